"""The two files of a pool: payload at <pool.path>/<name>, tables at <pool.path>/<name>.tables; who may have them, and their life.

    absent ──create──> CREATING ──all memory taken──> LIVE ──SIGTERM──> REMOVED, unlinked
                          │                             │
                       killed                        killed: the next sidecar adopts it where version, sizes, boot and members' lock
                          └──────> replaced <───────────┘  files agree; else replaces it once nobody uses it

With a group its members may write the payload and read the tables.

The tables file is flock'ed as long as a sidecar serves it, so a pool of one name has one owner however many run directories there are.
Files are never truncated or resized once somebody may map them: a replacement is a new file. All memory is taken before the pool is LIVE:
a page first touched during a copy costs ten times the copy, and one that cannot be had then would kill the process that touches it."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

from ..cext import LayoutError, Tables
from ..schemas import layout
from .config import GIB, MIB, Config
from .errors import StartupError
from .rundir import FREED_WAIT_S, RunDirectory, file_system, same_file, set_access, take_lock

MAX_MEMBERS = 1024
MAX_NAMESPACES = 1024
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
CHUNK_BYTES = 256 * MIB  # memory taken between two looks at signals and the progress line
REPLACE_WAIT_S, REPLACE_PAUSE_S = 10.0, 0.05
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # linux/mman.h; the second since Linux 5.14
_EPOCH = slice(64, 80)  # pool_epoch in the header (layout.h)
Progress = Callable[[str, bool], None]  # (a line for people, whether it is the last of its kind); may raise to end the work


class Capacity(TypedDict):
    pool_bytes: int
    extent_bytes: int
    max_blocks: int
    max_shards: int
    max_pins: int
    max_members: int
    max_namespaces: int


class Rules(TypedDict):
    verify: bool
    keeps_reused: bool
    min_reuse: int


@dataclass(frozen=True, slots=True)
class Pool:
    pool_path: str
    tables_path: str
    tables_bytes: int
    tables: Tables
    tables_fd: int  # holds the flock
    adopted: bool  # the tables still want repair()
    why_new: str  # why an earlier pool was not adopted, "" if there was none or it was

    def remove(self) -> None:
        """Every reader sees misses from now on, and the memory goes with its last user. What lies at its paths meanwhile may be another
        sidecar's, where somebody removed our files under us."""
        self.tables.set_removed()
        if same_file(self.tables_fd, self.tables_path):
            _unlink_both(self.pool_path)


def capacity(config: Config) -> Capacity:
    """Sizes of the tables. A pin or a shard in flight belongs to a block, so there may be as many as blocks, within 64 MiB and 4 MiB; at
    least one full batch of each."""
    return Capacity(
        pool_bytes=config.pool_bytes,
        extent_bytes=config.extent_bytes,
        max_blocks=config.max_blocks,
        max_shards=max(8192, min(config.max_blocks, 1 << 16)),
        max_pins=max(8192, min(config.max_blocks, 1 << 20)),
        max_members=MAX_MEMBERS,
        max_namespaces=MAX_NAMESPACES,
    )


def _rules(config: Config) -> Rules:
    return Rules(
        verify=config.verify,
        keeps_reused=config.eviction == "reuse",
        min_reuse=config.tiers[0].min_reuse if config.tiers else 0,
    )


def take(config: Config, run: RunDirectory, instance_id: bytes, progress: Progress) -> Pool:
    """The pool that `config` asks for: the one an earlier sidecar left, or a new one. Raises StartupError when it cannot be had; nothing
    half-made stays behind, except by SIGKILL."""
    base = os.path.join(config.pool_path, config.pool_name)
    if run.earlier_pool not in ("", base):
        _discard(run, run.earlier_pool, run.earlier_epoch, progress)
    sizes = capacity(config)
    tables_bytes = Tables.bytes_needed(**sizes)
    fd, found = open_tables(base)
    set_access(fd, run.group_id, 0o600, 0o640)
    pool_epoch = os.urandom(16)
    why = ""
    if found:
        adopted = _adopt(base, fd, config, instance_id, run)
        if isinstance(adopted, Tables):
            run.write_lock_file(base, adopted.pool_epoch.hex())
            return Pool(base, f"{base}.tables", tables_bytes, adopted, fd, True, "")
        why, strange = adopted
        remove_left(run, base, why, progress, strange)
        os.close(fd)
        fd, _ = open_tables(base)
        set_access(fd, run.group_id, 0o600, 0o640)
    if not found and os.path.lexists(base):
        _unlink(f"{base}.tables")
        raise StartupError(
            f"{base} is in the way, no pool of ours: it has no {base}.tables beside it; remove it or use another --pool-name"
        )
    run.write_lock_file(base, pool_epoch.hex())
    tables = _create(base, fd, config, run, tables_bytes, pool_epoch, instance_id, progress)
    return Pool(base, f"{base}.tables", tables_bytes, tables, fd, False, why)


