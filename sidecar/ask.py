"""What the command line says to a running sidecar, each within a bounded time: asks for its status, or empties it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import zmq

from ..cext import lock_take
from ..schemas import messages
from ..schemas.errors import ProtocolError
from .errors import StartupError
from .keygen import read_key
from .page import printable


class Keys(NamedTuple):
    """What a client needs over TCP."""

    public: bytes
    secret: bytes
    server: bytes


class NoAnswer(Exception):
    """None came in time, or none that is a valid one."""


class Refused(StartupError):
    """It answered with an error, whose code is this."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the sidecar answers {code}: {printable(message)}")
        self.code = code


def load_keys(key: str, server_key: str) -> Keys:
    """From a client's .key_secret file and the sidecar's server.key, as hostkv keygen makes them."""
    public, secret = _read(key)
    server, _ = _read(server_key)
    if secret is None:
        raise StartupError(f"--key {key} holds no secret key; it must be the client's NAME.key_secret of hostkv keygen")
    return Keys(public, secret, server)


def ask_status(endpoint: str, timeout_ms: int, keys: Keys | None = None) -> dict[str, Any]:
    """The status map of the sidecar at `endpoint`. Raises NoAnswer."""
    with _connected(endpoint, keys) as socket:
        reply = _ask(socket, messages.StatusRequest(), timeout_ms)
    assert isinstance(reply, messages.StatusReply)
    return reply.status


def ask_clear(endpoint: str, members: str, base: str, timeout_ms: int) -> tuple[int, str]:
    """Empties the pool of the sidecar at `endpoint`, where it is the one at `base` ("": whichever): how many blocks that were, and which
    pool. Becomes a client for it, with a lock in the directory `members` that lives as long as this process, which should end soon. Raises
    NoAnswer."""
    lock = os.urandom(messages.ID_BYTES)
    try:
        lock_take(os.path.join(members, lock.hex()))
    except OSError as error:
        raise StartupError(f"cannot take a member lock in {members}: {error.strerror}") from None
    hello = messages.Hello(
        protocol=[messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR],
        client=os.urandom(messages.ID_BYTES),
        session=os.urandom(messages.ID_BYTES),
        lock=lock,
        pid=os.getpid(),
        name="hostkv clear",
    )
    with _connected(endpoint, None) as socket:
        greeting = _ask(socket, hello, timeout_ms)
        assert isinstance(greeting, messages.HelloReply)
        if base not in ("", greeting.pool_path):  # it was starting when its lock file still named the pool before
            raise StartupError(f"the sidecar at {endpoint} serves {greeting.pool_path}, not {base}; try again")
        cleared = _ask(socket, messages.Clear(messages.ALL_NAMESPACES), timeout_ms)
        assert isinstance(cleared, messages.CountReply)
        _ask(socket, messages.Bye(), timeout_ms)
    return cleared.count, greeting.pool_path


@contextmanager
def _connected(endpoint: str, keys: Keys | None) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys
        socket.connect(endpoint)
        yield socket
    except zmq.ZMQError as error:  # a host name that means nothing, and the like
        raise StartupError(f"cannot connect to {endpoint}: {error.strerror}") from None
    finally:
        socket.close()
        context.term()


def _ask(socket: zmq.Socket[bytes], request: messages.Request, timeout_ms: int) -> messages.Reply:
    """The reply, which is of the request's kind. An error is raised as Refused."""
    try:  # a connection that was refused for its key takes nothing
        if not socket.poll(timeout_ms, zmq.POLLOUT):
            raise NoAnswer
        socket.send(messages.encode_request(request, 1), zmq.NOBLOCK)
    except zmq.Again:
        raise NoAnswer from None
    if not socket.poll(timeout_ms):
        raise NoAnswer
    try:
        _, _, reply = messages.decode_reply(socket.recv(), request)
    except ProtocolError:
        raise NoAnswer from None
    if isinstance(reply, messages.ErrorReply):
        raise Refused(reply.error, reply.message)
    return reply


def _read(path: str) -> tuple[bytes, bytes | None]:
    try:
        return read_key(path)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read the key {path}: {error}") from None
