"""Engines with several host pools: windows and states beside the KV, and an anchor that has no bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rig import PAGE, Rank, hashes, kv_pool, state_pool
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from tests.support import Sidecar, disk_tier

Make = Callable[..., Rank]
KEYS = hashes(8)


def pools() -> dict[str, object]:
    """Windows as large as the KV, and states."""
    return {PoolName.SWA: kv_pool("page_first", False), PoolName.MAMBA: state_pool()}


def save(one: Rank, name: str, keys: list[str]) -> list[bytes]:
    indices = one.alloc(len(keys), name)
    assert one.storage.batch_set_v2([PoolTransfer(name, indices, keys=keys)]) == {name: [True] * len(keys)}
    one.storage.settle()
    return one.bytes(indices, name)


def load(one: Rank, name: str, keys: list[str]) -> list[bytes]:
    indices = one.alloc(len(keys), name)
    results = one.storage.batch_get_v2([PoolTransfer(name, indices, keys=keys)])[name]
    return one.bytes(indices, name)[: (*results, False).index(False)]


@pytest.mark.parametrize("name", [PoolName.KV, PoolName.SWA, PoolName.MAMBA])
def test_every_pool_comes_back_and_has_blocks_of_its_own(sidecar: Sidecar, rank: Make, name: str) -> None:
    one, other = rank(sidecar, pools=pools()), rank(sidecar, pools=pools())
    saved = save(one, name, KEYS)
    assert len(set(saved)) == 8
    assert load(other, name, KEYS) == saved
    for another in {PoolName.KV, PoolName.SWA, PoolName.MAMBA} - {name}:
        assert load(other, another, KEYS) == []


def found(one: Rank, *transfers: PoolTransfer) -> tuple[int, dict[str, int], list[int] | None]:
    result = one.storage.batch_exists_v2(KEYS, list(transfers))
    return result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages


def test_prefixes_that_have_what_each_pool_needs(sidecar: Sidecar, rank: Make) -> None:
    one = rank(sidecar, pools=pools())
    window = PoolTransfer(PoolName.SWA, keys=KEYS[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    state = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    every = PoolTransfer(PoolName.SWA, keys=KEYS)
    group = PoolTransfer(PoolName.MAMBA, keys=KEYS, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=1)
    assert found(one, window) == (0, {}, [])
    save(one, PoolName.KV, KEYS[:7])
    assert found(one) == (7, {"kv": 7}, [1, 2, 3, 4, 5, 6, 7])
    assert found(one, window) == (0, {"kv": 7}, [])
    save(one, PoolName.SWA, [KEYS[0], KEYS[2], KEYS[3], KEYS[4]])
    assert found(one, window) == (5, {"kv": 7, "swa": 5}, [1, 4, 5])  # a window of one page is whole in a prefix of one page
    assert found(one, every) == (1, {"kv": 7, "swa": 1}, [1])
    save(one, PoolName.MAMBA, [KEYS[3], KEYS[6]])
    assert found(one, state) == (7, {"kv": 7, "mamba": 7}, [4, 7])
    assert found(one, window, state) == (4, {"kv": 7, "swa": 5, "mamba": 7}, [4])
    assert found(one, every, state) == (0, {"kv": 7, "swa": 1, "mamba": 7}, [])
    assert found(one, group) == (7, {"kv": 7}, [1, 2, 3, 4, 5, 6, 7])
    assert found(one, PoolTransfer(PoolName.INDEXER, keys=KEYS)) == (0, {"kv": 7}, [])  # which nobody registered


def test_states_are_each_ranks_own_where_latent_attention_is_not(sidecar: Sidecar, rank: Make) -> None:
    ranks = [rank(sidecar, mla=True, tp=(i, 2), pools={PoolName.MAMBA: state_pool()}) for i in range(2)]
    latent = [save(one, PoolName.KV, KEYS) for one in ranks]
    states = [save(one, PoolName.MAMBA, KEYS) for one in ranks]
    assert states[0] != states[1]
    assert [load(one, PoolName.KV, KEYS) for one in ranks] == [latent[0]] * 2
    assert [load(one, PoolName.MAMBA, KEYS) for one in ranks] == states


def test_a_draft_of_heads_beside_latent_attention_is_never_whole(sidecar: Sidecar, rank: Make) -> None:
    """SGLang has the first rank alone write it, though each rank has other heads."""
    draft = {PoolName.DRAFT: kv_pool("page_first", False)}
    ranks = [rank(sidecar, mla=True, tp=(i, 2), pools=draft) for i in range(2)]
    save(ranks[0], PoolName.DRAFT, KEYS)
    assert [load(one, PoolName.DRAFT, KEYS) for one in ranks] == [[], []]


def test_an_anchor_without_bytes_has_every_page(sidecar: Sidecar, rank: Make) -> None:
    one = rank(sidecar, pool=LogicalHostPool(40 * PAGE, PAGE), pools={PoolName.SWA: kv_pool("page_first", False)})
    indices = torch.arange(8 * PAGE)
    assert one.storage.batch_set_v1(KEYS, indices) == one.storage.batch_get_v1(KEYS, indices) == [True] * 8
    every = PoolTransfer(PoolName.SWA, keys=KEYS)
    assert found(one, every) == (0, {"kv": 8}, [])
    save(one, PoolName.SWA, KEYS[:3])
    assert found(one, every) == (3, {"kv": 8, "swa": 3}, [1, 2, 3])


def test_a_pool_that_is_registered_later(sidecar: Sidecar, rank: Make) -> None:
    one = rank(sidecar)
    one.pools[PoolName.SWA] = kv_pool("page_first", False)
    one.storage.register_mem_host_pool_v2(one.pools[PoolName.SWA], PoolName.SWA)
    saved = save(one, PoolName.SWA, KEYS)
    assert load(one, PoolName.SWA, KEYS) == saved


def test_what_a_prefix_needs_is_brought_from_disk(tmp_path: Path, rank: Make) -> None:
    with Sidecar(tmp_path, config=disk_tier(tmp_path / "disk")) as sidecar:
        sidecar.until_tier_serves()
        one = rank(sidecar, pools=pools())
        save(one, PoolName.KV, KEYS)
        saved = save(one, PoolName.SWA, KEYS)
        sidecar.until_clean()
        sidecar.stop()
        sidecar.start()
        sidecar.until_tier_serves()
        other = rank(sidecar, pools=pools())
        window = PoolTransfer(PoolName.SWA, keys=KEYS[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert found(other, window)[0] == 8
        sidecar.until(lambda: sidecar.status()["blocks"]["ready"] == 8 + 2)
        assert load(other, PoolName.SWA, KEYS[6:]) == saved[6:]
