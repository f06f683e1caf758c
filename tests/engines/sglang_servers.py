"""Real SGLang servers (serve_sglang.py) for the tests, with HostKV as the storage of their HiCache, or without any."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from conftest import MODELS, ROOT

from tests.engines.forks import ANSWER_S, HERE, Child, reserved_port, started
from tests.support import Sidecar

PYTHON = ROOT / ".venvs" / "sglang" / "bin" / "python"
PAGE = 16
KEY = "key of the tests"  # SGLang's calls to attach and detach need one
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions"),
}
FLAGS = {  # what lets SGLang run without an accelerator, and small
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "max-running-requests": "8",
    "mem-fraction-static": "0.9",
    "hicache-ratio": "2",
    "hicache-write-policy": "write_through",
    "hicache-storage-prefetch-policy": "wait_complete",
    "admin-api-key": KEY,
    "random-seed": "0",
    "host": "127.0.0.1",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "skip-server-warmup": True,
    "sleep-on-idle": True,
    "enable-metrics": True,
    "enable-cache-report": True,
}


def whole_pages(count: int, page: int = PAGE) -> int:
    """How many of a prompt's tokens can be reused: whole pages, and one token is always computed."""
    return (count - 1) // page * page


def hostkv(sidecar: Sidecar, **more: Any) -> dict[str, Any]:
    """The extra configuration that makes SGLang's dynamic storage backend HostKV's."""
    where = {"backend_name": "hostkv", "module_path": "hostkv.connector.sglang", "class_name": "HostKVStorage"}
    return {**where, "interface_v1": 1, "endpoint": sidecar.endpoint, "prefetch_threshold": PAGE, "tier_wait_s": 60.0, **more}


class Answer(NamedTuple):
    tokens: list[int]
    text: str
    prompt: int  # tokens of it
    cached: int  # of these, those that were not computed
    stored: int  # of these, those that came from the storage backend
    first_s: float  # to the first token


class SglangError(Exception):
    """The server has ended, or did not start."""


class SglangServer:
    def __init__(self, path: Path, log: Path, flags: dict[str, Any], environment: dict[str, str]) -> None:
        self._port, port = reserved_port()
        self.url = f"http://127.0.0.1:{port}"
        self.model = str(flags["model-path"])
        self._log = log
        options = {**FLAGS, **flags, "port": port}.items()
        given = [(flag, value) for flag, value in options if value is not None]
        args = [part for flag, value in given for part in ([f"--{flag}"] if value is True else [f"--{flag}", str(value)])]
        self._child = Child(path)
        self.pid: int = self._child.ask({"args": args, "environment": environment, "log": str(log)})["pid"]

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            if self._child.ends(within_s=0.1):
                break
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=ANSWER_S).close()
                return
            except OSError:
                pass
        raise SglangError(self.log()[-4000:])

    def log(self) -> str:
        return self._log.read_text()

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers, method=method), timeout=ANSWER_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def idle(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """The same, for what SGLang refuses as long as it is not idle, which it is a moment after its last answer."""
        until = time.monotonic() + ANSWER_S
        while True:
            status, text = self.call(method, path, body)
            if status == 200 or "idle" not in text or time.monotonic() > until:
                return status, text
            time.sleep(0.05)

    def ask(self, prompt: list[int] | str, max_tokens: int = 8) -> Answer:
        what = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = json.dumps({**what, "sampling_params": sampling, "stream": True}).encode()
        started = time.monotonic()
        first_s, last = 0.0, b""
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"}), timeout=ANSWER_S
        ) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.monotonic() - started
                    last = line
        answer = json.loads(last[len(b"data: ") :])
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            answer["output_ids"], answer["text"], meta["prompt_tokens"], meta["cached_tokens"], details.get("storage", 0), first_s
        )

    def flush(self) -> None:
        """Empties the engine's own device and host caches, not the storage."""
        until = time.monotonic() + ANSWER_S
        while self.call("POST", "/flush_cache")[0] != 200:
            assert time.monotonic() < until, self.log()[-4000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends the server the ordinary way, and waits until each of its processes is gone."""
        self._child.end()
        self._port.close()


class SglangServers:
    """Starts servers and stops those that a test left."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._running: list[SglangServer] = []
        self._count = 0

    def start(
        self, extra: dict[str, Any] | None = None, *, model: str = "tiny-a", tokens: int = 8192, environment: dict[str, str] | None = None,
        **flags: Any,
    ) -> SglangServer:  # fmt: skip
        """A server whose KV memory holds so many tokens, with HiCache and the dynamic storage backend of `extra`, or without any cache
        below its own memory. `flags` have _ for -, and None for SGLang's own default; two ranks share the two cores."""
        wanted: dict[str, Any] = {"model-path": MODELS / model, "page-size": PAGE, "max-total-tokens": tokens}
        wanted |= {name.replace("_", "-"): value for name, value in flags.items()}
        environment = dict(environment or {})
        if wanted.get("tp-size", 1) == 2:
            environment |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
        if extra is not None:
            wanted |= {"enable-hierarchical-cache": True, "hicache-storage-backend": "dynamic"}
            wanted |= {"hicache-storage-backend-extra-config": json.dumps(extra)}
        self._count += 1
        server = SglangServer(self._path, self._folder / f"{self._count}.log", wanted, environment)
        self._running.append(server)
        try:
            server.wait()
        except SglangError:
            self.stop(server)
            raise
        return server

    def stop(self, server: SglangServer) -> None:
        self._running.remove(server)
        server.stop()

    def stop_all(self) -> None:
        while self._running:
            self.stop(self._running[-1])


@contextmanager
def sglang_imported(folder: Path) -> Iterator[Path]:
    """The process that has imported SGLang and forks servers; the path of its socket."""
    assert PYTHON.exists(), f"{PYTHON} is missing; run: bash tests/engines/install_sglang.sh"
    print(f"\nimporting SGLang (half a minute); what the servers print is in {folder}", flush=True)
    with started([PYTHON, HERE / "serve_sglang.py"], folder / "serve.log", ENVIRONMENT) as path:
        yield path
