"""Time to first token of one long prompt in real vLLM engines on the CPU: with HostKV (loads beside the steps), with vLLM's own
offloading (OffloadingConnector, TieringOffloadingSpec and its `fs` tier, with the copies of cpu_offload.py), with LMCache's connector, and
without any.

Each prompt is new to all of them. `cold` computes it; `from memory` is asked again of the same engine once that forgot its own prefix
cache; `from disk` of a new engine with nothing in memory beside it, the files out of the page cache. The engines take turns, prompt by
prompt, another one first each time; one prompt goes before all, so that no first call is measured. Every answer must be what the engine
without any says.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hostkv.connector import Client
from hostkv.connector.bench import MIB, OwnSidecar

from tests.bench.lmcache_l2 import forget_pages
from tests.bench.peers.common import HERE, QUIET, VENVS, Process, Table, Unavailable, free_port, say
from tests.engines.conftest import ENVIRONMENT, MODELS, VENV, Engine, EngineError, Engines
from tests.engines.forks import started

MODEL = "smollm2-135m"
PROMPT_TOKENS, ANSWER_TOKENS, BLOCK_TOKENS, PROMPTS = 2000, 8, 128, 5
BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
MEMORY_BYTES, DISK = 1024 * MIB, "4GiB"  # beside the engine, of each
COLD, MEMORY, DISK_LINE = (f"vLLM, first token of {PROMPT_TOKENS} tokens, {how}" for how in ("cold", "from memory", "from disk"))
PLAIN = "no cache"


@contextmanager
def engine_server(place: Path) -> Iterator[Path]:
    """The process that has imported vLLM and forks engines. What LMCache's connector needs and vLLM has not is taken from LMCache's own
    environment."""
    environment = {**ENVIRONMENT, **QUIET}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    lmcache = [str(path) for path in VENVS.glob("lmcache/lib/python*/site-packages")]
    program = (
        f"import runpy, sys; sys.path += {lmcache!r}\n"
        # LMCache imports numba, and vLLM's search for Triton kernels on a CPU stumbles over an object of llvmlite that answers to any name
        "import llvmlite.binding.ffi; llvmlite.binding.ffi._lib_fn_wrapper.get = lambda *_: None\n"
        "runpy.run_module('engine', run_name='__main__')"  # of the folder that forks.py starts it in
    )
    try:
        with started([VENV / "bin" / "python", "-c", program], place / "engines.log", environment) as listens:
            yield listens
    except ImportError as error:
        raise Unavailable(str(error)) from error


class Plain:
    """An engine with nothing beside it; the others say what they have."""

    name = PLAIN
    config: dict[str, Any] = {}  # noqa: RUF012

    def settle(self) -> None:
        """Waits until all prompts are on disk, before the engine ends."""

    def only_disk(self) -> None:
        """The engine is gone; nothing is left in memory."""

    def stop(self) -> None:
        pass


class HostKV(Plain):
    name = Table.OURS

    def __init__(self, place: Path) -> None:
        self._sidecar = OwnSidecar(MEMORY_BYTES, tiers=f"[{{type: disk, path: {place}/hostkv, size: {DISK}}}]")
        self.config = {"extra": {"endpoint": self._sidecar.endpoint}, "connector": "HostKVConnector", "module": "hostkv.connector.vllm"}

    def settle(self) -> None:
        with Client(self._sidecar.endpoint) as client:
            while not client.serving() or client.status()["blocks"]["dirty"]:
                time.sleep(0.05)

    def only_disk(self) -> None:
        self._sidecar.stop()
        self._sidecar.start()

    def stop(self) -> None:
        self._sidecar.__exit__()


class Native(Plain):
    name = "vLLM native"

    def __init__(self, place: Path) -> None:
        self._files = place / "fs"
        tier = {"type": "fs", "root_dir": str(self._files)}
        extra = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_offload",
            "cpu_bytes_to_use": MEMORY_BYTES,
            "secondary_tiers": [tier],
        }
        self.config = {"extra": extra, "connector": "OffloadingConnector", "module": None}

    def settle(self) -> None:
        until_files(self._files, "*.bin")

    def only_disk(self) -> None:
        forget_pages(str(self._files))


class LMCache(Plain):
    name = "LMCache"

    def __init__(self, place: Path) -> None:
        self._place, self._files = place, place / "lmcache"
        self._port = free_port()
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port}
        self.config = {"extra": extra, "connector": "LMCacheMPConnector", "module": "lmcache.integration.vllm.lmcache_mp_connector"}
        self._start()

    def _start(self) -> None:
        adapter = f'{{"type": "fs_native", "base_path": "{self._files}", "use_odirect": true}}'
        more = ["--chunk-size", str(BLOCK_TOKENS), "--l2-adapter", adapter]
        self._server = lmcache_server(self._place / "lmcache.log", self._port, MEMORY_BYTES >> 30, more)

    def settle(self) -> None:
        until_files(self._files, "*")

    def only_disk(self) -> None:
        self._server.stop()
        forget_pages(str(self._files))
        self._start()

    def stop(self) -> None:
        self._server.stop()


def lmcache_server(log: Path, port: int, gib: int, more: list[str]) -> Process:
    """Both ways of moving data are offered; shared memory is taken at the start; nothing is observed."""
    command = [
        str(VENVS / "lmcache" / "bin" / "lmcache"),
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--http-port",
        str(free_port()),
    ]
    command += ["--l1-size-gb", str(gib), "--no-l1-use-lazy", "--shm-name", f"hostkv-peers-{port}", "--supported-transfer-mode", "auto"]
    command += ["--eviction-policy", "LRU", "--disable-observability", *more]
    server = Process("lmcache server", command, log)
    try:
        server.until(port)
    except BaseException:
        server.stop()
        raise
    return server


def until_files(directory: Path, pattern: str) -> None:
    """Waits until the blocks of all prompts are files there, for a minute."""
    wanted, end = (PROMPTS + 1) * BLOCKS, time.monotonic() + 60
    while len([path for path in directory.rglob(pattern) if path.is_file()]) < wanted and time.monotonic() < end:
        time.sleep(0.05)


class Turns:
    def __init__(self, engines: Engines, table: Table, subjects: list[Plain]) -> None:
        self._engines, self._table, self._subjects = engines, table, subjects
        self._running: dict[str, Engine] = {}
        self._expected: dict[int, list[int]] = {}

    def start(self) -> None:
        for subject in list(self._subjects):
            kv_bytes = 512 * MIB
            try:
                self._running[subject.name] = self._engines.start(
                    **{
                        "model": str(MODELS / MODEL),
                        "block_size": BLOCK_TOKENS,
                        "kv_bytes": kv_bytes,
                        "connector": "",
                        "extra": {},
                        "patient": False,
                        **subject.config,
                    }
                )
                self._ask(subject, 0)
            except (EngineError, OSError) as error:
                self._gone(subject, str(error))

    def ask(self, line: str, number: int, cached: int) -> None:
        order = [*self._subjects]
        random.Random(f"{line} {number}").shuffle(order)  # whoever comes after ten seconds of computing finds another machine
        for subject in order:
            try:
                answer = self._ask(subject, number)
            except (EngineError, OSError) as error:
                self._gone(subject, str(error))
                continue
            wanted = 0 if subject.name == PLAIN else cached
            if answer["tokens"] != self._expected.setdefault(number, answer["tokens"]):
                self._gone(subject, f"prompt {number} {line}: other tokens than another engine's")
            elif answer["cached"] != wanted:
                self._gone(subject, f"prompt {number} {line}: {answer['cached']} tokens from the cache and not {wanted}")
            else:
                self._table.add(line, subject.name, answer["ttft_s"])

    def forget(self) -> None:
        for engine in self._running.values():
            engine.do(forget=True)

    def stop(self) -> None:
        for engine in self._running.values():
            self._engines.close(engine)
        self._running.clear()

    def _ask(self, subject: Plain, number: int) -> dict[str, Any]:
        prompt = [random.Random(number).randrange(100, 2000) for _ in range(PROMPT_TOKENS)]
        return self._running[subject.name].ask(ANSWER_TOKENS, tokens=prompt)

    def _gone(self, subject: Plain, why: str) -> None:
        self._table.note(f"{subject.name}: vLLM: {why}")
        self._subjects.remove(subject)
        if engine := self._running.pop(subject.name, None):
            self._engines.close(engine)


def measure(table: Table, place: Path, kinds: list[type[Plain]]) -> None:
    for line in (COLD, MEMORY, DISK_LINE):
        table.line(line, "s")
    say("vLLM on this CPU: importing it (half a minute)")
    with engine_server(place) as listens, ExitStack() as closing:
        subjects = []
        for kind in kinds:
            try:
                subjects.append(kind(place) if kind is not Plain else kind())
                closing.callback(subjects[-1].stop)
            except (Unavailable, OSError) as error:
                table.note(f"{kind.name}: {error}")
        turns = Turns(Engines(listens), table, subjects)
        try:
            say(f"engines with {', '.join(subject.name for subject in subjects)}")
            turns.start()
            for number in range(1, PROMPTS + 1):
                say(f"prompt {number} of {PROMPTS}, cold and from memory")
                turns.ask(COLD, number, 0)
                turns.forget()
                turns.ask(MEMORY, number, BLOCKS * BLOCK_TOKENS)
                turns.forget()
            for subject in subjects:
                subject.settle()
            turns.stop()
            subjects[:] = [subject for subject in subjects if subject.name != PLAIN]
            for subject in subjects:
                subject.only_disk()
            turns.start()
            turns.forget()
            for number in range(1, PROMPTS + 1):
                say(f"prompt {number} of {PROMPTS}, from disk")
                turns.ask(DISK_LINE, number, BLOCKS * BLOCK_TOKENS)
                turns.forget()
        finally:
            turns.stop()
