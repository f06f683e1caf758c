"""The client: one member of one session, its connections, the mapped pool and tables, and whether the sidecar serves now.

Every call first looks whether the sidecar serves, which costs no round trip: the tables are mapped, so its heartbeat, its instance and
the pool's state are read from memory. When it does not serve, the call is a miss or a dropped save at once; at most every half second
one call tries to reconnect, within 40 ms, and not at all while the mapped heartbeat tells that the sidecar hangs. What belongs to one
start of the sidecar is a Link; a new Link replaces it whole, so threads that still use the old one keep valid memory.

A thread that moves bytes is a transfer. Goodbye lets the sidecar give this member's slots to others at once, so close() waits for the
transfers, and where it cannot, it says no goodbye: the member lock tells the sidecar when this process is gone.

A thread takes a Channel from a stack, uses it synchronously and puts it back: no helper thread stands between a call and its reply. The
engine calls from any thread; a fork's child must make a client of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..cext import LayoutError, Mapping, View
from ..schemas.endpoint import MAX_SOCKET_PATH_BYTES, default_endpoint
from ..schemas.errors import ErrorCode
from ..schemas.messages import (
    ID_BYTES,
    MAX_NAME_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    Bye,
    Discard,
    Hello,
    HelloReply,
    Register,
    Release,
    Request,
    StatusRequest,
)
from ..schemas.namespace import Layout, NamespaceError
from .attach import attach
from .channel import Channel, Debts, connected, socket_file
from .errors import SidecarRefused, SidecarUnavailable, hint
from .member import lock_name
from .tasks import Task, Worker

if TYPE_CHECKING:
    from .store import Store

log = logging.getLogger("hostkv")

STALE_NS = 1_500_000_000  # a heartbeat older than this means that nobody serves (PROTOCOL.md, hello)
RETRY_S = 0.5  # between attempts to reconnect
RECONNECT_WAIT_S = 0.04  # for all replies of one attempt together; a sidecar that hangs is not asked, so this is paid once
BYE_WAIT_S = 0.1
CLOSE_COPY_S = 10.0  # how long close() waits for copies, besides what their requests may take
REFUSED_RETRY_S = 5.0  # between registrations of a namespace whose layout was refused
MAX_GREETINGS = 3  # of one connection in one call: the sidecar forgets a member's oldest connection when it opens too many
MAX_CHANNELS = 12  # in use at a time; a sidecar keeps 16 connections of one client, and a reconnect needs one
MAX_COPY_THREADS = 64
_POPULATE_BYTES = 64 << 20  # one step; the GIL is free during each
_SAME_MEMORY = "do this process and the sidecar see the same /dev/shm (in containers: a shared IPC namespace or volume)?"


class Counters:
    """Since the client was made. lookups, hits: blocks; dropped_saves: shards not stored for want of room or of a sidecar; failed_loads:
    blocks; corrupt_blocks: those of them that did not match their checksums; reconnects: links to a sidecar after the first."""

    __slots__ = ("_guard", "corrupt_blocks", "dropped_saves", "failed_loads", "hits", "lookups", "reconnects")

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.lookups = self.hits = self.dropped_saves = self.failed_loads = self.corrupt_blocks = self.reconnects = 0

    def add(
        self,
        *,
        lookups: int = 0,
        hits: int = 0,
        dropped_saves: int = 0,
        failed_loads: int = 0,
        corrupt_blocks: int = 0,
        reconnects: int = 0,
    ) -> None:
        with self._guard:
            self.lookups += lookups
            self.hits += hits
            self.dropped_saves += dropped_saves
            self.failed_loads += failed_loads
            self.corrupt_blocks += corrupt_blocks
            self.reconnects += reconnects

    def as_dict(self) -> dict[str, int]:
        with self._guard:
            return {name: getattr(self, name) for name in self.__slots__ if name != "_guard"}


class Link:
    """One start of the sidecar, as this client knows it. `socket`: the file that it listens at (see socket_file)."""

    def __init__(
        self,
        hello: HelloReply,
        instance: bytes,
        socket: tuple[int, int, int],
        view: View,
        pool: Mapping,
        clock_ns: int,
        has_index: bool = False,
    ) -> None:
        self.hello = hello
        self.instance = instance
        self.socket = socket
        self.view = view
        self.pool = pool
        self.has_index = has_index  # whether the view finds what is on disk, too
        self.clock_offset_ns = hello.clock_ns - clock_ns  # zero but across time namespaces
        self.indexes: dict[bytes, int] = {}  # namespace fingerprint -> its number in this pool
        self.refused: dict[bytes, tuple[float, SidecarRefused]] = {}  # fingerprint -> when to ask again, why it was refused
        self.fault = ""  # why this link must not be used before another hello

    def beats(self) -> bool:
        """Whether somebody, maybe another start, serves this pool."""
        return time.monotonic_ns() + self.clock_offset_ns - self.view.heartbeat_ns() < STALE_NS

    def serves(self) -> bool:
        return not self.fault and self.beats() and self.view.instance_id() == self.instance and self.view.alive()

    def why_not(self) -> str:
        if not self.view.alive():
            return "the sidecar has ended and removed its pool"
        if self.fault:
            return self.fault
        if self.view.instance_id() != self.instance:
            return "the sidecar was restarted"
        age_ns = time.monotonic_ns() + self.clock_offset_ns - self.view.heartbeat_ns()
        return f"the sidecar gave no sign of life for {age_ns / 1e9:.1f} s"


class Client:
    """A connection of this process to the sidecar of this host.

    endpoint: "ipc:///path/control.sock"; else HOSTKV_ENDPOINT, else the default of the run directory. session: 16 bytes, equal in all
    processes of one engine (pins belong to it); random where None. name: for people, at most 64 bytes. copy_threads: threads of one
    batch copy. timeout_s: how long one request may wait for its reply. tier_wait_s: how long a load may wait for the next
    block to come from a tier; then the rest are misses.

    No sidecar is no error: lookups miss and saves are dropped until there is one. Thread-safe. Not to be used after fork. ValueError or
    TypeError on arguments that no sidecar could satisfy.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        session: bytes | None = None,
        name: str = "",
        copy_threads: int = 1,
        timeout_s: float = 1.0,
        tier_wait_s: float = 5.0,
    ) -> None:
        self._path = _socket_path(endpoint)
        if session is not None and (not isinstance(session, bytes) or len(session) != ID_BYTES):
            raise ValueError(f"session is {session!r}, must be {ID_BYTES} bytes, equal in all processes of the engine")
        if not isinstance(name, str) or len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"name is {name!r}, must be a string of at most {MAX_NAME_BYTES} bytes")
        if not isinstance(copy_threads, int) or not 1 <= copy_threads <= MAX_COPY_THREADS:
            raise ValueError(f"copy_threads is {copy_threads!r}, must be 1..{MAX_COPY_THREADS}")
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= 3600:
            raise ValueError(f"timeout_s is {timeout_s!r}, must be above 0 and at most 3600 seconds")
        if not isinstance(tier_wait_s, (int, float)) or not 0 <= tier_wait_s <= 3600:
            raise ValueError(f"tier_wait_s is {tier_wait_s!r}, must be 0 to 3600 seconds")
        self.copy_threads = copy_threads
        self.timeout_s = float(timeout_s)
        self.tier_wait_s = float(tier_wait_s)
        self.counters = Counters()
        self._pid = os.getpid()
        self._client_id = secrets.token_bytes(ID_BYTES)
        self._session = session or secrets.token_bytes(ID_BYTES)
        self._name = name
        self._tags = itertools.count(secrets.randbits(32) << 32)  # unique in the session as long as no two clients draw the same half
        self._channels: list[Channel] = []  # those that nobody uses
        self._channels_in_use = 0
        self._debts = Debts()  # of channels that are gone
        self._in_debt = False  # whether they, or a channel that nobody uses, may owe anything
        self._next_settle_s = 0.0
        self._transfers = 0  # threads that use the pool's memory
        self._channels_guard = threading.RLock()  # of the six above
        self._channels_change = threading.Condition(self._channels_guard)  # is told where somebody can wait for it
        self._link: Link | None = None
        self._was_linked = False
        self._namespaces: dict[bytes, bytes] = {}  # fingerprint -> encoded, of every open store
        self._lock = b""  # the name of the member lock that the sidecar knows this client by
        self._has_device = False  # whether a driver may touch the pool for this process
        self._connecting = threading.Lock()
        self._next_try_s = 0.0
        self._down = ""  # why the sidecar does not serve; empty while it does
        self._worker: Worker | None = None
        self._worker_guard = threading.Lock()
        self._closing = False  # no more tasks
        self._draining = False  # no more transfers
        self._closed = False  # no more of anything
        self._stop = threading.Event()  # threads of ours end, and channels that come back are closed
        self._populated: threading.Event | None = None
        self._populating: threading.Thread | None = None
        self._reconnect(self.timeout_s)

    # ---- for users --------------------------------------------------------------------------------------------------------------
    def open(self, layout: Layout, piece_bytes: Sequence[int] | None = None) -> Store:
        """The store of this namespace. piece_bytes: sizes in bytes of the m pieces that each dump and load names per block; they sum
        to layout.shard_bytes. None: however many pieces a call names, they are equal. NamespaceError: the sidecar refuses the layout."""
        from .store import Store

        self.check_usable()
        store = Store(self, layout, piece_bytes)
        self._namespaces[store.fingerprint] = layout.encode()
        link = self.ready()
        if link is not None and self.index(link, store.fingerprint) is None and store.fingerprint in link.refused:
            refusal = link.refused[store.fingerprint][1]
            if refusal.code == ErrorCode.BAD_NAMESPACE:
                raise NamespaceError(f"the sidecar refused this layout: {refusal}")
        return store

    def status(self) -> dict[str, Any]:
        """What `hostkv status --json` prints. SidecarUnavailable when there is none."""
        reply, _ = self.call(StatusRequest())
        status: dict[str, Any] = reply.status
        return status

    def new_tag(self) -> int:
        """A number (uint64) that no other request of this session uses."""
        return next(self._tags)

    def attach_device(self) -> None:
        """Tells the sidecar that a device driver touches the pool for this process: what this process holds is then given to others only
        when the driver has ended, too. To be called before memory of a pool is given to the driver, for each pool (pool_epoch) again.
        SidecarUnavailable: it was not heard, so the driver must not have that memory."""
        self.check_usable()
        self._has_device = True  # and from now on at each hello
        for _ in range(2):
            if self.ready() is None:
                raise SidecarUnavailable(self._down or "reconnecting to the sidecar")
            if attach(os.path.dirname(self._path), self._client_id, self.timeout_s):
                return
            self.status()  # says hello where this client is not known any more
        raise SidecarUnavailable("the sidecar restarts again and again")

    def serving(self) -> bool:
        """Whether the sidecar serves now; may try to reconnect (at most 40 ms)."""
        return self.ready() is not None

    @property
    def down_reason(self) -> str:
        """Why the sidecar does not serve, and what to do about it; empty while it does."""
        return self._down

    @property
    def pool_epoch(self) -> bytes:
        """Which pool this process has mapped (16 bytes, new for each pool), b"" for none; may try to reconnect as serving() does."""
        link = self.ready() or self._link
        return link.hello.pool_epoch if link is not None else b""

    @property
    def pool_bytes(self) -> int:
        """Of the pool that this process has mapped, 0 for none."""
        link = self._link
        return link.pool.size if link is not None else 0

    def warm(self, timeout_s: float | None = None) -> bool:
        """Waits until this process has mapped every page of the pool, so that the next copy meets no page fault. False: not yet."""
        populated = self._populated  # another thread may let go of the pool
        return populated is not None and populated.wait(timeout_s)

    def close(self) -> None:
        """Finishes queued tasks and transfers under way, says goodbye and lets go of the pool. Idempotent; in a fork's child it does
        nothing."""
        if os.getpid() != self._pid:
            return
        with self._worker_guard:
            if self._closing:
                return
            self._closing = True
            worker = self._worker
        if worker is not None:
            worker.close()
        end_s = time.monotonic() + 4 * self.timeout_s + CLOSE_COPY_S  # a transfer asks twice, and may have to say hello for each
        with self._channels_guard:
            self._draining = True
            self._channels_change.wait_for(lambda: not self._transfers, end_s - time.monotonic())
            for idle in self._channels:  # what was told may not have been heard
                self._in_debt |= bool(idle.unpaid())
        if self._in_debt:  # another member may keep the session alive, and its pins
            self._next_try_s = self._next_settle_s = 0.0
            self.ready()
        with self._channels_guard:
            self._closed = True
            quiet = self._channels_change.wait_for(lambda: not self._transfers and not self._channels_in_use, end_s - time.monotonic())
        quiet &= self._connecting.acquire(timeout=max(0.0, end_s - time.monotonic()))  # and kept: nobody connects any more
        self._stop.set()
        if self._populating is not None:
            self._populating.join()
        link = self._link
        with self._channels_guard:
            channels, self._channels = self._channels, []
        if quiet and link is not None and channels:
            link.fault = ""  # goodbye may be heard, whatever was not answered
            if link.serves():
                self._say_goodbye(link, channels)
        for channel in channels:
            channel.close()
        if not quiet:
            log.warning("closed while the pool is in use; the sidecar frees what this client holds when its process ends")
        self._link = None

    def _say_goodbye(self, link: Link, channels: list[Channel]) -> None:
        """Pays what was lost meanwhile first, each channel its own."""
        end_s = time.monotonic() + BYE_WAIT_S
        last = channels[-1]
        last.debts.take_over(self._debts)
        try:
            for channel in channels:
                if channel.unpaid():
                    self._converse(channel, link, end_s - time.monotonic(), lambda _: None)
            self._converse(last, link, end_s - time.monotonic(), lambda _: last.ask(Bye(), end_s - time.monotonic()))
        except (_Restarted, SidecarUnavailable) as error:
            log.debug("goodbye was not heard: %s", error)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- for the store ------------------------------------------------------------------------------------------------------------
    def check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed; make another one")
        if os.getpid() != self._pid:
            raise RuntimeError(f"this client belongs to process {self._pid}, this is {os.getpid()}: make a client after fork")

    def ready(self) -> Link | None:
        """The link, if the sidecar serves now. Otherwise None, after one bounded attempt to reconnect if one is due."""
        link = self._link
        if link is None or self._down or self._closed or not link.serves():
            self.check_usable()
            link = self._reconnect(RECONNECT_WAIT_S)
        if self._in_debt and link is not None:
            self._settle(link)
        return link

    def mapped(self) -> Link | None:
        """The latest link, whether its sidecar still serves or not: its memory is there."""
        self.check_usable()
        return self._link

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """To be held from before this thread asks for a place in the pool until it touches it no more. RuntimeError when it is too late."""
        self.check_usable()
        with self._channels_guard:
            if self._draining:
                raise RuntimeError("this client is closed; make another one")
            self._transfers += 1
        try:
            yield
        finally:
            with self._channels_guard:
                self._transfers -= 1
                if self._draining:
                    self._channels_change.notify_all()

    def index(self, link: Link, fingerprint: bytes) -> int | None:
        """The namespace's number in this pool; registers it where needed. None when that was refused or got no answer: try again later."""
        index = link.indexes.get(fingerprint)
        if index is None and (fingerprint not in link.refused or time.monotonic() >= link.refused[fingerprint][0]):
            try:
                reply, link = self.call(Register(self._namespaces[fingerprint]))
            except SidecarRefused as refusal:
                _note_refused(link, fingerprint, refusal)
            except SidecarUnavailable:
                return None
            else:
                index = link.indexes[fingerprint] = reply.index
        return index

    def call(
        self,
        request: Request,
        *,
        undo: Abort | Release | None = None,
        fingerprint: bytes = b"",
        count: int | None = None,
        wait: bool = True,
        late_s: float = 0.0,
    ) -> tuple[Any, Link]:
        """One request and its reply, and the link it was valid in. `fingerprint`: the namespace whose index goes into the request. `undo`:
        what gives back all that the request may have taken, sent when its reply is lost. `wait` False, for Abort, Release and Discard: it
        is only sent, and the reply is None. `late_s`: how much later than other replies its own may come. Raises SidecarUnavailable."""

        def say(channel: Channel) -> Any:
            if not wait:
                assert isinstance(request, (Abort, Release, Discard))
                return channel.tell(request, self.timeout_s)
            answered = False
            try:
                reply = channel.ask(request, self.timeout_s + late_s, count)
                answered = True
                return reply
            except SidecarRefused as refusal:
                answered = refusal.code != ErrorCode.INTERNAL  # any other error means that nothing changed
                raise
            finally:  # whatever else it was, the request may be on its way
                if not answered and undo is not None:
                    channel.debts.owe(undo)

        for attempt in range(3):
            link = self.ready()
            if link is None:
                raise SidecarUnavailable(self._down or "reconnecting to the sidecar")
            if fingerprint:
                index = self.index(link, fingerprint)
                if index is None:
                    raise SidecarUnavailable(self._down or str(link.refused.get(fingerprint, ("", "the namespace is not registered"))[1]))
                request.index = index  # type: ignore[union-attr]
            channel = self._take()
            try:
                return self._converse(channel, link, self.timeout_s, say), link
            except _Restarted:
                self._fail(link, "the sidecar was restarted", retry_now=True)
            except SidecarRefused as refusal:
                if refusal.code == ErrorCode.NO_NAMESPACE and attempt < 2:
                    link.indexes.pop(fingerprint, None)
                else:
                    if refusal.code == ErrorCode.INTERNAL:
                        self._fail(link, str(refusal))
                    raise
            except SidecarUnavailable as error:
                self._fail(link, str(error))
                raise
            finally:
                self._give(channel)
        raise SidecarUnavailable("the sidecar restarts again and again")

    def give_back(self, undo: Abort | Release) -> None:
        """Ends what is held under these tags: now, or as soon as the sidecar serves again. Does not wait for the answer."""
        self._see_to_debts()
        try:
            self.call(undo, wait=False)
        except SidecarUnavailable:
            with self._channels_guard:
                self._debts.owe(undo)
                self._in_debt = True

    def submit(self, task: Task) -> Task:
        """Queues it for the worker threads, which the first task starts."""
        with self._worker_guard:
            self.check_usable()
            if self._closing:
                raise RuntimeError("this client is closed; make another one")
            self._started_worker().submit(task)
        return task

    def _started_worker(self) -> Worker:
        """Under its guard."""
        if self._worker is None:
            self._worker = Worker(f"hostkv-{self._name or 'worker'}", self._pay_late)
        return self._worker

    def _see_to_debts(self) -> None:
        """The worker's threads pay what is owed though nobody asks anything more."""
        if self._worker is None:
            with self._worker_guard, suppress(SidecarUnavailable):  # there can be no threads: then the next request pays
                if not self._closing:
                    self._started_worker()

    def _pay_late(self) -> None:
        link = self._link
        if self._in_debt or (link is not None and not link.serves()):  # what was told to one that went was perhaps not heard
            with suppress(RuntimeError):  # closed meanwhile
                self.ready()

    # ---- connections ----------------------------------------------------------------------------------------------------------------
    def _take(self) -> Channel:
        """A channel that nobody uses; one in debt first, so that nothing stays held for long."""
        with self._channels_guard:
            if self._channels_in_use == MAX_CHANNELS and not self._channels_change.wait_for(
                lambda: self._channels_in_use < MAX_CHANNELS, self.timeout_s
            ):
                raise SidecarUnavailable(f"all {MAX_CHANNELS} connections of this client were in use for {self.timeout_s:g} s")
            if self._closed:  # close() counts those in use after it has closed
                self.check_usable()
            if self._channels:
                at = next((i for i, idle in enumerate(self._channels) if idle.debts), -1) if self._in_debt else -1
                channel = self._channels.pop(at)
            else:
                channel = Channel(self._path)
            self._channels_in_use += 1
            if self._in_debt:
                channel.debts.take_over(self._debts)
        return channel

    def _give(self, channel: Channel) -> None:
        with self._channels_guard:
            if self._channels_in_use == MAX_CHANNELS or self._draining:
                self._channels_change.notify_all()
            self._channels_in_use -= 1
            kept = self._keep(channel)
        if not kept:
            channel.close()
        if self._in_debt:
            self._see_to_debts()

    def _keep(self, channel: Channel) -> bool:
        """Puts it back for the next call, or takes over its debts. Under the lock."""
        link = self._link
        usable = channel.greeted and not (channel.broken or self._stop.is_set() or link is None or channel.instance != link.instance)
        kept = usable and (len(self._channels) < MAX_CHANNELS or bool(channel.debts))
        if kept:
            self._channels.append(channel)
            self._in_debt |= bool(channel.debts)
        else:
            self._debts.take_over(channel.unpaid())
            self._in_debt |= bool(self._debts)
        return kept

    def _converse(self, channel: Channel, link: Link, timeout_s: float, say: Callable[[Channel], Any]) -> Any:
        """What `say` returns, said on a channel of this link that owes nothing. Says hello where the sidecar does not know the channel."""
        greetings = 0
        while True:
            if not channel.greeted:
                greetings += 1
                self._greet(channel, time.monotonic() + timeout_s)
            if channel.instance != link.instance:  # restarted a moment ago; the tables do not tell yet
                raise _Restarted
            ended = False
            try:
                if channel.debts:
                    channel.debts.pay(channel, timeout_s)
                said = say(channel)
                ended = True
                return said
            except SidecarUnavailable as error:
                ended = True
                if not isinstance(error, SidecarRefused) or error.code != ErrorCode.NO_SESSION or greetings == MAX_GREETINGS:
                    raise
                channel.greeted = False
            finally:
                if not ended:  # what a signal's handler raises comes between any two bytes
                    channel.broken = True

    def _settle(self, link: Link) -> None:
        """Pays what is owed, for a client that may ask nothing more: within the time of an attempt to reconnect, and as seldom."""
        with self._channels_guard:
            now_s = time.monotonic()
            if now_s < self._next_settle_s:
                return
            self._next_settle_s = now_s + RETRY_S
        while (left_s := now_s + RECONNECT_WAIT_S - time.monotonic()) > 0:
            with self._channels_guard:
                self._in_debt = bool(self._debts) or any(idle.debts for idle in self._channels)
                if not self._in_debt or self._channels_in_use >= MAX_CHANNELS:
                    return
                try:
                    channel = self._take()  # one is free, so this does not wait
                except SidecarUnavailable as error:
                    log.debug("what is owed is paid later: %s", error)
                    return
            try:
                self._converse(channel, link, left_s, lambda _: None)
            except (_Restarted, SidecarUnavailable) as error:
                log.debug("what is owed is paid later: %s", error)
                return
            finally:
                self._give(channel)

    def _greet(self, channel: Channel, deadline_s: float) -> HelloReply:
        """Says hello on a channel, for the one member that this client is."""
        directory = os.path.dirname(self._path)
        lock = self._lock or lock_name(directory)
        version = [PROTOCOL_MAJOR, PROTOCOL_MINOR]
        for attempt in range(2):
            hello = Hello(version, self._client_id, self._session, lock, self._pid, self._name)
            try:
                reply: HelloReply = channel.ask(hello, deadline_s - time.monotonic())
            except SidecarRefused as refusal:
                if refusal.code != ErrorCode.NO_LOCK:  # among others: the lock of before is seen again, and still this client's
                    raise
                if attempt:
                    self._lock = lock
                    raise SidecarRefused(
                        refusal.code,
                        f"the sidecar does not see that this process holds {directory}/members/{lock.hex()}; both must have the same "
                        "directory there (in containers: one volume), on a file system that carries POSIX locks between them",
                    ) from refusal
                lock = lock_name(directory, lost=lock)
            else:
                self._lock = lock
                break
        channel.greeted = True
        if self._has_device:  # the member may be another, or its sidecar; without an answer the driver is given its time
            try:
                attach(directory, self._client_id, 0)
            except SidecarUnavailable as error:
                log.debug("%s", error)
        return reply

    def _reconnect(self, wait_s: float) -> Link | None:
        """The link if it serves again, or a new one after at most `wait_s`. One thread at a time tries; the others go on uncached."""
        if not self._connecting.acquire(blocking=False):
            return None
        try:
            old = self._link
            if old is not None and old.serves():
                self._note_up(old)
                return old
            if old is not None:
                if not self._down:  # else the last attempt has said why
                    self._note_down(old.why_not())
                if not old.view.alive():
                    old = self._link = self._populated = None  # unmapped, as soon as no transfer uses it
            now_s = time.monotonic()
            if now_s < self._next_try_s:
                return None
            self._next_try_s = now_s + RETRY_S
            try:
                link = self._connect(old, now_s + wait_s)
            except SidecarUnavailable as error:
                self._note_down(str(error))
                return None
            if self._was_linked:
                self.counters.add(reconnects=1)
            self._was_linked = True
            self._note_up(link)
            return link
        finally:
            self._connecting.release()

    def _connect(self, old: Link | None, deadline_s: float) -> Link:
        socket = socket_file(self._path)
        if old is not None and old.socket == socket and not old.beats():
            connected(self._path).close()  # or it is gone, and nobody listens
            raise SidecarUnavailable(old.why_not())  # it hangs, so a hello would only cost its wait
        channel = Channel(self._path)
        with ExitStack() as on_failure:
            on_failure.callback(channel.close)
            hello = self._greet(channel, deadline_s)
            clock_ns = time.monotonic_ns()
            view, has_index = self._map_tables(hello)
            pool = old.pool if old is not None and old.hello.pool_epoch == hello.pool_epoch else self._map_pool(hello)
            link = Link(hello, channel.instance, socket, view, pool, clock_ns, has_index)
            for fingerprint, encoded in list(self._namespaces.items()):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break  # the others are registered when they are asked for
                try:
                    link.indexes[fingerprint] = channel.ask(Register(encoded), left_s).index
                except SidecarRefused as refusal:
                    _note_refused(link, fingerprint, refusal)
            with self._channels_guard:
                if self._closed:
                    raise SidecarUnavailable("this client is being closed")
                self._link = link
                gone = [other for other in self._channels if other.instance != link.instance]
                self._channels = [other for other in self._channels if other.instance == link.instance]
                for other in gone:
                    self._debts.take_over(other.unpaid())
                self._in_debt |= bool(self._debts)
                if not self._keep(channel):
                    gone.append(channel)
                self._next_settle_s = 0.0
            on_failure.pop_all()
        for other in gone:
            other.close()
        if old is None or old.pool is not pool:
            self._populate(pool)
        return link

    def _map_tables(self, hello: HelloReply) -> tuple[View, bool]:
        """A reader of the tables, and of what is on disk where that is told (True)."""
        fd = _opened(hello.tables_path, os.O_RDONLY)
        try:
            view = View(fd, hello.tables_bytes)
        except LayoutError as error:
            raise SidecarUnavailable(f"cannot read {hello.tables_path}: {error}") from error
        except OSError as error:
            raise _cannot_map(hello.tables_path, error) from error
        finally:
            os.close(fd)
        if view.pool_epoch != hello.pool_epoch:
            raise SidecarUnavailable(
                f"{hello.tables_path} holds the tables of another pool than the sidecar at {self._path} serves; {_SAME_MEMORY}"
            )
        return view, _attach_index(view, f"{hello.pool_path}.index")

    def _map_pool(self, hello: HelloReply) -> Mapping:
        fd = _opened(hello.pool_path, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            if size != hello.pool_bytes:
                raise SidecarUnavailable(f"{hello.pool_path} has {size} bytes, the sidecar's pool has {hello.pool_bytes}; {_SAME_MEMORY}")
            return Mapping(fd, size, writable=True)
        except OSError as error:
            raise _cannot_map(hello.pool_path, error) from error
        finally:
            os.close(fd)

    def _populate(self, pool: Mapping) -> None:
        """Maps the pool's pages in the background, so that first copies need not."""
        done = threading.Event()

        def populate() -> None:
            for offset in range(0, pool.size, _POPULATE_BYTES):
                if self._stop.is_set() or self._populated is not done:
                    return
                pool.populate(offset, min(_POPULATE_BYTES, pool.size - offset))
            done.set()

        self._populated = done
        thread = threading.Thread(target=populate, name="hostkv-populate", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.debug("the pool is mapped as it is used: %s", error)
            self._populated = None
        else:
            self._populating = thread

    def _fail(self, link: Link, reason: str, *, retry_now: bool = False) -> None:
        link.fault = reason
        if retry_now:
            self._next_try_s = 0.0
        self._note_down(reason)

    def _note_down(self, reason: str) -> None:
        if not self._down:
            log.warning("running uncached: %s", reason)
        self._down = reason

    def _note_up(self, link: Link) -> None:
        if self._down:
            log.info("the sidecar serves again (version %s, pool of %d bytes)", link.hello.version, link.hello.pool_bytes)
        self._down = ""


class _Restarted(Exception):
    """The channel met another start of the sidecar than its link's."""


def _opened(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_map(path, error) from error


def _cannot_map(path: str, error: OSError) -> SidecarUnavailable:
    return SidecarUnavailable(f"cannot map {path}: {error.strerror}; {hint(error, _SAME_MEMORY)}")


def _attach_index(view: View, path: str) -> bool:
    """Has lookups find what is on disk, too. Each start of a sidecar makes a new file; without tiers there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        view.attach_index(fd, os.fstat(fd).st_size)
        return True
    except (OSError, LayoutError) as error:
        log.warning("what is on disk is not looked up: %s: %s", path, error)
        return False
    finally:
        os.close(fd)


def _note_refused(link: Link, fingerprint: bytes, refusal: SidecarRefused) -> None:
    if fingerprint not in link.refused:
        log.error("running uncached, the sidecar refused to register the namespace: %s", refusal)
    again_s = REFUSED_RETRY_S if refusal.code == ErrorCode.BAD_NAMESPACE else RETRY_S
    link.refused[fingerprint] = (time.monotonic() + again_s, refusal)


def _socket_path(endpoint: str | None) -> str:
    if endpoint is None and (endpoint := default_endpoint(os.environ, os.geteuid())) is None:
        raise ValueError("there is no default endpoint without XDG_RUNTIME_DIR; pass endpoint= or set HOSTKV_ENDPOINT")
    if not isinstance(endpoint, str) or not endpoint.startswith("ipc:///"):
        raise ValueError(f"endpoint is {endpoint!r}, must be ipc:// with an absolute path (ipc:///run/hostkv/control.sock)")
    path = endpoint[len("ipc://") :]
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"endpoint {endpoint!r} is too long: its path may have {MAX_SOCKET_PATH_BYTES} bytes; use a shorter run directory")
    return path
