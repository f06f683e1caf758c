"""What a request may ask for and is told, and what vLLM's own metrics and events say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Engine, Engines, Sidecar, expect, tokens

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
    sidecar.stop()
    sidecar.start()
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
