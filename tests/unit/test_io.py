"""The I/O engine: exact bytes both ways, checksums, records, bounds, errors and faults, on both engines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostkv.cext import Io, Mapping, xxh3_64
from hostkv.schemas.layout import PAGE, RECORD

from tests.fusefs import FuseFile, everything
from tests.support import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("io_uring", "threads")
POOL_BYTES = 1 << 20
BLOCK = 4 * PAGE
SEED = 5 << 32 | 7


def checksum(payload: bytes, shards: int, shard_bytes: int) -> int:
    stride = -(-shard_bytes // 64) * 64
    result = 0
    for shard in range(shards):
        result ^= xxh3_64(payload[shard * stride : shard * stride + shard_bytes], shard)
    return result


def require(engine: str) -> None:
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, PAGE)
    try:
        Io(fd, PAGE, engine=engine)
    except OSError as error:
        pytest.skip(str(error))
    finally:
        os.close(fd)


class Rig:
    """An Io on a pool of its own, which the test sees as `pool`, and a file that is opened as `direct` says."""

    def __init__(self, engine: str, path: Path, direct: bool = False, pool_bytes: int = POOL_BYTES, depth: int = 64) -> None:
        fd = os.memfd_create("hostkv-test")
        os.ftruncate(fd, pool_bytes)
        self.mapping = Mapping(fd, pool_bytes, True)
        self.pool = memoryview(self.mapping)
        self.io = Io(fd, pool_bytes, engine=engine, depth=depth)
        os.close(fd)
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        self.tokens = 0

    def op(self, kind: int, offset: int, at: int, size: int = BLOCK, **more: object) -> tuple:
        self.tokens += 1
        fields = {"token": self.tokens, "kind": kind, "fd": self.fd, "offset": offset, "at": at, "size": size}
        fields |= {"shards": 1, "shard_bytes": size, "checksum": None, "record_fd": -1, "record_offset": 0, "record": b""}
        return tuple((fields | more).values())

    def wait(self, count: int) -> dict[int, tuple[int, int]]:
        """(result, checksum) by token of the next `count` ops that end."""
        ended: dict[int, tuple[int, int]] = {}
        while len(ended) < count:
            assert select.select([self.io.fileno()], [], [], PATIENCE_S)[0]
            for token, result, value in self.io.reap():
                assert token not in ended
                ended[token] = (result, value)
        return ended

    def run(self, *ops: tuple) -> list[tuple[int, int]]:
        assert self.io.submit(ops) == len(ops)
        ended = self.wait(len(ops))
        return [ended[op[0]] for op in ops]

    def fill(self, at: int, size: int = BLOCK, seed: int = 1) -> bytes:
        payload = np.random.default_rng(seed).bytes(size)
        self.pool[at : at + size] = payload
        return payload

    def close(self) -> None:
        self.io.close()
        os.close(self.fd)
        self.pool.release()
        self.mapping.close()


@pytest.fixture(
    params=[(engine, direct) for engine in ENGINES for direct in (True, False)], ids=lambda p: f"{p[0]}-{'direct' if p[1] else 'buffered'}"
)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    require(request.param[0])
    rig = Rig(request.param[0], tmp_path / "slab", request.param[1])
    yield rig
    rig.close()


@pytest.fixture(params=ENGINES)
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    require(request.param)
    rigs = []

    def make(**more: object) -> Rig:
        rigs.append(Rig(request.param, tmp_path / f"slab{len(rigs)}", **more))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("shards, shard_bytes", [(1, BLOCK), (1, 1), (3, 5000), (4, PAGE), (64, 200)])
def test_a_block_comes_back_as_it_was_written(rig: Rig, shards: int, shard_bytes: int) -> None:
    payload = rig.fill(PAGE)
    expected = checksum(payload, shards, shard_bytes)
    shape = {"shards": shards, "shard_bytes": shard_bytes}
    assert rig.run(rig.op(Io.WRITE, 3 * PAGE, PAGE, **shape)) == [(0, expected)]
    assert rig.path.read_bytes() == bytes(3 * PAGE) + payload, "and nothing else was written"
    before = bytes(rig.pool)
    assert rig.run(rig.op(Io.READ, 3 * PAGE, 10 * PAGE, **shape, checksum=expected)) == [(0, expected)]
    assert bytes(rig.pool) == before[: 10 * PAGE] + payload + before[14 * PAGE :], "and nothing else was changed"


def test_a_flipped_bit_on_disk_is_found(rig: Rig) -> None:
    rig.fill(0)
    ((_, expected),) = rig.run(rig.op(Io.WRITE, 0, 0))
    for place in (0, 1234, BLOCK - 1):
        with rig.path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        ((result, value),) = rig.run(rig.op(Io.READ, 0, BLOCK, checksum=expected))
        assert result == Io.CORRUPT
        assert value == checksum(bytes(rig.pool[BLOCK : 2 * BLOCK]), 1, BLOCK), "the checksum of what was there"
        with rig.path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))
    assert rig.run(rig.op(Io.READ, 0, BLOCK, checksum=expected)) == [(0, expected)]


def test_a_write_of_other_bytes_than_expected_writes_nothing(rig: Rig, tmp_path: Path) -> None:
    payload = rig.fill(0)
    right = checksum(payload, 1, BLOCK)
    records = os.open(tmp_path / "records", os.O_RDWR | os.O_CREAT)
    record = {"record_fd": records, "record": bytes(64)}
    assert rig.run(rig.op(Io.WRITE, 0, 0, checksum=right ^ 1, **record)) == [(Io.CORRUPT, right)]
    assert rig.path.read_bytes() == b""
    assert os.fstat(records).st_size == 0
    assert rig.run(rig.op(Io.WRITE, 0, 0, checksum=right, **record)) == [(0, right)]
    assert rig.path.read_bytes() == payload
    os.close(records)


def test_a_record_follows_its_payload_byte_for_byte(rig: Rig, tmp_path: Path) -> None:
    payload = rig.fill(0)
    key, sequence, number = bytes(range(32)), 2**63 + 5, 77
    records = os.open(tmp_path / "records", os.O_RDWR | os.O_CREAT)
    unsealed = RECORD.pack(key, 0, sequence, number, BLOCK // PAGE, SEED)
    rig.run(rig.op(Io.WRITE, 0, 0, shards=2, shard_bytes=5000, record_fd=records, record_offset=3 * 64, record=unsealed))
    body = RECORD.pack(key, checksum(payload, 2, 5000), sequence, number, BLOCK // PAGE, 0)[:56]
    assert os.pread(records, 1000, 0) == bytes(3 * 64) + body + xxh3_64(body, SEED).to_bytes(8, "little")
    os.close(records)


def test_no_record_of_a_payload_that_was_not_written(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_rig()
    records = os.open(tmp_path / "records", os.O_RDWR | os.O_CREAT)
    full = os.open("/dev/full", os.O_RDWR)
    (result,) = rig.run(rig.op(Io.WRITE, 0, 0, fd=full, record_fd=records, record=bytes(64)))
    assert result[0] == errno.ENOSPC
    assert os.fstat(records).st_size == 0
    os.close(records)
    os.close(full)


def test_a_record_that_cannot_be_written_is_the_ops_error(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    full = os.open("/dev/full", os.O_RDWR)
    (result,) = rig.run(rig.op(Io.WRITE, 0, 0, record_fd=full, record=bytes(64)))
    assert result[0] == errno.ENOSPC
    os.close(full)


@pytest.mark.parametrize("size", [0, PAGE, BLOCK // 2, BLOCK - 1, BLOCK - 4095])
def test_a_file_that_ends_before_its_block_is_an_error_of_that_op_alone(rig: Rig, size: int) -> None:
    payload = rig.fill(0)
    rig.run(rig.op(Io.WRITE, 0, 0), rig.op(Io.WRITE, BLOCK, 0))
    os.truncate(rig.path, BLOCK + size)
    first, second = rig.run(rig.op(Io.READ, 0, BLOCK, checksum=checksum(payload, 1, BLOCK)), rig.op(Io.READ, BLOCK, 2 * BLOCK))
    assert first[0] == 0
    assert second[0] == errno.EIO


def test_errors_are_those_of_their_op(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    payload = rig.fill(0)
    read_only = os.open(rig.path, os.O_RDONLY)
    memory = os.open("/proc/self/mem", os.O_RDWR)
    results = rig.run(
        rig.op(Io.WRITE, 0, 0),
        rig.op(Io.WRITE, 0, 0, fd=read_only),
        rig.op(Io.WRITE, BLOCK, 0),
        rig.op(Io.READ, 0, BLOCK, fd=1 << 20),
        rig.op(Io.WRITE, 2 * BLOCK, 0),
        rig.op(Io.READ, 0, BLOCK, fd=memory),
        rig.op(Io.READ, 0, BLOCK, fd=-1),
        rig.op(Io.WRITE, 3 * BLOCK, 0),
    )
    assert [result for result, _ in results] == [0, errno.EBADF, 0, errno.EBADF, 0, errno.EIO, errno.EBADF, 0]
    assert rig.path.read_bytes() == 4 * payload
    os.close(read_only)
    os.close(memory)


def test_a_file_size_limit_is_an_error_and_no_signal(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.fill(0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, before[1]))
    try:
        first, second = rig.run(rig.op(Io.WRITE, 0, 0), rig.op(Io.WRITE, BLOCK, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert first[0] == 0
    assert second[0] == errno.EFBIG


def test_any_script_of_ops_leaves_what_a_model_says(rig: Rig) -> None:
    """Blocks of several sizes, each at most once under way: reads answer what was written last, whatever else goes on."""
    rng = random.Random(4)
    sizes = [PAGE, 2 * PAGE, 8 * PAGE, 16 * PAGE]
    places = [(i * 16 * PAGE, rng.choice(sizes)) for i in range(40)]
    pages = list(range(0, POOL_BYTES, 16 * PAGE))
    disk: dict[int, int] = {}
    flying: dict[int, tuple[int, int, int, int | None]] = {}
    free, idle = pages.copy(), list(range(len(places)))
    done = 0
    while done < 2000:
        ops = []
        while free and idle and done + len(flying) < 2000:
            at, place = free.pop(rng.randrange(len(free))), idle.pop(rng.randrange(len(idle)))
            offset, size = places[place]
            if place in disk and rng.random() < 0.5:
                wanted = disk[place] ^ (rng.random() < 0.1)
                op = rig.op(Io.READ, offset, at, size, checksum=wanted)
                flying[op[0]] = (place, at, Io.READ, wanted)
            else:
                rig.fill(at, size, rng.getrandbits(30))
                op = rig.op(Io.WRITE, offset, at, size)
                flying[op[0]] = (place, at, Io.WRITE, None)
            ops.append(op)
        assert rig.io.submit(ops) == len(ops)
        for token, (result, value) in rig.wait(1).items():
            place, at, kind, wanted = flying.pop(token)
            content = checksum(bytes(rig.pool[at : at + places[place][1]]), 1, places[place][1])
            assert value == content
            if kind == Io.WRITE:
                assert result == 0
                disk[place] = content
            else:
                assert content == disk[place]
                assert result == (0 if wanted == content else Io.CORRUPT)
            free.append(at)
            idle.append(place)
            done += 1
    with rig.path.open("rb") as file:
        for place, value in disk.items():
            file.seek(places[place][0])
            assert checksum(file.read(places[place][1]), 1, places[place][1]) == value


def test_a_full_queue_takes_no_more_and_loses_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(depth=2)
    rig.fill(0)
    rig.run(rig.op(Io.WRITE, 0, 0))
    ops = [rig.op(Io.READ, 0, i * BLOCK) for i in range(20)]
    assert rig.io.submit(ops) == 8, "four times the depth, until they are reaped"
    select.select([rig.io.fileno()], [], [])
    assert rig.io.submit(ops[8:]) == 0, "also those that ended are held"
    ended: dict[int, tuple[int, int]] = {}
    taken = 8
    while len(ended) < 20:
        ended |= rig.wait(1)
        taken += rig.io.submit(ops[taken:])
    assert taken == 20
    assert {result for result, _ in ended.values()} == {0}
    assert sorted(ended) == [op[0] for op in ops]


def test_the_event_is_readable_exactly_while_there_is_something_to_reap(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    assert not select.select([rig.io.fileno()], [], [], 0)[0]
    assert rig.io.reap() == []
    rig.io.submit([rig.op(Io.WRITE, 0, 0)])
    assert select.select([rig.io.fileno()], [], [])[0]
    assert len(rig.io.reap()) == 1
    assert not select.select([rig.io.fileno()], [], [], 0)[0]


BAD = [
    ({"kind": 2}, ValueError, "kind"),
    ({"kind": -1}, ValueError, "kind"),
    ({"offset": 512}, ValueError, "offset"),
    ({"offset": -PAGE}, ValueError, "offset"),
    ({"at": 64}, ValueError, "at"),
    ({"at": POOL_BYTES - BLOCK + PAGE}, ValueError, "outside"),
    ({"at": 2**64 - PAGE}, ValueError, "outside"),
    ({"size": 0}, ValueError, "size"),
    ({"size": 100}, ValueError, "size"),
    ({"size": POOL_BYTES + PAGE}, ValueError, "outside"),
    ({"shards": 0}, ValueError, "shards"),
    ({"shards": 65}, ValueError, "shards"),
    ({"shard_bytes": 0}, ValueError, "shard_bytes"),
    ({"shard_bytes": BLOCK + 1}, ValueError, "shard_bytes"),
    ({"shard_bytes": 2**64 - 1}, ValueError, "shard_bytes"),
    ({"shards": 2, "shard_bytes": BLOCK // 2 + 1}, ValueError, "shard_bytes"),
    ({"checksum": "x"}, TypeError, "int"),
    ({"checksum": -1}, OverflowError, "int"),
    ({"record_fd": 0, "record": bytes(63)}, ValueError, "record"),
    ({"token": "x"}, TypeError, "int"),
]


@pytest.mark.parametrize("wrong, error, message", BAD, ids=lambda p: str(p)[:40])
def test_an_op_that_makes_no_sense_is_refused_and_none_of_its_batch_begins(
    make_rig: Callable[..., Rig], wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    rig = make_rig()
    bad = dict(zip(("token", "kind", "fd", "offset", "at", "size"), rig.op(Io.WRITE, 0, 0)[:6], strict=True)) | wrong
    with pytest.raises(error, match=message):
        rig.io.submit([rig.op(Io.WRITE, 0, 0), rig.op(**bad)])
    with pytest.raises(TypeError, match="tuple"):
        rig.io.submit([[1]])
    rig.run(rig.op(Io.WRITE, BLOCK, 0))
    assert rig.path.read_bytes()[:BLOCK] == bytes(BLOCK), "only the last one was written"


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseFile]:
    file = FuseFile(tmp_path / "mnt", POOL_BYTES)
    yield file
    file.rule = everything
    file.close()


class Gate:
    """A rule that lets nothing through before it is opened, and counts what waits. At least two ops arrive, whatever the engine: io_uring
    waits in the system call itself for a file system of this kind, with each of its workers."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, kind: int, offset: int, size: int) -> int:
        self.arrived.release()
        self.open.wait()  # whoever fails before it is opened takes the file system away
        return size

    def wait_for_two(self) -> None:
        for _ in range(2):
            assert self.arrived.acquire(timeout=PATIENCE_S)


