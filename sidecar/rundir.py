"""The run directory: one sidecar's private place, which its clients share.

    <run directory>/control.sock        the endpoint
    <run directory>/lock                flock'ed by the sidecar as long as it lives; holds its pid and the path of its pool
    <run directory>/members/<32 hex>    one lock file per client process, created and locked by it (PROTOCOL.md), removed here

It is taken before anything else is opened or bound, so whatever else lies in it is ours to replace. It never removes the file `lock`: a
lock on a file that is no longer there would protect nothing."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ..cext import lock_look
from .config import socket_path
from .core import Look
from .errors import StartupError

LOCK_TRIES, LOCK_PAUSE_S = 10, 0.02  # `hostkv stop` and `status` test the lock for an instant; that must not make a start fail
SWEEP_AGE_S = 10.0  # a lock file is created an instant before it is locked


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: str
    socket_path: str
    lock_fd: int
    earlier_pool: str  # what the sidecar before us wrote, "" if it ended well
    earlier_epoch: str

    def write_lock_file(self, pool_path: str = "", pool_epoch: str = "") -> None:
        """Tells others who holds the lock, and a later sidecar which pool was left if this one is killed. No path: none."""
        text = f"{os.getpid()}\n{pool_path}\n{pool_epoch}\n".encode()
        os.pwrite(self.lock_fd, text, 0)
        os.ftruncate(self.lock_fd, len(text))

    def remove_socket(self) -> None:
        with suppress(FileNotFoundError):  # ZeroMQ removes what it bound when it can
            os.unlink(self.socket_path)

    def member_path(self, lock: bytes) -> str:
        return os.path.join(self.path, "members", lock.hex())

    def look(self, lock: bytes) -> Look:
        """What can be told of this member lock: it is certainly free when its file is there and nobody locks it. A file that somebody removed
        under its member, a link or a device in its place, or one that cannot be opened for a moment, proves nothing."""
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
        for path in self._member_files():
            try:
                pid, _ = lock_look(path)
            except OSError:
                continue
            if pid >= 0:
                found[path] = pid
        return found

    def sweep(self, now_s: float, keep: set[bytes]) -> None:
        """Removes the lock files of processes that have ended. `now_s` is time.time(); `keep`: locks of members not yet declared gone."""
        kept = {self.member_path(lock) for lock in keep}
        for path in self._member_files():
            try:
                if path not in kept and now_s - os.lstat(path).st_mtime > SWEEP_AGE_S and lock_look(path)[0] < 0:
                    os.unlink(path)
            except OSError:  # gone meanwhile, a link, no permission: nothing that could be told to be free
                continue

    def _member_files(self) -> Iterator[str]:
        try:
            names = os.listdir(os.path.join(self.path, "members"))
        except FileNotFoundError:  # somebody removed the run directory under us; nobody new can reach us, the others stay served
            return
        for name in names:
            yield os.path.join(self.path, "members", name)


def take(endpoint: str) -> RunDirectory:
    """Creates the run directory of `endpoint` if needed, checks that it is ours alone, and takes its lock. Raises StartupError."""
    socket = socket_path(endpoint)
    path = os.path.dirname(socket)
    _own_directory(path)
    _own_directory(os.path.join(path, "members"))
    lock_path = os.path.join(path, "lock")
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise StartupError(f"cannot open {lock_path}: {error.strerror}; remove it or use another --endpoint") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise StartupError(f"{lock_path} is not a regular file; remove it or use another --endpoint")
    if not try_lock(fd):
        pid, _, _ = read_lock_file(fd)
        raise StartupError(f"run directory {path} is held by pid {pid or '?'}; run hostkv stop, or use another --endpoint")
    _, earlier_pool, earlier_epoch = read_lock_file(fd)
    run = RunDirectory(path, socket, fd, earlier_pool, earlier_epoch)
    run.write_lock_file(earlier_pool, earlier_epoch)
    return run


def try_lock(fd: int) -> bool:
    """Takes the flock of `fd` for as long as the process lives; False when another one keeps it."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    return False


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
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return read_lock_file(fd)[0]
    finally:
        os.close(fd)


def read_lock_file(fd: int) -> tuple[int, str, str]:
    """(pid, path of the pool, its epoch) as the last holder wrote them; 0 and "" where there is nothing."""
    lines = os.pread(fd, 8192, 0).decode(errors="replace").split("\n")
    pid = int(lines[0]) if lines[0].isascii() and lines[0].isdigit() else 0
    _, path, epoch, *_ = (*lines, "", "", "")
    return pid, path, epoch


def _own_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StartupError(
            f"cannot create the run directory {path}: {error.strerror}; use --endpoint with a directory you may write"
        ) from None
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise StartupError(f"{path} is not a directory (links are not followed); remove it or use another --endpoint")
    if info.st_uid != os.geteuid():
        raise StartupError(f"{path} belongs to uid {info.st_uid}, we run as {os.geteuid()}; use another --endpoint")
    if info.st_mode & 0o022:
        raise StartupError(f"{path} has mode {info.st_mode & 0o777:04o}, others may write to it; chmod 0700 {path}")
