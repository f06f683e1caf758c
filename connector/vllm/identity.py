"""Which namespace an engine's KV belongs to, and which engines have none."""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.version import __version__ as VLLM_VERSION

from ...schemas.namespace import MAX_SHARDS, Layout
from ..identity import model_identity
from .plan import Facts, Refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig


def layout_of(
    config: VllmConfig, kv_cache_config: KVCacheConfig, facts: list[KVConnectorHandshakeMetadata], revision: str | None
) -> Layout:
    """The namespace of this engine's KV but for the hash root, which is not yet chosen. Refused says what is not supported."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    workers = [fact for fact in facts if isinstance(fact, Facts)]
    refusals = [unsupported(config, kv_cache_config), *(fact.refusal for fact in workers)]
    if len(workers) != parallel.world_size:
        refusals.append(f"{len(workers)} of {parallel.world_size} workers described their KV memory")
    elif len(set(workers)) != 1:
        refusals.append("the workers' KV memory is laid out differently")
    for refusal in refusals:
        if refusal:
            raise Refused(refusal)
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


def unsupported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
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
