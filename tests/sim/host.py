"""The sidecar of the simulation: a core on private tables, its pool, and what must hold after each thing that it does.

Every answer is compared with the model (model.py), and so are the tables, with themselves (Tables.check) and with what readers see; a READY
block is compared with the bytes of the pool. Who talks to it, and what goes wrong, is the matter of world.py.
"""

from __future__ import annotations

import mmap
import os
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import hostkv.sidecar.core as core_module
import hostkv.sidecar.movement as movement_module
from hostkv.cext import Index, Tables, View
from hostkv.schemas import layout as bytes_of
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status
from hostkv.sidecar.errors import StartupError

from . import damage, moving
from .clients import Client, Handle, Process, geometry
from .layouts import EXTENT, FINGERPRINTS, GRAIN, KEYS, LAYOUTS, NUMBERS
from .model import ENDED, GONE, HANGS, LATER, Model, handles, require, split
from .tier import Directory, Grain, Seen, Tier, Transfer

BOOT = b"b" * 16
SECOND = 10**9
NO_NAME = bytes(16)  # of a lock: that of a record that nobody uses
MAX_CONNECTIONS = 2  # of one member, in place of the core's, so that it is met


@contextmanager
def small_limits() -> Iterator[None]:
    """Limits of the core that are met, as those of the tables are."""
    with (
        patch.object(core_module, "MAX_CONNECTIONS", MAX_CONNECTIONS),
        patch.object(movement_module, "MAX_WANTED", moving.MAX_WANTED),
        patch.object(movement_module, "MAX_LOOKED_AT", moving.MAX_LOOKED_AT),
    ):
        yield


