"""Members and the sidecar die or stop, for real: separate processes, SIGKILL and SIGSTOP. Each test is a line of the failure table."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
from hostkv.connector import Client, DumpError, LoadError, SidecarRefused, SidecarUnavailable, Store, tasks
from hostkv.connector import client as client_module
from hostkv.connector.channel import Channel
from hostkv.schemas.errors import Status
from hostkv.schemas.layout import POOL_CREATING, POOL_REMOVED, POOL_STATE_OFFSET
from hostkv.schemas.messages import Acquire, Bye, HelloReply, Register, Request, Reserve

from tests.crash.puppet import LAYOUT, Puppet
from tests.support import HASTY_CLIENTS, LIFE_S, PATIENCE_S, PATIENT_CLIENTS, Sidecar, until, waiting_as

IDS = [b"%d" % i for i in range(8)]
pytestmark = pytest.mark.usefixtures("patient_clients")


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


def content(block_id: bytes) -> bytes:
    return random.Random(block_id).randbytes(LAYOUT.shard_bytes)


def save(store: Store, ids: list[bytes]) -> list[str]:
    return store.wait(store.dump(ids, 0, [[content(i)] for i in ids]), PATIENCE_S)


def loaded(store: Store, ids: list[bytes]) -> list[bytes]:
    buffers = [[bytearray(LAYOUT.shard_bytes)] for _ in ids]
    store.wait(store.load(ids, 0, buffers), PATIENCE_S)
    return [bytes(row[0]) for row in buffers]


def eventually(condition: Callable[[], object], what: str) -> None:
    until(condition, lambda: what)


# ---- members -----------------------------------------------------------------------------------------------------------------------
def test_writer_killed_before_commit_is_a_miss_and_another_writes_the_block(sidecar: Sidecar, client: Client, store: Store) -> None:
    writer = Puppet(sidecar.endpoint)
    writer.do("reserve(client, store, [b'0', b'1'], 5)")
    assert store.lookup(IDS[:2]) == [False, False]
    assert save(store, IDS[:1]) == ["busy"]
    writer.kill()
    eventually(lambda: client.status()["shards_in_flight"] == 0, "the writer's rights end")
    assert client.status()["pool"]["used_bytes"] == 0
    assert store.lookup(IDS[:2]) == [False, False]
    assert save(store, IDS[:2]) == ["committed", "committed"]
    assert loaded(store, IDS[:2]) == [content(i) for i in IDS[:2]]


def test_pins_of_a_killed_reader_end(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    reader = Puppet(sidecar.endpoint)
    assert reader.do("answer = store.acquire([b'0', b'1'], 5).run") == 2
    assert client.status()["pins"] == 2
    reader.kill()
    eventually(lambda: client.status()["pins"] == 0, "the reader's pins end")


FOUR = replace(LAYOUT, shard_bytes=1 << 18, shards=4)
SESSION = b"the same engine."
WITH_FOUR = f"""
store = client.open({FOUR!r})
def shard(number): return random.Random(number).randbytes(1 << 18)
"""
IN_THE_COPY = """
class Pool:
    def __init__(self, pool): self.pool = pool
    def __getattr__(self, name): return getattr(self.pool, name)
    def copy_in(self, offsets, addresses, pieces, *rest):
        stop_here()
        return self.pool.copy_in(offsets, addresses, pieces, *rest)
