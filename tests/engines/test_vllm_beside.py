"""Loads that requests wait for outside of the engine's steps, in real vLLM engines. Small loads are made part of a step otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Engine, Engines, Sidecar, expect, no_pins, only_disk, tokens
from test_vllm import BLOCK, SMALL, whole_blocks

from tests.support import until

pytestmark = pytest.mark.engine

BESIDE = {"connector": "LoadsBeside", "module": "variants"}
HELD = {"connector": "HoldsLoads", "module": "variants"}


def fill(engines: Engines, sidecar: Sidecar, *prompts: list[int]) -> None:
    engine = engines.start(sidecar)
    for prompt in prompts:
        engine.ask(tokens=prompt)
    engines.close(engine)


def promised(engine: Engine, before: int = 0) -> int:
    """Steps until the engine was promised more than `before` blocks; how many."""
    blocks = [before]

    def more() -> bool:
        blocks.append(engine.do(step=1)["stats"]["scheduler"]["blocks_promised"])
        return blocks[-1] > before

    until(more)
    return blocks[-1]


def add(engine: Engine, prompts: dict[str, list[int]], max_tokens: int = 8) -> None:
    engine.do(add=[{"id": name, "tokens": prompt, "max_tokens": max_tokens} for name, prompt in prompts.items()])


def answers(engine: Engine) -> dict[str, Any]:
    answered: dict[str, Any] = engine.do(step=0)["answers"]
    return answered


def test_requests_that_wait_for_their_loads_get_all_of_them(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompts = {name: tokens(count, seed=seed) for seed, (name, count) in enumerate({"a": 900, "b": 333, "c": 70, "d": 20}.items())}
    fill(engines, sidecar, *prompts.values())
    engine = engines.start(sidecar, **BESIDE)
    for _ in range(3):
        add(engine, prompts)
        for name, answer in answers(engine).items():
            assert (answer["cached"], answer["tokens"]) == (whole_blocks(len(prompts[name])), expect(plain, prompts[name])), name
        no_pins(sidecar)
        engine.do(forget=True)


def test_what_only_a_disk_has_is_waited_for_beside_those_that_need_it_not(
    engines: Engines, sidecar_with_disk: Sidecar, plain: Engine
) -> None:
    sidecar = sidecar_with_disk
    on_disk, new = tokens(900, seed=1), tokens(300, seed=2)
    fill(engines, sidecar, on_disk)
    only_disk(sidecar)
    engine = engines.start(sidecar, **BESIDE)
    add(engine, {"disk": on_disk, "new": new})
    done = answers(engine)
    assert {name: answer["cached"] for name, answer in done.items()} == {"disk": whole_blocks(900), "new": 0}
    assert {name: answer["tokens"] for name, answer in done.items()} == {"disk": expect(plain, on_disk), "new": expect(plain, new)}
    no_pins(sidecar)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_one_lost_block_costs_its_own_request_alone(engines: Engines, sidecar: Sidecar, plain: Engine, policy: str) -> None:
    lost, kept = tokens(300, seed=1), tokens(60, seed=2)
    fill(engines, sidecar, lost, kept)
    engine = engines.start(sidecar, connector="LosesABlockBeside", module="variants", policy=policy)
    add(engine, {"lost": lost})
    done = engine.do(step=0)
    if policy == "recompute":
        assert done["answers"]["lost"]["tokens"] == expect(plain, lost)
    else:
        assert done["answers"]["lost"]["finish"] == "error"
    asked, *reported = done["reported"]
    assert [asked] == reported, "the block that was lost is reported, and no other"
    assert engine.ask(tokens=tokens(90, seed=3))["finish"] == "length"
    no_pins(sidecar)


def test_a_request_aborted_in_mid_load_gives_back_blocks_and_pins(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    first, second = tokens(900, seed=1), tokens(900, seed=2)
    fill(engines, sidecar, first, second)
    engine = engines.start(sidecar, **HELD, **SMALL)
    add(engine, {"a": first})
    promised(engine)
    assert sidecar.status()["pins"] == whole_blocks(900) // BLOCK, "the load has its pins"
    engine.do(abort=["a"])
    add(engine, {"b": second})
    assert engine.do(step=20)["stats"]["scheduler"]["blocks_promised"] == whole_blocks(900) // BLOCK, "the other's blocks are not free yet"
    engine.do(let=True)
    answer = answers(engine)["b"]
    assert (answer["cached"], answer["tokens"]) == (whole_blocks(900), expect(plain, second))
    no_pins(sidecar)


def test_others_run_on_while_a_request_waits_for_its_load(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    slow, quick = tokens(900, seed=1), tokens(20, seed=2)
    fill(engines, sidecar, slow)
    engine = engines.start(sidecar, **HELD)
    add(engine, {"slow": slow}, max_tokens=1)
    promised(engine)
    add(engine, {"quick": quick}, max_tokens=4)
    done: dict[str, Any] = {}
    until(lambda: done.update(engine.do(step=1)["answers"]) or done)
    assert done.keys() == {"quick"}
    engine.do(let=True)
    assert answers(engine)["slow"]["cached"] == whole_blocks(900)
    no_pins(sidecar)


def test_requests_that_were_preempted_wait_for_their_loads_too(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompts = {name: tokens(600, seed=seed) for seed, name in enumerate("ab")}
    engine = engines.start(sidecar, **BESIDE, **SMALL)
    add(engine, prompts, max_tokens=200)
    done = engine.do(step=0)
    assert {name: answer["tokens"] for name, answer in done["answers"].items()} == {n: expect(plain, p, 200) for n, p in prompts.items()}
    assert done["stats"]["worker"]["blocks_loaded"] > 0, "nobody was preempted; make the prompts longer"
    no_pins(sidecar)
