"""HostKV as the storage of HiCache in real SGLang servers: HTTP, tokenizer, scheduler and detokenizer are processes of their own.

What is replaced is what needs CUDA (sglang_cpu). The tiny models show what is reused, refused and recovered, the trained one shows it on a
document. Outputs are always compared with those of an engine without HostKV. Times are printed and not judged.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import Engine, Engines, Sidecar, expect, new_sidecar, only_disk, tokens
from sglang_servers import PAGE, Answer, SglangError, SglangServer, SglangServers, hostkv, sglang_imported, whole_pages
from test_vllm import DOCUMENT

from tests.engines.forks import ANSWER_S

pytestmark = pytest.mark.engine

QUESTION = "\n\nQuestion about this document: What are the rings of Saturn made of?\nAnswer:"
TRAINED = "smollm2-135m"  # its nine heads cannot be split between two ranks
STORAGE = "/hicache/storage-backend"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServers]:
    folder = tmp_path_factory.mktemp("sglang")
    with sglang_imported(folder) as path:
        running = SglangServers(path, folder)
        yield running
        running.stop_all()


@pytest.fixture(scope="module")
def shared_sidecar() -> Iterator[Sidecar]:
    with new_sidecar() as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def shared_server(servers: SglangServers, shared_sidecar: Sidecar) -> Iterator[SglangServer]:
    server = servers.start(hostkv(shared_sidecar))
    yield server
    servers.stop(server)


@pytest.fixture
def server(shared_server: SglangServer, shared_sidecar: Sidecar) -> SglangServer:
    """One for several tests, with HostKV attached, and nothing in its memory, in the sidecar's, or on the way from one to the other."""
    assert shared_server.idle("DELETE", STORAGE)[0] == 200
    shared_server.flush()
    assert attach(shared_server, shared_sidecar)[0] == 200
    assert shared_server.call("POST", f"{STORAGE}/clear")[0] == 200
    return shared_server


@pytest.fixture(scope="module")
def document_answer(servers: SglangServers) -> Answer:
    """Of a server without HiCache."""
    server = servers.start(model=TRAINED)
    server.ask(QUESTION * 3, 1)
    answer = server.ask(DOCUMENT.read_text() + QUESTION, 16)
    servers.stop(server)
    assert answer.cached == 0
    return answer


def attach(server: SglangServer, sidecar: Sidecar, **more: object) -> tuple[int, str]:
    body = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config_json": json.dumps(hostkv(sidecar, **more))}
    return server.idle("PUT", STORAGE, body)