client.mapped().pool = Pool(client.mapped().pool)
"""


def writer_of_four(sidecar: Sidecar) -> Puppet:
    """A member of the session SESSION that has committed one shard of four."""
    writer = Puppet()
    writer.do(f"client = Client({sidecar.endpoint!r}, session={SESSION!r})")
    writer.do(WITH_FOUR)
    assert writer.do("answer = store.wait(store.dump([b'four'], 0, [[shard(0)]]))") == ["committed"]
    return writer


def shard(number: int) -> bytes:
    return random.Random(number).randbytes(FOUR.shard_bytes)


def save_shards(store: Store, *numbers: int) -> list[str]:
    return store.wait(store.dump([b"four"] * len(numbers), numbers, [[shard(number)] for number in numbers]), PATIENCE_S)


def loaded_shards(store: Store) -> list[bytes]:
    buffers = [[bytearray(FOUR.shard_bytes)] for _ in range(4)]
    store.wait(store.load([b"four"] * 4, range(4), buffers), PATIENCE_S)
    return [bytes(row[0]) for row in buffers]


@pytest.mark.parametrize("session", [SESSION, None], ids=["of the same engine", "of another engine"])
def test_writer_killed_after_one_of_four_shards_is_a_miss_until_another_writer_has_made_it_whole(
    sidecar: Sidecar, client: Client, session: bytes | None
) -> None:
    with Client(sidecar.endpoint, session=session) as successor, writer_of_four(sidecar) as writer:
        store = successor.open(FOUR)
        writer.do("client.call(Reserve(0, 5, store.keys([b'four']).joined, bytes([1, 0])), fingerprint=store.fingerprint, count=1)")
        assert save_shards(store, 0, 1, 2) == ["present", "busy", "committed"]
        writer.kill()
        eventually(lambda: client.status()["shards_in_flight"] == 0, "the writer's right to its second shard ends")
        for numbers in ([3], [1]):
            assert store.lookup([b"four"]) == [False]
            with pytest.raises(LoadError):
                loaded_shards(store)
            assert save_shards(store, *numbers) == ["committed"]
        assert store.lookup([b"four"]) == [True]
        assert loaded_shards(store) == [shard(number) for number in range(4)]
        assert save_shards(store, 0, 1, 2, 3) == ["present"] * 4


def test_writer_stopped_past_every_limit_after_one_of_four_shards_keeps_its_second_and_makes_the_block_whole(
    sidecar: Sidecar, client: Client
) -> None:
    store = client.open(FOUR)
    with writer_of_four(sidecar) as writer:
        writer.do(IN_THE_COPY)
        writer.send("source = bytearray(shard(1)); answer = list(store.write([b'four'], 1, rows([source])))")
        writer.until_stopped()
        assert save_shards(store, 2, 3) == ["committed", "committed"]

        def silent() -> bool:
            return any(each["id"] == SESSION.hex() and each["members"][0]["silent_s"] >= 10 for each in client.status()["sessions"])

        eventually(silent, "the writer is silent for longer than any limit")
        assert save_shards(store, 1) == ["busy"]
        assert store.lookup([b"four"]) == [False]
        assert client.status()["shards_in_flight"] == 1
        writer.go_on()
        assert writer.answer() == [Status.OK]
    assert loaded_shards(store) == [shard(number) for number in range(4)]


def test_reader_killed_in_the_middle_of_a_copy_leaves_every_block_and_no_pin(tmp_path: Path) -> None:
    ids = [b"%d" % i for i in range(32)]  # an eighth of the pool: what one copy loads
    target = tmp_path / "target"
    with Sidecar(tmp_path, pool_size="256MiB") as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        save(store, ids)
        met, end = False, time.monotonic() + LIFE_S
        while not met:
            assert time.monotonic() < end, "no copy was met in its middle"
            target.write_bytes(bytes(len(ids) * LAYOUT.shard_bytes))
            with Puppet(sidecar.endpoint) as reader, target.open("r+b") as file, mmap(file.fileno(), 0) as seen:
                reader.do(f"""
