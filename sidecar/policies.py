"""Which block of a tier goes next. A policy proposes and the directory of the tier disposes: it alone knows what is pinned or being read,
and it says of each block what became of it. A policy sees nothing but this interface, keeps no payload, and is told nothing of time.

    use(keys)         a request used these blocks, which are here, in the order of its prompt
    add(key, after)   a new block; `after` is the one before it in the prompt, None for the first one of a prompt
    victim(busy)      the block that should go next, of those that are not busy; None where all are. It stays until remove()
    remove(key)       the directory has no such block any more

A block is worth something only with all blocks before it in the prompt (its parents): a lookup stops at the first one that is missing.
`prefix` is the policy that knows. Both halves of its rule come from one order: a block is always older than its parent, since a use
goes through the blocks deepest first and a new one is put right behind its parent. Whatever uses a block uses its parents as well, so
the oldest block never has a child that is here, and of one cold prompt the deep end goes first. It needs no count of children and no
link to a parent, but it does need to hear of each use from the first block on: a tier that hears of the deep end alone keeps that and
drops the beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from itertools import chain
from typing import Protocol

ROOM_STEP, ROOM_LEAST = 4.0, 0.25  # of Reuse, in blocks; and a part of all: what is saved or prefetched in one go must fit in
S3FIFO_SMALL = 0.1  # the part of all blocks in the small queue
S3FIFO_MAX_USES = 3
_END = -1  # of the list of Prefix: older than the oldest and newer than the newest; no key


class Policy(Protocol):
    def __init__(self, capacity: int) -> None: ...
    def use(self, keys: Sequence[int]) -> None: ...
    def add(self, key: int, after: int | None) -> None: ...
    def victim(self, busy: Container[int]) -> int | None: ...
    def remove(self, key: int) -> None: ...


class Lru:
    """Least recently used first. A use goes through the blocks deepest first, as `release` does; they are saved front first."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest first

    def use(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            self._order.move_to_end(key)

    def add(self, key: int, after: int | None) -> None:
        self._order[key] = None

    def victim(self, busy: Container[int]) -> int | None:
        return next((key for key in self._order if key not in busy), None)

    def remove(self, key: int) -> None:
        del self._order[key]


class Reuse:
    """Blocks that were used again and those that were not are in two lists, each in order of use. What comes back
    before as many blocks were evicted as there are was used again, too, and its list should have been longer: by up to ROOM_STEP blocks,
    by the fewer the more of what goes is of that list, so that in the end what goes of either comes back equally often. That is ARC
    (Megiddo and Modha, FAST '03) with bounded steps."""

    def __init__(self, capacity: int) -> None:
        self._new: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts: dict[int, tuple[int, bool]] = {}  # which eviction it was, and whether the block had been used again
        self._evicted = 0
        self._room = 0.5  # the part of all that may be new
        self._reused_go = 0.5  # the part of those evicted of late that were used again

    def use(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            self._new.pop(key, None)
            self._again[key] = None
            self._again.move_to_end(key)

    def add(self, key: int, after: int | None) -> None:
        (self._again if self._comes_back(key) else self._new)[key] = None

    def victim(self, busy: Container[int]) -> int | None:
        fits = len(self._new) < self._room * (len(self._new) + len(self._again))
        return next((key for key in (chain(self._again, self._new) if fits else chain(self._new, self._again)) if key not in busy), None)

    def remove(self, key: int) -> None:
        reused = key in self._again
        self._evicted += 1
        self._ghosts[key] = self._evicted, reused
        self._reused_go += (reused - self._reused_go) / (len(self._new) + len(self._again))
        del (self._again if reused else self._new)[key]

    def _comes_back(self, key: int) -> bool:
        eviction, reused = self._ghosts.get(key, (0, False))
        blocks = len(self._new) + len(self._again)
        if not eviction or self._evicted - eviction >= blocks:
            return False
        self._room += ROOM_STEP / blocks * (self._reused_go - reused)
        self._room = min(max(self._room, ROOM_LEAST), 1.0)
        return True


class Clock:
    """First in, first out; what was used since the hand last passed stays for one more round. The disk tier's: one bit a block."""

    def __init__(self, capacity: int) -> None:
        self._used: OrderedDict[int, bool] = OrderedDict()  # the hand is at the first one

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._used[key] = True

    def add(self, key: int, after: int | None) -> None:
        self._used[key] = False

    def victim(self, busy: Container[int]) -> int | None:
        for _ in range(2 * len(self._used)):
            key = next(iter(self._used))
            if key not in busy:
                if not self._used[key]:
                    return key
                self._used[key] = False
            self._used.move_to_end(key)
        return None

    def remove(self, key: int) -> None:
        del self._used[key]


class S3Fifo:
    """S3-FIFO of Yang et al., "FIFO queues are all you need for cache eviction" (SOSP '23), algorithm 1: what is new stands in a small
    queue and leaves early; what was used twice there, or comes back while it is remembered, gets into the main one, where each use is
    worth a round. Which queue gives is decided anew after each block that moves, so that one block goes for one that comes."""

    def __init__(self, capacity: int) -> None:
        self._small_wanted = max(1, int(capacity * S3FIFO_SMALL))
        self._main_wanted = capacity - self._small_wanted
        self._small: OrderedDict[int, int] = OrderedDict()  # uses of each; the next to go first
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # left the small queue last; as many as the main one has room for

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            queue = self._small if key in self._small else self._main
            queue[key] = min(queue[key] + 1, S3FIFO_MAX_USES)

    def add(self, key: int, after: int | None) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def victim(self, busy: Container[int]) -> int | None:
        passed = 0  # busy ones of the small queue; they stay where they are in its order
        while len(self._small) - passed > 0 and len(self._small) >= self._small_wanted:
            key = next(iter(self._small))
            if key in busy:
                self._small.move_to_end(key)
                passed += 1
            elif self._small[key] > 1:
                del self._small[key]
                self._main[key] = 0
            else:
                return key
        for _ in range((S3FIFO_MAX_USES + 1) * len(self._main)):
            key = next(iter(self._main))
            if key not in busy:
                if not self._main[key]:
                    return key
                self._main[key] -= 1
            self._main.move_to_end(key)
        return next((key for key in self._small if key not in busy), None)

    def remove(self, key: int) -> None:
        if self._main.pop(key, None) is not None:
            return
        del self._small[key]
        self._ghosts[key] = None
        if len(self._ghosts) > self._main_wanted:
            self._ghosts.popitem(last=False)


class Prefix:
    """Least recently used first, deepest first: no block outlives a parent. See above."""

    def __init__(self, capacity: int) -> None:
        self._older = {_END: _END}
        self._newer = {_END: _END}

    def use(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            self._unlink(key)
            self._link(key, _END)

    def add(self, key: int, after: int | None) -> None:
        """Without its parent a block is unreachable, and goes next."""
        self._link(key, _END if after is None else after if after in self._older else self._newer[_END])

    def victim(self, busy: Container[int]) -> int | None:
        key = self._newer[_END]
        while key in busy:
            key = self._newer[key]
        return None if key == _END else key

    def remove(self, key: int) -> None:
        self._unlink(key)
        del self._older[key], self._newer[key]

    def _link(self, key: int, newer: int) -> None:
        older = self._older[newer]
        self._older[key], self._newer[key] = older, newer
        self._newer[older] = self._older[newer] = key

    def _unlink(self, key: int) -> None:
        older, newer = self._older[key], self._newer[key]
        self._newer[older], self._older[newer] = newer, older


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": Lru,
    "reuse": Reuse,
    "clock": Clock,
    "s3fifo": S3Fifo,
    "prefix": Prefix,
}
