"""The tables, rule by rule: who gets what answer, what makes room for what, what a crash leaves, what readers see meanwhile."""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hostkv.cext import LayoutError, Tables, View
from hostkv.schemas import layout

OK, EXISTS, BUSY, FULL, THROTTLED, NOT_HELD, MISS = (bytes([s]) for s in range(7))
NIL = layout.NIL
PAGE = 4096
# Four extents of four slots of 16 KiB each.
GEOMETRY = {
    "pool_bytes": 64 * PAGE,
    "extent_bytes": 16 * PAGE,
    "max_blocks": 64,
    "max_shards": 32,
    "max_pins": 32,
    "max_members": 4,
    "max_namespaces": 4,
}
BOOT, EPOCH, INSTANCE = b"b" * 16, b"e" * 16, b"i" * 16
SLOT = 4 * PAGE


def key(n: int) -> bytes:
    return hashlib.sha256(b"key %d" % n).digest()


def joined(numbers: range | list[int]) -> bytes:
    return b"".join(map(key, numbers))


def shards(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}H", *numbers)


def tags(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def u32(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


class Pool:
    """Tables with two members of two sessions and one namespace, and the verbs in short."""

    def __init__(self, fd: int = -1, verify: bool = True, keeps_reused: bool = False, min_reuse: int = 0, **geometry: int) -> None:
        self.geometry = {**GEOMETRY, **geometry}
        identity = {"boot_id": BOOT, "pool_epoch": EPOCH, "instance_id": INSTANCE}
        self.tables = Tables.create(fd, **self.geometry, **identity, verify=verify, keeps_reused=keeps_reused, min_reuse=min_reuse)
        self.view = self.tables.view()
        self.a = self.tables.member_add(b"A" * 16, b"S" * 16, b"L" * 16, 1, 11)
        self.b = self.tables.member_add(b"B" * 16, b"T" * 16, b"M" * 16, 2, 12)
        self.small = self.namespace(SLOT)

    def namespace(self, shard_bytes: int, shards: int = 1, name: str = "") -> int:
        fingerprint = hashlib.sha256(f"{shard_bytes} {shards} {name}".encode()).digest()
        return self.tables.namespace_add(fingerprint, shard_bytes, shards, name)

    def save(self, *numbers: int, namespace: int = 0, count: int = 1, low: bool = False) -> bytes:
        """Writes whole blocks one by one, of low priority or not; returns the statuses of their first shards."""
        found = b""
        for n in numbers:
            for shard in range(count):
                statuses, _, generations = self.tables.reserve(namespace, self.a, 999, key(n), shards(shard), low)
                if statuses == OK:
                    assert self.commit(self.a, 999, key(n), shards(shard), generations) == OK
                found += statuses if shard == 0 else b""
        return found

    def commit(self, member: int, tag: int, keys: bytes, shards: bytes, generations: bytes, *checksums: int) -> bytes:
        return self.tables.commit(member, tag, keys, shards, generations, tags(*checksums) or bytes(len(generations)))

    def acquire(self, *numbers: int, tag: int = 1, head: int = NIL, namespace: int = 0, session: int = 1) -> tuple[bytes, int]:
        statuses, _, _, head = self.tables.acquire(namespace, session, tag, head, joined(list(numbers)))
        return statuses, head

    def ready(self, *numbers: int, namespace: int = 0) -> list[int]:
        hits = self.view.lookup(namespace, joined(list(numbers)))
        return [n for n, hit in zip(numbers, hits, strict=True) if hit]

    def stat(self, name: str) -> int:
        return self.tables.stats()[name]


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    assert pool.tables.check() == []
    pool.tables.close()


def take(pool: Pool, n: int, shard: int = 0, member: int = 0, tag: int = 1, namespace: int = 0) -> bytes:
    """Reserves one shard and returns its generation, as bytes to commit with."""
    statuses, _, generation = pool.tables.reserve(namespace, member, tag, key(n), shards(shard))
    assert statuses == OK
    return generation


# ---- writing ---------------------------------------------------------------------------------------------------------------------


def test_a_block_is_a_miss_until_its_last_shard_is_committed(pool: Pool) -> None:
    ns = pool.namespace(100, 3)
    for shard in (2, 0, 1):
        assert pool.ready(1, namespace=ns) == []
        assert pool.acquire(1, namespace=ns)[0] == MISS
        generation = take(pool, 1, shard, namespace=ns)
        assert pool.ready(1, namespace=ns) == []
        assert pool.commit(pool.a, 1, key(1), shards(shard), generation) == OK
    assert pool.ready(1, namespace=ns) == [1]


def test_shards_of_one_block_get_one_handle(pool: Pool) -> None:
    ns = pool.namespace(100, 3)
    statuses, pages, generations = pool.tables.reserve(ns, pool.a, 1, key(1) * 3, shards(0, 1, 2))
    assert statuses == OK * 3
    assert len(set(u32(pages))) == 1
    assert generations == generations[:8] * 3


def test_ready_blocks_and_committed_shards_exist(pool: Pool) -> None:
    ns = pool.namespace(100, 2)
    pool.save(1)
    assert pool.tables.reserve(pool.small, pool.b, 1, key(1), shards(0)) == (EXISTS, bytes(4), bytes(8))
    generation = take(pool, 2, 0, namespace=ns)
    pool.commit(pool.a, 1, key(2), shards(0), generation)
    assert pool.tables.reserve(ns, pool.b, 1, key(2) * 2, shards(0, 1))[0] == EXISTS + OK


def test_a_shard_in_flight_is_busy_for_everybody_its_holder_and_its_batch_included(pool: Pool) -> None:
    ns = pool.namespace(100, 2)
    assert pool.tables.reserve(ns, pool.a, 1, key(1) * 3, shards(0, 0, 1))[0] == OK + BUSY + OK
    for member in (pool.a, pool.b):
        assert pool.tables.reserve(ns, member, 2, key(1), shards(1))[0] == BUSY


def test_a_key_of_another_namespace_is_busy_to_write_and_a_miss_to_read(pool: Pool) -> None:
    other = pool.namespace(SLOT, name="other")
    pool.save(1)
    assert pool.save(1, namespace=other) == BUSY
    assert pool.ready(1, namespace=other) == []
    assert pool.acquire(1, namespace=other)[0] == MISS
    assert pool.tables.lookup(other, key(1)) == MISS
    assert pool.tables.lookup(pool.small, key(1)) == OK


def test_only_the_holder_commits_under_its_tag_shard_and_generation_and_once(pool: Pool) -> None:
    ns = pool.namespace(100, 2)
    generation = take(pool, 1, 0, namespace=ns)
    commit = pool.commit
    assert commit(pool.b, 1, key(1), shards(0), generation) == NOT_HELD
    assert commit(pool.a, 2, key(1), shards(0), generation) == NOT_HELD
    assert commit(pool.a, 1, key(1), shards(1), generation) == NOT_HELD
    assert commit(pool.a, 1, key(1), shards(700), generation) == NOT_HELD
    assert commit(pool.a, 1, key(2), shards(0), generation) == NOT_HELD
    assert commit(pool.a, 1, key(1), shards(0), bytes(8)) == NOT_HELD
    assert commit(pool.a, 1, key(1), shards(0), generation) == OK
    assert commit(pool.a, 1, key(1), shards(0), generation) == NOT_HELD


def test_a_block_that_nobody_committed_a_shard_of_is_freed_when_its_writer_gives_up(pool: Pool) -> None:
    take(pool, 1)
    take(pool, 2, tag=2)
    assert pool.tables.abort(pool.b, tags(1)) == 0
    assert pool.tables.abort(pool.a, tags(1)) == 1
    assert pool.stat("blocks") == 1
    assert pool.tables.abort(pool.a, tags(1)) == 0
    assert take(pool, 1, member=pool.b) != bytes(8)


def test_one_abort_gives_back_what_is_held_under_any_of_its_tags(pool: Pool) -> None:
    for n, tag in enumerate([7, 3, 9, 3, 5]):
        take(pool, n, tag=tag)
    take(pool, 10, member=pool.b, tag=3)
    assert pool.tables.abort(pool.a, tags(9, 4, 3)) == 3
    assert pool.tables.stats()["shards_in_flight"] == 3
    assert pool.tables.abort(pool.a, tags(*range(8192))) == 2
    assert pool.tables.check() == []


def test_a_removed_member_gives_back_every_shard_of_every_tag(pool: Pool) -> None:
    for n in range(5):
        take(pool, n, tag=n)
    take(pool, 9, member=pool.b)
    assert pool.tables.member_remove(pool.a) == 5
    assert pool.stat("blocks") == pool.stat("shards_in_flight") == 1
    assert [member[0] for member in pool.tables.members()] == [pool.b]
    with pytest.raises(IndexError, match="there is no member 0"):
        pool.tables.member_remove(pool.a)


def test_a_partial_block_waits_for_its_other_shards_after_its_writer_is_gone(pool: Pool) -> None:
    ns = pool.namespace(100, 2)
    generation = take(pool, 1, 0, namespace=ns)
    pool.commit(pool.a, 1, key(1), shards(0), generation)
    take(pool, 1, 1, namespace=ns)
    assert pool.tables.member_remove(pool.a) == 1
    assert pool.stat("writing") == 1
    assert take(pool, 1, 1, member=pool.b, namespace=ns) == generation
    assert pool.commit(pool.b, 1, key(1), shards(1), generation) == OK
    assert pool.ready(1, namespace=ns) == [1]


def test_a_partial_block_is_evicted_like_any_other(pool: Pool) -> None:
    ns = pool.namespace(SLOT // 2, 2)
    generation = take(pool, 0, 0, namespace=ns)
    pool.commit(pool.a, 1, key(0), shards(0), generation)
    assert pool.save(*range(1, 17)) == OK * 16
    assert pool.stat("writing") == 0
    assert take(pool, 0, 0, namespace=ns) > generation


def test_generations_are_never_given_twice(pool: Pool) -> None:
    seen = set()
    for n in range(100):
        generation = take(pool, n % 7)
        assert generation not in seen
        seen.add(generation)
        pool.tables.abort(pool.a, tags(1))
    assert len(seen) == 100


# ---- reading ---------------------------------------------------------------------------------------------------------------------


def test_the_handle_of_a_pinned_block_is_that_of_its_writer_and_verifies(pool: Pool) -> None:
    _, pages, generations = pool.tables.reserve(pool.small, pool.a, 1, joined(range(3)), shards(0, 0, 0))
    pool.commit(pool.a, 1, joined(range(3)), shards(0, 0, 0), generations)
    statuses, found_pages, found_generations, _ = pool.tables.acquire(pool.small, 1, 1, NIL, joined([2, 1, 0, 7]))
    assert statuses == OK * 3 + MISS
    assert found_generations == generations[16:] + generations[8:16] + generations[:8] + bytes(8)
    assert u32(found_pages) == u32(pages)[::-1] + [0]
    assert pool.view.check(joined(range(3)), pages, generations) == b"\1\1\1"
    assert pool.view.check(joined([1, 0, 9]), pages, generations) == b"\0\0\0"
    assert pool.view.check(joined(range(3)), pages, bytes(24)) == b"\0\0\0"


def test_a_block_is_pinned_once_however_often_its_tag_asks(pool: Pool) -> None:
    pool.save(1, 2, 3)
    statuses, head = pool.acquire(1, 2, 1)
    assert statuses == OK * 3
    statuses, head = pool.acquire(3, 2, head=head)
    assert statuses == OK * 2
    assert pool.stat("pins") == 3
    assert pool.tables.release(head) == 3
    assert pool.stat("pins") == pool.stat("pinned_blocks") == 0


def test_tags_and_sessions_pin_a_block_apart(pool: Pool) -> None:
    pool.save(1)
    heads = [pool.acquire(1, tag=tag, session=session)[1] for tag, session in [(1, 1), (2, 1), (1, 2)]]
    assert (pool.stat("pins"), pool.stat("pinned_blocks")) == (3, 1)
    for head in heads:
        assert pool.stat("pinned_blocks") == 1
        assert pool.tables.release(head) == 1
    assert pool.stat("pinned_blocks") == 0


def test_pins_run_out_as_full_and_what_was_pinned_stays_good() -> None:
    pool = Pool(max_pins=5)
    pool.save(*range(6))
    statuses, head = pool.acquire(1, 2)
    _, second = pool.acquire(3, 4, session=2)
    assert pool.acquire(5, session=3)[0] == OK
    assert pool.acquire(5, session=0)[0] == FULL
    statuses, head = pool.acquire(2, 5, 1, head=head)
    assert statuses == OK + FULL + OK
    assert pool.tables.release(head) == pool.tables.release(second) == 2
    assert pool.tables.check() == []


def test_a_wrong_chain_head_is_refused_and_nothing_changes(pool: Pool) -> None:
    pool.save(1, 2)
    _, head = pool.acquire(1)
    for wrong in (head + 1, 31, 32, NIL - 1):
        with pytest.raises(IndexError):
            pool.acquire(2, head=wrong)
        with pytest.raises(IndexError):
            pool.tables.release(wrong)
    with pytest.raises(IndexError):
        pool.tables.release(NIL)
    for tag, session in [(2, 1), (1, 2)]:
        with pytest.raises(IndexError):
            pool.acquire(2, head=head, tag=tag, session=session)
    assert pool.stat("pins") == 1
    pool.tables.release(head)
    with pytest.raises(IndexError):
        pool.tables.release(head)


def test_lookup_runs_from_both_ends(pool: Pool) -> None:
    pool.save(*range(5), 7, 9)
    keys = joined(range(12))
    assert pool.view.lookup_prefix(0, keys) == 5
    assert pool.view.lookup_reverse(0, keys) == 9
    assert pool.view.lookup_prefix(0, joined([11, 1])) == 0
    assert pool.view.lookup_reverse(0, joined([11, 12])) == -1
    assert pool.view.lookup_prefix(0, joined(range(5))) == 5
    assert (pool.view.lookup(0, b""), pool.view.lookup_prefix(0, b""), pool.view.lookup_reverse(0, b"")) == (b"", 0, -1)
    for namespace in (1, 3, 4, 1 << 20, NIL, 1 << 40, -1):
        assert pool.view.lookup(namespace, keys) == bytes(12)
        assert pool.view.locate(namespace, keys) == (MISS * 12, bytes(48), bytes(96))


# ---- invalidating ----------------------------------------------------------------------------------------------------------------


def test_clear_frees_idle_blocks_of_its_namespace_only(pool: Pool) -> None:
    other = pool.namespace(SLOT, name="other")
    pool.save(1, 2)
    pool.save(3, namespace=other)
    assert pool.tables.clear(pool.small) == 2
    assert pool.ready(1, 2) == []
    assert pool.ready(3, namespace=other) == [3]
    assert pool.tables.clear(pool.small) == 0


def test_clear_of_all_frees_the_blocks_of_every_namespace(pool: Pool) -> None:
    other = pool.namespace(SLOT, name="other")
    pool.save(1, 2)
    pool.save(3, 4, namespace=other)
    pool.acquire(1)
    assert pool.tables.clear(NIL) == 4
    assert (pool.stat("blocks"), pool.stat("doomed")) == (1, 1)
    assert pool.tables.clear(NIL) == 0
    assert pool.tables.check() == []


def test_a_doomed_block_is_a_miss_for_everybody_and_freed_at_its_last_release(pool: Pool) -> None:
    pool.save(1)
    _, pages, generations, head = pool.tables.acquire(pool.small, 1, 1, NIL, key(1))
    _, second = pool.acquire(1, session=2)
    assert pool.tables.clear(pool.small) == 1
    assert pool.tables.clear(pool.small) == 0
    assert pool.ready(1) == []
    assert pool.acquire(1, tag=5)[0] == MISS
    assert pool.save(1) == BUSY
    assert pool.view.check(key(1), pages, generations) == b"\1"  # its readers have good bytes
    pool.tables.release(head)
    assert pool.stat("doomed") == 1
    pool.tables.release(second)
    assert pool.stat("doomed") == pool.stat("blocks") == 0
    assert pool.save(1) == OK


@pytest.mark.parametrize("ending", ["commit", "abort", "member_remove"])
def test_a_doomed_block_being_written_is_freed_with_its_last_shard(pool: Pool, ending: str) -> None:
    ns = pool.namespace(100, 2)
    generation = take(pool, 1, 0, namespace=ns)
    take(pool, 1, 1, member=pool.b, namespace=ns)
    assert pool.tables.clear(ns) == 1
    assert pool.tables.reserve(ns, pool.a, 1, key(1), shards(1))[0] == BUSY
    assert pool.commit(pool.a, 1, key(1), shards(0), generation) == OK
    assert pool.stat("doomed") == 1
    if ending == "commit":
        assert pool.commit(pool.b, 1, key(1), shards(1), generation) == OK
    elif ending == "abort":
        assert pool.tables.abort(pool.b, tags(1)) == 1
    else:
        assert pool.tables.member_remove(pool.b) == 1
    assert pool.ready(1, namespace=ns) == []
    assert pool.stat("blocks") == pool.stat("doomed") == 0


def test_a_discarded_block_is_a_miss_until_it_is_saved_again(pool: Pool) -> None:
    other = pool.namespace(SLOT, name="other")
    pool.save(1, 2)
    _, _, generations, head = pool.tables.acquire(pool.small, 1, 1, NIL, joined([1, 2]))
    pool.tables.release(head)
    assert pool.tables.discard(other, joined([1, 2]), generations) == 0
    assert pool.tables.discard(pool.small, joined([1, 2, 3]), generations[:8] + bytes(16)) == 1
    assert pool.ready(1, 2) == [2]
    assert pool.save(1) == OK
    assert pool.tables.discard(pool.small, key(1), generations[:8]) == 0  # what was saved since is another block
    assert pool.ready(1) == [1]


def test_a_discarded_block_in_use_goes_at_its_last_release_and_is_discarded_once(pool: Pool) -> None:
    pool.save(1)
    _, _, generation, head = pool.tables.acquire(pool.small, 1, 1, NIL, key(1))
    assert pool.tables.discard(pool.small, key(1), generation) == 1
    assert pool.tables.discard(pool.small, key(1), generation) == 0
    assert (pool.ready(1), pool.save(1), pool.stat("doomed")) == ([], BUSY, 1)
    pool.tables.release(head)
    assert (pool.save(1), pool.stat("doomed")) == (OK, 0)


def test_what_is_being_written_is_not_discarded(pool: Pool) -> None:
    generation = take(pool, 1)
    assert pool.tables.discard(pool.small, key(1), generation) == 0
    assert pool.commit(pool.a, 1, key(1), shards(0), generation) == OK


# ---- checksums -------------------------------------------------------------------------------------------------------------------


def checks(pool: Pool, n: int, checksum: int, namespace: int = 0) -> int:
    """What a reader that copied the block finds when its checksum of the bytes is this one."""
    statuses, pages, generations, head = pool.tables.acquire(namespace, 1, 99, NIL, key(n))
    assert statuses == OK
    found = pool.view.check(key(n), pages, generations, tags(checksum))
    assert pool.view.check(key(n), pages, bytes(8), tags(checksum)) == b"\0"
    assert pool.view.check(key(n), pages, generations) == b"\1"
    pool.tables.release(head)
    return found[0]


def test_the_checksum_of_a_block_is_the_xor_of_its_shards(pool: Pool) -> None:
    ns = pool.namespace(100, 3)
    for shard, checksum in [(1, 0xF0), (0, 0x0F), (2, 1 << 63)]:
        assert pool.commit(pool.a, 1, key(1), shards(shard), take(pool, 1, shard, namespace=ns), checksum) == OK
    assert checks(pool, 1, 0xFF | 1 << 63, ns) == 1
    assert checks(pool, 1, 0xFF, ns) == 2


def test_a_shard_that_was_not_committed_is_not_in_the_checksum(pool: Pool) -> None:
    ns = pool.namespace(100, 2)
    first = take(pool, 1, 0, namespace=ns)
    take(pool, 1, 1, member=pool.b, namespace=ns)
    assert pool.commit(pool.b, 2, key(1), shards(1), first, 0xBAD) == NOT_HELD
    pool.commit(pool.a, 1, key(1), shards(0), first, 5)
    pool.tables.abort(pool.b, tags(1))
    assert pool.commit(pool.b, 1, key(1), shards(1), take(pool, 1, 1, member=pool.b, namespace=ns), 9) == OK
    assert checks(pool, 1, 5 ^ 9, ns) == 1


def test_a_new_grant_of_a_key_begins_without_a_checksum(pool: Pool) -> None:
    pool.commit(pool.a, 1, key(1), shards(0), take(pool, 1), 0xAAAA)
    pool.tables.clear(pool.small)
    pool.commit(pool.a, 1, key(1), shards(0), take(pool, 1), 0x5)
    assert checks(pool, 1, 0x5) == 1


# ---- what one member may take ----------------------------------------------------------------------------------------------------


def test_a_member_gets_half_of_the_pool_and_another_one_the_rest(pool: Pool) -> None:
    statuses = pool.tables.reserve(pool.small, pool.a, 1, joined(range(10)), bytes(20))[0]
    assert statuses == OK * 8 + THROTTLED * 2
    assert pool.tables.reserve(pool.small, pool.a, 2, joined([0, 9]), bytes(4))[0] == BUSY + THROTTLED
    assert pool.tables.reserve(pool.small, pool.b, 1, joined(range(20, 30)), bytes(20))[0] == OK * 8 + THROTTLED * 2
    pool.tables.abort(pool.a, tags(1))
    assert pool.tables.reserve(pool.small, pool.a, 1, joined(range(10)), bytes(20))[0] == OK * 8 + THROTTLED * 2


def test_a_member_gets_half_of_the_records() -> None:
    pool = Pool(max_shards=9)
    tiny = pool.namespace(PAGE)
    assert pool.tables.reserve(tiny, pool.a, 1, joined(range(6)), bytes(12))[0] == OK * 4 + THROTTLED * 2
    assert pool.tables.reserve(tiny, pool.b, 1, joined(range(10, 16)), bytes(12))[0] == OK * 4 + THROTTLED * 2
    pool.tables.abort(pool.a, tags(1))
    assert pool.tables.reserve(tiny, pool.a, 1, joined(range(6)), bytes(12))[0] == OK * 4 + THROTTLED * 2
    assert pool.tables.check() == []


def test_a_members_first_shard_is_never_throttled() -> None:
    pool = Pool(pool_bytes=16 * PAGE, max_shards=1)
    whole = pool.namespace(16 * PAGE)
    assert pool.save(1, namespace=whole) == OK
    assert pool.tables.check() == []


def test_a_shard_counts_as_its_part_of_the_slot(pool: Pool) -> None:
    two = pool.namespace(SLOT // 2, 2)
    for n in range(8):
        assert pool.tables.reserve(two, pool.a, 1, key(n) * 2, shards(0, 1))[0] == OK * 2
    assert pool.tables.reserve(two, pool.a, 1, key(9), shards(0))[0] == THROTTLED


def test_the_limits_count_on_after_adoption(file: int) -> None:
    pool = Pool(file)
    pool.tables.reserve(pool.small, pool.a, 1, joined(range(8)), bytes(16))
    pool.tables.close()
    pool.tables = adopt(file)
    pool.tables.repair([])
    assert pool.tables.reserve(pool.small, pool.a, 1, key(9), bytes(2))[0] == THROTTLED
    pool.tables.abort(pool.a, tags(1))
    assert pool.tables.reserve(pool.small, pool.a, 1, joined(range(9)), bytes(18))[0] == OK * 8 + THROTTLED
    assert pool.tables.check() == []


# ---- making room -----------------------------------------------------------------------------------------------------------------


def test_the_block_that_was_used_longest_ago_goes_first(pool: Pool) -> None:
    pool.save(*range(16))
    _, head = pool.acquire(0, 1)
    pool.tables.release(head)
    pool.save(16, 17)
    assert pool.ready(*range(18)) == [0, 1, *range(4, 18)]
    assert pool.stat("evicted") == 2


def test_pinned_and_written_blocks_stay_and_the_pool_answers_full(pool: Pool) -> None:
    pool.save(*range(15))
    _, head = pool.acquire(*range(15))
    take(pool, 15)
    assert pool.save(16) == FULL
    assert pool.ready(*range(17)) == list(range(15))
    pool.tables.abort(pool.a, tags(1))
    assert pool.save(16) == OK
    pool.tables.release(head)
    assert pool.save(17) == OK


def test_one_batch_evicts_nothing_it_has_just_granted(pool: Pool) -> None:
    pool.save(*range(100, 116))
    pool.acquire(*range(100, 112))
    statuses = pool.tables.reserve(pool.small, pool.a, 1, joined(range(8)), shards(*[0] * 8))[0]
    assert statuses == OK * 4 + FULL * 4
    assert pool.ready(*range(100, 116)) == list(range(100, 112))


def test_an_extent_that_lost_its_last_block_serves_any_size(pool: Pool) -> None:
    large = pool.namespace(4 * SLOT)
    pool.save(*range(16))
    assert pool.tables.clear(pool.small) == 16
    assert pool.stat("free_extents") == 4
    assert pool.save(20, 21, 22, 23, namespace=large) == OK * 4
    assert [extent[1:] for extent in pool.tables.extents()] == [(4 * SLOT, 1, 1)] * 4


def test_the_coldest_extent_of_another_size_is_taken_back_whole(pool: Pool) -> None:
    large = pool.namespace(4 * SLOT)
    pool.save(*range(16))
    _, head = pool.acquire(0, 1, 2, 3)  # makes the extent of these four the last one used
    pool.tables.release(head)
    assert pool.save(20, namespace=large) == OK
    assert pool.ready(*range(16)) == [*range(4), *range(8, 16)]
    assert (pool.stat("extents_taken_back"), pool.stat("evicted")) == (1, 4)


def test_an_extent_in_which_one_block_is_in_use_is_not_taken_back(pool: Pool) -> None:
    large = pool.namespace(4 * SLOT)
    pool.save(*range(16))
    heads = [pool.acquire(n, tag=n)[1] for n in (0, 4, 8)]
    assert pool.save(20, namespace=large) == OK
    assert pool.ready(*range(16)) == list(range(12))
    pool.acquire(20, tag=20, namespace=large)
    assert pool.save(21, namespace=large) == FULL
    pool.tables.release(heads[1])
    assert pool.save(21, namespace=large) == OK
    assert pool.ready(*range(16)) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_of_an_own_block_and_a_whole_other_extent_the_colder_one_goes(pool: Pool) -> None:
    large = pool.namespace(4 * SLOT)
    pool.save(*range(12))
    pool.save(20, namespace=large)
    pool.save(21, namespace=large)  # extent of 0..3 is colder than 20
    assert (pool.ready(*range(12)), pool.ready(20, 21, namespace=large)) == (list(range(4, 12)), [20, 21])
    _, head = pool.acquire(*range(4, 12))
    pool.tables.release(head)
    pool.save(22, namespace=large)  # now 20 is colder than any extent
    assert (pool.ready(*range(12)), pool.ready(20, 21, 22, namespace=large)) == (list(range(4, 12)), [21, 22])


def test_a_short_last_extent_is_used_for_what_fits_into_it() -> None:
    pool = Pool(pool_bytes=(16 + 9) * PAGE)
    large = pool.namespace(4 * SLOT)
    assert pool.save(20, namespace=large) == OK
    assert pool.save(*range(2)) == OK * 2
    assert pool.save(21, namespace=large) == OK
    assert pool.ready(20, 21, namespace=large) == [21]
    assert sorted(extent[1:] for extent in pool.tables.extents()) == [(SLOT, 2, 2), (4 * SLOT, 1, 1)]
    assert pool.tables.check() == []


def test_a_pool_smaller_than_an_extent_is_one_short_extent() -> None:
    pool = Pool(pool_bytes=8 * PAGE)
    assert pool.save(1, 2, 3) == OK * 3
    assert pool.ready(1, 2, 3) == [2, 3]
    with pytest.raises(ValueError, match="does not fit in an extent of 32768 bytes"):
        pool.namespace(4 * SLOT)


def test_when_all_entries_are_in_use_the_oldest_block_of_any_size_goes() -> None:
    pool = Pool(max_blocks=4)
    other = pool.namespace(2 * SLOT)
    pool.save(0, 1)
    pool.save(2, 3, namespace=other)
    assert pool.save(4, namespace=other) == OK
    assert (pool.ready(0, 1), pool.ready(2, 3, 4, namespace=other)) == ([1], [2, 3, 4])
    pool.acquire(1)
    pool.acquire(2, 3, 4, namespace=other, tag=2)
    assert pool.save(5) == FULL
    assert pool.tables.check() == []


def test_shard_records_run_out_as_full_and_nothing_is_evicted_for_it() -> None:
    pool = Pool(max_shards=2)
    pool.save(*range(16))
    take(pool, 16)
    take(pool, 17, member=pool.b)
    third = pool.tables.member_add(b"C" * 16, b"T" * 16, b"N" * 16, 2, 13)
    before = pool.stat("evicted")
    assert pool.tables.reserve(pool.small, third, 1, key(18), shards(0))[0] == FULL
    assert pool.stat("evicted") == before
    assert pool.tables.check() == []


# ---- the hash table --------------------------------------------------------------------------------------------------------------


def crafted(home: int, n: int) -> bytes:
    return struct.pack("<Q", home) + struct.pack("<3Q", n, n, n)


def put(pool: Pool, *keys: bytes, namespace: int = 0) -> None:
    for each in keys:
        statuses, _, generation = pool.tables.reserve(namespace, pool.a, 1, each, shards(0))
        assert statuses == OK
        assert pool.commit(pool.a, 1, each, shards(0), generation) == OK


def test_a_delete_in_a_run_leaves_a_tombstone_that_the_next_insert_takes(pool: Pool) -> None:
    other = pool.namespace(SLOT, name="other")
    put(pool, crafted(127, 0), crafted(127, 1))
    put(pool, crafted(127, 2), namespace=other)
    put(pool, crafted(127, 3))
    pool.tables.clear(other)
    assert pool.stat("tombstones") == 1
    assert pool.view.lookup(0, crafted(127, 0) + crafted(127, 1) + crafted(127, 2) + crafted(127, 3)) == b"\1\1\0\1"
    put(pool, crafted(127, 4))
    assert pool.stat("tombstones") == 0
    assert pool.view.lookup(0, crafted(127, 3) + crafted(127, 4)) == b"\1\1"


def test_tombstones_at_the_end_of_a_run_vanish_with_its_last_block(pool: Pool) -> None:
    other = pool.namespace(SLOT, name="other")
    put(pool, crafted(5, 0))
    put(pool, *[crafted(5, n) for n in range(1, 4)], namespace=other)
    put(pool, crafted(5, 4))
    pool.tables.clear(other)
    assert pool.stat("tombstones") == 3
    pool.tables.clear(pool.small)
    assert pool.stat("tombstones") == 0


def test_blocks_move_into_tombstones_and_nothing_else_of_them_changes() -> None:
    pool = Pool(pool_bytes=256 * PAGE, max_blocks=64)  # 128 entries: 16 tombstones are let alone
    other = pool.namespace(SLOT, name="other")
    two = pool.namespace(SLOT // 2, 2, name="two")
    put(pool, *[crafted(120, n) for n in range(10)])
    put(pool, *[crafted(120, n) for n in range(10, 50)], namespace=other)
    put(pool, *[crafted(120, n) for n in range(50, 56)])
    statuses, _, generation = pool.tables.reserve(two, pool.b, 7, crafted(120, 60) * 2, shards(0, 1))
    assert statuses == OK + OK
    _, pages, generations, head = pool.tables.acquire(pool.small, 1, 1, NIL, crafted(120, 3) + crafted(120, 52))
    pool.tables.clear(other)
    assert pool.stat("tombstones") == 40
    kept = b"".join(crafted(120, n) for n in (*range(10), *range(50, 56)))
    for n in range(100, 110):
        put(pool, crafted(3, n))
        assert pool.tables.check() == []
        assert pool.view.lookup(pool.small, kept) == b"\1" * 16
    assert pool.stat("moved") >= 5
    assert pool.stat("tombstones") > 16  # in front of blocks in use, which stay
    assert pool.view.check(crafted(120, 3) + crafted(120, 52), pages, generations) == b"\1\1"
    assert pool.tables.release(head) == 2
    assert pool.commit(pool.b, 7, crafted(120, 60) * 2, shards(0, 1), generation) == OK + OK
    for n in range(110, 120):
        put(pool, crafted(3, n))
    assert pool.stat("tombstones") <= 16
    assert pool.tables.check() == []
    for n in range(64 - pool.stat("blocks") + 2):  # fills the pool and then evicts the two that were used longest ago
        put(pool, key(n))
    assert pool.stat("evicted") == 2
    assert pool.view.lookup(pool.small, b"".join(crafted(120, n) for n in range(4))) == b"\0\0\1\1"


def test_the_last_empty_entries_are_not_given_where_pins_keep_tombstones_in_place() -> None:
    pool = Pool(pool_bytes=64 * PAGE, extent_bytes=64 * PAGE, max_blocks=8)  # 16 entries
    tiny = pool.namespace(PAGE)
    heads = []
    for home in range(0, 14, 2):  # a tombstone, and behind it a pinned block whose search passes it
        put(pool, crafted(home, 0), crafted(home, 1), namespace=tiny)
        heads.append(pool.tables.acquire(tiny, home // 2 % 4, home, NIL, crafted(home, 1))[3])
        _, _, generation, head = pool.tables.acquire(tiny, 0, 99, NIL, crafted(home, 0))
        pool.tables.release(head)
        assert pool.tables.discard(tiny, crafted(home, 0), generation) == 1
    assert (pool.stat("blocks"), pool.stat("tombstones")) == (7, 7)
    put(pool, crafted(14, 0), namespace=tiny)
    assert pool.tables.reserve(tiny, pool.a, 1, crafted(15, 1), shards(0))[0] == FULL
    put(pool, crafted(0, 0), namespace=tiny)  # in the place of a tombstone
    for head in heads:
        pool.tables.release(head)
    put(pool, crafted(15, 1), namespace=tiny)
    assert pool.stat("tombstones") <= 2
    assert pool.tables.check() == []


def test_keys_chosen_to_collide_are_refused_beyond_a_bound_and_harm_no_others() -> None:
    pool = Pool(pool_bytes=4096 * PAGE, extent_bytes=64 * PAGE, max_blocks=4096, max_shards=4096)
    tiny = pool.namespace(PAGE)
    many = b"".join(crafted(7, n) for n in range(1200))
    statuses, _, generations = pool.tables.reserve(tiny, pool.a, 1, many, bytes(2 * 1200))
    assert statuses == OK * layout.MAX_PROBE + FULL * (1200 - layout.MAX_PROBE)
    pool.commit(pool.a, 1, many, bytes(2 * 1200), generations)
    assert pool.view.lookup(tiny, many) == b"\1" * layout.MAX_PROBE + b"\0" * (1200 - layout.MAX_PROBE)
    assert pool.tables.reserve(tiny, pool.a, 1, crafted(8, 0) + key(1), bytes(4))[0] == OK + OK
    assert pool.tables.check() == []


# ---- members and namespaces ------------------------------------------------------------------------------------------------------


def test_members_are_listed_and_bounded(pool: Pool) -> None:
    assert pool.tables.members() == [(0, b"A" * 16, b"S" * 16, b"L" * 16, 1, 11, 0), (1, b"B" * 16, b"T" * 16, b"M" * 16, 2, 12, 0)]
    pool.tables.member_set_flags(pool.b, layout.DEVICE)
    assert [member[6] for member in pool.tables.members()] == [0, layout.DEVICE]
    assert [pool.tables.member_add(b"C" * 16, b"S" * 16, b"N" * 16, 1, n, layout.TIER) for n in range(3)] == [2, 3, -1]
    assert [member[6] for member in pool.tables.members()] == [0, layout.DEVICE, layout.TIER, layout.TIER]
    assert pool.tables.member_add(b"E" * 16, b"U" * 16, b"N" * 16, GEOMETRY["max_members"], 9) == -1  # the number of one session too many
    pool.tables.member_remove(1)
    assert pool.tables.member_add(b"D" * 16, b"S" * 16, b"N" * 16, 1, 9) == 1


def test_a_namespace_keeps_its_number_and_only_one_without_blocks_is_replaced(pool: Pool) -> None:
    pool.save(1)
    numbers = [pool.namespace(100, name=str(n)) for n in range(3)]
    assert numbers == [1, 2, 3]
    assert pool.namespace(100, name="1") == 2
    pool.save(5, namespace=1)
    assert pool.namespace(8192, name="new") == 2
    assert pool.namespace(100, name="1") == 2
    pool.save(6, namespace=2)
    pool.save(7, namespace=3)
    assert pool.namespace(100, name="one too many") == -1
    assert [each[0] for each in pool.tables.namespaces()] == [0, 1, 2, 3]
    assert pool.tables.namespaces()[3][2:] == (100, 1, PAGE, 1, "2")


def test_a_namespace_whose_block_cannot_be_stored_is_refused(pool: Pool) -> None:
    add = pool.tables.namespace_add
    for shard_bytes, count in [(0, 1), (16 * PAGE + 1, 1), (8 * PAGE + 1, 2), (1 << 36, 64), ((1 << 64) - 1, 64), (1, 0), (1, 65), (-1, 1)]:
        with pytest.raises(ValueError):
            add(b"x" * 32, shard_bytes, count, "")
    with pytest.raises(ValueError, match="fingerprint has 31 bytes"):
        add(b"x" * 31, 1, 1, "")
    with pytest.raises(ValueError, match="label has 65 bytes"):
        add(b"x" * 32, 1, 1, "y" * 65)
    assert len(pool.tables.namespaces()) == 1
    assert add(b"x" * 32, 16 * PAGE, 1, "é" * 32) == 1
    assert pool.tables.namespaces()[1][6] == "é" * 32
    for shard_bytes in (1, 4095, 4097):
        index = pool.namespace(shard_bytes)
        assert pool.tables.namespaces()[index][4] == -(-shard_bytes // PAGE) * PAGE


# ---- bad arguments ---------------------------------------------------------------------------------------------------------------


def test_wrong_arguments_raise_and_change_nothing(pool: Pool) -> None:
    pool.save(1)
    before = pool.tables.stats()
    t, ns, a = pool.tables, pool.small, pool.a
    calls: list[tuple[type[Exception], Callable[..., Any], tuple[Any, ...]]] = [
        (ValueError, t.reserve, (ns, a, 1, key(2)[:31], shards(0))),
        (ValueError, t.reserve, (ns, a, 1, key(2), shards(0, 0))),
        (ValueError, t.reserve, (ns, a, 1, key(2) + key(3), shards(0, 1))),
        (ValueError, t.reserve, (ns, a, 1, key(2), shards(0xFFFF))),
        (ValueError, t.reserve, (ns, a, 1 << 64, key(2), shards(0))),
        (ValueError, t.reserve, (ns, a, -1, key(2), shards(0))),
        (IndexError, t.reserve, (1, a, 1, key(2), shards(0))),
        (IndexError, t.reserve, (-1, a, 1, key(2), shards(0))),
        (IndexError, t.reserve, (1 << 70, a, 1, key(2), shards(0))),
        (IndexError, t.reserve, (ns, 2, 1, key(2), shards(0))),
        (IndexError, t.reserve, (ns, 1 << 40, 1, key(2), shards(0))),
        (TypeError, t.reserve, (ns, a, 1, "text", shards(0))),
        (TypeError, t.reserve, ("0", a, 1, key(2), shards(0))),
        (ValueError, t.commit, (a, 1, key(1), shards(0), bytes(7), bytes(8))),
        (ValueError, t.commit, (a, 1, key(1), shards(), bytes(8), bytes(8))),
        (ValueError, t.commit, (a, 1, key(1), shards(0), bytes(8), bytes(9))),
        (IndexError, t.commit, (3, 1, key(1), shards(0), bytes(8), bytes(8))),
        (IndexError, t.abort, (3, tags(1))),
        (ValueError, t.abort, (a, bytes(7))),
        (IndexError, t.member_remove, (4,)),
        (IndexError, t.acquire, (1, 1, 1, NIL, key(1))),
        (ValueError, t.acquire, (ns, 1, 1, NIL, b"x")),
        (ValueError, t.acquire, (ns, 1 << 32, 1, NIL, key(1))),
        (IndexError, t.acquire, (ns, GEOMETRY["max_members"], 1, NIL, key(1))),
        (IndexError, t.discard, (2, key(1), bytes(8))),
        (ValueError, t.discard, (ns, key(1), bytes(7))),
        (IndexError, t.clear, (2,)),
        (ValueError, t.clear, (-1,)),
        (ValueError, t.clear, (1 << 40,)),
        (IndexError, t.lookup, (2, key(1))),
        (ValueError, t.lookup, (ns, b"x")),
        (ValueError, t.member_add, (b"c" * 15, b"s" * 16, b"l" * 16, 1, 1)),
        (IndexError, t.member_add, (b"c" * 16, b"s" * 16, b"l" * 16, GEOMETRY["max_members"], 1)),
        (ValueError, t.member_add, (b"c" * 16, b"s" * 16, b"l" * 16, 1, 1, 4)),
        (IndexError, t.member_set_flags, (2, 0)),
        (ValueError, t.member_set_flags, (a, 4)),
        (TypeError, Tables.geometry, ("0",)),
        (OSError, Tables.geometry, (-1,)),
        (ValueError, pool.view.lookup, (ns, b"x" * 33)),
        (ValueError, pool.view.lookup_prefix, (ns, b"x" * 31)),
        (ValueError, pool.view.check, (key(1), bytes(3), bytes(8))),
        (ValueError, pool.view.check, (key(1), bytes(4), bytes(9))),
        (ValueError, pool.view.check, (key(1), bytes(4), bytes(8), bytes(7))),
        (TypeError, pool.view.check, (key(1), bytes(4), bytes(8), "text")),
        (RuntimeError, t.repair, ([],)),
    ]
    for error, call, arguments in calls:
        with pytest.raises(error):
            call(*arguments)
    assert pool.tables.stats() == before


@pytest.mark.parametrize("name", sorted(GEOMETRY))
@pytest.mark.parametrize("value", [0, -1, 1 << 64, (1 << 44) + PAGE, "1"])
def test_a_geometry_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Tables.bytes_needed(**{**GEOMETRY, name: value})
    with pytest.raises((ValueError, TypeError)):
        Tables.create(-1, **{**GEOMETRY, name: value}, boot_id=BOOT, pool_epoch=EPOCH, instance_id=INSTANCE)


def test_a_file_of_the_wrong_size_or_no_file_is_refused() -> None:
    fd = os.memfd_create("tables")
    with pytest.raises(ValueError, match="the file has 0 bytes, these tables need"):
        Pool(fd)
    os.close(fd)
    with pytest.raises(OSError):
        Pool(fd)


def test_tables_are_made_only_by_create_and_adopt() -> None:
    with pytest.raises(TypeError):
        Tables()


# ---- files, processes, threads ---------------------------------------------------------------------------------------------------


# As many slots as entries, so that tombstones pile up.
ROOMY = {"pool_bytes": 256 * PAGE}


@pytest.fixture
def file(request: pytest.FixtureRequest) -> Iterator[int]:
    fd = os.memfd_create("tables")
    os.ftruncate(fd, Tables.bytes_needed(**{**GEOMETRY, **getattr(request, "param", {})}))
    yield fd
    os.close(fd)


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


def in_child(work: Callable[[], None]) -> None:
    """Runs it in a forked process; fails unless it returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_view_sees_what_the_writer_does_until_the_pool_is_removed(file: int) -> None:
    pool = Pool(file)
    view = View(file, size_of(file))
    assert (view.pool_epoch, view.pool_bytes, view.size) == (EPOCH, GEOMETRY["pool_bytes"], size_of(file))
    assert pool.tables.pool_epoch == EPOCH
    pool.tables.heartbeat(123456789)
    assert (view.heartbeat_ns(), view.instance_id(), view.alive()) == (123456789, INSTANCE, True)
    pool.save(1)
    _, pages, generations, _ = pool.tables.acquire(0, 1, 1, NIL, key(1))
    assert view.lookup(0, key(1)) == view.check(key(1), pages, generations) == b"\1"
    pool.tables.set_removed()
    assert not view.alive()
    assert view.lookup(0, key(1)) == view.check(key(1), pages, generations) == b"\0"
    assert (view.lookup_prefix(0, key(1)), view.lookup_reverse(0, key(1))) == (0, -1)
    with pytest.raises(LayoutError, match="pool_state"):
        adopt(file)


def test_a_view_of_private_tables_outlives_them() -> None:
    pool = Pool()
    pool.save(1)
    pool.tables.close()
    assert pool.ready(1, 2) == [1]
    pool.view.close()
    pool.view.close()
    with pytest.raises(ValueError, match="the View is closed"):
        pool.view.lookup(0, key(1))
    with pytest.raises(ValueError, match="the View is closed"):
        _ = pool.view.address
    with pytest.raises(ValueError, match="the Tables is closed"):
        pool.tables.stats()


def test_a_forked_child_is_told_that_the_memory_is_not_its_own(file: int) -> None:
    pool = Pool(file)
    view = View(file, size_of(file))

    def child() -> None:
        with pytest.raises(RuntimeError, match="is not mapped in process"):
            view.lookup(0, key(1))
        with pytest.raises(RuntimeError, match="is not mapped in process"):
            pool.tables.stats()
        view.close()
        own = View(file, size_of(file))
        assert own.lookup(0, key(1)) == b"\0"

    in_child(child)
    assert view.lookup(0, key(1)) == b"\0"


def test_closing_a_view_while_other_threads_read_it_is_safe() -> None:
    pool = Pool()
    pool.save(*range(8))
    keys = joined(range(16)) * 1000
    expected = (b"\1" * 8 + b"\0" * 8) * 1000
    for _ in range(20):
        view = pool.tables.view()
        started, wrong = threading.Barrier(4), []

        def read(view: View = view, started: threading.Barrier = started, wrong: list[bytes] = wrong) -> None:
            started.wait()
            while True:
                try:
                    found = view.lookup(0, keys)
                except ValueError:
                    return
                if found != expected:
                    wrong.append(found)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        view.close()
        for thread in threads:
            thread.join()
        assert wrong == []
    pool.tables.close()


@pytest.mark.parametrize("file", [ROOMY], indirect=True, ids=["roomy"])
def test_readers_never_miss_pinned_blocks_nor_find_others_while_the_table_churns(file: int) -> None:
    """A real reader process beside a writer that evicts, leaves tombstones and moves blocks into them all the time."""
    pool = Pool(file, **ROOMY)
    other = pool.namespace(SLOT, name="other")
    last = pool.namespace(SLOT, name="last")
    pinned = [crafted(125, n) for n in range(4)]
    put(pool, *[crafted(125, n) for n in range(100, 104)])
    put(pool, *pinned)
    _, pages, generations, _ = pool.tables.acquire(pool.small, 1, 1, NIL, b"".join(pinned))
    stop_read, stop_write = os.pipe()
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stop_write)
        os.set_blocking(stop_read, False)
        view, errors, rounds = View(file, size_of(file)), 0, 0
        never = b"".join(crafted(125, n) for n in range(1000, 1020))
        while True:
            errors += view.lookup(0, b"".join(pinned)) != b"\1" * 4
            errors += view.lookup_prefix(0, b"".join(pinned) + never) != 4
            errors += view.check(b"".join(pinned), pages, generations) != b"\1" * 4
            errors += any(view.lookup(0, never)) or any(view.lookup(other, b"".join(pinned)))
            rounds += 1
            if rounds in (1, 50):
                os.write(ready_write, b"r")
            try:
                os.read(stop_read, 1)
                os._exit(min(errors, 100))
            except BlockingIOError:
                pass
    os.close(ready_write)
    assert os.read(ready_read, 1) == b"r"
    n = 2000
    while pool.stat("moved") < 1000 or not select.select([ready_read], [], [], 0)[0]:  # while it did all its rounds
        put(pool, *[crafted(125, n + i) for i in range(40)], namespace=other)
        put(pool, crafted(125, n + 50), namespace=last)  # keeps the tombstones before it
        pool.tables.clear(other)
        put(pool, crafted(125, n + 51), namespace=last)
        pool.tables.clear(last)
        n += 100
    os.close(stop_write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.tables.check() == []
    for fd in (stop_read, ready_read):
        os.close(fd)


# ---- after a crash ---------------------------------------------------------------------------------------------------------------


def adopt(fd: int, **changes: Any) -> Tables:
    return Tables.adopt(fd, **{**GEOMETRY, "boot_id": BOOT, "instance_id": b"2" * 16, **changes})


def test_adopted_tables_do_nothing_before_they_are_repaired(file: int) -> None:
    Pool(file).tables.close()
    tables = adopt(file)
    assert len(tables.members()) == 2  # whose locks are looked at first
    for call in (tables.stats, tables.check, tables.view, tables.namespaces, tables.extents):
        with pytest.raises(RuntimeError, match="call repair"):
            call()
    with pytest.raises(IndexError):
        tables.repair([4])
    tables.repair([])
    assert tables.check() == []
    with pytest.raises(RuntimeError):
        tables.repair([])


def test_a_new_writer_serves_the_same_blocks_keeps_live_pins_and_frees_what_the_dead_held(file: int) -> None:
    pool = Pool(file)
    pool.save(*range(6))
    pool.acquire(0, 1, tag=5)
    pool.acquire(2, tag=6)
    pool.acquire(3, tag=5, session=2)
    take(pool, 10)
    generation = take(pool, 11, member=pool.b)
    pool.tables.close()
    tables = adopt(file)
    chains = tables.repair([pool.a])
    assert [(session, tag) for session, tag, _ in chains] == [(2, 5)]
    assert tables.check() == []
    assert pool.ready(*range(12)) == list(range(6))
    assert (tables.stats()["pins"], tables.stats()["shards_in_flight"]) == (1, 1)
    assert tables.commit(pool.b, 1, key(11), shards(0), generation, bytes(8)) == OK
    assert tables.release(chains[0][2]) == 1
    assert tables.reserve(0, pool.b, 1, key(12), shards(0))[2] > generation
    assert pool.view.instance_id() == b"2" * 16
    assert tables.check() == []


def test_the_order_of_use_survives(file: int) -> None:
    pool = Pool(file)
    pool.save(*range(16))
    _, head = pool.acquire(0, 5)
    pool.tables.release(head)
    pool.tables.close()
    pool.tables = adopt(file)
    pool.tables.repair([])
    pool.save(16, 17)
    assert pool.ready(*range(18)) == [0, *range(3, 18)]


def entry_of(fd: int, wanted: bytes) -> tuple[int, int]:
    """Offsets of a key's entry and its aux in the table in use, as the prose of PROTOCOL.md finds them."""
    data = os.pread(fd, size_of(fd), 0)
    header = layout.HEADER.unpack_from(data)
    capacity = header[17]
    at = int.from_bytes(wanted[:8], "little") & (capacity - 1)
    for _ in range(capacity):
        entry = header[23] + 64 * at
        _, state, _, _, found, *_ = layout.BLOCK.unpack_from(data, entry)
        if state in (layout.WRITING, layout.READY) and found == wanted:
            return entry, header[24] + 32 * at
        assert state != layout.EMPTY
        at = (at + 1) & (capacity - 1)
    raise AssertionError("no such entry")


@pytest.mark.parametrize(
    "what, offset, value",
    [
        ("died while it was changed", 0, struct.pack("<I", 7)),
        ("unknown state", 4, b"\x09"),
        ("wrong number of shards", 6, struct.pack("<H", 2)),
        ("unknown key", 8, b"\xff" * 8),
        ("no generation", 40, bytes(8)),
        ("a generation never given", 40, struct.pack("<Q", 1 << 60)),
        ("generation of another block", 40, struct.pack("<Q", 3)),
        ("misaligned page", 48, struct.pack("<I", 1)),
        ("page of another slot size", 48, struct.pack("<I", 32)),
        ("page of a free extent", 48, struct.pack("<I", 48)),
        ("page outside of the pool", 48, struct.pack("<I", 64)),
        ("page far outside of the pool", 48, struct.pack("<I", NIL)),
        ("page of another block", 48, struct.pack("<I", 4)),
        ("no namespace", 52, struct.pack("<I", 3)),
        ("namespace out of range", 52, struct.pack("<I", 1 << 31)),
        ("namespace of another slot size", 52, struct.pack("<I", 1)),
    ],
)
def test_an_entry_that_is_not_sound_is_dropped_alone(file: int, what: str, offset: int, value: bytes) -> None:
    pool = Pool(file)
    large = pool.namespace(2 * SLOT)
    pool.save(*range(6))
    pool.save(7, namespace=large)
    pool.tables.close()
    entry, _ = entry_of(file, key(0 if "another block" not in what else 5))
    os.pwrite(file, value, entry + offset)
    tables = adopt(file)
    tables.repair([])
    assert tables.check() == []
    assert tables.stats()["blocks"] == 6
    assert tables.stats()["bad_blocks"] == (what != "died while it was changed")
    assert len(pool.ready(*range(6))) == 5
    assert pool.ready(7, namespace=large) == [7]


@pytest.mark.parametrize("offset", [4, 6, 8, 39, 40, 48, 52, 56], ids=lambda offset: f"byte {offset}")
def test_an_entry_with_a_flipped_bit_is_dropped(file: int, offset: int) -> None:
    """State, shards, key, generation, page, namespace, seal: where payload has no checksums each entry has a seal."""
    pool = Pool(file, verify=False)
    pool.save(*range(6))
    pool.tables.close()
    entry, _ = entry_of(file, key(3))
    (byte,) = os.pread(file, 1, entry + offset)
    os.pwrite(file, bytes([byte ^ 1]), entry + offset)
    pool.tables = adopt(file)
    pool.tables.repair([])
    assert pool.tables.check() == []
    assert pool.ready(*range(6)) == [0, 1, 2, 4, 5]


def test_a_block_whose_checksum_may_not_cover_its_shards_is_never_ready(file: int) -> None:
    """A commit changes mask and checksum while the entry's seq is odd; what a crash leaves in there is found by nobody."""
    pool = Pool(file)
    two = pool.namespace(100, 2)
    generation = take(pool, 1, 0, namespace=two)
    take(pool, 1, 1, namespace=two)
    take(pool, 2, 0, namespace=two)
    take(pool, 3, 0, namespace=two)
    pool.tables.close()
    for n, mask, odd in [(1, 1, 1), (2, 3, 0), (3, 0, 0)]:  # in mid-commit; all but published; a checksum of nothing
        entry, aux = entry_of(file, key(n))
        (seq,) = struct.unpack("<I", os.pread(file, 4, entry))
        os.pwrite(file, struct.pack("<I", seq | odd), entry)
        os.pwrite(file, struct.pack("<Q", 7), entry + 56)
        os.pwrite(file, struct.pack("<Q", mask), aux + 16)
    pool.tables = adopt(file, verify=True)
    pool.tables.repair([])
    assert pool.tables.check() == []
    assert (pool.stat("blocks"), pool.stat("doomed"), pool.stat("bad_blocks"), pool.stat("bad_records")) == (1, 1, 2, 0)
    assert pool.commit(pool.a, 1, key(1), shards(0), generation, 1) == NOT_HELD
    assert pool.commit(pool.a, 1, key(1), shards(1), generation, 1) == OK  # a member that lives kept its place to the end
    assert pool.stat("blocks") == 0


@pytest.mark.parametrize(
    "what, record, offset, value",
    [
        ("used twice", "shard", 0, struct.pack("<I", 2)),
        ("member out of range", "shard", 4, struct.pack("<I", 4)),
        ("shard out of range", "shard", 8, struct.pack("<I", 1)),
        ("shard of another grant", "shard", 24, struct.pack("<Q", 1)),
        ("pin of no session", "pin", 4, struct.pack("<I", 4)),
        ("pin of another grant", "pin", 16, struct.pack("<Q", 9)),
        ("member of no session", "member", 4, struct.pack("<I", 4)),
        ("member with another one's client", "member", 16, b"A" * 16),
        ("member with another one's session number", "member", 4, struct.pack("<I", 1)),
        ("member with another one's session", "member", 32, b"S" * 16),
        ("unknown flag", "member", 12, struct.pack("<I", 4)),
        ("slots of another size", "namespace", 16, struct.pack("<Q", SLOT)),
        ("another one's fingerprint", "namespace", 32, b""),
    ],
)
def test_a_record_that_no_writer_leaves_is_counted_as_bad_and_harms_no_other(
    file: int, what: str, record: str, offset: int, value: bytes
) -> None:
    pool = Pool(file)
    pool.namespace(100, name="other")
    pool.save(1, 2)
    pool.acquire(2)
    take(pool, 10)
    pool.tables.close()
    header = layout.HEADER.unpack(os.pread(file, layout.HEADER.size, 0))
    starts = {"shard": header[25], "pin": header[26], "member": header[27] + 64, "namespace": header[28] + 128}
    if not value:
        value = os.pread(file, 32, header[28] + 32)
    os.pwrite(file, value, starts[record] + offset)
    pool.tables = adopt(file)
    listed = pool.tables.members()
    pool.tables.repair([])
    assert pool.tables.members() == listed  # whose locks are looked at is who is kept
    assert len(listed) == (1 if record == "member" and what != "unknown flag" else 2)
    assert pool.tables.check() == []
    assert pool.ready(1, 2) == [1, 2]
    assert (pool.stat("bad_blocks"), pool.stat("bad_records")) == (0, 1)


def test_what_a_crash_leaves_unfinished_is_not_bad(file: int) -> None:
    pool = Pool(file)
    take(pool, 10)
    take(pool, 11, member=pool.b)
    pool.tables.clear(pool.small)
    pool.tables.close()
    entry, _ = entry_of(file, key(11))  # killed in the middle of an entry: its records have no block any more
    (seq,) = struct.unpack("<I", os.pread(file, 4, entry))
    os.pwrite(file, struct.pack("<I", seq + 1), entry)
    pool.tables = adopt(file)
    pool.tables.repair([pool.b])
    assert pool.tables.check() == []
    assert (pool.stat("blocks"), pool.stat("pins"), pool.stat("shards_in_flight")) == (1, 0, 1)  # 10, whose writer lives
    assert (pool.stat("bad_blocks"), pool.stat("bad_records")) == (0, 0)


@pytest.mark.parametrize("lives", [True, False])
def test_the_slot_of_an_entry_in_change_stays_taken_while_its_writer_lives(file: int, lives: bool) -> None:
    """Given to another block, it would be written by two."""
    pool = Pool(file)
    two = pool.namespace(100, 2)
    take(pool, 1, 0, namespace=two, member=pool.a)
    generation = take(pool, 1, 1, namespace=two, member=pool.b)
    pool.tables.close()
    entry, aux = entry_of(file, key(1))  # killed in the commit of shard 0
    os.pwrite(file, struct.pack("<IB", 3, 2), entry)
    os.pwrite(file, struct.pack("<Q", 1), aux + 16)
    pool.tables = adopt(file)
    pool.tables.repair([] if lives else [pool.b])
    assert pool.tables.check() == []
    assert (pool.stat("blocks"), pool.stat("doomed"), pool.stat("shards_in_flight"), pool.stat("bad_blocks")) == (lives, lives, lives, 0)
    assert pool.ready(1, namespace=two) == []
    if lives:
        assert pool.commit(pool.b, 1, key(1), shards(1), generation, 0) == OK
    assert pool.stat("blocks") == 0


@pytest.mark.parametrize("lives", [True, False])
def test_the_slot_of_an_entry_in_change_stays_taken_while_its_reader_lives(file: int, lives: bool) -> None:
    """Who has pinned a block copies it and checks nothing afterwards."""
    pool = Pool(file)
    pool.save(1)
    pool.acquire(1, session=2)
    pool.tables.close()
    entry, _ = entry_of(file, key(1))  # killed while it doomed the block
    (seq,) = struct.unpack("<I", os.pread(file, 4, entry))
    os.pwrite(file, struct.pack("<I", seq + 1), entry)
    pool.tables = adopt(file)
    chains = pool.tables.repair([] if lives else [pool.b])
    assert pool.tables.check() == []
    assert (pool.stat("blocks"), pool.stat("doomed"), pool.stat("pins"), pool.stat("bad_blocks")) == (lives, lives, lives, 0)
    assert pool.ready(1) == []
    for *_, head in chains:
        assert pool.tables.release(head) == 1
    assert pool.stat("blocks") == 0


def test_counters_at_the_end_of_their_range_count_on(file: int) -> None:
    pool = Pool(file)
    pool.save(*range(16))
    pool.tables.close()
    os.pwrite(file, struct.pack("<QQ", (1 << 64) - 1, (1 << 64) - 1), layout.GENERATION_OFFSET)
    pool.tables = adopt(file)
    pool.tables.repair([])
    assert pool.ready(*range(16)) == list(range(16))
    pool.save(20, 21)
    assert pool.ready(*range(16)) == list(range(2, 16))
    assert pool.tables.check() == []


@pytest.mark.parametrize("seed", range(40))
def test_tables_of_random_bytes_are_adopted_without_harm(seed: int) -> None:
    """Under a good header: some bytes of it all, or most of them, are not what a writer of ours leaves."""
    rng = random.Random(seed)
    fd = os.memfd_create("tables")
    os.ftruncate(fd, Tables.bytes_needed(**GEOMETRY))
    pool = Pool(fd)
    pool.namespace(100, 2)
    pool.save(*range(20))
    pool.acquire(*range(16, 20))
    take(pool, 30)
    pool.tables.close()
    data = bytearray(os.pread(fd, size_of(fd), 0))
    if seed % 2:
        data[layout.MOVES_OFFSET :] = rng.randbytes(len(data) - layout.MOVES_OFFSET)
    else:
        for _ in range(20 << seed % 8):
            data[rng.randrange(layout.MOVES_OFFSET, len(data))] = rng.choice([0, 1, 2, 3, 255, rng.randrange(256)])
    struct.pack_into("<QQ", data, layout.GENERATION_OFFSET, 1000, 1000)
    struct.pack_into("<I", data, layout.POOL_STATE_OFFSET, layout.POOL_LIVE)
    os.pwrite(fd, data, 0)
    view = View(fd, size_of(fd))
    view.lookup(0, joined(range(40)))
    tables = adopt(fd)
    pool.tables = tables
    tables.repair([0])  # leaves room for the member below
    assert tables.check() == []
    if not tables.namespaces():
        tables.namespace_add(b"n" * 32, SLOT, 1, "")
    member = tables.member_add(b"m" * 16, b"s" * 16, b"l" * 16, 0, 5)
    namespace = tables.namespaces()[0][0]
    for n in range(200, 260):
        statuses, _, generation = tables.reserve(namespace, member, 1, key(n), shards(0))
        if statuses == OK:
            tables.commit(member, 1, key(n), shards(0), generation, bytes(8))
    assert tables.check() == []
    os.close(fd)


@pytest.mark.parametrize("seed", range(60))
def test_a_view_of_random_bytes_misses_and_never_crashes(seed: int) -> None:
    rng = random.Random(seed)
    fd = os.memfd_create("tables")
    os.ftruncate(fd, Tables.bytes_needed(**GEOMETRY))
    pool = Pool(fd)
    size = size_of(fd)
    view = View(fd, size)
    keys = joined(range(64))
    for _ in range(8):
        os.pwrite(fd, rng.randbytes(size - layout.STATIC_BYTES), layout.STATIC_BYTES)
        if rng.random() < 0.5:  # entries as searches like them: with an even seq, and READY
            for at in range(4096, size - 64, 64):
                os.pwrite(fd, struct.pack("<IBB", rng.randrange(1 << 31) * 2, rng.choice([1, 2, 3, 200]), 0), at)
        os.pwrite(fd, struct.pack("<I", layout.POOL_LIVE), layout.POOL_STATE_OFFSET)
        assert view.lookup(0, keys) == bytes(64)
        assert view.lookup_prefix(rng.randrange(1 << 32), keys) == 0
        assert view.lookup_reverse(0, keys) == -1
        assert view.check(keys, rng.randbytes(256), rng.randbytes(512)) == bytes(64)
        assert (len(view.instance_id()), view.heartbeat_ns() >= 0) == (16, True)
    pool.tables.close()
    os.close(fd)


def churn(fd: int, seed: int) -> None:
    """A writer that never stops by itself. Blocks 0..3 stay pinned; all others come and go."""
    rng = random.Random(seed)
    pool = Pool(fd, **ROOMY)
    other = pool.namespace(SLOT // 2, 2, name="other")
    put(pool, *[crafted(125, n) for n in range(4)])
    pool.tables.acquire(pool.small, 1, 1, NIL, b"".join(crafted(125, n) for n in range(4)))
    os.pwrite(fd, b"\1", size_of(fd) - 1)  # the last page of the slot map is padding: a flag for the test
    while True:
        n = rng.randrange(100, 200)
        which = rng.randrange(8)
        if which < 3:
            pool.tables.reserve(other, pool.b, n % 5, crafted(125, n) * 2, shards(0, 1))
        elif which < 5:
            statuses, _, generation = pool.tables.reserve(pool.small, pool.a, 3, crafted(124, n), shards(0))
            if statuses == OK:
                pool.commit(pool.a, 3, crafted(124, n), shards(0), generation)
        elif which == 5:
            pool.tables.abort(pool.b, tags(n % 5))
        elif which == 6:
            _, _, _, head = pool.tables.acquire(pool.small, 2, 4, NIL, b"".join(crafted(124, i) for i in range(100, 200)))
            if head != NIL:
                pool.tables.release(head)
        elif n % 4 == 0:
            pool.tables.clear(other)


@pytest.mark.parametrize("file", [ROOMY], indirect=True, ids=["roomy"])
@pytest.mark.parametrize("seed", range(30))
def test_tables_of_a_writer_killed_at_any_instant_are_adopted_whole(file: int, seed: int) -> None:
    pid = os.fork()
    if pid == 0:
        churn(file, seed)
    while os.pread(file, 1, size_of(file) - 1) == b"\0":
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    target = random.Random(seed).randrange(20, 3000)
    while int.from_bytes(os.pread(file, 8, layout.TICK_OFFSET), "little") < target:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.pwrite(file, b"\0", size_of(file) - 1)

    tables = adopt(file, **ROOMY)
    chains = tables.repair([1])  # the member that was writing is dead, the one that reads lives
    assert tables.check() == []
    assert [(session, tag) for session, tag, _ in chains] == [(1, 1)]
    assert tables.lookup(0, b"".join(crafted(125, n) for n in range(4))) == OK * 4
    assert tables.stats()["shards_in_flight"] <= 1
    assert tables.release(chains[0][2]) == 4
    assert tables.check() == []


# ---- tiers -----------------------------------------------------------------------------------------------------------------------
def spill(pool: Pool, *numbers: int) -> None:
    """A tier takes the dirty blocks, oldest first; these must be the next."""
    for n in numbers:
        found = pool.tables.spill(1, 77)
        assert found is not None
        assert found[0] == key(n)
        assert pool.tables.set_clean(key(n), found[3])
        pool.tables.release(found[5])


def test_dirty_blocks_are_spilled_oldest_first_and_pinned_meanwhile(pool: Pool) -> None:
    pool.save(1, 2, 3)
    pool.tables.release(pool.acquire(1)[1])
    _, head = pool.acquire(3)
    assert pool.stat("dirty") == 3
    key_, namespace, page, generation, _, pin = pool.tables.spill(1, 77) or pytest.fail("nothing to spill")
    assert (key_, namespace) == (key(2), pool.small)
    assert pool.view.check(key_, struct.pack("<I", page), tags(generation)) == b"\1"
    assert pool.stat("pins") == 2
    pool.tables.release(pin)
    spill(pool, 1)
    pool.tables.release(head)
    spill(pool, 2, 3)
    assert pool.tables.spill(1, 77) is None
    assert pool.stat("dirty") == 0


def test_what_is_half_written_doomed_or_gone_is_not_spilled_and_not_clean(pool: Pool) -> None:
    two = pool.namespace(100, 2)
    generation = take(pool, 1, 0, namespace=two)
    assert pool.commit(0, 1, key(1), shards(0), generation) == OK
    pool.save(2, 3)
    _, head = pool.acquire(2)
    assert pool.tables.discard(pool.small, key(2), tags(2)) == 1
    assert pool.tables.spill(1, 77)[0] == key(3)  # type: ignore[index]
    assert pool.tables.spill(1, 77) is None
    assert not pool.tables.set_clean(key(1), 1)
    assert not pool.tables.set_clean(key(2), 2)
    assert not pool.tables.set_clean(key(3), 4)
    assert not pool.tables.set_clean(key(9), 1)
    assert pool.stat("dirty") == 1
    pool.tables.release(head)


def test_while_a_tier_takes_blocks_clean_ones_go_before_dirty_ones(pool: Pool) -> None:
    pool.tables.set_spills(True)
    pool.save(*range(16))
    spill(pool, 0, 1, 2)
    pool.tables.release(pool.acquire(0, 1, 2)[1])  # the newest, and yet
    pool.save(20, 21)
    assert pool.ready(*range(16)) == [0, *range(3, 16)]
    pool.save(22, 23)
    assert pool.ready(*range(16), 20, 21, 22, 23) == [*range(4, 16), 20, 21, 22, 23]
    assert pool.stat("evicted_dirty") == 1
    pool.tables.set_spills(False)
    spill(pool, 4)  # the newest of all now
    pool.save(24)
    assert pool.ready(4, 5) == [4]
    assert pool.stat("evicted_dirty") == 1


@pytest.mark.parametrize("keeps_reused", [False, True])
def test_a_block_whose_other_rank_is_late_becomes_whole_in_a_pool_full_of_dirty_ones(keeps_reused: bool) -> None:
    pool = Pool(keeps_reused=keeps_reused)
    pool.tables.set_spills(True)
    pool.save(*range(16))
    ns = pool.namespace(SLOT // 2, 2)
    for n in range(100, 140):
        assert pool.commit(pool.a, 1, key(n), shards(0), take(pool, n, 0, pool.a, namespace=ns)) == OK
        if n >= 104:
            assert pool.commit(pool.b, 1, key(n - 4), shards(1), take(pool, n - 4, 1, pool.b, namespace=ns)) == OK
            assert pool.ready(n - 4, namespace=ns) == [n - 4]
    assert pool.stat("evicted_dirty") == pool.stat("evicted") > 16
    assert pool.tables.check() == []
    pool.tables.close()


def test_an_extent_of_another_size_with_dirty_blocks_is_taken_back_last(pool: Pool) -> None:
    pool.tables.set_spills(True)
    large = pool.namespace(4 * SLOT)
    pool.save(*range(8))  # two extents
    spill(pool, 0, 1, 2, 3, 4, 5)
    pool.save(30, 31, 32, namespace=large)
    assert pool.ready(*range(8)) == [4, 5, 6, 7]
    pool.save(33, namespace=large)
    assert pool.ready(*range(8)) == []
    assert pool.stat("evicted_dirty") == 2
    assert pool.ready(30, 31, 32, 33, namespace=large) == [30, 31, 32, 33]  # which are dirty and newer


def test_clean_blocks_stay_clean_for_the_next_sidecar(file: int) -> None:
    pool = Pool(file)
    pool.save(1, 2, 3)
    spill(pool, 1, 2)
    pool.tables.close()
    tables = adopt(file)
    tables.repair([])
    assert tables.check() == []
    assert tables.stats()["dirty"] == 1
    assert tables.spill(1, 77)[0] == key(3)  # type: ignore[index]
    tables.close()


# ---- what was used again -----------------------------------------------------------------------------------------------------------


def use(pool: Pool, *numbers: int) -> None:
    statuses, head = pool.acquire(*numbers)
    assert statuses == OK * len(numbers)
    pool.tables.release(head)


@pytest.fixture
def reuse() -> Iterator[Pool]:
    pool = Pool(keeps_reused=True)
    yield pool
    assert pool.tables.check() == []
    pool.tables.close()


def test_what_was_used_again_keeps_half_of_the_pool_and_no_more(reuse: Pool) -> None:
    reuse.save(*range(16))
    use(reuse, *range(8))
    reuse.save(*range(20, 60))  # a scan
    assert reuse.ready(*range(8)) == [*range(8)]
    use(reuse, 59)
    assert reuse.stat("blocks") == 16
    reuse.save(70)
    assert reuse.ready(*range(9), 59) == [*range(7), 59], "of nine that were used again the oldest goes; a use goes deepest first"


@pytest.mark.parametrize("others, soon", [(29, True), (30, False)])
def test_what_comes_back_before_as_many_went_as_there_are_was_used_again(reuse: Pool, others: int, soon: bool) -> None:
    reuse.save(0, *range(1, 1 + others))
    reuse.save(0)
    reuse.save(*range(40, 80))
    assert reuse.ready(0) == [0] * soon


def test_uses_are_counted_up_to_a_limit(file: int) -> None:
    pool = Pool(file, min_reuse=63)
    pool.save(1)
    for _ in range(100):
        use(pool, 1)
    entry, _ = entry_of(file, key(1))
    assert os.pread(file, 2, entry + 4) == bytes([layout.READY, layout.MAX_USES * layout.USE])
    assert pool.tables.check() == []
    pool.tables.close()


def test_a_tier_wants_only_what_was_reused_often_enough_and_the_next_sidecar_knows(file: int) -> None:
    pool = Pool(file, min_reuse=2)
    pool.tables.set_spills(True)
    pool.save(*range(4))
    use(pool, 1, 2)
    assert pool.tables.spill(1, 77) is None
    use(pool, 2)
    assert pool.stat("dirty") == 1
    found = pool.tables.spill(1, 77)
    assert found is not None
    assert found[0] == key(2)
    pool.tables.release(found[5])  # which was no use of it
    pool.tables.close()
    tables = adopt(file, min_reuse=2)
    tables.repair([])
    assert tables.check() == []
    assert tables.stats()["dirty"] == 1
    tables.release(tables.acquire(0, 1, 1, NIL, key(1))[3])
    assert tables.stats()["dirty"] == 2
    tables.close()
    tables = adopt(file, min_reuse=3)
    tables.repair([])
    assert tables.stats()["dirty"] == 0
    tables.close()


def test_blocks_of_low_priority_have_an_eighth_of_a_full_pool(file: int) -> None:
    pool = Pool(file)
    pool.save(*range(10))
    pool.save(*range(100, 106), low=True)
    assert pool.stat("blocks") == 16
    pool.save(*range(10, 14))
    assert pool.ready(*range(14), *range(100, 106)) == [*range(14), 104, 105], "they went, down to an eighth"
    pool.save(14, 15)
    pool.save(106, low=True)
    assert pool.ready(*range(16), *range(100, 107)) == [*range(2, 16), 105, 106]
    use(pool, 105)
    pool.save(16, 107, low=True)
    assert pool.ready(*range(17), *range(104, 108)) == [*range(3, 17), 105, 107]
    pool.tables.close()
    adopted = adopt(file)
    adopted.repair([])
    assert adopted.check() == []
    adopted.close()


@pytest.mark.parametrize("keeps_reused", [False, True])
def test_blocks_of_low_priority_go_to_no_tier_until_they_are_used(keeps_reused: bool) -> None:
    pool = Pool(keeps_reused=keeps_reused)
    pool.tables.set_spills(True)
    pool.save(*range(3), low=True)
    assert (pool.stat("dirty"), pool.tables.spill(1, 77)) == (0, None)
    use(pool, 1)
    found = pool.tables.spill(1, 77)
    assert found is not None
    assert (pool.stat("dirty"), found[0]) == (1, key(1))
    pool.tables.release(found[5])
    pool.save(*range(10, 25))
    assert pool.ready(0, 1, 2) == [1], "and before all that a tier wants"
    assert pool.tables.check() == []
    pool.tables.close()


def test_what_the_tier_does_not_want_goes_before_what_it_wants() -> None:
    pool = Pool(min_reuse=1)
    pool.tables.set_spills(True)
    pool.save(*range(16))
    use(pool, 0, 1)
    use(pool, *range(2, 16))
    pool.tables.set_clean(key(15), 16)
    pool.save(20, 21)
    assert pool.ready(0, 15, 20, 21) == [0, 21]
    assert pool.stat("evicted_dirty") == 0
    assert pool.tables.check() == []
    pool.tables.close()


def test_an_idle_block_that_becomes_clean_is_the_newest(pool: Pool) -> None:
    pool.save(*range(16))
    assert pool.tables.set_clean(key(0), 1)
    assert not pool.tables.set_clean(key(0), 1)
    pool.save(20)
    assert pool.ready(0, 1, 2) == [0, 2]
