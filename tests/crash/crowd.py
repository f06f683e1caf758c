"""Engines in small: forked processes that save and load self-describing blocks through the real client, to be killed, stopped and replaced
at any moment by whoever directs them. What they count lies in memory that outlives them.

The content of every (key, shard) is a window of its own into one random run of bytes, so making it costs nothing and a byte of another
block, or of none, is seen. Whoever makes a Crowd must have no ZeroMQ context and no thread while it starts members: they are its forks."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from hostkv.cext import Mapping
from hostkv.connector import Client, DumpError, Handles, Layout, LoadError, SidecarUnavailable, Store

from tests.support import PATIENCE_S

POOL_SIZE = "8MiB"  # in eight extents: eight blocks of the first two layouts, sixteen of the third
LAYOUTS = [
    Layout(model=f"of {shards}", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=size, shards=shards)
    for shards, size in ((1, 1 << 20), (2, 1 << 19), (4, 1 << 17))
]
KEYS = 200
MOST_KEYS = 1 << 14
STEP = 61  # between two windows
_RUN = np.frombuffer(random.Random(1).randbytes(MOST_KEYS * 4 * STEP + (1 << 20)), np.uint8)
PINNED_S = 5.0  # a pin may be lost to silence after 10 s; a reader that took less must find its block
FIELDS = (
    *("step_ns", "answered_ns", "mark_ns"),  # when the last step began; see Crowd.mark
    *("saved", "present", "busy", "dropped", "lookups", "hits", "loaded", "missed", "late_good", "late_failed", "wrong", "clears"),
)


def block_id(key: int) -> bytes:
    return b"block %d" % key


def layout_of(key: int) -> Layout:
    return LAYOUTS[key % len(LAYOUTS)]


def content(key: int, shard: int) -> np.ndarray:
    first = (key * 4 + shard) * STEP
    return _RUN[first : first + layout_of(key).shard_bytes]


def difference(key: int, shard: int, found: np.ndarray) -> str:
    """Empty when these are the bytes of this shard, else where they are not, and whose they are."""
    wrong = np.flatnonzero(found != content(key, shard))
    if not len(wrong):
        return ""
    at = int(wrong[0])
    whose = [f"key {k} shard {s}" for k in range(MOST_KEYS) for s in range(layout_of(k).shards) if at + 16 <= layout_of(k).shard_bytes
             and np.array_equal(content(k, s)[at : at + 16], found[at : at + 16])]  # fmt: skip
    return f"key {key} shard {shard}: {len(wrong)} wrong bytes, the first at {at}, of {' or '.join(whose) or 'nobody'}"


class Wrong(Exception):
    """A byte, or an answer, that nobody may ever get."""


class Board:
    """One row of counters for each place in the crowd, and a flag that ends all work; shared with every fork."""

    def __init__(self, places: int) -> None:
        memory = mmap(-1, (places + 1) * len(FIELDS) * 8)
        self._numbers = np.frombuffer(memory, np.int64).reshape(places + 1, len(FIELDS))

    def row(self, place: int) -> Row:
        return Row(self._numbers[place])

    @property
    def ending(self) -> bool:
        return bool(self._numbers[-1][0])

    def end(self) -> None:
        self._numbers[-1][0] = 1

    @property
    def mark_ns(self) -> int:
        return int(self._numbers[-1][1])

    def mark(self, now_ns: int) -> None:
        self._numbers[-1][1] = now_ns

    def totals(self) -> dict[str, int]:
        return {name: int(self._numbers[:-1, FIELDS.index(name)].sum()) for name in FIELDS[3:]}


class Row:
    """One place's counters, by name."""

    def __init__(self, numbers: np.ndarray) -> None:
        object.__setattr__(self, "_numbers", numbers)

    def __getattr__(self, name: str) -> int:
        return int(self._numbers[FIELDS.index(name)])

    def __setattr__(self, name: str, value: int) -> None:
        self._numbers[FIELDS.index(name)] = value


