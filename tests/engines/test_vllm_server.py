"""vLLM's OpenAI server as people run it (API, engine core and worker are processes of their own), prefill and decode apart behind the
proxy of examples/disaggregated, and two engines at once on one sidecar.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from conftest import ENVIRONMENT, MODELS, ROOT, VENV, Engine, Engines, Sidecar, expect, no_pins, tokens
from test_vllm import BLOCK, whole_blocks

from tests.engines.forks import ANSWER_S, HERE, reserved_port

pytestmark = pytest.mark.engine

PYTHON = VENV / "bin" / "python"


class Server:
    """A process that answers HTTP on a port of the loopback."""

    def __init__(self, log: Path, *command: str) -> None:
        self._port, port = reserved_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(PYTHON), *command, "--host", "127.0.0.1", "--port", str(port)], env=environment, cwd=HERE, stdout=output, stderr=output
            )
        self.pid = self._process.pid

    def wait(self, path: str = "/health") -> Server:
        """Until it answers, be it with an error."""
        until = time.monotonic() + ANSWER_S
        while True:
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            try:
                urllib.request.urlopen(self.url + path, timeout=ANSWER_S).close()
                return self
            except urllib.error.HTTPError:
                return self
            except OSError:
                time.sleep(0.1)

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self._port.close()
        self._process.terminate()
        try:
            return self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


class Servers:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def vllm(self, name: str, role: str, sidecar: Sidecar) -> Server:
        connector = {
            "kv_connector": "Patient",
            "kv_connector_module_path": "variants",
            "kv_role": role,
            "kv_connector_extra_config": {"endpoint": sidecar.endpoint},
        }
        flags = {"model": MODELS / "tiny-a", "served-model-name": "tiny", "dtype": "float32", "block-size": BLOCK, "max-model-len": 4096}
        flags |= {"kv-cache-memory-bytes": 256 << 20, "kv-transfer-config": json.dumps(connector)}
        command = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
        return self._start(name, "-m", "vllm.entrypoints.openai.api_server", *command, "--enforce-eager", "--enable-prompt-tokens-details")

    def proxy(self, prefill: str, decode: str) -> Server:
        proxy = self._start("proxy", str(ROOT / "examples" / "disaggregated" / "proxy.py"), "--prefill", prefill, "--decode", decode)
        return proxy.wait("/")

    def _start(self, name: str, *command: str) -> Server:
        server = Server(self._folder / f"{name}.log", *command)
        self._stack.callback(server.stop)
        return server


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=ANSWER_S)


def completion(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


def ask(server: Server, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's were not computed for it."""
    with post(server.url, completion(prompt)) as reply:
        answer = json.load(reply)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def events(lines: Any) -> list[Any]:
    """What a stream of server-sent events holds."""
    return [json.loads(line[len(b"data: ") :]) for line in lines if line.startswith(b"data: {")]


def members(sidecar: Sidecar) -> dict[str, int]:
    return {
        member["name"]: member["pid"]
        for session in sidecar.status()["sessions"]
        for member in session["members"]
        if "vllm" in member["name"]
    }


def test_an_openai_server_that_starts_again_reuses_every_whole_block(servers: Servers, sidecar: Sidecar, plain: Engine) -> None:
    prompt = tokens(500)
    answers = []
    for _ in range(2):
        server = servers.vllm("server", "kv_both", sidecar).wait()
        answers.append(ask(server, prompt))
        pids = members(sidecar)
        assert set(pids) == {"vllm scheduler", "vllm worker"}
        assert len({server.pid, *pids.values()}) == 3
        assert server.stop() == 0
        sidecar.until(lambda: members(sidecar) == {})
    assert answers == [(expect(plain, prompt), 0), (expect(plain, prompt), whole_blocks(500))]


def test_decode_starts_from_the_blocks_that_prefill_computed(servers: Servers, sidecar: Sidecar, plain: Engine) -> None:
    prefill, decode = servers.vllm("prefill", "kv_producer", sidecar), servers.vllm("decode", "kv_consumer", sidecar)
    proxy = servers.proxy(prefill.wait().url, decode.wait().url)

    prompts = [tokens(count, seed=count) for count in (20, 320, 500, 900)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(proxy, prompt), prompts))
    assert answers == [(expect(plain, prompt), whole_blocks(len(prompt))) for prompt in prompts]

    streamed = tokens(400, seed=1)
    with post(proxy.url, completion(streamed, stream=True, stream_options={"include_usage": True})) as reply:
        pieces = events(reply)
    assert [token for piece in pieces for choice in piece["choices"] for token in choice["token_ids"]] == expect(plain, streamed)
    assert pieces[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_blocks(400)
    assert "is left out" not in proxy.log()

    prefill.stop()
    alone = tokens(400, seed=2)
    assert ask(proxy, alone) == (expect(plain, alone), 0)
    assert f"the prefill server {prefill.url} is left out" in proxy.log()


def test_the_example_runs_and_stops_what_it_started() -> None:
    done = subprocess.run(
        [str(PYTHON), str(ROOT / "examples" / "disaggregated" / "run.py")], capture_output=True, text=True, timeout=2 * ANSWER_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "taken by the decode server from HostKV      3136\n" in done.stdout
    assert done.stdout.count("stopped  ") == 4


class Stub:
    """In place of a vLLM server: gives each POST to `answer`, and keeps the bodies."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.bodies: list[dict[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def status(code: int) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.end_headers()
        handler.wfile.write(b'{"from": "stub"}')

    return answer


def begins_a_stream(handler: BaseHTTPRequestHandler) -> None:
    """And breaks it off: what ends without the last chunk is not whole."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    event = b'data: {"choices": []}\n\n'
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))


