"""The run directory: one sidecar's private place, which its clients share.

    <run directory>/control.sock        the endpoint
    <run directory>/attach.sock         where members with a device pass their pidfds (attach.py)
    <run directory>/lock                flock'ed by the sidecar as long as it lives; holds its pid and the path of its pool
    <run directory>/members/<32 hex>    one lock file per client process, created and locked by it (PROTOCOL.md), removed here
    <run directory>/tiers               the directories of the disk tier that may have I/O of ours in flight (tiers/disk.py)

It is taken before anything else is opened or bound, so whatever else lies in it is ours to replace. It never removes the file `lock`: a
lock on a file that is no longer there would protect nothing.

Without a group it is ours alone. With one, its members may enter and connect, make lock files in members/ (which get the group, so that
we can look at them, and are theirs alone to remove, besides us), and read `lock`."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import select
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ..cext import lock_look
from ..schemas.endpoint import ATTACH_SOCKET
from .config import socket_path
from .core import Look
from .errors import StartupError

DYING_WAIT_S = 30.0  # for the I/O of a holder that was killed
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.02  # of a lock that another one keeps, as one does that ends
LOOK_WAIT_S = 10.0  # `hostkv stop`, `status` and `doctor` look at a lock for an instant, longer where they are put to sleep meanwhile
PROBE_WAIT_S = 30.0  # for a process that takes a lock, on a busy machine
FREED_WAIT_S = 5.0  # for the lock of a process that has ended, of which a child may have a copy that it has not come to close
GONE_WAIT_S = 1.0  # the same, for who only looks
SWEEP_AGE_S = 10.0  # a lock file is created an instant before it is locked
_PF_EXITING = 4  # linux/sched.h


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: str
    socket_path: str
    group_id: int  # whose members may use the sidecar besides us, -1: nobody
    lock_fd: int
    earlier_pool: str  # what the sidecar before us wrote, "" if it ended well
    earlier_epoch: str

    def write_lock_file(self, pool_path: str = "", pool_epoch: str = "") -> None:
        """Tells others who holds the lock, and a later sidecar which pool was left if this one is killed. No path: none."""
        text = f"{os.getpid()}\n{pool_path}\n{pool_epoch}\n".encode()
        try:
            os.pwrite(self.lock_fd, text, 0)
            os.ftruncate(self.lock_fd, len(text))
        except OSError as error:
            raise StartupError(f"cannot write {self.path}/lock: {error.strerror}; make room there or use another --endpoint") from None

    @property
    def attach_path(self) -> str:
        return os.path.join(self.path, ATTACH_SOCKET)

    @property
    def tiers_path(self) -> str:
        return os.path.join(self.path, "tiers")

    def remove_files(self) -> None:
        """All but the locks. There is no pool any more into which something that a disk still has to answer could write."""
        if not same_file(self.lock_fd, os.path.join(self.path, "lock")):
            return  # somebody removed the run directory under us, and another sidecar may have made it anew
        for path in (self.socket_path, self.attach_path, self.tiers_path):
            with suppress(FileNotFoundError):  # ZeroMQ removes what it bound when it can
                os.unlink(path)

    def member_path(self, lock: bytes) -> str:
        return os.path.join(self.path, "members", lock.hex())

    def look(self, lock: bytes) -> Look:
        """What can be told of this member lock: it is certainly free when its file is there and nobody locks it. A file that somebody
        removed under its member, a link in its place, or one that cannot be opened for a moment, proves nothing."""
        path = self.member_path(lock)
        try:
            holder, beat = lock_look(path)
        except OSError:
            return Look(None)
        if holder < 0 and not os.path.lexists(path):
            return Look(None)
        return Look(holder >= 0, beat)

    def lock_file_exists(self, lock: bytes) -> bool:
        return os.path.lexists(self.member_path(lock))

    def living_members(self) -> dict[str, int]:
        """Path and pid (0: in another pid namespace) of each member lock that is held."""
        found = {}
        for path in self.member_files():
            try:
                pid, _ = lock_look(path)
            except OSError:
                continue
            if pid >= 0:
                found[path] = pid
        return found

    def sweep(self, files: Iterable[str], now_s: float, keep: set[bytes]) -> None:
        """Removes, of these member files, those of processes that have ended, and what is no lock file. `now_s` is time.time(); `keep`:
        locks of members not yet declared gone."""
        kept = {self.member_path(lock) for lock in keep}
        for path in files:
            try:
                info = os.lstat(path)
                if path in kept or now_s - info.st_mtime <= SWEEP_AGE_S:
                    continue
                if not stat.S_ISREG(info.st_mode) or lock_look(path)[0] < 0:
                    os.unlink(path)
            except OSError:  # gone meanwhile, no permission, a directory: nothing that could be told to be free
                continue

    def member_files(self) -> Iterator[str]:
        """The paths of what lies in members/, read as they are asked for."""
        try:
            with os.scandir(os.path.join(self.path, "members")) as entries:
                yield from (entry.path for entry in entries)
        except FileNotFoundError:  # somebody removed the run directory under us; nobody new can reach us, the others stay served
            return


def take(endpoint: str, group_id: int = -1) -> RunDirectory:
    """Creates the run directory of `endpoint` if needed, checks that it is ours alone but for the group, and takes its lock. Raises
    StartupError."""
    socket = socket_path(endpoint)
    path = os.path.dirname(socket)
    members = os.path.join(path, "members")
    _own_directory(path, stat.S_IWGRP | stat.S_IWOTH)
    _own_directory(members, stat.S_IWOTH)
    fd = _open_lock(path, os.O_CREAT)
    if group_id >= 0:  # else an existing one keeps the mode that somebody gave it
        set_access(path, group_id, 0o700, 0o750)
    set_access(members, group_id, 0o700, 0o3770)
    set_access(fd, group_id, 0o600, 0o640)
    return _held(path, socket, group_id, fd)


def borrow(endpoint: str) -> RunDirectory:
    """The same for a command that is no sidecar: locked, otherwise left as it is; also where it is not there, and so nobody is in it."""
    socket = socket_path(endpoint)
    path = os.path.dirname(socket)
    try:
        fd = _open_lock(path, 0)
    except FileNotFoundError:
        return RunDirectory(path, socket, -1, -1, "", "")
    return _held(path, socket, -1, fd)


def _held(path: str, socket: str, group_id: int, fd: int) -> RunDirectory:
    """The run directory whose lock `fd` is and we have; says so in it, and keeps what the last holder said of its pool."""
    _, earlier_pool, earlier_epoch = read_lock_file(fd)
    run = RunDirectory(path, socket, group_id, fd, earlier_pool, earlier_epoch)
    run.write_lock_file(earlier_pool, earlier_epoch)
    return run


def _open_lock(path: str, create: int) -> int:
    """The file `lock` of a run directory, locked. FileNotFoundError where it is not there and not to be created."""
    lock_path = os.path.join(path, "lock")
    try:
        fd = os.open(lock_path, os.O_RDWR | create | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StartupError(f"cannot open {lock_path}: {error.strerror}; remove it or use another --endpoint") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise StartupError(f"{lock_path} is not a regular file; remove it or use another --endpoint")
    if not take_lock(fd, DYING_WAIT_S):
        pid, _, _ = read_lock_file(fd)
        if _is_dying(pid):
            raise StartupError(
                f"run directory {path} is held by pid {pid}, which was killed and waits for a disk that does not answer; "
                "start again when it does, or after a reboot"
            )
        raise StartupError(f"run directory {path} is held by pid {pid or '?'}; run hostkv stop, or use another --endpoint")
    return fd


def _is_dying(pid: int) -> bool:
    """Whether it was killed, and has not ended: a thread of it waits for a disk, or has had no processor since."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *_, flags = file.read().rpartition(")")[2].split()[:7]
        with open(f"/proc/{pid}/status") as file:
            pending = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    except OSError:
        return False
    return state in ("Z", "X") or bool(int(flags) & _PF_EXITING) or any(each >> signal.SIGKILL - 1 & 1 for each in pending)


