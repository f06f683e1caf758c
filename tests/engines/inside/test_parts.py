"""Models whose KV is of several kinds: sliding windows and recurrent states beside full attention, and latent attention, which is the same
on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hostkv.connector.errors import QueueFull
from hostkv.connector.vllm.plan import Part
from hostkv.connector.vllm.prefix import longest
from hostkv.schemas.namespace import Layout
from rig import BLOCK, Engine, Trouble, full_attention, prompt
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from tests.support import Sidecar

Start = Callable[..., Engine]
WINDOW = 40  # tokens: two blocks and a half


def windows(layers: int, window: int = WINDOW, heads: int = 2) -> dict[str, KVCacheSpec]:
    """All blocks are of the same size, so that of fewer heads has more tokens."""
    spec = SlidingWindowSpec(block_size=BLOCK * 2 // heads, num_kv_heads=heads, head_size=16, dtype=torch.float32, sliding_window=window)
    return {f"model.layers.{10 + window + i}.attn": spec for i in range(layers)}


def latent(layers: int) -> dict[str, KVCacheSpec]:
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32, max_tp_shards=1)
    return {f"model.layers.{i}.attn": spec for i in range(layers)}


def states(layers: int) -> dict[str, KVCacheSpec]:
    spec = MambaSpec(block_size=BLOCK, shapes=((4, 128), (16, 32)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align")
    return {f"model.layers.{1000 + i}.mixer": spec for i in range(layers)}


MODELS = {
    "windows": {"specs": {**full_attention(2), **windows(4)}},
    "two windows": {"specs": {**full_attention(2), **windows(2), **windows(2, 70)}},
    "unequal blocks": {"specs": {**full_attention(2), **windows(4, heads=1)}},
    "only windows": {"specs": windows(2)},
    "states": {"specs": {**full_attention(2), **states(4)}, "mamba_cache_mode": "align"},
}


ROOM = {"blocks": 600, "max_model_len": 2048}


def whole(tokens: int, model: str = "") -> int:
    step = 2 * BLOCK if model == "unequal blocks" else BLOCK
    return (tokens - 1) // step * step


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_is_computed_once(sidecar: Sidecar, start: Start, model: str, ranks: int) -> None:
    prompts = [prompt(tokens, tokens) for tokens in (15, 17, 34, 101, 1607)]
    first, second = (start(sidecar, ranks=ranks, **ROOM, **MODELS[model]) for _ in range(2))
    for one in prompts:
        answer = first.ask(one, 20)
        assert (answer.finish, answer.cached) == ("length", 0)
    for one in prompts:
        had = whole(len(one), model)
        answers = [second.ask(one, 20), second.ask(one + prompt(50, "more"), 20)]
        second.forget()
        answers.append(second.ask(one[:-1] + prompt(50, "other"), 20))
        assert [answer.finish for answer in answers] == ["length"] * 3
        assert [(answer.cached, answer.external) for answer in answers] == [(had, had), (had, 0), (had, had)]
    for engine in (first, second):
        engine.check_idle()
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


def test_part_of_a_prefix_is_found_where_the_window_before_its_end_is_there(sidecar: Sidecar, start: Start) -> None:
    """vLLM itself keeps windows at the ends of prompts alone."""
    one = prompt(640, "one")
    start(sidecar, **ROOM, **MODELS["two windows"]).ask(one)
    engine = start(sidecar, **ROOM, **MODELS["two windows"])
    for tokens in (10, 30, 50, 333):
        answer = engine.ask(one[:tokens] + prompt(100, "other"))
        assert answer.cached == tokens // BLOCK * BLOCK
    engine.forget()
    assert engine.ask(one[:333] + prompt(100, "others")).external == 320


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["windows", "states"])
def test_a_request_that_lost_a_block_fails_or_is_computed_anew(sidecar: Sidecar, start: Start, model: str, ranks: int, policy: str) -> None:
    one, long = prompt(100), prompt(100) + prompt(100, "more")
    start(sidecar, ranks=ranks, **ROOM, **MODELS[model]).ask(one)
    engine = start(sidecar, ranks=ranks, policy=policy, **ROOM, **MODELS[model])
    trouble = Trouble()
    trouble.fails = lambda blocks: [blocks - 1]
    with trouble.on():
        answer = engine.ask(long, 20)
    assert (answer.finish, answer.external) == ("length", 0) if policy == "recompute" else (answer.finish == "error")
    engine.check_idle()
    sidecar.until(lambda: sidecar.status()["pins"] == 0)
    answer = engine.ask(long + prompt(20, "end"), 20)
    assert (answer.finish, answer.cached) == ("length", whole(200) if policy == "recompute" else whole(100))
    assert engine.connector.stats.blocks_promised
    assert start(sidecar, ranks=ranks, **ROOM, **MODELS[model]).ask(long, 20).finish == "length"


def test_latent_attention_is_stored_once_for_all_ranks(sidecar: Sidecar, start: Start) -> None:
    one = prompt(100)
    model = {"specs": latent(2), "backends": dict.fromkeys(latent(2), "CPU_MLA")}
    start(sidecar, ranks=2, **ROOM, **model).ask(one, 20)
    (namespace,) = sidecar.status()["namespaces"]
    assert (namespace["blocks"], namespace["shards"], namespace["shard_bytes"]) == (100 // BLOCK, 1, 2 * 4096)
    for how in ({}, {"load_in_step_bytes": 0}):
        engine = start(sidecar, ranks=2, **ROOM, **model, **how)
        answer = engine.ask(one, 20)
        assert (answer.finish, answer.external) == ("length", whole(100))
        assert [role._worker._stats.blocks_saved for role in engine.executor.connectors] == [0, 0]
        engine.check_idle()


def layout(tokens: int) -> Layout:
    return Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=tokens, shard_bytes=4096)


def test_the_longest_prefix_is_what_a_model_of_it_says() -> None:
    """Against the definition: a prefix of so many tokens is there when each part has every block that it needs beyond what was computed."""
    draw = random.Random(1)
    for _ in range(3000):
        parts = []
        for kind in range(draw.randrange(1, 4)):
            reach = draw.choice([0, 1, 7, 16, 40, 100])
            parts.append(Part(layout(draw.choice([8, 16, 24])), kind, 0, 1, (kind,), reach, False))
        step = 48
        computed, limit = draw.randrange(3) * step, draw.randrange(8) * step
        there = {
            (part.kind, at): draw.random() < draw.choice([0.6, 0.95]) for part in parts for at in range(limit // part.layout.block_tokens)
        }
        found = []
        for part in parts:
            first = computed // part.layout.block_tokens + draw.choice([0, 0, 0, 1])
            found.append((first, [there[part.kind, at] for at in range(first, limit // part.layout.block_tokens)]))
        right = computed
        for tokens in range(computed, limit + 1):
            if all(
                tokens % part.layout.block_tokens == 0
                and all(
                    at >= found[i][0] and there[part.kind, at]
                    for at in range(part.first(computed, tokens), tokens // part.layout.block_tokens)
                )
                for i, part in enumerate(parts)
            ):
                right = tokens
        assert longest(parts, found, computed) == right, (parts, found, computed)


def test_a_load_that_cannot_begin_loses_each_block_once(sidecar: Sidecar, start: Start) -> None:
    start(sidecar, **ROOM, **MODELS["windows"]).ask(prompt(100))
    engine = start(sidecar, **ROOM, **MODELS["windows"])
    (connector,) = engine.executor.connectors

    def full(task: object) -> None:
        raise QueueFull("too many tasks")

    connector._client.submit = full
    assert engine.ask(prompt(100), 3).finish == "length"
    assert connector.stats.blocks_failed == engine.connector.stats.blocks_promised > 0
    engine.check_idle()