def test_a_device_that_hangs_holds_up_no_other(make_rig: Callable[..., Rig], fuse: FuseFile) -> None:
    rig = make_rig(depth=4)
    payload = rig.fill(0)
    gate = fuse.rule = Gate()
    fd = os.open(fuse.path, os.O_RDWR)
    hung = [rig.op(Io.READ, 0, BLOCK * (1 + i), fd=fd) for i in range(20)]
    assert rig.io.submit(hung) == 16, "its own bound is reached"
    gate.wait_for_two()
    for i in range(30):
        assert rig.run(rig.op(Io.WRITE, i * BLOCK, 0)) == [(0, checksum(payload, 1, BLOCK))]
    gate.open.set()
    assert set(rig.wait(16)) == {op[0] for op in hung[:16]}
    os.close(fd)


def test_close_waits_for_what_is_under_way_and_cancels_what_is_not(make_rig: Callable[..., Rig], fuse: FuseFile) -> None:
    rig = make_rig(depth=2)
    gate = fuse.rule = Gate()
    fd = os.open(fuse.path, os.O_RDWR)
    ops = [rig.op(Io.READ, 0, BLOCK * i, fd=fd) for i in range(8)]
    assert rig.io.submit(ops) == 8
    gate.wait_for_two()
    closing = threading.Thread(target=rig.io.close)
    closing.start()
    ended = rig.wait(6)
    assert {result for result, _ in ended.values()} == {errno.ECANCELED}
    assert closing.is_alive()
    gate.open.set()
    closing.join()
    assert [result for _, result, _ in rig.io.reap()] == [0, 0]
    with pytest.raises(ValueError, match="closed"):
        rig.io.submit(ops)
    rig.io.close()
    assert rig.io.reap() == []
    os.close(fd)