def _is_gone(pid: int) -> bool:
    """Whether it has ended, is about to, or is in another pid namespace."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return _is_dying(pid)


def set_access(target: str | int, group_id: int, alone: int, shared: int) -> None:
    """Gives a file or directory of ours (path or descriptor) the mode `shared` and the group, or `alone` where there is none, whatever the
    umask and whatever it had. Raises StartupError."""
    try:
        if group_id >= 0:
            os.chown(target, -1, group_id)
        os.chmod(target, alone if group_id < 0 else shared)
    except OSError as error:
        where = target if isinstance(target, str) else os.readlink(f"/proc/self/fd/{target}")
        raise StartupError(
            f"cannot give {where} to group {group_id}: {error.strerror}; the sidecar must be a member of the group "
            f"(usermod -aG), or run as root, or run without the key group"
        ) from None


def check_locks(path: str) -> None:
    """Whether a lock on a file in members/ of this run directory is seen from another process and is free when that one is killed, which
    everything depends on. Tried with a real process, so to be called before there are threads. Raises StartupError."""
    probe = os.path.join(path, "members", secrets.token_hex(16))  # as a member's, so that it is swept if we are killed here
    held_read, held_write = os.pipe()
    alive_read, alive_write = os.pipe()
    child = os.fork()
    if not child:
        try:
            close_others(held_write, alive_read)
            fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.fchmod(fd, 0o600)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(held_write, b"+")
            os.read(alive_read, 1)  # until we are killed, or our parent is
        except OSError as error:
            os.write(held_write, f"cannot take a lock: {error.strerror}".encode())
        finally:
            os._exit(0)
    try:
        os.close(held_write)
        told = os.read(held_read, 200) if select.select([held_read], [], [], PROBE_WAIT_S)[0] else b"taking a lock hangs"
        why = "" if told == b"+" else told.decode()
        if not why and not _is_held(probe):
            why = "a lock of another process is not seen"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        end = time.monotonic() + FREED_WAIT_S
        while not why and _is_held(probe):
            if time.monotonic() > end:
                why = "a lock outlives its process"
            time.sleep(LOCK_PAUSE_S)
    finally:
        for fd in (held_read, alive_read, alive_write):
            os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(probe)
    if why:
        raise StartupError(
            f"POSIX record locks do not work in {os.path.dirname(probe)} ({file_system(path) or 'unknown file system'}): {why}; "
            f"use --endpoint with a run directory on a local file system, such as a tmpfs"
        )


def close_others(*kept: int) -> None:
    """Closes, in a child, what it got from its parent, but the streams and these: a lock lives as long as a copy of its descriptor."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with suppress(OSError):
                os.close(fd)


