"""Four writers and four readers on a pool of eight blocks, killed, stopped and replaced at random; on request the sidecar too:

    python -m tests.crash.torture --minutes 10 [--sidecar-kills] [--verify] [--seed N]

Every load is exact, or a miss, or reported as failed; nobody hangs; nobody meets an error that is not documented. At the end every key
can be saved and is then found, pins and shards in flight are none, the pool holds READY blocks and nothing else, the tables are sound,
and nothing is left in /dev/shm. Who failed says why, and which seed drove it (processes and the kernel take part, so the seed alone
replays nothing)."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hostkv.connector import Client

from tests.crash.crowd import KEYS, LAYOUTS, POOL_SIZE, Crowd, block_id, content, difference, layout_of
from tests.support import PATIENCE_S, Sidecar, faults_after_repair, until

SILENCE_S = 11.5  # a stop that is longer than the 10 s after which a session loses its pins
LONG_STOP_EVERY_S = 25.0
SIDECAR_KILL_EVERY_S = (2.0, 5.0)
RESTART_S = 5.0  # before the end no restart is begun that it might not see done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.torture")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--sidecar-kills", action="store_true", help="kill the sidecar every few seconds too, or have it restart")
    parser.add_argument("--verify", action="store_true", help="with verify: load, so that every load compares checksums")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    config = f"verify: {'load' if options.verify else 'off'}\n"
    with tempfile.TemporaryDirectory(prefix="hostkv-") as folder, Sidecar(Path(folder), pool_size=POOL_SIZE, config=config) as sidecar:
        torture(sidecar, Path(folder), options.minutes * 60, options.seed, options.sidecar_kills)
    return 0


def torture(sidecar: Sidecar, folder: Path, seconds: float, seed: int, sidecar_kills: bool) -> None:
    with Crowd(folder, sidecar.endpoint, seed) as crowd:
        sidecars_killed, sidecars_restarted = torment(crowd, sidecar, seconds, random.Random(seed + 1), sidecar_kills)
        crowd.finish()
        until(lambda: nothing_held(sidecar), lambda: f"what is still held: {sidecar.status()}")
        counts = crowd.board.totals()
        evicted = sidecar.status()["items"]["evicted"]
        print(
            f"{counts['saved']} shards saved, {counts['present']} present, {counts['busy']} busy, {counts['dropped']} dropped; "
            f"{counts['loaded']} loaded, {counts['missed']} missed or failed; {counts['lookups']} lookups, {counts['hits']} hits; "
            f"with late handles {counts['late_good']} good, {counts['late_failed']} failed; {counts['clears']} clears, "
            f"{evicted} evictions{' since the last restart' if sidecars_killed else ''}; "
            f"{crowd.kills} kills, {crowd.stops} stops; of the sidecar {sidecars_killed} kills, {sidecars_restarted} warm restarts",
            flush=True,
        )
    assert counts["wrong"] == 0
    for name in ("saved", "present", "loaded", "missed", "hits", "late_good", "late_failed"):
        assert counts[name] > 0, f"nothing was {name}: this run shows nothing"
    every_key_can_be_saved_and_found(sidecar)
    nothing_is_left(sidecar)


def torment(crowd: Crowd, sidecar: Sidecar, seconds: float, draw: random.Random, sidecar_kills: bool) -> tuple[int, int]:
    """How often the sidecar was killed, and how often told to restart."""
    killed = restarted = 0
    start_s = time.monotonic()
    long_stop_s = start_s + 1.0
    sidecar_kill_s = start_s + draw.uniform(*SIDECAR_KILL_EVERY_S)
    shown_s = start_s
    while (now_s := time.monotonic()) < start_s + seconds:
        crowd.tick()
        if now_s >= long_stop_s and now_s + SILENCE_S < start_s + seconds:
            for place in (draw.choice(crowd.places[:4]), draw.choice(crowd.places[4:])):
                crowd.stop(place, SILENCE_S)
            long_stop_s = now_s + LONG_STOP_EVERY_S
        working = [place for place in crowd.places if place not in crowd.stopped()]
        if draw.random() < 0.7:
            crowd.replace(draw.choice(working))
        elif len(working) > 4:
            crowd.stop(draw.choice(working), draw.uniform(0.01, 0.6))
        if sidecar_kills and now_s >= sidecar_kill_s:
            if draw.random() < 0.3 and now_s + RESTART_S < start_s + seconds:
                os.kill(sidecar.pid, signal.SIGHUP)
                restarted += 1
            else:
                sidecar.kill()
                assert faults_after_repair(sidecar.tables_path) == []
                sidecar.start()
                killed += 1
            sidecar_kill_s = time.monotonic() + draw.uniform(*SIDECAR_KILL_EVERY_S)
        if now_s - shown_s > 60:
            shown_s = now_s
            print(f"{now_s - start_s:.0f} of {seconds:.0f} s: {crowd.kills} kills, {crowd.board.totals()}", flush=True)
        time.sleep(draw.uniform(0.02, 0.15))
    return killed, restarted


def nothing_held(sidecar: Sidecar) -> bool:
    status = sidecar.status()
    return bool(status["pins"] == status["shards_in_flight"] == status["blocks"]["pinned"] == 0 and status["sessions"] == [])


def every_key_can_be_saved_and_found(sidecar: Sidecar) -> None:
    """One key after the other; in the end no block is half there, since each was made whole or evicted."""
    with Client(sidecar.endpoint) as client:
        stores = [client.open(layout) for layout in LAYOUTS]
        for key in range(KEYS):
            store, shards = stores[LAYOUTS.index(layout_of(key))], list(range(layout_of(key).shards))
            ids = [block_id(key)] * len(shards)
            words = store.wait(store.dump(ids, shards, [[content(key, shard)] for shard in shards]), PATIENCE_S)
            assert set(words) <= {"committed", "present"}, f"key {key}: {words}"
            targets = [np.zeros(layout_of(key).shard_bytes, np.uint8) for _ in shards]
            store.wait(store.load(ids, shards, [[target] for target in targets]), PATIENCE_S)
            for shard in shards:
                assert not (why := difference(key, shard, targets[shard])), why
    until(lambda: nothing_held(sidecar), lambda: f"what is still held: {sidecar.status()}")
    status = sidecar.status()
    assert status["blocks"]["writing"] == status["blocks"]["doomed"] == 0, status["blocks"]
    assert status["pool"]["used_bytes"] == sum(each["blocks"] * each["slot_bytes"] for each in status["namespaces"])
    assert status["pool"]["used_bytes"] + status["pool"]["free_bytes"] == status["pool"]["bytes"]


def nothing_is_left(sidecar: Sidecar) -> None:
    """Not in the tables, and, once it has ended well, not in /dev/shm."""
    ready = sidecar.status()["blocks"]["ready"]
    sidecar.kill()
    assert faults_after_repair(sidecar.tables_path) == []
    assert int(sidecar.start()["adopted"]) == ready
    assert sidecar.stop() == 0
    assert [name for name in os.listdir("/dev/shm") if sidecar.pool_name in name] == []


if __name__ == "__main__":
    sys.exit(main())
