"""Hashes against hashlib, on every code path this CPU has; xxh3 against values of the reference implementation."""

import ctypes
import hashlib
import os
import random
import struct
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostkv.cext import Mapping, _cext, chain_ids, cpu_features, derive_keys, sha256, xxh3_64


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


# XXH3_64bits_withSeed of the first `size` bytes of sanity_bytes(), from the sanity test of xxHash 0.8.2: with seed 0, with SEED.
SEED = 0x9E3779B185EBCA8D
SEEDED = {
    0: (0x2D06800538D394C2, 0xA8A6B918B2F0364A),
    1: (0xC44BDFF4074EECDB, 0x032BE332DD766EF8),
    6: (0x27B56A84CD2D7325, 0x84589C116AB59AB9),
    12: (0xA713DAF0DFBB77E7, 0xE7303E1B2336DE0E),
    24: (0xA3FE70BF9D3510EB, 0x850E80FC35BDD690),
    48: (0x397DA259ECBA1F11, 0xADC2CBAA44ACC616),
    80: (0xBCDEFBBB2C47C90A, 0xC6DD0CB699532E73),
    195: (0xCD94217EE362EC3A, 0xBA68003D370CB3D9),
    403: (0xCDEB804D65C6DEA4, 0x6259F6ECFD6443FD),
    512: (0x617E49599013CB6B, 0x3CE457DE14C27708),
    2048: (0xDD59E2C3A5F038E0, 0x66F81670669ABABC),
    2099: (0xC6B9D9B3FC9AC765, 0x184F316843663974),
    2240: (0x6E73A90539CF2948, 0x757BA8487D1B5247),
    2367: (0xCB37AEB9E5D361ED, 0xD2DB3415B942B42A),
}


def sanity_bytes() -> bytes:
    generated, state = bytearray(), 2654435761
    for _ in range(max(SEEDED)):
        generated.append(state >> 56)
        state = state * SEED % (1 << 64)
    return bytes(generated)


def test_checksums_of_a_mapping_are_seeded_xxh3_at_any_alignment() -> None:
    data = sanity_bytes()
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, 8192)
    for skew in (0, 1, 37):
        os.pwrite(fd, data, skew)
        mapping = Mapping(fd, 8192)
        for size, expected in SEEDED.items():
            assert mapping.checksums(array("Q", [skew, skew]), size, array("Q", [0, SEED])) == struct.pack("<2Q", *expected)
        mapping.close()
    os.close(fd)


# The code for CPUs without AVX2, which this one may have, is reached from C alone.
STREAMED = """
#include "hash.c"
typedef void add_function(struct hkv_xxh3 *, const void *, size_t);
static uint64_t streamed(add_function *add, const uint8_t *data, size_t size, uint64_t seed, size_t part) {
    struct hkv_xxh3 sum;
    hkv_xxh3_start(&sum, ~seed);
    add(&sum, data, size);
    hkv_xxh3_start(&sum, seed);
    for (size_t at = 0; at < size; at += part) add(&sum, data + at, size - at < part ? size - at : part);
    return hkv_xxh3_end(&sum);
}
uint64_t best(const uint8_t *data, size_t size, uint64_t seed, size_t part) { return streamed(hkv_xxh3_add, data, size, seed, part); }
uint64_t plain(const uint8_t *data, size_t size, uint64_t seed, size_t part) { return streamed(add_plain, data, size, seed, part); }
"""


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    work, cext = tmp_path_factory.mktemp("streamed"), Path(__file__).parents[2] / "cext"
    (work / "streamed.c").write_text(STREAMED)
    flags = ["-std=c11", "-O1", "-shared", "-fPIC", f"-I{cext}", f"-I{cext}/vendor"]
    subprocess.run(["cc", *flags, "streamed.c", "-o", "streamed.so"], cwd=work, check=True)
    return ctypes.CDLL(str(work / "streamed.so"))


@pytest.mark.parametrize("code", ["best", "plain"])
@pytest.mark.parametrize("part", [1, 7, 64, 255, 256, 257, 1024, 2048])
def test_xxh3_of_parts_is_that_of_the_whole(streamed: ctypes.CDLL, code: str, part: int) -> None:
    function = streamed[code]
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_size_t]
    function.restype = ctypes.c_uint64
    data = sanity_bytes()
    for size, expected in SEEDED.items():
        assert (function(data, size, 0, part), function(data, size, SEED, part)) == expected
