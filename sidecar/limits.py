"""What the sidecar lets others make it use: memory and descriptors. ZeroMQ bounds neither for us: it keeps the frames of a message that is
never finished, and accepts every connection. It cannot be told to close one either, so beyond a limit all of them go, by a restart on the
same pool. The limits are far over what every client that this sidecar may have can need at once.
"""

from __future__ import annotations

import os
import resource

from .core import MAX_CONNECTIONS
from .errors import StartupError

MEMORY_BYTES = 1 << 30  # over what it was when ready: 16384 connections of 40 KiB, or 30 whose queues are full
OWN_FILES = 64  # descriptors that are not of clients: the tables, locks while they are looked at, ZeroMQ's own
SPARE_FILES = 8  # kept free, to look at locks with
MIN_FILES = 48  # what starts, and serves a few; ZeroMQ ends a process that has not enough for itself
_PAGE_BYTES = resource.getpagesize()


def set_file_limit(members: int, tier_files: int = 0) -> int:
    """Sets how many descriptors this process may have to what `members` and tiers can need, or to what it may be; returns it. Raises
    StartupError."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MIN_FILES + tier_files:
        needs = f"at least {MIN_FILES + tier_files} files are needed{f' ({tier_files} for the tiers)' * bool(tier_files)}"
        raise StartupError(f"ulimit -n is {hard}, {needs} and one per connection; raise it")
    limit = min(members * (MAX_CONNECTIONS + 1) + OWN_FILES + tier_files, hard)  # one pidfd each; Linux has no unlimited number of files
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class Limits:
    """`files`: the limit of descriptors. Memory is counted from what is in use when this is made."""

    def __init__(self, files: int) -> None:
        self._files = files
        self._memory_bytes = MEMORY_BYTES
        self._memory_bytes += self._look()[0]

    def exceeded(self) -> str:
        """Which limit is, and what to do; empty while none is."""
        try:
            memory_bytes, lowest_free = self._look()
        except OSError:  # EMFILE
            memory_bytes, lowest_free = 0, self._files
        if lowest_free >= self._files - SPARE_FILES:
            return f"{lowest_free} files are open, ulimit -n is {self._files}; raise it, or find who opens so many connections"
        if memory_bytes > self._memory_bytes:
            return f"{memory_bytes} bytes of memory beside the pool; a client sends requests that it does not finish, or reads no replies"
        return ""

    @staticmethod
    def _look() -> tuple[int, int]:
        """Bytes of memory that are ours alone, and the lowest descriptor that is free: descriptors are given from the lowest."""
        fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, resident, shared, *_ = map(int, os.read(fd, 200).split())
        finally:
            os.close(fd)
        return (resident - shared) * _PAGE_BYTES, fd
