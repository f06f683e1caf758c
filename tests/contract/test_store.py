"""The nine methods of the store contract, and the calls for engine connectors beneath them, against a real sidecar."""

from __future__ import annotations

import ctypes
import pickle
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hostkv.connector import Client, DumpError, Keys, Layout, LoadError, NamespaceError, SidecarRefused, SidecarUnavailable, Store
from hostkv.connector import store as store_module
from hostkv.connector.channel import Channel
from hostkv.connector.client import MAX_CHANNELS
from hostkv.schemas.errors import ErrorCode, Status
from hostkv.schemas.messages import MAX_KEYS, MAX_TAGS, Bye, Register, Request, Reserve

from tests.support import LIFE_S, PATIENT_PROGRAM, Sidecar, until

POOL = "64MiB"
BLOCK = 1 << 20  # of the tests that fill the pool
_salts = iter(range(1 << 30))
pytestmark = pytest.mark.usefixtures("patient_clients")


@pytest.fixture(scope="module", params=["off", "load"])
def sidecar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    config = f"{{pool: {{max_blocks: 16384}}, verify: {request.param}}}"
    with Sidecar(tmp_path_factory.mktemp("run"), pool_size=POOL, config=config) as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with Client(sidecar.endpoint) as client:
        yield client


def layout(**fields: Any) -> Layout:
    """A namespace that no other test uses."""
    defaults = {"model": "m", "revision": "1", "kv_dtype": "uint8", "layout_id": "opaque", "block_tokens": 16, "shard_bytes": 4096}
    return Layout(**{**defaults, "salt": str(next(_salts)), **fields})


def content(block_id: bytes, shard: int, size: int) -> bytes:
    return random.Random(block_id + bytes([shard])).randbytes(size)


BUFFERS: dict[str, Callable[[bytes], Any]] = {
    "bytearray": bytearray,
    "numpy": lambda data: numpy.frombuffer(bytearray(data), numpy.uint8),
    "array": lambda data: array("B", data),
}


def save(store: Store, ids: list[bytes], shard: int = 0) -> list[str]:
    size = store.layout.shard_bytes
    return store.wait(store.dump(ids, shard, [[content(i, shard, size)] for i in ids]))


def loaded(store: Store, ids: list[bytes], shard: int = 0) -> list[bytes]:
    buffers = [[bytearray(store.layout.shard_bytes)] for _ in ids]
    store.wait(store.load(ids, shard, buffers))
    return [bytes(row[0]) for row in buffers]


# ---- what is saved is what is loaded -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("size", [1, 4095, 4097])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("id_bytes", [1, 32, 64])
def test_what_is_dumped_is_loaded_byte_for_byte(client: Client, id_bytes: int, shards: int, size: int, kind: str) -> None:
    store = client.open(layout(shard_bytes=size, shards=shards))
    ids = [bytes([i]) * id_bytes for i in range(5)]
    pairs = [(i, shard) for i in ids for shard in range(shards)]
    sources = [[BUFFERS[kind](content(i, shard, size))] for i, shard in pairs]
    names, numbers = [i for i, _ in pairs], [shard for _, shard in pairs]
    assert store.wait(store.dump(names, numbers, sources)) == ["committed"] * len(pairs)
    assert store.lookup(ids) == [True] * 5
    targets = [[BUFFERS[kind](bytes(size))] for _ in pairs]
    store.wait(store.load(names, numbers, targets))
    assert [bytes(memoryview(row[0])) for row in targets] == [content(i, shard, size) for i, shard in pairs]


