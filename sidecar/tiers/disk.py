"""The disk tier: one or several directories (directory.py), their health, and the jobs between them and the pool.

The loop's thread drives it: it places blocks (Index), gives jobs to the I/O engine (Io) and takes back what came of them. Each directory
has a thread of its own for whatever else may block (its Errands): opening, recovery, its list of namespaces, making writes durable. Those
threads never touch Index; they hand what they did to the loop's thread, which does the rest in `reap`.

    OPENING ──its files are open──> RECOVERING ──all records are in──> SERVING
      │  ^                            (reads only)                       │
      │  │ its pause is over          │                                  │
      v  │ and nothing is in flight   v                                  v
    FAILED <───── errors in a row, a read-only file system, silence ─────┘          QUARANTINE: as OPENING, until I/O of
                  (its blocks are misses from then on)                              an earlier sidecar has ended

A directory that hangs keeps its jobs; `room` counts those that answer. Before its first job it is in the ledger (ledger.py), which tells
our successor where I/O of ours may be in flight."""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import Semaphore, Thread
from typing import Any

from ...cext import Index, Io
from ...schemas.layout import PAGE, RECORD
from ..errors import StartupError
from ..log import PROGRESS_S, event
from . import CORRUPT, Done, Forget, Job, Read, Space, Write
from .directory import MAX_NAMESPACES, MAX_SLABS, MIN_BYTES, MIN_SLABS, Directory, Quarantine, default_slab_bytes, slabs_of
from .errands import Errands, Outcome
from .ledger import Entry, Ledger

QUEUE = 128  # jobs of one directory that are not done
WRITES_IN_IO = 32  # of one directory; the others wait here, and reads pass them
LOADS = 2  # slabs whose records have been read and are not yet in the index
START_S = 10.0  # that a start waits for its directories to answer; those that have not by then serve when they do
RETRY_S = 30.0  # after a failure
QUARANTINE_S = 0.25  # between two looks at I/O of an earlier sidecar
HUNG_S = 10.0  # without an answer to anything
STEP_S = 1.0  # what one reap adds to a silence at most: when we were stopped ourselves nobody was silent
ERRORS_IN_ROW = 8
CLOSE_S = 5.0  # that an end waits for transfers under way, and again for what is to be made durable
MAX_DIRECTORIES = 64
OPENING, QUARANTINE, RECOVERING, SERVING, FAILED = "opening", "quarantine", "recovering", "serving", "failed"
_READ, _WRITE = 0, 1  # cext.Io


def descriptors(directories: int) -> int:
    """How many files may be open for a tier of so many directories."""
    return directories * (2 * MAX_SLABS + 8) + 8


