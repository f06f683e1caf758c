"""The worker's role: copies blocks between the engine's KV memory and the pool."""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from ...schemas.errors import Status
from ...schemas.namespace import Layout, NamespaceError
from ..errors import QueueFull, SidecarUnavailable
from ..tasks import Task
from .identity import unsupported
from .plan import Facts, Load, Refused, Save, StepPlan, StepReport
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
    failed: list[int]  # block ids
    seconds: float


class Worker:
    """Copies blocks between this worker's KV memory and the pool. All methods are called by the worker's one model thread; loads that
    requests wait for outside of the steps are copied in threads of the client."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, client: Client, stats: Stats) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._client = client
        self._stats = stats
        self._rank: int = get_tensor_model_parallel_rank()
        self._bases = np.zeros(0, np.uint64)  # per layer: address of block 0, and bytes from one block to the next
        self._strides = np.zeros(0, np.uint64)
        self._caches: list[torch.Tensor] = []  # keeps that memory alive
        self._page_bytes = 0
        self._shard_bytes = 0  # of all layers
        self._store: Store | None = None
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
        caches = list({cache.data_ptr(): cache for cache in kv_caches.values()}.values())  # layers may share one
        first = caches[0]
        blocks, block_tokens = self._kv_cache_config.num_blocks, self._config.cache_config.block_size
        kernels = {_kernel(self._config, name) for name in kv_caches}
        if len(kernels) != 1:
            raise Refused(f"the layers use several attention kernels: {sorted(kernels)}")
        for name, cache in kv_caches.items():
            if cache.device.type != "cpu":
                raise Refused(f"KV memory on device {cache.device} is not supported by this version, only the CPU's")
            if cache.dim() != 4 or cache.shape[0] != blocks or cache.shape[2] != block_tokens:
                raise Refused(
                    f"unknown KV layout: {name} is {tuple(cache.shape)}, not [blocks={blocks}, heads, tokens={block_tokens}, content]"
                )
            if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
                raise Refused(f"the KV memory of {name} is shaped unlike the first layer's")
        shape, strides, item = tuple(first.shape[1:]), first.stride(), first.element_size()
        if not _dense(shape, strides[1:]) or strides[0] < first[0].numel():
            raise Refused(f"unknown KV layout: a block of shape {shape} and strides {strides[1:]} is not one run of bytes")
        self._caches = caches
        self._page_bytes = first[0].numel() * item
        self._shard_bytes = self._page_bytes * len(caches)
        self._bases = np.array([cache.data_ptr() for cache in caches], np.uint64)
        self._strides = np.array([cache.stride(0) * item for cache in caches], np.uint64)
        self._pool_epoch = self._pool_epoch_told = self._client.pool_epoch
        return Facts(
            refusal="",
            rank=self._rank,
            pool_epoch=self._pool_epoch,
            kernel=kernels.pop(),
            layers=len(caches),
            page_bytes=self._page_bytes,
            shape=shape,
            strides=tuple(s * item for s in strides[1:]),
        )

    def _opened(self, plan: StepPlan) -> Store | None:
        """The store of the plan's layout, which changes when the engine's cache is reset. None when the sidecar refuses the layout, as one
        that was restarted with another pool may."""
        assert plan.layout is not None
        if plan.layout == self._refused:
            return None
        if self._store is None or self._store.layout != plan.layout:
            try:
                self._store = self._client.open(plan.layout, piece_bytes=[self._page_bytes] * len(self._caches))
            except NamespaceError as refusal:
                self._refused = plan.layout
                logger.error("HostKV: nothing is saved: %s", refusal)
                return None
        return self._store

    def _addresses(self, block_ids: list[int]) -> Any:
        """uint64[blocks, layers]: where each layer of each block lies."""
        return self._bases + np.array(block_ids, np.uint64)[:, None] * self._strides

    def load(self, plan: StepPlan) -> None:
        self._unsound = False
        self._pool_epoch = self._client.pool_epoch
        if not plan.loads:
            return
        store = self._opened(plan)
        for load in plan.loads:
            if not load.request_id:
                self._unsound |= self._take(self._read(store, load))
                continue
            try:
                self._client.submit(Task(partial(self._read_beside, store, load)))
            except (QueueFull, SidecarUnavailable):
                self.landed.append(_Landed(load, load.block_ids, 0.0))

    def _read(self, store: Store | None, load: Load) -> _Landed:
        started = time.perf_counter()
        failed = load.block_ids
        if store is not None:
            failed = [load.block_ids[i] for i in store.read(load.handles, self._rank, self._addresses(load.block_ids))]
        return _Landed(load, failed, time.perf_counter() - started)

    def _read_beside(self, store: Store | None, load: Load, _: Task) -> None:
        """In a thread of the client's."""
        landed = _Landed(load, load.block_ids, 0.0)
        try:
            landed = self._read(store, load)
        finally:
            self.landed.append(landed)

    def take_landed(self) -> set[str]:
        """The requests whose loads beside the steps have ended since, well or badly."""
        requests = set()
        while self.landed:
            landed = self.landed.popleft()
            self._take(landed)
            requests.add(landed.load.request_id)
        return requests

    def _take(self, landed: _Landed) -> bool:
        """Notes what came of a load; whether something failed."""
        load, failed, seconds = landed
        self._failed.update(failed)
        self._loaded[load.tag] += 1
        good = len(load.block_ids) - len(failed)
        self._stats.blocks_loaded += good
        self._stats.bytes_loaded += good * self._shard_bytes
        self._stats.blocks_failed += len(failed)
        self._stats.load_s += seconds
        if failed:
            logger.warning("HostKV: %d of %d blocks did not load; the engine is told which", len(failed), len(load.block_ids))
        return bool(failed)

    def save(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        for save in plan.saves:
            dropped = self._saves[save.tag] = self._write(plan, save)
            saved = len(save.block_ids) - len(dropped)
            self._stats.blocks_saved += saved
            self._stats.bytes_saved += saved * self._shard_bytes
            self._stats.blocks_dropped += len(dropped)
        self._stats.save_s += time.perf_counter() - started

    def _write(self, plan: StepPlan, save: Save) -> set[int]:
        """Which of the blocks are not stored now, by whomever."""
        every = set(range(len(save.block_ids)))
        store = None if self._unsound else self._opened(plan)
        if store is None:
            return every
        try:
            statuses = store.write(save.keys, self._rank, self._addresses(save.block_ids))
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
        return StepReport(loaded, saves, {self._rank: self._pool_epoch})


def _kernel(config: VllmConfig, layer_name: str) -> str:
    """The attention backend of a layer, and on the CPU the instruction set that its kernel orders the keys in a block for."""
    layer = config.compilation_config.static_forward_context[layer_name]
    backend: str = layer.get_attn_backend().get_name()
    if backend != "CPU_ATTN":
        raise Refused(f"unknown KV layout: attention backend {backend}, known is CPU_ATTN")
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
