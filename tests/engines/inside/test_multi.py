"""Beside another connector under vLLM's MultiConnector, which loads from the first child that has something and has all of them save; and
the hooks of a step, in whose order that other connector sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import others
import pytest
from model import POISON
from rig import BLOCK, Engine, prompt
from test_parts import MODELS, ROOM

from tests.support import Sidecar

Start = Callable[..., Engine]
PROMPT = prompt(10 * BLOCK + 5, "multi")
OTHER = {"kv_connector": "OtherConnector", "kv_connector_module_path": "others", "kv_role": "kv_both"}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    for left in (others.KEPT, others.FAILS, others.CALLS):
        left.clear()


def both(start: Start, sidecar: Sidecar, ours_first: bool, **more: Any) -> Engine:
    ours = {
        "kv_connector": "HostKVConnector",
        "kv_connector_module_path": "hostkv.connector.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": sidecar.endpoint},
    }
    connectors = [ours, OTHER] if ours_first else [OTHER, ours]
    return start(None, connector=("MultiConnector", None), extra={"connectors": connectors}, **more)


def loaded(engine: Engine) -> int:
    """Blocks that ours loaded so far."""
    return sum(role._stats.blocks_loaded for role in engine.ours)


@pytest.mark.parametrize("beside", [False, True], ids=["in_step", "beside"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_the_first_that_has_it_loads_and_both_save(sidecar: Sidecar, start: Start, ours_first: bool, beside: bool) -> None:
    engine = both(start, sidecar, ours_first, load_in_step_bytes=0 if beside else 4 << 20)
    answer = engine.ask(PROMPT, 3)
    assert (answer.finish, answer.external) == ("length", 0)
    assert answer.params is not None
    assert answer.params.keys() == {"hostkv", "other"}
    assert sidecar.status()["blocks"]["ready"] == len(others.KEPT) == 10
    engine.forget()
    assert engine.ask(PROMPT).external == 10 * BLOCK
    assert loaded(engine) == (10 if ours_first else 0)
    engine.forget()
    if ours_first:
        engine.ours[0]._stores[0].clear()
    else:
        others.KEPT.clear()
    assert engine.ask(PROMPT, 2).external == 10 * BLOCK
    assert loaded(engine) == 10
    assert sidecar.status()["blocks"]["ready"] == len(others.KEPT) == 10, (
        "what was missing is saved again, in the second step where the other's load may have failed"
    )
    engine.check_idle()
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "steps planned ahead"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_what_followed_a_load_of_the_others_that_failed_is_not_saved(sidecar: Sidecar, start: Start, ours_first: bool, ahead: bool) -> None:
    engine = both(start, sidecar, ours_first, ahead=ahead)
    engine.ask(PROMPT)
    engine.forget()
    engine.ours[0]._stores[0].clear()
    others.FAILS.add(list(others.KEPT)[3])
    longer = PROMPT + prompt(100, "more")
    if ahead:
        engine.executor.tolerated.add("request-1")  # the next step was planned before vLLM knew
    assert engine.ask(longer, 3).finish == "length"
    engine.check_idle()
    start(sidecar).ask(longer)


def test_what_follows_a_block_of_a_window_that_the_others_lost_is_not_saved(sidecar: Sidecar, start: Start) -> None:
    """vLLM goes on at that block, without what lies before the window."""
    kind = {**ROOM, **MODELS["only windows"]}
    engine = both(start, sidecar, ours_first=False, **kind)
    engine.ask(PROMPT)
    engine.forget()
    engine.ours[0]._stores[0].clear()
    others.FAILS.add(list(others.KEPT)[8])
    longer = PROMPT + prompt(100, "more")
    engine.executor.tolerated.add("request-1")
    assert POISON in engine.ask(longer, 3).tokens, "it did go on with what was there"
    engine.check_idle()
    assert start(sidecar, **kind).ask(longer).finish == "length"


def test_a_load_of_the_others_fails_in_an_engine_that_runs_uncached(sidecar: Sidecar, start: Start) -> None:
    engine = both(start, sidecar, ours_first=True, load_format="dummy")
    engine.ask(PROMPT)
    engine.forget()
    others.FAILS.add(list(others.KEPT)[3])
    assert engine.ask(PROMPT, 3).finish == "length"
    assert sidecar.status()["blocks"]["total"] == 0


def test_the_hooks_of_a_step_come_in_order(sidecar: Sidecar, start: Start) -> None:
    engine = both(start, sidecar, ours_first=True)
    others.CALLS.clear()
    engine.ask(PROMPT, 1)
    layers = ["wait_for_layer_load", "save_kv_layer"] * 2
    after = ["wait_for_save", "get_finished", "get_block_ids_with_load_errors", "get_kv_connector_stats", "build_connector_worker_meta"]
    step = ["handle_preemptions", "bind_connector_metadata", *layers, "start_load_kv", *after, "clear_connector_metadata"]
    waits = ["build_connector_meta", "handle_preemptions", "bind_connector_metadata", "start_load_kv", *after, "clear_connector_metadata"]
    asked = ["get_num_new_matched_tokens", "update_state_after_alloc 0"]
    told = ["request_finished", "update_connector_output", "get_kv_connector_stats"]
    calls = others.CALLS
    assert calls[: len(asked) + 1 + len(step) + len(told)] == [*asked, "build_connector_meta", *step, *told]
    assert set(calls[len(asked) + 1 + len(step) + len(told) :]) <= {*waits, *told}


def test_a_step_leaves_no_metadata_behind(sidecar: Sidecar, start: Start) -> None:
    start(sidecar).ask(PROMPT)
    engine = start(sidecar, load_in_step_bytes=0)
    (worker,) = engine.executor.connectors
    seen = []
    engine.executor.during_step = lambda output: seen.append((output.total_num_scheduled_tokens > 0, worker.has_connector_metadata()))
    engine.add(PROMPT, 3)
    while engine.has_work():
        engine.step()
        assert not worker.has_connector_metadata()
    assert set(seen) == {(True, True), (False, True)}, "steps with tokens and without"
