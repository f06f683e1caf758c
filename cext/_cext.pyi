"""Types of the C extension. All batches are joined little-endian fields, as on the wire: keys 32 bytes each, shards uint16, pages
uint32, generations uint64, statuses one byte (schemas.errors.Status). Every call that touches more than a page of memory releases
the GIL, except the methods of Tables, which belong to one thread."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

class _Buffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...

Buffer = Any  # bytes, bytearray, memoryview, array, numpy array: anything C-contiguous

class LayoutError(ValueError):
    """The tables are not of this version, this pool or this host; the message names the first field that differs."""

# ---- hashes -------------------------------------------------------------------------------------------------------------------
def derive_keys(fingerprint: bytes, ids: list[bytes]) -> bytes:
    """Joined keys: SHA-256(fingerprint (32 bytes), 32 zero bytes, id) of each id of 1..64 bytes. ValueError names a bad id's index.
    Releases the GIL from 2048 ids on, since below that taking it back can cost more."""

def chain_ids(root: bytes, tokens: Buffer, block_tokens: int, extra: list[bytes] | None = None) -> list[bytes]:
    """Block ids of the whole blocks of `tokens` (uint32): id_i = SHA-256(id_{i-1} or root (32 bytes), block's tokens as uint32 LE,
    extra[i]). `extra`: one bytes object per whole block, empty where there is nothing (multimodal hashes, LoRA)."""

def sha256(data: Buffer, /) -> bytes: ...
def xxh3_64(data: Buffer, seed: int = 0, /) -> int: ...
def cpu_features() -> list[str]:
    """What the runtime dispatch chose for SHA-256 and for copies, e.g. ["sha_ni", "avx2"]; for status and bug reports."""

def _set_sha(name: str, /) -> bool:
    """For tests: makes SHA-256 run on "sha_ni", "arm_sha2" or "portable". False (and no change) when this CPU lacks it."""

def _set_copy(name: str, /) -> bool:
    """For tests: makes copies run on "avx512", "avx2", "sse2", "neon" or "plain". False (and no change) when this CPU lacks it."""

# ---- the sidecar's restart ----------------------------------------------------------------------------------------------------
def restart_on_abort(command: bytes, /) -> None:
    """From now on, an abort() in any other thread than this one replaces the process by `command` (execv; words that each end with a zero
    byte, the first the path of the program): ZeroMQ aborts where it finds no descriptor for a connection."""

# ---- the member lock ----------------------------------------------------------------------------------------------------------
def lock_take(path: str, /) -> None:
    """Creates `path` (O_EXCL, 0640 whatever the umask), takes a POSIX record lock on it and keeps the descriptor open until the process
    ends. A thread in C, which needs no GIL, writes a new number (uint64 LE) at its start every second from then on: the member's
    heartbeat. OSError (FileExistsError, PermissionError, ...) with the path."""

def lock_look(path: str, /) -> tuple[int, int]:
    """(holder, beat). holder: -1 when nobody holds a record lock on it or it is absent, else the pid (0 if it is in another PID namespace).
    beat: the uint64 at its start, 0 where there is none. OSError when it cannot be looked at (ELOOP, EACCES, ...). Never to be called in a
    process that holds a lock on the same file."""

# ---- shared memory ------------------------------------------------------------------------------------------------------------
class Mapping:
    """`size` bytes of a shared-memory file mapped at `address`, MADV_DONTFORK. A fork's child must not use it: every method then
    raises RuntimeError. The buffer protocol exports the bytes (read-only unless writable)."""

    address: int
    size: int
    def __init__(self, fd: int, size: int, writable: bool = False) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def populate(self, offset: int, length: int) -> None:
        """Pre-faults the pages of this mapping (MADV_POPULATE_WRITE/READ, touching where the kernel lacks it)."""

    def copy_in(
        self, offsets: Buffer, addresses: Buffer, piece_bytes: Buffer, threads: int = 1, queued: bool = False, seeds: Buffer | None = None
    ) -> bytes | None:
        """Gather: for block i of n and piece j of m, the piece_bytes[j] bytes at addresses[i*m+j] go to offsets[i] + sum of the
        earlier pieces. offsets: uint64[n], addresses: uint64[n*m], piece_bytes: uint64[m]. Streaming stores for large pieces.
        ValueError when a block would leave the mapping; the addresses are the caller's to vouch for. queued: wait until
        no other queued copy of this mapping runs. No two blocks may overlap.
        threads: 1..64, the caller's included; no more are used than there are 2 MiB to copy. GIL released.
        seeds (uint64[n]): also returns the joined uint64 xxh3-64, with its seed, of the bytes of each block as they were stored."""

    def copy_out(
        self, offsets: Buffer, addresses: Buffer, piece_bytes: Buffer, threads: int = 1, queued: bool = False, seeds: Buffer | None = None
    ) -> bytes | None:
        """Scatter: the same the other way round; the checksums are those of the bytes as they were delivered."""

    def checksums(self, offsets: Buffer, size: int, seeds: Buffer) -> bytes:
        """Joined uint64 xxh3-64 of the `size` bytes at each offset, with its seed. GIL released."""

    def close(self) -> None:
        """Unmaps. Further use raises ValueError; refuses (BufferError) while a buffer or a copy is out."""

def memory_copy(destination: int, source: int, size: int, threads: int = 1, streaming: bool = True) -> None:
    """One flat copy of `size` bytes between two addresses: the limit that benchmarks compare with. GIL released."""

def buffer_address(buffer: Buffer, writable: bool) -> tuple[int, int]:
    """(address, bytes) of a C-contiguous buffer. BufferError when it is not contiguous, or read-only and writable was asked."""

# ---- the I/O engine -----------------------------------------------------------------------------------------------------------
# (token, kind, fd, offset, at, size, shards, shard_bytes, checksum, record_fd, record_offset, record)
_Op = tuple[int, int, int, int, int, int, int, int, int | None, int, int, bytes]

class Io:
    """Moves blocks between files and `size` bytes of a shared-memory file (the pool), which it maps, in threads of its own that hash them,
    too. Each device (st_dev) that the files are on has a queue, threads and a depth of its own, so one that hangs holds up no other. A
    fork's child must not use it: every method then raises RuntimeError."""

    READ: ClassVar[int]
    WRITE: ClassVar[int]
    CORRUPT: ClassVar[int]
    """A result: the payload has another checksum than the one given."""

    engine: str
    """Which one runs: "io_uring" or "threads"."""
    why: str
    """Why it is not io_uring; "" where it is."""
    def __init__(self, fd: int, size: int, *, engine: str = "auto", depth: int = 64, workers: int = 2) -> None:
        """engine: "io_uring", "threads", or "auto", the first of them that works here. depth: at most so many transfers of a device are
        under way at once, and four times as many ops of it are held. workers: threads of a device that hash (io_uring), or hash beside
        those that wait for transfers (threads). OSError where the engine that was asked for does not work, with what `why` would say."""

    def fileno(self) -> int:
        """An eventfd, readable while there is something to reap."""

    def submit(self, ops: Sequence[_Op]) -> int:
        """Takes ops in their order until one has no room with its device, and returns how many. Never waits for a device.

        An op is (token, kind, fd, offset, at, size, shards, shard_bytes, checksum, record_fd, record_offset, record). Its `size` bytes lie
        at `offset` of fd and at `at` of the mapping, all multiples of 4096, and hold `shards` shards of shard_bytes, each at a multiple of
        64 bytes. Their checksum is that of a struct hkv_record.
        READ: moves them into the mapping and compares the checksum (unless None) with that of the bytes there.
        WRITE: computes the checksum, fails and writes nothing where one is given that differs, and moves the bytes into the file; then,
        unless record_fd is -1, completes `record` (64 bytes, checksum 0, the seed of the seal in the seal's place), and writes it.
        The caller keeps both descriptors open, and the bytes as they are, until the op is reaped. ValueError or TypeError: none was taken.
        Ops of one kind that are waiting one behind the other, and lie so in the file, may be moved by one transfer; what comes of each is
        its own.
        """

    def reap(self) -> list[tuple[int, int, int]]:
        """(token, result, checksum of the payload) of each op that ended since. result: 0, CORRUPT, or an errno; EIO where a file ends
        before its bytes. What a failed READ leaves in the mapping is undefined."""

    def depths(self) -> dict[int, int]:
        """How many transfers each device (st_dev) is given at once now."""

    def close(self) -> None:
        """Waits for the transfers under way, which is as long as the slowest device takes, ends ops that did not begin with ECANCELED,
        and unmaps. reap() still answers. The last reference to an Io that is not closed closes it."""

