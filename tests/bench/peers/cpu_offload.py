"""A worker that copies by CPU for vLLM's own offloading, whose worker needs CUDA: TieringOffloadingSpec, its managers, tiers and shared
memory are vLLM's; only the copies between the engine's KV tensors and that memory are ours. Loaded by the engine as a module of its own
(`spec_module_path`). Each copy is done when submit_store or submit_load returns, in one thread, without any wait for another.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._finished: list[TransferResult] = []
        self._sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._engine = [tensor.tensor for tensor in kv_caches.tensors]
        self._offloaded = [region.create_next_worker_view(size) for size in self._sizes]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._engine, src_spec, self._offloaded, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._offloaded, src_spec, self._engine, dst_spec)

    def _copy(self, job_id: int, sources: list[Any], src_spec: Any, targets: list[Any], dst_spec: Any) -> bool:
        began = time.perf_counter()
        pairs = list(zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True))
        for source, target, size in zip(sources, targets, self._sizes, strict=True):
            from_base, from_stride = source.data_ptr(), source.stride(0) * source.element_size()
            to_base, to_stride = target.data_ptr(), target.stride(0) * target.element_size()
            for i, j in pairs:
                ctypes.memmove(to_base + j * to_stride, from_base + i * from_stride, size)
        self._finished.append(TransferResult(job_id, True, len(pairs) * sum(self._sizes), time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._engine.clear()
        self._offloaded.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """One engine process of one rank, one vLLM block per chunk."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, region)
        return self._worker
