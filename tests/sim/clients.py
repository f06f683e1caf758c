"""What stands around the sidecar in the simulation: processes with their locks and heartbeats, clients, connections, and what clients do.

A client does what connector/client.py and connector/store.py do, in the same order: hello, register, reserve, copy, commit; acquire, copy,
check, release; an undo on the same connection for each reply that was lost. What it does is a generator, which yields where another
process may come in between: a request (it goes on with the reply, or with LOST) or None.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator
from struct import pack
from typing import TYPE_CHECKING, Any, TypeAlias

from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status
from hostkv.schemas.namespace import Layout

from .layouts import ENCODED, KEYS, LAYOUTS
from .model import handles, require

if TYPE_CHECKING:
    from .world import World

COPY = object()  # yielded before half of a copy, which a device may do when its process is dead
LOST = object()  # in the place of a reply that did not come in time
Steps: TypeAlias = Generator[Any, Any, Any]
Handle: TypeAlias = tuple[bytes, int, int]  # key, page, generation


class Process:
    """`ran_ns`: how long it has run, by which its heartbeat moves. One that has died may still have a driver that finishes its copies."""

    def __init__(self, world: World, number: int, device: bool, beats: bool) -> None:
        self.world, self.number, self.device, self.beats = world, number, device, beats
        self.lock = world.new_id()
        self.locks = [self.lock]  # all it holds: a lock that was lost sight of is still held
        world.owners[self.lock] = self
        self.alive, self.stopped, self.pidfd, self.careless = True, False, False, False
        self.started_ns = world.alive_ns  # since when it runs, or has stood still
        self.ran_ns = 0
        self.exit_ns = 0  # when the driver of one that died is done
        self.clients: list[Client] = []

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    @property
    def exited(self) -> bool:
        return not self.alive and self.world.now_ns >= self.exit_ns

    def shares_session(self, other: Process) -> bool:
        return any(mine.session == theirs.session for mine in self.clients for theirs in other.clients)

    def beat(self) -> int:
        if not self.beats:
            return 0
        ran_ns = self.ran_ns + (0 if self.stopped else self.world.alive_ns - self.started_ns)
        return 1 + ran_ns // 10**9

    def stop(self) -> None:
        self.ran_ns += self.world.alive_ns - self.started_ns
        self.stopped, self.started_ns = True, self.world.alive_ns

    def resume(self) -> None:
        self.stopped, self.started_ns = False, self.world.alive_ns
        self.ran_ns += 10**9  # its heart's sleep of a second is over at once

    def take_lock(self) -> None:
        """The sidecar cannot see the lock: another one, on another file. The old one stays held."""
        self.lock = self.world.new_id()
        self.locks.append(self.lock)
        self.world.owners[self.lock] = self


class Connection:
    """Requests and replies in order. `waiting` is the task that wants the reply of request `sent`; `told` what was sent without waiting."""

    def __init__(self, client: Client, name: bytes) -> None:
        self.client, self.name = client, name
        self.outbox: deque[tuple[int, m.Request]] = deque()
        self.inbox: deque[tuple[int, bytes, Any]] = deque()
        self.sent = 0
        self.waiting: Task | None = None
        self.busy = self.broken = False
        self.greeted = b""  # the instance that knows it
        self.debts: list[m.Request] = []
        self.told: dict[int, m.Request] = {}

    def send(self, request: m.Request) -> None:
        self.sent += 1
        self.outbox.append((self.sent, request))


class Task:
    def __init__(self, client: Client, what: str, steps: Steps) -> None:
        self.client, self.what, self.steps = client, what, steps
        self.connection: Connection | None = None  # the one it waits at
        self.copies = False


class Client:
    def __init__(self, process: Process, number: int, session: bytes) -> None:
        self.process, self.number, self.session = process, number, session
        self.id = process.world.new_id()
        self.connections: list[Connection] = []
        self.debts: list[m.Request] = []  # of connections that are gone
        self.indexes: dict[int, tuple[bytes, int]] = {}  # layout -> (instance, index)
        self.attached = b""  # the instance that knows of its device
        self.tasks: list[Task] = []
        self.kept: list[tuple[Handle, int]] = []  # handles of long ago, with their layout
        self.tags = number << 16
        self.closing = False

    def new_tag(self) -> int:
        self.tags += 1
        return self.tags

    def take(self) -> Connection | None:
        """One that nobody uses, in debt first; None when all there may be are in use."""
        free = [connection for connection in self.connections if not connection.busy]
        connection = next((each for each in free if each.debts or (each.told and self.process.world.calm)), free[-1] if free else None)
        world = self.process.world
        if connection is None or (not connection.debts and not world.calm and world.random() < 0.1):
            if len(self.connections) >= world.max_connections:
                return None
            connection = Connection(self, self.process.world.new_name())
            self.connections.append(connection)
        connection.busy = True
        connection.debts += self.debts
        self.debts.clear()
        return connection

    def give(self, connection: Connection) -> None:
        connection.busy = False
        if connection.broken:
            self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Of no use any more: what it owes is paid on another one."""
        self.debts += connection.debts + list(connection.told.values())
        connection.told.clear()
        connection.debts.clear()
        self.connections.remove(connection)

    def owes(self) -> bool:
        return bool(self.debts or any(connection.debts or connection.told for connection in self.connections))

    # ---- talking --------------------------------------------------------------------------------------------------------------------

    def ask(self, make: Callable[[int], m.Request], undo: m.Request | None = None, layout: int | None = None) -> Steps:
        """(reply, whether it was sent more than once); the reply is LOST when the client gives up. `layout`: whose number `make` gets."""
        world = self.process.world
        repeated = False
        for _ in range(5):
            connection = self.take()
            if connection is None:
                yield None
                continue
            reply = yield from self._prepare(connection, layout)
            if isinstance(reply, int):
                request = make(reply)
                reply = yield connection, request
                if reply is LOST and not connection.broken and world.random() < 0.3:
                    repeated = True
                    reply = yield connection, request
                if reply is LOST and undo is not None:
                    connection.debts.append(undo)
            self.give(connection)
            code = reply.error if isinstance(reply, m.ErrorReply) else ""
            if code == ErrorCode.NO_SESSION:
                connection.greeted = b""
                self.attached = b""  # it may be another member now, without a device,
                self.indexes.clear()  # and with other numbers
            elif code == ErrorCode.NO_NAMESPACE and layout is not None:
                self.indexes.pop(layout, None)
            else:
                return reply, repeated
        if undo is not None:
            self.debts.append(undo)
        return LOST, repeated

    def _prepare(self, connection: Connection, layout: int | None) -> Steps:
        """The number of the layout (0 where none is wanted) once hello was said, debts are paid and it is registered; else the reply
        that says why not."""
        world, process = self.process.world, self.process
        if not connection.greeted:
            for _ in range(2):
                version = [m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR]
                hello = m.Hello(version, self.id, self.session, process.lock, process.number, f"c{self.number}")
                reply = yield connection, hello
                if not isinstance(reply, m.ErrorReply):
                    break
                if reply.error == ErrorCode.NO_LOCK:
                    process.take_lock()
                elif reply.error == ErrorCode.BAD_VALUE:  # it is known by the lock that was out of sight for a moment
                    process.lock = process.locks[process.locks.index(process.lock) - 1]
            if not isinstance(reply, m.HelloReply):
                return reply
        if process.device and self.attached != connection.greeted:
            yield None
            if not world.attach(self):
                return LOST
        while connection.debts:
            reply = yield connection, connection.debts[0]
            if not isinstance(reply, m.CountReply):
                return reply
            del connection.debts[0]
        if layout is None:
            return 0
        known = self.indexes.get(layout)
        if known is None or known[0] != connection.greeted:
            reply = yield connection, m.Register(ENCODED[layout])
            if not isinstance(reply, m.RegisterReply):
                return reply
            known = self.indexes[layout] = (connection.greeted, reply.index)
        return known[1]

    def tell(self, undo: m.Request) -> None:
        """Sent and not waited for, where there is a connection that nobody uses; owed otherwise."""
        for connection in self.connections:
            if not connection.busy and connection.greeted and not connection.debts:
                connection.send(undo)
                connection.told[connection.sent] = undo
                return
        self.debts.append(undo)

    # ---- what it does ---------------------------------------------------------------------------------------------------------------

    def save(self, layout: int, items: list[tuple[bytes, int]], ending: str) -> Steps:
        """`ending`: commit; part (commits the first, aborts the others); wrong (commits another generation); abort."""
        world = self.process.world
        tag = self.new_tag()
        undo = m.Abort(joined_tags(tag))
        keys, shards = b"".join(key for key, _ in items), pack(f"<{len(items)}H", *(shard for _, shard in items))
        low = tag % 4 == 0
        reply, repeated = yield from self.ask(lambda index: m.Reserve(index, tag, keys, shards, int(low)), undo, layout)
        if not isinstance(reply, m.HandlesReply):
            if repeated:
                self.tell(undo)
            return
        granted = [
            (key, shard, page, generation)
            for (key, shard), (status, page, generation) in zip(items, handles(reply), strict=True)
            if status == Status.OK
        ]
        for half in (0, 1):
            yield COPY
            for key, shard, page, generation in granted:
                world.write(self, layout, key, shard, page, generation, half)
        yield None
        if ending == "part":
            granted = granted[:1]
        if granted and ending != "abort":
            moved = int(ending == "wrong")
            checksums = [world.checksum_of(layout, key, generation, shard) if world.verify else 0 for key, shard, _, generation in granted]
            commit = m.Commit(
                tag,
                b"".join(key for key, *_ in granted),
                pack(f"<{len(granted)}H", *(shard for _, shard, *_ in granted)),
                pack(f"<{len(granted)}Q", *(generation + moved for *_, generation in granted)),
                pack(f"<{len(granted)}Q", *checksums),
            )
            reply, again = yield from self.ask(lambda index: commit, undo)
            if isinstance(reply, m.StatusesReply) and moved:
                require(set(reply.statuses) == {Status.NOT_HELD}, "a handle that was never given was committed", granted)
            elif isinstance(reply, m.StatusesReply) and not again and not world.lost.intersection(generation for *_, generation in granted):
                require(not any(reply.statuses), "a writer that lives has lost its right to write", self.number, granted)
        if repeated or ending != "commit" or not isinstance(reply, m.StatusesReply) or any(reply.statuses):
            self.tell(undo)
        self.kept += [((key, page, generation), layout) for key, _, page, generation in granted]
        del self.kept[:-6]

    def prefetch(self, layout: int, keys: list[bytes], wait_ms: int, begun: list[tuple[bytes, int]]) -> Steps:
        """And loads what is there then. `begun`: some of it is half saved before."""
        if begun:
            yield from self.save(layout, begun, "commit")
        reply, _ = yield from self.ask(lambda index: m.Prefetch(index, b"".join(keys), wait_ms), None, layout)
        if isinstance(reply, m.StatusesReply):
            there = [key for key, status in zip(keys, reply.statuses, strict=True) if status == Status.OK]
            if there:
                yield from self.load(layout, there, self)

    def churn(self, layout: int, other: int) -> Steps:
        """Leaves holes between its blocks before those of another size come."""
        for of in (layout, other):
            for key in KEYS[of][2:]:
                yield from self.save(of, [(key, shard) for shard in range(LAYOUTS[of].shards)], "commit")
            if of != other and any(each == of for _, each in self.kept):
                mine = [handle for handle, each in self.kept if each == of]
                yield from self.discard(of, mine[1::2] + mine[2::4] or mine)

    def load(self, layout: int, keys: list[bytes], reader: Client) -> Steps:
        """`reader`: who copies, this client or another one of the session, as a scheduler and its worker do."""
        tag = self.new_tag()
        undo = m.Release(joined_tags(tag))
        world = self.process.world
        pins = world.pins_kept(self.session)
        got: list[Handle] = []
        lost = False  # whether an answer was, of what was done
        if world.random() < 0.1:
            keys = [*keys, keys[0]]  # which is pinned once all the same
        for batch in (keys[:1], keys[1:]) if world.random() < 0.4 else (keys,):
            if not batch:
                continue
            reply, repeated = yield from self.ask(lambda index, some=batch: m.Acquire(index, tag, b"".join(some)), undo, layout)  # type: ignore[misc]
            lost |= repeated
            if not isinstance(reply, m.HandlesReply):
                if lost or got:
                    self.tell(undo)
                return
            answers = zip(batch, handles(reply), strict=True)
            got += [(key, page, generation) for key, (status, page, generation) in answers if status == Status.OK]
        if got and reader is self:
            yield from self.read(layout, got, pins)
        elif got and reader.process.alive and not reader.closing:
            task = Task(reader, "read", reader.read(layout, got, pins))
            reader.tasks.append(task)
            while task in reader.tasks and reader.process.alive:
                yield None
        for _ in range(world.rng.choice([0, 8, 20])):  # promised, and not needed yet
            yield None
        if got or lost:
            self.tell(undo)
        self.kept += [(handle, layout) for handle in got]
        del self.kept[:-6]

    def hold(self, layout: int, keys: list[bytes]) -> Steps:
        """Pins the same blocks under two tags, in turn and for long."""
        tags = [self.new_tag(), self.new_tag()]
        for key in keys:
            for tag in tags:
                acquire = functools.partial(m.Acquire, tag=tag, keys=key)
                yield from self.ask(acquire, m.Release(joined_tags(tag)), layout)
        for _ in range(20):
            yield None
        self.tell(m.Release(joined_tags(*tags)))

    def read(self, layout: int, got: list[Handle], pins: object = None) -> Steps:
        """Copies in halves and checks. `pins`: what pins_kept() said before they were pinned; None: they are not pinned."""
        world = self.process.world
        if pins is None:  # a handle of its own save may be of a block that is not READY yet
            got = [handle for handle, seen in zip(got, world.check_handles(got), strict=True) if seen]
        halves = []
        for half in (0, 1):
            yield None
            halves.append([world.read(layout, page, half) for _, page, _ in got])
        yield None
        rows = [first + second for first, second in zip(*halves, strict=True)]
        good = world.check_handles(got, [world.checksum(row) for row in rows])
        for handle, row, verdict in zip(got, rows, good, strict=True):
            right = sorted(row) == world.content(layout, handle[0], handle[2])
            unseen = not world.verify and handle[2] in world.scribbled
            require(verdict != 1 or right or unseen, "a check passes and the bytes are not the key's", handle, row)
            kept = pins is not None and world.pins_kept(self.session) == pins
            require(verdict or not kept, "a pinned block is gone", handle)
            require(verdict != 2 or (world.verify and not right), "a checksum differs and the bytes are right", handle)
        wrong = [handle for handle, verdict in zip(got, good, strict=True) if verdict == 2]
        if wrong:
            yield from self.discard(layout, wrong)

    def discard(self, layout: int, wrong: list[Handle]) -> Steps:
        keys, generations = b"".join(key for key, *_ in wrong), pack(f"<{len(wrong)}Q", *(generation for *_, generation in wrong))
        yield from self.ask(lambda index: m.Discard(index, keys, generations), None, layout)

    def bye(self) -> Steps:
        """Once nothing else is under way and nothing is owed."""
        while len(self.tasks) > 1:
            yield None
        while self.owes() and self.id in self.process.world.model.members:
            yield from self.ask(lambda index: m.StatusRequest())
        while self.id in self.process.world.model.members:
            yield from self.ask(lambda index: m.Bye())
        self.process.clients.remove(self)

    def say(self, make: Callable[[int], m.Request], layout: int | None = None) -> Steps:
        """One request, whatever comes of it."""
        yield from self.ask(make, None, layout)


def joined_tags(*numbers: int) -> bytes:
    return pack(f"<{len(numbers)}Q", *numbers)


def geometry(layout: Layout, grain: int) -> tuple[int, int]:
    """Grains of one shard, and from one shard of a block to the next."""
    return layout.shard_bytes // grain, layout.shard_stride // grain
