"""The scheduler's role: what is promised to an engine, and what each step loads and saves."""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...schemas.namespace import Layout, NamespaceError
from ..errors import SidecarUnavailable
from ..identity import IdentityError, weights_fingerprint, weights_state
from .events import stored
from .identity import layout_of
from .params import ANSWER, Params
from .plan import Facts, Load, Refused, Save, StepPlan, StepReport
from .queries import Queries, Query
from .stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ..client import Client
    from ..store import Handles, Keys, Store

logger = init_logger("vllm.hostkv")  # below vLLM's own logger, or its handler would not show it

SLOW_S = 2.0  # to identify the weights; longer is worth a word
LOAD_IN_STEP_BYTES = 4 << 20  # of all loads that one step waits for: a millisecond; others go on beside the steps
PINNED_SHARE = 4  # several requests that wait pin at most such a part of the pool together


@dataclass
class _Pins:
    """Blocks of a waiting request that are pinned for it: `handles` are its blocks `first`, `first` + 1, … Promised are those from
    `promised` on: the engine may have got more of the prefix itself since the pins were taken."""

    tag: int
    first: int
    handles: Handles
    on_tier: list[int]  # those of `handles` that came from a tier
    promised: int
    step_waits: bool = True  # for the load; else the request waits for it outside of the steps


@dataclass(frozen=True)
class _Adapter:
    """What the files under a path were when a request used them first; without a fingerprint, requests with it are not cached."""

    state: tuple[tuple[str, int, int, int], ...]
    fingerprint: bytes | None


@dataclass
class _Tracked:
    """One request: its adapter (empty: none, None: one that cannot be told from others, so the request is not cached), its derived keys,
    what is pinned for it or is about to be, how many blocks from the front need no further thought about saving, and whether it is sound:
    one that stands on KV that is not what its hash says is never saved."""

    request: Request
    adapter: bytes | None
    keys: Keys | None = None
    last_id: bytes = b""
    query: Query | None = None
    first: int = 0  # of the query's blocks
    pins: _Pins | None = None
    asked_step: int = 0  # when the engine asked last
    saved: int = 0
    sound: bool = True
    loads: bool = True  # False once a load has failed: what failed then would fail again
    saves: bool = True
    got: list[_Got] = field(default_factory=list)
    blocks_saved: int = 0


@dataclass
class _Got:
    """What came of one load: its first `blocks`, as far as is known; those of them that a tier had are at `on_tier`."""

    blocks: int
    on_tier: list[int]

    @property
    def from_tier(self) -> int:
        return sum(at < self.blocks for at in self.on_tier)


@dataclass
class _Flight:
    """A load whose end `readers` ranks have not reported yet."""

    tracked: _Tracked
    load: Load
    got: _Got
    readers: int


@dataclass
class _Saving:
    """A save that the workers have not reported yet: blocks `first` to `end` of a request."""

    tracked: _Tracked
    first: int
    end: int


