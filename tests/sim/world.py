"""One simulated host: a core on private tables, the processes around it, the network between them, and everything that goes wrong.

All of it is one thread and one random.Random, so a seed replays exactly. A step is one event: a request or a reply arrives, a client moves
on, the loop looks at the members, or a fault: a process is killed, stopped, continued, or its lock is out of sight; a connection or a reply
is lost; the sidecar is killed between any two messages, after one that it did not answer, or stopped for a minute; the clock jumps.

After each step the answer and the tables are compared with the model (model.py), the tables with themselves (Tables.check), and what
clients see with the bytes of the pool. The pool is a list of grains of 1024 bytes, each holding which byte run of which grant was written
there; copies happen in halves, so that a half-copied shard is seen.

The core of today has no jobs; what it asks of others, the member locks and the pidfds, fails and is slow here in their place.
"""

from __future__ import annotations

import mmap
import os
import random
from collections import deque
from typing import Any
from unittest.mock import patch

import hostkv.sidecar.core as core_module
from hostkv.cext import Tables, View
from hostkv.schemas import layout as bytes_of
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status
from hostkv.schemas.namespace import Layout

from . import damage
from .clients import COPY, LOST, Client, Connection, Handle, Process, Task, geometry, joined_tags
from .model import GONE, HANGS, Model, Violation, handles, require, split

GRAIN = 1024
EXTENT = 16 << 10
BOOT = b"b" * 16
SECOND = 10**9
MAX_CONNECTIONS = 2  # of one member, in place of the core's, so that it is met
MAX_PROCESSES, MAX_TASKS = 4, 2
DRAIN_STEPS = 4000


def make_layout(model: str, shard_bytes: int, shards: int) -> Layout:
    return Layout(model=model, revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=shard_bytes, shards=shards)


# Two of one slot size, one with shards that share a page, one that leaves a rest in each extent, one that takes a whole one, one too large.
LAYOUTS = [
    make_layout("one", 4096, 1),
    make_layout("two", 2048, 2),
    make_layout("three", 4096, 3),
    make_layout("four", 2048, 4),
    make_layout("whole", EXTENT, 1),
    make_layout("other", 4096, 1),
]
TOO_LARGE = make_layout("too large", EXTENT + 1, 1)
ENCODED = [layout.encode() for layout in LAYOUTS]
FINGERPRINTS = [layout.fingerprint() for layout in LAYOUTS]
NAMES = 7  # blocks of each layout


def make_key(layout: int, name: int) -> bytes:
    """Keys crowd at few places of the table, so that searches are long. Name 0 is one key that all layouts claim, which honest clients
    never do."""
    number = name and layout * NAMES + name
    return (number * 5 % 11).to_bytes(8, "little") + number.to_bytes(24, "little")


KEYS = [[make_key(layout, name) for name in range(NAMES)] for layout in range(len(LAYOUTS))]
NUMBERS = {key: number for number, key in enumerate({key: None for keys in KEYS for key in keys})}


