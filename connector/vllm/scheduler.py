"""The scheduler's role: what is promised to an engine, and what each step loads and saves."""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from time import sleep as nap
from typing import TYPE_CHECKING, Any

import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...schemas.errors import Status
from ...schemas.namespace import NamespaceError
from ..errors import SidecarRefused, SidecarUnavailable
from ..identity import IdentityError, weights_fingerprint, weights_state
from ..store import Keys
from ..tasks import MAX_QUEUED_TASKS
from .events import Told, stored
from .identity import adapter_settings, parts_of, random_root
from .params import ANSWER, Params
from .plan import Facts, Load, Part, Read, Refused, Save, StepPlan, StepReport
from .prefix import longest
from .queries import Queries, Query
from .stats import Stats
from .worker import fails_by_block

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ..client import Client
    from ..store import Handles, Store

logger = init_logger("vllm.hostkv")  # below vLLM's own logger, or its handler would not show it

SLOW_S = 2.0  # to identify the weights; longer is worth a word
LOAD_IN_STEP_BYTES = 4 << 20  # of all loads that one step waits for: a millisecond; others go on beside the steps
KEYS_IN_STEP = 512  # are derived and looked up, more only for one long request: a millisecond; what else is new comes in the next step
NAP_S = 1e-4  # of a step with nothing to compute while threads of ours work: an engine that has no process of its own would spin, and keep
# the interpreter from them
CLEAR_AGAIN_S = 0.5  # until the sidecar is told again of a reset that it did not confirm
CLEAR_AGAIN_MOST_S = 30.0
MAX_FLYING = MAX_QUEUED_TASKS // 2  # loads; a worker that has more of them than it can queue lets them fail
PINNED_SHARE = 4  # several requests that wait pin at most such a part of the pool together


@dataclass
class _Held:
    """Blocks `first`, `first` + 1, … of one part, as they were acquired under `tag`."""

    tag: int
    first: int
    handles: Handles
    on_tier: list[int]  # those of `handles` that came from a tier


@dataclass
class _Pins:
    """The prefix of `tokens` that is pinned for a waiting request, by part. Promised is what is beyond `promised` tokens: the engine may
    have got more of the prefix itself since the pins were taken."""

    held: list[_Held]
    tokens: int
    promised: int
    step_waits: bool = True  # for the load; else the request waits for it outside of the steps


@dataclass(frozen=True)
class _Adapter:
    """What the files under a path were when a request used them first; without a fingerprint, requests with it are not cached."""

    state: tuple[tuple[str, int, int, int], ...]
    fingerprint: str | None


@dataclass
class _Tracked:
    """One request: its adapter (empty: none, None: one that cannot be told from others, so the request is not cached), its derived keys by
    part, what is pinned for it or is about to be, how many blocks of each part from the front need no further thought about saving, and
    whether it is sound: one that stands on KV that is not what its hash says is never saved."""

    request: Request
    adapter: bytes | None
    keys: list[Keys] = field(default_factory=list)
    keyed: int = 0  # so many of the engine's ids are in `keys`, the last of them is
    last_id: bytes = b""
    queries: list[Query] = field(default_factory=list)  # one for each part, or none
    firsts: list[int] = field(default_factory=list)  # of each query's blocks
    pins: _Pins | None = None
    pinned_bytes: int = 0  # of the pool, or that are about to be
    asked_step: int = 0  # when the engine asked last
    no_room: int = 0  # for so many bytes more to pin there was no room then
    known: int = 0  # its tokens that the engine had when it asked, and those that it gets from us
    saved: list[int] = field(default_factory=list)
    sound: bool = True
    loads: bool = True  # False once a load has failed: what failed then would fail again
    saves: bool = True
    low_priority: bool = False
    got: list[_Got] = field(default_factory=list)
    tokens_saved: int = 0


@dataclass
class _Got:
    """What came of one load: its first `tokens`, as far as is known; of the first part a tier had blocks of `block_tokens` at `on_tier`."""

    tokens: int
    block_tokens: int
    on_tier: list[int]

    @property
    def from_tier(self) -> int:
        return sum(self.block_tokens for at in self.on_tier if 0 <= at < self.tokens)


@dataclass
class _Flight:
    """A load whose end `readers` ranks have not reported yet."""

    tracked: _Tracked
    load: Load
    tags: list[int]
    got: _Got
    readers: int


