"""The attach socket: a member that gives the pool to a device driver says so here, with a pidfd of its process (PROTOCOL.md).

A driver finishes a moment after its process has dropped its lock, so what such a member held waits until the pidfd says that the process
has exited. The pidfds are held here, one a client, as long as the client is a member. No request ever comes this way; one packet is
read, one byte is answered, and the connection is closed. Nothing here waits: `serve` is called every few dozen milliseconds, takes
what has come, and drops who connects and says nothing. A sender can pass any descriptor it likes: all but a pidfd of its own are closed, by
a thread that does nothing else, since closing somebody's file can take as long as its owner likes (a socket that lingers, a file system in
user space).
"""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..schemas.errors import Attached
from ..schemas.messages import ID_BYTES
from .errors import StartupError
from .rundir import RunDirectory, set_access

BACKLOG = 64
ACCEPTS = 64  # in one call of serve
WAITING, WAIT_S = 16, 1.0  # connections without their packet: how many, for how long; the oldest goes
CLOSING = 64  # descriptors whose close takes long; while there are more nobody is served
_PIDFD_NAMES = ("anon_inode:[pidfd]", "pidfd:[")  # the second in Linux 6.9
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_ROOM = socket.CMSG_SPACE(2 * 4)  # two descriptors: one too many is seen, and what has no room is never made


class Attach:
    """Holds nothing and listens nowhere until `listen`."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._waiting: dict[socket.socket, float] = {}  # since when; oldest first
        self._pidfds: dict[bytes, int] = {}
        self._closing: queue.SimpleQueue[int] = queue.SimpleQueue()

    def listen(self, run: RunDirectory) -> None:
        """At attach.sock of a run directory that we hold, so what is in the way is of a sidecar that ended. Raises StartupError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with suppress(FileNotFoundError):
                os.unlink(run.attach_path)
            before = os.umask(0o177)
            try:
                listener.bind(run.attach_path)
            finally:
                os.umask(before)
            set_access(run.attach_path, run.group_id, 0o600, 0o660)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupError(f"cannot bind {run.attach_path}: {error.strerror}; remove what is there or use another --endpoint") from None
        except StartupError:
            listener.close()
            raise
        self._listener = listener
        threading.Thread(target=self._close_all, name="close", daemon=True).start()

    def exited(self, client: bytes) -> bool | None:
        """Whether the process of this client has exited; None where no pidfd of it is held."""
        pidfd = self._pidfds.get(client)
        if pidfd is None:
            return None
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def serve(self, attach: Callable[[bytes], bool], members: set[bytes]) -> None:
        """Answers what has come. `attach` notes a client, False where it is none of the `members`, whose pidfds alone are kept."""
        for client in self._pidfds.keys() - members:
            os.close(self._pidfds.pop(client))
        now = time.monotonic()
        assert self._listener is not None, "listen() comes first"
        for _ in range(ACCEPTS):
            if self._closing.qsize() > CLOSING:
                return
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none; or no descriptor is left for it, and it waits
                break
            self._waiting[connection] = now
            self._take(connection, attach)
        for connection, since in list(self._waiting.items()):
            if since < now:
                self._take(connection, attach)
            if connection in self._waiting and (now - since > WAIT_S or len(self._waiting) > WAITING):
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._waiting[connection]
        self._closing.put(connection.detach())  # what else was sent over it closes with it

    def _close_all(self) -> None:
        while True:
            os.close(self._closing.get())

    def _take(self, connection: socket.socket, attach: Callable[[bytes], bool]) -> None:
        """Its packet, if it is there: answered, and the connection closed."""
        fds: list[int] = []
        try:
            packet, ancillary, flags, _ = connection.recvmsg(ID_BYTES + 1, _ROOM, _FLAGS)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
            answer = self._answer(connection, packet, fds, flags, attach)
            connection.send(bytes([answer]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:  # it went away
            pass
        finally:
            for fd in fds:
                self._closing.put(fd)
        self._drop(connection)

    def _answer(self, connection: socket.socket, packet: bytes, fds: list[int], flags: int, attach: Callable[[bytes], bool]) -> int:
        """Takes the pidfd it keeps out of `fds`."""
        if len(packet) != ID_BYTES or len(fds) > 1 or flags & socket.MSG_TRUNC or (fds and flags & socket.MSG_CTRUNC):
            return Attached.MALFORMED
        own = _is_of_sender(connection, fds[0]) if fds else None
        if own is False:
            return Attached.NOT_THE_SENDER
        if not attach(packet):
            return Attached.UNKNOWN_CLIENT
        if own:
            if packet in self._pidfds:
                os.close(self._pidfds.pop(packet))
            self._pidfds[packet] = fds.pop()
        return Attached.NOTED


def _is_of_sender(connection: socket.socket, fd: int) -> bool | None:
    """Whether `fd` is a pidfd of the process that connected. None: it cannot be told, such as for a process out of our sight in another
    PID namespace; its driver is then given its time."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    sender, _, _ = struct.unpack("3i", credentials)
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(_PIDFD_NAMES):
            return False  # and not read: what is told of an inotify descriptor, for one, is as long as its owner likes
        with open(f"/proc/self/fdinfo/{fd}") as file:
            facts = dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
    except OSError:  # no /proc of ours, or no descriptor to read it with
        return None
    if "Pid" not in facts or int(facts["flags"], 8) & os.O_EXCL:  # no pidfd, or (PIDFD_THREAD) that of a thread, which may end first
        return False
    pid = int(facts["Pid"])
    return None if sender == pid == 0 else pid == sender
