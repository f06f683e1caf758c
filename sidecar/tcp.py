"""The control socket on TCP as well, for who has a key (`hostkv keygen`): CURVE both ways, and nothing without it.

The keys are pyzmq's certificate files: <tcp.keys>/server.key_secret is ours, <tcp.keys>/clients/*.key are those who may connect. Only this
module imports what the authenticator needs, a thread of its own; the Unix socket knows nothing of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import zmq
from zmq.auth import load_certificates
from zmq.auth.thread import ThreadAuthenticator

from .errors import StartupError
from .keygen import read_key

_DOMAIN = "hostkv"
_CLIENTS = "clients"


def listen(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], address: str, keys: str) -> Callable[[], None]:
    """Binds `socket`, which is bound to its Unix socket already and stays as it is there, to tcp://`address` too. Returns what ends the
    authenticator. Raises StartupError."""
    public, secret = check_keys(keys)
    clients = os.path.join(keys, _CLIENTS)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()  # before the bind, so that nobody is let in unasked
    try:
        authenticator.configure_curve(domain=_DOMAIN, location=clients)
        socket.setsockopt(zmq.IPV6, int(address.startswith("[")))
        socket.setsockopt(zmq.CURVE_SERVER, 1)  # these hold for binds that come after them
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the authenticator nobody gets in
        socket.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        authenticator.stop()
        raise StartupError(
            f"cannot bind tcp://{address} (tcp.listen): {error.strerror}; give an address or interface of this host, and a free port"
        ) from None
    return authenticator.stop


def check_keys(keys: str) -> tuple[bytes, bytes]:
    """Our public and secret key. Raises StartupError where they, or those of clients, are missing or not to be trusted."""
    pair = _server_key(os.path.join(keys, "server.key_secret"))
    _client_keys(os.path.join(keys, _CLIENTS))
    return pair


def _server_key(path: str) -> tuple[bytes, bytes]:
    advice = f"make the keys with: hostkv keygen {os.path.dirname(path)}"
    try:
        info = os.stat(path)
        if stat.S_IMODE(info.st_mode) & 0o077:
            raise StartupError(f"{path} has mode {stat.S_IMODE(info.st_mode):04o}, others may read it; chmod 0600 {path}")
        if info.st_uid not in (0, os.geteuid()):
            raise StartupError(f"{path} belongs to uid {info.st_uid}, who can read it; chown it to uid {os.geteuid()}")
        public, secret = read_key(path)
    except OSError as error:
        raise StartupError(f"cannot read {path} (tcp.keys): {error.strerror}; {advice}") from None
    except ValueError as error:
        raise StartupError(f"{path} is no key file: {error}; {advice}") from None
    if secret is None:
        raise StartupError(f"{path} holds no secret key; {advice}")
    return public, secret


def _client_keys(directory: str) -> None:
    advice = f"make one with: hostkv keygen {os.path.dirname(directory)} --client NAME"
    try:
        found = load_certificates(directory)
    except OSError:
        found = {}
    except ValueError as error:
        raise StartupError(f"{directory}: {error}; remove that file, or {advice}") from None
    if not found:
        raise StartupError(f"{directory} holds no client's key (*.key), so nobody could connect over tcp.listen; {advice}")
