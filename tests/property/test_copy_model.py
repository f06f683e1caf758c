"""Copies against the plainest model there is: slices of bytes."""

import os

import numpy as np
import pytest
from hostkv.cext import Mapping, buffer_address
from hypothesis import given, settings
from hypothesis import strategies as st

# Around a cache line, around the size from which pieces are streamed, and a few pages.
sizes = st.one_of(st.integers(1, 200), st.integers(900, 1200), st.integers(1, 20_000))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[list[int]], int]:
    """(pool bytes, offsets, piece sizes, piece places in the memory outside, memory bytes), no two of them overlapping."""
    pieces = draw(st.lists(sizes, min_size=1, max_size=6))
    blocks = draw(st.integers(1, 5))
    gaps = st.integers(0, 130)
    offsets, pool_bytes = [], 0
    for _ in range(blocks):
        pool_bytes += draw(gaps)
        offsets.append(pool_bytes)
        pool_bytes += sum(pieces)
    places: list[list[int]] = [[0] * len(pieces) for _ in range(blocks)]
    memory_bytes = 0
    for flat in draw(st.permutations(range(blocks * len(pieces)))):
        memory_bytes += draw(gaps)
        places[flat // len(pieces)][flat % len(pieces)] = memory_bytes
        memory_bytes += pieces[flat % len(pieces)]
    return pool_bytes, draw(st.permutations(offsets)), pieces, places, memory_bytes


def u64(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def mapped(size: int) -> Mapping:
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, size)
    mapping = Mapping(fd, size, True)
    os.close(fd)
    return mapping


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 3), st.none() | st.lists(st.integers(0, (1 << 64) - 1), min_size=5), st.randoms(use_true_random=False))
def test_copies_equal_the_model(
    batch: tuple[int, list[int], list[int], list[list[int]], int], threads: int, numbers: list[int] | None, random: object
) -> None:
    pool_bytes, offsets, pieces, places, memory_bytes = batch
    seeds = None if numbers is None else u64(numbers[: len(offsets)])
    memory = np.random.default_rng(random.getrandbits(32)).integers(0, 256, memory_bytes, dtype=np.uint8)
    base, _ = buffer_address(memory, True)
    mapping, expected = mapped(pool_bytes), mapped(pool_bytes)
    addresses = u64(places) + np.uint64(base)

    model = bytearray(pool_bytes)
    for offset, block in zip(offsets, places, strict=True):
        for piece, place in zip(pieces, block, strict=True):
            model[offset : offset + piece] = memory[place : place + piece].tobytes()
            offset += piece
    with memoryview(expected) as view:
        view[:] = model
    checksums = None if seeds is None else expected.checksums(u64(offsets), sum(pieces), seeds)
    assert mapping.copy_in(u64(offsets), addresses, u64(pieces), threads, seeds=seeds) == checksums
    assert bytes(mapping) == model

    wiped = memory.copy()
    for block in places:
        for piece, place in zip(pieces, block, strict=True):
            memory[place : place + piece] ^= 0xFF
    assert mapping.copy_out(u64(offsets), addresses, u64(pieces), threads, seeds=seeds) == checksums
    assert np.array_equal(memory, wiped)
    mapping.close()
    expected.close()


any_u64 = st.one_of(st.integers(0, 70_000), st.integers(0, (1 << 64) - 1), st.sampled_from([1 << 63, (1 << 64) - 1, (1 << 64) - 4096]))


@settings(max_examples=300, deadline=None)
@given(st.lists(any_u64, min_size=1, max_size=4), st.lists(any_u64, min_size=1, max_size=4))
def test_offsets_and_sizes_of_any_value_stay_inside_or_are_refused(offsets: list[int], pieces: list[int]) -> None:
    pool_bytes = 65_536
    mapping = mapped(pool_bytes)
    memory = np.zeros(pool_bytes, dtype=np.uint8)
    addresses = u64([buffer_address(memory, True)[0]] * (len(offsets) * len(pieces)))
    fits = 0 not in pieces and all(offset + sum(pieces) <= pool_bytes for offset in offsets)
    if fits:
        mapping.copy_in(u64(offsets), addresses, u64(pieces))
    else:
        with pytest.raises(ValueError):
            mapping.copy_in(u64(offsets), addresses, u64(pieces))
    mapping.close()