def test_pieces_of_several_sizes_make_one_block(client: Client) -> None:
    store = client.open(layout(shard_bytes=10000), [1, 8191, 1808])
    whole = content(b"x", 0, 10000)
    pieces = [whole[:1], whole[1:8192], whole[8192:]]
    store.wait(store.dump([b"x"], 0, [pieces]))
    targets = [bytearray(1), bytearray(8191), bytearray(1808)]
    store.wait(store.load([b"x"], 0, [targets]))
    assert b"".join(targets) == whole


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", ["numpy", "array", "lists"])
def test_raw_addresses_do_the_same(sidecar: Sidecar, threads: int, form: str) -> None:
    with Client(sidecar.endpoint, copy_threads=threads) as client:
        store = client.open(layout(shard_bytes=1 << 17))
        source = numpy.random.default_rng(5).integers(0, 256, (4, 1 << 17), numpy.uint8)
        target = numpy.zeros_like(source)
        ids = [b"%d" % i for i in range(4)]

        def addresses(buffer: Any) -> Any:
            table = buffer.ctypes.data + numpy.arange(16, dtype=numpy.uint64).reshape(4, 4) * (1 << 15)
            return {"numpy": table, "array": array("Q", table.ravel().tolist()), "lists": table.tolist()}[form]

        store.wait(store.dump_data(ids, 0, addresses(source)))
        store.wait(store.load_data(ids, 0, addresses(target)))
        assert (source == target).all()


def test_more_keys_than_one_message_holds_are_split(client: Client) -> None:
    count = MAX_KEYS + 8
    store = client.open(layout(shard_bytes=8))
    source, target = numpy.arange(count, dtype=numpy.uint64), numpy.zeros(count, numpy.uint64)
    ids = [b"%d" % i for i in range(count)]
    steps = numpy.arange(count, dtype=numpy.uint64) * 8
    assert set(store.wait(store.dump_data(ids, 0, source.ctypes.data + steps))) == {"committed"}
    assert store.lookup_on_prefix(ids) == count - 1
    store.wait(store.load_data(ids, 0, target.ctypes.data + steps))
    assert (source == target).all()


def test_more_keys_than_one_message_holds_are_asked_for_in_several(client: Client) -> None:
    store = client.open(layout())
    asked = client.status()["requests"]["prefetch"]
    store.bring(Keys(bytes(32) * (2 * MAX_KEYS + 1)), 0)
    status = client.status()
    assert (status["requests"]["prefetch"] - asked, status["errors"]["TOO_LARGE"]) == (3, 0)


# ---- lookups -----------------------------------------------------------------------------------------------------------------------
def test_lookups_tell_each_the_run_from_the_front_and_the_rightmost(client: Client) -> None:
    store = client.open(layout())
    save(store, [b"0", b"1", b"3"])
    ids = [b"0", b"1", b"2", b"3", b"4"]
    for form in (ids, store.keys(ids)):
        assert store.lookup(form) == [True, True, False, True, False]
        assert store.lookup_on_prefix(form) == 1
        assert store.lookup_on_reverse(form) == 3
    assert store.lookup_on_prefix([b"2", b"3"]) == -1
    assert store.lookup_on_reverse([b"2", b"4"]) == -1
    assert client.counters.as_dict()["lookups"] == 34
    assert client.counters.as_dict()["hits"] == 2 * (3 + 2 + 1)


@pytest.mark.parametrize("field", [{"salt": "other"}, {"model": "other"}, {"kv_dtype": "float8_e4m3fn"}, {"revision": "2"}, {"tp_size": 2}])
def test_another_namespace_is_a_miss(client: Client, field: dict[str, Any]) -> None:
    ours = layout()
    save(client.open(ours), [b"a"])
    theirs = Layout(**{**{name: getattr(ours, name) for name in ours.__slots__}, **field})
    assert client.open(ours).lookup([b"a"]) == [True]
    assert client.open(theirs).lookup([b"a"]) == [False]


def test_keys_pickled_here_find_the_block_in_another_process(client: Client, sidecar: Sidecar) -> None:
    ours = layout()
    store = client.open(ours)
    save(store, [b"a", b"b"])
    assert (
        another_process(sidecar, ours, "print(store.lookup(pickle.loads(bytes.fromhex(argument))))", store.keys([b"a", b"z"]))
        == "[True, False]"
    )


