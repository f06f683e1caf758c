"""What moves between the pool and the tier below it: a part of the core, so without file, clock or thread.

Both ways use the verbs that engines use, for a member and a session of the sidecar's own. A spill pins a dirty block as a reader does; a
promotion reserves its slot as a writer does, and commits it. So before a job is given out the tables say which slots the kernel may still
touch after this process is gone; a successor gives them back when the tier says that all such transfers have ended.

`work` gives out jobs, promotions first and in the order they were asked for, but for those of a namespace that the pool has no slot for
now; `complete` takes what came of them.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import count, islice
from struct import pack
from typing import NamedTuple

from ..cext import Tables
from ..schemas.errors import Status
from ..schemas.namespace import KEY_BYTES
from .tiers import CORRUPT, Done, Forget, Job, Read, Space, Tier, Write

MAX_WANTED = 1 << 16  # blocks that are asked for and not being read yet; what is asked beyond them is a miss
MAX_LOOKED_AT = 256  # in one call: blocks that are wanted, and dirty ones that turn out to be on the tier
POOL_SHARE = 4  # writes in flight pin at most such a part of the pool: however slow a disk, the rest makes room for new blocks
PAUSE_NS = 10**9  # after a write that failed, or for which there was no room


class _Reading(NamedTuple):
    key: bytes
    namespace: int
    generation: int
    entry: int


class _Spilling(NamedTuple):
    key: bytes
    namespace: int
    generation: int
    head: int
    entry: int
    slot_bytes: int


class Movement:
    """`member`, `session`: the records in the tables that transfers belong to. `space`: what is behind a namespace's number in the pool."""

    def __init__(self, tables: Tables, tier: Tier, member: int, session: int, space: Callable[[int], Space]) -> None:
        self._tables = tables
        self._tier = tier
        self._member = member
        self._session = session
        self._space = space
        self._tokens = count(1)
        self._wanted: dict[int, OrderedDict[bytes, int]] = {}  # namespace -> key -> which one it was of all that were ever asked for
        self._asked = count()
        self._reading: dict[int, _Reading] = {}
        self._coming: set[bytes] = set()  # their keys
        self._spilling: dict[int, _Spilling] = {}
        self._spilling_bytes = 0
        self._most_spilling_bytes = tables.stats()["pool_bytes"] // POOL_SHARE
        self._spill_again_ns = 0
        self._forgets: list[Forget] = []  # to be given out
        self._forgetting = 0  # those whose end has not come
        self.arrived: set[bytes] = set()  # keys that are there now, or are not to be had, until the core has taken them
        self.forgotten: list[Done] = []  # what came of forgets, until the core has taken it
        names = ("spilled", "spills_failed", "promoted", "promotions_failed", "corrupt", "too_large", "no_room", "no_slot", "unwanted")
        self.counts = dict.fromkeys(names, 0)

    def status(self) -> dict[str, int]:
        return {"reading": len(self._reading), "wanted": self._wanted_keys(), "spilling": len(self._spilling), **self.counts}

    # ---- what is asked ------------------------------------------------------------------------------------------------------------

    def look(self, index: int, keys: bytes, want: bool = False) -> bytes:
        """One Status per key: OK (in the pool), BUSY (it is coming), MISS (neither). `want`: what the tier has begins to come."""
        statuses = bytearray(self._tables.lookup(index, keys))
        missing = [i for i, status in enumerate(statuses) if status != Status.OK]
        on_tier = self._tier.index.has(keys, self._tier.number(self._space(index))) if want and missing else b""
        wanted = self._wanted.get(index, OrderedDict())
        room = MAX_WANTED - self._wanted_keys()
        for i in missing:
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            if key in self._coming or key in wanted:
                statuses[i] = Status.BUSY
            elif want and on_tier[i]:
                if room > 0:
                    wanted[key] = next(self._asked)
                    room -= 1
                    statuses[i] = Status.BUSY
                else:
                    self.counts["unwanted"] += 1
        if wanted:
            self._wanted[index] = wanted
        return bytes(statuses)

    def _wanted_keys(self) -> int:
        return sum(map(len, self._wanted.values()))

    def want_nothing(self) -> None:
        """Nobody is left who waits for what was asked for."""
        self._wanted.clear()

    def forget(self, index: int | None) -> set[int]:
        """Nothing of this namespace (None: of any) is on the tier any more, as far as anybody can see. The tokens of the jobs that make
        that last."""
        forgets = []
        for number in self._tier.retire(None if index is None else [self._space(index)]):
            self._tier.index.remove_namespace(number)
            forgets.append(Forget(next(self._tokens), number))
        self._forgets += forgets
        self._forgetting += len(forgets)
        return {forget.token for forget in forgets}

    def idle(self) -> bool:
        return not (self._reading or self._spilling or self._forgetting)

    # ---- jobs -----------------------------------------------------------------------------------------------------------------------

    def work(self, now_ns: int, transfers: bool = True) -> list[Job]:
        """Jobs to be done: as many as the tier has room for. `transfers` False: only what a clear waits for."""
        jobs: list[Job] = [*self._forgets]
        self._forgets.clear()
        if not transfers:
            return jobs
        room = self._tier.room()
        blocked: set[int] = set()
        for key, index in islice(self._next_wanted(blocked), MAX_LOOKED_AT):
            read = self._promote(key, index, room > 0)
            if read is None and (not room or self._in_flight()):  # no slot for it; one will be free when a transfer has ended
                blocked.add(index)
                continue
            del self._wanted[index][key]
            if not self._wanted[index]:
                del self._wanted[index]
            if isinstance(read, Read):
                jobs.append(read)
                room -= 1
            else:
                self.arrived.add(key)
        spills = now_ns >= self._spill_again_ns and self._tier.takes()
        self._tables.set_spills(spills)  # while it takes none, dirty blocks are not worth keeping longer
        if spills:
            while room > 0 and (write := self._spill(now_ns)) is not None:
                jobs.append(write)
                room -= 1
        return jobs

    def complete(self, done: Iterable[Done], now_ns: int) -> None:
        for each in done:
            if (reading := self._reading.pop(each.token, None)) is not None:
                self._has_read(reading, each)
            elif (spilling := self._spilling.pop(each.token, None)) is not None:
                self._has_spilled(spilling, each, now_ns)
            else:
                self._forgetting -= 1
                self.forgotten.append(each)

    def _next_wanted(self, blocked: set[int]) -> Iterator[tuple[bytes, int]]:
        """In the order of asking, without the namespaces that are blocked by now. Who takes a key deletes it, or blocks its namespace."""

        def of(index: int) -> Iterator[tuple[int, bytes, int]]:
            keys = self._wanted[index]
            while keys and index not in blocked:
                key = next(iter(keys))
                yield keys[key], key, index

        for _, key, index in merge(*map(of, self._wanted)):
            yield key, index

    def _in_flight(self) -> bool:
        return bool(self._reading or self._spilling)

    def _promote(self, key: bytes, index: int, may_read: bool) -> Read | bool | None:
        """The job; True where there is nothing to read, None where it may not be read, or the pool has no slot for it now."""
        if self._tables.lookup(index, key)[0] == Status.OK:
            return True
        space = self._space(index)
        number = self._tier.number(space)
        if not may_read:
            return None if self._tier.index.has(key, number)[0] else True
        found = self._tier.index.open(key, number)
        if found is None:
            return True
        entry, directory, slab, slot, checksum = found
        token, shards = next(self._tokens), space.shards
        statuses, pages, generations = self._tables.reserve(index, self._member, token, key * shards, _numbers(shards))
        if any(statuses):
            self._tables.abort(self._member, pack("<Q", token))
            self._tier.index.close(entry, True)
            if Status.BUSY in statuses or Status.EXISTS in statuses:  # somebody computes it again, and is half done
                return True
            self.counts["no_slot"] += not self._in_flight()
            return None
        page, generation = int.from_bytes(pages[:4], "little"), int.from_bytes(generations[:8], "little")
        self._reading[token] = _Reading(key, index, generation, entry)
        self._coming.add(key)
        return Read(token, directory, slab, slot, page, shards, space.shard_bytes, space.slot_bytes, checksum)

    def _has_read(self, reading: _Reading, done: Done) -> None:
        key, index, generation, entry = reading
        if done.result == 0:
            shards = self._space(index).shards
            checksums = pack(f"<{shards}Q", done.checksum, *[0] * (shards - 1))  # the entry's is the XOR over all
            self._tables.commit(self._member, done.token, key * shards, _numbers(shards), pack("<Q", generation) * shards, checksums)
            self._tables.set_clean(key, generation)
            self.counts["promoted"] += 1
        else:
            self._tables.abort(self._member, pack("<Q", done.token))
            self.counts["corrupt" if done.result == CORRUPT else "promotions_failed"] += 1
        self._tier.index.close(entry, done.result in (0, errno.EBUSY, errno.ENODEV))
        self._coming.discard(key)
        self.arrived.add(key)

    def _spill(self, now_ns: int) -> Write | None:
        """The job for the dirty block that nobody used for longest."""
        if self._spilling_bytes >= self._most_spilling_bytes:
            return None
        for _ in range(MAX_LOOKED_AT):
            token = next(self._tokens)
            found = self._tables.spill(self._session, token)
            if found is None:
                return None
            key, index, page, generation, checksum, head = found
            space = self._space(index)
            number = self._tier.number(space)
            if space.slot_bytes > self._tier.largest_bytes:
                self.counts["too_large"] += 1
            elif not self._tier.index.has(key, number)[0]:
                placed = self._tier.index.place(key, number, space.slot_bytes)
                if placed is None:
                    self._tables.release(head)
                    self._spill_again_ns = now_ns + PAUSE_NS
                    self.counts["no_room"] += 1
                    return None
                entry, directory, slab, slot, sequence = placed
                self._spilling[token] = _Spilling(key, index, generation, head, entry, space.slot_bytes)
                self._spilling_bytes += space.slot_bytes
                wanted = checksum if self._tables.verify else None
                return Write(
                    token,
                    directory,
                    slab,
                    slot,
                    sequence,
                    page,
                    key,
                    number,
                    space.shards,
                    space.shard_bytes,
                    space.slot_bytes,
                    wanted,
                )
            self._tables.set_clean(key, generation)
            self._tables.release(head)
        return None

    def _has_spilled(self, spilling: _Spilling, done: Done, now_ns: int) -> None:
        key, index, generation, head, entry, slot_bytes = spilling
        self._spilling_bytes -= slot_bytes
        self._tier.index.settle(entry, done.checksum if done.result == 0 else None)
        if done.result == 0:
            self._tables.set_clean(key, generation)
            self.counts["spilled"] += 1
        elif done.result == CORRUPT:
            self._tables.discard(index, key, pack("<Q", generation))
            self.counts["corrupt"] += 1
        else:
            self._spill_again_ns = now_ns + PAUSE_NS
            self.counts["spills_failed"] += 1
        self._tables.release(head)


def _numbers(shards: int) -> bytes:
    return pack(f"<{shards}H", *range(shards))
