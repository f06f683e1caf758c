"""Mappings of the pool and the copies in and out of it: exact bytes, bounds, lifetime, fork."""

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hostkv.cext import Mapping, _cext, buffer_address, cpu_features, memory_copy

from tests.support import until

KERNELS = ("avx512", "avx2", "sse2", "neon", "plain")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with each copy kernel; one that this CPU lacks is replaced by the best it has."""
    best = cpu_features()[1]
    _cext._set_copy(request.param)
    yield request.param
    assert _cext._set_copy(best)


def make_mapping(size: int, writable: bool = True) -> Mapping:
    fd = os.memfd_create("hostkv-test")
    try:
        os.ftruncate(fd, size)
        return Mapping(fd, size, writable)
    finally:
        os.close(fd)


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def address_of(array: np.ndarray) -> int:
    return buffer_address(array, False)[0]


class Batch:
    """Blocks of random bytes whose pieces lie scattered over `memory`, each at its own alignment, with gaps between them."""

    def __init__(self, blocks: int, piece_bytes: list[int], seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.block_bytes = sum(piece_bytes)
        self.piece_bytes = u64(*piece_bytes)
        self.memory = random.integers(0, 256, blocks * (self.block_bytes + 80 * len(piece_bytes)), dtype=np.uint8)
        places = []
        at = 0
        for piece in random.permutation(blocks * len(piece_bytes)):
            at += int(random.integers(0, 80))
            places.append((int(piece), at))
            at += piece_bytes[int(piece) % len(piece_bytes)]
        self.starts = [start for _, start in sorted(places)]
        self.addresses = u64(*(address_of(self.memory) + start for start in self.starts))
        self.offsets = u64(*(int(i) * (self.block_bytes + 100) + int(random.integers(0, 100)) for i in random.permutation(blocks)))
        self.pool_bytes = blocks * (self.block_bytes + 100)

    def block(self, index: int) -> bytes:
        starts = self.starts[index * len(self.piece_bytes) :]
        return b"".join(self.memory[start : start + int(size)].tobytes() for start, size in zip(starts, self.piece_bytes, strict=False))


SHAPES = [
    (1, [1]),
    (3, [64]),
    (5, [1023, 1024, 1025, 7]),
    (4, [4096, 4096, 4096]),
    (2, [63, 65, 2000, 100_000]),
    (9, [333, 1_000_000, 70_001, 4096]),
]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("blocks", "piece_bytes"), SHAPES)
def test_copy_in_gathers_exactly_the_pieces_and_nothing_else(kernel: str, blocks: int, piece_bytes: list[int], threads: int) -> None:
    batch = Batch(blocks, piece_bytes)
    mapping = make_mapping(batch.pool_bytes)
    expected = bytearray(b"\xa5" * batch.pool_bytes)
    with memoryview(mapping) as view:
        view[:] = expected
    mapping.copy_in(batch.offsets, batch.addresses, batch.piece_bytes, threads)
    for i, offset in enumerate(batch.offsets):
        expected[int(offset) : int(offset) + batch.block_bytes] = batch.block(i)
    assert bytes(mapping) == expected


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("blocks", "piece_bytes"), SHAPES)
def test_copy_out_scatters_exactly_the_pieces_and_nothing_else(kernel: str, blocks: int, piece_bytes: list[int], threads: int) -> None:
    batch = Batch(blocks, piece_bytes)
    mapping = make_mapping(batch.pool_bytes)
    mapping.copy_in(batch.offsets, batch.addresses, batch.piece_bytes)
    before = batch.memory.copy()
    gaps = np.ones(len(before), dtype=bool)
    for start, size in zip(batch.starts, list(batch.piece_bytes) * blocks, strict=True):
        gaps[start : start + int(size)] = False
    batch.memory[~gaps] = 0
    mapping.copy_out(batch.offsets, batch.addresses, batch.piece_bytes, threads)
    assert np.array_equal(batch.memory, before)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("blocks", "piece_bytes"), SHAPES)
def test_copies_with_seeds_move_the_same_bytes_and_tell_the_checksum_of_each_block(
    kernel: str, blocks: int, piece_bytes: list[int], threads: int
) -> None:
    batch = Batch(blocks, piece_bytes)
    plain, hashed = make_mapping(batch.pool_bytes), make_mapping(batch.pool_bytes)
    seeds = u64(*(i % 3 * 0x0123456789ABCDEF for i in range(blocks)))
    plain.copy_in(batch.offsets, batch.addresses, batch.piece_bytes)
    stored = hashed.copy_in(batch.offsets, batch.addresses, batch.piece_bytes, threads, seeds=seeds)
    assert bytes(hashed) == bytes(plain)
    assert stored == plain.checksums(batch.offsets, batch.block_bytes, seeds)
    before = batch.memory.copy()
    for start, size in zip(batch.starts, list(batch.piece_bytes) * blocks, strict=True):
        batch.memory[start : start + int(size)] = 0
    assert hashed.copy_out(batch.offsets, batch.addresses, batch.piece_bytes, threads, seeds=seeds) == stored
    assert np.array_equal(batch.memory, before)


@pytest.mark.parametrize("out", [False, True])
def test_a_checksum_is_that_of_what_arrived_though_somebody_writes_to_the_source_meanwhile(out: bool) -> None:
    size = 4 << 20
    seeds = u64(0, 1)
    source, target = make_mapping(2 * size), make_mapping(2 * size)
    scribbled = np.frombuffer(source, np.uint8)  # all of one value, but for where the scribbler is
    pool, place = (source, u64(target.address, target.address + size)) if out else (target, u64(source.address, source.address + size))
    done = threading.Event()

    def scribble() -> None:
        while not done.is_set():
            np.bitwise_xor(scribbled, 0xFF, out=scribbled)

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    torn = 0
    try:
        for _ in range(10_000):
            told = (pool.copy_out if out else pool.copy_in)(u64(0, size), place, u64(size), seeds=seeds)
            assert told == target.checksums(u64(0, size), size, seeds)
            arrived = np.frombuffer(target, np.uint8)
            torn += int(arrived.min() != arrived.max())
            if torn == 20:
                break
    finally:
        done.set()
        scribbler.join()
    assert torn == 20


def test_seeds_that_do_not_fit_are_refused_before_a_byte_moves() -> None:
    mapping = make_mapping(4096)
    memory = np.ones(128, dtype=np.uint8)
    here = u64(address_of(memory))
    for copy in (mapping.copy_in, mapping.copy_out):
        assert copy(b"", b"", u64(64), seeds=b"") == b""
        assert copy(b"", b"", u64(64), seeds=None) is None
        for seeds in (b"", u64(1, 2)):
            with pytest.raises(ValueError, match="items for 1 blocks"):
                copy(u64(0), here, u64(64), seeds=seeds)
        with pytest.raises(ValueError, match="seeds has 7 bytes"):
            copy(u64(0), here, u64(64), seeds=bytes(7))
        with pytest.raises(ValueError, match="a checksum needs bytes"):
            copy(u64(0), b"", b"", seeds=u64(0))
    assert bytes(mapping) == bytes(4096)
    assert memory.all()


@pytest.mark.parametrize(("offsets", "size"), [((0, 4096), 1), ((0,), 4097), ((4000,), 97), (((1 << 64) - 1,), 1), ((0,), -1), ((), -1)])
def test_checksums_of_bytes_outside_of_the_mapping_are_refused(offsets: tuple[int, ...], size: int) -> None:
    mapping = make_mapping(4096)
    with pytest.raises(ValueError, match="leave the mapping of 4096 bytes"):
        mapping.checksums(u64(*offsets), size, u64(*offsets))


def test_checksums_take_a_seed_for_each_offset() -> None:
    mapping = make_mapping(4096)
    assert mapping.checksums(b"", 4096, b"") == b""
    assert len(mapping.checksums(u64(0, 4096), 0, u64(0, 0))) == 16
    with pytest.raises(ValueError, match="seeds has 1 items for 2 offsets"):
        mapping.checksums(u64(0, 0), 1, u64(0))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("size", "threads"), [(0, 1), (1, 2), (4095, 1), (100_003, 1), (9_000_001, 2)])
def test_memory_copy_is_exact_at_any_alignment(kernel: str, size: int, threads: int, streaming: bool) -> None:
    source = np.random.default_rng(2).integers(0, 256, size + 64, dtype=np.uint8)
    for skew in (0, 1, 17, 63):
        destination = np.zeros(size + 128, dtype=np.uint8)
        memory_copy(address_of(destination) + skew, address_of(source) + 63 - skew, size, threads, streaming)
        assert np.array_equal(destination[skew : skew + size], source[63 - skew : 63 - skew + size])
        assert not destination[:skew].any()
        assert not destination[skew + size :].any()


def test_cpu_features_names_the_kernel_in_use() -> None:
    best = cpu_features()[1]
    assert _cext._set_copy("plain")
    assert cpu_features()[1] == "plain"
    assert not _cext._set_copy("abacus")
    assert _cext._set_copy(best)


MAX = (1 << 64) - 1


@pytest.mark.parametrize(
    ("offsets", "piece_bytes", "message"),
    [
        ((8193,), (1,), "block 0: 1 bytes at offset 8193 leave the mapping of 8192 bytes"),
        ((0, 4097), (4000, 96), "block 1"),
        ((MAX,), (1,), "block 0"),
        ((MAX - 63,), (64,), "block 0"),
        ((0,), (8193,), "pieces 0..0 are larger"),
        ((0,), (8192, 1), "pieces 0..1 are larger"),
        ((0,), (MAX, 2), "pieces 0..0 are larger"),
        ((0,), (1, MAX), "pieces 0..1 are larger"),
        ((0,), (4, 0), r"piece_bytes\[1\] is 0"),
    ],
)
def test_a_block_that_leaves_the_mapping_is_refused_before_a_byte_moves(
    offsets: tuple[int, ...], piece_bytes: tuple[int, ...], message: str
) -> None:
    mapping = make_mapping(8192)
    memory = np.ones(8192, dtype=np.uint8)
    addresses = u64(*[address_of(memory)] * (len(offsets) * len(piece_bytes)))
    for copy in (mapping.copy_in, mapping.copy_out):
        with pytest.raises(ValueError, match=message):
            copy(u64(*offsets), addresses, u64(*piece_bytes))
    assert bytes(mapping) == bytes(8192)
    assert memory.all()


def test_a_block_may_end_where_the_mapping_ends() -> None:
    mapping = make_mapping(8192)
    memory = np.ones(4096, dtype=np.uint8)
    mapping.copy_in(u64(4096), u64(address_of(memory)), u64(4096))
    assert bytes(mapping) == bytes(4096) + b"\1" * 4096


def test_an_empty_batch_does_nothing() -> None:
    mapping = make_mapping(4096)
    mapping.copy_in(b"", b"", u64(64))
    mapping.copy_out(u64(0), b"", b"")
    assert bytes(mapping) == bytes(4096)


@pytest.mark.parametrize("threads", [0, -1, 65])
def test_threads_out_of_range_are_refused(threads: int) -> None:
    mapping = make_mapping(4096)
    with pytest.raises(ValueError, match="threads"):
        mapping.copy_in(b"", b"", b"", threads)
    with pytest.raises(ValueError, match="threads"):
        memory_copy(0, 0, 0, threads)


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    mapping = make_mapping(4096)
    for offsets, addresses, sizes in (
        (u64(0), u64(1, 2), u64(64)),
        (u64(0, 64), u64(1), u64(64)),
        (u64(0), u64(), u64(64)),
        (bytes(7), u64(1), u64(64)),
        (u64(0), u64(1), bytes(12)),
        (u64(0), bytes(9), u64(64)),
    ):
        with pytest.raises(ValueError, match="bytes"):
            mapping.copy_in(offsets, addresses, sizes)
    with pytest.raises(TypeError):
        mapping.copy_in([0], [0], [64])


def test_a_read_only_mapping_takes_no_bytes_and_lends_no_writable_ones() -> None:
    mapping = make_mapping(4096, writable=False)
    with pytest.raises(ValueError, match="writable=True"):
        mapping.copy_in(u64(0), u64(address_of(np.ones(64, dtype=np.uint8))), u64(64))
    with memoryview(mapping) as view:
        assert view.readonly
    with pytest.raises(BufferError):
        buffer_address(mapping, True)
    assert buffer_address(mapping, False) == (mapping.address, 4096)


def test_two_mappings_of_one_file_see_each_other() -> None:
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, 8192)
    writer, reader = Mapping(fd, 8192, True), Mapping(fd, 4096)
    os.close(fd)
    with memoryview(writer) as view:
        view[:5] = b"hello"
    assert bytes(reader)[:5] == b"hello"
    assert reader.size == 4096


def test_a_mapping_beyond_the_file_is_refused(tmp_path: os.PathLike[str]) -> None:
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="the file has 4096 bytes, 4097 were to be mapped"):
        Mapping(fd, 4097)
    with pytest.raises(ValueError, match="size is 0"):
        Mapping(fd, 0)
    os.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        Mapping(fd, 4096)


def test_populate_allocates_the_pages_and_keeps_their_bytes() -> None:
    size = 1 << 20
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, size)
    os.pwrite(fd, b"kept", 5000)
    mapping = Mapping(fd, size, True)
    mapping.populate(5000, 100_000)
    assert os.fstat(fd).st_blocks * 512 == 25 * 4096
    mapping.populate(0, size)
    assert os.fstat(fd).st_blocks * 512 == size
    assert bytes(mapping)[5000:5004] == b"kept"
    reader = Mapping(fd, size)
    reader.populate(0, size)
    os.close(fd)
    for offset, length in ((0, size + 1), (size, 1), (-1, 2), (0, -1), (size + 1, 0)):
        with pytest.raises(ValueError, match="outside"):
            mapping.populate(offset, length)


def test_close_refuses_while_a_buffer_is_out_and_then_ends_every_use() -> None:
    mapping = make_mapping(4096)
    view = memoryview(mapping)
    with pytest.raises(BufferError, match="in use"):
        mapping.close()
    view.release()
    mapping.close()
    for use in (
        lambda: mapping.address,
        lambda: mapping.size,
        lambda: memoryview(mapping),
        lambda: mapping.populate(0, 1),
        lambda: mapping.copy_in(b"", b"", b""),
        lambda: mapping.copy_out(b"", b"", b""),
        lambda: mapping.checksums(b"", 0, b""),
        mapping.close,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_close_refuses_while_a_copy_runs_in_another_thread() -> None:
    size = 32 << 20
    mapping = make_mapping(size)
    mapping.populate(0, size)
    memory = np.ones(size, dtype=np.uint8)
    seen = threading.Event()

    def copy_until_seen() -> None:
        while not seen.is_set():
            mapping.copy_in(u64(0), u64(address_of(memory)), u64(size))

    worker = threading.Thread(target=copy_until_seen)
    worker.start()

    def refused_for_two() -> bool:
        with memoryview(mapping):  # a use of our own, so that a try between two copies does not close
            with pytest.raises(BufferError, match="in use by") as refusal:
                mapping.close()
        return "in use by 2" in str(refusal.value)

    try:
        until(refused_for_two)
    finally:
        seen.set()
        worker.join()
    mapping.close()


def test_a_forked_child_is_told_what_to_do_and_its_parent_goes_on() -> None:
    mapping = make_mapping(4096)
    uses = (
        lambda: mapping.address,
        lambda: mapping.size,
        lambda: memoryview(mapping),
        lambda: mapping.populate(0, 1),
        lambda: mapping.copy_in(b"", b"", b""),
        lambda: mapping.copy_out(b"", b"", b""),
        lambda: mapping.checksums(b"", 0, b""),
        mapping.close,
    )
    child = os.fork()
    if child == 0:
        refusals = 0
        for use in uses:
            try:
                use()
            except RuntimeError as error:
                refusals += "make a new client after fork" in str(error)
        with open("/proc/self/maps") as maps:
            os._exit(refusals if "hostkv-test" not in maps.read() else 99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(uses)
    mapping.copy_in(u64(0), u64(address_of(np.ones(64, dtype=np.uint8))), u64(64))
    mapping.close()


def test_buffer_address_takes_contiguous_buffers_only() -> None:
    array = np.zeros((4, 6), dtype=np.float32)
    assert buffer_address(array, True) == (array.ctypes.data, 96)
    assert buffer_address(array[1:3], True) == (array.ctypes.data + 24, 48)
    assert buffer_address(bytearray(5), True)[1] == 5
    for strided in (array[:, 1:3], array.T, array[::2]):
        with pytest.raises(BufferError, match="not C-contiguous"):
            buffer_address(strided, False)
    array.flags.writeable = False
    assert buffer_address(array, False)[1] == 96
    for fixed in (array, b"bytes"):
        with pytest.raises(BufferError, match="read-only"):
            buffer_address(fixed, True)
    with pytest.raises(TypeError):
        buffer_address([1], False)
