"""The order in which the pool gives up blocks is that of the policy of the same name, so that `hostkv simulate` foretells what it does."""

from __future__ import annotations

import pytest
from hostkv.cext import Tables
from hostkv.schemas import layout
from hostkv.schemas.errors import Status
from hostkv.sidecar.policies import POLICIES
from hostkv.sidecar.simulate import Directory
from hypothesis import given
from hypothesis import strategies as st

SLOTS, NAMES = 10, 30
# Prompts of which parts are asked for: (first key, how many), over and over.
REQUESTS = st.lists(st.tuples(st.integers(0, NAMES - 1), st.integers(1, 5)), min_size=30, max_size=90)


def key(n: int) -> bytes:
    return bytes([n + 1]) * 32


@pytest.mark.parametrize("policy", ["reuse", "lru"])
@given(requests=REQUESTS)
def test_the_pool_evicts_what_the_policy_says(policy: str, requests: list[tuple[int, int]]) -> None:
    tables = Tables.create(
        -1,
        pool_bytes=SLOTS * layout.PAGE,
        extent_bytes=SLOTS * layout.PAGE,
        max_blocks=32,
        max_shards=SLOTS,
        max_pins=2 * SLOTS,
        max_members=1,
        max_namespaces=1,
        boot_id=bytes(16),
        pool_epoch=bytes(16),
        instance_id=bytes(16),
        keeps_reused=policy == "reuse",
    )
    tables.member_add(b"c" * 16, b"s" * 16, b"l" * 16, 0, 1)
    tables.namespace_add(bytes(32), layout.PAGE, 1, "")
    directory = Directory(POLICIES[policy](SLOTS), SLOTS)
    for first, count in requests:
        prompt = [(first + n) % NAMES for n in range(count)]
        here = [n for n in prompt if n in directory.blocks]
        directory.use(here)
        if here:
            tables.release(tables.acquire(0, 0, 1, layout.NIL, b"".join(map(key, here)))[3])
        for n in prompt:
            if n in directory.blocks:
                continue
            directory.save([n], {n: None}, ())
            status, _, generation = tables.reserve(0, 0, 1, key(n), bytes(2))
            assert status[0] == Status.OK
            tables.commit(0, 1, key(n), bytes(2), generation, bytes(8))
        found = tables.lookup(0, b"".join(map(key, range(NAMES))))
        assert {n for n, status in enumerate(found) if status == Status.OK} == directory.blocks
    assert tables.check() == []
    tables.close()
