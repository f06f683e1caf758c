"""HostKVStorage: a storage backend of SGLang's HiCache, so that pages which left an engine's host memory come back, also into another
engine, or into this one after a restart.

SGLang makes one object per rank, in the process of its scheduler. Three of its threads call it: one asks what there is
(batch_exists*), one reads (batch_get*), one writes (batch_set*), each one call after the other. The scheduler's own thread calls
get_stats at every turn of its loop, and the rest when there is nothing else to do.

The id of a block is SGLang's hash of the page: a chain over all tokens before it, which starts from what the request says that it shares
nothing across (extra_key with the LoRA adapter, cache_salt). Each of the engine's host pools (the KV, and of hybrid models windows, states
and indexes) has a namespace of its own, and each rank writes its shard of a block; where all have the same bytes, as with latent
attention, the first writes the one shard and every one reads it.

Bytes are copied once, between the host pool's pages and the sidecar's slots, by the thread that calls. No call waits longer than the
client's bounded times: without a sidecar, or with one that hangs, everything is a miss, and what is saved is dropped and counted.
"""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
# (SGLang is in the engine's environment, seldom in the one that checks types)
from __future__ import annotations

import logging
import threading
import time
from binascii import unhexlify
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sglang.version import __version__ as SGLANG_VERSION

from ...schemas.errors import Status
from ..client import Client
from ..errors import QueueFull, SidecarUnavailable
from ..options import check_options
from ..tasks import Task

TRIED = "0.5.23"

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
    from sglang.srt.observability.metrics_collector import StorageMetrics

    from .identity import identity_of, is_replicated, layout_of, weights_in_use
except ImportError as error:
    raise ImportError(f"this HostKV is made for SGLang {TRIED} and does not fit SGLang {SGLANG_VERSION}: {error}") from error

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolTransfer

    from ..store import Handles, Placed, Store

log = logging.getLogger("hostkv")

WHERE = "--hicache-storage-backend-extra-config"
OPTIONS: dict[str, type] = {"endpoint": str, "revision": str, "copy_threads": int, "tier_wait_s": float}
SGLANGS = (  # what SGLang itself reads there
    *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "hicache_storage_pass_prefix_keys"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
)
TIMEOUT_S = 0.5  # of a request; SGLang has one thread for each kind of call, in which all requests wait
TIER_WAIT_S = 1.0  # for the next page from a tier; SGLang's own patience with a prefetch is a second and a little
FIRST_KEYS, MORE_KEYS = 32, 1024  # looked up at a time; with more than 2,047 the GIL would be let go, and taking it back can cost more
PROMOTED_SHARE = 4  # of the pool, that pages may take which are promoted before they are asked for
TELL_S = 60.0  # between messages about pages that were not stored
_KEPT = (Status.OK, Status.EXISTS, Status.BUSY)  # it is stored, or somebody else is storing it


@dataclass
class Counts:
    """Since the backend was made, on this rank. Pages of all pools; `hits`: of those asked about."""

    asked: int = 0
    hits: int = 0
    saved: int = 0
    saved_bytes: int = 0
    dropped: int = 0  # were to be saved and were not
    loaded: int = 0
    loaded_bytes: int = 0
    lost: int = 0  # were to be loaded and were not
    exists_cpu_s: float = 0.0  # CPU time of SGLang's threads in our calls
    get_cpu_s: float = 0.0
    set_cpu_s: float = 0.0


class _Part(NamedTuple):
    """One host pool. `base`: of each piece of a page the address in page 0; `stride`: bytes from one page to the next."""

    store: Store
    shard: int
    page_size: int
    base: Any  # int64[pieces]
    stride: Any
    page_bytes: int
    writes: bool

    def addresses(self, keys: Sequence[str], host_indices: torch.Tensor) -> Any:
        """int64[pages, pieces]."""
        count = None if host_indices is None else len(host_indices)
        if count != len(keys) * self.page_size:
            raise ValueError(f"{count} host indices for {len(keys)} pages of {self.page_size}")
        first = host_indices[:: self.page_size].cpu().numpy()
        pages = first // self.page_size
        if (pages * self.page_size != first).any():
            raise ValueError("a page does not start at a multiple of the page size")
        return self.base + pages[:, None] * self.stride