import mmap
file = open({str(target)!r}, "r+b")
memory = memoryview(mmap.mmap(file.fileno(), 0))
buffers = [[memory[i * LAYOUT.shard_bytes : (i + 1) * LAYOUT.shard_bytes]] for i in range({len(ids)})]
""")
                reader.send(f"store.wait(store.load({ids!r}, 0, buffers))")
                while seen[:64] == bytes(64):
                    assert time.monotonic() < end, "no copy began"
                reader.kill()
                met = seen[-64:] == bytes(64)
        eventually(lambda: client.status()["pins"] == 0, "the reader's pins end")
        assert loaded(store, ids) == [content(i) for i in ids]
        others = [b"other %d" % i for i in range(256)]
        source = content(b"other")
        words = store.wait(store.dump(others, 0, [[source] for _ in others]), PATIENCE_S)
        assert words == ["committed"] * len(others), "every slot can be had again"
        assert store.lookup(ids) == [False] * len(ids)


def test_a_client_is_of_no_use_after_fork_and_its_parent_goes_on(client: Client, store: Store) -> None:
    save(store, IDS[:1])
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answers = []
            for call in (lambda: store.lookup(IDS), lambda: save(store, IDS), client.status):
                try:
                    call()
                    answers.append("answered")
                except RuntimeError:
                    answers.append("refused")
            client.close()
            os.write(write, " ".join(answers).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"refused refused refused"
    os.close(read)
    os.close(write)
    assert loaded(store, IDS[:1]) == [content(IDS[0])]
    assert client.status()["sessions"][0]["members"][0]["pid"] == os.getpid()


def test_a_forked_child_makes_a_client_of_its_own(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS[:1])
    child = os.fork()
    if not child:
        good = False
        try:
            with Client(sidecar.endpoint) as own:
                good = loaded(own.open(LAYOUT), IDS[:1]) == [content(IDS[0])]
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert loaded(store, IDS[:1]) == [content(IDS[0])]


# ---- the sidecar -------------------------------------------------------------------------------------------------------------------
def one_step(store: Store) -> list[object]:
    """What an engine does in a step: looks up, pins, saves and gives back."""
    tag = store.acquire(IDS, 99).run
    store.release([99])
    try:
        saved: object = save(store, IDS)
    except DumpError as error:
        saved = len(error.failed)
    return [store.lookup(IDS), store.lookup_on_prefix(IDS), store.lookup_on_reverse(IDS), tag, saved]


NOTHING = [[False] * len(IDS), -1, -1, 0, len(IDS)]


def steps_are_misses(store: Store) -> None:
    """What each costs is in the benchmark (bounded by 50 ms)."""
    for _ in range(20):
        assert one_step(store) == NOTHING


def test_without_a_sidecar_every_step_is_a_miss(tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/control.sock") as client:
        steps_are_misses(client.open(LAYOUT))
        assert client.counters.dropped_saves == 20 * len(IDS)


def test_a_client_that_was_there_first_finds_the_sidecar_when_it_comes(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path, pool_size="64MiB", start=False)
    with Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)
        assert one_step(store) == NOTHING
        with sidecar:
            sidecar.start()
            eventually(client.serving, "the client finds the sidecar")
            save(store, IDS)
            assert loaded(store, IDS) == [content(i) for i in IDS]


def test_sidecar_killed_means_misses_and_its_successor_serves_the_same_blocks(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    handles = store.acquire(IDS, client.new_tag())
    sidecar.kill()
    with pytest.raises((DumpError, LoadError)):  # the first detection
        store.wait(store.load(IDS, 0, [[bytearray(LAYOUT.shard_bytes)] for _ in IDS]))
    steps_are_misses(store)
    targets = [bytearray(LAYOUT.shard_bytes) for _ in IDS]
    assert store.read(handles, 0, [[address_of(target)] for target in targets]) == [], "what is pinned is readable without the sidecar"
    assert [bytes(target) for target in targets] == [content(i) for i in IDS]
    sidecar.start()
    eventually(client.serving, "the client finds the new instance")
    assert store.lookup(IDS) == [True] * len(IDS)
    assert loaded(store, IDS) == [content(i) for i in IDS]
    assert client.counters.reconnects == 1
    eventually(lambda: client.status()["pins"] == len(IDS), "a restart protects the pins of those that live, and no others")


def address_of(buffer: bytearray) -> int:
    from hostkv.cext import buffer_address

    return buffer_address(buffer, True)[0]


def test_sidecar_killed_between_reserve_and_commit_fails_the_save_and_leaves_nothing_held(
    sidecar: Sidecar, client: Client, store: Store
) -> None:
    def kill_after_copy(*arguments: object) -> None:
        sidecar.kill()

    link = client.mapped()
    assert link is not None
    link.pool = type("Pool", (), {"copy_in": staticmethod(kill_after_copy), "size": link.pool.size})()  # type: ignore[assignment]
    with pytest.raises(SidecarUnavailable):
        store.write(IDS[:2], 0, [[1], [1]])
    sidecar.start()
    eventually(client.serving, "the client finds the new instance")
    client.status()  # the first request gives back what was lost
    eventually(lambda: client.status()["shards_in_flight"] == 0, "the lost reservation is given back")
    assert store.lookup(IDS[:2]) == [False, False]


def test_sidecar_that_ended_well_and_came_back_is_a_new_pool(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    tag = client.new_tag()
    handles = store.acquire(IDS, tag)
    sidecar.stop()
    assert one_step(store) == NOTHING
    sidecar.start()
    eventually(client.serving, "the client finds the new pool")
    assert store.lookup(IDS) == [False] * len(IDS)
    targets = [bytearray(LAYOUT.shard_bytes) for _ in IDS]
    assert store.read(handles, 0, [[address_of(target)] for target in targets]) == list(range(len(IDS))), "handles of the old pool fail"
    store.release([tag])
    assert save(store, IDS) == ["committed"] * len(IDS)
    assert loaded(store, IDS) == [content(i) for i in IDS]


@pytest.mark.parametrize("state", [POOL_CREATING, POOL_REMOVED], ids=["makes", "removes"])
def test_sidecar_killed_while_it_makes_or_removes_a_pool_is_followed_by_another_whoever_lives(
    sidecar: Sidecar, client: Client, store: Store, state: int
) -> None:
    save(store, IDS)
    sidecar.kill()
    with sidecar.tables_path.open("r+b") as tables:
        os.pwrite(tables.fileno(), bytes([state]), POOL_STATE_OFFSET)
    sidecar.pool_path.unlink()
    assert sidecar.start()["adopted"] == "0"
    eventually(client.serving, "the client finds the new pool")
    assert save(store, IDS) == ["committed"] * len(IDS)


def test_stopped_sidecar_means_misses_and_work_resumes_when_it_goes_on(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        with waiting_as(HASTY_CLIENTS):
            client.timeout_s = 1.0
            eventually(lambda: store.acquire(IDS, 7).run == 0, "the client notices")  # this request is lost in the stopped sidecar
            steps_are_misses(store)
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    client.timeout_s = PATIENCE_S
    eventually(client.serving, "the client notices that it goes on")
    assert store.lookup(IDS) == [True] * len(IDS)
    assert loaded(store, IDS) == [content(i) for i in IDS]
    eventually(lambda: client.status()["pins"] == client.status()["shards_in_flight"] == 0, "the lost acquire is given back")


def test_threads_that_save_and_load_while_the_sidecar_is_killed_never_get_wrong_bytes(
    sidecar: Sidecar, client: Client, store: Store
) -> None:
    stop = threading.Event()
    wrong: list[object] = []
    done = [0, 0]

    def work(number: int) -> None:
        step = 0
        while not stop.is_set():
            ids = [b"%d/%d" % (number, step % 5)]
            step += 1
            try:
                save(store, ids)
                if loaded(store, ids) != [content(ids[0])]:
                    wrong.append(ids)
                done[number] += 1
            except (DumpError, LoadError):
                continue
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            before = sum(done)
            eventually(lambda before=before: sum(done) > before + 4 or bool(wrong), "blocks are saved and loaded")  # type: ignore[misc]
            sidecar.kill()
            sidecar.start()
        before = sum(done)
        eventually(lambda: sum(done) > before + 4 or bool(wrong), "work resumes")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    save(store, IDS[:1])
    eventually(lambda: client.status()["pins"] == client.status()["shards_in_flight"] == 0, "nothing stays held")


def test_a_lock_that_the_sidecar_cannot_see_is_taken_anew(sidecar: Sidecar) -> None:
    with Client(sidecar.endpoint) as first:  # this process has its lock now
        assert first.serving()
    for name in (sidecar.run_directory / "members").iterdir():
        name.unlink()
    with Client(sidecar.endpoint) as second:
        assert second.serving(), second.down_reason


def test_tables_of_another_pool_are_refused_with_the_reason(sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sidecar(tmp_path / "other", pool_size="64MiB") as other, Client(other.endpoint) as theirs:
        link = theirs.mapped()
        assert link is not None
        real = os.open
        monkeypatch.setattr(os, "open", lambda path, *rest: real(link.hello.tables_path if str(path).endswith("tables") else path, *rest))
        with Client(sidecar.endpoint) as client:
            assert not client.serving()
            assert "another pool" in client.down_reason
            assert "/dev/shm" in client.down_reason


# ---- a client that closes while it works ---------------------------------------------------------------------------------------------
class SlowPool:
    """In place of a link's pool: its copies wait for `go`."""

    def __init__(self, client: Client) -> None:
        self.copying, self.go = threading.Event(), threading.Event()
        link = client.mapped()
        assert link is not None
        self._pool, self.size = link.pool, link.pool.size
        link.pool = self  # type: ignore[assignment]

    def copy_in(self, *arguments: Any) -> Any:
        self.copying.set()
        assert self.go.wait(PATIENCE_S)
        return self._pool.copy_in(*arguments)

    def copy_out(self, *arguments: Any) -> Any:
        self.copying.set()
        assert self.go.wait(PATIENCE_S)
        return self._pool.copy_out(*arguments)


