"""The index of what is on disk: every verb, recovery by the rules of layout.h, and what readers see of it."""

from __future__ import annotations

import os
import random
import struct
import sys
import threading
from collections.abc import Iterator

import pytest
from hostkv.cext import Index, LayoutError, Tables, View, xxh3_64
from hostkv.schemas import layout

PAGE = 4096
SLAB = 16 * PAGE
ONE, TWO = 1, 2  # namespaces
GEOMETRY = {
    "pool_bytes": 64 * PAGE,
    "extent_bytes": 64 * PAGE,
    "max_blocks": 64,
    "max_shards": 64,
    "max_pins": 4,
    "max_members": 1,
    "max_namespaces": 1,
}


def key(n: int | bytes) -> bytes:
    return random.Random(n).randbytes(32) if isinstance(n, int) else n


def index_of(*slabs: int, max_blocks: int = 256) -> Index:
    """With a directory of that many slabs each, all enabled."""
    index = Index(None, max_blocks, SLAB)
    for count in slabs:
        index.enable(index.add_directory(count))
    return index


def write(index: Index, n: int | bytes, slot_bytes: int = PAGE, namespace: int = ONE) -> tuple[int, int, int, int, int]:
    """Begins to write; what place() says."""
    placed = index.place(key(n), namespace, slot_bytes)
    assert placed is not None
    return placed


def save(index: Index, n: int | bytes, slot_bytes: int = PAGE, namespace: int = ONE) -> tuple[int, int, int]:
    """A whole write; where it lies."""
    entry, *where, _ = write(index, n, slot_bytes, namespace)
    index.settle(entry, 1)
    return where[0], where[1], where[2]


def has(index: Index, *numbers: int, namespace: int = ONE) -> list[int]:
    return list(index.has(b"".join(map(key, numbers)), namespace))


def read(index: Index, n: int) -> int:
    """Begins to read; the entry."""
    found = index.open(key(n), ONE)
    assert found is not None
    return found[0]


def record(slab: int, slot: int, n: int, *, sequence: int = 1, number: int = 7, pages: int = 1, checksum: int = 0) -> bytes:
    body = layout.RECORD.pack(key(n), checksum, sequence, number, pages, 0)[:-8]
    return body + struct.pack("<Q", xxh3_64(body, slab << 32 | slot))


# ---- one block -----------------------------------------------------------------------------------------------------------------


def test_a_block_is_a_miss_until_its_write_has_ended() -> None:
    index = index_of(1)
    entry, directory, slab, slot, sequence = write(index, 1)
    assert (directory, slab, slot, sequence) == (0, 0, 0, 1)
    assert has(index, 1) == [0]
    assert index.open(key(1), ONE) is None
    index.settle(entry, 0xFEDCBA9876543210)
    assert has(index, 1) == [1]
    assert index.open(key(1), ONE) == (entry, 0, 0, 0, 0xFEDCBA9876543210)


def test_a_block_is_found_in_its_namespace_only() -> None:
    index = index_of(1)
    save(index, 1)
    assert has(index, 1, namespace=TWO) == [0]
    assert index.open(key(1), TWO) is None
    assert not index.remove(key(1), TWO)
    assert has(index, 1) == [1]


def test_a_key_that_is_there_is_not_placed_again() -> None:
    index = index_of(1)
    entry = write(index, 1)[0]
    assert index.place(key(1), ONE, PAGE) is None  # still being written
    index.settle(entry, 1)
    assert index.place(key(1), ONE, PAGE) is None
    assert index.place(key(1), TWO, 2 * PAGE) is None
    assert index.stats()["placed"] == 1


def test_a_failed_write_leaves_nothing() -> None:
    index = index_of(1)
    for _ in range(40):
        entry = write(index, 1)[0]
        index.settle(entry, None)
        assert has(index, 1) == [0]
    stats = index.stats()
    assert (stats["failed"], stats["blocks"], stats["used_bytes"], stats["evicted"]) == (40, 0, 0, 0)
    assert index.check() == []


def test_a_bad_block_is_a_miss_for_all_and_its_slot_waits_for_the_last_reader() -> None:
    index = index_of(1)
    slot = save(index, 1)
    first, second = read(index, 1), read(index, 1)
    assert first == second
    index.close(first, False)
    assert has(index, 1) == [0]
    assert save(index, 1) != slot
    assert index.stats()["gone"] == 1
    index.close(second, True)
    assert index.stats()["gone"] == 0
    assert has(index, 1) == [1]
    assert save(index, 2) == slot
    assert index.check() == []