def another_process(sidecar: Sidecar, ours: Layout, code: str, argument: Any = None) -> str:
    """What `code`, with `client`, `store` and `argument` (pickled, in hex), prints in a process of its own."""
    program = f"""
import pickle, sys
from hostkv.connector import Client
{PATIENT_PROGRAM}
endpoint, layout, argument = sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2])), sys.argv[3]
with Client(endpoint) as client:
    store = client.open(layout)
    {code}
"""
    pickled = [pickle.dumps(ours).hex(), pickle.dumps(argument).hex()]
    done = subprocess.run(
        [sys.executable, "-c", program, sidecar.endpoint, *pickled], capture_output=True, text=True, check=True, timeout=LIFE_S
    )
    return done.stdout.strip()


# ---- visibility --------------------------------------------------------------------------------------------------------------------
def test_a_block_is_visible_elsewhere_when_its_last_shard_is_committed_and_not_before(client: Client, sidecar: Sidecar) -> None:
    ours = layout(shards=3)
    store = client.open(ours)
    look = "print(store.lookup([b'a']), store.acquire([b'a'], 1).run)"
    for shard in (2, 0):
        assert save(store, [b"a"], shard) == ["committed"]
        assert store.lookup([b"a"]) == [False]
        assert another_process(sidecar, ours, look) == "[False] 0"
    assert save(store, [b"a"], 1) == ["committed"]
    assert another_process(sidecar, ours, look) == "[True] 1"


def test_what_is_there_is_present_and_stays_as_it_was(client: Client) -> None:
    store = client.open(layout())
    save(store, [b"a"])
    assert store.wait(store.dump([b"a", b"b"], 0, [[bytes(4096)], [content(b"b", 0, 4096)]])) == ["present", "committed"]
    assert loaded(store, [b"a", b"b"]) == [content(b"a", 0, 4096), content(b"b", 0, 4096)]


def test_a_shard_that_another_member_is_writing_is_busy_and_no_error(client: Client, sidecar: Sidecar) -> None:
    store = client.open(layout(shards=2))
    with Client(sidecar.endpoint) as other:
        reserve = Reserve(0, other.new_tag(), other.open(store.layout).keys([b"a"]).joined, bytes(2))
        other.call(reserve, fingerprint=store.fingerprint, count=1)
        assert store.wait(store.dump([b"a", b"a"], [0, 1], [[bytes(4096)]] * 2)) == ["busy", "committed"]
        assert store.lookup([b"a"]) == [False]
    assert client.counters.dropped_saves == 0
    assert save(store, [b"a"], 0) == ["committed"]  # the other has said goodbye, so its right has ended
    assert store.lookup([b"a"]) == [True]


# ---- failures are exactly those that failed ----------------------------------------------------------------------------------------
def test_an_absent_block_fails_alone(client: Client) -> None:
    store = client.open(layout())
    save(store, [b"a", b"c"])
    buffers = [[bytearray(4096)] for _ in range(4)]
    with pytest.raises(LoadError, match="2 of 4") as caught:
        store.wait(store.load([b"a", b"b", b"c", b"d"], 0, buffers))
    assert caught.value.failed == [b"b", b"d"]
    assert [bytes(buffers[i][0]) for i in (0, 2)] == [content(b"a", 0, 4096), content(b"c", 0, 4096)]
    assert client.counters.failed_loads == 2
    until(lambda: client.status()["pins"] == 0)


