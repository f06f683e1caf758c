"""Bytes that no client of ours would send, to the core and to a real process: each is answered, nothing changes, and it stays alive."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode
from hypothesis import given
from hypothesis import strategies as st

from tests.cores import Driver, keys, make_layout, tags
from tests.support import Sidecar, Wire

SEED = 20261129
MEMBER, STRANGER = b"member", b"stranger"
VALID: list[m.Request] = [
    m.Hello([2, 0], b"c" * 16, b"s" * 16, b"l" * 16, 1, "name"),
    m.Bye(),
    m.Register(make_layout().encode()),
    m.Lookup(0, keys(1, 2)),
    m.Reserve(0, 1, keys(5, 6), bytes(4)),
    m.Commit(1, keys(5, 6), bytes(4), bytes(16), bytes(16)),
    m.Abort(tags(1, 2)),
    m.Acquire(0, 1, keys(1, 2)),
    m.Prefetch(0, keys(1, 2), 5),
    m.Release(tags(1, 2)),
    m.Discard(0, keys(1, 2), bytes(16)),
    m.Clear(0),
    m.Clear(m.ALL_NAMESPACES),
    m.StatusRequest(),
]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(max_size=20), st.binary(max_size=80)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)
field_names = st.sampled_from(sorted({name for request in VALID for name in request.__dataclass_fields__} | {"verb", "id"}))
bodies = st.dictionaries(field_names | st.text(max_size=8), values, max_size=8)
wild_bodies = st.builds(
    lambda verb, number, body: {**body, "verb": verb, "id": number}, st.sampled_from(sorted(m.VERBS)), st.integers(0, 9), bodies
)


def prepared() -> Driver:
    driver = Driver()
    driver.hello(MEMBER)
    driver.write(MEMBER, driver.register(MEMBER), [1, 2])
    driver.ask(MEMBER, m.Reserve(0, 7, keys(8), bytes(2)))
    driver.ask(MEMBER, m.Acquire(0, 7, keys(1)))
    return driver


@pytest.fixture(scope="module")
def core() -> Iterator[Driver]:
    driver = prepared()
    yield driver
    assert driver.tables.check() == []
    driver.close()


def answered(driver: Driver, connection: bytes, payload: bytes) -> bool:
    """Sends it; whether it was answered by an error, which then changed nothing."""
    before = driver.state()
    reply = msgpack.unpackb(driver.core.handle(connection, payload, 1))
    assert reply["instance"] == driver.core.instance_id
    if "error" not in reply:
        return False
    assert set(reply) == {"id", "instance", "error", "message"}
    assert ErrorCode(reply["error"]) is not ErrorCode.INTERNAL
    assert len(reply["message"].encode()) <= 4096
    assert driver.state() == before
    return True


@given(st.binary(max_size=400), st.sampled_from([MEMBER, STRANGER]))
def test_random_bytes_are_refused(core: Driver, payload: bytes, connection: bytes) -> None:
    assert answered(core, connection, payload)


@given(values, st.sampled_from([MEMBER, STRANGER]))
def test_random_values_are_refused(core: Driver, value: Any, connection: bytes) -> None:
    assert answered(core, connection, msgpack.packb(value))


@given(st.lists(wild_bodies, max_size=6), st.sampled_from([MEMBER, STRANGER]))
def test_random_fields_are_refused_or_mean_something(bodies: list[dict[str, Any]], connection: bytes) -> None:
    driver = prepared()
    for body in bodies:
        answered(driver, connection, msgpack.packb(body))
    assert driver.tables.check() == []
    driver.close()


@given(st.sampled_from(VALID), st.data())
def test_valid_messages_with_changed_bytes_never_break_the_core(request: m.Request, data: st.DataObject) -> None:
    driver = prepared()
    payload = bytearray(m.encode_request(request, 5))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    answered(driver, data.draw(st.sampled_from([MEMBER, STRANGER])), bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    answered(driver, MEMBER, bytes(payload))
    assert driver.tables.check() == []
    driver.close()


@given(st.lists(st.tuples(st.sampled_from(VALID), st.sampled_from([MEMBER, STRANGER])), max_size=30))
def test_valid_messages_in_any_order_repeated_and_from_anybody(messages: list[tuple[m.Request, bytes]]) -> None:
    driver = prepared()
    driver.locks[b"l" * 16] = 0
    for request, connection in messages:
        answered(driver, connection, m.encode_request(request, 5))
    assert driver.tables.check() == []
    driver.close()


@pytest.mark.parametrize("request_", VALID, ids=lambda r: r.verb)
def test_the_largest_message_is_answered_and_a_larger_one_is_too_large(core: Driver, request_: m.Request) -> None:
    body = msgpack.unpackb(m.encode_request(request_, 5))
    for size, code in ((m.MAX_MESSAGE_BYTES // 2, "BAD_MESSAGE"), (m.MAX_MESSAGE_BYTES, "TOO_LARGE"), (m.MAX_FRAME_BYTES, "TOO_LARGE")):
        payload = msgpack.packb({**body, "padding": bytes(size)})
        assert msgpack.unpackb(core.core.handle(MEMBER, payload, 1))["error"] == code


# ---- a real process ----


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("fuzz")) as sidecar:
        yield sidecar
        assert sidecar.stop() == 0, sidecar.log()


def test_a_process_answers_thousands_of_broken_messages_and_lives(sidecar: Sidecar) -> None:
    generator = random.Random(SEED)
    whole = [m.encode_request(request, 5) for request in VALID]
    with Wire(sidecar.endpoint) as wire:
        for _ in range(3000):
            payload = (
                bytearray(generator.choice(whole)) if generator.random() < 0.8 else bytearray(generator.randbytes(generator.randrange(200)))
            )
            for _ in range(generator.randrange(3)):
                if payload:
                    payload[generator.randrange(len(payload))] = generator.randrange(256)
            wire.send(bytes(payload[: generator.randrange(len(payload) + 1)] if generator.random() < 0.3 else payload))
            reply = msgpack.unpackb(wire.receive())
            assert reply["instance"].hex() == sidecar.ready["instance"]
            assert reply.get("error") != "INTERNAL"
    status = sidecar.status()
    assert status["blocks"]["total"] == 0
    assert status["sessions"] == []


def test_a_process_refuses_several_frames_in_one_message(sidecar: Sidecar) -> None:
    with Wire(sidecar.endpoint) as wire:
        for frames in ([b"", b"x"], [m.encode_request(m.StatusRequest(), 1)] * 2, [b""] * 100):
            wire.send(*frames)
            assert msgpack.unpackb(wire.receive())["error"] == "BAD_MESSAGE"


def test_a_frame_over_the_limit_costs_its_sender_the_connection_and_nobody_else(sidecar: Sidecar) -> None:
    context = zmq.Context()
    sender = context.socket(zmq.DEALER)
    monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sender.setsockopt(zmq.LINGER, 0)
    sender.connect(sidecar.endpoint)
    sender.send(bytes(m.MAX_FRAME_BYTES + 1))
    assert monitor.poll(20_000), "the connection was not closed"
    assert sidecar.status()["pid"] == sidecar.pid
    sender.disable_monitor()
    monitor.close()
    sender.close()
    context.term()


def test_a_process_survives_strange_identities_and_files_in_the_place_of_locks(sidecar: Sidecar) -> None:
    members = Path(sidecar.run_directory) / "members"
    names = [secrets.token_bytes(16) for _ in range(4)]
    (members / names[0].hex()).symlink_to("/dev/zero")
    (members / names[1].hex()).mkdir()
    os.mkfifo(members / names[2].hex())
    with Wire(sidecar.endpoint) as wire:
        for name in names:
            reply = wire.ask(m.Hello([2, 0], name, name, name, 1, "x"))
            assert isinstance(reply, m.ErrorReply)
            assert reply.error == "NO_LOCK"
    context = zmq.Context()
    for identity in (b"x", b"\xff" * 255):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(sidecar.endpoint)
        socket.send(m.encode_request(m.StatusRequest(), 3))
        assert socket.poll(20_000)
        assert msgpack.unpackb(socket.recv())["id"] == 3
        socket.close()
    context.term()