class _Place:
    """One directory as the loop's thread sees it; `directory` is its thread's alone."""

    def __init__(self, path: str, endpoint: str, post: Callable[[Callable[[], None]], None]) -> None:
        self.path = path
        self.directory = Directory(path, endpoint)
        self.errands = Errands(f"disk {path}", post, self._idle)
        self._post = post
        self.state = OPENING
        self.reason = ""
        self.retry_s = float("inf")  # when to try again, in time.monotonic()
        self.looked = False
        self.number = -1  # in the index; -1: it is not there
        self.wanted = 0  # slabs
        self.slab_fds: list[int] = []
        self.record_fds: list[int] = []
        self.loads = Semaphore(LOADS)
        self.epoch = 0  # of its files; what was read in an earlier one counts no more
        self.recovered = self.loaded = 0  # slabs, blocks
        self.said_s = 0.0
        self.numbers: dict[int, int] = {}  # namespace number there -> in the tier
        self.current: dict[int, int] = {}  # the other way round, for writes
        self.owed: set[int] = set()  # numbers there that were retired, but are still on its list
        self.retired: dict[bytes, int] = {}  # namespaces that were, before anybody knew its list -> in the tier
        self.all_retired: int | None = None  # every other one was, under this number
        self.reads: list[tuple[Any, ...]] = []  # ops that are still to be given to Io
        self.writes: list[tuple[Any, ...]] = []
        self.waiting: dict[int, list[Write]] = {}  # tier namespace without a number there yet
        self.busy = 0  # jobs that are not done
        self.flying = self.flying_writes = 0  # in Io
        self.silent_s = 0.0
        self.errors_in_row = 0
        self.dirty: dict[int, None] = {}  # slabs written to since they were made durable; single steps, from both threads
        self.on_flush_error: Callable[[OSError], None]
        self.counts = dict.fromkeys(
            ("reads", "read_bytes", "writes", "written_bytes", "errors", "corrupt", "failures", "dropped_blocks", "lost_bytes"), 0
        )

    @property
    def open(self) -> bool:
        return self.state in (RECOVERING, SERVING)

    # In its thread:

    def close(self) -> None:
        try:
            self._flush()
        except OSError as error:
            event(logging.ERROR, "disk directory not flushed, its newest blocks may be lost", directory=self.path, reason=_said(error))
        self.directory.close()

    def _flush(self) -> None:
        while True:
            try:
                slab, _ = self.dirty.popitem()
            except KeyError:
                return
            self.directory.flush(slab)

    def _idle(self) -> None:
        try:
            self._flush()
        except OSError as error:
            self._post(partial(self.on_flush_error, error))


