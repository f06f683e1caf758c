"""The benchmark runs through on a small scale and gives every figure that the project promises. What the figures are is not tested."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostkv.connector import Client, bench, bench_disk

from tests.support import PATIENCE_S

PROMISED = [
    "save 4 x 1 MiB, 1 thread",
    "load 4 x 1 MiB, 2 threads",
    "save 4 x 4 MiB, 2 threads",
    "load 4 x 1 MiB in pieces of 4 KiB",
    "save 4 x 1 MiB in pieces of 64 KiB",
    "save 4 x 1 MiB, verify: load",
    "load 4 x 1 MiB, verify: load",
    "derive 100 keys",
    "look up 100 keys among 1,000",
    "look up 100 keys among 10,000",
    "a bare ZeroMQ round trip",
    "acquire and release 4 blocks",
    "4 clients at once: acquire and release 4",
    "a step while the sidecar hangs, slowest of 100",
    "empty",
    "with 1,000 blocks",
    "spill of 1 MiB blocks, threads",
    "promotion of 4 MiB blocks, threads",
]


def test_every_promised_figure_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = {
        "POOL_BYTES": 128 << 20,
        "BATCH": 4,
        "LOOKUP_KEYS": 100,
        "CLIENTS": 4,
        "PROCESSES": 2,
        "FILL_BLOCKS": 1000,
        "QUICK_BLOCKS": 10000,
    }
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench_disk, "QUICK_BYTES", 64 << 20)
    monkeypatch.setattr(bench_disk, "QUICK_ROUNDS", 1)
    assert bench.main(["--quick", "--json", "--disk", str(tmp_path)]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(PROMISED) <= set(rows)
    assert all(row["value"] > 0 for row in rows.values())
    assert list(tmp_path.iterdir()) == []
    assert "0 lost" in rows["4 clients at once: acquire and release 4"]["beside"]
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(f"hostkv-bench-{os.getpid()}-")]


def test_a_sidecar_that_gets_no_processor_makes_a_figure_bad_and_no_request_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH": 4, "CLIENTS": 4, "PROCESSES": 2}.items():
        monkeypatch.setattr(bench, name, value)
    report, over = bench.Report(quiet=True), threading.Event()
    with bench.OwnSidecar(64 << 20) as sidecar, Client(sidecar.endpoint, timeout_s=bench.TIMEOUT_S) as client:

        def now_and_then() -> None:
            while not over.wait(0.3):
                os.kill(sidecar.pid, signal.SIGSTOP)
                time.sleep(2)
                os.kill(sidecar.pid, signal.SIGCONT)

        with bench.hangs_after(bench.TIMEOUT_S), ThreadPoolExecutor(1) as pool:
            pool.submit(now_and_then)
            try:
                bench.many_clients(report, client, sidecar.endpoint, 400)
            finally:
                over.set()
    assert "1600 pairs, 0 lost" in report.rows[0].beside


def test_a_signal_to_end_ends_its_sidecar_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hostkv.sidecar.cli", "bench", "--quick", "--disk", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as benchmark:

        def pools() -> list[Path]:
            return list(Path("/dev/shm").glob(f"hostkv-bench-{benchmark.pid}-*"))

        end = time.monotonic() + PATIENCE_S
        while not pools():
            assert time.monotonic() < end, "it did not start"
            time.sleep(0.01)
        benchmark.terminate()
        assert benchmark.wait(PATIENCE_S) == 1
        assert not pools()
