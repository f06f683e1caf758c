"""`hostkv fsck` and `hostkv clear`: what can be done with a pool, and with a disk tier below it, that no sidecar serves.

Both hold the locks that a sidecar holds (run directory, tables, directories of the tier), so none starts meanwhile. fsck repairs a private
copy of the tables, as the next sidecar would repair them in place, and tells what that dropped: without --fix it changes nothing. With
--fix it then does the same in place. A pool is removed only under the rule by which pool.py replaces one: nobody who may use it lives. On
disk, --fix erases records, of what is unsound and of what can never count again; no payload. Killed at any point, both can be run again.

Which directories a tier has tells the configuration, or else the ledger that a killed sidecar left in the run directory."""

from __future__ import annotations

import os
import resource
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import NamedTuple

from ..cext import Io, LayoutError, Mapping, Tables
from ..schemas import layout
from ..schemas.errors import ErrorCode
from ..schemas.namespace import SHARD_ALIGN
from . import apart, rundir
from . import pool as pools
from .ask import NoAnswer, Refused, ask_clear, ask_status
from .config import Config, socket_path
from .core import certainly_gone
from .errors import StartupError
from .log import Progress
from .page import size_text
from .tiers import check, ledger
from .tiers.directory import Directory, Quarantine

CLEAR_TIMEOUT_MS = 30_000  # millions of blocks take a while
STATUS_TIMEOUT_MS = 2000
ENTRIES_AT_ONCE = 1 << 16  # of the block table, read at a time
BATCH_BYTES = 16 << 20  # of payload, read in one call
MAX_THREADS = 8
FAULTS_SHOWN = 10
_UNCLEARED = (
    "a directory of the disk tier has not taken note of it (hostkv status says which, and why), so that a restart would serve what it "
    "holds; run hostkv clear again when it serves, or remove its files when the sidecar has ended"
)


class _Header(NamedTuple):
    """What is read of the header besides the geometry. `places`: where records lie: (offset, bytes of one, how many)."""

    version: int
    boot_id: bytes
    pool_epoch: bytes
    state: int
    places: dict[str, tuple[int, int, int]]


class _Block(NamedTuple):
    """A READY block, as its entry says."""

    namespace: int
    key: bytes
    generation: int
    page: int
    checksum: int


class _Found(NamedTuple):
    """What a repair leaves, and what was found on the way."""

    faults: list[str]  # nothing that a correct process, killed anywhere, leaves
    wrong: list[_Block]  # READY blocks whose bytes are not those that were saved


@dataclass
class _OnDisk:
    """What was found in slabs of a directory."""

    valid: int = 0
    valid_bytes: int = 0
    resized: int = 0
    ended: int = 0
    faults: list[str] = field(default_factory=list)
    useless: dict[int, list[int]] = field(default_factory=dict)  # by slab, slots whose records are unsound or can never count again
    slot_pages: dict[int, int] = field(default_factory=dict)  # of each slab


def fsck(config: Config, *, named: bool, fix: bool, quick: bool) -> int:
    """0 sound or repaired, 1 faults found, 2 a directory of the disk tier cannot be looked at. Raises StartupError where nothing can be.
    `named`: config names pool and tier; otherwise those are meant that the run directory's last sidecar had. `quick`: reads no payload."""
    run, base = _borrow(config, named)
    code = _fsck_pool(run, base, fix, quick)
    with suppress(OSError, ValueError):  # as many files as a sidecar has open
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return max([code, *(_apart(each, lambda directory: _fsck_directory(directory, fix, quick)) for each in _tier(config, named, run))])


def clear(config: Config, *, named: bool) -> int:
    """Forgets every block: asks the sidecar that runs on the endpoint, else removes the pool that a killed one left, and takes what is on
    disk off the lists there. 1: a sidecar runs and does not answer, or a disk does not; 2: a directory cannot be looked at."""
    pid = rundir.holder(config.endpoint)
    if pid is not None and _serves(config, named):
        return _ask_clear(config, named, pid)
    run, base = _borrow(config, named)
    fd = _open(base)
    if fd is None:
        print(f"hostkv: no pool at {base}, nothing to clear")
    else:
        with os.fdopen(fd, "rb"):
            _remove(run, base, fd, "it is to be cleared")
    return max([0, *(_apart(each, _empty) for each in _tier(config, named, run))])


