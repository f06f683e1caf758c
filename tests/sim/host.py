"""The sidecar of the simulation: a core on private tables, its pool, and what must hold after each thing that it does.

Every answer is compared with the model (model.py), and so are the tables, with themselves (Tables.check) and with what readers see; a READY
block is compared with the bytes of the pool. Who talks to it, and what goes wrong, is the matter of world.py.
"""

from __future__ import annotations

import mmap
import os
import random
from collections import deque
from typing import Any

import hostkv.sidecar.core as core_module
from hostkv.cext import Tables, View
from hostkv.schemas import layout as bytes_of
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode

from . import damage
from .clients import Client, Handle, Process, geometry
from .layouts import EXTENT, FINGERPRINTS, GRAIN, KEYS, LAYOUTS, NUMBERS
from .model import GONE, HANGS, Model, handles, require, split

BOOT = b"b" * 16
SECOND = 10**9
NO_NAME = bytes(16)  # of a lock: that of a record that nobody uses
MAX_CONNECTIONS = 2  # of one member, in place of the core's, so that it is met


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

        size = Tables.bytes_needed(**self.sizes)
        self.fd = os.memfd_create("tables")
        os.ftruncate(self.fd, size)
        self.instance = self.new_id()
        self.tables = Tables.create(
            self.fd, boot_id=BOOT, pool_epoch=self.new_id(), instance_id=self.instance, verify=self.verify, **self.sizes
        )
        self.memory = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
        header = bytes_of.HEADER.unpack_from(self.memory)
        self.capacity, self.offsets = header[17], header[23:31]
        self.view = View(self.fd, size)
        self.model = Model(self.sizes, MAX_CONNECTIONS, self.look, self.exited)
        self.core: Any = None
        self.paused = 0  # steps in which the sidecar is stopped
        self.start_core(False)
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

    def start_core(self, adopted: bool) -> None:
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
            started_ns=self.now_ns,
            **self.sizes,
        )
        self.core = core_module.Core(self.tables, facts, self.look, self.exited, adopted)

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
        self.note("sidecar starts, and finds", what)
        self.instance = self.new_id()
        self.tables = Tables.adopt(self.fd, boot_id=BOOT, instance_id=self.instance, verify=self.verify, **self.sizes)
        self.start_core(True)
        self.model.adopt()
        require(self.core.adopted_blocks == sum(block.ready for block in self.model.blocks.values()), "adopted_blocks is wrong")
        stats = self.tables.stats()
        found = (stats["bad_blocks"], stats["bad_records"])
        require(found == bad, "adoption counts bad blocks and records", found, "expected", bad)
        self.tick = self.number_at(bytes_of.TICK_OFFSET)
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
        require(found == expected, "watch finds", found, "expected", expected)
        for what, who in expected:
            self.note(what, who)
            if what == GONE:
                process, (lock, driven) = self.known[who].process, before[who]
                lost = lock not in process.locks
                gone = not process.alive and (process.exited or not driven)
                require(lost or gone, "a living member is gone", process.number)
            else:
                owners = [self.known[client].process for client in self.model.sessions[who].members]
                quiet = all(not process.runs and self.alive_ns - process.started_ns > 8 * SECOND for process in owners if process.alive)
                require(quiet, "a session that beats lost its pins", who)
        self.compare(bool(expected))

    def exchange(self, connection: bytes, number: int, request: m.Request) -> Any:
        """The core's reply, which is the one that is due, and leaves the tables as they must be."""
        self.note("request", connection, number, request)
        payload = self.core.handle(connection, m.encode_request(request, number), self.now_ns)
        answered, instance, reply = m.decode_reply(payload, request)
        require((answered, instance) == (number, self.instance), "an answer of another request or instance", answered, instance)
        expected = self.model.answer(connection, request, reply)
        if isinstance(expected, ErrorCode):
            require(isinstance(reply, m.ErrorReply) and reply.error == expected, "answered", reply, "expected", expected)
        elif isinstance(expected, type):
            require(isinstance(reply, expected), "answered", reply, "expected", expected)
            if isinstance(reply, m.StatusReply):
                self.check_status(reply.status)
        else:
            require(reply == expected, "answered", reply, "expected", expected)
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
        if half:
            self.copied.add((generation, shard))

    def read(self, layout: int, page: int, half: int) -> list[tuple[int, ...]]:
        return [self.pool[grain] for shard in range(LAYOUTS[layout].shards) for grain in self.grains(layout, page, shard, half)[0]]

    def content(self, layout: int, key: bytes, generation: int) -> list[tuple[int, ...]]:
        """What a READY block must hold."""
        return [
            (NUMBERS[key], generation, shard, n)
            for shard in range(LAYOUTS[layout].shards)
            for n in range(LAYOUTS[layout].shard_bytes // GRAIN)
        ]

    def checksum_of(self, layout: int, key: bytes, generation: int, shard: int) -> int:
        return self.checksum(layout, [run for run in self.content(layout, key, generation) if run[2] == shard])

    def checksum(self, layout: int, row: list[tuple[int, ...]]) -> int:
        total = 0
        for run in row:
            total ^= hash(run)
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
            block = self.rng.choice(ready)
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
        sizes = self.sizes
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
        model.take_ticks(used, before, self.tick)
        expected = [
            (
                key,
                block.ready,
                int(block.doomed),
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
                whole = sorted(self.read(layout, block.page, 0) + self.read(layout, block.page, 1))
                require(
                    whole == self.content(layout, key, block.generation), "a READY block has a missing or half-written shard", key, whole
                )

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
            expected = (member.index, member.session.session_id, member.lock, int(member.device))
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
            "pinned_blocks": sum(bool(block.pins) for block in blocks),
            "used_bytes": sum(self.model.extents[block.page * bytes_of.PAGE // EXTENT].slot_bytes for block in blocks),
            "free_extents": sum(not extent.slot_bytes for extent in self.model.extents),
            "evicted": self.model.evicted,
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
            for (key, page, generation), verdict in zip(self.handles, good, strict=True):
                block = model.blocks.get(key)
                right = block is not None and block.ready and (block.page, block.generation) == (page, generation)
                require(verdict == right, "a handle was judged", verdict, key, page, generation)
        for space, known in enumerate(model.spaces):
            if known is None:
                continue
            keys = KEYS[FINGERPRINTS.index(known[0])]
            wanted = [model.found(space, key) for key in keys]
            joined = b"".join(keys)
            require(list(self.view.lookup(space, joined)) == wanted, "readers find", self.view.lookup(space, joined), "expected", wanted)
            prefix = wanted.index(False) if False in wanted else len(wanted)
            require(self.view.lookup_prefix(space, joined) == prefix, "lookup_prefix is wrong")
            last = max((n for n, hit in enumerate(wanted) if hit), default=-1)
            require(self.view.lookup_reverse(space, joined) == last, "lookup_reverse is wrong")

    def check_status(self, status: dict[str, Any]) -> None:
        sessions = {session["id"]: session for session in status["sessions"]}
        expected = {session.session_id.hex(): len(session.pins) for session in self.model.sessions.values()}
        require({name: session["tags"] for name, session in sessions.items()} == expected, "status tells of other sessions", sessions)