def test_what_is_removed_while_it_is_written_is_never_found() -> None:
    index = index_of(1)
    entry, *place = write(index, 1)
    assert index.remove(key(1), ONE)
    again = write(index, 1)
    assert again[1:4] != tuple(place[:3])
    index.settle(entry, 1)
    assert has(index, 1) == [0]
    index.settle(again[0], 1)
    assert has(index, 1) == [1]
    assert index.check() == []


def test_a_block_has_as_many_readers_as_fit() -> None:
    index = index_of(1)
    save(index, 1)
    for _ in range(65535):
        entry = read(index, 1)
    assert index.open(key(1), ONE) is None
    index.close(entry, True)
    assert index.open(key(1), ONE) is not None


def test_removing_a_namespace_takes_all_of_it_and_nothing_else() -> None:
    index = index_of(4)
    for n in range(30):
        save(index, n, namespace=ONE if n % 3 else TWO)
    reading = read(index, 1)
    writing = write(index, 30)[0]
    assert index.remove_namespace(ONE) == 21
    assert has(index, *range(31)) == [0] * 31
    assert has(index, *range(30), namespace=TWO) == [int(n % 3 == 0) for n in range(30)]
    index.settle(writing, 1)
    index.close(reading, True)
    assert index.check() == []
    assert (index.stats()["blocks"], index.stats()["gone"]) == (10, 0)
    assert index.remove_namespace(ONE) == 0


@pytest.mark.parametrize("entry", [0, 1, 255, 256, 0xFFFFFFFF])
def test_what_does_not_fit_the_state_is_an_error_and_changes_nothing(entry: int) -> None:
    index = index_of(1)
    save(index, 1)
    before = index.stats()
    with pytest.raises(IndexError, match="is not being written"):
        index.settle(entry, 1)
    with pytest.raises(IndexError, match="is not being read"):
        index.close(entry, False)
    writing = write(index, 2)[0]
    with pytest.raises(IndexError, match="is not being read"):
        index.close(writing, True)
    index.settle(writing, None)
    with pytest.raises(IndexError, match="is not being written"):
        index.settle(writing, None)
    assert {**index.stats(), "placed": 1, "failed": 0, "sequence": 1} == before
    assert index.check() == []


def test_arguments_out_of_range_are_refused() -> None:
    index = index_of(1)
    for slot_bytes in (0, 1, PAGE + 1, SLAB + PAGE, 1 << 63):
        with pytest.raises(ValueError, match="slot_bytes is"):
            index.place(key(1), ONE, slot_bytes)
    for bad in (b"", b"x" * 31, b"x" * 33):
        with pytest.raises(ValueError, match=f"key has {len(bad)} bytes"):
            index.place(bad, ONE, PAGE)
        with pytest.raises(ValueError, match=f"key has {len(bad)} bytes"):
            index.open(bad, ONE)
        with pytest.raises(ValueError, match=f"key has {len(bad)} bytes"):
            index.remove(bad, ONE)
    with pytest.raises(ValueError, match="multiple of 32"):
        index.has(b"x" * 33, ONE)
    with pytest.raises(ValueError, match=r"2\*\*32"):
        index.place(key(1), 1 << 32, PAGE)
    with pytest.raises(ValueError, match="at least one slab"):
        index.add_directory(0)
    for number in (1, 0xFFFFFFFF):
        for call in (index.enable, index.drop, index.directory):
            with pytest.raises(IndexError, match=f"there is no directory {number}"):
                call(number)
    for blocks in (0, (1 << 30) + 1):
        with pytest.raises(ValueError, match="max_blocks"):
            Index.bytes_needed(blocks)
        with pytest.raises(ValueError, match="max_blocks"):
            Index(None, blocks, SLAB)
    for slab_bytes in (0, 1, PAGE + 1, 1 << 43):
        with pytest.raises(ValueError, match="slab_bytes"):
            Index(None, 1, slab_bytes)
    fd = os.memfd_create("index")
    with pytest.raises(ValueError, match="the file has 0 bytes, this index needs"):
        Index(fd, 1, SLAB)
    os.close(fd)
    with pytest.raises(OSError):
        Index(fd, 1, SLAB)


# ---- eviction ------------------------------------------------------------------------------------------------------------------