class Background(threading.Thread):
    """A call in a thread of its own; `outcome` is what it returned or raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.outcome: object = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._call()
        except BaseException as error:  # noqa: BLE001 - for the test
            self.outcome = error

    def ended(self) -> object:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it hangs"
        return self.outcome


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False


def test_close_lets_a_write_under_way_finish_before_others_may_have_its_slot(sidecar: Sidecar, client: Client, store: Store) -> None:
    other = Client(sidecar.endpoint)
    theirs = other.open(LAYOUT)
    pool = SlowPool(other)
    source = bytearray(content(IDS[0]))
    write = Background(lambda: theirs.write(IDS[:1], 0, [[address_of(source)]]))
    assert pool.copying.wait(PATIENCE_S)
    closing = Background(other.close)
    eventually(lambda: other._draining, "no new transfers")
    assert refuses(lambda: theirs.write(IDS[1:2], 0, [[address_of(source)]]))
    closing.join(0.3)  # time enough for a goodbye that comes too early
    assert save(store, IDS[:1]) == ["busy"]
    assert closing.is_alive()
    pool.go.set()
    assert write.ended() == bytes([Status.OK])
    assert closing.ended() is None
    assert loaded(store, IDS[:1]) == [content(IDS[0])]
    assert len(client.status()["sessions"]) == 1, "the goodbye was said"


def test_close_lets_a_read_under_way_finish_before_its_pins_end(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS[:1])
    other = Client(sidecar.endpoint)
    theirs = other.open(LAYOUT)
    handles = theirs.acquire(IDS[:1], other.new_tag())
    pool = SlowPool(other)
    target = bytearray(LAYOUT.shard_bytes)
    read = Background(lambda: theirs.read(handles, 0, [[address_of(target)]]))
    assert pool.copying.wait(PATIENCE_S)
    closing = Background(other.close)
    closing.join(0.3)
    assert client.status()["pins"] == 1
    pool.go.set()
    assert read.ended() == []
    assert closing.ended() is None
    assert target == content(IDS[0])
    assert client.status()["pins"] == 0


def test_close_that_cannot_wait_for_a_write_says_no_goodbye(
    sidecar: Sidecar, client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSE_COPY_S", 0.0)
    other = Client(sidecar.endpoint)
    theirs = other.open(LAYOUT)
    pool = SlowPool(other)
    source = bytearray(LAYOUT.shard_bytes)
    write = Background(lambda: theirs.write(IDS[:1], 0, [[address_of(source)]]))
    assert pool.copying.wait(PATIENCE_S)
    other.timeout_s = 0.1
    other.close()
    assert save(store, IDS[:1]) == ["busy"], "nobody may have the slot while the copy runs"
    pool.go.set()
    assert isinstance(write.ended(), RuntimeError)
    assert store.lookup(IDS[:1]) == [False]


def test_close_while_another_thread_connects_ends(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    link = client.mapped()
    assert link is not None
    greeted, go = threading.Event(), threading.Event()
    real = Client._greet

    def greet(self: Client, channel: Channel, deadline_s: float) -> HelloReply:
        reply = real(self, channel, deadline_s)
        greeted.set()
        assert go.wait(PATIENCE_S)
        return reply

    monkeypatch.setattr(Client, "_greet", greet)
    link.fault = "to be greeted again"
    client._next_try_s = 0.0
    connecting = Background(client.serving)
    assert greeted.wait(PATIENCE_S)
    closing = Background(client.close)
    eventually(lambda: client._closed, "the client is closed")
    assert refuses(client.status)
    closing.join(0.3)  # time enough to overlook the connection
    go.set()
    assert connecting.ended() is False
    assert closing.ended() is None


# ---- what is owed --------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def idle_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads for tasks that pay nothing by themselves, as they do once a second."""
    monkeypatch.setattr(tasks, "IDLE_S", 3600.0)