# ---- the tables, as their one writer (the sidecar) ------------------------------------------------------------------------------
class Tables:
    @staticmethod
    def bytes_needed(
        *, pool_bytes: int, extent_bytes: int, max_blocks: int, max_shards: int, max_pins: int, max_members: int, max_namespaces: int
    ) -> int: ...
    @staticmethod
    def create(
        fd: int,
        *,
        pool_bytes: int,
        extent_bytes: int,
        max_blocks: int,
        max_shards: int,
        max_pins: int,
        max_members: int,
        max_namespaces: int,
        boot_id: bytes,
        pool_epoch: bytes,
        instance_id: bytes,
        verify: bool = False,
        keeps_reused: bool = False,
        min_reuse: int = 0,
    ) -> Tables:
        """Writes fresh tables into a zero-filled file of bytes_needed() bytes (fd -1: private memory) and sets it LIVE last.
        pool_bytes and extent_bytes are multiples of 4096. `keeps_reused`: half of the pool is for blocks that were used again; else the
        least recently used goes first. `min_reuse`: a tier wants blocks that were used again so often. Neither is in the tables."""

    @staticmethod
    def adopt(
        fd: int,
        *,
        pool_bytes: int,
        extent_bytes: int,
        max_blocks: int,
        max_shards: int,
        max_pins: int,
        max_members: int,
        max_namespaces: int,
        boot_id: bytes,
        instance_id: bytes,
        verify: bool = False,
        keeps_reused: bool = False,
        min_reuse: int = 0,
    ) -> Tables:
        """Maps tables that an earlier sidecar left. LayoutError unless LIVE and equal in version, sizes and boot id, or when `verify` is
        asked of tables whose blocks have no checksums. repair() must be the next call. Writes nothing before it."""

    @staticmethod
    def geometry(fd: int) -> dict[str, int]:
        """pool_bytes, extent_bytes, max_blocks, max_shards, max_pins, max_members, max_namespaces, verify of tables that somebody left,
        whoever and in whatever boot. LayoutError when they are not of this version, damaged in what never changes, or cut short."""

    def repair(self, dead_members: list[int]) -> list[tuple[int, int, int]]:
        """Rebuilds all that is derived; frees entries whose writer died in mid-update; drops the members listed, shards held by
        members that are gone, pins of sessions without a member. Returns (session, tag, head) of every pin chain that lives on. What
        was unsound, and not merely unfinished, is counted in stats(): bad_blocks, bad_records."""

    pool_epoch: bytes
    verify: bool
    def heartbeat(self, now_ns: int) -> None: ...
    def set_removed(self) -> None:
        """Marks the pool REMOVED: every reader sees misses from now on."""

    # members
    def member_add(self, client_id: bytes, session_id: bytes, lock_name: bytes, session: int, pid: int, flags: int = 0) -> int:
        """Index of the new record, -1 when the table is full. Wherever the writer is killed, no record is without its flags."""
    def member_set_lock(self, member: int, lock_name: bytes) -> None: ...
    def member_set_flags(self, member: int, flags: int) -> None: ...
    def member_remove(self, member: int) -> int:
        """Aborts every shard the member holds and frees its record. Returns how many were aborted."""
    def members(self) -> list[tuple[int, bytes, bytes, bytes, int, int, int]]:
        """(index, client_id, session_id, lock_name, session, pid, flags) of each."""

    # namespaces
    def namespace_add(self, fingerprint: bytes, shard_bytes: int, shards: int, label: str) -> int:
        """Index of the (possibly already present) namespace, -1 when the table is full and no namespace without blocks can be replaced.
        ValueError when slot_bytes exceeds an extent. A replaced index is only one that no block refers to."""
    def namespaces(self) -> list[tuple[int, bytes, int, int, int, int, str]]:
        """(index, fingerprint, shard_bytes, shards, slot_bytes, blocks, label) of each."""

    # blocks
    def lookup(self, namespace: int, keys: Buffer) -> bytes:
        """One byte per key: Status.OK where READY (and not doomed) in that namespace, Status.MISS elsewhere."""
    def reserve(
        self, namespace: int, member: int, tag: int, keys: Buffer, shards: Buffer, low_priority: bool = False
    ) -> tuple[bytes, bytes, bytes]:
        """(statuses, pages, generations). Evicts when room is needed. Blocks that begin here with `low_priority` have a small part of a
        full pool, and no tier wants them, until they are acquired. EXISTS: READY, or that shard is already
        committed; BUSY: the shard is in flight (whoever holds it, the same call included), the block is doomed, or the key belongs
        to another namespace; FULL: no slot (all pinned or being written), or a table is full; THROTTLED: the member holds shards, and with
        this one they would be over half of the records or half of the pool's bytes. IndexError: no such namespace or member;
        ValueError: a shard index not below the namespace's shards (nothing changed)."""
    def commit(self, member: int, tag: int, keys: Buffer, shards: Buffer, generations: Buffer, checksums: Buffer) -> bytes:
        """Statuses: OK, or NOT_HELD. The last shard of a block makes it READY. The entry's checksum becomes the XOR of its shards'."""
    def abort(self, member: int, tags: Buffer) -> int:
        """Gives back all shards that the member holds under these tags (uint64); returns how many."""
    def acquire(self, namespace: int, session: int, tag: int, head: int, keys: Buffer) -> tuple[bytes, bytes, bytes, int]:
        """(statuses, pages, generations, head): pins of (session, tag) form a chain whose head (NIL = 0xffffffff for none) the caller
        keeps. A block already pinned in the chain, or twice in the batch, is OK and pinned once. Touches the blocks' LRU order. FULL:
        no record is free, or the session has half of them (session numbers are below max_members)."""
    def release(self, head: int) -> int:
        """Ends every pin of the chain; returns how many. IndexError when head is no live pin."""
    def discard(self, namespace: int, keys: Buffer, generations: Buffer) -> int:
        """Frees those of these blocks that are READY with that generation in that namespace, dooms those in use; returns how many."""
    def clear(self, namespace: int) -> int:
        """Frees the namespace's unused blocks, dooms those in use; returns how many blocks it hit. NIL: of every namespace, in one pass."""

    # tiers: a block is dirty when it is READY and no tier has it
    def set_spills(self, on: bool) -> None:
        """On: blocks that a tier wants and has not are evicted only where there are no others (False at first)."""
    def spill(self, session: int, tag: int) -> tuple[bytes, int, int, int, int, int] | None:
        """Pins the block that a tier wants and has not and that nobody used for longest, in a chain of its own; that is no use of it. (key,
        namespace, page, generation, checksum of its entry, head). None: there is no such block that is not in use, or no pin left."""
    def set_clean(self, key: bytes, generation: int) -> bool:
        """A tier has this block. False: it is gone, or clean already."""

    def stats(self) -> dict[str, int]:
        """pool_bytes, used_bytes (slots that hold a block), max_blocks, blocks, ready, writing, doomed, dirty (a tier wants them),
        pinned_blocks, pins, shards_in_flight, members, namespaces, extents, free_extents, tombstones, evicted, evicted_dirty (while
        spills), extents_taken_back, moved (entries, into tombstones), bad_blocks, bad_records (the last six since this object was made).
        All counters: O(1)."""
    def extents(self) -> list[tuple[int, int, int, int]]:
        """(index, slot_bytes, slots, taken) of each extent in use."""
    def check(self) -> list[str]:
        """Every invariant that does not hold, as a sentence; [] when all do. O(tables). For tests, fsck and the simulation."""
    def view(self) -> View:
        """A reader over the same memory (used where the tables are private)."""
    def close(self) -> None: ...

