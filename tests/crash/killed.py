"""A sidecar killed at any line of its own code, from main() to its end; whatever it left, a plain start serves on:

    python -m tests.crash.killed [--trials 200 | --all] [--seed N] [--outside 24]

A process that has imported everything forks one child for each trial. The child runs `hostkv serve` with a trace over the lines of
sidecar/ and kills itself at one of them: in the start, while it serves, in the restart that SIGHUP asks for, in the end that SIGTERM
asks for. Five starts are looked at: on nothing, on a pool that another one left, on a pool of another size, on one of another name, and
on a disk tier whose blocks only the disk has. The threads of a tier's directory are traced, too; what they do beside the others is in no
order, so a line may be met at another time than it was when the points were found, or not at all.
--outside: so many real processes are killed by a timer as well.

Of the trace's children two things are not real: exec, at SIGHUP, is a call of main() after all descriptors were closed that exec
closes, and is waited for longer; and the periods of the loop's timers are shorter. What lies inside of one line, in C or in the kernel,
is only met by the kills from outside (and, for the tables' writer, instruction by instruction in step_writer.c)."""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from hostkv.cext import lock_take
from hostkv.schemas import messages as m
from hostkv.schemas.errors import Status
from hostkv.schemas.namespace import Layout
from hostkv.sidecar import attach, cli, loop, serve  # noqa: F401  imported before the forks

from tests.support import PATIENCE_S, Sidecar, Wire, disk_tier, faults_after_repair, hostkv

SOURCES = os.path.dirname(os.path.abspath(cli.__file__))
LAYOUT = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=4096)
OTHER = Layout(model="n", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=8192, shards=2)
POOL_SIZE, OTHER_SIZE = "8MiB", "4MiB"
LIFE_FILES = {"pool.py", "rundir.py", "serve.py", "cli.py"}  # what may run otherwise in another start than the one on a pool of before
TIER_FILES = {"core.py", "movement.py", "disk.py", "directory.py", "errands.py", "ledger.py"}
SECONDS_TO_DIE = PATIENCE_S


class Died(Exception):
    """The child of a trial is no more."""


