"""The ledger: in which directories this sidecar and those before it may have I/O in flight, in a file of the run directory. It also names
all directories that the last one was given, whatever became of them, for the fsck and the clear that come after a kill.

I/O that the kernel has begun outlives a killed process, and may still write into slots of the pool; it keeps the description of the slab
open, and with it the slab's flock. So a directory is in the ledger before its first job, and a later sidecar uses the slots that were in
flight only after it has found each slab there free. What is not there, or is another directory by now, cannot be told, and is not quiet
until the host starts anew, which ends all I/O."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import NamedTuple

from ..log import event
from .directory import is_quiet

LOOK_S = 0.25  # between two looks at a directory
_NEVER = 1 << 30  # more slabs than any directory has


class Entry(NamedTuple):
    """`slabs`: so many must be there, and free."""

    path: str
    id: str
    slabs: int


class Unreadable(Exception):
    """It says nothing; the message tells why."""


def entries(path: str, boot_id: bytes) -> set[Entry]:
    """Where the ledger says that I/O of this boot may be in flight; nothing where there is none. Raises Unreadable."""
    boot, directories, _ = _read(path)
    return directories if boot == boot_id.hex() else set()


def paths(path: str) -> list[str]:
    """The directories of the last sidecar's tier, of whichever boot. Raises Unreadable."""
    return _read(path)[2]


def _read(path: str) -> tuple[str, set[Entry], list[str]]:
    try:
        with open(path, "rb") as file:
            tree = json.loads(file.read())
        directories = {Entry(str(each["path"]), str(each["id"]), int(each["slabs"])) for each in tree["directories"]}
        named = tree.get("paths", [entry.path for entry in directories])  # earlier ledgers have no list of their own
        return tree["boot_id"], directories, sorted({str(each) for each in named})
    except FileNotFoundError:
        return "", set(), []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


class Ledger:
    """`path` of the file, in a run directory that we hold; `boot_id`: the kernel's."""

    def __init__(self, path: str, boot_id: bytes) -> None:
        self._path, self._boot_id = path, boot_id.hex()
        self._paths: list[str] = []  # of the last start that was not refused
        self._earlier: set[Entry] = set()  # the watching threads take out of it what is quiet; so it is copied before it is gone through
        self._ended = False
        try:
            self._earlier, self._paths = entries(path, boot_id), paths(path)
        except Unreadable as error:
            self._earlier.add(Entry(path, "", _NEVER))  # the next sidecar cannot tell, either
            event(logging.ERROR, "pool slots in flight before stay unused until the host starts anew", file=path, reason=str(error))

    def quiet(self) -> bool:
        """Whether certainly no I/O of an earlier sidecar is under way."""
        return not self._earlier

    def not_quiet(self) -> list[str]:
        """The directories where it may be."""
        return sorted({earlier.path for earlier in list(self._earlier)})

    def watch(self, ours: set[str]) -> None:
        """Looks from now on at the directories that are not `ours` (ids), each in a thread of its own, for a disk may hang."""
        for earlier in list(self._earlier):
            if earlier.id not in ours and earlier.slabs != _NEVER:
                Thread(target=self._watch, args=(earlier,), name=f"disk before {earlier.path}", daemon=True).start()

    def heard_from(self, path: str, directory_id: str, found: frozenset[int]) -> None:
        """We have these slabs of this directory to ourselves, and no others were there."""
        for earlier in [each for each in list(self._earlier) if each.id == directory_id]:
            self._earlier.discard(earlier)
            if not found.issuperset(range(earlier.slabs)):
                self._earlier.add(earlier._replace(slabs=_NEVER))
                event(logging.ERROR, "slabs are gone, pool slots in flight before stay unused until the host starts anew", directory=path)

    def name(self, paths: list[str], accepted: bool) -> None:
        """The directories of our tier, before the first job. Not yet `accepted`: the start may be refused, and then those of the one before
        are meant. A file that cannot be written is told by `write`, when the first of them opens."""
        named = paths if accepted else self._paths + paths
        self._paths = paths if accepted else self._paths
        with suppress(OSError):
            self._write((), named)

    def write(self, ours: Iterable[Entry]) -> None:
        """Raises OSError."""
        self._write(ours, self._paths)

    def end(self, clean: bool) -> None:
        """`clean`: nothing of ours is in flight. The pool may be left to another start, so the directories stay named."""
        self._ended = True
        if clean:
            with suppress(OSError):
                if self._earlier or self._paths:
                    self.write(())
                else:
                    os.unlink(self._path)

    def _write(self, ours: Iterable[Entry], paths: Iterable[str]) -> None:
        directories = [each._asdict() for each in sorted({*self._earlier, *ours})]
        with open(f"{self._path}.new", "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
            json.dump({"boot_id": self._boot_id, "directories": directories, "paths": sorted(set(paths))}, file)
        os.replace(f"{self._path}.new", self._path)

    def _watch(self, earlier: Entry) -> None:
        while not self._ended and earlier in self._earlier:
            if is_quiet(*earlier):
                self._earlier.discard(earlier)
                return
            time.sleep(LOOK_S)
