"""What several ranks do to one request that one alone could not. (What a rank computed from another's lost block: test_soak.py.)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from rig import BLOCK, Engine, prompt
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored

from tests.support import Sidecar

Start = Callable[..., Engine]


def test_pins_stay_until_the_last_rank_has_loaded(sidecar: Sidecar, start: Start) -> None:
    start(sidecar, ranks=2).ask(prompt(300))
    engine = start(sidecar, ranks=2, load_in_step_bytes=0)
    worker, go_on = engine.executor.connectors[1]._worker, threading.Event()
    whole = worker._read

    def read(*args: Any) -> Any:
        go_on.wait()
        return whole(*args)

    worker._read = read
    name = engine.add(prompt(300))
    engine.step_until(lambda: engine.executor.connectors[0].stats.blocks_loaded)
    for _ in range(20):
        engine.step()
    assert sidecar.status()["pins"] == 300 // BLOCK
    go_on.set()
    engine.run()
    assert engine.answers[name].external == 300 // BLOCK * BLOCK
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


@pytest.mark.parametrize("dropped", [{0, 1, 2, 3}, {1}], ids=["all", "one"])
def test_what_one_of_several_ranks_dropped_is_not_told_as_saved(sidecar: Sidecar, start: Start, dropped: set[int]) -> None:
    engine = start(sidecar, ranks=2, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"))
    told: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: told.extend(batch.events)
    engine.executor.connectors[1]._worker._write = lambda part, save: dropped
    name = engine.add(prompt(4 * BLOCK), 2)
    engine.run()
    params = engine.answers[name].params
    assert params is not None
    assert params["hostkv"]["saved_tokens"] == (4 - len(dropped)) * BLOCK
    stored = [event for event in told if isinstance(event, BlockStored) and event.medium == MEDIUM_CPU]
    assert sum(len(event.block_hashes) for event in stored) == 4 - len(dropped)
    assert [role.stats.blocks_saved for role in engine.executor.connectors] == [4, 4 - len(dropped)]


def test_engines_of_other_sizes_have_other_blocks(sidecar: Sidecar, start: Start) -> None:
    for ranks in (1, 2, 1, 2):
        start(sidecar, ranks=ranks).ask(prompt(100, ranks))
    for ranks in (1, 2):
        engine = start(sidecar, ranks=ranks)
        assert engine.ask(prompt(100, 3 - ranks)).external == 0
        assert engine.ask(prompt(100, ranks)).external == 100 // BLOCK * BLOCK
