"""What others can make the sidecar hold, what the system refuses it or an engine, and shared memory that fills up: real processes."""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hostkv.connector import Client, Store
from hostkv.connector.member import lock_name
from hostkv.schemas import messages as m
from hostkv.sidecar import limits, loop

from tests.crash.puppet import LAYOUT, Puppet
from tests.support import LIFE_S, PATIENCE_S, Sidecar, until

IDS = [b"%d" % i for i in range(8)]
pytestmark = pytest.mark.usefixtures("patient_clients")


def content(block_id: bytes) -> bytes:
    return random.Random(block_id).randbytes(LAYOUT.shard_bytes)


def save(store: Store, ids: list[bytes]) -> list[str]:
    return store.wait(store.dump(ids, 0, [[content(i)] for i in ids]), PATIENCE_S)


def loads_exactly(store: Store, ids: list[bytes]) -> bool:
    buffers = [[bytearray(LAYOUT.shard_bytes)] for _ in ids]
    store.wait(store.load(ids, 0, buffers), PATIENCE_S)
    return [bytes(row[0]) for row in buffers] == [content(i) for i in ids]


class Wrapped(Sidecar):
    """Started by a shell that first runs `before`."""

    def __init__(self, directory: Path, before: str, **options: str) -> None:
        self.before = before
        super().__init__(directory, **options)  # type: ignore[arg-type]

    def launch(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*shell(self.before), sys.executable, "-m", "hostkv.sidecar.cli", "serve", *self.arguments],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        return self.process


def shell(before: str) -> list[str]:
    return ["sh", "-c", f'{before} && exec "$@"', "sh"]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, pool_size="64MiB") as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with Client(sidecar.endpoint) as client:
        yield client


@pytest.fixture
def store(client: Client) -> Store:
    return client.open(LAYOUT)


class Zmtp:
    """A connection that speaks ZeroMQ's wire protocol itself (ZMTP 3.0, NULL), and so can leave a message unfinished and replies unread."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(sidecar.run_directory / "control.sock"))
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        self.socket.sendall(b"\x04" + bytes([len(_READY)]) + _READY)
        _, size = self._read(64 + 2)[64:]  # a frame that overtakes the other's READY ends the connection
        self._read(size)

    def _read(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            got += (piece := self.socket.recv(size - len(got)))
            assert piece, "the connection was closed"
        return got

    def frame(self, payload: bytes, more: bool) -> None:
        self.socket.sendall(bytes([2 | more]) + struct.pack(">Q", len(payload)) + payload)

    def close(self) -> None:
        self.socket.close()


_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + bytes(4)


def own_memory(pid: int) -> int:
    """Bytes beside pool and tables."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError


