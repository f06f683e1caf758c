"""Pages through SGLang's host pools and factory, byte for byte."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import pytest
import torch
from rig import EVERY_LAYOUT, PAGE, Rank, hashes, kv_pool
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from tests.support import Sidecar

Make = Callable[..., Rank]


@pytest.mark.parametrize(("layout", "mla"), EVERY_LAYOUT)
def test_every_layout_comes_back_in_another_engine(sidecar: Sidecar, rank: Make, layout: str, mla: bool) -> None:
    keys = hashes(6)
    one, other = rank(sidecar, layout=layout, mla=mla), rank(sidecar, layout=layout, mla=mla)
    assert other.storage.batch_exists(keys) == 0
    assert other.load(keys) == []
    saved = one.save(keys)
    assert len(set(saved)) == 6
    assert other.storage.batch_exists(keys, HiCacheStorageExtraInfo(prefix_keys=[])) == 6
    assert other.load(keys) == saved
    assert other.load(keys[3:]) == saved[3:]


@pytest.mark.parametrize(("layout", "mla"), EVERY_LAYOUT)
def test_the_slow_path_sees_the_same_pages(sidecar: Sidecar, rank: Make, layout: str, mla: bool) -> None:
    """An engine without interface_v1 hands over flat pages, of which it makes a copy."""
    fast, slow = rank(sidecar, layout=layout, mla=mla), rank(sidecar, layout=layout, mla=mla, extra={"interface_v1": 0})
    keys, others = hashes(4, "fast"), hashes(4, "slow")
    saved = fast.save(keys)
    dummies = [slow.pool.get_dummy_flat_data_page() for _ in keys]
    found = slow.storage.batch_get([*keys, *others[:1]], [*dummies, slow.pool.get_dummy_flat_data_page()])
    assert found[4] is None
    assert [page.view(torch.uint8).numpy().tobytes() for page in found[:4]] == saved
    assert slow.storage.get(others[0], dummies[0]) is None
    indices = slow.alloc(4)
    pages = [slow.pool.get_data_page(int(first), flat=True) for first in indices[::PAGE]]
    assert slow.storage.set(others[0], pages[0])
    slow.storage.settle()
    assert slow.storage.exists(others[0])
    assert not slow.storage.exists(others[1])
    assert slow.storage.batch_set(others, pages)
    slow.storage.settle()
    assert fast.load(others) == slow.bytes(indices)
    assert torch.equal(slow.storage.get(others[2]).view(torch.uint8), pages[2].view(torch.uint8))


def test_only_the_leading_run_is_loaded(sidecar: Sidecar, rank: Make) -> None:
    keys = hashes(5)
    one = rank(sidecar)
    saved = one.save([keys[0], keys[1], keys[3], keys[4]])
    assert one.storage.batch_exists(keys) == 2
    indices = one.alloc(5)
    assert one.storage.batch_get_v1(keys, indices) == [True, True, False, False, False]
    assert one.bytes(indices)[:2] == saved[:2]
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


def test_pages_that_go_while_they_are_read_are_not_told_as_loaded(sidecar: Sidecar, rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing pins them: others get their places between the look and the copy."""
    keys = hashes(6)
    one = rank(sidecar)
    one.save(keys)
    store = one.storage._parts["kv"].store
    locate = store.locate

    def then_replaced(ids: list[bytes]) -> object:
        found = locate(ids)
        one.storage.clear()
        one.save(hashes(6, "others"))
        assert set(struct.unpack("<6I", locate([bytes.fromhex(key) for key in hashes(6, "others")]).pages)) == set(
            struct.unpack("<6I", found.pages)
        )
        return found

    monkeypatch.setattr(store, "locate", then_replaced)
    assert one.load(keys) == []
    assert one.storage.counts.lost == 6


def test_a_use_is_told_to_the_sidecar(own_sidecar: Sidecar, rank: Make) -> None:
    one = rank(own_sidecar)
    saved = one.save(hashes(4))
    assert one.load(hashes(4)) == saved
    own_sidecar.until(lambda: own_sidecar.status()["items"].get("released") == 4)
    assert own_sidecar.status()["pins"] == 0


def test_what_is_there_is_not_written_again_and_is_success(sidecar: Sidecar, rank: Make) -> None:
    keys = hashes(3)
    one, other = rank(sidecar), rank(sidecar)
    saved = one.save(keys)
    assert other.save(keys) != saved
    assert other.load(keys) == saved
    assert (one.storage.counts.saved, other.storage.counts.saved, other.storage.counts.dropped) == (3, 0, 0)


