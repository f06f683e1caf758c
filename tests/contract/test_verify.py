"""`verify: load`: bytes of the pool that changed behind the sidecar's back are never loaded as good, and the next save repairs them."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hostkv.connector import Client, Layout, LoadError, Store
from hostkv.schemas.errors import Status
from hostkv.schemas.messages import Commit, Reserve
from hostkv.schemas.namespace import PAGE_BYTES

from tests.support import Sidecar, until

SIZE = 5001  # of a shard; no multiple of a line, so that there are bytes between two shards
_salts = iter(range(1 << 30))
pytestmark = pytest.mark.usefixtures("patient_clients")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("run"), config="verify: load") as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with Client(sidecar.endpoint) as client:
        yield client


def layout(**fields: Any) -> Layout:
    """A namespace that no other test uses."""
    defaults = {"model": "m", "revision": "1", "kv_dtype": "uint8", "layout_id": "opaque", "block_tokens": 16, "shard_bytes": SIZE}
    return Layout(**{**defaults, "salt": str(next(_salts)), **fields})


def content(block_id: bytes, shard: int) -> bytes:
    return random.Random(block_id + bytes([shard])).randbytes(SIZE)


def save(store: Store, *ids: bytes) -> list[str]:
    """All shards of these blocks."""
    pairs = [(i, shard) for i in ids for shard in range(store.layout.shards)]
    return store.wait(store.dump([i for i, _ in pairs], [shard for _, shard in pairs], [[content(*pair)] for pair in pairs]))


def load(store: Store, ids: list[bytes], shard: int = 0) -> tuple[list[bytes], list[bytes]]:
    """The ids that failed, and those whose bytes are right."""
    buffers = [[bytearray(SIZE)] for _ in ids]
    failed = []
    try:
        store.wait(store.load(ids, shard, buffers))
    except LoadError as error:
        failed = error.failed
    return failed, [i for i, (buffer,) in zip(ids, buffers, strict=True) if buffer == content(i, shard)]


def offset(store: Store, block_id: bytes) -> int:
    """Where the block's slot lies in the pool."""
    tag = store._client.new_tag()
    handles = store.acquire([block_id], tag)
    assert handles.run == 1
    store.release([tag])
    until(lambda: store._client.status()["pins"] == 0)
    return int.from_bytes(handles.pages, "little") * PAGE_BYTES


def flip(sidecar: Sidecar, at: int) -> None:
    """What a stray write of another process does."""
    with sidecar.pool_path.open("r+b") as pool:
        byte = os.pread(pool.fileno(), 1, at)[0]
        os.pwrite(pool.fileno(), bytes([byte ^ 0x10]), at)


def saved_again(store: Store, block_id: bytes) -> None:
    """Saves it once the pins of those who found the damage have ended."""
    until(lambda: set(save(store, block_id)) == {"committed"})


@pytest.mark.parametrize("at", [0, 2600, SIZE - 1])
def test_a_stray_write_fails_its_block_alone_which_is_a_miss_for_everybody_until_the_next_save(
    client: Client, sidecar: Sidecar, at: int
) -> None:
    store = client.open(layout())
    ids = [b"a", b"b", b"c"]
    save(store, *ids)
    assert load(store, ids) == ([], ids)
    before = client.status()["items"]["discarded"]
    flip(sidecar, offset(store, b"b") + at)
    assert load(store, ids) == ([b"b"], [b"a", b"c"])
    assert (client.counters.corrupt_blocks, client.counters.failed_loads) == (1, 1)
    with Client(sidecar.endpoint) as other:
        theirs = other.open(store.layout)
        until(lambda: theirs.lookup(ids) == [True, False, True])
        assert load(theirs, ids) == ([b"b"], [b"a", b"c"])
        assert (other.counters.corrupt_blocks, other.counters.failed_loads) == (0, 1)
        saved_again(theirs, b"b")
    assert load(store, ids) == ([], ids)
    assert client.status()["items"]["discarded"] == before + 1


@pytest.mark.parametrize("loaded", range(4))
@pytest.mark.parametrize("hit", range(4))
def test_a_stray_write_into_any_shard_fails_the_load_of_every_shard(client: Client, sidecar: Sidecar, hit: int, loaded: int) -> None:
    store = client.open(layout(shards=4))
    save(store, b"a", b"b")
    assert load(store, [b"a", b"b"], loaded) == ([], [b"a", b"b"])
    flip(sidecar, offset(store, b"b") + hit * store.layout.shard_stride + 1234)
    assert load(store, [b"a", b"b"], loaded)[0] == [b"b"]
    assert client.counters.corrupt_blocks == 1
    until(lambda: store.lookup([b"a", b"b"]) == [True, False])
    saved_again(store, b"b")
    assert load(store, [b"a", b"b"], loaded) == ([], [b"a", b"b"])


def test_a_block_whose_shards_are_loaded_together_is_counted_once(client: Client, sidecar: Sidecar) -> None:
    store = client.open(layout(shards=4))
    save(store, b"a", b"b")
    flip(sidecar, offset(store, b"a"))
    with pytest.raises(LoadError, match="4 of 8") as caught:
        store.wait(store.load([b"a", b"b"] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [[bytearray(SIZE)] for _ in range(8)]))
    assert caught.value.failed == [b"a"] * 4
    assert client.counters.corrupt_blocks == 1
    until(lambda: store.lookup([b"a", b"b"]) == [False, True])


