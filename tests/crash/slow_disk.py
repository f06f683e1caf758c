"""A disk that hangs, crawls or fails when it is told to: a file system of our own over a directory, spoken at /dev/fuse without a library.

    with SlowDisk(tmp_path / "disk") as disk:      disk.path is a directory for files, and for nothing else
        disk.hold("read")                          reads that begin from now on get no answer
        disk.until_held(3)                         waits until so many do
        disk.obey()                                they are answered, and all that comes

What a process has asked of it outlives the process, as with a real disk: a thread in a system call is not gone before its answer came, and
a read that is answered later still goes to where it was to go. It runs as a process of its own, so that whoever hangs is never the test.
Its end is the end of all that waits for it (ENOTCONN)."""

from __future__ import annotations

import ctypes
import errno
import heapq
import json
import os
import select
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import Struct, pack, unpack_from
from typing import Any

import pytest

from tests.support import LIFE_S, MEMORY, PATIENCE_S, until

ROOT = 1
IN, OUT = Struct("<IIQQIIIHH"), Struct("<IiQ")  # struct fuse_in_header, fuse_out_header of linux/fuse.h
LOOKUP, FORGET, GETATTR, SETATTR, UNLINK, RENAME, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 1, 2, 3, 4, 10, 12, 14, 15, 16, 17, 18, 20
INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, CREATE, INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE, RENAME2 = (
    *(26, 27, 28, 29, 30, 35, 36, 38, 42, 43, 45),
)
NO_ANSWER = {FORGET, INTERRUPT, DESTROY, BATCH_FORGET}
KINDS = {
    "read": {READ}, "write": {WRITE}, "sync": {FSYNC, FSYNCDIR}, "make": {CREATE, RENAME, RENAME2, UNLINK, FALLOCATE}, "open": {OPEN},
    "look": {LOOKUP, GETATTR, STATFS, OPENDIR, READDIR},
}  # fmt: skip
FLAGS = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22  # ASYNC_READ, BIG_WRITES, ASYNC_DIO, MAX_PAGES
BYTES = 1 << 20  # of one read or write
CACHED_S = 3600  # names and attributes of files: nobody else changes them
SET_MODE, SET_SIZE = 1 << 0, 1 << 3
NOSUID_NODEV, DETACH = 6, 2