ANY = {"prompt": [5, 6], "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}


def test_prefill_is_asked_for_one_token_and_decode_for_the_request_itself(servers: Servers) -> None:
    with Stub(status(200)) as prefill, Stub(status(200)) as decode:
        with post(servers.proxy(prefill.url, decode.url).url, ANY) as reply:
            assert json.load(reply) == {"from": "stub"}
        assert prefill.bodies == [{"prompt": [5, 6], "max_tokens": 1, "n": 1, "stream": False}]
        assert decode.bodies == [ANY]


def test_an_error_of_prefill_is_logged_and_one_of_decode_is_the_answer(servers: Servers) -> None:
    with Stub(status(500)) as prefill, Stub(status(429)) as decode:
        proxy = servers.proxy(prefill.url, decode.url)
        with pytest.raises(urllib.error.HTTPError) as failed:
            post(proxy.url, ANY)
        assert (failed.value.code, json.load(failed.value)) == (429, {"from": "stub"})
        assert f"{prefill.url} is left out, decode computes this prompt: answered 500" in proxy.log()


def test_a_decode_server_that_is_away_is_named_in_the_answer(servers: Servers) -> None:
    with Stub(status(200)) as prefill:
        nobody, port = reserved_port()
        with nobody, pytest.raises(urllib.error.HTTPError) as failed:
            post(servers.proxy(prefill.url, f"http://127.0.0.1:{port}").url, ANY)
        assert failed.value.code == 502
        assert f"the decode server http://127.0.0.1:{port} does not answer" in json.load(failed.value)["error"]["message"]


def test_a_stream_that_breaks_off_ends_with_an_error(servers: Servers) -> None:
    with Stub(status(200)) as prefill, Stub(begins_a_stream) as decode:
        with post(servers.proxy(prefill.url, decode.url).url, ANY) as reply:
            first, last = events(reply)
        assert first == {"choices": []}
        assert f"the decode server {decode.url} does not answer" in last["error"]["message"]


def test_a_client_that_goes_away_ends_its_request_at_decode(servers: Servers) -> None:
    ended = Event()

    def streams_until_nobody_listens(handler: BaseHTTPRequestHandler) -> None:
        begins_a_stream(handler)
        handler.connection.settimeout(ANSWER_S)
        if handler.connection.recv(1) == b"":
            ended.set()

    with Stub(status(200)) as prefill, Stub(streams_until_nobody_listens) as decode:
        reply = post(servers.proxy(prefill.url, decode.url).url, ANY)
        assert reply.readline().startswith(b"data: ")
        assert not ended.is_set()
        reply.close()
        assert ended.wait(ANSWER_S)


def test_two_engines_at_once_answer_forty_mixed_requests_as_without_a_cache(engines: Engines, sidecar: Sidecar, plain: Engine) -> None:
    draw = random.Random(40)
    prefixes = [tokens(draw.randrange(100, 700), seed=seed) for seed in range(5)]
    requests = [(prefix, prefix + tokens(draw.randrange(1, 200), seed=100 + i)) for i in range(8) for prefix in prefixes]
    draw.shuffle(requests)
    pair = [engines.start(sidecar) for _ in range(2)]

    def run(engine: Engine, share: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
        engine.do(add=[{"id": str(i), "tokens": prompt, "max_tokens": 8} for i, (_, prompt) in enumerate(share)])
        answers = engine.do(step=0)["answers"]
        return [answers[str(i)] for i in range(len(share))]

    def check(shares: list[list[tuple[list[int], list[int]]]], known: bool) -> None:
        with ThreadPoolExecutor(2) as pool:
            for share, answers in zip(shares, pool.map(run, pair, shares), strict=True):
                for (prefix, prompt), answer in zip(share, answers, strict=True):
                    assert (answer["finish"], answer["tokens"]) == ("length", expected[tuple(prompt)])
                    assert not known or answer["cached"] >= whole_blocks(len(prefix) + 1)

    expected = {tuple(prompt): expect(plain, prompt) for _, prompt in requests}
    # In the first round both engines compute and save the same prefixes, and take what the other one was first with.
    check([requests[:10], requests[10:20]], known=False)
    for engine in pair:
        engine.do(forget=True)
    # In the second one every prefix is in the pool, and in neither engine.
    check([requests[20:30], requests[30:]], known=True)
    counted = [engine.do(step=0)["stats"]["worker"] for engine in pair]
    assert all(stats["blocks_loaded"] > 0 and stats["blocks_failed"] == 0 for stats in counted)
    no_pins(sidecar)
    status = sidecar.status()
    # Nothing is dropped but what the other engine was saving at that moment.
    assert sum(stats["blocks_dropped"] for stats in counted) == status["items"]["busy"]
    assert status["blocks"]["writing"] == 0