def test_a_pool_full_of_pinned_blocks_fails_the_dump_of_those_that_had_no_room(client: Client) -> None:
    store = client.open(layout(shard_bytes=BLOCK))
    tag = client.new_tag()
    ids = [b"%d" % i for i in range(80)]
    fits = 0
    for block_id in ids:
        try:
            save(store, [block_id])
        except DumpError:
            break
        fits += store.acquire([block_id], tag).run
    assert 48 <= fits < 80
    with pytest.raises(DumpError, match="2 FULL") as caught:
        store.wait(store.dump([ids[0], b"x", b"y"], 0, [[bytes(BLOCK)]] * 3))
    assert caught.value.failed == [b"x", b"y"]
    assert client.counters.dropped_saves >= 2
    assert loaded(store, ids[:3]) == [content(i, 0, BLOCK) for i in ids[:3]]
    store.release([tag])
    assert save(store, [b"x", b"y"]) == ["committed"] * 2


def test_dumps_larger_than_what_one_member_may_write_at_a_time_are_stored_whole(client: Client) -> None:
    store = client.open(layout(shard_bytes=BLOCK))
    source = numpy.arange(20 * BLOCK, dtype=numpy.uint32).view(numpy.uint8)[: 20 * BLOCK].reshape(20, BLOCK)
    ids = [b"%d" % i for i in range(40)]
    both = [store.dump(some, 0, [[row] for row in source]) for some in (ids[:20], ids[20:])]
    assert [store.wait(task) for task in both] == [["committed"] * 20] * 2
    target = numpy.zeros((40, BLOCK), numpy.uint8)
    store.wait(store.load(ids, 0, [[row] for row in target]))
    assert (target.reshape(2, 20, BLOCK) == source).all()
    assert client.counters.dropped_saves == 0


def test_a_load_pins_an_eighth_of_the_pool_at_a_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store = client.open(layout(shard_bytes=BLOCK))
    ids = [b"%d" % i for i in range(20)]
    save(store, ids)
    pinned, acquire = [], store.acquire

    def counted(keys: Keys, tag: int, wait_s: float) -> Any:
        pinned.append(len(keys))
        return acquire(keys, tag, wait_s)

    monkeypatch.setattr(store, "acquire", counted)
    assert loaded(store, ids) == [content(i, 0, BLOCK) for i in ids]
    assert pinned == [8, 8, 4]


def test_what_is_over_what_one_member_may_write_at_a_time_is_a_dropped_save(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "TRANSFER_SHARE", 1)
    store = client.open(layout(shard_bytes=BLOCK))
    ids = [b"%d" % i for i in range(48)]
    with pytest.raises(DumpError, match="16 of 48 were not stored: 16 THROTTLED") as caught:
        store.wait(store.dump(ids, 0, [[bytes(BLOCK)]] * 48))
    assert caught.value.failed == ids[32:]
    assert client.counters.dropped_saves == 16


def test_a_layout_whose_block_cannot_fit_is_refused_when_it_is_opened(client: Client) -> None:
    with pytest.raises(NamespaceError, match="extent"):
        client.open(layout(shard_bytes=65 << 20))


@pytest.mark.parametrize("code", [ErrorCode.LIMIT, ErrorCode.NO_SESSION])
def test_a_namespace_that_was_refused_for_now_leaves_its_store_uncached_for_now(
    client: Client, code: ErrorCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Channel.ask

    def refuse(self: Channel, request: Request, timeout_s: float, count: int | None = None) -> Any:
        if isinstance(request, Register):
            raise SidecarRefused(code.value, "not now")
        return real(self, request, timeout_s, count)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "ask", refuse)
        store = client.open(layout())
        assert store.lookup([b"a"]) == [False]
        with pytest.raises(DumpError, match=code.value):
            save(store, [b"a"])
        with pytest.raises(SidecarUnavailable, match=code.value):
            store.clear()

    def stored() -> bool:
        try:
            return save(store, [b"a"]) == ["committed"]
        except DumpError:
            return False

    until(stored)
    assert store.lookup([b"a"]) == [True]


def test_clear_invalidates_this_namespace_and_no_other(client: Client) -> None:
    cleared, kept = client.open(layout()), client.open(layout())
    save(cleared, [b"a"])
    save(kept, [b"a"])
    cleared.clear()
    assert (cleared.lookup([b"a"]), kept.lookup([b"a"])) == ([False], [True])
    assert save(cleared, [b"a"]) == ["committed"]


