"""Lets an unchanged SGLang run on a machine without an accelerator, through the two kinds of plug-in that it offers.

* A platform whose device is the CPU: with it each operation of a model takes SGLang's own version in plain torch.
* Hooks in place of the copies between the device's KV and the host pool, which are CUDA kernels, and no pinning, which needs CUDA.

One more hook is for tests: a host pool that is emptied loses its bytes.

All else is SGLang's: scheduler, radix tree, host pools, controller, storage threads, HTTP. Models with latent attention do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

POOLS = "sglang.srt.mem_cache.pool_host"


class Cpu(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


def platform() -> str:
    return "sglang_cpu_plugin.Cpu"


def register() -> None:
    HookRegistry.register(f"{POOLS}.base.HostKVCache.__init__", unpinned, HookType.AROUND)
    HookRegistry.register(f"{POOLS}.base.HostKVCache.clear", cleared, HookType.AROUND)
    HookRegistry.register(f"{POOLS}.mha.MHATokenToKVPoolHost.load_to_device_per_layer", load, HookType.REPLACE)
    HookRegistry.register(f"{POOLS}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer", backup, HookType.REPLACE)


def unpinned(init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    init(*args, **{**kwargs, "pin_memory": False})


def cleared(clear: Callable[..., None], pool: Any) -> None:
    """Nothing is left of what was there: a load that does not write all of a page is to be seen in the answer."""
    clear(pool)
    if isinstance(buffer := getattr(pool, "kv_buffer", None), torch.Tensor):
        buffer.fill_(torch.nan)


def place(pool: Any, layer: int, tokens: torch.Tensor) -> tuple[Any, ...]:
    """Where the host's K or V has these tokens of a layer: an index into the shape that init_kv_buffer gives it in each layout."""
    page, offset = tokens // pool.page_size, tokens % pool.page_size
    places: dict[str, tuple[Any, ...]] = {
        "layer_first": (layer, tokens),
        "page_first": (tokens, layer),
        "page_first_direct": (page, layer, offset),
        "page_head": (page, slice(None), offset, layer),
    }
    return places[pool.layout]


def load(pool: Any, _: Any, host: torch.Tensor, device: torch.Tensor, layer: int, io_backend: str, *, is_draft: bool = False) -> None:
    if is_draft or layer < pool.target_layer_num:
        where = place(pool, layer, host.long())
        pool.device_k_buffers[layer][device.long()] = pool.k_buffer[where]
        pool.device_v_buffers[layer][device.long()] = pool.v_buffer[where]


def backup(pool: Any, _: Any, host: torch.Tensor, device: torch.Tensor, io_backend: str) -> None:
    for layer, (keys, values) in enumerate(zip(pool.device_k_buffers, pool.device_v_buffers, strict=True)):
        where = place(pool, layer, host.long())
        pool.k_buffer[where] = keys[device.long()]
        pool.v_buffer[where] = values[device.long()]
