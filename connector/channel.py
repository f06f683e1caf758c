"""One connection to the sidecar: a DEALER socket that one thread at a time uses synchronously. The client owns a stack of them.

A connection never heals by itself (no ZeroMQ reconnect): when the sidecar goes, the channel is closed and another one says hello, so a
request can never reach a sidecar that it was not meant for. A reply that did not come in time may still come: it is skipped by its id.
What the lost request may have taken is a debt, paid on the same connection, so that it arrives after the request it undoes.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import zmq

from ..schemas.errors import ErrorCode, ProtocolError
from ..schemas.messages import MAX_FRAME_BYTES, MAX_TAGS, Abort, Discard, ErrorReply, Release, Request, decode_reply, encode_request
from .errors import SidecarRefused, SidecarUnavailable

MAX_DEBTS = 1 << 16  # more tags than that are forgotten, oldest first; their pins end with the session
MAX_TOLD = 32  # answers of one channel that wait to be read
_FILES, _THREADS = 16, 2  # over and exactly what ZeroMQ takes to start
_SLICE_MS = 100  # how often a waiting thread looks whether anybody still listens


def listening(path: str) -> str:
    """Empty when a process listens on the Unix socket `path`, else why not. Never blocks."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
            probe.connect(path)
    except BlockingIOError:  # its queue of connections is full: it is there, and maybe hung
        return ""
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"cannot look who listens at {path} ({reason}); raise ulimit -n"
        return f"nobody listens at {path} ({reason}); start one with: hostkv serve --endpoint ipc://{path}"
    return ""


