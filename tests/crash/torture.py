"""Four writers and four readers on a pool of eight blocks, killed, stopped and replaced at random; on request the sidecar too:

    python -m tests.crash.torture --minutes 10 [--sidecar-kills] [--verify] [--seed N]
    python -m tests.crash.torture --tier [--pool 1GiB --working-set 8GiB]         on a disk tier that has room for three quarters of it

Every load is exact, or a miss, or reported as failed; nobody hangs; nobody meets an error that is not documented. At the end every key
can be saved and is then found, pins and shards in flight are none, the pool holds READY blocks and nothing else, the tables are sound,
and nothing is left in /dev/shm. With a tier the sidecar is told to end, too, so that all comes from disk, and the last time it must; a run
in which nothing came from there fails. Who failed says why, and which seed drove it (processes and the kernel take part, so the seed
alone replays nothing)."""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hostkv.connector import Client, LoadError

from tests.crash.crowd import KEYS, LAYOUTS, MOST_KEYS, POOL_SIZE, Crowd, block_id, content, difference, layout_of
from tests.crash.restart import size
from tests.support import PATIENCE_S, PATIENT_CLIENTS, Sidecar, disk_tier, faults_after_repair, hostkv, until, waiting_as

MIB = 1 << 20

SILENCE_S = 11.5  # a stop that is longer than the 10 s after which a session loses its pins
LONG_STOP_EVERY_S = 25.0
SIDECAR_KILL_EVERY_S = (2.0, 5.0)
TIER_KILL_EVERY_S = (4.0, 12.0)  # so that what is lost with the pool comes back from disk before the next
SHOWN = ("saved", "present", "loaded", "missed", "hits", "late_good", "late_failed")  # what a run must have seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.torture")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--sidecar-kills", action="store_true", help="kill the sidecar every few seconds too, or have it restart")
    parser.add_argument("--verify", action="store_true", help="with verify: load, so that every load compares checksums")
    parser.add_argument("--tier", action="store_true", help="with a disk tier, and all that --sidecar-kills does")
    parser.add_argument("--pool", type=size, default=64 * MIB, help="with --tier: its size (default 64MiB)")
    parser.add_argument("--working-set", type=size, default=512 * MIB, help="with --tier: bytes of all blocks (default 512MiB)")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    config = f"verify: {'load' if options.verify else 'off'}\neviction: {('lru', 'reuse')[options.seed % 2]}\n"
    pool_size, keys = POOL_SIZE, KEYS
    with tempfile.TemporaryDirectory(prefix="hostkv-") as folder:
        if options.tier:
            paths = [Path(folder, "disk", name) for name in "ab"]
            paths[0].parent.mkdir()
            config += disk_tier(*paths, size=f"{options.working_set * 3 // 4 // MIB}MiB")
            pool_size = f"{options.pool // MIB}MiB"
            keys = options.working_set // (sum(layout.slot_bytes for layout in LAYOUTS) // len(LAYOUTS))
            assert keys <= MOST_KEYS, f"{keys} keys are too many, at most {MOST_KEYS}"
        with Sidecar(Path(folder), pool_size=pool_size, config=config) as sidecar:
            torture(sidecar, Path(folder), options.minutes * 60, options.seed, options.sidecar_kills or options.tier, keys)
    return 0


