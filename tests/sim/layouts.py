"""The namespaces and keys of the simulation, small enough that every limit is met, and what the bytes of a READY block are.

The pool is a list of grains of 1024 bytes. What was written into one is told by four numbers: key, generation, shard, and which grain of
the shard it is.
"""

from __future__ import annotations

from hostkv.schemas.namespace import Layout

GRAIN = 1024
EXTENT = 16 << 10


def make_layout(model: str, shard_bytes: int, shards: int) -> Layout:
    return Layout(model=model, revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=shard_bytes, shards=shards)


# Two of one slot size, one with shards that share a page, one that leaves a rest in each extent, one that takes a whole one, one too large.
LAYOUTS = [
    make_layout("one", 4096, 1),
    make_layout("two", 2048, 2),
    make_layout("three", 4096, 3),
    make_layout("four", 2048, 4),
    make_layout("whole", EXTENT, 1),
    make_layout("other", 4096, 1),
]
TOO_LARGE = make_layout("too large", EXTENT + 1, 1)
ENCODED = [layout.encode() for layout in LAYOUTS]
FINGERPRINTS = [layout.fingerprint() for layout in LAYOUTS]
NAMES = 7  # blocks of each layout


def make_key(layout: int, name: int) -> bytes:
    """Keys crowd at few places of the table, so that searches are long, and some meet where evicted ones are remembered. Name 0 is one key
    that all layouts claim, which honest clients never do."""
    number = name and layout * NAMES + name
    return (number * 5 % 11).to_bytes(8, "little") + number.to_bytes(4, "little") + (number % 3 * 2).to_bytes(4, "little") + bytes(16)


KEYS = [[make_key(layout, name) for name in range(NAMES)] for layout in range(len(LAYOUTS))]
NUMBERS = {key: number for number, key in enumerate({key: None for keys in KEYS for key in keys})}
