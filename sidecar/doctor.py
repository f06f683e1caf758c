"""`hostkv doctor`: looks at the host before a user finds out. One small function per check; each turns what it is given into lines: ok,
warning (something will be slower, or cannot be had) or problem (`hostkv serve` will not start, or engines will run uncached), with what
was found and how it is fixed. It changes nothing; what it tries out it tries on files of its own."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import io
import json
import mmap
import os
import platform
import re
import resource
import shlex
import stat
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from itertools import chain
from typing import NamedTuple

import zmq

from ..cext import Index, Io, Tables, cpu_features, lock_look
from ..schemas import layout
from ..schemas.endpoint import ATTACH_SOCKET, MAX_SOCKET_PATH_BYTES
from . import apart, fsck, rundir, tcp
from . import pool as pools
from .config import Config, socket_path
from .errors import StartupError
from .limits import MIN_FILES
from .page import size_text
from .tiers.directory import MAX_SLABS, MIN_SLABS, Directory, is_quiet, slabs_of
from .tiers.disk import descriptors
from .tiers.ledger import Unreadable, entries

OK, WARNING, PROBLEM = "ok", "warning", "problem"
IO_URING_SETUP = 425  # the number of the system call, the same on x86-64 and arm64
IO_URING_PARAMS_BYTES = 120  # struct io_uring_params of linux/io_uring.h
REMOTE = ("nfs", "cifs", "smb", "ceph", "fuse", "9p", "lustre", "gluster", "beegfs", "gpfs", "afs")
FILES_WANTED = 4096  # descriptors: one per connection, and an engine of eight ranks opens some thirty


STRANGE_PLACES = [  # file systems, by how their types begin, and what is to be said of them
    *((kind, "hangs with its server, or with the process that serves it; a local disk is meant") for kind in REMOTE),
    *((kind, "is memory, which no reboot survives; better a larger pool") for kind in pools.MEMORY_FILE_SYSTEMS),
    ("overlay", "goes with its container; mount a volume or a directory of the host"),
]
_UNUSED = "slots of a left pool that were in flight stay unused"


class Line(NamedTuple):
    level: str
    subject: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.subject}: {self.found}{f'; {self.fix}' if self.fix else ''}"


def doctor(config: Config, disks: Sequence[str], flags: str) -> int:
    """Prints a line per check. 1 when one of them is a problem. `flags`: what other commands need to mean the same sidecar."""
    worst = 0
    for line in _lines(config, disks, flags):
        worst |= line.level == PROBLEM
        print(line, flush=True)
    return worst


def _lines(config: Config, disks: Sequence[str], flags: str) -> Iterator[Line]:
    base = os.path.join(config.pool_path, config.pool_name)
    run_path = os.path.dirname(socket_path(config.endpoint))
    taken = sum(_taken_bytes(path) for path in _files(base))
    index_bytes = sum(Index.bytes_needed(tier.max_blocks) for tier in config.tiers)
    wanted = max(config.pool_bytes + Tables.bytes_needed(**pools.capacity(config)) + index_bytes - taken, 0)
    shares = {path: tier.size_bytes // len(tier.paths) for tier in config.tiers for path in tier.paths}
    yield versions(config.tcp_listen != "")
    yield kernel()
    yield from place(config.pool_path, wanted)
    yield memory(wanted)
    yield locked_memory(config.pool_bytes, bool(shares))
    yield open_files(descriptors(len(shares)) if shares else 0)
    yield from run_directory(config.endpoint)
    yield from group(config.group_id)
    yield from tcp_keys(config.tcp_keys)
    yield io_uring(any(tier.engine == "io_uring" for tier in config.tiers))
    hung: set[str] = set()
    for path in dict.fromkeys([*shares, *disks]):
        yield from _apart(path, chain(disk_directory(path, config.endpoint, shares.get(path)), direct_io(path)), hung)
    if not (shares or disks):
        yield Line(OK, "disk tier", "not configured; --disk DIR tries a directory for one")
    answering = {path: share for path, share in shares.items() if path not in hung}
    yield from _apart(", ".join(answering), disk_room(answering), hung)
    yield from pool_files(base, config.group_id)
    yield from pool_holder(base, config.endpoint)
    yield from left_pools(config.pool_path, flags)
    yield from left_files(run_path, config.endpoint)
    yield from left_transfers(run_path, config.endpoint, hung)


def _apart(path: str, lines: Iterable[Line], hung: set[str]) -> Iterator[Line]:
    """These lines, made where nobody waits for a disk longer than for it to hang; nothing of a path that is known to be `hung`."""

    def say() -> int:
        for line in lines:
            print(json.dumps(line))
        return 0

    if path in hung:
        return
    said = io.StringIO()
    with redirect_stdout(said):
        code = apart.run(say)
    yield from (Line(*json.loads(line)) for line in said.getvalue().splitlines())
    if code is None:
        hung.add(path)
        yield Line(PROBLEM, f"disk {path}", apart.UNANSWERED)


def versions(tcp: bool) -> Line:
    curve = zmq.has("curve")
    found = (
        f"Python {platform.python_version()}, pyzmq {zmq.__version__} on libzmq {zmq.zmq_version()} "
        f"{'with' if curve else 'without'} CURVE, msgpack {importlib.metadata.version('msgpack')}"
    )
    if curve:
        return Line(OK, "versions", found)
    return Line(PROBLEM if tcp else WARNING, "versions", found, "TCP needs CURVE: install pyzmq from its wheel")


def kernel() -> Line:
    release = platform.release()
    words = release.split(".")
    number = tuple(int(word) for word in words[:2] if word.isdigit())
    found = f"Linux {release} {platform.machine()}, CPU {', '.join(cpu_features())}"
    if number < (5, 14):
        return Line(WARNING, "kernel", found, "before 5.14 memory is taken more slowly, before 5.3 a device's end is awaited for 5 s")
    return Line(OK, "kernel", found)


def place(path: str, wanted: int) -> Iterator[Line]:
    """pool.path: whether it is memory, and has room for what the pool does not hold yet."""
    subject = f"memory file system {path}"
    try:
        kind = rundir.file_system(path)
        room = os.statvfs(path)
    except OSError as error:
        yield Line(PROBLEM, subject, os.strerror(error.errno or 0), "pool.path must be a directory on a tmpfs")
        return
    if kind not in pools.MEMORY_FILE_SYSTEMS:
        yield Line(PROBLEM, subject, f"is on {kind or 'an unknown file system'}", "pool.path must be a directory on a tmpfs")
        return
    if not os.access(path, os.W_OK | os.X_OK):
        yield Line(PROBLEM, subject, f"uid {os.geteuid()} may not write to it", f"chmod 1777 {path}, or another pool.path")
        return
    free = room.f_bavail * room.f_frsize
    if free < wanted:
        yield Line(PROBLEM, subject, str(pools.too_small(path, free, wanted)))
    else:
        yield Line(OK, subject, f"{kind}, {size_text(free)} free, the pool needs {size_text(wanted)}")
    yield huge_pages(path)


def huge_pages(path: str, switch: str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled") -> Line:
    """How the tmpfs was mounted. The kernel's switch counts where it denies or forces; else it is for memory without a mount."""
    words = [word for _, options in rundir.mounts(path) for word in options if word.startswith("huge=")]
    mounted = words[-1].partition("=")[2] if words else "never"
    kernel_says = ""
    with suppress(OSError), open(switch) as file:
        kernel_says = file.read().partition("[")[2].partition("]")[0]
    found = f"{path} is mounted with huge={mounted}, shmem_enabled is {kernel_says or 'not there'}"
    if kernel_says == "force" or (mounted != "never" and kernel_says not in ("deny", "")):
        return Line(OK, "huge pages", found)
    if kernel_says in ("deny", ""):
        return Line(OK, "huge pages", f"{found}: none for a pool")
    return Line(OK, "huge pages", f"{found}; for faster copies: mount -t tmpfs -o huge=advise,size=... tmpfs /mnt/hostkv and pool.path: it")


