"""The reference, continued: what the core must do with a tier. The rules of sidecar/movement.py once more, over the model's blocks.

What the tier has, and which places and numbers it gives, is no rule of the core's: it is taken from what the tier was asked and said
(`said`), which must be just what these rules ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from errno import EBUSY, ENODEV
from typing import TYPE_CHECKING, Any

from hostkv.schemas import messages as m
from hostkv.sidecar.tiers import CORRUPT, Done, Forget, Job, Read, Write

from .model import BUSY, EXISTS, MISS, OK, Block, Member, Model, require

if TYPE_CHECKING:
    from .tier import Tier

MAX_WANTED, MAX_LOOKED_AT = 4, 3  # in place of the core's, so that they are met
PAUSE_NS, POOL_SHARE = 10**9, 4


@dataclass(slots=True)
class Moved:
    """One block under way. `entry`: where on the tier."""

    key: bytes
    space: int
    generation: int
    entry: int
    slot_bytes: int = 0  # of one that is spilled


class Moving:
    def __init__(self, model: Model, member: Member, tier: Tier) -> None:
        self.model, self.member, self.tier, self.said = model, member, tier, tier.said
        self.wanted: dict[tuple[int, bytes], None] = {}  # spaces and keys, in the order of asking
        self.reading: dict[int, Moved] = {}  # by token
        self.spilling: dict[int, Moved] = {}
        self.again_ns = 0
        self.forgets: dict[int, int] = {}  # to be given out: a number of ours -> that of the namespace in the tier
        self.forgetting: dict[int, int] = {}  # token -> a number of ours
        self.asked = 0
        self.arrived: set[bytes] = set()

    def say(self, *asked: Any) -> Any:
        """What the tier said when it was asked this, which must be what came next."""
        require(self.said and self.said[0][:-1] == asked, "the tier was asked", self.said[:1], "expected", asked)
        return self.said.pop(0)[-1]

    def number(self, space: int) -> int:
        known = self.model.spaces[space]
        assert known is not None
        number: int = self.say("number", known[0])
        return number

    def moved(self, token: int) -> tuple[bytes, int]:
        each = self.reading.get(token) or self.spilling[token]
        return each.key, each.generation

    def idle(self) -> bool:
        return not (self.reading or self.spilling or self.forgets or self.forgetting)

    def has_work(self, now_ns: int) -> bool:
        """Whether anything could come of `work` now."""
        model = self.model
        spills = self.spills(now_ns) and self.may_spill() and any(model.wanted(block) and block.idle for block in model.blocks.values())
        changes = self.spills(now_ns) != model.spills
        return bool(changes or self.forgets or (self.tier.room() and (self.wanted or spills)) or any(map(self.is_over, self.wanted)))

    def is_over(self, wanted: tuple[int, bytes]) -> bool:
        """Whether nothing is to be read: it is in the pool, or not on the tier."""
        known = self.model.spaces[wanted[0]]
        assert known is not None
        number = self.tier.names.get(known[0])
        return self.model.found(*wanted) or number is None or not self.tier.index.real.has(wanted[1], number)[0]

    def may_spill(self) -> bool:
        """Whether one more block may be pinned for that."""
        under_way = sum(each.slot_bytes for each in self.spilling.values())
        return under_way < self.model.sizes["pool_bytes"] // POOL_SHARE and self.model.may_pin(self.member.session)

    # ---- what is asked --------------------------------------------------------------------------------------------------------------

    def look(self, space: int, keys: list[bytes], want: bool) -> bytes:
        statuses = [OK if self.model.found(space, key) else MISS for key in keys]
        missing = [n for n, status in enumerate(statuses) if status == MISS]
        coming = {each.key for each in self.reading.values()}
        on_tier = [0] * len(keys)
        if want and missing:
            number = self.number(space)
            on_tier = [self.say("has", key, number) for key in keys]
        for n in missing:
            key = keys[n]
            if want and on_tier[n] and key not in coming and len(self.wanted) < MAX_WANTED:
                self.wanted.setdefault((space, key))
            if key in coming or (space, key) in self.wanted:
                statuses[n] = BUSY
        return bytes(statuses)

    def forget(self, index: int) -> set[int]:
        names = None
        if index != m.ALL_NAMESPACES:
            known = self.model.spaces[index]
            assert known is not None
            names = (known[0],)
        numbers = self.say("retire", names)
        jobs = range(self.asked, self.asked + len(numbers))
        self.asked += len(numbers)
        for job, number in zip(jobs, numbers, strict=True):
            self.say("remove_namespace", number)
            self.forgets[job] = number
        return set(jobs)

    def spills(self, now_ns: int) -> bool:
        return now_ns >= self.again_ns and self.tier.takes()

    # ---- jobs -----------------------------------------------------------------------------------------------------------------------

    def work(self, jobs: list[Job], room: int, now_ns: int) -> None:
        """`jobs` are what the core has given out, where there was room for so many."""
        given = deque(jobs)
        for job, number in self.forgets.items():
            forget = given.popleft() if given else None
            require(isinstance(forget, Forget) and forget.namespace == number, "a forget was not given out", number, forget)
            assert isinstance(forget, Forget)
            self.forgetting[forget.token] = job
        self.forgets.clear()
        looked, blocked = 0, set[int]()
        for space, key in list(self.wanted):
            if space in blocked:
                continue
            if looked == MAX_LOOKED_AT:
                break
            looked += 1
            read = self.promote(key, space, room > 0)
            if read is None and (not room or self.reading or self.spilling):
                blocked.add(space)
                continue
            del self.wanted[space, key]
            if isinstance(read, Read):
                require(given and given.popleft() == read, "the core reads other blocks than are wanted", read, given)
                room -= 1
            else:
                self.arrived.add(key)
        self.model.spills = self.spills(now_ns)
        if self.model.spills:
            while room > 0 and (found := self.spill(given, now_ns)):
                room -= found
        require(not given, "the core gave out jobs that nothing is to be done for", given)
        self.end_waits({})

    def promote(self, key: bytes, space: int, may_read: bool) -> Read | bool | None:
        model = self.model
        if model.found(space, key):
            return True
        number = self.number(space)
        if not may_read:
            return None if self.say("has", key, number) else True
        found = self.say("open", key, number)
        if found is None:
            return True
        entry, directory, slab, slot, checksum = found
        known = model.spaces[space]
        assert known is not None
        layout = known[1]
        _, keys, token, pages = self.said.pop(0) if self.said else (0, b"", 0, [])
        require(keys == key * layout.shards, "another block was reserved than is wanted", keys, key)
        statuses = [model.grant(self.member, space, token, layout, key, shard, page) for shard, page in enumerate(pages)]
        if any(statuses):
            model.abort(self.member.client, (token,))
            self.say("close", entry, True)
            return True if BUSY in statuses or EXISTS in statuses else None
        block = model.blocks[key]
        self.reading[token] = Moved(key, space, block.generation, entry)
        return Read(token, directory, slab, slot, block.page, layout.shards, layout.shard_bytes, layout.slot_bytes, checksum)

    def spill(self, given: deque[Job], now_ns: int) -> bool:
        """Whether there was something to write."""
        model = self.model
        for _ in range(MAX_LOOKED_AT):
            block = min(
                (block for block in model.blocks.values() if model.wanted(block) and block.idle), key=lambda block: block.used, default=None
            )
            if block is None or not self.may_spill():
                return False
            known = model.spaces[block.space]
            assert known is not None
            layout, number = known[1], self.number(block.space)
            model.touch(block)
            if layout.slot_bytes > self.tier.largest_bytes or self.say("has", block.key, number):
                block.clean = True
                continue
            placed = self.say("place", block.key, number, layout.slot_bytes)
            if placed is None:
                self.again_ns = now_ns + PAUSE_NS
                return False
            write = given.popleft() if given else None
            assert isinstance(write, Write)
            self.spilling[write.token] = Moved(block.key, block.space, block.generation, placed[0], layout.slot_bytes)
            wanted = block.checksum if model.verify else None
            shape = (layout.shards, layout.shard_bytes, layout.slot_bytes)
            expected = Write(write.token, *placed[1:], block.page, block.key, number, *shape, wanted)
            require(write == expected, "the core writes", write, "expected", expected)
            model.pin(self.member.session, write.token, block)
            return True
        return False

    def complete(self, done: Iterable[Done], now_ns: int) -> None:
        results: dict[int, bool] = {}
        for token, result, checksum in done:
            if token in self.reading:
                self.has_read(self.reading.pop(token), token, result, checksum)
            elif token in self.spilling:
                self.has_spilled(self.spilling.pop(token), token, result, checksum, now_ns)
            else:
                results[self.forgetting.pop(token)] = result == 0
        self.end_waits(results)

    def has_read(self, moved: Moved, token: int, result: int, checksum: int) -> None:
        block = self.model.blocks[moved.key]
        if result == 0:
            for shard in range(block.shards):
                self.model.commit(block, shard, 0 if shard else checksum)
            self.set_clean(moved)
        else:
            self.model.abort(self.member.client, (token,))
        self.say("close", moved.entry, result in (0, EBUSY, ENODEV))
        self.arrived.add(moved.key)

    def has_spilled(self, moved: Moved, token: int, result: int, checksum: int, now_ns: int) -> None:
        self.say("settle", moved.entry, checksum if result == 0 else None)
        if result == 0:
            self.set_clean(moved)
        elif result == CORRUPT:
            self.model.discard(moved.space, moved.key, moved.generation)
        else:
            self.again_ns = now_ns + PAUSE_NS
        self.model.unpin(self.member.session, token)

    def set_clean(self, moved: Moved) -> None:
        block: Block | None = self.model.blocks.get(moved.key)
        if block is not None and block.generation == moved.generation and block.dirty:
            block.clean = True
            if block.idle:
                self.model.touch(block)

    def end_waits(self, forgotten: dict[int, bool]) -> None:
        """Ends the waits for what has come, or cannot. `forgotten`: jobs that have ended, and whether well."""
        arrived, self.arrived = self.arrived, set()
        for connection, wait in list(self.model.waits.items()):
            wait.left -= arrived
            wait.failed |= any(not forgotten.get(job, True) for job in wait.jobs)
            wait.jobs -= forgotten.keys()
            if not wait.left and not wait.jobs:
                self.model.end_wait(connection)