def _fsck_pool(run: rundir.RunDirectory, base: str, fix: bool, quick: bool) -> int:
    fd = _open(base)
    if fd is None:
        print(f"hostkv: no pool at {base}, nothing to check")
        return 0
    with os.fdopen(fd, "rb"):
        why = useless(fd, base)
        if why:
            print(f"pool     {base}: no sidecar can ever serve it again: {why}")
            return _remove(run, base, fd, why) if fix else _advise(1, "hostkv fsck --fix removes it; so does the next hostkv serve")
        found = _examine(run, base, fd, quick)
        if not (found.faults or found.wrong):
            if fix:
                _repair(run, fd).close()
            print("result   sound")
            return 0
        if not fix:
            return _advise(1, "hostkv fsck --fix repairs it: what is unsound becomes a miss")
        tables = _repair(run, fd)
        for block in found.wrong:
            tables.discard(block.namespace, block.key, struct.pack("<Q", block.generation))
        left = tables.check()
        tables.close()
    for sentence in left[:FAULTS_SHOWN]:
        print(f"fault    {sentence}")
    if left:
        return _advise(1, f"repair is not enough; hostkv clear --pool-name {os.path.basename(base)} removes it. Please report this")
    print("result   repaired: what was unsound is a miss now")
    return 0


def useless(fd: int, base: str) -> str:
    """Why no sidecar can ever serve the pool at `base` again, of which `fd` is the tables file; "" where one may."""
    if not any(os.pread(fd, len(layout.MAGIC), 0)):
        return "its creation was never finished"
    try:
        geometry = Tables.geometry(fd)
    except LayoutError as error:
        return str(error)
    header = _header(fd)
    if header.boot_id != pools.boot_id():
        return "it is of another boot of this host, or of another host"
    if header.state != layout.POOL_LIVE:
        return "its creation was never finished" if header.state == layout.POOL_CREATING else "its removal was never finished"
    try:
        return pools.payload_fault(os.lstat(base), geometry["pool_bytes"])
    except FileNotFoundError:
        return "its payload file is gone"


def _ask_clear(config: Config, named: bool, pid: int) -> int:
    """`pid`: of the sidecar that runs."""
    run_path = os.path.dirname(socket_path(config.endpoint))
    wanted = os.path.join(config.pool_path, config.pool_name) if named else ""
    try:
        count, base = ask_clear(config.endpoint, os.path.join(run_path, "members"), wanted, CLEAR_TIMEOUT_MS)
    except Refused as refusal:
        if refusal.code != ErrorCode.TIER.value:
            raise
        return _advise(1, f"the pool is empty, but {_UNCLEARED}")
    except NoAnswer:
        with suppress(NoAnswer):
            ask_status(config.endpoint, STATUS_TIMEOUT_MS)
            return _advise(1, f"pid {pid or '?'} serves, but has not ended it within {CLEAR_TIMEOUT_MS // 1000} s: {_UNCLEARED}")
        return _advise(1, f"pid {pid or '?'} holds {run_path} and does not answer; kill -9 it, then hostkv clear removes its pool")
    print(f"hostkv: {count} blocks of {base} are forgotten; those in use go with their last user")
    return 0


def _tier(config: Config, named: bool, run: rundir.RunDirectory) -> list[Directory]:
    """The directories of the disk tier that is meant."""
    paths = [path for tier in config.tiers for path in tier.paths]
    try:
        paths = paths if named else ledger.paths(run.tiers_path)
    except ledger.Unreadable as fault:
        raise StartupError(f"{run.tiers_path} does not tell the directories of the disk tier ({fault}); name them by --config") from None
    return [Directory(path, config.endpoint) for path in paths]


def _apart(directory: Directory, what: Callable[[Directory], int]) -> int:
    """As `_at_rest`; 2 also where its disk hangs."""
    code = apart.run(lambda: _at_rest(directory, what))
    if code is None:
        print(f"disk     {directory.path}")
        return _advise(2, f"cannot be looked at: it {apart.UNANSWERED}")
    return code