@dataclass
class _Saving:
    """A save that the workers have not reported yet: blocks `first` to `end` of a part of a request."""

    tracked: _Tracked
    part: int
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
        assert config.kv_transfer_config is not None
        self._ranks: int = config.parallel_config.world_size
        self._may_load = config.kv_transfer_config.is_kv_consumer
        self._may_save = config.kv_transfer_config.is_kv_producer
        self._hash_tokens: int = kv_cache_config.hash_block_size or config.cache_config.block_size
        self._parts: tuple[Part, ...] = ()  # none: nothing is cached
        self._step_tokens = 1  # promises are of so many tokens, or twice as many, …
        self._drop_tokens = 0  # at the end of what is found, which are not promised
        self._stores: list[Store] = []  # of the parts
        self._pool_epochs: dict[int, bytes] = {}  # by worker
        self._requests: dict[str, _Tracked] = {}
        self._adapters: dict[str, _Adapter] = {}  # by path
        self._loaded_adapters: dict[int, tuple[str, bool, bool]] = {}  # by number: what the newest request said of it
        self._adapter_settings = adapter_settings(config)
        self._params = Params()
        self._events: list[KVCacheEvent] = []
        self._told = Told(client)
        self._tells_events = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
        self._queries = Queries(client)
        self._waiting: dict[str, _Tracked] = {}  # requests with a query or pins, in the order of asking
        self._pinned_bytes = 0  # of all of them
        self._step = 0
        self._derived = 0  # keys in this step
        # A step waits for a load only where the engine is told of one that failed before the next step is planned, and where it takes that
        # block by block: a whole request can only fail while it waits outside of the steps.
        self._batches: int = config.max_concurrent_batches
        self._by_block = fails_by_block(kv_cache_config)
        self.load_in_step_bytes = LOAD_IN_STEP_BYTES if self._batches == 1 and self._by_block else 0
        self._step_bytes = self.load_in_step_bytes  # left of this step's
        self._loads: list[Load] = []
        self._flying: dict[int, _Flight] = {}  # by tag
        self._saving: dict[int, _Saving] = {}  # by tag
        self._admitted: list[_Tracked] = []  # in this step
        self._loading: dict[str, list[int]] = {}  # while a step with loads runs: the blocks of its requests
        self._loading_until = 0  # the last step that is planned before it is known what came of those loads
        self.block_pool: BlockPool | None = None  # the engine's own prefix cache

    def describe(self, facts: list[KVConnectorHandshakeMetadata]) -> None:
        """Takes what the workers know, and settles whether and under which identity this engine's KV is cached. Here and not at the first
        request, because the model's files are read."""
        started = time.perf_counter()
        try:
            self._parts = tuple(parts_of(self._config, self._kv_cache_config, facts, self._revision))
        except (Refused, IdentityError, NamespaceError) as refusal:
            logger.error("HostKV: this engine runs uncached: %s", refusal)
            return
        self._step_tokens = math.lcm(*(part.layout.block_tokens for part in self._parts))
        drafter = self._config.speculative_config
        self._drop_tokens = self._step_tokens if drafter is not None and drafter.use_eagle_block_drop() else 0
        self._pool_epochs = {fact.rank: fact.pool_epoch for fact in facts if isinstance(fact, Facts)}
        if (took := time.perf_counter() - started) > SLOW_S:
            logger.info(
                'HostKV: the weights were read to identify them, in %.1f s; "revision" in kv_connector_extra_config saves that', took
            )
        sizes = " and ".join(f"{part.layout.slot_bytes} bytes for {part.layout.block_tokens} tokens" for part in self._parts)
        logger.info("HostKV: blocks of %s of %s, %s", sizes, self._parts[0].layout.model, self._parts[0].layout.revision)
        if random_root(self._config):
            logger.warning(
                "HostKV: nothing is shared with other engines, nor found again after a restart: the block hashes of this engine begin with "
                "a random number (prefix_caching_hash_algo %s); set PYTHONHASHSEED, or use sha256",
                self._config.cache_config.prefix_caching_hash_algo,
            )

    def _opened(self) -> list[Store]:
        """The stores of the parts. Opened at the first request, because vLLM chooses the root of its hashes after it has built its
        connectors."""
        if not self._stores and self._parts:
            root = kv_cache_utils.NONE_HASH.hex()
            self._parts = tuple(replace(part, layout=replace(part.layout, hash_root=root)) for part in self._parts)
            try:
                self._stores = [self._client.open(part.layout) for part in self._parts]
            except NamespaceError as refusal:
                logger.error("HostKV: this engine runs uncached: %s", refusal)
                self._parts = ()
        return self._stores

    def promise(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` the sidecar has, all of them pinned, and whether the request is to wait for them outside
        of the steps; None: ask again in the next step. May be asked again and again before the request is admitted; the same pins then
        answer. The last token is never promised: an engine has to compute one to sample the next."""
        stores = self._opened()
        if not stores or not self._may_load or request.skip_reading_prefix_cache:
            return 0, False
        if self._derived >= KEYS_IN_STEP and request.request_id not in self._requests:
            return None, False
        tracked = self._track(request)
        tracked.asked_step, tracked.known = self._step, computed_tokens
        if any(query.handles is None for query in tracked.queries):
            return None, False
        pools = set(self._pool_epochs.values())
        limit = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_tokens) // self._step_tokens * self._step_tokens
        if limit <= computed_tokens or tracked.adapter is None or not tracked.loads or pools != {self._client.pool_epoch}:
            self._unpin(tracked)
            return 0, False
        if tracked.no_room and not self._has_room(tracked.no_room):
            return None, False
        keys = self._keys(tracked, limit)
        queried = False
        if tracked.queries:  # the answer settles it, unless the engine has lost since what lies before the blocks that it is about
            queried = all(
                part.reach or at <= part.first(computed_tokens, limit) for part, at in zip(self._parts, tracked.firsts, strict=True)
            )
            self._take_handles(tracked, computed_tokens)
        pins = tracked.pins
        if pins is not None:
            here = self._has_still(pins, keys, computed_tokens)
            epochs = {held.handles.pool_epoch for held in pins.held}
            if here and pools == epochs == {self._client.pool_epoch}:  # after the lookup, which may find another pool
                pins.promised = computed_tokens
                pins.step_waits = self._slot_bytes(computed_tokens, pins.tokens) <= self._step_bytes
                if not pins.step_waits and len(self._flying) >= MAX_FLYING:
                    return None, False
                return pins.tokens - computed_tokens, not pins.step_waits
        self._unpin(tracked)
        tokens = computed_tokens if queried else self._find(keys, computed_tokens, limit)
        tracked.no_room = 0
        if tokens == computed_tokens:
            return 0, False
        wanted_bytes = self._slot_bytes(computed_tokens, tokens)
        if not self._has_room(wanted_bytes):
            tracked.no_room = wanted_bytes
        else:
            tracked.firsts = [part.first(computed_tokens, tokens) for part in self._parts]
            wanted = [
                mine[first : tokens // part.layout.block_tokens]
                for part, mine, first in zip(self._parts, keys, tracked.firsts, strict=True)
            ]
            self._count_pinned(tracked, wanted_bytes)
            tracked.queries = [self._queries.ask(store, some) for store, some in zip(stores, wanted, strict=True)]
            self._waiting[request.request_id] = tracked
        return None, False

    def _find(self, keys: list[Keys], computed: int, limit: int) -> int:
        """How many tokens from the front the sidecar has, or the engine, which has `computed`."""
        found: list[tuple[int, list[bool]]] = []
        for part, store, mine in zip(self._parts, self._stores, keys, strict=True):
            first, end = computed // part.layout.block_tokens, limit // part.layout.block_tokens
            if part.reach:
                there = store.lookup(mine[first:end])
            else:
                there = [True] * (store.lookup_on_prefix(mine[first:end]) + 1)
                limit = (first + len(there)) * part.layout.block_tokens // self._step_tokens * self._step_tokens
                if limit <= computed:
                    return computed
            found.append((first, there))
        # A drafter's KV of a token may depend on the next one, which another prompt goes on with; vLLM does not use its last block either.
        return max(computed, longest(self._parts, found, computed) - self._drop_tokens)

    def _has_still(self, pins: _Pins, keys: list[Keys], computed: int) -> bool:
        """Whether that prefix is pinned and there, where the engine has `computed` tokens now."""
        if pins.tokens <= computed:
            return False
        for part, store, mine, held in zip(self._parts, self._stores, keys, pins.held, strict=True):
            first, end = part.first(computed, pins.tokens), pins.tokens // part.layout.block_tokens
            if first < held.first or store.lookup_on_prefix(mine[first:end]) != end - first - 1:
                return False
        return True

    def _take_handles(self, tracked: _Tracked, computed: int) -> None:
        queries, tracked.queries = tracked.queries, []
        held = []
        for query, first in zip(queries, tracked.firsts, strict=True):
            assert query.handles is not None
            held.append(_Held(query.tag, first, query.handles, query.on_tier))
        there = [(each.first, [status == Status.OK for status in each.handles.statuses]) for each in held]
        tracked.pins = _Pins(held, longest(self._parts, there, computed), computed)

    def _slot_bytes(self, computed: int, tokens: int) -> int:
        """Of the pool, that a prefix of so many tokens takes beyond those that the engine has."""
        return sum((tokens // part.layout.block_tokens - part.first(computed, tokens)) * part.layout.slot_bytes for part in self._parts)

    def _has_room(self, slot_bytes: int) -> bool:
        """Whether so much more may be pinned for a waiting request; for the only one as much as it likes. Requests that the engine does
        not ask for any more, though they wait, lose their pins to those it does."""
        most = self._client.pool_bytes // PINNED_SHARE
        if self._pinned_bytes + slot_bytes > most:
            for other in [other for other in self._waiting.values() if other.asked_step < self._step - 1]:
                self._unpin(other)
                if self._pinned_bytes + slot_bytes <= most:
                    break
        return not self._pinned_bytes or self._pinned_bytes + slot_bytes <= most

    def _count_pinned(self, tracked: _Tracked, slot_bytes: int) -> None:
        self._pinned_bytes += slot_bytes - tracked.pinned_bytes
        tracked.pinned_bytes = slot_bytes

    def admit(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request has its blocks; the promised ones among them are loaded from the coming step on, and the load has the pins now."""
        tracked = self._track(request)
        self._admitted.append(tracked)
        pins = tracked.pins
        if pins is None or not external_tokens:
            self._unpin(tracked)
            return
        computed, tokens = pins.promised, pins.promised + external_tokens
        ids, reads = blocks.get_block_ids(), []
        for number, (part, held) in enumerate(zip(self._parts, pins.held, strict=True)):
            first, end = part.first(computed, tokens), tokens // part.layout.block_tokens
            handles = held.handles[first - held.first : end - held.first]
            reads.append(Read(number, handles, [ids[group][first:end] for group in part.groups]))
            self._stats.blocks_promised += end - first
        load = Load(self._client.new_tag(), request.request_id, not pins.step_waits, reads)
        self._loads.append(load)
        if pins.step_waits:
            self._step_bytes -= self._slot_bytes(computed, tokens)
        block_tokens, held = self._parts[0].layout.block_tokens, pins.held[0]
        got = _Got(external_tokens, block_tokens, [(held.first + i) * block_tokens - computed for i in held.on_tier])
        tracked.got.append(got)
        tracked.known += external_tokens
        self._flying[load.number] = _Flight(tracked, load, [each.tag for each in pins.held], got, self._ranks)
        tracked.pins = None
        self._count_pinned(tracked, 0)
        self._waiting.pop(request.request_id, None)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The step's loads, and of every scheduled request the blocks that will be full after the step and that the sidecar lacks. Blocks
        that the engine had itself are looked at too: the sidecar may have been emptied since."""
        self._queries.send()
        if not output.total_num_scheduled_tokens and (self._waiting or self._flying):
            nap(NAP_S)
        self._step += 1
        self._derived = 0
        self._step_bytes = self.load_in_step_bytes
        plan = StepPlan(loads=self._loads)
        self._loads = []
        in_step = output.has_sync_kv_loads
        others_load = in_step and any(tracked.request.num_computed_tokens > tracked.known for tracked in self._admitted)
        self._admitted.clear()
        state = output.kv_connector_block_state
        if self._step > self._loading_until:
            self._loading = {}
        if in_step and state is not None:
            self._loading_until = self._step + self._batches - 1
            self._loading |= {name: list(blocks[0]) for name in output.num_scheduled_tokens if (blocks := state.get_block_ids(name))}
        unknown = self._step <= self._loading_until
        # Ranks do not know of each other's failed loads, and one's garbage is in the other's sums, nor do we know of those of another
        # connector under vLLM's MultiConnector: what follows such a load is saved in a later step, when the scheduler knows of them all.
        if self._stores and self._may_save and not (unknown and (self._ranks > 1 or self._batches > 1 or others_load)):
            assert state is not None
            for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tracked is not None and tracked.adapter is not None and tracked.sound and tracked.saves:
                    self._plan_saves(plan, tracked, scheduled_tokens, state)
        if plan.loads or plan.saves:
            plan.parts = self._parts
        return plan

    def _plan_saves(self, plan: StepPlan, tracked: _Tracked, scheduled_tokens: int, state: KVConnectorBlockState) -> None:
        request = tracked.request
        full = min(request.num_computed_tokens + scheduled_tokens, len(request.block_hashes) * self._hash_tokens)
        if not self._save_decode:
            full = min(full, request.num_prompt_tokens)
        for number, part in enumerate(self._parts):
            if part.handed:
                continue
            start = min(tracked.saved[number], request.num_computed_tokens // part.layout.block_tokens)  # lower again after a preemption
            end = full // part.layout.block_tokens
            if end <= start:
                continue
            tracked.saved[number] = end
            keys = self._keys(tracked, end * part.layout.block_tokens)[number]
            start += self._stores[number].lookup_on_prefix(keys[start:end]) + 1
            if start < end:
                block_ids = state.get_block_ids(request.request_id)
                assert block_ids is not None
                if part.reach:  # what is out of its window the engine has given up, and it said so with the null block
                    start += sum(1 for _ in takewhile(self._is_null, block_ids[part.groups[0]][start:end]))
                if start < end:
                    self._save(plan, tracked, number, start, end, [block_ids[group][start:end] for group in part.groups])
        for tokens, handed in _by_end(state.boundary_state_offloads.get(request.request_id, ())).items():
            if tokens <= full:
                self._plan_handed(plan, tracked, tokens, handed)

    def _plan_handed(self, plan: StepPlan, tracked: _Tracked, tokens: int, handed: dict[int, int]) -> None:
        """The blocks that end after so many tokens, by group, which are whole after this step and perhaps no other one."""
        for number, part in enumerate(self._parts):
            at, rest = divmod(tokens, part.layout.block_tokens)
            if not part.handed or rest or not all(group in handed for group in part.groups):
                continue
            keys = self._keys(tracked, tokens)[number]
            if self._stores[number].lookup_on_prefix(keys[at - 1 : at]) < 0:
                self._save(plan, tracked, number, at - 1, at, [[handed[group]] for group in part.groups])

    def _save(self, plan: StepPlan, tracked: _Tracked, number: int, first: int, end: int, block_ids: list[list[int]]) -> None:
        save = Save(self._client.new_tag(), number, tracked.keys[number][first:end], block_ids, tracked.low_priority)
        plan.saves.append(save)
        self._saving[save.number] = _Saving(tracked, number, first, end)
        if not number:
            tracked.tokens_saved += (end - first) * self._parts[number].layout.block_tokens

    def _is_null(self, block_id: int) -> bool:
        assert self.block_pool is not None
        null: int = self.block_pool.null_block.block_id
        return block_id == null

    def distrust(self, failed: set[int]) -> None:
        """These blocks did not load, and vLLM has set the requests back that it recomputes. Until then, or for ever when such a request is
        aborted, all blocks from the failed one on stay in the engine's prefix cache, where the next request with the same prefix would
        find garbage and it would be saved; so they go. (vLLM evicts them itself with the failure policy "fail" alone, and then not those
        of a request that shared another one's failed block. A recomputed block of a running request is not put back: a later request
        finds it at the sidecar.)"""
        if not self._parts:  # another connector's
            return
        assert self.block_pool is not None
        block_tokens = self._parts[0].layout.block_tokens  # there is one group of blocks, for vLLM takes no others
        for flight in self._flying.values():
            at = next((i for i, block_id in enumerate(flight.load.reads[0].block_ids[0]) if block_id in failed), None)
            if at is not None:
                self._note_failure(flight, at * block_tokens)
        for request_id, block_ids in self._loading.items():
            first = next((i for i, block_id in enumerate(block_ids) if block_id in failed), None)
            if first is None:
                continue
            self.block_pool.evict_blocks(set(block_ids[first:]))
            tracked = self._requests.get(request_id)
            if tracked is not None and (tracked.request.num_computed_tokens > first * block_tokens or not self._by_block):
                # Another request shall recompute the block that it stands on, and may never get to it. Or another connector told of a
                # block of a window, and vLLM goes on there without what lies before.
                tracked.sound = False

    def distrust_requests(self, failed: set[str]) -> None:
        """These did not get what they were promised, and nobody has used what they got."""
        for flight in self._flying.values():
            if flight.load.request_id in failed:
                self._note_failure(flight, 0)

    def _note_failure(self, flight: _Flight, tokens: int) -> None:
        """Only so many tokens of it came."""
        if flight.load.waits:
            flight.tracked.loads = False  # it computes them itself: nothing else stands on them
        flight.got.tokens = min(flight.got.tokens, tokens)

    def take_report(self, report: StepReport) -> None:
        self._pool_epochs.update(report.pool_epochs)
        for number, ranks in report.loaded.items():
            flight = self._flying[number]
            flight.readers -= ranks
            if not flight.readers:
                del self._flying[number]
                self._release(flight.tags)
        for number, dropped in report.saves.items():
            saving = self._saving.pop(number, None)
            if saving is not None:
                self._end_save(saving, sorted(dropped))

    def _end_save(self, saving: _Saving, dropped: list[int]) -> None:
        part = self._parts[saving.part]
        if not saving.part:
            saving.tracked.tokens_saved -= len(dropped) * part.layout.block_tokens
        if not self._tells_events or part.stage:
            return
        request, first = saving.tracked.request, saving.first
        ids = request.block_hashes[part.hashes - 1 :: part.hashes]
        for end in [*(saving.first + at for at in dropped), saving.end]:
            if first < end:
                self._told.add(saving.part, saving.tracked.keys[saving.part][first:end], ids[first:end])
                for group in part.groups:
                    spec = self._kv_cache_config.kv_cache_groups[group].kv_cache_spec
                    self._events.append(stored(request, ids, first, end, part.layout.block_tokens, group, spec))
            first = end + 1

    def take_events(self) -> list[KVCacheEvent]:
        if self._tells_events:
            self._events += self._told.gone(self._parts, self._stores)
        if not self._events:
            return self._events
        events, self._events = self._events, []
        return events

    def hit_sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens lay that the request was just admitted with."""
        got = self._track(request).got
        on_disk = got[-1].from_tier if got else 0
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
        if not self._stores:
            return None
        return {
            ANSWER: {
                "loaded_tokens": sum(got.tokens for got in tracked.got),
                "loaded_from_disk_tokens": sum(got.from_tier for got in tracked.got),
                "saved_tokens": tracked.tokens_saved,
            }
        }

    def reset(self) -> bool:
        """Nothing of this namespace may be served again, to any engine: the weights changed. Where the sidecar does not confirm that, it is
        told again until it does: vLLM would keep an engine paused whose reset failed, which can go on, for it finds nothing of that.

        The new weights may be in memory alone, so from now on this engine has a namespace of its own, and not that of the files. Requests
        that run keep KV of the old weights, and with them vLLM refuses to empty its prefix cache."""
        stores = self._opened()
        if not stores:
            return True
        for tracked in self._requests.values():
            self._unpin(tracked)
            tracked.keys = []
            if tracked.request.num_computed_tokens:
                tracked.sound = False
        self._saving.clear()
        self._told.clear()  # vLLM tells of that itself
        if self.block_pool is not None:
            self.block_pool.evict_blocks(set(range(self.block_pool.num_gpu_blocks)))
        salt = secrets.token_hex(16)
        self._parts, self._stores = tuple(replace(part, layout=replace(part.layout, salt=salt)) for part in self._parts), []
        self._opened()
        owed: list[Store] = []
        reason = ""
        for store in stores:
            try:
                store.clear()
            except SidecarUnavailable as error:
                reason = str(error)
                if not store.layout.salt:  # else nobody looks for it any more
                    owed.append(store)
        if owed:
            logger.error("HostKV: other engines may be served what was to be forgotten until the sidecar has confirmed: %s", reason)
            try:
                threading.Thread(target=_clear_late, args=(owed,), name="hostkv-clear", daemon=True).start()
            except RuntimeError:  # there can be no more threads
                return False
        return True

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = _Tracked(request, self._adapter(request), saved=[0] * len(self._parts))
            if request.kv_transfer_params:
                asked = self._params.read(request.kv_transfer_params)
                tracked.loads, tracked.saves = "no_load" not in asked, "no_save" not in asked
                tracked.low_priority = "low_priority" in asked
        return tracked

    def _adapter(self, request: Request) -> bytes | None:
        """What stands for the request's adapter. An engine computes all requests of a number with the weights that it loaded last under it,
        and nobody tells us when. So once the files under a path change, or a request comes with the same number and another path, or with
        the same one that was loaded again, the path that was there before is not cached any more; nor is the new one, if the engine was not
        told to load it in place of the other."""
        lora = request.lora_request
        if lora is None:
            return b""
        said = lora.lora_path, lora.load_inplace, lora.is_3d_lora_weight
        before = self._loaded_adapters.get(lora.lora_int_id, said)
        self._loaded_adapters[lora.lora_int_id] = said
        if said != before:
            for path in (before[0],) if lora.load_inplace else (before[0], lora.lora_path):
                self._give_up(path, "another was loaded in its place")
        known = self._adapters.get(lora.lora_path)
        if known is not None and known.fingerprint is None:
            return None
        try:
            files = Path(lora.lora_path).expanduser()
            state = weights_state(files)
            if known is None:
                known = self._adapters[lora.lora_path] = _Adapter(state, weights_fingerprint(files))
            if known.state == state:
                return hashlib.sha256(f"{known.fingerprint}{lora.is_3d_lora_weight}{self._adapter_settings}".encode()).digest()
            reason = "its files changed while this engine runs; put another version under another path"
        except IdentityError as error:
            reason = str(error)
        self._give_up(lora.lora_path, reason)
        return None

    def _give_up(self, path: str, reason: str) -> None:
        """Nobody can tell which requests with the adapter of this path have been computed, or are in the engine's prefix cache, with its
        old weights and which with the new ones."""
        known = self._adapters.get(path)
        if known is None or known.fingerprint is not None:
            logger.warning("HostKV: requests with the adapter %s run uncached from now on: %s", path, reason)
        self._adapters[path] = _Adapter((), None)
        for tracked in self._requests.values():
            if tracked.request.lora_request is not None and tracked.request.lora_request.lora_path == path:
                tracked.adapter, tracked.sound = None, False

    def _keys(self, tracked: _Tracked, tokens: int) -> list[Keys]:
        """Keys of the first blocks of each part, for so many tokens at least. Ids are a chain, so the last one stands for all before it."""
        ids, keyed = tracked.request.block_hashes, tracked.keyed
        if not tracked.keys or keyed > len(ids) or ids[keyed - 1] != tracked.last_id:
            tracked.keys, tracked.keyed = [Keys(b"")] * len(self._parts), 0
        if tokens > tracked.keyed * self._hash_tokens:
            for number, (part, store) in enumerate(zip(self._parts, self._stores, strict=True)):
                mine = tracked.keys[number]
                more = ids[(len(mine) + 1) * part.hashes - 1 :: part.hashes]
                if tracked.adapter:
                    more = [hashlib.sha256(block_id + tracked.adapter).digest() for block_id in more]
                if more:
                    tracked.keys[number] = mine + store.keys(more)
            self._derived += len(ids) - tracked.keyed
            tracked.keyed, tracked.last_id = len(ids), ids[-1]
        return tracked.keys

    def _unpin(self, tracked: _Tracked) -> None:
        """Nothing is pinned, or about to be, for this request."""
        queries, pins = tracked.queries, tracked.pins
        tracked.queries, tracked.pins = [], None
        self._count_pinned(tracked, 0)
        self._waiting.pop(tracked.request.request_id, None)
        for query in queries:
            self._queries.cancel(query)
        if pins is not None:
            self._release([held.tag for held in pins.held])

    def _release(self, tags: list[int]) -> None:
        if self._stores:
            self._stores[0].release(tags)  # a tag is of the session, whichever namespace is pinned under it


def _clear_late(stores: list[Store]) -> None:
    """In a thread of its own, since an engine that sleeps does no steps. Ever more seldom, for a tier may fail for good."""
    wait_s = CLEAR_AGAIN_S
    while stores:
        nap(wait_s)
        try:
            stores[0].clear()
        except SidecarUnavailable as error:
            wait_s = min(2 * wait_s, CLEAR_AGAIN_MOST_S) if isinstance(error, SidecarRefused) else CLEAR_AGAIN_S
        except RuntimeError:  # the client is closed
            return
        else:
            del stores[0]
    logger.info("HostKV: the sidecar has forgotten now what was to be forgotten")


def _by_end(handed: Iterable[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
    """tokens -> group -> block."""
    by_end: dict[int, dict[int, int]] = {}
    for group, block_id, tokens in handed:
        by_end.setdefault(tokens, {})[group] = block_id
    return by_end
