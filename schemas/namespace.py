"""Namespaces: everything that must be equal for two blocks to be interchangeable, as bytes with one SHA-256.

A namespace is encoded field by field in the order of their tags: tag (uint8), length (uint32 LE), value. Integers are uint64 LE,
strings are UTF-8. Every field is present exactly once, so equal namespaces are equal bytes. The fingerprint is the SHA-256 of
those bytes; a key is SHA-256(fingerprint, 32 zero bytes, block id), one compression past a prepared state.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields
from typing import Any

FORMAT_VERSION = 1
KEY_BYTES = 32
MAX_ID_BYTES = 64
MAX_SHARDS = 64
MAX_STRING_BYTES = 1024
MAX_ENCODED_BYTES = 16384
PAGE_BYTES = 4096
SHARD_ALIGN = 64
LAYOUT_FAMILIES = ("opaque", "vllm", "sglang")


class NamespaceError(ValueError):
    """A namespace that cannot be registered; the message names the field and the fix."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Identity and geometry of one kind of block.

    model, revision: name, and revision or weights fingerprint. kv_dtype: of the stored KV ("bfloat16"). layout_id: "opaque" for
    bytes only their writer understands, or "vllm:..." / "sglang:..." as that connector defines it. block_tokens: tokens a block
    holds. shard_bytes: bytes one rank writes of a block. shards: ranks that write one, 1..64. The rest is identity that has a
    default: the shape and strides behind layout_id, parallel sizes and the rank rule, LoRA, salt, how block ids are hashed.
    Raises NamespaceError on a value out of range.
    """

    model: str
    revision: str
    kv_dtype: str
    layout_id: str
    block_tokens: int
    shard_bytes: int
    shards: int = 1
    layout_shape: tuple[int, ...] = ()
    layout_strides: tuple[int, ...] = ()
    tp_size: int = 1
    pp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    rank_rule: str = ""
    lora_name: str = ""
    lora_version: str = ""
    salt: str = ""
    hash_algorithm: str = ""
    hash_root: str = ""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            _check(name, kind, getattr(self, name))
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise NamespaceError(f"{name} is {value}, must be {low}..{high}")
        for name in ("model", "kv_dtype", "layout_id"):
            if not getattr(self, name):
                raise NamespaceError(f"{name} is empty; two models without it would share blocks")
        if self.pp_rank >= self.pp_size or self.cp_rank >= self.cp_size:
            raise NamespaceError("pp_rank and cp_rank must be below pp_size and cp_size")
        if self.layout_id.split(":", 1)[0] not in LAYOUT_FAMILIES:
            raise NamespaceError(f"layout_id {self.layout_id!r} is unknown; it must start with one of {', '.join(LAYOUT_FAMILIES)}")

    @property
    def shard_stride(self) -> int:
        """Bytes from one shard of a block to the next in its slot."""
        return -(-self.shard_bytes // SHARD_ALIGN) * SHARD_ALIGN

    @property
    def slot_bytes(self) -> int:
        """Bytes of the pool one block takes."""
        return -(-self.shards * self.shard_stride // PAGE_BYTES) * PAGE_BYTES

    def encode(self) -> bytes:
        """The canonical bytes."""
        parts = [_field(0, struct.pack("<Q", FORMAT_VERSION))]
        for tag, field in enumerate(fields(self), 1):
            parts.append(_field(tag, _KINDS[field.name].pack(getattr(self, field.name))))
        return b"".join(parts)

    def fingerprint(self) -> bytes:
        """32 bytes that stand for all of it."""
        return hashlib.sha256(self.encode()).digest()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """The inverse of encode(). Raises NamespaceError on anything that encode() cannot have written."""
        if len(data) > MAX_ENCODED_BYTES:
            raise NamespaceError(f"namespace of {len(data)} bytes, the limit is {MAX_ENCODED_BYTES}")
        values: list[bytes] = []
        at = 0
        while at < len(data):
            if at + 5 > len(data):
                raise NamespaceError("namespace is truncated in a field header")
            tag, length = struct.unpack_from("<BI", data, at)
            at += 5
            if tag != len(values) or at + length > len(data):
                raise NamespaceError(f"namespace field {tag} is out of order, repeated, unknown or truncated")
            values.append(data[at : at + length])
            at += length
        if len(values) != len(_KINDS) + 1:
            raise NamespaceError(f"namespace has {len(values)} fields, this version has {len(_KINDS) + 1}")
        if values[0] != struct.pack("<Q", FORMAT_VERSION):
            raise NamespaceError("namespace is of another format version")
        decoded: dict[str, Any] = {name: kind.unpack(name, raw) for (name, kind), raw in zip(_KINDS.items(), values[1:], strict=True)}
        layout = cls(**decoded)
        if layout.encode() != data:
            raise NamespaceError("namespace is not in canonical form")
        return layout


def _field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


class _Int:
    def pack(self, value: int) -> bytes:
        return struct.pack("<Q", value)

    def unpack(self, name: str, raw: bytes) -> int:
        if len(raw) != 8:
            raise NamespaceError(f"{name} has {len(raw)} bytes, an integer has 8")
        return int.from_bytes(raw, "little")


class _Str:
    def pack(self, value: str) -> bytes:
        return value.encode()

    def unpack(self, name: str, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise NamespaceError(f"{name} is not UTF-8") from None


class _Ints:
    def pack(self, value: tuple[int, ...]) -> bytes:
        return struct.pack(f"<{len(value)}Q", *value)

    def unpack(self, name: str, raw: bytes) -> tuple[int, ...]:
        if len(raw) % 8:
            raise NamespaceError(f"{name} has {len(raw)} bytes, not a multiple of 8")
        return struct.unpack(f"<{len(raw) // 8}Q", raw)


_KINDS: dict[str, _Int | _Str | _Ints] = {
    field.name: _Ints() if "tuple" in str(field.type) else _Int() if str(field.type) == "int" else _Str() for field in fields(Layout)
}
_RANGES = (
    ("block_tokens", 1, 1 << 20),
    ("shard_bytes", 1, 1 << 36),
    ("shards", 1, MAX_SHARDS),
    ("tp_size", 1, 1 << 16),
    ("pp_size", 1, 1 << 16),
    ("pp_rank", 0, 1 << 16),
    ("cp_size", 1, 1 << 16),
    ("cp_rank", 0, 1 << 16),
)


def _check(name: str, kind: _Int | _Str | _Ints, value: object) -> None:
    if isinstance(kind, _Int):
        if type(value) is not int:
            raise NamespaceError(f"{name} is {value!r}, must be an integer")
    elif isinstance(kind, _Str):
        if type(value) is not str:
            raise NamespaceError(f"{name} is {value!r}, must be a string")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise NamespaceError(f"{name} is not valid UTF-8") from None
        if size > MAX_STRING_BYTES:
            raise NamespaceError(f"{name} has {size} bytes, the limit is {MAX_STRING_BYTES}")
    elif type(value) is not tuple or len(value) > 16 or any(type(v) is not int or not 0 <= v < 1 << 63 for v in value):
        raise NamespaceError(f"{name} is {value!r}, must be a tuple of at most 16 non-negative integers")
