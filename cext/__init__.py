"""The C extension: tables and pool in shared memory, copies, hashes, the I/O engine, the member lock. _cext.pyi documents every call."""

from ._cext import (
    CStore,
    Io,
    LayoutError,
    Mapping,
    Tables,
    View,
    buffer_address,
    chain_ids,
    cpu_features,
    derive_keys,
    lock_look,
    lock_take,
    memory_copy,
    restart_on_abort,
    sha256,
    xxh3_64,
)

__all__ = [
    "CStore",
    "Io",
    "LayoutError",
    "Mapping",
    "Tables",
    "View",
    "buffer_address",
    "chain_ids",
    "cpu_features",
    "derive_keys",
    "lock_look",
    "lock_take",
    "memory_copy",
    "restart_on_abort",
    "sha256",
    "xxh3_64",
]
