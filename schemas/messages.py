"""The typed messages: what PROTOCOL.md tells in prose, as dataclasses that encode, decode and check themselves.

Every message is one msgpack map in one ZeroMQ frame. A request carries `verb` and `id`; its reply carries the same `id`, the
`instance` that answered, and either the fields of the verb's reply or `error` and `message`. Unknown or missing fields, wrong
types and values out of range raise ProtocolError; nothing else can come out of decode_request or decode_reply.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgpack

from .errors import ErrorCode, ProtocolError
from .namespace import KEY_BYTES, MAX_ENCODED_BYTES

PROTOCOL_MAJOR = 2
PROTOCOL_MINOR = 2

MAX_MESSAGE_BYTES = 1 << 20  # a larger request is answered TOO_LARGE
MAX_FRAME_BYTES = 2 << 20  # a larger frame closes the connection (ZMQ_MAXMSGSIZE)
MAX_KEYS = 8192  # in one batch; clients split longer ones
MAX_TAGS = 8192
MAX_NAME_BYTES = 64
MAX_WAIT_MS = 60_000
ID_BYTES = 16
ALL_NAMESPACES = (1 << 32) - 1  # in the place of an index

# Types on the wire. Keys and their companions are joined fixed-width fields, so a batch is one bytes object, never a list.
U32: TypeAlias = int
U64: TypeAlias = int
WaitMs: TypeAlias = int  # 0..MAX_WAIT_MS
Id16: TypeAlias = bytes  # exactly 16 bytes
Keys: TypeAlias = bytes  # 32 bytes per key, 1..MAX_KEYS keys
Shards: TypeAlias = bytes  # uint16 LE per item
Pages: TypeAlias = bytes  # uint32 LE per item: where the slot starts in the pool, in pages of 4096 bytes
Generations: TypeAlias = bytes  # uint64 LE per item
Checksums: TypeAlias = bytes  # uint64 LE per item, 0 where not computed
Statuses: TypeAlias = bytes  # one Status per item
Tags: TypeAlias = bytes  # uint64 LE per tag, 1..MAX_TAGS tags
Namespace: TypeAlias = bytes  # Layout.encode()
Flag: TypeAlias = int  # 0 or 1
Name: TypeAlias = str  # for people, at most 64 bytes
Path: TypeAlias = str
Version: TypeAlias = list[int]  # [major, minor]


@dataclass(slots=True)
class Hello:
    """First message of a connection: joins (or renews) a member of a session."""

    verb: ClassVar[str] = "hello"
    protocol: Version
    client: Id16
    session: Id16
    lock: Id16
    pid: U32
    name: Name


@dataclass(slots=True)
class HelloReply:
    protocol: Version
    version: Name
    pool_path: Path
    tables_path: Path
    pool_epoch: Id16
    pool_bytes: U64
    tables_bytes: U64
    clock_ns: U64
    verify: U32  # 1: who commits gives checksums, and who loads compares them


@dataclass(slots=True)
class Bye:
    """The member leaves: its shards in flight are aborted; the session's pins go with its last member."""

    verb: ClassVar[str] = "bye"


@dataclass(slots=True)
class Register:
    """Makes a namespace known and returns its number in this pool."""

    verb: ClassVar[str] = "register"
    namespace: Namespace


@dataclass(slots=True)
class RegisterReply:
    index: U32


@dataclass(slots=True)
class Lookup:
    """Which keys are READY. Clients with the tables mapped read them instead."""

    verb: ClassVar[str] = "lookup"
    index: U32
    keys: Keys


@dataclass(slots=True)
class LookupReply:
    found: Statuses


@dataclass(slots=True)
class Reserve:
    """Asks for the right to write (key, shard) pairs; what is granted is held under `tag` until commit or abort. `low_priority` 1: until
    somebody acquires them, blocks that begin here go to no tier and have a small part of a full pool."""

    verb: ClassVar[str] = "reserve"
    index: U32
    tag: U64
    keys: Keys
    shards: Shards
    low_priority: Flag = 0