def test_what_was_read_outlives_what_was_not() -> None:
    index = index_of(2)
    for n in range(32):
        save(index, n)
    for n in range(0, 32, 2):
        index.close(read(index, n), True)
    for n in range(32, 48):
        save(index, n)
    assert has(index, *range(48)) == [1, 0] * 16 + [1] * 16
    assert index.stats()["evicted"] == 16
    assert index.check() == []


def test_a_block_that_is_read_once_and_never_again_goes_at_the_second_pass() -> None:
    index = index_of(1)
    for n in range(16):
        save(index, n)
    index.close(read(index, 0), True)
    for n in range(16, 31):
        save(index, n)
    assert has(index, 0) == [1]
    save(index, 31)
    assert has(index, 0) == [0]


def test_nothing_is_evicted_under_a_read_or_a_write() -> None:
    index = index_of(1)
    entries = [write(index, n)[0] for n in range(8)]
    for n in range(8, 16):
        save(index, n)
    reads = [read(index, n) for n in range(8, 16)]
    assert index.place(key(99), ONE, PAGE) is None
    assert index.place(key(99), ONE, 2 * PAGE) is None
    index.close(reads[3], True)
    assert save(index, 99) == (0, 0, 11)
    assert has(index, *range(8, 16)) == [1, 1, 1, 0, 1, 1, 1, 1]
    for entry in entries:
        index.settle(entry, 1)
    assert has(index, *range(8)) == [1] * 8


def test_an_eviction_looks_at_a_bounded_number_of_blocks() -> None:
    """All were read: the hand takes some hit bits away, then evicts the first that it passed."""
    blocks = 1000
    fd = os.memfd_create("index")
    os.ftruncate(fd, Index.bytes_needed(blocks))
    index = Index(fd, blocks, 1024 * PAGE)
    index.enable(index.add_directory(1))
    for n in range(blocks):
        save(index, n)
        index.close(read(index, n), True)
    save(index, blocks)
    offset = layout.INDEX_HEADER.unpack_from(os.pread(fd, PAGE, 0))[6]
    hits = [layout.INDEX_ENTRY.unpack(os.pread(fd, 56, offset + 56 * n))[-1] for n in range(blocks)]
    assert hits.count(0) == 512
    assert has(index, 0, 1, blocks) == [0, 1, 1]
    os.close(fd)


def test_where_entries_run_out_before_slots_blocks_are_evicted_too() -> None:
    index = index_of(4, max_blocks=5)
    for n in range(12):
        save(index, n)
        assert index.check() == []
    assert sum(has(index, *range(12))) == 5
    assert save(index, 12, 4 * PAGE) == (0, 0, 0)  # of another size: a whole slab went
    assert sum(has(index, *range(13))) == 1


# ---- slot sizes ----------------------------------------------------------------------------------------------------------------


def test_a_size_with_nothing_to_evict_takes_the_coldest_slab_that_is_not_busy() -> None:
    index = index_of(3)
    for n in range(48):
        save(index, n)
    reading = read(index, 0)
    assert save(index, 48, 4 * PAGE) == (0, 1, 0)  # slab 0 is busy, slab 2 was used later
    assert has(index, *range(48)) == [1] * 16 + [0] * 16 + [1] * 16
    assert (index.stats()["slabs_taken_back"], index.stats()["evicted"]) == (1, 16)
    index.close(reading, True)
    assert index.check() == []


def test_a_size_takes_colder_slabs_of_another_and_leaves_warmer_ones() -> None:
    index = index_of(4)
    for n in range(64):
        save(index, n)
    for n in range(100, 140):  # ten slabs full
        save(index, n, 4 * PAGE)
        index.close(read(index, 63), True)
    assert has(index, 63) == [1]
    assert index.stats()["slabs_taken_back"] == 3
    assert sum(has(index, *range(64))) == 16
    assert index.check() == []


def test_a_slab_whose_last_block_ends_serves_any_size() -> None:
    index = index_of(1)
    save(index, 1)
    assert index.directory(0)["free_slabs"] == 0
    reading = read(index, 1)
    index.remove(key(1), ONE)
    assert index.place(key(2), ONE, 2 * PAGE) is None
    index.close(reading, True)
    assert index.directory(0)["free_slabs"] == 1
    assert save(index, 2, 2 * PAGE) == (0, 0, 0)


