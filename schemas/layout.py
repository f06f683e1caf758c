"""Python mirror of layout.h, compared with the C header by a test. For readers without the C extension and for tools."""

from __future__ import annotations

import struct

MAGIC = b"HOSTKV\0\x01"
LAYOUT_VERSION = 4
BYTE_ORDER = 0x01020304
PAGE = 4096
NIL = 0xFFFFFFFF
MAX_PROBE = 1024

POOL_CREATING, POOL_LIVE, POOL_REMOVED = 0, 1, 2
EMPTY, WRITING, READY, TOMBSTONE = 0, 1, 2, 3
DOOMED, CLEAN = 1, 2
USE, MAX_USES = 4, 63
DEVICE, TIER = 1, 2
INDEX_MAGIC = b"HKVINDX\x01"
TOMBSTONE_WORD = 0xFFFFFFFF
ON_DISK_FREE, ON_DISK_WRITING, ON_DISK, ON_DISK_GONE, ON_DISK_DOOMED = 0, 1, 2, 3, 4

STATIC_BYTES = 512
STATIC_CHECKSUM_OFFSET = 504
INSTANCE_OFFSET = 512
HEARTBEAT_OFFSET = 528
MOVES_OFFSET = 536
GENERATION_OFFSET = 544
TICK_OFFSET = 552
POOL_STATE_OFFSET = 560
VERIFY_OFFSET = 564

# Little-endian, no padding; the names are those of layout.h.
HEADER = struct.Struct("<8sII8I16s16s4QQ5Q2Q6Q280xQ16s4QII3528x")
BLOCK = struct.Struct("<IBBH32sQIIQ")
AUX = struct.Struct("<IIQQII")
SHARD = struct.Struct("<IIIIQQ32s")
PIN = struct.Struct("<IIQQ32sII")
MEMBER = struct.Struct("<IIII16s16s16s")
NAMESPACE = struct.Struct("<IIQQQ32s64s")
EXTENT = struct.Struct("<QQIIIIII24x")
RECORD = struct.Struct("<32sQQIIQ")
INDEX_HEADER = struct.Struct("<8sIIQQQQQ4040x")
INDEX_ENTRY = struct.Struct("<32sQIIIHBB")

SIZES = {
    "hkv_header": HEADER.size,
    "hkv_block": BLOCK.size,
    "hkv_aux": AUX.size,
    "hkv_shard": SHARD.size,
    "hkv_pin": PIN.size,
    "hkv_member": MEMBER.size,
    "hkv_namespace": NAMESPACE.size,
    "hkv_extent": EXTENT.size,
    "hkv_record": RECORD.size,
    "hkv_index_header": INDEX_HEADER.size,
    "hkv_index_entry": INDEX_ENTRY.size,
}
