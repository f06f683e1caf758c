"""vLLM's KV events, for those who route requests by what an engine's caches hold."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


def stored(request: Request, ids: Sequence[bytes], first: int, end: int, block_tokens: int, group: int, spec: KVCacheSpec) -> BlockStored:
    """Blocks `first` to `end` of the request's `ids` are saved, of this group. It says what vLLM's own event says of the same blocks, but
    for the medium."""
    lora = request.lora_request
    extra_keys, mm_index = [], 0
    for i in range(first, end):
        keys, mm_index = generate_block_hash_extra_keys(request, i * block_tokens, (i + 1) * block_tokens, mm_index)
        extra_keys.append(keys)
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(block_id) for block_id in ids[first:end]],
        parent_block_hash=maybe_convert_block_hash(ids[first - 1]) if first else None,
        token_ids=request.all_token_ids[first * block_tokens : end * block_tokens],
        block_size=block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_CPU,
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys(extra_keys),
        group_idx=group,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        session_id=request.session_id,
    )
