"""Engines in which a drafter guesses tokens, several of which are verified in a step."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, Engine, Engines, Sidecar, expect, tokens

pytestmark = pytest.mark.engine

BLOCK = 32
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
ITSELF = {"method": "draft_model", "model": str(MODELS / "tiny-a"), "num_speculative_tokens": 3}  # whose every guess is right


def write_eagle(folder: Path) -> dict[str, Any]:
    """A drafter of one layer, tiny-a's last, above the model's hidden state and a little of the next token's embedding."""
    of_model = (MODELS / "tiny-a" / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", of_model)
    header, data = {}, b""

    def add(name: str, shape: list[int], values: bytes) -> None:
        nonlocal data
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values

    for name, tensor in json.loads(of_model[8 : 8 + size]).items():
        if name.startswith("model.layers.3.") and "input_layernorm" not in name:
            first, end = tensor["data_offsets"]
            add(name.replace("model.layers.3.", "layers.0."), tensor["shape"], of_model[8 + size + first : 8 + size + end])
    add("fc.weight", [256, 512], np.concatenate([0.1 * np.eye(256), np.eye(256)], 1).astype(np.float32).tobytes())
    described = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(described)) + described + data)
    config = json.loads((MODELS / "tiny-a" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 3}


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle"])
def test_what_a_drafter_left_and_what_it_guessed_wrong(
    engines: Engines, sidecar: Sidecar, plain: Engine, tmp_path: Path, drafter: str
) -> None:
    """The prompt goes on with all of an answer, so that blocks of tokens that were guessed are had, too."""
    speculative = {"ngram": NGRAM, "draft_model": ITSELF}.get(drafter) or write_eagle(tmp_path)
    prompt = [*tokens(90, seed=1), *tokens(40, seed=2) * 5]
    answer = expect(plain, prompt, 100)
    longer = prompt + answer
    goes_on = expect(plain, longer, 20)
    dropped = BLOCK * (drafter == "eagle")  # the last block that is found, as vLLM does
    told = []
    for had in (0, len(prompt) // BLOCK * BLOCK - dropped):
        engine = engines.start(sidecar, speculative=speculative, extra={"save_decode": True})
        before = engine.do(metrics=True)["metrics"]
        first = engine.ask(tokens=prompt, max_tokens=100)
        assert (first["cached"], first["tokens"]) == (had, answer)
        engine.do(forget=True)
        second = engine.ask(tokens=longer, max_tokens=20)
        assert (second["cached"], second["tokens"]) == (len(longer) // BLOCK * BLOCK - dropped, goes_on)
        after = engine.do(metrics=True)["metrics"]
        told.append({name: after[name] - before.get(name, 0) for name in after if "spec_decode" in name})
        engines.close(engine)
    assert told[0] == told[1], "what came from the sidecar serves a drafter like what it computed itself"
    guessed, right = (told[0][f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
    assert guessed == right if drafter == "draft_model" else guessed > right > 0