def memory(wanted: int, meminfo: str = "/proc/meminfo", cgroups: str = "/proc/self/cgroup", mounted: str = "/sys/fs/cgroup") -> Line:
    """What the host and the control group would let the pool take."""
    with open(meminfo) as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    limit = _group_limit(cgroups, mounted)
    found = f"{size_text(available)} available" + (f", control group limited to {size_text(limit)}" if limit is not None else "")
    found += f", the pool needs {size_text(wanted)}"
    if wanted > available or (limit is not None and wanted > limit):
        return Line(PROBLEM, "memory", found, "a smaller pool.size" + (", or a higher limit of the container" if limit is not None else ""))
    if wanted > 0.9 * min(available, limit or available):
        return Line(WARNING, "memory", found, "little is left for the engines; a smaller pool.size")
    return Line(OK, "memory", found)


def _group_limit(cgroups: str, mounted: str) -> int | None:
    """The lowest memory limit of our control groups, versions 1 and 2; None where there is none. In a container the path may be the
    host's, and then the group is the mount itself."""
    limits = []
    with open(cgroups) as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "":
                tops, name = [mounted, os.path.join(mounted, "unified")], "memory.max"
            elif "memory" in controllers.split(","):
                tops, name = [os.path.join(mounted, "memory")], "memory.limit_in_bytes"
            else:
                continue
            parts = [part for part in path.split("/") if part]
            for top in tops:
                for depth in range(len(parts) + 1):
                    with suppress(OSError, ValueError), open(os.path.join(top, *parts[:depth], name)) as limit:
                        limits.append(int(limit.read()))
    return min((limit for limit in limits if limit < 1 << 60), default=None)  # version 1 says "none" with a huge number