@dataclass(slots=True)
class HandlesReply:
    """One status per item; page and generation are zero where the status is not OK."""

    statuses: Statuses
    pages: Pages
    generations: Generations


@dataclass(slots=True)
class Commit:
    """The bytes of these shards are in place. A block is READY when its last shard is committed."""

    verb: ClassVar[str] = "commit"
    tag: U64
    keys: Keys
    shards: Shards
    generations: Generations
    checksums: Checksums


@dataclass(slots=True)
class StatusesReply:
    statuses: Statuses


@dataclass(slots=True)
class Abort:
    """Gives back every shard this member still holds under these tags."""

    verb: ClassVar[str] = "abort"
    tags: Tags


@dataclass(slots=True)
class CountReply:
    count: U64


@dataclass(slots=True)
class Acquire:
    """Pins READY blocks for a request of this session. Pinning a block twice under one tag is one pin."""

    verb: ClassVar[str] = "acquire"
    index: U32
    tag: U64
    keys: Keys


@dataclass(slots=True)
class Prefetch:
    """Brings blocks from the tier into the pool. Answered when all that the tier has are there, after `wait_ms`, or when this connection
    asks something else: OK where a block is in the pool, BUSY where it is still coming, MISS where it is nowhere. Since minor version 1."""

    verb: ClassVar[str] = "prefetch"
    index: U32
    keys: Keys
    wait_ms: WaitMs


@dataclass(slots=True)
class Release:
    """Ends every pin of this session under these tags."""

    verb: ClassVar[str] = "release"
    tags: Tags


@dataclass(slots=True)
class Discard:
    """These blocks hold wrong bytes: they are misses from now on, freed at their last release, and repaired by the next save."""

    verb: ClassVar[str] = "discard"
    index: U32
    keys: Keys
    generations: Generations


@dataclass(slots=True)
class Clear:
    """Invalidates one namespace, or all (ALL_NAMESPACES): its blocks are misses from now on, freed at their last release."""

    verb: ClassVar[str] = "clear"
    index: U32


@dataclass(slots=True)
class StatusRequest:
    verb: ClassVar[str] = "status"


@dataclass(slots=True)
class StatusReply:
    status: dict[str, Any]


@dataclass(slots=True)
class Empty:
    pass


@dataclass(slots=True)
class ErrorReply:
    error: str
    message: str


Request: TypeAlias = (
    Hello | Bye | Register | Lookup | Reserve | Commit | Abort | Acquire | Prefetch | Release | Discard | Clear | StatusRequest
)
Reply: TypeAlias = HelloReply | RegisterReply | LookupReply | HandlesReply | StatusesReply | CountReply | StatusReply | Empty | ErrorReply

REPLIES: dict[type[Any], type[Any]] = {
    Hello: HelloReply,
    Bye: Empty,
    Register: RegisterReply,
    Lookup: LookupReply,
    Reserve: HandlesReply,
    Commit: StatusesReply,
    Abort: CountReply,
    Acquire: HandlesReply,
    Prefetch: StatusesReply,
    Release: CountReply,
    Discard: CountReply,
    Clear: CountReply,
    StatusRequest: StatusReply,
}
VERBS: dict[str, type[Any]] = {request.verb: request for request in REPLIES}


def _integer(high: int) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if type(value) is not int:
            raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{name} must be an integer, got {type(value).__name__}")
        if not 0 <= value <= high:
            raise ProtocolError(ErrorCode.BAD_VALUE, f"{name} is {value}, must be 0..{high}")

    return check


def _joined(width: int, low: int, high: int) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if type(value) is not bytes:
            raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{name} must be bytes, got {type(value).__name__}")
        count, rest = divmod(len(value), width)
        if rest:
            raise ProtocolError(ErrorCode.BAD_VALUE, f"{name} has {len(value)} bytes, must be a multiple of {width}")
        if count > high:
            raise ProtocolError(ErrorCode.TOO_LARGE, f"{name} has {count} items, the limit is {high}")
        if count < low:
            raise ProtocolError(ErrorCode.BAD_VALUE, f"{name} has {count} items, must be at least {low}")

    return check


