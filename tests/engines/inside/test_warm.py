"""What one engine saved another gets byte for byte, or the same one later: in a step and beside the steps, on one rank and two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hostkv.connector.store import Keys, Store
from hostkv.connector.vllm import scheduler
from rig import BLOCK, Engine, Trouble, WrongBytes, prompt

from tests.support import LIFE_S, Sidecar

Start = Callable[..., Engine]
IN_STEP, BESIDE = {}, {"load_in_step_bytes": 0}


def whole(tokens: int) -> int:
    """How many of so many tokens of a prompt can be had: whole blocks, and never the last token."""
    return (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how",
    [IN_STEP, BESIDE, {"ahead": True}, {"drafts": 3}, {"drafts": 3, "ahead": True}],
    ids=["in_step", "beside", "steps planned ahead", "drafts", "drafts, ahead"],
)
def test_a_prompt_is_computed_once(sidecar: Sidecar, start: Start, ranks: int, how: dict[str, int]) -> None:
    prompts = [prompt(tokens, tokens) for tokens in (15, 16, 17, 33, 1600)]
    first, second = start(sidecar, ranks=ranks, **how), start(sidecar, ranks=ranks, **how)
    for one in prompts:
        answer = first.ask(one, 20)
        assert (answer.finish, answer.cached) == ("length", 0)
    assert sidecar.status()["blocks"]["ready"] == sum(len(one) // BLOCK for one in prompts)
    for one in prompts:
        had = whole(len(one))
        answers = [second.ask(one, 20), second.ask(one, 20)]
        second.forget()
        answers.append(second.ask(one, 20))
        assert [answer.finish for answer in answers] == ["length"] * 3
        assert [(answer.cached, answer.external) for answer in answers] == [(had, had), (had, 0), (had, had)]
    for engine in (first, second):
        engine.check_idle()
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


def test_a_step_that_waits_for_a_load_lets_the_threads_that_load_run(
    sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    started, go = threading.Event(), threading.Event()
    trouble = Trouble()
    trouble.delay_s = lambda: started.set() or float(not go.wait(LIFE_S))
    start(sidecar).ask(prompt(100))
    engine = start(sidecar, **BESIDE)
    monkeypatch.setattr(scheduler, "nap", naps.append)
    engine.ask(prompt(100, "another"), 5)
    assert not naps, "every step had something to compute"
    with trouble.on():
        engine.add(prompt(100))
        engine.step_until(started.is_set)
        before = len(naps)
        for _ in range(5):
            engine.step()
        assert len(naps) == before + 5
        engine.add(prompt(100, "a third"), 5)
        engine.step()
        assert len(naps) == before + 5, "nobody sleeps beside work"
        go.set()
        engine.run()
    engine.check_idle()


def test_the_keys_of_many_new_requests_are_derived_over_several_steps(
    sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(10 * BLOCK + 1, i) for i in range(12)]
    saver = start(sidecar)
    for one in prompts:
        saver.ask(one)
    engine, derived, whole = start(sidecar), [0], Store.keys

    def keys(store: Store, ids: Any) -> Keys:
        derived[-1] += len(ids)
        return whole(store, ids)

    monkeypatch.setattr(Store, "keys", keys)
    monkeypatch.setattr(scheduler, "KEYS_IN_STEP", 25)
    names = [engine.add(one, 3) for one in prompts]
    while engine.has_work():
        derived.append(0)
        engine.step()
    assert [each for each in derived if each] == [30] * 4, "and none of them twice"
    assert [engine.answers[name].external for name in names] == [10 * BLOCK] * 12
    engine.check_idle()


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_loads_than_a_worker_takes_come_one_after_the_other(
    sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    naps: list[float] = []
    shared, go, trouble = prompt(BLOCK), threading.Event(), Trouble()
    trouble.delay_s = lambda: float(not go.wait(LIFE_S))
    start(sidecar, ranks=ranks).ask(shared)
    engine = start(sidecar, ranks=ranks, blocks=1000, max_model_len=100, **BESIDE)
    monkeypatch.setattr(scheduler, "nap", naps.append)
    names = [engine.add(shared + prompt(1, i)) for i in range(300)]
    flying = engine.ours[0]._flying
    with trouble.on():
        engine.step_until(lambda: len(flying) >= scheduler.MAX_FLYING)
        before = len(naps)
        for _ in range(10):
            engine.step()
        assert len(flying) == scheduler.MAX_FLYING
        assert len(naps) == before + 10
        go.set()
        engine.run()
    assert {engine.answers[name].cached for name in names} == {BLOCK}
    assert [role.stats.blocks_failed for role in engine.executor.connectors] == [0] * ranks
    engine.check_idle()
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


@pytest.mark.parametrize("how", [IN_STEP, BESIDE], ids=["in_step", "beside"])
def test_requests_that_share_a_prefix_share_its_blocks(sidecar: Sidecar, start: Start, how: dict[str, int]) -> None:
    shared = prompt(10 * BLOCK, "shared")
    prompts = [shared[: i * BLOCK] + prompt(40, "own", i) for i in range(11)]
    for cached in (False, True):
        engine = start(sidecar, **how)
        names = [engine.add(one, 5) for one in prompts]
        engine.run()
        answers = [engine.answers[name] for name in names]
        assert [answer.finish for answer in answers] == ["length"] * 11
        assert not cached or [answer.cached for answer in answers] == [whole(len(one)) for one in prompts]
        assert bool(sum(answer.external for answer in answers)) == cached
        engine.check_idle()
    assert sidecar.status()["blocks"]["ready"] == 10 + sum((i * BLOCK + 40) // BLOCK - i for i in range(11))
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


def test_a_prefix_that_the_engine_loses_while_it_asks_for_the_rest_comes_whole(
    sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompt(20 * BLOCK + 3, "lost")
    start(sidecar).ask(text)
    engine = start(sidecar)
    engine.ask(text[: 8 * BLOCK + 1])
    plan, waiting = scheduler.Scheduler.plan, []

    def plan_and_forget(self: scheduler.Scheduler, output: Any) -> Any:
        made = plan(self, output)
        if self._waiting and not waiting:
            waiting.extend(self._waiting)
            assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        return made

    monkeypatch.setattr(scheduler.Scheduler, "plan", plan_and_forget)
    answer = engine.ask(text)
    assert (len(waiting), answer.external) == (1, 20 * BLOCK)
    engine.check_idle()
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


@pytest.mark.parametrize("how", [IN_STEP, BESIDE], ids=["in_step", "beside"])
def test_a_byte_that_is_wrong_and_not_reported_is_noticed(sidecar: Sidecar, start: Start, how: dict[str, int]) -> None:
    start(sidecar).ask(prompt(100))
    engine = start(sidecar, **how)
    trouble = Trouble()
    trouble.fails = lambda blocks: [3]
    trouble.told = False
    engine.add(prompt(100))
    with trouble.on(), pytest.raises(WrongBytes, match="token 48"):
        engine.run()


def test_what_a_request_of_low_priority_saves_is_wanted_by_no_tier_until_another_one_gets_it(sidecar: Sidecar, start: Start) -> None:
    def dirty() -> int:
        return int(sidecar.status()["blocks"]["dirty"])

    low = {"priority": "low"}
    start(sidecar).ask(prompt(100), params={"priority": "normal"})
    assert dirty() == 100 // BLOCK
    start(sidecar, ranks=1).ask(prompt(100, "batch"), params=low)
    assert (dirty(), sidecar.status()["blocks"]["ready"]) == (100 // BLOCK, 2 * (100 // BLOCK))
    assert start(sidecar).ask(prompt(100, "batch"), params=low).external == whole(100)
    assert dirty() == 2 * (100 // BLOCK)
