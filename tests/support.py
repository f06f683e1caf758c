"""A sidecar for tests: a real process on a run directory and a pool name of its own, of which nothing stays behind."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from hostkv.cext import Tables
from hostkv.connector import client as clients
from hostkv.schemas import messages
from hostkv.sidecar.pool import boot_id

PATIENCE_S = 60.0  # far over every bound of ours; who waits as long has failed
LIFE_S = 3 * PATIENCE_S  # for what starts Python and takes memory, and for its end, which may be asked for while it does that
MEMORY = "/dev/shm"  # for directories of which a test needs that they answer at once; disks take what time they like
HASTY_CLIENTS = (clients.STALE_NS, clients.RECONNECT_WAIT_S, clients.BYE_WAIT_S, clients.Client.__init__.__kwdefaults__)
PATIENT_CLIENTS = (15 * 10**9, 4.0, 10.0, {**HASTY_CLIENTS[3], "timeout_s": 10.0, "tier_wait_s": PATIENCE_S})
PATIENT_PROGRAM = f"""
from hostkv.connector import client as clients
clients.STALE_NS, clients.RECONNECT_WAIT_S, clients.BYE_WAIT_S, clients.Client.__init__.__kwdefaults__ = {PATIENT_CLIENTS!r}
"""


class Sidecar:
    """`hostkv serve` on `directory`/run. Starts at once unless told not to; ends, with all it left, at the end of the `with` block.
    `disk`: constants of its sidecar/tiers/disk.py, so that it waits less for a disk than others do."""

    def __init__(
        self,
        directory: Path,
        *,
        pool_size: str = "64MiB",
        pool_name: str | None = None,
        config: str | None = None,
        disk: dict[str, float] | None = None,
        start: bool = True,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.run_directory = directory / "run"
        self.endpoint = f"ipc://{self.run_directory}/control.sock"
        self.pool_name = pool_name or f"hostkv-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.pool_path = Path("/dev/shm") / self.pool_name
        self.tables_path = Path("/dev/shm") / f"{self.pool_name}.tables"
        self.index_path = Path("/dev/shm") / f"{self.pool_name}.index"
        self._program = ["-m", "hostkv.sidecar.cli"]
        if disk is not None:
            set_them = "; ".join(f"disk.{name} = {value!r}" for name, value in disk.items())
            self.program(f"from hostkv.sidecar.tiers import disk; {set_them}")
        self.arguments = ["--endpoint", self.endpoint, "--pool-name", self.pool_name, "--pool-size", pool_size]
        if config is not None:
            file = directory / "hostkv.yaml"
            file.write_text(config)
            self.arguments += ["--config", str(file)]
        self.log_path = directory / "sidecar.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, str] = {}
        if start:
            try:
                self.start()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def program(self, first: str) -> None:
        """The code that its process runs before all else."""
        self._program = ["-c", f"{first}; from hostkv.sidecar import cli; exit(cli.main())"]

    @property
    def pid(self) -> int:
        assert self.process is not None, "the sidecar was not started"
        return self.process.pid

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts the process and does not wait for it to be ready."""
        assert self.process is None or self.process.poll() is not None, "the sidecar runs already"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, *self._program, "serve", *self.arguments], stdout=subprocess.PIPE, stderr=log)
        return self.process

    def start(self) -> dict[str, str]:
        """Starts it and waits for the ready line, whose words it returns."""
        self.launch()
        return self.until_ready()

    def until_ready(self) -> dict[str, str]:
        process = self.process
        assert process is not None
        assert process.stdout is not None
        line, end = b"", time.monotonic() + LIFE_S
        while not line.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"the sidecar was not ready in {LIFE_S} s: {self.log()}")
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                raise AssertionError(f"the sidecar ended with {process.wait()}: {self.log()}")
            line += piece
        assert line.startswith(b"hostkv ready "), line
        self.ready = dict(word.split("=", 1) for word in line.decode().split()[2:])
        return self.ready

    def try_again(self) -> str:
        """What another start is refused with."""
        command = [sys.executable, *self._program, "serve", *self.arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIFE_S, check=False)
        assert done.returncode == 2, done
        return done.stderr

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def kill(self) -> None:
        """SIGKILL; pool and tables stay."""
        self._signal(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        return self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> int:
        assert self.process is not None, "the sidecar was not started"
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Waits for its end; its exit code."""
        assert self.process is not None, "the sidecar was not started"
        code = self.process.wait(LIFE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def close(self) -> None:
        """Ends what we started, however it is, and removes what it may have left."""
        try:
            if self.process is not None and self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)
                self.kill()
        finally:  # also where a disk that hangs keeps it
            for path in (self.pool_path, self.tables_path, self.index_path):
                path.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """Asked over the wire, by none of our clients."""
        request = messages.StatusRequest()
        with Wire(self.endpoint) as wire:
            reply = wire.ask(request)
        assert isinstance(reply, messages.StatusReply), reply
        return reply.status

    def tier(self) -> dict[str, Any]:
        """The status of its disk tier."""
        (tier,) = self.status()["tiers"]
        found: dict[str, Any] = tier
        return found

    def until_tier_serves(self) -> None:
        self.until(lambda: all(directory["state"] == "serving" for directory in self.tier()["directories"]))

    def until_clean(self) -> None:
        """All that it has is on disk."""
        self.until(lambda: self.status()["blocks"]["dirty"] == 0)

    def until(self, condition: Callable[[], object]) -> None:
        """Waits until it holds; fails after PATIENCE_S."""
        until(condition, self.log)


def disk_tier(*paths: Path, size: str = "64MiB", **more: object) -> str:
    """The line of a configuration that puts a disk tier on these directories."""
    return f"tiers: [{json.dumps({'type': 'disk', 'path': [str(path) for path in paths], 'size': size, **more})}]\n"


class Wire:
    """One connection that speaks the protocol without the client: typed requests, or bytes."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._next = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> bytes:
        assert self._socket.poll(int(PATIENCE_S * 1000)), "no reply"
        return self._socket.recv()

    def ask(self, request: messages.Request) -> messages.Reply:
        self._next += 1
        self.send(messages.encode_request(request, self._next))
        number, _, reply = messages.decode_reply(self.receive(), request)
        assert number == self._next
        return reply


@contextmanager
def waiting_as(waits: tuple[int, float, float, dict[str, Any]]) -> Iterator[None]:
    """Clients of this process wait as long for a sidecar as PATIENT_CLIENTS do, so that one that only gets no processor is none that hangs,
    or as HASTY_CLIENTS do, who are as users have them; PATIENT_PROGRAM begins a program of the first kind."""
    init = clients.Client.__init__
    before = (clients.STALE_NS, clients.RECONNECT_WAIT_S, clients.BYE_WAIT_S, init.__kwdefaults__)
    clients.STALE_NS, clients.RECONNECT_WAIT_S, clients.BYE_WAIT_S, init.__kwdefaults__ = waits
    try:
        yield
    finally:
        clients.STALE_NS, clients.RECONNECT_WAIT_S, clients.BYE_WAIT_S, init.__kwdefaults__ = before


def until(condition: Callable[[], object], explain: Callable[[], object] = lambda: "") -> None:
    """Waits until it holds; fails after PATIENCE_S with what `explain` says."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {PATIENCE_S} s: {explain()}"
        time.sleep(0.01)


def hostkv(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "hostkv.sidecar.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=LIFE_S,
        env={**os.environ, **environment},
        check=False,
    )


def status_json(endpoint: str) -> dict[str, Any]:
    done = hostkv("status", "--json", "--endpoint", endpoint)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def faults_after_repair(tables_path: Path) -> list[str]:
    """What is wrong with the tables that a killed sidecar left, once a copy of them is repaired as the next start will do: what no correct
    writer leaves wherever it is killed, and every invariant that does not hold. [] when they are sound."""
    data = tables_path.read_bytes()
    fd = os.memfd_create("tables")
    try:
        os.write(fd, data)
        sizes = Tables.geometry(fd)
        verify = bool(sizes.pop("verify"))
        tables = Tables.adopt(fd, boot_id=boot_id(), instance_id=bytes(16), verify=verify, **sizes)
        tables.repair([])
        stats = tables.stats()
        unsound = [f"{stats[name]} {name}" for name in ("bad_blocks", "bad_records") if stats[name]]
        return unsound + tables.check()
    finally:
        os.close(fd)
