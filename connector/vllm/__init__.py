"""HostKVConnector: vLLM's KV blocks kept by the sidecar, so that another engine process, or this one after a restart, finds them.

vLLM builds one object per role, usually in two processes. The scheduler's (Scheduler) promises an engine the blocks it finds, and
plans each step's loads and saves; the worker's (Worker) copies bytes. Whole blocks are opaque bytes: what the attention kernel put
into a block on one worker goes, all layers one after the other, into one shard of one slot, and comes back only into a kernel of the
same kind.

The ids of blocks are the engine's own prefix hashes: they hold tokens, multimodal inputs and salt, and of a LoRA adapter its name and
path, to which its fingerprint is added here, since files change under a path. The namespace holds the rest; half of that is known to the
workers alone, who hand it to the scheduler at start-up (Facts).

Three rules:
* What is promised is pinned first, because an engine may end a whole request over one block that was promised and did not come. Pins
  pass from the request to its load, and are given back when the last worker has reported that, or when the request ends before it.
* Nothing is saved that was computed after a load failed, until the engine has recomputed it: the bytes below it were not what their hash
  says. That holds for the engine's own prefix cache too, because what an engine finds there is saved.
* No fault of the sidecar leaves a hook. What this version cannot store, it refuses at start with a message, and the engine runs uncached.
"""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
# (vLLM is in the engine's environment, seldom in the one that checks types)
from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.version import __version__ as VLLM_VERSION

from ...schemas.messages import ID_BYTES
from ..client import Client
from ..options import check_options

TRIED = "0.32"

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )

    from .plan import StepPlan, StepReport
    from .scheduler import Scheduler
    from .stats import HostKVMetrics, HostKVStats, News, Stats
    from .worker import Worker
except ImportError as error:
    raise ImportError(f"this HostKV is made for vLLM {TRIED} and does not fit vLLM {VLLM_VERSION}: {error}") from error

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.hostkv")

EXTRA_CONFIG: dict[str, type] = {"endpoint": str, "save_decode": bool, "revision": str, "copy_threads": int, "tier_wait_s": float}


class _Hook:
    """Counts the CPU time of the calling thread inside the connector, so that its cost to an engine is a figure and not an opinion."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._stats.hook_cpu_s += time.thread_time() - self._entered


class HostKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands each hook to its role."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER and not VLLM_VERSION.startswith(f"{TRIED}."):
            logger.warning("HostKV: not tried with vLLM %s, only with %s", VLLM_VERSION, TRIED)
        extra = check_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self.stats = Stats()
        self._hook = _Hook(self.stats)
        self._news = News(self.stats)
        self._client = Client(
            extra.get("endpoint"),
            session=hashlib.sha256(str(self._kv_transfer_config.engine_id).encode()).digest()[:ID_BYTES],
            name=f"vllm {role.name.lower()}",
            copy_threads=extra.get("copy_threads", 1),
            tier_wait_s=extra.get("tier_wait_s", 5.0),
        )
        self._scheduler = (
            Scheduler(vllm_config, kv_cache_config, extra, self._client, self.stats) if role is KVConnectorRole.SCHEDULER else None
        )
        self._worker = Worker(vllm_config, kv_cache_config, self._client, self.stats) if role is KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a save that does not happen is a later miss

    def shutdown(self) -> None:
        with self._hook:
            self._client.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._news.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return HostKVStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return HostKVMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

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
            return self._scheduler.promise(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler
        with self._hook:
            self._scheduler.admit(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        assert self._scheduler
        return self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler
        with self._hook:
            return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler
        failed, requests = connector_output.invalid_block_ids, connector_output.failed_recving
        report = connector_output.kv_connector_worker_meta
        if failed or requests or report is not None:  # nothing is not measured: that costs more than it does
            with self._hook:
                if failed:
                    self._scheduler.distrust(failed)
                if requests:
                    self._scheduler.distrust_requests(requests)
                if isinstance(report, StepReport):
                    self._scheduler.take_report(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler
        with self._hook:
            return False, self._scheduler.finish(request.request_id, block_ids)

    def take_events(self) -> list[KVCacheEvent]:
        assert self._scheduler
        return self._scheduler.take_events()

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
        pass  # loads of the step are over when start_load_kv returns, and others are of requests that are not in it

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        pass  # blocks are saved whole in wait_for_save

    def wait_for_save(self) -> None:
        assert self._worker
        plan = self._plan()
        if plan.saves:
            with self._hook:
                self._worker.save(plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker
        if not self._worker.landed:
            return KVConnectorTransferResults()
        with self._hook:
            landed, failed = self._worker.take_landed()
            return KVConnectorTransferResults(finished_recving=landed, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker
        return self._worker.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker
        return self._worker.report()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan


def check_extra_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """kv_connector_extra_config as it is, or ValueError."""
    return check_options("kv_connector_extra_config", extra, EXTRA_CONFIG)
