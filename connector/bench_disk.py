"""The disk tier's part of `hostkv bench`: spill and promotion through sidecar, index and I/O engine, beside what the disk itself does.

The disk itself is `fio` with the same block size and O_DIRECT, 16 deep, where it is installed, else four threads of ours that do nothing
but pread and pwrite. Both take turns with HostKV in the same minute: disks are shared, and virtual ones are throttled. A spill lasts from
the first save until no block is dirty, a promotion from the first prefetch into an empty pool until all blocks are in it.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cext import Io, buffer_address, xxh3_64
from .client import Client

if TYPE_CHECKING:
    from .bench import OwnSidecar, Report

MIB, GB = 1 << 20, 10**9
TOTAL_BYTES, QUICK_BYTES = 768 * MIB, 256 * MIB
ROUNDS, QUICK_ROUNDS = 5, 3
DEPTH, THREADS = 16, 4
BATCH_BYTES = 32 * MIB  # of one save


class _Run(NamedTuple):
    """GB/s both ways, and milliseconds of the sidecar's CPU a GB."""

    write: float
    read: float
    write_cpu: float = 0.0
    read_cpu: float = 0.0


def disk(report: Report, directory: str, quick: bool) -> None:
    total, rounds = (QUICK_BYTES, QUICK_ROUNDS) if quick else (TOTAL_BYTES, ROUNDS)
    beside = "fio" if shutil.which("fio") else "pread and pwrite"
    checksum = _checksum_ms()
    with tempfile.TemporaryDirectory(prefix="hostkv-bench-", dir=os.path.abspath(directory)) as place:
        report.section(f"Disk at {os.path.dirname(place)}, beside {beside} with O_DIRECT (medians of {rounds})")
        report.add("xxh3 over memory that is not in the cache, CPU", checksum, "ms/GB")
        for engine in ("io_uring", "threads"):
            if engine == "io_uring" and (why := _why_no_io_uring()):
                report.section(f"  no io_uring: {why}")
                continue
            for size in (MIB, 4 * MIB):
                runs, limits = [], []
                for _ in range(rounds):
                    limits.append(_limit(place, size, total))
                    runs.append(_hostkv(place, engine, size, total))
                for way, cpu, what in ((0, 2, "spill"), (1, 3, "promotion")):
                    value, limit = (statistics.median(each[way] for each in of) for of in (runs, limits))
                    spent = statistics.median(each[cpu] for each in runs)
                    report.add(
                        f"{what} of {size // MIB} MiB blocks, {engine}",
                        value,
                        "GB/s",
                        f"{value / limit * 100:.0f} % of {limit:.2f} GB/s; CPU {spent:.0f} ms/GB, {spent - checksum:.0f} beyond checksums",
                        "95 %, 40 ms/GB",
                    )


def _why_no_io_uring() -> str:
    fd = os.memfd_create("hostkv-bench")
    try:
        os.truncate(fd, mmap.PAGESIZE)
        io = Io(fd, mmap.PAGESIZE)
        why = io.why
        io.close()
        return why
    finally:
        os.close(fd)


def _checksum_ms() -> float:
    """In shared memory, as the pool is: its pages are small."""
    fd = os.memfd_create("hostkv-bench")
    os.truncate(fd, 256 * MIB)
    with open(fd, "rb+") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory.write(b"\1" * len(memory))
        began = time.process_time()
        for first in range(0, len(memory), MIB):
            xxh3_64(memoryview(memory)[first : first + MIB])
        return (time.process_time() - began) * 1000 / (len(memory) / GB)


# ---- HostKV --------------------------------------------------------------------------------------------------------------------------
def _hostkv(place: str, engine: str, size: int, total: int) -> _Run:
    from .bench import OwnSidecar, layout, new_ids

    path = os.path.join(place, "tier")
    tiers = f"[{{type: disk, path: {path}, size: {4 * total // MIB}MiB, engine: {engine}}}]"
    ids = new_ids(total // size)
    at_a_time = BATCH_BYTES // size
    try:
        with OwnSidecar(total + total // 4, tiers=tiers) as sidecar, mmap.mmap(-1, BATCH_BYTES) as memory:
            memory.write(os.urandom(MIB) * (BATCH_BYTES // MIB))
            base = buffer_address(memory, False)[0]
            addresses = array("Q", [base + i * size for i in range(at_a_time)])
            with Client(sidecar.endpoint, name="bench", tier_wait_s=60) as client:
                store = client.open(layout(size))
                client.warm(30)
                _until(client, lambda status: status["tiers"][0]["directories"][0]["state"] == "serving")
                began, cpu = time.perf_counter(), _cpu_s(sidecar)
                for first in range(0, len(ids), at_a_time):
                    store.wait(store.dump_data(ids[first : first + at_a_time], 0, [[address] for address in addresses]))
                _until(client, lambda status: not status["blocks"]["dirty"])
                write, write_cpu = total / (time.perf_counter() - began) / GB, _cpu_s(sidecar) - cpu
                sidecar.stop()
                sidecar.start()
                _until(client, lambda status: status["tiers"][0]["directories"][0]["state"] == "serving")
                began, cpu = time.perf_counter(), _cpu_s(sidecar)
                store.wait(store.prefetch(ids))
                read, read_cpu = total / (time.perf_counter() - began) / GB, _cpu_s(sidecar) - cpu
                ready = client.status()["blocks"]["ready"]
                assert ready == len(ids), f"{ready} of {len(ids)} blocks came back from disk"
        return _Run(write, read, write_cpu * 1000 / (total / GB), read_cpu * 1000 / (total / GB))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _until(client: Client, condition: Callable[[dict[str, Any]], bool]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if client.serving() and condition(client.status()):
            return
        time.sleep(0.01)
    raise TimeoutError("the sidecar of the benchmark did not do in a minute what it was to do")


def _cpu_s(sidecar: OwnSidecar) -> float:
    with open(f"/proc/{sidecar.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- the disk itself ---------------------------------------------------------------------------------------------------------------
def _limit(place: str, size: int, total: int) -> _Run:
    path = os.path.join(place, "plain")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        os.posix_fallocate(fd, 0, total)
        os.close(fd)
        return _Run(*(_fio(path, way, size, total) if shutil.which("fio") else _plain(path, way, size, total) for way in ("write", "read")))
    finally:
        os.unlink(path)


def _fio(path: str, way: str, size: int, total: int) -> float:
    command = ["fio", "--name=hostkv", f"--filename={path}", f"--rw={way}", f"--bs={size}", f"--size={total}", f"--iodepth={DEPTH}"]
    command += ["--direct=1", "--ioengine=libaio", "--output-format=json", "--randrepeat=0", "--refill_buffers=0"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(found["jobs"][0][way]["bw_bytes"]) / GB


def _plain(path: str, way: str, size: int, total: int) -> float:
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, THREADS * size) as memory, ThreadPoolExecutor(THREADS) as pool:
            memory.write(os.urandom(MIB) * (len(memory) // MIB))
            view = memoryview(memory)

            def work(thread: int) -> None:
                mine = view[thread * size : (thread + 1) * size]
                for offset in range(thread * size, total, THREADS * size):
                    (os.pwritev if way == "write" else os.preadv)(fd, [mine], offset)

            began = time.perf_counter()
            list(pool.map(work, range(THREADS)))
            taken = time.perf_counter() - began
            view.release()
            return total / taken / GB
    finally:
        os.close(fd)
