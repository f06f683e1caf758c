"""The store of one namespace: what an engine or a user does with blocks.

Two levels. The nine-method contract (lookup, lookup_on_prefix, lookup_on_reverse, prefetch, dump, load, wait, check and the raw-address
dump_data, load_data) works on block ids and is asynchronous where it moves bytes. Below it, for engine connectors, are synchronous
calls on derived keys: acquire and release pin blocks for a request, read and write move bytes. A lookup reads the shared tables and
makes no round trip; the path from Keys to its answer has no Python work per key.

Saving is reserve, copy, commit; loading is acquire, copy, check, release. Where the sidecar wants blocks verified, both copies give the
checksums of the bytes that they moved: commit carries them, check compares, and a block that differs is discarded. All numbers in
batches are joined little-endian bytes, as on the wire, and this module only runs where that is the machine's own order.
"""

from __future__ import annotations

import logging
import operator
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from ..cext import CStore, View, derive_keys
from ..schemas.errors import Status
from ..schemas.messages import (
    ID_BYTES,
    MAX_KEYS,
    MAX_TAGS,
    PROTOCOL_MAJOR,
    Abort,
    Acquire,
    Clear,
    Commit,
    Discard,
    Prefetch,
    Release,
    Reserve,
)
from ..schemas.namespace import KEY_BYTES, MAX_ID_BYTES, PAGE_BYTES, Layout
from .device import Addresses, from_addresses, from_tensors, split
from .errors import DumpError, LoadError, QueueFull, SidecarUnavailable
from .tasks import Task

if TYPE_CHECKING:
    from .client import Client, Link

assert sys.byteorder == "little", "HostKV's shared memory is little-endian"

log = logging.getLogger("hostkv")

# What a save has in flight, and a load has pinned, at a time: shards or blocks, since the tables' records are few; and a share of the pool,
# so that the batches of both worker threads stay below the half that one member may write at a time.
TRANSFER_KEYS = 1024
TRANSFER_SHARE = 8
STREAM_BYTES = 64 << 20  # of blocks that come from a tier: so much is copied while the next is read
PREFETCH_STEP_S = 0.5  # of one request's wait; a sidecar that hangs is found out at its end

_SAVED = {Status.OK: "committed", Status.EXISTS: "present", Status.BUSY: "busy"}
_NOT_SAVED = frozenset(Status) - _SAVED.keys()
_GOOD, _CORRUPT = 1, 2  # what View.check says of a block that is there
_OK = b"\0"
assert _OK[0] == Status.OK


@dataclass(frozen=True, slots=True)
class Keys:
    """Derived keys of a list of ids, in order. `joined`: 32 bytes each. Slices and sums are Keys; picklable."""

    joined: bytes

    def __len__(self) -> int:
        return len(self.joined) // KEY_BYTES

    @overload
    def __getitem__(self, at: slice) -> Keys: ...
    @overload
    def __getitem__(self, at: int) -> bytes: ...
    def __getitem__(self, at: int | slice) -> Keys | bytes:
        if isinstance(at, slice):
            first, last, step = at.indices(len(self))
            if step == 1:
                return Keys(self.joined[first * KEY_BYTES : last * KEY_BYTES])
            return Keys(b"".join(self[i] for i in range(first, last, step)))
        i = range(len(self))[at]
        return self.joined[i * KEY_BYTES : (i + 1) * KEY_BYTES]

    def __add__(self, other: Keys) -> Keys:
        return Keys(self.joined + other.joined)