class Scheduler:
    """Decides what is loaded and saved. All methods are called by the engine's scheduling thread."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, extra: dict[str, Any], client: Client, stats: Stats) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._revision: str | None = extra.get("revision")
        self._save_decode: bool = extra.get("save_decode", False)
        self._client = client
        self._stats = stats
        self._block_tokens: int = config.cache_config.block_size
        assert config.kv_transfer_config is not None
        self._ranks: int = config.parallel_config.world_size
        self._may_load = config.kv_transfer_config.is_kv_consumer
        self._may_save = config.kv_transfer_config.is_kv_producer
        self._layout: Layout | None = None
        self._store: Store | None = None
        self._pool_epochs: dict[int, bytes] = {}  # by worker
        self._requests: dict[str, _Tracked] = {}
        self._adapters: dict[str, _Adapter] = {}  # by path
        self._params = Params()
        self._events: list[KVCacheEvent] = []
        self._tells_events = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
        self._queries = Queries(client)
        self._waiting: dict[str, _Tracked] = {}  # requests with a query or pins, in the order of asking
        self._step = 0
        self.load_in_step_bytes = LOAD_IN_STEP_BYTES
        self._step_bytes = LOAD_IN_STEP_BYTES  # left of this step's
        self._loads: list[Load] = []
        self._flying: dict[int, _Flight] = {}  # by tag
        self._saving: dict[int, _Saving] = {}  # by tag
        self._loading: dict[str, list[int]] = {}  # while a step with loads runs: the blocks of its requests
        self.block_pool: BlockPool | None = None  # the engine's own prefix cache

    def describe(self, facts: list[KVConnectorHandshakeMetadata]) -> None:
        """Takes what the workers know, and settles whether and under which identity this engine's KV is cached. Here and not at the first
        request, because the model's files are read."""
        started = time.perf_counter()
        try:
            self._layout = layout_of(self._config, self._kv_cache_config, facts, self._revision)
        except (Refused, IdentityError, NamespaceError) as refusal:
            logger.error("HostKV: this engine runs uncached: %s", refusal)
            return
        self._pool_epochs = {fact.rank: fact.pool_epoch for fact in facts if isinstance(fact, Facts)}
        if (took := time.perf_counter() - started) > SLOW_S:
            logger.info(
                'HostKV: the weights were read to identify them, in %.1f s; "revision" in kv_connector_extra_config saves that', took
            )
        logger.info("HostKV: blocks of %d bytes for %s, %s", self._layout.slot_bytes, self._layout.model, self._layout.revision)

    def _opened(self) -> Store | None:
        """The store. Opened at the first request, because vLLM chooses the root of its hashes after it has built its connectors."""
        if self._store is None and self._layout is not None:
            self._layout = replace(self._layout, hash_root=kv_cache_utils.NONE_HASH.hex())
            try:
                self._store = self._client.open(self._layout)
            except NamespaceError as refusal:
                logger.error("HostKV: this engine runs uncached: %s", refusal)
                self._layout = None
        return self._store

    def promise(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` the sidecar has, all of them pinned, and whether the request is to wait for them outside
        of the steps; None: ask again in the next step. May be asked again and again before the request is admitted; the same pins then
        answer. The last token is never promised: an engine has to compute one to sample the next."""
        store = self._opened()
        if store is None or not self._may_load or request.skip_reading_prefix_cache:
            return 0, False
        tracked = self._track(request)
        tracked.asked_step = self._step
        if tracked.query is not None and tracked.query.handles is None:
            return None, False
        first = computed_tokens // self._block_tokens
        pools = set(self._pool_epochs.values())
        limit = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        if limit <= first or tracked.adapter is None or not tracked.loads or pools != {self._client.pool_epoch}:
            self._unpin(tracked)
            return 0, False
        keys = self._keys(store, tracked, limit)
        queried = tracked.query is not None
        if queried:
            self._take_handles(tracked)
        pins = tracked.pins
        if pins is not None:
            end = pins.first + len(pins.handles)
            here = pins.first <= first < end and store.lookup_on_prefix(keys[first:end]) == end - first - 1
            if here and pools == {pins.handles.pool_epoch} == {self._client.pool_epoch}:  # after the lookup, which may find another pool
                pins.promised = first
                pins.step_waits = (end - first) * store.layout.slot_bytes <= self._step_bytes
                return (end - first) * self._block_tokens, not pins.step_waits
        self._unpin(tracked)
        found = 0 if queried else store.lookup_on_prefix(keys[first:limit]) + 1
        if not found:
            return 0, False
        if self._has_room(found, store.layout.slot_bytes):
            tracked.query, tracked.first = self._queries.ask(store, keys[first : first + found]), first
            self._waiting[request.request_id] = tracked
        return None, False

    def _take_handles(self, tracked: _Tracked) -> None:
        query, tracked.query = tracked.query, None
        assert query is not None
        assert query.handles is not None
        tracked.pins = _Pins(query.tag, tracked.first, query.handles[: query.handles.run], query.on_tier, tracked.first)

    def _has_room(self, blocks: int, slot_bytes: int) -> bool:
        """Whether so many more blocks may be pinned for a waiting request; for the only one any number may. Requests that the engine does
        not ask for any more, though they wait, lose their pins to those it does."""
        most = self._client.pool_bytes // PINNED_SHARE // slot_bytes
        pinned = sum(map(_pinned, self._waiting.values()))
        for other in list(self._waiting.values()):
            if pinned + blocks <= most:
                break
            if other.asked_step < self._step - 1:
                pinned -= _pinned(other)
                self._unpin(other)
        return not pinned or pinned + blocks <= most

    def admit(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request has its blocks; the promised ones among them are loaded from the coming step on, and the load has the pins now."""
        tracked = self._track(request)
        pins = tracked.pins
        if pins is None or not external_tokens:
            self._unpin(tracked)
            return
        count = external_tokens // self._block_tokens
        first, last = pins.promised, pins.promised + count
        handles = pins.handles[first - pins.first : last - pins.first]
        load = Load("" if pins.step_waits else request.request_id, pins.tag, handles, blocks.get_block_ids()[0][first:last])
        self._loads.append(load)
        if pins.step_waits:
            assert self._layout is not None
            self._step_bytes -= count * self._layout.slot_bytes
        got = _Got(count, [at for at in (pins.first + i - first for i in pins.on_tier) if 0 <= at < count])
        tracked.got.append(got)
        self._flying[pins.tag] = _Flight(tracked, load, got, self._ranks)
        tracked.pins = None
        self._waiting.pop(request.request_id, None)
        self._stats.blocks_promised += count

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The step's loads, and of every scheduled request the blocks that will be full after the step and that the sidecar lacks. Blocks
        that the engine had itself are looked at too: the sidecar may have been emptied since."""
        self._queries.send()
        self._step += 1
        self._step_bytes = self.load_in_step_bytes
        plan = StepPlan(loads=self._loads)
        self._loads = []
        in_step = any(not load.request_id for load in plan.loads)
        store = self._store
        state = output.kv_connector_block_state
        self._loading = {}
        if in_step and state is not None:
            self._loading = {name: list(blocks[0]) for name in output.num_scheduled_tokens if (blocks := state.get_block_ids(name))}
        # Ranks do not know of each other's failed loads, and one's garbage is in the other's sums: several save what follows a load in the
        # next step, when the scheduler knows of them all.
        if store is not None and self._may_save and not (in_step and self._ranks > 1):
            assert state is not None
            for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tracked is None or tracked.adapter is None or not tracked.sound or not tracked.saves:
                    continue
                request = tracked.request
                start = min(tracked.saved, request.num_computed_tokens // self._block_tokens)  # lower again after a preemption
                end = min((request.num_computed_tokens + scheduled_tokens) // self._block_tokens, len(request.block_hashes))
                if not self._save_decode:
                    end = min(end, request.num_prompt_tokens // self._block_tokens)
                if end <= start:
                    continue
                tracked.saved = end
                keys = self._keys(store, tracked, end)
                start += store.lookup_on_prefix(keys[start:end]) + 1
                if start < end:
                    block_ids = state.get_block_ids(request_id)
                    assert block_ids is not None
                    save = Save(self._client.new_tag(), keys[start:end], block_ids[0][start:end])
                    plan.saves.append(save)
                    self._saving[save.tag] = _Saving(tracked, start, end)
                    tracked.blocks_saved += end - start
        if plan.loads or plan.saves:
            plan.layout = self._layout
        return plan

    def distrust(self, failed: set[int]) -> None:
        """These blocks did not load, and vLLM has set the requests back that it recomputes. Until then, or for ever when such a request is
        aborted, all blocks from the failed one on stay in the engine's prefix cache, where the next request with the same prefix would
        find garbage and it would be saved; so they go. (vLLM evicts them itself with the failure policy "fail" alone, and then not those
        of a request that shared another one's failed block. A recomputed block of a running request is not put back: a later request
        finds it at the sidecar.)"""
        assert self.block_pool is not None
        for flight in self._flying.values():
            at = next((i for i, block_id in enumerate(flight.load.block_ids) if block_id in failed), None)
            if at is None:
                continue
            if flight.load.request_id:
                flight.tracked.loads = False  # it computes them itself: nothing else stands on them
            flight.got.blocks = min(flight.got.blocks, at)
        for request_id, block_ids in self._loading.items():
            first = next((i for i, block_id in enumerate(block_ids) if block_id in failed), None)
            if first is None:
                continue
            self.block_pool.evict_blocks(set(block_ids[first:]))
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.request.num_computed_tokens > first * self._block_tokens:
                tracked.sound = False  # another request shall recompute the block that it stands on, and may never get to it

    def take_report(self, report: StepReport) -> None:
        self._pool_epochs.update(report.pool_epochs)
        over = []
        for tag, ranks in report.loaded.items():
            flight = self._flying[tag]
            flight.readers -= ranks
            if not flight.readers:
                del self._flying[tag]
                over.append(tag)
        if self._store is not None:
            self._store.release(over)
        for tag, dropped in report.saves.items():
            saving = self._saving.pop(tag, None)
            if saving is not None:
                self._end_save(saving, sorted(dropped))

    def _end_save(self, saving: _Saving, dropped: list[int]) -> None:
        saving.tracked.blocks_saved -= len(dropped)
        if not self._tells_events:
            return
        request, first = saving.tracked.request, saving.first
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        for end in [*(saving.first + at for at in dropped), saving.end]:
            if first < end:
                self._events.append(stored(request, first, end, self._block_tokens, spec))
            first = end + 1

    def take_events(self) -> list[KVCacheEvent]:
        if not self._events:
            return self._events
        events, self._events = self._events, []
        return events

    def hit_sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens lay that the request was just admitted with."""
        got = self._track(request).got
        on_disk = got[-1].from_tier * self._block_tokens if got else 0
        return {source: count for source, count in ((CacheHitSource.HOST, tokens - on_disk), (CacheHitSource.DISK, on_disk)) if count}

    def finish(self, request_id: str, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """What the request is told: the tokens that it got from here, again after each preemption, and those whose blocks it gave to be
        saved, less those that are known not to have been. (The engine ends a request before it says what the last step's workers did.)"""
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return None
        self._unpin(tracked)
        if not tracked.sound and self.block_pool is not None:
            self.block_pool.evict_blocks({block_id for group in block_ids for block_id in group})
        if self._store is None:
            return None
        return {
            ANSWER: {
                "loaded_tokens": sum(got.blocks for got in tracked.got) * self._block_tokens,
                "loaded_from_disk_tokens": sum(got.from_tier for got in tracked.got) * self._block_tokens,
                "saved_tokens": tracked.blocks_saved * self._block_tokens,
            }
        }

    def reset(self) -> bool:
        """Nothing of this namespace may be served again, to any engine: the weights changed. False when the sidecar did not confirm.

        The new weights may be in memory alone, so from now on this engine has a namespace of its own, and not that of the files. Requests
        that run keep KV of the old weights, and with them vLLM refuses to empty its prefix cache."""
        store = self._opened()
        if store is None or self._layout is None:
            return True
        for tracked in self._requests.values():
            self._unpin(tracked)
            tracked.keys = None
            if tracked.request.num_computed_tokens:
                tracked.sound = False
        self._saving.clear()
        if self.block_pool is not None:
            self.block_pool.evict_blocks(set(range(self.block_pool.num_gpu_blocks)))
        self._layout, self._store = replace(self._layout, salt=secrets.token_hex(16)), None
        self._opened()
        try:
            store.clear()
        except SidecarUnavailable as error:
            logger.error("HostKV: the cache was not reset: %s", error)
            return False
        return True

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = _Tracked(request, self._adapter(request))
            if request.kv_transfer_params:
                asked = self._params.read(request.kv_transfer_params)
                tracked.loads, tracked.saves = "no_load" not in asked, "no_save" not in asked
        return tracked

    def _adapter(self, request: Request) -> bytes | None:
        """The fingerprint of the request's adapter. Once its files change, nobody can tell which requests have been computed, or are in the
        engine's prefix cache, with the old ones and which with the new ones, so it is not cached any more."""
        lora = request.lora_request
        if lora is None:
            return b""
        path = Path(lora.lora_path).expanduser()
        known = self._adapters.get(lora.lora_path)
        if known is not None and known.fingerprint is None:
            return None
        try:
            state = weights_state(path)
            if known is None:
                known = self._adapters[lora.lora_path] = _Adapter(state, weights_fingerprint(path).encode())
            if known.state == state:
                return known.fingerprint
            reason = "its files changed while this engine runs; put another version under another path"
        except IdentityError as error:
            reason = str(error)
        logger.warning("HostKV: requests with the adapter %s run uncached from now on: %s", lora.lora_name, reason)
        self._adapters[lora.lora_path] = _Adapter((), None)
        for tracked in self._requests.values():
            if tracked.request.lora_request is not None and tracked.request.lora_request.lora_path == lora.lora_path:
                tracked.sound = False
        return None

    def _keys(self, store: Store, tracked: _Tracked, count: int) -> Keys:
        """Keys of the first `count` blocks. Ids are a chain, so the last one stands for all before it."""
        ids = tracked.request.block_hashes
        keys = tracked.keys
        if keys is None or not count <= len(keys) <= len(ids) or ids[len(keys) - 1] != tracked.last_id:
            adapted = [hashlib.sha256(block_id + tracked.adapter).digest() for block_id in ids] if tracked.adapter else ids
            keys = tracked.keys = store.keys(adapted)
            tracked.last_id = ids[-1]
        return keys[:count]

    def _unpin(self, tracked: _Tracked) -> None:
        """Nothing is pinned, or about to be, for this request."""
        query, pins = tracked.query, tracked.pins
        tracked.query = tracked.pins = None
        self._waiting.pop(tracked.request.request_id, None)
        if query is not None:
            self._queries.cancel(query)
        if pins is not None and self._store is not None:
            self._store.release([pins.tag])


def _pinned(tracked: _Tracked) -> int:
    """Blocks, or those that are about to be."""
    query, pins = tracked.query, tracked.pins
    return (len(query.keys) if query is not None else 0) + (len(pins.handles) if pins is not None else 0)
