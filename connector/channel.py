"""One connection to the sidecar: a Unix socket, which one thread at a time uses synchronously. The client owns a stack of them.

It speaks ZeroMQ's wire protocol (ZMTP 3.0, rfc.zeromq.org/spec/23) as a DEALER does, without libzmq: that has threads of its own, so that a
round trip would wake two more, a third of the time of a bare one, and it aborts the process, here an engine, when files or threads run out.

A connection never heals by itself: when the sidecar goes, the channel is closed and another one says hello, so a request can never reach
a sidecar that it was not meant for. A reply that did not come in time may still come: it is skipped by its id. What the lost request may
have taken is a debt, paid on the same connection, so that it arrives after the request it undoes.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections import deque
from typing import Any

from ..schemas.errors import ErrorCode, ProtocolError
from ..schemas.messages import MAX_FRAME_BYTES, MAX_TAGS, Abort, Discard, ErrorReply, Release, Request, decode_reply, encode_request
from .errors import SidecarRefused, SidecarUnavailable, hint

MAX_DEBTS = 1 << 16  # more tags than that are forgotten, oldest first; their pins end with the session
MAX_TOLD = 32  # answers of one channel that wait to be read
NOT_DONE = (ErrorCode.NO_SESSION, ErrorCode.INTERNAL)  # errors after which what was to be given back may still be held
_RECEIVE_BYTES = 1 << 16
_GRACE_S = 0.05  # after a wait what has come is read all the same, but not what comes bit by bit
# ZMTP: the signature, version 3.0, the mechanism NULL, and the rest of the 64 bytes; then one command, and messages.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_LONG, _COMMAND = 2, 4  # flags of a frame; the others are of no use to us


def socket_file(path: str) -> tuple[int, int, int]:
    """What differs when another process has bound the Unix socket `path`; a process that hangs keeps its own. Raises SidecarUnavailable."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise _nobody(path, error) from None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def connected(path: str) -> socket.socket:
    """A connection to who listens there. Never blocks. Raises SidecarUnavailable."""
    try:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise SidecarUnavailable(
            f"cannot open a connection to {path}: {error.strerror}; {hint(error, 'a limit or a sandbox forbids it')}"
        ) from error
    try:
        found.connect(path)
    except BlockingIOError:
        found.close()
        raise SidecarUnavailable(f"the sidecar at {path} hangs: others wait for a connection already") from None
    except OSError as error:
        found.close()
        raise _nobody(path, error) from None
    return found


def _nobody(path: str, error: OSError) -> SidecarUnavailable:
    return SidecarUnavailable(f"nobody listens at {path} ({error.strerror}); start one with: hostkv serve --endpoint ipc://{path}")


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
                    if refusal.code in NOT_DONE:
                        raise
                for _ in batch:
                    tags.popleft()