@pytest.mark.parametrize("kind", [Io.READ, Io.WRITE])
def test_short_transfers_go_on_and_errors_do_not(tmp_path: Path, fuse: FuseFile, kind: int) -> None:
    """With threads. io_uring takes a file system's short answer for a reason to ask on by itself, and Linux 6.18 then asks FUSE for the
    wrong bytes; short transfers of io_uring are io_faults.c's."""
    rig = Rig("threads", tmp_path / "slab")
    payload = rig.fill(0)
    fuse.content[:BLOCK] = payload if kind == Io.READ else bytes(BLOCK)
    lengths = iter([1, 4095, 100, PAGE, 7])
    fuse.rule = lambda kind, offset, size: min(size, next(lengths, size)) if offset < BLOCK else -errno.ENOSPC
    fd = os.open(fuse.path, os.O_RDWR)
    first, second = rig.run(rig.op(kind, 0, 0, fd=fd), rig.op(kind, BLOCK, BLOCK, fd=fd))
    assert first == (0, checksum(payload, 1, BLOCK))
    assert second[0] == errno.ENOSPC
    assert next(lengths, None) is None, "it was short each time"
    assert bytes(rig.pool[:BLOCK]) == fuse.content[:BLOCK] == payload
    os.close(fd)
    rig.close()


