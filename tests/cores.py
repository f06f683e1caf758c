"""A core on private tables, driven by hand: what tests and simulations of the brain start from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hostkv.cext import Tables
from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode
from hostkv.schemas.namespace import Layout
from hostkv.sidecar.core import Core, Event, Facts, Look
from hostkv.sidecar.tiers import Tier

EXTENT = 1 << 20
SIZES = {
    "pool_bytes": 8 * EXTENT,
    "extent_bytes": EXTENT,
    "max_blocks": 1024,
    "max_shards": 64,
    "max_pins": 256,
    "max_members": 8,
    "max_namespaces": 4,
}
BOOT = b"b" * 16


class Driver:
    """A core, the locks its members hold, and a way to talk to it as a client does. The tables lie in an anonymous file, whose bytes can be
    compared and which a second core can adopt."""

    def __init__(
        self, before: Driver | None = None, tier: Tier | None = None, quiet: Callable[[], bool] = lambda: True, **sizes: int
    ) -> None:
        """`before`: a driver whose core is never used again, as after SIGKILL; its tables and locks are taken over."""
        self.sizes = {**SIZES, **sizes} if before is None else before.sizes
        self.now_ns = 10**9
        self.ended = False  # another one has taken the tables over
        instance_id = os.urandom(16)
        if before is None:
            self.locks: dict[bytes, int] = {}  # those that are held -> their holder's heartbeat
            self.hidden: set[bytes] = set()  # locks whose files cannot be looked at
            self.exits: dict[bytes, bool] = {}  # clients whose pidfd is held -> whether it says exited
            self.fd = os.memfd_create("tables")
            os.ftruncate(self.fd, Tables.bytes_needed(**self.sizes))
            self.tables = Tables.create(self.fd, boot_id=BOOT, pool_epoch=os.urandom(16), instance_id=instance_id, **self.sizes)
        else:
            before.ended = True
            self.locks, self.hidden, self.fd = before.locks, before.hidden, before.fd
            self.exits = {}
            self.tables = Tables.adopt(self.fd, boot_id=BOOT, instance_id=instance_id, **self.sizes)
        facts = Facts(
            version="0",
            instance_id=instance_id,
            pid=1,
            endpoint="ipc:///x",
            pool_name="x",
            pool_path="/x",
            tables_path="/x.tables",
            tables_bytes=Tables.bytes_needed(**self.sizes),
            verify=False,
            eviction="lru",
            started_ns=0,
            **self.sizes,
        )
        self.core = Core(self.tables, facts, self._look, self.exits.get, before is not None, tier, quiet)

    def _look(self, name: bytes) -> Look:
        return Look(None) if name in self.hidden else Look(name in self.locks, self.locks.get(name, 0))

    def close(self) -> None:
        self.tables.close()
        os.close(self.fd)

    def ask(self, connection: bytes, request: m.Request) -> Any:
        """The typed reply."""
        self.now_ns += 1000
        number, instance, reply = m.decode_reply(self.core.handle(connection, m.encode_request(request, 77), self.now_ns), request)
        assert (number, instance) == (77, self.core.instance_id)
        return reply

    def refused(self, connection: bytes, request: m.Request) -> ErrorCode:
        """The code of the error it must be answered with."""
        reply = self.ask(connection, request)
        assert isinstance(reply, m.ErrorReply), f"expected an error, got {reply}"
        return ErrorCode(reply.error)

    def hello(self, connection: bytes, client: int = 1, session: int = 1, lock: int | None = None) -> m.HelloReply:
        name = ident(lock if lock is not None else client)
        self.locks.setdefault(name, 0)
        reply = self.ask(
            connection, m.Hello([m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR], ident(client), ident(session), name, client, f"c{client}")
        )
        assert isinstance(reply, m.HelloReply), reply
        return reply

    def register(self, connection: bytes, layout: Layout | None = None) -> int:
        reply = self.ask(connection, m.Register((layout or make_layout()).encode()))
        assert isinstance(reply, m.RegisterReply), reply
        return reply.index

    def die(self, lock: int) -> None:
        """The kernel drops a lock, and the loop sees it."""
        self.locks.pop(ident(lock), None)
        self.watch()

    def watch(self, after_ns: int = 0) -> list[Event]:
        """The loop looks at the members, `after_ns` from now."""
        self.now_ns += after_ns
        return self.core.watch(self.now_ns)

    def write(self, connection: bytes, index: int, names: list[int], tag: int = 1) -> None:
        """Makes blocks of one shard READY."""
        shards = bytes(2 * len(names))
        granted = self.ask(connection, m.Reserve(index, tag, keys(*names), shards))
        assert not any(granted.statuses), granted
        done = self.ask(connection, m.Commit(tag, keys(*names), shards, granted.generations, bytes(8 * len(names))))
        assert not any(done.statuses), done

    def state(self) -> tuple[Any, ...]:
        """All that an error must not change: who is who, and the tables byte for byte."""
        status = self.core.status(0)
        status.pop("errors"), status.pop("requests")
        return status, os.pread(self.fd, Tables.bytes_needed(**self.sizes), 0)


def ident(n: int) -> bytes:
    return n.to_bytes(16, "little")


def keys(*names: int) -> bytes:
    """Keys that spread over the table as real ones do not need to: the name is in the bytes that choose the place."""
    return b"".join((n * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") + n.to_bytes(24, "little") for n in names)


def tags(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)


def make_layout(model: str = "m", shard_bytes: int = 1 << 16, shards: int = 1) -> Layout:
    return Layout(model=model, revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=shard_bytes, shards=shards)
