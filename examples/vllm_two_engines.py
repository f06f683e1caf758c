"""Two vLLM processes, one after the other: the second one answers from the KV that the first one computed.

The first engine reads document.md, answers a question about it and ends. The second engine gets another question about the same
document. Its prompt begins with the same 3,100 tokens, so HostKV gives it their KV instead of letting it compute them. A third engine,
which has never heard of HostKV, answers that question too: the answers have to be equal, token for token.

    python examples/vllm_two_engines.py       (with a Python that has vLLM and HostKV: .venvs/vllm/bin/python after `make engine`)

The sidecar is the one at HOSTKV_ENDPOINT; without that, one is started for as long as this takes. MODEL names another model folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE / "document.md"
MODEL = os.environ.get("MODEL", str(HERE.parent / ".cache" / "models" / "smollm2-135m"))
FIRST_QUESTION = "Why does the Earth have seasons?"
SECOND_QUESTION = "What is the highest volcano on Mars?"
BLOCK_TOKENS = 32
# What lets one vLLM engine run well on a small machine without a GPU, and without a network.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "0",
}


def engine(question: str, cached: bool) -> None:
    """Runs in a process of its own: one vLLM engine, one question; prints the answer as the last line, in JSON."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="HostKVConnector",
        kv_connector_module_path="hostkv.connector.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    llm = LLM(
        MODEL,
        dtype="float32",
        max_model_len=8192,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=connector if cached else None,
    )
    llm.generate(["Hello"], SamplingParams(max_tokens=1), use_tqdm=False)  # what an engine does only once is not part of the times
    message = f"{DOCUMENT.read_text()}\n\nQuestion about this document: {question}"
    prompt = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True)
    answer = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0]
    result = {
        "text": answer.outputs[0].text.strip(),
        "tokens": list(answer.outputs[0].token_ids),
        "prompt": list(answer.prompt_token_ids or ()),
        "reused_tokens": answer.num_cached_tokens or 0,
        "first_token_s": answer.metrics.first_token_latency,  # type: ignore[union-attr]
    }
    print(json.dumps(result))


def ask(title: str, question: str, cached: bool) -> dict[str, Any]:
    """The answer of a new engine process."""
    print(f"{title}\n   question: {question}", flush=True)
    started = time.monotonic()
    environment = {**os.environ, **ENVIRONMENT}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    command = [sys.executable, __file__, "--engine", question, str(int(cached))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        back, stay = ("\r", "") if sys.stdout.isatty() else ("", "\n")
        while True:
            try:
                output, messages = process.communicate(timeout=5)
                break
            except subprocess.TimeoutExpired:
                print(f"{back}   vLLM runs for {time.monotonic() - started:.0f} s (most of it is its start){stay}", end="", flush=True)
    if process.returncode:
        sys.exit(f"\nthe engine failed:\n{messages[-4000:]}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(f"{back}   answer:   {answer['text']}{' ' * 20 if back else ''}")
    reused = f"{answer['reused_tokens']} of {len(answer['prompt'])} prompt tokens reused"
    print(f"   {answer['first_token_s']:.2f} s to the first token, {reused}\n")
    return answer


def main() -> int:
    if sys.argv[1:2] == ["--engine"]:
        engine(sys.argv[2], sys.argv[3] == "1")
        return 0
    if "HOSTKV_ENDPOINT" not in os.environ:
        helper = [str(HERE / "with_sidecar.py"), "--pool-size", "1GiB", "--"]
        return subprocess.call([sys.executable, *helper, sys.executable, __file__])
    first = ask("1. an engine that nobody helps: it computes the document's KV, saves it, and ends", FIRST_QUESTION, cached=True)
    warm = ask("2. another engine process, another question about the same document", SECOND_QUESTION, cached=True)
    cold = ask("3. for comparison, the same question without HostKV", SECOND_QUESTION, cached=False)
    equal = warm["tokens"] == cold["tokens"]
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first["prompt"], warm["prompt"], strict=False)))
    whole = shared // BLOCK_TOKENS * BLOCK_TOKENS
    rows = {
        "cold: time to first token, computed": f"{cold['first_token_s']:.2f} s",
        "warm: time to first token, from HostKV": f"{warm['first_token_s']:.2f} s",
        "speed-up": f"{cold['first_token_s'] / warm['first_token_s']:.1f} x",
        "prompt tokens reused": f"{warm['reused_tokens']} of {len(warm['prompt'])}",
        "outputs equal": "yes" if equal else "NO",
    }
    for name, value in rows.items():
        print(f"{name:<40} {value:>14}")
    if not equal or warm["reused_tokens"] != whole:
        print(f"the second engine should have reused {whole} tokens of the first one's KV, and answered the same", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
