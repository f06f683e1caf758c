"""The worker's role: copies blocks between the engine's KV memory and the pool."""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from ...schemas.errors import Status
from ...schemas.namespace import Layout, NamespaceError
from ..errors import QueueFull, SidecarUnavailable
from ..tasks import Task
from .identity import Kind, kinds_of, unsupported
from .plan import Facts, Load, Memory, Part, Refused, Save, StepPlan, StepReport
from .stats import Stats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ..client import Client
    from ..store import Store

logger = init_logger("vllm.hostkv")


class _Landed(NamedTuple):
    load: Load
    blocks: int  # that came
    bytes: int
    failed: list[int]  # block ids
    lost: int  # blocks that did not come
    seconds: float


class _Pieces(NamedTuple):
    """Where the memory of one kind is: of each piece of a block the address in block 0, bytes from one block to the next, and which of the
    part's groups says in which block it is."""

    bases: Any
    strides: Any
    group: Any
    sizes: list[int]

    def addresses(self, block_ids: list[list[int]]) -> Any:
        """uint64[blocks, pieces]."""
        return self.bases + np.array(block_ids, np.uint64).T.take(self.group, axis=1) * self.strides


class Worker:
    """Copies blocks between this worker's KV memory and the pool. All methods are called by the worker's one model thread; loads that
    requests wait for outside of the steps are copied in threads of the client."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, client: Client, stats: Stats) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._client = client
        self._stats = stats
        self._rank: int = get_tensor_model_parallel_rank()
        self._stage: int = get_pp_group().rank_in_group if config.parallel_config.pipeline_parallel_size > 1 else 0
        self._number = self._stage * config.parallel_config.tensor_parallel_size + self._rank
        self._by_block = fails_by_block(kv_cache_config)
        self._pieces: dict[int, _Pieces] = {}  # by kind
        self._caches: list[torch.Tensor] = []  # keeps that memory alive
        self._stores: dict[int, Store] = {}  # by kind
        self._refused: Layout | None = None
        self._failed: set[int] = set()
        self._loaded: Counter[int] = Counter()
        self._saves: dict[int, set[int]] = {}  # see StepReport
        self.landed: deque[_Landed] = deque()  # loads beside the steps that have ended
        self._pool_epoch = b""
        self._pool_epoch_told = b""
        self._unsound = False  # a load of this step failed
        self.facts = Facts("the worker registered no KV memory")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self.facts = self._measure(kv_caches)
        except Refused as refusal:
            self.facts = Facts(str(refusal))
            logger.error("HostKV: this worker's KV is not cached: %s", refusal)

    def _measure(self, kv_caches: dict[str, torch.Tensor]) -> Facts:
        """Finds the bytes of each layer's blocks; Refused where a block is not one run of bytes."""
        if reason := unsupported(self._config, self._kv_cache_config):
            raise Refused(reason)
        memories = {}
        for number, kind in enumerate(kinds_of(self._kv_cache_config)):
            names = [
                (name, at) for at, group in enumerate(kind.groups) for name in self._kv_cache_config.kv_cache_groups[group].layer_names
            ]
            if names:
                memories[number] = self._measure_kind(number, kind, names, kv_caches)
        self._pool_epoch = self._pool_epoch_told = self._client.pool_epoch
        return Facts("", self._number, self._stage, self._pool_epoch, memories)

    def _measure_kind(self, number: int, kind: Kind, names: list[tuple[str, int]], kv_caches: dict[str, torch.Tensor]) -> Memory:
        state = isinstance(kind.spec, MambaSpec)
        kernels = {_kernel(self._config, name, state) for name, _ in names}
        if len(kernels) != 1:
            raise Refused(f"the layers use several attention kernels: {sorted(kernels)}")
        pieces: dict[tuple[int, int], torch.Tensor] = {}  # layers of a group may share one
        for name, at in names:
            cache = kv_caches[name]
            self._look_at(name, cache, None if state else kind.spec.block_size)
            pieces[at, cache.data_ptr()] = cache
        caches = list(pieces.values())
        first = caches[0]
        if any((cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype) for cache in caches):
            raise Refused(f"the KV memory of the layers of groups {kind.groups} is not of one shape")
        page_bytes = first[0].numel() * first.element_size()
        self._caches += caches
        self._pieces[number] = _Pieces(
            np.array([cache.data_ptr() for cache in caches], np.uint64),
            np.array([cache.stride(0) * cache.element_size() for cache in caches], np.uint64),
            np.array([at for at, _ in pieces]),
            [page_bytes] * len(caches),
        )
        strides = tuple(stride * first.element_size() for stride in first.stride()[1:])
        return Memory(kernels.pop(), len(caches), page_bytes, tuple(first.shape[1:]), strides, tuple(names))

    def _look_at(self, name: str, cache: torch.Tensor, block_tokens: int | None) -> None:
        """Refused where this is not known to be KV memory of so many tokens a block, or (None) of states."""
        blocks = self._kv_cache_config.num_blocks
        if cache.device.type != "cpu":
            raise Refused(f"KV memory on device {cache.device} is not supported by this version, only the CPU's")
        if block_tokens is None:
            if cache.dim() < 2 or cache.shape[0] != blocks:
                raise Refused(f"unknown layout of states: {name} is {tuple(cache.shape)}, not [blocks={blocks}, …]")
        elif cache.dim() != 4 or cache.shape[0] != blocks or cache.shape[2] != block_tokens:
            raise Refused(
                f"unknown KV layout: {name} is {tuple(cache.shape)}, not [blocks={blocks}, heads, tokens={block_tokens}, content]"
            )
        shape, strides = tuple(cache.shape[1:]), cache.stride()
        if not _dense(shape, strides[1:]) or strides[0] < cache[0].numel():
            raise Refused(f"unknown KV layout: a block of shape {shape} and strides {strides[1:]} is not one run of bytes")

    def _opened(self, part: Part) -> Store | None:
        """The store of the part's layout, which changes when the engine's cache is reset. None when the sidecar refuses the layout, as one
        that was restarted with another pool may."""
        store = self._stores.get(part.kind)
        if store is None or store.layout != part.layout:
            if part.layout == self._refused:
                return None
            try:
                store = self._stores[part.kind] = self._client.open(part.layout, piece_bytes=self._pieces[part.kind].sizes)
            except NamespaceError as refusal:
                self._refused = part.layout
                logger.error("HostKV: nothing is saved: %s", refusal)
                return None
        return store

    def _shard(self, part: Part) -> int:
        """Which one is this rank's."""
        return self._rank if part.layout.shards > 1 else 0

    def load(self, plan: StepPlan) -> None:
        self._unsound = False
        self._pool_epoch = self._client.pool_epoch
        if not plan.loads:
            return
        mine = {number: (part, self._opened(part)) for number, part in enumerate(plan.parts) if part.stage == self._stage}
        for load in plan.loads:
            if not load.waits:
                self._unsound |= self._take(self._read(mine, load))
                continue
            try:
                self._client.submit(Task(partial(self._read_beside, mine, load)))
            except (QueueFull, SidecarUnavailable):
                self.landed.append(self._read(_without_stores(mine), load))

    def _read(self, mine: dict[int, tuple[Part, Store | None]], load: Load) -> _Landed:
        started = time.perf_counter()
        failed: list[int] = []
        blocks = size = lost = 0
        for read in load.reads:
            part, store = mine.get(read.part, (None, None))
            if part is None:  # of another stage
                continue
            bad = list(range(len(read.handles)))
            if store is not None:
                bad = store.read(read.handles, self._shard(part), self._pieces[part.kind].addresses(read.block_ids))
            failed += [ids[i] for ids in read.block_ids for i in bad]
            lost += len(bad)
            good = len(read.handles) - len(bad)
            blocks += good
            size += good * part.layout.shard_bytes
        return _Landed(load, blocks, size, failed, lost, time.perf_counter() - started)

    def _read_beside(self, mine: dict[int, tuple[Part, Store | None]], load: Load, _: Task) -> None:
        """In a thread of the client's."""
        landed = None
        try:
            landed = self._read(mine, load)
        finally:
            self.landed.append(landed or self._read(_without_stores(mine), load))

    def take_landed(self) -> tuple[set[str], set[str]]:
        """The requests whose loads beside the steps have ended since, well or badly, and those that failed, where blocks do not tell."""
        requests, failed = set(), set()
        while self.landed:
            landed = self.landed.popleft()
            requests.add(landed.load.request_id)
            if self._take(landed) and not self._by_block:
                failed.add(landed.load.request_id)
        return requests, failed

    def _take(self, landed: _Landed) -> bool:
        """Notes what came of a load; whether something failed."""
        if self._by_block:
            self._failed.update(landed.failed)
        self._loaded[landed.load.number] += 1
        self._stats.blocks_loaded += landed.blocks
        self._stats.bytes_loaded += landed.bytes
        self._stats.blocks_failed += landed.lost
        self._stats.load_s += landed.seconds
        if landed.lost:
            logger.warning("HostKV: %d of %d blocks did not load; the engine is told", landed.lost, landed.lost + landed.blocks)
        return bool(landed.lost)

    def save(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        for save in plan.saves:
            part = plan.parts[save.part]
            if part.stage != self._stage or self._rank >= part.layout.shards:
                continue
            dropped = self._saves[save.number] = self._write(part, save)
            saved = len(save.keys) - len(dropped)
            self._stats.blocks_saved += saved
            self._stats.bytes_saved += saved * part.layout.shard_bytes
            self._stats.blocks_dropped += len(dropped)
        self._stats.save_s += time.perf_counter() - started

    def _write(self, part: Part, save: Save) -> set[int]:
        """Which of the blocks are not stored now, by whomever."""
        every = set(range(len(save.keys)))
        store = None if self._unsound else self._opened(part)
        if store is None:
            return every
        try:
            statuses = store.write(save.keys, self._rank, self._pieces[part.kind].addresses(save.block_ids), save.low_priority)
        except SidecarUnavailable:  # the client tells, once
            return every
        return {i for i, status in enumerate(statuses) if status not in (Status.OK, Status.EXISTS)}

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> StepReport | None:
        told, self._pool_epoch_told = self._pool_epoch_told, self._pool_epoch
        if not self._loaded and not self._saves and told == self._pool_epoch:
            return None
        loaded, saves = self._loaded, self._saves
        self._loaded, self._saves = Counter(), {}
        return StepReport(loaded, saves, {self._number: self._pool_epoch})


def fails_by_block(kv_cache_config: KVCacheConfig) -> bool:
    """Whether an engine is told of blocks that did not load, and not of requests. It keeps what lies before such a block and goes on there,
    so all of that has to be there: of a window or a state it is not. And of several groups it does not know whose block it is."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def _without_stores(mine: dict[int, tuple[Part, Store | None]]) -> dict[int, tuple[Part, Store | None]]:
    """With these a read gets nothing."""
    return {number: (part, None) for number, (part, _) in mine.items()}


def _kernel(config: VllmConfig, layer_name: str, state: bool) -> str:
    """The attention backend of a layer, and on the CPU the instruction set that its kernel orders the keys in a block for."""
    layer = config.compilation_config.static_forward_context[layer_name]
    backend: str = layer.get_attn_backend().get_name()
    if state or backend == "CPU_MLA":
        return backend
    if backend != "CPU_ATTN":
        raise Refused(f"unknown KV layout: attention backend {backend}, known are CPU_ATTN and CPU_MLA")
    return f"{backend}:{layer.isa}"


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether an array of this shape fills one run of memory, in whatever order of its axes."""
    run = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != run:
                return False
            run *= size
    return True
