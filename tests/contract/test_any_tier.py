"""What every tier promises (sidecar/tiers): it is compared with a perfect one in memory through many restarts, hunting blocks that were
never written, or were forgotten, and bytes that are not theirs. A tier may lose a block; one with room for all of them does not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hostkv.sidecar.tiers import CORRUPT, Read
from hostkv.sidecar.tiers.disk import QUEUE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support import MEMORY
from tests.tiers import MIB, Rig, checksum_of, key_of, make_space, payload_of

SPACES = [make_space("a"), make_space("b", shards=1, shard_bytes=60_000), make_space("c", shards=3, shard_bytes=100)]
NAMES = st.integers(0, 15)
WHICH = st.sampled_from(SPACES)

TIERS: dict[str, Callable[[Path], Rig]] = {
    "disk": lambda base: Rig(base / "a"),
    "disk on threads": lambda base: Rig(base / "a", engine="threads"),
    "three disks": lambda base: Rig(base / "a", base / "b", base / "c", size_bytes=48 * MIB),
}


class AgainstAPerfectOne(RuleBasedStateMachine):
    make: Callable[[Path], Rig]

    @initialize()
    def start(self) -> None:
        """Many files are made; a disk has nothing to do with what is promised."""
        self.base = Path(tempfile.mkdtemp(prefix="hostkv-test-", dir=MEMORY))
        self.rig = type(self).make(self.base)
        self.there: set[tuple[int, int]] = set()  # (space, name) of what must be found
        self.maybe: set[tuple[int, int]] = set()  # removed singly: may be found again after a restart, with the right bytes
        self.flying: list[tuple[int, int, int, int]] = []  # token, entry, space, name
        self.removed: set[tuple[int, int]] = set()  # while they were

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.__exit__()
            shutil.rmtree(self.base)

    @rule(space=WHICH, name=NAMES)
    def write(self, space: object, name: int) -> None:
        which = SPACES.index(space)  # type: ignore[arg-type]
        result = self.rig.write(name, SPACES[which])
        known = {*self.there, *self.maybe, *((s, n) for _, _, s, n in self.flying)}
        assert result == 0 or (result is None and (which, name) in known)
        if result == 0:
            self.there.add((which, name))

    @rule(space=WHICH, name=NAMES, page=st.integers(0, 200))
    def begin_write(self, space: object, name: int, page: int) -> None:
        """Whose end comes later."""
        which = SPACES.index(space)  # type: ignore[arg-type]
        if len(self.flying) < 8 and (begun := self.rig.begin_write(name, SPACES[which], 512 + 32 * len(self.flying))) is not None:
            self.flying.append((*begun, which, name))

    @rule()
    def end_writes(self) -> None:
        for token, entry, which, name in self.flying:
            (done,) = self.rig.wait([token])
            self.rig.disk.index.settle(entry, done.checksum if done.result == 0 else None)
            if done.result == 0 and self.rig.disk.index.has(key_of(name, SPACES[which]), self.rig.disk.number(SPACES[which]))[0]:
                self.there.add((which, name))
            elif done.result == 0 and (which, name) in self.removed:
                self.maybe.add((which, name))
        self.flying.clear()
        self.removed.clear()

    @rule(space=WHICH, name=NAMES)
    def read(self, space: object, name: int) -> None:
        which = SPACES.index(space)  # type: ignore[arg-type]
        result = self.rig.read(name, SPACES[which])  # which checks the bytes
        if (which, name) in self.there:
            assert result == 0, "a block was lost"
        elif (which, name) not in self.maybe:
            assert result is None, "a phantom"

    @rule(space=WHICH, name=NAMES)
    def remove(self, space: object, name: int) -> None:
        which = SPACES.index(space)  # type: ignore[arg-type]
        self.rig.disk.index.remove(key_of(name, SPACES[which]), self.rig.disk.number(SPACES[which]))
        if (which, name) in self.there:
            self.there.remove((which, name))
            self.maybe.add((which, name))
        if any((s, n) == (which, name) for _, _, s, n in self.flying):
            self.removed.add((which, name))

    @rule(which=st.integers(0, len(SPACES)))
    def forget(self, which: int) -> None:
        spaces = SPACES if which == len(SPACES) else [SPACES[which]]
        assert set(self.rig.forget(*spaces)) <= {0}
        gone = {SPACES.index(space) for space in spaces}
        self.there = {each for each in self.there if each[0] not in gone}
        self.maybe = {each for each in self.maybe if each[0] not in gone}
        self.removed = {each for each in self.removed if each[0] not in gone}

    @rule()
    def reopen(self) -> None:
        self.end_writes()
        self.rig.reopen()
        assert self.rig.disk.quiet()

    @rule()
    def look_at_all(self) -> None:
        for which, space in enumerate(SPACES):
            held = self.rig.held(range(16), space)
            flying = {n for _, _, s, n in self.flying if s == which}
            must = {n for s, n in self.there if s == which}
            may = must | {n for s, n in self.maybe if s == which}
            assert must - flying <= held <= may, "lost, or phantoms"

    @invariant()
    def index_is_sound(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.disk.index.check() == []


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_is_a_perfect_one_that_may_forget_nothing_and_invent_nothing(name: str) -> None:
    machine = type(name, (AgainstAPerfectOne,), {"make": staticmethod(TIERS[name])})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=30))


@pytest.fixture(params=list(TIERS))
def rig(request: pytest.FixtureRequest) -> Rig:
    with tempfile.TemporaryDirectory(prefix="hostkv-test-", dir=MEMORY) as base, TIERS[request.param](Path(base)) as rig:
        yield rig


def test_a_full_tier_keeps_the_newest_and_invents_nothing(rig: Rig) -> None:
    space = SPACES[1]
    newest = range(2000, 2040)
    rig.write_all(range(2040), space)
    for _ in range(3):
        held = rig.held(range(2100), space)
        assert set(newest) <= held < set(range(2040))
        rig.reopen()


def test_every_job_is_done_once_with_the_checksum_of_its_bytes(rig: Rig) -> None:
    space = SPACES[0]
    begun = {name: rig.begin_write(name, space, 4 * name) for name in range(QUEUE)}
    for name, each in begun.items():
        assert each is not None
        (done,) = rig.wait([each[0]])
        assert (done.result, done.checksum) == (0, checksum_of(payload_of(name, space), space))
        rig.disk.index.settle(each[1], done.checksum)
    reads = {name: rig.begin_read(name, space, 4 * name) for name in begun}
    for name, each in reads.items():
        assert each is not None
        (done,) = rig.wait([each[0]])
        assert (done.result, done.checksum) == (0, checksum_of(payload_of(name, space), space))
        rig.disk.index.close(each[1], True)
    for _ in range(5):
        rig.turn(0)  # and no second one comes: turn() would say so


def test_a_read_of_other_bytes_is_corrupt_and_never_good(rig: Rig) -> None:
    space = SPACES[0]
    rig.write_all(range(2), space)
    number = rig.disk.number(space)
    (entry, directory, slab, slot, _), (other, *_, checksum) = (rig.disk.index.open(key_of(name, space), number) for name in range(2))
    rig.disk.submit([Read(10**6, directory, slab, slot, 0, space.shards, space.shard_bytes, space.slot_bytes, checksum)])
    assert rig.wait([10**6])[0].result == CORRUPT
    rig.disk.index.close(entry, False)
    rig.disk.index.close(other, True)
    assert rig.held(range(2), space) == {1}


def test_room_is_what_may_be_submitted(rig: Rig) -> None:
    room = rig.disk.room()
    begun = [rig.begin_write(name, SPACES[0], 4 * name) for name in range(room)]
    assert {done.result for done in rig.wait(each[0] for each in begun if each is not None)} == {0}


def test_an_end_keeps_what_was_written(rig: Rig) -> None:
    rig.write_all(range(30), SPACES[2])
    for _ in range(10):
        rig.reopen()
        assert rig.held(range(60), SPACES[2]) == set(range(30))
