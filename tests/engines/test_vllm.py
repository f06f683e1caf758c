"""The connector inside real vLLM engines, each a process of its own, against real sidecars.

The tiny models show what is reused, refused and recovered; the trained one shows it on a document. Output tokens are always compared with
those of an engine without HostKV. Times are printed and not judged.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELS, Engine, EngineError, Engines, Sidecar, expect, no_pins, only_disk, tokens, write_adapter

from tests.support import until

pytestmark = pytest.mark.engine

BLOCK = 32
DOCUMENT = Path(__file__).resolve().parents[2] / "examples" / "document.md"
SMALL = {"max_model_len": 1024, "kv_bytes": 5 << 20}  # 40 blocks of tiny-a: room for one long request, not for two


def whole_blocks(count: int, block: int = BLOCK) -> int:
    """How many of a prompt's tokens can be reused: whole blocks, and one token is always computed."""
    return (count - 1) // block * block


def reconnected(engine: Engine) -> None:
    """Asks something else until the engine has found its sidecar again: it looks for it when it has something to do."""
    probes = itertools.count()
    until(lambda: engine.ask(tokens=tokens(40, seed=1000 + next(probes)), max_tokens=1) and engine.do(step=0)["serves"])


def loaded(engine: Engine, blocks: int) -> None:
    """Steps until the engine has loaded so many blocks."""
    until(lambda: engine.do(step=1)["stats"]["worker"]["blocks_loaded"] >= blocks)


def test_a_second_process_reuses_every_whole_block_of_the_shared_prefix(engines: Engines, sidecar: Sidecar) -> None:
    document = DOCUMENT.read_text()
    trained = {"model": str(MODELS / "smollm2-135m"), "max_model_len": 8192, "kv_bytes": 512 << 20}

    def ask(engine: Engine, question: str) -> dict:
        engine.ask(prompt="Hello", max_tokens=1)  # what an engine does only once
        return engine.ask(prompt=f"{document}\n\nQuestion about this document: {question}", max_tokens=24, ignore_eos=False)

    engine = engines.start(sidecar, **trained)
    first = ask(engine, "What are the rings of Saturn made of?")
    engines.close(engine)
    engine = engines.start(sidecar, **trained)
    second = ask(engine, "What is the highest volcano on Mars?")
    engines.close(engine)
    uncached = ask(engines.start(**trained), "What is the highest volcano on Mars?")

    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first["prompt"], second["prompt"], strict=False)))
    assert shared >= 3000
    assert first["cached"] == uncached["cached"] == 0
    assert second["cached"] == whole_blocks(shared + 1)
    assert second["tokens"] == uncached["tokens"]
    worker = second["stats"]["worker"]
    print(
        f"\n{len(second['prompt'])} prompt tokens, {second['cached']} reused; time to first token "
        f"{uncached['ttft_s']:.2f} s cold, {second['ttft_s']:.2f} s warm: {uncached['ttft_s'] / second['ttft_s']:.1f} times shorter; "
        f"{worker['blocks_loaded']} blocks loaded in {worker['load_s'] * 1000:.0f} ms, {first['stats']['worker']['blocks_saved']} saved in "
        f"{first['stats']['worker']['save_s'] * 1000:.0f} ms\n{second['text']!r}"
    )


def test_a_prefix_is_read_from_disk_after_sidecar_and_engine_have_ended(engines: Engines, sidecar_with_disk: Sidecar) -> None:
    sidecar = sidecar_with_disk
    trained = {"model": str(MODELS / "smollm2-135m"), "max_model_len": 4096, "kv_bytes": 512 << 20, "block_size": 128}
    prompt = tokens(2000, seed=3)

    def ask(engine: Engine, **what: Any) -> dict:
        engine.ask(prompt="Hello", max_tokens=1)
        return engine.ask(tokens=prompt, max_tokens=16, **what)

    engine = engines.start(sidecar, **trained)
    cold = ask(engine)
    engines.close(engine)
    only_disk(sidecar)
    engine = engines.start(sidecar, **trained)
    disk = ask(engine)
    promoted = sidecar.tier()["promoted"]
    engine.do(forget=True)
    pool = ask(engine)
    engines.close(engine)
    assert cold["cached"] == 0
    assert disk["cached"] == pool["cached"] == 1920
    assert disk["tokens"] == pool["tokens"] == cold["tokens"]
    assert promoted == sidecar.tier()["promoted"] == 15
    print(
        f"\n2000 tokens, 1920 of them reused; time to first token {cold['ttft_s']:.2f} s cold, {disk['ttft_s']:.2f} s from disk, "
        f"{pool['ttft_s']:.2f} s from the pool"
    )