class Channel:
    """`instance` is the sidecar's start that answered here; `greeted`: hello was said; `broken`: of no use any more. The client pays
    `debts` before its next request here."""

    def __init__(self, path: str) -> None:
        self.instance = b""
        self.greeted = False
        self.broken = False
        self.debts = Debts()
        self._path = path
        self._sent = 0
        self._unanswered = 0
        self._told: dict[int, Abort | Release] = {}  # id -> what was sent without waiting for its answer
        self._socket = connected(path)
        self._wait_s = 0.0  # the socket's timeout
        self._met = False  # ZMTP's greetings were exchanged
        self._received = b""  # of the frame that comes next

    def ask(self, request: Request, timeout_s: float, count: int | None = None) -> Any:
        """The reply of `request`, of the type that REPLIES gives. `count`: how many items a batch reply must have. Raises SidecarRefused on
        an error reply and SidecarUnavailable when no answer came within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._send(request, timeout_s)
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
        self._send(request, timeout_s)
        if not isinstance(request, Discard):
            self._told[self._sent] = request

    def unpaid(self) -> Debts:
        """The debts, with all that was told and not answered."""
        while self._told:
            self.debts.owe(self._told.popitem()[1])
        return self.debts

    def _send(self, request: Request, timeout_s: float) -> None:
        if not self._met:
            self._meet(timeout_s)
        self._sent += 1
        body = encode_request(request, self._sent)
        size = len(body)
        self._write((bytes((0, size)) if size < 256 else struct.pack(">BQ", _LONG, size)) + body, timeout_s)
        self._unanswered += 1

    def _answered(self, request_id: int, frame: bytes) -> None:
        """The answer of an earlier request: of no use any more, but for whether what was told was done."""
        told = self._told.pop(request_id, None)
        if told is not None:
            reply = decode_reply(frame, told)[2]
            if isinstance(reply, ErrorReply) and reply.error in NOT_DONE:
                self.debts.owe(told)

    # ---- ZMTP -----------------------------------------------------------------------------------------------------------------------
    def _meet(self, timeout_s: float) -> None:
        """Nothing else may be sent before a ROUTER has said READY, too."""
        self.broken = True  # unless it ends well
        deadline = time.monotonic() + timeout_s
        self._write(_GREETING, timeout_s)
        while len(self._received) < len(_GREETING):
            self._read(deadline, timeout_s, "greeting")
        theirs, self._received = self._received[: len(_GREETING)], self._received[len(_GREETING) :]
        if (theirs[0], theirs[9], theirs[12:32]) != (0xFF, 0x7F, _GREETING[12:32]) or theirs[10] < 3:
            raise SidecarUnavailable(f"not a HostKV sidecar at {self._path}: it does not speak ZMTP 3 without a key")
        self._write(bytes((_COMMAND, len(_READY))) + _READY, timeout_s)
        flags, command = self._frame(deadline, timeout_s, "greeting")
        if not flags & _COMMAND or not command.startswith(_READY[:6]):
            raise SidecarUnavailable(f"not a HostKV sidecar at {self._path}: it takes no connection ({command[:100]!r})")
        self._met, self.broken = True, False

    def _receive(self, deadline: float, timeout_s: float, verb: str) -> bytes:
        """The next message."""
        while True:
            flags, frame = self._frame(deadline, timeout_s, verb)
            if not flags & _COMMAND:
                return frame

    def _frame(self, deadline: float, timeout_s: float, verb: str) -> tuple[int, bytes]:
        """Its flags and its bytes."""
        while True:
            received = self._received
            if received:
                flags = received[0]
                start = 9 if flags & _LONG else 2
                if len(received) >= start:
                    end = start + int.from_bytes(received[1:start], "big")
                    if flags & ~(_LONG | _COMMAND) or end > MAX_FRAME_BYTES:
                        self.broken = True
                        raise SidecarUnavailable(f"not a HostKV sidecar at {self._path}: a frame of {end - start} bytes, flags {flags:#x}")
                    if len(received) >= end:
                        self._received = received[end:]
                        return flags, received[start:end]
            self._read(deadline, timeout_s, verb)

    def _read(self, deadline: float, timeout_s: float, verb: str) -> None:
        """Some more of what comes."""
        left_s = deadline - time.monotonic()
        if left_s < 0.9 * self._wait_s:
            self._wait(left_s)
        try:
            if self._received and left_s < -_GRACE_S:
                raise TimeoutError
            data = self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            raise SidecarUnavailable(f"no answer to {verb} from {self._path} within {max(0.0, timeout_s):g} s") from None
        except OSError as error:
            self.broken = True
            raise SidecarUnavailable(f"cannot receive from the sidecar at {self._path}: {error.strerror}") from error
        if not data:
            self.broken = True
            raise SidecarUnavailable(f"the sidecar at {self._path} closed the connection")
        self._received += data

    def _write(self, data: bytes, timeout_s: float) -> None:
        if timeout_s != self._wait_s:
            self._wait(timeout_s)
        try:
            self._socket.sendall(data, socket.MSG_NOSIGNAL)
        except OSError as error:  # also when the time is over: nobody knows how much of it was sent
            self.broken = True
            raise SidecarUnavailable(f"cannot send to the sidecar at {self._path}: {error.strerror or error}") from error

    def _wait(self, wait_s: float) -> None:
        self._socket.settimeout(max(wait_s, 0.001))
        self._wait_s = wait_s

    def close(self) -> None:
        self._socket.close()
