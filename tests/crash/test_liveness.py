"""Who is certainly gone, and who only looks like it: real processes that are killed, stopped, forked, put into namespaces, or lose their
lock and live on. Nothing that may still be touched is given to others; all else comes back by itself."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hostkv.connector import Client, SidecarUnavailable, Store
from hostkv.connector.attach import attach
from hostkv.connector.member import MAX_LOCKS
from hostkv.sidecar import attach as attach_socket
from hostkv.sidecar import rundir
from hostkv.sidecar.core import DEVICE_WAIT_NS, SILENT_NS
from hostkv.sidecar.errors import StartupError

from tests.crash.puppet import LAYOUT, Puppet
from tests.support import LIFE_S, PATIENCE_S, Sidecar, until

IDS = [b"%d" % i for i in range(8)]
ROOT = Path(__file__).resolve().parents[2]
DEVICE_WAIT_S, SILENT_S = DEVICE_WAIT_NS / 1e9, SILENT_NS / 1e9
pytestmark = pytest.mark.usefixtures("patient_clients")


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, pool_size="64MiB") as sidecar:
        yield sidecar


@pytest.fixture
def patient_sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    """It waits for the packet of who connects to its attach socket and then gets no processor."""
    with Sidecar(tmp_path, start=False) as sidecar:
        sidecar.program(f"from hostkv.sidecar import attach; attach.WAIT_S = {LIFE_S}")
        sidecar.start()
        yield sidecar


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with Client(sidecar.endpoint) as client:
        yield client


@pytest.fixture
def store(client: Client) -> Store:
    return client.open(LAYOUT)


def save(store: Store, ids: list[bytes]) -> list[str]:
    return store.wait(store.dump(ids, 0, [[random.Random(i).randbytes(LAYOUT.shard_bytes)] for i in ids]), PATIENCE_S)


def locks(sidecar: Sidecar) -> set[str]:
    return {path.name for path in (sidecar.run_directory / "members").iterdir()}


def members(sidecar: Sidecar) -> dict[int, dict[str, Any]]:
    """By pid."""
    return {member["pid"]: member for session in sidecar.status()["sessions"] for member in session["members"]}


# ---- one lock per process ------------------------------------------------------------------------------------------------------------
def test_a_process_has_one_lock_file_however_many_clients_it_has(sidecar: Sidecar) -> None:
    with Puppet(sidecar.endpoint) as puppet:
        first = locks(sidecar)
        puppet.do(f"clients = [Client({sidecar.endpoint!r}) for _ in range(3)]; [each.open(LAYOUT) for each in clients]")
        assert len(sidecar.status()["sessions"]) == 4
        assert locks(sidecar) == first
        assert len(first) == 1
        puppet.do("[each.close() for each in clients]; reserve(client, store, [b'0'], 1)")
        assert sidecar.status()["shards_in_flight"] == 1, "closing clients does not drop the lock of the others"
        puppet.kill()
        until(lambda: sidecar.status()["sessions"] == [])


def test_pins_of_an_engine_of_several_processes_end_with_the_last_of_them(sidecar: Sidecar, store: Store) -> None:
    save(store, IDS[:2])
    session = secrets.token_bytes(16)
    make = f"client = Client({sidecar.endpoint!r}, session={session!r}); store = client.open(LAYOUT)"
    with Puppet() as scheduler, Puppet() as worker, Puppet() as another:
        for puppet in (scheduler, worker, another):
            puppet.do(make)
        scheduler.do("store.acquire([b'0', b'1'], 5)")
        worker.do("reserve(client, store, [b'x'], 6)")
        worker.kill()
        until(lambda: sidecar.status()["shards_in_flight"] == 0)
        scheduler.kill()
        until(lambda: sidecar.status()["members_gone"] == 2)
        assert sidecar.status()["pins"] == 2, "what the scheduler pinned may still be read by a worker"
        another.kill()
        until(lambda: sidecar.status()["pins"] == 0)


# ---- fork ----------------------------------------------------------------------------------------------------------------------------
FORK = """
child = os.fork()
if not child:
    try:
        obey(SPARE)
    finally:
        os._exit(0)
