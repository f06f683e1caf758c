"""HostKV's side (side.py): the client, with its one copy thread. An object's pieces lie as in LMCache's, in an engine's KV tensors."""

from __future__ import annotations

import mmap
import secrets
import statistics
import sys
import time

import numpy as np
from hostkv.cext import buffer_address
from hostkv.connector import Client, Layout
from side import PIECE_BYTES, median_of, serve, timed


class HostKV:
    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint, name="peers", timeout_s=10)
        self._ids: dict[str, list[bytes]] = {}

    def open(self, size: int, count: int) -> None:
        """Memory as of `size // PIECE_BYTES // 2` layers, each with its keys and its values of `count` blocks."""
        self._size, self._count = size, count
        self._memory = mmap.mmap(-1, size * count)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._bytes[:] = np.random.default_rng(1).integers(0, 256, len(self._bytes), np.uint8)
        planes = size // PIECE_BYTES
        pieces = np.arange(planes, dtype=np.uint64) * (count * PIECE_BYTES)
        blocks = np.arange(count, dtype=np.uint64)[:, None] * PIECE_BYTES
        self._addresses = np.ascontiguousarray(buffer_address(self._memory, True)[0] + blocks + pieces, dtype=np.uint64)
        layout = Layout(
            model="m", revision=secrets.token_hex(8), kv_dtype="float16", layout_id="opaque", block_tokens=256, shard_bytes=size
        )
        self._store = self._client.open(layout, [PIECE_BYTES] * planes)
        self._client.warm(60)

    def save(self, batch: str) -> float:
        ids = self._ids[batch] = [secrets.token_bytes(32) for _ in range(self._count)]
        return timed(lambda: self._store.wait(self._store.dump_data(ids, 0, self._addresses)))

    def load(self, batch: str) -> float:
        saved = self._bytes[:: 1 << 12].copy()
        self._bytes[:] = 0
        spent = timed(lambda: self._store.wait(self._store.load_data(self._ids[batch], 0, self._addresses)))
        if not np.array_equal(self._bytes[:: 1 << 12], saved):
            raise ValueError("other bytes came back")
        return spent

    def clear(self) -> None:
        self._store.clear()

    def keep(self, count: int) -> None:
        self._absent = self._store.keys([b"absent"])
        self._kept = [secrets.token_bytes(32) for _ in range(count)]
        for first in range(0, count, self._count):
            ids = self._kept[first : first + self._count]
            self._store.wait(self._store.dump_data(ids, 0, self._addresses[: len(ids)]))

    def lookup(self, count: int) -> float:
        ids = self._kept[:count]
        assert self._store.lookup_on_prefix(ids) == count - 1
        return median_of(50, lambda: self._store.lookup_on_prefix(ids))

    def lookup_kept(self, count: int) -> float:
        ids, spent = self._kept[:count], []
        for _ in range(50):
            tag = self._client.new_tag()
            start = time.perf_counter()
            found = self._store.acquire(ids, tag).run
            spent.append(time.perf_counter() - start)
            assert found == count
            self._store.release([tag])
            self._ask_for_nothing()  # the answer tells that the release is done
        return statistics.median(spent)

    def round_trip(self) -> float:
        return median_of(500, self._ask_for_nothing)

    def _ask_for_nothing(self) -> None:
        self._store.acquire(self._absent, self._client.new_tag())

    def close(self) -> None:
        self._client.close()


if __name__ == "__main__":
    serve(HostKV(sys.argv[1]))
