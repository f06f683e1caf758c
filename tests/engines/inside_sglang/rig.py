"""SGLang's own host pools and factory, around our storage backend with a real sidecar. What is ours stands in for the threads of SGLang's
controller, and compares bytes."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import torch
from hostkv.connector.sglang import HostKVStorage
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs

from tests.engines import llama

PAGE = 16  # tokens
LAYERS = 3
MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct")
EVERY_LAYOUT = [*((layout, False) for layout in MHA), *((layout, True) for layout in MLA)]
weight_version = "of the test"


def make_model(folder: Path, weights: bytes = b"", **config: Any) -> Path:
    return llama.make_model(folder, weights, num_hidden_layers=LAYERS, torch_dtype="bfloat16", **config)


def serve(model: Path, **arguments: Any) -> None:
    """Makes this process the scheduler of an engine with these server arguments."""
    defaults = {"device": "cpu", "attention_backend": "torch_native", "skip_tokenizer_init": True, "weight_version": weight_version}
    publish(ServerArgs(model_path=str(make_model(model)), **{**defaults, **arguments}), role="scheduler")


def hashes(pages: int, *which: object, extra_key: str | None = None, cache_salt: str | None = None) -> list[str]:
    """SGLang's own, of the pages of a prompt; another prompt for other `which`, of which a longer one starts like a shorter one."""
    draw = random.Random(repr(which))
    tokens = array("q", [draw.randrange(2048) for _ in range(pages * PAGE)])
    found: list[str] = get_storage_hash_str(RadixKey(tokens, extra_key=extra_key, cache_salt=cache_salt), None, page_size=PAGE)
    return found


def kv_pool(layout: str, mla: bool, dtype: torch.dtype = torch.bfloat16, page: int = PAGE, pages: int = 40, heads: int = 2) -> Any:
    """A host pool of so many pages of the engine's KV."""
    common = {"host_to_device_ratio": pages / 8, "host_size": 0, "page_size": page, "layout": layout, "pin_memory": False}
    shape = {"size": 8 * page, "page_size": page, "dtype": dtype, "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
    if not mla:
        device = MHATokenToKVPool(head_num=heads, head_dim=16, enable_alt_stream=False, **shape)
        kind, info, more = _mha_host_inputs(device)
        return kind(info, **more, **common)
    device = MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=16, **shape)
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        override_kv_cache_dim=device.kv_cache_dim,
        **common,
    )


def state_pool(slots: int = 40) -> MambaPoolHost:
    """A host pool of recurrent states: two kinds of pieces, of different sizes and types."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 8, 4, 5, dtype=torch.float32), conv=(torch.zeros(LAYERS, 8, 6, 3, dtype=torch.bfloat16),)
    )
    return MambaPoolHost(info, slots / 8, 0, device_capacity=8, pin_memory=False, layout="page_first")


def page_bytes(pool: Any, index: int) -> bytes:
    """Of the page that starts there, as SGLang itself reads it."""
    flat: torch.Tensor = pool.get_data_page(index, flat=True)
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def buffers(pool: Any) -> list[torch.Tensor]:
    return [pool.kv_buffer] if isinstance(pool.kv_buffer, torch.Tensor) else [pool.temporal_buffer, *pool.conv_buffer]


class Rank:
    """One rank of an engine: its host pools, full of random bytes, and its backend, attached as SGLang does it. `more`: of the storage's
    configuration; `extra`: what its user wrote; `pools`: beside the KV's."""

    def __init__(
        self,
        endpoint: str,
        layout: str = "page_first",
        mla: bool = False,
        tp: tuple[int, int] = (0, 1),
        extra: dict[str, Any] | None = None,
        pool: Any = None,
        pools: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.pool = pool or kv_pool(layout, mla)
        self.pools = {PoolName.KV: self.pool, **(pools or {})}
        for one in self.pools.values():
            for buffer in buffers(one) if one.kv_buffer is not None else ():
                buffer.view(torch.uint8).copy_(torch.randint(256, buffer.view(torch.uint8).shape, dtype=torch.uint8))
        common = {"backend_name": "hostkv", "module_path": "hostkv.connector.sglang", "class_name": "HostKVStorage", "interface_v1": 1}
        settings = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "enable_storage_metrics": True, **more}
        config = HiCacheStorageConfig(
            tp_rank=tp[0],
            tp_size=tp[1],
            is_mla_model=mla,
            is_page_first_layout=layout == "page_first",
            model_name="served name",
            extra_config={**common, "endpoint": endpoint, **(extra or {})},
            **settings,
        )
        storage = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        assert isinstance(storage, HostKVStorage)
        self.storage = storage
        try:
            storage.register_mem_pool_host(self.pool)
            for name, one in self.pools.items():
                storage.register_mem_host_pool_v2(one, name)
            storage.on_host_pools_registered()
        except ValueError:
            storage.close()  # as SGLang does
            raise

    def alloc(self, pages: int, name: str = PoolName.KV) -> torch.Tensor:
        """Host indices of so many pages, in no order."""
        size = self.pools[name].page_size
        indices = self.pools[name].alloc(pages * size).reshape(pages, size)
        return indices[torch.randperm(pages)].flatten()

    def bytes(self, indices: torch.Tensor, name: str = PoolName.KV) -> list[bytes]:
        pool = self.pools[name]
        return [page_bytes(pool, int(first)) for first in indices[:: pool.page_size]]

    def save(self, keys: list[str]) -> list[bytes]:
        """What was there is gone from the engine then; its bytes."""
        indices = self.alloc(len(keys))
        assert self.storage.batch_set_v1(keys, indices) == [True] * len(keys)
        self.storage.settle()
        saved = self.bytes(indices)
        self.pool.free(indices)
        return saved

    def load(self, keys: list[str]) -> list[bytes]:
        """The bytes of those that are found, as SGLang counts them. Nothing else in the host pool is touched."""
        indices = self.alloc(len(keys))
        mine = set(indices.tolist())
        others = torch.tensor([index for index in range(self.pool.size) if index not in mine], dtype=torch.int64)
        before = self.bytes(others)
        results = self.storage.batch_get_v1(keys, indices)
        assert self.bytes(others) == before
        run = (*results, False).index(False)
        found = self.bytes(indices)[:run]
        self.pool.free(indices)
        return found

    def close(self) -> None:
        self.storage.close()
