"""Loads that fail. The engine is told of exactly those blocks and does what its policy says; what stood on them is kept nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from hostkv.connector.errors import SidecarRefused
from hostkv.connector.store import Store
from hostkv.connector.vllm import scheduler
from hostkv.schemas.errors import ErrorCode
from model import POISON
from rig import BLOCK, Engine, Trouble, prompt
from test_parts import MODELS, ROOM

from tests.support import LIFE_S, Sidecar

Start = Callable[..., Engine]
LONG = prompt(100 * BLOCK, "long")  # of which 99 blocks can be had
IN_STEP, BESIDE = 4 << 20, 0


@pytest.fixture
def trouble() -> Iterator[Trouble]:
    trouble = Trouble()
    with trouble.on():
        yield trouble


def once(*blocks: int) -> Callable[[int], tuple[int, ...]]:
    """These blocks of the next read fail, on the rank that is first."""
    left = iter([blocks])
    return lambda _: next(left, ())


def computed(engine: Engine) -> list[int]:
    """The tokens of each step from now on."""
    steps: list[int] = []
    engine.executor.before_step = lambda output: steps.append(output.total_num_scheduled_tokens)
    return steps


def no_pins(sidecar: Sidecar) -> None:
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", [IN_STEP, BESIDE], ids=["in_step", "beside"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_some_of_99_blocks_do_not_come(sidecar: Sidecar, start: Start, trouble: Trouble, ranks: int, how: int, policy: str) -> None:
    start(sidecar, ranks=ranks).ask(LONG)
    engine = start(sidecar, ranks=ranks, policy=policy, load_in_step_bytes=how)
    for bad in ((0, 98), (50, 98), (98,)):
        good, had = bad[0] * BLOCK, 99 * BLOCK
        trouble.fails = once(*bad)
        steps = computed(engine)
        answer = engine.ask(LONG, 3)
        if policy == "recompute":
            cached = good if how == BESIDE and not good else had  # without one good block it is admitted anew
            assert (answer.finish, answer.cached) == ("length", cached)
            assert answer.params is not None
            assert answer.params["hostkv"]["loaded_tokens"] == good
            in_vain = [len(LONG) - had] if how == IN_STEP else []
            assert [tokens for tokens in steps if tokens] == [*in_vain, len(LONG) - good, 1, 1]
        else:
            assert (answer.finish, answer.tokens) == ("error", [])
        again = engine.ask(LONG)
        assert (again.finish, again.cached) == ("length", had)
        if how == BESIDE and policy == "recompute":
            assert again.external == 0
        elif how == BESIDE:
            assert again.external == had
        else:
            assert again.external == had - good, "no bad block stays in the engine's own prefix cache, nor one after it"
        engine.forget()
    engine.check_idle()
    no_pins(sidecar)
    assert start(sidecar, ranks=ranks).ask(LONG).external == 99 * BLOCK, "what the sidecar has is as it was"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_that_did_not_come_whole_is_computed_from_the_start(
    sidecar: Sidecar, start: Start, trouble: Trouble, ranks: int, policy: str
) -> None:
    """What lies before it the engine does not have, so that nothing can be computed from the lost block on."""
    kind = {**ROOM, **MODELS["only windows"]}
    one = LONG[: 20 * BLOCK + 5]
    start(sidecar, ranks=ranks, **kind).ask(one)
    engine = start(sidecar, ranks=ranks, policy=policy, **kind)
    for bad in range(3):
        trouble.fails = once(bad)
        answer = engine.ask(one, 3 * BLOCK)
        assert (answer.finish, answer.cached) == ("length" if policy == "recompute" else "error", 0)
        engine.forget()
        assert engine.ask(one + answer.tokens, 3).finish == "length"
        engine.forget()
    engine.check_idle()
    no_pins(sidecar)
    other = start(sidecar, ranks=ranks, **kind)
    assert other.ask(one + prompt(50), 3).external == 20 * BLOCK


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_share_a_block_that_does_not_come(sidecar: Sidecar, start: Start, trouble: Trouble, ranks: int, policy: str) -> None:
    shared = LONG[: 10 * BLOCK]
    start(sidecar, ranks=ranks).ask(shared)
    engine = start(sidecar, ranks=ranks, policy=policy, load_in_step_bytes=IN_STEP)
    trouble.fails = once(3)
    prompts = [shared + prompt(50, i) for i in range(3)]
    names = [engine.add(one, 3) for one in prompts]
    engine.await_queries()
    engine.run()
    assert {engine.answers[name].finish for name in names} == {"length" if policy == "recompute" else "error"}
    for one in prompts:
        assert engine.ask(one, 3).finish == "length"
    engine.check_idle()
    no_pins(sidecar)
    other = start(sidecar, ranks=ranks)
    for one in prompts:
        other.ask(one)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_request_computed_on_anothers_bad_block_is_kept_nowhere(
    sidecar: Sidecar, start: Start, trouble: Trouble, ranks: int
) -> None:
    """Of two requests that share a bad block vLLM has the first compute it. When that one is aborted before it has, the second goes on
    with what is there."""
    shared = LONG[: 10 * BLOCK]
    start(sidecar, ranks=ranks).ask(shared)
    engine = start(sidecar, ranks=ranks, load_in_step_bytes=IN_STEP, extra={"save_decode": True})
    trouble.fails = once(3)
    one, other = shared + prompt(50, 1), shared + prompt(50, 2)
    first, second = engine.add(one, 3), engine.add(other, 3 * BLOCK)
    engine.await_queries()
    engine.step_until(lambda: any(told.invalid_block_ids for told in engine.executor.outputs))
    engine.abort(first)
    engine.executor.tolerated.add(second)
    engine.run()
    answer = engine.answers[second]
    assert POISON in answer.tokens, "it did go on with what was there"
    engine.check_idle()
    no_pins(sidecar)
    for asked in (engine, start(sidecar, ranks=ranks)):
        for tokens in (one, other, other + answer.tokens):
            assert asked.ask(tokens).finish == "length"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_request_whose_load_failed_is_promised_nothing_again(sidecar: Sidecar, start: Start, trouble: Trouble, policy: str) -> None:
    """All of its loads would fail; it is computed, or ended, at once."""
    start(sidecar).ask(LONG)
    engine = start(sidecar, policy=policy, load_in_step_bytes=BESIDE)
    reads = []
    trouble.fails = lambda blocks: reads.append(blocks) or range(blocks)
    answer = engine.ask(LONG, 3)
    assert answer.finish == ("length" if policy == "recompute" else "error")
    assert reads == [99]
    engine.check_idle()
    no_pins(sidecar)


def test_a_request_aborted_while_it_waits_for_a_load_that_fails(sidecar: Sidecar, start: Start, trouble: Trouble) -> None:
    start(sidecar).ask(LONG)
    engine = start(sidecar, load_in_step_bytes=BESIDE)
    go = threading.Event()
    trouble.fails, trouble.delay_s = once(7), lambda: float(not go.wait(LIFE_S))
    name = engine.add(LONG)
    engine.step_until(lambda: sidecar.status()["pins"])
    engine.step_until(lambda: engine.scheduler.requests[name].num_computed_tokens)
    engine.abort(name)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.requests, "its blocks are being written to"
    go.set()
    engine.run()
    engine.check_idle()
    no_pins(sidecar)
    assert engine.ask(LONG).external == 99 * BLOCK


@pytest.mark.parametrize("how", [IN_STEP, BESIDE], ids=["in_step", "beside"])
def test_a_sidecar_killed_in_mid_load_costs_nothing_but_time(sidecar: Sidecar, start: Start, trouble: Trouble, how: int) -> None:
    """The pool is mapped, and what was promised is pinned."""
    start(sidecar).ask(LONG)
    engine = start(sidecar, load_in_step_bytes=how)

    def kill() -> float:
        if sidecar.process is not None and sidecar.process.poll() is None:
            sidecar.kill()
        return 0.0

    trouble.delay_s = kill
    answer = engine.ask(LONG, 3)
    assert (answer.finish, answer.external) == ("length", 99 * BLOCK)
    engine.check_idle()
    engine.forget()
    assert engine.ask(LONG).external == 0
    sidecar.start()
    sidecar.until(lambda: engine.ask(prompt(40)).finish and sidecar.status()["pins"] == 0)  # released when the engine asks again


@pytest.mark.parametrize("how", ["away", "its tier fails"])
def test_a_reset_that_the_sidecar_does_not_confirm_is_made_up_for(
    sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of an engine that does no step meanwhile: vLLM empties the caches of one that sleeps."""
    one, repaired, clear = prompt(100), threading.Event(), Store.clear

    def refused(store: Store) -> None:
        if not store.layout.salt and not repaired.is_set():
            raise SidecarRefused(ErrorCode.TIER, "clear again")
        clear(store)

    monkeypatch.setattr(scheduler, "CLEAR_AGAIN_S", 0.1)
    engine, other = start(sidecar), start(sidecar)
    engine.ask(one)
    if how == "away":
        sidecar.kill()
    else:
        monkeypatch.setattr(Store, "clear", refused)
    for _ in range(2):
        assert engine.core.reset_prefix_cache(reset_connector=True)
    assert sum(thread.name == "hostkv-clear" for thread in threading.enumerate()) == 1
    if how == "away":
        sidecar.start()
    repaired.set()
    sidecar.until(lambda: not sidecar.status()["blocks"]["ready"])
    sidecar.until(lambda: all(thread.name != "hostkv-clear" for thread in threading.enumerate()))
    sidecar.until(lambda: other.ask(prompt(40)).finish and sidecar.status()["blocks"]["ready"])
    assert other.ask(one).external == 0
    assert engine.ask(one).external == 0
    engine.forget()
    assert engine.ask(one).external == 96


def test_a_reset_that_is_not_made_up_for_ends_with_its_engine(sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CLEAR_AGAIN_S", 0.1)
    engine = start(sidecar)
    engine.ask(prompt(100))
    sidecar.kill()
    assert engine.core.reset_prefix_cache(reset_connector=True)
    engine.close()
    sidecar.until(lambda: all(thread.name != "hostkv-clear" for thread in threading.enumerate()))
