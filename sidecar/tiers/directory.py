"""The files of one directory of the disk tier, and whose they are. Everything here may block for as long as a disk does, so a sidecar calls
it in the directory's own thread (disk.py) and nowhere else; commands that look at one at rest (check.py) have the time.

    <directory>/lock              flock'ed by the sidecar that has the directory, on a description that does no I/O; its pid and endpoint
    <directory>/directory.json    what this is, and its namespaces; replaced as a whole, durable before anything relies on it
    <directory>/NNNNN.slab        payload, all of it allocated; one description each, flock'ed too
    <directory>/NNNNN.records     what is in each slot of the slab (struct hkv_record in layout.h)

directory.json is made first: a directory that holds anything and not that is somebody else's, and is refused. What it lists gives the
records their meaning, so leaving the list ends all blocks of a namespace at once, and a directory starts anew by an empty list.

The lock of a killed sidecar is free when its process is gone, but its I/O may not be: that keeps the description of a slab alive, and with
it the slab's flock. As long as one is held the directory is in quarantine."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ...schemas.layout import PAGE, RECORD
from ...schemas.namespace import MAX_SHARDS
from ..errors import StartupError
from ..log import PROGRESS_S, event
from ..rundir import FREED_WAIT_S, is_locked, same_file, take_lock, try_lock
from . import Space

FORMAT = 1
MAX_NAMESPACES = 1024  # in one directory's list
MAX_LIST_BYTES = 1 << 20
MIN_SLABS, MAX_SLABS = 4, 512  # two descriptors each
MIB, GIB = 1 << 20, 1 << 30
RESERVED_BYTES = 1 * MIB  # of a directory's size, for its list and its replacement
MIN_BYTES = 16 * MIB
CHUNK_BYTES = 8 * MIB  # of records, in one read
TAKEN_BYTES = 64 * MIB  # of a slab, in one call: some file systems write all of it
LIST, NEW_LIST, LOCK = "directory.json", "directory.json.new", "lock"
_BEFORE_LIST = {LOCK, NEW_LIST, "lost+found"}  # what may lie in a directory that has no list yet
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Quarantine(Exception):
    """I/O that an earlier sidecar submitted may still be under way in this directory; the message names the file."""


def default_slab_bytes(size_bytes: int) -> int:
    """Of a directory that may have `size_bytes` in all: 64 MiB or a little more, as much as it takes to have at most 256 slabs, and as
    little as it takes to have 8, so that blocks of several sizes find slabs in a small one."""
    usable = (size_bytes - RESERVED_BYTES) * 64 // 65
    slabs = max(8, min(256, usable // (64 * MIB)))
    return (usable // slabs // PAGE - 1) * PAGE


def slabs_of(size_bytes: int, slab_bytes: int) -> int:
    """How many slabs fit, each with as many records as it may have blocks."""
    return (size_bytes - RESERVED_BYTES) // (slab_bytes + -(-slab_bytes // 64 // PAGE) * PAGE)


class Directory:
    """`look` and `open` make it ready, and again after `release` or a failure of either. OSError from any method: the disk, or what lies
    on it, does not allow it (strerror says it, filename names it); StartupError: a person must decide."""

    def __init__(self, path: str, endpoint: str) -> None:
        self.path = path
        self.id = ""  # of what was found there first
        self.slab_bytes = 0
        self.namespaces: dict[int, Space] = {}
        self.found: frozenset[int] | None = None  # the slabs that lay there first, once nobody else has one of them open
        self.slab_fds: list[int] = []
        self.record_fds: list[int] = []
        self.direct = True
        self.lost_bytes = 0  # of slabs that were given up because the directory started anew
        self._endpoint = endpoint
        self._said_s = 0.0
        self.next_number = 1  # of a namespace; none below it is given again
        self._fd = self._lock_fd = -1

    def look(self, create: bool) -> int:
        """Takes the directory, made if absent and `create`, once it is sure that it is ours and nobody else has it; returns its slab_bytes,
        0 where it is new. In one that is not the same as before nothing is touched."""
        self.release()
        before, self._fd = self._fd, self._open_path(create)
        try:
            if self.id:
                self._read_list()
            else:
                self._refuse_strange()
            self._take_lock()
            self._read_list()
        except (OSError, StartupError):
            before, self._fd = self._fd, before
            raise
        finally:
            if before >= 0:
                os.close(before)
        return self.slab_bytes

    def peek(self) -> tuple[int, str] | None:
        """What `look` would find, without taking or changing anything: (pid, endpoint) of who has the directory, None for nobody."""
        self._fd = self._open_path(False)
        self._refuse_strange()
        self._read_list()
        try:
            fd = self._open_file(LOCK, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return _holder(fd) if is_locked(fd) else None
        finally:
            os.close(fd)

    def open(self, slab_bytes: int, slabs: int) -> None:
        """Makes its slabs `slabs` of `slab_bytes`, or as many as there is room for, and opens them. A directory that has others starts
        anew. Raises Quarantine."""
        self._open_with(lambda: self._open_slabs(slab_bytes, slabs))

    def open_as_found(self) -> None:
        """Opens the slabs and records that lie there, and changes nothing; -1 stands for a file that does not. Raises Quarantine."""
        self._open_with(self._open_found)

    def release(self) -> None:
        """Closes the slabs; nobody uses their descriptors any more. The lock stays ours."""
        for fd in [*self.slab_fds, *self.record_fds]:
            if fd >= 0:
                os.close(fd)
        self.slab_fds, self.record_fds = [], []

    def close(self) -> None:
        self.release()
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def records(self, slab: int) -> bytearray:
        """All records of a slab, up to the last that is there; zeros for those that never were written."""
        fd = self.record_fds[slab]
        size = min(os.fstat(fd).st_size if fd >= 0 else 0, self.slab_bytes // PAGE * RECORD.size) // RECORD.size * RECORD.size
        records = bytearray(size)
        at = 0
        with memoryview(records) as view:
            while at < size:
                try:
                    at = os.lseek(fd, at, os.SEEK_DATA)
                    end = min(size, os.lseek(fd, at, os.SEEK_HOLE))
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    break  # nothing but a hole is left
                while at < end:
                    with view[at : min(end, at + CHUNK_BYTES)] as piece:
                        got = os.preadv(fd, [piece], at)
                    if not got:
                        return records  # somebody truncates it
                    at += got
        return records

    def add(self, space: Space) -> int:
        """A new number for this namespace, durable."""
        if len(self.namespaces) >= MAX_NAMESPACES:
            raise _bad(self.path, LIST, f"lists {MAX_NAMESPACES} namespaces; hostkv clear those that nobody uses")
        number = self.next_number
        self._write_list({**self.namespaces, number: space}, number + 1)
        return number

    def forget(self, numbers: set[int]) -> None:
        """Takes these off the list, durably."""
        kept = {number: space for number, space in self.namespaces.items() if number not in numbers}
        if len(kept) < len(self.namespaces):
            self._write_list(kept, self.next_number)

    def flush(self, slab: int) -> None:
        """Makes durable what was written to a slab."""
        os.fdatasync(self.slab_fds[slab])
        os.fdatasync(self.record_fds[slab])

    def erase(self, slab: int, slots: Iterable[int]) -> None:
        """Makes the records of these slots such that never were written, durably."""
        for slot in slots:
            os.pwrite(self.record_fds[slab], bytes(RECORD.size), slot * RECORD.size)
        os.fdatasync(self.record_fds[slab])

    # ---- the directory itself ----

    def _refuse_strange(self) -> None:
        if not self._has(LIST) and (strange := set(os.listdir(self._fd)) - _BEFORE_LIST):
            raise StartupError(
                f"{self.path} is no directory of a disk tier: it has no {LIST} but holds {min(strange)}; use an empty directory"
            )

    def _open_path(self, create: bool) -> int:
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(self.path, 0o700)
                    os.chmod(self.path, 0o700)
            fd = os.open(self.path, _OPEN | os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise StartupError(f"{self.path} is not a directory (links are not followed); name the directory itself") from None
            if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
                raise StartupError(
                    f"cannot open the directory {self.path}: {error.strerror}; make it, ours alone, or use another"
                ) from None
            raise
        info = os.fstat(fd)
        try:
            if info.st_uid != os.geteuid():
                raise StartupError(f"{self.path} belongs to uid {info.st_uid}, we run as {os.geteuid()}; use another directory")
            if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise StartupError(f"{self.path} has mode {info.st_mode & 0o777:04o}, others may write to it; chmod 0700 {self.path}")
        except StartupError:
            os.close(fd)
            raise
        return fd

    def _take_lock(self) -> None:
        path = os.path.join(self.path, LOCK)
        if self._lock_fd >= 0:
            if same_file(self._lock_fd, path):
                return
            os.close(self._lock_fd)
            self._lock_fd = -1
        fd = self._open_file(LOCK, os.O_RDWR | os.O_CREAT)
        if not take_lock(fd, FREED_WAIT_S):
            pid, endpoint = _holder(fd)
            os.close(fd)
            if pid == os.getpid():
                raise StartupError(f"{self.path} is given twice; give each directory to one tier, once")
            raise StartupError(
                f"{self.path} is held by the sidecar with pid {pid or '?'} on {endpoint or '?'}; stop that one or use another directory"
            )
        self._lock_fd = fd
        text = f"{os.getpid()}\n{self._endpoint}\n".encode()
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))

    # ---- its list ----

    def _read_list(self) -> None:
        try:
            fd = self._open_file(LIST, os.O_RDONLY)
        except FileNotFoundError:
            if self.id:
                raise _bad(self.path, LIST, "is gone; restart the sidecar to start the directory anew") from None
            return
        try:
            data = os.read(fd, MAX_LIST_BYTES + 1)
        finally:
            os.close(fd)
        try:
            found = _parse(data)
        except _Newer as newer:
            raise StartupError(
                f"{self.path} was written by a newer version of hostkv (format {newer}, this one knows {FORMAT}); use another directory, "
                f"or empty this one"
            ) from None
        except (ValueError, RecursionError) as error:
            raise _bad(self.path, LIST, f"is damaged ({error}); empty the directory, what it cached is lost") from None
        if self.id not in ("", found["id"]):
            raise _bad(self.path, LIST, "is of another directory than it was; restart the sidecar to use that")
        self.id, self.slab_bytes = found["id"], found["slab_bytes"]
        self.namespaces, self.next_number = found["namespaces"], found["next_number"]

    def _write_list(self, namespaces: dict[int, Space], next_number: int) -> None:
        tree = {
            "format": FORMAT,
            "id": self.id,
            "slab_bytes": self.slab_bytes,
            "next_number": next_number,
            "namespaces": [
                {
                    "number": number,
                    "fingerprint": space.fingerprint.hex(),
                    "shards": space.shards,
                    "shard_bytes": space.shard_bytes,
                    "slot_bytes": space.slot_bytes,
                    "label": space.label,
                }
                for number, space in namespaces.items()
            ],
        }
        with suppress(FileNotFoundError):
            os.unlink(NEW_LIST, dir_fd=self._fd)
        fd = self._open_file(NEW_LIST, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(fd, "wb") as file:
            file.write(json.dumps(tree, indent=1).encode())
            file.flush()
            os.fsync(fd)
        os.rename(NEW_LIST, LIST, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)
        self.namespaces, self.next_number = namespaces, next_number

    # ---- its slabs ----

    def _numbers(self, kind: str) -> list[int]:
        return sorted(int(name[:5]) for name in os.listdir(self._fd) if re.fullmatch(rf"[0-9]{{5}}\.{kind}", name))

    def _open_with(self, opens: Callable[[], None]) -> None:
        self.release()
        try:
            opens()
            if self.direct and not all(_reads_direct(fd) for fd in [fd for fd in self.slab_fds if fd >= 0][:1]):
                self.direct = False
                self.release()
                opens()
        except (OSError, Quarantine):
            self.release()
            raise

    def _open_found(self) -> None:
        slabs, records = self._numbers("slab"), self._numbers("records")
        for number in range(max([*slabs, *records], default=-1) + 1):
            self.slab_fds.append(-1)
            self.record_fds.append(-1)
            if number in slabs:
                self.slab_fds[number] = self._open_slab(number)
            if number in records:
                self.record_fds[number] = self._open_file(_records(number), os.O_RDWR)

    def _open_slabs(self, slab_bytes: int, slabs: int) -> None:
        fds: dict[int, int] = {}  # those that are open and not yet in slab_fds
        self._said_s = time.monotonic()
        try:
            for number in self._numbers("slab"):
                fds[number] = self._open_slab(number)
            if self.found is None:
                self.found = frozenset(fds)
            if self.slab_bytes != slab_bytes:
                self._start_anew(slab_bytes, fds)
            for number in [number for number in fds if number >= slabs]:
                self._remove_slab(number, fds)
            for number in range(slabs):
                if not self._make_slab(number, slabs, fds):
                    break
        finally:
            for fd in fds.values():
                os.close(fd)

    def _open_slab(self, number: int) -> int:
        fd = -1
        if self.direct:
            try:
                fd = self._open_file(_slab(number), os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False  # this file system has none
        if fd < 0:
            fd = self._open_file(_slab(number), os.O_RDWR)
        try:
            if not try_lock(fd):
                raise Quarantine(f"{self.path}/{_slab(number)}")
        except (Quarantine, OSError):
            os.close(fd)
            raise
        return fd

    def _start_anew(self, slab_bytes: int, fds: dict[int, int]) -> None:
        """The list first: from then on no record that lies here is valid."""
        self.lost_bytes += len(fds) * self.slab_bytes
        self.id = self.id or secrets.token_hex(16)
        self.slab_bytes = slab_bytes
        self._write_list({}, self.next_number)
        for number in list(fds):
            self._remove_slab(number, fds)

    def _remove_slab(self, number: int, fds: dict[int, int]) -> None:
        for name in (_records(number), _slab(number)):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
        os.close(fds.pop(number))

    def _make_slab(self, number: int, slabs: int, fds: dict[int, int]) -> bool:
        """One slab of so many and its records, whole and open. False where there is no room for it."""
        new = number not in fds
        if new and not self._has_room(number):
            return False
        fd = self._open_file(_slab(number), os.O_RDWR | os.O_CREAT)  # not O_DIRECT: where it cannot be preallocated zeros are written
        try:
            info = os.fstat(fd)
            if info.st_size > self.slab_bytes:
                os.ftruncate(fd, self.slab_bytes)
            if info.st_size < self.slab_bytes or info.st_blocks * 512 < self.slab_bytes:
                for at in range(0, self.slab_bytes, TAKEN_BYTES):
                    size = min(TAKEN_BYTES, self.slab_bytes - at)
                    os.posix_fallocate(fd, at, size)
                    self._say(number * self.slab_bytes + at + size, slabs * self.slab_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if new:
                os.unlink(_slab(number), dir_fd=self._fd)
            return False
        finally:
            os.close(fd)
        if new:
            fds[number] = self._open_slab(number)
        self.record_fds.append(self._open_file(_records(number), os.O_RDWR | os.O_CREAT))
        self.slab_fds.append(fds.pop(number))
        if new:
            os.ftruncate(self.record_fds[number], 0)
        return True

    def _say(self, taken: int, of: int) -> None:
        now = time.monotonic()
        if now - self._said_s > PROGRESS_S:
            self._said_s = now
            event(logging.INFO, "disk room is being taken", directory=self.path, bytes=taken, of=of)

    def _has_room(self, number: int) -> bool:
        """Whether another slab leaves what records and list may need: a file system filled to the last byte would take no namespace. One
        that does not tell its size is tried."""
        room = os.statvfs(self._fd)
        return not room.f_blocks or room.f_bavail * room.f_frsize >= self.slab_bytes + RESERVED_BYTES + (number + 1) * (
            self.slab_bytes // 64
        )

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _open_file(self, name: str, flags: int) -> int:
        """A regular file of this directory, 0600 if it is new."""
        return _open_regular(self._fd, self.path, name, flags)


def is_quiet(path: str, directory_id: str, slabs: int) -> bool:
    """Whether certainly nobody has one of these slabs open any more, of a directory that is not ours now. What is not there cannot be
    told: a removed file may still be written to."""
    try:
        directory = os.open(path, _OPEN | os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fd = _open_regular(directory, path, LIST, os.O_RDONLY)
        try:
            if _parse(os.read(fd, MAX_LIST_BYTES + 1))["id"] != directory_id:
                return False
        finally:
            os.close(fd)
        for number in range(slabs):
            fd = _open_regular(directory, path, _slab(number), os.O_RDONLY)
            try:
                if is_locked(fd):
                    return False
            finally:
                os.close(fd)
    except (OSError, ValueError, RecursionError, _Newer):
        return False
    finally:
        os.close(directory)
    return True


class _Newer(Exception):
    """The format of a list that a later version wrote."""


def _parse(data: bytes) -> dict[str, Any]:
    """What directory.json says, checked. Raises ValueError, RecursionError or _Newer."""
    tree = json.loads(data)
    if not isinstance(tree, dict) or type(tree.get("format")) is not int:
        raise ValueError("not a list of ours")
    if tree["format"] > FORMAT:
        raise _Newer(tree["format"])
    if tree["format"] != FORMAT:
        raise ValueError(f"format is {tree['format']}")
    if len(data) > MAX_LIST_BYTES:
        raise ValueError(f"more than {MAX_LIST_BYTES} bytes")
    slab_bytes, next_number = _integer(tree, "slab_bytes", PAGE, 1 << 50), _integer(tree, "next_number", 1, (1 << 32) - 1)
    if slab_bytes % PAGE:
        raise ValueError(f"slab_bytes is {slab_bytes}")
    namespaces: dict[int, Space] = {}
    if not isinstance(tree.get("namespaces"), list) or len(tree["namespaces"]) > MAX_NAMESPACES:
        raise ValueError(f"namespaces is not a list of at most {MAX_NAMESPACES}")
    for entry in tree["namespaces"]:
        if not isinstance(entry, dict) or type(entry.get("label")) is not str:
            raise ValueError("a namespace is no namespace")
        number = _integer(entry, "number", 1, next_number - 1)
        if number in namespaces:
            raise ValueError(f"number {number} is there twice")
        shards, shard_bytes = _integer(entry, "shards", 1, MAX_SHARDS), _integer(entry, "shard_bytes", 1, 1 << 36)
        slot_bytes = _integer(entry, "slot_bytes", shards * shard_bytes, 1 << 50)
        if slot_bytes % PAGE:
            raise ValueError(f"slot_bytes is {slot_bytes}")
        namespaces[number] = Space(bytes.fromhex(_hex(entry, "fingerprint", 64)), shards, shard_bytes, slot_bytes, entry["label"])
    return {"id": _hex(tree, "id", 32), "slab_bytes": slab_bytes, "next_number": next_number, "namespaces": namespaces}


def _integer(tree: dict[str, Any], name: str, low: int, high: int) -> int:
    value = tree.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}")
    return value


def _hex(tree: dict[str, Any], name: str, digits: int) -> str:
    value = tree.get(name)
    if type(value) is not str or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise ValueError(f"{name} is {value!r}")
    return value


def _slab(number: int) -> str:
    return f"{number:05d}.slab"


def _records(number: int) -> str:
    return f"{number:05d}.records"


def _bad(path: str, name: str, why: str) -> OSError:
    return OSError(errno.EBADMSG, why, os.path.join(path, name))


def _open_regular(directory: int, path: str, name: str, flags: int) -> int:
    try:
        fd = os.open(name, _OPEN | flags, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _bad(path, name, "is not a regular file (links are not followed); remove it") from None
        raise OSError(error.errno, error.strerror, os.path.join(path, name)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _bad(path, name, "is not a regular file (links are not followed); remove it")
    if flags & os.O_CREAT:
        os.fchmod(fd, 0o600)  # whatever the umask
    return fd


def _holder(fd: int) -> tuple[int, str]:
    """(pid, endpoint) as the sidecar that has a directory wrote them; 0 and "" where there is nothing."""
    first, endpoint, *_ = (*os.pread(fd, 8192, 0).decode(errors="replace").split("\n"), "", "")
    return int(first) if re.fullmatch("[0-9]{1,9}", first) else 0, endpoint


def _reads_direct(fd: int) -> bool:
    """Some file systems take O_DIRECT at open and refuse the I/O."""
    with mmap.mmap(-1, PAGE) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True
