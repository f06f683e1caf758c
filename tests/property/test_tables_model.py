"""Tables against a model of dicts: every answer, every eviction and every adoption is predicted exactly.

The model knows nothing of entries, tombstones, lists or chains. It knows blocks, who holds what, and one number per use. Where the
tables are free to choose (which free slot), it takes their choice and checks that it was one. Records are numbered as in a pile from
which the top one is taken, because the order in which a whole tag is given back orders the blocks' last use.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

from hostkv.cext import Tables, View
from hostkv.schemas import layout
from hostkv.schemas.errors import Status
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

PAGE = 4096
EXTENT_PAGES, POOL_PAGES = 16, 54  # three extents and a short one of six pages
MAX_BLOCKS, MAX_SHARDS, MAX_PINS, MAX_MEMBERS = 16, 12, 12, 4
GEOMETRY = {
    "pool_bytes": POOL_PAGES * PAGE,
    "extent_bytes": EXTENT_PAGES * PAGE,
    "max_blocks": MAX_BLOCKS,
    "max_shards": MAX_SHARDS,
    "max_pins": MAX_PINS,
    "max_members": MAX_MEMBERS,
    "max_namespaces": 4,
}
BOOT, EPOCH = b"b" * 16, b"e" * 16
NAMESPACES = [(2 * PAGE, 1, 2), (5 * PAGE // 2, 2, 5), (PAGE // 2 + 64, 3, 2), (8 * PAGE, 1, 8)]  # shard bytes, shards, pages of a slot
SESSIONS = [1, 3]
# Searches start in a few places only, at the end of the table among them, so that they cross and wrap.
KEYS = [struct.pack("<Q", (0, 1, 31, 30)[n % 4] + (n % 3 << 40)) + bytes([n]) * 24 for n in range(32)]  # no two are one ghost


@dataclass
class Block:
    namespace: int
    page: int
    generation: int
    used: int = 0
    doomed: bool = False
    done: set[int] = field(default_factory=set)
    checksum: int = 0
    writers: dict[int, int] = field(default_factory=dict)  # shard -> record
    pins: set[int] = field(default_factory=set)  # records
    uses: int = 1

    @property
    def whole(self) -> bool:
        return len(self.done) == NAMESPACES[self.namespace][1]

    @property
    def idle(self) -> bool:
        return not self.writers and not self.pins

    @property
    def pages(self) -> int:
        return NAMESPACES[self.namespace][2]

    @property
    def extent(self) -> int:
        return self.page // EXTENT_PAGES


class Model:
    def __init__(self, keeps_reused: bool) -> None:
        self.keeps_reused = keeps_reused
        self.forget()
        self.blocks: dict[bytes, Block] = {}
        self.members: dict[int, int] = {}  # member -> session
        self.shards: dict[int, tuple[int, int, bytes, int]] = {}  # record -> member, tag, key, shard
        self.pins: dict[int, tuple[int, int, bytes]] = {}  # record -> session, tag, key
        self.chains: dict[tuple[int, int], list[int]] = {}  # newest record first
        self.free_shards = list(range(MAX_SHARDS))
        self.free_pins = list(range(MAX_PINS))
        self.last_used: dict[int, int] = {}  # of extents in use
        self.tick = 0
        self.generation = 0

    def touch(self, block: Block) -> None:
        self.tick += 1
        block.used = self.last_used[block.extent] = self.tick

    def erase(self, key: bytes) -> None:
        extent = self.blocks.pop(key).extent
        if not any(block.extent == extent for block in self.blocks.values()):
            del self.last_used[extent]

    def forget(self) -> None:
        """What is not in the tables."""
        self.ghosts: dict[bytes, tuple[int, bool]] = {}  # which eviction it was, and whether the block had been used again
        self.evicted, self.room, self.reused_go = 0, 0.5, 0.5

    def is_reused(self, block: Block) -> bool:
        return block.uses > self.keeps_reused

    def evict(self, key: bytes) -> None:
        reused = self.is_reused(self.blocks[key])
        self.evicted += 1
        self.ghosts[key] = self.evicted, reused
        self.reused_go += (reused - self.reused_go) / len(self.blocks)
        self.erase(key)

    def comes_back(self, key: bytes) -> bool:
        eviction, reused = self.ghosts.get(key, (0, False))
        if not self.keeps_reused or not eviction or self.evicted - eviction >= len(self.blocks):
            return False
        self.room += 4 / len(self.blocks) * (self.reused_go - reused)
        self.room = min(max(self.room, 0.25), 1)
        return True

    def settle(self, key: bytes) -> None:
        block = self.blocks[key]
        if block.idle:
            if block.doomed or not block.done:
                self.erase(key)
            else:
                self.touch(block)

    # -- room

    def may_take(self, member: int, namespace: int) -> int:
        """A member's first shard always, then up to half of the records and half of the pool."""
        held = [NAMESPACES[self.blocks[key].namespace] for holder, _, key, _ in self.shards.values() if holder == member]
        shares = sum(pages * PAGE // shards for _, shards, pages in (*held, NAMESPACES[namespace]))
        if held and (len(held) + 1 > MAX_SHARDS // 2 or shares > POOL_PAGES * PAGE // 2):
            return Status.THROTTLED
        return Status.OK if self.free_shards else Status.FULL

    def slots_in(self, extent: int, pages: int) -> int:
        return min(EXTENT_PAGES, POOL_PAGES - extent * EXTENT_PAGES) // pages

    def has_room(self, pages: int) -> bool:
        for extent in range(4):
            inside = [block for block in self.blocks.values() if block.extent == extent]
            if self.slots_in(extent, pages) > len(inside) and all(block.pages == pages for block in inside):
                return True
        return False

    def oldest(self, pages: int) -> bytes | None:
        """Of this size: of those that were used again (or not of low priority) where the others fit into their room."""
        own = {key: block for key, block in self.blocks.items() if block.pages == pages}
        fits = sum(not self.is_reused(block) for block in own.values()) < (self.room if self.keeps_reused else 0.125) * len(own)
        idle = [(self.is_reused(block) != fits, block.used, key) for key, block in own.items() if block.idle]
        return min(idle)[2] if idle else None

    def oldest_of_all(self) -> bytes | None:
        keys = [key for key in map(self.oldest, {pages for _, _, pages in NAMESPACES}) if key is not None]
        return min(keys, key=lambda key: self.blocks[key].used, default=None)

    def make_room(self, pages: int) -> bool:
        coldest = None
        for extent, last_used in self.last_used.items():
            inside = [block for block in self.blocks.values() if block.extent == extent]
            usable = all(block.idle and block.pages != pages for block in inside) and self.slots_in(extent, pages) > 0
            if usable and (coldest is None or last_used < self.last_used[coldest]):
                coldest = extent
        key = self.oldest(pages)
        if coldest is not None and (key is None or self.last_used[coldest] < self.blocks[key].used):
            inside = [(block.page, each) for each, block in self.blocks.items() if block.extent == coldest]
            for _, each in sorted(inside):
                self.evict(each)
            return True
        if key is None:
            return False
        self.evict(key)
        return True

    def find_slot(self, pages: int) -> bool:
        while not self.has_room(pages):
            if not self.make_room(pages):
                return False
        if len(self.blocks) == MAX_BLOCKS:
            key = self.oldest_of_all()
            if key is None:
                return False
            self.evict(key)
        return True

    def check_slot(self, page: int, pages: int) -> None:
        extent, within = divmod(page, EXTENT_PAGES)
        assert within % pages == 0
        assert within // pages < self.slots_in(extent, pages)
        for block in self.blocks.values():
            assert block.page != page
            assert block.extent != extent or block.pages == pages

    # -- verbs

    def reserve(
        self, namespace: int, member: int, tag: int, key: bytes, shard: int, page: int, low_priority: bool = False
    ) -> tuple[int, int, int]:
        block = self.blocks.get(key)
        if block is not None:
            if block.namespace != namespace or block.doomed:
                return Status.BUSY, 0, 0
            if block.whole or shard in block.done:
                return Status.EXISTS, 0, 0
            if shard in block.writers:
                return Status.BUSY, 0, 0
        allowed = self.may_take(member, namespace)
        if allowed != Status.OK:
            return allowed, 0, 0
        if block is None:
            pages = NAMESPACES[namespace][2]
            if not self.find_slot(pages):
                return Status.FULL, 0, 0
            self.check_slot(page, pages)
            self.generation += 1
            block = self.blocks[key] = Block(namespace, page, self.generation, uses=(not low_priority) + self.comes_back(key))
        self.touch(block)
        record = self.free_shards.pop(0)
        self.shards[record] = (member, tag, key, shard)
        block.writers[shard] = record
        return Status.OK, block.page, block.generation

    def give_back(self, record: int) -> bytes:
        _, _, key, shard = self.shards.pop(record)
        del self.blocks[key].writers[shard]
        self.free_shards.insert(0, record)
        return key

    def commit(self, member: int, tag: int, key: bytes, shard: int, generation: int, checksum: int) -> int:
        block = self.blocks.get(key)
        record = block.writers.get(shard) if block is not None and block.generation == generation else None
        if block is None or record is None or self.shards[record][:2] != (member, tag):
            return Status.NOT_HELD
        block.done.add(shard)
        block.checksum ^= checksum
        self.give_back(record)
        self.settle(key)
        return Status.OK

    def abort(self, member: int, tag: int | None) -> int:
        records = [r for r, held in sorted(self.shards.items()) if held[0] == member and tag in (None, held[1])]
        for record in records:
            self.settle(self.give_back(record))
        return len(records)

    def acquire(self, namespace: int, session: int, tag: int, key: bytes) -> tuple[int, int, int]:
        block = self.blocks.get(key)
        if block is None or not block.whole or block.doomed or block.namespace != namespace:
            return Status.MISS, 0, 0
        chain = self.chains.get((session, tag), [])
        if not block.pins.intersection(chain):
            if not self.free_pins or sum(holder == session for holder, _, _ in self.pins.values()) >= MAX_PINS // 2:
                return Status.FULL, 0, 0
            record = self.free_pins.pop(0)
            self.pins[record] = (session, tag, key)
            self.chains[session, tag] = [record, *chain]
            block.pins.add(record)
            block.uses += 1
            self.touch(block)
        return Status.OK, block.page, block.generation

    def release(self, session: int, tag: int) -> int:
        chain = self.chains.pop((session, tag))
        for record in chain:
            _, _, key = self.pins.pop(record)
            self.free_pins.insert(0, record)
            self.blocks[key].pins.remove(record)
            self.settle(key)
        return len(chain)

    def clear(self, namespace: int) -> int:
        hit = [key for key, block in self.blocks.items() if block.namespace == namespace and not block.doomed]
        for key in hit:
            self.doom(key)
        return len(hit)

    def doom(self, key: bytes) -> None:
        if self.blocks[key].idle:
            self.erase(key)
        else:
            self.blocks[key].doomed = True
            self.blocks[key].uses = 0

    def discard(self, namespace: int, key: bytes, generation: int) -> int:
        block = self.blocks.get(key)
        if block is None or not block.whole or block.doomed or (block.namespace, block.generation) != (namespace, generation):
            return 0
        self.doom(key)
        return 1

    def adopt(self, dead: list[int]) -> None:
        for member in dead:
            del self.members[member]
        for record, (member, _, key, shard) in list(self.shards.items()):
            if member not in self.members:
                del self.shards[record], self.blocks[key].writers[shard]
        for (session, tag), chain in list(self.chains.items()):
            if session in self.members.values():
                chain.sort(reverse=True)
                continue
            del self.chains[session, tag]
            for record in chain:
                self.blocks[self.pins.pop(record)[2]].pins.remove(record)
        self.free_shards = [record for record in range(MAX_SHARDS) if record not in self.shards]
        self.free_pins = [record for record in range(MAX_PINS) if record not in self.pins]
        for key, block in list(self.blocks.items()):
            if block.idle and (block.doomed or not block.done):
                del self.blocks[key]
        self.forget()
        self.last_used = {}
        for block in self.blocks.values():
            self.last_used[block.extent] = max(block.used, self.last_used.get(block.extent, 0))


batches = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 2)), min_size=1, max_size=6)
key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)
tags = st.integers(1, 2)
checksums = st.integers(0, (1 << 64) - 1)
namespaces = st.integers(0, len(NAMESPACES) - 1)


