"""The client without a sidecar: what it refuses, how it behaves when nobody serves, and one channel against a scripted peer."""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import zmq
from hostkv.connector import Client, DumpError, Handles, Keys, Layout, LoadError, QueueFull, SidecarRefused, SidecarUnavailable, Store
from hostkv.connector import tasks as tasks_module
from hostkv.connector.channel import MAX_TOLD, Channel
from hostkv.connector.tasks import Task
from hostkv.schemas import messages
from hostkv.schemas.errors import ErrorCode, Status

from tests.support import PATIENCE_S, Sidecar

LAYOUT = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=4096, shards=2)
IDS = [b"a", b"b", b"c"]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(f"ipc://{tmp_path}/control.sock") as client:
        yield client


@pytest.fixture
def store(client: Client) -> Store:
    return client.open(LAYOUT)


def buffers(count: int = 3, size: int = 4096) -> list[list[bytearray]]:
    return [[bytearray(size)] for _ in range(count)]


# ---- nobody serves -----------------------------------------------------------------------------------------------------------------
def test_without_a_sidecar_lookups_miss_and_are_counted(client: Client, store: Store) -> None:
    assert store.lookup(IDS) == [False, False, False]
    assert store.lookup_on_prefix(IDS) == -1
    assert store.lookup_on_reverse(store.keys(IDS)) == -1
    assert (client.counters.lookups, client.counters.hits) == (9, 0)


def test_without_a_sidecar_a_dump_fails_with_all_its_ids_and_is_counted(client: Client, store: Store) -> None:
    with pytest.raises(DumpError, match="nobody listens") as caught:
        store.wait(store.dump(IDS, 0, buffers()))
    assert caught.value.failed == IDS
    assert client.counters.dropped_saves == 3


def test_without_a_sidecar_a_load_fails_with_all_its_ids_and_is_counted(client: Client, store: Store) -> None:
    with pytest.raises(LoadError) as caught:
        store.wait(store.load(IDS, 0, buffers()))
    assert caught.value.failed == IDS
    assert client.counters.failed_loads == 3


def test_without_a_sidecar_acquire_answers_misses_and_write_and_status_raise(client: Client, store: Store) -> None:
    handles = store.acquire(IDS, client.new_tag())
    assert handles.run == 0
    assert set(handles.statuses) == {Status.MISS}
    with pytest.raises(SidecarUnavailable, match="hostkv serve"):
        store.write(IDS, 0, [[1], [2], [3]])
    with pytest.raises(SidecarUnavailable):
        client.status()
    store.release([1, 2])
    assert store.wait(store.prefetch(IDS)) == []


# ---- bad input ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([], ValueError, "ids is empty"),
        (b"abc", TypeError, "ids is a bytes"),
        ([b"a", "b"], TypeError, r"ids\[1\] is 'b'"),
        ([b"a", b""], ValueError, r"ids\[1\] has 0 bytes"),
        ([b"a", b"x" * 65], ValueError, r"ids\[1\] has 65 bytes"),
        (None, TypeError, "ids is a NoneType"),
    ],
)
def test_ids_that_are_none_are_named_by_every_method(store: Store, ids: Any, error: type[Exception], words: str) -> None:
    methods: list[Callable[[], object]] = [
        lambda: store.keys(ids),
        lambda: store.lookup(ids),
        lambda: store.lookup_on_prefix(ids),
        lambda: store.lookup_on_reverse(ids),
        lambda: store.prefetch(ids),
        lambda: store.acquire(ids, 1),
        lambda: store.write(ids, 0, [[1]]),
        lambda: store.dump(ids, 0, buffers(2)),
        lambda: store.load(ids, 0, buffers(2)),
        lambda: store.dump_data(ids, 0, [[1], [2]]),
        lambda: store.load_data(ids, 0, [[1], [2]]),
    ]
    for method in methods:
        with pytest.raises(error, match=words):
            method()


