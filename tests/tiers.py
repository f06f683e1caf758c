"""A disk tier driven by hand, as the core does: what tests of it start from. The bytes of a block follow from its name, so whatever comes
back is told to be right or wrong without keeping it."""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import time
from collections.abc import Callable, Iterable
from errno import EBUSY, ENODEV
from itertools import count
from pathlib import Path
from typing import Any

from hostkv.cext import xxh3_64
from hostkv.schemas.layout import PAGE
from hostkv.schemas.namespace import Layout
from hostkv.sidecar.tiers import CORRUPT, Done, Forget, Read, Space, Write
from hostkv.sidecar.tiers import disk as disks
from hostkv.sidecar.tiers.disk import Disk

from tests.support import PATIENCE_S

MIB = 1 << 20
BOOT = bytes(range(16))
POOL_BYTES = 4 * MIB
disks.HUNG_S = disks.CLOSE_S = PATIENCE_S  # a disk that only takes long keeps its lock, and its blocks


def make_space(name: str = "m", shards: int = 2, shard_bytes: int = 8000) -> Space:
    layout = Layout(model=name, revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=shard_bytes, shards=shards)
    return Space(layout.fingerprint(), shards, shard_bytes, layout.slot_bytes, name)


SPACE = make_space()


def key_of(name: int, space: Space = SPACE) -> bytes:
    return hashlib.sha256(space.fingerprint + name.to_bytes(8, "little")).digest()


