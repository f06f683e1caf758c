"""HostKVConnector: vLLM's KV blocks kept by the sidecar, so that another engine process, or this one after a restart, finds them.

vLLM builds one object per role, usually in two processes. The scheduler's (_Scheduler) promises an engine the blocks it finds, and
plans each step's loads and saves; the worker's (_Worker) copies bytes. Whole blocks are opaque bytes: what the attention kernel put
into a block on one worker goes, all layers one after the other, into one shard of one slot, and comes back only into a kernel of the
same kind.

The ids of blocks are the engine's own prefix hashes: they hold tokens, multimodal inputs and salt, and of a LoRA adapter its name and
path, to which its fingerprint is added here, since files change under a path. The namespace holds the rest; half of that is known to the
workers alone, who hand it to the scheduler at start-up (_Facts).

Three rules:
* What is promised is pinned first, because an engine may end a whole request over one block that was promised and did not come. Pins
  pass from the request to the step that loads, and are given back when the workers have reported that step, or when the request ends.
* Nothing is saved that was computed after a load failed, until the engine has recomputed it: the bytes below it were not what their hash
  says. That holds for the engine's own prefix cache too, because what an engine finds there is saved.
* No fault of the sidecar leaves a hook. What this version cannot store, it refuses at start with a message, and the engine runs uncached.
"""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
# (vLLM is in the engine's environment, seldom in the one that checks types)

from __future__ import annotations

import difflib
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as VLLM_VERSION

from ..schemas.errors import Status
from ..schemas.messages import ID_BYTES
from ..schemas.namespace import MAX_SHARDS, Layout, NamespaceError
from .client import Client
from .errors import SidecarUnavailable
from .identity import IdentityError, model_identity, weights_fingerprint, weights_state

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .store import Handles, Keys, Store

logger = init_logger("vllm.hostkv")  # below vLLM's own logger, or its handler would not show it

SLOW_S = 2.0  # to identify the weights; longer is worth a word
EXTRA_CONFIG: dict[str, type] = {"endpoint": str, "save_decode": bool, "revision": str, "copy_threads": int, "tier_wait_s": float}


class _Refused(Exception):
    """This engine's KV is not cached; the message says why."""


# ---- what passes between the roles ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts(KVConnectorHandshakeMetadata):
    """What one worker knows about its KV memory, once per engine start."""

    refusal: str
    rank: int = field(default=0, compare=False)
    pool_epoch: bytes = field(default=b"", compare=False)  # of the pool it has mapped, see _StepReport
    kernel: str = ""  # attention backend and how it orders the bytes of a block
    layers: int = 0
    page_bytes: int = 0
    shape: tuple[int, ...] = ()  # of one block in one layer
    strides: tuple[int, ...] = ()  # the same in bytes


@dataclass
class _Load:
    tag: int
    handles: Handles
    block_ids: list[int]


@dataclass
class _Save:
    keys: Keys
    block_ids: list[int]


@dataclass
class _StepPlan(KVConnectorMetadata):
    """What the workers do in one step. `layout` is there whenever there is anything to do."""

    layout: Layout | None = None
    loads: list[_Load] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)


@dataclass
class _StepReport(KVConnectorWorkerMetadata):
    """`loaded`: tags whose loads are over, well or badly. `pool_epochs`: by rank, which pool a worker has mapped since now (empty: none).
    The scheduler promises nothing out of a pool that a worker does not have, such as a new one after a restart of the sidecar."""

    loaded: set[int]
    pool_epochs: dict[int, bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, _StepReport)
        return _StepReport(self.loaded | other.loaded, self.pool_epochs | other.pool_epochs)


@dataclass
class Stats:
    """Counters of one role since its start. CPU and wall times in seconds; blocks are counted once per worker."""

    hook_cpu_s: float = 0.0
    blocks_promised: int = 0
    blocks_loaded: int = 0
    blocks_failed: int = 0
    blocks_saved: int = 0
    saves_dropped: int = 0
    load_s: float = 0.0
    save_s: float = 0.0