class SlowDisk:
    """Skips the test where there can be none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700)
        self._memory = tempfile.TemporaryDirectory(prefix="hostkv-test-", dir=MEMORY)  # so that it is as slow as it is told to be
        self.behind = Path(self._memory.name)  # where the files are, for whoever must not hang
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.slow_disk", str(self.behind), str(path)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if why := self._heard(LIFE_S)["why"]:
            self._process.wait(PATIENCE_S)
            self._memory.cleanup()
            pytest.skip(f"a file system of our own cannot be mounted here: {why}")

    def __enter__(self) -> SlowDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)
        self._memory.cleanup()

    def hold(self, *kinds: str) -> None:
        """Requests of these kinds, and of no others, get no answer if they come from now on."""
        self._say(hold=kinds)

    def fail(self, error: int, *kinds: str) -> None:
        """They are answered with this errno."""
        self._say(fail=kinds, error=error)

    def slow(self, seconds: float, *kinds: str) -> None:
        """They are answered one after the other, each so long after the one before; those that are held, too."""
        self._say(slow=kinds, seconds=seconds)

    def obey(self) -> None:
        """Answers what is held, and is a good disk again."""
        self._say(obey=True)

    def answer(self) -> None:
        """Answers what is held; what comes from now on is held as before."""
        self._say(answer=True)

    def held(self) -> int:
        count: int = self._say()["held"]
        return count

    def until_held(self, count: int) -> None:
        until(lambda: self.held() >= count, lambda: f"{self.held()} are held")

    def _say(self, **words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self, wait_s: float = PATIENCE_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], wait_s)[0], "the slow disk says nothing"
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


# ---- in the process of its own ---------------------------------------------------------------------------------------------------------
class Server:
    """One thread: what it is asked, in the order of asking. A node's number is its inode's; each has a descriptor, for as long as this
    lives."""

    def __init__(self, directory: str, device: int) -> None:
        self._device = device
        self._nodes = {ROOT: os.open(directory, os.O_RDONLY | os.O_DIRECTORY)}
        self._hold: set[int] = set()
        self._held: list[bytes] = []
        self._fail: set[int] = set()
        self._error = 0
        self._slow: set[int] = set()
        self._seconds = self._next_s = 0.0
        self._later: list[tuple[float, int, bytes]] = []
        self._does: dict[int, Callable[[int, memoryview], bytes]] = {
            LOOKUP: lambda node, body: self._entry(bytes(body[:-1])),
            GETATTR: lambda node, body: self._attributes(node),
            SETATTR: self._set,
            UNLINK: lambda node, body: os.unlink(bytes(body[:-1]), dir_fd=self._nodes[ROOT]) or b"",
            RENAME: lambda node, body: self._rename(body[8:]),
            RENAME2: lambda node, body: self._rename(body[16:]),
            OPEN: lambda node, body: bytes(16),
            OPENDIR: lambda node, body: bytes(16),
            RELEASE: lambda node, body: b"",
            RELEASEDIR: lambda node, body: b"",
            READ: lambda node, body: os.pread(self._nodes[node], *reversed(unpack_from("<QI", body, 8))),
            WRITE: self._write,
            STATFS: self._room,
            FSYNC: lambda node, body: os.fsync(self._nodes[node]) or b"",
            FSYNCDIR: lambda node, body: os.fsync(self._nodes[node]) or b"",
            INIT: lambda node, body: pack("<IIIIHHIIHHI28x", 7, 31, 0, FLAGS, 1024, 1024, BYTES, 1, BYTES // 4096, 0, 0),
            READDIR: self._list,
            CREATE: self._create,
            FALLOCATE: lambda node, body: os.posix_fallocate(self._nodes[node], *unpack_from("<QQ", body, 8)) or b"",
        }

    def serve(self) -> None:
        """Until the other side of stdin ends."""
        poll = select.poll()
        for fd in (self._device, sys.stdin.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            wait_ms = max(0, (self._later[0][0] - time.monotonic()) * 1000) if self._later else None
            ready = {fd for fd, _ in poll.poll(wait_ms)}
            while self._later and self._later[0][0] <= time.monotonic():
                self._answer(heapq.heappop(self._later)[2])
            if sys.stdin.fileno() in ready and not self._told(sys.stdin.readline()):
                return
            if self._device in ready:
                with suppress(BlockingIOError, FileNotFoundError):  # somebody gave up asking
                    self._take(os.read(self._device, BYTES + 65536))

    def _told(self, line: str) -> bool:
        if not line:
            return False
        words = json.loads(line)
        for name in ("hold", "fail", "slow"):
            if name in words:
                setattr(self, f"_{name}", set().union(*(KINDS[kind] for kind in words[name])))
        if "slow" in words:
            self._hold -= self._slow
            waiting, self._held = self._held, []
            for request in waiting:
                self._take(request)
        self._error, self._seconds = words.get("error", self._error), words.get("seconds", self._seconds)
        if "answer" in words:
            waiting, self._held = self._held, []
            for request in waiting:
                self._answer(request)
        if "obey" in words:
            self._hold, self._fail, self._slow = set(), set(), set()
            waiting, self._held, self._later = [*self._held, *(request for _, _, request in sorted(self._later))], [], []
            for request in waiting:
                self._answer(request)
        print(json.dumps({"held": len(self._held)}), flush=True)
        return True

    def _take(self, request: bytes) -> None:
        kind = IN.unpack_from(request)[1]
        if kind in NO_ANSWER:
            return
        if kind in self._hold:
            self._held.append(request)
        elif kind in self._slow:
            self._next_s = max(self._next_s, time.monotonic()) + self._seconds
            heapq.heappush(self._later, (self._next_s, len(self._later), request))
        else:
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, kind, number, node, *_ = IN.unpack_from(request)
        error, answer = 0, b""
        try:
            if kind in self._fail:
                raise OSError(self._error, "told to fail")
            if kind not in self._does:
                raise OSError(errno.ENOSYS, "not known")
            answer = self._does[kind](node, memoryview(request)[IN.size :])
        except OSError as caught:
            error = caught.errno or errno.EIO
        with suppress(FileNotFoundError):
            os.write(self._device, OUT.pack(OUT.size + len(answer), -error, number) + answer)

    # ---- what it is asked ----

    def _entry(self, name: bytes, flags: int = os.O_RDWR, mode: int = 0) -> bytes:
        fd = os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=self._nodes[ROOT])
        node = os.fstat(fd).st_ino
        if node in self._nodes:
            os.close(fd)
        else:
            self._nodes[node] = fd
        return pack("<QQQQII", node, 0, CACHED_S, CACHED_S, 0, 0) + self._fields(node)

    def _fields(self, node: int) -> bytes:
        """struct fuse_attr."""
        at = os.fstat(self._nodes[node])
        times = [int(each) for each in (at.st_atime, at.st_mtime, at.st_ctime)]
        return pack("<6Q10I", node, at.st_size, at.st_blocks, *times, 0, 0, 0, at.st_mode, at.st_nlink, at.st_uid, at.st_gid, 0, 4096, 0)

    def _attributes(self, node: int) -> bytes:
        return pack("<QII", 0 if node == ROOT else CACHED_S, 0, 0) + self._fields(node)

    def _set(self, node: int, body: memoryview) -> bytes:
        (valid,) = unpack_from("<I", body)
        if valid & SET_SIZE:
            os.ftruncate(self._nodes[node], *unpack_from("<Q", body, 16))
        if valid & SET_MODE:
            os.fchmod(self._nodes[node], stat.S_IMODE(*unpack_from("<I", body, 68)))
        return self._attributes(node)

    def _rename(self, names: memoryview) -> bytes:
        before, after, _ = bytes(names).split(b"\0")
        os.rename(before, after, src_dir_fd=self._nodes[ROOT], dst_dir_fd=self._nodes[ROOT])
        return b""

    def _create(self, node: int, body: memoryview) -> bytes:
        flags, mode = unpack_from("<II", body)
        return self._entry(bytes(body[16:-1]), os.O_RDWR | os.O_CREAT | flags & os.O_EXCL, mode) + bytes(16)

    def _write(self, node: int, body: memoryview) -> bytes:
        offset, size = unpack_from("<QI", body, 8)
        return pack("<II", os.pwrite(self._nodes[node], body[40 : 40 + size], offset), 0)

    def _list(self, node: int, body: memoryview) -> bytes:
        (offset,) = unpack_from("<Q", body, 8)
        listed = b""
        for at, name in list(enumerate(sorted(os.listdir(os.fsencode(f"/proc/self/fd/{self._nodes[ROOT]}"))), 1))[offset:]:
            entry = pack("<QQII", at + ROOT, at, len(name), 0) + name
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > 4096:
                break
            listed += entry
        return listed

    def _room(self, node: int, body: memoryview) -> bytes:
        at = os.fstatvfs(self._nodes[ROOT])
        return pack("<5Q4I24x", at.f_blocks, at.f_bfree, at.f_bavail, at.f_files, at.f_ffree, at.f_bsize, at.f_namemax, at.f_frsize, 0)


def main(directory: str, path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        print(json.dumps({"why": f"/dev/fuse: {error.strerror}"}), flush=True)
        return
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={BYTES}"
    failed = libc.mount(b"slow", path.encode(), b"fuse", NOSUID_NODEV, options.encode())
    print(json.dumps({"why": f"mount: {os.strerror(ctypes.get_errno())}" if failed else ""}), flush=True)
    if not failed:
        Server(directory, device).serve()
        libc.umount2(path.encode(), DETACH)


if __name__ == "__main__":
    main(*sys.argv[1:])
