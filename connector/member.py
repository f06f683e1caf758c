"""The member lock of this process: how the sidecar's kernel knows that a process which may touch the pool is certainly gone.

One lock file per (process, run directory), whatever the number of clients, taken at the first connection and held until the process
ends: closing any descriptor of a file drops the POSIX locks on it, so nothing here ever opens one again. A fork's child owns no lock
of its parent's and takes its own. The names are random and never reused.
"""

from __future__ import annotations

import os
import secrets
import threading

from ..cext import lock_take
from .errors import SidecarUnavailable, hint

MAX_LOCKS = 16  # of one process in one run directory, each with a descriptor and a thread for good; where none is seen more do not help

_names: dict[tuple[int, str], bytes] = {}
_taken: dict[tuple[int, str], int] = {}
_guard = threading.Lock()


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()  # another thread of the parent may have held the old one


os.register_at_fork(after_in_child=_after_fork)


def lock_name(run_directory: str, lost: bytes = b"") -> bytes:
    """16 bytes that name this process's lock file in `run_directory`; takes the lock at the first call. `lost`: a name that the sidecar
    cannot see (NO_LOCK), to be replaced unless another thread has done so, or too many were. SidecarUnavailable: it cannot be taken."""
    where = (os.getpid(), run_directory)
    with _guard:
        name = _names.get(where)
        if name is None or (name == lost and _taken[where] < MAX_LOCKS):
            name = secrets.token_bytes(16)
            path = os.path.join(run_directory, "members", name.hex())
            try:
                lock_take(path)
            except OSError as error:
                raise SidecarUnavailable(
                    f"cannot take the member lock {path}: {error.strerror}; "
                    + hint(error, "the run directory must be shared with the sidecar and writable")
                ) from error
            _names[where] = name
            _taken[where] = _taken.get(where, 0) + 1
        return name
