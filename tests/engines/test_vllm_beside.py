"""Loads that requests wait for outside of the engine's steps, in real vLLM engines. Small loads are made part of a step otherwise."""

from __future__ import annotations

import time
from typing import Any

import pytest
from conftest import Engine, Engines, Sidecar, expect, tokens
from test_vllm import BLOCK, SMALL, whole_blocks

pytestmark = pytest.mark.engine

BESIDE = {"connector": "LoadsBeside", "module": "variants"}


def fill(engines: Engines, sidecar: Sidecar, *prompts: list[int]) -> None:
    engine = engines.start(sidecar)
    for prompt in prompts:
        engine.ask(tokens=prompt)
    engines.close(engine)


def no_pins(sidecar: Sidecar) -> None:
    """They are given back beside the engine, so soon, and not at once."""
    for _ in range(200):
        if sidecar.status()["pins"] == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"{sidecar.status()['pins']} pins stay")


def promised(engine: Engine) -> None:
    """Steps until the engine was promised something."""
    for _ in range(1000):
        if engine.do(step=1)["stats"]["scheduler"]["blocks_promised"]:
            return
        time.sleep(0.005)
    raise AssertionError("nothing was promised")


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
    sidecar.stop()
    sidecar.start()
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
    engine = engines.start(sidecar, connector="LoadsSlowly", module="variants", **SMALL)
    add(engine, {"a": first})
    promised(engine)
    assert sidecar.status()["pins"] == whole_blocks(900) // BLOCK, "the load has its pins"
    engine.do(abort=["a"])
    answer = engine.ask(tokens=second)  # there is room for it only when the other's blocks are free again
    assert (answer["cached"], answer["tokens"]) == (whole_blocks(900), expect(plain, second))
    no_pins(sidecar)


def test_others_run_on_while_a_request_waits_for_its_load(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    slow, quick = tokens(900, seed=1), tokens(20, seed=2)
    fill(engines, sidecar, slow)
    engine = engines.start(sidecar, connector="LoadsSlowly", module="variants")
    add(engine, {"slow": slow}, max_tokens=1)
    add(engine, {"quick": quick}, max_tokens=4)
    order: list[str] = []
    while len(order) < 2:
        order += engine.do(step=1)["answers"]
    assert order == ["quick", "slow"]
    no_pins(sidecar)


def test_requests_that_were_preempted_wait_for_their_loads_too(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompts = {name: tokens(600, seed=seed) for seed, name in enumerate("ab")}
    engine = engines.start(sidecar, **BESIDE, **SMALL)
    add(engine, prompts, max_tokens=200)
    done = engine.do(step=0)
    assert {name: answer["tokens"] for name, answer in done["answers"].items()} == {n: expect(plain, p, 200) for n, p in prompts.items()}
    assert done["stats"]["worker"]["blocks_loaded"] > 0, "nobody was preempted; make the prompts longer"
    no_pins(sidecar)
