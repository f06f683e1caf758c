"""Asynchronous dump and load: two daemon threads per client take tasks in order, and one at a time copies (a queued copy). So the questions
of one task to the sidecar pass while the bytes of the other move, which is worth more than a tenth of the time; two tasks that are not
waited for may end in either order. The copies release the GIL, so the engine computes on.

The queue is bounded. A task that failed keeps its error for whoever waits; nothing is raised in the thread itself but a bug, which the
waiter gets as it is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

from .errors import QueueFull, SidecarUnavailable

MAX_QUEUED_TASKS = 256
THREADS = 2
IDLE_S = 1.0


class Task:
    """What dump(), load() and prefetch() return; give it to Store.wait() or Store.check()."""

    __slots__ = ("_done", "_error", "_result", "_run")

    def __init__(self, run: Callable[[Task], None] | None = None) -> None:
        self._run = run
        self._done = threading.Event()
        self._result: list[str] = []
        self._error: BaseException | None = None

    def succeed(self, result: list[str]) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout_s: float | None) -> list[str]:
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the task is not done after {timeout_s:g} s; it goes on, wait() again")
        if self._error is not None:
            raise self._error
        return self._result

    def execute(self) -> None:
        """Runs it. A task may be done before its last step (giving back pins) is."""
        run, self._run = self._run, None  # the buffers it holds are freed with it
        assert run is not None
        with self:
            run(self)

    def __enter__(self) -> Task:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Whatever ends the work, a bug of ours too, is for the waiter, who must not wait for ever."""
        if error is not None:
            self.fail(error)
        return True


class Worker:
    """The threads and their queue; the first thread calls `idle` about once in IDLE_S while it has nothing to do. close() lets them finish
    what is queued. SidecarUnavailable when there can be no more threads."""

    def __init__(self, name: str, idle: Callable[[], object]) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = idle
        self._threads: list[threading.Thread] = []
        for i in range(THREADS):
            thread = threading.Thread(target=self._loop, args=(None if self._threads else IDLE_S,), name=f"{name}-{i}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise SidecarUnavailable(f"no thread for dumps and loads: {error}") from error
            else:
                self._threads.append(thread)

    def submit(self, task: Task) -> None:
        if self._tasks.qsize() >= MAX_QUEUED_TASKS:
            raise QueueFull(f"{MAX_QUEUED_TASKS} tasks wait in this client, the limit; wait() for some of them or drop this one")
        self._tasks.put(task)

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _loop(self, idle_s: float | None) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=idle_s)
            except queue.Empty:
                self._idle()
                continue
            if task is None:
                return
            task.execute()
