"""Prints what our calls cost SGLang's threads, beside the limits of this machine in the same run: sets and gets of 128 pages against one
flat copy of as many bytes between the same memories, by memcpy and by the streaming copy that ours are made of; questions about 4,000
pages, what a miss costs, how long calls take when the sidecar hangs, and other ways that the bytes could go.

Not a test: `.venvs/sglang/bin/python tests/engines/inside_sglang/speed.py`, alone on the machine.
"""

# ruff: noqa: E402, B023
from __future__ import annotations

import logging
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
sys.path[:0] = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parent)]

import torch
from hostkv.cext import memory_copy
from rig import EVERY_LAYOUT, Rank, hashes, kv_pool, serve

from tests.support import Sidecar, disk_tier

PAGES = 128  # SGLang moves as many at a time
TURNS = 9


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copies(sidecar: Sidecar, layout: str, mla: bool, page: int) -> None:
    """By turns."""
    one = Rank(sidecar.endpoint, mla=mla, pool=kv_pool(layout, mla, page=page, pages=2 * PAGES + 8, heads=32))
    assert one.storage._client.warm(60)
    size = PAGES * one.storage._parts["kv"].page_bytes
    halves = one.alloc(2 * PAGES).reshape(2, -1)
    pool, memory = one.storage._client.mapped().pool, one.pool.kv_buffer.data_ptr()
    took: dict[str, list[float]] = {}
    for turn in range(TURNS):
        keys = hashes(PAGES, layout, mla, turn)
        there = pool.address + turn % (pool.size // size) * size
        for name, call in (
            ("memcpy in", lambda: memory_copy(there, memory, size, streaming=False)),  # the pool is empty
            ("stream in", lambda: memory_copy(there, memory, size)),
            ("set", lambda: one.storage.batch_set_v1(keys, halves[0])),
            ("commit", one.storage.settle),
            ("memcpy out", lambda: memory_copy(memory, there, size, streaming=False)),
            ("stream out", lambda: memory_copy(memory, there, size)),
            ("get", lambda: one.storage.batch_get_v1(keys, halves[1])),
            ("set again", lambda: one.storage.batch_set_v1(keys, halves[0])),
        ):
            took.setdefault(name, []).append(timed(call))
        one.storage.clear()
    assert one.storage.counts.lost == one.storage.counts.dropped == 0
    each = {name: statistics.median(some[1:]) for name, some in took.items()}

    def told(what: str, way: str) -> str:
        of = [each[f"{copy} {way}"] / each[what] for copy in ("memcpy", "stream")]
        return f"{what} {size / each[what] / 1e9:.3g} GB/s ({of[0]:.0%} of memcpy, {of[1]:.0%} of streaming)"

    print(
        f"{'MLA' if mla else 'MHA'} {layout}, {size / PAGES / 2**20:.3g} MiB a page: {told('set', 'in')}, committed "
        f"{each['commit'] * 1e3:.3g} ms later; {told('get', 'out')}; set of what is there {each['set again'] * 1e3:.3g} ms"
    )
    one.close()


def ways(folder: Path) -> None:
    """The same pages from the host pool into our pool, into another process through a socket, and from our pool to disk."""
    with Sidecar(folder / "disk", pool_size="1GiB", config=disk_tier(folder / "disk" / "tier", size="1GiB")) as sidecar:
        sidecar.until_tier_serves()
        one = Rank(sidecar.endpoint, pool=kv_pool("page_first", False, page=256, pages=PAGES + 8, heads=32))
        assert one.storage._client.warm(60)
        indices = one.alloc(PAGES)
        size = PAGES * one.storage._parts["kv"].page_bytes
        print(f"{PAGES} pages of {size / PAGES / 2**20:.3g} MiB:")

        def told(what: str, seconds: float, cpu_s: float) -> None:
            print(f"  {what}: {size / seconds / 1e9:.3g} GB/s, {cpu_s / size * 1e12:.3g} ms of CPU a GB")

        for turn in range(3):
            keys = hashes(PAGES, "ways", turn)
            cpu_s, disk_cpu_s = time.process_time(), cpu_of(sidecar.pid)
            started = time.perf_counter()
            one.storage.batch_set_v1(keys, indices)
            told("host pool to pool", time.perf_counter() - started, time.process_time() - cpu_s)
            sidecar.until_clean()
            told("pool to disk, of the sidecar", time.perf_counter() - started, cpu_of(sidecar.pid) - disk_cpu_s)
            cpu_s, started = time.process_time(), time.perf_counter()
            through_a_socket(memoryview(one.pool.kv_buffer.view(torch.uint8).numpy().reshape(-1))[:size])
            told("host pool to another buffer through a Unix socket, both ends", time.perf_counter() - started, time.process_time() - cpu_s)
        one.close()


def through_a_socket(source: memoryview) -> None:
    near, far = socket.socketpair()
    sender = threading.Thread(target=near.sendall, args=(source,))
    target = memoryview(bytearray(len(source)))
    sender.start()
    at = 0
    while at < len(target):
        at += far.recv_into(target[at : at + (1 << 20)])
    sender.join()
    near.close()
    far.close()


def cpu_of(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def questions(sidecar: Sidecar) -> None:
    one = Rank(sidecar.endpoint)
    indices = one.alloc(32)
    for count in (128, 1000, 4000):
        keys = hashes(count, "questions")
        for first in range(0, count, 32):
            one.storage.batch_set_v1(keys[first : first + 32], indices[: len(keys[first : first + 32]) * 16])
        one.storage.settle()
        for name, asked in (("all there", keys), ("none", hashes(count, "absent"))):
            before = one.storage.counts.exists_cpu_s
            took = statistics.median(timed(lambda: one.storage.batch_exists(asked)) for _ in range(51))
            cpu = (one.storage.counts.exists_cpu_s - before) / 51
            print(f"batch_exists of {count}, {name}: {took * 1e3:.3g} ms, {cpu * 1e3:.3g} ms of CPU")
    one.storage.get_stats()
    print(f"get_stats: {statistics.median(timed(one.storage.get_stats) for _ in range(999)) * 1e9:.3g} ns when nothing is new")
    one.close()


def hung(sidecar: Sidecar) -> None:
    one, keys = Rank(sidecar.endpoint), hashes(4)
    indices = one.alloc(4)
    one.storage.batch_set_v1(keys, indices)
    one.storage.settle()
    os.kill(sidecar.pid, signal.SIGSTOP)
    for name, call in (
        ("get", lambda: one.storage.batch_get_v1(keys, indices)),
        ("get again", lambda: one.storage.batch_get_v1(keys, indices)),
        ("set", lambda: one.storage.batch_set_v1(keys, indices)),
        ("exists", lambda: one.storage.batch_exists(keys)),
        ("get_stats", one.storage.get_stats),
        ("close", one.storage.close),
    ):
        print(f"sidecar stopped: {name} {timed(call) * 1e3:.3g} ms")
    os.kill(sidecar.pid, signal.SIGCONT)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder) / "model")
        with Sidecar(Path(folder), pool_size="4GiB") as sidecar:
            for layout, mla in EVERY_LAYOUT:
                copies(sidecar, layout, mla, page=2048 if mla else 128)
            for page in (32, 64, 256, 512):
                copies(sidecar, "page_first", False, page)
            questions(sidecar)
            hung(sidecar)
        ways(Path(folder))