def _at_rest(directory: Directory, what: Callable[[Directory], int]) -> int:
    """Takes a directory of a disk tier and does this with it; 2 where it cannot be taken or looked at, with the reason printed."""
    try:
        if os.path.lexists(directory.path):
            directory.peek()
        if not directory.id:
            print(f"disk     {directory.path}: nothing of a disk tier is there")
            return 0
        directory.look(False)
        return what(directory)
    except (StartupError, OSError) as error:
        reason = error if isinstance(error, StartupError) else f"{error.filename or directory.path}: {error.strerror}"
    except Quarantine as where:
        reason = f"a transfer of a sidecar that was killed is still under way on {where}; try again when it has ended"
    finally:
        directory.close()
    print(f"disk     {directory.path}")
    return _advise(2, f"cannot be looked at: {reason}")


def _borrow(config: Config, named: bool) -> tuple[rundir.RunDirectory, str]:
    """The run directory, locked, and the base path of the pool that is meant."""
    base = os.path.join(config.pool_path, config.pool_name)
    pid = rundir.holder(config.endpoint)
    if pid is not None and not _serves(config, named):
        # A run directory without members: of those that the pool has only that can be told whether their pids run.
        return rundir.RunDirectory("/nonexistent", "", -1, -1, "", ""), base
    if pid is not None:
        raise StartupError(
            f"pid {pid or '?'} holds the run directory of {config.endpoint}: only a pool that no sidecar serves can be looked at; "
            f"kill -9 {pid or 'PID'} ends that one and keeps its pool, hostkv stop removes it"
        )
    run = rundir.borrow(config.endpoint)
    return run, base if named or not os.path.isabs(run.earlier_pool) else run.earlier_pool


