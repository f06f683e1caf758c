"""The core against a model made of dicts: clients come, write, read, clear, leave, die and lose replies, sidecars are killed and
replaced, in any order. After each step the answers, the block table as its bytes tell it, the pins and the shards in flight are those of
the model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hostkv.schemas import layout
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cores import Driver, ident, keys, make_layout, tags

OK, EXISTS, BUSY, FULL, NOT_HELD, MISS = Status.OK, Status.EXISTS, Status.BUSY, Status.FULL, Status.NOT_HELD, Status.MISS
SESSION_OF = [0, 0, 1]  # of each client
LAYOUTS = [make_layout("one", shard_bytes=32 << 10), make_layout("two", shard_bytes=32 << 10, shards=2)]
EXTENT = 64 << 10
ROOMY, TIGHT = 32, 4  # extents: every block fits; hardly any does

clients = st.sampled_from(range(len(SESSION_OF)))
spaces = st.sampled_from([0, 1])
some_tags = st.sampled_from([1, 2])
numbers = st.integers(1, 4)
names = st.lists(numbers, min_size=1, max_size=4)
items = st.lists(st.tuples(numbers, st.integers(0, 1)), min_size=1, max_size=5)
ALL_NAMES = [1, 2, 3, 4, 12, 13, 14]


def own(space: int, number: int) -> int:
    """Each namespace has blocks of its own, and one key that both claim, which honest clients never do."""
    return number if number == 1 else number + 10 * space


@dataclass
class Block:
    """What the table holds under one key."""

    space: int
    generation: int
    page: int
    done: set[int] = field(default_factory=set)
    writers: dict[int, tuple[int, int]] = field(default_factory=dict)  # shard -> (client, tag)
    pins: set[tuple[int, int]] = field(default_factory=set)  # (session, tag)
    doomed: bool = False

    @property
    def ready(self) -> bool:
        return len(self.done) == LAYOUTS[self.space].shards

    @property
    def idle(self) -> bool:
        return not self.writers and not self.pins


class Model(RuleBasedStateMachine):
    granted = Bundle("granted")  # (client, tag, name, shard, generation) of every grant there was, valid or long gone

    @initialize(extents=st.sampled_from([ROOMY, TIGHT]))
    def start(self, extents: int) -> None:
        self.tight = extents == TIGHT
        self.driver = Driver(pool_bytes=extents * EXTENT, extent_bytes=EXTENT)
        self.blocks: dict[int, Block] = {}
        self.members: set[int] = set()
        self.connected: set[int] = set()
        self.registered: dict[int, dict[int, int]] = {}  # client -> namespace -> index
        self.last_generation = 0
        for client in range(len(SESSION_OF)):
            self.hello(client)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()

    # ---- the model's own rules ----

    def settle(self, name: int) -> None:
        """A block goes when nobody uses it and it was cleared, or nothing of it is committed."""
        block = self.blocks[name]
        if block.idle and (block.doomed or not block.done):
            del self.blocks[name]

    def give_back(self, client: int, tag: int | None) -> int:
        count = 0
        for name, block in list(self.blocks.items()):
            mine = [s for s, (owner, under) in block.writers.items() if owner == client and tag in (None, under)]
            for shard in mine:
                del block.writers[shard]
            count += len(mine)
            if mine:
                self.settle(name)
        return count

    def unpin(self, session: int, tag: int | None) -> int:
        count = 0
        for name, block in list(self.blocks.items()):
            ended = {pin for pin in block.pins if pin[0] == session and tag in (None, pin[1])}
            block.pins -= ended
            count += len(ended)
            if ended:
                self.settle(name)
        return count

    def leave(self, client: int) -> None:
        self.members.discard(client)
        self.connected.discard(client)
        self.registered.pop(client, None)
        self.give_back(client, None)
        if not any(SESSION_OF[other] == SESSION_OF[client] for other in self.members):
            self.unpin(SESSION_OF[client], None)

    def ask(self, client: int, request: m.Request) -> Any:
        return self.driver.ask(b"%d" % client, request)

    def index(self, client: int, space: int) -> int:
        return self.registered[client][space]

    # ---- clients ----

    def pick(self, n: int) -> int:
        """Mostly one that may speak: others are only ever refused, which `strangers_are_refused` looks at."""
        if not self.connected:
            self.hello(n)
        known = sorted(self.connected)
        return known[n % len(known)]

    @rule(client=clients)
    def hello(self, client: int) -> None:
        self.driver.hello(b"%d" % client, client=client + 1, session=SESSION_OF[client] + 1)
        self.members.add(client)
        self.connected.add(client)
        spaces = self.registered.setdefault(client, {})
        for space, layout_ in enumerate(LAYOUTS):
            spaces[space] = self.driver.register(b"%d" % client, layout_)

    @rule(client=clients, how=st.sampled_from(["bye", "die", "lose a reply"]))
    def end(self, client: int, how: str) -> None:
        client = self.pick(client)
        if how == "bye":
            assert self.ask(client, m.Bye()) == m.Empty()
            self.leave(client)
        elif how == "die":
            self.driver.die(client + 1)
            self.leave(client)
        else:
            self.driver.core.forget(b"%d" % client)
            self.connected.discard(client)

    @rule(client=clients, request=st.sampled_from([m.Bye(), m.Abort(tags(1)), m.Release(tags(1)), m.Clear(0), m.Acquire(0, 1, keys(1))]))
    def strangers_are_refused(self, client: int, request: m.Request) -> None:
        if client not in self.connected:
            assert self.driver.refused(b"%d" % client, request) is ErrorCode.NO_SESSION

    @rule(dead=st.sets(clients, max_size=1))
    def sidecar_killed_and_replaced(self, dead: set[int]) -> None:
        for client in dead:
            self.driver.locks.discard(ident(client + 1))
        old = self.driver
        self.driver = Driver(before=old)
        old.tables.close()
        for client in dead:
            self.leave(client)
        for client in sorted(self.connected):
            assert self.driver.refused(b"%d" % client, m.Lookup(0, keys(1))) is ErrorCode.NO_SESSION
            self.driver.hello(b"%d" % client, client=client + 1, session=SESSION_OF[client] + 1)
            assert self.driver.refused(b"%d" % client, m.Lookup(0, keys(1))) is ErrorCode.NO_NAMESPACE
            self.hello(client)

    # ---- blocks ----

    @rule(target=granted, client=clients, space=spaces, tag=some_tags, wanted=items)
    def reserve(self, client: int, space: int, tag: int, wanted: list[tuple[int, int]]) -> Any:
        client = self.pick(client)
        wanted = [(own(space, number), shard) for number, shard in wanted]
        shards = b"".join(shard.to_bytes(2, "little") for _, shard in wanted)
        request = m.Reserve(self.index(client, space), tag, keys(*(name for name, _ in wanted)), shards)
        if any(shard >= LAYOUTS[space].shards for _, shard in wanted):
            assert self.driver.refused(b"%d" % client, request) is ErrorCode.BAD_VALUE
            return (client, tag, 1, 0, 0)
        evicted = self.driver.tables.stats()["evicted"]
        reply = self.ask(client, request)
        handles = zip(wanted, reply.statuses, each(reply.pages, 4), each(reply.generations, 8), strict=True)
        last = (client, tag, 1, 0, 0)
        vanished: set[int] = set()
        for (name, shard), status, page, generation in handles:
            if self.tight and name in self.blocks and generation > self.last_generation:
                assert self.blocks[name].idle  # evicted by an earlier item of this batch
                vanished.add(name)
                del self.blocks[name]
            block = self.blocks.get(name)
            if status == FULL:
                assert self.tight
                assert block is None or block.idle
                if block is not None:
                    vanished.add(name)
                    del self.blocks[name]
                mine = [other for other in self.entries() if self.blocks[other].space == space]
                assert not any(self.blocks[other].idle for other in mine), "full, though a block of this size could go"
            elif block is None:
                assert status == OK
                assert generation > self.last_generation
                self.last_generation = generation
                self.blocks[name] = Block(space, generation, page, writers={shard: (client, tag)})
                last = (client, tag, name, shard, generation)
            elif block.space != space or block.doomed or shard in block.writers:
                assert status == BUSY
            elif block.ready or shard in block.done:
                assert status == EXISTS
            else:
                assert (status, page, generation) == (OK, block.page, block.generation)
                block.writers[shard] = (client, tag)
                last = (client, tag, name, shard, generation)
            assert status == OK or (page, generation) == (0, 0)
        here = self.entries()
        for name in [name for name in self.blocks if name not in here]:
            assert self.tight
            assert self.blocks[name].idle, "evicted though in use"
            vanished.add(name)
            del self.blocks[name]
        assert self.driver.tables.stats()["evicted"] - evicted >= len(vanished)
        return last

    @rule(grant=granted)
    def commit(self, grant: tuple[int, int, int, int, int]) -> None:
        client, tag, name, shard, generation = grant
        if client not in self.members:
            return
        if client not in self.connected:
            self.hello(client)
        request = m.Commit(tag, keys(name), shard.to_bytes(2, "little"), generation.to_bytes(8, "little"))
        block = self.blocks.get(name)
        held = block is not None and block.generation == generation and block.writers.get(shard) == (client, tag)
        assert list(self.ask(client, request).statuses) == [OK if held else NOT_HELD]
        if held:
            assert block is not None
            del block.writers[shard]
            block.done.add(shard)
            self.settle(name)

    @rule(client=clients, space=spaces, some=names)
    def save(self, client: int, space: int, some: list[int]) -> None:
        """Whole blocks, so that there is often something to read."""
        for number in some:
            for shard in range(LAYOUTS[space].shards):
                self.commit(self.reserve(client, space, 3, [(number, shard)]))

    @rule(client=clients, some=st.lists(some_tags, min_size=1, max_size=3))
    def abort(self, client: int, some: list[int]) -> None:
        client = self.pick(client)
        assert self.ask(client, m.Abort(tags(*some))) == m.CountReply(sum(self.give_back(client, tag) for tag in some))

    @rule(client=clients, space=spaces, tag=some_tags, wanted=names)
    def acquire(self, client: int, space: int, tag: int, wanted: list[int]) -> None:
        client = self.pick(client)
        wanted = [own(space, number) for number in wanted]
        request = m.Acquire(self.index(client, space), tag, keys(*wanted))
        reply = self.ask(client, request)
        for name, status, page, generation in zip(wanted, reply.statuses, each(reply.pages, 4), each(reply.generations, 8), strict=True):
            block = self.blocks.get(name)
            if block is not None and block.ready and not block.doomed and block.space == space:
                assert (status, page, generation) == (OK, block.page, block.generation)
                block.pins.add((SESSION_OF[client], tag))
            else:
                assert (status, page, generation) == (MISS, 0, 0)

    @rule(client=clients, some=st.lists(some_tags, min_size=1, max_size=3))
    def release(self, client: int, some: list[int]) -> None:
        client = self.pick(client)
        assert self.ask(client, m.Release(tags(*some))) == m.CountReply(sum(self.unpin(SESSION_OF[client], tag) for tag in some))

    @rule(client=clients, space=spaces)
    def clear(self, client: int, space: int) -> None:
        client = self.pick(client)
        request = m.Clear(self.index(client, space))
        hit = [name for name, block in self.blocks.items() if block.space == space and not block.doomed]
        assert self.ask(client, request) == m.CountReply(len(hit))
        for name in hit:
            self.blocks[name].doomed = True
            self.settle(name)

    @rule(client=clients, space=spaces)
    def lookup(self, client: int, space: int) -> None:
        client = self.pick(client)
        request = m.Lookup(self.index(client, space), keys(*ALL_NAMES))
        hits = [name in self.blocks and self.is_hit(name, space) for name in ALL_NAMES]
        assert list(self.ask(client, request).found) == [OK if hit else MISS for hit in hits]
        assert [bool(byte) for byte in self.driver.tables.view().lookup(request.index, request.keys)] == hits

    def is_hit(self, name: int, space: int) -> bool:
        block = self.blocks[name]
        return block.ready and not block.doomed and block.space == space

    # ---- what must hold after each step ----

    def entries(self) -> dict[int, tuple[int, bool, int, int]]:
        """name -> (state, doomed, generation, page) of each block, read from the tables' bytes as layout.py describes them."""
        fd = self.driver.fd
        header = layout.HEADER.unpack(os.pread(fd, layout.HEADER.size, 0))
        capacity, offsets, root = header[17], header[23:25], header[36]
        raw = os.pread(fd, capacity * layout.BLOCK.size, offsets[root & 1])
        found = {}
        for seq, state, flags, _, key, generation, page, _, _ in layout.BLOCK.iter_unpack(raw):
            assert seq % 2 == 0
            if state in (layout.WRITING, layout.READY):
                found[int.from_bytes(key[8:], "little")] = (state, bool(flags & layout.DOOMED), generation, page)
        return found

    @invariant()
    @precondition(lambda self: hasattr(self, "driver"))
    def the_tables_are_those_of_the_model(self) -> None:
        assert self.driver.tables.check() == []
        assert self.entries() == {
            name: (layout.READY if block.ready else layout.WRITING, block.doomed, block.generation, block.page)
            for name, block in self.blocks.items()
        }
        stats = self.driver.tables.stats()
        assert stats["shards_in_flight"] == sum(len(block.writers) for block in self.blocks.values())
        assert stats["pins"] == sum(len(block.pins) for block in self.blocks.values())
        assert stats["members"] == len(self.members)
        sessions = self.driver.core.status(0)["sessions"]
        pinned = {pin for block in self.blocks.values() for pin in block.pins}
        assert {int.from_bytes(bytes.fromhex(session["id"]), "little") - 1: session["tags"] for session in sessions} == {
            number: sum(session == number for session, _ in pinned) for number in {SESSION_OF[client] for client in self.members}
        }
        pages = [(block.page, LAYOUTS[block.space].slot_bytes // layout.PAGE) for block in self.blocks.values()]
        taken = [page + n for page, count in pages for n in range(count)]
        assert len(taken) == len(set(taken)), "two blocks share memory"


def each(joined: bytes, width: int) -> list[int]:
    return [int.from_bytes(joined[i : i + width], "little") for i in range(0, len(joined), width)]


TestCoreModel = Model.TestCase
