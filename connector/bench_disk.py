"""The disk tier's part of `hostkv bench`: spill and promotion through sidecar, index and I/O engine, beside what the disk itself does.

The disk itself is `fio` with the same block size and O_DIRECT, 16 deep, where it is installed, else four threads of ours that do nothing
but pread and pwrite. Both take turns with HostKV in the same minute: disks are shared, and virtual ones are throttled. A spill lasts from
the first save until no block is dirty, a promotion from the first prefetch until all blocks are in the pool, in place of others. Both are
measured in their steady state: the first transfer of each page costs page tables and its registration with io_uring, once per start, and
the first write to a slot makes the file system note that there is something now, once in the life of the tier.
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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cext import Io, buffer_address, xxh3_64
from .client import Client

if TYPE_CHECKING:
    from .bench import Report

MIB, GB = 1 << 20, 10**9
TOTAL_BYTES, QUICK_BYTES = 768 * MIB, 256 * MIB
ROUNDS, QUICK_ROUNDS = 5, 3
WARM_ROUNDS = 2
DEPTH, THREADS = 16, 4
BATCH_BYTES = 32 * MIB  # of one save


class Rate(NamedTuple):
    """GB/s, and milliseconds of CPU a GB."""

    speed: float
    cpu: float


def disk(report: Report, directory: str, quick: bool) -> None:
    total, rounds = (QUICK_BYTES, QUICK_ROUNDS) if quick else (TOTAL_BYTES, ROUNDS)
    beside = "fio" if shutil.which("fio") else "pread and pwrite"
    checksum = _checksum_ms()
    with tempfile.TemporaryDirectory(prefix="hostkv-bench-", dir=os.path.abspath(directory)) as place:
        path = os.path.join(place, "tier")
        report.section(f"Disk at {os.path.dirname(place)}, beside {beside} with O_DIRECT (medians of {rounds})")
        report.add("xxh3 over memory that is not in the cache, CPU", checksum, "ms/GB")
        for engine in ("io_uring", "threads"):
            if engine == "io_uring" and (why := _why_no_io_uring()):
                report.section(f"  no io_uring: {why}")
                continue
            for size in (MIB, 4 * MIB):
                limits: dict[str, list[Rate]] = {"spill": [], "promotion": []}
                done = measure(path, engine, size, total, rounds, partial(_beside, limits, place, size, total))
                shutil.rmtree(path)
                for what, rates in done.items():
                    ours, theirs = (Rate(*map(statistics.median, zip(*of, strict=True))) for of in (rates, limits[what]))
                    report.add(
                        f"{what} of {size // MIB} MiB blocks, {engine}",
                        ours.speed,
                        "GB/s",
                        f"{ours.speed / theirs.speed * 100:.0f} % of {theirs.speed:.2f} GB/s; CPU {ours.cpu:.0f} ms/GB, "
                        f"{ours.cpu - checksum:.0f} beyond checksums; {beside} {theirs.cpu:.0f}",
                        "95 %, 40 ms/GB",
                    )


def _beside(limits: dict[str, list[Rate]], place: str, size: int, total: int, what: str) -> None:
    limits[what].append(limit(place, what, size, total))


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
def measure(
    path: str, engine: str, size: int, total: int, rounds: int, beside: Callable[[str], None] | None = None, warm: int = WARM_ROUNDS
) -> dict[str, list[Rate]]:
    """Of "spill" and "promotion", `total` bytes a round in blocks of `size`, after `warm` rounds, in the tier at `path`, which has room for
    one round more. It is left without blocks, for another call. `beside` is told their name after each round."""
    from .bench import TIMEOUT_S, OwnSidecar, hangs_after, layout, new_ids

    tiers = f"[{{type: disk, path: {path}, size: {(warm + rounds + 1) * total // MIB}MiB, engine: {engine}}}]"
    sets = [new_ids(total // size) for _ in range(warm + rounds)]
    at_a_time = BATCH_BYTES // size
    with (
        hangs_after(TIMEOUT_S),
        OwnSidecar(total + total // 4, tiers=tiers) as sidecar,
        mmap.mmap(-1, BATCH_BYTES) as memory,
    ):
        memory.write(os.urandom(MIB) * (BATCH_BYTES // MIB))
        base = buffer_address(memory, False)[0]
        addresses = array("Q", [base + i * size for i in range(at_a_time)])
        with Client(sidecar.endpoint, timeout_s=TIMEOUT_S, name="bench", tier_wait_s=60) as client:
            store = client.open(layout(size))

            def spill(ids: list[bytes]) -> None:
                for first in range(0, len(ids), at_a_time):
                    store.wait(store.dump_data(ids[first : first + at_a_time], 0, [[address] for address in addresses]))
                _spilled(client)

            def promotion(ids: list[bytes]) -> None:
                store.wait(store.prefetch(ids))
                assert all(store.lookup(ids)), "not all blocks came back from disk"

            def series(what: Callable[[list[bytes]], None]) -> list[Rate]:
                _until(client, lambda status: status["tiers"][0]["directories"][0]["state"] == "serving")
                for ids in sets[:warm]:
                    what(ids)
                rates = []
                for ids in sets[warm:]:
                    began, cpu = time.perf_counter(), sidecar.cpu_s()
                    what(ids)
                    rates.append(Rate(total / (time.perf_counter() - began) / GB, (sidecar.cpu_s() - cpu) * 1000 / (total / GB)))
                    if beside:
                        beside(what.__name__)
                return rates

            client.warm(30)
            spills = series(spill)
            sidecar.stop()
            sidecar.start()
            promotions = series(promotion)
            store.clear()
            return {"spill": spills, "promotion": promotions}


def _spilled(client: Client) -> None:
    """Until no block is dirty. It asks again after half of the time that the rest may take: a status costs as much as a block."""
    began, first = time.monotonic(), 0
    while time.monotonic() < began + 60:
        if not (dirty := client.status()["blocks"]["dirty"]):
            return
        first = max(first, dirty)
        time.sleep(min(0.5, max(0.005, (time.monotonic() - began) * dirty / (first - dirty) / 2 if dirty < first else 0.02)))
    raise TimeoutError("the sidecar of the benchmark did not write its blocks in a minute")


def _until(client: Client, condition: Callable[[dict[str, Any]], bool]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if client.serving() and condition(client.status()):
            return
        time.sleep(0.01)
    raise TimeoutError("the sidecar of the benchmark did not do in a minute what it was to do")


# ---- the disk itself ---------------------------------------------------------------------------------------------------------------
def limit(place: str, what: str, size: int, total: int) -> Rate:
    """What the disk of `place` does instead of a spill, into preallocated space as there, or of a promotion."""
    path = os.path.join(place, "plain")
    run = _fio if shutil.which("fio") else _plain
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        os.posix_fallocate(fd, 0, total)
        os.close(fd)
        if what == "spill":
            return run(path, "write", size, total)
        run(path, "write", size, total)
        return run(path, "read", size, total)
    finally:
        os.unlink(path)


def _fio(path: str, way: str, size: int, total: int) -> Rate:
    command = ["fio", "--name=hostkv", f"--filename={path}", f"--rw={way}", f"--bs={size}", f"--size={total}", f"--iodepth={DEPTH}"]
    command += ["--direct=1", "--ioengine=libaio", "--output-format=json", "--randrepeat=0", "--refill_buffers=0"]
    job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
    return Rate(job[way]["bw_bytes"] / GB, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / (total / GB))


def _plain(path: str, way: str, size: int, total: int) -> Rate:
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, THREADS * size) as memory, ThreadPoolExecutor(THREADS) as pool:
            memory.write(os.urandom(MIB) * (len(memory) // MIB))
            view = memoryview(memory)

            def work(thread: int) -> None:
                mine = view[thread * size : (thread + 1) * size]
                for offset in range(thread * size, total, THREADS * size):
                    (os.pwritev if way == "write" else os.preadv)(fd, [mine], offset)

            began, cpu = time.perf_counter(), time.process_time()
            list(pool.map(work, range(THREADS)))
            taken, spent = time.perf_counter() - began, time.process_time() - cpu
            view.release()
            return Rate(total / taken / GB, spent * 1000 / (total / GB))
    finally:
        os.close(fd)