class Slow:
    """A pool whose copies out take long to return, as for a process that loses its processor."""

    def __init__(self, pool: Mapping, seconds: float) -> None:
        self._pool, self._seconds, self.size = pool, seconds, pool.size

    def copy_out(self, *arguments: Any, **more: Any) -> Any:
        result = self._pool.copy_out(*arguments, **more)
        time.sleep(self._seconds)
        return result

    def checksums(self, *arguments: Any) -> bytes:
        return self._pool.checksums(*arguments)


class Work:
    """What one process does until it is ended."""

    def __init__(self, board: Board, place: int, writes: bool, seed: int, endpoint: str, keys: int) -> None:
        self._board, self._row = board, board.row(place)
        self._draw = random.Random(seed)
        self._step = self.write if writes else self.read
        self._all_keys = keys
        self._client = Client(
            endpoint,
            name=f"{'writer' if writes else 'reader'} {place}",
            copy_threads=self._draw.choice((1, 1, 2)),
            tier_wait_s=self._draw.choice((0.05, 1, 5)),
        )
        self._stores = [self._client.open(layout) for layout in LAYOUTS]
        if self._draw.random() < 0.25:  # what it holds is given back when its pidfd says that it has exited, or 5 s after its lock
            with suppress(SidecarUnavailable):
                self._client.attach_device()
        self._late: deque[tuple[list[int], Handles]] = deque(maxlen=8)

    def run(self) -> None:
        while not self._board.ending:
            self._row.step_ns = time.monotonic_ns()
            self._step()
            if self._client.counters.corrupt_blocks:
                raise Wrong("a block does not match its checksum, although nobody but writers writes")
        self._client.close()

    def _keys(self, most: int) -> list[int]:
        """Distinct keys of one layout, low ones more often, so that some are found."""
        kind = range(self._draw.randrange(len(LAYOUTS)), self._all_keys, len(LAYOUTS))
        return list({kind[int(len(kind) * self._draw.random() ** 4)] for _ in range(self._draw.randint(1, most))})

    def _answered(self) -> None:
        """The sidecar has done what this step asked."""
        mark = self._board.mark_ns
        if self._row.mark_ns != mark and self._row.step_ns >= mark:
            self._row.answered_ns = time.monotonic_ns()
            self._row.mark_ns = mark

    # ---- writers ------------------------------------------------------------------------------------------------------------------
    def write(self) -> None:
        if self._draw.random() < 0.002:
            self._clear()
        tasks = []
        for _ in range(self._draw.choice((1, 1, 2))):
            keys = self._keys(3)
            shards = list(range(layout_of(keys[0]).shards))
            self._draw.shuffle(shards)
            if self._draw.random() < 0.3:  # the others are left to others
                del shards[self._draw.randrange(len(shards)) + 1 :]
            pairs = [(key, shard) for shard in shards for key in keys]
            pieces = self._draw.choice((1, 4, 64))
            store = self._store(keys)
            ids, numbers = [block_id(key) for key, _ in pairs], [shard for _, shard in pairs]
            sources = [np.split(content(key, shard), pieces) for key, shard in pairs]
            if self._draw.random() < 0.7:
                tasks.append((store, store.dump(ids, numbers, sources)))
            else:
                self._count_words(self._write_now(store, ids, numbers, sources))
        for store, task in tasks:
            try:
                self._count_words(store.wait(task, PATIENCE_S))
            except DumpError as error:
                self._row.dropped += len(error.failed)

    def _write_now(self, store: Store, ids: list[bytes], shards: list[int], sources: list[list[np.ndarray]]) -> list[str]:
        words = {0: "committed", 1: "present", 2: "busy"}
        try:
            statuses = store.write(ids, shards, [[piece.ctypes.data for piece in row] for row in sources])
        except SidecarUnavailable:
            self._row.dropped += len(ids)
            return []
        self._row.dropped += sum(status not in words for status in statuses)
        return [words[status] for status in statuses if status in words]

    def _count_words(self, words: list[str]) -> None:
        self._row.saved += words.count("committed")
        self._row.present += words.count("present")
        self._row.busy += words.count("busy")
        if "committed" in words or "present" in words:
            self._answered()

    def _clear(self) -> None:
        with suppress(SidecarUnavailable):
            self._draw.choice(self._stores).clear()
            self._row.clears += 1

    # ---- readers ------------------------------------------------------------------------------------------------------------------
    def read(self) -> None:
        keys = self._keys(6)
        store = self._store(keys)
        ids = [block_id(key) for key in keys]
        self._row.lookups += len(keys)
        self._row.hits += sum(store.lookup(ids))
        how = self._draw.random()
        if how < 0.1:
            store.wait(store.prefetch(ids), PATIENCE_S)
        if how < 0.5:
            self._load(store, keys, ids)
        elif how < 0.8:
            self._read_pinned(store, keys, ids)
        elif self._late:
            self._read_late(*self._draw.choice(self._late))

    def _targets(self, keys: list[int]) -> tuple[list[int], list[np.ndarray]]:
        shards = [self._draw.randrange(layout_of(key).shards) for key in keys]
        return shards, [np.zeros(layout_of(key).shard_bytes, np.uint8) for key in keys]

    def _load(self, store: Store, keys: list[int], ids: list[bytes]) -> None:
        shards, targets = self._targets(keys)
        pieces = self._draw.choice((1, 8))
        task = store.load(ids, shards, [np.split(target, pieces) for target in targets])
        failed: set[bytes] = set()
        try:
            store.wait(task, PATIENCE_S)
        except LoadError as error:
            failed = set(error.failed)
        good = [i for i, name in enumerate(ids) if name not in failed]
        self._row.missed += len(failed)
        self._row.loaded += len(good)
        self._check(keys, shards, targets, good, "loaded")
        if good:
            self._answered()

    def _read_pinned(self, store: Store, keys: list[int], ids: list[bytes]) -> None:
        tag = self._client.new_tag()
        began = time.monotonic()
        handles = store.acquire(ids, tag, self._draw.choice((0, 0, 0.1, 2)))
        held = [i for i, status in enumerate(handles.statuses) if status == 0]
        try:
            time.sleep(self._draw.choice((0, 0, 0.001, 0.02)))
            good = self._read_and_check(store, keys, handles, "pinned")
            link = self._client.mapped()
            still_there = link is not None and link.view.alive() and link.hello.pool_epoch == handles.pool_epoch
            if time.monotonic() - began < PINNED_S and still_there and good != held:
                raise Wrong(f"{[keys[i] for i in held]} were pinned, {[keys[i] for i in good]} were read")
            self._row.loaded += len(good)
            self._row.missed += len(keys) - len(good)
            if held:
                self._answered()
                self._late.append((keys, handles))
        finally:
            store.release([tag])

    def _read_late(self, keys: list[int], handles: Handles) -> None:
        """With handles whose pins have ended: failures, or still the right bytes. Whoever takes its time between the copy and the check may
        meet its key again at the same page."""
        link = self._client.mapped()
        if link is None:  # the pool is gone, and no other one is there yet
            return
        pool = link.pool
        link.pool = Slow(pool, self._draw.choice((0, 0.01, 0.03)))  # type: ignore[assignment]
        try:
            good = self._read_and_check(self._store(keys), keys, handles, "late")
        finally:
            link.pool = pool
        self._row.late_good += len(good)
        self._row.late_failed += len(keys) - len(good)

    def _read_and_check(self, store: Store, keys: list[int], handles: Handles, how: str) -> list[int]:
        shards, targets = self._targets(keys)
        failed = store.read(handles, shards, [[target.ctypes.data] for target in targets])
        good = [i for i in range(len(keys)) if i not in failed]
        self._check(keys, shards, targets, good, how)
        return good

    def _check(self, keys: list[int], shards: list[int], targets: list[np.ndarray], good: list[int], how: str) -> None:
        for i in good:
            if why := difference(keys[i], shards[i], targets[i]):
                self._row.wrong += 1
                raise Wrong(f"{how}: {why}")

    def _store(self, keys: list[int]) -> Store:
        return self._stores[keys[0] % len(LAYOUTS)]