def torture(sidecar: Sidecar, folder: Path, seconds: float, seed: int, sidecar_kills: bool, keys: int) -> None:
    with Crowd(folder, sidecar.endpoint, seed, keys=keys) as crowd:
        torment = Torment(crowd, sidecar, random.Random(seed + 1))
        torment.go_on_for(seconds, sidecar_kills)
        crowd.finish()
        until(lambda: not torment.restarting(), sidecar.log)  # or a request may reach the old process, and be lost with it
        until(lambda: nothing_held(sidecar), lambda: f"what is still held: {sidecar.status()}")
        torment.look()
        counts = crowd.board.totals()
        evicted = sidecar.status()["items"]["evicted"]
        print(
            f"{counts['saved']} shards saved, {counts['present']} present, {counts['busy']} busy, {counts['dropped']} dropped; "
            f"{counts['loaded']} loaded, {counts['missed']} missed or failed; {counts['lookups']} lookups, {counts['hits']} hits; "
            f"with late handles {counts['late_good']} good, {counts['late_failed']} failed; {counts['clears']} clears, "
            f"{evicted} evictions{' since the last restart' if sidecar_kills else ''}; "
            f"{crowd.kills} kills, {crowd.stops} stops; of the sidecar {torment.killed} kills, {torment.restarted} warm restarts, "
            f"{torment.ended} ends",
            flush=True,
        )
        if torment.tiers:
            print(", ".join(f"{count} {name}" for name, count in torment.tier_counts().items()), "(as seen before each end)", flush=True)
    assert counts["wrong"] == 0
    for name in SHOWN:
        assert counts[name] > 0, f"nothing was {name}: this run shows nothing"
    with waiting_as(PATIENT_CLIENTS):
        every_key_can_be_saved_and_found(sidecar, keys)
        if torment.tiers:
            assert torment.tier_counts()["promoted"] > 0, "nothing came from disk: this run shows nothing"
            all_comes_from_disk(sidecar, keys)
    nothing_is_left(sidecar)


class Torment:
    """What is done to a crowd and its sidecar."""

    def __init__(self, crowd: Crowd, sidecar: Sidecar, draw: random.Random) -> None:
        self._crowd, self._sidecar, self._draw = crowd, sidecar, draw
        self.killed = self.restarted = self.ended = 0  # how often the sidecar was
        self._told = 0  # what its log tells of starts and restarts when the last restart is over
        self.tiers: dict[str, dict[str, int]] = {}  # instance -> the counts of its tier when it was looked at last

    def look(self) -> None:
        """By another process: there must be no ZeroMQ here while the crowd grows."""
        told = hostkv("status", "--json", "--endpoint", self._sidecar.endpoint)
        if told.returncode == 0:  # else it restarts
            status = json.loads(told.stdout)
            for tier in status["tiers"]:
                self.tiers[status["instance"]] = tier

    def restarting(self) -> bool:
        return self._starts() < self._told

    def _starts(self) -> int:
        log = self._sidecar.log()
        return log.count(" ready ") + log.count("restart put off")

    def tier_counts(self) -> dict[str, int]:
        names = ("spilled", "spills_failed", "promoted", "promotions_failed", "corrupt", "no_room", "no_slot")
        return {name: sum(tier[name] for tier in self.tiers.values()) for name in names}

    def go_on_for(self, seconds: float, sidecar_kills: bool) -> None:
        crowd, draw = self._crowd, self._draw
        self.look()
        kill_every_s = TIER_KILL_EVERY_S if self.tiers else SIDECAR_KILL_EVERY_S
        start_s = time.monotonic()
        long_stop_s = start_s + 1.0
        sidecar_kill_s = start_s + draw.uniform(*kill_every_s)
        shown_s = start_s
        while (now_s := time.monotonic()) < start_s + seconds or (self._lacks() and now_s < start_s + seconds + PATIENCE_S):
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
                self._end_sidecar()
                sidecar_kill_s = time.monotonic() + draw.uniform(*kill_every_s)
            if now_s - shown_s > 60:
                shown_s = now_s
                print(f"{now_s - start_s:.0f} of {seconds:.0f} s: {crowd.kills} kills, {crowd.board.totals()}", flush=True)
            time.sleep(draw.uniform(0.02, 0.15))

    def _lacks(self) -> bool:
        """Whether the run has not shown yet what it is to show, on a machine that gives it little time."""
        counts = self._crowd.board.totals()
        return not all(counts[name] for name in SHOWN) or bool(self.tiers and not self.tier_counts()["promoted"])

    def _end_sidecar(self) -> None:
        sidecar = self._sidecar
        how = self._draw.random()
        self.look()
        if how < 0.3:
            if not self.restarting():  # two in one could not be told from one
                self._told = self._starts() + 1
                os.kill(sidecar.pid, signal.SIGHUP)
                self.restarted += 1
            return
        if how > 0.8 and self.tiers:
            assert sidecar.stop() == 0
            self.ended += 1
        else:
            sidecar.kill()
            assert faults_after_repair(sidecar.tables_path) == []
            self.killed += 1
        sidecar.start()
        self._told = 0