def locked_memory(pool_bytes: int, tier: bool) -> Line:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= pool_bytes:
        return Line(OK, "locked memory", "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft))
    return Line(
        WARNING,
        "locked memory",
        f"{size_text(soft)} at most, pool.size is {size_text(pool_bytes)}",
        f"only engines with a device need it{', and io_uring, to spend half the CPU on a block' if tier else ''}: "
        "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1",
    )


def open_files(tier_files: int) -> Line:
    """`tier_files`: those of a disk tier."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED + tier_files
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return Line(OK, "open files", "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} at most")
    return Line(
        WARNING if hard >= MIN_FILES + tier_files else PROBLEM,
        "open files",
        f"{hard} at most, one per connection{f' and {tier_files} for the disk tier' if tier_files else ''}",
        f"many engines need more: ulimit -n {wanted}, LimitNOFILE={wanted}, or docker run --ulimit nofile={wanted}",
    )


def run_directory(endpoint: str) -> Iterator[Line]:
    path = os.path.dirname(socket_path(endpoint))
    subject = f"run directory {path}"
    room = f"socket path of {len(socket_path(endpoint).encode())} bytes, at most {MAX_SOCKET_PATH_BYTES}"
    if not os.path.lexists(path):
        yield _to_be_made(subject, path, room, "use another --endpoint")
        return
    try:
        rundir.check_directory(path, stat.S_IWGRP | stat.S_IWOTH)
        if os.path.lexists(os.path.join(path, "members")):
            rundir.check_directory(os.path.join(path, "members"), stat.S_IWOTH)
        pid = rundir.holder(endpoint)
        if os.path.isdir(os.path.join(path, "members")):
            rundir.check_locks(path)
    except StartupError as error:
        yield Line(PROBLEM, subject, str(error))
        return
    holder = "no sidecar runs there" if pid is None else f"held by pid {pid or '?'}"
    yield Line(OK, subject, f"{holder}; locks are seen across processes; {room}")


def _to_be_made(subject: str, path: str, more: str, otherwise: str) -> Line:
    """A directory that the first start makes, not its parent."""
    parent = os.path.dirname(path)
    if not os.path.lexists(parent):
        return Line(PROBLEM, subject, f"{parent} is not there", f"mkdir -p {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        return Line(PROBLEM, subject, f"uid {os.geteuid()} may not make it in {parent}", f"{otherwise}, or make it and chown it")
    return Line(OK, subject, f"not there yet, the first start makes it; {more}")


def group(group_id: int) -> Iterator[Line]:
    """Whether we may give files to the group that is to use the pool."""
    if group_id < 0:
        return
    if os.geteuid() == 0 or group_id in (os.getegid(), *os.getgroups()):
        yield Line(OK, "group", f"{group_id}, which may be given files")
    else:
        yield Line(
            PROBLEM,
            "group",
            f"uid {os.geteuid()} is no member of group {group_id}",
            "usermod -aG, or run as root, or without the key group",
        )


def tcp_keys(keys: str) -> Iterator[Line]:
    if not keys:
        return
    try:
        tcp.check_keys(keys)
    except StartupError as error:
        yield Line(PROBLEM, "keys for TCP", str(error))
    else:
        yield Line(OK, "keys for TCP", keys)


def io_uring(asked_for: bool, switch: str = "/proc/sys/kernel/io_uring_disabled") -> Line:
    """Sets a ring up and reads with it, as the disk tier would. `asked_for`: by the configuration, which does without otherwise."""
    level, otherwise = WARNING, "the disk tier falls back to threads"
    if asked_for:
        level, otherwise = PROBLEM, "with engine: auto the disk tier falls back to threads"
    fd = os.memfd_create("hostkv-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.PAGE)
        io = Io(fd, layout.PAGE)
        io.close()
    finally:
        os.close(fd)
    if not io.why:
        return Line(OK, "io_uring", "works")
    if "without liburing" in io.why:
        fix = "apt-get install liburing-dev (or dnf install liburing-devel) and install hostkv again"
        return Line(level, "io_uring", f"hostkv was {io.why}", f"{otherwise}; {fix}")
    code = _set_up_ring()
    if code == errno.ENOSYS:
        return Line(level, "io_uring", "is not in this kernel, or hidden by seccomp", otherwise)
    setting = ""
    with suppress(OSError), open(switch) as file:
        setting = file.read().strip()
    if code == errno.EPERM and setting not in ("", "0"):
        return Line(
            level, "io_uring", f"is denied by kernel.io_uring_disabled={setting}", f"{otherwise}; sysctl kernel.io_uring_disabled=0"
        )
    if code == errno.EPERM:
        return Line(
            level, "io_uring", "is denied by seccomp", f"{otherwise}; docker run --security-opt seccomp=... with a profile that allows it"
        )
    return Line(level, "io_uring", f"does not work: {io.why}", otherwise)


def _set_up_ring() -> int:
    """0, or the errno."""
    parameters = ctypes.create_string_buffer(IO_URING_PARAMS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(IO_URING_SETUP), ctypes.c_uint(1), parameters)
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def disk_directory(path: str, endpoint: str, size_bytes: int | None) -> Iterator[Line]:
    """Whether the disk tier can have this directory, and what lies there. `size_bytes`: what it may take, None: nobody said."""
    subject = f"disk {path}"
    kind = _file_system(path if os.path.lexists(path) else os.path.dirname(path))
    strange = next((why for words, why in STRANGE_PLACES if kind.startswith(words)), "")
    if not os.path.lexists(path):
        line = _to_be_made(subject, path, kind, "use another directory")
        yield Line(WARNING, subject, line.found, strange) if line.level == OK and strange else line
        return
    directory = Directory(path, endpoint)
    try:
        holder = directory.peek()
    except StartupError as error:
        yield Line(PROBLEM, subject, str(error))
        return
    except OSError as error:
        yield Line(PROBLEM, subject, f"{error.filename or path}: {error.strerror}")
        return
    finally:
        directory.close()
    if holder is not None and holder[1] != endpoint:
        yield Line(
            PROBLEM, subject, f"held by pid {holder[0] or '?'}, a sidecar on {holder[1] or '?'}", "stop that one or use another directory"
        )
        return
    slabs = [name for name in os.listdir(path) if re.fullmatch("[0-9]{5}[.]slab", name)]
    what = f"{len(slabs)} slabs of {size_text(directory.slab_bytes)}, {len(directory.namespaces)} namespaces" if directory.id else "new"
    found = f"{kind}, {what}, {'nobody has it' if holder is None else f'held by pid {holder[0]}'}"
    yield Line(WARNING if strange else OK, subject, found, strange)
    if not directory.id or size_bytes is None or holder is not None:
        return
    fit = slabs_of(size_bytes, directory.slab_bytes)
    beyond = sum(int(name[:5]) >= fit for name in slabs)
    if not MIN_SLABS <= fit <= MAX_SLABS:
        yield Line(
            WARNING,
            f"slabs in {path}",
            f"of {size_text(directory.slab_bytes)}, which do not fit a directory of {size_text(size_bytes)}",
            "the next hostkv serve may start it anew, and what it caches is lost; the size before keeps it",
        )
    elif beyond:
        yield Line(WARNING, f"slabs in {path}", f"{beyond} are more than its size allows", "the next hostkv serve removes them")


def _file_system(path: str) -> str:
    with suppress(OSError):
        return rundir.file_system(path) or "unknown file system"
    return "unknown file system"


def direct_io(path: str) -> Iterator[Line]:
    """Writes one page past the page cache where a directory of the disk tier is, or will be."""
    subject, directory = f"O_DIRECT on {path}", path if os.path.lexists(path) else os.path.dirname(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".hostkv-doctor-", dir=directory) as place, mmap.mmap(-1, mmap.PAGESIZE) as page:
            fd = os.open(os.path.join(place, "page"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
            try:
                os.pwrite(fd, page, 0)
            finally:
                os.close(fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            yield Line(
                WARNING,
                subject,
                f"{_file_system(directory)} does not offer it",
                "blocks go through the page cache, slower and twice in memory; a local file system such as ext4 or xfs",
            )
        else:
            yield Line(PROBLEM, subject, os.strerror(error.errno or 0), "the disk tier must be able to write there")
        return
    yield Line(OK, subject, "works")


def disk_room(shares: dict[str, int]) -> Iterator[Line]:
    """Whether the file systems have room for what each directory may take and has not yet."""
    systems: dict[int, list[str]] = {}
    for path in shares:
        with suppress(OSError):
            systems.setdefault(os.stat(path if os.path.lexists(path) else os.path.dirname(path)).st_dev, []).append(path)
    for paths in systems.values():
        subject = f"room on {', '.join(paths)}"
        room = os.statvfs(paths[0] if os.path.lexists(paths[0]) else os.path.dirname(paths[0]))
        free, wanted = room.f_bavail * room.f_frsize, sum(max(0, shares[path] - _lies_there(path)) for path in paths)
        found = f"{size_text(free)} free, {size_text(wanted)} are to be taken"
        if free < wanted and room.f_blocks:
            yield Line(WARNING, subject, found, "the tier will have less than its size; free some, or a smaller size of the tier")
        elif len(paths) > 1:
            yield Line(WARNING, subject, f"{found}; all on one file system", "several directories pay on different disks only")
        else:
            yield Line(OK, subject, found)


def _lies_there(path: str) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(path))
    except OSError:
        return 0


def pool_files(base: str, group_id: int) -> Iterator[Line]:
    """Who may read and write the files of the configured pool."""
    for path, mode in zip(_files(base), (0o600,) * 3 if group_id < 0 else (0o660, 0o640, 0o640), strict=True):
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            continue
        found = f"mode {info.st_mode & 0o7777:04o}, uid {info.st_uid}, gid {info.st_gid}"
        if not stat.S_ISREG(info.st_mode):
            yield Line(PROBLEM, f"file {path}", "is not a regular file (links are not followed)", "remove it or use another --pool-name")
        elif info.st_uid != os.geteuid():
            yield Line(PROBLEM, f"file {path}", f"{found}; we run as {os.geteuid()}", "use another --pool-name, or run as its owner")
        elif info.st_mode & 0o777 & ~mode:
            yield Line(PROBLEM, f"file {path}", f"{found}: others may use it", f"chmod {mode:04o} {path}")
        else:
            yield Line(OK, f"file {path}", found)


def pool_holder(base: str, endpoint: str) -> Iterator[Line]:
    """Whether a sidecar of another run directory has the configured pool."""
    try:
        if rundir.holder(endpoint) is not None:
            return
        fd = os.open(f"{base}.tables", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, StartupError):  # none, or told by pool_files and run_directory
        return
    try:
        if rundir.is_locked(fd):
            yield Line(
                PROBLEM, f"pool {base}", "a sidecar with another run directory serves it", "use its --endpoint, or another --pool-name"
            )
    finally:
        os.close(fd)


def left_pools(directory: str, flags: str) -> Iterator[Line]:
    """Pools that no sidecar serves, whatever their name: they hold memory until somebody serves or removes them."""
    found = False
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        base = os.path.join(directory, name.removesuffix(".tables"))
        if name.endswith(".index") and not os.path.lexists(os.path.join(directory, f"{name.removesuffix('.index')}.tables")):
            found |= yield from _left_index(os.path.join(directory, name))
        if not name.endswith(".tables"):
            continue
        if (fd := _regular(f"{base}.tables")) is None:
            continue
        try:
            magic = os.pread(fd, len(layout.MAGIC), 0)
            begun = not any(magic) and os.path.lexists(base)  # the payload is made first
            if not (magic == layout.MAGIC or begun) or rundir.is_locked(fd):
                continue
            found = True
            why = fsck.useless(fd, base)
            size = size_text(sum(_taken_bytes(path) for path in _files(base)))
            state = f"useless ({why})" if why else "hostkv serve serves it again, where run directory and sizes are the same"
            yield Line(
                WARNING,
                f"pool {base}",
                f"{size}, left by a sidecar that was killed: {state}",
                f"hostkv clear --pool-name {os.path.basename(base)}{flags} removes it",
            )
        finally:
            os.close(fd)
    if not found:
        yield Line(OK, "left pools", f"none in {directory}")


def _regular(path: str) -> int | None:
    """Opens a file among those of others. None: it is another user's, a link, a pipe or a folder, or gone meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _left_index(path: str) -> Generator[Line, None, bool]:
    """The index of a pool whose other files somebody removed. Whether it is one."""
    if (fd := _regular(path)) is None:
        return False
    try:
        if os.pread(fd, len(layout.INDEX_MAGIC), 0) != layout.INDEX_MAGIC:
            return False
    finally:
        os.close(fd)
    yield Line(WARNING, f"file {path}", f"{size_text(_taken_bytes(path))}, the index of a pool that is gone", f"rm {shlex.quote(path)}")
    return True


def left_files(run_path: str, endpoint: str) -> Iterator[Line]:
    """What lies in a run directory that no sidecar holds."""
    try:
        if rundir.holder(endpoint) is not None:
            return
        names = os.listdir(os.path.join(run_path, "members"))
    except (OSError, StartupError):  # not there, or told by run_directory
        return
    free = 0
    for name in names:
        path = os.path.join(run_path, "members", name)
        with suppress(OSError):
            free += time.time() - os.lstat(path).st_mtime > rundir.SWEEP_AGE_S and lock_look(path)[0] < 0
    if free:
        yield Line(WARNING, "left lock files", f"{free} of processes that have ended", "the next hostkv serve removes them")
    sockets = [path for path in (socket_path(endpoint), os.path.join(run_path, ATTACH_SOCKET)) if os.path.lexists(path)]
    if sockets:
        yield Line(WARNING, "left sockets", f"{', '.join(sockets)}, of a sidecar that was killed", "the next hostkv serve replaces them")


def left_transfers(run_path: str, endpoint: str, hung: set[str]) -> Iterator[Line]:
    """What a killed sidecar may still be reading or writing; the slots it uses are not free before that has ended. `hung`: directories that
    do not answer."""
    try:
        if rundir.holder(endpoint) is not None:
            return
        left = entries(os.path.join(run_path, "tiers"), pools.boot_id())
    except StartupError:  # told by run_directory
        return
    except Unreadable as fault:
        yield Line(WARNING, "left transfers", f"{run_path}/tiers says nothing ({fault})", f"{_UNUSED} until the host starts anew")
        return
    for entry in sorted(left):
        line = Line(
            WARNING,
            "left transfers",
            f"of a killed sidecar may be under way in {entry.path}",
            f"{_UNUSED} until they have ended, or, where files of it are gone, until the host starts anew",
        )
        yield from _apart(entry.path, (line for each in [entry] if not is_quiet(*each)), hung)
        if entry.path in hung:
            yield line


def _files(base: str) -> tuple[str, str, str]:
    """Of a pool."""
    return base, f"{base}.tables", f"{base}.index"


def _taken_bytes(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0