@pytest.fixture
def queued(make_rig: Callable[..., Rig], fuse: FuseFile) -> Iterator[Callable[..., tuple[list[tuple[int, int]], list[tuple[int, int]]]]]:
    """Runs ops that begin when all of them are queued, one transfer at a time; `rule` answers what the file system is asked for. Returns
    their results, and (offset, size) of each request."""
    rig = make_rig(depth=2)
    fd = os.open(fuse.path, os.O_RDWR)

    def run(rule: Callable[[int, int, int], int], *ops: tuple) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        asked: list[tuple[int, int]] = []
        gates = [threading.Event(), threading.Event()]
        began = threading.Semaphore(0)

        def answer(kind: int, offset: int, size: int) -> int:
            if offset >= POOL_BYTES // 2:
                began.release()
                gates[offset % (2 * PAGE) // PAGE].wait()
                return size
            asked.append((offset, size))
            return rule(kind, offset, size)

        fuse.rule = answer
        holds = [rig.op(Io.READ, POOL_BYTES // 2 + i * 3 * PAGE, POOL_BYTES // 2, PAGE, fd=fd) for i in range(2)]
        assert rig.io.submit(holds) == 2
        assert all(began.acquire(timeout=PATIENCE_S) for _ in holds)
        assert rig.io.submit(ops) == len(ops)
        gates[0].set()
        ended = rig.wait(1 + len(ops))
        gates[1].set()
        rig.wait(1)
        return [ended[op[0]] for op in ops], asked

    run.rig, run.fd = rig, fd  # type: ignore[attr-defined]
    yield run
    os.close(fd)


@pytest.mark.parametrize("kind", [Io.READ, Io.WRITE])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("fault", [0, errno.EIO, errno.ENOSPC, errno.EINTR, "short"])
def test_neighbours_are_moved_together_and_each_has_its_own_result(
    queued: Any, fuse: FuseFile, kind: int, scattered: bool, fault: int | str
) -> None:
    """A transfer of four blocks of which the third cannot be had, or that is interrupted, or ends in the middle of the third."""
    rig, bad, count = queued.rig, 2 * BLOCK, 4
    if fault == "short" and rig.io.engine == "io_uring":
        pytest.skip("Linux 6.18 then asks FUSE for the wrong bytes")
    ats = [(2 * count - 2 * i if scattered else i) * BLOCK for i in range(count)]
    payloads = [rig.fill(at, seed=i) for i, at in enumerate(ats)]
    if kind == Io.READ:
        fuse.content[: count * BLOCK] = b"".join(payloads)
        for at in ats:
            rig.fill(at, seed=99)

    def rule(kind: int, offset: int, size: int) -> int:
        together = size > BLOCK
        if fault == "short" and together:
            return bad + PAGE
        if fault in (errno.EIO, errno.ENOSPC) and offset <= bad < offset + size:
            return -int(fault)
        return -errno.EINTR if fault == errno.EINTR and together else size

    sums = [checksum(payload, 1, BLOCK) for payload in payloads]
    wanted = [value ^ (i == 3 and kind == Io.READ) for i, value in enumerate(sums)]
    ops = [rig.op(kind, i * BLOCK, at, fd=queued.fd, checksum=wanted[i]) for i, at in enumerate(ats)]
    results, asked = queued(rule, *ops)
    fails = fault in (errno.EIO, errno.ENOSPC)
    third = fault if fails else 0
    assert [result for result, _ in results] == [0, 0, third, Io.CORRUPT if kind == Io.READ else 0]
    for i, at in enumerate(ats):
        if i != 2 or not fails:
            assert results[i][1] == sums[i]
            assert bytes(rig.pool[at : at + BLOCK]) == bytes(fuse.content[i * BLOCK : (i + 1) * BLOCK]) == payloads[i]
    left = {0: [], "short": [(bad + PAGE, BLOCK - PAGE), (3 * BLOCK, BLOCK)]}.get(fault, [(i * BLOCK, BLOCK) for i in range(count)])
    if not (scattered and rig.io.engine == "io_uring" and asked[0] == (0, BLOCK)):  # before Linux 6.15
        assert asked == [(0, count * BLOCK), *left]


def test_a_block_of_other_bytes_than_expected_is_not_written_with_its_neighbours(queued: Any, fuse: FuseFile) -> None:
    rig = queued.rig
    payloads = [rig.fill(i * BLOCK, seed=i) for i in range(3)]
    wanted = [checksum(payload, 1, BLOCK) ^ (i == 1) for i, payload in enumerate(payloads)]
    results, _ = queued(everything, *(rig.op(Io.WRITE, i * BLOCK, i * BLOCK, fd=queued.fd, checksum=wanted[i]) for i in range(3)))
    assert [result for result, _ in results] == [0, Io.CORRUPT, 0]
    assert fuse.content[: 3 * BLOCK] == payloads[0] + bytes(BLOCK) + payloads[2]


def test_what_is_no_neighbour_is_moved_by_itself(queued: Any, fuse: FuseFile) -> None:
    rig = queued.rig
    other = os.open(fuse.path, os.O_RDWR)
    places = [(Io.READ, 0), (Io.READ, 1), (Io.READ, 3), (Io.WRITE, 4), (Io.READ, 5)]
    ops = [rig.op(kind, place * BLOCK, i * BLOCK, fd=queued.fd) for i, (kind, place) in enumerate(places)]
    ops.append(rig.op(Io.READ, 6 * BLOCK, len(places) * BLOCK, fd=other))
    results, asked = queued(everything, *ops)
    assert {result for result, _ in results} == {0}
    assert asked == [(block * BLOCK, blocks * BLOCK) for block, blocks in ((0, 2), (3, 1), (4, 1), (5, 1), (6, 1))]
    os.close(other)


def test_the_depth_bounds_what_a_device_is_given(make_rig: Callable[..., Rig], fuse: FuseFile) -> None:
    rig = make_rig(depth=2)
    gate = fuse.rule = Gate()
    fd = os.open(fuse.path, os.O_RDWR)
    assert rig.io.submit([rig.op(Io.READ, 0, BLOCK * i, fd=fd) for i in range(8)]) == 8
    gate.wait_for_two()
    assert rig.io.depths() == {os.fstat(fd).st_dev: 2}
    assert not gate.arrived.acquire(timeout=0.2), "there is no event of what does not happen"
    gate.open.set()
    rig.wait(8)
    os.close(fd)


# ---- processes and threads ------------------------------------------------------------------------------------------------------

READER = """
import fcntl, os, sys
from hostkv.cext import Io
engine, path, pool, count, size = *sys.argv[1:4], *map(int, sys.argv[4:6])
if sys.argv[6:]:
    with open(sys.argv[6], "w") as cgroup:
        cgroup.write(str(os.getpid()))
pool = os.open(pool, os.O_RDWR)
io = Io(pool, count * size, engine=engine, depth=count)
fd = os.open(path, os.O_RDWR | os.O_DIRECT)
fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
print(open("/proc/self/io").read().split()[9], flush=True)
io.submit([(i, io.READ, fd, i * size, i * size, size, 1, size, None, -1, 0, b"") for i in range(count)])
os.read(0, 1)
"""


def start_reader(engine: str, path: Path, pool: Path, count: int, size: int, *cgroup: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", READER, engine, *map(str, (path, pool, count, size, *cgroup))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize("engine", ENGINES)
def test_the_flock_of_a_killed_process_is_held_until_its_reads_are_done(engine: str, tmp_path: Path, fuse: FuseFile) -> None:
    require(engine)
    pool = tmp_path / "pool"
    pool.write_bytes(bytes(2 * BLOCK))
    fuse.content[: 2 * BLOCK] = b"\xaa" * (2 * BLOCK)
    gate = fuse.rule = Gate()
    reader = start_reader(engine, fuse.path, pool, 2, BLOCK)
    gate.wait_for_two()
    reader.kill()
    other = os.open(fuse.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert pool.read_bytes() == bytes(2 * BLOCK)
    gate.open.set()
    fcntl.flock(other, fcntl.LOCK_EX)  # waits
    assert pool.read_bytes() == b"\xaa" * (2 * BLOCK), (
        "what a dead process had begun to read was written to memory, before its flock was free"
    )
    reader.communicate()
    os.close(other)


class Throttle:
    """A cgroup whose reads from a directory's disk take minutes, until they are let go."""

    def __init__(self, directory: Path) -> None:
        self.group = Path("/sys/fs/cgroup/blkio") / f"hostkv-test-{os.getpid()}"
        device = os.stat(directory).st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"
        try:
            self.group.mkdir()
            self.limit(16 << 10)
        except OSError as error:
            if self.group.exists():
                self.group.rmdir()
            pytest.skip(f"no throttling of block devices here: {error}")

    def limit(self, bytes_per_s: int) -> None:
        (self.group / "blkio.throttle.read_bps_device").write_text(f"{self._device} {bytes_per_s}")

    def let_go(self) -> None:
        self.limit(0)


@pytest.fixture
def throttle(tmp_path: Path) -> Iterator[Throttle]:
    throttle = Throttle(tmp_path)
    yield throttle
    throttle.let_go()
    throttle.group.rmdir()


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_comes_from_a_real_disk_once_the_flock_of_a_killed_process_is_free(engine: str, tmp_path: Path, throttle: Throttle) -> None:
    require(engine)
    size, count = 1 << 20, 4
    slab, pool = tmp_path / "slab", tmp_path / "pool"
    slab.write_bytes(b"\xaa" * (count * size))
    fd = os.open(slab, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    pool.write_bytes(bytes(count * size))
    mapped = np.memmap(pool, dtype=np.uint8, mode="r")
    reader = start_reader(engine, slab, pool, count, size, throttle.group / "cgroup.procs")
    assert reader.stdout is not None
    before = int(reader.stdout.readline())
    until(lambda: read_bytes(reader.pid) - before >= size)  # counted when the disk is asked
    reader.kill()
    assert is_locked(slab), "it is held after the process was killed"
    assert not mapped.any()
    throttle.let_go()
    until(lambda: not is_locked(slab))
    arrived = int(mapped.sum())
    reader.communicate()
    assert arrived > 0, "what was under way came after the kill"
    assert int(mapped.sum()) == arrived, "and nothing came after it was free"


def read_bytes(pid: int) -> int:
    """That all threads of a process have asked disks for."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[9])


def test_works_after_the_thread_that_made_it_is_gone(make_rig: Callable[..., Rig]) -> None:
    rigs = []

    def make() -> None:
        rig = make_rig()
        rig.run(rig.op(Io.WRITE, 0, 0))
        rigs.append(rig)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert rigs[0].run(rigs[0].op(Io.READ, 0, BLOCK), rigs[0].op(Io.WRITE, BLOCK, 0)) == 2 * [(0, checksum(bytes(BLOCK), 1, BLOCK))]


def test_a_forks_child_must_not_use_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    op = rig.op(Io.WRITE, 0, 0)
    rig.run(op)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: rig.io.submit([op]), rig.io.reap, rig.io.close, rig.io.fileno, rig.io.depths, lambda: rig.io.engine):
            try:
                call()
            except RuntimeError:
                refused += 1
        rig.io = None  # type: ignore[assignment]
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert rig.run(rig.op(Io.READ, 0, BLOCK))[0][0] == 0


def io_threads() -> set[str]:
    """Of this process, and not those that the kernel starts and ends in it when it likes."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if Path("/proc/self/task", task, "comm").read_text() == "hostkv-io\n":
                found.add(task)
    return found


def test_signals_are_for_the_threads_of_the_process(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    before = io_threads()
    rig.run(rig.op(Io.WRITE, 0, 0))
    workers = [Path("/proc/self/task", task, "status").read_text() for task in io_threads() - before]
    blocked = [int(text.split("SigBlk:")[1].split()[0], 16) for text in workers]
    assert blocked
    unblockable = 1 << signal.SIGKILL - 1 | 1 << signal.SIGSTOP - 1
    assert all(mask >> (number - 1) & 1 or 1 << number - 1 & unblockable for mask in blocked for number in range(1, 32))


def test_nothing_is_left_of_many(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_rig()
    engine = rig.io.engine

    def once() -> None:
        fd = os.memfd_create("hostkv-test")
        os.ftruncate(fd, POOL_BYTES)
        io = Io(fd, POOL_BYTES, engine=engine)
        os.close(fd)
        io.submit([rig.op(Io.WRITE, i * BLOCK, 0) for i in range(8)])

    def left() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), len(io_threads()), maps.count("hostkv-test")

    gc.collect()
    once()
    until(lambda: not io_threads())  # one that was joined may still be seen for a moment
    before = left()
    for _ in range(20):
        once()
    until(lambda: left() == before, left)


# ---- which engine ---------------------------------------------------------------------------------------------------------------


def test_auto_is_io_uring_where_it_works_and_says_why_not() -> None:
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, PAGE)
    io = Io(fd, PAGE)
    if io.engine == "io_uring":
        assert io.why == ""
        assert Io(fd, PAGE, engine="io_uring").engine == "io_uring"
    else:
        assert io.engine == "threads"
        assert io.why
        with pytest.raises(OSError, match=re.escape(io.why)):
            Io(fd, PAGE, engine="io_uring")
    assert Io(fd, PAGE, engine="threads").why == "threads were asked for"
    os.close(fd)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"engine": "aio"}, "engine"),
        ({"depth": 0}, "depth"),
        ({"workers": 0}, "workers"),
        ({"size": PAGE + 1}, "mapped"),
        ({"size": 0}, "size"),
    ],
)
def test_an_io_that_makes_no_sense_is_refused(more: dict[str, object], message: str) -> None:
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, PAGE)
    with pytest.raises(ValueError, match=message):
        Io(fd, **({"size": PAGE} | more))  # type: ignore[arg-type]
    os.close(fd)


REFUSED = """
import ctypes, errno, os, platform, select, struct, sys
from hostkv.cext import Io
first, number, error = map(int, sys.argv[1:])
# seccomp: system calls first..first+number-1 answer `error`.
program = b"".join(struct.pack("<HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x35, 0, 2, first), (0x35, 1, 0, first + number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)))
code = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, struct.pack("<HxxxxxxQ", 5, ctypes.addressof(code)), 0, 0):
    sys.exit(77)
fd = os.memfd_create("pool")
os.ftruncate(fd, 1 << 20)
io = Io(fd, 1 << 20)
file = os.open("/proc/self/exe", os.O_RDONLY)
io.submit([(1, io.READ, file, 0, 0, 4096, 1, 4096, None, -1, 0, b"")])
select.select([io.fileno()], [], [])
print(io.engine, io.reap()[0][1], io.why, sep="|")
"""


@pytest.mark.parametrize("first, number", [(425, 1), (426, 1), (425, 3)], ids=["setup", "enter", "all"])
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_where_io_uring_is_refused_threads_do_the_work(first: int, number: int, error: int) -> None:
    child = subprocess.run([sys.executable, "-c", REFUSED, str(first), str(number), str(error)], capture_output=True, text=True)
    if child.returncode == 77:
        pytest.skip("no seccomp here")
    engine, result, why = child.stdout.rstrip("\n").split("|")
    assert (engine, result) == ("threads", "0"), child.stderr
    call = "io_uring_enter" if first == 426 else "io_uring_setup"
    assert why in (f"{call}: {os.strerror(error)}", "built without liburing")


# ---- in C -----------------------------------------------------------------------------------------------------------------------


def build(name: str, folder: Path, *sources: str) -> Path:
    flags = ["-std=c11", "-O1", "-g", "-I", str(ROOT / "cext"), "-I", str(ROOT / "cext/vendor"), "-I", str(ROOT / "schemas"), "-pthread"]
    command = [
        "cc",
        *flags,
        str(ROOT / f"tests/unit/{name}.c"),
        *(str(ROOT / "cext" / source) for source in sources),
        "-o",
        str(folder / name),
    ]
    with_uring = subprocess.run([*command, "-DHKV_HAVE_LIBURING", "-luring"], capture_output=True)
    if with_uring.returncode != 0:
        subprocess.run(command, check=True)
    return folder / name


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("io_faults", tmp_path_factory.mktemp("build"), "io_depth.c", "hash.c")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [[], ["direct"]], ids=["buffered", "direct"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_an_op_fails_with_its_own_error_and_the_others_do_not(
    faults: Path, tmp_path: Path, engine: str, direct: list[str], seed: int
) -> None:
    """Short, interrupted, refused and failed transfers, rings that cannot be had, memory that cannot be registered."""
    command = [faults, engine, tmp_path / "slab", str(seed), "1500", *direct]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S * 4)
    if run.returncode == 77:
        pytest.skip(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("io_depth", tmp_path_factory.mktemp("build"))


@pytest.mark.parametrize("noise_percent", [0, 10, 20])
@pytest.mark.parametrize(
    "knee, most, settled", [(1, 64, 1), (2, 64, 2), (4, 64, 4), (6, 64, 8), (32, 64, 32), (100, 64, 64), (32, 6, 6), (4, 1, 1)]
)
def test_the_depth_settles_where_more_gains_nothing(simulated: Path, knee: int, most: int, settled: int, noise_percent: int) -> None:
    """A device that is at full speed from `knee` transfers on, whose speed changes by +- noise_percent twenty times a second."""
    arguments = map(str, (knee, most, noise_percent, 220, 1))
    depths = [int(line) for line in subprocess.run([simulated, *arguments], capture_output=True, text=True, check=True).stdout.split()]
    assert len(depths) == 220
    assert max(depths) <= most
    assert depths[20:].count(settled) > 120
