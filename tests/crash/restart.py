"""How soon a killed sidecar is back, and what its clients meet meanwhile:

    python -m tests.crash.restart [--kills 50] [--seed N]               under load: two writers, two readers
    python -m tests.crash.restart --pool 4GiB [--block 1MiB]            full of READY blocks of one size, nobody else there

Every answer must be a miss or right, and everybody must get answers again; times are printed and not judged. After a kill a client
counts as back when a request of it that began after the kill has been done; its time is told from the ready line on."""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from hostkv.connector import Client, Layout

from tests.crash.crowd import POOL_SIZE, Crowd
from tests.support import HASTY_CLIENTS, PATIENCE_S, PATIENT_CLIENTS, Sidecar, faults_after_repair, until, waiting_as

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MAX_BATCH = 1024
GIB_PER_S = 16  # what a restart must serve again at least


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.restart")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--pool", type=size, help="payload bytes, such as 4GiB")
    parser.add_argument("--block", type=size, default=1 << 20, help="bytes of a block (default 1MiB)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostkv-") as folder:
        if options.pool:
            with waiting_as(PATIENT_CLIENTS):
                full_pool(Path(folder), options.pool, options.block)
        else:
            print(f"seed {options.seed}, {options.kills} kills", flush=True)
            under_load(Path(folder), options.kills, options.seed)
    return 0


def size(text: str) -> int:
    return int(text[:-3]) * UNITS[text[-3:]]


# ---- under load ----------------------------------------------------------------------------------------------------------------------
def under_load(folder: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    back_s: list[float] = []
    start_s: list[float] = []
    with Sidecar(folder, pool_size=POOL_SIZE) as sidecar, Crowd(folder, sidecar.endpoint, seed, writers=2, readers=2) as crowd:
        board = crowd.board

        def all_answered() -> bool:
            crowd.tick()
            return all(board.row(place).mark_ns == board.mark_ns for place in crowd.places)

        board.mark(time.monotonic_ns())
        for _ in range(kills):
            until(all_answered)
            time.sleep(draw.uniform(0, 0.3))
            sidecar.kill()
            killed_ns = time.monotonic_ns()
            assert faults_after_repair(sidecar.tables_path) == []
            time.sleep(draw.choice((0, 0, draw.uniform(0, 1.5))))
            board.mark(killed_ns)
            launched_ns = time.monotonic_ns()
            sidecar.start()
            ready_ns = time.monotonic_ns()
            until(all_answered)
            start_s.append((ready_ns - launched_ns) / 1e9)
            back_s += [max(0, board.row(place).answered_ns - ready_ns) / 1e9 for place in crowd.places]
        crowd.finish()
        counts = board.totals()
        until(lambda: sidecar.status()["sessions"] == [])
        status = sidecar.status()
        assert (status["pins"], status["shards_in_flight"]) == (0, 0)
    print(
        f"{kills} kills of the sidecar; {counts['saved']} shards saved, {counts['dropped']} dropped, {counts['loaded']} loaded, "
        f"{counts['missed']} missed or failed, {counts['late_good']} read with late handles, {counts['wrong']} wrong\n"
        f"start to ready line: median {median(start_s):.2f} s, longest {max(start_s):.2f} s\n"
        f"ready line to a client's first answer: median {median(back_s):.2f} s, longest {max(back_s):.2f} s ({len(back_s)} times)",
        flush=True,
    )
    assert counts["wrong"] == 0
    assert min(counts[name] for name in ("saved", "loaded", "dropped")) > 0, "this run shows nothing"


# ---- a full pool -----------------------------------------------------------------------------------------------------------------------
def full_pool(folder: Path, pool_bytes: int, block_bytes: int) -> None:
    """Fills it, kills its sidecar, and serves it again."""
    layout = Layout(model="full", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=block_bytes)
    count = pool_bytes // block_bytes
    config = f"pool: {{size: {pool_bytes >> 20}MiB, max_blocks: {max(1024, count)}}}\n"
    with Sidecar(folder, config=config, pool_size=f"{pool_bytes >> 20}MiB") as sidecar, Client(sidecar.endpoint, copy_threads=2) as client:
        store = client.open(layout)
        ids = [b"%d" % i for i in range(count)]
        source = np.arange(MAX_BATCH * block_bytes // 8, dtype=np.uint64).view(np.uint8).reshape(MAX_BATCH, block_bytes)
        for first in range(0, count, MAX_BATCH):
            batch = ids[first : first + MAX_BATCH]
            words = store.wait(store.dump(batch, 0, [[source[i]] for i in range(len(batch))]), PATIENCE_S)
            assert words == ["committed"] * len(batch)
        assert sidecar.status()["blocks"]["ready"] == count
        sidecar.kill()
        with waiting_as(HASTY_CLIENTS):
            until(lambda: not client.serving())
        launched_s = time.monotonic()
        ready = sidecar.start()
        ready_s = time.monotonic()
        assert int(ready["adopted"]) == count
        last = np.zeros(block_bytes, np.uint8)

        def loaded() -> bool:
            return client.serving() and store.wait(store.load(ids[-1:], 0, [[last]]), PATIENCE_S) == []

        until(loaded)
        first_load_s = time.monotonic()
        assert np.array_equal(last, source[(count - 1) % MAX_BATCH])
        assert store.lookup(ids) == [True] * count
        target = np.zeros((MAX_BATCH, block_bytes), np.uint8)
        for first in range(0, count, MAX_BATCH):
            batch = ids[first : first + MAX_BATCH]
            store.wait(store.load(batch, 0, [[target[i]] for i in range(len(batch))]), PATIENCE_S)
            assert np.array_equal(target[: len(batch)], source[: len(batch)])
        empty_s = start_of_an_empty_one(folder / "empty")
    gib = pool_bytes / (1 << 30)
    print(
        f"{gib:.1f} GiB full of {count} blocks of {block_bytes} bytes: {ready_s - launched_s:.2f} s from start to the ready line, "
        f"{first_load_s - launched_s:.2f} s to the first correct load; 1 s per {GIB_PER_S} GiB would be {gib / GIB_PER_S:.2f} s; "
        f"a sidecar with a pool of 1 MiB starts in {empty_s:.2f} s",
        flush=True,
    )


def start_of_an_empty_one(folder: Path) -> float:
    with Sidecar(folder, pool_size="1MiB", start=False) as sidecar:
        launched_s = time.monotonic()
        sidecar.start()
        return time.monotonic() - launched_s


if __name__ == "__main__":
    sys.exit(main())