class _Hook:
    """Counts the CPU time of the calling thread inside the connector, so that its cost to an engine is a figure and not an opinion."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._stats.hook_cpu_s += time.thread_time() - self._entered


# ---- the class that vLLM loads ----------------------------------------------------------------------------------------------------


class HostKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands each hook to its role. It supports the hybrid memory allocator in that it lets the engine keep it: a model with several
    kinds of KV memory runs as it would without the connector, uncached."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = check_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self.stats = Stats()
        self._hook = _Hook(self.stats)
        self._client = Client(
            extra.get("endpoint"),
            session=hashlib.sha256(str(self._kv_transfer_config.engine_id).encode()).digest()[:ID_BYTES],
            name=f"vllm {role.name.lower()}",
            copy_threads=extra.get("copy_threads", 1),
            tier_wait_s=extra.get("tier_wait_s", 5.0),
        )
        self._scheduler = (
            _Scheduler(vllm_config, kv_cache_config, extra, self._client, self.stats) if role is KVConnectorRole.SCHEDULER else None
        )
        self._worker = _Worker(vllm_config, kv_cache_config, self._client, self.stats) if role is KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a save that does not happen is a later miss

    def shutdown(self) -> None:
        with self._hook:
            self._client.close()

    # scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        assert self._scheduler
        self._scheduler.describe(list(metadata.values()))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self._scheduler
        self._scheduler.block_pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler
        with self._hook:
            return self._scheduler.promise(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler
        with self._hook:
            self._scheduler.admit(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler
        with self._hook:
            return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler
        with self._hook:
            if connector_output.invalid_block_ids:
                self._scheduler.distrust(connector_output.invalid_block_ids)
            report = connector_output.kv_connector_worker_meta
            if isinstance(report, _StepReport):
                self._scheduler.take_report(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler
        with self._hook:
            self._scheduler.finish(request.request_id, block_ids)
        return False, None

    def reset_cache(self) -> bool | None:
        assert self._scheduler
        with self._hook:
            return self._scheduler.reset()

    # worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker
        return self._worker.facts

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self._worker
        with self._hook:
            self._worker.load(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads are over when start_load_kv returns

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        pass  # blocks are saved whole in wait_for_save

    def wait_for_save(self) -> None:
        assert self._worker
        with self._hook:
            self._worker.save(self._plan())

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker
        return self._worker.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker
        return self._worker.report()

    def _plan(self) -> _StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, _StepPlan)
        return plan


def check_extra_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """kv_connector_extra_config as it is, or ValueError: an option that cannot be honoured is a start-up error."""
    for key, value in extra.items():
        if key not in EXTRA_CONFIG:
            nearest = difflib.get_close_matches(key, EXTRA_CONFIG, n=1, cutoff=0)[0]
            raise ValueError(
                f"kv_connector_extra_config: {key!r} is unknown, the nearest known key is {nearest!r} (known: {', '.join(EXTRA_CONFIG)})"
            )
        if type(value) is not EXTRA_CONFIG[key] and not (EXTRA_CONFIG[key] is float and type(value) is int):
            raise ValueError(f"kv_connector_extra_config: {key!r} is {value!r}, must be a {EXTRA_CONFIG[key].__name__}")
    return dict(extra)


# ---- scheduler --------------------------------------------------------------------------------------------------------------------


@dataclass
class _Pins:
    """Blocks of a waiting request that are pinned for it: `handles` are its blocks `first`, `first` + 1, … Promised are those from
    `promised` on: the engine may have got more of the prefix itself since the pins were taken."""

    tag: int
    first: int
    handles: Handles
    promised: int


@dataclass(frozen=True)
class _Adapter:
    """What the files under a path were when a request used them first; without a fingerprint, requests with it are not cached."""

    state: tuple[tuple[str, int, int, int], ...]
    fingerprint: bytes | None


@dataclass
class _Tracked:
    """One request: its adapter (empty: none, None: one that cannot be told from others, so the request is not cached), its derived keys,
    how many blocks from the front need no further thought about saving, and whether it is sound: one that stands on KV that is not what
    its hash says is never saved."""

    request: Request
    adapter: bytes | None
    keys: Keys | None = None
    last_id: bytes = b""
    pins: _Pins | None = None
    saved: int = 0
    sound: bool = True


class _Scheduler:
    """Decides what is loaded and saved. All methods are called by the engine's scheduling thread."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, extra: dict[str, Any], client: Client, stats: Stats) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._revision: str | None = extra.get("revision")
        self._save_decode: bool = extra.get("save_decode", False)
        self._client = client
        self._stats = stats
        self._block_tokens: int = config.cache_config.block_size
        assert config.kv_transfer_config is not None
        self._may_load = config.kv_transfer_config.is_kv_consumer
        self._may_save = config.kv_transfer_config.is_kv_producer
        self._layout: Layout | None = None
        self._store: Store | None = None
        self._pool_epochs: dict[int, bytes] = {}  # by worker
        self._requests: dict[str, _Tracked] = {}
        self._adapters: dict[str, _Adapter] = {}  # by path
        self._loads: list[_Load] = []
        self._loading: dict[str, list[int]] = {}  # while a step with loads runs: the blocks of its requests
        self.block_pool: BlockPool | None = None  # the engine's own prefix cache

    def describe(self, facts: list[KVConnectorHandshakeMetadata]) -> None:
        """Takes what the workers know, and settles whether and under which identity this engine's KV is cached. Here and not at the first
        request, because the model's files are read."""
        started = time.perf_counter()
        try:
            self._layout = _layout(self._config, self._kv_cache_config, facts, self._revision)
        except (_Refused, IdentityError, NamespaceError) as refusal:
            logger.error("HostKV: this engine runs uncached: %s", refusal)
            return
        self._pool_epochs = {fact.rank: fact.pool_epoch for fact in facts if isinstance(fact, _Facts)}
        if (took := time.perf_counter() - started) > SLOW_S:
            logger.info(
                'HostKV: the weights were read to identify them, in %.1f s; "revision" in kv_connector_extra_config saves that', took
            )
        logger.info("HostKV: blocks of %d bytes for %s, %s", self._layout.slot_bytes, self._layout.model, self._layout.revision)

    def _opened(self) -> Store | None:
        """The store. Opened at the first request, because vLLM chooses the root of its hashes after it has built its connectors."""
        if self._store is None and self._layout is not None:
            self._layout = replace(self._layout, hash_root=kv_cache_utils.NONE_HASH.hex())
            try:
                self._store = self._client.open(self._layout)
            except NamespaceError as refusal:
                logger.error("HostKV: this engine runs uncached: %s", refusal)
                self._layout = None
        return self._store

    def promise(self, request: Request, computed_tokens: int) -> int:
        """How many tokens beyond `computed_tokens` the sidecar has, all of them pinned. May be asked again and again before the request is
        admitted; the same pins then answer. The last token is never promised: an engine has to compute one to sample the next."""
        store = self._opened()
        if store is None or not self._may_load or request.skip_reading_prefix_cache:
            return 0
        tracked = self._track(request)
        first = computed_tokens // self._block_tokens
        pools = set(self._pool_epochs.values())
        limit = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        if limit <= first or tracked.adapter is None or pools != {self._client.pool_epoch}:
            self._unpin(tracked)
            return 0
        keys = self._keys(store, tracked, limit)
        pins = tracked.pins
        if pins is not None:
            end = pins.first + len(pins.handles)
            here = pins.first <= first < end and store.lookup_on_prefix(keys[first:end]) == end - first - 1
            if here and pools == {pins.handles.pool_epoch} == {self._client.pool_epoch}:  # after the lookup, which may find another pool
                pins.promised = first
                return (end - first) * self._block_tokens
            self._unpin(tracked)
        found = store.lookup_on_prefix(keys[first:limit]) + 1
        if not found:
            return 0
        tag = self._client.new_tag()
        handles = store.acquire(keys[first : first + found], tag, self._client.tier_wait_s)
        tracked.pins = _Pins(tag, first, handles[: handles.run], first)
        if not handles.run or pools != {handles.pool_epoch}:
            self._unpin(tracked)
            return 0
        return handles.run * self._block_tokens

    def admit(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request has its blocks; the promised ones among them are loaded in the coming step, which the pins now belong to."""
        tracked = self._track(request)
        pins = tracked.pins
        if pins is None or not external_tokens:
            self._unpin(tracked)
            return
        count = external_tokens // self._block_tokens
        first, last = pins.promised, pins.promised + count
        handles = pins.handles[first - pins.first : last - pins.first]
        self._loads.append(_Load(pins.tag, handles, blocks.get_block_ids()[0][first:last]))
        tracked.pins = None
        self._stats.blocks_promised += count

    def plan(self, output: SchedulerOutput) -> _StepPlan:
        """The step's loads, and of every scheduled request the blocks that will be full after the step and that the sidecar lacks. Blocks
        that the engine had itself are looked at too: the sidecar may have been emptied since."""
        plan = _StepPlan(loads=self._loads)
        self._loads = []
        store = self._store
        state = output.kv_connector_block_state
        self._loading = {}
        if plan.loads and state is not None:
            self._loading = {name: list(blocks[0]) for name in output.num_scheduled_tokens if (blocks := state.get_block_ids(name))}
        # Ranks do not know of each other's failed loads, and one's garbage is in the other's sums: several save what follows a load in the
        # next step, when the scheduler knows of them all.
        if store is not None and self._may_save and not (plan.loads and store.layout.shards > 1):
            assert state is not None
            for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tracked is None or tracked.adapter is None or not tracked.sound:
                    continue
                request = tracked.request
                start = min(tracked.saved, request.num_computed_tokens // self._block_tokens)  # lower again after a preemption
                end = min((request.num_computed_tokens + scheduled_tokens) // self._block_tokens, len(request.block_hashes))
                if not self._save_decode:
                    end = min(end, request.num_prompt_tokens // self._block_tokens)
                if end <= start:
                    continue
                tracked.saved = end
                keys = self._keys(store, tracked, end)
                start += store.lookup_on_prefix(keys[start:end]) + 1
                if start < end:
                    block_ids = state.get_block_ids(request_id)
                    assert block_ids is not None
                    plan.saves.append(_Save(keys[start:end], block_ids[0][start:end]))
        if plan.loads or plan.saves:
            plan.layout = self._layout
        return plan

    def distrust(self, failed: set[int]) -> None:
        """These blocks did not load, and vLLM has set the requests back that it recomputes. Until then, or for ever when such a request is
        aborted, all blocks from the failed one on stay in the engine's prefix cache, where the next request with the same prefix would
        find garbage and it would be saved; so they go. (vLLM evicts them itself with the failure policy "fail" alone, and then not those
        of a request that shared another one's failed block. A recomputed block of a running request is not put back: a later request
        finds it at the sidecar.)"""
        assert self.block_pool is not None
        for request_id, block_ids in self._loading.items():
            first = next((i for i, block_id in enumerate(block_ids) if block_id in failed), None)
            if first is None:
                continue
            self.block_pool.evict_blocks(set(block_ids[first:]))
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.request.num_computed_tokens > first * self._block_tokens:
                tracked.sound = False  # another request shall recompute the block that it stands on, and may never get to it

    def take_report(self, report: _StepReport) -> None:
        self._pool_epochs.update(report.pool_epochs)
        if self._store is not None and report.loaded:
            self._store.release(sorted(report.loaded))

    def finish(self, request_id: str, block_ids: tuple[list[int], ...]) -> None:
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._unpin(tracked)
            if not tracked.sound and self.block_pool is not None:
                self.block_pool.evict_blocks({block_id for group in block_ids for block_id in group})

    def reset(self) -> bool:
        """Nothing of this namespace may be served again, to any engine: the weights changed. False when the sidecar did not confirm.

        The new weights may be in memory alone, so from now on this engine has a namespace of its own, and not that of the files. Requests
        that run keep KV of the old weights, and with them vLLM refuses to empty its prefix cache."""
        store = self._opened()
        if store is None or self._layout is None:
            return True
        for tracked in self._requests.values():
            self._unpin(tracked)
            tracked.keys = None
            if tracked.request.num_computed_tokens:
                tracked.sound = False
        if self.block_pool is not None:
            self.block_pool.evict_blocks(set(range(self.block_pool.num_gpu_blocks)))
        self._layout, self._store = replace(self._layout, salt=secrets.token_hex(16)), None
        self._opened()
        try:
            store.clear()
        except SidecarUnavailable as error:
            logger.error("HostKV: the cache was not reset: %s", error)
            return False
        return True

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = _Tracked(request, self._adapter(request))
        return tracked

    def _adapter(self, request: Request) -> bytes | None:
        """The fingerprint of the request's adapter. Once its files change, nobody can tell which requests have been computed, or are in the
        engine's prefix cache, with the old ones and which with the new ones, so it is not cached any more."""
        lora = request.lora_request
        if lora is None:
            return b""
        path = Path(lora.lora_path).expanduser()
        known = self._adapters.get(lora.lora_path)
        if known is not None and known.fingerprint is None:
            return None
        try:
            state = weights_state(path)
            if known is None:
                known = self._adapters[lora.lora_path] = _Adapter(state, weights_fingerprint(path).encode())
            if known.state == state:
                return known.fingerprint
            reason = "its files changed while this engine runs; put another version under another path"
        except IdentityError as error:
            reason = str(error)
        logger.warning("HostKV: requests with the adapter %s run uncached from now on: %s", lora.lora_name, reason)
        self._adapters[lora.lora_path] = _Adapter((), None)
        for tracked in self._requests.values():
            if tracked.request.lora_request is not None and tracked.request.lora_request.lora_path == lora.lora_path:
                tracked.sound = False
        return None

    def _keys(self, store: Store, tracked: _Tracked, count: int) -> Keys:
        """Keys of the first `count` blocks. Ids are a chain, so the last one stands for all before it."""
        ids = tracked.request.block_hashes
        keys = tracked.keys
        if keys is None or not count <= len(keys) <= len(ids) or ids[len(keys) - 1] != tracked.last_id:
            adapted = [hashlib.sha256(block_id + tracked.adapter).digest() for block_id in ids] if tracked.adapter else ids
            keys = tracked.keys = store.keys(adapted)
            tracked.last_id = ids[-1]
        return keys[:count]

    def _unpin(self, tracked: _Tracked) -> None:
        if tracked.pins is not None and self._store is not None:
            self._store.release([tracked.pins.tag])
            tracked.pins = None


def _layout(config: VllmConfig, kv_cache_config: KVCacheConfig, facts: list[KVConnectorHandshakeMetadata], revision: str | None) -> Layout:
    """The namespace of this engine's KV but for the hash root, which is not yet chosen. _Refused says what is not supported."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    workers = [fact for fact in facts if isinstance(fact, _Facts)]
    refusals = [_unsupported(config, kv_cache_config), *(fact.refusal for fact in workers)]
    if len(workers) != parallel.world_size:
        refusals.append(f"{len(workers)} of {parallel.world_size} workers described their KV memory")
    elif len(set(workers)) != 1:
        refusals.append("the workers' KV memory is laid out differently")
    for refusal in refusals:
        if refusal:
            raise _Refused(refusal)
    fact = workers[0]
    name, weights = model_identity(model.model, getattr(model.hf_config, "_commit_hash", None) or model.revision, revision)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    assert isinstance(spec, FullAttentionSpec)
    dtype = str(spec.dtype).removeprefix("torch.")
    return Layout(
        model=name,
        revision=f"{weights} as:{_computation(config)}",
        kv_dtype=dtype if cache.cache_dtype == "auto" else f"{dtype}:{cache.cache_dtype}",
        layout_id=f"vllm:{kv_cache_config.kv_cache_layout}:{fact.kernel}:{VLLM_VERSION}",
        block_tokens=spec.block_size,
        shard_bytes=fact.layers * fact.page_bytes,
        shards=parallel.tensor_parallel_size,
        layout_shape=(fact.layers, *fact.shape),
        layout_strides=fact.strides,
        tp_size=parallel.tensor_parallel_size,
        rank_rule="shard = tensor-parallel rank",
        hash_algorithm=cache.prefix_caching_hash_algo,
    )


def _computation(config: VllmConfig) -> str:
    """SHA-256 of what else decides which KV the same weights give: the configuration in use (with the user's overrides), the dtype that
    is computed in, quantization, and the revision of code from the hub."""
    model = config.model_config
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    described = json.dumps([settings, str(model.dtype), str(model.quantization), model.code_revision], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()


def _unsupported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why an engine configured like this is not cached; empty when it is."""
    parallel, groups = config.parallel_config, kv_cache_config.kv_cache_groups
    sizes = {
        "pipeline": parallel.pipeline_parallel_size,
        "prefill context": parallel.prefill_context_parallel_size,
        "decode context": parallel.decode_context_parallel_size,
    }
    for kind, size in sizes.items():
        if size > 1:
            return f"{kind} parallel size {size} is not supported, only 1"
    if config.load_config.load_format == "dummy":
        return "the weights are made up (load_format dummy), so they are not those that the model's name stands for"
    if config.speculative_config is not None:
        return "speculative decoding is not supported"
    if parallel.tensor_parallel_size > MAX_SHARDS:
        return f"tensor parallel size {parallel.tensor_parallel_size} is over the limit of {MAX_SHARDS}"
    if len(groups) != 1:
        return f"the model has {len(groups)} kinds of KV memory, one is supported (try --disable-hybrid-kv-cache-manager)"
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"KV memory of kind {type(spec).__name__} is not supported, only FullAttentionSpec"
    if spec.non_causal or not config.model_config.is_prefix_caching_supported:
        return "the model's attention is not causal, so a prefix cannot be reused"
    if kv_cache_config.hash_block_size != spec.block_size:
        return f"blocks of {spec.block_size} tokens are hashed by {kv_cache_config.hash_block_size}, both must be equal"
    if config.max_concurrent_batches > 1:
        # A step would run on a failed load before the engine knows that it failed, and what it computes would be saved.
        return "several batches at once (asynchronous scheduling) are not supported; pass --no-async-scheduling"
    return ""


# ---- worker -----------------------------------------------------------------------------------------------------------------------


class _Worker:
    """Copies blocks between this worker's KV memory and the pool. All methods are called by the worker's one model thread."""

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
        self._store: Store | None = None
        self._refused: Layout | None = None
        self._failed: set[int] = set()
        self._loaded: set[int] = set()
        self._pool_epoch = b""
        self._pool_epoch_told = b""
        self._unsound = False  # a load of this step failed
        self.facts = _Facts("the worker registered no KV memory")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self.facts = self._measure(kv_caches)
        except _Refused as refusal:
            self.facts = _Facts(str(refusal))
            logger.error("HostKV: this worker's KV is not cached: %s", refusal)

    def _measure(self, kv_caches: dict[str, torch.Tensor]) -> _Facts:
        """Finds the bytes of each layer's blocks; _Refused where a block is not one run of bytes."""
        if reason := _unsupported(self._config, self._kv_cache_config):
            raise _Refused(reason)
        caches = list({cache.data_ptr(): cache for cache in kv_caches.values()}.values())  # layers may share one
        first = caches[0]
        blocks, block_tokens = self._kv_cache_config.num_blocks, self._config.cache_config.block_size
        kernels = {_kernel(self._config, name) for name in kv_caches}
        if len(kernels) != 1:
            raise _Refused(f"the layers use several attention kernels: {sorted(kernels)}")
        for name, cache in kv_caches.items():
            if cache.device.type != "cpu":
                raise _Refused(f"KV memory on device {cache.device} is not supported by this version, only the CPU's")
            if cache.dim() != 4 or cache.shape[0] != blocks or cache.shape[2] != block_tokens:
                raise _Refused(
                    f"unknown KV layout: {name} is {tuple(cache.shape)}, not [blocks={blocks}, heads, tokens={block_tokens}, content]"
                )
            if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
                raise _Refused(f"the KV memory of {name} is shaped unlike the first layer's")
        shape, strides, item = tuple(first.shape[1:]), first.stride(), first.element_size()
        if not _dense(shape, strides[1:]) or strides[0] < first[0].numel():
            raise _Refused(f"unknown KV layout: a block of shape {shape} and strides {strides[1:]} is not one run of bytes")
        self._caches = caches
        self._page_bytes = first[0].numel() * item
        self._bases = np.array([cache.data_ptr() for cache in caches], np.uint64)
        self._strides = np.array([cache.stride(0) * item for cache in caches], np.uint64)
        self._pool_epoch = self._pool_epoch_told = self._client.pool_epoch
        return _Facts(
            refusal="",
            rank=self._rank,
            pool_epoch=self._pool_epoch,
            kernel=kernels.pop(),
            layers=len(caches),
            page_bytes=self._page_bytes,
            shape=shape,
            strides=tuple(s * item for s in strides[1:]),
        )

    def _opened(self, plan: _StepPlan) -> Store | None:
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

    def load(self, plan: _StepPlan) -> None:
        self._unsound = False
        self._pool_epoch = self._client.pool_epoch
        if not plan.loads:
            return
        started = time.perf_counter()
        store = self._opened(plan)
        for load in plan.loads:
            failed = load.block_ids
            if store is not None:
                failed = [load.block_ids[i] for i in store.read(load.handles, self._rank, self._addresses(load.block_ids))]
            self._failed.update(failed)
            self._loaded.add(load.tag)
            self._stats.blocks_loaded += len(load.block_ids) - len(failed)
            self._stats.blocks_failed += len(failed)
            if failed:
                self._unsound = True
                logger.warning("HostKV: %d of %d blocks did not load; the engine is told which", len(failed), len(load.block_ids))
        self._stats.load_s += time.perf_counter() - started

    def save(self, plan: _StepPlan) -> None:
        if not plan.saves:
            return
        started = time.perf_counter()
        for save in plan.saves:
            saved = 0 if self._unsound else self._write(plan, save)
            self._stats.blocks_saved += saved
            self._stats.saves_dropped += len(save.block_ids) - saved
        self._stats.save_s += time.perf_counter() - started

    def _write(self, plan: _StepPlan, save: _Save) -> int:
        """How many of the blocks are stored now, by whomever."""
        store = self._opened(plan)
        if store is None:
            return 0
        try:
            statuses = store.write(save.keys, self._rank, self._addresses(save.block_ids))
        except SidecarUnavailable:  # the client tells, once
            return 0
        return sum(status in (Status.OK, Status.EXISTS) for status in statuses)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> _StepReport | None:
        loaded, self._loaded = self._loaded, set()
        told, self._pool_epoch_told = self._pool_epoch_told, self._pool_epoch
        if not loaded and told == self._pool_epoch:
            return None
        return _StepReport(loaded, {self._rank: self._pool_epoch})


def _kernel(config: VllmConfig, layer_name: str) -> str:
    """The attention backend of a layer, and on the CPU the instruction set that its kernel orders the keys in a block for."""
    layer = config.compilation_config.static_forward_context[layer_name]
    backend: str = layer.get_attn_backend().get_name()
    if backend != "CPU_ATTN":
        raise _Refused(f"unknown KV layout: attention backend {backend}, known is CPU_ATTN")
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
