"""Blocks between the pool and a tier: what is spilled and promoted, who waits for what, and what is left when any of it fails."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hostkv.cext import Index
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status
from hostkv.schemas.layout import DEVICE, TIER
from hostkv.sidecar.core import MAX_CONNECTIONS
from hostkv.sidecar.tiers import CORRUPT, Done, Forget, Job, Read, Space, Write

from tests.cores import EXTENT, Driver, ident, keys, make_layout

A, B = b"A", b"B"
OK, BUSY, MISS = Status.OK, Status.BUSY, Status.MISS
BLOCK = 1 << 16
MS = 10**6
SECOND = 10**9


class Disk:
    """A tier whose jobs wait until a test ends them. `rooms`: of each directory; its blocks are remembered by key and checksum."""

    def __init__(self, slabs: int = 12, directories: int = 1) -> None:
        self.index = Index(None, 256, 16 * BLOCK)
        self.rooms = {self.index.add_directory(slabs): 8 for _ in range(directories)}
        for directory in self.rooms:
            self.index.enable(directory)
        self.numbers_of: dict[bytes, int] = {}
        self.on, self.largest_bytes = True, 16 * BLOCK
        self._next = itertools.count(1)
        self.jobs: list[Job] = []

    def number(self, space: Space) -> int:
        return self.numbers_of.setdefault(space.fingerprint, next(self._next))

    def retire(self, spaces: Iterable[Space] | None) -> list[int]:
        names = [space.fingerprint for space in spaces] if spaces is not None else list(self.numbers_of)
        return [self.numbers_of.pop(name) for name in names if name in self.numbers_of]

    def takes(self) -> bool:
        return self.on

    def room(self) -> int:
        return min((room for room in self.rooms.values() if room), default=0)

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not isinstance(job, Forget):
                self.rooms[job.directory] -= 1
        self.jobs += jobs

    def status(self) -> dict[str, Any]:
        return {"type": "fake"}


class Tiered(Driver):
    def __init__(self, before: Driver | None = None, disk: Disk | None = None, **sizes: int) -> None:
        self.disk = disk or Disk()
        self.silent = True  # what quiet() says
        super().__init__(before, tier=self.disk, quiet=lambda: self.silent, **sizes)

    def work(self, kind: type[Any] = Write | Read | Forget) -> list[Any]:  # type: ignore[assignment]
        """Gives out jobs; all that are under way, of one kind."""
        self.disk.submit(self.core.work(self.now_ns))
        return [job for job in self.disk.jobs if isinstance(job, kind)]

    def end(self, *jobs: Any, result: int = 0, checksum: int | None = None) -> None:
        done = []
        for job in jobs:
            self.disk.jobs.remove(job)
            if not isinstance(job, Forget):
                self.disk.rooms[job.directory] += 1
            sum_ = 0 if isinstance(job, Forget) else checksum if checksum is not None else job.checksum or 5
            done.append(Done(job.token, result, sum_ if result == 0 else 0))
        self.core.complete(done, self.now_ns)

    def spill(self) -> None:
        while jobs := self.work(Write):
            self.end(*jobs)

    def send(self, connection: bytes, request: m.Request, number: int = 77) -> bool:
        """Whether it was answered at once (the answer is in `answers`)."""
        self.now_ns += 1000
        self.requests[connection, number] = request
        reply = self.core.handle(connection, m.encode_request(request, number), self.now_ns)
        self.collect()
        if reply:
            self.answers.append((connection, number, m.decode_reply(reply, request)[2]))
        return bool(reply)

    def collect(self) -> list[tuple[bytes, int, Any]]:
        for connection, reply in self.core.replies():
            number = m.decode_reply(reply, None)[0]
            self.answers.append((connection, number, m.decode_reply(reply, self.requests[connection, number])[2]))
        return self.answers

    requests: dict[tuple[bytes, int], m.Request] = {}  # noqa: RUF012 - set anew by the fixture
    answers: list[tuple[bytes, int, Any]] = []  # noqa: RUF012


@pytest.fixture
def core() -> Iterator[Tiered]:
    yield from made(Tiered())


def made(driver: Tiered) -> Iterator[Tiered]:
    driver.requests, driver.answers = {}, []
    driver.hello(A)
    assert driver.register(A) == 0
    yield driver
    assert driver.ended or driver.tables.check() == []
    assert driver.disk.index.check() == []
    driver.close()


def on_disk_only(core: Tiered, *names: int) -> None:
    """Saves blocks, spills them and drops them from the pool."""
    core.write(A, 0, list(names))
    core.spill()
    handles = core.ask(A, m.Acquire(0, 99, keys(*names)))
    core.ask(A, m.Discard(0, keys(*names), handles.generations))
    core.ask(A, m.Release(tags_of(99)))
    assert core.tables.lookup(0, keys(*names)) == bytes([MISS]) * len(names)


def tags_of(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)


def fill(core: Tiered, first: int, last: int) -> None:
    for at in range(first, last, 16):
        core.write(A, 0, list(range(at, min(at + 16, last))))


def prefetch(*names: int, wait_ms: int = 1000, index: int = 0) -> m.Prefetch:
    return m.Prefetch(index, keys(*names), wait_ms)


def found(core: Tiered, *names: int) -> list[int]:
    return list(core.tables.lookup(0, keys(*names)))


# ---- spill -------------------------------------------------------------------------------------------------------------------------
def test_what_is_committed_is_spilled_once_and_clean_then(core: Tiered) -> None:
    core.write(A, 0, [1, 2])
    jobs = core.work(Write)
    assert [job.key for job in jobs] == [keys(1), keys(2)]
    assert core.tables.stats()["pins"] == 2
    core.end(*jobs)
    assert core.tables.stats()["dirty"] == core.tables.stats()["pins"] == 0
    assert core.disk.index.has(keys(1, 2, 3), 1) == b"\1\1\0"
    assert core.work() == []
    assert core.core.status(0)["tiers"][0]["spilled"] == 2


def test_no_more_jobs_are_given_out_than_there_is_room_for(core: Tiered) -> None:
    core.write(A, 0, list(range(10)))
    assert len(core.work(Write)) == 8
    core.end(core.disk.jobs[0])
    assert len(core.work(Write)) == 8


def test_however_slow_the_tier_writes_in_flight_pin_a_share_of_the_pool_and_engines_find_room_in_the_rest(core: Tiered) -> None:
    core.disk.rooms = dict.fromkeys(core.disk.rooms, 1000)
    for first in range(0, 256, 16):  # twice what the pool holds
        core.write(A, 0, list(range(first, first + 16)))
        assert len(core.work(Write)) <= 32, "a quarter of 128 slots"
    jobs = core.work(Write)
    assert len(jobs) == 32
    core.end(*jobs[:10])
    assert len(core.work(Write)) == 32


def test_a_block_that_is_on_the_tier_is_not_written_again(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.write(A, 0, [1])
    assert core.work() == []
    assert core.tables.stats()["dirty"] == 0


def test_a_failed_spill_is_tried_again_after_a_pause_and_meanwhile_dirty_blocks_may_go(core: Tiered) -> None:
    core.watch()
    core.write(A, 0, [1])
    core.end(*core.work(Write), result=errno.EIO)
    core.watch()
    assert core.work() == []
    assert core.tables.stats()["dirty"] == 1
    assert core.disk.index.stats()["blocks"] == 0
    fill(core, 100, 227)  # the pool has 128 slots: full now
    core.write(A, 0, [300])
    assert found(core, 1, 300) == [MISS, OK]
    assert core.tables.stats()["evicted_dirty"] == 0, "nothing was to be gained from keeping it"
    core.now_ns += 2 * SECOND
    assert len(core.work(Write)) == 8


def test_a_block_that_does_not_match_its_own_checksum_is_discarded_instead_of_spilled(core: Tiered) -> None:
    core.write(A, 0, [1, 2])
    first, second = core.work(Write)
    core.end(first, result=CORRUPT)
    core.end(second)
    assert found(core, 1, 2) == [MISS, OK]
    assert core.disk.index.has(keys(1, 2), 1) == b"\0\1"


def test_a_full_tier_pauses_spills(core: Tiered) -> None:
    core.disk.index.enable(0, False)
    core.write(A, 0, [1])
    assert core.work() == []
    assert core.tables.stats()["pins"] == 0
    core.disk.index.enable(0)
    assert core.work() == []
    core.now_ns += 2 * SECOND
    assert len(core.work(Write)) == 1


# ---- promotion -----------------------------------------------------------------------------------------------------------------------
def test_a_prefetch_is_answered_when_its_blocks_have_come(core: Tiered) -> None:
    on_disk_only(core, 1, 2)
    core.write(A, 0, [3])
    core.spill()
    assert not core.send(A, prefetch(1, 2, 3, 4))
    first, second = core.work(Read)
    assert core.tables.stats()["shards_in_flight"] == 2
    core.end(first)
    assert core.collect() == []
    core.end(second)
    assert core.collect() == [(A, 77, m.StatusesReply(bytes([OK, OK, OK, MISS])))]
    assert found(core, 1, 2) == [OK, OK]
    assert core.tables.stats()["dirty"] == 0
    assert list(core.ask(A, m.Acquire(0, 5, keys(1, 2))).statuses) == [OK, OK]


def test_a_prefetch_that_has_nothing_to_wait_for_is_answered_at_once(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.write(A, 0, [3])
    assert core.send(A, prefetch(3, 4))
    assert core.send(A, prefetch(1, 3, wait_ms=0))
    assert [list(reply.statuses) for _, _, reply in core.answers] == [[OK, MISS], [BUSY, OK]]
    assert [job.page for job in core.work(Read)] != []


def test_blocks_are_read_in_the_order_they_were_asked_for_before_anything_is_spilled(core: Tiered) -> None:
    on_disk_only(core, 5, 1, 3)
    core.write(A, 0, [9])
    core.send(A, prefetch(1, 5, 3))
    jobs = core.work()
    assert [type(job) for job in jobs] == [Read, Read, Read, Write]
    opened = [core.disk.index.open(keys(n), 1) for n in (1, 5, 3)]
    assert [(job.slab, job.slot) for job in jobs[:3]] == [(each[2], each[3]) for each in opened if each]
    for each in opened:
        assert each is not None
        core.disk.index.close(each[0], True)


def test_several_waiters_share_one_read(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.hello(B, client=2)
    core.register(B)
    core.send(A, prefetch(1))
    core.send(B, prefetch(1, 2))
    (job,) = core.work(Read)
    assert core.work(Read) == [job]
    core.end(job)
    assert [(who, list(reply.statuses)) for who, _, reply in core.collect()] == [(A, [OK]), (B, [OK, MISS])]


def test_time_that_is_up_ends_a_wait_and_not_the_read(core: Tiered) -> None:
    on_disk_only(core, 1, 2)
    core.send(A, prefetch(1, 2, wait_ms=50))
    first, second = core.work(Read)
    core.end(first)
    core.watch(49 * MS)
    assert core.collect() == []
    core.watch(2 * MS)
    assert core.collect() == [(A, 77, m.StatusesReply(bytes([OK, BUSY])))]
    core.end(second)
    assert found(core, 2) == [OK]
    assert len(core.collect()) == 1


def test_the_next_message_of_a_connection_ends_its_wait_and_is_answered_after_it(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.send(A, prefetch(1), number=5)
    core.work()
    assert core.send(A, m.Lookup(0, keys(1)), number=6)
    assert [(number, type(reply)) for _, number, reply in core.answers] == [(5, m.StatusesReply), (6, m.LookupReply)]
    core.send(A, prefetch(1), number=7)
    core.core.handle(A, b"rubbish", core.now_ns)
    assert [number for _, number, _ in core.collect()] == [5, 6, 7]


@pytest.mark.parametrize("result", [CORRUPT, errno.EIO])
def test_a_block_that_cannot_be_read_is_a_miss_until_the_next_save(core: Tiered, result: int) -> None:
    on_disk_only(core, 1, 2)
    core.send(A, prefetch(1, 2))
    first, second = core.work(Read)
    core.end(first, result=result)
    core.end(second)
    assert core.collect() == [(A, 77, m.StatusesReply(bytes([MISS, OK])))]
    assert core.disk.index.has(keys(1, 2), 1) == b"\0\1"
    assert core.tables.stats()["shards_in_flight"] == 0
    core.write(A, 0, [1])
    core.spill()
    assert core.disk.index.has(keys(1), 1) == b"\1"


def test_a_namespace_finds_only_its_own_blocks_on_the_tier(core: Tiered) -> None:
    on_disk_only(core, 1)
    other = core.register(A, make_layout("other"))
    assert core.send(A, prefetch(1, index=other))
    assert core.answers[-1][2].statuses == bytes([MISS])
    assert core.refused(A, m.Prefetch(3, keys(1), 0)) is ErrorCode.NO_NAMESPACE


def test_a_block_of_several_shards_comes_back_whole_with_its_checksum() -> None:
    for core in made(Tiered()):
        index = core.register(A, make_layout("wide", 1000, 3))
        granted = core.ask(A, m.Reserve(index, 1, keys(1) * 3, b"\0\0\1\0\2\0"))
        core.ask(A, m.Commit(1, keys(1) * 3, b"\0\0\1\0\2\0", granted.generations, bytes(24)))
        core.spill()
        held = core.ask(A, m.Acquire(index, 9, keys(1)))
        core.ask(A, m.Discard(index, keys(1), held.generations))
        core.ask(A, m.Release(tags_of(9)))
        core.send(A, prefetch(1, index=index))
        (job,) = core.work(Read)
        assert (job.shards, job.shard_bytes, job.slot_bytes) == (3, 1000, 4096)
        assert core.tables.stats()["shards_in_flight"] == 3
        core.end(job)
        assert core.collect() == [(A, 77, m.StatusesReply(bytes([OK])))]


def test_a_block_that_an_engine_is_writing_again_is_not_read(core: Tiered) -> None:
    on_disk_only(core, 1)
    granted = core.ask(A, m.Reserve(0, 1, keys(1), b"\0\0"))
    core.send(A, prefetch(1))
    assert core.work(Read) == []
    assert core.collect() == [(A, 77, m.StatusesReply(bytes([MISS])))]
    assert list(core.ask(A, m.Commit(1, keys(1), b"\0\0", granted.generations, bytes(8))).statuses) == [OK]


def test_without_a_slot_in_the_pool_a_block_waits_for_transfers_and_else_is_a_miss(core: Tiered) -> None:
    on_disk_only(core, 1, 2)
    fill(core, 100, 227)
    core.spill()
    for session, first in ((2, 100), (3, 132), (4, 164), (5, 196)):  # 127 of 128 slots
        who = b"%d" % session
        core.hello(who, client=session, session=session)
        core.register(who)
        assert not any(core.ask(who, m.Acquire(0, 7, keys(*range(first, min(first + 32, 227))))).statuses)
    core.send(A, prefetch(1, 2))
    (job,) = core.work(Read)
    core.end(job)
    assert core.collect() == []
    core.ask(b"2", m.Acquire(0, 8, keys(1)))
    assert core.work(Read) == []
    assert core.collect() == [(A, 77, m.StatusesReply(bytes([OK, MISS])))]


def test_a_block_that_waits_for_a_slot_lets_those_of_other_namespaces_pass() -> None:
    for core in made(Tiered(pool_bytes=3 * EXTENT)):
        core.disk.rooms = dict.fromkeys(core.disk.rooms, 1000)
        slots = EXTENT // BLOCK
        on_disk_only(core, *range(slots))
        on_disk_only(core, slots, slots + 1)
        other = core.register(A, make_layout("other", BLOCK // 2))
        core.write(A, other, [50, 51])
        core.spill()
        handles = core.ask(A, m.Acquire(other, 9, keys(50, 51)))
        core.ask(A, m.Discard(other, keys(50), handles.generations[:8]))
        core.ask(A, m.Release(tags_of(9)))
        core.ask(A, m.Acquire(other, 8, keys(51)))  # so that one extent stays theirs
        core.write(A, 0, list(range(100, 100 + slots)))
        core.spill()
        core.ask(A, m.Acquire(0, 8, keys(*range(100, 100 + slots))))
        core.hello(B, client=2)
        core.register(B)
        core.register(B, make_layout("other", BLOCK // 2))
        core.send(A, prefetch(*range(slots + 2)))
        core.send(B, prefetch(50, index=other))
        jobs = core.work(Read)
        assert [job.slot_bytes for job in jobs] == [BLOCK] * slots + [BLOCK // 2]
        core.end(jobs[-1])
        assert core.collect() == [(B, 77, m.StatusesReply(bytes([OK])))]
        core.end(jobs[0])
        core.work(Read)
        assert found(core, 0, slots, slots + 1) == [MISS] * 3, "the first of those that wait has its slot"
        core.end(*core.disk.jobs)
        assert found(core, slots) == [OK]


def test_who_waits_for_what_the_tier_has_no_more_is_told_while_it_takes_no_jobs(core: Tiered) -> None:
    on_disk_only(core, 1, 2, 3)
    core.hello(B, client=2)
    core.register(B)
    core.disk.rooms[0] = 0
    core.send(A, prefetch(1, 2, 3))
    assert core.work() == []
    core.write(B, 0, [1])
    assert core.work() == []
    assert core.collect() == []
    core.disk.index.drop(0)
    assert core.work() == []
    assert core.collect() == [(A, 77, m.StatusesReply(bytes([OK, MISS, MISS])))]


def test_what_a_busy_directory_does_not_take_is_a_miss_now_and_stays_on_the_tier(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.send(A, prefetch(1))
    core.end(*core.work(Read), result=errno.EBUSY)
    assert core.collect() == [(A, 77, m.StatusesReply(bytes([MISS])))]
    assert core.disk.index.has(keys(1), 1) == b"\1"


def test_blocks_that_no_place_of_the_tier_is_large_enough_for_are_left_in_the_pool(core: Tiered) -> None:
    core.disk.largest_bytes = BLOCK - 1
    core.write(A, 0, [1])
    assert core.work() == []
    assert core.tables.stats()["dirty"] == 0
    assert core.core.status(0)["tiers"][0]["too_large"] == 1


# ---- clear ---------------------------------------------------------------------------------------------------------------------------
def test_a_clear_is_answered_when_the_tier_has_forgotten_too(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.write(A, 0, [2])
    assert not core.send(A, m.Clear(0))
    (job,) = core.work(Forget)
    assert core.disk.index.has(keys(1), 1) == b"\0"
    assert core.core.moving(), "nobody ends the sidecar before the answer"
    core.end(job)
    assert not core.core.moving()
    assert core.collect() == [(A, 77, m.CountReply(1))]
    core.write(A, 0, [1])
    assert core.work(Write)[0].namespace != job.namespace


def test_a_clear_is_made_to_last_while_nothing_else_is_to_be_moved(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.write(A, 0, [2])
    core.send(A, prefetch(1), number=5)
    assert core.core.work(core.now_ns, transfers=False) == []
    core.send(A, m.Clear(0), number=6)
    (job,) = core.core.work(core.now_ns, transfers=False)
    core.core.complete([Done(job.token, 0, 0)], core.now_ns)
    assert core.collect()[-1] == (A, 6, m.CountReply(1))


def test_a_clear_that_the_tier_cannot_make_last_is_an_error_and_the_pool_is_cleared(core: Tiered) -> None:
    core.write(A, 0, [1])
    core.spill()
    core.send(A, m.Clear(0))
    core.end(*core.work(Forget), result=errno.EIO)
    assert core.collect()[0][2].error == ErrorCode.TIER
    assert found(core, 1) == [MISS]


def test_a_clear_of_all_namespaces_reaches_those_that_only_the_tier_knows(core: Tiered) -> None:
    core.disk.numbers_of[b"of an earlier boot"] = 50
    on_disk_only(core, 1)
    core.send(A, m.Clear(m.ALL_NAMESPACES))
    jobs = core.work(Forget)
    assert sorted(job.namespace for job in jobs) == [1, 50]
    core.end(*jobs)
    assert core.collect() == [(A, 77, m.CountReply(0))]


def test_blocks_that_are_cleared_while_they_move_stay_away(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.write(A, 0, [2])
    core.send(A, prefetch(1))
    jobs = core.work()
    assert {type(job) for job in jobs} == {Read, Write}
    core.send(A, m.Clear(0), number=78)
    core.end(*core.work(Forget))
    core.end(*jobs)
    assert found(core, 1, 2) == [MISS, MISS]
    assert core.tables.stats()["blocks"] == 0
    assert core.disk.index.stats()["blocks"] == 0


# ---- life ------------------------------------------------------------------------------------------------------------------------------
def test_slots_that_an_earlier_sidecar_was_moving_wait_until_the_tier_is_quiet(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.write(A, 0, [2])
    core.send(A, prefetch(1))
    assert len(core.work()) == 2
    successor = Tiered(core)
    successor.requests, successor.answers = {}, []
    successor.silent = False
    for _ in range(3):
        assert successor.watch(SECOND) == []
    assert successor.tables.stats()["shards_in_flight"] == successor.tables.stats()["pins"] == 1
    assert successor.tables.lookup(0, keys(1)) == bytes([MISS])
    successor.silent = True
    assert [event.what for event in successor.watch()] == ["transfers of an earlier sidecar have ended"]
    assert successor.tables.stats()["shards_in_flight"] == successor.tables.stats()["pins"] == 0
    assert successor.tables.lookup(0, keys(2)) == bytes([OK])
    assert successor.tables.check() == []


def test_nobody_joins_the_sidecars_own_session_or_takes_its_place(core: Tiered) -> None:
    own = core.core.instance_id
    core.locks[ident(9)] = 0
    core.locks[own] = 0
    for client, session, lock in ((own, own, own), (ident(9), own, ident(9)), (own, ident(9), ident(9))):
        assert core.refused(b"X", m.Hello([2, 1], client, session, lock, 1, "")) is ErrorCode.BAD_VALUE
    assert not core.core.attach(own)
    assert [flags for *_, flags in core.tables.members() if flags != 0] == [TIER]
    assert core.core.attach(ident(1))
    assert sorted(flags for *_, flags in core.tables.members()) == [DEVICE, TIER]


def test_who_is_forgotten_waits_for_nothing(core: Tiered) -> None:
    on_disk_only(core, 1)
    core.send(A, prefetch(1))
    core.core.forget(A)
    core.end(*core.work(Read))
    assert core.collect() == []
    assert core.core.status(0)["waiting"] == 0


@pytest.mark.parametrize("how", ["bye", "lock gone", "device's lock gone", "too many connections"])
def test_what_a_connection_waits_for_is_answered_when_its_member_or_it_must_go(core: Tiered, how: str) -> None:
    on_disk_only(core, 1)
    core.hello(B)
    assert not core.send(A, prefetch(1), number=5)
    if how == "bye":
        assert core.send(B, m.Bye(), number=6)
        assert core.answers.pop() == (B, 6, m.Empty())
    elif how == "too many connections":
        for n in range(MAX_CONNECTIONS - 1):
            core.hello(b"%d" % n)
    else:
        if "device" in how:
            assert core.core.attach(ident(1))
        core.die(1)
    assert core.collect() == [(A, 5, m.StatusesReply(bytes([BUSY])))]
    assert core.core.status(0)["waiting"] == 0
    assert core.refused(A, m.Lookup(0, keys(1))) is ErrorCode.NO_SESSION


def test_at_the_end_what_engines_had_pinned_is_spilled_too(core: Tiered) -> None:
    core.write(A, 0, [1, 2])
    core.ask(A, m.Acquire(0, 5, keys(1)))
    assert [job.key for job in core.work(Write)] == [keys(2)]
    core.core.end_members()
    assert [job.key for job in core.work(Write)] == [keys(2), keys(1)]
    assert core.core.moving()
    core.end(*core.disk.jobs)
    assert not core.core.moving()
    assert core.tables.stats()["dirty"] == 0


def test_at_the_end_nothing_is_read_that_nobody_will_use(core: Tiered) -> None:
    on_disk_only(core, *range(8))
    core.write(A, 0, [8])
    core.send(A, prefetch(*range(8), wait_ms=0))
    core.core.end_members()
    assert [type(job) for job in core.work()] == [Write]
    assert core.core.status(0)["tiers"][0]["wanted"] == 0


def test_without_a_tier_a_prefetch_tells_what_is_in_the_pool() -> None:
    driver = Driver()
    driver.hello(A)
    driver.register(A)
    driver.write(A, 0, [1])
    assert driver.ask(A, prefetch(1, 2)).statuses == bytes([OK, MISS])
    assert driver.core.status(0)["tiers"] == []
    driver.close()


assert EXTENT % BLOCK == 0