@dataclass(frozen=True, slots=True)
class Handles:
    """Where blocks were when they were acquired, item by item: Status, page and generation (PROTOCOL.md), and in which pool: generations
    start anew in each. Slices are Handles; picklable."""

    keys: Keys
    statuses: bytes
    pages: bytes
    generations: bytes
    pool_epoch: bytes

    def __len__(self) -> int:
        return len(self.statuses)

    def __getitem__(self, at: slice) -> Handles:
        first, last, step = at.indices(len(self))
        if step != 1:
            raise ValueError(f"handles[::{step}] is not supported, slices must have step 1")
        return Handles(
            self.keys[first:last],
            self.statuses[first:last],
            self.pages[first * 4 : last * 4],
            self.generations[first * 8 : last * 8],
            self.pool_epoch,
        )

    def merged(self, which: Sequence[int], others: Handles) -> Handles:
        """With `others` in the place of these items. Of another pool: misses, all of them."""
        if others.pool_epoch != self.pool_epoch:
            return Handles(self.keys, bytes([Status.MISS]) * len(self), bytes(4 * len(self)), bytes(8 * len(self)), bytes(ID_BYTES))
        statuses, pages, generations = bytearray(self.statuses), bytearray(self.pages), bytearray(self.generations)
        for k, i in enumerate(which):
            statuses[i] = others.statuses[k]
            pages[i * 4 : i * 4 + 4] = others.pages[k * 4 : k * 4 + 4]
            generations[i * 8 : i * 8 + 8] = others.generations[k * 8 : k * 8 + 8]
        return Handles(self.keys, bytes(statuses), bytes(pages), bytes(generations), self.pool_epoch)

    @property
    def run(self) -> int:
        """Number of leading blocks that are pinned."""
        return len(self) - len(self.statuses.lstrip(_OK))


class Placed(NamedTuple):
    """Shards whose bytes are in their places, and that nobody finds there before Store.commit()."""

    statuses: bytes  # of each pair, as write() answers; OK for those that are `granted`
    granted: list[int]
    commit: Commit | None
    undo: Abort


