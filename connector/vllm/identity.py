"""Which namespace an engine's KV belongs to, and which engines have none."""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.version import __version__ as VLLM_VERSION

from ...schemas.namespace import MAX_SHARDS, Layout
from ..identity import model_identity
from .plan import Facts, Part, Refused

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)
DRAFTERS = ("ngram", "ngram_gpu", "suffix", "medusa", "draft_model", "eagle", "eagle3", "mtp")  # the last four with KV memory of their own

# In the configuration of a model that computes short prompts otherwise in an engine which takes long ones: with the other factors of its
# rotary embedding, or with attention scaled by position.
LENGTH_DECIDES = ("longrope", "llama4")


class Kind(NamedTuple):
    """Groups of the engine's KV cache that are alike but for their layers. Each has as many blocks as the others of the same tokens."""

    spec: KVCacheSpec
    groups: tuple[int, ...]


def kinds_of(kv_cache_config: KVCacheConfig) -> list[Kind]:
    """Full attention first: what it has bounds the others."""
    found: list[Kind] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        at = next((i for i, kind in enumerate(found) if kind.spec == group.kv_cache_spec), len(found))
        found[at : at + 1] = [Kind(group.kv_cache_spec, (*(found[at].groups if at < len(found) else ()), number))]
    return sorted(found, key=lambda kind: not isinstance(kind.spec, FullAttentionSpec))


def parts_of(
    config: VllmConfig, kv_cache_config: KVCacheConfig, facts: list[KVConnectorHandshakeMetadata], revision: str | None
) -> list[Part]:
    """What this engine's KV consists of, with its namespaces but for the hash root, which is not yet chosen. Refused says what is not
    supported."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    workers = [fact for fact in facts if isinstance(fact, Facts)]
    refusals = [unsupported(config, kv_cache_config), *(fact.refusal for fact in workers)]
    if len(workers) != parallel.world_size:
        refusals.append(f"{len(workers)} of {parallel.world_size} workers described their KV memory")
    for refusal in refusals:
        if refusal:
            raise Refused(refusal)
    name, weights = model_identity(model.model, _commit(model), revision)
    assert kv_cache_config.hash_block_size
    ranks, cp_size = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    parts = []
    kinds = kinds_of(kv_cache_config)
    for number, (spec, groups) in enumerate(kinds):
        for stage in range(parallel.pipeline_parallel_size):
            memories = {fact.memories.get(number) for fact in workers if fact.stage == stage}
            memory = memories.pop()
            if memories:
                raise Refused("the workers' KV memory is laid out differently")
            if memory is None:  # this stage has no layers of that kind
                continue
            alike = spec.tp_replicated if isinstance(spec, MambaSpec) else spec.max_tp_shards == 1  # as latent attention is
            every_rank_the_same = alike and cp_size == 1
            tokens = _block_tokens(config, spec)
            dtype = "+".join(str(kind).removeprefix("torch.") for kind in (spec.dtypes if isinstance(spec, MambaSpec) else (spec.dtype,)))
            names = hashlib.sha256(json.dumps(memory.names).encode()).hexdigest()
            states = [size for shape in spec.shapes for size in shape] if isinstance(spec, MambaSpec) else []
            layout = Layout(
                model=name,
                revision=f"{weights} as:{_computation(config)}",
                kv_dtype=dtype if cache.cache_dtype == "auto" else f"{dtype}:{cache.cache_dtype}",
                layout_id=f"vllm:{kv_cache_config.kv_cache_layout}:{memory.kernel}:{VLLM_VERSION}",
                block_tokens=tokens,
                shard_bytes=memory.layers * memory.page_bytes,
                shards=1 if every_rank_the_same else ranks,
                layout_shape=(memory.layers, *memory.shape, *states),
                layout_strides=memory.strides,
                tp_size=ranks,
                pp_size=parallel.pipeline_parallel_size,
                pp_rank=stage,
                cp_size=cp_size,
                rank_rule=f"kind {number} of {len(kinds)}; shard = {'any' if every_rank_the_same else 'tensor-parallel'} rank; "
                f"{parallel.cp_kv_cache_interleave_size} tokens at a time to each context-parallel rank; layers {names}",
                hash_algorithm=cache.prefix_caching_hash_algo,
            )
            parts.append(
                Part(layout, number, stage, tokens // kv_cache_config.hash_block_size, groups, _reach(spec), isinstance(spec, MambaSpec))
            )
    if not parts:
        raise Refused("the model has no KV memory")
    return parts


def _block_tokens(config: VllmConfig, spec: KVCacheSpec) -> int:
    """Of all ranks that share its tokens."""
    tokens: int = spec.block_size * (config.parallel_config.decode_context_parallel_size if spec.dcp_sharded else 1)
    return tokens


def _reach(spec: KVCacheSpec) -> int:
    """See Part."""
    if isinstance(spec, SlidingWindowSpec):
        reach: int = spec.sliding_window - 1 + spec.extra_retained_tokens  # the next token sees itself, too
        return reach
    return 1 if isinstance(spec, MambaSpec) else 0  # the state after the last token


def random_root(config: VllmConfig) -> bool:
    """Whether the engine's hashes mean something to itself alone."""
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    return bool(resolve_none_hash_seed(hash_fn) != resolve_none_hash_seed(hash_fn))