def test_there_are_at_most_32_sizes_at_a_time() -> None:
    slab = 40 * PAGE
    index = Index(None, 64, slab)
    index.enable(index.add_directory(40))
    for n in range(1, 33):
        save(index, n, n * PAGE)
    assert index.place(key(33), ONE, 33 * PAGE) is None
    assert index.check() == []
    index.remove(key(7), ONE)
    save(index, 33, 33 * PAGE)
    assert index.place(key(7), ONE, 7 * PAGE) is None


# ---- directories ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_placed_in_a_directory_that_is_not_enabled_and_what_it_has_is_served() -> None:
    index = Index(None, 64, SLAB)
    first = index.add_directory(1)
    assert index.place(key(1), ONE, PAGE) is None
    index.enable(first)
    save(index, 1)
    index.enable(first, False)
    assert index.place(key(2), ONE, PAGE) is None
    assert has(index, 1) == [1]
    index.close(read(index, 1), True)
    second = index.add_directory(1)
    index.enable(second, on=True)
    assert save(index, 2)[0] == second


def test_directories_fill_evenly_by_their_share() -> None:
    index = index_of(1, 3)
    for n in range(32):
        save(index, n)
        shares = [index.directory(d)["used_bytes"] / index.directory(d)["total_bytes"] for d in (0, 1)]
        assert abs(shares[0] - shares[1]) <= 1 / 16
    assert [index.directory(d)["blocks"] for d in (0, 1)] == [8, 24]


def test_full_directories_take_turns_by_their_size() -> None:
    index = index_of(1, 3)
    for n in range(64):
        save(index, n)
    placed = [save(index, 64 + n)[0] for n in range(40)]
    assert all(sorted(placed[n : n + 4]) == [0, 1, 1, 1] for n in range(0, 40, 4))
    assert [index.directory(d)["evicted"] for d in (0, 1)] == [10, 30]


def test_a_busy_directory_does_not_keep_others_from_evicting() -> None:
    index = index_of(1, 1)
    for n in range(32):
        if save(index, n)[0] == 0:
            read(index, n)
    assert {save(index, 100 + n)[0] for n in range(8)} == {1}


def test_a_dropped_directory_is_a_miss_at_once_and_its_slots_are_never_given_again() -> None:
    index = index_of(1, 1)
    where = {n: save(index, n) for n in range(10)}
    lost = [n for n in where if where[n][0] == 0]
    reading = read(index, lost[0])
    writing = write(index, 10)
    assert writing[1] == 0
    assert index.drop(0) == len(lost) == 5
    assert has(index, *range(11)) == [int(n not in lost) for n in range(10)] + [0]
    assert {save(index, n)[0] for n in lost} == {1}
    assert (index.stats()["gone"], index.stats()["total_bytes"]) == (2, SLAB)
    assert index.check() == []
    with pytest.raises(IndexError, match="there is no directory 0"):
        index.drop(0)
    assert index.add_directory(1) == 2
    index.settle(writing[0], 1)
    assert index.check() == []
    index.close(reading, True)
    assert index.check() == []
    assert (index.stats()["gone"], has(index, 10)) == (0, [0])
    index.enable(2)
    assert save(index, 11)[0] == 2


def test_there_are_at_most_64_directories_and_dropped_ones_count_until_nothing_is_in_flight() -> None:
    index = index_of(*[1] * 64)
    writing = [write(index, n) for n in range(64)]
    assert sorted(place[1] for place in writing) == list(range(64))
    with pytest.raises(MemoryError, match="64 directories already"):
        index.add_directory(1)
    index.drop(5)
    with pytest.raises(MemoryError):
        index.add_directory(1)
    index.settle(next(entry for entry, directory, *_ in writing if directory == 5), 1)
    assert index.add_directory(1) == 64
    assert index.check() == []


# ---- recovery ------------------------------------------------------------------------------------------------------------------


def test_what_the_records_say_is_there_again() -> None:
    index = index_of(2)
    records = b"".join(record(1, n, n, sequence=100 + n, checksum=50 + n) for n in range(16))
    assert index.load(0, 1, records, {7: (ONE, PAGE)}) == 16
    assert index.check() == []
    assert has(index, *range(16)) == [1] * 16
    assert index.open(key(3), ONE)[1:] == (0, 1, 3, 53)  # type: ignore[index]
    assert write(index, 99)[4] == 116
    assert index.stats()["used_bytes"] == 17 * PAGE


NUMBERS = {7: (ONE, PAGE), 8: (TWO, 2 * PAGE), 9: (ONE, 3 * PAGE)}