class World:
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
            "max_pins": pick([1, 3, 6, 10]),
            "max_members": pick([3, 5, 6]),
            "max_namespaces": pick([2, 3, 4]),
        }
        self.verify = self.random() < 0.5
        self.layouts = self.rng.sample(range(len(LAYOUTS)), 3)
        self.encoded = ENCODED
        self.max_connections = pick([2, MAX_CONNECTIONS + 2])
        self.now_ns = 5 * SECOND
        self.alive_ns = 0  # time in which anybody ran
        self.names = 0
        self.ids = 0
        self.steps = 0
        self.log: deque[tuple[Any, ...]] = deque(maxlen=30)
        self.calm = False  # nothing goes wrong any more
        self.owners: dict[bytes, Process] = {}  # of locks
        self.known: dict[bytes, Client] = {}  # whoever there was
        self.hidden: dict[bytes, None] = {}  # locks whose files cannot be looked at
        self.exits: dict[bytes, Process] = {}  # clients whose pidfd the sidecar holds
        self.processes: list[Process] = []
        self.drivers: list[Task] = []  # what the devices of dead processes still copy
        self.sessions = [self.new_id() for _ in range(3)]
        self.orphans: list[Connection] = []  # of dead processes
        self.handles: deque[Handle] = deque(maxlen=12)
        self.pool: list[tuple[int, ...]] = [(0,)] * (self.sizes["pool_bytes"] // GRAIN)
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
        for _ in range(3):
            self.spawn()

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

    def kill_sidecar(self) -> None:
        self.note("sidecar killed")
        self.core = None
        self.tables.close()
        self.exits.clear()
        for connection in self.connections():
            connection.outbox.clear()
            if self.random() < 0.5:
                connection.inbox.clear()
            connection.broken = True
            if not connection.busy and connection in connection.client.connections:
                connection.client.drop(connection)
        self.orphans.clear()
        for client in self.known.values():  # a pidfd went with it, and without one only 5 s count
            client.process.exit_ns = min(client.process.exit_ns, self.now_ns + 4 * SECOND)

    def start_sidecar(self) -> None:
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
        locks = {member.client: member.lock for member in self.model.members.values()}
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
                process, driven = self.known[who].process, self.known[who].attached
                lost = locks[who] not in process.locks
                gone = not process.alive and (process.exited or not driven)
                require(lost or gone, "a living member is gone", process.number)
            else:
                owners = [self.known[client].process for client in self.model.sessions[who].members]
                quiet = all(not process.runs and self.alive_ns - process.started_ns > 8 * SECOND for process in owners if process.alive)
                require(quiet, "a session that beats lost its pins", who)
        self.compare(bool(expected))

    # ---- messages -------------------------------------------------------------------------------------------------------------------

    def deliver(self, connection: Connection) -> None:
        """One request arrives; its answer is on its way, or lost with the connection, or with the sidecar."""
        number, request = connection.outbox.popleft()
        reply = self.exchange(connection.name, number, request)
        lives, fate = connection.client.process.alive, 0.0 if self.calm else self.random()
        if not connection.outbox and connection in self.orphans:
            self.orphans.remove(connection)
        if lives and fate < 0.97:
            connection.inbox.append((number, self.instance, reply))
        elif not lives or fate < 0.995:
            self.note("reply lost", connection.name)
            require(self.core.forget(connection.name) == (connection.name in self.model.connections), "forget answers wrong")
            self.model.forget(connection.name)
        else:
            self.kill_sidecar()

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
            self.handles += [
                (key, page, generation) for key, (status, page, generation) in zip(keys, handles(reply), strict=True) if not status
            ]
        return reply

    def junk(self) -> None:
        """What no client of ours sends: refused, and nothing changes."""
        name = self.rng.choice([b"stranger", *self.model.connections])
        if name in self.model.connections and self.random() < 0.5:
            member = self.model.connections[name]
            self.exchange(
                name, 1, m.Hello([m.PROTOCOL_MAJOR, 0], self.new_id(), member.session.session_id, member.lock, 1, "another client")
            )
            return
        if name in self.model.connections and self.random() < 0.5:  # another session for a client whose lock is out of sight
            member = self.model.connections[name]
            process = self.known[member.client].process
            lock, hidden = process.lock, dict(self.hidden)
            process.take_lock()
            self.hidden[member.lock] = None
            self.exchange(name, 1, m.Hello([m.PROTOCOL_MAJOR, 0], member.client, self.new_id(), process.lock, 1, "another session"))
            process.lock, self.hidden = lock, hidden
            return
        payload = self.rng.choice([b"", b"junk", b"\x80", m.encode_request(m.Bye(), 1)[:-1], bytes(40)])
        self.note("junk", name)
        _, _, reply = m.decode_reply(self.core.handle(name, payload, self.now_ns), m.Bye())
        require(isinstance(reply, m.ErrorReply), "junk was answered", reply)
        self.compare(False)

    def receive(self, connection: Connection) -> None:
        number, instance, reply = connection.inbox.popleft()
        task = connection.waiting
        if task is not None and number == connection.sent:
            connection.waiting = None
            connection.debts += connection.told.values()  # answers come in order, so what is still open has lost its own
            connection.told.clear()
            if isinstance(reply, m.HelloReply):
                connection.greeted = instance
            self.go_on(task, reply)
        else:
            told = connection.told.pop(number, None)
            if told is not None and isinstance(reply, m.ErrorReply) and reply.error == ErrorCode.NO_SESSION:
                connection.debts.append(told)

    def give_up(self, task: Task) -> None:
        """Its reply did not come in time."""
        assert task.connection is not None
        self.note("times out", task.client.number, task.what)
        task.connection.waiting = None
        self.go_on(task, LOST)

    def go_on(self, task: Task, value: Any) -> None:
        """The client takes its next step, up to its next request or to where others may come in between."""
        task.connection = None
        try:
            wanted = task.steps.send(value)
        except StopIteration:
            if task in task.client.tasks:
                task.client.tasks.remove(task)
            return
        task.copies = wanted is COPY
        if isinstance(wanted, tuple):
            task.connection, request = wanted
            task.connection.send(request)
            task.connection.waiting = task

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

    def read(self, layout: int, page: int, half: int) -> list[tuple[int, ...]]:
        return [self.pool[grain] for shard in range(LAYOUTS[layout].shards) for grain in self.grains(layout, page, shard, half)[0]]

    def is_written(self, layout: int, key: bytes, page: int, generation: int, shard: int) -> bool:
        there = [self.pool[grain] for half in (0, 1) for grain in self.grains(layout, page, shard, half)[0]]
        return there == [run for run in self.content(layout, key, generation) if run[2] == shard]

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
                found.append((key, state == bytes_of.READY, flags, shards, generation, page, space, checksum, done))
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
                block.checksum,
                sum(1 << n for n in block.done),
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

    # ---- what happens ---------------------------------------------------------------------------------------------------------------

    def note(self, *what: Any) -> None:
        self.log.append((self.steps, *what))

    @property
    def clients(self) -> list[Client]:
        return [client for process in self.processes for client in process.clients]

    def connections(self) -> list[Connection]:
        return [connection for client in self.clients for connection in client.connections] + self.orphans

    def spawn(self) -> None:
        """A new process: a scheduler, a worker of an engine that is there, or one with two clients of different sessions."""
        if sum(process.alive for process in self.processes) >= MAX_PROCESSES:
            return
        process = Process(self, self.ids, device=self.random() < 0.35, beats=self.random() < 0.9)
        process.pidfd = self.random() < 0.5
        for session in self.rng.sample(self.sessions, self.rng.choice([1, 1, 2])):
            client = Client(process, self.ids, session)
            self.known[client.id] = client
            process.clients.append(client)
        self.processes = [other for other in self.processes if other.alive]
        self.processes.append(process)
        self.note("process starts", process.number, "device" if process.device else "")

    def kill(self, process: Process) -> None:
        """The kernel drops its locks; requests that it sent may still arrive; its driver may still copy for a moment."""
        self.note("process killed", process.number)
        process.alive = False
        longest = 20 if all(client.id in self.exits for client in process.clients) else 4
        process.exit_ns = self.now_ns + int(self.random() * longest * SECOND) if process.device else self.now_ns
        for client in process.clients:
            for task in client.tasks:
                if task.connection is not None:
                    task.connection.waiting = None
                elif process.device and task.copies:
                    self.drivers.append(task)
                    continue
                task.steps.close()
            client.tasks.clear()
            for connection in client.connections:
                if connection.outbox and self.random() < 0.5:
                    self.orphans.append(connection)
            client.connections.clear()

    def drive(self, task: Task) -> None:
        """The device of a dead process finishes a copy. Nobody is left to go on after it."""
        try:
            wanted = None if task.client.process.exited else task.steps.send(None)
        except StopIteration:
            wanted = None
        if wanted is not COPY:
            task.steps.close()
            self.drivers.remove(task)

    def start_task(self, client: Client) -> None:
        kind, pick = self.random(), self.rng.choice
        layout = pick(self.layouts)
        keys = self.rng.sample(KEYS[layout][: pick([3, NAMES])], pick([1, 1, 2, 3]))  # some are wanted more than others
        if kind < 0.45:
            shards = range(LAYOUTS[layout].shards)
            items = [(key, shard) for key in keys for shard in (shards if self.random() < 0.5 else [pick(shards)])]
            if self.random() < 0.05:
                items.append(pick(items))
            ending = "commit" if self.random() < 0.8 else pick(["abort", "part", "wrong"])
            steps, what = client.save(layout, items, ending), "save"
        elif kind < 0.8:
            reader = pick(
                [other for other in self.clients if other.session == client.session and other.process.alive and not other.closing]
            )
            steps, what = client.load(layout, keys, reader), "load"
        elif kind < 0.87 and client.kept:
            handle, of = pick(client.kept)
            steps, what = client.read(of, [handle]), "peek"
        elif kind < 0.90:
            steps, what = client.say(lambda index: m.Lookup(index, b"".join(keys)), layout), "lookup"
        elif kind < 0.93 and client.kept:
            (key, _, generation), of = pick(client.kept)
            of = of if self.random() < 0.8 else layout
            steps, what = client.say(lambda index: m.Discard(index, key, generation.to_bytes(8, "little")), of), "discard"
        elif kind < 0.95:
            everything = self.random() < 0.3
            steps, what = client.say(lambda index: m.Clear(m.ALL_NAMESPACES if everything else index), layout), "clear"
        elif kind < 0.96:
            steps, what = client.say(lambda index: m.StatusRequest()), "status"
        elif kind < 0.98:
            steps, what = client.say(pick(self.odd_requests(client, layout)), layout), "odd"
        else:
            client.closing = True
            steps, what = client.bye(), "bye"
        self.start(client, what, steps)

    def start(self, client: Client, what: str, steps: Any) -> None:
        task = Task(client, what, steps)
        client.tasks.append(task)
        self.note("starts", client.number, what)
        self.go_on(task, None)

    def odd_requests(self, client: Client, layout: int) -> list[Any]:
        """What honest clients do not send, or not now."""
        key, tag = KEYS[layout][1], client.new_tag()
        unknown = self.rng.randrange(self.sizes["max_namespaces"] + 1)  # or one that this client does not know, or knows as another
        return [
            lambda index: m.Reserve(index, tag, key, (LAYOUTS[layout].shards).to_bytes(2, "little")),
            lambda index: m.Commit(tag, key, bytes(2), (1).to_bytes(8, "little"), bytes(8)),
            lambda index: m.Lookup(unknown, key),
            lambda index: m.Reserve(unknown, tag, key, (64).to_bytes(2, "little")),
            lambda index: m.Acquire(unknown, tag, bytes(31) + b"x"),
            lambda index: m.Discard(unknown, key, bytes(8)),
            lambda index: m.Clear(unknown),
            lambda index: m.Hello([m.PROTOCOL_MAJOR, 0], client.id, client.session, client.process.lock, 1, "again"),
            lambda index: m.Register(TOO_LARGE.encode()),
            lambda index: m.Register(b"junk"),
            lambda index: m.Hello([m.PROTOCOL_MAJOR, 0], client.id, self.new_id(), client.process.lock, 1, ""),
            lambda index: m.Hello([m.PROTOCOL_MAJOR, 0], client.id, client.session, self.new_id(), 1, ""),
        ]

    def fault(self) -> None:
        kind, pick = self.random(), self.rng.choice
        process = pick(self.processes) if self.processes else None
        if process is None or kind < 0.12:
            self.spawn()
        elif kind < 0.24:
            if process.alive:
                self.kill(process)
        elif kind < 0.40:
            if process.runs:
                self.note("process stopped", process.number)
                process.stop()
        elif kind < 0.44:
            self.hang()
        elif kind < 0.60:
            if process.stopped:
                self.note("process continues", process.number)
                process.resume()
        elif kind < 0.65:
            lock = pick(process.locks)
            self.note("lock hidden", process.number)
            self.hidden[lock] = None
        elif kind < 0.70:
            self.hidden.clear()
        elif kind < 0.74:
            if self.core is not None and not self.paused:
                self.lose_locks()
        elif kind < 0.82:
            if self.core is not None:
                self.kill_sidecar()
        elif kind < 0.86:
            self.paused = self.rng.randrange(1, 12)
            self.note("sidecar stopped")
        elif kind < 0.90:
            connections = self.connections()
            if connections and self.core is not None:
                self.cut(pick(connections))
        elif kind < 0.93:
            self.scribble()
        elif kind < 0.96:
            self.note("the clock jumps, for nobody runs")
            self.now_ns += self.rng.randrange(60 * SECOND)
        elif self.core is not None and not self.paused:
            self.junk()

    def lose_locks(self) -> None:
        """A process that does nothing closes a file too many and loses its locks with it; then it takes another one, and says so."""
        idle = [process for process in self.processes if process.alive and not any(client.tasks for client in process.clients)]
        if not idle:
            return
        process = self.rng.choice(idle)
        self.note("all locks lost, another one taken", process.number)
        process.locks.clear()
        process.take_lock()
        if process.device and self.random() < 0.7:
            self.watch()  # so its connections are no good any more
            return
        for connection in [connection for client in process.clients for connection in client.connections]:
            self.cut(connection)

    def hang(self) -> None:
        """An engine that has promised blocks stands still."""
        pinning = [session for session in self.model.sessions.values() if session.pins]
        if not pinning:
            return
        session = self.rng.choice(pinning)
        for client in session.members:
            process = self.known[client].process
            if process.runs:
                self.note("process stopped", process.number)
                process.stop()
        if self.core is not None and not self.paused:
            self.watch_for_long()

    def watch_for_long(self) -> None:
        """Nothing else happens for a while."""
        for _ in range(self.rng.randrange(20)):
            self.pass_time(self.rng.choice([SECOND // 4, SECOND, SECOND, SECOND, 2 * SECOND]))
            self.watch()

    def cut(self, connection: Connection) -> None:
        """A connection is gone, with all that is under way on it."""
        self.note("connection cut", connection.name)
        connection.outbox.clear()
        connection.inbox.clear()
        connection.broken = True
        self.core.forget(connection.name)
        self.model.forget(connection.name)
        if connection in self.orphans:
            self.orphans.remove(connection)
        elif not connection.busy:
            connection.client.drop(connection)

    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        self.alive_ns += ns

    def step(self) -> bool:
        """One event. False when nothing is left to happen."""
        self.steps += 1
        rng = self.random
        self.pass_time(int(rng() * 0.1 * SECOND) if rng() < 0.97 else int(rng() * 7 * SECOND))
        if self.paused:
            self.paused -= 1
            if not self.paused:
                self.pass_time(60 * SECOND)
        up = self.core is not None and not self.paused
        kind = rng()
        if not self.calm and kind < 0.045:
            self.fault()
            return True
        if kind < 0.09 or (not up and kind < 0.15):
            if self.core is None:
                self.start_sidecar()
            elif up:
                self.watch()
                if rng() < 0.1:
                    self.watch_for_long()
            return True
        clients = [client for client in self.clients if client.process.runs]
        if not self.calm and kind < 0.24:
            free = [client for client in clients if len(client.tasks) < MAX_TASKS and not client.closing]
            if free:
                self.start_task(self.rng.choice(free))
                return True
        events: list[tuple[Any, Any]] = []
        if up:
            events += [(self.deliver, connection) for connection in self.connections() if connection.outbox]
        for client in clients:
            events += [(self.receive, connection) for connection in client.connections if connection.inbox]
            for task in client.tasks:
                if task.connection is None:
                    events.append((self.advance, task))
                elif task.connection.broken or not up or rng() < 0.01 or not (task.connection.outbox or task.connection.inbox):
                    events.append((self.give_up, task))
        events += [(self.drive, task) for task in self.drivers]
        if not events:
            return False
        what, whom = self.rng.choice(events)
        what(whom)
        return True

    def advance(self, task: Task) -> None:
        self.go_on(task, None)

    # ---- the end --------------------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Whatever happened, nothing stays behind: first all that is under way ends, then everybody leaves or dies, and then every key can
        be written again."""
        self.paused, self.calm = 0, True
        self.hidden.clear()
        if self.core is None:
            self.start_sidecar()
        for process in self.processes:
            if process.stopped:
                process.resume()
        if self.random() < 0.6:
            self.drain()
        for process in self.processes:
            if process.alive:
                self.kill(process)
        for connection in list(self.orphans):
            while connection.outbox:
                self.deliver(connection)
        for _ in range(4):
            self.pass_time(10 * SECOND)
            self.watch()
        stats = self.tables.stats()
        left = {name: stats[name] for name in ("members", "pins", "shards_in_flight", "doomed")}
        require(not any(left.values()), "everybody is gone, and there still are", left)
        self.write_every_key()
        self.tables.set_removed()
        keys, handles_now = (
            b"".join(KEYS[self.layouts[0]]),
            [(key, block.page, block.generation) for key, block in self.model.blocks.items()],
        )
        for space in range(self.sizes["max_namespaces"]):
            require(not any(self.view.lookup(space, keys)), "a pool that was removed has hits")
            require(self.view.lookup_prefix(space, keys) == 0 and self.view.lookup_reverse(space, keys) == -1, "a removed pool has hits")
        require(not any(self.check_handles(handles_now)), "a handle of a removed pool is good")

    def drain(self) -> None:
        """Everybody lives and finishes what was begun, and pays what is owed: nothing is held any more."""
        for _ in range(DRAIN_STEPS):
            if self.step():
                continue
            owing = [client for client in self.clients if client.id in self.model.members and client.owes()]
            if not owing:
                break
            self.start(owing[0], "pay", owing[0].say(lambda index: m.Lookup(0, KEYS[0][0]), self.layouts[0]))
        else:
            raise Violation("the clients do not come to rest")
        self.watch()
        for block in self.model.blocks.values():  # but the pins of the dead while their session lives, and what their drivers may write
            held = [tag >> 16 for _, tag in (*block.pins, *block.writers.values())]
            living = [client.number for client in self.clients if client.process.alive and client.number in held]
            require(not living, "nobody does anything, and still hold", short(block.key, "keys"), living)

    def write_every_key(self) -> None:
        process = Process(self, self.ids, device=False, beats=False)
        name = self.new_name()
        self.exchange(name, 1, m.Hello([m.PROTOCOL_MAJOR, 0], self.new_id(), self.new_id(), process.lock, 1, "the last one"))
        for known in list(self.model.spaces):
            if known is None:
                continue
            layout = FINGERPRINTS.index(known[0])
            index = self.exchange(name, 1, m.Register(ENCODED[layout])).index
            for key in KEYS[layout]:
                other = self.model.blocks.get(key)
                for shard in range(LAYOUTS[layout].shards):
                    reply = self.exchange(name, 1, m.Reserve(index, 1, key, shard.to_bytes(2, "little")))
                    foreign = other is not None and other.space != index
                    require(foreign or reply.statuses[0] in (Status.OK, Status.EXISTS), "a key is busy forever", key, reply)
                    self.exchange(name, 1, m.Abort(joined_tags(1)))


def run(seed: int, steps: int) -> None:
    """One seed. Violation (or whatever the core raised) carries what happened last and how to see it again."""
    with patch.object(core_module, "MAX_CONNECTIONS", MAX_CONNECTIONS):
        world = World(seed)
        try:
            while world.steps < steps:
                world.step()
            world.end()
        except Exception as error:
            events = "\n".join("  " + " ".join(map(short, event)) for event in world.log)
            raise Violation(
                f"seed {seed}, step {world.steps}: {type(error).__name__}: {error}\nthe last {len(world.log)} events:\n{events}\n"
                f"again: python -m tests.sim --seeds 1 --first {seed} --steps {steps}"
            ) from error
        finally:
            world.close()


def short(value: Any, name: str = "") -> str:
    """For a person who reads what happened: ids and keys as the numbers they were made of."""
    if hasattr(value, "__dataclass_fields__"):
        fields = " ".join(f"{each}={short(getattr(value, each), each)}" for each in value.__dataclass_fields__ if each != "protocol")
        return f"{type(value).__name__.lower()}({fields})"
    if not isinstance(value, bytes):
        return str(value)
    if name == "keys":
        return ",".join(str(NUMBERS[key]) for key in split(value))
    width = {"shards": 2, "generations": 8, "tags": 8}.get(name)
    if width:
        return ",".join(str(int.from_bytes(value[i : i + width], "little")) for i in range(0, len(value), width))
    return (
        f"#{int.from_bytes(value, 'little')}"
        if len(value) == 16
        else f"{len(value)} bytes"
        if len(value) > 16
        else value.decode(errors="replace")
    )