# ---- the tables, as one of many readers (clients) -----------------------------------------------------------------------------
class View:
    """Lock-free reader of tables that another process writes. Bytes changed under it can give a miss, never a crash or another
    block's place. Thread-safe; GIL released around batches."""

    def __init__(self, fd: int, size: int) -> None:
        """Maps read-only, MADV_DONTFORK. LayoutError on another version or size."""
    pool_epoch: bytes
    pool_bytes: int
    address: int
    size: int
    def alive(self) -> bool:
        """False when the pool was marked REMOVED."""
    def instance_id(self) -> bytes: ...
    def heartbeat_ns(self) -> int: ...
    def attach_index(self, fd: int, size: int, /) -> None:
        """From now on the lookups also find keys that are on disk, as this Index's file says. Maps it as the tables; replaces an earlier
        one. LayoutError (nothing changed) when it is not an index of this version and size."""
    def lookup(self, namespace: int, keys: Buffer) -> bytes:
        """One byte per key: 1 where READY and not doomed, or on disk, else 0. (The Store's contract; Tables.lookup gives statuses.)"""
    def lookup_prefix(self, namespace: int, keys: Buffer) -> int:
        """Length of the unbroken run of such keys from the front."""
    def lookup_reverse(self, namespace: int, keys: Buffer) -> int:
        """Index of the rightmost such key, -1 if none."""
    def locate(self, namespace: int, keys: Buffer) -> tuple[bytes, bytes, bytes]:
        """(statuses, pages, generations) as an acquire would answer now, with nothing pinned: Status.OK where READY and not doomed, else
        Status.MISS. Who reads there looks afterwards, with check(), whether the block was there all the time."""
    def check(self, keys: Buffer, pages: Buffer, generations: Buffer, checksums: Buffer | None = None) -> bytes:
        """One byte per key: 1 where the key still is READY at that page and generation (doomed counts as READY: its bytes are
        unchanged), else 0; 2 where it is and `checksums` (uint64 per key) has another number than the entry (unless verify was turned
        off since). Orders the reads before it (acquire fence), so bytes copied before the call are the block's."""
    def close(self) -> None: ...

