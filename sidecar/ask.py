"""One question to a running sidecar, for the command line: its status, within a bounded time."""

from __future__ import annotations

from typing import Any

import zmq

from ..schemas import messages
from ..schemas.errors import ProtocolError


def ask_status(endpoint: str, timeout_ms: int) -> dict[str, Any] | None:
    """The status map of the sidecar at `endpoint`; None when no valid answer comes within `timeout_ms`."""
    request = messages.StatusRequest()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(endpoint)
        socket.send(messages.encode_request(request, 1))
        if not socket.poll(timeout_ms):
            return None
        _, _, reply = messages.decode_reply(socket.recv(), request)
    except ProtocolError:
        return None
    finally:
        socket.close()
        context.term()
    return reply.status if isinstance(reply, messages.StatusReply) else None