class TablesMachine(RuleBasedStateMachine):
    keeps_reused = True

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.memfd_create("tables")
        self.size = Tables.bytes_needed(**GEOMETRY)
        os.ftruncate(self.fd, self.size)
        self.tables = Tables.create(
            self.fd, **GEOMETRY, boot_id=BOOT, pool_epoch=EPOCH, instance_id=b"i" * 16, verify=True, keeps_reused=self.keeps_reused
        )
        self.view = View(self.fd, self.size)
        self.model = Model(self.keeps_reused)
        self.clients = 0
        for n, (shard_bytes, shards, _) in enumerate(NAMESPACES):
            assert self.tables.namespace_add(bytes([n]) * 32, shard_bytes, shards, str(n)) == n
        for session in SESSIONS:
            self.member_add(session)

    def teardown(self) -> None:
        self.view.close()
        self.tables.close()
        os.close(self.fd)

    @rule(session=st.sampled_from(SESSIONS))
    def join(self, session: int) -> None:
        self.member_add(session)

    def member_add(self, session: int) -> None:
        self.clients += 1
        member = self.tables.member_add(self.clients.to_bytes(16, "little"), bytes([session]) * 16, b"l" * 16, session, 1)
        if len(self.model.members) == MAX_MEMBERS:
            assert member == -1
        else:
            assert member == min(set(range(MAX_MEMBERS)) - set(self.model.members))
            self.model.members[member] = session

    @precondition(lambda self: self.model.members)
    @rule(data=st.data())
    def member_remove(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.model.members)))
        session = self.model.members.pop(member)
        assert self.tables.member_remove(member) == self.model.abort(member, None)
        if session not in self.model.members.values():  # what the sidecar does when the last member of a session is gone
            for chain in [chain for chain in self.model.chains if chain[0] == session]:
                self.release_chain(*chain)

    @precondition(lambda self: self.model.members)
    @rule(data=st.data(), namespace=namespaces, tag=tags, batch=batches, low=st.booleans())
    def reserve(self, data: st.DataObject, namespace: int, tag: int, batch: list[tuple[bytes, int]], low: bool) -> None:
        member = data.draw(st.sampled_from(sorted(self.model.members)))
        batch = [(key, shard % NAMESPACES[namespace][1]) for key, shard in batch]
        keys, shards = b"".join(key for key, _ in batch), struct.pack(f"<{len(batch)}H", *(shard for _, shard in batch))
        statuses, pages, generations = self.tables.reserve(namespace, member, tag, keys, shards, low)
        for n, (key, shard) in enumerate(batch):
            page, generation = struct.unpack_from("<I", pages, 4 * n)[0], struct.unpack_from("<Q", generations, 8 * n)[0]
            assert (statuses[n], page, generation) == self.model.reserve(namespace, member, tag, key, shard, page, low)

    @precondition(lambda self: self.model.members)
    @rule(
        data=st.data(),
        namespace=namespaces,
        first=st.integers(0, len(KEYS) - 1),
        count=st.integers(1, 12),
        step=st.sampled_from([1, 4]),
        low=st.booleans(),
    )
    def save(self, data: st.DataObject, namespace: int, first: int, count: int, step: int, low: bool) -> None:
        """Whole blocks one after the other, as an engine saves a prompt; with step 4 of keys whose searches start together."""
        member = data.draw(st.sampled_from(sorted(self.model.members)))
        for n in range(count):
            key = KEYS[(first + n * step) % len(KEYS)]
            for shard in range(NAMESPACES[namespace][1]):
                packed = struct.pack("<H", shard)
                statuses, pages, generations = self.tables.reserve(namespace, member, 9, key, packed, low)
                (page,) = struct.unpack("<I", pages)
                (generation,) = struct.unpack("<Q", generations)
                assert (statuses[0], page, generation) == self.model.reserve(namespace, member, 9, key, shard, page, low)
                if statuses[0] == Status.OK:
                    status = self.tables.commit(member, 9, key, packed, generations, struct.pack("<Q", 5 + n))[0]
                    assert status == self.model.commit(member, 9, key, shard, generation, 5 + n) == Status.OK

    @precondition(lambda self: self.model.shards)
    @rule(data=st.data(), count=st.integers(1, 8))
    def commit(self, data: st.DataObject, count: int) -> None:
        held = data.draw(st.lists(st.sampled_from(sorted(self.model.shards.values())), min_size=1, max_size=count, unique=True))
        member, tag = held[0][:2]
        # those of other members are not held
        items = [(key, shard, self.model.blocks[key].generation, data.draw(checksums)) for _, _, key, shard in held]
        statuses = self.tables.commit(
            member,
            tag,
            b"".join(key for key, *_ in items),
            struct.pack(f"<{len(items)}H", *(shard for _, shard, *_ in items)),
            struct.pack(f"<{len(items)}Q", *(generation for *_, generation, _ in items)),
            struct.pack(f"<{len(items)}Q", *(checksum for *_, checksum in items)),
        )
        assert list(statuses) == [self.model.commit(member, tag, *item) for item in items]

    @precondition(lambda self: self.model.members)
    @rule(data=st.data(), tag=tags, key=st.sampled_from(KEYS), shard=st.integers(0, 70), generation=st.integers(0, 60))
    def commit_anything(self, data: st.DataObject, tag: int, key: bytes, shard: int, generation: int) -> None:
        member = data.draw(st.sampled_from(sorted(self.model.members)))
        statuses = self.tables.commit(member, tag, key, struct.pack("<H", shard), struct.pack("<Q", generation), b"checksum")
        assert statuses[0] == self.model.commit(member, tag, key, shard, generation, int.from_bytes(b"checksum", "little"))

    @precondition(lambda self: self.model.members)
    @rule(data=st.data(), tag=tags)
    def abort(self, data: st.DataObject, tag: int) -> None:
        member = data.draw(st.sampled_from(sorted(self.model.members)))
        assert self.tables.abort(member, struct.pack("<Q", tag)) == self.model.abort(member, tag)

    @rule(session=st.sampled_from(SESSIONS), namespace=namespaces, tag=tags, keys=key_lists, known=st.booleans(), data=st.data())
    def acquire(self, session: int, namespace: int, tag: int, keys: list[bytes], known: bool, data: st.DataObject) -> None:
        ready = sorted(key for key, block in self.model.blocks.items() if block.whole)
        if known and ready:
            keys = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=6))
            namespace = self.model.blocks[keys[0]].namespace
        chain = self.model.chains.get((session, tag), [layout.NIL])
        statuses, pages, generations, head = self.tables.acquire(namespace, session, tag, chain[0], b"".join(keys))
        for record in self.model.chains.get((session, tag), []):
            self.model.touch(self.model.blocks[self.model.pins[record][2]])
        for n, key in enumerate(keys):
            found = (statuses[n], *struct.unpack_from("<I", pages, 4 * n), *struct.unpack_from("<Q", generations, 8 * n))
            assert found == self.model.acquire(namespace, session, tag, key)
        assert head == self.model.chains.get((session, tag), [layout.NIL])[0]

    def release_chain(self, session: int, tag: int) -> None:
        head = self.model.chains[session, tag][0]
        assert self.tables.release(head) == self.model.release(session, tag)

    @precondition(lambda self: self.model.chains)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_chain(*data.draw(st.sampled_from(sorted(self.model.chains))))

    @rule(namespace=namespaces)
    def clear(self, namespace: int) -> None:
        assert self.tables.clear(namespace) == self.model.clear(namespace)

    @precondition(lambda self: self.model.blocks)
    @rule(data=st.data(), namespace=st.none() | namespaces, older=st.sampled_from([0, 0, 1]))
    def discard(self, data: st.DataObject, namespace: int | None, older: int) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.model.blocks)), min_size=1, max_size=4))
        namespace = self.model.blocks[keys[0]].namespace if namespace is None else namespace
        generations = [self.model.blocks[key].generation - older for key in keys]
        discarded = self.tables.discard(namespace, b"".join(keys), struct.pack(f"<{len(keys)}Q", *generations))
        assert discarded == sum(self.model.discard(namespace, *each) for each in zip(keys, generations, strict=True))

    @rule(data=st.data(), in_place=st.booleans())
    def writer_dies_and_another_adopts(self, data: st.DataObject, in_place: bool) -> None:
        """In place, or from a copy in which all that is derived was overwritten."""
        dead = data.draw(st.lists(st.sampled_from(sorted(self.model.members)), unique=True)) if self.model.members else []
        if not in_place:
            fd = os.memfd_create("tables")
            os.pwrite(fd, spoil_derived(bytearray(os.pread(self.fd, self.size, 0))), 0)
            self.view.close()
            os.close(self.fd)
            self.fd = fd
            self.view = View(fd, self.size)
        self.tables.close()
        self.tables = Tables.adopt(self.fd, **GEOMETRY, boot_id=BOOT, instance_id=b"j" * 16, verify=True, keeps_reused=self.keeps_reused)
        chains = self.tables.repair(dead)
        self.model.adopt(dead)
        assert (self.tables.stats()["bad_blocks"], self.tables.stats()["bad_records"]) == (0, 0)
        assert sorted(chains) == sorted((*chain, records[0]) for chain, records in self.model.chains.items())

    @invariant()
    def all_invariants_hold(self) -> None:
        assert self.tables.check() == []

    @invariant()
    def counters_are_those_of_the_model(self) -> None:
        blocks = self.model.blocks.values()
        stats = self.tables.stats()
        assert stats["blocks"] == len(blocks)
        assert stats["ready"] == sum(block.whole for block in blocks)
        assert stats["doomed"] == sum(block.doomed for block in blocks)
        assert stats["pinned_blocks"] == sum(bool(block.pins) for block in blocks)
        assert stats["pins"] == len(self.model.pins)
        assert stats["shards_in_flight"] == len(self.model.shards)
        assert stats["members"] == len(self.model.members)
        assert stats["used_bytes"] == sum(block.pages * PAGE for block in blocks)
        assert stats["free_extents"] == 4 - len(self.model.last_used)

    @invariant()
    def readers_see_exactly_the_ready_blocks(self) -> None:
        for namespace in range(len(NAMESPACES)):
            expected = [
                (block := self.model.blocks.get(key)) is not None and block.whole and not block.doomed and block.namespace == namespace
                for key in KEYS
            ]
            joined = b"".join(KEYS)
            assert list(self.view.lookup(namespace, joined)) == expected
            assert [status == Status.OK for status in self.tables.lookup(namespace, joined)] == expected
            places = [
                (block.page, block.generation) if hit else (0, 0)
                for hit, block in zip(expected, map(self.model.blocks.get, KEYS), strict=True)
            ]
            statuses, pages, generations = self.view.locate(namespace, joined)
            assert [status == Status.OK for status in statuses] == expected
            assert list(zip(struct.unpack(f"<{len(KEYS)}I", pages), struct.unpack(f"<{len(KEYS)}Q", generations), strict=True)) == places
            assert self.view.lookup_prefix(namespace, joined) == (expected + [False]).index(False)
            assert self.view.lookup_reverse(namespace, joined) == max((n for n, hit in enumerate(expected) if hit), default=-1)
        for key, block in self.model.blocks.items():
            handle = struct.pack("<I", block.page), struct.pack("<Q", block.generation)
            assert self.view.check(key, *handle)[0] == block.whole
            assert self.view.check(key, *handle, struct.pack("<Q", block.checksum))[0] == block.whole
            assert self.view.check(key, *handle, struct.pack("<Q", block.checksum ^ 1))[0] == 2 * block.whole
            assert self.view.check(key, handle[0], struct.pack("<Q", block.generation + 1)) == b"\0"


