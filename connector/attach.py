"""Telling the sidecar that this process gives the pool to a device driver: one packet with a pidfd over the attach socket (PROTOCOL.md).

A driver may go on for a moment after its process has lost its member lock, so the sidecar waits for the pidfd of such a member. Nothing is
asked here; requests go over channels.
"""

from __future__ import annotations

import os
import socket

from ..schemas.endpoint import ATTACH_SOCKET
from ..schemas.errors import Attached
from .errors import SidecarUnavailable


def attach(run_directory: str, client: bytes, timeout_s: float) -> bool:
    """Tells the sidecar of `run_directory` that `client` has a device, and waits for its answer: False where it does not know the client
    (say hello first). `timeout_s` 0: only tells it, without waiting for anything. Raises SidecarUnavailable when it cannot be told, and
    RuntimeError when its answer is that we are at fault."""
    path = os.path.join(run_directory, ATTACH_SOCKET)
    pidfd = _own_pidfd()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            socket.send_fds(connection, [client], pidfd)
            if not timeout_s:
                return True
            answer = connection.recv(2)
    except OSError as error:  # a timeout is one
        raise SidecarUnavailable(f"cannot tell the sidecar at {path} of a device: {error.strerror or error}") from error
    finally:
        for fd in pidfd:
            os.close(fd)
    if len(answer) != 1:
        raise SidecarUnavailable(f"the sidecar at {path} closed the connection")
    if answer[0] not in (Attached.NOTED, Attached.UNKNOWN_CLIENT):
        names = {int(each): each.name for each in Attached}
        raise RuntimeError(f"the sidecar at {path} does not take this process's pidfd: {names.get(answer[0], answer[0])}")
    return answer[0] == Attached.NOTED


def _own_pidfd() -> list[int]:
    """One, or none where the kernel or a sandbox has no pidfds; the sidecar then gives the driver its time."""
    try:
        return [os.pidfd_open(os.getpid())]
    except (AttributeError, OSError):
        return []
