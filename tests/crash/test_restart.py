"""A sidecar killed again and again under load, and one that was full, in small. restart.py tells what it is; CI and soak do more of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hostkv.connector import Client, Layout

from tests.support import PATIENCE_S, Sidecar

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("patient_clients")


def run(*flags: str) -> None:
    command = [sys.executable, "-m", "tests.crash.restart", *flags]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=6 * PATIENCE_S, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


def test_whenever_the_sidecar_is_killed_answers_are_misses_or_right_and_every_client_comes_back() -> None:
    run("--kills", "10")


@pytest.mark.parametrize("pool, block", [("256MiB", "1MiB"), ("64MiB", "4KiB")])
def test_every_block_of_a_full_pool_is_served_again_byte_for_byte(pool: str, block: str) -> None:
    run("--pool", pool, "--block", block)


@pytest.mark.parametrize("heard", [False, True], ids=["while it is away", "just before"])
def test_what_is_given_back_while_the_sidecar_is_away_is_so_though_nobody_asks_anything_more(tmp_path: Path, heard: bool) -> None:
    with Sidecar(tmp_path) as sidecar, Client(sidecar.endpoint) as client:
        store = client.open(Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=4096))
        store.wait(store.dump([b"a"], 0, [[bytes(4096)]]), PATIENCE_S)
        tag = client.new_tag()
        assert store.acquire([b"a"], tag).run == 1
        if heard:
            os.kill(sidecar.pid, signal.SIGSTOP)
            store.release([tag])
        sidecar.kill()
        if not heard:
            store.release([tag])
        sidecar.start()
        sidecar.until(lambda: sidecar.status()["pins"] == 0)


def test_a_signal_to_end_that_comes_while_it_restarts_is_not_lost(tmp_path: Path) -> None:
    """Between SIGHUP and the next ready line: while the old one stops, while Python starts, while the new one adopts."""
    with Sidecar(tmp_path, start=False) as sidecar:
        for wait_s in (0.0, 0.01, 0.05, 0.1, 0.2):
            sidecar.start()
            process = sidecar.process
            assert process is not None
            restarts = sidecar.log().count(" restarting ")
            process.send_signal(signal.SIGHUP)
            sidecar.until(lambda restarts=restarts: sidecar.log().count(" restarting ") > restarts)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            assert sidecar.stop() == 0, f"SIGTERM {wait_s} s after the restart began"
            assert not sidecar.tables_path.exists()
            assert not sidecar.pool_path.exists()
