"""Starts a sidecar, a prefill server, a decode server and the proxy before them, asks one question, and shows where its KV came from.

The prefill server computes the KV of a prompt with a document of 3,100 tokens; the decode server, another vLLM server with memory of
its own, answers, and has computed none of the document. Everything is stopped at the end.

    python examples/disaggregated/run.py       (with a Python that has vLLM and HostKV: .venvs/vllm/bin/python after `make engine`)

MODEL names another model folder. What the processes print goes to a folder whose name is shown.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "document.md"
MODEL = os.environ.get("MODEL", str(HERE.parents[1] / ".cache" / "models" / "smollm2-135m"))
QUESTION = "What is the highest volcano on Mars?"
BLOCK_TOKENS = 32
START_S = 600
# What lets two vLLM servers run on a small machine without a GPU, and without a network.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def running(name: str, log: Path, command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"stopped  {name}", flush=True)


def healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True


def wait(name: str, log: Path, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not ready():
        if process.poll() is not None or time.monotonic() > started + START_S:
            sys.exit(f"the {name} did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.2)


def vllm(port: int, role: str, endpoint: str) -> list[str]:
    connector = {
        "kv_connector": "HostKVConnector",
        "kv_connector_module_path": "hostkv.connector.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", str(BLOCK_TOKENS)]
    command += ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(512 << 20), "--enforce-eager", "--enable-prompt-tokens-details"]
    return [*command, "--kv-transfer-config", json.dumps(connector)]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


def ask(url: str) -> dict[str, Any]:
    """Prints the answer as it comes; its usage."""
    message = f"{DOCUMENT.read_text()}\n\nQuestion about this document: {QUESTION}"
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": message}],
        "temperature": 0,
        "max_tokens": 40,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    print(f"question {QUESTION}\nanswer   ", end="", flush=True)
    usage: dict[str, Any] = {}
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
    print()
    return usage


def prompt_tokens(url: str) -> dict[str, int]:
    """Where a server's prompt tokens came from until now, by source."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total{")]
    return {line.split('source="')[1].split('"')[0]: int(float(line.split()[-1])) for line in found}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything ends with us
    logs = Path(tempfile.mkdtemp(prefix="hostkv-disaggregated-"))
    print(f"logs     {logs}")
    with ExitStack() as stack:
        endpoint = f"ipc://{stack.enter_context(tempfile.TemporaryDirectory(prefix='hostkv-'))}/control.sock"
        serve = [sys.executable, "-m", "hostkv.sidecar.cli", "serve", "--endpoint", endpoint]
        serve += ["--pool-name", f"hostkv-{secrets.token_hex(4)}", "--pool-size", "1GiB"]
        log = logs / "sidecar.log"
        wait("sidecar", log, stack.enter_context(running("sidecar", log, serve, {})), lambda: "hostkv ready" in log.read_text())
        print(f"runs     sidecar at {endpoint}")
        ports = free_ports(3)
        prefill, decode, proxy = (f"http://127.0.0.1:{port}" for port in ports)
        commands = {
            "prefill server": (prefill, vllm(ports[0], "kv_producer", endpoint)),
            "decode server": (decode, vllm(ports[1], "kv_consumer", endpoint)),
            "proxy": (proxy, [sys.executable, str(HERE / "proxy.py"), "--port", str(ports[2]), "--prefill", prefill, "--decode", decode]),
        }
        print("waits    for both servers, a minute or two", flush=True)
        logged = {name: logs / f"{name.split()[0]}.log" for name in commands}
        processes = {name: stack.enter_context(running(name, logged[name], commands[name][1], ENVIRONMENT)) for name in commands}
        for name, (url, _) in commands.items():
            wait(name, logged[name], processes[name], partial(healthy, url))
            print(f"runs     {name} at {url}", flush=True)
        usage = ask(proxy)
        print()
        at_prefill, at_decode = prompt_tokens(prefill), prompt_tokens(decode)
    whole = (usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS  # an engine computes at least a prompt's last token
    rows = {
        "prompt tokens": usage["prompt_tokens"],
        "computed by the prefill server": at_prefill["local_compute"],
        "taken by the decode server from HostKV": at_decode["external_kv_transfer"],
        "computed by the decode server": at_decode["local_compute"],
    }
    print()
    for name, value in rows.items():
        print(f"{name:<40}{value:>8}")
    if [*rows.values()] != [usage["prompt_tokens"], usage["prompt_tokens"], whole, usage["prompt_tokens"] - whole]:
        print(f"the decode server should have taken {whole} tokens: all whole blocks that the prefill server computed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
