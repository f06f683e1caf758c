"""Hashes against hashlib, on every code path this CPU has; xxh3 against values of the reference implementation."""

import hashlib
import random
import struct
from array import array
from collections.abc import Iterator

import pytest
from hostkv.cext import _cext, chain_ids, cpu_features, derive_keys, sha256, xxh3_64


@pytest.fixture(params=["sha_ni", "arm_sha2", "portable"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on each SHA-256 path; one that this CPU lacks is replaced by the best it has."""
    best = cpu_features()[0]
    _cext._set_sha(request.param)
    yield request.param
    assert _cext._set_sha(best)


def test_cpu_features_names_the_path_in_use() -> None:
    best = cpu_features()[0]
    assert _cext._set_sha("portable")
    assert cpu_features()[0] == "portable"
    assert not _cext._set_sha("abacus")
    assert _cext._set_sha(best)


def test_sha256_equals_hashlib_at_every_length_and_alignment(path: str) -> None:
    data = random.Random(1).randbytes(1 << 20)
    for size in [*range(300), 4095, 4096, 65_535, 65_536, 1 << 20]:
        assert sha256(data[:size]) == hashlib.sha256(data[:size]).digest()
    for start in range(1, 20):
        assert sha256(memoryview(data)[start : start + 999]) == hashlib.sha256(data[start : start + 999]).digest()


def test_keys_equal_hashlib_for_every_id_length(path: str) -> None:
    rng = random.Random(2)
    for count in (0, 1, 2, 3, 63, 64, 1000, 5001):  # from 2048 on without the GIL
        fingerprint = rng.randbytes(32)
        ids = [rng.randbytes(rng.randint(1, 64)) for _ in range(count)]
        expected = b"".join(hashlib.sha256(fingerprint + bytes(32) + i).digest() for i in ids)
        assert derive_keys(fingerprint, ids) == expected
    for size in range(1, 65):
        ids = [rng.randbytes(size), rng.randbytes(65 - size), rng.randbytes(size)]
        assert derive_keys(bytes(32), ids) == b"".join(hashlib.sha256(bytes(64) + i).digest() for i in ids)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([b"ok", b""], ValueError, r"ids\[1\] has 0 bytes"),
        ([b"x" * 65], ValueError, r"ids\[0\] has 65 bytes"),
        ([b"ok", b"ok", "text"], TypeError, r"ids\[2\]"),
        ([bytearray(b"ok")], TypeError, r"ids\[0\]"),
        ((b"ok",), TypeError, "list"),
    ],
)
def test_a_bad_id_is_named_by_its_index(ids: list[bytes], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        derive_keys(bytes(32), ids)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_fingerprint_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        derive_keys(bytes(size), [b"id"])


def reference_chain(root: bytes, tokens: list[int], block_tokens: int, extra: list[bytes] | None) -> list[bytes]:
    ids = []
    for i in range(len(tokens) // block_tokens):
        block = tokens[i * block_tokens : (i + 1) * block_tokens]
        root = hashlib.sha256(root + struct.pack(f"<{block_tokens}I", *block) + (extra[i] if extra else b"")).digest()
        ids.append(root)
    return ids


@pytest.mark.parametrize(("count", "block_tokens"), [(0, 16), (15, 16), (16, 16), (47, 16), (300, 1), (1000, 7), (40_000, 128)])
def test_the_chain_equals_its_definition_and_leaves_the_partial_block_out(path: str, count: int, block_tokens: int) -> None:
    rng = random.Random(count)
    root = rng.randbytes(32)
    tokens = [rng.getrandbits(32) for _ in range(count)]
    extra = [rng.choice([b"", rng.randbytes(rng.randint(1, 200))]) for _ in range(count // block_tokens)]
    packed = array("I", tokens)
    assert chain_ids(root, packed, block_tokens) == reference_chain(root, tokens, block_tokens, None)
    assert chain_ids(root, packed, block_tokens, extra) == reference_chain(root, tokens, block_tokens, extra)


def test_the_chain_of_a_longer_prompt_begins_with_the_chain_of_its_prefix() -> None:
    tokens = array("I", range(64))
    assert chain_ids(bytes(32), tokens, 16)[:2] == chain_ids(bytes(32), tokens[:40], 16)
    assert len(set(chain_ids(bytes(32), array("I", [7] * 64), 16))) == 4


def test_bad_chains_are_refused() -> None:
    tokens = array("I", range(32))
    for arguments, message in (
        ((bytes(31), tokens, 16), "root has 31 bytes"),
        ((bytes(32), tokens, 0), "block_tokens is 0"),
        ((bytes(32), bytes(7), 1), "tokens has 7 bytes"),
        ((bytes(32), tokens, 16, [b""]), "extra has 1 items, there are 2"),
    ):
        with pytest.raises(ValueError, match=message):
            chain_ids(*arguments)
    with pytest.raises(TypeError, match=r"extra\[1\]"):
        chain_ids(bytes(32), tokens, 16, [b"", None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="extra must be a list"):
        chain_ids(bytes(32), tokens, 16, (b"", b""))  # type: ignore[arg-type]


def test_xxh3_equals_the_reference() -> None:
    assert xxh3_64(b"") == 0x2D06800538D394C2
    assert xxh3_64(b"a") == 0xE6C632B61E964E1F
    assert xxh3_64(b"abc") == 0x78AF5F94892F3950


@pytest.mark.parametrize(
    ("size", "digest"),
    [
        (1, 0xC44BDFF4074EECDB),
        (3, 0xC3489259E968AD9E),
        (4, 0xD3D60C1519014E89),
        (8, 0xB88DEE77F6BF6980),
        (9, 0x03688DCAD730D826),
        (16, 0x9DA23836ADF2BE1E),
        (17, 0xF34C3C9CF5A112D1),
        (128, 0x65F3C2C00FA93185),
        (129, 0x28065C6EC25F5B25),
        (240, 0x4917A75C0EF8EED7),
        (241, 0x541B19226F0052E8),
        (1000, 0xD1DB6A0AFEA2CC82),
        (100_000, 0xB25CEA78018497FF),
    ],
)
def test_xxh3_equals_the_reference_in_each_of_its_ranges_of_sizes(size: int, digest: int) -> None:
    assert xxh3_64(bytes((i * 7 + i // 256) % 256 for i in range(size))) == digest
