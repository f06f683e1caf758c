"""Acquires that requests wait for, made beside the engine's scheduling thread: all that were asked in one step go out together, and what
only a tier has is waited for apart, so that a slow disk keeps nobody waiting who does not need it."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..errors import QueueFull, SidecarUnavailable
from ..tasks import Task

if TYPE_CHECKING:
    from ..client import Client
    from ..store import Handles, Keys, Store


class Query:
    """The acquire of `keys` under `tag`. Its `handles` come from another thread, once and complete; the asker is to release them."""

    __slots__ = ("cancelled", "handles", "keys", "on_tier", "store", "tag")

    def __init__(self, store: Store, keys: Keys, tag: int) -> None:
        self.store = store
        self.keys = keys
        self.tag = tag
        self.on_tier: list[int] = []
        self.handles: Handles | None = None
        self.cancelled = False


class Queries:
    """`ask`, `send` and `cancel` are for the scheduling thread. What the sidecar does not answer is a miss."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asked: list[Query] = []
        self._on_tier: list[tuple[Query, Handles]] = []  # wait for what a tier has
        self._waiting = False  # a thread of the client does that
        self._lock = threading.Lock()  # of the two above, and of who releases a cancelled query's pins

    def ask(self, store: Store, keys: Keys) -> Query:
        query = Query(store, keys, self._client.new_tag())
        self._asked.append(query)
        return query

    def send(self) -> None:
        """Once a step."""
        if self._asked:
            asked, self._asked = self._asked, []
            try:
                self._client.submit(Task(lambda _: self._acquire(asked)))
            except (QueueFull, SidecarUnavailable):
                for query in asked:
                    query.handles = query.store.no_handles(query.keys)

    def cancel(self, query: Query) -> None:
        with self._lock:
            query.cancelled = True
            done = query.handles is not None
        if done:
            query.store.release([query.tag])

    # In threads of the client:

    def _acquire(self, asked: list[Query]) -> None:
        waits = False
        try:
            for query in asked:
                handles = query.store.acquire(query.keys, query.tag)
                query.on_tier = query.store.on_tier(handles) if self._client.tier_wait_s > 0 else []
                if not query.on_tier:
                    self._end(query, handles)
                    continue
                with self._lock:
                    self._on_tier.append((query, handles))
                    waits, self._waiting = waits or not self._waiting, True
        finally:
            for query in asked:
                if query.handles is None and not query.on_tier:
                    self._end(query, query.store.no_handles(query.keys))
            if waits:
                self._wait()

    def _wait(self) -> None:
        """One after the other, as the tier brings them."""
        while True:
            with self._lock:
                batch, self._on_tier = self._on_tier, []
                self._waiting = bool(batch)
            if not batch:
                return
            wait_s, ended = self._client.tier_wait_s, False
            try:
                for query, _ in batch:
                    query.store.bring(query.keys, 0)
                for query, handles in batch:
                    found = query.store.promote(handles, query.on_tier, query.tag, 0 if query.cancelled else wait_s)
                    if found.run < len(found) and not query.cancelled:
                        wait_s = 0.0  # it was waited for once in vain
                    self._end(query, found)
                ended = True
            finally:
                for query, handles in batch:
                    if query.handles is None:
                        self._end(query, handles)
                if not ended:  # a bug of ours; the next query that a tier has finds nobody waiting, and does
                    with self._lock:
                        self._waiting = False

    def _end(self, query: Query, handles: Handles) -> None:
        with self._lock:
            query.handles = handles
            cancelled = query.cancelled
        if cancelled:
            query.store.release([query.tag])