def boot_id() -> bytes:
    """16 bytes that the kernel draws at each boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))


def open_tables(base: str) -> tuple[int, bool]:
    """The locked tables file, made if absent, and whether it was there."""
    path = f"{base}.tables"
    while True:
        fd, found = _open(path)
        if not take_lock(fd, FREED_WAIT_S, _flock_holder):
            pid = _flock_holder(fd)
            os.close(fd)
            raise StartupError(f"pool {base} is held by pid {pid or '?'}, a sidecar with another run directory; use another --pool-name")
        if same_file(fd, path):
            return fd, found
        os.close(fd)  # a sidecar that was ending removed it between our open and our lock


def _open(path: str) -> tuple[int, bool]:
    """A file of ours at `path`, 0600 if it is new, and whether it was there. Raises StartupError for anything else that is in its place."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, 0o600)
        return fd, False
    except FileExistsError:
        pass
    except OSError as error:
        raise StartupError(f"cannot create {path}: {error.strerror}; pool.path must be a directory that we may write") from None
    advice = "remove it or use another --pool-name"
    try:
        info = os.lstat(path)
        if not stat.S_ISREG(info.st_mode):
            raise StartupError(f"{path} is not a regular file (links are not followed); {advice}")
        if info.st_uid != os.geteuid():
            raise StartupError(f"{path} belongs to uid {info.st_uid}, we run as {os.geteuid()}; {advice}")
        return os.open(path, flags), True
    except FileNotFoundError:
        return _open(path)
    except OSError as error:
        raise StartupError(f"cannot open {path}: {error.strerror}; {advice}") from None


def _adopt(base: str, fd: int, config: Config, instance_id: bytes, run: RunDirectory) -> Tables | tuple[str, list[int]]:
    """The tables an earlier sidecar left, or why they cannot be used, and the pids of users that this run directory knows nothing of."""
    if not os.path.lexists(base):
        return "its payload file is gone", []
    pool_fd, _ = _open(base)
    try:
        set_access(pool_fd, run.group_id, 0o600, 0o660)
        info = os.fstat(pool_fd)
    finally:
        os.close(pool_fd)
    fault = payload_fault(info, config.pool_bytes)
    if fault:
        return fault, []
    try:
        tables = Tables.adopt(fd, boot_id=boot_id(), instance_id=instance_id, **_rules(config), **capacity(config))
    except LayoutError as error:
        return str(error), []
    strange = strangers(tables, run)
    if strange:
        tables.close()
        return f"pid {strange[0]} used it through another run directory than {run.path}", strange
    return tables


def payload_fault(info: os.stat_result, pool_bytes: int) -> str:
    """Why a payload file cannot be the one of a pool of this size, "" if it can."""
    if info.st_size != pool_bytes:
        return f"its payload file has {info.st_size} bytes, the pool {pool_bytes}"
    return "its payload file has holes" if info.st_blocks * 512 < info.st_size else ""


def strangers(tables: Tables, run: RunDirectory) -> list[int]:
    """The pids of members that used the pool through another run directory; a sidecar's own has no lock file at all. A lock file leaves the
    run directory only after its member's record has left the tables. One that is not here lies in another: whether its process is gone
    cannot be told, so its slots must never be given to anybody."""
    return [pid for _, _, _, lock, _, pid, flags in tables.members() if not flags & layout.TIER and not run.lock_file_exists(lock)]


def remove_left(run: RunDirectory, base: str, why: str, progress: Progress, strange: Sequence[int]) -> None:
    """Removes a pool whose tables we hold locked, once nobody who may use it lives. `strange`: of `strangers`. Raises StartupError."""
    if _announced(base):
        _wait_for_users(run, base, why, progress, strange)
    _unlink_both(base)


def _announced(base: str) -> bool:
    """False for a pool whose creation or removal was cut short: nobody could map the one, and nobody was to be waited for by the other."""
    with open(f"{base}.tables", "rb") as tables:
        header = tables.read(layout.HEADER.size)
    (state,) = struct.unpack_from("<I", header.ljust(layout.HEADER.size, b"\0"), layout.POOL_STATE_OFFSET)
    return any(header) and not (header.startswith(layout.MAGIC) and state != layout.POOL_LIVE)


def _create(
    base: str,
    fd: int,
    config: Config,
    run: RunDirectory,
    tables_bytes: int,
    pool_epoch: bytes,
    instance_id: bytes,
    progress: Progress,
) -> Tables:
    """New files, all memory taken; the tables are LIVE last. `fd` is the new, empty, locked tables file, and nothing is at `base`."""
    sizes = capacity(config)
    directory = os.path.dirname(base)
    kind = file_system(directory)
    if kind not in MEMORY_FILE_SYSTEMS:
        raise StartupError(f"{directory} is on {kind or 'an unknown file system'}, pool.path must be memory: a directory on a tmpfs")
    needed = sizes["pool_bytes"] + tables_bytes
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    tables = None
    try:
        if free < needed:
            raise too_small(directory, free, needed)
        pool_fd, _ = _open(base)
        try:
            set_access(pool_fd, run.group_id, 0o600, 0o660)
            _take_memory(pool_fd, sizes["pool_bytes"], base, progress)
        finally:
            os.close(pool_fd)
        _take_memory(fd, tables_bytes, f"{base}.tables", progress)
        tables = Tables.create(fd, boot_id=boot_id(), pool_epoch=pool_epoch, instance_id=instance_id, **_rules(config), **sizes)
        return tables
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFAULT, errno.ENOMEM, errno.EFBIG):
            raise too_small(directory, free, needed) from None
        raise StartupError(f"cannot take {needed} bytes at {base}: {error.strerror}") from None
    finally:
        if tables is None:
            _unlink_both(base)