def test_bytes_between_shards_and_after_the_last_belong_to_nobody(client: Client, sidecar: Sidecar) -> None:
    store = client.open(layout(shards=2))
    save(store, b"a")
    start = offset(store, b"a")
    for at in (SIZE, store.layout.shard_stride - 1, store.layout.shard_stride + SIZE, store.layout.slot_bytes - 1):
        flip(sidecar, start + at)
    assert load(store, [b"a"], 0) == load(store, [b"a"], 1) == ([], [b"a"])


def test_whoever_has_pinned_a_damaged_block_is_told_too_and_it_is_free_when_they_let_go(client: Client, sidecar: Sidecar) -> None:
    store = client.open(layout())
    save(store, b"a")
    flip(sidecar, offset(store, b"a"))
    target = numpy.zeros(SIZE, numpy.uint8)
    with Client(sidecar.endpoint) as other:
        theirs = other.open(store.layout)
        handles = theirs.acquire([b"a"], tag := other.new_tag())
        assert load(store, [b"a"])[0] == [b"a"]
        until(lambda: store.lookup([b"a"]) == [False])
        assert theirs.read(handles, 0, [[target.ctypes.data]]) == [0]
        assert other.counters.corrupt_blocks == 1
        assert save(store, b"a") == ["busy"]
        theirs.release([tag])
        saved_again(store, b"a")
        assert load(theirs, [b"a"]) == ([], [b"a"])


def test_a_damaged_block_is_told_though_the_sidecar_hangs_and_discarded_by_who_loads_it_next(client: Client, sidecar: Sidecar) -> None:
    store = client.open(layout())
    save(store, b"a", b"b")
    flip(sidecar, offset(store, b"a"))
    handles = store.acquire([b"a", b"b"], tag := client.new_tag())
    target = numpy.zeros((2, SIZE), numpy.uint8)
    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        assert store.read(handles, 0, target.ctypes.data + numpy.array([[0], [SIZE]], numpy.uint64)) == [0]
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    assert target[1].tobytes() == content(b"b", 0)
    until(client.serving)
    store.release([tag])
    assert load(store, [b"a", b"b"]) == ([b"a"], [b"b"])
    until(lambda: store.lookup([b"a", b"b"]) == [False, True])
    saved_again(store, b"a")


def test_a_save_without_the_right_checksum_is_never_loaded(client: Client) -> None:
    store = client.open(layout())
    key, tag = store.keys([b"a"]).joined, client.new_tag()
    granted, _ = client.call(Reserve(0, tag, key, bytes(2)), fingerprint=store.fingerprint, count=1)
    done, _ = client.call(Commit(tag, key, bytes(2), granted.generations, bytes(8)), count=1)
    assert done.statuses == bytes([Status.OK])
    assert load(store, [b"a"])[0] == [b"a"]
    until(lambda: store.lookup([b"a"]) == [False])


def test_a_block_whose_source_changed_while_it_was_saved_is_what_was_stored(client: Client) -> None:
    store = client.open(layout(shard_bytes=1 << 20))
    source, target = numpy.zeros((8, 1 << 20), numpy.uint8), numpy.zeros((8, 1 << 20), numpy.uint8)
    done = threading.Event()

    def scribble() -> None:
        while not done.is_set():
            numpy.bitwise_xor(source, 0xFF, out=source)

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    torn = 0
    try:
        for attempt in range(1000):
            ids = [b"%d/%d" % (attempt, i) for i in range(8)]
            store.wait(store.dump(ids, 0, [[row] for row in source]))
            store.wait(store.load(ids, 0, [[row] for row in target]))
            torn += sum(int(row.min() != row.max()) for row in target)
            if torn >= 8:
                break
    finally:
        done.set()
        scribbler.join()
    assert torn >= 8


def test_checksums_outlive_the_sidecar(tmp_path: Path) -> None:
    with Sidecar(tmp_path, config="verify: load") as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(layout(shards=2))
        save(store, b"a", b"b")
        at = offset(store, b"b")
        sidecar.kill()
        flip(sidecar, at)
        sidecar.start()
        until(client.serving)
        assert load(store, [b"a", b"b"]) == ([b"b"], [b"a"])
        until(lambda: store.lookup([b"a", b"b"]) == [True, False])
        assert sidecar.status()["pool"]["adopted_blocks"] == 2


def test_a_reader_that_has_not_heard_that_verify_was_turned_off_finds_nothing_wrong(tmp_path: Path) -> None:
    """What is saved since then has no checksums."""
    target = numpy.zeros(SIZE, numpy.uint8)
    with Sidecar(tmp_path, config="verify: load") as sidecar, Client(sidecar.endpoint) as worker:
        store = worker.open(layout())
        save(store, b"a")
        sidecar.kill()
        (tmp_path / "hostkv.yaml").write_text("verify: off")
        assert sidecar.start()["adopted"] == "1"
        with Client(sidecar.endpoint) as scheduler:
            theirs = scheduler.open(store.layout)
            save(theirs, b"b")
            handles = theirs.acquire([b"b"], scheduler.new_tag())
            assert store.read(handles, 0, [[target.ctypes.data]]) == []
        assert target.tobytes() == content(b"b", 0)
        assert worker.counters.corrupt_blocks == 0


def test_without_verify_nobody_looks(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(layout())
        save(store, b"a", b"b")
        flip(sidecar, offset(store, b"b"))
        assert load(store, [b"a", b"b"]) == ([], [b"a"])
        assert client.counters.corrupt_blocks == client.counters.failed_loads == 0
        assert store.lookup([b"a", b"b"]) == [True, True]
        assert save(store, b"b") == ["present"]