# ---- acquire, read, write, release -------------------------------------------------------------------------------------------------
def fill(store: Store, count: int = 70) -> None:
    for i in range(count):
        save(store, [b"filler %d" % i])


def test_pinned_blocks_outlive_any_pressure_and_others_do_not(client: Client) -> None:
    store = client.open(layout(shard_bytes=BLOCK))
    ids = [b"a", b"b"]
    save(store, ids)
    tag = client.new_tag()
    handles = store.acquire(ids[:1], tag)
    fill(store)
    assert store.lookup(ids) == [True, False]
    target = numpy.zeros(BLOCK, numpy.uint8)
    assert store.read(pickle.loads(pickle.dumps(handles)), 0, [[target.ctypes.data]]) == []
    assert target.tobytes() == content(b"a", 0, BLOCK)
    store.release([tag])
    fill(store)
    assert store.lookup(ids) == [False, False]


def test_a_handle_whose_block_is_gone_fails_the_read_and_not_its_neighbour(client: Client) -> None:
    store = client.open(layout(shard_bytes=BLOCK))
    save(store, [b"a", b"b"])
    gone, kept = client.new_tag(), client.new_tag()
    handles = store.acquire([b"a", b"b", b"absent"], gone)
    store.acquire([b"b"], kept)
    assert (handles.run, handles.statuses[2]) == (2, Status.MISS)
    store.release([gone])
    fill(store)
    target = numpy.zeros((3, BLOCK), numpy.uint8)
    assert store.read(handles, 0, (target.ctypes.data + numpy.arange(3, dtype=numpy.uint64) * BLOCK).reshape(3, 1)) == [0, 2]
    assert target[1].tobytes() == content(b"b", 0, BLOCK)
    assert client.counters.failed_loads == 2
    store.release([kept])


def test_located_blocks_are_read_without_a_pin(client: Client) -> None:
    store = client.open(layout(shard_bytes=BLOCK))
    save(store, [b"a", b"b"])
    handles = store.locate([b"a", b"absent", b"b"])
    assert list(handles.statuses) == [Status.OK, Status.MISS, Status.OK]
    assert client.status()["pins"] == 0
    target = numpy.zeros((3, BLOCK), numpy.uint8)
    addresses = (target.ctypes.data + numpy.arange(3, dtype=numpy.uint64) * BLOCK).reshape(3, 1)
    assert store.read(handles, 0, addresses) == [1]
    assert [row.tobytes() for row in target[::2]] == [content(i, 0, BLOCK) for i in (b"a", b"b")]
    fill(store)
    assert store.read(handles, 0, addresses) == [0, 1, 2]


def test_the_sidecar_hears_that_located_blocks_were_used(client: Client) -> None:
    store = client.open(layout(shard_bytes=BLOCK))
    ids = [b"%d" % i for i in range(64)]
    save(store, ids)
    before = client.status()["items"].get("released", 0)
    store.used(store.keys(ids[:8]))
    until(lambda: client.status()["items"].get("released", 0) == before + 8)
    fill(store, 8)
    assert store.lookup(ids) == [True] * 8 + [False] * 8 + [True] * 48


def test_what_is_placed_is_found_when_it_is_committed(client: Client) -> None:
    store = client.open(layout())
    save(store, [b"a"])
    sources = [numpy.frombuffer(content(i, 0, 4096), numpy.uint8).copy() for i in (b"a", b"b", b"c")]
    placed = store.place([b"a", b"b", b"c"], 0, [[source.ctypes.data] for source in sources])
    for source in sources:
        source[:] = 0
    assert list(placed.statuses) == [Status.EXISTS, Status.OK, Status.OK]
    assert store.lookup([b"a", b"b", b"c"]) == [True, False, False]
    assert store.commit(placed) == placed.statuses
    assert loaded(store, [b"a", b"b", b"c"]) == [content(i, 0, 4096) for i in (b"a", b"b", b"c")]
    lost = store.place([b"d"], 0, [[sources[0].ctypes.data]])
    client.give_back(lost.undo)
    assert list(store.commit(lost)) == [Status.NOT_HELD]
    assert store.lookup([b"d"]) == [False]


