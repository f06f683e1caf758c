"""A file system of one file, whose every answer a test decides: it hangs, fails or answers short. Speaks the FUSE protocol of kernels from
5.4 on (include/uapi/linux/fuse.h) from a thread; needs root and /dev/fuse."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import PATIENCE_S

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT, INTERRUPT, BATCH_FORGET = (
    1, 2, 3, 4, 14, 15, 16, 17, 18, 20, 25, 26, 36, 42,
)  # fmt: skip
REQUEST = struct.Struct("<IIQQIIII")
MAX_BYTES = 1 << 20
Rule = Callable[[int, int, int], int]
"""(READ or WRITE, offset, size) -> how many bytes to move, or a negative errno. May block: each request has a thread of its own."""


def everything(kind: int, offset: int, size: int) -> int:
    return size


class FuseFile:
    """`path` is the file: `size` bytes in memory at `content`."""

    def __init__(self, folder: Path, size: int) -> None:
        self.content = bytearray(size)
        self.rule: Rule = everything
        self.path = folder / "slab"
        folder.mkdir(exist_ok=True)
        try:
            self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            pytest.skip(f"/dev/fuse: {error}")
        self.libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,max_read={MAX_BYTES}".encode()
        if self.libc.mount(b"hostkv-test", bytes(folder), b"fuse", 6, options) < 0:  # MS_NOSUID | MS_NODEV
            os.close(self.fd)
            pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
        self.folder = folder
        self.closed, self.lock = False, threading.Lock()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.libc.umount2(bytes(self.folder), 1)  # MNT_FORCE: what hangs is aborted,
        self.libc.umount2(bytes(self.folder), 2)  # MNT_DETACH: and gone when nobody has it open any more
        self.thread.join(PATIENCE_S)
        with self.lock:  # who answers later must not write to another file of this number
            self.closed = True
            os.close(self.fd)

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.fd, MAX_BYTES + 65536)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # unmounted
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = REQUEST.unpack_from(request)
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        body = self.reply(opcode, node, request[REQUEST.size :])
        error, data = (body, b"") if isinstance(body, int) else (0, body)
        with self.lock, contextlib.suppress(OSError):  # nobody waits any more: interrupted, or unmounted
            if not self.closed:
                os.write(self.fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)

    def attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o600
        return struct.pack("<6Q10I", node, len(self.content), 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def reply(self, opcode: int, node: int, body: bytes) -> bytes | int:
        if opcode == INIT:
            # FUSE_BIG_WRITES, FUSE_PARALLEL_DIROPS, FUSE_MAX_PAGES
            flags = 1 << 5 | 1 << 18 | 1 << 22
            return struct.pack("<4IHHIIHHI28x", 7, 31, 0, flags, 64, 48, MAX_BYTES, 1, MAX_BYTES // 4096, 0, 0)
        if opcode == LOOKUP:
            return struct.pack("<QQQQII", 2, 0, 3600, 3600, 0, 0) + self.attributes(2) if body == b"slab\0" else errno.ENOENT
        if opcode in (GETATTR, SETATTR):
            return struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        if opcode == OPEN:
            return struct.pack("<QII", 0, 1, 0)  # FOPEN_DIRECT_IO: what is answered is what the caller gets
        if opcode in (READ, WRITE):
            _, offset, size = struct.unpack_from("<QQI", body)
            size = min(size, max(len(self.content) - offset, 0))
            moved = self.rule(opcode, offset, size)
            if moved < 0:
                return -moved
            if opcode == READ:
                return bytes(self.content[offset : offset + moved])
            self.content[offset : offset + moved] = body[40 : 40 + moved]
            return struct.pack("<II", moved, 0)
        if opcode in (FLUSH, RELEASE, FSYNC):
            return b""
        return errno.ENOSYS
