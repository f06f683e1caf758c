"""What SGLang's controller makes of our answers: its own steps of a backup, a question and a prefetch, without its threads."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch
from rig import PAGE, Rank, kv_pool
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.support import Sidecar

Make = Callable[..., Rank]


def controller_of(one: Rank) -> Any:
    """With what these steps use of it."""
    controller = HybridCacheController.__new__(HybridCacheController)
    controller.storage_backend, controller.storage_config = one.storage, one.storage._config
    controller.page_size, controller.prefetch_sync_queue = PAGE, Queue()
    controller.mem_pool_host = SimpleNamespace(layout_lease=nullcontext)
    controller.page_set_func, controller.page_get_func = controller._page_set_zero_copy, controller._page_get_zero_copy
    return controller


def prompt(pages: int) -> RadixKey:
    return RadixKey(array("q", range(pages * PAGE)))


def backup(one: Rank, pages: int) -> tuple[int, list[bytes]]:
    """How many pages SGLang counts as stored, and the bytes of all."""
    indices, key = one.alloc(pages), prompt(pages)
    operation = StorageOperation(indices, key.token_ids, hash_value=get_storage_hash_str(key, None, page_size=PAGE))
    controller_of(one)._page_backup(operation)
    one.storage.settle()
    saved = one.bytes(indices)
    one.pool.free(indices)
    return operation.completed_tokens // PAGE, saved


def prefetch(one: Rank, pages: int, meanwhile: Callable[[], object] = lambda: None) -> tuple[int, list[bytes]]:
    """How many pages SGLang finds, and the bytes of those that it has loaded. `meanwhile`: between the two."""
    controller = controller_of(one)
    operation = PrefetchOperation(SimpleNamespace(rid="one"), prompt(pages))
    operation.hash_value, found = controller._storage_hit_query(operation)
    meanwhile()
    operation.host_indices = one.alloc(found // PAGE) if found else torch.empty(0, dtype=torch.int64)
    controller._page_transfer(operation)
    loaded = 0
    while not controller.prefetch_sync_queue.empty():
        loaded = controller.prefetch_sync_queue.get().completed_tokens
    pages_found = one.bytes(operation.host_indices)
    one.pool.free(operation.host_indices)
    return found // PAGE, pages_found[: loaded // PAGE]


def test_a_document_of_several_batches(sidecar: Sidecar, rank: Make) -> None:
    one, other = (rank(sidecar, pool=kv_pool("page_first", False, pages=320)) for _ in range(2))
    assert prefetch(other, 300) == (0, [])
    stored, saved = backup(one, 300)
    assert stored == 300
    assert prefetch(other, 310) == (300, saved)


def test_pages_that_go_between_the_question_and_the_load(sidecar: Sidecar, rank: Make) -> None:
    """Nothing is pinned in between, so SGLang computes them."""
    one = rank(sidecar, pool=kv_pool("page_first", False, pages=320))
    backup(one, 300)
    kept: list[bytes] = []

    def clear_all_but(pages: int) -> None:
        one.storage.clear()
        kept[:] = backup(one, pages)[1] if pages else []

    for pages in (0, 5, 130):
        backup(one, 300)
        assert prefetch(one, 300, lambda pages=pages: clear_all_but(pages)) == (300, kept)
        assert len(kept) == pages


def test_a_backup_ends_where_nothing_is_stored_any_more(own_sidecar: Sidecar, rank: Make) -> None:
    one = rank(own_sidecar, pool=kv_pool("page_first", False, pages=320))
    set_v1, calls = one.storage.batch_set_v1, []

    def killed_before_the_second(*args: Any) -> list[bool]:
        calls.append(args)
        if len(calls) == 2:
            one.storage.settle()
            own_sidecar.kill()
        return set_v1(*args)

    one.storage.batch_set_v1 = killed_before_the_second
    assert backup(one, 300)[0] == 128
    assert len(calls) == 2
    assert one.storage.counts.dropped == 128
