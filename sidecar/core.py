"""The brain of the sidecar: a function of (state, message, now) to a reply, without socket, clock, file or thread.

The loop hands it every message (`handle`), every reply that could not be sent (`forget`), what came over the attach socket (`attach`),
what the tier has done (`complete`), takes jobs for the tier (`work`) and late replies (`replies`), and calls `watch` a few times a second;
it may ask a few things back, through the functions it was given: what can be told of a member lock, whether a process has exited, whether
an earlier sidecar's transfers have ended. So a simulation can drive it through any order of messages and deaths. All that is known of a
block lives in the tables (cext); here live connections, members, sessions, the geometry of namespaces, and counters, each with a bound. A
request is answered by its reply or by a typed error, and an error means that nothing changed. An exception that leaves this module is a
fault of ours: the loop ends the process."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from ..cext import Tables
from ..schemas import messages as m
from ..schemas.errors import ErrorCode, ProtocolError, Status
from ..schemas.layout import DEVICE, NIL, TIER
from ..schemas.namespace import KEY_BYTES, Layout, NamespaceError
from .errors import StartupError
from .movement import Movement
from .tiers import Done, Job, Space, Tier

MAX_CONNECTIONS = 16  # of one member; the oldest is forgotten when it opens more, and its next request is answered NO_SESSION
SILENT_NS = 10 * 10**9  # without a heartbeat or a request of any of its members a session loses its pins, and nothing else
DEVICE_WAIT_NS = 5 * 10**9  # from the end of a device member's lock to the end of what its driver does, where no pidfd tells
WATCH_STEP_NS = 10**9  # what one watch adds to a member's silence at most: a sidecar that was stopped itself has seen none
NEVER_NS = 1 << 62
MAX_ERROR_CHARACTERS = 1000  # of the message for people, which may quote what the client sent


@dataclass(frozen=True, slots=True)
class Facts:
    """What the core tells others and cannot know itself."""

    version: str
    instance_id: bytes
    pid: int
    endpoint: str
    pool_name: str
    pool_path: str
    tables_path: str
    pool_bytes: int
    tables_bytes: int
    extent_bytes: int
    max_blocks: int
    max_shards: int
    max_pins: int
    max_members: int
    max_namespaces: int
    verify: bool
    eviction: str
    started_ns: int


class Look(NamedTuple):
    """What can be told of a member lock. `held` None: nothing, its file is gone or cannot be looked at. `beat`: its holder's heartbeat, a
    number that changes every second; 0 where there is none."""

    held: bool | None
    beat: int = 0


class Event(NamedTuple):
    """Something that `watch` found and did, for the log."""

    what: str
    client: str
    pid: int


@dataclass(slots=True)
class Session:
    """All processes of one engine. `pins` maps a request tag to the head of its chain of pin records in the tables."""

    number: int
    session_id: bytes
    members: set[int] = field(default_factory=set)
    pins: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Member:
    """One client of a session. `namespaces`: the fingerprint it was told each number for, by this instance. The number of a namespace
    without blocks may be given to another one, and who does not know must not write with the old geometry; who knew it for the one is
    never told it for the other, since what it sends could mean either. `silent_ns`: how long its heartbeat is seen to stand still
    since it last asked anything, which it may do before its heartbeat moves again.
    `ending_ns`: when the lock of a member with a device was first seen free."""

    index: int
    client_id: bytes
    lock: bytes
    session: Session
    pid: int
    flags: int = 0
    name: str = ""
    beat: int = 0
    silent_ns: int = 0
    ending_ns: int | None = None
    connections: dict[bytes, None] = field(default_factory=dict)  # oldest first
    namespaces: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Waiting:
    """A request that is answered later: a prefetch until `left` has come, or a clear until the tier has done `jobs`."""

    request_id: int
    request: m.Prefetch | m.Clear
    deadline_ns: int
    left: set[bytes] = field(default_factory=set)
    jobs: set[int] = field(default_factory=set)
    cleared: int = 0
    failed: bool = False


def certainly_gone(members: list[tuple[int, bytes, bytes, bytes, int, int, int]], look: Callable[[bytes], Look]) -> set[int]:
    """Which members of adopted tables can touch the pool no more. A device's driver may outlive its process, and a tier's transfers: those
    are watched first."""
    return {index for index, _, _, lock, _, _, flags in members if not flags and look(lock).held is False}


class Core:
    """`tables` is either new (`adopted` False) or adopted and not yet repaired. `look(lock)` tells of a member lock; `exited(client)`
    whether the process of a client has exited, None where no pidfd of it is held; `quiet()` whether nothing that earlier sidecars began to
    move between this pool and a tier can still go on."""

    def __init__(
        self,
        tables: Tables,
        facts: Facts,
        look: Callable[[bytes], Look],
        exited: Callable[[bytes], bool | None],
        adopted: bool = False,
        tier: Tier | None = None,
        quiet: Callable[[], bool] = lambda: True,
    ) -> None:
        self.tables = tables
        self.facts = facts
        self.instance_id = facts.instance_id
        self._look = look
        self._exited = exited
        self._quiet = quiet
        self._tier = tier
        self._watched_ns = 0
        self._connections: dict[bytes, Member] = {}
        self._members: dict[int, Member] = {}
        self._clients: dict[bytes, Member] = {}
        self._sessions: dict[bytes, Session] = {}
        self._fingerprints: dict[int, bytes] = {}
        self._spaces: dict[int, Space] = {}  # filled as they are asked for
        self._waiting: dict[bytes, Waiting] = {}  # by connection
        self._replies: list[tuple[bytes, bytes]] = []
        self._requests: dict[str, int] = dict.fromkeys(m.VERBS, 0)
        self._errors: dict[str, int] = {code.value: 0 for code in ErrorCode}
        self._items: dict[str, int] = dict.fromkeys(
            (
                *("found", "missed", "acquired", "reserved", "exists", "busy", "full", "throttled", "committed", "not_held", "aborted"),
                *("released", "discarded"),
            ),
            0,
        )
        self._members_gone = self._sessions_silenced = 0
        if adopted:
            self._adopt()
        self.adopted_blocks = tables.stats()["ready"]
        self._movement = self._begin_to_move(tier) if tier is not None else None

    def _adopt(self) -> None:
        """Takes over the members that are not certainly gone, with their pins and shards; the others are dropped."""
        found = self.tables.members()
        dead = certainly_gone(found, self._look)
        pins = self.tables.repair(sorted(dead))
        for index, client_id, session_id, lock, number, pid, flags in found:
            if index not in dead:
                self._join(index, client_id, session_id, lock, number, pid).flags = flags
        numbers = {session.number: session for session in self._sessions.values()}
        for number, tag, head in pins:
            numbers[number].pins[tag] = head
        for index, fingerprint, *_ in self.tables.namespaces():
            self._fingerprints[index] = fingerprint

    def _begin_to_move(self, tier: Tier) -> Movement:
        """A member and a session of our own, named like this start, that transfers belong to."""
        own = self.instance_id
        index = self.tables.member_add(own, own, own, number := self._unused_session(), self.facts.pid, TIER)
        if index < 0:
            raise StartupError(f"the pool's tables hold {self.facts.max_members} members, none is left for the tiers; stop an engine")
        member = self._join(index, own, own, own, number, self.facts.pid)
        member.flags, member.name = TIER, "tier"
        return Movement(self.tables, tier, index, number, self._space)

    # ---- what the loop calls ------------------------------------------------------------------------------------------------------

    def handle(self, connection: bytes, payload: bytes, now_ns: int) -> bytes:
        """The reply to one message of one connection, b"" where it comes later, through `replies`. `now_ns` is CLOCK_MONOTONIC. What a
        connection waits for ends with its next message, so its answers come in the order of its requests."""
        if connection in self._waiting:
            self._end_wait(connection)
        request_id, request = m.decode_request(payload)
        try:
            if isinstance(request, ProtocolError):
                raise request
            self._requests[request.verb] += 1
            reply = self._answer(connection, request, now_ns)
        except ProtocolError as error:
            return self._refuse(request_id, error.code, error.message)
        if isinstance(reply, Waiting):
            reply.request_id = request_id
            self._waiting[connection] = reply
            return b""
        return m.encode_reply(reply, request_id, self.instance_id)

    def replies(self) -> list[tuple[bytes, bytes]]:
        """(connection, reply) of requests that had to wait, to be sent before anything else that goes to these connections."""
        replies, self._replies = self._replies, []
        return replies

    def work(self, now_ns: int, transfers: bool = True) -> list[Job]:
        """Jobs for the tier, as many as it has room for. `transfers` False: none that moves blocks."""
        assert self._movement is not None
        jobs = self._movement.work(now_ns, transfers)
        self._look_at_waiting()
        return jobs

    def complete(self, done: list[Done], now_ns: int) -> None:
        """What the tier says of its jobs."""
        assert self._movement is not None
        self._movement.complete(done, now_ns)
        self._look_at_waiting()

    def end_members(self) -> None:
        """Nobody is served any more: what is pinned can be spilled, and nothing needs to come."""
        for member in list(self._members.values()):
            if not member.flags & TIER:
                self._leave(member)
        if self._movement is not None:
            self._movement.want_nothing()

    def waits(self) -> bool:
        """Whether anybody waits for a late reply."""
        return bool(self._waiting)

    def moving(self) -> bool:
        """Whether jobs have been given out, or are to be, whose end has not come."""
        return self._movement is not None and not self._movement.idle()

    def refuse_frames(self, frames: int) -> bytes:
        """The reply to a message of the wrong number of frames."""
        return self._refuse(0, ErrorCode.BAD_MESSAGE, f"message of {frames} frames, must be one")

    def internal_error(self, payload: bytes) -> bytes:
        """What the sender of the message that made the core fail is told before the process ends."""
        request_id, _ = m.decode_request(payload)
        return self._refuse(request_id, ErrorCode.INTERNAL, "the sidecar met a fault of its own and ends; its log has the traceback")

    def forget(self, connection: bytes) -> bool:
        """A reply could not be sent: the connection, if it is known, has to say hello again. Its member stays; the kernel tells when that
        one is gone."""
        member = self._connections.pop(connection, None)
        self._waiting.pop(connection, None)
        if member is not None:
            del member.connections[connection]
        return member is not None

    def locks(self) -> set[bytes]:
        """The names of the locks of members, whose files must stay."""
        return {member.lock for member in self._members.values() if not member.flags & TIER}

    def clients(self) -> set[bytes]:
        """The ids of the clients that are members."""
        return set(self._clients)

    def attach(self, client_id: bytes) -> bool:
        """This client is about to give the pool to a device driver. False: it is no member; it has to say hello first."""
        member = self._clients.get(client_id)
        if member is None or member.flags & TIER:
            return False
        member.flags = DEVICE
        self.tables.member_set_flags(member.index, DEVICE)
        return True

    def watch(self, now_ns: int) -> list[Event]:
        """Looks at every member: ends those that are certainly gone, and the pins of sessions that have hung for long."""
        step_ns = min(now_ns - self._watched_ns, WATCH_STEP_NS)
        self._watched_ns = now_ns
        looks = {lock: self._look(lock) for lock in self.locks()}
        events = []
        for connection in [each for each, waiting in self._waiting.items() if now_ns >= waiting.deadline_ns]:
            self._end_wait(connection)
        for member in list(self._members.values()):
            if member.flags & TIER:
                if member.client_id != self.instance_id and self._quiet():
                    self._leave(member)
                    events.append(Event("transfers of an earlier sidecar have ended", member.client_id.hex(), member.pid))
                continue
            held, beat = looks[member.lock]
            if held is False:
                if self._is_gone(member, now_ns):
                    self._leave(member)
                    self._members_gone += 1
                    events.append(Event("member gone", member.client_id.hex(), member.pid))
            elif held and beat and beat == member.beat:
                member.silent_ns += step_ns
            else:
                member.beat, member.silent_ns = beat, 0
        for session in self._sessions.values():
            if session.pins and all(self._members[index].silent_ns >= SILENT_NS for index in session.members):
                self._unpin(session)
                self._sessions_silenced += 1
                member = self._members[min(session.members)]
                events.append(Event("session hangs, its pins are given back", member.client_id.hex(), member.pid))
        return events

    def _is_gone(self, member: Member, now_ns: int) -> bool:
        """Whether nothing can touch the pool for this member any more, given that its lock is free."""
        if not member.flags & DEVICE:
            return True
        if member.ending_ns is None:
            member.ending_ns = now_ns
            self._dismiss(list(member.connections))
        exited = self._exited(member.client_id)
        return exited if exited is not None else now_ns - member.ending_ns >= DEVICE_WAIT_NS

    # ---- who may say what ---------------------------------------------------------------------------------------------------------

    def _answer(self, connection: bytes, request: m.Request, now_ns: int) -> m.Reply | Waiting:
        """A connection is NEW until its hello is accepted, then MEMBER until bye, a lost reply or the end of the member's lock:

        state    hello      status    any other verb
        NEW      -> MEMBER  answered  NO_SESSION
        MEMBER   renews     answered  answered; bye -> NEW
        """
        if isinstance(request, m.Hello):
            return self._hello(connection, request, now_ns)
        if isinstance(request, m.StatusRequest):
            return m.StatusReply(self.status(now_ns))
        member = self._connections.get(connection)
        if member is None:
            raise ProtocolError(ErrorCode.NO_SESSION, f"{request.verb}: say hello first; this connection is unknown to this instance")
        member.silent_ns = 0
        if isinstance(request, m.Prefetch):
            return self._prefetch(member, request, now_ns)
        return _HANDLERS[type(request)](self, member, request)

    def _hello(self, connection: bytes, request: m.Hello, now_ns: int) -> m.HelloReply:
        member = self._connections.get(connection)
        if member is not None and member.client_id != request.client:
            raise ProtocolError(ErrorCode.BAD_VALUE, "client: this connection belongs to another client; say bye or open a new one")
        if not any(request.lock) or not self._look(request.lock).held:  # zero is what an unused record has, and no name
            raise ProtocolError(ErrorCode.NO_LOCK, f"lock: nobody is seen to hold members/{request.lock.hex()} in the run directory")
        member = self._clients.get(request.client)
        session = self._sessions.get(request.session)
        if (member is not None and member.flags & TIER) or (session is not None and self._is_tiers(session)):
            raise ProtocolError(ErrorCode.BAD_VALUE, "client, session: a sidecar's own; draw them at random")
        if member is not None and (member.session.session_id, member.lock) != (request.session, request.lock):
            held = self._look(member.lock).held
            if held is False and not member.flags & DEVICE:
                self._leave(member)
                member = None
            elif held or member.session.session_id != request.session:
                raise ProtocolError(ErrorCode.BAD_VALUE, "client: it already is a member with another session or lock")
            else:  # its lock file was removed under it: it lives, may be writing, and holds another lock now
                self.tables.member_set_lock(member.index, request.lock)
                member.lock = request.lock
        if member is None:
            member = self._add(request)
        member.name, member.pid, member.silent_ns, member.ending_ns = request.name, request.pid, 0, None
        member.connections.pop(connection, None)
        while len(member.connections) >= MAX_CONNECTIONS:
            self._dismiss([next(iter(member.connections))])
        member.connections[connection] = None
        self._connections[connection] = member
        facts = self.facts
        return m.HelloReply(
            protocol=[m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR],
            version=facts.version,
            pool_path=facts.pool_path,
            tables_path=facts.tables_path,
            pool_epoch=self.tables.pool_epoch,
            pool_bytes=facts.pool_bytes,
            tables_bytes=facts.tables_bytes,
            clock_ns=now_ns,
            verify=int(facts.verify),
        )

    # ---- members and sessions -----------------------------------------------------------------------------------------------------

    def _add(self, request: m.Hello) -> Member:
        session = self._sessions.get(request.session)
        number = session.number if session is not None else self._unused_session()
        index = self.tables.member_add(request.client, request.session, request.lock, number, request.pid)
        if index < 0:
            raise ProtocolError(ErrorCode.LIMIT, f"{self.facts.max_members} clients are connected, the limit of this sidecar")
        return self._join(index, request.client, request.session, request.lock, number, request.pid)

    def _is_tiers(self, session: Session) -> bool:
        return any(self._members[index].flags & TIER for index in session.members)

    def _unused_session(self) -> int:
        used = {known.number for known in self._sessions.values()}
        return next(n for n in count() if n not in used)

    def _join(self, index: int, client_id: bytes, session_id: bytes, lock: bytes, number: int, pid: int) -> Member:
        session = self._sessions.setdefault(session_id, Session(number, session_id))
        member = Member(index, client_id, lock, session, pid)
        session.members.add(index)
        self._members[index] = self._clients[client_id] = member
        return member

    def _leave(self, member: Member) -> None:
        """Ends a member: its shards in flight are aborted, and with the last one its session's pins end."""
        session = member.session
        self._items["aborted"] += self.tables.member_remove(member.index)
        self._dismiss(list(member.connections))
        del self._members[member.index], self._clients[member.client_id]
        session.members.remove(member.index)
        if not session.members:
            self._unpin(session)
            del self._sessions[session.session_id]

    def _dismiss(self, connections: list[bytes]) -> None:
        """They have to say hello again. Every request gets a reply, so what they wait for is answered."""
        for connection in connections:
            if connection in self._waiting:
                self._end_wait(connection)
            self.forget(connection)

    def _unpin(self, session: Session) -> None:
        for head in session.pins.values():
            self._items["released"] += self.tables.release(head)
        session.pins.clear()

    def _bye(self, member: Member, request: m.Bye) -> m.Empty:
        self._leave(member)
        return m.Empty()

    # ---- namespaces ---------------------------------------------------------------------------------------------------------------

    def _register(self, member: Member, request: m.Register) -> m.RegisterReply:
        try:
            layout = Layout.decode(request.namespace)
        except NamespaceError as error:
            raise ProtocolError(ErrorCode.BAD_NAMESPACE, str(error)) from None
        if layout.slot_bytes > self.facts.extent_bytes:
            raise ProtocolError(
                ErrorCode.BAD_NAMESPACE,
                f"a block takes {layout.slot_bytes} bytes of the pool ({layout.shards} x {layout.shard_bytes}, aligned), "
                f"pool.extent_size is {self.facts.extent_bytes}; make blocks smaller or raise pool.extent_size (and pool.size)",
            )
        label = layout.model.encode()[: m.MAX_NAME_BYTES].decode(errors="ignore")
        fingerprint = layout.fingerprint()
        number = next((index for index, known in self._fingerprints.items() if known == fingerprint), None)
        if number is None and len(self._fingerprints) == self.facts.max_namespaces:
            number = next((index for index, _, _, _, _, blocks, _ in self.tables.namespaces() if not blocks), None)  # it is replaced
            if number is None:
                raise ProtocolError(ErrorCode.LIMIT, f"{self.facts.max_namespaces} namespaces hold blocks, the limit of this sidecar")
        if number is not None and member.namespaces.get(number, fingerprint) != fingerprint:
            raise ProtocolError(ErrorCode.LIMIT, f"this client may still use number {number} for a namespace that was replaced")
        index = self.tables.namespace_add(fingerprint, layout.shard_bytes, layout.shards, label)
        if self._fingerprints.get(index) != fingerprint:
            self._spaces.pop(index, None)
        self._fingerprints[index] = member.namespaces[index] = fingerprint
        return m.RegisterReply(index)

    def _need_namespace(self, member: Member, index: int) -> None:
        if member.namespaces.get(index, b"") != self._fingerprints.get(index):
            raise ProtocolError(ErrorCode.NO_NAMESPACE, f"index {index} is not a namespace this client has registered with this instance")

    def _space(self, index: int) -> Space:
        """What is behind a namespace's number, for the tier."""
        if index not in self._spaces:
            for number, fingerprint, shard_bytes, shards, slot_bytes, _, label in self.tables.namespaces():
                self._spaces[number] = Space(fingerprint, shards, shard_bytes, slot_bytes, label)
        return self._spaces[index]

    def _clear(self, member: Member, request: m.Clear) -> m.CountReply | Waiting:
        if request.index != m.ALL_NAMESPACES:  # which is NIL, that of every namespace
            self._need_namespace(member, request.index)
        cleared = self.tables.clear(request.index)
        if self._movement is not None:
            jobs = self._movement.forget(None if request.index == m.ALL_NAMESPACES else request.index)
            if jobs:
                return Waiting(0, request, NEVER_NS, jobs=jobs, cleared=cleared)
        return m.CountReply(cleared)

    # ---- blocks -------------------------------------------------------------------------------------------------------------------

    def _lookup(self, member: Member, request: m.Lookup) -> m.LookupReply:
        self._need_namespace(member, request.index)
        found = self.tables.lookup(request.index, request.keys)
        self._count(found, _LOOKED_UP)
        return m.LookupReply(found)

    def _reserve(self, member: Member, request: m.Reserve) -> m.HandlesReply:
        self._need_namespace(member, request.index)
        try:
            statuses, pages, generations = self.tables.reserve(
                request.index, member.index, request.tag, request.keys, request.shards, bool(request.low_priority)
            )
        except ValueError as error:  # a shard the namespace does not have
            raise ProtocolError(ErrorCode.BAD_VALUE, f"shards: {error}") from None
        self._count(statuses, _RESERVED)
        return m.HandlesReply(statuses, pages, generations)

    def _commit(self, member: Member, request: m.Commit) -> m.StatusesReply:
        statuses = self.tables.commit(member.index, request.tag, request.keys, request.shards, request.generations, request.checksums)
        self._count(statuses, _COMMITTED)
        return m.StatusesReply(statuses)

    def _abort(self, member: Member, request: m.Abort) -> m.CountReply:
        aborted = self.tables.abort(member.index, request.tags)
        self._items["aborted"] += aborted
        return m.CountReply(aborted)

    def _acquire(self, member: Member, request: m.Acquire) -> m.HandlesReply:
        self._need_namespace(member, request.index)
        session = member.session
        head = session.pins.get(request.tag, NIL)
        statuses, pages, generations, head = self.tables.acquire(request.index, session.number, request.tag, head, request.keys)
        if head != NIL:
            session.pins[request.tag] = head
        self._count(statuses, _ACQUIRED)
        return m.HandlesReply(statuses, pages, generations)

    def _release(self, member: Member, request: m.Release) -> m.CountReply:
        pins = member.session.pins
        released = sum(self.tables.release(pins.pop(tag)) for tag in _tags(request.tags) if tag in pins)
        self._items["released"] += released
        return m.CountReply(released)

    def _prefetch(self, member: Member, request: m.Prefetch, now_ns: int) -> m.StatusesReply | Waiting:
        self._need_namespace(member, request.index)
        statuses = self._look_for(request, want=True)
        if not request.wait_ms or Status.BUSY not in statuses:
            return m.StatusesReply(statuses)
        keys = request.keys
        left = {keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i, status in enumerate(statuses) if status == Status.BUSY}
        return Waiting(0, request, now_ns + request.wait_ms * 10**6, left)

    def _look_for(self, request: m.Prefetch, want: bool = False) -> bytes:
        if self._movement is not None:
            return self._movement.look(request.index, request.keys, want)
        return self.tables.lookup(request.index, request.keys)

    def _end_wait(self, connection: bytes) -> None:
        """Answers, with what is so now."""
        waiting = self._waiting.pop(connection)
        request = waiting.request
        reply: m.Reply
        if isinstance(request, m.Prefetch):
            reply = m.StatusesReply(self._look_for(request))
        elif waiting.failed or waiting.jobs:
            self._errors[ErrorCode.TIER.value] += 1
            reply = m.ErrorReply(ErrorCode.TIER.value, "cleared in the pool; a tier did not take note of it for good: clear again")
        else:
            reply = m.CountReply(waiting.cleared)
        self._replies.append((connection, m.encode_reply(reply, waiting.request_id, self.instance_id)))

    def _look_at_waiting(self) -> None:
        """Ends the waits for what has come, or can't."""
        assert self._movement is not None
        arrived, self._movement.arrived = self._movement.arrived, set()
        done, self._movement.forgotten = self._movement.forgotten, []
        if not arrived and not done:
            return
        for connection, waiting in list(self._waiting.items()):
            waiting.left -= arrived
            for each in done:
                if each.token in waiting.jobs:
                    waiting.jobs.remove(each.token)
                    waiting.failed |= each.result != 0
            if not waiting.left and not waiting.jobs:
                self._end_wait(connection)

    def _discard(self, member: Member, request: m.Discard) -> m.CountReply:
        self._need_namespace(member, request.index)
        discarded = self.tables.discard(request.index, request.keys, request.generations)
        self._items["discarded"] += discarded
        return m.CountReply(discarded)

    def _count(self, statuses: bytes, names: tuple[tuple[str, int], ...]) -> None:
        for name, status in names:
            self._items[name] += statuses.count(status)

    # ---- status -------------------------------------------------------------------------------------------------------------------

    def status(self, now_ns: int) -> dict[str, Any]:
        """What `hostkv status --json` prints: strings, numbers, lists and maps only. Counters start with the instance."""
        facts, stats = self.facts, self.tables.stats()
        sizes: dict[int, list[int]] = {}
        for _, slot_bytes, slots, taken in self.tables.extents():
            line = sizes.setdefault(slot_bytes, [0, 0, 0])
            line[:] = line[0] + 1, line[1] + slots, line[2] + taken
        return {
            "instance": self.instance_id.hex(),
            "version": facts.version,
            "protocol": [m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR],
            "pid": facts.pid,
            "endpoint": facts.endpoint,
            "uptime_s": (now_ns - facts.started_ns) / 1e9,
            "pool": {
                "name": facts.pool_name,
                "path": facts.pool_path,
                "epoch": self.tables.pool_epoch.hex(),
                "bytes": stats["pool_bytes"],
                "used_bytes": stats["used_bytes"],
                "free_bytes": stats["pool_bytes"] - stats["used_bytes"],
                "tables_bytes": facts.tables_bytes,
                "extent_bytes": facts.extent_bytes,
                "verify": facts.verify,
                "eviction": facts.eviction,
                "extents": stats["extents"],
                "free_extents": stats["free_extents"],
                "extents_taken_back": stats["extents_taken_back"],
                "adopted_blocks": self.adopted_blocks,
                "sizes": [
                    {"slot_bytes": slot_bytes, "extents": extents, "slots": slots, "taken": taken}
                    for slot_bytes, (extents, slots, taken) in sorted(sizes.items())
                ],
            },
            "blocks": {
                "total": stats["blocks"],
                "ready": stats["ready"],
                "writing": stats["writing"],
                "doomed": stats["doomed"],
                "dirty": stats["dirty"],
                "pinned": stats["pinned_blocks"],
                "tombstones": stats["tombstones"],
                "moved": stats["moved"],
            },
            "pins": stats["pins"],
            "shards_in_flight": stats["shards_in_flight"],
            "namespaces": [
                {
                    "index": index,
                    "label": label,
                    "fingerprint": fingerprint.hex(),
                    "blocks": blocks,
                    "shards": shards,
                    "shard_bytes": shard_bytes,
                    "slot_bytes": slot_bytes,
                }
                for index, fingerprint, shard_bytes, shards, slot_bytes, blocks, label in self.tables.namespaces()
            ],
            "sessions": [
                {
                    "id": session.session_id.hex(),
                    "tags": len(session.pins),
                    "members": [
                        {
                            "name": member.name,
                            "pid": member.pid,
                            "connections": len(member.connections),
                            "device": bool(member.flags & DEVICE),
                            "silent_s": member.silent_ns / 1e9,
                            "ending": member.ending_ns is not None,
                        }
                        for member in map(self._members.__getitem__, sorted(session.members))
                    ],
                }
                for session in self._sessions.values()
            ],
            "requests": dict(self._requests),
            "errors": dict(self._errors),
            "items": {**self._items, "evicted": stats["evicted"], "evicted_dirty": stats["evicted_dirty"]},
            "tiers": [{**self._tier.status(), **self._movement.status()}] if self._tier is not None and self._movement is not None else [],
            "waiting": len(self._waiting),
            "members_gone": self._members_gone,
            "sessions_silenced": self._sessions_silenced,
            "limits": {
                "blocks": facts.max_blocks,
                "shards_in_flight": facts.max_shards,
                "pins": facts.max_pins,
                "members": facts.max_members,
                "namespaces": facts.max_namespaces,
                "connections_per_member": MAX_CONNECTIONS,
                "message_bytes": m.MAX_MESSAGE_BYTES,
                "batch": m.MAX_KEYS,
            },
        }

    def _refuse(self, request_id: int, code: ErrorCode, message: str) -> bytes:
        self._errors[code.value] += 1
        return m.encode_reply(m.ErrorReply(code.value, message[:MAX_ERROR_CHARACTERS]), request_id, self.instance_id)


def _counted(**names: Status) -> tuple[tuple[str, int], ...]:
    return tuple((name, int(status)) for name, status in names.items())


# What `_count` counts the items of a batch as.
_LOOKED_UP = _counted(found=Status.OK, missed=Status.MISS)
_RESERVED = _counted(reserved=Status.OK, exists=Status.EXISTS, busy=Status.BUSY, full=Status.FULL, throttled=Status.THROTTLED)
_COMMITTED = _counted(committed=Status.OK, not_held=Status.NOT_HELD)
_ACQUIRED = _counted(acquired=Status.OK, missed=Status.MISS, full=Status.FULL)


def _tags(joined: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(joined) // 8}Q", joined)


_HANDLERS: dict[type[Any], Callable[[Core, Member, Any], m.Reply | Waiting]] = {
    m.Bye: Core._bye,
    m.Register: Core._register,
    m.Lookup: Core._lookup,
    m.Reserve: Core._reserve,
    m.Commit: Core._commit,
    m.Abort: Core._abort,
    m.Acquire: Core._acquire,
    m.Release: Core._release,
    m.Discard: Core._discard,
    m.Clear: Core._clear,
}
