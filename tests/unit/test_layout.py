"""The bytes of the tables: C header, Python mirror and golden bytes agree, and only tables of exactly this layout are mapped."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hostkv.cext import Index, LayoutError, Tables, View, xxh3_64
from hostkv.schemas import layout

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "schemas" / "layout.h").read_text()
GOLDEN = ROOT / "schemas" / "golden" / "tables.hex"
GOLDEN_INDEX = ROOT / "schemas" / "golden" / "index.hex"
GOLDEN_RECORD = ROOT / "schemas" / "golden" / "record.hex"
GEOMETRY = {
    "pool_bytes": 20 * 4096,
    "extent_bytes": 8 * 4096,
    "max_blocks": 8,
    "max_shards": 4,
    "max_pins": 3,
    "max_members": 2,
    "max_namespaces": 2,
}
BOOT, EPOCH, INSTANCE = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
FORMATS = {
    "hkv_header": layout.HEADER,
    "hkv_block": layout.BLOCK,
    "hkv_aux": layout.AUX,
    "hkv_shard": layout.SHARD,
    "hkv_pin": layout.PIN,
    "hkv_member": layout.MEMBER,
    "hkv_namespace": layout.NAMESPACE,
    "hkv_extent": layout.EXTENT,
    "hkv_record": layout.RECORD,
    "hkv_index_header": layout.INDEX_HEADER,
    "hkv_index_entry": layout.INDEX_ENTRY,
}
CHECKSUMS = [bytes(range(n, n + 8)) for n in (0x10, 0x20, 0x30)]
KEYS = [bytes([n]) + bytes(7) + bytes([0xA0 + n]) * 24 for n in (1, 1, 2, 3)]
KEYS[1] = KEYS[1][:8] + bytes([0xEE]) * 24  # where KEYS[0] starts, too


def fields_of(name: str) -> list[tuple[str, int]]:
    """(field, array length) of a struct of layout.h, in order."""
    body = re.search(rf"struct {name} \{{.*?\n(.*?)\n\}};", HEADER, re.S)
    assert body is not None
    found = []
    for line in re.sub(r"/\*.*?\*/", "", body[1], flags=re.S).split(";"):
        match = re.match(r"\s*u?int(?:8|16|32|64)_t\s+(.*)", line, re.S)
        for part in match[1].split(",") if match else []:
            field, count = re.match(r"\s*(\w+)(?:\[(\w+)\])?", part).groups()  # type: ignore[union-attr]
            found.append((field, 8 if count == "HKV_SIZES_COUNT" else int(count or 1)))
    return found


def expand(format_: str) -> list[tuple[int, int]]:
    """(offset, bytes) of each item of a struct format without padding; the repeats of a number are items of their own."""
    items, at = [], 0
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", format_):
        for size in [int(count or 1)] if kind in "sx" else [struct.calcsize("<" + kind)] * int(count or 1):
            items.append((at, size))
            at += size
    return items


def test_c_and_python_agree_on_every_offset_size_and_constant(tmp_path: Path) -> None:
    constants = re.findall(r"#define HKV_(LAYOUT_VERSION|BYTE_ORDER|PAGE|NIL|MAX_PROBE|STATIC_BYTES|TOMBSTONE_WORD)\b", HEADER)
    states = ["POOL_CREATING", "POOL_LIVE", "POOL_REMOVED", "EMPTY", "WRITING", "READY", "TOMBSTONE", "DOOMED", "DEVICE"]
    states += ["ON_DISK_FREE", "ON_DISK_WRITING", "ON_DISK", "ON_DISK_GONE", "ON_DISK_DOOMED"]
    names = constants + states
    lines = [f'printf("{name} %llu\\n", (unsigned long long)HKV_{name});' for name in names]
    for name in FORMATS:
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        lines += [f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));' for field, _ in fields_of(name)]
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stdio.h>\n#include <stddef.h>\n#include "layout.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0; }\n"
    )
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-std=c11", "-I", str(ROOT / "schemas"), "-o", str(tmp_path / "offsets"), str(source)], check=True)
    printed = subprocess.run([str(tmp_path / "offsets")], capture_output=True, text=True, check=True).stdout
    c = {name: int(value) for name, value in (line.split() for line in printed.splitlines())}

    assert len(constants) == 7
    for name in names:
        assert c[name] == getattr(layout, name), name
    for name, format_ in FORMATS.items():
        assert c[name] == format_.size == layout.SIZES[name]
        python = expand(format_.format)
        at = 0
        for field, count in fields_of(name):
            assert python[at][0] == c[f"{name}.{field}"], f"{name}.{field}"
            # A run of bytes is one item in Python, an array of integers is as many.
            at += 1 if count == 1 or python[at][1] > 8 or field in ("magic", "unused") else count
        assert at == len(python), name
    for name in ("instance", "heartbeat", "moves", "generation", "tick", "pool_state", "verify", "static_checksum"):
        field = {"instance": "instance_id", "heartbeat": "heartbeat_ns"}.get(name, name)
        assert getattr(layout, f"{name.upper()}_OFFSET") == c[f"hkv_header.{field}"]


def golden_tables() -> bytes:
    """Tables that hold one of everything: a READY and pinned block, one being written, a tombstone between two entries."""
    fd = os.memfd_create("golden")
    size = Tables.bytes_needed(**GEOMETRY)
    os.ftruncate(fd, size)
    tables = Tables.create(fd, **GEOMETRY, boot_id=BOOT, pool_epoch=EPOCH, instance_id=INSTANCE, verify=True)
    tables.heartbeat(0x1122334455667788)
    member = tables.member_add(b"C" * 16, b"S" * 16, b"L" * 16, 1, 4321)
    one = tables.namespace_add(b"F" * 32, 8192, 1, "one")
    two = tables.namespace_add(b"G" * 32, 100, 2, "two")
    zero = struct.pack("<H", 0)
    for key, checksum in zip(KEYS[:3], CHECKSUMS, strict=True):
        generation = tables.reserve(one, member, 1, key, zero)[2]
        assert tables.commit(member, 1, key, zero, generation, checksum) == b"\0"
    assert tables.acquire(one, 1, 77, layout.NIL, KEYS[1])[0] == b"\0"
    tables.reserve(two, member, 2, KEYS[3] + KEYS[3], struct.pack("<2H", 0, 1))
    tables.member_set_flags(member, layout.DEVICE)
    assert tables.check() == []
    found = os.pread(fd, size, 0)
    tables.close()
    os.close(fd)
    return found


def to_text(data: bytes) -> str:
    rows = ((at, data[at : at + 16]) for at in range(0, len(data), 16))
    return f"{len(data)} bytes, zero but for\n" + "".join(f"{at:06x} {row.hex(' ', 4)}\n" for at, row in rows if any(row))


def golden_bytes(path: Path = GOLDEN) -> bytearray:
    first, *rows = path.read_text().splitlines()
    data = bytearray(int(first.split()[0]))
    for row in rows:
        at, _, value = row.partition(" ")
        data[int(at, 16) : int(at, 16) + 16] = bytes.fromhex(value)
    return data


def file_of(data: bytes) -> int:
    fd = os.memfd_create("tables")
    os.pwrite(fd, data, 0)
    return fd


def sealed(data: bytearray) -> bytes:
    """With the checksum of its static part right, whatever that says."""
    struct.pack_into("<Q", data, layout.STATIC_CHECKSUM_OFFSET, xxh3_64(bytes(data[: layout.STATIC_CHECKSUM_OFFSET])))
    return bytes(data)


def test_the_same_verbs_write_the_golden_bytes() -> None:
    assert to_text(golden_tables()) == GOLDEN.read_text()


def test_golden_bytes_read_as_what_was_written() -> None:
    data = golden_bytes()
    header = layout.HEADER.unpack_from(data)
    assert header[:3] == (layout.MAGIC, layout.LAYOUT_VERSION, 0x01020304)
    assert header[3:11] == tuple(layout.SIZES.values())[:8]
    assert header[11:13] == (BOOT, EPOCH)
    assert header[13:17] == (GEOMETRY["pool_bytes"], GEOMETRY["extent_bytes"], len(data), 8)
    assert header[17:23] == (16, 4, 3, 2, 2, 3)
    blocks, aux, shards, pins, members, namespaces, extents, slots = (*header[23:31],)
    assert header[31] == xxh3_64(bytes(data[:504]))
    assert header[32:37] == (INSTANCE, 0x1122334455667788, 0, 4, 9)
    assert header[37:39] == (layout.POOL_LIVE, 1)

    entries = {n: layout.BLOCK.unpack_from(data, blocks + 64 * n) for n in range(16)}
    # KEYS[0] and [1] begin at 1; KEYS[2] at 2 and finds 2 taken, KEYS[3] at 3 finds 3 taken.
    assert [entries[n][4] for n in (1, 2, 3, 4)] == KEYS
    assert [entries[n][1] for n in (1, 2, 3, 4)] == [layout.READY] * 3 + [layout.WRITING]
    assert [entries[n][2] // layout.USE for n in (1, 2, 3, 4)] == [1, 2, 1, 1]
    assert [entries[n][3] for n in (1, 2, 3, 4)] == [1, 1, 1, 2]
    assert [entries[n][5] for n in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert [entries[n][6] for n in (1, 2, 3, 4)] == [0, 2, 4, 8]
    assert [entries[n][8] for n in (1, 2, 3, 4)] == [*(int.from_bytes(each, "little") for each in CHECKSUMS), 0]
    assert all(entries[n][0] % 2 == 0 for n in entries)
    assert [layout.AUX.unpack_from(data, aux + 32 * n)[5] for n in (1, 2, 3)] == [0, 1, 0]
    assert layout.SHARD.unpack_from(data, shards)[:7] == (1, 0, 0, layout.NIL, 2, 4, KEYS[3])
    assert layout.SHARD.unpack_from(data, shards + 64)[:7] == (1, 0, 1, 0, 2, 4, KEYS[3])
    assert layout.PIN.unpack_from(data, pins) == (1, 1, 77, 2, KEYS[1], layout.NIL, 2)
    assert layout.MEMBER.unpack_from(data, members) == (1, 1, 4321, layout.DEVICE, b"C" * 16, b"S" * 16, b"L" * 16)
    assert layout.NAMESPACE.unpack_from(data, namespaces)[:6] == (1, 1, 8192, 8192, 3, b"F" * 32)
    assert layout.EXTENT.unpack_from(data, extents)[0] == 8192
    assert layout.EXTENT.unpack_from(data, extents + 64)[0] == 4096
    assert struct.unpack_from("<5I", data, slots) == (1, 0, 2, 0, 3)


def test_golden_bytes_are_still_served_and_adopted() -> None:
    data = golden_bytes()
    fd = file_of(data)
    view = View(fd, len(data))
    assert view.lookup(0, b"".join(KEYS)) == b"\1\1\1\0"
    assert (view.pool_epoch, view.pool_bytes, view.instance_id()) == (EPOCH, GEOMETRY["pool_bytes"], INSTANCE)
    tables = Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=bytes(16))
    assert tables.repair([]) == [(1, 77, 0)]
    assert tables.check() == []
    assert tables.stats()["shards_in_flight"] == 2
    os.close(fd)


@pytest.mark.parametrize(
    "offset, value, name",
    [
        (0, b"X", "magic of the tables is 584f"),
        (8, struct.pack("<I", 1), f"layout_version of the tables is 1, must be {layout.LAYOUT_VERSION}"),
        (12, struct.pack("<I", 0x04030201), "byte_order of the tables is"),
        (16 + 4 * 1, struct.pack("<I", 72), r"struct_bytes\[1\] of the tables is 72, must be 64"),
        (16 + 4 * 7, struct.pack("<I", 0), r"struct_bytes\[7\] of the tables is 0, must be 64"),
        (504, b"\xff", "static_checksum of the tables is"),
        (100, b"\xff", "static_checksum of the tables is"),
    ],
)
def test_tables_of_another_version_are_refused_by_name(offset: int, value: bytes, name: str) -> None:
    data = golden_bytes()
    data[offset : offset + len(value)] = value
    fd = file_of(data)
    with pytest.raises(LayoutError, match=name):
        View(fd, len(data))
    with pytest.raises(LayoutError, match=name):
        Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=INSTANCE)
    os.close(fd)


def test_no_static_number_of_a_file_is_believed_even_under_a_right_checksum() -> None:
    """What follows from other numbers (offsets, the table's capacity, the file's size) must be what this build computes from them."""
    computed = {96, 112, *range(152, 224, 8)}
    for offset in range(80, 224, 8):
        for change in (1, 4096, 1 << 40, -1):
            data = golden_bytes()
            (value,) = struct.unpack_from("<Q", data, offset)
            struct.pack_into("<Q", data, offset, (value + change) % (1 << 64))
            fd = file_of(sealed(data))
            if offset in computed:
                with pytest.raises(LayoutError):
                    View(fd, len(data))
            with pytest.raises(LayoutError):
                Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=INSTANCE)
            os.close(fd)


def test_a_file_of_another_size_is_refused() -> None:
    data = golden_bytes()
    for size in (0, 100, 4095, 4096, len(data) - 4096, len(data) + 4096):
        fd = file_of(bytes(data))
        os.ftruncate(fd, size)
        for wanted in (size, len(data)):
            with pytest.raises(LayoutError):
                View(fd, wanted)
        with pytest.raises(LayoutError):
            Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=INSTANCE)
        os.close(fd)
    fd = file_of(bytes(data))
    with pytest.raises(LayoutError, match="must be 4096"):
        View(fd, 4096)
    os.close(fd)


def test_tables_of_another_boot_geometry_or_state_are_not_adopted() -> None:
    data = golden_bytes()
    fd = file_of(bytes(data))
    with pytest.raises(LayoutError, match=f"host_boot_id of the tables is {BOOT.hex()}, must be {bytes(16).hex()}"):
        Tables.adopt(fd, **GEOMETRY, boot_id=bytes(16), instance_id=INSTANCE)
    for name, field in [("pool_bytes", "pool_bytes"), ("extent_bytes", "extent_bytes"), ("max_pins", "pin_capacity")]:
        other = {**GEOMETRY, name: GEOMETRY[name] * 2}
        with pytest.raises(LayoutError, match=f"{field} of the tables is {GEOMETRY[name]}, must be {GEOMETRY[name] * 2}"):
            Tables.adopt(fd, **other, boot_id=BOOT, instance_id=INSTANCE)
    for state in (layout.POOL_CREATING, layout.POOL_REMOVED, 7):
        os.pwrite(fd, struct.pack("<I", state), layout.POOL_STATE_OFFSET)
        with pytest.raises(LayoutError, match=f"pool_state of the tables is {state}, must be 1"):
            Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=INSTANCE)
        view = View(fd, len(data))
        assert not view.alive()
        assert view.lookup(0, KEYS[0]) == b"\0"
    os.close(fd)


def test_the_geometry_of_tables_is_told_whoever_left_them() -> None:
    data = golden_bytes()
    fd = file_of(data)
    assert Tables.geometry(fd) == {**GEOMETRY, "verify": 1}
    os.pwrite(fd, struct.pack("<II", layout.POOL_REMOVED, 0), layout.POOL_STATE_OFFSET)
    assert Tables.geometry(fd) == {**GEOMETRY, "verify": 0}
    os.ftruncate(fd, len(data) - 1)
    with pytest.raises(LayoutError, match="the file has"):
        Tables.geometry(fd)
    os.close(fd)
    data[80] ^= 1
    with pytest.raises(LayoutError, match="static_checksum"):
        Tables.geometry(file_of(data))


def test_tables_without_checksums_are_not_adopted_to_verify_and_those_with_lose_them_at_repair() -> None:
    data = golden_bytes()
    fd = file_of(data)
    tables = Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=bytes(16))
    assert not tables.verify
    assert os.pread(fd, len(data), 0) == data  # adopt writes nothing
    tables.repair([])
    assert Tables.geometry(fd)["verify"] == 0
    tables.close()
    with pytest.raises(LayoutError, match="its blocks have no checksums, verify: load needs them"):
        Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=bytes(16), verify=True)
    os.pwrite(fd, data, 0)
    tables = Tables.adopt(fd, **GEOMETRY, boot_id=BOOT, instance_id=bytes(16), verify=True)
    assert tables.verify
    tables.repair([])
    assert Tables.geometry(fd)["verify"] == 1
    tables.close()
    os.close(fd)


# ---- the disk tier ---------------------------------------------------------------------------------------------------------------


def golden_index() -> bytes:
    """An index that holds one of everything: a block that is read, one that is written, one gone, one doomed, a free entry."""
    fd = os.memfd_create("golden")
    os.ftruncate(fd, Index.bytes_needed(10))
    index = Index(fd, 10, 16 * 4096)
    for slabs in (2, 3):
        index.enable(index.add_directory(slabs))
    keys = [bytes([5, 0, 0, 0, n]) + bytes([0xA0 + n]) * 27 for n in range(5)]
    placed = [index.place(key, 0x11223344, 8192) for key in keys]
    for n in (0, 1, 4):
        index.settle(placed[n][0], 0x0102030405060708 + n)
    for n in (0, 0, 1):
        index.open(keys[n], 0x11223344)
    for n in (1, 2, 4):
        assert index.remove(keys[n], 0x11223344)
    assert index.check() == []
    found = os.pread(fd, Index.bytes_needed(10), 0)
    os.close(fd)
    return found


def test_the_same_verbs_write_the_golden_index() -> None:
    assert to_text(golden_index()) == GOLDEN_INDEX.read_text()


def test_the_golden_index_reads_as_what_was_written() -> None:
    data = golden_bytes(GOLDEN_INDEX)
    assert layout.INDEX_HEADER.unpack_from(data) == (layout.INDEX_MAGIC, layout.BYTE_ORDER, 56, 10, 16, 4096, 8192, len(data))
    assert struct.unpack_from("<16Q", data, 4096) == (0,) * 5 + (5 << 32 | 1, 5 << 32 | 4) + (0,) * 9
    entries = [layout.INDEX_ENTRY.unpack_from(data, 8192 + 56 * n) for n in range(10)]
    assert [key[:5] for key, *_ in entries[:5]] == [bytes([5, 0, 0, 0, n]) for n in range(5)]
    assert [checksum for _, checksum, *_ in entries[:2]] == [0x0102030405060708, 0x0102030405060709]
    assert [entry[2:4] for entry in entries[:4]] == [(0, 0), (2, 0), (2, 1), (0, 1)]
    assert {entry[4] for entry in entries[:4]} == {0x11223344}
    assert [entry[5] for entry in entries[:5]] == [2, 1, 0, 0, 0]
    states = [layout.ON_DISK, layout.ON_DISK_GONE, layout.ON_DISK_DOOMED, layout.ON_DISK_WRITING, layout.ON_DISK_FREE]
    assert [entry[6] for entry in entries[:5]] == states
    assert [entry[7] for entry in entries[:5]] == [1, 1, 0, 0, 0]
    assert entries[4][3] == layout.NIL
    assert entries[5:] == [(bytes(32), 0, 0, 0, 0, 0, 0, 0)] * 5


def test_the_golden_record_is_still_recovered() -> None:
    data = bytes(golden_bytes(GOLDEN_RECORD))
    key = bytes(range(32))
    assert layout.RECORD.unpack(data) == (key, 0x1122334455667788, 0x99AABBCC, 7, 2, xxh3_64(data[:56], 3 << 32 | 1))
    index = Index(None, 10, 16 * 4096)
    index.add_directory(4)
    assert index.load(0, 3, bytes(64) + data, {7: (5, 8192)}) == 1
    assert index.open(key, 5) == (0, 0, 3, 1, 0x1122334455667788)
    assert index.stats()["sequence"] == 0x99AABBCC
