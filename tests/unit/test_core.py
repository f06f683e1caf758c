"""The core, message by message: what each is answered, in each state, and that an error changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hostkv.cext import View
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status
from hostkv.schemas.layout import DEVICE
from hostkv.schemas.namespace import Layout
from hostkv.sidecar.core import DEVICE_WAIT_NS, MAX_CONNECTIONS, SILENT_NS, Event

from tests.cores import EXTENT, Driver, ident, keys, make_layout, tags

A, B = b"A", b"B"
ONE = b"\x00\x00"
OK, EXISTS, BUSY, FULL, THROTTLED, NOT_HELD, MISS = Status
SECOND = 10**9


@pytest.fixture
def core() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    assert driver.ended or driver.tables.check() == []
    driver.close()


@pytest.fixture
def joined(core: Driver) -> Driver:
    """Connection A is a member and has registered namespace 0."""
    core.hello(A)
    assert core.register(A) == 0
    return core


def reserve(core: Driver, connection: bytes, *names: int, tag: int = 1, index: int = 0, shards: bytes | None = None) -> Any:
    return core.ask(connection, m.Reserve(index, tag, keys(*names), shards if shards is not None else bytes(2 * len(names))))


def acquire(core: Driver, connection: bytes, *names: int, tag: int = 9, index: int = 0) -> Any:
    return core.ask(connection, m.Acquire(index, tag, keys(*names)))


def found(core: Driver, connection: bytes, *names: int, index: int = 0) -> list[int]:
    return list(core.ask(connection, m.Lookup(index, keys(*names))).found)


# ---- hello ----


def test_hello_answers_where_the_pool_is(core: Driver) -> None:
    reply = core.hello(A)
    assert reply.protocol == [m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR]
    assert (reply.pool_path, reply.tables_path, reply.pool_bytes) == ("/x", "/x.tables", 8 * EXTENT)
    assert reply.pool_epoch == core.tables.pool_epoch
    assert reply.clock_ns == core.now_ns


def test_hello_without_a_held_lock_is_no_lock(core: Driver) -> None:
    before = core.state()
    assert core.refused(A, m.Hello([2, 0], ident(1), ident(1), ident(1), 1, "")) is ErrorCode.NO_LOCK
    assert core.state() == before


def test_a_lock_named_zero_is_no_lock(core: Driver) -> None:
    """The record of such a member would be dropped at adoption, while it lives and writes."""
    core.locks[ident(0)] = 1
    assert core.refused(A, m.Hello([2, 0], ident(1), ident(1), ident(0), 1, "")) is ErrorCode.NO_LOCK


def test_hello_again_renews_the_same_member(joined: Driver) -> None:
    granted = reserve(joined, A, 1)
    joined.hello(A)
    joined.hello(B)  # another connection of the same client
    assert joined.tables.stats()["members"] == 1
    assert list(joined.ask(B, m.Commit(1, keys(1), ONE, granted.generations, bytes(8))).statuses) == [OK]


def test_a_connection_cannot_become_another_client(joined: Driver) -> None:
    joined.locks[ident(2)] = 0
    before = joined.state()
    assert joined.refused(A, m.Hello([2, 0], ident(2), ident(1), ident(2), 1, "")) is ErrorCode.BAD_VALUE
    assert joined.state() == before


@pytest.mark.parametrize("session, lock", [(2, 1), (1, 2)])
def test_a_known_client_with_another_session_or_lock_is_refused_while_its_lock_is_held(joined: Driver, session: int, lock: int) -> None:
    joined.locks[ident(2)] = 0
    before = joined.state()
    assert joined.refused(B, m.Hello([2, 0], ident(1), ident(session), ident(lock), 1, "")) is ErrorCode.BAD_VALUE
    assert joined.state() == before


def test_a_known_client_whose_lock_is_dead_may_come_back_with_another(joined: Driver) -> None:
    reserve(joined, A, 1)
    del joined.locks[ident(1)]
    joined.hello(B, client=1, lock=2)
    assert joined.tables.stats()["members"] == 1
    assert joined.tables.stats()["shards_in_flight"] == 0
    assert joined.refused(A, m.Bye()) is ErrorCode.NO_SESSION


def test_a_lock_that_cannot_be_looked_at_is_not_a_dead_one(joined: Driver) -> None:
    """Its member may be writing: it keeps what it holds, here and with a successor, and may go on under another lock."""
    reserve(joined, A, 1)
    joined.hidden.add(ident(1))
    joined.hello(b"a2", lock=7)
    assert joined.tables.stats()["shards_in_flight"] == 1
    assert [lock for _, _, _, lock, *_ in joined.tables.members()] == [ident(7)]
    assert joined.watch() == []
    joined.hidden.add(ident(7))
    assert joined.watch() == []
    successor = Driver(joined)
    assert successor.tables.stats()["shards_in_flight"] == 1
    assert successor.tables.check() == []


def test_members_are_bounded(core: Driver) -> None:
    for client in range(1, core.sizes["max_members"] + 1):
        core.hello(b"c%d" % client, client=client)
    core.locks[ident(99)] = 0
    before = core.state()
    assert core.refused(A, m.Hello([2, 0], ident(99), ident(99), ident(99), 1, "")) is ErrorCode.LIMIT
    assert core.state() == before
    core.ask(b"c1", m.Bye())
    core.hello(A, client=99)


def test_connections_of_a_member_are_bounded_and_the_oldest_goes(core: Driver) -> None:
    for n in range(MAX_CONNECTIONS + 1):
        core.hello(b"%d" % n)
    assert core.refused(b"0", m.Abort(tags(1))) is ErrorCode.NO_SESSION
    assert core.ask(b"1", m.Abort(tags(1))) == m.CountReply(0)


# ---- states ----

NEEDS_SESSION: list[m.Request] = [
    m.Bye(),
    m.Register(make_layout().encode()),
    m.Lookup(0, keys(1)),
    m.Reserve(0, 1, keys(1), ONE),
    m.Commit(1, keys(1), ONE, bytes(8), bytes(8)),
    m.Abort(tags(1)),
    m.Acquire(0, 1, keys(1)),
    m.Prefetch(0, keys(1), 10),
    m.Release(tags(1)),
    m.Discard(0, keys(1), bytes(8)),
    m.Clear(0),
]


@pytest.mark.parametrize("request_", NEEDS_SESSION, ids=lambda r: r.verb)
def test_without_hello_there_is_no_session_and_nothing_changes(joined: Driver, request_: m.Request) -> None:
    before = joined.state()
    assert joined.refused(B, request_) is ErrorCode.NO_SESSION
    assert joined.state() == before


@pytest.mark.parametrize("request_", NEEDS_SESSION, ids=lambda r: r.verb)
@pytest.mark.parametrize("how", ["bye", "lost reply", "lock gone"])
def test_a_session_that_has_ended_is_no_session(joined: Driver, request_: m.Request, how: str) -> None:
    if how == "bye":
        joined.ask(A, m.Bye())
    elif how == "lost reply":
        joined.core.forget(A)
    else:
        joined.die(1)
    before = joined.state()
    assert joined.refused(A, request_) is ErrorCode.NO_SESSION
    assert joined.state() == before


def test_every_verb_is_in_the_list_of_those_that_need_a_session_or_not() -> None:
    assert {request.verb for request in NEEDS_SESSION} | {"hello", "status"} == set(m.VERBS)


def test_status_is_answered_without_hello(core: Driver) -> None:
    status = core.ask(A, m.StatusRequest()).status
    assert status["instance"] == core.core.instance_id.hex()
    assert status["pool"]["bytes"] == 8 * EXTENT


def test_a_lost_reply_costs_the_connection_not_the_member(joined: Driver) -> None:
    granted = reserve(joined, A, 1)
    joined.core.forget(A)
    joined.hello(B)
    assert list(joined.ask(B, m.Commit(1, keys(1), ONE, granted.generations, bytes(8))).statuses) == [OK]


# ---- namespaces ----


@pytest.mark.parametrize("index", [1, 3, 4, 1 << 20, (1 << 32) - 2])
@pytest.mark.parametrize(
    "make", [lambda i: m.Lookup(i, keys(1)), lambda i: m.Reserve(i, 1, keys(1), ONE), lambda i: m.Acquire(i, 1, keys(1)), m.Clear]
)
def test_an_unknown_namespace_is_told_so(joined: Driver, index: int, make: Any) -> None:
    before = joined.state()
    assert joined.refused(A, make(index)) is ErrorCode.NO_NAMESPACE
    assert joined.state() == before


def test_a_namespace_counts_only_for_who_registered_it(joined: Driver) -> None:
    joined.hello(B, client=2)
    assert joined.refused(B, m.Lookup(0, keys(1))) is ErrorCode.NO_NAMESPACE
    assert joined.register(B) == 0
    assert found(joined, B, 1) == [MISS]


def test_a_replaced_namespace_must_be_registered_again(joined: Driver) -> None:
    """Its number may belong to another geometry now, and writing with the old one would run over the next slot."""
    joined.hello(B, client=2)
    used = {0}
    for n in range(joined.sizes["max_namespaces"]):
        used.add(joined.register(B, make_layout(f"other{n}", shard_bytes=4096)))
    assert used == {0, 1, 2, 3}
    assert joined.refused(A, m.Reserve(0, 1, keys(1), ONE)) is ErrorCode.NO_NAMESPACE


def test_namespaces_with_blocks_are_never_replaced(core: Driver) -> None:
    core.hello(A)
    for n in range(core.sizes["max_namespaces"]):
        index = core.register(A, make_layout(f"m{n}"))
        core.write(A, index, [n])
    before = core.state()
    assert core.refused(A, m.Register(make_layout("one more").encode())) is ErrorCode.LIMIT
    assert core.state() == before
    core.ask(A, m.Clear(0))
    core.hello(B, client=2)
    assert core.register(B, make_layout("one more")) == 0


def test_a_number_is_never_told_to_one_client_for_two_namespaces(core: Driver) -> None:
    """A request of another of its threads, under way with the number it knew first, would be taken for one in the other namespace."""
    layouts = [make_layout(f"m{n}", shard_bytes=4096 * (n + 1)) for n in range(core.sizes["max_namespaces"] + 1)]
    for client, connection in ((1, A), (2, B)):
        core.hello(connection, client=client)
    for n, layout in enumerate(layouts[:-1]):
        assert core.register(A, layout) == n
    before = core.state()
    assert core.refused(A, m.Register(layouts[-1].encode())) is ErrorCode.LIMIT  # it would replace what A knows as 0
    assert core.state() == before
    assert core.register(B, layouts[-1]) == 0
    assert core.refused(A, m.Lookup(0, keys(1))) is ErrorCode.NO_NAMESPACE
    assert core.refused(A, m.Register(layouts[-1].encode())) is ErrorCode.LIMIT
    core.ask(A, m.Bye())
    core.hello(A)
    assert core.register(A, layouts[-1]) == 0


@pytest.mark.parametrize(
    "encoded", [b"x", b"\x00" * 5, make_layout().encode()[:-1], make_layout().encode() + b"\x00", make_layout().encode() * 2]
)
def test_a_malformed_namespace_is_refused(joined: Driver, encoded: bytes) -> None:
    before = joined.state()
    assert joined.refused(A, m.Register(encoded)) is ErrorCode.BAD_NAMESPACE
    assert joined.state() == before


@pytest.mark.parametrize("name, value", [("shard_bytes", 0), ("shards", 0), ("shards", 65), ("block_tokens", 0), ("layout_id", "paged")])
def test_a_namespace_out_of_range_is_refused(joined: Driver, name: str, value: Any) -> None:
    """Encoded by hand: Layout itself would not make it."""
    layout = make_layout()
    object.__setattr__(layout, name, value)
    assert joined.refused(A, m.Register(layout.encode())) is ErrorCode.BAD_NAMESPACE


def test_a_long_message_for_people_is_cut_to_what_a_client_takes(joined: Driver) -> None:
    layout = make_layout()
    object.__setattr__(layout, "layout_shape", tuple(range(1 << 60, (1 << 60) + 1900)))
    assert joined.refused(A, m.Register(layout.encode())) is ErrorCode.BAD_NAMESPACE


@pytest.mark.parametrize("shard_bytes, shards", [(EXTENT + 1, 1), (1 << 36, 64), (EXTENT // 2 + 1, 2), (8 * EXTENT, 1)])
def test_a_block_that_fits_no_extent_is_refused_and_names_the_key(joined: Driver, shard_bytes: int, shards: int) -> None:
    before = joined.state()
    reply = joined.ask(A, m.Register(make_layout(shard_bytes=shard_bytes, shards=shards).encode()))
    assert reply.error == ErrorCode.BAD_NAMESPACE.value
    assert "pool.extent_size" in reply.message
    assert joined.state() == before


@pytest.mark.parametrize("shard_bytes, shards", [(1, 1), (4095, 1), (4096, 1), (4097, 1), (EXTENT, 1), (EXTENT // 64, 64), (1, 64)])
def test_odd_block_sizes_work(joined: Driver, shard_bytes: int, shards: int) -> None:
    index = joined.register(A, make_layout(shard_bytes=shard_bytes, shards=shards))
    for shard in range(shards):
        which = shard.to_bytes(2, "little")
        granted = reserve(joined, A, 7, index=index, shards=which)
        assert list(granted.statuses) == [OK]
        assert found(joined, A, 7, index=index) == [MISS]
        assert list(joined.ask(A, m.Commit(1, keys(7), which, granted.generations, bytes(8))).statuses) == [OK]
    assert found(joined, A, 7, index=index) == [OK]


def test_a_label_is_the_model_cut_to_whole_characters(core: Driver) -> None:
    core.hello(A)
    core.register(A, make_layout("ü" * 31 + "xü"))
    assert core.core.status(0)["namespaces"][0]["label"] == "ü" * 31 + "x"


# ---- reserve, commit, abort ----


def test_a_block_is_ready_when_its_last_shard_is_committed(joined: Driver) -> None:
    index = joined.register(A, make_layout("two", shards=2))
    joined.hello(B, client=2)
    joined.register(B, make_layout("two", shards=2))
    first = reserve(joined, A, 1, index=index, shards=b"\x00\x00")
    second = reserve(joined, B, 1, index=index, shards=b"\x01\x00")
    assert list(first.statuses + second.statuses) == [OK, OK]
    assert (first.pages, first.generations) == (second.pages, second.generations)
    assert list(joined.ask(B, m.Commit(1, keys(1), b"\x01\x00", second.generations, bytes(8))).statuses) == [OK]
    assert found(joined, A, 1, index=index) == [MISS]
    assert list(reserve(joined, B, 1, index=index, shards=b"\x01\x00").statuses) == [EXISTS]
    assert list(joined.ask(A, m.Commit(1, keys(1), b"\x00\x00", first.generations, bytes(8))).statuses) == [OK]
    assert found(joined, A, 1, index=index) == [OK]


def test_a_shard_in_flight_is_busy_for_all_and_within_a_batch(joined: Driver) -> None:
    joined.hello(B, client=2)
    joined.register(B)
    assert list(reserve(joined, A, 1, 1).statuses) == [OK, BUSY]
    assert list(reserve(joined, A, 1, tag=2).statuses) == [BUSY]
    assert list(reserve(joined, B, 1).statuses) == [BUSY]


def test_a_ready_block_exists(joined: Driver) -> None:
    joined.write(A, 0, [1])
    again = reserve(joined, A, 1)
    assert (list(again.statuses), again.pages, again.generations) == ([EXISTS], bytes(4), bytes(8))


@pytest.mark.parametrize("shard", [1, 2, 63, 64, 65535])
def test_a_shard_index_out_of_range_is_refused_and_nothing_of_the_batch_is_done(joined: Driver, shard: int) -> None:
    before = joined.state()
    assert joined.refused(A, m.Reserve(0, 1, keys(1, 2), ONE + shard.to_bytes(2, "little"))) is ErrorCode.BAD_VALUE
    assert joined.state() == before


def test_commit_of_what_is_not_held_changes_nothing(joined: Driver) -> None:
    joined.hello(B, client=2)
    joined.register(B)
    granted = reserve(joined, A, 1)
    wrong = (int.from_bytes(granted.generations, "little") + 1).to_bytes(8, "little")
    before = joined.core.status(0)["shards_in_flight"], joined.tables.stats()
    for connection, tag, key, shard, generation in [
        (A, 2, 1, ONE, granted.generations),  # another tag
        (A, 1, 2, ONE, granted.generations),  # another key
        (A, 1, 1, b"\x01\x00", granted.generations),  # another shard
        (A, 1, 1, b"\xff\xff", granted.generations),
        (A, 1, 1, ONE, wrong),
        (A, 1, 1, ONE, b"\xff" * 8),
        (B, 1, 1, ONE, granted.generations),  # another member
    ]:
        assert list(joined.ask(connection, m.Commit(tag, keys(key), shard, generation, bytes(8))).statuses) == [NOT_HELD]
    assert (joined.core.status(0)["shards_in_flight"], joined.tables.stats()) == before
    assert list(joined.ask(A, m.Commit(1, keys(1, 1), bytes(4), granted.generations * 2, bytes(16))).statuses) == [OK, NOT_HELD]
    assert list(joined.ask(A, m.Commit(1, keys(1), ONE, granted.generations, bytes(8))).statuses) == [NOT_HELD]


def test_abort_gives_back_what_was_reserved_under_the_tag_and_only_that(joined: Driver) -> None:
    reserve(joined, A, 1, 2, tag=1)
    reserve(joined, A, 3, tag=2)
    assert joined.ask(A, m.Abort(tags(1, 1, 77))) == m.CountReply(2)
    assert joined.ask(A, m.Abort(tags(1))) == m.CountReply(0)
    assert joined.tables.stats()["shards_in_flight"] == 1
    assert list(reserve(joined, A, 1, 3, tag=3).statuses) == [OK, BUSY]


def test_tags_of_shards_belong_to_the_member(joined: Driver) -> None:
    joined.hello(B, client=2)
    reserve(joined, A, 1, tag=1)
    assert joined.ask(B, m.Abort(tags(1))) == m.CountReply(0)


def test_a_member_is_throttled_at_half_of_the_shards_in_flight_and_all_of_them_are_full_for_everybody(joined: Driver) -> None:
    half = joined.sizes["max_shards"] // 2
    for client, connection in ((2, B), (3, b"C")):
        joined.hello(connection, client=client, session=client)
        joined.register(connection)
    assert list(reserve(joined, A, *range(half + 1)).statuses) == [OK] * half + [THROTTLED]
    assert list(reserve(joined, B, *range(100, 100 + half)).statuses) == [OK] * half
    assert list(reserve(joined, b"C", 99).statuses) == [FULL]
    assert joined.ask(A, m.Abort(tags(1))) == m.CountReply(half)
    assert list(reserve(joined, b"C", 99).statuses) == [OK]
    assert list(reserve(joined, A, *range(half)).statuses) == [OK] * (half - 1) + [FULL]


def test_a_member_is_throttled_at_half_of_the_pools_bytes_but_one_shard_is_always_granted(core: Driver) -> None:
    core.hello(A)
    index = core.register(A, make_layout("big", shard_bytes=EXTENT))
    granted = reserve(core, A, *range(5), index=index)
    assert list(granted.statuses) == [OK] * 4 + [THROTTLED]
    done = m.Commit(1, keys(0), ONE, granted.generations[:8], bytes(8))
    assert list(core.ask(A, done).statuses) == [OK]
    assert list(reserve(core, A, 4, 5, index=index).statuses) == [OK, THROTTLED]
    small = Driver(pool_bytes=EXTENT)
    small.hello(A)
    assert list(reserve(small, A, 1, 2, index=small.register(A, make_layout("all of it", shard_bytes=EXTENT))).statuses) == [OK, THROTTLED]
    assert small.tables.check() == []
    small.close()


def test_a_throttled_member_does_not_evict(core: Driver) -> None:
    core.hello(A)
    index = core.register(A, make_layout("big", shard_bytes=EXTENT))
    core.write(A, index, [1, 2, 3, 4])
    core.write(A, index, [5, 6, 7, 8])
    assert list(reserve(core, A, *range(11, 16), index=index).statuses) == [OK] * 4 + [THROTTLED]
    assert core.tables.stats()["evicted"] == 4


# ---- acquire, release ----


def test_acquire_answers_the_place_and_pins_once(joined: Driver) -> None:
    granted = reserve(joined, A, 1)
    joined.ask(A, m.Commit(1, keys(1), ONE, granted.generations, bytes(8)))
    got = acquire(joined, A, 1, 2, 1)
    assert list(got.statuses) == [OK, MISS, OK]
    assert got.pages == granted.pages + bytes(4) + granted.pages
    assert got.generations == granted.generations + bytes(8) + granted.generations
    assert joined.tables.stats()["pins"] == 1
    acquire(joined, A, 1)
    assert joined.tables.stats()["pins"] == 1
    assert joined.ask(A, m.Release(tags(9, 9))) == m.CountReply(1)
    assert joined.ask(A, m.Release(tags(9))) == m.CountReply(0)


def test_pins_belong_to_the_session_and_end_with_its_last_member(core: Driver) -> None:
    core.hello(A, client=1, session=5)
    core.hello(B, client=2, session=5)
    core.hello(b"C", client=3, session=6)
    core.register(A)
    core.write(A, 0, [1, 2])
    acquire(core, A, 1, 2)
    assert core.ask(b"C", m.Release(tags(9))) == m.CountReply(0)
    core.ask(A, m.Bye())
    assert core.tables.stats()["pins"] == 2
    core.die(2)
    assert core.tables.stats()["pins"] == 0


def test_release_by_another_member_of_the_session(core: Driver) -> None:
    core.hello(A, client=1, session=5)
    core.hello(B, client=2, session=5)
    core.register(A)
    core.write(A, 0, [1])
    acquire(core, A, 1)
    assert core.ask(B, m.Release(tags(9))) == m.CountReply(1)


def test_a_session_pins_half_of_what_can_be_pinned_and_the_rest_is_full(joined: Driver) -> None:
    small = make_layout("small", shard_bytes=4096)
    index = joined.register(A, small)
    half = joined.sizes["max_pins"] // 2
    many = list(range(half + 1))
    for n in many:
        joined.write(A, index, [n])
    for client, connection in ((2, B), (3, b"C")):
        joined.hello(connection, client=client, session=client)
        joined.register(connection, small)
    assert list(acquire(joined, A, *many, index=index).statuses) == [OK] * half + [FULL]
    assert list(acquire(joined, A, half, tag=10, index=index).statuses) == [FULL]
    assert list(acquire(joined, B, *many[1:], index=index).statuses) == [OK] * half
    assert list(acquire(joined, b"C", 1, index=index).statuses) == [FULL]
    assert joined.ask(A, m.Release(tags(9))) == m.CountReply(half)
    assert list(acquire(joined, b"C", 1, index=index).statuses) == [OK]


def test_what_a_session_may_pin_is_counted_over_its_members(core: Driver) -> None:
    small = make_layout("small", shard_bytes=4096)
    half = core.sizes["max_pins"] // 2
    for client, connection in ((1, A), (2, B)):
        core.hello(connection, client=client, session=5)
        index = core.register(connection, small)
    for n in range(half + 1):
        core.write(A, index, [n])
    assert list(acquire(core, A, *range(half), index=index).statuses) == [OK] * half
    assert list(acquire(core, B, half, tag=10, index=index).statuses) == [FULL]


def test_a_pool_of_pinned_blocks_is_full_and_an_unpinned_one_is_not(joined: Driver) -> None:
    index = joined.register(A, make_layout("big", shard_bytes=EXTENT))
    for n in range(8):
        joined.write(A, index, [n])
    acquire(joined, A, *range(8), index=index)
    assert list(reserve(joined, A, 100, index=index).statuses) == [FULL]
    joined.ask(A, m.Release(tags(9)))
    assert list(reserve(joined, A, 100, index=index).statuses) == [OK]
    assert joined.core.status(0)["items"]["evicted"] == 1


# ---- clear ----


def test_clear_makes_misses_and_frees_at_the_last_release(joined: Driver) -> None:
    joined.write(A, 0, [1, 2, 3])
    acquire(joined, A, 1)
    assert joined.ask(A, m.Clear(0)) == m.CountReply(3)
    assert found(joined, A, 1, 2, 3) == [MISS] * 3
    assert list(acquire(joined, A, 1, tag=10).statuses) == [MISS]
    assert list(reserve(joined, A, 1, 2).statuses) == [BUSY, OK]
    joined.ask(A, m.Release(tags(9)))
    assert list(reserve(joined, A, 1).statuses) == [OK]


def test_clear_of_all_namespaces_needs_no_registration(joined: Driver) -> None:
    joined.write(A, 0, [1])
    joined.write(A, joined.register(A, make_layout("two", shard_bytes=4096)), [2, 3])
    joined.hello(B, client=2)
    assert joined.refused(B, m.Clear(0)) is ErrorCode.NO_NAMESPACE
    assert joined.ask(B, m.Clear(m.ALL_NAMESPACES)) == m.CountReply(3)
    assert joined.tables.stats()["blocks"] == 0
    assert joined.ask(B, m.Clear(m.ALL_NAMESPACES)) == m.CountReply(0)


# ---- discard ----


def discard(core: Driver, connection: bytes, names: list[int], generations: bytes, index: int = 0) -> Any:
    return core.ask(connection, m.Discard(index, keys(*names), generations))


def test_a_discarded_block_is_a_miss_until_it_is_saved_again(joined: Driver) -> None:
    joined.write(A, 0, [1, 2])
    generations = acquire(joined, A, 1, 2).generations
    joined.ask(A, m.Release(tags(9)))
    assert discard(joined, A, [1], generations[:8]) == m.CountReply(1)
    assert found(joined, A, 1, 2) == [MISS, OK]
    assert discard(joined, A, [1], generations[:8]) == m.CountReply(0)
    joined.write(A, 0, [1])
    assert found(joined, A, 1) == [OK]
    assert discard(joined, A, [1], generations[:8]) == m.CountReply(0)  # it is another block now
    assert found(joined, A, 1) == [OK]
    assert joined.core.status(0)["items"]["discarded"] == 1


def test_a_discarded_block_that_is_pinned_stays_until_its_last_release(joined: Driver) -> None:
    joined.write(A, 0, [1])
    got = acquire(joined, A, 1)
    assert discard(joined, A, [1], got.generations) == m.CountReply(1)
    assert found(joined, A, 1) == [MISS]
    assert list(reserve(joined, A, 1).statuses) == [BUSY]
    assert discard(joined, A, [1], got.generations) == m.CountReply(0)
    view = joined.tables.view()
    assert list(view.check(keys(1), got.pages, got.generations)) == [1]
    view.close()
    joined.ask(A, m.Release(tags(9)))
    assert list(reserve(joined, A, 1).statuses) == [OK]


def test_discard_leaves_blocks_being_written_and_those_of_other_namespaces_alone(joined: Driver) -> None:
    granted = reserve(joined, A, 1)
    other = joined.register(A, make_layout("two"))
    joined.write(A, other, [2])
    ready = acquire(joined, A, 2, index=other).generations
    assert discard(joined, A, [1, 2, 3], granted.generations + ready + bytes(8)) == m.CountReply(0)
    assert joined.refused(A, m.Discard(3, keys(2), ready)) is ErrorCode.NO_NAMESPACE
    assert found(joined, A, 2, index=other) == [OK]
    assert list(joined.ask(A, m.Commit(1, keys(1), ONE, granted.generations, bytes(8))).statuses) == [OK]


# ---- death ----


def test_a_dead_writer_leaves_a_miss_that_another_may_write(joined: Driver) -> None:
    joined.hello(B, client=2)
    joined.register(B)
    old = reserve(joined, A, 1)
    joined.die(1)
    assert joined.tables.stats()["shards_in_flight"] == 0
    new = reserve(joined, B, 1)
    assert list(new.statuses) == [OK]
    assert new.generations != old.generations


def test_all_members_of_one_lock_go_together(core: Driver) -> None:
    core.hello(A, client=1, lock=9)
    core.hello(B, client=2, session=2, lock=9)
    assert core.core.locks() == {ident(9)}
    assert core.watch() == []
    del core.locks[ident(9)]
    assert core.watch() == [Event("member gone", ident(n).hex(), n) for n in (1, 2)]
    assert core.tables.stats()["members"] == 0
    assert core.watch() == []
    assert core.core.status(0)["members_gone"] == 2


# ---- devices ----


def attached(core: Driver, pidfd: bool) -> None:
    """Connection A, with a device; it holds a shard in flight."""
    assert core.core.attach(ident(1))
    if pidfd:
        core.exits[ident(1)] = False
    assert not any(reserve(core, A, 1).statuses)
    del core.locks[ident(1)]


def test_only_a_member_can_attach(core: Driver) -> None:
    assert not core.core.attach(ident(1))
    core.hello(A)
    assert core.core.attach(ident(1))
    assert core.core.attach(ident(1))
    assert [flags for *_, flags in core.tables.members()] == [DEVICE]
    core.ask(A, m.Bye())
    assert not core.core.attach(ident(1))


def test_what_a_member_with_a_device_held_waits_until_its_process_has_exited(joined: Driver) -> None:
    attached(joined, pidfd=True)
    assert joined.watch() == []
    assert joined.watch(100 * DEVICE_WAIT_NS) == []
    assert joined.tables.stats()["shards_in_flight"] == 1
    assert joined.core.status(0)["sessions"][0]["members"][0]["ending"] is True
    assert joined.core.locks() == {ident(1)}
    assert joined.refused(A, m.Abort(tags(1))) is ErrorCode.NO_SESSION
    joined.exits[ident(1)] = True
    assert joined.watch() == [Event("member gone", ident(1).hex(), 1)]
    assert joined.tables.stats()["shards_in_flight"] == 0


def test_without_a_pidfd_it_waits_five_seconds_from_when_its_lock_was_seen_free(joined: Driver) -> None:
    attached(joined, pidfd=False)
    assert joined.watch(100 * SECOND) == []
    assert joined.watch(DEVICE_WAIT_NS - 1) == []
    assert joined.tables.stats()["shards_in_flight"] == 1
    assert joined.watch(1) == [Event("member gone", ident(1).hex(), 1)]
    assert joined.tables.stats()["shards_in_flight"] == 0


def test_a_process_that_has_exited_with_its_lock_held_elsewhere_is_not_gone(joined: Driver) -> None:
    """The lock decides first: a pidfd may be of another process than the one that locks."""
    assert joined.core.attach(ident(1))
    joined.exits[ident(1)] = True
    assert joined.watch() == []
    joined.hidden.add(ident(1))
    assert joined.watch() == []


def test_a_member_that_ends_may_say_hello_again_when_it_holds_a_lock(joined: Driver) -> None:
    attached(joined, pidfd=False)
    assert joined.watch() == []
    assert joined.refused(B, m.Hello([2, 0], ident(1), ident(1), ident(1), 1, "")) is ErrorCode.NO_LOCK
    joined.locks[ident(2)] = 0
    assert joined.refused(B, m.Hello([2, 0], ident(1), ident(2), ident(2), 1, "")) is ErrorCode.BAD_VALUE  # another session
    joined.hello(B, client=1, lock=2)
    assert joined.watch(DEVICE_WAIT_NS) == []
    assert joined.tables.stats()["shards_in_flight"] == 1
    del joined.locks[ident(2)]
    assert joined.watch() == []  # its five seconds begin anew
    assert joined.watch(DEVICE_WAIT_NS) != []


def test_a_successor_keeps_a_member_with_a_device_whose_lock_is_free(joined: Driver) -> None:
    attached(joined, pidfd=True)
    after = Driver(before=joined)
    assert after.tables.stats()["shards_in_flight"] == 1
    assert after.watch() == []
    assert after.watch(DEVICE_WAIT_NS - 1) == []
    assert after.watch(1) == [Event("member gone", ident(1).hex(), 1)]
    assert after.tables.stats()["shards_in_flight"] == 0
    assert after.tables.check() == []
    after.tables.close()


# ---- heartbeats ----


def silence(core: Driver, seconds: int) -> list[Event]:
    """The loop looks once a second."""
    return [event for _ in range(seconds) for event in core.watch(SECOND)]


def test_a_session_without_a_heartbeat_for_ten_seconds_loses_its_pins_and_nothing_else(joined: Driver) -> None:
    joined.write(A, 0, [1])
    acquire(joined, A, 1)
    granted = reserve(joined, A, 2)
    joined.locks[ident(1)] = 5
    joined.watch()
    assert silence(joined, SILENT_NS // SECOND - 1) == []
    assert joined.tables.stats()["pins"] == 1
    assert silence(joined, 1) == [Event("session hangs, its pins are given back", ident(1).hex(), 1)]
    stats = joined.tables.stats()
    assert (stats["pins"], stats["shards_in_flight"], stats["members"]) == (0, 1, 1)
    assert joined.core.status(0)["sessions_silenced"] == 1
    assert silence(joined, 30) == []  # it has no pins to lose
    assert joined.ask(A, m.Release(tags(9))) == m.CountReply(0)
    assert list(joined.ask(A, m.Commit(1, keys(2), ONE, granted.generations, bytes(8))).statuses) == [OK]


def test_one_member_that_beats_keeps_the_pins_of_its_session(core: Driver) -> None:
    core.hello(A, client=1, session=5)
    core.hello(B, client=2, session=5)
    core.register(A)
    core.write(A, 0, [1])
    acquire(core, A, 1)
    core.locks[ident(1)] = 5
    for beat in range(1, 40):
        core.locks[ident(2)] = beat
        assert silence(core, 1) == []
    del core.locks[ident(2)]  # and without it, the other one's silence counts
    assert [what for what, _, _ in silence(core, 1)] == ["member gone", "session hangs, its pins are given back"]


def test_a_heartbeat_that_moves_again_starts_the_ten_seconds_anew(joined: Driver) -> None:
    joined.write(A, 0, [1])
    acquire(joined, A, 1)
    for beat in range(1, 4):
        joined.locks[ident(1)] = beat
        assert silence(joined, SILENT_NS // SECOND) == []


HELLO = m.Hello([2, 0], ident(1), ident(1), ident(1), 1, "")


@pytest.mark.parametrize("sign", [HELLO, m.Lookup(0, keys(1)), m.Acquire(0, 9, keys(1))], ids=["hello", "lookup", "acquire"])
def test_what_a_member_asks_is_a_sign_of_life(joined: Driver, sign: m.Request) -> None:
    """Who goes on after a stop may ask before its heartbeat moves, and what it is given then is not taken from it at once."""
    joined.write(A, 0, [1])
    acquire(joined, A, 1)
    joined.locks[ident(1)] = 5
    joined.watch()
    for _ in range(2):
        assert silence(joined, SILENT_NS // SECOND - 1) == []
        joined.ask(A, sign)
    assert len(silence(joined, SILENT_NS // SECOND)) == 1
    assert silence(joined, SILENT_NS // SECOND) == []
    acquire(joined, A, 1)
    assert silence(joined, SILENT_NS // SECOND - 1) == []
    assert len(silence(joined, 1)) == 1


@pytest.mark.parametrize("how", ["no number", "hidden"])
def test_what_has_no_heartbeat_to_be_seen_is_never_found_silent(joined: Driver, how: str) -> None:
    joined.write(A, 0, [1])
    acquire(joined, A, 1)
    joined.locks[ident(1)] = 0 if how == "no number" else 5
    if how == "hidden":
        joined.hidden.add(ident(1))
    assert silence(joined, 100) == []


def test_a_sidecar_that_was_stopped_itself_silences_nobody(joined: Driver) -> None:
    """It has seen no more of a member's silence than between the looks it took."""
    joined.write(A, 0, [1])
    acquire(joined, A, 1)
    joined.locks[ident(1)] = 5
    joined.watch()
    for _ in range(SILENT_NS // SECOND - 1):
        assert joined.watch(60 * SECOND) == []
    assert joined.tables.stats()["pins"] == 1
    assert len(joined.watch(60 * SECOND)) == 1


# ---- adoption ----


def test_a_successor_keeps_blocks_members_pins_and_shards_in_flight(joined: Driver) -> None:
    joined.write(A, 0, [1, 2])
    acquire(joined, A, 1, tag=9)
    granted = reserve(joined, A, 3, tag=4)
    after = Driver(before=joined)
    assert after.core.instance_id != joined.core.instance_id
    assert after.core.adopted_blocks == 2
    assert after.refused(A, m.Lookup(0, keys(1))) is ErrorCode.NO_SESSION
    after.hello(A)
    assert after.tables.stats()["members"] == 1
    assert after.refused(A, m.Lookup(0, keys(1))) is ErrorCode.NO_NAMESPACE
    assert after.register(A) == 0
    assert found(after, A, 1, 2, 3) == [OK, OK, MISS]
    assert list(after.ask(A, m.Commit(4, keys(3), ONE, granted.generations, bytes(8))).statuses) == [OK]
    assert after.ask(A, m.Release(tags(9))) == m.CountReply(1)
    assert after.tables.check() == []
    after.tables.close()


def test_a_successor_drops_what_the_dead_held(joined: Driver) -> None:
    joined.hello(B, client=2, session=2)
    joined.register(B)
    joined.write(A, 0, [1])
    acquire(joined, A, 1, tag=9)
    acquire(joined, B, 1, tag=9)
    reserve(joined, A, 3)
    del joined.locks[ident(1)]
    after = Driver(before=joined)
    stats = after.tables.stats()
    assert (stats["members"], stats["pins"], stats["shards_in_flight"]) == (1, 1, 0)
    assert after.tables.check() == []
    after.tables.close()


def test_a_session_number_is_not_given_twice(core: Driver) -> None:
    for n in range(1, 5):
        core.hello(b"%d" % n, client=n, session=n)
    core.ask(b"1", m.Bye())
    after = Driver(before=core)
    after.hello(b"9", client=9, session=9)
    numbers = [number for *_, number, _, _ in after.tables.members()]
    assert len(set(numbers)) == 4
    after.tables.close()


# ---- errors ----


def test_a_message_of_several_frames_is_a_bad_message(core: Driver) -> None:
    _, _, reply = m.decode_reply(core.core.refuse_frames(3), m.Bye())
    assert isinstance(reply, m.ErrorReply)
    assert reply.error == "BAD_MESSAGE"


def test_errors_are_counted_by_code(joined: Driver) -> None:
    joined.core.handle(A, b"junk", 0)
    joined.refused(B, m.Bye())
    errors = joined.core.status(0)["errors"]
    assert {code: n for code, n in errors.items() if n} == {"BAD_MESSAGE": 1, "NO_SESSION": 1}


def test_status_is_a_plain_map_that_survives_the_wire_and_json(joined: Driver) -> None:
    import json

    joined.write(A, 0, [1])
    status = joined.ask(A, m.StatusRequest()).status
    assert json.loads(json.dumps(status)) == status
    assert status["namespaces"][0]["blocks"] == 1
    assert status["sessions"][0]["members"] == [{"name": "c1", "pid": 1, "connections": 1, "device": False, "silent_s": 0, "ending": False}]
    assert status["items"]["reserved"] == status["items"]["committed"] == 1


def test_a_reader_of_the_tables_sees_what_the_core_answers(joined: Driver) -> None:
    joined.write(A, 0, [1, 3])
    view = joined.tables.view()
    assert isinstance(view, View)
    assert list(view.lookup(0, keys(1, 2, 3))) == [1, 0, 1]
    view.close()


def test_layouts_of_several_sizes_live_side_by_side(joined: Driver) -> None:
    sizes: list[tuple[Layout, int]] = [(make_layout(f"s{n}", shard_bytes=n), n) for n in (4096, 40_000, EXTENT)]
    for number, (layout, _) in enumerate(sizes):
        joined.write(A, joined.register(A, layout), [number + 10])
    assert {line["slot_bytes"] for line in joined.core.status(0)["pool"]["sizes"]} == {4096, 40960, EXTENT}