def connections(pid: int) -> int:
    """Not all that is open: files are, for a moment, to look at locks and memory."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(fd).startswith("socket:")
    return count


def is_between(pid: int, count: int) -> bool:
    """Whether it has so many connections, and descriptors to spare; else it will restart."""
    lowest_free = next((n for n in range(64) if not os.path.lexists(f"/proc/{pid}/fd/{n}")), 64)
    return connections(pid) >= count and lowest_free < 64 - limits.SPARE_FILES


def has_restarted(sidecar: Sidecar) -> bool:
    return sidecar.log().count(" ready ") > 1


# ---- memory --------------------------------------------------------------------------------------------------------------------------
def test_a_message_without_end_costs_a_restart_and_nobody_a_block(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    pid, before = sidecar.pid, own_memory(sidecar.pid)
    piece = bytes(m.MAX_MESSAGE_BYTES)
    endless = Zmtp(sidecar)
    with suppress(OSError):  # the end of the connection
        while own_memory(pid) < before + limits.MEMORY_BYTES + (64 << 20) and not has_restarted(sidecar):
            endless.frame(piece, more=True)
    until(lambda: has_restarted(sidecar), sidecar.log)
    endless.close()
    assert "limit exceeded" in sidecar.log()
    assert "requests that it does not finish" in sidecar.log()
    until(client.serving)
    assert sidecar.pid == pid
    assert own_memory(pid) < before + (64 << 20)
    assert loads_exactly(store, IDS)
    assert save(store, [b"another"]) == ["committed"]
    assert client.counters.reconnects == 1


def test_a_message_of_very_many_frames_costs_a_restart_and_nobody_a_wait(sidecar: Sidecar, client: Client, store: Store) -> None:
    """They come one by one, and nobody else is answered before the last."""
    save(store, IDS)
    flood = Zmtp(sidecar)
    for frames in (loop.MAX_FRAMES, loop.MAX_FRAMES + 1):
        assert not has_restarted(sidecar)
        flood.socket.sendall(b"\1\0" * (frames - 1) + b"\0\0")
        if frames == loop.MAX_FRAMES:
            until(lambda: client.status()["errors"]["BAD_MESSAGE"] == 1, lambda: f"{client.status()['errors']} {sidecar.log()}")
    until(lambda: has_restarted(sidecar), sidecar.log)
    flood.close()
    assert f"a message of more than {loop.MAX_FRAMES} frames" in sidecar.log()
    until(client.serving)
    assert loads_exactly(store, IDS)


def test_one_connection_that_reads_no_replies_holds_little_memory(sidecar: Sidecar, store: Store) -> None:
    """Of a member, so that its replies are large."""
    save(store, IDS)
    before = own_memory(sidecar.pid)
    deaf = Zmtp(sidecar)
    lock = lock_name(str(sidecar.run_directory))
    deaf.frame(m.encode_request(m.Hello([2, 0], b"d" * 16, b"d" * 16, lock, 1, "deaf"), 1), more=False)
    deaf.frame(m.encode_request(m.Register(LAYOUT.encode()), 2), more=False)
    question = m.encode_request(m.Acquire(0, 1, secrets.token_bytes(32 * m.MAX_KEYS)), 3)
    stop, most = threading.Event(), 0

    def flood() -> None:
        while not stop.is_set():
            try:
                deaf.frame(question, more=False)
            except OSError:
                return

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for n in range(1, 6):
            sidecar.until(lambda n=n: sidecar.status()["requests"]["acquire"] > n * 200)  # type: ignore[misc]
            most = max(most, own_memory(sidecar.pid) - before)
            assert loads_exactly(store, IDS)
    finally:
        stop.set()
        deaf.socket.shutdown(socket.SHUT_RDWR)
        thread.join()
        deaf.close()
    assert sidecar.status()["items"]["missed"] > 0, "its replies were large"
    assert "connection forgotten" in sidecar.log()
    assert most < loop.REQUESTS_QUEUED * m.MAX_FRAME_BYTES + (16 << 20)


def test_a_thousand_connections_that_say_nothing_keep_nobody_from_working(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, memory = connections(sidecar.pid), own_memory(sidecar.pid)
    with ExitStack() as silent:
        silent.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for i in range(1000):
            if i % 2:
                silent.callback(Zmtp(sidecar).close)
            else:
                mute = socket.socket(socket.AF_UNIX)
                silent.callback(mute.close)
                mute.settimeout(PATIENCE_S)
                until(lambda mute=mute: connected(mute, str(sidecar.run_directory / "control.sock")))  # type: ignore[misc]
        until(lambda: connections(sidecar.pid) >= files + 1000)
        assert own_memory(sidecar.pid) - memory < limits.MEMORY_BYTES // 10
        assert loads_exactly(store, IDS)
        with Client(sidecar.endpoint) as another:
            assert save(another.open(LAYOUT), [b"another"]) == ["committed"]
    until(lambda: connections(sidecar.pid) < files + 10)
    assert not has_restarted(sidecar)


def connected(connection: socket.socket, path: str) -> bool:
    try:
        connection.connect(path)
    except BlockingIOError:
        return False
    return True


# ---- descriptors and locked memory -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["one after the other", "all at once"])
def test_a_sidecar_with_few_descriptors_works_and_gets_rid_of_who_takes_them_all(tmp_path: Path, how: str) -> None:
    """One after the other, it sees them coming; all at once, ZeroMQ aborts. Both are a restart on the same pool."""
    with Wrapped(tmp_path, "ulimit -n 64", pool_size="64MiB") as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        assert save(store, IDS) == ["committed"] * len(IDS)
        pid = sidecar.pid
        with Puppet(sidecar.endpoint) as dying, ExitStack() as silent:
            dying.do("reserve(client, store, [b'x'], 5)")
            before = connections(pid)
            for count in range(1, 65):
                mute = socket.socket(socket.AF_UNIX)
                silent.callback(mute.close)
                mute.setblocking(False)
                mute.connect_ex(str(sidecar.run_directory / "control.sock"))
                if how != "all at once":
                    until(lambda count=count: has_restarted(sidecar) or is_between(pid, before + count))  # type: ignore[misc]
                    if has_restarted(sidecar):
                        break
            until(lambda: has_restarted(sidecar), sidecar.log)
            assert "ulimit -n is 64" in sidecar.log() or (how == "all at once" and "ZeroMQ ended itself" in sidecar.log())
            dying.kill()
        until(client.serving)
        assert sidecar.pid == pid
        assert sidecar.process is not None
        assert sidecar.process.poll() is None
        assert loads_exactly(store, IDS)
        until(lambda: sidecar.status()["shards_in_flight"] == 0)
        assert sidecar.stop() == 0, "signals are as they were"


def test_a_flood_of_connections_makes_it_restart_again_and_again_and_does_not_end_it(tmp_path: Path) -> None:
    """ZeroMQ aborts at any moment then: while it starts, serves, and closes its sockets for the next restart."""
    with Wrapped(tmp_path, "ulimit -n 64", pool_size="16MiB") as sidecar:
        over = threading.Event()

        def flood() -> None:
            held: list[socket.socket] = []
            while not over.is_set():
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].settimeout(0.2)
                with suppress(OSError):  # while nobody listens
                    held[-1].connect(str(sidecar.run_directory / "control.sock"))
                    if len(held) < 300:
                        continue
                while held:
                    held.pop().close()

        threads = [threading.Thread(target=flood) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for start in range(2, 8):
                until(lambda start=start: sidecar.log().count(" ready ") >= start, sidecar.log)  # type: ignore[misc]
        finally:
            over.set()
            for thread in threads:
                thread.join()
        with Client(sidecar.endpoint) as client:
            until(client.serving, sidecar.log)


def test_a_sidecar_whose_descriptors_do_not_suffice_says_so(tmp_path: Path) -> None:
    for files in (8, 16, 24):
        with Wrapped(tmp_path, f"ulimit -n {files}", pool_size="64MiB", start=False) as sidecar:  # type: ignore[arg-type]
            process = sidecar.launch()
            out, _ = process.communicate(timeout=LIFE_S)
            assert (process.returncode, out) == (2, b""), sidecar.log()
            assert "Traceback" not in sidecar.log()
            assert "ulimit -n" in sidecar.log().splitlines()[-1]
            assert not sidecar.pool_path.exists()


def test_limits_of_the_system_stop_neither_a_sidecar_nor_an_engine(tmp_path: Path) -> None:
    """Locked memory is what device drivers need, and nobody else."""
    with Wrapped(tmp_path, "ulimit -l 64 && ulimit -n 64", pool_size="64MiB") as sidecar:
        with Puppet(sidecar.endpoint, shell("ulimit -l 64 && ulimit -n 64")) as engine:
            assert engine.do(f"answer = save(store, {IDS!r})") == ["committed"] * len(IDS)
            assert engine.do(f"answer = load(store, {IDS!r})") == [True] * len(IDS)
            engine.do("files = []\ntry:\n    while True: files.append(os.dup(0))\nexcept OSError: pass")
            assert engine.do(f"answer = load(store, {IDS!r})") == [True] * len(IDS), "what is open stays so"
            engine.do(f"another = Client({sidecar.endpoint!r})")
            for _ in range(20):  # with ever more to spare
                assert engine.do("another._next_try_s = 0; answer = another.serving() or 'ulimit -n' in another.down_reason")
                engine.do("os.close(files.pop())")
            engine.do("for file in files: os.close(file)")
            engine.do("while not another.serving(): time.sleep(0.01)")
            assert engine.do(f"answer = load(another.open(LAYOUT), {IDS!r})") == [True] * len(IDS)


# ---- shared memory that is small, or fills up ------------------------------------------------------------------------------------------
@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 40 MiB."""
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here (as root it can): {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def on(tmpfs: Path, size: str) -> str:
    return f"pool: {{path: {tmpfs}, size: {size}}}\n"


def without_size(sidecar: Sidecar) -> Sidecar:
    at = sidecar.arguments.index("--pool-size")
    del sidecar.arguments[at : at + 2]
    return sidecar


def fill(directory: Path) -> int:
    """Takes the file system's last byte; how many bytes that were."""
    with (directory / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
        return file.tell()


@pytest.mark.parametrize("size", ["32MiB", "64MiB"])
def test_a_pool_for_which_shared_memory_has_no_room_is_refused_with_the_fix(tmp_path: Path, tmpfs: Path, size: str) -> None:
    (tmpfs / "others").write_bytes(bytes(16 << 20))
    with without_size(Sidecar(tmp_path, config=on(tmpfs, size), start=False)) as sidecar:
        process = sidecar.launch()
        out, _ = process.communicate(timeout=LIFE_S)
        assert (process.returncode, out) == (2, b"")
        last = sidecar.log().splitlines()[-1]
        assert f"{tmpfs} is too small" in last
        assert "remount" in last
        assert os.listdir(tmpfs) == ["others"]


def test_a_tmpfs_filled_by_others_after_the_start_kills_nobody(tmp_path: Path, tmpfs: Path) -> None:
    """All memory was taken. The run directory lies there as well: lock files, sockets and a restart must do without another page."""
    sidecar = without_size(Sidecar(tmpfs, config=on(tmpfs, "16MiB"), start=False))
    sidecar.log_path = tmp_path / "sidecar.log"
    with sidecar:
        sidecar.start()
        with Puppet(sidecar.endpoint) as engine:
            assert fill(tmpfs) > 1 << 20
            many = [b"%d" % i for i in range(40)]  # more than the pool holds
            for first in range(0, len(many), 4):
                assert engine.do(f"answer = save(store, {many[first : first + 4]!r})") == ["committed"] * 4
            last = many[-8:]
            assert engine.do(f"answer = load(store, {last!r})") == [True] * len(last)
            with Puppet() as newcomer:  # its lock file has no room for a heartbeat
                newcomer.do(f"client = Client({sidecar.endpoint!r}); store = client.open(LAYOUT)")
                serving, why = newcomer.do("answer = client.serving(), client.down_reason")
                assert serving is False
                assert "No space left" in why
                assert newcomer.do("answer = store.lookup([b'0'])") == [False]
                os.kill(sidecar.pid, signal.SIGHUP)
                until(lambda: has_restarted(sidecar), sidecar.log)
                engine.do("while not client.serving(): time.sleep(0.01)")
                assert engine.do(f"answer = load(store, {last!r})") == [True] * len(last)
                sidecar.kill()
                sidecar.start()
                engine.do("while not client.serving(): time.sleep(0.01)")
                assert engine.do(f"answer = load(store, {last!r})") == [True] * len(last)
                assert engine.do("answer = save(store, [b'new'])") == ["committed"]
                (tmpfs / "filler").unlink()
                newcomer.do("while not client.serving(): time.sleep(0.01)")
                assert newcomer.do(f"answer = load(store, {last[:2]!r})") == [True] * 2
            assert engine.process.poll() is None
        assert sidecar.stop() == 0