class Host:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.random = self.rng.random
        pick = self.rng.choice
        extents, rest = pick([1, 2, 3, 4]), pick([0, 0, 4096, 8192])
        self.sizes = {
            "pool_bytes": extents * EXTENT + rest,
            "extent_bytes": EXTENT,
            "max_blocks": pick([4, 6, 10, 16]),
            "max_shards": pick([1, 3, 6, 10]),
            "max_pins": pick([1, 3, 10, 16]),
            "max_members": pick([3, 5, 6]),
            "max_namespaces": pick([2, 3, 4]),
        }
        self.verify = self.random() < 0.5
        self.draw_order()
        self.calm = False  # nothing goes wrong any more
        self.layouts = [pick([0, 1, 5]), *self.rng.sample([2, 3, 4], 2)]  # of three slot sizes
        if self.random() < 0.3:
            self.layouts = self.rng.sample(range(len(LAYOUTS)), 3)
        self.directories: list[Directory] = []
        if self.random() < 0.67:  # there is a tier; its member records, one of an earlier sidecar, are beside those of clients
            self.sizes["max_members"] += 2
            self.slab_bytes = pick([8192, EXTENT, EXTENT, 2 * EXTENT])
            self.directories = [Directory(pick([1, 2, 3]), self.slab_bytes) for _ in range(pick([1, 1, 2]))]
            namespaces = pick([self.sizes["max_namespaces"], 6])  # fewer than the pool has could never all be spilled
            self.tier_limits = pick([3, 6, 40]), namespaces, pick([1, 2, 4, 8])  # blocks, namespaces, jobs of a directory
        self.now_ns = 5 * SECOND
        self.alive_ns = 0  # time in which anybody ran
        self.names = self.ids = self.steps = 0
        self.log: deque[tuple[Any, ...]] = deque(maxlen=30)
        self.owners: dict[bytes, Process] = {}  # of locks
        self.known: dict[bytes, Client] = {}  # whoever there was
        self.hidden: dict[bytes, None] = {}  # locks whose files cannot be looked at
        self.exits: dict[bytes, Process] = {}  # clients whose pidfd the sidecar holds
        self.handles: deque[Handle] = deque(maxlen=12)  # given of late
        self.pool: list[tuple[int, ...]] = [(0,)] * (self.sizes["pool_bytes"] // GRAIN)
        self.copied: set[tuple[int, int]] = set()  # generation and shard of what a writer has copied to its end
        self.scribbled: set[int] = set()  # generations of the blocks
        self.whole: set[int] = set()  # generations of READY blocks whose bytes were looked at
        self.lost: set[int] = set()  # generations of blocks that damage has cost
        self.origins: dict[tuple[int, int], int] = {}  # (generation, shard) of what came from the tier -> that of its bytes
        self.contents: dict[int, tuple[bytes, list[int], bool]] = {}  # checksum of what was spilled -> key, origins, whether it was right
        self.cleared: dict[bytes, int] = {}  # namespace -> the newest generation when a clear that was answered was asked for
        self.clears: dict[bytes, dict[bytes, int]] = {}  # by connection: what of `cleared` is so when its last clear is answered
        self.unanswered: dict[bytes, deque[int]] = {}  # by connection

        for directory in self.directories:
            if self.random() < 0.7:
                directory.fill(self, [layout for layout in self.layouts if LAYOUTS[layout].slot_bytes <= self.slab_bytes] or [0])

        size = Tables.bytes_needed(**self.sizes)
        self.fd = os.memfd_create("tables")
        os.ftruncate(self.fd, size)
        self.instance = self.new_id()
        self.tables = Tables.create(
            self.fd, boot_id=BOOT, pool_epoch=self.new_id(), instance_id=self.instance, verify=self.verify, **self.order, **self.sizes
        )
        self.memory = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
        header = bytes_of.HEADER.unpack_from(self.memory)
        self.capacity, self.offsets = header[17], header[23:31]
        self.view = View(self.fd, size)
        self.model = Model(self.sizes, MAX_CONNECTIONS, self.look, self.exited, self.quiet)
        self.core: Any = None
        self.tier: Tier | None = None
        self.paused = 0  # steps in which the sidecar is stopped
        self.start_core(False, bool(self.directories))
        self.seen, self.tick = b"", 0  # at the last look
        self.compare(True)

    def note(self, *what: Any) -> None:
        self.log.append((self.steps, *what))

    def close(self) -> None:
        if self.core is not None:
            self.tables.close()
        self.view.close()
        self.memory.close()
        os.close(self.fd)

    def new_id(self) -> bytes:
        self.ids += 1
        return self.ids.to_bytes(16, "little")

    def new_name(self) -> bytes:
        self.names += 1
        return b"%d" % self.names

    # ---- the sidecar ----------------------------------------------------------------------------------------------------------------

    def draw_order(self) -> None:
        """Which blocks go first, and which the tier wants."""
        self.order = {"keeps_reused": self.random() < 0.5, "min_reuse": self.rng.choice([0, 0, 1, 2])}

    def start_core(self, adopted: bool, tiered: bool) -> bool:
        """False: no member record is left for the tier."""
        self.tier = None
        if self.directories:
            index = self.new_index(self.tier_limits[0] if tiered else 1)
            self.tier = Tier(self, index, self.directories, self.slab_bytes, *self.tier_limits[1:]) if tiered else None
        tables = Seen(self.tables, self.tier.said) if self.tier is not None else self.tables
        facts = core_module.Facts(
            version="0",
            instance_id=self.instance,
            pid=1,
            endpoint="ipc:///x",
            pool_name="x",
            pool_path="/x",
            tables_path="/x.tables",
            tables_bytes=len(self.memory),
            verify=self.verify,
            eviction="",
            started_ns=self.now_ns,
            **self.sizes,
        )
        self.model.verify = self.verify
        self.model.keeps_reused, self.model.min_reuse = self.order["keeps_reused"], self.order["min_reuse"]
        if adopted:
            self.model.adopt()
        member = self.model.join_tier(self.instance) if tiered else None
        try:
            self.core = core_module.Core(tables, facts, self.look, self.exited, adopted, self.tier, self.quiet)
        except StartupError:
            require(tiered and member is None, "the sidecar does not start")
            return False
        require(member is not None or not tiered, "the sidecar starts without a member for its tier")
        if member is not None:
            self.model.moving = moving.Moving(self.model, member, self.tier)
            tables.member = next(index for index, client, *_ in self.tables.members() if client == self.instance)
        return True

    def new_index(self, max_blocks: int) -> Index:
        """In a file that readers map; one of nothing where there is no tier."""
        size = Index.bytes_needed(max_blocks)
        fd = os.memfd_create("index")
        os.ftruncate(fd, size)
        index = Index(fd, max_blocks, self.slab_bytes)
        self.view.attach_index(fd, size)
        os.close(fd)
        return index

    def quiet(self) -> bool:
        return not any(directory.orphans for directory in self.directories)

    def look(self, lock: bytes) -> core_module.Look:
        if lock in self.hidden:
            return core_module.Look(None)
        if lock == NO_NAME:  # somebody has such a file
            return core_module.Look(True)
        process = self.owners.get(lock)
        held = process is not None and process.alive and lock in process.locks
        return core_module.Look(held, process.beat() if process is not None and held else 0)

    def exited(self, client: bytes) -> bool | None:
        process = self.exits.get(client)
        return None if process is None else process.exited

    def attach(self, client: Client) -> bool:
        """What a client says over the attach socket before its driver gets the pool; True when the sidecar has noted it."""
        if self.core is None or self.paused:
            return False
        self.note("attach", client.number)
        noted = self.core.attach(client.id)
        require(noted == self.model.attach(client.id), "attach answers wrong", client.number, noted)
        if noted:
            client.attached = self.instance
            if client.process.pidfd:
                self.exits[client.id] = client.process
        self.compare(True)
        return noted

    def start_sidecar(self) -> None:
        if self.verify and self.random() < 0.1:
            self.verify, what, bad = False, "that verify is off", (0, 0)
        else:
            what, bad = damage.crash(self)
        tiered = bool(self.directories) and self.random() < 0.85
        self.note("sidecar starts, and finds", what, "with a tier" if tiered else "")
        self.instance = self.new_id()
        if self.random() < 0.2:
            self.draw_order()
        self.tables = Tables.adopt(self.fd, boot_id=BOOT, instance_id=self.instance, verify=self.verify, **self.order, **self.sizes)
        if not self.start_core(True, tiered):
            self.tables.close()
            self.instance, bad = self.new_id(), (0, 0)
            self.tables = Tables.adopt(self.fd, boot_id=BOOT, instance_id=self.instance, verify=self.verify, **self.order, **self.sizes)
            self.start_core(True, False)
        require(self.core.adopted_blocks == sum(block.ready for block in self.model.blocks.values()), "adopted_blocks is wrong")
        stats = self.tables.stats()
        found = (stats["bad_blocks"], stats["bad_records"])
        require(found == bad, "adoption counts bad blocks and records", found, "expected", bad)
        self.tick = self.model.clock = self.number_at(bytes_of.TICK_OFFSET)
        self.compare(True)

    def watch(self) -> None:
        self.note("watch")
        before = {member.client: (member.lock, member.device) for member in self.model.members.values()}
        expected = sorted(self.model.watch(self.now_ns))
        events = self.core.watch(self.now_ns)
        sessions = {member.client: member.session.session_id for member in self.model.members.values()}
        found = sorted(
            (what, sessions.get(bytes.fromhex(client), b"") if what == HANGS else bytes.fromhex(client)) for what, client, _ in events
        )
        self.take_replies()
        require(found == expected, "watch finds", found, "expected", expected)
        for what, who in expected:
            self.note(what, who)
            if what == GONE:
                process, (lock, driven) = self.known[who].process, before[who]
                lost = lock not in process.locks
                gone = not process.alive and (process.exited or not driven)
                require(lost or gone, "a living member is gone", process.number)
            elif what == ENDED:
                require(self.quiet(), "the slots of transfers that go on were given back", who)
            else:
                owners = [self.known[client].process for client in self.model.sessions[who].members]
                quiet = all(not process.runs and self.alive_ns - process.started_ns > 8 * SECOND for process in owners if process.alive)
                require(quiet, "a session that beats lost its pins", who)
        self.compare(bool(expected))

    def exchange(self, connection: bytes, number: int, request: m.Request) -> Any:
        """The core's reply, which is the one that is due, and leaves the tables as they must be."""
        self.note("request", connection, number, request)
        waiting = self.unanswered.setdefault(connection, deque())
        if connection not in self.model.waits:  # what it waited for is forgotten, if it was
            waiting.clear()
        waiting.append(number)
        payload = self.core.handle(connection, m.encode_request(request, number), self.now_ns)
        reply = self.decoded(number, request, payload) if payload else LATER
        self.model.now_ns, self.model.number = self.now_ns, number
        expected = self.model.answer(connection, request, reply)
        self.take_replies()
        if isinstance(request, m.Clear) and not isinstance(expected, ErrorCode):
            names = FINGERPRINTS if request.index == m.ALL_NAMESPACES else [self.model.spaces[request.index][0]]  # type: ignore[index]
            self.clears[connection] = dict.fromkeys(names, self.model.generation)
        if reply is not LATER:
            self.answered(connection, number, request, reply)
        if isinstance(expected, ErrorCode):
            require(isinstance(reply, m.ErrorReply) and reply.error == expected, "answered", reply, "expected", expected)
        elif isinstance(expected, type):
            require(isinstance(reply, expected), "answered", reply, "expected", expected)
            if isinstance(reply, m.StatusReply):
                self.check_status(reply.status)
        else:
            require(reply == expected, "answered", reply, "expected", expected)
        require(self.tier is None or not self.tier.said, "the tier was asked for nothing")
        self.compare(not isinstance(expected, ErrorCode))
        if isinstance(reply, m.HandlesReply):
            keys = split(request.keys)  # type: ignore[union-attr]
            if isinstance(request, m.Reserve):
                for (status, _, generation), shard in zip(handles(reply), memoryview(request.shards).cast("H"), strict=True):
                    if not status:
                        self.copied.discard((generation, shard))
            self.handles += [
                (key, page, generation) for key, (status, page, generation) in zip(keys, handles(reply), strict=True) if not status
            ]
        return reply

    def decoded(self, number: int, request: m.Request, payload: bytes) -> Any:
        found, instance, reply = m.decode_reply(payload, request)
        require((found, instance) == (number, self.instance), "an answer of another request or instance", found, instance)
        return reply

    def answered(self, connection: bytes, number: int, request: m.Request, reply: Any) -> None:
        """Once, and in the order of asking."""
        waiting = self.unanswered[connection]
        require(waiting and waiting.popleft() == number, "answered out of turn", connection, number)
        if isinstance(request, m.Clear) and isinstance(reply, m.CountReply) and self.tier is not None:
            self.cleared |= self.clears[connection]

    def take_replies(self) -> None:
        """Those that come late must be the ones that are due."""
        due, self.model.due = self.model.due, []
        late = self.core.replies()
        require(sorted(name for name, _ in late) == sorted(name for name, *_ in due), "answered late", late, "expected", due)
        for name, payload in late:
            _, wait, expected = next(each for each in due if each[0] == name)
            reply = self.decoded(wait.number, wait.request, payload)
            right = isinstance(reply, m.ErrorReply) and reply.error == expected if isinstance(expected, ErrorCode) else reply == expected
            require(right, "answered late", reply, "expected", expected)
            self.note("late reply", name, wait.number)
            self.answered(name, wait.number, wait.request, reply)
            self.send_late(name, wait.number, reply)

    def send_late(self, connection: bytes, number: int, reply: Any) -> None:
        raise NotImplementedError

    # ---- the tier -------------------------------------------------------------------------------------------------------------------

    def move(self, _: object = None) -> None:
        """What the loop does between two messages: what the tier has done goes to the core, and what is to be done to the tier."""
        moving, tier = self.model.moving, self.tier
        if done := tier.reap():
            self.note("done", *((each.token, each.result) for each in done))
            self.core.complete(done, self.now_ns)
            moving.complete(done, self.now_ns)
            self.moved()
        room = tier.room()
        jobs = self.core.work(self.now_ns)
        moving.work(jobs, room, self.now_ns)
        if jobs:
            self.note("jobs", *jobs)
            tier.submit(jobs)
        self.moved()

    def moved(self) -> None:
        require(not self.tier.said, "the tier was asked for nothing", self.tier.said)
        require(not self.tier.index.real.check(), "the index disagrees with itself")
        self.take_replies()
        self.compare(True)

    def taken(self, transfer: Transfer, row: list[Grain]) -> None:
        """A block is being spilled, and hashed: its slot holds what it must, or somebody wrote there astray."""
        layout = self.layout_of(self.model.blocks[transfer.key].space)
        right = row == self.content(layout, transfer.key, transfer.generation)
        require(right or transfer.generation in self.scribbled, "a slot that is being spilled holds something else", transfer.key, row)
        shards = range(LAYOUTS[layout].shards)
        origins = [self.origins.get((transfer.generation, shard), transfer.generation) for shard in shards]
        self.contents[transfer.checksum] = (transfer.key, origins, right)

    def delivered(self, transfer: Transfer) -> None:
        """A block has come with the right checksum."""
        key, origins, right = self.contents[transfer.checksum]
        require(key == transfer.key, "the tier delivered another block", key, transfer.key)
        for shard, origin in enumerate(origins):
            self.origins[transfer.generation, shard] = origin
            self.copied.add((transfer.generation, shard))
        if not right:
            self.scribbled.add(transfer.generation)

    # ---- bytes ----------------------------------------------------------------------------------------------------------------------

    def grains(self, layout: int, page: int, shard: int, half: int) -> tuple[range, int]:
        """Where half of a shard lies in the pool, and how many grains of the shard come before it."""
        size, stride = geometry(LAYOUTS[layout], GRAIN)
        first = page * (bytes_of.PAGE // GRAIN) + shard * stride
        return (range(first, first + size // 2), 0) if half == 0 else (range(first + size // 2, first + size), size // 2)

    def write(self, client: Client, layout: int, key: bytes, shard: int, page: int, generation: int, half: int) -> None:
        block = self.model.blocks.get(key)
        right = (
            block is not None and (block.generation, block.page) == (generation, page) and block.writers.get(shard, (b"",))[0] == client.id
        )
        require(right, "the slot of a living writer was given away", client.number, key, shard, page, generation)
        where, done = self.grains(layout, page, shard, half)
        for n, grain in enumerate(where, done):
            self.pool[grain] = (NUMBERS[key], generation, shard, n)
        self.origins.pop((generation, shard), None)
        if half:
            self.copied.add((generation, shard))

    def read(self, layout: int, page: int, half: int) -> list[tuple[int, ...]]:
        return [self.pool[grain] for shard in range(LAYOUTS[layout].shards) for grain in self.grains(layout, page, shard, half)[0]]

    def content(self, layout: int, key: bytes, generation: int) -> list[tuple[int, ...]]:
        """What a READY block must hold."""
        return [
            (NUMBERS[key], self.origins.get((generation, shard), generation), shard, n)
            for shard in range(LAYOUTS[layout].shards)
            for n in range(LAYOUTS[layout].shard_bytes // GRAIN)
        ]

    def checksum_of(self, layout: int, key: bytes, generation: int, shard: int) -> int:
        return self.checksum([run for run in self.content(layout, key, generation) if run[2] == shard])

    def checksum(self, row: list[Grain]) -> int:
        """Python hashes a number modulo 2^61 - 1, and each start begins its generations 2^61 after the last one's: so their high half once
        more."""
        total = 0
        for run in row:
            total ^= hash((run, run[1:] and run[1] >> 32))
        return total & (1 << 64) - 1

    def check_handles(self, got: list[Handle], checksums: list[int] | None = None) -> bytes:
        return self.view.check(
            b"".join(key for key, _, _ in got),
            b"".join(page.to_bytes(4, "little") for _, page, _ in got),
            b"".join(generation.to_bytes(8, "little") for _, _, generation in got),
            None if checksums is None else b"".join(each.to_bytes(8, "little") for each in checksums),
        )

    def scribble(self) -> None:
        """A stray write into a READY block: whoever loads it has to find out."""
        ready = [block for block in self.model.blocks.values() if block.ready]
        if self.verify and ready:
            dirty = [block for block in ready if block.dirty]
            block = self.rng.choice(dirty if self.tier is not None and dirty else ready)
            grain = block.page * (bytes_of.PAGE // GRAIN)
            self.note("stray write", grain)
            self.pool[grain] = (-self.steps,)
            self.scribbled.add(block.generation)

    def pins_kept(self, session_id: bytes) -> Any:
        """Equal as long as a session keeps its pins; None when there is no session."""
        session = self.model.sessions.get(session_id)
        return None if session is None else (session, session.silenced, len(self.lost))

    # ---- what must hold after each step ---------------------------------------------------------------------------------------------

    def table(self, which: int, width: int, count: int) -> bytes:
        return self.memory[self.offsets[which] : self.offsets[which] + width * count]

    def number_at(self, offset: int) -> int:
        return int.from_bytes(self.memory[offset : offset + 8], "little")

    def compare(self, may_change: bool) -> None:
        """The tables with themselves, with the model, and what readers see with both."""
        moving, sizes = self.model.moving, self.sizes
        require(self.core.moving() == (moving is not None and not moving.idle()), "whether something moves is wrong")
        require(self.core.waits() == bool(self.model.waits), "whether somebody waits is wrong")
        blocks, aux = self.table(0, 64, self.capacity), self.table(1, 32, self.capacity)
        shards, pins = self.table(2, 64, sizes["max_shards"]), self.table(3, 64, sizes["max_pins"])
        seen = b"".join((blocks, aux, shards, pins, self.table(4, 64, sizes["max_members"]), self.table(5, 128, sizes["max_namespaces"])))
        wrong = self.tables.check()
        require(not wrong, "the tables disagree with themselves", *wrong[:3])
        require(may_change or seen == self.seen, "an error changed the tables")
        if seen == self.seen and not self.model.touched:
            return
        self.seen = seen
        self.compare_blocks(blocks, aux)
        self.compare_records(shards, pins)
        self.compare_counts()
        self.compare_readers()

    def compare_blocks(self, blocks: bytes, aux: bytes) -> None:
        model = self.model
        found, used = [], {}
        states = blocks[4::64]
        for i, state in enumerate(states):
            if state in (bytes_of.WRITING, bytes_of.READY):
                _, _, flags, shards, key, generation, page, space, checksum = bytes_of.BLOCK.unpack_from(blocks, 64 * i)
                _, _, tick, done, _, _ = bytes_of.AUX.unpack_from(aux, 32 * i)
                found.append((key, state == bytes_of.READY, flags, shards, generation, page, space, checksum if self.verify else 0, done))
                used[key] = tick
        before, self.tick = self.tick, self.number_at(bytes_of.TICK_OFFSET)
        extents = bytes_of.EXTENT.iter_unpack(self.table(6, 64, len(model.extents)))
        model.take_ticks(used, [last_used for _, last_used, *_ in extents], before, self.tick)
        expected = [
            (
                key,
                block.ready,
                block.uses * bytes_of.USE + (bytes_of.DOOMED if block.doomed else bytes_of.CLEAN if block.clean else 0),
                block.shards,
                block.generation,
                block.page,
                block.space,
                block.checksum if self.verify else 0,
                block.mask,
            )
            for key, block in model.blocks.items()
        ]
        require(
            sorted(found) == sorted(expected),
            "the blocks are",
            sorted(set(found) - set(expected)),
            "expected",
            sorted(set(expected) - set(found)),
        )
        for key, block in model.blocks.items():
            require(used[key] == block.used, "a block was used that nobody used", key)
            if block.ready and block.generation not in self.whole:
                self.whole.add(block.generation)
                layout = self.layout_of(block.space)
                whole, right = (
                    sorted(self.read(layout, block.page, 0) + self.read(layout, block.page, 1)),
                    block.generation in self.scribbled,
                )
                right |= whole == self.content(layout, key, block.generation)
                require(right, "a READY block has a missing or half-written shard", key, whole)
                for shard in range(block.shards):
                    origin = self.origins.get((block.generation, shard), block.generation)
                    cleared = self.cleared.get(FINGERPRINTS[layout], -1)
                    require(block.doomed or origin > cleared, "a block came back that was cleared", key, origin, cleared)
        for transfer in self.transfers():
            block = model.blocks.get(transfer.key)  # type: ignore[assignment]
            right = block is not None and (block.generation, block.page) == (transfer.generation, transfer.job.page)
            require(right or transfer.generation in self.lost, "a slot under transfer was given away", transfer.key, transfer.job)

    def transfers(self) -> list[Transfer]:
        """All that may read from or write into the pool."""
        orphans = [transfer for directory in self.directories for transfer in directory.orphans]
        return orphans + (self.tier.transfers if self.tier is not None else [])

    def layout_of(self, space: int) -> int:
        known = self.model.spaces[space]
        assert known is not None
        return FINGERPRINTS.index(known[0])

    def compare_records(self, shard_records: bytes, pin_records: bytes) -> None:
        model = self.model
        members = {}
        for index, client, session, lock, number, _, flags in self.tables.members():
            members[index] = (client, session, lock, number, flags)
        model_members = {member.client: member for member in model.members.values()}
        require(sorted(client for client, *_ in members.values()) == sorted(model_members), "the members are", members)
        numbers: dict[int, bytes] = {}
        for index, (client, session, lock, number, flags) in members.items():
            member = model_members[client]
            if member.index < 0:
                member.index = index
            expected = (member.index, member.session.session_id, member.lock, member.flags)
            require((index, session, lock, flags) == expected, "a member is", (index, session, lock, flags), "expected", expected)
            require(numbers.setdefault(number, session) == session, "two sessions have one number", number)
        require(len(numbers) == len(model.sessions), "the sessions are", numbers)
        found = []
        for used, index, shard, _, tag, generation, key in bytes_of.SHARD.iter_unpack(shard_records):
            if used:
                found.append((key, generation, shard, members[index][0], tag))
        held = [(key, block.generation, shard, *writer) for key, block in model.blocks.items() for shard, writer in block.writers.items()]
        require(sorted(found) == sorted(held), "the shards in flight are", sorted(found), "expected", sorted(held))
        found = []
        for used, number, tag, generation, key, _, _ in bytes_of.PIN.iter_unpack(pin_records):
            if used:
                found.append((key, generation, numbers.get(number, b""), tag))
        held = [(key, block.generation, *pin) for key, block in model.blocks.items() for pin in block.pins]
        require(sorted(found) == sorted(held), "the pins are", sorted(found), "expected", sorted(held))
        by_session = sum(len(pinned) for session in model.sessions.values() for pinned in session.pins.values())
        require(len(held) == by_session, "the model disagrees with itself about pins")

    def compare_counts(self) -> None:
        stats, blocks = self.tables.stats(), self.model.blocks.values()
        expected = {
            "blocks": len(blocks),
            "ready": sum(block.ready for block in blocks),
            "doomed": sum(block.doomed for block in blocks),
            "dirty": sum(map(self.model.wanted, blocks)),
            "pinned_blocks": sum(bool(block.pins) for block in blocks),
            "used_bytes": sum(self.model.extents[block.page * bytes_of.PAGE // EXTENT].slot_bytes for block in blocks),
            "free_extents": sum(not extent.slot_bytes for extent in self.model.extents),
            "evicted": self.model.evicted,
            "evicted_dirty": self.model.evicted_dirty,
            "extents_taken_back": self.model.taken_back,
        }
        found = {name: stats[name] for name in expected}
        require(found == expected, "counted", found, "expected", expected)
        taken = {grain for block in blocks for grain in range(block.page, block.page + self._pages(block.space))}
        require(len(taken) == sum(self._pages(block.space) for block in blocks), "two blocks share memory")

    def _pages(self, space: int) -> int:
        return LAYOUTS[self.layout_of(space)].slot_bytes // bytes_of.PAGE

    def compare_readers(self) -> None:
        """Clients, who read the tables themselves: every handle ever given is bad or right, and what is found is what is there."""
        model = self.model
        if self.handles:
            good = self.check_handles(list(self.handles))
            summed = self.check_handles(list(self.handles), [0] * len(self.handles)) if self.verify else good
            for (key, page, generation), verdict, with_sum in zip(self.handles, good, summed, strict=True):
                block = model.blocks.get(key)
                right = block is not None and block.ready and (block.page, block.generation) == (page, generation)
                require(verdict == right, "a handle was judged", verdict, key, page, generation)
                expected = 2 if right and self.verify and block.checksum else int(right)  # type: ignore[union-attr]
                require(with_sum == expected, "a checksum was judged", with_sum, key, page, generation)
        for space, known in enumerate(model.spaces):
            if known is None:
                continue
            keys = KEYS[FINGERPRINTS.index(known[0])]
            joined = b"".join(keys)
            wanted = [model.found(space, key) or on_tier for key, on_tier in zip(keys, self.on_any_tier(joined), strict=True)]
            require(list(self.view.lookup(space, joined)) == wanted, "readers find", self.view.lookup(space, joined), "expected", wanted)
            here = [model.blocks[key] if model.found(space, key) else None for key in keys]
            places = [(Status.MISS, 0, 0) if block is None else (Status.OK, block.page, block.generation) for block in here]
            located = handles(m.HandlesReply(*self.view.locate(space, joined)))
            require(located == places, "readers locate", located, "expected", places)
            prefix = wanted.index(False) if False in wanted else len(wanted)
            require(self.view.lookup_prefix(space, joined) == prefix, "lookup_prefix is wrong")
            last = max((n for n, hit in enumerate(wanted) if hit), default=-1)
            require(self.view.lookup_reverse(space, joined) == last, "lookup_reverse is wrong")

    def on_any_tier(self, keys: bytes) -> list[bool]:
        """Whether readers find them there; they do not ask for the namespace."""
        rows = [self.tier.index.real.has(keys, number) for number in self.tier.names.values()] if self.tier is not None else []
        return [any(found) for found in zip(bytes(len(keys) // 32), *rows, strict=True)]

    def check_status(self, status: dict[str, Any]) -> None:
        sessions = {session["id"]: session for session in status["sessions"]}
        moving = self.model.moving  # what it has pinned is told as what is moving
        own = moving.member.session if moving is not None else None
        expected = {s.session_id.hex(): len(s.pins) if s is not own else 0 for s in self.model.sessions.values()}
        require({name: session["tags"] for name, session in sessions.items()} == expected, "status tells of other sessions", sessions)
        require(status["waiting"] == len(self.model.waits), "status tells of other waits", status["waiting"])
        tiers = [{name: len(getattr(moving, name)) for name in ("reading", "wanted", "spilling")}] if moving is not None else []
        found = [{name: tier[name] for name in ("reading", "wanted", "spilling")} for tier in status["tiers"]]
        require(found == tiers, "status tells of other transfers", found, "expected", tiers)
