"""Telling the sidecar that this process gives the pool to a device driver: one packet with a pidfd over the attach socket (PROTOCOL.md).

A driver may go on for a moment after its process has lost its member lock, so the sidecar waits for the pidfd of such a member. Nothing is
asked here; requests go over channels.
"""

from __future__ import annotations

import os
import socket
import time

from ..schemas.endpoint import ATTACH_SOCKET
from ..schemas.errors import Attached
from .errors import SidecarUnavailable

_RETRY_S = 0.01
_LATER = (BlockingIOError, BrokenPipeError, ConnectionResetError)  # too many connect at once, or it gave up on one that took its time


def attach(run_directory: str, client: bytes, timeout_s: float) -> bool:
    """Tells the sidecar of `run_directory` that `client` has a device, and waits for its answer: False where it does not know the client
    (say hello first). `timeout_s` 0: only tells it, without waiting for anything. Raises SidecarUnavailable when it cannot be told, and
    RuntimeError when its answer is that we are at fault."""
    path = os.path.join(run_directory, ATTACH_SOCKET)
    end_s = time.monotonic() + timeout_s
    pidfd = _own_pidfd()
    try:
        while True:
            try:
                answer = _told(path, client, pidfd, timeout_s)
                break
            except _LATER:
                if (timeout_s := end_s - time.monotonic()) <= 0:
                    raise
                time.sleep(_RETRY_S)
    except OSError as error:  # a timeout is one
        raise SidecarUnavailable(f"cannot tell the sidecar at {path} of a device: {error.strerror or error}") from error
    finally:
        for fd in pidfd:
            os.close(fd)
    if answer not in (Attached.NOTED, Attached.UNKNOWN_CLIENT):
        names = {int(each): each.name for each in Attached}
        raise RuntimeError(f"the sidecar at {path} does not take this process's pidfd: {names.get(answer, answer)}")
    return answer == Attached.NOTED


def _told(path: str, client: bytes, pidfd: list[int], timeout_s: float) -> int:
    """What it answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        socket.send_fds(connection, [client], pidfd)
        if not timeout_s:
            return Attached.NOTED
        answer = connection.recv(2)
    if len(answer) != 1:
        raise ConnectionResetError("it closed the connection")
    return answer[0]


def _own_pidfd() -> list[int]:
    """One, or none where the kernel or a sandbox has no pidfds; the sidecar then gives the driver its time."""
    try:
        return [os.pidfd_open(os.getpid())]
    except (AttributeError, OSError):
        return []