@pytest.mark.parametrize(
    ("shard", "error", "words"),
    [
        (2, ValueError, "id 0 is 2, must be 0..1"),
        (-1, ValueError, "id 0 is -1"),
        ([0, 1], ValueError, "2 entries for 3 ids"),
        ([0, 1, 2], ValueError, "id 2 is 2"),
        (1 << 20, ValueError, "id 0 is 1048576"),
        ([0, "1", 1], TypeError, "id 1 is '1'"),
        (0.5, TypeError, "id 0 is 0.5"),
    ],
)
def test_a_shard_index_out_of_range_is_named(store: Store, shard: Any, error: type[Exception], words: str) -> None:
    for method in (store.dump, store.load):
        with pytest.raises(error, match=words):
            method(IDS, shard, buffers())


def test_the_same_pair_twice_in_a_dump_is_refused_and_named(store: Store) -> None:
    with pytest.raises(ValueError, match=r"ids\[2\] = b'a', shard 0 .* twice"):
        store.dump([b"a", b"b", b"a"], 0, buffers())


class FakeTensor:
    """What torch.Tensor has of that which the client asks for."""

    def __init__(self, data: bytearray, device: str = "cpu", contiguous: bool = True) -> None:
        self._array = numpy.frombuffer(data, numpy.uint8)
        self.device = type("Device", (), {"type": device, "__str__": lambda _: f"{device}:0"})()
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def numel(self) -> int:
        return len(self._array)

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return self._contiguous


