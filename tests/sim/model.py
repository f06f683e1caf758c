"""The reference: what the core must answer to each message and hold after it, over plain dicts.

These are the rules of PROTOCOL.md and ARCHITECTURE.md once more, without tables, lists, chains or counters: a set of blocks, of members, of
sessions. It decides by itself who is refused, what is granted, evicted, kept at adoption and given back; it takes over from the core only
what no rule fixes: which free slot a new block gets, which number a member, and the order of blocks that became idle in one message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from struct import unpack
from typing import TYPE_CHECKING, Any, TypeAlias

from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status
from hostkv.schemas.layout import DEVICE, MAX_USES, PAGE, TIER
from hostkv.schemas.namespace import Layout, NamespaceError
from hostkv.sidecar.core import Look

if TYPE_CHECKING:
    from .moving import Moving

OK, EXISTS, BUSY, FULL, THROTTLED, NOT_HELD, MISS = Status
SILENT_NS, DEVICE_WAIT_NS, WATCH_STEP_NS, NEVER_NS = 10 * 10**9, 5 * 10**9, 10**9, 1 << 62
Space: TypeAlias = tuple[bytes, Layout]  # the fingerprint comes first
GONE, HANGS, ENDED = "member gone", "session hangs, its pins are given back", "transfers of an earlier sidecar have ended"
NO_HANDLE = (0, 0)
LATER = object()  # in the place of a reply that comes when the tier has done its part


class Violation(AssertionError):
    """A rule that does not hold."""


def require(condition: object, what: str, *seen: object) -> None:
    if not condition:
        raise Violation(" ".join([what, *map(repr, seen)]))


@dataclass(slots=True, eq=False)
class Block:
    key: bytes
    space: int
    shards: int
    generation: int
    page: int
    used: int = 0
    checksum: int = 0
    done: set[int] = field(default_factory=set)
    writers: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # shard -> (client, tag)
    pins: dict[tuple[bytes, int], None] = field(default_factory=dict)  # (session, tag)
    doomed: bool = False
    clean: bool = False  # a tier has it, or had it once
    uses: int = 1  # requests that had it

    @property
    def dirty(self) -> bool:
        return self.ready and not self.doomed and not self.clean

    @property
    def ready(self) -> bool:
        return len(self.done) == self.shards

    @property
    def mask(self) -> int:
        return sum(1 << shard for shard in self.done)

    @property
    def idle(self) -> bool:
        return not self.writers and not self.pins


@dataclass(slots=True, eq=False)
class Extent:
    slot_bytes: int = 0
    last_used: int = 0
    blocks: dict[int, Block] = field(default_factory=dict)  # by page


@dataclass(slots=True, eq=False)
class Session:
    session_id: bytes
    members: dict[bytes, Member] = field(default_factory=dict)
    pins: dict[int, dict[bytes, Block]] = field(default_factory=dict)  # tag -> key -> block
    silenced: int = 0  # how often its pins were given back

    @property
    def tiers(self) -> bool:
        return any(member.tier for member in self.members.values())


@dataclass(slots=True, eq=False)
class Member:
    client: bytes
    lock: bytes
    session: Session
    index: int = -1  # of its record; told by the tables
    device: bool = False
    tier: bool = False
    beat: int = 0
    silent_ns: int = 0
    ending_ns: int | None = None
    connections: dict[bytes, None] = field(default_factory=dict)
    spaces: dict[int, Space] = field(default_factory=dict)  # as it was told of them

    @property
    def flags(self) -> int:
        return TIER if self.tier else DEVICE if self.device else 0


@dataclass(slots=True, eq=False)
class Wait:
    """A request that is answered later. `left`: keys that have not come; `jobs`: of the tier, that make a clear last."""

    number: int
    request: m.Prefetch | m.Clear
    deadline_ns: int
    left: set[bytes]
    jobs: set[int]
    count: int = 0
    failed: bool = False


class Model:
    def __init__(
        self,
        sizes: dict[str, int],
        max_connections: int,
        look: Callable[[bytes], Look],
        exited: Callable[[bytes], bool | None],
        quiet: Callable[[], bool],
    ) -> None:
        self.sizes, self.max_connections, self.look, self.exited, self.quiet = sizes, max_connections, look, exited, quiet
        self.moving: Moving | None = None  # where there is a tier
        self.verify = False
        self.spills = False  # what the tier does not want is evicted first
        self.keeps_reused, self.min_reuse = False, 0
        self.ghosts: dict[int, tuple[int, int, bool]] = {}  # part of a key -> more of it, which eviction it was, whether it was reused
        self.room = self.reused_go = 0.5
        self.waits: dict[bytes, Wait] = {}  # by connection
        self.due: list[tuple[bytes, Wait, Any]] = []  # late replies, as those of `answer`
        self.now_ns = self.number = 0  # of the current message
        self.members: dict[bytes, Member] = {}
        self.sessions: dict[bytes, Session] = {}
        self.connections: dict[bytes, Member] = {}
        self.spaces: list[Space | None] = [None] * sizes["max_namespaces"]
        self.blocks: dict[bytes, Block] = {}
        self.extents = [Extent() for _ in range(-(-sizes["pool_bytes"] // sizes["extent_bytes"]))]
        self.generation = 0
        self.evicted = self.evicted_dirty = self.taken_back = 0
        self.touched: dict[Block, None] = {}  # by the current message
        self.clock = 0  # the order of use within it, after all that is older
        self.watched_ns = 0

    # ---- blocks ---------------------------------------------------------------------------------------------------------------------

    def _extent(self, page: int) -> Extent:
        return self.extents[page * PAGE // self.sizes["extent_bytes"]]

    def _slots_in(self, number: int, slot_bytes: int) -> int:
        extent_bytes = self.sizes["extent_bytes"]
        return min(extent_bytes, self.sizes["pool_bytes"] - number * extent_bytes) // slot_bytes

    def erase(self, block: Block) -> None:
        del self.blocks[block.key]
        self.touched.pop(block, None)
        extent = self._extent(block.page)
        del extent.blocks[block.page]
        if not extent.blocks:
            extent.slot_bytes = extent.last_used = 0

    def _settle(self, block: Block, touch: bool = True) -> None:
        """What becomes of a block of which something was given back."""
        if not block.idle:
            return
        if block.doomed or not block.done:
            self.erase(block)
        elif touch:
            self.touch(block)

    def touch(self, block: Block) -> None:
        self.clock += 1
        block.used = self._extent(block.page).last_used = self.clock
        self.touched[block] = None

    def take_ticks(self, used: dict[bytes, int], last_used: list[int], before: int, now: int) -> None:
        """The tables' own order of what this message has used: after everything else, and nothing else moves."""
        for block in self.touched:
            tick = used.get(block.key, 0)
            require(before < tick <= now, "a block was used and is not newer than all others", block.key, tick, before, now)
            block.used = tick
        for extent, tick in zip(self.extents, last_used, strict=True):
            if extent.slot_bytes:  # by one that was given back at once, too
                right = before < tick <= now if extent.last_used > before else tick == extent.last_used
                require(right, "an extent was used when nobody used it, or was not", tick, extent.last_used, before, now)
                extent.last_used = tick
        self.touched.clear()
        self.clock = now

    def _room(self, slot_bytes: int) -> bool:
        """Makes room for one more block of this size, evicting as the order of use says."""
        while not self._homes(slot_bytes):
            if not any(self._make_room(slot_bytes, dirty_too) for dirty_too in self._passes()):
                return False
        if len(self.blocks) == self.sizes["max_blocks"]:
            oldest = next(filter(None, map(self._oldest_of_all, self._passes())), None)
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def _passes(self) -> tuple[bool, ...]:
        """Whether dirty blocks go too: while a tier takes them, only where nothing else can."""
        return (False, True) if self.spills else (True,)

    def _make_room(self, slot_bytes: int, dirty_too: bool) -> bool:
        cold = [
            (extent.last_used, number)
            for number, extent in enumerate(self.extents)
            if extent.slot_bytes not in (0, slot_bytes)
            and self._slots_in(number, slot_bytes)
            and all(block.idle and (dirty_too or not self.wanted(block)) for block in extent.blocks.values())
        ]
        oldest = self._oldest(slot_bytes, dirty_too)
        if cold and (oldest is None or min(cold)[0] < oldest.used):
            for _, block in sorted(self.extents[min(cold)[1]].blocks.items()):
                self._evict(block)
            self.taken_back += 1
        elif oldest is not None:
            self._evict(oldest)
        return bool(cold) or oldest is not None

    def _evict(self, block: Block) -> None:
        reused = self._is_reused(block)
        self.reused_go += (reused - self.reused_go) / len(self.blocks)
        self.erase(block)
        self.evicted += 1
        self.evicted_dirty += self.spills and self.wanted(block)
        part, more = self._parts(block.key)
        self.ghosts[part] = more, self.evicted, reused

    def _is_reused(self, block: Block) -> bool:
        return block.uses > self.keeps_reused

    def _parts(self, key: bytes) -> tuple[int, int]:
        """Where a table as large as that of the blocks remembers it, and what it knows it by."""
        capacity = max(16, 1 << (2 * self.sizes["max_blocks"] - 1).bit_length())
        return int.from_bytes(key[8:16], "little") % capacity, int.from_bytes(key[12:16], "little") // 2

    def _comes_back(self, key: bytes) -> bool:
        part, more = self._parts(key)
        known, eviction, reused = self.ghosts.get(part, (None, 0, False))
        if not self.keeps_reused or known != more or self.evicted - eviction >= len(self.blocks):
            return False
        self.room += 4 / len(self.blocks) * (self.reused_go - reused)
        self.room = min(max(self.room, 0.25), 1)
        return True

    def wanted(self, block: Block) -> bool:
        """Whether a tier should have it, and has not."""
        return block.dirty and block.uses > self.min_reuse

    def _stays(self, block: Block) -> bool:
        """Whether others go before it while a tier takes blocks: it is wanted there, or will be when it is whole."""
        return block.uses > self.min_reuse and not (block.clean or block.doomed)

    def _oldest(self, slot_bytes: int, dirty_too: bool) -> Block | None:
        """What goes next of this size: of those that were used again (or not of low priority) where the others fit into their room."""
        blocks = [block for extent in self.extents if extent.slot_bytes == slot_bytes for block in extent.blocks.values()]
        fits = sum(not self._is_reused(block) for block in blocks) < (self.room if self.keeps_reused else 0.125) * len(blocks)
        idle = [block for block in blocks if block.idle and (dirty_too or not self._stays(block))]
        return min(idle, key=lambda block: (self._is_reused(block) != fits, block.used), default=None)

    def _oldest_of_all(self, dirty_too: bool) -> Block | None:
        blocks = [self._oldest(size, dirty_too) for size in {extent.slot_bytes for extent in self.extents}]
        return min(filter(None, blocks), key=lambda block: block.used, default=None)

    def _homes(self, slot_bytes: int) -> list[int]:
        """The extents that a new block of this size may be put in: those of its size with a free slot, else free ones."""
        slots = [self._slots_in(number, slot_bytes) for number in range(len(self.extents))]
        own = [n for n, extent in enumerate(self.extents) if extent.slot_bytes == slot_bytes and len(extent.blocks) < slots[n]]
        return own or [n for n, extent in enumerate(self.extents) if not extent.slot_bytes and slots[n]]

    def _place(self, block: Block, slot_bytes: int) -> None:
        homes = self._homes(slot_bytes)  # after the evictions, the last of which may have emptied one
        pages = self.sizes["extent_bytes"] // PAGE
        number, within = divmod(block.page, pages)
        step = slot_bytes // PAGE
        require(number in homes, "a block was put into an extent that has no room for it", block.page, homes)
        fits = within % step == 0 and within // step < self._slots_in(number, slot_bytes)
        require(fits, "a block was put where no slot of its size begins", block.page)
        extent = self.extents[number]
        require(block.page not in extent.blocks, "one slot was given to two blocks", block.page)
        extent.slot_bytes = slot_bytes
        extent.blocks[block.page] = block
        self.blocks[block.key] = block

    def abort(self, client: bytes, wanted: tuple[int, ...] | None, touch: bool = True) -> int:
        count = 0
        for block in list(self.blocks.values()):
            mine = [shard for shard, (owner, tag) in block.writers.items() if owner == client and (wanted is None or tag in wanted)]
            for shard in mine:
                del block.writers[shard]
            if mine:
                count += len(mine)
                self._settle(block, touch)
        return count

    def unpin(self, session: Session, tag: int, touch: bool = True) -> int:
        pinned = session.pins.pop(tag)
        for block in pinned.values():
            del block.pins[session.session_id, tag]
            self._settle(block, touch)
        return len(pinned)

    def pins(self) -> int:
        return sum(len(block.pins) for block in self.blocks.values())

    def shards_in_flight(self) -> int:
        return sum(len(block.writers) for block in self.blocks.values())

    # ---- members --------------------------------------------------------------------------------------------------------------------

    def pin(self, session: Session, tag: int, block: Block) -> None:
        session.pins.setdefault(tag, {})[block.key] = block
        block.pins[session.session_id, tag] = None
        self.touch(block)

    def may_pin(self, session: Session) -> bool:
        here, most = sum(map(len, session.pins.values())), self.sizes["max_pins"]
        return self.pins() < most and (not here or here < most // 2)

    def leave(self, member: Member, touch: bool = True) -> None:
        session = member.session
        self.abort(member.client, None, touch)
        self.dismiss(list(member.connections))
        del self.members[member.client], session.members[member.client]
        if not session.members:
            for tag in list(session.pins):
                self.unpin(session, tag, touch)
            del self.sessions[session.session_id]

    def forget(self, connection: bytes) -> None:
        member = self.connections.pop(connection, None)
        self.waits.pop(connection, None)
        if member is not None:
            del member.connections[connection]

    def dismiss(self, connections: list[bytes]) -> None:
        for connection in connections:
            if connection in self.waits:
                self.end_wait(connection)
            self.forget(connection)

    def attach(self, client: bytes) -> bool:
        member = self.members.get(client)
        if member is None or member.tier:
            return False
        member.device = True
        return True

    def watch(self, now_ns: int) -> list[tuple[str, bytes]]:
        """What happens, to which client or session."""
        step_ns = min(now_ns - self.watched_ns, WATCH_STEP_NS)
        self.watched_ns = now_ns
        events = []
        for connection in [each for each, wait in self.waits.items() if now_ns >= wait.deadline_ns]:
            self.end_wait(connection)
        for member in list(self.members.values()):
            if member.tier:
                if (self.moving is None or member is not self.moving.member) and self.quiet():
                    self.leave(member)
                    events.append((ENDED, member.client))
                continue
            held, beat = self.look(member.lock)
            if held is False:
                if member.device and member.ending_ns is None:
                    member.ending_ns = now_ns
                    self.dismiss(list(member.connections))
                gone = True
                if member.device:
                    gone_by_pidfd = self.exited(member.client)
                    gone = now_ns - (member.ending_ns or 0) >= DEVICE_WAIT_NS if gone_by_pidfd is None else gone_by_pidfd
                if gone:
                    self.leave(member)
                    events.append((GONE, member.client))
            elif held and beat and member.beat == beat:
                member.silent_ns += step_ns
            else:
                member.beat, member.silent_ns = beat, 0
        for session in self.sessions.values():
            if session.pins and all(member.silent_ns >= SILENT_NS for member in session.members.values()):
                session.silenced += 1
                events.append((HANGS, session.session_id))
                for tag in list(session.pins):
                    self.unpin(session, tag)
        return events

    def adopt(self, dead: list[bytes] | None = None) -> None:
        """A successor took over: it knows members, pins and shards, and neither connections nor who registered what."""
        self.evicted = self.evicted_dirty = self.taken_back = self.watched_ns = 0
        self.ghosts.clear()
        self.room = self.reused_go = 0.5
        self.moving, self.spills = None, False
        self.connections.clear(), self.waits.clear()
        self.members = dict(sorted(self.members.items(), key=lambda item: item[1].index))
        for member in list(self.members.values()):
            member.connections.clear(), member.spaces.clear()
            member.beat, member.silent_ns, member.ending_ns = 0, 0, None
            if not member.flags and self.look(member.lock).held is False:
                self.leave(member, touch=False)
        for extent in self.extents:
            extent.last_used = max((block.used for block in extent.blocks.values()), default=0)

    def join_tier(self, instance: bytes) -> Member | None:
        """The sidecar's own member, None where no record is left for it."""
        if len(self.members) == self.sizes["max_members"]:
            return None
        session = self.sessions[instance] = Session(instance)
        member = self.members[instance] = session.members[instance] = Member(instance, instance, session, tier=True)
        return member

    # ---- messages -------------------------------------------------------------------------------------------------------------------

    def answer(self, connection: bytes, request: m.Request, got: Any) -> Any:
        """The reply that is due, an ErrorCode where it is a refusal; `got` is the reply that came, of which the places of new blocks are
        taken. StatusReply and HelloReply are told by their type alone."""
        if connection in self.waits:  # answers come in the order of requests
            self.end_wait(connection)
        if isinstance(request, m.Hello):
            return self._hello(connection, request)
        if isinstance(request, m.StatusRequest):
            return m.StatusReply
        member = self.connections.get(connection)
        if member is None:
            return ErrorCode.NO_SESSION
        member.silent_ns = 0
        if "index" in type(request).__slots__ and not self.knows(member, request.index) and request != m.Clear(m.ALL_NAMESPACES):
            return ErrorCode.NO_NAMESPACE
        reply = _ANSWERS[type(request)](self, member, request, got)
        if isinstance(reply, Wait):
            self.waits[connection] = reply
            return LATER
        return reply

    def end_wait(self, connection: bytes) -> None:
        """It is answered with what is so now."""
        wait = self.waits.pop(connection)
        if isinstance(wait.request, m.Prefetch):
            self.due.append((connection, wait, m.StatusesReply(self.look_for(wait.request))))
        else:
            self.due.append((connection, wait, ErrorCode.TIER if wait.failed or wait.jobs else m.CountReply(wait.count)))

    def look_for(self, request: m.Prefetch, want: bool = False) -> bytes:
        keys = split(request.keys)
        if self.moving is not None:
            return self.moving.look(request.index, keys, want)
        return bytes(OK if self.found(request.index, key) else MISS for key in keys)

    def _hello(self, connection: bytes, request: m.Hello) -> Any:
        member = self.connections.get(connection)
        if member is not None and member.client != request.client:
            return ErrorCode.BAD_VALUE
        if not any(request.lock) or self.look(request.lock).held is not True:  # a name of zeros is none
            return ErrorCode.NO_LOCK
        member = self.members.get(request.client)
        joined = self.sessions.get(request.session)
        if (member is not None and member.tier) or (joined is not None and joined.tiers):
            return ErrorCode.BAD_VALUE
        if member is not None and (member.session.session_id, member.lock) != (request.session, request.lock):
            held = self.look(member.lock).held
            if held is False and not member.device:
                self.leave(member)
                member = None
            elif held or member.session.session_id != request.session:
                return ErrorCode.BAD_VALUE
            else:
                member.lock = request.lock
        if member is None:
            if len(self.members) == self.sizes["max_members"]:
                return ErrorCode.LIMIT
            session = self.sessions.setdefault(request.session, Session(request.session))
            member = Member(request.client, request.lock, session)
            self.members[request.client] = session.members[request.client] = member
        member.silent_ns, member.ending_ns = 0, None
        member.connections.pop(connection, None)
        while len(member.connections) >= self.max_connections:
            self.dismiss([next(iter(member.connections))])
        member.connections[connection] = None
        self.connections[connection] = member
        return m.HelloReply

    def _bye(self, member: Member, request: m.Bye, got: Any) -> Any:
        self.leave(member)
        return m.Empty()

    def _register(self, member: Member, request: m.Register, got: Any) -> Any:
        layout = decode(request.namespace)
        if layout is None or layout.slot_bytes > self.sizes["extent_bytes"]:
            return ErrorCode.BAD_NAMESPACE
        known = (layout.fingerprint(), layout)
        index = self.spaces.index(known) if known in self.spaces else -1
        if index < 0:
            unused = [n for n, each in enumerate(self.spaces) if each is None]
            idle = [n for n in range(len(self.spaces)) if not any(block.space == n for block in self.blocks.values())]
            if not unused and not idle:
                return ErrorCode.LIMIT
            index = (unused or idle)[0]
        if member.spaces.get(index, known) != known:
            return ErrorCode.LIMIT
        self.spaces[index] = member.spaces[index] = known
        return m.RegisterReply(index)

    def knows(self, member: Member, index: int) -> bool:
        return index in member.spaces and member.spaces[index] == self.spaces[index]

    def found(self, index: int, key: bytes) -> bool:
        block = self.blocks.get(key)
        return block is not None and block.ready and not block.doomed and block.space == index

    def _lookup(self, member: Member, request: m.Lookup, got: Any) -> Any:
        return m.LookupReply(bytes(OK if self.found(request.index, key) else MISS for key in split(request.keys)))

    def _reserve(self, member: Member, request: m.Reserve, got: Any) -> Any:
        space = self.spaces[request.index]
        assert space is not None
        shards = unpack(f"<{len(request.shards) // 2}H", request.shards)
        if max(shards) >= space[1].shards:
            return ErrorCode.BAD_VALUE
        given = handles(got) if isinstance(got, m.HandlesReply) and len(got.statuses) == len(shards) else [(0, *NO_HANDLE)] * len(shards)
        granted = []
        for key, shard, (_, page, _) in zip(split(request.keys), shards, given, strict=True):
            status = self.grant(member, request.index, request.tag, space[1], key, shard, page, bool(request.low_priority))
            block = self.blocks.get(key)
            granted.append((status, block.page, block.generation) if status == OK and block else (status, *NO_HANDLE))
        return joined(granted)

    def grant(
        self, member: Member, index: int, tag: int, layout: Layout, key: bytes, shard: int, page: int, low_priority: bool = False
    ) -> int:
        block = self.blocks.get(key)
        if block is not None:
            if block.space != index or block.doomed:
                return BUSY
            if shard in block.done:
                return EXISTS
            if shard in block.writers:
                return BUSY
        mine = [other for other in self.blocks.values() for owner, _ in other.writers.values() if owner == member.client]
        share = layout.slot_bytes // layout.shards
        held = sum(self._share(other) for other in mine)
        if mine and (len(mine) + 1 > self.sizes["max_shards"] // 2 or held + share > self.sizes["pool_bytes"] // 2):
            return THROTTLED
        if self.shards_in_flight() == self.sizes["max_shards"]:
            return FULL
        if block is None:
            if not self._room(layout.slot_bytes):
                return FULL
            self.generation += 1
            block = Block(key, index, layout.shards, self.generation, page, uses=(not low_priority) + self._comes_back(key))
            self._place(block, layout.slot_bytes)
        block.writers[shard] = (member.client, tag)
        self.touch(block)
        return OK

    def _share(self, block: Block) -> int:
        return self._extent(block.page).slot_bytes // block.shards

    def _commit(self, member: Member, request: m.Commit, got: Any) -> Any:
        count = len(request.shards) // 2
        shards, generations, checksums = (
            unpack(f"<{count}{kind}", joined_)
            for kind, joined_ in (("H", request.shards), ("Q", request.generations), ("Q", request.checksums))
        )
        statuses = []
        for key, shard, generation, checksum in zip(split(request.keys), shards, generations, checksums, strict=True):
            block = self.blocks.get(key)
            held = block is not None and block.generation == generation and block.writers.get(shard) == (member.client, request.tag)
            statuses.append(OK if held else NOT_HELD)
            if block is not None and held:
                self.commit(block, shard, checksum)
        return m.StatusesReply(bytes(statuses))

    def commit(self, block: Block, shard: int, checksum: int) -> None:
        del block.writers[shard]
        block.done.add(shard)
        block.checksum ^= checksum
        self._settle(block)

    def _abort(self, member: Member, request: m.Abort, got: Any) -> Any:
        return m.CountReply(self.abort(member.client, tags(request.tags)))

    def _acquire(self, member: Member, request: m.Acquire, got: Any) -> Any:
        session = member.session
        pinned = session.pins.get(request.tag, {})
        for block in pinned.values():
            self.touch(block)
        result = []
        for key in split(request.keys):
            block = self.blocks.get(key)
            if block is None or not self.found(request.index, key):
                result.append((MISS, *NO_HANDLE))
            elif key not in session.pins.get(request.tag, {}) and not self.may_pin(session):
                result.append((FULL, *NO_HANDLE))
            else:
                if key not in session.pins.get(request.tag, {}):
                    self.pin(session, request.tag, block)
                    block.uses = min(block.uses + 1, MAX_USES)
                result.append((OK, block.page, block.generation))
        return joined(result)

    def _release(self, member: Member, request: m.Release, got: Any) -> Any:
        session = member.session
        return m.CountReply(sum(self.unpin(session, tag) for tag in tags(request.tags) if tag in session.pins))

    def _prefetch(self, member: Member, request: m.Prefetch, got: Any) -> Any:
        statuses = self.look_for(request, want=True)
        left = {key for key, status in zip(split(request.keys), statuses, strict=True) if status == BUSY}
        if not request.wait_ms or not left:
            return m.StatusesReply(statuses)
        return Wait(self.number, request, self.now_ns + request.wait_ms * 10**6, left, set())

    def _doom(self, block: Block) -> None:
        block.doomed, block.uses = True, 0
        if block.idle:
            self.erase(block)

    def _discard(self, member: Member, request: m.Discard, got: Any) -> Any:
        generations = unpack(f"<{len(request.generations) // 8}Q", request.generations)
        return m.CountReply(sum(map(self.discard, [request.index] * len(generations), split(request.keys), generations)))

    def discard(self, index: int, key: bytes, generation: int) -> bool:
        right = self.found(index, key) and self.blocks[key].generation == generation
        if right:
            self._doom(self.blocks[key])
        return right

    def _clear(self, member: Member, request: m.Clear, got: Any) -> Any:
        hit = [block for block in self.blocks.values() if request.index in (block.space, m.ALL_NAMESPACES) and not block.doomed]
        for block in hit:
            self._doom(block)
        jobs = self.moving.forget(request.index) if self.moving is not None else set()
        if jobs:
            return Wait(self.number, request, NEVER_NS, set(), jobs, len(hit))
        return m.CountReply(len(hit))


_ANSWERS: dict[type[Any], Callable[[Model, Member, Any, Any], Any]] = {
    m.Bye: Model._bye,
    m.Register: Model._register,
    m.Lookup: Model._lookup,
    m.Reserve: Model._reserve,
    m.Commit: Model._commit,
    m.Abort: Model._abort,
    m.Acquire: Model._acquire,
    m.Release: Model._release,
    m.Prefetch: Model._prefetch,
    m.Discard: Model._discard,
    m.Clear: Model._clear,
}


@cache
def decode(namespace: bytes) -> Layout | None:
    try:
        return Layout.decode(namespace)
    except NamespaceError:
        return None


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


def tags(joined_: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(joined_) // 8}Q", joined_)


def handles(reply: m.HandlesReply) -> list[tuple[int, int, int]]:
    """(status, page, generation) of each item."""
    count = len(reply.statuses)
    return list(zip(reply.statuses, unpack(f"<{count}I", reply.pages), unpack(f"<{count}Q", reply.generations), strict=True))


def joined(items: list[tuple[int, int, int]]) -> m.HandlesReply:
    return m.HandlesReply(
        bytes(status for status, _, _ in items),
        b"".join(page.to_bytes(4, "little") for _, page, _ in items),
        b"".join(generation.to_bytes(8, "little") for _, _, generation in items),
    )