def payload_of(name: int, space: Space = SPACE) -> bytes:
    """What the slot holds, the padding of its shards included."""
    seed = key_of(name, space)
    return (seed * (space.slot_bytes // len(seed) + 1))[: space.slot_bytes]


def checksum_of(payload: bytes, space: Space = SPACE) -> int:
    stride = -(-space.shard_bytes // 64) * 64
    total = 0
    for shard in range(space.shards):
        total ^= xxh3_64(payload[shard * stride : shard * stride + space.shard_bytes], shard)
    return total


class Rig:
    """`paths`: its directories; made where they are not there. The ledger lies beside the last one."""

    def __init__(self, *paths: Path, size_bytes: int = 16 * MIB, max_blocks: int = 4096, engine: str = "auto", start: bool = True) -> None:
        self.paths, self.size_bytes, self.max_blocks, self.engine = paths, size_bytes, max_blocks, engine
        self.ledger = paths[-1].parent / "tiers"
        self.pool_fd = os.memfd_create("pool")
        os.ftruncate(self.pool_fd, POOL_BYTES)
        self.pool = mmap.mmap(self.pool_fd, POOL_BYTES)
        self._tokens = count(1)
        self.done: dict[int, Done] = {}
        self.disk: Any = None
        if start:
            self.open()

    def open(self) -> None:
        self.launch()
        self.until(lambda: all(each["state"] in ("serving", "failed") for each in self.directories()))

    def launch(self) -> None:
        """Without waiting for anything."""
        self.disk = Disk(
            [str(path) for path in self.paths],
            self.size_bytes,
            self.max_blocks,
            engine=self.engine,
            pool_fd=self.pool_fd,
            pool_bytes=POOL_BYTES,
            index_fd=None,
            endpoint="ipc:///run/x/control.sock",
            ledger_path=str(self.ledger),
            boot_id=BOOT,
        )

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.pool.close()
        os.close(self.pool_fd)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
            self.disk = None

    def reopen(self, *paths: Path) -> None:
        """A clean end, and a new start; on other directories if told so."""
        self.close()
        self.paths = paths or self.paths
        self.open()

    def directories(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.disk.status()["directories"]
        return found

    # ---- the loop ----

    def turn(self, wait_s: float = 0.02) -> None:
        select.select([self.disk.fileno()], [], [], wait_s)
        for done in self.disk.reap():
            assert done.token not in self.done, "Done twice"
            self.done[done.token] = done

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"it did not happen within {PATIENCE_S} s: {self.disk.status()}"
            self.turn()

    def wait(self, tokens: Iterable[int]) -> list[Done]:
        wanted = list(tokens)
        self.until(lambda: all(token in self.done for token in wanted))
        return [self.done.pop(token) for token in wanted]

    # ---- what the core does ----

    def begin_write(self, name: int, space: Space = SPACE, page: int = 0, checksum: int | None = None) -> tuple[int, int] | None:
        """(token, entry); None where there is no place."""
        namespace = self.disk.number(space)
        placed = self.disk.index.place(key_of(name, space), namespace, space.slot_bytes)
        if placed is None:
            return None
        entry, directory, slab, slot, sequence = placed
        self.pool[page * PAGE : page * PAGE + space.slot_bytes] = payload_of(name, space)
        token = next(self._tokens)
        shape = (space.shards, space.shard_bytes, space.slot_bytes, checksum)
        self.disk.submit([Write(token, directory, slab, slot, sequence, page, key_of(name, space), namespace, *shape)])
        return token, entry

    def write(self, name: int, space: Space = SPACE, checksum: int | None = None) -> int | None:
        """Its result; None where it has no place or is there already."""
        begun = self.begin_write(name, space, checksum=checksum)
        if begun is None:
            return None
        token, entry = begun
        (done,) = self.wait([token])
        self.disk.index.settle(entry, done.checksum if done.result == 0 else None)
        assert done.result != 0 or done.checksum == checksum_of(payload_of(name, space), space)
        return done.result

    def write_all(self, names: Iterable[int], space: Space = SPACE) -> None:
        for name in names:
            assert self.write(name, space) == 0

    def begin_read(self, name: int, space: Space = SPACE, page: int = 0) -> tuple[int, int] | None:
        found = self.disk.index.open(key_of(name, space), self.disk.number(space))
        if found is None:
            return None
        entry, directory, slab, slot, checksum = found
        self.pool[page * PAGE : page * PAGE + space.slot_bytes] = bytes(space.slot_bytes)
        token = next(self._tokens)
        self.disk.submit([Read(token, directory, slab, slot, page, space.shards, space.shard_bytes, space.slot_bytes, checksum)])
        return token, entry

    def read(self, name: int, space: Space = SPACE) -> int | None:
        """Its result, None on a miss. Bytes that are presented as good are."""
        begun = self.begin_read(name, space)
        if begun is None:
            return None
        token, entry = begun
        (done,) = self.wait([token])
        self.disk.index.close(entry, done.result in (0, EBUSY, ENODEV))
        if done.result == 0:
            assert same_shards(self.pool[: space.slot_bytes], payload_of(name, space), space), f"wrong bytes for block {name}"
        else:
            assert done.result == CORRUPT or done.result > 0
        return done.result

    def path_of(self, name: int, space: Space = SPACE) -> Path:
        """The directory it lies in."""
        entry, directory, *_ = self.disk.index.open(key_of(name, space), self.disk.number(space))
        self.disk.index.close(entry, True)
        return Path(self.disk._by_index[directory].path)

    def held(self, names: Iterable[int], space: Space = SPACE) -> set[int]:
        """Which of these blocks can be read; none of them with wrong bytes."""
        return {name for name in names if self.read(name, space) == 0}

    def forget(self, *spaces: Space) -> list[int]:
        """Results; of all namespaces where none is given."""
        numbers = self.disk.retire(spaces or None)
        for number in numbers:
            self.disk.index.remove_namespace(number)
        forgets = [Forget(next(self._tokens), number) for number in numbers]
        self.disk.submit(forgets)
        return [done.result for done in self.wait(forget.token for forget in forgets)]


def same_shards(a: bytes, b: bytes, space: Space) -> bool:
    """What lies between two shards is nobody's."""
    stride = -(-space.shard_bytes // 64) * 64
    return all(a[at : at + space.shard_bytes] == b[at : at + space.shard_bytes] for at in range(0, space.shards * stride, stride))