@pytest.mark.parametrize(
    ("piece", "error", "words"),
    [
        (bytearray(4095), ValueError, r"tensors\[1\]\[0\] has 4095 bytes, must be 4096"),
        (bytearray(4097), ValueError, r"tensors\[1\]\[0\] has 4097 bytes"),
        (bytes(4096), ValueError, r"tensors\[1\]\[0\] is not usable .*writable"),
        (numpy.zeros((64, 128), numpy.uint8)[:, ::2], ValueError, "contiguous"),
        (memoryview(bytearray(8192))[::2], ValueError, "contiguous"),
        (FakeTensor(bytearray(4096), device="cuda"), ValueError, r"tensors\[1\]\[0\] is on device cuda:0"),
        (FakeTensor(bytearray(4096), contiguous=False), ValueError, "contiguous"),
        (FakeTensor(bytearray(4095)), ValueError, "has 4095 bytes"),
        (7, TypeError, r"tensors\[1\]\[0\] is a int"),
    ],
)
def test_a_buffer_that_cannot_be_loaded_into_is_named(store: Store, piece: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        store.load(IDS, 0, [[bytearray(4096)], [piece], [bytearray(4096)]])


def test_lists_of_buffers_of_other_lengths_are_named(store: Store) -> None:
    with pytest.raises(ValueError, match="2 rows for 3 ids"):
        store.dump(IDS, 0, buffers(2))
    with pytest.raises(ValueError, match=r"tensors\[1\] has 2 buffers, a block has 1"):
        store.dump(IDS, 0, [[bytearray(4096)], [bytearray(2048)] * 2, [bytearray(4096)]])
    with pytest.raises(ValueError, match="does not divide into 3"):
        store.dump(IDS, 0, [[bytearray(1365)] * 3] * 3)
    with pytest.raises(TypeError, match=r"tensors\[0\] is a bytearray"):
        store.dump([b"a"], 0, [bytearray(4096)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("addresses", "error", "words"),
    [
        ([[1], [0], [2]], ValueError, r"addresses\[1\]\[0\] is 0"),
        ([[1], [2]], ValueError, "2 rows for 3 ids"),
        ([[1], [2, 3], [4]], ValueError, r"addresses\[1\] has 2 entries"),
        ([[], [], []], ValueError, "0 entries for 3 blocks"),
        ([[1], ["x"], [2]], TypeError, r"addresses\[1\]\[0\] is 'x'"),
        ([[1], [-1], [2]], TypeError, r"addresses\[1\]\[0\] is -1"),
        ([1, 2, 3], TypeError, r"addresses\[0\] is 1"),
        (5, TypeError, "addresses is a int"),
        (array("Q", [1, 2, 0]), ValueError, r"addresses\[2\]\[0\] is 0"),
        (array("Q", [1, 2]), ValueError, "2 entries for 3 blocks"),
        (array("I", [1, 2, 3]), TypeError, "64-bit"),
        (numpy.ones((2, 2), numpy.uint64), ValueError, "2 rows for 3 ids"),
        (numpy.ones((3, 4), numpy.uint64)[:, ::2], ValueError, "contiguous"),
        (numpy.ones((3, 1)), TypeError, "64-bit"),
    ],
)
def test_addresses_that_are_none_are_named(store: Store, addresses: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        store.dump_data(IDS, 0, addresses)
    with pytest.raises(error, match=words):
        store.write(IDS, 0, addresses)


def test_an_event_to_wait_for_is_refused_on_the_cpu(store: Store) -> None:
    with pytest.raises(ValueError, match="prerequisite_handle is 5"):
        store.dump_data(IDS, 0, [[1], [2], [3]], prerequisite_handle=5)


@pytest.mark.parametrize("piece_bytes", [[], [4095], [0, 4096], [4096, 1], [-1, 4097]])
def test_pieces_that_do_not_make_the_shard_are_refused(client: Client, piece_bytes: list[int]) -> None:
    with pytest.raises(ValueError, match="piece_bytes is"):
        client.open(LAYOUT, piece_bytes)


def test_a_block_of_more_pieces_than_the_store_was_opened_with_is_refused(client: Client) -> None:
    store = client.open(LAYOUT, [4000, 96])
    with pytest.raises(ValueError, match="3 pieces here, the store was opened with 2"):
        store.load([b"a"], 0, [[bytearray(4000), bytearray(90), bytearray(6)]])
    with pytest.raises(ValueError, match=r"tensors\[0\]\[1\] has 90 bytes, must be 96"):
        store.load([b"a"], 0, [[bytearray(4000), bytearray(90)]])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"endpoint": "tcp://127.0.0.1:1"}, "must be ipc://"),
        ({"endpoint": "ipc://relative.sock"}, "absolute"),
        ({"endpoint": "ipc:///" + "x" * 120}, "too long"),
        ({"endpoint": 5}, "endpoint is 5"),
        ({"session": b"short"}, "session is"),
        ({"name": "x" * 65}, "name is"),
        ({"copy_threads": 0}, "copy_threads is 0"),
        ({"timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_arguments_of_the_client_that_no_sidecar_can_satisfy_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Client(**{"endpoint": "ipc:///tmp/absent/control.sock", **arguments})


def test_the_endpoint_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOSTKV_ENDPOINT", f"ipc://{tmp_path}/there.sock")
    with Client() as client:
        assert f"{tmp_path}/there.sock" in client.down_reason


# ---- life of a client --------------------------------------------------------------------------------------------------------------
def test_a_closed_client_raises_and_closes_twice(client: Client, store: Store) -> None:
    client.close()
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: store.lookup(IDS),
        lambda: store.dump(IDS, 0, buffers()),
        lambda: store.acquire(IDS, 1),
        lambda: store.release([1]),
        lambda: store.prefetch(IDS),
        lambda: client.open(LAYOUT),
        client.status,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_client_used_after_fork_raises(store: Store) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            store.lookup(IDS)
            os.write(write, b"answered")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"make a client after fork" in os.read(read, 1000)
    os.close(read)


def test_a_pool_that_goes_while_somebody_waits_until_it_is_mapped_is_not_mapped_yet(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two looks another thread may find that the sidecar has removed it."""
    looks = iter([threading.Event()])
    monkeypatch.setattr(Client, "_populated", property(lambda self: next(looks, None)), raising=False)
    assert not client.warm(0)


def test_tags_of_two_clients_differ(client: Client, tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/control.sock") as other:
        tags = [c.new_tag() for c in (client, other) for _ in range(1000)]
    assert len(set(tags)) == 2000
    assert max(tags) < 1 << 64


def test_more_tasks_than_the_bound_are_refused_and_the_queued_ones_finish(
    store: Store, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "MAX_QUEUED_TASKS", 2)
    go = threading.Event()
    started = threading.Barrier(tasks_module.THREADS + 1)

    def block(task: Task) -> None:
        started.wait()
        go.wait()
        task.succeed(["committed"])

    running = [client.submit(Task(block)) for _ in range(tasks_module.THREADS)]
    started.wait()
    queued = [store.dump([b"a"], 0, buffers(1)), store.dump([b"b"], 0, buffers(1))]
    with pytest.raises(QueueFull, match="2 tasks wait"):
        store.dump([b"c"], 0, buffers(1))
    assert not store.check(running[0])
    with pytest.raises(TimeoutError):
        store.wait(running[0], timeout_s=0.01)
    go.set()
    assert store.wait(running[0]) == ["committed"]
    for task in queued:
        with pytest.raises(DumpError):
            store.wait(task)


def test_what_is_not_a_task_is_refused(store: Store) -> None:
    with pytest.raises(TypeError, match="task is a int"):
        store.wait(5)  # type: ignore[arg-type]


# ---- keys and handles --------------------------------------------------------------------------------------------------------------
def test_keys_slice_join_and_pickle(store: Store) -> None:
    keys = store.keys(IDS)
    assert len(keys) == 3
    assert keys[1:].joined == store.keys(IDS[1:]).joined
    assert keys[::2] == keys[:1] + keys[2:]
    assert keys[-1] == keys[2:].joined
    assert pickle.loads(pickle.dumps(keys)) == keys
    assert keys[3:].joined == b""
    with pytest.raises(ValueError, match="empty"):
        store.lookup(keys[3:])


def test_handles_slice_run_and_pickle() -> None:
    handles = Handles(Keys(bytes(range(128))), bytes([0, 0, 6, 0]), bytes(range(16)), bytes(range(32)), bytes(range(16)))
    assert handles.run == 2
    assert handles[1:3] == Handles(Keys(bytes(range(32, 96))), bytes([0, 6]), bytes(range(4, 12)), bytes(range(8, 24)), bytes(range(16)))
    assert handles[2:].run == 0
    assert pickle.loads(pickle.dumps(handles)) == handles


# ---- one channel -------------------------------------------------------------------------------------------------------------------
class Peer:
    """A ROUTER whose answers the test writes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(f"ipc://{path}")
        self.instance = secrets.token_bytes(16)

    def receive(self) -> tuple[bytes, int, Any]:
        assert self.socket.poll(int(PATIENCE_S * 1000))
        who, frame = self.socket.recv_multipart()
        return who, *messages.decode_request(frame)

    def answer(self, who: bytes, request_id: int, reply: Any) -> None:
        self.socket.send_multipart([who, messages.encode_reply(reply, request_id, self.instance)])

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path / "peer.sock")
    yield peer
    peer.close()


@pytest.fixture
def channel(peer: Peer) -> Iterator[Channel]:
    channel = Channel(peer.path)
    channel._meet(PATIENCE_S)  # before requests that wait for less
    yield channel
    channel.close()


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Runs it in a thread; the function returned waits for its result or raises what it raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 - handed to the test
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE_S)
        assert outcome, "it goes on"
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return result


def test_a_late_reply_is_not_taken_for_the_answer_of_the_next_request(peer: Peer, channel: Channel) -> None:
    with pytest.raises(SidecarUnavailable, match="no answer to status"):
        channel.ask(messages.StatusRequest(), 0.02)
    who, late_id, _ = peer.receive()
    result = in_background(lambda: channel.ask(messages.StatusRequest(), PATIENCE_S))
    who, request_id, _ = peer.receive()
    peer.answer(who, late_id, messages.StatusReply({"which": "late"}))
    peer.answer(who, request_id, messages.StatusReply({"which": "asked for"}))
    assert result().status == {"which": "asked for"}


def test_what_a_lost_request_may_hold_is_given_back_on_the_same_channel(peer: Peer, channel: Channel) -> None:
    channel.debts.owe(messages.Abort((7).to_bytes(8, "little")))
    channel.debts.owe(messages.Release((9).to_bytes(8, "little")))
    result = in_background(lambda: channel.debts.pay(channel, PATIENCE_S))
    who, request_id, request = peer.receive()
    assert request == messages.Abort((7).to_bytes(8, "little"))
    peer.answer(who, request_id, messages.CountReply(1))
    same, request_id, request = peer.receive()
    assert (same, request) == (who, messages.Release((9).to_bytes(8, "little")))
    peer.answer(who, request_id, messages.CountReply(1))
    result()
    assert not channel.debts


def test_a_debt_stays_when_nobody_answers_and_goes_when_it_is_refused(peer: Peer, channel: Channel) -> None:
    channel.debts.owe(messages.Abort((7).to_bytes(8, "little")))
    with pytest.raises(SidecarUnavailable):
        channel.debts.pay(channel, 0.02)
    assert channel.debts
    peer.receive()
    result = in_background(lambda: channel.debts.pay(channel, PATIENCE_S))
    who, request_id, _ = peer.receive()
    peer.answer(who, request_id, messages.ErrorReply(ErrorCode.BAD_VALUE.value, "no such tag"))
    result()
    assert not channel.debts


def test_a_debt_stays_when_the_sidecar_fails_while_it_is_paid(peer: Peer, channel: Channel) -> None:
    channel.debts.owe(messages.Release((7).to_bytes(8, "little")))
    result = in_background(lambda: channel.debts.pay(channel, PATIENCE_S))
    who, request_id, _ = peer.receive()
    peer.answer(who, request_id, messages.ErrorReply(ErrorCode.INTERNAL.value, "a fault of its own"))
    with pytest.raises(SidecarRefused, match="a fault of its own"):
        result()
    assert channel.debts


@pytest.mark.parametrize("code", [ErrorCode.NO_SESSION, ErrorCode.INTERNAL])
def test_what_is_only_told_is_answered_on_the_way_to_a_later_reply(peer: Peer, channel: Channel, code: ErrorCode) -> None:
    for tag in (7, 8, 9):
        channel.tell(messages.Release(tag.to_bytes(8, "little")), PATIENCE_S)
    told = [peer.receive() for _ in range(3)]
    assert [int.from_bytes(request.tags, "little") for _, _, request in told] == [7, 8, 9]
    result = in_background(lambda: channel.ask(messages.StatusRequest(), PATIENCE_S))
    who, request_id, _ = peer.receive()
    peer.answer(who, told[0][1], messages.CountReply(1))
    peer.answer(who, told[1][1], messages.ErrorReply(code.value, "not done"))
    peer.answer(who, request_id, messages.StatusReply({}))  # the third answer is lost
    result()
    peer_asks = in_background(lambda: channel.debts.pay(channel, PATIENCE_S))
    who, request_id, owed = peer.receive()
    assert {int.from_bytes(owed.tags[at : at + 8], "little") for at in (0, 8)} == {8, 9}
    peer.answer(who, request_id, messages.CountReply(2))
    peer_asks()


def test_what_was_told_to_a_sidecar_that_went_is_owed(peer: Peer, channel: Channel) -> None:
    channel.tell(messages.Release(bytes(8)), PATIENCE_S)
    peer.receive()
    assert not channel.debts
    assert channel.unpaid()


def test_answers_that_nobody_reads_are_bounded(peer: Peer, channel: Channel) -> None:
    for _ in range(MAX_TOLD):
        channel.tell(messages.Release(bytes(8)), PATIENCE_S)
    result = in_background(lambda: channel.tell(messages.Release(bytes(8)), PATIENCE_S))
    for _ in range(MAX_TOLD + 1):
        who, request_id, _ = peer.receive()
        peer.answer(who, request_id, messages.CountReply(0))
    result()
    assert not channel.unpaid()


def test_an_error_reply_is_raised_with_its_code(peer: Peer, channel: Channel) -> None:
    result = in_background(lambda: channel.ask(messages.StatusRequest(), PATIENCE_S))
    who, request_id, _ = peer.receive()
    peer.answer(who, request_id, messages.ErrorReply("SOMETHING_NEW", "of a newer sidecar"))
    with pytest.raises(SidecarRefused, match="of a newer sidecar") as caught:
        result()
    assert caught.value.code == "SOMETHING_NEW"


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"\x80", b"\xc1" * 40])
def test_bytes_that_no_sidecar_sends_break_the_channel(peer: Peer, channel: Channel, garbage: bytes) -> None:
    result = in_background(lambda: channel.ask(messages.StatusRequest(), PATIENCE_S))
    who, _, _ = peer.receive()
    peer.socket.send_multipart([who, garbage])
    with pytest.raises(SidecarUnavailable, match="not a HostKV sidecar"):
        result()
    assert channel.broken