def _take_memory(fd: int, size: int, what: str, progress: Progress) -> None:
    """Allocates and zeroes `size` bytes of a file. Through a mapping and not by posix_fallocate where the kernel can: on tmpfs that one
    leaves the zeroing to the first toucher, and it ignores huge=advise. OSError EFAULT or ENOSPC: there is no room."""
    os.ftruncate(fd, size)
    for offset in range(0, size, CHUNK_BYTES):
        progress(f"taking memory for {what}: {offset / GIB:.2f} of {size / GIB:.2f} GiB", False)
        length = min(CHUNK_BYTES, size - offset)
        with mmap.mmap(fd, length, offset=offset) as window:
            with suppress(OSError):  # a kernel or a mount without huge pages
                window.madvise(MADV_HUGEPAGE)
            try:
                window.madvise(MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.posix_fallocate(fd, offset, length)
    progress(f"taking memory for {what}: {size / GIB:.2f} of {size / GIB:.2f} GiB", True)


def too_small(directory: str, free: int, needed: int, what: str = "pool.size and its tables") -> StartupError:
    gib = -(-needed // GIB) + 1
    return StartupError(
        f"{directory} is too small: {needed} bytes are needed ({what}), {free} are free; "
        f"mount -o remount,size={gib}G {directory}, or docker run --shm-size={gib}g, or a smaller --pool-size"
    )


def _wait_for_users(run: RunDirectory, base: str, why: str, progress: Progress, strangers: Sequence[int] = ()) -> None:
    """A pool is replaced only when nobody uses it. Bounded. `strangers`: pids of which only that can be told whether they run."""
    end = time.monotonic() + REPLACE_WAIT_S
    while True:
        living = [*run.living_members().values(), *filter(_runs, strangers)]
        if not living:
            return
        users = ", ".join(f"pid {pid}" if pid else "a process of another container" for pid in living)
        progress(f"waiting for {users} to end before pool {base} is removed ({why})", False)
        if time.monotonic() > end:
            raise StartupError(
                f"pool {base} is to be removed ({why}) but still used by {users}; end that process or use another --pool-name"
            )
        time.sleep(REPLACE_PAUSE_S)


def _discard(run: RunDirectory, base: str, epoch: str, progress: Progress) -> None:
    """Removes the pool of another name that a killed sidecar of this run directory left, unless another run directory has it now."""
    try:
        if not os.path.isabs(base) or os.lstat(f"{base}.tables").st_uid != os.geteuid():
            return
        fd, _ = open_tables(base)
    except (OSError, StartupError):  # gone, or a sidecar serves it
        return
    found = os.pread(fd, layout.HEADER.size, 0)[_EPOCH]
    if found.hex() == epoch or not any(found):  # ours, or never finished
        remove_left(run, base, "the pool has another name now", progress, ())
    os.close(fd)


def _runs(pid: int) -> bool:
    if not 0 < pid < 1 << 31:  # a client says its pid itself
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _flock_holder(fd: int) -> int:
    """The pid that the kernel shows for a lock on this file, 0 if it shows none."""
    info = os.fstat(fd)
    name = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    with open("/proc/locks") as file:
        for line in file:
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == name:
                return max(int(words[4]), 0)
    return 0


def _unlink_both(base: str) -> None:
    """The payload first: it is never there without its tables, so one that is belongs to somebody else."""
    _unlink(base)
    _unlink(f"{base}.index")
    _unlink(f"{base}.tables")


def make_index(base: str, size: int, run: RunDirectory) -> int:
    """A new, empty file for the index of what is on disk, beside a pool that we hold; who has mapped an earlier one keeps that."""
    path = f"{base}.index"
    _unlink(path)
    if not size:
        return -1
    fd, found = _open(path)
    if found:
        raise StartupError(f"{path} is in the way; remove it or use another --pool-name")
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        set_access(fd, run.group_id, 0o600, 0o640)
    except OSError as error:
        os.close(fd)
        _unlink(path)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            room = os.statvfs(os.path.dirname(base))
            raise too_small(os.path.dirname(base), room.f_bavail * room.f_frsize, size, "the index of what is on disk") from None
        raise StartupError(f"cannot take {size} bytes at {path}: {error.strerror}") from None
    return fd


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
