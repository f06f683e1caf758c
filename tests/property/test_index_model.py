"""The index against a model of dicts: what is found, what may be evicted, what nobody else may touch, and what a restart finds.

The model knows blocks, who uses them and what the disk holds; nothing of entries, tables, lists or hands. Where the index is free to choose
(slot, victim), the model takes its choice and checks that it was allowed. Every record that a write left stays on the model's disk, so a
restart recovers from all that a crash may leave.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from hostkv.cext import Index, xxh3_64
from hostkv.schemas import layout
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

PAGE = 4096
SLAB_PAGES = 6
SIZES = [1, 2, 5]  # pages of a slot: six, three and one of them in a slab
NAMESPACES = {1: 1, 2: 2, 3: 5, 4: 1}  # of the tier -> pages of a slot
LISTED = {10 + number: (number, pages * PAGE) for number, pages in NAMESPACES.items()}
# Searches start in a few places only, the end of the table among them, so that they cross and wrap.
KEYS = [struct.pack("<I", (0, 1, 63, 62, 15)[n % 5]) + bytes([n]) * 28 for n in range(24)]


@dataclass
class Block:
    key: bytes
    namespace: int
    place: tuple[int, int, int]  # directory, slab, slot
    sequence: int
    checksum: int = 0
    writing: bool = True
    readers: int = 0
    read: bool = False  # ever
    hot: bool = False  # read since something was evicted for its slot size in its directory

    @property
    def busy(self) -> bool:
        return self.writing or self.readers > 0

    @property
    def pages(self) -> int:
        return NAMESPACES[self.namespace]

    @property
    def slab(self) -> tuple[int, int]:
        return self.place[:2]


@dataclass
class Model:
    max_blocks: int
    blocks: dict[bytes, Block] = field(default_factory=dict)  # by key: those that are found, or are being written
    used: dict[int, Block] = field(default_factory=dict)  # by entry: those that are written or read, found or not
    slabs: dict[int, int] = field(default_factory=dict)  # directory -> how many
    enabled: set[int] = field(default_factory=set)
    records: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)  # slab -> slot -> record
    sequence: int = 0

    def all(self) -> list[Block]:
        return list({id(block): block for block in [*self.blocks.values(), *self.used.values()]}.values())

    def within(self, directory: int) -> list[Block]:
        return [block for block in self.all() if block.place[0] == directory]

    def has_room(self, directory: int, pages: int) -> bool:
        for slab in range(self.slabs[directory]):
            there = [block for block in self.within(directory) if block.slab == (directory, slab)]
            if not there or (there[0].pages == pages and len(there) < SLAB_PAGES // pages):
                return True
        return False

    def evictable(self, directory: int, pages: int) -> tuple[list[Block], list[list[Block]]]:
        """Single blocks of that size, whole slabs of others."""
        there = self.within(directory)
        slabs = [[block for block in there if block.slab == slab] for slab in {block.slab for block in there}]
        return [block for block in there if block.pages == pages and not block.busy], [
            slab for slab in slabs if slab[0].pages != pages and not any(block.busy for block in slab)
        ]

    def share(self, directory: int) -> float:
        return sum(block.pages for block in self.within(directory)) / self.slabs[directory]


class IndexMachine(RuleBasedStateMachine):
    @initialize(max_blocks=st.sampled_from([5, 12, 40]))
    def start(self, max_blocks: int) -> None:
        self.index = Index(None, max_blocks, SLAB_PAGES * PAGE)
        self.model = Model(max_blocks)
        self.made = 0

    # ---- directories

    @precondition(lambda self: len(self.model.slabs) < 3)
    @rule(slabs=st.integers(1, 3), on=st.sampled_from([True, True, False]))
    def add_directory(self, slabs: int, on: bool) -> None:
        directory = self.index.add_directory(slabs)
        assert directory == self.made
        self.made += 1
        self.model.slabs[directory] = slabs
        if on:
            self.enable(directory, True)

    def enable(self, directory: int, on: bool) -> None:
        self.index.enable(directory, on)
        (self.model.enabled.add if on else self.model.enabled.discard)(directory)

    @precondition(lambda self: self.model.slabs)
    @rule(data=st.data(), on=st.booleans())
    def switch(self, data: st.DataObject, on: bool) -> None:
        self.enable(data.draw(st.sampled_from(sorted(self.model.slabs))), on)

    @precondition(lambda self: self.model.slabs)
    @rule(data=st.data(), really=st.sampled_from([False, False, True]))
    def drop(self, data: st.DataObject, really: bool) -> None:
        directory = data.draw(st.sampled_from(sorted(self.model.slabs)))
        if not really:
            return
        lost = [block for block in self.model.blocks.values() if block.place[0] == directory]
        assert self.index.drop(directory) == sum(not block.writing for block in lost)
        for block in lost:
            del self.model.blocks[block.key]
        del self.model.slabs[directory]
        self.model.enabled.discard(directory)

    # ---- blocks

    @rule(key=st.sampled_from(KEYS), namespace=st.sampled_from(sorted(NAMESPACES)), whole=st.booleans())
    def place(self, key: bytes, namespace: int, whole: bool) -> None:
        model, pages = self.model, NAMESPACES[namespace]
        room = [d for d in model.enabled if model.has_room(d, pages)] if len(model.all()) < model.max_blocks else []
        victims = {d: model.evictable(d, pages) for d in model.enabled}
        placed = self.index.place(key, namespace, pages * PAGE)
        if key in model.blocks or not (room or any(single or slabs for single, slabs in victims.values())):
            assert placed is None
            return
        assert placed is not None
        entry, directory, slab, slot, sequence = placed
        gone = [block for block in model.blocks.values() if not block.writing and not self.found(block)]
        if room:
            assert not gone
            assert directory in room
            assert model.share(directory) == min(model.share(d) for d in room)
        else:
            single, slabs = victims[directory]
            if len(gone) == 1 and gone[0] in single:
                if any(not block.read for block in single):
                    assert not gone[0].hot
                for block in single:
                    block.hot = False
            else:
                assert sorted(block.key for block in gone) in [sorted(block.key for block in each) for each in slabs]
        for block in gone:
            del model.blocks[block.key]
        block = Block(key, namespace, (directory, slab, slot), sequence)
        assert directory in model.enabled
        assert slab < model.slabs[directory]
        assert slot < SLAB_PAGES // pages
        assert all(other.place != block.place for other in model.all())
        assert all(other.pages == pages for other in model.all() if other.slab == block.slab)
        assert sequence == model.sequence + 1
        assert entry not in model.used
        model.sequence = sequence
        model.blocks[key] = model.used[entry] = block
        if whole:
            self.settle_one(entry, True)

    def found(self, block: Block) -> bool:
        return self.index.has(block.key, block.namespace) == b"\1"

    def entries(self, writing: bool) -> list[int]:
        return sorted(entry for entry, block in self.model.used.items() if block.writing == writing)

    @precondition(lambda self: self.entries(True))
    @rule(data=st.data(), good=st.sampled_from([True, True, False]))
    def settle(self, data: st.DataObject, good: bool) -> None:
        self.settle_one(data.draw(st.sampled_from(self.entries(True))), good)

    def settle_one(self, entry: int, good: bool) -> None:
        block = self.model.used.pop(entry)
        block.writing = False
        block.checksum = block.sequence * 0x0123456789ABCD
        self.index.settle(entry, block.checksum if good else None)
        if good:
            directory, slab, slot = block.place
            body = layout.RECORD.pack(block.key, block.checksum, block.sequence, 10 + block.namespace, block.pages, 0)[:-8]
            self.model.records.setdefault((directory, slab), {})[slot] = body + struct.pack("<Q", xxh3_64(body, slab << 32 | slot))
        elif self.model.blocks.get(block.key) is block:
            del self.model.blocks[block.key]

    @rule(key=st.sampled_from(KEYS), data=st.data())
    def open(self, key: bytes, data: st.DataObject) -> None:
        ready = sorted(key for key, block in self.model.blocks.items() if not block.writing)
        key = data.draw(st.sampled_from([key, *ready]))
        block = self.model.blocks.get(key)
        namespace = data.draw(st.sampled_from([*[block.namespace] * 4, 1])) if block else 1
        opened = self.index.open(key, namespace)
        if block is None or block.writing or block.namespace != namespace:
            assert opened is None
            return
        assert opened is not None
        assert opened[1:] == (*block.place, block.checksum)
        assert self.model.used.setdefault(opened[0], block) is block
        block.readers += 1
        block.read = block.hot = True

    @precondition(lambda self: self.entries(False))
    @rule(data=st.data(), keep=st.sampled_from([True, True, False]))
    def close(self, data: st.DataObject, keep: bool) -> None:
        entry = data.draw(st.sampled_from(self.entries(False)))
        block = self.model.used[entry]
        self.index.close(entry, keep)
        block.readers -= 1
        if block.readers == 0:
            del self.model.used[entry]
        if not keep and self.model.blocks.get(block.key) is block:
            del self.model.blocks[block.key]

    @rule(key=st.sampled_from(KEYS), namespace=st.sampled_from(sorted(NAMESPACES)))
    def remove(self, key: bytes, namespace: int) -> None:
        there = key in self.model.blocks and self.model.blocks[key].namespace == namespace
        assert self.index.remove(key, namespace) == there
        if there:
            del self.model.blocks[key]

    @rule(namespace=st.sampled_from(sorted(NAMESPACES)))
    def remove_namespace(self, namespace: int) -> None:
        gone = [key for key, block in self.model.blocks.items() if block.namespace == namespace]
        assert self.index.remove_namespace(namespace) == len(gone)
        for key in gone:
            del self.model.blocks[key]

    # ---- the sidecar is killed and starts again

    def valid(self, directory: int, slab: int) -> dict[bytes, tuple[int, int, int, int]]:
        """What the records of a slab say, by the rules of layout.h: key -> (namespace, slot, checksum, sequence)."""
        read = {slot: layout.RECORD.unpack(record) for slot, record in self.model.records.get((directory, slab), {}).items()}
        newest = max(read.values(), key=lambda record: record[2], default=None)
        return {
            key: (number - 10, slot, checksum, sequence)
            for slot, (key, checksum, sequence, number, pages, _) in read.items()
            if newest is not None and pages == newest[4] and (slot + 1) * pages <= SLAB_PAGES
        }

    @rule(cut=st.booleans())
    def restart(self, cut: bool) -> None:
        old = self.model
        before = {key for key, block in old.blocks.items() if not block.writing}
        self.start(old.max_blocks)
        for directory, slabs in sorted(old.slabs.items()):
            number = self.index.add_directory(slabs)
            self.made = number + 1
            self.model.slabs[number] = slabs
            for slab in range(slabs):
                records = old.records.get((directory, slab), {})
                if records:
                    self.model.records[number, slab] = records
                data = b"".join(records.get(slot, bytes(64)) for slot in range(SLAB_PAGES)) + bytes(63 * cut)
                valid = self.valid(number, slab)
                new = {key: each for key, each in valid.items() if key not in self.model.blocks}
                loaded = self.index.load(number, slab, data, LISTED)
                assert loaded == min(len(new), old.max_blocks - len(self.model.blocks))
                self.model.sequence = max([self.model.sequence, *(layout.RECORD.unpack(each)[2] for each in records.values())])
                for key, (namespace, slot, checksum, sequence) in new.items():
                    if self.index.has(key, namespace) == b"\1":
                        self.model.blocks[key] = Block(key, namespace, (number, slab, slot), sequence, checksum, writing=False)
            self.enable(number, True)
        assert self.index.stats()["sequence"] == self.model.sequence
        if len(self.model.blocks) < old.max_blocks:
            assert before <= set(self.model.blocks)

    # ---- always

    @invariant()
    def all_invariants_hold(self) -> None:
        assert self.index.check() == []

    @invariant()
    def exactly_the_blocks_of_the_model_are_found(self) -> None:
        for namespace in NAMESPACES:
            expected = [
                (block := self.model.blocks.get(key)) is not None and not block.writing and block.namespace == namespace for key in KEYS
            ]
            assert list(self.index.has(b"".join(KEYS), namespace)) == expected

    @invariant()
    def counters_are_those_of_the_model(self) -> None:
        stats, everything = self.index.stats(), self.model.all()
        found = self.model.blocks.values()
        assert stats["blocks"] == sum(not block.writing for block in found)
        assert stats["writing"] == sum(block.writing for block in everything)
        assert stats["reading"] == sum(block.readers > 0 for block in everything)
        assert stats["gone"] == sum(self.model.blocks.get(block.key) is not block for block in everything)
        assert stats["sequence"] == self.model.sequence
        assert stats["total_bytes"] == sum(self.model.slabs.values()) * SLAB_PAGES * PAGE
        for directory in self.model.slabs:
            there = self.model.within(directory)
            each = self.index.directory(directory)
            assert each["enabled"] == (directory in self.model.enabled)
            assert each["used_bytes"] == sum(block.pages for block in there) * PAGE
            assert each["free_slabs"] == self.model.slabs[directory] - len({block.slab for block in there})
            assert each["busy"] == sum(block.busy for block in there)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