def _serves(config: Config, named: bool) -> bool:
    """Whether the sidecar that holds the run directory has the pool that is meant."""
    fd = os.open(os.path.join(os.path.dirname(socket_path(config.endpoint)), "lock"), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _, base, _ = rundir.read_lock_file(fd)
    finally:
        os.close(fd)
    return not named or base == os.path.join(config.pool_path, config.pool_name)


def _open(base: str) -> int | None:
    """The tables file, locked; None where there is no pool."""
    if not os.path.lexists(f"{base}.tables"):
        if os.path.lexists(base):
            raise StartupError(f"{base} is no pool of ours: it has no {base}.tables beside it; remove it or use another --pool-name")
        return None
    fd, found = pools.open_tables(base)
    if found:
        return fd
    os.unlink(f"{base}.tables")  # a sidecar of another run directory removed it between the look and the lock, and this one is ours
    os.close(fd)
    return None


def _advise(code: int, text: str) -> int:
    print(f"result   {text}")
    return code


def _remove(run: rundir.RunDirectory, base: str, fd: int, why: str) -> int:
    """Under the rule of pool.py. Raises StartupError, naming the pid, when somebody who may use it lives."""
    size = sum(os.lstat(path).st_blocks * 512 for path in (base, f"{base}.tables") if os.path.lexists(path))
    strange: list[int] = []
    with suppress(LayoutError):  # of useless tables nothing can be told; then only members of this run directory are waited for
        tables = _adopt(fd)
        strange = pools.strangers(tables, run)
        tables.close()
    pools.remove_left(run, base, why, Progress(), strange)
    if run.earlier_pool == base and run.lock_fd >= 0:
        run.write_lock_file()
    print(f"hostkv: pool {base} is removed, {size_text(size)} are free again")
    return 0


def _repair(run: rundir.RunDirectory, fd: int) -> Tables:
    """The tables in the file `fd`, adopted and repaired in place."""
    tables = _adopt(fd)
    tables.repair(_dead(tables, run))
    return tables


def _adopt(fd: int) -> Tables:
    geometry = Tables.geometry(fd)
    verify = bool(geometry.pop("verify"))
    return Tables.adopt(fd, boot_id=pools.boot_id(), instance_id=os.urandom(16), verify=verify, keeps_reused=False, **geometry)


def _dead(tables: Tables, run: rundir.RunDirectory) -> list[int]:
    return sorted(certainly_gone(tables.members(), run.look))


def _examine(run: rundir.RunDirectory, base: str, fd: int, quick: bool) -> _Found:
    """Prints what there is, and what a repair of a copy drops."""
    header, size = _header(fd), os.fstat(fd).st_size
    copy = os.memfd_create("hostkv-fsck", os.MFD_CLOEXEC)
    with os.fdopen(copy, "rb"):
        _copy(fd, copy, size)
        before = _counts(copy)
        tables = _adopt(copy)
        try:
            verify, members = tables.verify, tables.members()
            print(
                f"pool     {base}: {size_text(os.stat(base).st_size)} and {size_text(size)} of tables, layout {header.version}, "
                f"epoch {header.pool_epoch.hex()}, verify: {'load' if verify else 'off'}"
            )
            dead = _dead(tables, run)
            _print_members(run, members, dead, pools.strangers(tables, run))
            tables.repair(dead)
            after = tables.stats()
            faults = _print_repair(before, after)
            for sentence in tables.check():
                faults.append(f"after repair: {sentence}")
            wrong = _print_payload(base, tables, copy) if verify and not quick else []
        finally:
            tables.close()
    for sentence in faults[:FAULTS_SHOWN]:
        print(f"fault    {sentence}")
    return _Found(faults, wrong)


def _print_members(
    run: rundir.RunDirectory, members: list[tuple[int, bytes, bytes, bytes, int, int, int]], dead: list[int], strange: list[int]
) -> None:
    gone = [pid for index, _, _, _, _, pid, _ in members if index in dead]
    living = [pid for index, _, _, lock, _, pid, _ in members if index not in dead and run.lock_file_exists(lock)]
    words = [
        f"{len(pids)} {what} (pid {', '.join(map(str, pids[:FAULTS_SHOWN]))})"
        for what, pids in (("alive", living), ("dead", gone), ("of another run directory, which --endpoint must name", strange))
        if pids
    ]
    print(f"members  {'; '.join(words) or 'none'}")


def _print_repair(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What is unsound, as sentences."""
    names = (("ready", "ready"), ("writing", "being written"), ("pins", "pins"), ("shards_in_flight", "shards in flight"))
    print(f"blocks   {', '.join(f'{after[name]} {words}' for name, words in names)}")
    dropped = [f"{before[name] - after[name]} {words}" for name, words in names if before[name] > after[name]]
    if dropped:
        print(f"repair   drops what is unfinished, unsound, or of processes that are gone: {', '.join(dropped)}")
    bad = (("bad_blocks", "block entries"), ("bad_records", "records of shards, pins, members, namespaces or extents"))
    return [f"{after[name]} {what} that no sidecar writes: damaged from outside" for name, what in bad if after[name]]


def _print_payload(base: str, tables: Tables, copy: int) -> list[_Block]:
    """Compares every READY block with its checksum; the blocks that differ."""
    progress, started = Progress(), time.monotonic()
    shapes = {index: (shard_bytes, shards) for index, _, shard_bytes, shards, *_ in tables.namespaces()}
    total = tables.stats()["ready"]
    seen = size = 0
    wrong: list[_Block] = []
    fd = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        payload = Mapping(fd, os.fstat(fd).st_size)
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as workers:
            for blocks in _ready_blocks(copy):
                batches = list(_batches(blocks, shapes))
                for batch, differ in zip(batches, workers.map(lambda batch: _differ(payload, *batch), batches), strict=True):
                    wrong += differ
                    found, shard_bytes, shards = batch
                    seen, size = seen + len(found), size + len(found) * shards * shard_bytes
                    progress(f"compared {seen} of {total} blocks, {_speed(size, started)}", False)
        payload.close()
    finally:
        os.close(fd)
    print(f"payload  {seen} blocks compared with their checksums, {_speed(size, started)}; {len(wrong)} differ")
    for block in wrong[:FAULTS_SHOWN]:
        print(f"fault    block {block.key.hex()} at page {block.page}: its bytes are not those that were saved")
    return wrong


def _batches(blocks: list[_Block], shapes: dict[int, tuple[int, int]]) -> Iterator[tuple[list[_Block], int, int]]:
    """(blocks of one namespace, shard_bytes, shards), as many as are read in one call."""
    by_namespace: dict[int, list[_Block]] = {}
    for block in blocks:
        by_namespace.setdefault(block.namespace, []).append(block)
    for namespace, mine in by_namespace.items():
        shard_bytes, shards = shapes[namespace]
        at_once = max(1, BATCH_BYTES // (shard_bytes * shards))
        for first in range(0, len(mine), at_once):
            yield mine[first : first + at_once], shard_bytes, shards


def _differ(payload: Mapping, blocks: list[_Block], shard_bytes: int, shards: int) -> list[_Block]:
    step = -(-shard_bytes // SHARD_ALIGN) * SHARD_ALIGN
    places = array("Q", (block.page * layout.PAGE + k * step for block in blocks for k in range(shards)))
    sums = array("Q", payload.checksums(places, shard_bytes, array("Q", [*range(shards)] * len(blocks))))
    return [block for i, block in enumerate(blocks) if block.checksum != reduce(xor, sums[i * shards : (i + 1) * shards])]


def _empty(directory: Directory) -> int:
    """No record of it counts from then on."""
    namespaces = len(directory.namespaces)
    directory.forget(set(directory.namespaces))
    print(f"hostkv: disk {directory.path} is empty, {namespaces} namespaces are forgotten; its slabs stay, for what is saved next")
    return 0


def _open_as_found(directory: Directory) -> None:
    """A process that was killed closes its files one after the other, when it gets a processor, and has given back `lock` first."""
    end = time.monotonic() + rundir.FREED_WAIT_S
    while True:
        try:
            directory.open_as_found()
        except Quarantine:
            if time.monotonic() > end:
                raise
        else:
            return


def _fsck_directory(directory: Directory, fix: bool, quick: bool) -> int:
    _open_as_found(directory)
    slabs = range(len(directory.slab_fds))
    print(
        f"disk     {directory.path}: {sum(fd >= 0 for fd in directory.slab_fds)} slabs of {size_text(directory.slab_bytes)} on "
        f"{rundir.file_system(directory.path) or 'an unknown file system'}, {len(directory.namespaces)} namespaces"
    )
    found = _sort(directory, slabs)
    served, served_bytes = check.served(directory, found.valid)
    print(f"records  {served} blocks ({size_text(served_bytes)}) that a start serves")
    unused = (
        (found.valid - served, "more of the same blocks"),
        (found.resized, "of slots before their slab got larger or smaller ones"),
        (found.ended, "of namespaces that were cleared"),
    )
    if any(count for count, _ in unused):
        print(f"unused   {', '.join(f'{count} {what}' for count, what in unused if count)}: no fault, and written over in time")
    if not quick:
        differ, speed = _compare(directory, found)
        print(f"payload  {found.valid} blocks compared with their checksums, {speed}; {differ} differ")
    for sentence in found.faults[:FAULTS_SHOWN]:
        print(f"fault    {sentence}")
    if len(found.faults) > FAULTS_SHOWN:
        print(f"fault    and {len(found.faults) - FAULTS_SHOWN} more")
    faulty, erased = bool(found.faults), 0
    while fix and found.useless:
        for slab, slots in found.useless.items():
            directory.erase(slab, slots)
            erased += len(slots)
        # Without the records that told a slab's slot size, others of it may count again.
        found = _sort(directory, [slab for slab in found.useless if check.sort(directory, slab).slot_pages != found.slot_pages[slab]])
        if not quick:
            _compare(directory, found)
    if erased:
        print(f"repair   {erased} records are erased")
    if faulty and not fix:
        return _advise(1, "hostkv fsck --fix erases the records of what is unsound, which is a miss then")
    print(f"result   {'repaired: what was unsound is a miss now' if faulty else 'sound'}")
    return 0


def _sort(directory: Directory, slabs: Iterable[int]) -> _OnDisk:
    progress, found = Progress(), _OnDisk()
    for slab in slabs:
        each = check.sort(directory, slab)
        found.slot_pages[slab] = each.slot_pages
        found.faults += [f"record {slot} of {slab:05d}.records: {why}" for slot, why in each.wrong]
        if slots := [slot for slot, _ in each.wrong] + each.ended:
            found.useless[slab] = slots
        found.valid += len(each.valid)
        found.valid_bytes += sum(block.slot_bytes for block in each.valid)
        found.resized += len(each.resized)
        found.ended += len(each.ended)
        progress(f"looked at the records of {len(found.slot_pages)} of {len(directory.slab_fds)} slabs", False)
    return found


def _compare(directory: Directory, found: _OnDisk) -> tuple[int, str]:
    """Reads the payload behind the valid records and adds to `found` what is not as it was saved; how many, and how fast."""
    progress, started, read, before = Progress(), time.monotonic(), 0, len(found.faults)

    def seen(block_bytes: int) -> None:
        nonlocal read
        read += block_bytes
        progress(f"compared {size_text(read)} of {size_text(found.valid_bytes)} on {directory.path}, {_speed(read, started)}", False)

    for block, result in check.differing(directory, found.slot_pages, seen):
        why = "its bytes are not those that were saved" if result == Io.CORRUPT else f"cannot be read: {os.strerror(result)}"
        found.faults.append(f"block {block.key.hex()} in slot {block.slot} of {block.slab:05d}.slab: {why}")
        found.useless.setdefault(block.slab, []).append(block.slot)
    return len(found.faults) - before, _speed(read, started)


def _speed(size: int, started: float) -> str:
    return f"{size / max(time.monotonic() - started, 1e-9) / 1e9:.1f} GB/s"


def _header(fd: int) -> _Header:
    values = layout.HEADER.unpack(os.pread(fd, layout.HEADER.size, 0))
    boot_id, pool_epoch = values[11:13]
    blocks, shards, pins = values[17:20]
    blocks_at = values[23]
    shards_at, pins_at = values[25:27]
    state = values[37]
    places = {
        "blocks": (blocks_at, layout.BLOCK.size, blocks),
        "shards_in_flight": (shards_at, layout.SHARD.size, shards),
        "pins": (pins_at, layout.PIN.size, pins),
    }
    return _Header(values[1], boot_id, pool_epoch, state, places)


def _copy(source: int, target: int, size: int) -> None:
    try:
        os.ftruncate(target, size)
        done = 0
        while done < size:
            copied = os.sendfile(target, source, done, size - done)
            if copied == 0:
                raise StartupError("the tables became shorter while they were read")
            done += copied
    except OSError as error:
        raise StartupError(f"cannot copy the tables ({size_text(size)}) into memory: {error.strerror}") from None


def _pieces(fd: int, place: tuple[int, int, int]) -> Iterator[bytes]:
    offset, size, count = place
    for first in range(0, count, ENTRIES_AT_ONCE):
        yield os.pread(fd, min(ENTRIES_AT_ONCE, count - first) * size, offset + first * size)


def _counts(fd: int) -> dict[str, int]:
    """What the tables claim before they are repaired, whether it counts or not."""
    places = _header(fd).places
    counts = dict.fromkeys(("ready", "writing"), 0)
    for piece in _pieces(fd, places["blocks"]):
        states = piece[4 :: layout.BLOCK.size]
        counts["ready"] += states.count(layout.READY)
        counts["writing"] += states.count(layout.WRITING)
    for name in ("shards_in_flight", "pins"):
        counts[name] = sum(piece[:: places[name][1]].count(1) for piece in _pieces(fd, places[name]))
    return counts


def _ready_blocks(fd: int) -> Iterator[list[_Block]]:
    for piece in _pieces(fd, _header(fd).places["blocks"]):
        yield [
            _Block(namespace, key, generation, page, checksum)
            for _, state, flags, _, key, generation, page, namespace, checksum in layout.BLOCK.iter_unpack(piece)
            if state == layout.READY and not flags & layout.DOOMED
        ]
