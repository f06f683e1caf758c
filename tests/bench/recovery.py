"""Recovery of a disk tier's index from records alone: `python -m tests.bench.recovery [--blocks N] [--directory DIR]`.

Makes that many sealed records in record files, as 512 slabs have them, puts the files out of the page cache, reads and loads them, and
prints the seconds and what a block costs in memory (pages of the index's file, and private memory). What comes after a recovery is
measured too: a lookup of 1,000 keys, and the ends of a namespace and of a directory. Needs 64 bytes of disk and about 80 bytes of memory
per block.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hostkv.cext import Index, Mapping, Tables, View

PAGE, SLOT_BYTES, SLABS, NUMBER = 4096, 1 << 20, 512, 3
RECORD = np.dtype(
    [("key", "u1", 32), ("checksum", "<u8"), ("sequence", "<u8"), ("namespace", "<u4"), ("slot_pages", "<u4"), ("seal", "<u8")]
)


def make_records(directory: Path, blocks: int, slabs: int = SLABS) -> tuple[list[Path], int]:
    """Record files of `blocks` blocks in all, and how many slots a slab has."""
    slots = -(-blocks // slabs)
    random = np.random.default_rng(1)
    fd = os.memfd_create("records")
    os.ftruncate(fd, slots * 64)
    mapping = Mapping(fd, slots * 64, True)
    offsets = np.arange(slots, dtype="<u8") * 64
    paths = []
    for slab in range(slabs):
        count = min(slots, blocks - slab * slots)
        records = np.frombuffer(mapping, RECORD)[:count]  # type: ignore[call-overload]
        records["key"] = np.frombuffer(random.bytes(32 * count), "u1").reshape(count, 32)
        records["checksum"] = random.integers(0, 1 << 63, count)
        records["sequence"] = slab * slots + np.arange(count) + 1
        records["namespace"] = NUMBER + np.arange(count) % 2
        records["slot_pages"] = SLOT_BYTES // PAGE
        seeds = (slab << 32) + np.arange(count, dtype="<u8")
        records["seal"] = np.frombuffer(mapping.checksums(offsets[:count], 56, seeds), "<u8")
        paths.append(directory / f"{slab:05}.records")
        with open(paths[-1], "wb") as file:
            file.write(records.tobytes())
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        del records
    mapping.close()
    os.close(fd)
    return paths, slots


def private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def median_us(view: View, keys: list[bytes]) -> float:
    spent = []
    for batch in keys:
        start = time.perf_counter()
        view.lookup(0, batch)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent) * 1e6


def recover(paths: list[Path], slots: int, blocks: int) -> dict[str, float]:
    """What `main` prints, by name."""
    slab_bytes = slots * SLOT_BYTES
    fd = os.memfd_create("index")
    os.ftruncate(fd, Index.bytes_needed(blocks))
    records = bytearray(slots * 64)  # before memory is looked at
    before = private_bytes()
    read_s = load_s = 0.0
    index = Index(fd, blocks, slab_bytes)
    directory = index.add_directory(len(paths))
    numbers = {NUMBER: (1, SLOT_BYTES), NUMBER + 1: (2, SLOT_BYTES)}
    loaded = 0
    for slab, path in enumerate(paths):
        start = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            size = file.readinto(records)
        middle = time.perf_counter()
        loaded += index.load(directory, slab, memoryview(records)[:size], numbers)
        read_s += middle - start
        load_s += time.perf_counter() - middle
    if loaded != blocks:
        sys.exit(f"{loaded} of {blocks} blocks were recovered")
    memory = os.fstat(fd).st_blocks * 512 + private_bytes() - before

    geometry = {"pool_bytes": 1 << 20, "extent_bytes": 1 << 20, "max_blocks": 16, "max_shards": 1, "max_pins": 1, "max_members": 1}
    tables_fd = os.memfd_create("tables")
    os.ftruncate(tables_fd, Tables.bytes_needed(**geometry, max_namespaces=1))
    Tables.create(tables_fd, **geometry, max_namespaces=1, boot_id=bytes(16), pool_epoch=bytes(16), instance_id=bytes(16))
    view = View(tables_fd, os.fstat(tables_fd).st_size)
    view.attach_index(fd, Index.bytes_needed(blocks))
    random = np.random.default_rng(2)
    on_disk = []
    for _ in range(min(100, blocks // 1000)):
        keys = []
        for slab in random.choice(len(paths), 20):
            stored = np.fromfile(paths[slab], RECORD)["key"]
            keys.append(stored[random.choice(len(stored), 50)].tobytes())
        on_disk.append(b"".join(keys))
    nowhere = [random.bytes(32000) for _ in on_disk]
    if any(0 in view.lookup(0, keys) for keys in on_disk):
        sys.exit("a recovered block is not found")
    figures = {
        "read s": read_s,
        "load s": load_s,
        "read and load s": read_s + load_s,
        "bytes a block": memory / blocks,
        "look up 1,000 keys on disk us": median_us(view, on_disk),
        "look up 1,000 keys that are nowhere us": median_us(view, nowhere),
    }
    view.close()
    os.close(tables_fd)
    for name, end in (("remove a namespace, ms a million blocks", lambda: index.remove_namespace(1)), ("drop", lambda: index.drop(0))):
        start = time.perf_counter()
        count = end()
        figures[name if " " in name else "drop a directory, ms a million blocks"] = (time.perf_counter() - start) * 1e9 / count
    os.close(fd)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--directory", type=Path, help="where the record files are made (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostkv-recovery-", dir=options.directory) as directory:
        start = time.perf_counter()
        paths, slots = make_records(Path(directory), options.blocks)
        print(f"{options.blocks:,} records in {len(paths)} files made in {time.perf_counter() - start:.1f} s", flush=True)
        for name, value in recover(paths, slots, options.blocks).items():
            print(f"  {name:<44} {value:>10.2f}")


if __name__ == "__main__":
    main()
