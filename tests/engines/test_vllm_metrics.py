"""What a request may ask for and is told, and what vLLM's own metrics and events say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Engine, Engines, Sidecar, expect, only_disk, tokens

pytestmark = pytest.mark.engine

BLOCK = 32
PROMPT = tokens(400)
WHOLE = 12 * BLOCK  # what of it is saved and reused


def told(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens loaded, those of them that came from disk, and tokens saved."""
    ours = answer["params"]["hostkv"]
    return ours["loaded_tokens"], ours["loaded_from_disk_tokens"], ours["saved_tokens"]


def test_a_request_is_told_what_was_loaded_and_saved_for_it(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar)
    assert told(engine.ask(tokens=PROMPT)) == (0, 0, WHOLE)
    assert told(engine.ask(tokens=PROMPT)) == (0, 0, 0), "the engine had it itself"
    engine.do(forget=True)
    assert told(engine.ask(tokens=PROMPT)) == (WHOLE, 0, 0)
    engine.do(forget=True)
    assert told(engine.ask(tokens=PROMPT + tokens(100, seed=1))) == (WHOLE, 0, 3 * BLOCK)


def test_a_request_is_told_what_came_from_disk(engines: Engines, sidecar_with_disk: Sidecar) -> None:
    sidecar = sidecar_with_disk
    engine = engines.start(sidecar)
    engine.ask(tokens=PROMPT)
    engines.close(engine)
    only_disk(sidecar)
    engine = engines.start(sidecar)
    assert told(engine.ask(tokens=PROMPT[: 5 * BLOCK + 1])) == (5 * BLOCK, 5 * BLOCK, 0)
    engine.do(forget=True)
    assert told(engine.ask(tokens=PROMPT)) == (WHOLE, WHOLE - 5 * BLOCK, 0), "the first five are in the pool now"
    engine.do(forget=True)
    assert told(engine.ask(tokens=PROMPT)) == (WHOLE, 0, 0)


def test_a_request_is_not_told_of_saves_that_were_dropped_or_loads_that_failed(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar)
    engine.ask(tokens=PROMPT)
    losing = engines.start(sidecar, connector="LosesABlock", module="variants", policy="recompute")
    assert told(losing.ask(tokens=PROMPT)) == (3 * BLOCK, 0, 0), "block 3 did not come, and what follows it was computed"
    sidecar.kill()
    assert told(engine.ask(tokens=tokens(400, seed=1))) == (0, 0, 0)