@pytest.mark.parametrize("byte", range(64))
def test_a_record_with_a_flipped_bit_anywhere_is_a_miss(byte: int) -> None:
    index = index_of(1)
    bad = bytearray(record(0, 1, 1))
    bad[byte] ^= 1 << byte % 8
    assert index.load(0, 0, record(0, 0, 0) + bad + record(0, 2, 2), NUMBERS) == 2
    assert has(index, 0, 1, 2) == [1, 0, 1]
    assert index.check() == []


@pytest.mark.parametrize(
    "why, wrong",
    [
        ("of another slot", record(0, 2, 1)),
        ("of another slab", record(1, 1, 1)),
        ("of a namespace that is not listed", record(0, 1, 1, number=6)),
        ("of another slot size than its namespace has", record(0, 1, 1, number=8, sequence=0)),
        ("of another slot size than the slab has", record(0, 1, 1, pages=2, sequence=0)),
        ("never written", bytes(64)),
        ("of no size", record(0, 1, 1, pages=0)),
    ],
)
def test_a_record_is_a_miss_if_it_is(why: str, wrong: bytes) -> None:
    index = index_of(1)
    assert index.load(0, 0, record(0, 0, 0) + wrong + record(0, 2, 2), NUMBERS) == 2
    assert has(index, 0, 1, 2) == [1, 0, 1]
    assert save(index, 3) == (0, 0, 1)  # and its slot is free
    assert index.check() == []


def test_only_records_of_the_slot_size_that_was_written_last_count() -> None:
    index = index_of(1)
    old = [record(0, n, n, sequence=10 + n) for n in range(16)]
    assert index.load(0, 0, b"".join([record(0, 0, 99, number=8, pages=2, sequence=40), *old[1:]]), NUMBERS) == 1
    assert has(index, 99, namespace=TWO) == [1]
    assert has(index, *range(16)) == [0] * 16
    assert index.stats()["sequence"] == 40


def test_the_last_write_decides_the_slot_size_even_if_its_namespace_was_cleared() -> None:
    index = index_of(1)
    records = record(0, 0, 0, sequence=5) + record(0, 1, 1, sequence=9, number=6, pages=2)
    assert index.load(0, 0, records, NUMBERS) == 0
    assert index.directory(0)["free_slabs"] == 1
    assert index.stats()["sequence"] == 9  # or the next write would be older than that one


def test_a_record_of_a_slot_that_does_not_end_inside_of_the_slab_is_a_miss() -> None:
    index = index_of(1)
    records = b"".join(record(0, n, n, number=9, pages=3) for n in range(8))
    assert index.load(0, 0, records, NUMBERS) == 5
    assert index.check() == []
    assert index_of(1).load(0, 0, record(0, 0, 0, pages=17), {7: (ONE, 17 * PAGE)}) == 0
    assert index_of(1).load(0, 0, record(0, 0, 0, pages=0xFFFFFFFF), {7: (ONE, 0xFFFFFFFF * PAGE)}) == 0