class Disk:
    """`paths`: its directories, over which `size_bytes` are divided evenly; `max_blocks` in all of them. `engine`: which of Io's.
    `pool_fd`: the pool's payload, of `pool_bytes`. `index_fd`: an empty file of Index.bytes_needed(max_blocks), or None for private memory.
    `ledger_path`: a file of the run directory, which we hold. `boot_id`: the kernel's. Raises StartupError where a person has to decide; a
    disk that fails or hangs is no reason not to start."""

    def __init__(
        self,
        paths: Sequence[str],
        size_bytes: int,
        max_blocks: int,
        *,
        engine: str,
        pool_fd: int,
        pool_bytes: int,
        index_fd: int | None,
        endpoint: str,
        ledger_path: str,
        boot_id: bytes,
    ) -> None:
        self._size_bytes = size_bytes // len(paths)
        if self._size_bytes < MIN_BYTES:
            raise StartupError(f"the size of the disk tier is {size_bytes} bytes, must be at least {MIN_BYTES} for each of its directories")
        if len(paths) > MAX_DIRECTORIES:
            raise StartupError(f"the disk tier has {len(paths)} directories, the limit is {MAX_DIRECTORIES}")
        try:
            self._io = Io(pool_fd, pool_bytes, engine=engine)
        except (OSError, ValueError) as error:
            raise StartupError(f"the I/O engine {engine} does not run here: {error}; use another engine") from None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._event, select.EPOLLIN)
        self._poll.register(self._io.fileno(), select.EPOLLIN)
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = False
        self._done: list[Done] = []
        self._jobs: dict[int, tuple[_Place, int, int]] = {}  # token -> (place, slab or -1 for a read, bytes), of those in Io or about to be
        self._forgets: dict[int, list[int]] = {}  # token -> [directories that have not answered, result]
        self._spaces: OrderedDict[bytes, tuple[int, Space]] = OrderedDict()  # by fingerprint, the one asked for last at the end
        self._by_number: dict[int, Space] = {}
        # Numbers that were retired and may still be on a list -> their fingerprint; None: of whatever is on a list that nobody has read.
        self._owing: dict[int, bytes | None] = {}
        self._next_number = 1
        self.ledger = Ledger(ledger_path, boot_id)
        self._ticked_s = time.monotonic()
        self._places = [_Place(path, endpoint, self._post) for path in paths]
        self._by_index: dict[int, _Place] = {}
        self._closed = False
        self._slab_bytes = 0  # not decided yet
        try:
            self._start(max_blocks, index_fd)
        except StartupError:
            self.close()
            raise

    # ---- the contract ----

    @property
    def largest_bytes(self) -> int:
        return self._slab_bytes

    def number(self, space: Space) -> int:
        known = self._spaces.get(space.fingerprint)
        if known is not None:
            self._spaces.move_to_end(space.fingerprint)
            return known[0]
        if len(self._spaces) >= MAX_NAMESPACES:
            fingerprint, (oldest, _) = self._spaces.popitem(last=False)
            del self._by_number[oldest]
            self._owing[oldest] = fingerprint
            self.index.remove_namespace(oldest)
            self._forget(None, oldest)
        number = self._new_number()
        self._spaces[space.fingerprint] = number, space
        self._by_number[number] = space
        return number

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def retire(self, spaces: Iterable[Space] | None) -> list[int]:
        """Also numbers that were retired before and may still be on a list, and one of what is on a list that nobody has read yet."""
        everything = [*self._spaces, *self._owing.values(), None]
        numbers: list[int] = []
        unlooked = [place for place in self._places if not place.looked]
        for fingerprint in dict.fromkeys(everything if spaces is None else (space.fingerprint for space in spaces)):
            owing = [number for number, known in self._owing.items() if known == fingerprint]
            current = None if fingerprint is None else self._spaces.pop(fingerprint, None)
            if current is not None or (unlooked and not owing):
                number = self._new_number() if current is None else current[0]
                self._by_number.pop(number, None)
                self._owing[number] = fingerprint
                owing.append(number)
            for place in unlooked:
                if fingerprint is None:
                    place.all_retired = owing[-1]
                else:
                    place.retired[fingerprint] = owing[-1]
            numbers += owing
        return numbers

    def takes(self) -> bool:
        return any(place.state == SERVING for place in self._places)

    def room(self) -> int:
        return min((QUEUE - place.busy for place in self._places if place.open and place.busy < QUEUE), default=0)

    def submit(self, jobs: Sequence[Job]) -> None:
        touched = set()
        for job in jobs:
            if isinstance(job, Forget):
                self._forget(job.token, job.namespace)
                continue
            place = self._by_index.get(job.directory)
            if place is None or not place.open:
                self._end(job.token, errno.ENODEV)
            elif place.busy >= QUEUE:
                self._end(job.token, errno.EBUSY)
            else:
                place.busy += 1
                touched.add(place)
                if isinstance(job, Read):
                    self._take_read(place, job)
                else:
                    self._take_write(place, job)
        for place in touched:
            self._pump(place)

    def fileno(self) -> int:
        return self._poll.fileno()

    def reap(self) -> list[Done]:
        self._read_inbox()
        ended = self._io.reap()
        for token, result, checksum in ended:
            place, slab, size = self._jobs.pop(token)
            place.busy -= 1
            place.flying -= 1
            place.flying_writes -= slab >= 0
            place.silent_s = 0.0
            self._count(place, slab, size, result)
            self._done.append(Done(token, result, checksum))
        if ended:  # directories share the queue of a device: what ended in one is room for all, and first for who has least of it
            for place in sorted(self._places, key=lambda place: place.flying):
                self._pump(place)
        self._tick()
        done, self._done = self._done, []
        return done

    def status(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "type": "disk",
            "size_bytes": self._size_bytes * len(self._places),
            "slab_bytes": self._slab_bytes,
            "engine": self._io.engine,
            "engine_why": self._io.why,
            "quiet": self.quiet(),
            "not_quiet": self.ledger.not_quiet(),
            "index": self.index.stats(),
            "directories": [
                {
                    "path": place.path,
                    "state": place.state,
                    "reason": place.reason,
                    "retry_in_s": 0.0 if place.retry_s == float("inf") else max(0.0, place.retry_s - now),
                    "slabs": len(place.slab_fds),
                    "slabs_wanted": place.wanted,
                    "slabs_recovered": place.recovered,
                    "blocks_recovered": place.loaded,
                    "direct": place.directory.direct,
                    "namespaces": len(place.numbers),
                    "in_flight": place.busy,
                    "silent_s": place.silent_s,
                    **place.counts,
                    **(self.index.directory(place.number) if place.number >= 0 else {}),
                }
                for place in self._places
            ],
        }

    def quiet(self) -> bool:
        return self.ledger.quiet()

    def busy(self) -> bool:
        return any(place.errands.busy or place.errands.waiting for place in self._places)

    def waits(self) -> bool:
        return any(place.silent_s > 0 for place in self._places)

    def close(self) -> None:
        self._closed = True
        closer = Thread(target=self._io.close, name="disk close", daemon=True)
        closer.start()
        closer.join(CLOSE_S)
        for place in self._places:
            place.epoch += 1
            place.loads.release(LOADS)  # a recovery that waits sees that it is in vain
            if place.flying:
                place.errands.do(closer.join, lambda _: None)  # it uses the descriptors
            place.errands.do(place.close, lambda _: None)
            place.errands.end()
        end = time.monotonic() + CLOSE_S
        for place in self._places:
            place.errands.join(max(0.0, end - time.monotonic()))
            if place.errands.is_alive():
                event(logging.WARNING, "disk directory does not answer, left as it is", directory=place.path)
        clean = not any(place.errands.is_alive() for place in self._places)
        self.ledger.end(clean)
        if clean:
            self._poll.close()
            os.close(self._event)

    # ---- jobs ----

    def _take_read(self, place: _Place, job: Read) -> None:
        token, _, slab, slot, page, shards, shard_bytes, slot_bytes, checksum = job
        self._jobs[token] = place, -1, slot_bytes
        place.reads.append(
            (token, _READ, place.slab_fds[slab], slot * slot_bytes, page * PAGE, slot_bytes, shards, shard_bytes, checksum, -1, 0, b"")
        )

    def _take_write(self, place: _Place, job: Write) -> None:
        number = place.current.get(job.namespace)
        if number is not None:
            self._take_numbered(place, job, number)
        elif job.namespace in place.waiting:
            place.waiting[job.namespace].append(job)
        elif (space := self._by_number.get(job.namespace)) is None:
            place.busy -= 1
            self._end(job.token, errno.ESTALE)
        else:
            place.waiting[job.namespace] = [job]
            place.errands.do(partial(place.directory.add, space), partial(self._numbered, place, job.namespace))

    def _take_numbered(self, place: _Place, job: Write, number: int) -> None:
        token, _, slab, slot, sequence, page, key, _, shards, shard_bytes, slot_bytes, checksum = job
        self._jobs[token] = place, slab, slot_bytes
        record = RECORD.pack(key, 0, sequence, number, slot_bytes // PAGE, slab << 32 | slot)
        place.writes.append(
            (token, _WRITE, place.slab_fds[slab], slot * slot_bytes, page * PAGE, slot_bytes, shards, shard_bytes, checksum)
            + (place.record_fds[slab], slot * RECORD.size, record)
        )

    def _numbered(self, place: _Place, namespace: int, result: int | Outcome) -> None:
        """A namespace has got its number in a directory, or has not."""
        jobs = place.waiting.pop(namespace, [])
        if isinstance(result, int):
            place.numbers[result] = namespace
            if namespace in self._by_number:
                place.current[namespace] = result
                for job in jobs:
                    self._take_numbered(place, job, result)
                self._pump(place)
                return
            self._drop_numbers(place, {result}, lambda _: None)  # it was retired meanwhile
        elif place.open:
            self._error(place, result)
        place.busy -= len(jobs)
        for job in jobs:
            self._end(job.token, result.errno or errno.EIO if isinstance(result, OSError) else errno.ESTALE)
        self._pump(place)

    def _pump(self, place: _Place) -> None:
        """Gives to Io what it takes, reads first."""
        if place.reads:
            self._give(place, place.reads, len(place.reads))
        if place.writes and not place.reads:
            place.flying_writes += self._give(place, place.writes, WRITES_IN_IO - place.flying_writes)
        if place.state == SERVING:
            self.index.enable(place.number, place.busy < QUEUE)

    def _give(self, place: _Place, ops: list[tuple[Any, ...]], most: int) -> int:
        taken = self._io.submit(ops[:most])
        del ops[:taken]
        place.flying += taken
        return taken

    def _end(self, token: int, result: int) -> None:
        self._done.append(Done(token, result, 0))
        self._wake()

    def _forget(self, token: int | None, namespace: int) -> None:
        """Takes a namespace off the lists of all directories; those that nobody could look at yet owe it."""
        left, failed = 1, 0

        def forgotten(error: OSError | None) -> None:
            nonlocal left, failed
            left -= 1
            if error is not None:
                failed = error.errno or errno.EIO
            if left:
                return
            if not failed:
                self._owing.pop(namespace, None)
            if token is not None:
                self._end(token, failed)

        for place in self._places:
            numbers = {number for number, known in place.numbers.items() if known == namespace}
            place.current.pop(namespace, None)
            if numbers:
                left += 1
                self._drop_numbers(place, numbers, forgotten)
            elif not place.looked:
                failed = errno.ENODEV
        forgotten(None)

    def _drop_numbers(self, place: _Place, numbers: set[int], then: Callable[[OSError | None], None]) -> None:
        place.owed |= numbers

        def dropped(result: OSError | None) -> None:
            if result is None:
                place.owed -= numbers
                for number in numbers:
                    place.numbers.pop(number, None)
            elif place.open:
                self._error(place, result)
            then(result)

        place.errands.do(partial(place.directory.forget, numbers), dropped)

    # ---- health ----

    def _count(self, place: _Place, slab: int, size: int, result: int) -> None:
        counts = place.counts
        if result == 0:
            place.errors_in_row = 0
            if slab < 0:
                counts["reads"] += 1
                counts["read_bytes"] += size
            else:
                counts["writes"] += 1
                counts["written_bytes"] += size
                place.dirty[slab] = None
        elif result == CORRUPT:
            counts["corrupt"] += 1
        elif result != errno.ECANCELED:
            self._error(place, OSError(result, os.strerror(result)))

    def _error(self, place: _Place, error: Outcome) -> None:
        place.counts["errors"] += 1
        place.errors_in_row += 1
        read_only = isinstance(error, OSError) and error.errno == errno.EROFS
        if place.open and (read_only or place.errors_in_row >= ERRORS_IN_ROW):
            self._fail(place, f"{_said(error)}, {place.errors_in_row} errors in a row")

    def _fail(self, place: _Place, reason: str) -> None:
        """From now on its blocks are misses and nothing new goes there, until it is tried again."""
        blocks = 0
        if place.number >= 0:
            blocks = self.index.drop(place.number)
            del self._by_index[place.number]
        waiting = [job.token for jobs in place.waiting.values() for job in jobs]
        waiting += [op[0] for op in (*place.reads, *place.writes)]
        place.busy -= len(waiting)
        for token in waiting:
            self._jobs.pop(token, None)
            self._end(token, errno.ENODEV)
        place.waiting.clear()
        place.reads.clear()
        place.writes.clear()
        place.number, place.state, place.reason = -1, FAILED, reason
        place.epoch += 1
        place.retry_s = time.monotonic() + RETRY_S
        place.errors_in_row = 0
        place.counts["failures"] += 1
        place.counts["dropped_blocks"] += blocks
        event(logging.ERROR, "disk directory failed", directory=place.path, reason=reason, blocks=blocks, retry_s=RETRY_S)

    def _tick(self) -> None:
        now = time.monotonic()
        step = min(now - self._ticked_s, STEP_S)
        self._ticked_s = now
        for place in self._places:
            if place.errands.waits() or place.flying:
                place.silent_s += step
                if place.silent_s > HUNG_S and place.open:
                    self._fail(place, f"no answer for {HUNG_S:.0f} s")
            else:
                place.silent_s = 0.0
            if now >= place.retry_s and not place.flying and not place.errands.waiting and not self._closed:
                place.retry_s = float("inf")
                if place.state == FAILED:
                    place.dirty.clear()
                    place.slab_fds, place.record_fds = [], []
                    place.errands.do(partial(place.directory.look, False), partial(self._looked, place))
                elif place.state == QUARANTINE:
                    self._open(place)

    # ---- opening and recovery ----

    def _start(self, max_blocks: int, index_fd: int | None) -> None:
        """Looks at all directories, decides on the size of slabs, and begins to open them."""
        looks: dict[_Place, int | Outcome] = {}
        paths = [place.path for place in self._places]
        self.ledger.name(paths, accepted=False)
        for place in self._places:
            place.on_flush_error = partial(self._error, place)
            place.errands.do(partial(place.directory.look, True), partial(self._looked_first, looks, place))
        end = time.monotonic() + START_S
        while len(looks) < len(self._places) and (left := end - time.monotonic()) > 0:
            self._poll.poll(left)
            self._read_inbox()
        for result in looks.values():
            if isinstance(result, StartupError):
                raise result
        self.ledger.name(paths, accepted=True)
        fitting = [result for result in looks.values() if isinstance(result, int) and self._fits(result)]
        self._slab_bytes = max(fitting, key=fitting.count) if fitting else default_slab_bytes(self._size_bytes)
        self.index = Index(index_fd, max_blocks, self._slab_bytes)
        for place in self._places:
            if place in looks:
                self._looked(place, looks[place], late=False)
            else:
                place.reason = f"no answer for {START_S:.0f} s"
                event(logging.WARNING, "disk directory does not answer, started without it", directory=place.path)
        self.ledger.watch({place.directory.id for place in looks})

    def _looked_first(self, looks: dict[_Place, int | Outcome], place: _Place, result: int | Outcome) -> None:
        if self._slab_bytes:
            self._looked(place, result)
        else:
            looks[place] = result

    def _fits(self, slab_bytes: int) -> bool:
        return slab_bytes > 0 and MIN_SLABS <= slabs_of(self._size_bytes, slab_bytes) <= MAX_SLABS

    def _looked(self, place: _Place, result: int | Outcome, late: bool = True) -> None:
        if self._closed:
            return
        if not isinstance(result, int):
            self._fail(place, _said(result))
            return
        if late and result != self._slab_bytes and self._fits(result):  # it would have been asked
            self._fail(
                place, f"its slabs have {result} bytes, but {self._slab_bytes} was decided on without it; restart to keep what it has"
            )
            return
        place.looked = True
        if result not in (0, self._slab_bytes):
            event(
                logging.WARNING, "disk directory starts anew, what it cached is lost",
                directory=place.path, slab_bytes=self._slab_bytes, before=result,
            )  # fmt: skip
        else:
            self._learn(place, place.directory.namespaces)  # its thread has nothing to do
        self._open(place)

    def _learn(self, place: _Place, listed: dict[int, Space]) -> None:
        """What the list of a directory says."""
        for number, space in listed.items():
            retired = place.retired.get(space.fingerprint, place.all_retired)
            if retired is not None:
                place.numbers[number] = retired
                place.owed.add(number)
            elif number not in place.numbers:
                place.numbers[number] = self.number(space)
                place.current[place.numbers[number]] = number
        place.retired.clear()
        place.all_retired = None
        if place.owed:
            self._drop_numbers(place, set(place.owed), lambda _: None)

    def _open(self, place: _Place) -> None:
        place.state = OPENING
        place.wanted = slabs_of(self._size_bytes, self._slab_bytes)
        place.errands.do(partial(place.directory.open, self._slab_bytes, place.wanted), partial(self._opened, place))

    def _opened(self, place: _Place, result: Outcome | None) -> None:
        if self._closed:
            return
        directory = place.directory
        place.counts["lost_bytes"] = directory.lost_bytes
        if isinstance(result, Quarantine):
            if not place.reason:
                event(logging.WARNING, "disk directory in quarantine, I/O of an earlier sidecar is under way", file=result)
            place.state, place.reason = QUARANTINE, f"I/O of an earlier sidecar is under way on {result}"
            place.retry_s = time.monotonic() + QUARANTINE_S
            return
        if result is None and not directory.slab_fds:
            result = OSError(errno.ENOSPC, f"no room for a single slab of {self._slab_bytes} bytes; free some, or give the tier less")
        if result is None:
            place.slab_fds, place.record_fds = directory.slab_fds, directory.record_fds
            self.ledger.heard_from(place.path, directory.id, directory.found or frozenset())
            opened = [each for each in self._places if each.open or each is place or each.flying]
            try:
                self.ledger.write(Entry(each.path, each.directory.id, len(each.slab_fds)) for each in opened)
            except OSError as error:
                result = error
        if result is not None:
            self._fail(place, _said(result))
            return
        if len(place.slab_fds) < place.wanted:
            event(
                logging.WARNING, "disk directory has less room than it may take",
                directory=place.path, bytes=len(place.slab_fds) * self._slab_bytes, wanted=place.wanted * self._slab_bytes,
            )  # fmt: skip
        place.number = self.index.add_directory(len(place.slab_fds))
        self.index.enable(place.number, False)
        self._by_index[place.number] = place
        place.state, place.reason = RECOVERING, ""
        place.recovered = place.loaded = 0
        place.said_s = time.monotonic()
        place.silent_s = 0.0
        place.loads = Semaphore(LOADS)
        place.errands.do(partial(self._recover, place, place.epoch, place.loads), partial(self._recovered, place, place.epoch))

    def _recover(self, place: _Place, epoch: int, loads: Semaphore) -> None:
        """In the directory's thread."""
        for slab in range(len(place.directory.slab_fds)):
            loads.acquire()
            if place.epoch != epoch:
                return
            self._post(partial(self._load, place, epoch, slab, place.directory.records(slab)))

    def _load(self, place: _Place, epoch: int, slab: int, records: bytearray) -> None:
        place.loads.release()
        if place.epoch != epoch:
            return
        numbers = {number: (tier, self._by_number[tier].slot_bytes) for number, tier in place.numbers.items() if tier in self._by_number}
        place.loaded += self.index.load(place.number, slab, records, numbers)
        place.recovered += 1
        now = time.monotonic()
        if now - place.said_s > PROGRESS_S:
            place.said_s = now
            self._say_recovery("disk recovery", place)

    def _recovered(self, place: _Place, epoch: int, result: Outcome | None) -> None:
        if place.epoch != epoch:
            return
        if result is not None:
            self._fail(place, _said(result))
            return
        place.state = SERVING
        self._pump(place)
        self._say_recovery("disk directory serves", place)

    def _say_recovery(self, what: str, place: _Place) -> None:
        event(logging.INFO, what, directory=place.path, slabs=place.recovered, of=len(place.slab_fds), blocks=place.loaded)

    # ---- between the threads ----

    def _post(self, what: Callable[[], None]) -> None:
        self._inbox.append(what)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._event, 1)
        self._woken = True  # later, so that it is never False while the event is set and nobody is about to set it

    def _read_inbox(self) -> None:
        """At most a moment's worth: one slab's records can take some milliseconds."""
        if not self._woken:
            return
        self._woken = False
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for _ in range(len(self._inbox)):
            what = self._inbox.popleft()
            what()
            if isinstance(what, partial) and what.func == self._load and self._inbox:
                self._wake()
                return


def _said(error: Outcome) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
