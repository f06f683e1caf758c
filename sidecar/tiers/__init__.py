"""What a tier is: a place below the pool that keeps blocks longer than memory does. A tier moves bytes and knows what it may lose; which
block goes where, who waits for it and what is dropped is decided by the core, which drives a tier from its one thread:

    entry, directory, slab, slot, sequence = tier.index.place(key, namespace, slot_bytes)     nobody finds it there until it is settled
    tier.submit([Write(...)])                                in the same turn; the pool slot stays as it is until the Done
    tier.index.settle(entry, done.checksum if done.result == 0 else None)

    entry, directory, slab, slot, checksum = tier.index.open(key, namespace)                  it stays there until it is closed
    tier.submit([Read(...)])                                 the pool slot is the tier's to write until the Done
    tier.index.close(entry, keep=done.result in (0, EBUSY, ENODEV))

What a tier must do, besides what the methods of `Tier` say:

* Nothing here waits, and nothing is raised because of a disk, a network or a file: what may wait or fail does so in threads of the tier,
  and fails a job, or the tier, which its status says and its log says once.
* Each job that was submitted gets exactly one Done, with an errno where it cannot be done. When is not promised: a job whose disk hangs
  stays in flight, and so does the pool slot it reads or writes, because the kernel may still touch it.
* Payload is told by its checksum (XOR over a block's shards k of xxh3-64 of its shard_bytes, seed k). A read that finds other bytes than
  were written is Done with CORRUPT, never with 0. So nothing else needs to be ordered or atomic: a torn write is a miss.
* What `index` holds when a tier starts is what it recovered; that may come in while it serves already.
* A namespace whose Forget is Done with 0 is never seen again, not after a power loss either. Until then it is not seen by this process.

A tier whose places are no slabs on a disk makes an Index of its own, and takes (directory, slab, slot) for the name of a place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from ...cext import Index

CORRUPT = -1  # a result: the payload has another checksum than it must have


class Write(NamedTuple):
    """One block from the pool to a place that Index.place gave."""

    token: int  # the caller's; no two jobs in flight have the same
    directory: int
    slab: int
    slot: int
    sequence: int
    page: int  # where it starts in the pool, in pages of 4096 bytes
    key: bytes
    namespace: int  # as Tier.number said
    shards: int
    shard_bytes: int
    slot_bytes: int
    checksum: int | None  # what it must be, or the write fails with CORRUPT; None: whatever it is


class Read(NamedTuple):
    """One block from a place that Index.open gave to the pool."""

    token: int
    directory: int
    slab: int
    slot: int
    page: int
    shards: int
    shard_bytes: int
    slot_bytes: int
    checksum: int


class Forget(NamedTuple):
    """All blocks of a namespace that Tier.retire named."""

    token: int
    namespace: int


Job = Write | Read | Forget


class Done(NamedTuple):
    token: int
    result: int  # 0, CORRUPT, or an errno: EBUSY no room, ENODEV not in service, ESTALE a namespace that was retired, others the disk's
    checksum: int  # of the payload, where a job that moves one ended well


class Space(NamedTuple):
    """What a tier keeps of a namespace (schemas/namespace.py)."""

    fingerprint: bytes
    shards: int
    shard_bytes: int
    slot_bytes: int
    label: str


class Tier(Protocol):
    index: Index

    @property
    def largest_bytes(self) -> int:
        """No block with larger slot_bytes has a place here."""

    def number(self, space: Space) -> int:
        """The number of a namespace in this tier, until it is retired; asked for at each use, since a tier keeps a bounded number of them
        and gives up the one that was not asked for the longest. Nothing is waited for."""

    def retire(self, spaces: Iterable[Space] | None) -> list[int]:
        """The numbers that these namespaces (None: all) had until now. What is saved from now on gets others. The caller removes what the
        index has of them, and submits a Forget for each."""

    def takes(self) -> bool:
        """Whether writes have a place now, as far as can be told."""

    def room(self) -> int:
        """How many more jobs may be submitted now, whatever they are. Those beyond it may end with EBUSY."""

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def fileno(self) -> int:
        """Readable when `reap` has something to do."""

    def reap(self) -> list[Done]:
        """What has ended. To be called when `fileno` is readable, and once a second all the same: it is the tier's clock, too."""

    def status(self) -> dict[str, Any]:
        """For people and `hostkv status`: strings, numbers, lists and maps."""

    def quiet(self) -> bool:
        """Whether certainly no I/O that an earlier sidecar submitted is under way, so that slots it had in flight may be reused."""

    def busy(self) -> bool:
        """Whether a thread of it does something that may block besides jobs. exec waits for what blocks."""

    def waits(self) -> bool:
        """Whether one has lately done nothing but wait for a disk."""

    def close(self) -> None:
        """Makes durable what was written, and ends. Waits for what is in flight, but not for ever."""