class HostKVStorage(HiCacheStorage):
    """`--hicache-storage-backend dynamic` makes it with (storage_config, {})."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        if not SGLANG_VERSION.startswith(TRIED):
            log.warning("HostKV: not tried with SGLang %s, only with %s", SGLANG_VERSION, TRIED)
        given = storage_config.extra_config or {}
        options = options_of(given)
        if storage_config.tp_lcm_size:
            raise ValueError(f"{WHERE}: 'tp_lcm_size' is not supported: engines of different tensor parallel sizes share nothing")
        if not given.get("interface_v1"):
            log.warning('HostKV: %s lacks "interface_v1": 1, so SGLang copies each page once more on its way', WHERE)
        started = time.monotonic()
        self._identity = identity_of(options.get("revision"))
        if (took := time.monotonic() - started) > 1:
            log.info('HostKV: the weights were read to identify them, in %.1f s; "revision" in %s saves that', took, WHERE)
        self._weights: tuple[str, str] | None = weights_in_use()
        self._config = storage_config
        self._parts: dict[str, _Part | None] = {}  # None: a pool that has pages, and no bytes
        self.counts = Counts()
        self._gets: deque[tuple[int, float]] = deque(maxlen=1024)  # (pages, GB/s) that SGLang was not yet told of
        self._sets: deque[tuple[int, float]] = deque(maxlen=1024)
        self._told_s = -TELL_S
        self._guard = threading.Lock()  # of what both SGLang's saving thread and ours count
        self._pending = Task()  # the last commit
        self._pending.succeed([])
        self._client = Client(
            options.get("endpoint"),
            name=f"sglang rank {storage_config.tp_rank}",
            copy_threads=options.get("copy_threads", 1),
            timeout_s=TIMEOUT_S,
            tier_wait_s=options.get("tier_wait_s", TIER_WAIT_S),
        )

    # ---- pools ------------------------------------------------------------------------------------------------------------------
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._open(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV or host_pool is not self.mem_pool_host:
            self._open(host_pool_name, host_pool)

    def on_host_pools_registered(self) -> None:
        for name, part in self._parts.items():
            if part is not None:
                layout = part.store.layout
                log.info(
                    "HostKV: pages of %d bytes of pool %s as shard %d of %d, %s, of %s, %s",
                    *(part.page_bytes, str(name), part.shard, layout.shards, layout.layout_id, layout.model, layout.revision),
                )

    def _open(self, name: str, pool: Any) -> None:
        """ValueError (NamespaceError where it is the sidecar that refuses) when its pages cannot be stored."""
        if isinstance(pool, LogicalHostPool):
            self._parts[name] = None
            return
        base, stride, sizes = _measure(name, pool)
        layout = layout_of(self._identity, self._config, str(name), pool, sizes, self.mem_pool_host.page_size)
        store = self._client.open(layout, piece_bytes=None if len(set(sizes)) == 1 else sizes)
        replicated = is_replicated(self._config, name, pool)
        writes = not replicated or self._config.is_storage_writer
        shard = 0 if replicated else self._config.tp_rank
        self._parts[name] = _Part(store, shard, pool.page_size, base, stride, sum(sizes), writes)

    # ---- what there is ------------------------------------------------------------------------------------------------------------
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages from the first on there are. Those that only a tier has are on their way then."""
        with self._timed("exists_cpu_s"):
            run = self._run(keys)
            self._promote(PoolName.KV, keys[:run])
            return run

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> PoolTransferResult:
        """Which prefixes of these pages there are with all that each of the pools needs of them."""
        with self._timed("exists_cpu_s"):
            run = self._run(keys)
            reach = {PoolName.KV: run}  # the longest prefix that a pool has what is needed for
            restorable = list(range(1, run + 1))
            windows = {PoolName.KV: run}  # pages at its end that a prefix needs of a pool
            for transfer in pool_transfers or ():
                if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not run:
                    continue  # such groups never bound a prefix; we keep none, and say nothing of them
                trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
                window = windows[transfer.name] = max(1, len(transfer.keys or ())) if trailing else run
                ends = accumulate(self._found(transfer.name, keys[:run]), lambda before, one: before + 1 if one else 0)
                legal = {pages for pages, in_a_row in enumerate(ends, 1) if in_a_row >= min(window, pages)}
                reach[transfer.name] = max(legal, default=0)
                restorable = [pages for pages in restorable if pages in legal]
            longest = restorable[-1] if restorable else 0
            for name, window in windows.items():
                self._promote(name, keys[max(0, longest - window) : longest])
            return PoolTransferResult(longest, {name: pages for name, pages in reach.items() if pages}, restorable)

    def _run(self, keys: list[str]) -> int:
        """Most questions end with one of the first pages, so these are looked up first."""
        part = self._part(PoolName.KV)
        run, step = 0, FIRST_KEYS
        if part is None:
            run = len(keys)
        elif self._sound():
            while some := keys[run : run + step]:
                found = part.store.lookup_on_prefix(_ids(some)) + 1
                run += found
                if found < len(some):
                    break
                step = MORE_KEYS
        self.counts.asked += len(keys)
        self.counts.hits += run
        return run

    def _found(self, name: str, keys: list[str]) -> list[bool]:
        if name not in self._parts:
            return [False] * len(keys)
        part = self._parts[name]
        return [True] * len(keys) if part is None else part.store.lookup(_ids(keys))

    def _promote(self, name: str, keys: list[str]) -> None:
        """Has what only a tier holds of these brought into the pool, beside all this, while SGLang makes room for it."""
        part = self._parts.get(name)
        link = self._client.mapped()
        if part is None or not keys or link is None or not link.has_index:
            return
        store = part.store
        some = keys[: max(1, link.pool.size // PROMOTED_SHARE // store.layout.slot_bytes)]
        try:
            self._client.submit(Task(lambda _: store.bring(store.keys(_ids(some)), 0)))
        except (QueueFull, SidecarUnavailable) as error:
            log.debug("not promoted: %s", error)

    # ---- pages of the host pools --------------------------------------------------------------------------------------------------
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """The leading run is loaded; what is said of the others is False."""
        with self._timed("get_cpu_s"):
            return self._get(self._part(PoolName.KV), keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """True for what is stored now, by whomever, or being stored. SGLang drops the rest of a backup at the first False, and does not
        come back to it: rightly, since a page is worth nothing without those before it."""
        with self._timed("set_cpu_s"):
            return self._set(self._part(PoolName.KV), keys, host_indices)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        with self._timed("get_cpu_s"):
            return {one.name: self._get(self._part(one.name), one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        with self._timed("set_cpu_s"):
            return {one.name: self._set(self._part(one.name), one.keys or [], one.host_indices) for one in transfers}

    def _part(self, name: str) -> _Part | None:
        if name not in self._parts:
            raise ValueError(f"host pool {str(name)!r} was not registered")
        return self._parts[name]

    def _get(self, part: _Part | None, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        if part is None or not keys:
            return [True] * len(keys)
        run = self._load(part, keys, part.addresses(keys, host_indices))
        return [True] * run + [False] * (len(keys) - run)

    def _set(self, part: _Part | None, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        if part is None or not keys or not part.writes:
            return [True] * len(keys)
        return self._save(part, keys, part.addresses(keys, host_indices))

    # ---- pages in tensors, which SGLang copies to and from the host pool: the slow path without interface_v1 ---------------------------
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        part = self._part(PoolName.KV)
        into = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        if part is None or not keys:
            return list(into)
        with self._timed("get_cpu_s"):
            run = self._load(part, keys, _addresses(part, keys, into))
        return [*into[:run], *([None] * (len(keys) - run))]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        part = self._part(PoolName.KV)
        if part is None or not keys or not part.writes:
            return True
        with self._timed("set_cpu_s"):
            pages = [value.contiguous() for value in values]
            return all(self._save(part, keys, _addresses(part, keys, pages)))

    # ---- both ---------------------------------------------------------------------------------------------------------------------
    def _load(self, part: _Part, keys: list[str], addresses: Any) -> int:
        """Pages of the leading run that is loaded."""
        started = time.perf_counter()
        run = 0
        if self._sound():
            found = part.store.locate(_ids(keys))
            if found.run == len(keys):  # as mostly, since SGLang has asked about them
                run = self._read(part, found, addresses)
                part.store.used(found.keys)
            else:
                tag = self._client.new_tag()
                handles = part.store.acquire(found.keys, tag, self._client.tier_wait_s)
                try:
                    run = self._read(part, handles[: handles.run], addresses[: handles.run]) if handles.run else 0
                finally:
                    if Status.OK in handles.statuses:
                        part.store.release([tag])
        self.counts.loaded += run
        self.counts.loaded_bytes += run * part.page_bytes
        self.counts.lost += len(keys) - run
        self._note(self._gets, run, part, started)
        return run

    @staticmethod
    def _read(part: _Part, handles: Handles, addresses: Any) -> int:
        failed = part.store.read(handles, part.shard, addresses)
        return failed[0] if failed else len(handles)

    def _save(self, part: _Part, keys: list[str], addresses: Any) -> list[bool]:
        started = time.perf_counter()
        statuses = b""
        if self._sound():
            step = part.store.at_a_time()
            with suppress(SidecarUnavailable):
                for first in range(0, len(keys), step):
                    placed = part.store.place(_ids(keys[first : first + step]), part.shard, addresses[first : first + step])
                    statuses += placed.statuses
                    self._finish(part, placed)
        kept = [status in _KEPT for status in statuses] + [False] * (len(keys) - len(statuses))
        self._note(self._sets, statuses.count(Status.OK), part, started)
        self._dropped(kept.count(False))
        return kept

    def _finish(self, part: _Part, placed: Placed) -> None:
        """Has pages committed that are in their places, beside what SGLang does next: while the next are placed, but not longer, so that
        what this engine is writing stays a small part of the pool."""

        def commit(task: Task) -> None:
            statuses = b""
            with suppress(SidecarUnavailable):
                statuses = part.store.commit(placed)
            saved = statuses.count(Status.OK)
            self.counts.saved += saved
            self.counts.saved_bytes += saved * part.page_bytes
            self._dropped(len(placed.granted) - saved)
            task.succeed([])

        self.settle()
        if placed.granted:
            task = Task(commit)
            try:
                self._pending = self._client.submit(task)
            except (QueueFull, SidecarUnavailable, RuntimeError):
                task.execute()

    def settle(self) -> None:
        """Waits until all that was stored can be found, or was dropped."""
        self._pending.result(None)

    def _dropped(self, pages: int) -> None:
        if not pages:
            return
        with self._guard:
            self.counts.dropped += pages
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            why = self._client.down_reason or "the pool is full"
            log.warning("HostKV: %d pages were not stored by now, with what follows them: %s", self.counts.dropped, why)

    def _sound(self) -> bool:
        """Whether the engine computes with the weights that it had when this backend was attached."""
        if self._weights is not None and weights_in_use() != self._weights:
            self._weights = None
            log.error("HostKV: the engine's weights were replaced, so nothing is loaded or stored any more: detach and attach the backend")
        return self._weights is not None

    # ---- the scheduler's thread ---------------------------------------------------------------------------------------------------
    def get_stats(self) -> StorageMetrics | None:
        """What SGLang was not yet told of. No message, no lock."""
        if not self._gets and not self._sets:
            return None
        gets, sets = ([news.popleft() for _ in range(len(news))] for news in (self._gets, self._sets))
        return StorageMetrics([n for n, _ in gets], [n for n, _ in sets], [speed for _, speed in gets], [speed for _, speed in sets])

    def clear(self) -> None:
        """Invalidates what all engines like this one stored. SidecarUnavailable: it may be there still."""
        for part in self._parts.values():
            if part is not None:
                part.store.clear()

    def close(self) -> None:
        self._client.close()
        told = ", ".join(f"{field.name} {getattr(self.counts, field.name):g}" for field in fields(Counts))
        log.info("HostKV: closed; %s", told)

    # ---- inside -------------------------------------------------------------------------------------------------------------------
    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Counts the CPU time of the calling thread."""
        entered = time.thread_time()
        try:
            yield
        finally:
            setattr(self.counts, name, getattr(self.counts, name) + time.thread_time() - entered)

    def _note(self, news: deque[tuple[int, float]], pages: int, part: _Part, started: float) -> None:
        if pages and self._config.enable_storage_metrics:
            news.append((pages, pages * part.page_bytes / 1e9 / (time.perf_counter() - started)))


def options_of(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Our options, of the engine's extra configuration and of the YAML file that it names with `config`; the former win. ValueError."""
    options = check_options(WHERE, extra, {**OPTIONS, "config": str}, SGLANGS)
    path = options.pop("config", None)
    if path is None:
        return options
    import yaml

    try:
        with open(path) as file:
            written = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{WHERE}: cannot read 'config' {path!r}: {error}") from error
    if not isinstance(written, dict):
        raise ValueError(f"{path} holds a {type(written).__name__}, must hold names and values")
    return {**check_options(str(path), written, OPTIONS), **options}


def _ids(keys: list[str]) -> list[bytes]:
    """Of blocks: the 32 bytes of SGLang's hashes."""
    return list(map(unhexlify, keys))


def _measure(name: str, pool: Any) -> tuple[Any, Any, list[int]]:
    """Where the pieces of page 0 are, bytes from one page to the next, and the pieces' sizes: by what the pool says of three of its pages.
    Pieces in one buffer are put into the order of its memory, which is that of SGLang's flat pages."""
    size, last = pool.page_size, pool.size // pool.page_size - 1
    try:
        metas = [pool.get_page_buffer_meta(torch.arange(page * size, (page + 1) * size)) for page in (0, min(1, last), last)]
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise ValueError(f"host pool {str(name)!r} ({type(pool).__name__}, layout {pool.layout}) cannot be stored: {error}") from error
    base, second, end = (np.array(pointers, np.int64) for pointers, _ in metas)
    sizes = [int(piece) for piece in metas[0][1]]
    stride = second - base
    if not sizes or not (end == base + stride * last).all():
        raise ValueError(
            f"host pool {str(name)!r} ({type(pool).__name__}, layout {pool.layout}) cannot be stored: its pages are not evenly apart"
        )
    buffer = getattr(pool, "kv_buffer", None)
    if isinstance(buffer, torch.Tensor):
        start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        if all(start <= at < stop for at in base.tolist()):
            order = np.argsort(base)
            base, stride, sizes = base[order], stride[order], [sizes[i] for i in order]
    return base, stride, sizes


def _addresses(part: _Part, keys: list[str], pages: Sequence[torch.Tensor]) -> Any:
    """uint64[pages, 1] of flat pages in memory."""
    if len(pages) != len(keys) or any(page.nbytes != part.page_bytes or not page.is_contiguous() for page in pages):
        raise ValueError(f"there must be {len(keys)} contiguous tensors of {part.page_bytes} bytes, one per key")
    return np.array([[page.data_ptr()] for page in pages], np.uint64)
