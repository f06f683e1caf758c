"""Does what may never end, such as asking a disk, in a process of its own, which is left behind where it hangs. A thread would not do: one
that the kernel keeps for a disk keeps its whole process, and whoever waits for that.

Nobody who works says so: a process that gets answers uses the CPU, if only for a moment, and one that waits for a disk uses none. Nor does
one that gets no processor, but that one can be told by its state."""

from __future__ import annotations

import ctypes
import io
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType

from .rundir import close_others
from .tiers.disk import HUNG_S

STEP_S = 0.5  # between two looks, and what one adds to a silence: when we were stopped ourselves nobody was silent
UNANSWERED = "does not answer; see whether the disk, or the server behind it, still works, and then again"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FAULT = 255
_MAX_BYTES = 1 << 18  # of one message, more than a socket takes


def run(what: Callable[[], int]) -> int | None:
    """What `what` returns, 0 to 254, done by a child whose prints come out here; None where it hangs. The child is told to end then, and
    does when it gets its answer. Nothing else that `what` does is seen here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    live = [stream.isatty() for stream in (sys.stdout, sys.stderr)]
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what Python raises while it forks is lost
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        raise
    if not child:
        _work(what, theirs, live, unblocked, parent)
    theirs.close()
    done = False
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        with ours:
            done = _follow(ours, child)
    finally:
        if not done:
            os.kill(child, signal.SIGINT)
    if not done:
        return None
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in range(_FAULT):
        raise RuntimeError(f"a process of ours ended by a fault ({code}), its traceback is above")
    return code


def _follow(ours: socket.socket, child: int) -> bool:
    """Prints what the child says, to its end; False where it hangs."""
    clock = ctypes.c_int()
    ctypes.CDLL(None).clock_getcpuclockid(child, ctypes.byref(clock))
    silent_s = 0.0
    worked_ns = -1
    while silent_s < HUNG_S:
        if select.select([ours], [], [], STEP_S)[0]:
            said = ours.recv(_MAX_BYTES)
            if not said:
                return True
            print(said[1:].decode(errors="surrogateescape"), end="", file=(sys.stdout, sys.stderr)[said[0]], flush=True)
            silent_s = 0.0
        else:
            before, worked_ns = worked_ns, time.clock_gettime_ns(clock.value)
            silent_s = silent_s + STEP_S if worked_ns == before and not _is_runnable(child) else 0.0
    return False


def _is_runnable(child: int) -> bool:
    """Whether a thread of it runs, or waits for a processor."""
    for task in os.listdir(f"/proc/{child}/task"):
        with suppress(OSError), open(f"/proc/{child}/task/{task}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "R":
                return True
    return False


class _Said(io.TextIOBase):
    """A stream of the child."""

    def __init__(self, to: socket.socket, number: int, live: bool) -> None:
        self._to, self._number, self._live = to, number, live

    def write(self, text: str) -> int:
        self._to.send(bytes([self._number]) + text.encode(errors="surrogateescape"))
        return len(text)

    def isatty(self) -> bool:
        return self._live


def _work(what: Callable[[], int], theirs: socket.socket, live: list[bool], unblocked: Iterable[int], parent: int) -> None:
    """The child. What it has open it has for as long as it hangs: so not the locks of its parent, and no pipe whose end others wait for."""
    code = _FAULT
    try:
        signal.signal(signal.SIGINT, _end)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != parent:  # it was killed before we asked to be told
            return
        close_others(theirs.fileno())
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        sys.stdout, sys.stderr = (_Said(theirs, number, each) for number, each in enumerate(live))
        code = what()
    except KeyboardInterrupt:
        pass
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