def test_a_batch_reply_of_another_length_breaks_the_channel(peer: Peer, channel: Channel) -> None:
    result = in_background(lambda: channel.ask(messages.Acquire(0, 1, bytes(64)), PATIENCE_S, count=2))
    who, request_id, _ = peer.receive()
    peer.answer(who, request_id, messages.HandlesReply(bytes(1), bytes(4), bytes(8)))
    with pytest.raises(SidecarUnavailable, match="not a HostKV sidecar"):
        result()


def test_a_waiting_request_ends_when_its_sidecar_goes(peer: Peer, channel: Channel) -> None:
    result = in_background(lambda: channel.ask(messages.StatusRequest(), 2 * PATIENCE_S))
    peer.receive()
    peer.close()
    with pytest.raises(SidecarUnavailable, match=r"closed the connection|cannot receive"):
        result()
    assert channel.broken


def test_a_channel_to_nobody_says_what_to_do(tmp_path: Path) -> None:
    left = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(left))
    with pytest.raises(SidecarUnavailable, match=r"nobody listens .*\(Connection refused\); start one with: hostkv serve"):
        Channel(str(left))


def test_a_process_without_a_file_to_spare_is_told_so_and_goes_on_uncached(
    tmp_path: Path, client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    peer = Peer(tmp_path / "control.sock")
    monkeypatch.setattr(socket, "socket", no_file)
    client._next_try_s = 0.0
    assert store.lookup(IDS) == [False, False, False]
    assert "raise ulimit -n" in client.down_reason
    peer.close()


# ---- ZMTP, whose other end is libzmq above, and bytes that the test writes here -------------------------------------------------------
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"


class Bytes:
    """Who listens, and writes what the test says."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(1)

    def accept(self) -> socket.socket:
        return self._listener.accept()[0]

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[Channel, socket.socket]]:
    listener = Bytes(tmp_path / "bytes.sock")
    channel = Channel(listener.path)
    with listener.accept() as theirs:
        yield channel, theirs
    channel.close()
    listener.close()


def status(channel: Channel, timeout_s: float = PATIENCE_S) -> Callable[[], Any]:
    return in_background(lambda: channel.ask(messages.StatusRequest(), timeout_s).status)


def reply_to_the_first(value: Any) -> bytes:
    body = messages.encode_reply(messages.StatusReply(value), 1, bytes(16))
    return (bytes((0, len(body))) if len(body) < 256 else b"\x02" + len(body).to_bytes(8, "big")) + body


def test_what_comes_in_pieces_is_put_together(scripted: tuple[Channel, socket.socket]) -> None:
    channel, theirs = scripted
    result = status(channel)
    ping = b"\x04\x07\x04PING\x00\x00"  # a command, which is no message
    for byte in GREETING + READY + ping + reply_to_the_first({"text": "x" * 300}):
        theirs.send(bytes((byte,)))
    assert result() == {"text": "x" * 300}


@pytest.mark.parametrize(
    "sent",
    [
        bytes(64),
        b"HTTP/1.1 400 Bad Request\r\n" * 3,
        GREETING[:10] + b"\x02" + GREETING[11:],  # ZMTP 2
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:] + READY,
        GREETING + b"\x04\x07\x05ERROR\x00",
        GREETING + b"\x00\x01x",  # a message before READY
        GREETING + READY + b"\x01\x01x",  # one of two frames
        GREETING + READY + b"\x40\x01x",
        GREETING + READY + b"\x02" + (1 << 40).to_bytes(8, "big"),
    ],
)
def test_who_is_no_sidecar_is_told_so(scripted: tuple[Channel, socket.socket], sent: bytes) -> None:
    channel, theirs = scripted
    result = status(channel)
    theirs.sendall(sent)
    with pytest.raises(SidecarUnavailable, match="not a HostKV sidecar"):
        result()
    assert channel.broken


@pytest.mark.parametrize("length", [0, 1, 63, 64, 70, len(GREETING + READY), len(GREETING + READY) + 5])
def test_who_ends_or_falls_silent_anywhere_ends_the_wait(scripted: tuple[Channel, socket.socket], length: int) -> None:
    channel, theirs = scripted
    theirs.sendall((GREETING + READY + reply_to_the_first({}))[:length])
    with pytest.raises(SidecarUnavailable, match="no answer to"):
        channel.ask(messages.StatusRequest(), 0.05)
    assert channel.broken == (length < len(GREETING + READY)), "who was not met cannot be asked again"
    theirs.close()
    with pytest.raises(SidecarUnavailable):
        channel.ask(messages.StatusRequest(), PATIENCE_S)
    assert channel.broken


def test_what_trickles_does_not_hold_who_waits(scripted: tuple[Channel, socket.socket]) -> None:
    channel, theirs = scripted
    theirs.sendall(GREETING + READY + b"\x02" + (1 << 20).to_bytes(8, "big"))
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.0002):
            with suppress(BlockingIOError):  # full, while nobody has the time to read
                theirs.send(b"x", socket.MSG_DONTWAIT)

    result = in_background(trickle)
    with pytest.raises(SidecarUnavailable, match="no answer to status"):
        channel.ask(messages.StatusRequest(), 0.05)
    ended.set()
    assert len(channel._received) < 1 << 20, "it was waited for to the end"
    result()


def test_a_request_that_nobody_reads_ends_in_time(scripted: tuple[Channel, socket.socket]) -> None:
    channel, theirs = scripted
    theirs.sendall(GREETING + READY)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with pytest.raises(SidecarUnavailable, match="cannot send"):
        channel.tell(messages.Discard(0, bytes(32 * 8192), bytes(8 * 8192)), 0.05)
    assert channel.broken


def test_the_largest_messages_go_both_ways(peer: Peer, channel: Channel) -> None:
    keys = os.urandom(32 * messages.MAX_KEYS)
    result = in_background(lambda: channel.ask(messages.Acquire(0, 1, keys), PATIENCE_S, count=messages.MAX_KEYS))
    who, request_id, request = peer.receive()
    assert request.keys == keys
    answer = messages.HandlesReply(bytes(messages.MAX_KEYS), os.urandom(4 * messages.MAX_KEYS), os.urandom(8 * messages.MAX_KEYS))
    peer.answer(who, request_id, answer)
    assert result() == answer


@pytest.mark.usefixtures("patient_clients")
def test_a_channel_whose_request_was_cut_short_by_an_interrupt_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sidecar(tmp_path) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(LAYOUT)

        def interrupted(*_: object) -> bytes:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "_receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.acquire(IDS, client.new_tag())
        assert not client._channels, "its next answer would be that of this request"
        assert store.wait(store.dump(IDS, 0, buffers()), PATIENCE_S) == ["committed"] * len(IDS)