def _is_held(path: str) -> bool:
    try:
        return lock_look(path)[0] >= 0
    except OSError as error:
        raise StartupError(f"cannot look at the lock {path}: {error.strerror}; use --endpoint with another run directory") from None


def file_system(directory: str) -> str:
    """The type of the file system that a directory is on, such as "tmpfs"; "" where that cannot be told."""
    return next((kind for kind, _ in mounts(directory)), "")


def mounts(directory: str) -> Iterator[tuple[str, list[str]]]:
    """Type and options (of the file system, not of the mount) of each mount of the file system that a directory is on."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as file:
        for line in file:
            mount, _, system = line.rstrip("\n").partition(" - ")
            if mount.split()[2] == number:
                kind, _, options = system.split(" ", 2)
                yield kind, options.split(",")


def same_file(fd: int, path: str) -> bool:
    """Whether this file still lies at this path."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def try_lock(fd: int) -> bool:
    """Takes the flock of `fd` for as long as the process lives; False when another one keeps it. Who only looks at it shares it."""
    kept, end = 0, time.monotonic() + LOOK_WAIT_S
    while kept < LOCK_TRIES and time.monotonic() < end:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            kept += is_locked(fd)
            time.sleep(LOCK_PAUSE_S)
    return False


def take_lock(fd: int, dying_wait_s: float, holder_of: Callable[[int], int] = lambda fd: read_lock_file(fd)[0]) -> bool:
    """As `try_lock`, but a holder that is gone is waited for, `dying_wait_s` where it is still there. `holder_of`: its pid."""
    start = time.monotonic()
    while not try_lock(fd):
        pid = holder_of(fd)
        wait_s = dying_wait_s if _is_dying(pid) else FREED_WAIT_S if _is_gone(pid) else 0.0
        if time.monotonic() - start >= wait_s:
            return False
    return True


def holder(endpoint: str) -> int | None:
    """The pid of the sidecar that holds the run directory of `endpoint`, None when nobody does (0: it has not yet said its pid)."""
    path = os.path.join(os.path.dirname(socket_path(endpoint)), "lock")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartupError(f"cannot open {path}: {error.strerror}; is --endpoint right, and ours?") from None
    try:
        end = time.monotonic() + GONE_WAIT_S
        while is_locked(fd):
            pid, _, _ = read_lock_file(fd)
            if not _is_gone(pid) or time.monotonic() > end:
                return pid
            time.sleep(LOCK_PAUSE_S)
        return None
    finally:
        os.close(fd)


def is_locked(fd: int) -> bool:
    """Whether another one holds the flock of this file. A sidecar that starts in the same instant tries again."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def read_lock_file(fd: int) -> tuple[int, str, str]:
    """(pid, path of the pool, its epoch) as the last holder wrote them; 0 and "" where there is nothing."""
    first, path, epoch, *_ = (*os.pread(fd, 8192, 0).decode(errors="replace").split("\n"), "", "", "")
    pid = int(first) if re.fullmatch("[0-9]{1,9}", first) else 0
    return pid, path if "\0" not in path else "", epoch


def _own_directory(path: str, forbidden: int) -> None:
    """`forbidden`: bits of the mode that would let others put something into it."""
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StartupError(
            f"cannot create the run directory {path}: {error.strerror}; use --endpoint with a directory you may write"
        ) from None
    check_directory(path, forbidden)


def check_directory(path: str, forbidden: int) -> None:
    """Raises StartupError unless it is a directory of ours without these bits in its mode."""
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise StartupError(f"{path} is not a directory (links are not followed); remove it or use another --endpoint")
    if info.st_uid != os.geteuid():
        raise StartupError(f"{path} belongs to uid {info.st_uid}, we run as {os.geteuid()}; use another --endpoint")
    if info.st_mode & forbidden:
        raise StartupError(f"{path} has mode {info.st_mode & 0o777:04o}, others may write to it; chmod 0700 {path}")