@pytest.mark.usefixtures("idle_worker")
@pytest.mark.parametrize("why", [SidecarUnavailable("lost"), SidecarRefused("INTERNAL", "lost")], ids=["no reply", "a fault inside"])
def test_a_lost_reservation_is_given_back_by_a_client_that_only_looks_up(sidecar: Sidecar, store: Store, why: Exception) -> None:
    real = Channel.ask

    def lose(self: Channel, request: Request, timeout_s: float, count: int | None = None) -> Any:
        reply = real(self, request, timeout_s, count)
        if isinstance(request, Reserve):
            raise why
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "ask", lose)
        with pytest.raises(SidecarUnavailable, match="lost"):
            store.write(IDS[:2], 0, [[1], [1]])
    assert sidecar.status()["shards_in_flight"] == 2

    def given_back() -> bool:
        store.lookup(IDS)
        return bool(sidecar.status()["shards_in_flight"] == 0)

    eventually(given_back, "the lost reservation is given back")


@pytest.mark.usefixtures("idle_worker")
def test_pins_given_back_while_nobody_served_end_for_a_client_that_only_looks_up(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    store.acquire(IDS, tag := client.new_tag())
    sidecar.kill()
    with waiting_as(HASTY_CLIENTS):
        eventually(lambda: not client.serving(), "the client notices")
        store.release([tag])
    sidecar.start()
    assert sidecar.status()["pins"] == len(IDS)

    def ended() -> bool:
        store.lookup(IDS)
        return bool(sidecar.status()["pins"] == 0)

    eventually(ended, "the pins end")


@pytest.mark.usefixtures("idle_worker")
def test_what_is_owed_is_paid_before_goodbye(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    with Client(sidecar.endpoint, session=client._session) as other:
        store_of_other = other.open(LAYOUT)
        real = Channel.ask

        def lose(self: Channel, request: Request, timeout_s: float, count: int | None = None) -> Any:
            reply = real(self, request, timeout_s, count)
            if isinstance(request, Acquire):
                raise SidecarUnavailable("the reply was lost")
            return reply

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "ask", lose)
            assert store_of_other.acquire(IDS, other.new_tag()).run == 0
        assert sidecar.status()["pins"] == len(IDS)
    assert sidecar.status()["pins"] == 0, "although its session goes on"


@pytest.mark.usefixtures("idle_worker")
@pytest.mark.parametrize("on_another", [False, True])
def test_what_was_not_heard_is_given_back_before_goodbye(sidecar: Sidecar, client: Client, store: Store, on_another: bool) -> None:
    """`on_another`: connection than the one that goodbye is said on. The sidecar has forgotten both."""
    save(store, IDS)
    with Client(sidecar.endpoint, session=client._session) as other:
        store_of_other = other.open(LAYOUT)
        channels = [other._take(), other._take()]
        other._greet(channels[1], time.monotonic() + PATIENCE_S)
        for channel in channels:
            other._give(channel)
        tag = other.new_tag()
        assert store_of_other.acquire(IDS, tag).run == len(IDS)
        other.call(Bye())
        other._channels.reverse()
        store_of_other.release([tag])
        if on_another:
            other._channels.reverse()
        assert sidecar.status()["pins"] == len(IDS)
    assert sidecar.status()["pins"] == 0, "although its session goes on"


@pytest.mark.usefixtures("idle_worker")
def test_what_was_lost_while_close_waited_is_given_back_before_goodbye(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    real, asked, go = Channel.ask, threading.Event(), threading.Event()

    def lose(self: Channel, request: Request, timeout_s: float, count: int | None = None) -> Any:
        reply = real(self, request, timeout_s, count)
        if isinstance(request, Acquire):
            asked.set()
            assert go.wait(PATIENCE_S)
            raise SidecarUnavailable("the reply was lost")
        return reply

    other = Client(sidecar.endpoint, session=client._session)
    store_of_other = other.open(LAYOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "ask", lose)
        acquiring = Background(lambda: store_of_other.acquire(IDS, other.new_tag()).run)
        assert asked.wait(PATIENCE_S)
        closing = Background(other.close)
        eventually(lambda: refuses(other.status), "the client is closed")
        assert sidecar.status()["pins"] == len(IDS)
        go.set()
        assert acquiring.ended() == 0
        assert closing.ended() is None
    assert sidecar.status()["pins"] == 0, "although its session goes on"


# ---- locks -----------------------------------------------------------------------------------------------------------------------------
def test_a_lock_out_of_sight_for_one_hello_stays_the_clients(
    sidecar: Sidecar, client: Client, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(store, IDS)
    lock = next(Path(sidecar.run_directory, "members").iterdir())
    real = client_module.lock_name

    def seen_again(directory: str, lost: bytes = b"") -> bytes:
        os.rename(tmp_path / "away", lock)
        return real(directory, lost)

    os.rename(lock, tmp_path / "away")
    monkeypatch.setattr(client_module, "lock_name", seen_again)
    client._channels[-1].greeted = False
    with pytest.raises(SidecarUnavailable, match="another session or lock"):
        client.status()
    monkeypatch.undo()
    eventually(client.serving, "the client serves again")
    assert loaded(store, IDS) == [content(i) for i in IDS]


# ---- other pools -----------------------------------------------------------------------------------------------------------------------
def test_handles_of_an_earlier_pool_fail_although_page_and_generation_recur(sidecar: Sidecar, client: Client, store: Store) -> None:
    def pinned() -> Any:
        for block_id in IDS:
            save(store, [block_id])
        return store.acquire(IDS, client.new_tag())

    old = pinned()
    assert client.pool_epoch == old.pool_epoch == old[2:3].pool_epoch
    sidecar.stop()
    eventually(lambda: client.pool_epoch == b"", "the client notices")
    sidecar.start()
    eventually(client.serving, "the client finds the new pool")
    new = pinned()
    assert (old.pages, old.generations) == (new.pages, new.generations)
    assert client.pool_epoch == new.pool_epoch != old.pool_epoch
    targets = [bytearray(LAYOUT.shard_bytes) for _ in IDS]
    addresses = [[address_of(target)] for target in targets]
    assert store.read(old, 0, addresses) == list(range(len(IDS)))
    assert store.read(new, 0, addresses) == []


def test_a_pool_that_its_sidecar_removed_is_unmapped_at_the_next_call(sidecar: Sidecar, client: Client, store: Store) -> None:
    def mapped() -> bool:
        return sidecar.pool_name in Path("/proc/self/maps").read_text()

    save(store, IDS)
    assert mapped()
    sidecar.stop()
    assert store.lookup(IDS) == [False] * len(IDS)
    eventually(lambda: not mapped(), "the pool is unmapped")
    sidecar.start()
    eventually(client.serving, "the client finds the new pool")
    assert client.counters.reconnects == 1


# ---- a sidecar that hangs ----------------------------------------------------------------------------------------------------------------
def test_a_sidecar_that_hangs_is_asked_nothing_until_its_heart_beats(
    sidecar: Sidecar, client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = client.mapped()
    assert link is not None
    made = []

    def channel(*arguments: Any) -> Channel:
        made.append(arguments)
        return Channel(*arguments)

    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        with waiting_as(HASTY_CLIENTS):
            client.timeout_s = 1.0
            eventually(lambda: store.acquire(IDS, 7).run == 0 and not link.beats(), "the client notices")
            monkeypatch.setattr(client_module, "Channel", channel)
            for _ in range(5):
                client._next_try_s = 0.0
                assert one_step(store) == NOTHING
            assert made == []
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    eventually(client.serving, "the client notices that it goes on")


def test_a_killed_sidecar_is_not_said_to_hang(sidecar: Sidecar, client: Client, store: Store) -> None:
    link = client.mapped()
    assert link is not None
    sidecar.kill()
    with waiting_as(HASTY_CLIENTS):
        eventually(lambda: not link.beats(), "its heart stands still")
        client._next_try_s = 0.0
        assert one_step(store) == NOTHING
    assert "start one with: hostkv serve" in client.down_reason
    sidecar.start()


def test_a_sidecar_of_another_pool_is_found_although_the_old_tables_tell_nothing(sidecar: Sidecar, client: Client, store: Store) -> None:
    save(store, IDS)
    link = client.mapped()
    assert link is not None
    sidecar.kill()
    sidecar.pool_path.unlink()
    sidecar.tables_path.unlink()
    sidecar.start()
    with waiting_as((HASTY_CLIENTS[0], *PATIENT_CLIENTS[1:])):
        eventually(lambda: not link.beats(), "the old tables look like those of a sidecar that hangs")
        assert link.view.alive()
        eventually(client.serving, "the client finds the new pool")
    assert store.lookup(IDS) == [False] * len(IDS)
    assert save(store, IDS) == ["committed"] * len(IDS)


def test_registering_many_namespaces_does_not_keep_a_reconnect_past_its_time(
    sidecar: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [client.open(replace(LAYOUT, salt=str(i))) for i in range(5)]
    link = client.mapped()
    assert link is not None
    greet, ask, asked = Client._greet, Channel.ask, []

    def late(self: Client, channel: Channel, deadline_s: float) -> HelloReply:
        reply = greet(self, channel, deadline_s)
        while time.monotonic() < deadline_s:
            time.sleep(0.001)
        return reply

    def record(self: Channel, request: Request, timeout_s: float, count: int | None = None) -> Any:
        asked.append(type(request))
        return ask(self, request, timeout_s, count)

    monkeypatch.setattr(client_module, "RECONNECT_WAIT_S", 1.0)
    monkeypatch.setattr(Client, "_greet", late)
    monkeypatch.setattr(Channel, "ask", record)
    link.fault = "to be greeted again"
    client._next_try_s = 0.0
    eventually(client.serving, "the client is greeted again")
    assert Register not in asked
    for store in stores:
        assert save(store, IDS[:1]) == ["committed"]
