"""vLLM's KV events, for those who route requests by what an engine's caches hold."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from ..store import Keys

if TYPE_CHECKING:
    from vllm.distributed.kv_events import ExternalBlockHash
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

    from ..client import Client
    from ..store import Store
    from .plan import Part

MAX_TOLD = 1 << 18  # blocks that are remembered as told, some 200 bytes each; of more the first are told to be gone
LOOKED_AT = 64  # of them, at each step


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


class Told:
    """The blocks that were told to be stored. The sidecar tells nobody what it evicts, so in each step some of them are looked up."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._blocks: OrderedDict[tuple[int, bytes], ExternalBlockHash] = OrderedDict()  # (part, key); the next one to be looked up first

    def add(self, part: int, keys: Keys, ids: Sequence[bytes]) -> None:
        for i, block_id in zip(range(len(keys)), ids, strict=False):
            self._blocks[part, keys[i]] = maybe_convert_block_hash(block_id)

    def clear(self) -> None:
        self._blocks.clear()

    def gone(self, parts: Sequence[Part], stores: Sequence[Store]) -> Iterator[BlockRemoved]:
        """What is there no more, neither in the pool nor on a tier. Nothing of that is said while the sidecar is away: it may be there."""
        too_many = max(0, len(self._blocks) - MAX_TOLD)
        looked_at = list(islice(self._blocks, max(too_many, LOOKED_AT)))
        forgotten = set(looked_at[:too_many])
        if not looked_at or not self._client.serving():
            return
        for number, (part, store) in enumerate(zip(parts, stores, strict=True)):
            keys = [key for at, key in looked_at if at == number]
            there = store.lookup(Keys(b"".join(keys))) if keys else []
            if not self._client.serving():
                return
            hashes = []
            for i, key in enumerate(keys):
                block_hash = self._blocks.pop((number, key))
                if there[i] and (number, key) not in forgotten:
                    self._blocks[number, key] = block_hash
                else:
                    hashes.append(block_hash)
            if hashes:
                yield from (BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=group) for group in part.groups)
