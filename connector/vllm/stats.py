"""What the connector counts, and how vLLM shows it: in the line of its log, and as metrics beside its own.

Each role adds up its Stats from its start on. After every step vLLM asks what is new (News), sums that over the roles and the ranks, and
hands it to its loggers, which may be in another process.
"""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _counter(metric: str, about: str, zero: float = 0) -> Any:
    return field(default=zero, metadata={"metric": f"vllm:hostkv_{metric}", "about": about})


@dataclass
class Stats:
    """Counters of one role since its start, with the names and descriptions of their metrics. What several ranks do is counted for each."""

    hook_cpu_s: float = _counter("hook_cpu_seconds", "CPU time of the engine's threads in the connector's hooks, in seconds.", 0.0)
    blocks_promised: int = _counter("blocks_promised", "Blocks that requests were promised.")
    blocks_loaded: int = _counter("blocks_loaded", "Blocks that were loaded, counted on each rank.")
    blocks_failed: int = _counter("blocks_failed", "Promised blocks that did not load, counted on each rank.")
    blocks_saved: int = _counter("blocks_saved", "Blocks that were saved, counted on each rank.")
    blocks_dropped: int = _counter("blocks_dropped", "Blocks that were to be saved and were not, counted on each rank.")
    bytes_loaded: int = _counter("loaded_bytes", "Bytes of the blocks that were loaded.")
    bytes_saved: int = _counter("saved_bytes", "Bytes of the blocks that were saved.")
    load_s: float = _counter("load_seconds", "Time that the copies of loads took, in seconds.", 0.0)
    save_s: float = _counter("save_seconds", "Time that saves took, in seconds.", 0.0)


_NAMES = [counter.name for counter in fields(Stats)]
_values = attrgetter(*_NAMES)
_work = attrgetter(*_NAMES[1:])  # all but CPU time


class News:
    """What vLLM was not yet told of a role's counters."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._told = _values(stats)

    def take(self) -> HostKVStats | None:
        """None when there is nothing but CPU time, which every step takes; it is told with the next news."""
        told = self._told
        if _work(self._stats) == told[1:]:
            return None
        self._told = now = _values(self._stats)
        return HostKVStats({name: after - before for name, before, after in zip(_NAMES, told, now, strict=True) if after != before})


class HostKVStats(KVConnectorStats):
    """`data`: by name of the counter, what was added. Absent is 0."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, added in other.data.items():
            self.data[name] = self.data.get(name, 0) + added
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(self.data[name], 6) for name in _NAMES if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class HostKVMetrics(KVConnectorPromMetrics):
    def __init__(
        self, config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for counter in fields(Stats):
            metric = self._counter_cls(name=counter.metadata["metric"], documentation=counter.metadata["about"], labelnames=labelnames)
            self._counters[counter.name] = create_metric_per_engine(metric, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, added in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(added)