def test_of_a_key_with_several_records_one_counts() -> None:
    index = index_of(2)
    assert index.load(0, 0, record(0, 0, 0) + record(0, 1, 0, sequence=2) + record(0, 2, 2), NUMBERS) == 2
    assert index.load(0, 1, record(1, 0, 3) + record(1, 1, 2), NUMBERS) == 1
    assert has(index, 0, 2, 3) == [1, 1, 1]
    assert index.check() == []
    assert {save(index, 10 + n)[1:] for n in range(2)} <= {(0, 1), (1, 1), (0, 3), (1, 2)}


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 64 * 16 - 1, 64 * 16, 64 * 17, 64 * 4000])
def test_records_cut_short_or_too_long_are_read_as_far_as_they_go(size: int) -> None:
    index = index_of(1)
    records = b"".join(record(0, n, n) for n in range(17)).ljust(size, b"\xff")[:size]
    assert index.load(0, 0, records, NUMBERS) == min(size // 64, 16)
    assert index.check() == []


def test_free_slots_between_recovered_ones_are_used_lowest_first() -> None:
    index = index_of(1)
    index.load(0, 0, b"".join(record(0, n, n) if n in (2, 3, 5) else bytes(64) for n in range(16)), NUMBERS)
    assert [save(index, 100 + n)[2] for n in range(13)] == [0, 1, 4, *range(6, 16)]
    save(index, 200)
    assert index.stats()["evicted"] == 1
    assert index.check() == []


def test_recovery_stops_at_max_blocks() -> None:
    index = index_of(2, max_blocks=20)
    counts = [index.load(0, slab, b"".join(record(slab, n, 16 * slab + n) for n in range(16)), NUMBERS) for slab in (0, 1)]
    assert counts == [16, 4]
    assert index.check() == []
    save(index, 99)


def test_how_cold_a_recovered_slab_is_its_records_tell() -> None:
    index = index_of(2)
    index.load(0, 0, b"".join(record(0, n, n, sequence=50 + n) for n in range(16)), NUMBERS)
    index.load(0, 1, b"".join(record(1, n, 16 + n, sequence=20 + n) for n in range(16)), NUMBERS)
    assert save(index, 99, 2 * PAGE, TWO) == (0, 1, 0)
    assert has(index, *range(16)) == [1] * 16


def test_a_slab_is_loaded_before_anything_else_is_in_it() -> None:
    index = index_of(1)
    save(index, 1)
    with pytest.raises(ValueError, match="slab 0 of directory 0 is in use"):
        index.load(0, 0, b"", NUMBERS)
    with pytest.raises(IndexError, match="there is no slab 1 in directory 0"):
        index.load(0, 1, b"", NUMBERS)
    with pytest.raises(IndexError, match="there is no directory 1"):
        index.load(1, 0, b"", NUMBERS)
    for numbers in ({1: 2}, {1: (1,)}, {1: (1, 2, 3)}, {"a": (1, 2)}, {1: ("a", 2)}, {-1: (1, 2)}):
        with pytest.raises((TypeError, ValueError)):
            index_of(1).load(0, 0, record(0, 0, 0), numbers)


def test_many_namespaces_are_told_apart() -> None:
    index = index_of(1)
    numbers = {n * 1000: (n, PAGE) for n in random.Random(1).sample(range(5000), 1000)}
    chosen = sorted(numbers)[::63]
    assert index.load(0, 0, b"".join(record(0, n, n, number=number) for n, number in enumerate(chosen)), numbers) == len(chosen) == 16
    for n, number in enumerate(chosen):
        assert has(index, n, namespace=numbers[number][0]) == [1]
    for number in (0, 1, chosen[0] + 1, 0xFFFFFFFF):
        assert index_of(1).load(0, 0, record(0, 0, 0, number=number), {n: each for n, each in numbers.items() if n}) == 0


# ---- searches ------------------------------------------------------------------------------------------------------------------


def crowded(home: int, n: int) -> bytes:
    return struct.pack("<I", home) + key(n)[4:]


def test_keys_chosen_to_collide_are_placed_up_to_a_bound_and_found() -> None:
    index = Index(None, 3000, 4096 * PAGE)
    index.enable(index.add_directory(1))
    keys = [crowded(5, n) for n in range(1100)]
    placed = [each for each in keys if (at := index.place(each, ONE, PAGE)) and index.settle(at[0], 1) is None]
    assert placed == keys[: layout.MAX_PROBE]
    assert index.has(b"".join(keys), ONE) == b"\1" * 1024 + b"\0" * 76
    random.Random(3).shuffle(placed)
    for n, each in enumerate(placed):
        assert index.remove(each, ONE)
        if n % 100 == 0:
            assert index.check() == []
            assert index.has(b"".join(placed), ONE) == b"\0" * (n + 1) + b"\1" * (1023 - n)


def test_a_run_too_long_to_move_up_keeps_a_tombstone_that_is_used_again() -> None:
    blocks = 12000
    fd = os.memfd_create("index")
    os.ftruncate(fd, Index.bytes_needed(blocks))
    index = Index(fd, blocks, blocks * PAGE)
    index.enable(index.add_directory(1))
    keys = [crowded(max(0, n - 1), n) for n in range(4600)]  # all but the first lie one step from home
    for each in keys:
        save(index, each)
    header = layout.INDEX_HEADER.unpack_from(os.pread(fd, PAGE, 0))

    def tombstones() -> list[int]:
        words = struct.unpack(f"<{header[4]}Q", os.pread(fd, 8 * header[4], header[5]))
        return [at for at, word in enumerate(words) if word == layout.TOMBSTONE_WORD]

    assert index.remove(keys[0], ONE)
    assert tombstones() == [4 * layout.MAX_PROBE]
    assert index.check() == []
    assert index.has(b"".join(keys), ONE) == b"\0" + b"\1" * 4599
    assert index.remove(keys[1000], ONE)  # those behind it are where their searches start
    assert tombstones() == [4 * layout.MAX_PROBE]
    save(index, crowded(4 * layout.MAX_PROBE, 7000))
    assert tombstones() == []
    assert index.check() == []
    os.close(fd)


# ---- memory --------------------------------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("blocks", [98304, 98305, 131072])  # the table is just large enough, or just doubled
def test_a_block_costs_at_most_100_bytes_in_all(blocks: int) -> None:
    fd = os.memfd_create("index")
    os.ftruncate(fd, Index.bytes_needed(blocks))
    before = anonymous_bytes()
    index = Index(fd, blocks, 1024 * PAGE)
    index.enable(index.add_directory(-(-blocks // 1024)))
    for n in range(blocks):
        save(index, struct.pack("<I28x", n * 2654435761 % (1 << 32)))
    assert index.stats()["blocks"] == blocks
    assert index.stats()["memory_bytes"] <= 100 * blocks
    assert os.fstat(fd).st_blocks * 512 + anonymous_bytes() - before <= 100 * blocks
    os.close(fd)


def test_thousands_of_small_ones_leave_nothing_behind() -> None:
    def several(count: int) -> None:
        for _ in range(count):
            index = index_of(4, 4, max_blocks=16)
            save(index, 1)
            read(index, 1)
            index.drop(0)

    several(100)
    before = anonymous_bytes()
    several(3000)
    assert anonymous_bytes() - before < 1 << 20


# ---- readers -------------------------------------------------------------------------------------------------------------------


class Pool:
    """Tables with the keys 0..7 of one namespace READY, and an index with 4..11 and more on disk, both in files."""

    def __init__(self) -> None:
        self.tables_fd, self.index_fd = os.memfd_create("tables"), os.memfd_create("index")
        self.tables_bytes, self.index_bytes = Tables.bytes_needed(**GEOMETRY), Index.bytes_needed(64)
        os.ftruncate(self.tables_fd, self.tables_bytes)
        os.ftruncate(self.index_fd, self.index_bytes)
        self.tables = Tables.create(self.tables_fd, **GEOMETRY, boot_id=bytes(16), pool_epoch=bytes(16), instance_id=bytes(16))
        self.namespace = self.tables.namespace_add(b"f" * 32, PAGE, 1, "")
        member = self.tables.member_add(bytes(16), bytes(16), bytes(16), 0, 0)
        zero = bytes(2)
        for n in range(8):
            generation = self.tables.reserve(self.namespace, member, 1, key(n), zero)[2]
            assert self.tables.commit(member, 1, key(n), zero, generation, bytes(8)) == b"\0"
        self.index = Index(self.index_fd, 64, SLAB)
        self.index.enable(self.index.add_directory(4))
        for n in range(4, 12):
            save(self.index, n)
        self.view = View(self.tables_fd, self.tables_bytes)

    def lookup(self, *numbers: int) -> list[int]:
        return list(self.view.lookup(self.namespace, b"".join(map(key, numbers))))


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.view.close()
    os.close(made.tables_fd)
    os.close(made.index_fd)


def test_a_view_finds_what_is_on_disk_once_the_index_is_attached(pool: Pool) -> None:
    assert pool.lookup(*range(14)) == [1] * 8 + [0] * 6
    pool.view.attach_index(pool.index_fd, pool.index_bytes)
    assert pool.lookup(*range(14)) == [1] * 12 + [0] * 2
    entry = write(pool.index, 12)[0]
    assert pool.lookup(12) == [0]
    pool.index.settle(entry, 1)
    assert pool.lookup(12) == [1]
    read(pool.index, 12)
    pool.index.remove(key(12), ONE)
    assert pool.lookup(12) == [0]
    assert list(pool.tables.lookup(pool.namespace, key(11))) == [6]  # the sidecar's own table knows only the pool


def test_lookups_of_any_mixture_agree_with_a_plain_count(pool: Pool) -> None:
    pool.view.attach_index(pool.index_fd, pool.index_bytes)
    choose = random.Random(5)
    for _ in range(400):
        numbers = [choose.choice([*range(12)] * 9 + [50]) for _ in range(choose.choice([0, 1, 2, 15, 16, 17, 33, 64, 200]))]
        keys = b"".join(map(key, numbers))
        hits = [n < 12 for n in numbers]
        assert list(pool.view.lookup(pool.namespace, keys)) == hits
        assert pool.view.lookup_prefix(pool.namespace, keys) == (hits + [False]).index(False)
        misses = [choose.choice([0, 9, 50, 51, 52, 53]) for _ in numbers]
        last = max((n for n, number in enumerate(misses) if number < 12), default=-1)
        assert pool.view.lookup_reverse(pool.namespace, b"".join(map(key, misses))) == last


def test_a_removed_pool_answers_misses_whatever_is_on_disk(pool: Pool) -> None:
    pool.view.attach_index(pool.index_fd, pool.index_bytes)
    pool.tables.set_removed()
    assert pool.lookup(0, 9) == [0, 0]
    assert pool.view.lookup_prefix(pool.namespace, key(9)) == 0
    assert pool.view.lookup_reverse(pool.namespace, key(9)) == -1


def test_another_index_replaces_the_first(pool: Pool) -> None:
    pool.view.attach_index(pool.index_fd, pool.index_bytes)
    fd = os.memfd_create("index")
    os.ftruncate(fd, Index.bytes_needed(7))
    other = Index(fd, 7, SLAB)
    other.enable(other.add_directory(1))
    save(other, 30)
    pool.view.attach_index(fd, Index.bytes_needed(7))
    os.close(fd)
    del other
    assert pool.lookup(9, 30, 3) == [0, 1, 1]


def test_a_closed_view_takes_no_index(pool: Pool) -> None:
    pool.view.attach_index(pool.index_fd, pool.index_bytes)
    pool.view.close()
    with pytest.raises(ValueError, match="the View is closed"):
        pool.view.attach_index(pool.index_fd, pool.index_bytes)
    with pytest.raises(ValueError, match="the View is closed"):
        pool.lookup(1)


@pytest.mark.parametrize(
    "offset, name",
    [(0, "magic"), (8, "byte_order"), (12, "entry_bytes"), (16, "max_blocks|table_capacity|entries_offset|index_bytes")]
    + [(24, "table_capacity"), (32, "table_offset"), (40, "entries_offset"), (48, "index_bytes")],
)
def test_no_number_of_an_index_is_believed(pool: Pool, offset: int, name: str) -> None:
    good = os.pread(pool.index_fd, PAGE, 0)
    pool.view.attach_index(pool.index_fd, pool.index_bytes)
    for bit in range(64 if offset >= 16 or offset == 0 else 32):
        bad = bytearray(good)
        bad[offset + bit // 8] ^= 1 << bit % 8
        fd = os.memfd_create("index")
        os.pwrite(fd, bad, 0)
        os.ftruncate(fd, pool.index_bytes)
        if offset != 16 or Index.bytes_needed(64) != pool.index_bytes or bit > 30:
            with pytest.raises(LayoutError, match=name):
                pool.view.attach_index(fd, pool.index_bytes)
        os.close(fd)
    assert pool.lookup(9) == [1]


@pytest.mark.parametrize("size", [0, 100, PAGE - 1, PAGE, -1])
def test_an_index_of_another_size_is_refused(pool: Pool, size: int) -> None:
    os.ftruncate(pool.index_fd, size if size >= 0 else pool.index_bytes + size)
    with pytest.raises(LayoutError, match="of this index is wrong"):
        pool.view.attach_index(pool.index_fd, pool.index_bytes)
    assert pool.lookup(9) == [0]


def test_an_index_is_attached_and_the_view_closed_while_others_look_up(pool: Pool) -> None:
    """Batches that run without the GIL keep what they read mapped."""
    keys = b"".join(key(n % 14) for n in range(5000))
    stop, failures = threading.Event(), []

    def look(view: View) -> None:
        while not stop.is_set():
            try:
                found = view.lookup(pool.namespace, keys)
            except ValueError:
                return
            if {found[n] for n in range(5000) if n % 14 < 8} != {1} or any(found[n] for n in range(5000) if n % 14 >= 12):
                failures.append(found)
                return

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for _ in range(20):
        view = View(pool.tables_fd, pool.tables_bytes)
        threads = [threading.Thread(target=look, args=(view,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            view.attach_index(pool.index_fd, pool.index_bytes)
        view.close()
        for thread in threads:
            thread.join()
    sys.setswitchinterval(switch)
    assert failures == []


def test_a_forks_child_has_no_index() -> None:
    fd = os.memfd_create("index")
    os.ftruncate(fd, Index.bytes_needed(4))
    index = Index(fd, 4, SLAB)
    child = os.fork()
    if child == 0:
        try:
            index.stats()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.close(fd)