def _string(high: int) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if type(value) is not str:
            raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{name} must be a string, got {type(value).__name__}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:  # a lone surrogate: msgpack refuses it on the way out
            raise ProtocolError(ErrorCode.BAD_VALUE, f"{name} is not valid UTF-8") from None
        if size > high:
            raise ProtocolError(ErrorCode.BAD_VALUE, f"{name} is longer than {high} bytes")

    return check


def _version(name: str, value: object) -> None:
    if type(value) is not list or len(value) != 2 or any(type(v) is not int or not 0 <= v < 1 << 16 for v in value):
        raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{name} must be [major, minor]")


def _map(name: str, value: object) -> None:
    if type(value) is not dict:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{name} must be a map, got {type(value).__name__}")


_HIGHEST = {"Flag": 1, "U32": (1 << 32) - 1, "U64": (1 << 64) - 1, "WaitMs": MAX_WAIT_MS}
_WIDTHS = {"Keys": KEY_BYTES, "Shards": 2, "Pages": 4, "Generations": 8, "Checksums": 8, "Statuses": 1}
_CHECKS: dict[str, Callable[[str, object], None]] = {
    **{kind: _integer(high) for kind, high in _HIGHEST.items()},
    **{kind: _joined(width, 1, MAX_KEYS) for kind, width in _WIDTHS.items()},
    "Id16": _joined(1, ID_BYTES, ID_BYTES),
    "Tags": _joined(8, 1, MAX_TAGS),
    "Namespace": _joined(1, 1, MAX_ENCODED_BYTES),
    "Name": _string(MAX_NAME_BYTES),
    "Path": _string(4096),
    "Version": _version,
    "str": _string(4096),
    "dict[str, Any]": _map,
}


class _Plan:
    """How messages of one type are looked at. Of a short one most of its time is Python's, so what is right is told by few steps of it, and
    the checks of integers and of the items of a batch are asked only for what is wrong."""

    def __init__(self, kind: type[Any]) -> None:
        found = [(field.name, field.default, str(field.type)) for field in fields(kind)]
        # The default is of a field that came in a later minor version and is left out where it says nothing.
        self.fields = [(name, default) for name, default, _ in found]
        self.integers = [(name, _HIGHEST[kind], _CHECKS[kind]) for name, _, kind in found if kind in _HIGHEST]
        self.batch = [(name, _WIDTHS[kind], _CHECKS[kind]) for name, _, kind in found if kind in _WIDTHS]
        self.others = [(name, _CHECKS[kind]) for name, _, kind in found if kind not in _HIGHEST and kind not in _WIDTHS]

    def misfit(self, body: dict[str, Any]) -> ProtocolError:
        """Which field is missing, or not known."""
        for name, default in self.fields:
            if name not in body and default is MISSING:
                return ProtocolError(ErrorCode.BAD_MESSAGE, f"field {name!r} is missing")
        unknown = sorted({str(name) for name in body} - {name for name, _ in self.fields})
        return ProtocolError(ErrorCode.BAD_MESSAGE, f"unknown field {', '.join(unknown)[:100]!r}")


_PLANS = {_type: _Plan(_type) for _type in {*REPLIES, *REPLIES.values(), ErrorReply}}

_T = TypeVar("_T")


def _build(kind: type[_T], body: dict[str, Any], count: int | None = None) -> _T:
    """`count`: how many items it must have; None: as many as its first field of items."""
    plan = _PLANS[kind]
    try:
        message = kind(**body)
    except TypeError:
        raise plan.misfit(body) from None
    for name, high, check in plan.integers:
        value = getattr(message, name)
        if type(value) is not int or not 0 <= value <= high:
            check(name, value)
    for name, check in plan.others:
        check(name, getattr(message, name))
    for name, width, check in plan.batch:
        value = getattr(message, name)
        if count is None or type(value) is not bytes or len(value) != width * count:
            check(name, value)
            if count is not None:
                raise ProtocolError(ErrorCode.BAD_VALUE, f"{name} has {len(value) // width} items, must have {count}")
            count = len(value) // width
    return message