def test_write_tells_the_status_of_each_pair(client: Client) -> None:
    store = client.open(layout())
    save(store, [b"a"])
    source = numpy.frombuffer(content(b"b", 0, 4096), numpy.uint8)
    keys = store.keys([b"a", b"b"])
    assert store.write(keys, 0, [[source.ctypes.data]] * 2) == bytes([Status.EXISTS, Status.OK])
    assert store.write(keys, [0, 0], [[source.ctypes.data]] * 2) == bytes([Status.EXISTS, Status.EXISTS])
    assert loaded(store, [b"b"]) == [source.tobytes()]


def test_a_copy_that_fails_gives_back_what_was_reserved(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store = client.open(layout())
    link = client.mapped()
    assert link is not None
    with monkeypatch.context() as patch:
        patch.setattr(link, "pool", None)  # has no copy_in
        with pytest.raises(AttributeError):
            store.write([b"a"], 0, [[1]])
    assert client.status()["shards_in_flight"] == 0
    assert client.counters.dropped_saves == 1
    assert save(store, [b"a"]) == ["committed"]


def test_a_client_that_the_sidecar_forgot_says_hello_and_registers_again(client: Client) -> None:
    store = client.open(layout())
    client.call(Bye())
    assert save(store, [b"a"]) == ["committed"]
    assert store.lookup([b"a"]) == [True]
    assert client.counters.dropped_saves == 0


def greet_again(client: Client) -> None:
    link = client.mapped()
    assert link is not None
    link.fault = "to be greeted again"
    client._next_try_s = 0.0
    until(client.serving)


def test_all_connections_of_a_client_may_be_forgotten_at_once(client: Client) -> None:
    store = client.open(layout())
    for _ in range(MAX_CHANNELS - 1):
        greet_again(client)
    client.call(Bye())
    assert save(store, [b"a"]) == ["committed"]
    assert client.counters.dropped_saves == 0


def test_connections_stay_few_however_often_a_client_reconnects(client: Client) -> None:
    for _ in range(3 * MAX_CHANNELS):
        greet_again(client)
    assert len(client._channels) == MAX_CHANNELS
    client._channels.reverse()  # the oldest, which the sidecar has forgotten, come next
    assert save(client.open(layout()), [b"a"]) == ["committed"]


def test_pins_of_a_session_end_with_its_last_client(client: Client, sidecar: Sidecar) -> None:
    store = client.open(layout())
    save(store, [b"a"])
    session = bytes(range(16))
    first, second = Client(sidecar.endpoint, session=session), Client(sidecar.endpoint, session=session)
    first.open(store.layout).acquire([b"a"], first.new_tag())
    first.close()
    assert client.status()["pins"] == 1
    second.close()
    assert client.status()["pins"] == 0


def test_more_tags_than_one_message_holds_are_released(client: Client) -> None:
    store = client.open(layout())
    save(store, [b"a", b"b"])
    first, *others, last = (client.new_tag() for _ in range(MAX_TAGS + 2))
    for block_id, tag in ((b"a", first), (b"b", last)):
        assert store.acquire([block_id], tag).run == 1
    store.release([first, *others, last])
    assert client.status()["pins"] == 0


# ---- tasks and threads -------------------------------------------------------------------------------------------------------------
def test_a_task_is_done_after_wait_and_answers_again(client: Client) -> None:
    store = client.open(layout())
    task = store.dump([b"a"], 0, [[bytes(4096)]])
    assert store.wait(task, timeout_s=30) == ["committed"]
    assert store.check(task)
    assert store.wait(task) == ["committed"]
    assert store.wait(store.prefetch([b"a", b"z"])) == []


def test_threads_share_one_client(client: Client) -> None:
    store = client.open(layout(shard_bytes=5000))
    wrong: list[object] = []

    def work(number: int) -> None:
        for step in range(20):
            ids = [b"%d/%d/%d" % (number, step, i) for i in range(8)]
            try:
                save(store, ids)
                handles = store.acquire(ids, tag := client.new_tag())
                store.release([tag])
                if handles.run != 8 or loaded(store, ids) != [content(i, 0, 5000) for i in ids]:
                    wrong.append(ids)
            except Exception as error:  # noqa: BLE001 - shown by the assertion below
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    until(lambda: client.status()["pins"] == client.status()["shards_in_flight"] == 0)


def test_closing_a_client_finishes_what_is_queued(client: Client, sidecar: Sidecar) -> None:
    ours = layout()
    other = Client(sidecar.endpoint)
    store = other.open(ours)
    tasks = [store.dump([b"%d" % i], 0, [[content(b"%d" % i, 0, 4096)]]) for i in range(50)]
    other.close()
    assert all(store.check(task) for task in tasks)
    assert client.open(ours).lookup([b"%d" % i for i in range(50)]) == [True] * 50


def test_a_client_that_never_closes_leaves_nothing(client: Client, sidecar: Sidecar, tmp_path: Path) -> None:
    ours = layout()
    before = client.status()["members_gone"]
    another_process(sidecar, ours, "import os; store.acquire([b'a'], 1); os._exit(0)")
    until(lambda: client.status()["members_gone"] > before)


def test_an_empty_slice_of_keys_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="empty"):
        client.open(layout()).acquire(Keys(b""), 1)


