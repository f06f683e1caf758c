"""Namespaces: equal fields are equal bytes, any other field is another fingerprint, and only what encode() writes is decoded."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import fields
from typing import Any

import pytest
from hostkv.schemas.namespace import MAX_ENCODED_BYTES, Layout, NamespaceError
from hypothesis import given
from hypothesis import strategies as st

PLAIN: dict[str, Any] = {
    "model": "org/name",
    "revision": "abc123",
    "kv_dtype": "bfloat16",
    "layout_id": "opaque",
    "block_tokens": 128,
    "shard_bytes": 1 << 20,
}
LAYOUT = Layout(**PLAIN)
# Frozen: another value here means that every cache in the world is a miss.
FINGERPRINT = "a2812479cfe0ae49034abbb3cd339d1f3b72feafde04a12d3f7a4b105250780d"


def test_the_fingerprint_is_frozen() -> None:
    assert LAYOUT.fingerprint().hex() == FINGERPRINT
    assert LAYOUT.fingerprint() == hashlib.sha256(LAYOUT.encode()).digest()


@pytest.mark.parametrize("name", [field.name for field in fields(Layout)])
def test_any_other_field_is_another_namespace(name: str) -> None:
    value = getattr(LAYOUT, name)
    other: Any = value + 1 if type(value) is int else (*value, 1) if type(value) is tuple else value + "x"
    if name == "layout_id":
        other = "vllm:x"
    changes = {name: other}
    if name in ("pp_rank", "cp_rank"):
        changes[name.replace("rank", "size")] = 2
        base = dataclasses.replace(LAYOUT, **{name.replace("rank", "size"): 2})
    else:
        base = LAYOUT
    assert dataclasses.replace(LAYOUT, **changes).fingerprint() != base.fingerprint()


def test_neighbouring_fields_cannot_be_confused() -> None:
    assert Layout(**{**PLAIN, "model": "a", "revision": "bc"}).encode() != Layout(**{**PLAIN, "model": "ab", "revision": "c"}).encode()


@given(
    st.builds(
        Layout,
        model=st.text(min_size=1, max_size=40),
        revision=st.text(max_size=40),
        kv_dtype=st.text(min_size=1, max_size=10),
        layout_id=st.sampled_from(["opaque", "vllm:flash", "sglang:x"]),
        block_tokens=st.integers(1, 1 << 20),
        shard_bytes=st.integers(1, 1 << 36),
        shards=st.integers(1, 64),
        layout_shape=st.lists(st.integers(0, (1 << 63) - 1), max_size=16).map(tuple),
        salt=st.text(max_size=40),
    )
)
def test_decode_is_the_inverse_of_encode(layout: Layout) -> None:
    assert Layout.decode(layout.encode()) == layout
    assert layout.slot_bytes % 4096 == 0
    assert layout.shards * layout.shard_bytes <= layout.slot_bytes < layout.shards * (layout.shard_bytes + 64) + 4096


@given(st.data())
def test_changed_bytes_decode_to_another_layout_or_to_an_error(data: st.DataObject) -> None:
    raw = bytearray(LAYOUT.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = Layout.decode(bytes(raw))
    except NamespaceError:
        return
    assert decoded != LAYOUT


@given(st.binary(max_size=300))
def test_random_bytes_are_an_error(raw: bytes) -> None:
    with pytest.raises(NamespaceError):
        Layout.decode(raw)


def test_a_namespace_cut_anywhere_or_followed_by_anything_is_an_error() -> None:
    whole = LAYOUT.encode()
    for raw in [*(whole[:n] for n in range(len(whole))), whole + b"\x00", whole + whole, bytes(MAX_ENCODED_BYTES + 1)]:
        with pytest.raises(NamespaceError):
            Layout.decode(raw)


@pytest.mark.parametrize(
    "change, names",
    [
        ({"model": ""}, "model"),
        ({"kv_dtype": ""}, "kv_dtype"),
        ({"layout_id": ""}, "layout_id"),
        ({"layout_id": "paged"}, "opaque, vllm, sglang"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"shard_bytes": 0}, "shard_bytes"),
        ({"shard_bytes": -1}, "shard_bytes"),
        ({"shard_bytes": (1 << 36) + 1}, "shard_bytes"),
        ({"shards": 0}, "shards"),
        ({"shards": 65}, "shards"),
        ({"pp_rank": 1}, "pp_rank"),
        ({"cp_rank": 1}, "cp_rank"),
        ({"tp_size": 0}, "tp_size"),
        ({"model": 7}, "model"),
        ({"model": "x" * 1025}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"block_tokens": 1.0}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"layout_shape": [1]}, "layout_shape"),
        ({"layout_shape": tuple(range(17))}, "layout_shape"),
        ({"layout_strides": (-1,)}, "layout_strides"),
    ],
)
def test_a_value_out_of_range_is_named(change: dict[str, Any], names: str) -> None:
    with pytest.raises(NamespaceError, match=names):
        Layout(**{**PLAIN, **change})


@pytest.mark.parametrize(
    "shard_bytes, shards, slot_bytes", [(1, 1, 4096), (4095, 1, 4096), (4096, 1, 4096), (4097, 1, 8192), (4097, 2, 12288), (65, 64, 8192)]
)
def test_slots_are_whole_pages_of_aligned_shards(shard_bytes: int, shards: int, slot_bytes: int) -> None:
    assert Layout(**{**PLAIN, "shard_bytes": shard_bytes, "shards": shards}).slot_bytes == slot_bytes
