"""hostkv.h as its users see it: a C library, compiled here with the system's compiler, that is given the address of a store."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostkv.cext import CStore, Mapping, Tables, View, derive_keys

CEXT = Path(__file__).parents[2] / "cext"
POOL_BYTES = 1 << 20
FINGERPRINT = bytes(range(32))
GEOMETRY = {
    "pool_bytes": POOL_BYTES,
    "extent_bytes": POOL_BYTES // 4,
    "max_blocks": 64,
    "max_shards": 64,
    "max_pins": 64,
    "max_members": 4,
    "max_namespaces": 4,
}
C_USER = """
#include "hostkv.h"

int version_ok(const struct hostkv_store *store) {
    return store->abi_version == HOSTKV_ABI_VERSION && store->struct_bytes == sizeof *store;
}
int derive(const struct hostkv_store *store, const uint8_t *id, size_t id_bytes, uint8_t *key) {
    return store->derive(store, id, id_bytes, key);
}
int lookup(const struct hostkv_store *store, const uint8_t *keys, size_t count, uint8_t *found) {
    return store->lookup(store, keys, count, found);
}
uint64_t number(const struct hostkv_store *store, int which) {
    switch (which) {
    case 0: return store->namespace_index;
    case 1: return store->shards;
    case 2: return store->shard_bytes;
    case 3: return store->shard_stride;
    case 4: return (uintptr_t)store->pool;
    case 5: return store->pool_bytes;
    default: return store->tables_bytes;
    }
}
const uint8_t *fingerprint(const struct hostkv_store *store) { return store->fingerprint; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    work = tmp_path_factory.mktemp("user")
    (work / "user.c").write_text(C_USER)
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-I", str(CEXT), "user.c", "-o", "user.so"], cwd=work, check=True)
    library = ctypes.CDLL(str(work / "user.so"))
    library.derive.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    library.lookup.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    library.number.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.number.restype = ctypes.c_uint64
    library.version_ok.argtypes = [ctypes.c_void_p]
    library.fingerprint.argtypes = [ctypes.c_void_p]
    library.fingerprint.restype = ctypes.POINTER(ctypes.c_uint8)
    return library


class Pool:
    """Tables with one namespace, their pool, and a reader of both."""

    def __init__(self) -> None:
        size = Tables.bytes_needed(**GEOMETRY)
        tables_fd, pool_fd = os.memfd_create("hostkv-test"), os.memfd_create("hostkv-test")
        os.ftruncate(tables_fd, size)
        os.ftruncate(pool_fd, POOL_BYTES)
        self.tables = Tables.create(tables_fd, **GEOMETRY, boot_id=bytes(16), pool_epoch=b"e" * 16, instance_id=b"i" * 16)
        self.namespace = self.tables.namespace_add(FINGERPRINT, 5000, 2, "test")
        self.member = self.tables.member_add(b"c" * 16, b"s" * 16, b"l" * 16, 0, 1)
        self.view = View(tables_fd, size)
        self.mapping = Mapping(pool_fd, POOL_BYTES, True)
        self.tables_bytes = size
        os.close(tables_fd)
        os.close(pool_fd)

    def store(self) -> CStore:
        return CStore(self.view, self.mapping, FINGERPRINT, self.namespace, 5000, 2)

    def write(self, key: bytes) -> None:
        for shard in (b"\0\0", b"\1\0"):
            statuses, _, generations = self.tables.reserve(self.namespace, self.member, 1, key, shard)
            assert statuses == b"\0"
            assert self.tables.commit(self.member, 1, key, shard, generations, bytes(8)) == b"\0"


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.tables.close()


def test_the_struct_describes_the_store(library: ctypes.CDLL, pool: Pool) -> None:
    store = pool.store()
    assert library.version_ok(store.address)
    numbers = [library.number(store.address, which) for which in range(7)]
    assert numbers == [pool.namespace, 2, 5000, 5056, pool.mapping.address, POOL_BYTES, pool.tables_bytes]
    assert bytes(library.fingerprint(store.address)[:32]) == FINGERPRINT


@pytest.mark.parametrize("size", [1, 32, 55, 56, 64])
def test_c_derives_the_keys_that_python_does(library: ctypes.CDLL, pool: Pool, size: int) -> None:
    store, key = pool.store(), ctypes.create_string_buffer(32)
    assert library.derive(store.address, b"\0" * size, size, key) == 0
    assert key.raw == derive_keys(FINGERPRINT, [b"\0" * size])


def test_c_finds_a_block_when_its_last_shard_is_committed_and_none_in_a_removed_pool(library: ctypes.CDLL, pool: Pool) -> None:
    store, found = pool.store(), ctypes.create_string_buffer(2)
    keys = derive_keys(FINGERPRINT, [b"there", b"absent"])
    assert library.lookup(store.address, keys, 2, found) == 0
    assert found.raw == b"\0\0"
    pool.write(keys[:32])
    assert library.lookup(store.address, keys, 2, found) == 0
    assert found.raw == b"\1\0"
    pool.tables.set_removed()
    assert library.lookup(store.address, keys, 2, found) == 0
    assert found.raw == b"\0\0"


def test_c_is_told_of_arguments_out_of_range(library: ctypes.CDLL, pool: Pool) -> None:
    store, key = pool.store(), ctypes.create_string_buffer(b"unchanged", 32)
    for id_bytes in (0, 65):
        assert library.derive(store.address, bytes(65), id_bytes, key) == -1
    assert library.derive(store.address, None, 1, key) == -1
    assert library.derive(store.address, b"x", 1, None) == -1
    assert library.lookup(store.address, None, 1, key) == -1
    assert library.lookup(store.address, bytes(32), 1, None) == -1
    assert library.lookup(store.address, None, 0, None) == 0
    assert key.value == b"unchanged"


def test_a_store_outlives_its_view_and_keeps_its_mapping(library: ctypes.CDLL, pool: Pool) -> None:
    store, found = pool.store(), ctypes.create_string_buffer(1)
    key = derive_keys(FINGERPRINT, [b"there"])
    pool.write(key)
    pool.view.close()
    assert library.lookup(store.address, key, 1, found) == 0
    assert found.raw == b"\1"
    with pytest.raises(BufferError, match="in use"):
        pool.mapping.close()
    del store
    pool.mapping.close()


def test_a_store_of_things_that_do_not_belong_together_is_refused(pool: Pool) -> None:
    for arguments, error, message in (
        ((pool.mapping, pool.mapping, FINGERPRINT, 0, 1, 1), TypeError, "View"),
        ((pool.view, bytearray(POOL_BYTES), FINGERPRINT, 0, 1, 1), TypeError, "Mapping"),
        ((pool.view, pool.mapping, FINGERPRINT[1:], 0, 1, 1), ValueError, "31 bytes"),
        ((pool.view, pool.mapping, FINGERPRINT, 4, 1, 1), ValueError, "namespace 4"),
        ((pool.view, pool.mapping, FINGERPRINT, 1 << 32, 1, 1), ValueError, "out of range"),
        ((pool.view, pool.mapping, FINGERPRINT, 0, 0, 1), ValueError, "0 bytes"),
        ((pool.view, pool.mapping, FINGERPRINT, 0, (1 << 64) - 1, 1), ValueError, "cannot be"),
        ((pool.view, pool.mapping, FINGERPRINT, 0, 1, 0), ValueError, "0 shards"),
        ((pool.view, pool.mapping, FINGERPRINT, 0, 1, 65), ValueError, "65"),
        ((pool.view, pool.mapping, FINGERPRINT, 0, POOL_BYTES // 4, 2), ValueError, "cannot be"),
    ):
        with pytest.raises(error, match=message):
            CStore(*arguments)
    fd = os.memfd_create("hostkv-test")
    os.ftruncate(fd, POOL_BYTES)
    with pytest.raises(BufferError):
        CStore(pool.view, Mapping(fd, POOL_BYTES), FINGERPRINT, 0, 1, 1)
    with pytest.raises(ValueError, match="the mapping has 4096 bytes, the pool of these tables has 1048576"):
        CStore(pool.view, Mapping(fd, 4096, True), FINGERPRINT, 0, 1, 1)
    os.close(fd)
    pool.view.close()
    with pytest.raises(ValueError, match="closed"):
        pool.store()
    pool.mapping.close()


def test_a_forked_child_gets_no_address(pool: Pool) -> None:
    store = pool.store()
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(store.address == 0))
        except RuntimeError as error:
            with open("/proc/self/maps") as maps:
                os._exit(42 if "make a new client after fork" in str(error) and "hostkv-test" not in maps.read() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42
    assert store.address
