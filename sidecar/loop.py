"""The one thread around the core: messages, timers, signals. It takes no decisions; it moves bytes and asks the core.

It waits in a blocking receive, at most TICK_MS, and looks at the clock between any two messages, so neither many messages nor none can
starve the heartbeat or the look at member locks; one that frees millions of blocks can, for a moment. (A poll before each receive and a
receive that finds nothing after it would add half again to what a batch costs.) It stores nothing per request: ZeroMQ's queues are
bounded in whole messages, and a reply that does not fit is given up, with the connection, because a client that does not read must not
cost memory. What ZeroMQ does not bound (limits.py) ends in a restart on the same pool, which costs everybody a moment and nobody a
block."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from itertools import islice
from types import FrameType

import zmq

from ..cext import Tables
from ..schemas import messages
from .attach import Attach
from .core import Core
from .errors import StartupError
from .limits import Limits
from .log import event
from .pool import MAX_MEMBERS
from .rundir import RunDirectory, set_access
from .tiers import Tier
from .tiers.disk import STEP_S

TICK_MS = 50
GATHER_MS = 3
RESTART_WAIT_S = 5.0
HEARTBEAT_S, ATTACH_S, PROBE_S, SWEEP_S = 0.1, 0.05, 0.25, 10.0
SWEEP_FILES = 2 * MAX_MEMBERS  # looked at in one sweep, some 20 ms; members of the group can make any number
REQUESTS_QUEUED = 16  # per connection, of at most 2 MiB each; what a client sends beyond them waits at the client
REPLIES_QUEUED = 64  # per connection, of at most 0.5 MiB each (a full status); a client leaves no more than 33 requests unanswered
CONNECT_BACKLOG = 512
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # pyzmq's own flags are combined in Python, each time
MAX_FRAMES = 4096  # of one message, some 10 ms to read; ZeroMQ hands out its frames one by one, and a message of ours has one


class Stop:
    """SIGTERM, SIGINT and SIGHUP, as flags. One that comes while a restart is under way waits for the successor."""

    _NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested = False
        self.restart = False  # SIGHUP: the pool stays for the successor
        self.patient = False  # the restart may be put off
        self.again = False  # it was asked for before
        for number in self._NUMBERS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._NUMBERS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.again = self.requested
        if number == signal.SIGHUP:
            self.begin_anew(patient=True)
        else:
            self.requested, self.restart = True, False

    def begin_anew(self, patient: bool = False) -> None:
        """As at SIGHUP. Who was told to end does not: whoever told it waits for that."""
        self.restart = self.restart or not self.requested
        self.requested, self.patient = True, patient

    def put_off(self) -> None:
        """No restart for now, unless the end was asked for meanwhile."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._NUMBERS)
        if self.restart:
            self.requested = self.restart = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._NUMBERS)

    def restarting(self) -> bool:
        """Whether a successor is to be started. What comes from now on is for it: exec keeps what is blocked, and what came."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._NUMBERS)
        return self.restart


def bind(context: zmq.Context[zmq.Socket[bytes]], run: RunDirectory) -> zmq.Socket[bytes]:
    """The control socket, for us and the group. A socket file that is in the way is of a sidecar that ended: we hold the run directory."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RCVHWM, REQUESTS_QUEUED)
    socket.setsockopt(zmq.SNDHWM, REPLIES_QUEUED)
    socket.setsockopt(zmq.BACKLOG, CONNECT_BACKLOG)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, TICK_MS)
    try:
        before = os.umask(0o177)
        try:
            socket.bind(f"ipc://{run.socket_path}")
        finally:
            os.umask(before)
        set_access(run.socket_path, run.group_id, 0o600, 0o660)
    except StartupError:
        socket.close()
        raise
    except (zmq.ZMQError, OSError) as error:
        socket.close()
        raise StartupError(
            f"cannot bind ipc://{run.socket_path}: {error.strerror}; remove what is there or use another --endpoint"
        ) from None
    return socket


def move(core: Core, tier: Tier, transfers: bool = True) -> None:
    """Takes what the tier has done to the core, and what is to be done to the tier; with no more `transfers` where these are to end."""
    now_ns = time.monotonic_ns()
    if done := tier.reap():
        core.complete(done, now_ns)
    if jobs := core.work(now_ns, transfers):
        tier.submit(jobs)