def _unpack(payload: bytes, max_array: int = -1, max_map: int = -1) -> dict[str, Any]:
    try:
        body = msgpack.unpackb(payload, raw=False, strict_map_key=True, max_ext_len=0, max_array_len=max_array, max_map_len=max_map)
    except (ValueError, struct.error, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, f"not msgpack: {type(error).__name__}") from None
    if type(body) is not dict:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "not a map")
    return body


def encode_request(request: Request, request_id: int) -> bytes:
    body: dict[str, Any] = {"verb": request.verb, "id": request_id}
    for name, default in _PLANS[type(request)].fields:
        if (value := getattr(request, name)) != default:
            body[name] = value
    return msgpack.packb(body, use_bin_type=True)


def decode_request(payload: bytes) -> tuple[int, Request | ProtocolError]:
    """The request id (0 where none can be read) and the request, or what is wrong with it."""
    request_id = 0
    try:
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ProtocolError(ErrorCode.TOO_LARGE, f"message of {len(payload)} bytes, the limit is {MAX_MESSAGE_BYTES}")
        body = _unpack(payload, max_array=16, max_map=64)  # memory is taken for what a header claims
        request_id = _request_id(body)
        verb = body.pop("verb", None)
        if type(verb) is not str:
            raise ProtocolError(ErrorCode.BAD_MESSAGE, "field 'verb' must be a string")
        kind = VERBS.get(verb)
        if kind is None:
            raise ProtocolError(ErrorCode.UNKNOWN_VERB, f"verb {verb[:32]!r} is unknown, known are {', '.join(VERBS)}")
        if kind is Hello:
            _same_major(body.get("protocol"))
        return request_id, _build(kind, body)
    except ProtocolError as error:
        return request_id, error


def _request_id(body: dict[str, Any]) -> int:
    """Takes it out of the body."""
    request_id: int = body.pop("id", None)  # maybe of another type, until it has been looked at
    if type(request_id) is not int or not 0 <= request_id < 1 << 64:
        _CHECKS["U64"]("id", request_id)
    return request_id


def _same_major(version: object) -> None:
    """Looked at before the rest of a hello, which another major version may have changed."""
    _version("protocol", version)
    if version[0] != PROTOCOL_MAJOR:  # type: ignore[index]
        raise ProtocolError(
            ErrorCode.VERSION, f"the client speaks protocol {version}, this sidecar {[PROTOCOL_MAJOR, PROTOCOL_MINOR]}; upgrade one"
        )


def encode_reply(reply: Reply, request_id: int, instance: bytes) -> bytes:
    body: dict[str, Any] = {"id": request_id, "instance": instance}
    for name, _ in _PLANS[type(reply)].fields:
        body[name] = getattr(reply, name)
    return msgpack.packb(body, use_bin_type=True)


def decode_reply(payload: bytes, request: Request | None, count: int | None = None) -> tuple[int, bytes, Reply]:
    """Request id, instance and reply of `request` (an ErrorReply where the sidecar refused; with request None only the id is of
    use). `count`: how many items a batch reply must have. Raises ProtocolError on bytes no sidecar of this protocol sends."""
    body = _unpack(payload)
    request_id, instance = _request_id(body), body.pop("instance", None)
    if type(instance) is not bytes or len(instance) != ID_BYTES:
        _CHECKS["Id16"]("instance", instance)
    if request is None:
        return request_id, instance, Empty()
    if "error" in body:
        return request_id, instance, _build(ErrorReply, body)
    return request_id, instance, _build(REPLIES[type(request)], body, count)