class Store:
    """Made by Client.open(). Thread-safe. `ids` are bytes of 1 to 64; wherever lookups and acquire take them they take Keys as well."""

    def __init__(self, client: Client, layout: Layout, piece_bytes: Sequence[int] | None) -> None:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout is a {type(layout).__name__}, must be a Layout")
        if piece_bytes is not None:
            piece_bytes = [operator.index(size) for size in piece_bytes]
            if not piece_bytes or min(piece_bytes) < 1 or sum(piece_bytes) != layout.shard_bytes:
                raise ValueError(f"piece_bytes is {piece_bytes}, must be positive sizes with the sum shard_bytes={layout.shard_bytes}")
        self.layout = layout
        self.fingerprint = layout.fingerprint()
        self._client = client
        self._piece_bytes = piece_bytes
        self._c_stores: dict[tuple[bytes, int], CStore] = {}  # (pool epoch, namespace number); addresses given away stay good
        self._sizes: dict[int, array[int]] = {}  # pieces per block -> their sizes, as the copies take them

    # ---- lookups ----------------------------------------------------------------------------------------------------------------
    def keys(self, ids: Sequence[bytes]) -> Keys:
        """The derived keys of `ids`; keep them with the request. ValueError or TypeError names the first bad id."""
        try:
            return Keys(derive_keys(self.fingerprint, ids if isinstance(ids, list) and ids else _ids(ids)))
        except (TypeError, ValueError):
            _ids(ids)
            raise

    def lookup(self, ids: Sequence[bytes] | Keys) -> list[bool]:
        """For each id, in order, whether its block can be loaded now."""
        keys = self._keys(ids)
        found = bytes(len(keys))
        if at := self._tables():
            found = at[0].lookup(at[1], keys.joined)
        self._client.counters.add(lookups=len(keys), hits=found.count(1))
        return list(map(bool, found))

    def lookup_on_prefix(self, ids: Sequence[bytes] | Keys) -> int:
        """Index of the last id of the unbroken run of present blocks from the front, -1 if the first is absent."""
        keys = self._keys(ids)
        run = 0
        if at := self._tables():
            run = at[0].lookup_prefix(at[1], keys.joined)
        self._client.counters.add(lookups=len(keys), hits=run)
        return run - 1

    def lookup_on_reverse(self, ids: Sequence[bytes] | Keys) -> int:
        """Index of the rightmost id whose block is present, -1 if none is."""
        keys = self._keys(ids)
        index = -1
        if at := self._tables():
            index = at[0].lookup_reverse(at[1], keys.joined)
        self._client.counters.add(lookups=len(keys), hits=index >= 0)
        return index

    # ---- the contract's transfers ---------------------------------------------------------------------------------------------------
    def prefetch(self, ids: Sequence[bytes] | Keys) -> Task:
        """Brings blocks from tiers into the pool. The task ends when they are there, or cannot be, or Client.tier_wait_s after the last one
        came; well in any case, since a load tells."""
        keys = self._keys(ids)

        def run(task: Task) -> None:
            link = self._client.ready()
            if link is not None and link.has_index:
                self.bring(keys, self._client.tier_wait_s)
            task.succeed([])

        return self._client.submit(Task(run))

    def dump(self, ids: Sequence[bytes], shard_index: int | Sequence[int], tensors: Sequence[Sequence[Any]]) -> Task:
        """Saves tensors[i][j] (piece j of shard shard_index, or shard_index[i], of block ids[i]); any contiguous buffer on the CPU, of the
        size that open() was told. The buffers must not change until the task is done. wait() gives one word per pair: "committed",
        "present" (it was there) or "busy" (another member is writing it; nothing was stored by this call)."""
        ids = _ids(ids)
        return self._dump(ids, shard_index, from_tensors(tensors, len(ids), self._piece_bytes, self.layout.shard_bytes, writable=False))

    def load(self, ids: Sequence[bytes], shard_index: int | Sequence[int], tensors: Sequence[Sequence[Any]]) -> Task:
        """Loads into tensors[i][j], which must be writable; as dump() otherwise. A block that is absent fails alone (LoadError.failed)."""
        ids = _ids(ids)
        return self._load(ids, shard_index, from_tensors(tensors, len(ids), self._piece_bytes, self.layout.shard_bytes, writable=True))

    def dump_data(self, ids: Sequence[bytes], shard_index: int | Sequence[int], addrs: Any, prerequisite_handle: int = 0) -> Task:
        """dump() from raw addresses: addrs[i][j], a list of lists or an array of uint64. The memory must stay as it is until the task is
        done. prerequisite_handle: an event of a device to wait for; the CPU has none, so it must be 0."""
        if prerequisite_handle != 0:
            raise ValueError(f"prerequisite_handle is {prerequisite_handle!r}, must be 0: memory of the CPU has no events to wait for")
        ids = _ids(ids)
        return self._dump(ids, shard_index, _kept(from_addresses(addrs, len(ids))))

    def load_data(self, ids: Sequence[bytes], shard_index: int | Sequence[int], addrs: Any) -> Task:
        """load() into raw addresses."""
        ids = _ids(ids)
        return self._load(ids, shard_index, _kept(from_addresses(addrs, len(ids))))

    def wait(self, task: Task, timeout_s: float | None = None) -> list[str]:
        """Waits for the task; without timeout_s as long as it takes, which is bounded. What dump() promises, else []. DumpError or
        LoadError name the ids that failed; TimeoutError leaves the task going."""
        return _task(task).result(timeout_s)

    def check(self, task: Task) -> bool:
        """Whether the task is done, well or not. Never blocks."""
        return _task(task).done()

    def cc_store(self) -> int:
        """Address of the `struct hostkv_store` of hostkv.h, which is valid as long as this store lives. Ask again after a reconnect: a new
        pool has a new struct. SidecarUnavailable while there is none to give."""
        link = self._client.ready()
        index = self._client.index(link, self.fingerprint) if link is not None else None
        if link is None or index is None:
            raise SidecarUnavailable(self._client.down_reason or "the namespace is not registered")
        at = (link.hello.pool_epoch, index)
        c_store = self._c_stores.get(at)
        if c_store is None:
            made = CStore(link.view, link.pool, self.fingerprint, index, self.layout.shard_bytes, self.layout.shards)
            c_store = self._c_stores.setdefault(at, made)  # another thread's, if it was first: an address given away stays good
        return c_store.address

    def clear(self) -> None:
        """Invalidates the namespace, for every client: its weights changed, so nothing stored may be served again. SidecarUnavailable: it
        may not have been."""
        self._client.call(Clear(0), fingerprint=self.fingerprint)

    # ---- for engine connectors: synchronous, on keys ----------------------------------------------------------------------------------
    def acquire(self, ids: Sequence[bytes] | Keys, tag: int, wait_s: float = 0.0) -> Handles:
        """Pins the blocks that are in the pool until release([tag]), or until every member of the session is gone; waits at most `wait_s`
        for those that only a tier has. All are MISS when the sidecar does not serve. Use a tag (Client.new_tag) for one acquire only: when
        the reply is lost, the tag is released as a whole."""
        handles = self._acquire(self._keys(ids), tag)
        on_tier = self.on_tier(handles) if wait_s > 0 else []
        return self.promote(handles, on_tier, tag, wait_s) if on_tier else handles

    def locate(self, ids: Sequence[bytes] | Keys) -> Handles:
        """Where those blocks are that are in the pool, as acquire() answers, but without a pin and without a message: read() tells which of
        them did not stay there. Who has read them says so with used()."""
        keys = self._keys(ids)
        if at := self._tables():
            return Handles(keys, *at[0].locate(at[1], keys.joined), at[0].pool_epoch)
        return self.no_handles(keys)

    def used(self, keys: Keys) -> None:
        """Has a thread of the client tell the sidecar that these blocks, which locate() found, are in use: what it evicts goes by that."""

        def tell(_: Task) -> None:
            tag = self._client.new_tag()
            if Status.OK in self._acquire(keys, tag).statuses:
                self.release([tag])

        try:
            self._client.submit(Task(tell))
        except (QueueFull, SidecarUnavailable, RuntimeError) as error:  # RuntimeError: the client is being closed
            log.debug("the sidecar does not hear of a use: %s", error)

    @staticmethod
    def no_handles(keys: Keys) -> Handles:
        """What an acquire answers that finds nothing."""
        return Handles(keys, bytes([Status.MISS]) * len(keys), bytes(4 * len(keys)), bytes(8 * len(keys)), bytes(ID_BYTES))

    def promote(self, handles: Handles, on_tier: list[int], tag: int, wait_s: float) -> Handles:
        """What an acquire under `tag` answered, with those blocks too that only a tier had, as soon as they are in the pool."""
        keys = Keys(_select(handles.keys.joined, KEY_BYTES, on_tier))
        self.bring(keys, wait_s)
        others = self._acquire(keys, tag)
        if others.pool_epoch != handles.pool_epoch:  # all are misses then, and who is told that gives nothing back
            self.release([tag])
        return handles.merged(on_tier, others)

    def _acquire(self, keys: Keys, tag: int) -> Handles:
        parts: list[Handles] = []
        undo = Release(_joined_tags([tag]))
        count = len(keys)
        try:
            for first in range(0, count, MAX_KEYS):
                batch = keys if count <= MAX_KEYS else keys[first : first + MAX_KEYS]
                request = Acquire(0, tag, batch.joined)
                reply, link = self._client.call(request, undo=undo, fingerprint=self.fingerprint, count=min(count - first, MAX_KEYS))
                parts.append(Handles(batch, reply.statuses, reply.pages, reply.generations, link.hello.pool_epoch))
                if parts[0].pool_epoch != parts[-1].pool_epoch:
                    raise SidecarUnavailable("the pool was replaced between two batches")
        except SidecarUnavailable:
            if parts:
                self._client.give_back(undo)
            return self.no_handles(keys)
        if len(parts) == 1:
            return parts[0]
        statuses, pages, generations = (b"".join(getattr(part, name) for part in parts) for name in ("statuses", "pages", "generations"))
        return Handles(keys, statuses, pages, generations, parts[0].pool_epoch)

    def release(self, tags: Sequence[int]) -> None:
        """Ends the pins under these tags: now, or as soon as the sidecar serves again."""
        self._client.check_usable()
        joined = _joined_tags(tags)
        for first in range(0, len(joined), 8 * MAX_TAGS):
            self._client.give_back(Release(joined[first : first + 8 * MAX_TAGS]))

    def read(self, handles: Handles, shard: int | Sequence[int], addresses: Any) -> list[int]:
        """Copies one shard of each block to addresses[i][j] (n x m) and then checks that each block was where its handle says. Indices of
        those that failed; the bytes at their addresses are undefined. Needs no answer from the sidecar."""
        return self._read(handles, self._shards(shard, len(handles)), from_addresses(addresses, len(handles)), queued=False)

    def write(self, ids: Sequence[bytes] | Keys, shards: int | Sequence[int], addresses: Any, low_priority: bool = False) -> bytes:
        """Saves addresses[i][j] (n x m). One Status per pair: OK, EXISTS, BUSY, FULL, THROTTLED or NOT_HELD. `low_priority`: until somebody
        acquires them, the blocks go to no tier and have a small part of a full pool. SidecarUnavailable: it went away, and of 1024
        pairs at a time some may have been stored before."""
        keys = self._keys(ids)
        return self._write(keys, self._shards(shards, len(keys)), from_addresses(addresses, len(keys)), False, low_priority)

    def place(self, ids: Sequence[bytes] | Keys, shards: int | Sequence[int], addresses: Any) -> Placed:
        """The first part of write(), for one batch of at_a_time() or fewer. When it returns, addresses[i][j] are copied and may change, and
        the rest, commit(), can be done by another thread. SidecarUnavailable: nothing was stored."""
        keys = self._keys(ids)
        with self._client.transfer():
            return self._place(keys.joined, self._shards(shards, len(keys)), from_addresses(addresses, len(keys)), 0, False, False)

    def commit(self, placed: Placed) -> bytes:
        """The second part, once: what write() answers. SidecarUnavailable: what was placed is lost."""
        if placed.commit is None:
            return placed.statuses
        written = b""
        try:
            written = self._client.call(placed.commit, undo=placed.undo, count=len(placed.granted))[0].statuses
        finally:
            if not written or Status.NOT_HELD in written:
                self._client.give_back(placed.undo)
        merged = bytearray(placed.statuses)
        for i, status in zip(placed.granted, written, strict=True):
            merged[i] = status
        return bytes(merged)

    # ---- inside -------------------------------------------------------------------------------------------------------------------
    def _keys(self, ids: Sequence[bytes] | Keys) -> Keys:
        if not isinstance(ids, Keys):
            return self.keys(ids)
        if not ids.joined:
            raise ValueError("the keys are empty, there must be at least one")
        return ids

    def _tables(self) -> tuple[View, int] | None:
        """The tables to look in and the namespace's number there; None while the sidecar does not serve."""
        link = self._client.ready()
        if link is None:
            return None
        index = self._client.index(link, self.fingerprint)
        return None if index is None else (link.view, index)

    def _shards(self, shard: int | Sequence[int], count: int) -> array[int]:
        """uint16 per item."""
        if isinstance(shard, int) and 0 <= shard < self.layout.shards:
            return array("H", (shard,)) * count
        shards: Any = shard if hasattr(shard, "__len__") else [shard] * count
        if len(shards) != count:
            raise ValueError(f"shard_index has {len(shards)} entries for {count} ids, must be one number or one per id")
        try:
            joined = array("H", shards)
        except (TypeError, OverflowError):
            joined = array("H")
        if len(joined) != count or max(joined) >= self.layout.shards:
            for i, value in enumerate(shards):
                if not isinstance(value, int) and not hasattr(value, "__index__"):
                    raise TypeError(f"shard_index of id {i} is {value!r}, must be an integer")
                if not 0 <= value < self.layout.shards:
                    raise ValueError(f"shard_index of id {i} is {value}, must be 0..{self.layout.shards - 1} (shards={self.layout.shards})")
        return joined

    def _pieces(self, pieces: int) -> array[int]:
        sizes = self._sizes.get(pieces)
        if sizes is None:
            sizes = self._sizes[pieces] = array("Q", split(self._piece_bytes, self.layout.shard_bytes, pieces))
        return sizes

    def _dump(self, ids: list[bytes], shard_index: int | Sequence[int], source: Addresses) -> Task:
        shards = self._shards(shard_index, len(ids))
        self._pieces(source.pieces)
        pairs = list(zip(ids, shards, strict=True))
        if len(set(pairs)) != len(pairs):
            i = next(i for i, pair in enumerate(pairs) if pair in pairs[:i])
            raise ValueError(f"ids[{i}] = {ids[i]!r}, shard {shards[i]} is in this dump twice; a shard has one content")
        keys = self.keys(ids)

        def run(task: Task) -> None:
            try:
                statuses = self._write(keys, shards, source, queued=True)
            except SidecarUnavailable as error:
                task.fail(DumpError(f"not stored: {error}", list(ids)))
                return
            if failed := [i for i, status in enumerate(statuses) if status not in _SAVED]:
                why = ", ".join(f"{statuses.count(status)} {status.name}" for status in sorted(_NOT_SAVED) if status in statuses)
                task.fail(DumpError(f"{len(failed)} of {len(ids)} were not stored: {why}", [ids[i] for i in failed]))
            else:
                task.succeed([_SAVED[Status(status)] for status in statuses])

        return self._client.submit(Task(run))

    def _load(self, ids: list[bytes], shard_index: int | Sequence[int], target: Addresses) -> Task:
        shards = self._shards(shard_index, len(ids))
        self._pieces(target.pieces)
        keys = self.keys(ids)

        def run(task: Task) -> None:
            failed: list[int] = []
            first = last = 0
            ahead = at_a_time = self.at_a_time()
            wait_s, streams = self._client.tier_wait_s, False
            while last < len(ids):
                first, last = last, min(last + at_a_time, len(ids))
                tag = self._client.new_tag()
                if streams:
                    self.bring(keys[first : first + ahead], 0)
                handles = self.acquire(keys[first:last], tag, wait_s if streams else 0)
                try:
                    on_tier = self.on_tier(handles)
                    if on_tier and not streams:  # from here on the first are copied while the others come
                        streams, last = True, first
                        at_a_time = max(1, min(at_a_time, STREAM_BYTES // self.layout.slot_bytes))
                        continue
                    if on_tier:
                        wait_s = 0.0  # it was waited for in vain once
                    rows = Addresses(target.rows(first, last), target.pieces)
                    failed += [first + i for i in self._read(handles, shards[first:last], rows, queued=True)]
                    if last < len(ids):
                        continue
                    if failed:
                        why = self._client.down_reason or "absent, gone while loading, or unlike their checksums"
                        task.fail(LoadError(f"{len(failed)} of {len(ids)} were not loaded: {why}", [ids[i] for i in failed]))
                    else:
                        task.succeed([])
                finally:
                    if any(status == Status.OK for status in handles.statuses):
                        self.release([tag])

        return self._client.submit(Task(run))

    def on_tier(self, handles: Handles) -> list[int]:
        """Which of those that were not in the pool a tier may have."""
        missed = [i for i, status in enumerate(handles.statuses) if status == Status.MISS]
        link = self._client.ready() if missed else None
        at = self._tables() if link is not None and link.has_index else None
        if at is None:
            return []
        found = at[0].lookup(at[1], _select(handles.keys.joined, KEY_BYTES, missed))
        return [i for i, is_found in zip(missed, found, strict=True) if is_found]

    def bring(self, keys: Keys, wait_s: float) -> None:
        """Asks for what a tier has of these to be brought into the pool; waits until all of it is there, or cannot be, or nothing has come
        for `wait_s`."""
        for first in range(0, len(keys), MAX_KEYS):
            self._bring(keys[first : first + MAX_KEYS], wait_s)

    def _bring(self, keys: Keys, wait_s: float) -> None:
        coming, since_s = len(keys) + 1, time.monotonic()
        while True:
            left_s = since_s + wait_s - time.monotonic()
            step_s = max(0.0, min(left_s, PREFETCH_STEP_S))
            request = Prefetch(0, keys.joined, int(step_s * 1000))
            try:
                reply, _ = self._client.call(request, fingerprint=self.fingerprint, count=len(keys), late_s=step_s)
            except SidecarUnavailable:
                return
            left = reply.statuses.count(Status.BUSY)
            if left < coming:
                coming, since_s = left, time.monotonic()
            if not left or left_s <= 0:
                return

    def at_a_time(self) -> int:
        """How many shards or blocks one batch may have."""
        link = self._client.mapped()
        if link is None:
            return TRANSFER_KEYS
        return max(1, min(TRANSFER_KEYS, link.pool.size // TRANSFER_SHARE // self.layout.slot_bytes))

    def _write(self, keys: Keys, shards: array[int], source: Addresses, queued: bool, low_priority: bool = False) -> bytes:
        statuses = b""
        first = last = 0
        try:
            while last < len(keys):
                first, last = last, min(last + self.at_a_time(), len(keys))
                batch = keys.joined[first * KEY_BYTES : last * KEY_BYTES]
                with self._client.transfer():
                    statuses += self.commit(self._place(batch, shards[first:last], source, first, queued, low_priority))
        finally:
            dropped = len(keys) - sum(map(statuses.count, _SAVED))
            if dropped:
                self._client.counters.add(dropped_saves=dropped)
        return statuses

    def _place(self, keys: bytes, shards: array[int], source: Addresses, first: int, queued: bool, low_priority: bool) -> Placed:
        count = len(shards)
        if low_priority:
            mapped = self._client.mapped()
            low_priority = mapped is not None and mapped.hello.protocol >= [PROTOCOL_MAJOR, 2]
        tag = self._client.new_tag()
        undo = Abort(_joined_tags([tag]))
        reserve = Reserve(0, tag, keys, shards.tobytes(), int(low_priority))
        reserved, link = self._client.call(reserve, undo=undo, fingerprint=self.fingerprint, count=count)
        statuses: bytes = reserved.statuses
        granted = [i for i, status in enumerate(statuses) if status == Status.OK]
        commit = None
        try:
            if granted:
                offsets = self._offsets(reserved.pages, shards, granted)
                all_of_it = len(granted) == count
                addresses = source.rows(first, first + count) if all_of_it else source.select([first + i for i in granted])
                seeds = array("Q", [shards[i] for i in granted]) if link.hello.verify else None
                checksums = link.pool.copy_in(offsets, addresses, self._pieces(source.pieces), self._client.copy_threads, queued, seeds)
                commit = Commit(
                    tag,
                    keys if all_of_it else _select(keys, KEY_BYTES, granted),
                    shards.tobytes() if all_of_it else array("H", [shards[i] for i in granted]).tobytes(),
                    reserved.generations if all_of_it else _select(reserved.generations, 8, granted),
                    bytes(8 * len(granted)) if checksums is None else checksums,
                )
        finally:  # what is reserved and cannot be committed, for whatever reason, is given back
            if granted and commit is None:
                self._client.give_back(undo)
        return Placed(statuses, granted, commit, undo)

    def _read(self, handles: Handles, shards: array[int], target: Addresses, queued: bool) -> list[int]:
        pinned: list[int] = []
        failed: list[int] = []
        with self._client.transfer():
            link = self._client.mapped()
            if link is not None and link.hello.pool_epoch == handles.pool_epoch:
                pinned = [i for i, status in enumerate(handles.statuses) if status == Status.OK]
                if pinned:
                    failed = self._copy_out(link, handles, pinned, shards, target, queued)
        if len(pinned) < len(handles):
            failed = sorted({*range(len(handles))}.difference(pinned).union(failed))
        if failed:
            self._client.counters.add(failed_loads=len(failed))
        return failed

    def _copy_out(self, link: Link, handles: Handles, pinned: list[int], shards: array[int], target: Addresses, queued: bool) -> list[int]:
        """Which of the pinned failed."""
        offsets = self._offsets(handles.pages, shards, pinned)
        seeds = others = None
        if link.hello.verify:
            seeds = array("Q", [shards[i] for i in pinned])
            others, other_seeds = self._other_shards(offsets, seeds)
        if max(max(offsets), max(others or offsets)) + self.layout.shard_bytes > link.pool.size:
            return pinned  # handles of another layout's store
        all_of_it = len(pinned) == len(handles)
        addresses = target.table if all_of_it else target.select(pinned)
        checksums = link.pool.copy_out(offsets, addresses, self._pieces(target.pieces), self._client.copy_threads, queued, seeds)
        if checksums is not None and others:
            checksums = _xor(checksums, link.pool.checksums(others, self.layout.shard_bytes, other_seeds))
        keys, pages, generations = handles.keys.joined, handles.pages, handles.generations
        if not all_of_it:
            keys, pages, generations = _select(keys, KEY_BYTES, pinned), _select(pages, 4, pinned), _select(generations, 8, pinned)
        good = link.view.check(keys, pages, generations, checksums)
        if good.count(_GOOD) == len(pinned):
            return []
        corrupt = [i for i, is_good in enumerate(good) if is_good == _CORRUPT]
        if corrupt:
            self._discard(_select(keys, KEY_BYTES, corrupt), _select(generations, 8, corrupt))
        return [i for i, is_good in zip(pinned, good, strict=True) if is_good != _GOOD]

    def _other_shards(self, offsets: array[int], shards: array[int]) -> tuple[array[int], array[int]]:
        """Where the other shards of these blocks lie, and which they are: block after block, shards - 1 of each."""
        stride, each = self.layout.shard_stride, range(self.layout.shards)
        pairs = [(at + (k - own) * stride, k) for at, own in zip(offsets, shards, strict=True) for k in each if k != own]
        return array("Q", [at for at, _ in pairs]), array("Q", [k for _, k in pairs])

    def _discard(self, keys: bytes, generations: bytes) -> None:
        """Makes blocks that do not match their checksums misses for everybody. Does not wait for the answer: a block that is still there
        fails the next load."""
        count = len({keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)})
        self._client.counters.add(corrupt_blocks=count)
        log.error("%d blocks do not match their checksums and are discarded: something writes into the pool, or its memory fails", count)
        try:
            for first in range(0, len(generations) // 8, MAX_KEYS):
                last = first + MAX_KEYS
                request = Discard(0, keys[first * KEY_BYTES : last * KEY_BYTES], generations[first * 8 : last * 8])
                self._client.call(request, fingerprint=self.fingerprint, wait=False)
        except SidecarUnavailable as error:
            log.debug("not discarded: %s", error)

    def _offsets(self, pages: bytes, shards: array[int], which: list[int]) -> array[int]:
        """Where in the pool the shards lie, in bytes."""
        stride = self.layout.shard_stride
        page = memoryview(pages).cast("I")
        return array("Q", [page[i] * PAGE_BYTES + shards[i] * stride for i in which])


def _ids(ids: Sequence[bytes]) -> list[bytes]:
    """The ids as a list. ValueError or TypeError names the first that is none."""
    if isinstance(ids, (bytes, str, Keys)) or not hasattr(ids, "__iter__"):
        raise TypeError(f"ids is a {type(ids).__name__}, must be a list of bytes")
    ids = list(ids)
    if not ids:
        raise ValueError("ids is empty, there must be at least one")
    for i, block_id in enumerate(ids):
        if not isinstance(block_id, bytes):
            raise TypeError(f"ids[{i}] is {block_id!r}, must be bytes")
        if not 1 <= len(block_id) <= MAX_ID_BYTES:
            raise ValueError(f"ids[{i}] has {len(block_id)} bytes, must have 1 to {MAX_ID_BYTES}; hash a longer one")
    return ids


def _kept(addresses: Addresses) -> Addresses:
    """The same with a table of its own: the caller's may change before the task runs."""
    table = array("Q")
    table.frombytes(addresses.table.tobytes())
    return Addresses(table, addresses.pieces)


def _joined_tags(tags: Sequence[int]) -> bytes:
    try:
        return array("Q", tags).tobytes()
    except (TypeError, OverflowError):
        raise ValueError(f"tags are {list(tags)!r}, must be integers from Client.new_tag()") from None


def _select(joined: bytes, width: int, which: Sequence[int]) -> bytes:
    return b"".join(joined[i * width : (i + 1) * width] for i in which)


def _xor(checksums: bytes, others: bytes) -> bytes:
    """The checksum of each block: of its one shard with those of its others, of which there are equally many per block."""
    whole = array("Q", checksums)
    rest = memoryview(others).cast("Q")
    each = len(rest) // len(whole)
    for i in range(len(rest)):
        whole[i // each] ^= rest[i]
    return whole.tobytes()


def _task(task: Task) -> Task:
    if not isinstance(task, Task):
        raise TypeError(f"task is a {type(task).__name__}, must be what dump(), load() or prefetch() returned")
    return task