def _computation(config: VllmConfig) -> str:
    """SHA-256 of what else decides which KV the same weights give: how they are computed with, and the same of a drafter whose layers
    stand beside the model's in each block, and its weights."""
    described: list[object] = [_settings(config.model_config)]
    drafter = config.speculative_config
    if drafter is not None and drafter.uses_draft_kv_cache():
        model = drafter.draft_model_config
        described += [drafter.method, *model_identity(model.model, _commit(model)), _settings(model)]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def adapter_settings(config: VllmConfig) -> str:
    """What an engine makes of an adapter's files: for which modules, in which dtype, and of which form those of experts are."""
    lora = config.lora_config
    if lora is None:
        return ""
    modules = None if lora.target_modules is None else sorted(set(lora.target_modules))  # of none at all is not of any
    experts = [lora.enable_mixed_moe_lora_format, lora.enable_moe_shared_loras]
    return json.dumps([modules, str(lora.lora_dtype), lora.enable_tower_connector_lora, experts])


def _settings(model: ModelConfig) -> list[object]:
    """The configuration in use (with the user's overrides), the dtype that is computed in, quantization, the revision of code from the
    hub, and what the identifiers of images and the like do not have of how they are computed."""
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    described: list[object] = [settings, str(model.dtype), str(model.quantization), model.quantization_config, model.code_revision]
    if (media := model.multimodal_config) is not None:
        described.append([media.mm_processor_kwargs, media.mm_encoder_attn_dtype, media.video_pruning_rate])
    if any(name in json.dumps(settings, default=str) for name in LENGTH_DECIDES):
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        described.append([model.max_model_len, generation.get("attn_temperature_tuning")])
    return described


def _commit(model: ModelConfig) -> str | None:
    """Of the weights; the configuration may be another repository's."""
    commit: str | None = getattr(model.hf_config, "_commit_hash", None) if not model.hf_config_path else None
    return commit or model.revision


def unsupported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why an engine configured like this is not cached; empty when it is."""
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        return f"prefill context parallel size {parallel.prefill_context_parallel_size} is not supported, only 1"
    if config.load_config.load_format == "dummy":
        return "the weights are made up (load_format dummy), so they are not those that the model's name stands for"
    if config.weight_transfer_config is not None:
        return "its weights may be replaced while it runs (weight_transfer_config), of which vLLM tells no connector"
    drafter = config.speculative_config
    if drafter is not None:
        if drafter.method not in DRAFTERS:
            return f"speculative decoding with {drafter.method!r} is not supported, only {', '.join(DRAFTERS)}"
        if len(kv_cache_config.kv_cache_groups) != 1 or not isinstance(kv_cache_config.kv_cache_groups[0].kv_cache_spec, FullAttentionSpec):
            return "speculative decoding is supported only for models with full attention in every layer, drafters included"
    if parallel.tensor_parallel_size > MAX_SHARDS:
        return f"tensor parallel size {parallel.tensor_parallel_size} is over the limit of {MAX_SHARDS}"
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if type(spec) not in SUPPORTED:
            return f"KV memory of kind {type(spec).__name__} is not supported, only {', '.join(kind.__name__ for kind in SUPPORTED)}"
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
            return f"states kept in mode {spec.mamba_cache_mode!r} cannot be reused by other requests, only those of 'align'"
        if not kv_cache_config.hash_block_size or _block_tokens(config, spec) % kv_cache_config.hash_block_size:
            return f"blocks of {_block_tokens(config, spec)} tokens are hashed by {kv_cache_config.hash_block_size}, which must divide them"
    causal = not any(getattr(group.kv_cache_spec, "non_causal", False) for group in kv_cache_config.kv_cache_groups)
    if not (causal and config.model_config.is_prefix_caching_supported):
        return "the model's attention is not causal, so a prefix cannot be reused"
    return ""
