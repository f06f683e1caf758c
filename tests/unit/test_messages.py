"""The messages: frozen bytes of each, and what decoding says to bytes that break the protocol. Nothing but ProtocolError comes out."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, ProtocolError, Status

GOLDEN = Path(__file__).resolve().parents[2] / "schemas" / "golden" / "messages.json"
A, B, C, E = (bytes([n]) * 16 for n in (0xAA, 0xBB, 0xCC, 0xEE))
KEYS = bytes(range(64))
INSTANCE = bytes(range(100, 116))
STATUSES = bytes([Status.OK, Status.MISS])
CHECKSUMS = bytes(range(0xF0, 0x100))
HANDLES = (bytes.fromhex("0500000000000000"), bytes.fromhex("0900000000000000") + bytes(8))

REQUESTS: dict[str, m.Request] = {
    "hello": m.Hello([2, 0], A, B, C, 4711, "engine:0"),
    "bye": m.Bye(),
    "register": m.Register(b"\x00\x08\x00\x00\x00encoded"),
    "lookup": m.Lookup(3, KEYS),
    "reserve": m.Reserve(3, (1 << 64) - 1, KEYS, b"\x00\x00\x01\x00"),
    "commit": m.Commit(7, KEYS, b"\x00\x00\x01\x00", HANDLES[1], CHECKSUMS),
    "abort": m.Abort((7).to_bytes(8, "little")),
    "acquire": m.Acquire(3, 8, KEYS),
    "prefetch": m.Prefetch(3, KEYS, 250),
    "release": m.Release((8).to_bytes(8, "little") + (9).to_bytes(8, "little")),
    "discard": m.Discard(3, KEYS, HANDLES[1]),
    "clear": m.Clear(3),
    "status": m.StatusRequest(),
}
REPLIES: dict[str, m.Reply] = {
    "hello": m.HelloReply([2, 0], "0.1.0", "/dev/shm/hostkv", "/dev/shm/hostkv.tables", E, 1 << 32, 1 << 24, 123456789, 1),
    "bye": m.Empty(),
    "register": m.RegisterReply(3),
    "lookup": m.LookupReply(STATUSES),
    "reserve": m.HandlesReply(STATUSES, *HANDLES),
    "commit": m.StatusesReply(STATUSES),
    "abort": m.CountReply(2),
    "acquire": m.HandlesReply(STATUSES, *HANDLES),
    "prefetch": m.StatusesReply(STATUSES),
    "release": m.CountReply(0),
    "discard": m.CountReply(1),
    "clear": m.CountReply(1 << 40),
    "status": m.StatusReply({"version": "0.1.0", "pool": {"bytes": 1}}),
    "error": m.ErrorReply("NO_SESSION", "say hello first"),
}
EACH_FIELD = [(verb, field.name, str(field.type)) for verb, request in REQUESTS.items() for field in fields(request)]


def body(verb: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(m.encode_request(REQUESTS[verb], 5))
    return {**found, **changes}


def decode_error(payload: bytes) -> ProtocolError:
    _, error = m.decode_request(payload)
    assert isinstance(error, ProtocolError), f"decoded to {error}"
    assert error.message
    return error


def packed_error(changed: dict[Any, Any]) -> ProtocolError:
    return decode_error(msgpack.packb(changed))


def test_every_verb_and_reply_has_golden_bytes() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {verb: m.encode_request(request, 5).hex() for verb, request in REQUESTS.items()} == golden["requests"]
    assert {verb: m.encode_reply(reply, 5, INSTANCE).hex() for verb, reply in REPLIES.items()} == golden["replies"]
    assert set(golden["requests"]) == set(m.VERBS)


@pytest.mark.parametrize("verb", REQUESTS)
def test_golden_requests_decode_to_themselves(verb: str) -> None:
    golden = bytes.fromhex(json.loads(GOLDEN.read_text())["requests"][verb])
    assert m.decode_request(golden) == (5, REQUESTS[verb])


@pytest.mark.parametrize("verb", REPLIES)
def test_golden_replies_decode_to_themselves(verb: str) -> None:
    golden = bytes.fromhex(json.loads(GOLDEN.read_text())["replies"][verb])
    assert m.decode_reply(golden, REQUESTS.get(verb, m.Bye())) == (5, INSTANCE, REPLIES[verb])


@pytest.mark.parametrize("verb", REQUESTS)
def test_a_request_cut_anywhere_is_a_bad_message(verb: str) -> None:
    whole = m.encode_request(REQUESTS[verb], 5)
    for length in range(len(whole)):
        assert decode_error(whole[:length]).code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("verb", REPLIES)
def test_a_reply_cut_anywhere_is_a_protocol_error(verb: str) -> None:
    whole = m.encode_reply(REPLIES[verb], 5, INSTANCE)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            m.decode_reply(whole[:length], REQUESTS.get(verb, m.Bye()))


@pytest.mark.parametrize("verb", REQUESTS)
def test_bytes_after_the_message_are_a_bad_message(verb: str) -> None:
    assert decode_error(m.encode_request(REQUESTS[verb], 5) + b"\x00").code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("verb", REQUESTS)
def test_an_oversized_message_is_too_large(verb: str) -> None:
    assert decode_error(m.encode_request(REQUESTS[verb], 5) + bytes(m.MAX_MESSAGE_BYTES)).code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("verb, name, kind", [each for each in EACH_FIELD if each[2] != "Flag"])
def test_a_missing_field_is_named(verb: str, name: str, kind: str) -> None:
    changed = body(verb)
    del changed[name]
    error = packed_error(changed)
    assert error.code is ErrorCode.BAD_MESSAGE
    assert name in error.message


def test_a_field_of_a_later_minor_version_is_left_out_where_it_says_nothing() -> None:
    plain, low = m.Reserve(3, 9, KEYS, b"\x00\x00\x01\x00"), m.Reserve(3, 9, KEYS, b"\x00\x00\x01\x00", low_priority=1)
    assert b"low_priority" not in m.encode_request(plain, 5)
    assert [m.decode_request(m.encode_request(each, 5))[1] for each in (plain, low)] == [plain, low]
    assert packed_error(body("reserve", low_priority=2)).code is ErrorCode.BAD_VALUE


@pytest.mark.parametrize("verb", REQUESTS)
def test_an_unknown_field_is_named(verb: str) -> None:
    error = packed_error(body(verb, colour="red"))
    assert error.code is ErrorCode.BAD_MESSAGE
    assert "colour" in error.message


@pytest.mark.parametrize("verb, name, kind", EACH_FIELD)
@pytest.mark.parametrize("value", [None, True, 1.5, -1, "text", b"bytes", [], {}, [[]], 1 << 40], ids=repr)
def test_a_field_of_the_wrong_type_is_refused(verb: str, name: str, kind: str, value: Any) -> None:
    allowed = {"U64": int, "U32": int, "Name": str, "Version": list, "Namespace": bytes}.get(kind)
    if type(value) is allowed and value != -1 and not (kind == "U32" and value == 1 << 40) and kind != "Version":
        assert m.decode_request(msgpack.packb(body(verb, **{name: value})))[0] == 5
        return
    error = packed_error(body(verb, **{name: value}))
    assert error.code in (ErrorCode.BAD_MESSAGE, ErrorCode.BAD_VALUE)
    assert name in error.message


@pytest.mark.parametrize(
    "verb, name, width", [(v, n, w) for v, n, k in EACH_FIELD for w in [{"Keys": 32, "Shards": 2, "Generations": 8, "Tags": 8}.get(k)] if w]
)
def test_joined_fields_must_be_whole_and_bounded(verb: str, name: str, width: int) -> None:
    for length in (1, width - 1, width + 1, 2 * width - 1):
        assert packed_error(body(verb, **{name: bytes(length)})).code is ErrorCode.BAD_VALUE
    assert packed_error(body(verb, **{name: b""})).code is ErrorCode.BAD_VALUE
    assert packed_error(body(verb, **{name: bytes(width * (m.MAX_KEYS + 1))})).code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("verb, name", [("reserve", "shards"), ("commit", "shards"), ("commit", "generations")])
def test_companions_of_keys_must_be_as_many(verb: str, name: str) -> None:
    width = len(body(verb)[name]) // 2
    for count in (1, 3):
        assert packed_error(body(verb, **{name: bytes(width * count)})).code is ErrorCode.BAD_VALUE


@pytest.mark.parametrize("name", ["client", "session", "lock"])
def test_ids_have_sixteen_bytes(name: str) -> None:
    for length in (0, 15, 17, 8000):
        assert packed_error(body("hello", **{name: bytes(length)})).code in (ErrorCode.BAD_VALUE, ErrorCode.TOO_LARGE)


@pytest.mark.parametrize("request_id", [None, "1", -1, 1.0, True, 1 << 63, (1 << 64) - 1])
def test_the_id_is_a_uint64(request_id: Any) -> None:
    if type(request_id) is int and request_id >= 0:
        assert m.decode_request(msgpack.packb(body("bye", id=request_id))) == (request_id, m.Bye())
    else:
        assert m.decode_request(msgpack.packb(body("bye", id=request_id)))[0] == 0
        assert packed_error(body("bye", id=request_id)).code in (ErrorCode.BAD_MESSAGE, ErrorCode.BAD_VALUE)


@pytest.mark.parametrize("verb", [None, 7, b"hello", [], "", "HELLO", "steal", "x" * 100_000])
def test_an_unknown_verb_is_told_so(verb: Any) -> None:
    error = packed_error({"verb": verb, "id": 5})
    assert error.code is (ErrorCode.UNKNOWN_VERB if type(verb) is str else ErrorCode.BAD_MESSAGE)
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\xc0", b"\x93\x01\x02\x03", b"\x81\x01\x02", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000, b"\x81\xa1" * 3000]
)
def test_what_is_no_map_of_strings_is_a_bad_message(payload: bytes) -> None:
    assert decode_error(payload).code is ErrorCode.BAD_MESSAGE


def test_extension_types_and_broken_text_are_bad_messages() -> None:
    assert decode_error(msgpack.packb({"verb": "bye", "id": 5, "x": msgpack.ExtType(1, b"x")})).code is ErrorCode.BAD_MESSAGE
    assert decode_error(msgpack.packb({"verb": "bye", "id": 5, "x": msgpack.Timestamp(1)})).code is ErrorCode.BAD_MESSAGE
    assert decode_error(b"\x82\xa4verb\xa3b\xffe\xa2id\x05").code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("version", [[1, 0], [0, 9], [65535, 0]])
def test_another_major_version_is_told_so_whatever_else_its_hello_holds(version: list[int]) -> None:
    assert packed_error(body("hello", protocol=version)).code is ErrorCode.VERSION
    assert packed_error({"verb": "hello", "id": 5, "protocol": version, "of_tomorrow": 1}).code is ErrorCode.VERSION


@pytest.mark.parametrize("version", [[1], [1, 0, 0], [1, -1], ["1", 0], [True, 0], [1, 1 << 16], "1.0"])
def test_a_version_is_two_small_integers(version: Any) -> None:
    assert packed_error(body("hello", protocol=version)).code is ErrorCode.BAD_MESSAGE


def test_a_newer_minor_version_is_understood() -> None:
    assert isinstance(m.decode_request(msgpack.packb(body("hello", protocol=[2, 9])))[1], m.Hello)


def test_names_are_bounded_in_bytes() -> None:
    assert packed_error(body("hello", name="ü" * 33)).code is ErrorCode.BAD_VALUE
    assert isinstance(m.decode_request(msgpack.packb(body("hello", name="ü" * 32)))[1], m.Hello)


@pytest.mark.parametrize("name", ["statuses", "pages", "generations"])
def test_a_reply_with_another_number_of_items_than_asked_is_refused(name: str) -> None:
    reply = msgpack.unpackb(m.encode_reply(REPLIES["reserve"], 5, INSTANCE))
    with pytest.raises(ProtocolError):
        m.decode_reply(msgpack.packb({**reply, name: reply[name] + reply[name][: len(reply[name]) // 2]}), REQUESTS["reserve"], 2)
    with pytest.raises(ProtocolError):
        m.decode_reply(msgpack.packb(reply), REQUESTS["reserve"], 3)