def spoil_derived(data: bytearray) -> bytearray:
    """Overwrites everything that layout.h calls derived."""
    header = layout.HEADER.unpack_from(data)
    capacity = header[17]
    aux, shards, pins, _, namespaces_offset, extents, slots = header[24:31]
    for n in range(capacity):
        at = aux + 32 * n
        data[at : at + 8] = b"\xa5" * 8
        data[at + 24 : at + 32] = b"\xa5" * 8
    for n in range(MAX_SHARDS):
        data[shards + 64 * n + 12 : shards + 64 * n + 16] = b"\xa5" * 4
    for n in range(MAX_PINS):
        data[pins + 64 * n + 56 : pins + 64 * n + 64] = b"\xa5" * 8
    for n in range(len(NAMESPACES)):
        data[namespaces_offset + 128 * n + 24 : namespaces_offset + 128 * n + 32] = b"\xa5" * 8
    for n in range(4):
        data[extents + 64 * n + 8 : extents + 64 * n + 64] = b"\xa5" * 56
    data[slots : slots + 4 * POOL_PAGES] = b"\xa5" * (4 * POOL_PAGES)
    return data


class LruMachine(TablesMachine):
    keeps_reused = False


TestTables, TestTablesWithLru = TablesMachine.TestCase, LruMachine.TestCase
TestTables.settings = TestTablesWithLru.settings = settings(
    max_examples=75, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
