"""A thread for what may block: the one of a directory of the disk tier.

It does one thing after the other, and hands its result, or what kept it from that, to the loop's thread, which alone decides what follows.
When it has had nothing to do for a while it makes durable what was written. A daemon: one that hangs in the kernel must not keep the
process from ending."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ..errors import StartupError
from .directory import Quarantine

IDLE_S = 5.0  # between two calls of `idle`
Outcome = OSError | StartupError | Quarantine  # what an errand may end with instead of a result


class Errands(Thread):
    """`post` takes what the loop's thread is to call, from this thread."""

    def __init__(self, name: str, post: Callable[[Callable[[], None]], None], idle: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._post, self._idle = post, idle
        self._queue: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = SimpleQueue()
        self.waiting = 0  # errands whose end the loop's thread has not seen
        self.busy = False  # with something that may block
        self._worked_ns = 0
        self.start()

    def do(self, what: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.waiting += 1
        self._queue.put((what, then))

    def end(self) -> None:
        """After what it has been told to do."""
        self._queue.put(None)

    def waits(self) -> bool:
        """Whether all that it did since this was last asked is to wait for a disk: who works uses the CPU, if only for a moment."""
        if not self.busy or not self.is_alive() or self.ident is None:
            return False
        before, self._worked_ns = self._worked_ns, time.clock_gettime_ns(time.pthread_getcpuclockid(self.ident))
        return self._worked_ns == before

    def run(self) -> None:
        fault = True
        try:
            while True:
                self.busy = False
                try:
                    errand = self._queue.get(timeout=IDLE_S)
                except Empty:
                    self.busy = True
                    self._idle()
                    continue
                if errand is None:
                    break
                what, then = errand
                self.busy = True
                result: Any
                try:
                    result = what()
                except (OSError, StartupError, Quarantine) as error:
                    result = error
                self._post(partial(self._done, then, result))
            fault = False
        finally:
            if fault:
                self._post(self._died)

    def _done(self, then: Callable[[Any], None], result: object) -> None:
        self.waiting -= 1
        then(result)

    def _died(self) -> None:
        raise RuntimeError(f"the thread {self.name} ended by a fault; its traceback is above")
