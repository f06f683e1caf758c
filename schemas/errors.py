"""Error codes of the wire and the item statuses of a batch. PROTOCOL.md says what the receiver of each must do."""

from __future__ import annotations

from enum import Enum, IntEnum


class ErrorCode(str, Enum):
    """Why a whole request was refused. The state behind it is unchanged."""

    BAD_MESSAGE = "BAD_MESSAGE"  # not msgpack, not a map, a field missing, unknown or of the wrong type
    BAD_VALUE = "BAD_VALUE"  # a field out of its range
    UNKNOWN_VERB = "UNKNOWN_VERB"
    TOO_LARGE = "TOO_LARGE"  # message or batch over the limits
    VERSION = "VERSION"  # another major protocol version
    NO_SESSION = "NO_SESSION"  # this connection has not said hello to this instance
    NO_LOCK = "NO_LOCK"  # the member's lock file is absent or its lock cannot be seen from the sidecar
    NO_NAMESPACE = "NO_NAMESPACE"  # the namespace number is not registered in this pool
    BAD_NAMESPACE = "BAD_NAMESPACE"  # the encoded namespace is malformed, unknown in layout, or its block does not fit
    LIMIT = "LIMIT"  # a table (members, namespaces) is full
    TIER = "TIER"  # clear: done in the pool, and a tier may still have it
    INTERNAL = "INTERNAL"  # a fault of the sidecar, which logs it and exits


class Status(IntEnum):
    """What happened to one item of a batch; one byte each on the wire."""

    OK = 0  # reserve: granted; commit, abort, acquire: done
    EXISTS = 1  # reserve: the block is READY, or this shard of it is already committed
    BUSY = 2  # reserve: another writer holds the shard, or the block is on its way out
    FULL = 3  # no slot, no table entry or no record to give
    THROTTLED = 4  # this member is writing as much as one member may; try again when some of it is committed
    NOT_HELD = 5  # commit: this member does not hold that shard at that generation under that tag
    MISS = 6  # acquire: no READY block of that key in that namespace


class Attached(IntEnum):
    """What the attach socket answers; one byte."""

    NOTED = 0
    UNKNOWN_CLIENT = 1  # it has to say hello first
    NOT_THE_SENDER = 2  # the descriptor is not a pidfd of the process that sent it
    MALFORMED = 3


class ProtocolError(Exception):
    """A request or reply that breaks the protocol; `code` is what the peer is told."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