class Loop:
    def __init__(
        self,
        core: Core,
        tables: Tables,
        run: RunDirectory,
        attach: Attach,
        socket: zmq.Socket[bytes],
        limits: Limits,
        stop: Stop,
        tier: Tier | None = None,
    ) -> None:
        self._core, self._tables, self._run, self._attach, self._socket = core, tables, run, attach, socket
        self._limits, self._stop, self._tier = limits, stop, tier
        self._waited_s = self._looked_s = 0.0  # how long a restart that was asked for has waited, and until when that was added up
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if tier is not None:
            self._poller.register(tier.fileno(), zmq.POLLIN)
        self._unswept = run.member_files()
        now = time.monotonic()
        self._timers: list[tuple[float, float, Callable[[], None]]] = [  # (next, every, what)
            (now, HEARTBEAT_S, self._heartbeat),
            (now, ATTACH_S, self._take_pidfds),  # before the look at locks: who said that it has a device and died is one that had
            (now, PROBE_S, self._probe),
            (now, SWEEP_S, self._sweep),
        ]

    def run(self) -> None:
        """Serves until a signal ends it. An exception is a fault of ours; the pool is then left as it is, for adoption."""
        due, skips = 0.0, False  # the rest of a message of too many frames, which comes before any other
        while not (self._stop.requested and self._is_over()):
            now = time.monotonic()
            if now >= due:
                due = self._run_timers(now)
            if self._tier is not None:
                move(self._core, self._tier, transfers=not self._stop.requested)
                self._send_late_replies()
                # A poll before each receive costs half a batch, so only while there is another thing to wait for.
                if self._core.moving() and not self._has_message():
                    continue
            try:
                connection = b"" if skips else self._socket.recv()
            except zmq.Again:
                continue
            frames, more = 0, True
            while more and frames <= MAX_FRAMES:
                frame = self._socket.recv(copy=False)  # which tells whether there is another one, for half of what getsockopt costs
                frames, more = frames + 1, frame.more
            skipped, skips = skips, more
            if skipped:
                continue
            if frames > MAX_FRAMES:
                self._give_up(f"a message of more than {MAX_FRAMES} frames")
            else:
                self._answer(connection, frames, frame.bytes)

    def _has_message(self) -> bool:
        """Waits for one, or for something that the tier has done; where nobody waits for that, one turn takes what ends within a moment."""
        return self._socket in dict(self._poller.poll(TICK_MS)) or (not self._core.waits() and self._socket.poll(GATHER_MS) != 0)

    def _is_over(self) -> bool:
        """Whether what was asked for is done now. A restart waits for transfers: where a disk does not answer, exec would not return before
        it does, and the pool is worth more than what the restart is for."""
        moving, tier = self._core.moving(), self._tier
        if not self._stop.restart or not (moving or (tier is not None and tier.busy())):
            return True
        now = time.monotonic()
        if self._looked_s:
            self._waited_s += min(now - self._looked_s, STEP_S)
        self._looked_s = now
        if self._waited_s < RESTART_WAIT_S:
            return False
        put_off = self._stop.patient and (moving or (tier is not None and tier.waits()))
        if put_off:
            self._stop.put_off()
            self._waited_s = self._looked_s = 0.0
            event(logging.WARNING, "restart put off, a disk does not answer; it serves on", waited_s=RESTART_WAIT_S)
        return not put_off

    def _answer(self, connection: bytes, frames: int, payload: bytes) -> None:
        """`payload`: the last of the frames."""
        reply: bytes | None
        if frames != 1:
            reply = self._core.refuse_frames(frames)
        else:
            reply = None
            try:
                reply = self._core.handle(connection, payload, time.monotonic_ns())
            finally:
                if reply is None:
                    self._socket.setsockopt(zmq.LINGER, 100)  # ms, enough for this one word
                    self._send(connection, self._core.internal_error(payload))
        self._send_late_replies()
        if reply:
            self._send(connection, reply)

    def _send_late_replies(self) -> None:
        for connection, reply in self._core.replies():
            self._send(connection, reply)

    def _send(self, connection: bytes, reply: bytes) -> None:
        try:
            self._socket.send(connection, _NOBLOCK_MORE)
            self._socket.send(reply, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            if self._core.forget(connection):
                event(logging.WARNING, "reply not sent, connection forgotten", connection=connection.hex(), reason=error.strerror)

    def _run_timers(self, now: float) -> float:
        """Runs what is due; returns when the next one is."""
        for i, (due, every, what) in enumerate(self._timers):
            if due <= now:
                what()
                self._timers[i] = (now + every, every, what)
        return min(due for due, _, _ in self._timers)

    def _heartbeat(self) -> None:
        self._tables.heartbeat(time.monotonic_ns())
        if why := self._limits.exceeded():
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        event(logging.ERROR, "limit exceeded, all connections are given up", reason=why)
        self._stop.begin_anew()

    def _take_pidfds(self) -> None:
        self._attach.serve(self._core.attach, self._core.clients())

    def _probe(self) -> None:
        for what, client, pid in self._core.watch(time.monotonic_ns()):
            event(logging.INFO, what, client=client, pid=pid)

    def _sweep(self) -> None:
        try:
            files = list(islice(self._unswept, SWEEP_FILES))
        except OSError:  # no descriptor is left to read the directory with
            files = []
        if len(files) < SWEEP_FILES:
            self._unswept = self._run.member_files()
        self._run.sweep(files, time.time(), self._core.locks())