def test_no_save_leaves_nothing_behind(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    engine = engines.start(sidecar)
    answer = engine.ask(tokens=PROMPT, params={"no_save": True})
    assert (told(answer), answer["tokens"]) == ((0, 0, 0), expect(plain, PROMPT))
    assert sidecar.status()["blocks"]["total"] == 0
    engine.do(forget=True)
    assert told(engine.ask(tokens=PROMPT, params={"no_save": False})) == (0, 0, WHOLE)


def test_no_load_computes_what_is_there(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    engine = engines.start(sidecar)
    engine.ask(tokens=PROMPT)
    engine.do(forget=True)
    answer = engine.ask(tokens=PROMPT, params={"no_load": True})
    assert (answer["cached"], told(answer), answer["tokens"]) == (0, (0, 0, 0), expect(plain, PROMPT))
    longer = engine.ask(tokens=PROMPT + tokens(100, seed=1), params={"no_load": True})
    assert told(longer) == (0, 0, 3 * BLOCK), "it saves all the same"
    engine.do(forget=True)
    assert engine.ask(tokens=PROMPT, params={"no_load": False})["cached"] == WHOLE


def test_params_that_cannot_be_understood_are_told_once_and_change_nothing(engines: Engines, sidecar: Sidecar, engine_log: Path) -> None:
    engine = engines.start(sidecar)
    theirs = {"do_remote_prefill": False, "remote_host": None, "transfer_id": "7", "hostkv": {"saved_tokens": 1}}
    before = len(engine_log.read_text())
    for _ in range(2):
        engine.do(forget=True)
        answer = engine.ask(tokens=PROMPT, params={"no_saves": True, "no_load": "yes", **theirs})
    assert told(answer) == (WHOLE, 0, 0)
    said = [line for line in engine_log.read_text()[before:].splitlines() if "kv_transfer_params of a request" in line]
    assert len(said) == 2, said
    assert "'no_saves' is unknown, the nearest known key is 'no_save'" in said[0]
    assert "'no_load' is 'yes', must be true or false" in said[1]


def metrics(engine: Engine) -> dict[str, float]:
    """HostKV's counters as Prometheus would read them, without their prefix."""
    values: dict[str, float] = engine.do(metrics=True)["metrics"]
    return {name[len("vllm:hostkv_") : -len("_total")]: value for name, value in values.items() if name.startswith("vllm:hostkv_")}


def hits(engine: Engine) -> dict[str, float]:
    """By source, the prompt tokens that vLLM counts as cached."""
    name = "vllm:prompt_tokens_cached_by_source_total "
    values: dict[str, float] = engine.do(metrics=True)["metrics"]
    return {key.removeprefix(name): value for key, value in values.items() if key.startswith(name) and value}


def test_metrics_are_what_happened(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar)
    assert set(metrics(engine).values()) == {0}
    engine.ask(tokens=PROMPT)
    engine.do(forget=True)
    engine.ask(tokens=PROMPT[:200])
    values = metrics(engine)
    block_bytes = 131072  # of tiny-a
    expected = {"blocks_promised": 6, "blocks_saved": 12, "blocks_loaded": 6, "blocks_failed": 0, "blocks_dropped": 0}
    assert {name: values[name] for name in expected} == expected
    assert values["saved_bytes"] == 12 * block_bytes
    assert values["loaded_bytes"] == 6 * block_bytes
    assert min(values["save_seconds"], values["load_seconds"], values["hook_cpu_seconds"]) > 0


def test_metrics_of_losses(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar)
    engine.ask(tokens=PROMPT)
    losing = engines.start(sidecar, connector="LosesABlock", module="variants", policy="recompute")
    losing.ask(tokens=PROMPT)
    values = metrics(losing)
    assert (values["blocks_promised"], values["blocks_loaded"], values["blocks_failed"]) == (12, 11, 1)
    sidecar.kill()
    engine.ask(tokens=tokens(400, seed=1))
    values = metrics(engine)
    assert (values["blocks_saved"], values["blocks_dropped"]) == (12, 12)


def test_metrics_and_counters_of_the_roles_are_the_same(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar)
    for seed in (7, 1, 7):
        engine.do(forget=True)
        stats = engine.ask(tokens=tokens(400, seed=seed), max_tokens=2)["stats"]
    values = metrics(engine)
    for metric, counter in (("load_seconds", "load_s"), ("save_seconds", "save_s"), ("saved_bytes", "bytes_saved")):
        assert values[metric] == pytest.approx(stats["scheduler"][counter] + stats["worker"][counter])


def test_hits_are_counted_by_the_tier_that_had_them(engines: Engines, sidecar_with_disk: Sidecar) -> None:
    sidecar = sidecar_with_disk
    engine = engines.start(sidecar)
    engine.ask(tokens=PROMPT)
    assert hits(engine) == {}
    engines.close(engine)
    only_disk(sidecar)
    engine = engines.start(sidecar)
    engine.ask(tokens=PROMPT[: 5 * BLOCK + 1])
    assert hits(engine) == {"disk": 5 * BLOCK}
    engine.do(forget=True)
    engine.ask(tokens=PROMPT)
    assert hits(engine) == {"disk": WHOLE, "host": 5 * BLOCK}
    engine.ask(tokens=PROMPT)
    assert hits(engine) == {"disk": WHOLE, "host": 5 * BLOCK, "device": WHOLE}


def test_events_tell_of_blocks_saved_as_the_engine_tells_of_its_own(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar, events=True)
    engine.ask(tokens=PROMPT, salt="tenant")
    engine.do(forget=True)
    engine.ask(tokens=PROMPT + tokens(100, seed=1), salt="tenant")
    stored = [event for event in engine.do(events=True)["events"] if event["type"] == "BlockStored"]
    ours, own = ([event for event in stored if event["medium"] == medium] for medium in ("CPU", "GPU"))
    assert [len(event["block_hashes"]) for event in ours] == [12, 3]
    assert ours[0]["token_ids"] == PROMPT[:WHOLE]
    assert ours[1]["parent_block_hash"] == ours[0]["block_hashes"][-1]
    assert ours[0]["parent_block_hash"] is None
    same = [event for event in own if event["block_hashes"] == ours[0]["block_hashes"]]
    assert {**same[0], "medium": "CPU"} == ours[0]


def test_events_tell_of_no_block_that_was_dropped_and_of_nothing_where_they_are_off(engines: Engines, sidecar: Sidecar) -> None:
    engine, silent = engines.start(sidecar, events=True), engines.start(sidecar)
    silent.ask(tokens=PROMPT)
    assert silent.do(events=True)["events"] == []
    sidecar.kill()
    engine.ask(tokens=tokens(400, seed=1))
    assert {event["medium"] for event in engine.do(events=True)["events"] if event["type"] == "BlockStored"} == {"GPU"}


def test_a_step_in_which_nothing_happens_has_no_news(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar)
    engine.do(add=[{"id": "one", "tokens": PROMPT, "max_tokens": 40}])
    engine.do(step=3)
    before = metrics(engine)
    stats = engine.do(step=20)["stats"]
    assert metrics(engine) == before
    assert stats["worker"]["hook_cpu_s"] + stats["scheduler"]["hook_cpu_s"] > before["hook_cpu_seconds"]