def nothing_held(sidecar: Sidecar) -> bool:
    status = sidecar.status()
    tiers = all(tier["reading"] == tier["wanted"] == tier["spilling"] == 0 and tier["quiet"] for tier in status["tiers"])
    members = [member["name"] for session in status["sessions"] for member in session["members"]]
    held = (status["pins"], status["shards_in_flight"], status["blocks"]["pinned"], status["waiting"])
    return tiers and not any(held) and members == ["tier"] * len(status["tiers"])


def every_key_can_be_saved_and_found(sidecar: Sidecar, keys: int) -> None:
    """One key after the other; in the end no block is half there, since each was made whole or evicted."""
    with Client(sidecar.endpoint) as client:
        stores = [client.open(layout) for layout in LAYOUTS]
        for key in range(keys):
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


def all_comes_from_disk(sidecar: Sidecar, keys: int) -> None:
    """After an end and a start: what was found before it, but for what only the pool had kept while the disk went round, and with a block
    or two whose place there had been given away and not been written yet. A kill in the middle of a write leaves the record of what lay
    there before: such a block is found until it is read, and then it is none."""
    sidecar.until_clean()
    before = found(sidecar, keys)
    assert sidecar.stop() == 0
    assert sidecar.start()["adopted"] == "0"
    sidecar.until_tier_serves()
    after = found(sidecar, keys)
    print(f"{len(before)} of {keys} blocks found at the end, {len(after)} on disk after a start", flush=True)
    assert len(before) // 2 < len(after)
    torn = 0
    with Client(sidecar.endpoint) as client:
        stores = [client.open(layout) for layout in LAYOUTS]
        for key in after:
            shards = list(range(layout_of(key).shards))
            targets = [np.zeros(layout_of(key).shard_bytes, np.uint8) for _ in shards]
            store = stores[LAYOUTS.index(layout_of(key))]
            try:
                store.wait(store.load([block_id(key)] * len(shards), shards, [[target] for target in targets]), PATIENCE_S)
            except LoadError:
                torn += 1
                continue
            for shard in shards:
                assert not (why := difference(key, shard, targets[shard])), why
    tier = sidecar.tier()
    assert (tier["promoted"], tier["corrupt"]) == (len(after) - torn, torn), tier
    assert torn <= len(after) // 4


def found(sidecar: Sidecar, keys: int) -> set[int]:
    with Client(sidecar.endpoint) as client:
        stores = [client.open(layout) for layout in LAYOUTS]
        return {key for key in range(keys) if stores[LAYOUTS.index(layout_of(key))].lookup([block_id(key)]) == [True]}


def nothing_is_left(sidecar: Sidecar) -> None:
    """Not in the tables, and, once it has ended well, not in /dev/shm nor in the run directory."""
    until(lambda: nothing_held(sidecar), lambda: f"what is still held: {sidecar.status()}")
    ready = sidecar.status()["blocks"]["ready"]
    sidecar.kill()
    assert faults_after_repair(sidecar.tables_path) == []
    assert int(sidecar.start()["adopted"]) == ready
    assert sidecar.stop() == 0
    assert [name for name in os.listdir("/dev/shm") if sidecar.pool_name in name] == []
    assert sorted(os.listdir(sidecar.run_directory)) == ["lock", "members"]


if __name__ == "__main__":
    sys.exit(main())