def test_the_struct_for_c_finds_what_the_store_finds(client: Client) -> None:
    store = client.open(layout(shards=2))
    address = store.cc_store()
    assert address == store.cc_store()
    abi_version, struct_bytes = (ctypes.c_uint32 * 2).from_address(address)
    assert (abi_version, struct_bytes > 64) == (1, True)
    assert bytes((ctypes.c_uint8 * 32).from_address(address + 8)) == store.fingerprint


def test_threads_that_ask_for_the_struct_at_once_get_the_same(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store = client.open(layout())
    both, real, got = threading.Barrier(2), store_module.CStore, []

    def make(*arguments: Any) -> Any:
        made = real(*arguments)
        both.wait()
        return made

    monkeypatch.setattr(store_module, "CStore", make)
    threads = [threading.Thread(target=lambda: got.append(store.cc_store())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [store.cc_store()] * 2


def test_the_struct_for_c_is_good_after_its_client_closed(sidecar: Sidecar) -> None:
    client = Client(sidecar.endpoint)
    store = client.open(layout())
    address = store.cc_store()
    client.close()
    assert bytes((ctypes.c_uint8 * 32).from_address(address + 8)) == store.fingerprint
    assert sidecar.pool_name in Path("/proc/self/maps").read_text()


# ---- a process at its limits -----------------------------------------------------------------------------------------------------------
def test_without_a_thread_to_spare_the_pool_is_used_as_it_is(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def only_zeromq_starts(thread: threading.Thread) -> None:  # without its threads there is no connection
        if thread.name.startswith("hostkv-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_zeromq_starts)
    with Client(sidecar.endpoint) as client:
        store = client.open(layout())
        assert not client.warm(0)
        source = numpy.zeros(4096, numpy.uint8)
        assert store.write([b"a"], 0, [[source.ctypes.data]]) == bytes([Status.OK])
        with pytest.raises(SidecarUnavailable, match="no thread"):
            store.dump([b"b"], 0, [[source]])
        monkeypatch.undo()
        assert store.wait(store.dump([b"b"], 0, [[source]])) == ["committed"]
