"""Mooncake's side (side.py): the dummy client beside a `mooncake_client`. Objects are contiguous and lie in memory that the client shares
with that process (alloc_from_mem_pool), which it copies from and to: an engine's own memory it would not reach."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from mooncake.store import MooncakeDistributedStore
from side import median_of, serve, timed

MOST_BYTES = 256 << 20


class Mooncake:
    def __init__(self, address: str) -> None:
        self._store = MooncakeDistributedStore()
        if self._store.setup_dummy(MOST_BYTES + (64 << 20), 64 << 20, address) != 0:
            raise RuntimeError("setup_dummy failed")
        self._base = self._store.alloc_from_mem_pool(MOST_BYTES)
        if not self._base or self._store.register_buffer(self._base, MOST_BYTES) != 0:
            raise RuntimeError("no memory from the pool")
        self._stored = 0

    def open(self, size: int, count: int) -> None:
        self._sizes = [size] * count
        self._addresses = [self._base + i * size for i in range(count)]
        ctypes.memmove(self._base, os.urandom(1 << 20) * (size * count >> 20), size * count)

    def save(self, batch: str) -> float:
        keys = self._keys(batch, len(self._sizes))
        return timed(lambda: self._put(keys))

    def load(self, batch: str) -> float:
        keys, total = self._keys(batch, len(self._sizes)), sum(self._sizes)
        saved = ctypes.string_at(self._base, 1 << 20)
        ctypes.memset(self._base, 0, total)
        codes: list[int] = []
        spent = timed(lambda: codes.extend(self._store.batch_get_into(keys, self._addresses, self._sizes)))
        if codes != self._sizes:
            raise ValueError(f"batch_get_into answers {sorted(set(codes))}")
        if any(ctypes.string_at(self._base + first, 1 << 20) != saved for first in range(0, total, 1 << 20)):
            raise ValueError("other bytes came back")
        return spent

    def clear(self) -> None:
        """What was read lately has a lease, and stays until that ends."""
        end = time.monotonic() + 30
        while self._stored and time.monotonic() < end:
            self._stored -= self._store.remove_all()
            if self._stored:
                time.sleep(0.5)
        if self._stored:
            raise RuntimeError(f"{self._stored} objects could not be removed")

    def keep(self, count: int) -> None:
        self._kept = self._keys("kept", count)
        for first in range(0, count, len(self._sizes)):
            self._put(self._kept[first : first + len(self._sizes)])

    def lookup(self, count: int) -> float:
        keys = self._kept[:count]
        assert self._store.batch_is_exist(keys) == [1] * count
        return median_of(50, lambda: self._store.batch_is_exist(keys))

    lookup_kept = lookup  # it always is

    def round_trip(self) -> float:
        return median_of(500, lambda: self._store.is_exist(self._kept[0]))

    @staticmethod
    def _keys(batch: str, count: int) -> list[str]:
        return [f"{batch}-{i:04}" for i in range(count)]

    def _put(self, keys: list[str]) -> None:
        codes = self._store.batch_put_from(keys, self._addresses[: len(keys)], self._sizes[: len(keys)])
        self._stored += len(keys)
        if any(codes):
            raise ValueError(f"batch_put_from answers {sorted(set(codes))}")

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    serve(Mooncake(sys.argv[1]))