answer = child
"""


def test_a_parent_killed_while_its_forked_child_lives_on_gives_back_its_slots(sidecar: Sidecar, store: Store) -> None:
    save(store, IDS[:2])
    with Puppet(sidecar.endpoint) as parent:
        parent.do("reserve(client, store, [b'x', b'y'], 5); store.acquire([b'0', b'1'], 6); client.warm(30)")
        child = parent.understudy
        child.pid = parent.do(FORK)
        assert child.do("answer = client.status.__name__") == "status"
        assert sidecar.pool_name in Path(f"/proc/{parent.pid}/maps").read_text()
        assert sidecar.pool_name not in Path(f"/proc/{child.pid}/maps").read_text(), "the child cannot touch the pool"
        parent.process.kill()
        until(lambda: (sidecar.status()["shards_in_flight"], sidecar.status()["pins"]) == (0, 0))
        assert child.do("answer = os.getpid()") == child.pid
        assert save(store, [b"x", b"y"]) == ["committed", "committed"]


def test_a_child_that_writes_with_a_client_of_its_own_outlives_its_parent(sidecar: Sidecar, store: Store) -> None:
    with Puppet(sidecar.endpoint) as parent:
        parent.do("reserve(client, store, [b'x', b'y'], 5)")
        child = parent.understudy
        child.pid = parent.do(FORK)
        child.do(f"client = Client({sidecar.endpoint!r}); store = client.open(LAYOUT)")
        child.do(HALF_WRITTEN)
        assert len(locks(sidecar)) == 3  # ours, the parent's, the child's
        assert sidecar.status()["shards_in_flight"] == 4
        parent.process.kill()
        until(lambda: sidecar.status()["shards_in_flight"] == 2)
        assert save(store, [b"x", b"y", b"w0"]) == ["committed", "committed", "busy"]
        assert child.do(REST_WRITTEN) == [0, 0]
        assert child.do("answer = load(store, [b'w0', b'w1'])") == [True, True]


# ---- stopped -------------------------------------------------------------------------------------------------------------------------
HALF_WRITTEN = """
import array
wanted = [b"w0", b"w1"]
granted = reserve(client, store, wanted, 7)
offsets = array.array("Q", [page * 4096 for page in memoryview(granted.pages).cast("I")])
sources = [bytearray(content(i)) for i in wanted]
half = array.array("Q", [LAYOUT.shard_bytes // 2])
addresses = array.array("Q", [row[0] for row in rows(sources)])
client.mapped().pool.copy_in(offsets, addresses, half)
"""
REST_WRITTEN = """
middle = lambda values: array.array("Q", [value + half[0] for value in values])
client.mapped().pool.copy_in(middle(offsets), middle(addresses), half)
answer = commit(client, store, wanted, 7, granted)
"""
READ = """
targets = [bytearray(LAYOUT.shard_bytes) for _ in ids]
failed = store.read(handles, 0, rows(targets))
exact = [bytes(target) == content(i) for i, target in zip(ids, targets)]
answer = failed, exact
"""
STOP_BEFORE_THE_CHECK = """
class View:
    def __init__(self, view): self.view = view
    def __getattr__(self, name): return getattr(self.view, name)
    def check(self, *arguments):
        stop_here()
        return self.view.check(*arguments)
client.mapped().view = View(client.mapped().view)
"""
STOP_IN_THE_COPY = """
class Pool:
    def __init__(self, pool): self.pool = pool
    def __getattr__(self, name): return getattr(self.pool, name)
    def copy_out(self, offsets, addresses, pieces, *rest):
        half = len(offsets) // 2
        self.pool.copy_out(offsets[:half], addresses[:half], pieces, *rest)
        stop_here()
        return self.pool.copy_out(offsets[half:], addresses[half:], pieces, *rest)
client.mapped().pool = Pool(client.mapped().pool)
"""


def test_members_stopped_past_every_limit_deliver_exact_bytes_or_report_failure(sidecar: Sidecar, store: Store) -> None:
    """All at once, since each of them has to be silent for ten seconds: readers stopped before, in and after their copy, a writer stopped
    in the middle of its copy; and one who is not silent, although no thread of its Python runs."""
    save(store, IDS)
    save(store, [b"kept0", b"kept1"])
    pin = f"ids = {IDS!r}; handles = store.acquire(ids, 5); answer = handles.run"
    with (
        Puppet(sidecar.endpoint) as before,
        Puppet(sidecar.endpoint) as within,
        Puppet(sidecar.endpoint) as after,
        Puppet(sidecar.endpoint) as writer,
        Puppet(sidecar.endpoint) as busy,
    ):
        readers = (before, within, after)
        for reader in readers:
            assert reader.do(pin) == len(IDS)
        assert busy.do("ids = [b'kept0', b'kept1']; handles = store.acquire(ids, 5); answer = handles.run") == 2
        busy.send("ctypes.PyDLL(None).sleep(15)")  # keeps the GIL
        before.stop()
        within.do(STOP_IN_THE_COPY)
        after.do(STOP_BEFORE_THE_CHECK)
        writer.do(HALF_WRITTEN)
        writer.stop()
        for reader in (within, after):
            reader.send(READ)
            reader.until_stopped()
        assert sidecar.status()["pins"] == 3 * len(IDS) + 2
        until(lambda: sidecar.status()["sessions_silenced"] == 3)
        status = sidecar.status()
        assert status["pins"] == 2, "who holds the GIL is not silent"
        assert status["shards_in_flight"] == 2, "the slots of a writer are never given away by time"
        until(lambda: members(sidecar)[writer.pid]["silent_s"] >= 10)
        assert save(store, [b"w0"]) == ["busy"]
        slots = 64
        for i in range(slots - len(IDS) - 2 - 2 + 4):
            assert save(store, [b"other%d" % i]) == ["committed"]
        there = store.lookup(IDS)
        assert there.count(False) == 4, "half of what was pinned gave its slots to others"
        for reader in readers:
            reader.go_on()
        before.send(READ)
        for reader in readers:
            failed, exact = reader.answer()
            assert failed == [i for i, found in enumerate(there) if not found]
            assert all(exact[i] for i, found in enumerate(there) if found)
        writer.go_on()
        assert writer.do(REST_WRITTEN) == [0, 0]
        assert writer.do("answer = load(store, [b'w0', b'w1'])") == [True, True]
        busy.answer()
        assert busy.do(READ) == ([], [True, True])
        assert before.do(f"store.release([5]); answer = load(store, [{IDS[there.index(True)]!r}])") == [True], "who woke up works again"


def test_a_sidecar_stopped_for_longer_than_a_member_may_be_silent_silences_nobody(sidecar: Sidecar, client: Client, store: Store) -> None:
    """It has heard nothing itself; of a member that was stopped with it (a host that slept) too, for as long as it did not listen."""
    save(store, IDS)
    with Puppet(sidecar.endpoint) as reader:
        assert reader.do(f"ids = {IDS!r}; handles = store.acquire(ids, 5); answer = handles.run") == len(IDS)
        reader.stop()
        until(lambda: members(sidecar)[reader.pid]["silent_s"] > 0)
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            link = client.mapped()
            assert link is not None
            until(lambda: float(link.why_not().removeprefix("the sidecar gave no sign of life for ").removesuffix(" s")) >= 11)
        finally:
            os.kill(sidecar.pid, signal.SIGCONT)
        until(lambda: 0 < members(sidecar)[reader.pid]["silent_s"] < SILENT_S)
        reader.go_on()
        until(lambda: members(sidecar)[reader.pid]["silent_s"] == 0)
        assert sidecar.status()["sessions_silenced"] == 0
        assert sidecar.status()["pins"] == len(IDS)
        assert reader.do(READ) == ([], [True] * len(IDS))


# ---- devices -------------------------------------------------------------------------------------------------------------------------
LOSE_THE_LOCK = """
from hostkv.connector.member import _names
(where, name), = _names.items()
os.close(os.open(os.path.join(where[1], "members", name.hex()), os.O_RDONLY))  # closing any descriptor of a file drops its locks
"""


def test_slots_of_a_device_wait_for_the_end_of_its_process_and_not_for_that_of_its_lock(sidecar: Sidecar) -> None:
    with Puppet(sidecar.endpoint) as device, Puppet(sidecar.endpoint) as without, Puppet(sidecar.endpoint) as plain:
        without.do("os.pidfd_open = lambda pid: os.open('/nowhere', 0)")  # a kernel that has none
        for puppet in (device, without):
            puppet.do("client.attach_device()")
        assert [members(sidecar)[puppet.pid]["device"] for puppet in (device, without, plain)] == [True, True, False]
        os.kill(sidecar.pid, signal.SIGHUP)
        sidecar.until(lambda: sidecar.log().count(" ready ") == 2)
        for n, puppet in enumerate((device, without, plain)):
            puppet.do("while not client.serving(): time.sleep(0.01)")
            puppet.do(f"reserve(client, store, [b'{n}', b'more{n}'], 5)")
        assert [members(sidecar)[puppet.pid]["device"] for puppet in (device, without, plain)] == [True, True, False]
        assert sidecar.status()["shards_in_flight"] == 6
        plain.do(LOSE_THE_LOCK)
        until(lambda: sidecar.status()["members_gone"] == 1)
        assert plain.pid not in members(sidecar)
        assert sidecar.status()["shards_in_flight"] == 4
        device.do(LOSE_THE_LOCK)
        until(lambda: members(sidecar)[device.pid]["ending"])
        lost_s = time.monotonic()
        without.do(LOSE_THE_LOCK)
        until(lambda: sidecar.status()["members_gone"] == 2)
        assert time.monotonic() - lost_s >= DEVICE_WAIT_S
        assert without.pid not in members(sidecar)
        assert sidecar.status()["shards_in_flight"] == 2, "its process lives, so its driver may write"
        device.kill()
        until(lambda: sidecar.status()["shards_in_flight"] == 0)
        assert sidecar.status()["sessions"] == []


def test_a_device_that_died_while_no_sidecar_ran_is_given_its_time(sidecar: Sidecar) -> None:
    with Puppet(sidecar.endpoint) as device:
        device.do("client.attach_device(); reserve(client, store, [b'0', b'1'], 5)")
        sidecar.kill()
        device.kill()
        started_s = time.monotonic()
        sidecar.start()
        until(lambda: sidecar.status()["shards_in_flight"] == 0)
        assert time.monotonic() - started_s >= DEVICE_WAIT_S


def test_a_device_is_noted_again_where_its_member_is_a_new_one(sidecar: Sidecar) -> None:
    with Puppet(sidecar.endpoint) as device:
        device.do("client.attach_device()")
        sidecar.stop()
        sidecar.start()
        device.do("while not client.serving(): time.sleep(0.01)")
        until(lambda: members(sidecar)[device.pid]["device"])


def test_attaching_a_device_without_a_sidecar_is_refused(sidecar: Sidecar, client: Client) -> None:
    client.attach_device()
    assert members(sidecar)[os.getpid()]["device"]
    sidecar.stop()
    with pytest.raises(SidecarUnavailable):
        client.attach_device()
    with pytest.raises(SidecarUnavailable, match=r"attach\.sock"):
        attach(str(sidecar.run_directory), b"c" * 16, 1.0)


def open_files(pid: int) -> int:
    """Without those that a sidecar opens for a moment, to look at locks and memory."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            path = os.readlink(fd)
            count += not path.startswith("/proc/") and "/run/members" not in path
    return count


def packet(path: str, payload: bytes, fds: list[int]) -> bytes:
    """The answer to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(path)
        socket.send_fds(connection, [payload], fds)
        return connection.recv(16)


def test_a_device_is_told_of_again_while_the_sidecar_has_no_time_for_it(tmp_path: Path) -> None:
    path = str(tmp_path / "attach.sock")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        listener.settimeout(PATIENCE_S)
        listener.bind(path)
        listener.listen(0)
        other.connect(path)
        noted = pool.submit(attach, str(tmp_path), b"c" * 16, PATIENCE_S)
        time.sleep(0.2)  # time enough to find that there is no room
        for _ in range(2):  # the other one, and ours, unheard
            listener.accept()[0].close()
        with listener.accept()[0] as connection:
            connection.settimeout(PATIENCE_S)
            assert connection.recv(17) == b"c" * 16
            connection.send(b"\0")
        assert noted.result()


def test_the_attach_socket_answers_whatever_comes_and_keeps_nothing_of_it(patient_sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar = patient_sidecar
    path = str(sidecar.run_directory / "attach.sock")
    bare = open_files(sidecar.pid)
    client = Client(sidecar.endpoint)
    me, client_id = os.getpid(), client._client_id
    noted, unknown, not_the_sender, malformed = (bytes([code]) for code in range(4))
    before = open_files(sidecar.pid)
    own = os.pidfd_open(me)
    other = os.pidfd_open(sidecar.pid)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    lingering, far = socket.socketpair()
    try:
        for payload, fds, answer in (
            (b"", [], malformed),
            (b"x", [own], malformed),
            (client_id + b"x", [own], malformed),
            (bytes(60_000), [own, file], malformed),
            (client_id, [own, own], malformed),
            (client_id, [own] * 250, malformed),
            (client_id, [file], not_the_sender),
            (client_id, [other], not_the_sender),
            (client_id, [lingering.fileno()], not_the_sender),
            (secrets.token_bytes(16), [own], unknown),
            (secrets.token_bytes(16), [], unknown),
            (client_id, [], noted),
        ):
            assert packet(path, payload, fds) == answer, (payload[:20], len(fds))
        until(lambda: open_files(sidecar.pid) == before)
        for _ in range(3):
            assert packet(path, client_id, [own]) == noted
        until(lambda: open_files(sidecar.pid) == before + 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:  # more than one packet, and nobody waits for the answer
            connection.connect(path)
            with suppress(ConnectionError):  # the first was answered, and that is the end
                for _ in range(5):
                    socket.send_fds(connection, [client_id], [own, file])
        assert packet(path, client_id, [own]) == noted
        until(lambda: open_files(sidecar.pid) == before + 1)
        client.close()
        until(lambda: open_files(sidecar.pid) == bare)
    finally:
        for fd in (own, other, file):
            os.close(fd)
        lingering.close()
        far.close()


def test_a_pidfd_of_a_thread_is_none_of_the_process(patient_sidecar: Sidecar) -> None:
    try:
        thread = os.pidfd_open(os.getpid(), os.O_EXCL)  # PIDFD_THREAD, Linux 6.9
    except OSError as error:
        pytest.skip(f"this kernel has no pidfds of threads: {error}")
    try:
        with Client(patient_sidecar.endpoint) as client:
            assert packet(str(patient_sidecar.run_directory / "attach.sock"), client._client_id, [thread]) == b"\x02"
    finally:
        os.close(thread)


def test_who_connects_to_the_attach_socket_and_says_nothing_keeps_nobody_waiting(sidecar: Sidecar, client: Client) -> None:
    path = str(sidecar.run_directory / "attach.sock")
    before = open_files(sidecar.pid)
    silent = []
    try:
        for _ in range(attach_socket.BACKLOG * 3):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(PATIENCE_S)
            silent.append(connection)
            until(lambda connection=connection: connected(connection, path))  # type: ignore[misc]
        client.attach_device()
        until(lambda: open_files(sidecar.pid) <= before + 1 + 1)  # the pidfd, and what is being closed
    finally:
        for connection in silent:
            connection.close()


def connected(connection: socket.socket, path: str) -> bool:
    try:
        connection.connect(path)
    except BlockingIOError:
        return False
    return True


# ---- namespaces ----------------------------------------------------------------------------------------------------------------------
NAMESPACES = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]


def namespaced(sidecar: Sidecar) -> list[str]:
    """A command line in front of another: a container that has nothing in common with this one but the run directory, at /mnt, and /dev/shm
    (and the files of Python and this project, to run at all). Skips where the kernel refuses namespaces."""
    try:
        tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if tried.returncode:
        assert any(why in tried.stderr for why in ("not permitted", "No space left")), tried.stderr
        pytest.skip(f"the kernel refuses namespaces: {tried.stderr.strip()}")
    needed = [Path(each).resolve() for each in (sys.prefix, sys.base_prefix, ROOT)]
    private = [each for each in ("/tmp", "/run", "/var", "/srv", "/opt") if not any(path.is_relative_to(each) for path in needed)]
    mounts = "; ".join(f'mount -t tmpfs none "{each}"' for each in (sidecar.directory, *private))
    script = f'set -e; mount --bind "{sidecar.run_directory}" /mnt; cd /; {mounts}; exec "$@"'
    return [*NAMESPACES, "sh", "-c", script, "sh"]


def inner_pid(outer: int) -> int:
    """The pid, as we see it, of what `unshare --fork` runs."""
    (pid,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    return int(pid)


INSIDE = "ipc:///mnt/control.sock"


def test_a_member_in_other_namespaces_saves_loads_and_is_seen_to_die(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS[:2])
    with Puppet(INSIDE, namespaced(sidecar)) as inside:
        assert inside.do("answer = os.getpid()") == 1
        assert inside.do(f"answer = os.path.exists({str(sidecar.run_directory)!r})") is False, "it sees nothing of ours"
        assert inside.do("answer = load(store, [b'0', b'1'])") == [True, True]
        assert inside.do("answer = save(store, [b'inside'])") == ["committed"]
        assert store.lookup([b"inside"]) == [True]
        inside.do("store.acquire([b'0', b'1'], 5); reserve(client, store, [b'x', b'y'], 6); client.attach_device()")
        status = sidecar.status()
        assert (status["pins"], status["shards_in_flight"]) == (2, 2)
        assert members(sidecar)[1]["device"]
        child = inner_pid(inside.pid)
        os.kill(child, signal.SIGSTOP)
        assert save(store, [b"x"]) == ["busy"]
        os.kill(child, signal.SIGKILL)
        until(lambda: (sidecar.status()["pins"], sidecar.status()["shards_in_flight"]) == (0, 0))
        assert save(store, [b"x", b"y"]) == ["committed", "committed"]


class Contained(Sidecar):
    """A sidecar in namespaces of its own; `inside` is its endpoint there."""

    def launch(self) -> subprocess.Popen[bytes]:
        self.run_directory.mkdir(mode=0o700, exist_ok=True)
        arguments = [INSIDE if each == self.endpoint else each for each in self.arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*namespaced(self), sys.executable, "-m", "hostkv.sidecar.cli", "serve", *arguments], stdout=subprocess.PIPE, stderr=log
            )
        return self.process

    def kill(self) -> None:
        os.kill(inner_pid(self.pid), signal.SIGKILL)
        assert self.process is not None
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_sidecar_in_other_namespaces_sees_who_dies_outside(tmp_path: Path) -> None:
    with Contained(tmp_path) as sidecar, Client(sidecar.endpoint) as client, Puppet(sidecar.endpoint) as outside:
        assert sidecar.status()["pid"] == 1
        store = client.open(LAYOUT)
        save(store, IDS[:2])
        assert outside.do("answer = load(store, [b'0', b'1'])") == [True, True]
        outside.do("store.acquire([b'0', b'1'], 5); reserve(client, store, [b'x', b'y'], 6); client.attach_device()")
        assert members(sidecar)[outside.pid]["device"]
        outside.kill()
        until(lambda: (sidecar.status()["pins"], sidecar.status()["shards_in_flight"]) == (0, 0))
        assert save(store, [b"x", b"y"]) == ["committed", "committed"]
        sidecar.kill()
        sidecar.arguments += ["--pool-size", "32MiB"]
        process = sidecar.launch()
        until(lambda: "waiting for a process of another container to end" in sidecar.log(), sidecar.log)
        client.close()
        with suppress(FileNotFoundError, ValueError):  # it has waited long enough
            os.kill(inner_pid(process.pid), signal.SIGKILL)
        process.wait(PATIENCE_S)


# ---- locks that do not propagate --------------------------------------------------------------------------------------------------------
def test_a_client_whose_lock_the_sidecar_cannot_see_runs_uncached_and_says_what_to_do(sidecar: Sidecar, tmp_path: Path) -> None:
    """Its members/ is another directory under the same name, as in a container that shares only the socket."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    wrapper = namespaced(sidecar)
    wrapper = [*wrapper[: wrapper.index("sh")], "sh", "-c", f'mount --bind {elsewhere} {sidecar.run_directory}/members; exec "$@"', "sh"]
    with Puppet(sidecar.endpoint, wrapper) as apart:
        why = apart.do("answer = client.serving(), client.down_reason")
        assert why[0] is False
        assert "NO_LOCK" in why[1]
        assert f"{sidecar.run_directory}/members" in why[1]
        assert "in containers: one volume" in why[1]
        assert apart.do("answer = store.lookup([b'0'])") == [False]
        apart.do("for _ in range(40):\n    client._next_try_s = 0; client.serving()")
        assert len(list(elsewhere.iterdir())) == MAX_LOCKS, "it does not take locks for ever"
        assert "NO_LOCK" in apart.do("answer = client.down_reason")


LOCKS_THAT_DO_NOT_WORK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* A file system whose locks are of the process alone (never seen), or are never given back (kept). */
int fcntl64(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    const char *how = getenv("HOSTKV_TEST_LOCKS");
    if (how && command == F_SETLK && strcmp(how, "refused") != 0) return 0;
    if (how && command == F_GETLK) {
        struct flock *lock = argument;
        lock->l_type = strcmp(how, "kept") == 0 ? F_WRLCK : F_UNLCK;
        lock->l_pid = 1;
        return 0;
    }
    int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64");
    if (how && command == F_SETLK) command = 12345;
    return real(fd, command, argument);
}
int fcntl(int fd, int command, ...) __attribute__((alias("fcntl64")));
"""


@pytest.mark.parametrize(
    "how, says",
    [("unseen", "a lock of another process is not seen"), ("kept", "a lock outlives its process"), ("refused", "cannot take a lock")],
)
def test_a_sidecar_does_not_start_where_locks_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, says: str) -> None:
    source, library = tmp_path / "locks.c", tmp_path / "locks.so"
    source.write_text(LOCKS_THAT_DO_NOT_WORK)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("HOSTKV_TEST_LOCKS", how)
    with Sidecar(tmp_path, start=False) as sidecar:
        process = sidecar.launch()
        out, _ = process.communicate(timeout=LIFE_S)
        assert (process.returncode, out) == (2, b""), sidecar.log()
        last = sidecar.log().splitlines()[-1]
        assert f"POSIX record locks do not work in {sidecar.run_directory}/members" in last
        assert says in last
        assert "use --endpoint" in last
        assert list((sidecar.run_directory / "members").iterdir()) == []
        monkeypatch.delenv("LD_PRELOAD")
        sidecar.start()


def test_the_check_of_locks_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "members").mkdir()
    before = open_files(os.getpid())
    rundir.check_locks(str(tmp_path))
    assert list((tmp_path / "members").iterdir()) == []
    assert open_files(os.getpid()) == before
    (tmp_path / "members").rmdir()
    with pytest.raises(StartupError, match="No such file"):
        rundir.check_locks(str(tmp_path))


def test_a_heartbeat_never_reaches_a_file_that_took_its_descriptors_number(sidecar: Sidecar, tmp_path: Path) -> None:
    """Some programs close every descriptor that they did not open."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    with Puppet(sidecar.endpoint) as puppet:
        (lock,) = (sidecar.run_directory / "members").iterdir()
        fd = next(int(each.name) for each in Path(f"/proc/{puppet.pid}/fd").iterdir() if os.readlink(each) == str(lock))
        threads = len(os.listdir(f"/proc/{puppet.pid}/task"))
        puppet.do(f"os.close({fd}); theirs = os.open({str(precious)!r}, os.O_RDWR); os.dup2(theirs, {fd})")
        until(lambda: len(os.listdir(f"/proc/{puppet.pid}/task")) < threads)
        assert precious.read_bytes() == b"precious"
