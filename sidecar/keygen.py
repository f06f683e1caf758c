"""`hostkv keygen`: the CURVE keys of a sidecar and of its clients over TCP, in pyzmq's own file format.

    DIR/server.key, server.key_secret          the sidecar's; clients need the first
    DIR/clients/NAME.key, NAME.key_secret      one pair per client; the sidecar answers whose .key lies here, the client needs the other

A key is made whole beside its place and linked into it, so none is ever overwritten, read half-written, or readable by others."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Sequence

import zmq.auth

from .errors import StartupError

SERVER = "server"
CURVE_KEY_BYTES = 40  # Z85 of 32 bytes
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"


def keygen(directory: str, names: Sequence[str]) -> str:
    """Makes what is missing of the sidecar's keys and of those of the clients `names`. Returns what was done, and what to do next."""
    for name in names:
        if not re.fullmatch(_NAME, name):
            raise StartupError(f"--client is {name!r}, must be 1..100 letters, digits, '.', '_' or '-', not starting with '.' or '-'")
    directory = os.path.abspath(directory)
    clients = os.path.join(directory, "clients")
    try:
        _own(directory)
        _own(clients)
        lines = [_pair(directory, SERVER), *(_pair(clients, name) for name in dict.fromkeys(names))]
    except OSError as error:
        raise StartupError(f"cannot make keys in {directory}: {error.strerror}: {error.filename}") from None
    if not any(name.endswith(".key") for name in os.listdir(clients)):
        lines.append(f"No client has a key yet, and the sidecar wants one: hostkv keygen {directory} --client NAME")
    return "\n".join(
        [
            *lines,
            "The sidecar's configuration on this host (it reads new keys at its start and at SIGHUP):",
            f"  tcp: {{listen: HOST:PORT, keys: {directory}}}",
            f"To a client, over a private channel: {directory}/server.key and its own {clients}/NAME.key_secret. There:",
            "  hostkv status --endpoint tcp://HOST:PORT --key NAME.key_secret --server-key server.key",
        ]
    )


def read_key(path: str) -> tuple[bytes, bytes | None]:
    """Public and secret key (None: it holds only the public one) of a file. OSError, or ValueError where it is none of ours."""
    public, secret = zmq.auth.load_certificate(path)
    if any(len(key) != CURVE_KEY_BYTES for key in (public, secret or public)):
        raise ValueError(f"no CURVE key of {CURVE_KEY_BYTES} characters; hostkv keygen makes them")
    return public, secret


def _own(path: str) -> None:
    """A directory of ours that nobody else can write to, 0700 where it is made here."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise StartupError(f"{path} must be a directory of uid {os.geteuid()} that nobody else may write to; chmod 0700 it") from None
    else:
        os.chmod(path, 0o700)


def _pair(directory: str, name: str) -> str:
    public, secret = (os.path.join(directory, f"{name}.{kind}") for kind in ("key", "key_secret"))
    there = [path for path in (public, secret) if os.path.lexists(path)]
    if len(there) == 2:
        return f"kept {public} and {secret}: keys are never overwritten; remove both to have new ones"
    if there:
        raise StartupError(f"{there[0]} is there without its other half; remove it and run this again")
    before = os.umask(0o077)
    try:
        with tempfile.TemporaryDirectory(prefix=".new-", dir=directory) as place:
            for path, mode, target in zip(zmq.auth.create_certificates(place, name), (0o644, 0o600), (public, secret), strict=True):
                os.chmod(path, mode)
                os.link(path, target)
    finally:
        os.umask(before)
    return f"made {public} and {secret}"
