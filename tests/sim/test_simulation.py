"""A few seeds of the simulation; CI runs thousands (`python -m tests.sim`)."""

from __future__ import annotations

import pytest

from tests.sim.host import small_limits
from tests.sim.model import Violation
from tests.sim.world import World, run

SEEDS, CHUNK = 200, 20


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_nothing_is_lost_leaked_or_wrong_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(seed, 500)


def test_a_seed_replays_exactly() -> None:
    histories = []
    for _ in range(2):
        with small_limits():
            world = World(7)
            while world.steps < 300:
                world.step()
        histories.append((str(world.log), world.seen, world.pool))
        world.close()
    assert histories[0] == histories[1]


def test_a_failing_seed_tells_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostkv.sidecar.core.Core._leave", lambda self, member: None)
    what = r"(?s)seed 0, step \d+: .*the last \d+ events:.*again: python -m tests.sim --seeds 1 --first 0 --steps 500"
    with pytest.raises(Violation, match=what):
        run(0, 500)