class Crowd:
    """Places 0..writers-1 write, the others read. Every process that ends without having been killed by us, or does nothing for long, is a
    failure: `tick` raises AssertionError with what it said. They use `keys` of MOST_KEYS keys."""

    def __init__(self, directory: Path, endpoint: str, seed: int, writers: int = 4, readers: int = 4, keys: int = KEYS) -> None:
        self.board = Board(writers + readers)
        self._keys = keys
        self.places = range(writers + readers)
        self._writers, self._endpoint, self._draw = writers, endpoint, random.Random(seed)
        self._errors = directory / "errors"
        self._errors.mkdir()
        self._pids: dict[int, int] = {}
        self._resume_s: dict[int, float] = {}  # place -> when it goes on
        self.kills = self.stops = 0
        for place in self.places:
            self.start(place)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for place in list(self._pids):
            self._end(place)

    def start(self, place: int) -> None:
        """A new process in this place."""
        seed = self._draw.getrandbits(64)
        self.board.row(place).step_ns = time.monotonic_ns()
        pid = os.fork()
        if not pid:
            logging.getLogger("hostkv").setLevel(logging.CRITICAL)  # that the sidecar is away is no news here
            code = 1
            try:
                Work(self.board, place, place < self._writers, seed, self._endpoint, self._keys).run()
                code = 0
            except BaseException:  # noqa: BLE001 - for tick()
                (self._errors / str(os.getpid())).write_text(traceback.format_exc())
            finally:
                os._exit(code)
        self._pids[place] = pid

    def replace(self, place: int) -> None:
        """SIGKILL, and another one in its place."""
        self._end(place)
        self.kills += 1
        self.start(place)

    def stop(self, place: int, seconds: float) -> None:
        """SIGSTOP; tick() lets it go on."""
        if place not in self._resume_s:
            os.kill(self._pids[place], signal.SIGSTOP)
            self._resume_s[place] = time.monotonic() + seconds
            self.stops += 1

    def stopped(self) -> set[int]:
        return set(self._resume_s)

    def tick(self) -> None:
        """Lets go on who has been stopped long enough; looks whether all others work."""
        now = time.monotonic()
        for place, resume_s in list(self._resume_s.items()):
            if now >= resume_s:
                self._continue(place)
        for place, pid in self._pids.items():
            if place not in self._resume_s:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del self._pids[place]
                    raise AssertionError(self._said(place, status))
                idle_s = (time.monotonic_ns() - self.board.row(place).step_ns) / 1e9
                assert idle_s < PATIENCE_S, f"the process in place {place} hangs: its last step began {idle_s:.0f} s ago"

    def finish(self) -> None:
        """Half of them are killed, the others end by themselves."""
        for place in list(self._resume_s):
            self._continue(place)
        for place in self.places[::2]:
            self._end(place)
            self.kills += 1
        self.board.end()
        end = time.monotonic() + PATIENCE_S
        for place, pid in list(self._pids.items()):
            while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
                assert time.monotonic() < end, f"the process in place {place} does not end"
                time.sleep(0.01)
            del self._pids[place]
            assert not ended[1], self._said(place, ended[1])

    def _said(self, place: int, status: int) -> str:
        files = sorted(self._errors.iterdir(), key=lambda path: path.stat().st_mtime)
        return f"the process in place {place} ended with {os.waitstatus_to_exitcode(status)}: {files[-1].read_text() if files else ''}"

    def _continue(self, place: int) -> None:
        del self._resume_s[place]
        self.board.row(place).step_ns = time.monotonic_ns()
        os.kill(self._pids[place], signal.SIGCONT)

    def _end(self, place: int) -> None:
        pid = self._pids.pop(place)
        self._resume_s.pop(place, None)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL and sys.exc_info()[0] is None:
            raise AssertionError(self._said(place, status))