def start_zeromq() -> zmq.Context[Any]:
    """A context whose threads run. ZeroMQ aborts a process that has no files or threads left for it, so they are tried first. Raises
    SidecarUnavailable."""
    end = threading.Event()
    with ExitStack() as tried:
        try:
            for _ in range(_FILES // 2):
                for fd in os.pipe():
                    tried.callback(os.close, fd)
            for _ in range(_THREADS):
                thread = threading.Thread(target=end.wait, daemon=True)
                thread.start()
                tried.callback(thread.join)
                tried.callback(end.set)
        except OSError as error:
            raise SidecarUnavailable(f"cannot open files ({error.strerror}); raise ulimit -n") from error
        except RuntimeError as error:
            raise SidecarUnavailable(f"cannot start threads ({error}); raise ulimit -u, or the container's limit of processes") from error
    try:
        context: zmq.Context[Any] = zmq.Context()
        context.socket(zmq.DEALER).close(0)  # the first one starts the threads
    except zmq.ZMQError as error:
        raise SidecarUnavailable(f"cannot start ZeroMQ: {error}; is ulimit -n reached?") from error
    return context


def socket_file(path: str) -> tuple[int, int, int]:
    """What differs when another process has bound the Unix socket `path`; a process that hangs keeps its own. Raises SidecarUnavailable."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise SidecarUnavailable(f"cannot look at {path}: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_ctime_ns


class Debts:
    """Tags that a lost request may hold, to be given back before anything else is asked."""

    def __init__(self) -> None:
        self._tags: dict[type[Abort] | type[Release], deque[int]] = {kind: deque(maxlen=MAX_DEBTS) for kind in (Abort, Release)}

    def __bool__(self) -> bool:
        return any(self._tags.values())

    def owe(self, undo: Abort | Release) -> None:
        self._tags[type(undo)] += struct.unpack(f"<{len(undo.tags) // 8}Q", undo.tags)

    def take_over(self, other: Debts) -> None:
        for kind, tags in other._tags.items():
            self._tags[kind] += tags
            tags.clear()

    def pay(self, channel: Channel, timeout_s: float) -> None:
        for kind, tags in self._tags.items():
            while tags:
                batch = list(itertools.islice(tags, MAX_TAGS))
                try:
                    channel.ask(kind(struct.pack(f"<{len(batch)}Q", *batch)), timeout_s)
                except SidecarRefused as refusal:
                    if refusal.code == ErrorCode.NO_SESSION:
                        raise
                for _ in batch:
                    tags.popleft()


class Channel:
    """`instance` is the sidecar's start that answered here; `greeted`: hello was said; `broken`: of no use any more. The client pays
    `debts` before its next request here."""

    def __init__(self, context: zmq.Context[Any], path: str) -> None:
        self.instance = b""
        self.greeted = False
        self.broken = False
        self.debts = Debts()
        self._path = path
        self._sent = 0
        self._unanswered = 0
        self._told: dict[int, Abort | Release] = {}  # id -> what was sent without waiting for its answer
        self._wait_ms = _SLICE_MS
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise SidecarUnavailable(f"cannot open a connection to {path}: {error}; is ulimit -n reached?") from error
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self._socket.setsockopt(zmq.RCVTIMEO, self._wait_ms)
            self._socket.connect(f"ipc://{path}")
        except zmq.ZMQError as error:
            self._socket.close(0)  # the context could not end before it
            raise SidecarUnavailable(f"cannot open a connection to {path}: {error}") from error

    def ask(self, request: Request, timeout_s: float, count: int | None = None) -> Any:
        """The reply of `request`, of the type that REPLIES gives. `count`: how many items a batch reply must have. Raises SidecarRefused on
        an error reply and SidecarUnavailable when no answer came within `timeout_s`."""
        self._send(request)
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self._receive(deadline, timeout_s, request.verb)
            self._unanswered -= 1
            try:
                if self._unanswered and (late := decode_reply(frame, None)[0]) != self._sent:
                    self._answered(late, frame)
                    continue
                request_id, instance, reply = decode_reply(frame, request, count)
            except ProtocolError as error:
                self.broken = True
                raise SidecarUnavailable(f"not a HostKV sidecar at {self._path}: {error}") from error
            self._unanswered = 0
            self.unpaid()  # answers come in order, so what is still open has lost its own
            if isinstance(reply, ErrorReply):
                raise SidecarRefused(reply.error, reply.message)
            if request_id != self._sent or (self.greeted and instance != self.instance):
                self.broken = True
                raise SidecarUnavailable(f"the sidecar at {self._path} answered out of turn")
            self.instance = instance
            return reply

    def tell(self, request: Abort | Release | Discard, timeout_s: float) -> None:
        """Sends it and does not wait; its answer is read on the way to a later one. Until then an Abort or Release can become a debt."""
        if self._unanswered >= MAX_TOLD:
            self.ask(request, timeout_s)
            return
        self._send(request)
        if not isinstance(request, Discard):
            self._told[self._sent] = request

    def unpaid(self) -> Debts:
        """The debts, with all that was told and not answered."""
        while self._told:
            self.debts.owe(self._told.popitem()[1])
        return self.debts

    def _send(self, request: Request) -> None:
        self._sent += 1
        try:
            self._socket.send(encode_request(request, self._sent), zmq.NOBLOCK)
        except zmq.Again:
            self.broken = True
            raise SidecarUnavailable(f"the sidecar at {self._path} closed the connection") from None
        except zmq.ZMQError as error:
            self.broken = True
            raise SidecarUnavailable(f"cannot send to {self._path}: {error}") from error
        self._unanswered += 1

    def _answered(self, request_id: int, frame: bytes) -> None:
        """The answer of an earlier request: of no use any more, but for whether what was told was done."""
        told = self._told.pop(request_id, None)
        if told is not None:
            reply = decode_reply(frame, told)[2]
            if isinstance(reply, ErrorReply) and reply.error == ErrorCode.NO_SESSION:
                self.debts.owe(told)

    def _receive(self, deadline: float, timeout_s: float, verb: str) -> bytes:
        while True:
            left_ms = int((deadline - time.monotonic()) * 1000)
            wait_ms = max(1, min(_SLICE_MS, left_ms))
            try:
                if wait_ms != self._wait_ms:
                    self._socket.setsockopt(zmq.RCVTIMEO, wait_ms)
                    self._wait_ms = wait_ms
                frame: bytes = self._socket.recv()
                return frame
            except zmq.Again:
                if left_ms <= wait_ms:
                    raise SidecarUnavailable(f"no answer to {verb} from {self._path} within {max(0.0, timeout_s):g} s") from None
                if why := listening(self._path):
                    self.broken = True
                    raise SidecarUnavailable(why) from None
            except zmq.ZMQError as error:  # the client is being closed by another thread
                self.broken = True
                raise SidecarUnavailable(f"cannot receive from {self._path}: {error}") from error

    def close(self) -> None:
        self._socket.close(0)
