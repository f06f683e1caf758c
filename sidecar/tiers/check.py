"""A directory of the disk tier that no sidecar has, and that whoever calls this has taken: what its records say, which of that no sidecar
writes, and which payload is not what was saved. For `hostkv fsck`.

Much of what lies there counts no more and is no damage: records are not erased when a block is evicted, when a slab gets another slot size
or when a namespace is cleared. A valid record without its payload is what a write leaves that was cut short, and what a disk leaves that
loses bytes; it is told here, and by the first read otherwise."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...cext import Index, Io, xxh3_64
from ...schemas.layout import PAGE, RECORD
from .directory import Directory

STAGING_BYTES = 64 << 20  # of payload that is being read
_SEALED_BYTES = RECORD.size - 8
_NEVER = bytes(RECORD.size)


class Block(NamedTuple):
    """What a valid record says."""

    slab: int
    slot: int
    key: bytes
    checksum: int
    shards: int
    shard_bytes: int
    slot_bytes: int


class Sorted(NamedTuple):
    """The records of one slab."""

    slot_pages: int  # of the slab now, 0: none
    valid: list[Block]
    resized: list[int]  # slots whose records are of a slot size that the slab has no more
    ended: list[int]  # of namespaces that were cleared
    wrong: list[tuple[int, str]]  # that no sidecar writes, and why


def sort(directory: Directory, slab: int) -> Sorted:
    """By the rule of layout.h."""
    records = directory.records(slab)
    valid: list[Block] = []
    resized: list[int] = []
    ended: list[int] = []
    wrong: list[tuple[int, str]] = []
    fd = directory.slab_fds[slab]
    slab_bytes = min(os.fstat(fd).st_size if fd >= 0 else 0, directory.slab_bytes)
    sealed = []
    pages = newest = 0
    for slot in range(len(records) // RECORD.size):
        at = slot * RECORD.size
        raw = records[at : at + RECORD.size]
        if raw == _NEVER:
            continue
        record = RECORD.unpack(raw)
        _, _, sequence, _, slot_pages, seal = record
        if not slot_pages or xxh3_64(raw[:_SEALED_BYTES], slab << 32 | slot) != seal:
            wrong.append((slot, "its seal is wrong"))
            continue
        sealed.append((slot, record))
        if not pages or sequence >= newest:
            pages, newest = slot_pages, sequence
    for slot, (key, checksum, _, number, slot_pages, _) in sealed:
        space, slot_bytes = directory.namespaces.get(number), slot_pages * PAGE
        if not 0 < number < directory.next_number:
            wrong.append((slot, f"its namespace {number} never was"))
        elif space is None:
            ended.append(slot)
        elif space.slot_bytes != slot_bytes:
            wrong.append((slot, f"its slot has {slot_bytes} bytes, those of its namespace {space.slot_bytes}"))
        elif (slot + 1) * slot_bytes > slab_bytes:
            wrong.append((slot, f"its slab has {slab_bytes} bytes, its slot ends at {(slot + 1) * slot_bytes}"))
        elif slot_pages != pages:
            resized.append(slot)
        else:
            valid.append(Block(slab, slot, key, checksum, space.shards, space.shard_bytes, slot_bytes))
    return Sorted(pages, valid, resized, ended, wrong)


def served(directory: Directory, valid: int) -> tuple[int, int]:
    """Blocks that a start finds there, and their bytes, of so many valid records: of several of one key it takes one."""
    index = Index(None, max(1, valid), directory.slab_bytes)
    number = index.add_directory(max(1, len(directory.slab_fds)))
    numbers = {number: (number, space.slot_bytes) for number, space in directory.namespaces.items()}
    for slab in range(len(directory.slab_fds)):
        index.load(number, slab, directory.records(slab), numbers)
    stats = index.stats()
    return stats["blocks"], stats["used_bytes"]


def differing(directory: Directory, slabs: Iterable[int], seen: Callable[[int], None]) -> Iterator[tuple[Block, int]]:
    """Reads the payload of each valid record of these slabs as a sidecar does, and yields those that are not what was saved, each with what
    the engine says: Io.CORRUPT or an errno. `seen` is told the bytes of each block that was read."""
    size = max([STAGING_BYTES, *(space.slot_bytes for space in directory.namespaces.values())])
    memory = os.memfd_create("hostkv-fsck", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, size)
        io = Io(memory, size)
    finally:
        os.close(memory)
    reader = _Reader(io, size, seen)
    try:
        for slab in slabs:
            for block in sort(directory, slab).valid:
                yield from reader.read(directory.slab_fds[slab], block)
        yield from reader.end()
    finally:
        io.close()


class _Reader:
    """Keeps the engine busy: as many blocks are on their way as the memory has room for."""

    def __init__(self, io: Io, size: int, seen: Callable[[int], None]) -> None:
        self._io, self._size, self._seen = io, size, seen
        self._slot_bytes = 0  # of all that are on their way
        self._free: list[int] = []  # offsets in the memory
        self._flying: dict[int, Block] = {}  # by the offset where they arrive

    def read(self, fd: int, block: Block) -> Iterator[tuple[Block, int]]:
        """Begins to read one, once there is room for it; yields what has ended badly meanwhile."""
        if block.slot_bytes != self._slot_bytes:
            yield from self.end()
            self._slot_bytes = block.slot_bytes
            self._free = list(range(0, self._size - block.slot_bytes + 1, block.slot_bytes))
        while not self._free:
            yield from self._reap()
        at = self._free.pop()
        _, slot, _, checksum, shards, shard_bytes, slot_bytes = block
        op = (at, Io.READ, fd, slot * slot_bytes, at, slot_bytes, shards, shard_bytes, checksum, -1, 0, b"")
        while not self._io.submit([op]):
            yield from self._reap()
        self._flying[at] = block

    def end(self) -> Iterator[tuple[Block, int]]:
        while self._flying:
            yield from self._reap()

    def _reap(self) -> Iterator[tuple[Block, int]]:
        select.select([self._io], [], [])
        for at, result, _ in self._io.reap():
            block = self._flying.pop(at)
            self._free.append(at)
            self._seen(block.slot_bytes)
            if result:
                yield block, result
