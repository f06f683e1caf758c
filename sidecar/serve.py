"""`hostkv serve`: puts the parts together, in the order that makes each start-up error harmless, and takes them apart."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from contextlib import ExitStack

import zmq

from ..cext import Index, cpu_features, restart_on_abort
from ..schemas.messages import ID_BYTES
from . import pool as pools
from . import rundir
from .attach import Attach
from .config import Config
from .core import Core, Facts
from .errors import StartupError
from .limits import Limits, set_file_limit
from .log import Progress, event, setup
from .loop import Loop, Stop, bind, move
from .tiers.disk import FAILED, HUNG_S, STEP_S, Disk, descriptors
from .tiers.ledger import Ledger


def serve(config: Config, version: str, command: list[str]) -> bool:
    """Serves until SIGTERM or SIGINT, then removes pool and socket; until SIGHUP, then leaves them to a successor, which is to be started:
    True. `command` starts one where ZeroMQ ends this process. Raises StartupError before the ready line."""
    setup(config.log_level, config.log_format)
    stop = Stop()
    files = set_file_limit(pools.MAX_MEMBERS, sum(descriptors(len(tier.paths)) for tier in config.tiers))
    run = rundir.take(config.endpoint, config.group_id)
    rundir.check_locks(run.path)
    instance_id = os.urandom(ID_BYTES)
    started_ns = time.monotonic_ns()
    pool = pools.take(config, run, instance_id, Progress(lambda: _end_early(stop)))
    tables = pool.tables
    sizes = pools.capacity(config)
    facts = Facts(
        version=version,
        instance_id=instance_id,
        pid=os.getpid(),
        endpoint=config.endpoint,
        pool_name=config.pool_name,
        pool_path=pool.pool_path,
        tables_path=pool.tables_path,
        tables_bytes=pool.tables_bytes,
        verify=config.verify,
        eviction=config.eviction,
        started_ns=started_ns,
        **sizes,
    )
    attach = Attach()
    tier = None
    try:
        tier = _open_tier(config, run, pool)
        ledger = Ledger(run.tiers_path, pools.boot_id()) if tier is None else tier.ledger
        if tier is None:
            ledger.watch(set())
        core = Core(tables, facts, run.look, attach.exited, pool.adopted, tier, ledger.quiet)
    except StartupError:
        if tier is not None:
            tier.close()
        if not pool.adopted:
            pool.remove()
        raise
    if pool.why_new:
        event(logging.WARNING, "earlier pool replaced", pool=pool.pool_path, reason=pool.why_new)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    ready = {
        "endpoint": config.endpoint,
        "pool": pool.pool_path,
        "instance": instance_id.hex(),
        "adopted": core.adopted_blocks,
    }
    started = False
    with ExitStack() as ends:
        ends.callback(context.term)
        try:
            attach.listen(run)
            limits = Limits(files)
            # The rest runs while others may already connect, and take every descriptor.
            restart_on_abort(b"".join(os.fsencode(word) + b"\0" for word in command))
            socket = bind(context, run)
            ends.callback(socket.close)
            if config.tcp_listen:
                from .tcp import listen

                ends.callback(listen(context, socket, config.tcp_listen, config.tcp_keys))
            tables.heartbeat(time.monotonic_ns())
            event(logging.INFO, "ready", adopted=core.adopted_blocks, size=config.pool_bytes, cpu=",".join(cpu_features()))
            _say_ready(ready, pool.adopted)
            started = True
        finally:  # a pool that was made for nothing is not left behind; one that was there is
            if not started:
                signal.signal(signal.SIGABRT, signal.SIG_DFL)
                if tier is not None:
                    tier.close()
                if not pool.adopted:
                    pool.remove()
        ends.callback(_disarm, stop)  # before the sockets close
        Loop(core, tables, run, attach, socket, limits, stop, tier).run()  # after a fault of ours the pool stays, for the next start
    if tier is not None:
        if not stop.restart:
            _flush(core, tier, stop)
        if not stop.restart or not core.moving():  # what a disk does not answer would only be waited for again
            tier.close()
    if stop.restarting():
        event(logging.INFO, "restarting", pool=pool.pool_path)
        return True
    pool.remove()
    run.remove_files()
    run.write_lock_file()
    event(logging.INFO, "stopped", pool=pool.pool_path)
    os.close(run.lock_fd)  # nothing of ours is left, but a thread that waits for a disk keeps what is open
    return False


def _open_tier(config: Config, run: rundir.RunDirectory, pool: pools.Pool) -> Disk | None:
    if not config.tiers:
        pools.make_index(pool.pool_path, 0, run)
        return None
    (wanted,) = config.tiers
    index_fd = pools.make_index(pool.pool_path, Index.bytes_needed(wanted.max_blocks), run)
    pool_fd = os.open(pool.pool_path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return Disk(
            wanted.paths,
            wanted.size_bytes,
            wanted.max_blocks,
            engine=wanted.engine,
            pool_fd=pool_fd,
            pool_bytes=config.pool_bytes,
            index_fd=index_fd,
            endpoint=config.endpoint,
            ledger_path=run.tiers_path,
            boot_id=pools.boot_id(),
        )
    finally:
        os.close(pool_fd)
        os.close(index_fd)


def _flush(core: Core, tier: Disk, stop: Stop) -> None:
    """At the end of the pool: writes to disk what only the pool has. As long as a disk answers; a second signal ends it."""
    core.tables.set_removed()  # everybody sees misses from now on
    core.end_members()
    total = left = core.tables.stats()["dirty"]
    progress = Progress(lambda: None)
    stop.again = False
    answers, looked_s, silent_s = _answers(tier), time.monotonic(), 0.0
    while not stop.again:
        move(core, tier)
        now, before, answers = time.monotonic(), answers, _answers(tier)
        silent_s = silent_s + min(now - looked_s, STEP_S) if answers == before else 0.0
        looked_s = now
        left = core.tables.stats()["dirty"]
        if silent_s > HUNG_S or (not core.moving() and (not left or not _may_take(tier))):
            break
        progress(f"writing to disk what only the pool has: {total - left} of {total} blocks", False)
        select.select([tier], [], [], 0.05)
    if left:
        event(logging.WARNING, "stopped before all blocks were on disk", lost=left, written=total - left)


def _may_take(tier: Disk) -> bool:
    """Whether writes have a place, or will where a directory is about to serve."""
    return any(each["state"] != FAILED for each in tier.status()["directories"])


def _answers(tier: Disk) -> list[int]:
    """What changes with each."""
    names = ("reads", "writes", "corrupt", "errors", "slabs", "slabs_recovered")
    return [each[name] for each in tier.status()["directories"] for name in names]


def _end_early(stop: Stop) -> None:
    if stop.requested and not stop.restart:  # who wants it anew gets that, as soon as it is ready
        raise StartupError("stopped by a signal before it was ready")


def _disarm(stop: Stop) -> None:
    """An abort of ZeroMQ while it stops is no restart. While it restarts it is just that, and as likely as anything that led to it."""
    if not stop.restarting():
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def _say_ready(ready: dict[str, object], adopted: bool) -> None:
    """The line on stdout. Whoever reads that may have closed it after the line of an earlier start; the blocks are still worth serving."""
    try:
        print("hostkv ready", *(f"{key}={value}" for key, value in ready.items()), flush=True)
    except OSError as error:
        if not adopted and not isinstance(error, BrokenPipeError):
            raise
        event(logging.WARNING, "stdout is closed, nothing more is said there", reason=error.strerror)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())  # or what could not be written would fail again at the end
        os.close(nowhere)
