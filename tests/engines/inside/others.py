"""Another connector, to be a child of vLLM's MultiConnector beside ours: it keeps blocks in a dict of this process, loads them in the step,
and writes down every hook that is called. For one rank and one group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

KEPT: dict[bytes, list[torch.Tensor]] = {}  # by the engine's hash of a block: its layers
FAILS: set[bytes] = set()  # these do not come when they are loaded
CALLS: list[str] = []


@dataclass
class Plan(KVConnectorMetadata):
    """Pairs of hash and block of the engine."""

    loads: list[tuple[bytes, int]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._first: dict[str, int] = {}  # the block from which on it was asked, by request
        self._loads: list[tuple[bytes, int]] = []
        self._caches: list[torch.Tensor] = []
        self._failed: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # scheduler

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        end = first = num_computed_tokens // self._block_tokens
        while end < (request.num_tokens - 1) // self._block_tokens and request.block_hashes[end] in KEPT:
            end += 1
        self._first[request.request_id] = first
        CALLS.append("get_num_new_matched_tokens")
        return (end - first) * self._block_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        CALLS.append(f"update_state_after_alloc {num_external_tokens}")
        first = self._first.get(request.request_id, 0)
        pairs = list(zip(request.block_hashes, blocks.get_block_ids()[0], strict=False))
        self._loads += pairs[first : first + num_external_tokens // self._block_tokens]

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan = Plan(loads=self._loads)
        self._loads = []
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            full = min((request.num_computed_tokens + tokens) // self._block_tokens, len(request.block_hashes))
            block_ids = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0]
            plan.saves += [pair for pair in list(zip(request.block_hashes, block_ids, strict=False))[:full] if pair[0] not in KEPT]
        CALLS.append("build_connector_meta")
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        CALLS.append("update_connector_output")

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        CALLS.append("request_finished")
        del self._requests[request.request_id]
        return False, {"other": True}

    # worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        CALLS.append("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        CALLS.append("bind_connector_metadata")
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        CALLS.append("start_load_kv")
        for name, block_id in self._get_connector_metadata().loads:  # type: ignore[attr-defined]
            for cache, kept in zip(self._caches, KEPT[name], strict=True):
                cache[block_id] = 7.0 if name in FAILS else kept
            if name in FAILS:
                self._failed.add(block_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append("wait_for_layer_load")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        CALLS.append("save_kv_layer")

    def wait_for_save(self) -> None:
        CALLS.append("wait_for_save")
        for name, block_id in self._get_connector_metadata().saves if not self._failed else ():  # type: ignore[attr-defined]
            KEPT[name] = [cache[block_id].clone() for cache in self._caches]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        CALLS.append("get_finished")
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        CALLS.append("get_block_ids_with_load_errors")
        failed, self._failed = self._failed, set()
        return failed

    def get_kv_connector_stats(self) -> None:
        CALLS.append("get_kv_connector_stats")

    def build_connector_worker_meta(self) -> None:
        CALLS.append("build_connector_worker_meta")

    def clear_connector_metadata(self) -> None:
        CALLS.append("clear_connector_metadata")
        super().clear_connector_metadata()
