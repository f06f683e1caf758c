"""KV events of blocks that leave the sidecar: of those that this engine told to be stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hostkv.connector import Client
from hostkv.connector.vllm import events
from rig import BLOCK, Engine, prompt
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

from tests.support import Sidecar

Start = Callable[..., Engine]
EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def listening(engine: Engine) -> list[Any]:
    told: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: told.extend(batch.events)
    return told


def hashes(told: list[Any], kind: type) -> list[Any]:
    return [block for event in told if isinstance(event, kind) and event.medium == MEDIUM_CPU for block in event.block_hashes]


def until_served(engine: Engine) -> None:
    engine.step_until(lambda: all(role._client.serving() for role in engine.ours))


def test_blocks_that_went_are_told_to_be_gone_once_and_no_others(sidecar: Sidecar, start: Start) -> None:
    engine = start(sidecar, kv_events_config=EVENTS)
    told = listening(engine)
    for one in ("a", "b"):
        engine.ask(prompt(4 * BLOCK, one), 2)
    stored = hashes(told, BlockStored)
    assert len(stored) == 8
    sidecar.kill()
    engine.ask(prompt(10, "c"), 40)
    assert hashes(told, BlockRemoved) == [], "the pool is there, though nobody serves it"
    sidecar.start()
    until_served(engine)
    engine.ask(prompt(10, "d"), 40)
    assert hashes(told, BlockRemoved) == []
    with Client(sidecar.endpoint) as client:
        store = client.open(engine.ours[0]._parts[0].layout)
        store.clear()
    engine.ask(prompt(4 * BLOCK, "b"), 2)
    engine.ask(prompt(10, "e"), 40)
    assert hashes(told, BlockRemoved) == stored[:4], "the others came back before anybody looked"
    assert hashes(told, BlockStored)[8:] == stored[4:]


def test_of_many_blocks_some_are_looked_at_in_each_step_and_the_first_are_forgotten(
    sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_TOLD", 6)
    monkeypatch.setattr(events, "LOOKED_AT", 1)
    engine = start(sidecar, kv_events_config=EVENTS)
    told = listening(engine)
    engine.ask(prompt(8 * BLOCK), 30)
    stored = hashes(told, BlockStored)
    assert hashes(told, BlockRemoved) == stored[: len(stored) - 6]
    with Client(sidecar.endpoint) as client:
        client.open(engine.ours[0]._parts[0].layout).clear()
    engine.ask(prompt(10), 1)
    assert len(hashes(told, BlockRemoved)) < len(stored), "not in one step"
    engine.ask(prompt(10), 10)
    assert hashes(told, BlockRemoved)[: len(stored)] == stored


def test_an_engine_that_publishes_no_events_remembers_none(sidecar: Sidecar, start: Start) -> None:
    engine = start(sidecar)
    engine.ask(prompt(4 * BLOCK), 2)
    assert not engine.ours[0]._told._blocks