# ---- the index of what is on disk, as its one writer (the sidecar) ---------------------------------------------------------------
class Index:
    """Which block is in which slot of which slab, of all directories of a disk tier; for one thread. Namespaces are numbers of the
    caller's. A block is placed, settled, and ends by eviction, a failed read or removal; while it is written or read its slot is given to
    nobody else. Entries are numbers that place() and open() give and settle() and close() take back, once each."""

    @staticmethod
    def bytes_needed(max_blocks: int, /) -> int: ...
    def __init__(self, fd: int | None, max_blocks: int, slab_bytes: int) -> None:
        """Writes an empty index into a zero-filled file of bytes_needed() bytes (None: private memory)."""
    def add_directory(self, slabs: int, /) -> int:
        """Its number, never given again. Nothing is placed there until enable(). MemoryError also where there are 64 already."""
    def enable(self, directory: int, on: bool = True) -> None:
        """Whether new blocks are placed there; those it has are served either way."""
    def drop(self, directory: int, /) -> int:
        """All of it is a miss from now on and its number is unknown; returns how many blocks that were. What is written or read is still to
        be settled and closed; its slots are never given again."""
    def load(self, directory: int, slab: int, records: Buffer, numbers: dict[int, tuple[int, int]], /) -> int:
        """Recovers one slab that holds nothing yet from its records, by the rules of layout.h; `numbers` maps the directory's namespace
        numbers to (namespace, slot_bytes). Returns how many blocks came in: of a key that is known already none does."""
    def place(self, key: bytes, namespace: int, slot_bytes: int, /) -> tuple[int, int, int, int, int] | None:
        """(entry, directory, slab, slot, sequence) of a block that is to be written; evicts. A miss until it is settled. None: the key is
        there already, or everything is busy or off."""
    def settle(self, entry: int, checksum: int | None, /) -> None:
        """The write has ended; None: it failed. IndexError (nothing changed) when the entry is not being written."""
    def has(self, keys: Buffer, namespace: int, /) -> bytes:
        """One byte per key: 1 where open() would find it."""
    def open(self, key: bytes, namespace: int, /) -> tuple[int, int, int, int, int] | None:
        """(entry, directory, slab, slot, checksum) of a block that is to be read, None on a miss. One entry has at most 65,535 readers."""
    def close(self, entry: int, keep: bool, /) -> None:
        """One read has ended; keep False: the block was bad, and is a miss. IndexError (nothing changed) when nobody reads the entry."""
    def remove(self, key: bytes, namespace: int, /) -> bool:
        """Whether it was there, also if it was still being written."""
    def remove_namespace(self, namespace: int, /) -> int: ...
    def stats(self) -> dict[str, int]:
        """max_blocks, blocks, writing, reading, gone (a miss, but written or read), used_bytes and total_bytes of slabs, memory_bytes of
        the index itself, sequence (the last one), and since it was made: placed, failed, evicted, slabs_taken_back."""
    def directory(self, number: int, /) -> dict[str, int]:
        """enabled, blocks, busy, used_bytes, total_bytes, slabs, free_slabs, placed, evicted of one. IndexError: there is none."""
    def check(self) -> list[str]:
        """Every invariant that does not hold, as a sentence; [] when all do. O(index). For tests and the simulation."""

# ---- for C and C++ ------------------------------------------------------------------------------------------------------------
class CStore:
    """A `struct hostkv_store` of hostkv.h, and what keeps its pool and tables mapped: while it lives, mapping.close() refuses, and
    view.close() does not matter. `mapping` is the whole pool of the view's tables, writable. ValueError when they do not belong
    together or a number is out of range; BufferError when the mapping is read-only; RuntimeError in a fork's child."""

    address: int
    def __init__(self, view: View, mapping: Mapping, fingerprint: bytes, namespace_index: int, shard_bytes: int, shards: int) -> None: ...
