"""A model of which there is nothing but a configuration, and weights to tell it from others: for tests without a model runner."""

from __future__ import annotations

import json
import struct
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 16,
    "vocab_size": 2048,
    "eos_token_id": 1,
}


def make_model(folder: Path, weights: bytes = b"", **config: object) -> Path:
    """`config`: beside LLAMA. A folder that is there stays as it is."""
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + weights)
    return folder
