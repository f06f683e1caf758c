"""LMCache's side (side.py): its engine-driven transfers through shared memory, by what `lmcache bench server` makes of an engine. An object
is a chunk of 256 tokens; its bytes come from the layers: 1, 4 or 32 of them, each with keys and values of 512 KiB."""

from __future__ import annotations

import sys
import time

import torch
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.cli.commands.bench.server_bench.helpers import _make_key
from side import CHUNK_TOKENS, PIECE_BYTES, median_of, serve, timed

TIMEOUT_S = 120


class LMCache:
    def __init__(self, url: str) -> None:
        self._url = url
        self._client: ServerBenchClient | None = None

    def open(self, size: int, count: int) -> None:
        self.close()
        self._count, layers = count, size // PIECE_BYTES // 2
        shape = f"(2,{count + 1},{CHUNK_TOKENS},8,128):float16:{layers}"  # block 0 stands for "no block"
        self._client = ServerBenchClient(
            BenchConfig(self._url, "", "cpu", "engine_driven", 1, False, CHUNK_TOKENS, shape, count + 1, CHUNK_TOKENS), lambda _: None
        )
        self._client.start()
        self._worker = self._client._workers[0]
        self._rpc = self._client._req_client
        self._saved = [tensor.clone() for tensor in self._worker.kv_caches.values()]

    def save(self, batch: str) -> float:
        return timed(lambda: self._store(batch, 0, self._count))

    def load(self, batch: str) -> float:
        if self._ask(batch, self._count) != self._count:  # the lookup that a load needs; what it takes is a line of its own
            raise ValueError("not all chunks are there")
        for tensor in self._worker.kv_caches.values():
            tensor.zero_()
        spent = timed(lambda: self._move("submit_retrieve", batch, 0, self._count, skip_first_n_tokens=0))
        for tensor, saved in zip(self._worker.kv_caches.values(), self._saved, strict=True):
            if not torch.equal(tensor[:, 1:], saved[:, 1:]):
                raise ValueError("other bytes came back")
        self._rpc.end_session(batch).result(timeout=TIMEOUT_S)
        return spent

    def clear(self) -> None:
        self._rpc.clear(True).result(timeout=TIMEOUT_S)

    def keep(self, count: int) -> None:
        for first in range(0, count, self._count):
            self._store("kept", first, min(self._count, count - first))

    def lookup(self, count: int) -> float:
        spent = []
        for number in range(20):
            request = f"lookup-{count}-{number}-{time.monotonic_ns()}"
            found: list[int | None] = []
            spent.append(timed(lambda: found.append(self._ask("kept", count, request))))  # noqa: B023
            if found != [count]:
                raise ValueError(f"{found} of {count} chunks are there")
            self._rpc.end_session(request).result(timeout=TIMEOUT_S)
        return sorted(spent)[len(spent) // 2]

    lookup_kept = lookup  # it always is

    def round_trip(self) -> float:
        return median_of(500, lambda: self._rpc.noop().result(timeout=TIMEOUT_S))

    def _key(self, prompt: str, request: str, first: int, last: int, worker: int | None) -> object:
        tokens = (hash(prompt) & 0xFFFFFF, *range(1, last * CHUNK_TOKENS))
        return _make_key(tokens, request, first * CHUNK_TOKENS, last * CHUNK_TOKENS, worker)

    def _ask(self, prompt: str, count: int, request: str = "") -> int | None:
        """How many of its first `count` chunks are there; they are kept for the request until that loads them, or ends."""
        request = request or prompt
        self._rpc.lookup(self._key(prompt, request, 0, count, None), 1).result(timeout=TIMEOUT_S)
        while (found := self._rpc.query_prefetch_status(request).result(timeout=TIMEOUT_S)) is None:
            pass
        return int(found)

    def _store(self, prompt: str, first: int, count: int) -> None:
        self._move("submit_store", prompt, first, count)

    def _move(self, what: str, prompt: str, first: int, count: int, **more: int) -> None:
        context = self._worker.transfer_context
        key = self._key(prompt, prompt, first, first + count, 0)
        submit = getattr(context, what)
        done = submit(prompt, key, self._worker.kv_caches, [list(range(1, count + 1))], context.create_recorded_event(), 1, **more)
        if not done.result(timeout=TIMEOUT_S):
            raise ValueError(f"{what} of {count} chunks failed")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


if __name__ == "__main__":
    serve(LMCache(sys.argv[1]))