def test_what_another_is_writing_is_success(sidecar: Sidecar, rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when two engines compute one prompt: the second comes while the first still copies."""
    import hostkv.connector.store as store

    keys = hashes(3)
    one, other = rank(sidecar), rank(sidecar)
    commit, answers = store.Commit, []

    def meanwhile(*args: object) -> object:
        monkeypatch.setattr(store, "Commit", commit)
        answers.append(other.storage.batch_set_v1(keys, other.alloc(3)))
        answers.append(other.storage.batch_exists(keys))
        return commit(*args)

    monkeypatch.setattr(store, "Commit", meanwhile)
    saved = one.save(keys)
    assert answers == [[True] * 3, 0]
    assert other.load(keys) == saved


def test_ranks_write_shards_of_one_block(sidecar: Sidecar, rank: Make) -> None:
    keys = hashes(4)
    writers = [rank(sidecar, tp=(i, 2)) for i in range(2)]
    first = writers[0].save(keys)
    assert [one.storage.batch_exists(keys) for one in writers] == [0, 0]
    second = writers[1].save(keys)
    assert first != second
    readers = [rank(sidecar, tp=(i, 2)) for i in range(2)]
    assert [one.storage.batch_exists(keys) for one in readers] == [4, 4]
    assert [one.load(keys) for one in readers] == [first, second]
    assert rank(sidecar).storage.batch_exists(keys) == 0
    assert [one.storage.counts.saved for one in writers] == [4, 4]


def test_latent_attention_is_stored_once_by_the_first_rank(sidecar: Sidecar, rank: Make) -> None:
    keys = hashes(4)
    ranks = [rank(sidecar, mla=True, tp=(i, 2)) for i in range(2)]
    ranks[1].save(keys)
    assert ranks[0].storage.batch_exists(keys) == 0
    saved = ranks[0].save(keys)
    assert [one.load(keys) for one in ranks] == [saved, saved]


def test_page_hashes_are_a_chain_from_salt_and_extra_key(sidecar: Sidecar, rank: Make) -> None:
    """What we take as ids: SGLang's native code, told again."""
    from array import array

    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = list(range(100, 100 + 3 * PAGE))
    told, before = [], b""
    for first in range(0, len(tokens), PAGE):
        before = hashlib.sha256(before + array("I", tokens[first : first + PAGE]).tobytes()).digest()
        told.append(before.hex())
    assert get_storage_hash_str(tokens, None, page_size=PAGE) == told
    one = rank(sidecar)
    one.save(hashes(3, extra_key="adapter", cache_salt="a"))
    found = [
        one.storage.batch_exists(hashes(3, extra_key=extra_key, cache_salt=cache_salt))
        for extra_key in ("adapter", "other", None)
        for cache_salt in ("a", "b", None)
    ]
    assert found == [3, *[0] * 8]


def test_metrics_are_of_what_was_moved_since(sidecar: Sidecar, rank: Make) -> None:
    keys = hashes(3)
    one, quiet = rank(sidecar), rank(sidecar, enable_storage_metrics=False)
    assert one.storage.get_stats() is None
    one.save(keys)
    one.save(keys)  # which moves nothing
    one.load(keys)
    one.load(hashes(3, "absent"))
    told = one.storage.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([3], [3])
    assert len(told.backup_bandwidth) == len(told.prefetch_bandwidth) == 1
    assert min(told.backup_bandwidth + told.prefetch_bandwidth) > 0
    assert one.storage.get_stats() is None
    quiet.load(keys)
    assert quiet.storage.get_stats() is None


def test_clear_is_of_engines_like_this_one(sidecar: Sidecar, rank: Make) -> None:
    keys = hashes(3)
    one, same, other = rank(sidecar), rank(sidecar), rank(sidecar, layout="page_head")
    one.save(keys)
    other.save(keys)
    one.storage.clear()
    assert [each.storage.batch_exists(keys) for each in (one, same, other)] == [0, 0, 3]
    one.save(keys)
    assert same.storage.batch_exists(keys) == 3


def test_nothing_is_success(sidecar: Sidecar, rank: Make) -> None:
    one = rank(sidecar)
    none = torch.empty(0, dtype=torch.int64)
    assert one.storage.batch_exists([]) == 0
    assert one.storage.batch_set_v1([], none) == one.storage.batch_get_v1([], none) == []


def test_indices_that_do_not_fit_are_refused(sidecar: Sidecar, rank: Make) -> None:
    one = rank(sidecar)
    with pytest.raises(ValueError, match="15 host indices for 1 pages of 16"):
        one.storage.batch_set_v1(hashes(1), one.alloc(1)[1:])
    with pytest.raises(ValueError, match="multiple of the page size"):
        one.storage.batch_set_v1(hashes(1), torch.arange(1, 17))
    with pytest.raises(ValueError, match="contiguous tensors"):
        one.storage.batch_set(hashes(1), [torch.zeros(3)])


def test_a_long_prompt(sidecar: Sidecar, rank: Make) -> None:
    """More pages than SGLang moves at a time, all of which it asks about at once."""
    keys = hashes(300)
    one = rank(sidecar, pool=kv_pool("page_first", False, pages=320))
    indices = one.alloc(300)
    for first in range(0, 300, 128):
        assert all(one.storage.batch_set_v1(keys[first : first + 128], indices[first * PAGE : (first + 128) * PAGE]))
    one.storage.settle()
    assert one.storage.batch_exists(keys) == 300
    assert one.storage.batch_exists(keys + hashes(5, "other")) == 300