def ask_and_save(server: SglangServer, sidecar: Sidecar, prompt: list[int] | str, max_tokens: int = 8, page: int = PAGE) -> Answer:
    """Asks what is new and waits until the sidecar has it: the server saves it beside, page by page, after it has answered."""

    def ready() -> int:
        return int(sidecar.status()["blocks"]["ready"])

    before = ready()
    answer = server.ask(prompt, max_tokens)
    assert answer.cached == 0
    sidecar.until(lambda: ready() - before == (answer.prompt + max_tokens - 1) // page)  # the last token's KV was not computed
    return answer


def reconnected(server: SglangServer, probe: list[int] | str) -> None:
    """Asks what is stored until it comes from there, and empties the engine's memory: a client looks for its sidecar when there is
    something to do, twice a second at most."""
    until = time.monotonic() + ANSWER_S
    while True:
        server.flush()
        if server.ask(probe, 1).stored:
            break
        assert time.monotonic() < until, server.log()[-4000:]
    server.flush()


def comes_back(servers: SglangServers, sidecar: Sidecar, prompt: list[int] | str, expected: list[int], **flags: Any) -> None:
    """All that can be reused of a prompt comes from HostKV after the server forgot it, after the sidecar was killed, after it was stopped
    and only its disk is left, and in a new server; and `expected` is the answer each time."""
    probe: list[int] | str = QUESTION * 3 if isinstance(prompt, str) else tokens(100, seed=100)
    if "direct" in flags["hicache_mem_layout"]:
        flags["hicache_io_backend"] = "direct"

    def ask() -> Answer:
        answer = server.ask(prompt, len(expected))
        pages = whole_pages(answer.prompt)
        assert (answer.tokens, answer.cached, answer.stored) == (expected, pages, pages)
        return answer

    server = servers.start(hostkv(sidecar), **flags)
    ask_and_save(server, sidecar, probe, 1)  # what an engine does only once
    cold = ask_and_save(server, sidecar, prompt, len(expected))
    assert cold.tokens == expected
    server.flush()
    flushed = ask()
    sidecar.kill()
    sidecar.start()
    reconnected(server, probe)
    ask()
    only_disk(sidecar)
    reconnected(server, probe)
    disk = ask()
    servers.stop(server)
    server = servers.start(hostkv(sidecar), **flags)
    server.ask(probe, 1)
    new = ask()
    servers.stop(server)
    print(
        f"\n{flags}: {cold.prompt} prompt tokens, {flushed.stored} from HostKV; time to first token {cold.first_s:.2f} s cold, "
        f"{flushed.first_s:.2f} s from the pool, {disk.first_s:.2f} s from disk, {new.first_s:.2f} s in a new server\n{cold.text!r}"
    )


LAYOUTS = ("page_first", "page_first_direct")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_whole_page_of_a_document_comes_back_whatever_was_restarted(
    servers: SglangServers, sidecar_with_disk: Sidecar, document_answer: Answer, layout: str
) -> None:
    assert document_answer.prompt >= 3000
    comes_back(
        servers, sidecar_with_disk, DOCUMENT.read_text() + QUESTION, document_answer.tokens, model=TRAINED, hicache_mem_layout=layout
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_tensor_parallel_ranks_share_a_block(servers: SglangServers, sidecar_with_disk: Sidecar, plain: Engine, layout: str) -> None:
    prompt = tokens(3000, seed=8)
    comes_back(servers, sidecar_with_disk, prompt, expect(plain, prompt), hicache_mem_layout=layout, tp_size=2)


def test_a_prompt_comes_back_from_storage_after_the_engine_forgot_it(server: SglangServer, shared_sidecar: Sidecar, plain: Engine) -> None:
    prompt = tokens(768)
    expected = expect(plain, prompt)
    assert ask_and_save(server, shared_sidecar, prompt).tokens == expected
    server.flush()
    answer = server.ask(prompt)
    assert (answer.tokens, answer.cached, answer.stored) == (expected, whole_pages(768), whole_pages(768))
    assert answer.cached > 700


def test_a_backend_is_detached_attached_and_cleared_while_the_server_runs(
    server: SglangServer, shared_sidecar: Sidecar, plain: Engine
) -> None:
    prompt = tokens(768, seed=1)
    expected = expect(plain, prompt)
    ask_and_save(server, shared_sidecar, prompt)
    assert json.loads(server.call("GET", STORAGE)[1])["hicache_storage_backend"] == "dynamic"

    status, text = server.idle("PUT", STORAGE, {"hicache_storage_backend": "file"})
    assert status == 400, "one backend at a time"
    assert "dynamic" in text
    status, text = server.idle("PUT", STORAGE, {"hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "sometimes"})
    assert (status, "sometimes" in text or "policy" in text) == (400, True)
    status, text = server.idle("PUT", STORAGE, {"hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "wait_complete"})
    assert status == 200, text

    for _ in range(2):  # what is detached already is no error
        assert server.idle("DELETE", STORAGE)[0] == 200
    assert json.loads(server.call("GET", STORAGE)[1])["hicache_storage_backend"] is None
    shared_sidecar.until(lambda: "sglang" not in str(shared_sidecar.status()["sessions"]))
    server.flush()
    assert (answer := server.ask(prompt)).tokens == expected
    assert answer.cached == 0

    status, text = attach(server, shared_sidecar, endpiont="ipc:///nowhere")
    assert (status, "'endpiont'" in text, "'endpoint'" in text) == (400, True, True), "the option is named, and the nearest known one"
    assert attach(server, shared_sidecar)[0] == 200
    server.flush()
    answer = server.ask(prompt)
    assert (answer.tokens, answer.stored) == (expected, whole_pages(768))

    assert server.call("POST", f"{STORAGE}/clear")[0] == 200
    server.flush()
    answer = server.ask(prompt)
    assert (answer.tokens, answer.cached) == (expected, 0)


def test_without_interface_v1_the_log_says_so_and_answers_stay_right(server: SglangServer, shared_sidecar: Sidecar, plain: Engine) -> None:
    prompt = tokens(400, seed=2)
    expected = expect(plain, prompt)
    assert server.idle("DELETE", STORAGE)[0] == 200
    assert 'lacks "interface_v1"' not in server.log()
    assert attach(server, shared_sidecar, interface_v1=0)[0] == 200
    assert 'lacks "interface_v1"' in server.log()
    assert ask_and_save(server, shared_sidecar, prompt).tokens == expected
    server.flush()
    answer = server.ask(prompt)
    assert (answer.tokens, answer.stored) == (expected, whole_pages(400))
    assert server.idle("DELETE", STORAGE)[0] == 200
    assert attach(server, shared_sidecar)[0] == 200
    server.flush()
    answer = server.ask(prompt)
    assert (answer.tokens, answer.stored) == (expected, whole_pages(400)), "both ways have the same bytes"


def test_a_sidecar_that_hangs_delays_no_answer_for_long_and_is_used_again(
    server: SglangServer, shared_sidecar: Sidecar, plain: Engine
) -> None:
    known, new = [tokens(400, seed=3), tokens(600, seed=4)], [tokens(300, seed=5), tokens(500, seed=6)]
    expected = [expect(plain, prompt) for prompt in known + new]
    for prompt in known:
        ask_and_save(server, shared_sidecar, prompt)
    server.flush()
    os.kill(shared_sidecar.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with ThreadPoolExecutor(4) as pool:  # were a call to wait for the sidecar, none of this would end: it hangs until all is over
            answers = list(pool.map(server.ask, known + new))
        answered_s = time.monotonic() - started
        started = time.monotonic()
        assert server.idle("DELETE", STORAGE)[0] == 200
        print(f"\nwhile the sidecar hangs: four answers after {answered_s:.2f} s, detached in {time.monotonic() - started:.2f} s")
    finally:
        os.kill(shared_sidecar.pid, signal.SIGCONT)
    assert [answer.tokens for answer in answers] == expected
    assert attach(server, shared_sidecar)[0] == 200
    reconnected(server, known[0])
    assert (answer := server.ask(known[1])).tokens == expected[1]
    assert answer.stored == whole_pages(600)


def test_sglang_and_vllm_share_a_sidecar_that_is_killed_and_answer_as_without(
    server: SglangServer, engines: Engines, shared_sidecar: Sidecar, plain: Engine
) -> None:
    prefixes = [tokens(300 + 100 * i, seed=10 + i) for i in range(3)]
    prompts = [prefix + tokens(20 + i, seed=20 + i) for i in range(4) for prefix in prefixes]
    expected = [expect(plain, prompt) for prompt in prompts]
    engine = engines.start(shared_sidecar)

    def ask_sglang(prompt: list[int]) -> list[int]:
        return server.ask(prompt).tokens

    def vllm() -> list[list[int]]:
        answers = []
        for prompt in prompts * 2:
            answers.append(engine.ask(tokens=prompt)["tokens"])
            engine.do(forget=True)
        return answers

    with ThreadPoolExecutor(4) as pool:
        theirs = pool.submit(vllm)
        ours, rounds, kills = [], 0, 0
        while not theirs.done() or rounds < 3:
            ours += pool.map(ask_sglang, prompts)
            rounds += 1
            shared_sidecar.kill()
            shared_sidecar.start()
            kills += 1
            server.flush()
        assert theirs.result() == expected * 2
    assert ours == expected * rounds
    reconnected(server, prompts[0])
    print(f"\n{len(ours)} answers of SGLang, {2 * len(expected)} of vLLM, {kills} kills of the sidecar")


def test_pages_of_another_size_and_of_another_model_do_not_meet(
    servers: SglangServers, server: SglangServer, shared_sidecar: Sidecar, plain: Engine
) -> None:
    prompt = tokens(500, seed=7)
    expected = expect(plain, prompt)
    ask_and_save(server, shared_sidecar, prompt)
    for flags, same in (({"page_size": 2 * PAGE}, True), ({"model": "tiny-b", "served_model_name": server.model}, False)):
        other = servers.start(hostkv(shared_sidecar), **flags)
        page = flags.get("page_size", PAGE)
        first = ask_and_save(other, shared_sidecar, prompt, page=page)
        other.flush()
        again = other.ask(prompt)
        servers.stop(other)
        assert (again.stored, again.tokens) == (whole_pages(500, page), first.tokens)
        assert (first.tokens == expected) is same
    server.flush()
    answer = server.ask(prompt)
    assert (answer.tokens, answer.stored) == (expected, whole_pages(500))


def test_weights_that_cannot_be_told_from_others_are_refused_at_the_start(servers: SglangServers, shared_sidecar: Sidecar) -> None:
    with pytest.raises(SglangError, match="load_format dummy"):
        servers.start(hostkv(shared_sidecar), load_format="dummy")


def test_sglangs_own_layout_overlap_and_prefetch_policy(servers: SglangServers, sidecar: Sidecar, plain: Engine) -> None:
    """That policy ends a prefetch which takes long, so a page may be computed though it is stored."""
    defaults = {"disable_overlap_schedule": None, "hicache_storage_prefetch_policy": None}
    server = servers.start(hostkv(sidecar), hicache_mem_layout="layer_first", **defaults)
    prompt = tokens(1000, seed=40)
    answers = [ask_and_save(server, sidecar, prompt)]
    until = time.monotonic() + ANSWER_S
    while answers[-1].stored < whole_pages(1000) and time.monotonic() < until:
        server.flush()
        answers.append(server.ask(prompt))
    servers.stop(server)
    assert [answer.tokens for answer in answers] == [expect(plain, prompt)] * len(answers)
    assert (answers[0].cached, answers[-1].stored) == (0, whole_pages(1000))


def test_faults_that_sglang_injects_into_the_backend_change_no_answer(servers: SglangServers, sidecar: Sidecar, plain: Engine) -> None:
    faults = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3"}
    server = servers.start(hostkv(sidecar), environment=faults)
    prompts = [tokens(200 + 50 * i, seed=30 + i) for i in range(6)]
    expected = [expect(plain, prompt) for prompt in prompts]
    stored, rounds = 0, 0
    while rounds < 4 or (not stored and rounds < 40):
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(server.ask, prompts))
        assert [answer.tokens for answer in answers] == expected
        stored += sum(answer.stored for answer in answers)
        rounds += 1
        server.flush()
    servers.stop(server)
    assert 0 < stored < (rounds - 1) * sum(whole_pages(len(prompt)) for prompt in prompts)