# ---- in the process that forks ---------------------------------------------------------------------------------------------------------
class Trace:
    """How often each line of sidecar/ ran in each life (1, and 2 after SIGHUP), and when first; kills the process when `target` has run
    `times`."""

    def __init__(self, target: tuple[int, str, int] | None, times: int) -> None:
        self.life = 1
        self.ran: dict[tuple[int, str, int], list[int]] = {}  # [how often, when first]
        self._pid, self._target, self._times = os.getpid(), target, times

    def install(self) -> None:
        sys.settrace(self._called)
        threading.settrace(self._called)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._ran if frame.f_code.co_filename.startswith(SOURCES) else None

    def _ran(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and os.getpid() == self._pid:
            line = (self.life, os.path.basename(frame.f_code.co_filename), frame.f_lineno)
            ran = self.ran.setdefault(line, [0, time.monotonic_ns()])
            ran[0] += 1
            if line == self._target and ran[0] == self._times:
                os.kill(self._pid, signal.SIGKILL)
        return self._ran


def serve_traced(order: dict[str, Any]) -> None:
    """One trial: `hostkv serve` in this process."""
    for number, name in ((1, "out"), (2, "err")):
        fd = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    trace = Trace(tuple(order["target"]) if order["target"] else None, order["times"])

    def instead_of_exec(path: str, arguments: list[str]) -> None:
        trace.life += 1
        gc.collect()  # unmaps the tables: a mapping would keep their lock
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if int(name) > 2 and fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(int(name))
        sys.exit(cli.main(arguments[3:]))

    os.execv = instead_of_exec  # type: ignore[assignment]
    sys.orig_argv[1:] = ["-m", "hostkv.sidecar.cli", "serve", *order["arguments"]]  # what a restart executes again
    loop.PROBE_S, loop.SWEEP_S = 0.02, 0.05
    loop.RESTART_WAIT_S = PATIENCE_S
    if order["traced"]:
        trace.install()
    code = 1
    try:
        code = cli.main(["serve", *order["arguments"]])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.settrace(None)
        if order["record"]:
            Path(order["record"]).write_text(json.dumps([[*line, *ran] for line, ran in trace.ran.items()]))
        sys.stderr.flush()
        os._exit(code)


def hold(order: dict[str, Any]) -> None:
    """Holds a member lock, as an engine does, until it is killed."""
    lock_take(order["path"])
    os.write(order["said"], b"1")
    while True:
        signal.pause()


def fork_for(connection: socket.socket) -> None:
    """Answers orders, one JSON line each, until the connection ends."""
    for line in connection.makefile("r"):
        order = json.loads(line)
        if order["do"] == "reap":
            answer: Any = os.waitstatus_to_exitcode(os.waitpid(order["pid"], 0)[1])
        else:
            reader, order["said"] = os.pipe()
            answer = os.fork()
            if not answer:
                connection.close()
                os.close(reader)
                hold(order) if order["do"] == "hold" else serve_traced(order)
            os.close(order["said"])
            if order["do"] == "hold":
                assert os.read(reader, 1)
            os.close(reader)
        connection.sendall(json.dumps(answer).encode() + b"\n")


# ---- in the process that judges --------------------------------------------------------------------------------------------------------
class Forks:
    """The other process, and what it started."""

    def __init__(self) -> None:
        """To be made before this process has a ZeroMQ context or a thread."""
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            try:
                fork_for(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._lines = self._socket.makefile("r")
        self._running: dict[int, int] = {}  # pid -> pidfd

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in list(self._running):
            self.kill(pid)
        self._lines.close()
        self._socket.close()
        os.waitpid(self._pid, 0)

    def _order(self, **order: Any) -> int:
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        answer: int = json.loads(self._lines.readline())
        return answer

    def start(self, do: str, **order: Any) -> int:
        pid = self._order(do=do, **order)
        self._running[pid] = os.pidfd_open(pid)
        return pid

    def dead(self, pid: int, wait_s: float = 0.0) -> bool:
        return bool(select.select([self._running[pid]], [], [], wait_s)[0])

    def reap(self, pid: int) -> int:
        os.close(self._running.pop(pid))
        return self._order(do="reap", pid=pid)

    def kill(self, pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        return self.reap(pid)


class Talk(Wire):
    """A connection whose waits end when the sidecar does."""

    def __init__(self, endpoint: str, died: Callable[[], bool]) -> None:
        super().__init__(endpoint)
        self._died = died

    def receive(self) -> bytes:
        end = time.monotonic() + PATIENCE_S
        while not self._socket.poll(5):
            if self._died():
                raise Died
            assert time.monotonic() < end, "no reply"
        return self._socket.recv()


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(24)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(LAYOUT.shard_bytes)


class World:
    """A run directory, and what we know of the pool: `present` blocks were acknowledged, `gone` ones discarded; our member holds `pins` (by
    tag) and the shard `in_flight` (block, page, generation). With a tier in `disk`, `on_disk` ones are there for good."""

    def __init__(self, folder: Path, forks: Forks, pool_size: str = POOL_SIZE, disk: Path | None = None) -> None:
        self.forks = forks
        self.disk = disk
        self.on_disk: set[int] = set()
        config = None if disk is None else disk_tier(disk)
        self.sidecar = Sidecar(folder, pool_size=pool_size, config=config, start=False)
        self.out = folder / "out"
        self.pid = 0
        self.present: set[int] = set()
        self.gone: set[int] = set()
        self.pins: dict[int, int] = {}  # tag -> how many
        self.in_flight: tuple[int, bytes, bytes] | None = None
        self.committing = False  # it, and no answer has come
        self.holder, self.lock = 0, b""
        self.real = False  # whether the sidecar is a process of its own, and no fork
        self._image: dict[str, bytes] = {}
        self._known: tuple[set[int], set[int], dict[int, int], tuple[int, bytes, bytes] | None, set[int]] = (set(), set(), {}, None, set())

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            self.forks.kill(self.pid)
        self.end_member()
        self.sidecar.close()
        for name in self.files_in_use():
            Path("/dev/shm", name).unlink()

    # ---- what a trial starts from ---------------------------------------------------------------------------------------------------
    def remember(self) -> None:
        """What a killed sidecar left is what every trial finds."""
        run = self.sidecar.run_directory
        held = run / "members" / self.lock.hex()
        files = [*(Path("/dev/shm", name) for name in self.files_in_use()), run / "lock", *(run / "members").iterdir(), *self.disk_files()]
        self._image = {str(path): path.read_bytes() for path in files if not (self.holder and path == held)}
        self._known = self.present, self.gone, self.pins, self.in_flight, self.on_disk

    def restore(self) -> None:
        for name in self.files_in_use():
            Path("/dev/shm", name).unlink()
        for path in (self.sidecar.run_directory / "members").glob("*"):
            if not (self.holder and path.name == self.lock.hex()):
                path.unlink()
        for path in [self.sidecar.run_directory / "tiers", *self.disk_files()]:
            path.unlink(missing_ok=True)
        for name, data in self._image.items():
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(fd, data)
            os.close(fd)
            os.utime(name, (0, 0))
        present, gone, pins, self.in_flight, on_disk = self._known
        self.committing = False
        self.present, self.gone, self.pins, self.on_disk = set(present), set(gone), dict(pins), set(on_disk)

    def disk_files(self) -> list[Path]:
        """Without payload, which stays as the last trial left it: records tell what of it counts."""
        return [path for path in self.disk.iterdir() if path.suffix != ".slab"] if self.disk is not None else []

    # ---- processes ------------------------------------------------------------------------------------------------------------------
    def serve(self, target: tuple[int, str, int] | None = None, times: int = 1, traced: bool = True, record: Path | None = None) -> None:
        self.out.write_bytes(b"")
        self.pid = self.forks.start(
            "serve",
            arguments=self.sidecar.arguments,
            target=target,
            times=times,
            traced=traced,
            record=str(record or ""),
            out=str(self.out),
            err=str(self.sidecar.log_path),
        )

    def died(self) -> bool:
        if self.real:
            assert self.sidecar.process is not None
            return self.sidecar.process.poll() is not None
        return self.forks.dead(self.pid)

    def ready(self, lives: int = 1) -> dict[str, str]:
        """Waits for the ready line of this life."""
        end = time.monotonic() + 2 * PATIENCE_S
        while (lines := self.out.read_text().splitlines(keepends=True))[lives - 1 :] == [] or not lines[lives - 1].endswith("\n"):
            if self.forks.dead(self.pid, 0.002):
                raise Died
            assert time.monotonic() < end, f"not ready: {self.sidecar.log()[-2000:]}"
        return dict(word.split("=", 1) for word in lines[lives - 1].split()[2:])

    def kill(self) -> None:
        pid, self.pid = self.pid, 0
        self.forks.kill(pid)

    def ended(self) -> int:
        assert self.forks.dead(self.pid, SECONDS_TO_DIE), f"it does not end: {self.sidecar.log()[-2000:]}"
        pid, self.pid = self.pid, 0
        return self.forks.reap(pid)

    def member(self) -> None:
        """A process of ours that lives, and whose lock is taken in this run directory."""
        if not self.holder:
            self.lock = secrets.token_bytes(16)
            self.holder = self.forks.start("hold", path=str(self.sidecar.run_directory / "members" / self.lock.hex()))

    def end_member(self) -> None:
        if self.holder:
            self.forks.kill(self.holder)
            self.holder = 0
        self.pins, self.in_flight = {}, None

    # ---- what we say ------------------------------------------------------------------------------------------------------------------
    @contextmanager
    def talk(self) -> Iterator[Talk]:
        with Talk(self.sidecar.endpoint, self.died) as wire:
            yield wire

    def hello(self, wire: Wire, client: bytes = b"c", lock: bytes | None = None) -> int:
        """Our member, or another one; the number of LAYOUT."""
        said = wire.ask(m.Hello([2, 0], client * 16, client * 16, lock or self.lock, self.holder, "test"))
        assert isinstance(said, m.HelloReply), said
        registered = wire.ask(m.Register(LAYOUT.encode()))
        assert isinstance(registered, m.RegisterReply), registered
        return registered.index

    def reserve(self, wire: Wire, index: int, numbers: list[int], tag: int) -> m.HandlesReply:
        granted = wire.ask(m.Reserve(index, tag, b"".join(map(key, numbers)), bytes(2 * len(numbers))))
        assert isinstance(granted, m.HandlesReply)
        assert not any(granted.statuses), granted
        return granted

    def write(self, wire: Wire, index: int, numbers: list[int], tag: int) -> None:
        granted = self.reserve(wire, index, numbers, tag)
        self.commit(wire, numbers, granted, tag)

    def commit(self, wire: Wire, numbers: list[int], granted: m.HandlesReply, tag: int) -> None:
        with self.sidecar.pool_path.open("r+b", buffering=0) as pool:
            for i, number in enumerate(numbers):
                pool.seek(int.from_bytes(granted.pages[4 * i : 4 * i + 4], "little") * 4096)
                pool.write(content(number))
        joined, zeros = b"".join(map(key, numbers)), bytes(8 * len(numbers))
        done = wire.ask(m.Commit(tag, joined, bytes(2 * len(numbers)), granted.generations, zeros))
        assert done == m.StatusesReply(bytes(len(numbers))), done
        self.present.update(numbers)

    def pin(self, wire: Wire, index: int, numbers: list[int], tag: int) -> m.HandlesReply:
        held = wire.ask(m.Acquire(index, tag, b"".join(map(key, numbers))))
        assert isinstance(held, m.HandlesReply)
        if pinned := held.statuses.count(Status.OK):
            self.pins[tag] = pinned
        return held

    def unpin(self, wire: Wire, tag: int) -> None:
        count = self.pins.pop(tag, 0)
        assert wire.ask(m.Release(tag.to_bytes(8, "little"))) == m.CountReply(count)

    def hold_some(self, wire: Wire, index: int) -> None:
        """Blocks, pins and a shard in flight, as a running engine has them."""
        self.write(wire, index, list(range(1, 9)), 1)
        self.pin(wire, index, [1, 2], 7)
        granted = self.reserve(wire, index, [50], 8)
        self.in_flight = (50, granted.pages, granted.generations)

    def say_everything(self, wire: Wire, index: int) -> None:
        """Every verb, and a member that dies. A block that the sidecar may or may not have taken away is in neither set."""
        ask = wire.ask
        if self.disk is not None:
            self.until_tier_serves(wire)
            self.prefetch(wire, index, sorted(self.on_disk)[:4])
        self.write(wire, index, [20, 21, 22], 2)
        held = self.pin(wire, index, [20, 21, 99], 3)
        self.unpin(wire, 3)
        assert isinstance(ask(m.Lookup(index, key(20) + key(98))), m.LookupReply)
        self.reserve(wire, index, [23], 4)
        assert ask(m.Abort((4).to_bytes(8, "little"))) == m.CountReply(1)
        self.present.discard(21)
        assert ask(m.Discard(index, key(21), held.generations[8:16])) == m.CountReply(1)
        self.gone.add(21)
        other = ask(m.Register(OTHER.encode()))
        assert isinstance(other, m.RegisterReply)
        half = ask(m.Reserve(other.index, 5, key(30) * 2, b"\0\0\1\0"))
        assert isinstance(half, m.HandlesReply)
        assert ask(m.Commit(5, key(30), bytes(2), half.generations[:8], bytes(8))) == m.StatusesReply(b"\0")
        assert isinstance(ask(m.Clear(other.index)), m.CountReply)
        assert isinstance(ask(m.Lookup(77, key(1))), m.ErrorReply)
        wire.send(b"\xc1")
        assert isinstance(m.decode_reply(wire.receive(), m.StatusRequest())[2], m.ErrorReply)
        name = secrets.token_bytes(16)
        dying = self.forks.start("hold", path=str(self.sidecar.run_directory / "members" / name.hex()))
        with self.talk() as theirs:
            try:
                self.reserve(theirs, self.hello(theirs, b"d", name), [40, 41], 6)
            finally:
                self.forks.kill(dying)
        self.until(wire, lambda status: status["members_gone"] > 0)
        with self.talk() as theirs:
            self.hello(theirs, b"e")
            assert theirs.ask(m.Bye()) == m.Empty()

    def until_tier_serves(self, wire: Wire) -> None:
        self.until(wire, lambda status: status["tiers"][0]["directories"][0]["state"] == "serving" and status["tiers"][0]["quiet"])

    def prefetch(self, wire: Wire, index: int, numbers: list[int]) -> None:
        """They come."""
        came = wire.ask(m.Prefetch(index, b"".join(map(key, numbers)), int(PATIENCE_S * 1000)))
        assert came == m.StatusesReply(bytes(len(numbers))), f"{numbers}: {came}"

    def until(self, wire: Wire, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Waits for a status of which it holds."""
        end = time.monotonic() + PATIENCE_S
        while not condition(status := self.status(wire)):
            assert time.monotonic() < end, status
            time.sleep(0.005)

    @staticmethod
    def status(wire: Wire) -> dict[str, Any]:
        reply = wire.ask(m.StatusRequest())
        assert isinstance(reply, m.StatusReply)
        return reply.status

    # ---- what we demand ---------------------------------------------------------------------------------------------------------------
    def nothing_wrong(self, wire: Wire, all_or_nothing: bool = False) -> None:
        """Every block that must be there is there, byte for byte, and what may be there is right; pins and the shard in flight are kept.
        `all_or_nothing`: the pool was on its way out, so it may be a new one."""
        index = self.hello(wire)
        new = all_or_nothing and not self.status(wire)["pool"]["adopted_blocks"]
        if self.disk is not None:
            self.until_tier_serves(wire)
        if not new:
            self.pay(wire)
            self.until(wire, lambda status: status["pins"] == sum(self.pins.values()))
            held = {0, 1} if self.committing else {int(self.in_flight is not None)}
            self.until(wire, lambda status: status["shards_in_flight"] in held)
            if self.in_flight is not None and self.status(wire)["shards_in_flight"]:
                number, pages, generations = self.in_flight
                self.committing = True
                self.commit(wire, [number], m.HandlesReply(b"\0", pages, generations), 8)
            self.in_flight, self.committing = None, False
        if self.disk is not None:
            self.prefetch(wire, index, sorted(self.on_disk))
        numbers = range(1, 100)
        held = wire.ask(m.Acquire(index, 9, b"".join(map(key, numbers))))
        assert isinstance(held, m.HandlesReply)
        pages = memoryview(held.pages).cast("I")
        with self.sidecar.pool_path.open("rb", buffering=0) as pool:
            for i, number in enumerate(numbers):
                there = held.statuses[i] == Status.OK
                assert there or (new and number not in self.on_disk) or number not in self.present, f"block {number} is lost"
                assert not (there and number in self.gone), f"block {number} is back"
                if there:
                    pool.seek(pages[i] * 4096)
                    assert pool.read(LAYOUT.shard_bytes) == content(number), f"block {number} has wrong bytes"
        wire.ask(m.Release((9).to_bytes(8, "little")))
        if new:
            self.present = {number for i, number in enumerate(numbers) if held.statuses[i] == Status.OK}

    def pay(self, wire: Wire) -> None:
        """Gives back what requests without an answer may hold, as a client does."""
        in_flight = {8} if self.in_flight is not None else set()
        for verb, tags in ((m.Release, {3, 7, 9} - self.pins.keys()), (m.Abort, {1, 2, 4, 5, 8} - in_flight)):
            assert isinstance(wire.ask(verb(b"".join(tag.to_bytes(8, "little") for tag in tags))), m.CountReply)

    def files_in_use(self) -> list[str]:
        return sorted(name for name in os.listdir("/dev/shm") if self.sidecar.pool_name in name)

    def left_in_run_directory(self) -> set[str]:
        return {path.name for path in self.sidecar.run_directory.iterdir()}


# ---- the starts that are looked at ------------------------------------------------------------------------------------------------------
def on_nothing(folder: Path, forks: Forks) -> World:
    return World(folder, forks)


def on_a_pool_of_before(folder: Path, forks: Forks) -> World:
    """With blocks, with what a living member holds, and with what one holds that died since."""
    world = World(folder, forks)
    world.serve(traced=False)
    world.ready()
    world.member()
    name = secrets.token_bytes(16)
    dying = forks.start("hold", path=str(world.sidecar.run_directory / "members" / name.hex()))
    with world.talk() as wire:
        world.hold_some(wire, world.hello(wire))
        with world.talk() as theirs:
            index = world.hello(theirs, b"d", name)
            world.reserve(theirs, index, [40, 41], 6)
            theirs.ask(m.Acquire(index, 6, key(3)))
    world.kill()
    forks.kill(dying)
    world.remember()
    return world


def on_a_pool_of_another_size(folder: Path, forks: Forks) -> World:
    world = World(folder, forks, OTHER_SIZE)
    left_by_nobody_alive(world)
    world.sidecar.arguments += ["--pool-size", POOL_SIZE]
    return world


def on_a_pool_of_another_name(folder: Path, forks: Forks) -> World:
    world = World(folder, forks)
    left_by_nobody_alive(world)
    name = f"{world.sidecar.pool_name}-2"
    world.sidecar.arguments += ["--pool-name", name]
    world.sidecar.pool_path, world.sidecar.tables_path = Path("/dev/shm", name), Path("/dev/shm", f"{name}.tables")
    return world


def left_by_nobody_alive(world: World) -> None:
    """A pool with blocks that the next start has no use for."""
    world.serve(traced=False)
    world.ready()
    world.member()
    with world.talk() as wire:
        world.hold_some(wire, world.hello(wire))
    world.kill()
    world.end_member()
    world.present = set()
    world.remember()


def on_a_disk_of_before(folder: Path, forks: Forks) -> World:
    """With blocks that a sidecar had which ended well."""
    world = World(folder, forks, disk=folder / "disk")
    world.serve(traced=False)
    world.ready()
    world.member()
    with world.talk() as wire:
        index = world.hello(wire)
        world.until_tier_serves(wire)
        world.write(wire, index, list(range(60, 68)), 1)
    os.kill(world.pid, signal.SIGTERM)
    assert world.ended() == 0, world.sidecar.log()[-2000:]
    world.end_member()
    world.on_disk = set(world.present)
    world.remember()
    return world


STARTS = [on_nothing, on_a_pool_of_before, on_a_pool_of_another_size, on_a_pool_of_another_name, on_a_disk_of_before]


# ---- a trial ---------------------------------------------------------------------------------------------------------------------------
STAGES = ["start", "serve", "restart", "end"]


def whole_life(world: World) -> dict[str, int]:
    """Start, work, restart, work and end: when each stage began that the sidecar came to, and "unharmed" where it came to its end."""
    stages = {"start": 0}
    try:
        world.ready()
        stages["serve"] = time.monotonic_ns()
        world.member()
        with world.talk() as wire:
            index = world.hello(wire)
            if not world.pins:
                world.hold_some(wire, index)
            world.say_everything(wire, index)
        stages["restart"] = time.monotonic_ns()
        os.kill(world.pid, signal.SIGHUP)
        world.ready(2)
        with world.talk() as wire:
            world.nothing_wrong(wire)
        stages["end"] = time.monotonic_ns()
        os.kill(world.pid, signal.SIGTERM)
        if world.ended() == 0:
            stages["unharmed"] = time.monotonic_ns()
    except Died:
        pass
    return stages


def trial(world: World, keeps: bool, target: tuple[int, str, int], times: int, real: bool) -> str:
    """`keeps`: the world's member lives on from trial to trial. `real`: the plain start is a process of its own."""
    world.restore()
    world.serve(target, times)
    stage = [*whole_life(world)][-1]
    if world.pid:
        code = world.ended()
        assert code == -signal.SIGKILL, f"ended with {code}: {world.sidecar.log()[-2000:]}"
    if stage in ("serve", "restart"):
        assert (found := faults_after_repair(world.sidecar.tables_path)) == [], found
    plain_start(world, stage in ("end", "unharmed"), real)
    if not keeps:
        world.end_member()
    return stage


def plain_start(world: World, all_or_nothing: bool, real: bool) -> None:
    """Serves what was left, and leaves nothing itself."""
    world.real = real
    if real:
        world.sidecar.start()
    else:
        world.serve(traced=False)
        world.ready()
    world.member()
    with world.talk() as wire:
        world.nothing_wrong(wire, all_or_nothing)
    paths, more = [world.sidecar.pool_path, world.sidecar.tables_path], set()
    if world.disk is not None:
        paths, more = [*paths, world.sidecar.index_path], {"tiers"}
    assert world.files_in_use() == sorted(path.name for path in paths)
    assert world.left_in_run_directory() <= {"lock", "members", "control.sock", "attach.sock"} | more
    if real:
        stopped = hostkv("stop", "--endpoint", world.sidecar.endpoint)
        assert stopped.returncode == 0, stopped.stderr
        world.sidecar.wait()
    else:
        os.kill(world.pid, signal.SIGTERM)
        assert world.ended() == 0, world.sidecar.log()[-2000:]
    world.real = False
    assert world.files_in_use() == []
    assert world.left_in_run_directory() == {"lock", "members"}
    if world.disk is not None:
        all_is_on_disk(world)


def all_is_on_disk(world: World) -> None:
    """It ended well, so the next one finds there what it had."""
    world.on_disk, world.pins, world.in_flight = set(world.present), {}, None
    world.serve(traced=False)
    world.ready()
    with world.talk() as wire:
        world.nothing_wrong(wire, all_or_nothing=True)
    world.kill()


class Point(NamedTuple):
    """Where to kill: a line in a life of a sidecar that starts in a world, the stage in which it first runs, and how often it ran."""

    world: int
    stage: str
    line: tuple[int, str, int]
    ran: int


def points_of(number: int, world: World, folder: Path, keeps: bool) -> list[Point]:
    """Every line that such a sidecar runs, by letting one live."""
    world.restore()
    record = folder / "record"
    world.serve(record=record)
    stages = whole_life(world)
    assert "unharmed" in stages, f"{stages}: {world.sidecar.log()[-2000:]}"
    if not keeps:
        world.end_member()
    points = []
    for life, file, line, count, first_ns in json.loads(record.read_text()):
        stage = max((name for name in STAGES if stages[name] <= first_ns), key=STAGES.index)
        points.append(Point(number, stage, (life, file, line), count))
    return points


def choose(points: list[Point], trials: int, draw: random.Random) -> list[Point]:
    """As many of each stage, evenly over the lines of it."""
    chosen = []
    for n, stage in enumerate(STAGES):
        some = [point for point in points if point.stage == stage]
        count = trials // len(STAGES) + (n < trials % len(STAGES))
        shift = draw.random()
        chosen += [some[int((i + shift) * len(some) / count) % len(some)] for i in range(count)]
    return chosen


def at_any_line(folder: Path, trials: int, seed: int) -> None:
    """`trials` 0: one at every line."""
    draw = random.Random(seed)
    began_s = time.monotonic()
    stages: dict[str, int] = {}
    with ExitStack() as stack:
        forks = stack.enter_context(Forks())
        points, worlds = [], []
        for n, start in enumerate(STARTS):
            place = folder / str(n)
            worlds.append(stack.enter_context(start(place, forks)))
            found = points_of(n, worlds[n], place, start is on_a_pool_of_before)
            files = TIER_FILES | LIFE_FILES if start is on_a_disk_of_before else LIFE_FILES
            points += [point for point in found if start is on_a_pool_of_before or point.line[1] in files]
        chosen = choose(points, trials, draw) if trials else points
        print(f"seed {seed}: {len(chosen)} kills at {len(points)} points (start, life, line)", flush=True)
        for i, point in enumerate(chosen):
            times = draw.randint(1, min(point.ran, 3)) if i % 2 else 1
            try:
                stage = trial(worlds[point.world], STARTS[point.world] is on_a_pool_of_before, point.line, times, real=i % 20 == 19)
            except BaseException:
                print(f"trial {i}: {STARTS[point.world].__name__}, to be killed at {point}, the {times}. time", flush=True)
                raise
            stages[stage] = stages.get(stage, 0) + 1
            if i % 100 == 99:
                print(f"{i + 1} kills in {time.monotonic() - began_s:.0f} s", flush=True)
    where = ", ".join(f"{count} in {stage}" if stage != "unharmed" else f"{count} not met" for stage, count in stages.items())
    print(f"{len(chosen)} kills in {time.monotonic() - began_s:.0f} s: {where}", flush=True)
    assert stages.keys() >= set(STAGES), "this run shows nothing"
    assert stages.get("unharmed", 0) <= len(chosen) // 10, "too few of them were killed"


# ---- from outside ------------------------------------------------------------------------------------------------------------------------
def from_outside(folder: Path, kills: int, seed: int) -> None:
    """Real processes, by a timer: one after the other on what the one before left, half of them on a pool of the right size, where blocks
    must stay, and half on one of another size, which takes memory."""
    draw = random.Random(seed)
    began_s = time.monotonic()
    hung_up = 0
    with Forks() as forks, on_a_pool_of_before(folder / "same", forks) as world:
        world.restore()
        for i in range(kills // 2):
            process = world.sidecar.launch()
            if i % 3 == 2:
                assert process.stdout is not None
                assert process.stdout.readline().startswith(b"hostkv ready")
                process.send_signal(signal.SIGHUP)
                hung_up += 1
            with suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0, 0.5))
            assert process.poll() is None, world.sidecar.log()[-2000:]
            world.sidecar.kill()
            assert (found := faults_after_repair(world.sidecar.tables_path)) == [], found
        plain_start(world, False, real=True)
    with Sidecar(folder / "other", start=False) as sidecar:
        for i in range(kills - kills // 2):
            sidecar.arguments += ["--pool-size", ("256MiB", "128MiB")[i % 2]]
            process = sidecar.launch()
            with suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0.1, 0.6))
            assert process.poll() is None, sidecar.log()[-2000:]
            sidecar.kill()
        sidecar.arguments += ["--pool-size", "64MiB"]
        sidecar.start()
        assert sidecar.pool_path.stat().st_size == 64 << 20
        assert sidecar.stop() == 0
        assert [name for name in os.listdir("/dev/shm") if sidecar.pool_name in name] == []
    print(f"{kills} kills from outside, {hung_up} after SIGHUP, in {time.monotonic() - began_s:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.killed")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--all", action="store_true", help="one trial at every line")
    parser.add_argument("--outside", type=int, default=24, help="real processes that are killed by a timer")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostkv-") as folder:
        at_any_line(Path(folder), 0 if options.all else options.trials, options.seed)
        from_outside(Path(folder), options.outside, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
