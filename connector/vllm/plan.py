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
class Facts(KVConnectorHandshakeMetadata):
    """What one worker knows about its KV memory, once per engine start."""

    refusal: str
    rank: int = field(default=0, compare=False)
    pool_epoch: bytes = field(default=b"", compare=False)  # of the pool it has mapped, see StepReport
    kernel: str = ""  # attention backend and how it orders the bytes of a block
    layers: int = 0
    page_bytes: int = 0
    shape: tuple[int, ...] = ()  # of one block in one layer
    strides: tuple[int, ...] = ()  # the same in bytes


@dataclass
class Load:
    """`request_id`: whose blocks they are, where the request waits for them outside of the steps; else empty, and the step waits."""

    request_id: str
    tag: int
    handles: Handles
    block_ids: list[int]


@dataclass
class Save:
    tag: int
    keys: Keys
    block_ids: list[int]


@dataclass
class StepPlan(KVConnectorMetadata):
    """What the workers do in one step. `layout` is there whenever there is anything to do."""

    layout: Layout | None = None
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """`loaded`: tags whose loads are over, well or badly, and on how many ranks. `saves`: by tag, which blocks of it were dropped.
    `pool_epochs`: by rank, which pool a worker has mapped since (empty: none). The scheduler promises nothing out of a pool that a worker
    does not have, such as a new one after a restart."""

    loaded: Counter[int]
    saves: dict[int, set[int]]
    pool_epochs: dict[int, bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        saves = {tag: self.saves.get(tag, set()) | other.saves.get(tag, set()) for tag in self.saves | other.saves}
        return StepReport(self.loaded + other.loaded, saves, self.pool_epochs | other.pool_epochs)
