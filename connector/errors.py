"""What the client raises, by fault: bad input is ValueError, TypeError or RuntimeError; the environment's faults are here.

An engine connector needs two of them: SidecarUnavailable (go on uncached) and nothing else, since acquire answers misses. Users of the
nine-method contract meet LoadError and DumpError in wait().
"""

from __future__ import annotations

import errno


class HostKVError(Exception):
    """Base of all that HostKV raises for reasons outside the calling code."""


class SidecarUnavailable(HostKVError):
    """Nobody serves now: absent, hung, restarting or too new. Nothing was stored; the client reconnects by itself at a later call."""


class SidecarRefused(SidecarUnavailable):
    """The sidecar answered with an error; `code` is one of schemas.errors.ErrorCode, or a newer sidecar's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class QueueFull(HostKVError):
    """Too many tasks wait in this client; wait() for some, or drop the save."""


class TaskError(HostKVError):
    """Part of a task failed. `failed`: its ids as they were given, one entry per failed pair, in order."""

    def __init__(self, message: str, failed: list[bytes]) -> None:
        super().__init__(message)
        self.failed = failed


class DumpError(TaskError):
    """These pairs were not stored; everything else of the task is."""


class LoadError(TaskError):
    """These blocks were not loaded and the bytes at their destination are undefined; everything else of the task is loaded."""


def hint(error: OSError, otherwise: str) -> str:
    """What to do about it."""
    return "raise ulimit -n" if error.errno in (errno.EMFILE, errno.ENFILE) else otherwise
