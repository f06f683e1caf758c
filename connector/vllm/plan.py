"""What passes between the two roles of the connector: facts at start-up, a plan for each step, and a report of it."""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ...schemas.namespace import Layout

if TYPE_CHECKING:
    from ..store import Handles, Keys


class Refused(Exception):
    """This engine's KV is not cached; the message says why."""


@dataclass(frozen=True)
class Memory:
    """How one worker's memory of one kind of KV is laid out. A block has `page_bytes` in each of the `layers`. `names`: of the model's
    layers in their order, and in which of the kind's groups each is; equal numbers of them may be others on the same stage."""

    kernel: str  # attention backend and how it orders the bytes of a block
    layers: int
    page_bytes: int
    shape: tuple[int, ...]  # of one block in one layer
    strides: tuple[int, ...]  # the same in bytes
    names: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Facts(KVConnectorHandshakeMetadata):
    """What one worker knows about its KV memory, once per engine start. `stage`: of the pipeline. `memories`: of each kind that it has."""

    refusal: str
    rank: int = 0
    stage: int = 0
    pool_epoch: bytes = b""  # of the pool it has mapped, see StepReport
    memories: dict[int, Memory] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What one slot holds: of `layout.block_tokens` tokens the KV of one kind, on one stage of the pipeline. A prefix is there when each
    part has the blocks that it needs of it."""

    layout: Layout
    kind: int
    stage: int
    hashes: int  # of the engine in one block; the last of them is the block's id
    groups: tuple[int, ...]  # of the engine's KV cache; a block here is one block of each
    reach: int  # so many tokens before its end are what a prefix needs; 0: all of them
    handed: bool  # the engine tells which blocks are to be saved, and in which of its steps

    def first(self, computed: int, tokens: int) -> int:
        """The first block that a prefix of so many tokens needs, of which the engine has `computed`; the last one ends with it."""
        return (max(computed, tokens - self.reach) if self.reach else computed) // self.layout.block_tokens


@dataclass
class Read:
    """`block_ids`: of the engine, for each group of the part."""

    part: int
    handles: Handles
    block_ids: list[list[int]]


@dataclass
class Load:
    """What one request gets. `waits`: it waits for that outside of the steps; else the step does."""

    number: int
    request_id: str
    waits: bool
    reads: list[Read]


@dataclass
class Save:
    number: int
    part: int
    keys: Keys
    block_ids: list[list[int]]
    low_priority: bool


@dataclass
class StepPlan(KVConnectorMetadata):
    """What the workers do in one step. `parts` are there whenever there is anything to do."""

    parts: tuple[Part, ...] = ()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """`loaded`: numbers of loads that are over, well or badly, and on how many ranks. `saves`: by number, which blocks of it were dropped.
    `pool_epochs`: by rank, which pool a worker has mapped since (empty: none). The scheduler promises nothing out of a pool that a worker
    does not have, such as a new one after a restart."""

    loaded: Counter[int]
    saves: dict[int, set[int]]
    pool_epochs: dict[int, bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        saves = {number: self.saves.get(number, set()) | other.saves.get(number, set()) for number in self.saves | other.saves}
        return StepReport(self.loaded + other.loaded, saves, self.pool_epochs | other.pool_epochs)
