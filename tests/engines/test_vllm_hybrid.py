"""Models with several kinds of KV memory in real vLLM engines: sliding windows, and the states of delta nets, beside full attention.

vLLM keeps of a prompt's windows and states only what its own end needs, and in which step a state can be saved it says itself. Output
tokens are always compared with those of an engine without HostKV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from conftest import MODELS, Engine, Engines, Sidecar, expect, no_pins, only_disk, tokens
from test_vllm import whole_blocks
from test_vllm_beside import HELD, add, answers, promised

pytestmark = pytest.mark.engine


class Model(NamedTuple):
    name: str
    block: int  # tokens; vLLM makes a block so large that a state has room in it
    small_bytes: int  # room for one long request, and not quite for two
    dtype: str = "float32"

    @property
    def config(self) -> dict[str, Any]:
        return {"model": str(MODELS / self.name), "dtype": self.dtype, "kv_bytes": 64 << 20}

    def whole(self, count: int) -> int:
        return whole_blocks(count, self.block)


SMALL = {"max_model_len": 1024, "step_tokens": 128}
WINDOW = Model("tiny-window", 32, 72 << 16)
DELTA = Model("tiny-delta", 96, 29 * 49152, "bfloat16")


@pytest.fixture(scope="module")
def plains(engine_server: Any) -> Iterator[dict[str, Engine]]:
    """Engines without HostKV, by model, as they are asked for."""
    engines = Engines(engine_server)

    class Plains(dict[str, Engine]):
        def __missing__(self, name: str) -> Engine:
            model = next(model for model in (WINDOW, DELTA) if model.name == name)
            self[name] = engines.start(**model.config)
            return self[name]

    yield Plains()
    engines.close_all()


@pytest.mark.parametrize("model", [WINDOW, DELTA], ids=lambda model: model.name)
def test_a_second_process_reuses_what_the_first_would_itself(
    engines: Engines, sidecar: Sidecar, plains: dict[str, Engine], model: Model
) -> None:
    prompts = [tokens(count, seed=count) for count in (20, 100, 600, 1500)]
    longer = prompts[2] + tokens(100, seed=1)
    branches = prompts[2][:320] + tokens(280, seed=2)
    plain = plains[model.name]
    expected = {len(prompt): expect(plain, prompt) for prompt in (*prompts, longer)} | {"branches": expect(plain, branches)}

    engine = engines.start(sidecar, **model.config, step_tokens=512)
    for prompt in prompts:
        for cached in (0, model.whole(len(prompt))):
            answer = engine.ask(tokens=prompt)
            assert (answer["cached"], answer["tokens"]) == (cached, expected[len(prompt)])
    assert answer["stats"]["worker"]["blocks_loaded"] == 0
    engines.close(engine)

    engine = engines.start(sidecar, **model.config)
    for prompt in prompts:
        answer = engine.ask(tokens=prompt)
        assert (answer["cached"], answer["tokens"]) == (model.whole(len(prompt)), expected[len(prompt)])
    assert answer["stats"]["worker"]["blocks_loaded"] > 0
    engine.do(forget=True)
    answer = engine.ask(tokens=branches)
    there = model.whole(321) if model is WINDOW else 0  # a state only where a prompt ended
    assert (answer["cached"], answer["tokens"]) == (there, expected["branches"])
    engine.do(forget=True)
    for prompt, cached in ((longer, model.whole(600)), (branches, model.whole(600)), (longer, model.whole(700))):
        answer = engine.ask(tokens=prompt)
        assert (answer["cached"], answer["tokens"]) == (cached, expected["branches" if prompt is branches else len(prompt)])
    no_pins(sidecar)


@pytest.mark.parametrize("model", [WINDOW, DELTA], ids=lambda model: model.name)
def test_a_prefix_outlives_sidecar_and_engine_on_disk(
    engines: Engines, sidecar_with_disk: Sidecar, plains: dict[str, Engine], model: Model
) -> None:
    sidecar, prompt = sidecar_with_disk, tokens(1000)
    expected = expect(plains[model.name], prompt)
    engine = engines.start(sidecar, **model.config)
    assert engine.ask(tokens=prompt)["cached"] == 0
    engines.close(engine)
    only_disk(sidecar)
    engine = engines.start(sidecar, **model.config)
    for from_disk in (model.whole(1000), 0):
        answer = engine.ask(tokens=prompt)
        assert (answer["cached"], answer["tokens"]) == (model.whole(1000), expected)
        assert answer["params"]["hostkv"]["loaded_from_disk_tokens"] == from_disk
        engine.do(forget=True)
    no_pins(sidecar)


@pytest.mark.parametrize("model", [WINDOW, DELTA], ids=lambda model: model.name)
def test_a_request_that_lost_a_block_is_computed_anew_or_fails_and_leaves_nothing_unsound(
    engines: Engines, sidecar: Sidecar, plains: dict[str, Engine], model: Model
) -> None:
    prompt = tokens(400)
    longer, longest = prompt + tokens(300, seed=1), prompt + tokens(500, seed=2)
    expected = {len(prompt): expect(plains[model.name], prompt) for prompt in (prompt, longer, longest)}
    engine = engines.start(sidecar, **model.config)
    engine.ask(tokens=prompt)
    engines.close(engine)

    engine = engines.start(sidecar, **model.config, connector="LosesTheStart", module="variants", policy="fail")
    for _ in range(2):
        answer = engine.ask(tokens=longer)
        assert (answer["finish"], answer["tokens"]) == ("error", [])
    assert answer["stats"]["worker"]["blocks_failed"] == 2
    assert answer["stats"]["worker"]["blocks_saved"] == 0
    engines.close(engine)

    engine = engines.start(sidecar, **model.config, connector="LosesTheStart", module="variants", policy="recompute")
    answer = engine.ask(tokens=longer)
    assert (answer["finish"], answer["tokens"]) == ("length", expected[700])
    assert answer["stats"]["worker"]["blocks_failed"] == 1
    answer = engine.ask(tokens=longest)  # the engine kept no window nor state in the midst of the longer one, so it asks again
    assert (answer["cached"], answer["tokens"]) == (0, expected[900])
    assert answer["stats"]["worker"]["blocks_failed"] == 2
    engines.close(engine)

    engine = engines.start(sidecar, **model.config)
    for one in (prompt, longer, longest):
        answer = engine.ask(tokens=one)
        assert (answer["cached"], answer["tokens"]) == (model.whole(len(one)), expected[len(one)])
    no_pins(sidecar)


@pytest.mark.parametrize("model", [WINDOW, DELTA], ids=lambda model: model.name)
def test_preempted_requests_come_back_through_the_sidecar(engines: Engines, sidecar: Sidecar, model: Model) -> None:
    prompts = {name: tokens(600, seed=seed) for seed, name in enumerate("ab")}
    plain = engines.start(**model.config, **SMALL)  # in bfloat16 it matters how a prompt is cut
    engine = engines.start(sidecar, **{**model.config, **SMALL, "kv_bytes": model.small_bytes})
    engine.do(add=[{"id": name, "tokens": prompt, "max_tokens": 350} for name, prompt in prompts.items()])
    done = engine.do(step=0)
    assert {name: answer["tokens"] for name, answer in done["answers"].items()} == {
        name: expect(plain, prompt, 350) for name, prompt in prompts.items()
    }
    assert done["stats"]["worker"]["blocks_loaded"] > 0, "nobody was preempted; make the prompts longer"
    no_pins(sidecar)


@pytest.mark.parametrize("model", [WINDOW, DELTA], ids=lambda model: model.name)
def test_a_request_aborted_while_it_loads_gives_everything_back(
    engines: Engines, sidecar: Sidecar, plains: dict[str, Engine], model: Model
) -> None:
    prompt = tokens(600)
    engine = engines.start(sidecar, **model.config)
    engine.ask(tokens=prompt)
    engines.close(engine)
    engine = engines.start(sidecar, **model.config, **HELD)
    add(engine, {"slow": prompt})
    blocks = promised(engine)
    assert sidecar.status()["pins"] > 0
    engine.do(abort=["slow"])
    other = tokens(700, seed=1)
    answer = engine.ask(tokens=other)
    assert (answer["cached"], answer["tokens"]) == (0, expect(plains[model.name], other))
    add(engine, {"slow": prompt})
    promised(engine, blocks)
    engine.do(let=True)
    answer = answers(engine)["slow"]
    assert (answer["cached"], answer["tokens"]) == (model.whole(600), expect(plains[model.name], prompt))
    no_pins(sidecar)


def test_two_tensor_parallel_ranks_share_windows(engines: Engines, sidecar: Sidecar, plains: dict[str, Engine]) -> None:
    prompt = tokens(400)
    for cached in (0, WINDOW.whole(400)):
        engine = engines.start(sidecar, **WINDOW.config, tensor_parallel=2)
        answer = engine.ask(tokens=prompt)
        assert (answer["cached"], answer["tokens"]) == (cached, expect(plains[WINDOW.name], prompt))
        engines.close(engine)
    no_pins(sidecar)