@pytest.mark.parametrize("block", [32, 128])
def test_a_prompt_that_ends_with_a_block_is_reused_but_for_its_last_token(
    engines: Engines, sidecar: Sidecar, plain: Engine, block: int
) -> None:
    prompt = tokens(512)
    engine = engines.start(sidecar, block_size=block)
    engine.ask(tokens=prompt)
    engines.close(engine)
    again = engines.start(sidecar, block_size=block).ask(tokens=prompt)
    assert again["cached"] == whole_blocks(512, block) == 512 - block
    assert again["tokens"] == expect(plain, prompt)


def test_a_cache_salt_keeps_tenants_apart(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    engine = engines.start(sidecar)
    prompt = tokens(300)
    answers = []
    for salt in ("a", "b", "a"):
        engine.do(forget=True)  # what is found now can only come from the sidecar
        answers.append(engine.ask(tokens=prompt, salt=salt))
    assert [answer["cached"] for answer in answers] == [0, 0, whole_blocks(300)]
    assert {tuple(answer["tokens"]) for answer in answers} == {tuple(expect(plain, prompt))}


def test_another_model_and_another_dtype_do_not_meet(engines: Engines, sidecar: Sidecar, tmp_path: Path) -> None:
    prompt = tokens(300)
    retrained = tmp_path / "tiny-a"  # the same name and shapes, other weights
    retrained.mkdir()
    for file in (MODELS / "tiny-b").iterdir():
        (retrained / file.name).symlink_to(file)
    for other in ({}, {"model": str(retrained)}, {"dtype": "bfloat16"}):
        engine = engines.start(sidecar, **other)
        answer = engine.ask(tokens=prompt)
        assert answer["cached"] == 0, other
        assert answer["stats"]["worker"]["blocks_saved"] == 300 // BLOCK
        engines.close(engine)
    namespaces = sidecar.status()["namespaces"]
    assert [namespace["blocks"] for namespace in namespaces] == [300 // BLOCK] * 3
    assert engines.start(sidecar).ask(tokens=prompt)["cached"] == whole_blocks(300)


def test_an_adapter_trained_anew_under_the_same_path_is_another_one(engines: Engines, sidecar: Sidecar, tmp_path: Path) -> None:
    prompt, adapter = tokens(300), str(tmp_path / "adapter")
    outputs = []
    for seed, cached in ((1, 0), (1, whole_blocks(300)), (2, 0)):
        write_adapter(tmp_path / "adapter", seed)
        engine = engines.start(sidecar, lora=True)
        answer = engine.ask(tokens=prompt, adapter=adapter)
        assert answer["cached"] == cached
        outputs.append(answer["tokens"])
        engines.close(engine)
    assert engines.start(sidecar, lora=True).ask(tokens=prompt)["cached"] == 0, "without an adapter it is another request"
    assert outputs[0] == outputs[1] != outputs[2]


def test_an_adapter_that_changes_while_the_engine_runs_is_not_cached_any_more(engines: Engines, sidecar: Sidecar, tmp_path: Path) -> None:
    prompt, adapter = tokens(300), str(tmp_path / "adapter")
    write_adapter(tmp_path / "adapter", 1)
    engine = engines.start(sidecar, lora=True)
    for cached in (0, whole_blocks(300)):
        engine.do(forget=True)
        assert engine.ask(tokens=prompt, adapter=adapter)["cached"] == cached
    write_adapter(tmp_path / "adapter", 2)
    engine.do(forget=True)
    assert engine.ask(tokens=prompt, adapter=adapter)["cached"] == 0
    assert sidecar.status()["blocks"]["total"] == 300 // BLOCK
    engines.close(engine)
    assert engines.start(sidecar, lora=True).ask(tokens=prompt, adapter=adapter)["cached"] == 0


def test_what_cannot_be_told_from_others_is_refused_and_the_engine_runs_uncached(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar, load_format="dummy")
    answer = engine.ask(tokens=tokens(300))
    assert (answer["finish"], answer["cached"]) == ("length", 0)
    assert sidecar.status()["blocks"]["total"] == 0


def test_sidecar_killed_in_mid_run_fails_no_request_and_serves_again_after_a_restart(
    engines: Engines, sidecar: Sidecar, plain: Engine
) -> None:
    prompts = {str(i): tokens(700 + 50 * i, seed=i) for i in range(4)}
    expected = {name: expect(plain, prompt, 24) for name, prompt in prompts.items()}
    requests = [{"id": name, "tokens": prompt, "max_tokens": 24} for name, prompt in prompts.items()]
    engine = engines.start(sidecar, extra={"save_decode": True})  # it saves in the steps after the kill too
    engine.do(add=requests[:2])
    answers = dict(engine.do(step=3)["answers"])
    sidecar.kill()
    answers |= engine.do(step=3)["answers"]
    engine.do(add=requests[2:])  # these begin without a sidecar
    answers |= engine.do(step=0)["answers"]
    assert {name: (answer["finish"], answer["tokens"]) for name, answer in answers.items()} == {
        n: ("length", t) for n, t in expected.items()
    }

    sidecar.start()
    reconnected(engine)
    engine.do(forget=True)
    engine.do(add=requests)
    done = engine.do(step=0)
    cached = {name: answer["cached"] for name, answer in done["answers"].items()}
    assert cached["0"] == whole_blocks(len(prompts["0"])), "what was saved before the kill is served after it"
    assert cached["1"] == whole_blocks(len(prompts["1"]))
    assert {name: answer["tokens"] for name, answer in done["answers"].items()} == expected
    no_pins(sidecar)
    engine.do(forget=True)
    again = engine.ask(tokens=prompts["3"], max_tokens=24)
    assert again["cached"] == whole_blocks(len(prompts["3"])), "what was dropped is saved at the next chance"


def test_sidecar_killed_every_five_seconds_while_ten_requests_run_changes_no_answer(engines: Engines, sidecar: Sidecar) -> None:
    """Three shared prefixes in an engine with room for one: each comes back from the sidecar, or is computed again where it is away."""
    prefixes = [tokens(640, seed=seed) for seed in range(3)]
    prompts = [prefixes[i % 3] + tokens(30 + 7 * i, seed=10 + i) for i in range(10)]
    requests = [{"id": str(i), "tokens": prompt, "max_tokens": 150} for i, prompt in enumerate(prompts)]

    def run(engine: Engine) -> tuple[dict[str, tuple[str, list[int]]], dict]:
        engine.do(add=requests)
        done = engine.do(step=0)
        return {name: (answer["finish"], answer["tokens"]) for name, answer in done["answers"].items()}, done["stats"].get("worker", {})

    uncached, _ = run(engines.start(**SMALL))
    assert {finish for finish, _ in uncached.values()} == {"length"}
    engine = engines.start(sidecar, **SMALL, patient=False)
    over, kills = threading.Event(), []

    def kill() -> None:
        while not over.wait(5):
            sidecar.kill()
            sidecar.start()
            kills.append(1)

    with ThreadPoolExecutor() as pool:
        killer = pool.submit(kill)
        try:
            stats = {"blocks_loaded": 0}
            while not (len(kills) > 1 and stats["blocks_loaded"]) and not killer.done():  # as long as it takes on this machine
                answers, stats = run(engine)
                assert answers == uncached
        finally:
            over.set()
        killer.result()
    print(f"\n{len(kills)} kills of the sidecar; {stats}")


def test_an_emptied_sidecar_is_filled_again_by_engines_that_have_the_prefix_themselves(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar)
    prompt = tokens(400)
    engine.ask(tokens=prompt)
    sidecar.stop()  # and its pool with it
    sidecar.start()
    reconnected(engine)
    assert engine.ask(tokens=prompt + tokens(5, seed=1))["cached"] == whole_blocks(405)
    assert engines.start(sidecar).ask(tokens=prompt)["cached"] == whole_blocks(400)


def test_blocks_of_a_new_pool_are_not_promised_to_a_worker_that_has_not_mapped_it(
    engines: Engines, sidecar: Sidecar, plain: Engine
) -> None:
    prompt = tokens(400)
    late, other = engines.start(sidecar, connector="WorkerStaysBehind", module="variants"), engines.start(sidecar)
    sidecar.stop()
    sidecar.start()
    other.ask(tokens=prompt)
    answer = late.ask(tokens=prompt)
    assert (answer["finish"], answer["cached"], answer["tokens"]) == ("length", 0, expect(plain, prompt))


def test_a_sidecar_that_never_started_costs_next_to_nothing(engines: Engines, plain: Engine, tmp_path: Path) -> None:
    engine = engines.start(extra={"endpoint": f"ipc://{tmp_path}/none.sock"})
    engine.ask(tokens=tokens(8), max_tokens=1)
    before = engine.do(forget=True)["stats"]
    prompt = tokens(2000)
    answer = engine.ask(tokens=prompt, max_tokens=1)
    assert answer["tokens"] == expect(plain, prompt, 1)
    spent = sum(answer["stats"][role]["hook_cpu_s"] - before[role]["hook_cpu_s"] for role in before)
    share = spent / answer["ttft_s"]
    print(f"\nno sidecar: {spent * 1000:.2f} ms of CPU in the hooks, {share:.2%} of {answer['ttft_s']:.2f} s to the first token")
    assert share < 0.01


def test_one_lost_block_is_reported_alone_and_recomputed_with_what_follows(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompt = tokens(400)
    engine = engines.start(sidecar)
    engine.ask(tokens=prompt)
    engines.close(engine)
    engine = engines.start(sidecar, connector="LosesABlock", module="variants", policy="recompute")
    answer = engine.ask(tokens=prompt)
    asked, reported = answer["reported"]
    assert asked == reported
    assert len(reported) == 1
    assert answer["stats"]["worker"]["blocks_loaded"] == whole_blocks(400) // BLOCK - 1
    assert answer["tokens"] == expect(plain, prompt)
    engines.close(engine)
    again = engines.start(sidecar).ask(tokens=prompt)
    assert (again["cached"], again["tokens"]) == (whole_blocks(400), expect(plain, prompt)), "nothing unsound was saved"


def test_reset_cache_makes_every_engine_compute_again(engines: Engines, sidecar: Sidecar) -> None:
    engine, other = engines.start(sidecar), engines.start(sidecar)
    prompt = tokens(300)
    engine.ask(tokens=prompt)
    assert other.ask(tokens=prompt)["cached"] == whole_blocks(300)
    assert engine.do(reset=True)["reset"] is True
    other.do(forget=True)
    assert other.ask(tokens=prompt)["cached"] == 0
    for cached in (0, whole_blocks(300)):  # what its weights are now, they are in memory: it shares with itself alone
        engine.do(forget=True)
        assert engine.ask(tokens=prompt)["cached"] == cached
    sidecar.kill()
    assert other.do(reset=True)["reset"] is True, "or vLLM would keep it paused"
    sidecar.start()
    sidecar.until(lambda: sidecar.status()["blocks"]["total"] == whole_blocks(300) // BLOCK)  # what `engine` has for itself


def test_requests_that_run_during_a_reset_are_neither_saved_nor_found(engines: Engines, sidecar: Sidecar) -> None:
    engine = engines.start(sidecar, extra={"save_decode": True})
    prompt = tokens(300)
    engine.do(add=[{"id": "old", "tokens": prompt, "max_tokens": 100}])
    engine.do(step=40)
    assert sidecar.status()["blocks"]["total"] >= whole_blocks(300) // BLOCK
    engine.do(reset=True)
    old = engine.do(step=0)["answers"]["old"]
    assert sidecar.status()["blocks"]["total"] == 0
    assert engine.ask(tokens=prompt + old["tokens"])["cached"] == 0
    assert engine.ask(tokens=prompt + old["tokens"])["cached"] == whole_blocks(400)


def test_decode_blocks_are_saved_on_request(engines: Engines, sidecar: Sidecar) -> None:
    prompt = tokens(100)
    for save_decode, expected in ((False, 96), (True, whole_blocks(100 + 60))):
        engine = engines.start(sidecar, extra={"save_decode": save_decode, "revision": str(save_decode)})
        first = engine.ask(tokens=prompt, max_tokens=64)
        engine.do(forget=True)
        assert engine.ask(tokens=prompt + first["tokens"][:60])["cached"] == expected
        engines.close(engine)


def test_pins_of_a_waiting_request_end_when_it_is_aborted(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompts = {name: tokens(900, seed=seed) for seed, name in enumerate("ab")}
    engine = engines.start(sidecar)
    for prompt in prompts.values():
        engine.ask(tokens=prompt)
    engines.close(engine)
    engine = engines.start(sidecar, **SMALL)
    engine.do(add=[{"id": name, "tokens": prompt, "max_tokens": 40} for name, prompt in prompts.items()])
    loaded(engine, whole_blocks(900) // BLOCK)
    engine.do(step=5)  # asking again takes no more pins, and those of the running one come back
    sidecar.until(lambda: sidecar.status()["pins"] == whole_blocks(900) // BLOCK)
    engine.do(abort=["b"])
    no_pins(sidecar)
    assert engine.do(step=0)["answers"]["a"]["tokens"] == expect(plain, prompts["a"], 40)


def test_pins_of_a_pool_that_was_replaced_promise_nothing(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompts = {name: tokens(900, seed=seed) for seed, name in enumerate("ab")}
    engine, other = engines.start(sidecar, **SMALL), engines.start(sidecar)
    for prompt in prompts.values():
        other.ask(tokens=prompt)
    engine.do(add=[{"id": name, "tokens": prompt, "max_tokens": 40} for name, prompt in prompts.items()])
    loaded(engine, whole_blocks(900) // BLOCK)
    engine.do(step=1)
    sidecar.until(lambda: sidecar.status()["pins"] == whole_blocks(900) // BLOCK)  # b waits with them
    sidecar.stop()  # and its pool with it
    sidecar.start()
    other.ask(tokens=prompts["b"])
    done = engine.do(step=0)
    assert {name: (answer["finish"], answer["tokens"]) for name, answer in done["answers"].items()} == {
        name: ("length", expect(plain, prompt, 40)) for name, prompt in prompts.items()
    }
    no_pins(sidecar)


def test_preempted_requests_come_back_through_the_sidecar(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompts = {name: tokens(600, seed=seed) for seed, name in enumerate("ab")}  # 19 blocks each, and 7 more when they end
    engine = engines.start(sidecar, **SMALL)
    engine.do(add=[{"id": name, "tokens": prompt, "max_tokens": 200} for name, prompt in prompts.items()])
    done = engine.do(step=0)
    assert {name: answer["tokens"] for name, answer in done["answers"].items()} == {n: expect(plain, p, 200) for n, p in prompts.items()}
    assert done["stats"]["worker"]["blocks_loaded"] > 0, "nobody was preempted; make the prompts longer"
    no_pins(sidecar)


def test_each_stage_of_a_pipeline_has_its_own_blocks_and_a_prefix_needs_all_of_them(
    engines: Engines, sidecar: Sidecar, plain: Engine
) -> None:
    prompt = tokens(400)
    longer = prompt + tokens(100, seed=2)
    engine = engines.start(sidecar, pipeline_parallel=2)
    cold = engine.ask(tokens=prompt)
    engines.close(engine)
    assert [namespace["blocks"] for namespace in sidecar.status()["namespaces"]] == [400 // BLOCK] * 2
    engine = engines.start(sidecar, pipeline_parallel=2)
    warm = engine.ask(tokens=longer)
    assert (cold["cached"], warm["cached"]) == (0, whole_blocks(400))
    assert (cold["tokens"], warm["tokens"]) == (expect(plain, prompt), expect(plain, longer))
    engines.close(engine)
    assert engines.start(sidecar).ask(tokens=prompt)["cached"] == 0, "one stage has other layers than one of two"


def test_two_tensor_parallel_ranks_share_a_block(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    prompt = tokens(300)
    for cached in (0, whole_blocks(300)):
        engine = engines.start(sidecar, tensor_parallel=2)
        answer = engine.ask(tokens=prompt)
        assert (answer["cached"], answer["tokens"]) == (cached, expect(plain, prompt))
        engines.close(engine)
    no_pins(sidecar)


def test_an_unknown_option_is_refused_and_the_nearest_named(engines: Engines, sidecar: Sidecar) -> None:
    with pytest.raises(EngineError, match="'save_decodes' is unknown, the nearest known key is 'save_decode'"):
        engines.start(sidecar, extra={"save_decodes": True})


def test_an_unknown_layout_is_refused_and_the_engine_runs_uncached(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    engine = engines.start(sidecar, connector="StrangeLayout", module="variants")
    prompt = tokens(300)
    for _ in range(2):
        engine.do(forget=True)
        answer = engine.ask(tokens=prompt)
        assert (answer["cached"], answer["tokens"]) == (0, expect(plain, prompt))
    assert sidecar.status()["blocks"]["total"] == 0
