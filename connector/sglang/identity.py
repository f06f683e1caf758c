"""Which namespaces an engine's KV belongs to, and which engines have none.

SGLang tells a storage backend its parallel sizes and the name that it serves the model under. What else decides the bytes of a page is
read here: from the engine's configuration, which the process holds, from the model's files, and from the host pool itself.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_model, get_server_args, get_serving, process_model_config
from sglang.version import __version__ as SGLANG_VERSION

from ...schemas.namespace import MAX_SHARDS, Layout
from ..identity import IdentityError, model_identity, weights_fingerprint, weights_state

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

# Numbers of a host pool that say how the bytes of a page are ordered.
SHAPE = ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "start_layer", "end_layer")
# Server arguments, beside the configuration of the model, that change which KV the same weights give.
COMPUTATION = (
    *("quantization", "quantization_param_path", "rl_quant_profile", "modelopt_quant", "modelopt_checkpoint_restore_path"),
    *("kt_weight_path", "kt_method", "kt_num_gpu_experts"),
)


class Identity(NamedTuple):
    """What all pools of one engine have in common."""

    model: str
    revision: str
    kv_cache_dtype: str  # "auto" for that of the pool
    lora: str  # of the adapters that the engine was started with


def identity_of(revision: str | None) -> Identity:
    """Of this process's engine. `revision`: the user's own word for the weights. ValueError says what is not supported."""
    args, model = get_server_args(), process_model_config()
    if args.load_format == "dummy" and not revision:
        raise IdentityError("the weights are made up (load_format dummy), so they are not those that the model's name stands for")
    if args.speculative_algorithm is not None:
        raise ValueError("speculative decoding is not supported")
    if args.nnodes > 1:
        raise ValueError(f"an engine over several hosts (nnodes={args.nnodes}) is not supported: each host has a pool of its own")
    path, version = weights_in_use()
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision if path == model.model_path else None
    name, weights = _model_identity(path, commit, revision, _state(path))
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    computation = [settings, str(model.dtype), str(model.quantization), version, *(str(getattr(args, one, None)) for one in COMPUTATION)]
    digest = hashlib.sha256(json.dumps(computation, sort_keys=True, default=str).encode()).hexdigest()
    return Identity(name, f"{weights} as:{digest}", str(args.kv_cache_dtype), _adapters(args.lora_paths))


@functools.lru_cache(maxsize=8)  # for a backend that is detached and attached again
def _model_identity(path: str, commit: str | None, revision: str | None, _state: object) -> tuple[str, str]:
    return model_identity(path, commit, revision)


def _state(path: str) -> object:
    """Changes when the files do."""
    return weights_state(Path(path)) if Path(path).exists() else None


def _adapters(lora_paths: Any) -> str:
    """Stands for the files of the adapters that the engine was started with. Which of them a request uses is in SGLang's page hashes, as
    name and path alone; those of adapters that are loaded later are random there."""
    if not lora_paths:
        return ""
    found = [(lora.lora_name, lora.lora_path, weights_fingerprint(Path(lora.lora_path))) for lora in lora_paths]
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()


def weights_in_use() -> tuple[str, str]:
    """(where they were loaded from, SGLang's weight version): other than before when those of a running engine were replaced, as far as
    SGLang tells."""
    return str(get_model().model_path), str(get_serving().weight_version)


def layout_of(identity: Identity, config: HiCacheStorageConfig, name: str, pool: Any, sizes: list[int], page_tokens: int) -> Layout:
    """The namespace of one host pool, a page of which consists of pieces of these sizes. ValueError says what is not supported."""
    if config.dcp_size > 1:
        raise ValueError(f"decode-context parallelism (dcp_size={config.dcp_size}) is not supported")
    if config.tp_size > MAX_SHARDS:
        raise ValueError(f"attention tensor parallel size {config.tp_size} is over the limit of {MAX_SHARDS}")
    replicated = is_replicated(config, name, pool)
    dtypes = [pool.dtype, *([pool.temporal_dtype] if name == PoolName.MAMBA else [])]
    dtype = "+".join(str(one).removeprefix("torch.") for one in dtypes)
    return Layout(
        model=identity.model,
        revision=identity.revision,
        kv_dtype=dtype if identity.kv_cache_dtype == "auto" else f"{dtype}:{identity.kv_cache_dtype}",
        layout_id=f"sglang:{pool.layout}:{type(pool).__name__}:{name}:{SGLANG_VERSION}",
        block_tokens=page_tokens,
        shard_bytes=sum(sizes),
        shards=1 if replicated else config.tp_size,
        layout_shape=(pool.page_size, len(sizes), *(int(getattr(pool, number, 0) or 0) for number in SHAPE)),
        layout_strides=tuple(sizes[:16]),
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        pp_rank=config.pp_rank,
        cp_size=config.attn_cp_size,
        cp_rank=config.attn_cp_rank,
        rank_rule="every attention tensor-parallel rank has the same" if replicated else "shard = attention tensor-parallel rank",
        lora_version=identity.lora,
        hash_algorithm="sglang: sha256 of the page before and its tokens",
    )


def is_replicated(config: HiCacheStorageConfig, name: str, pool: Any) -> bool:
    """Whether all ranks have the same bytes there, which the first one writes. So it is with latent attention, but not with what else such
    a model has."""
    return config.is_mla_model and name != PoolName.MAMBA and not isinstance(pool, (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost))
