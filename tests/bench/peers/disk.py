"""To disk and from disk by turns, past the page cache: HostKV's spill and promotion, as `hostkv bench` measures them, and LMCache's
`fs_native` adapter with O_DIRECT, as lmcache_l2.py does (there is also what the clocks count).

HostKV's tier stays from turn to turn, as one in use has. The first write to a place makes a file system note that it has bytes now, and
ext4, where it is mounted with `discard` and has no journal, discards each block of such notes that it frees before the write is done.
"""

from __future__ import annotations

import time
from pathlib import Path

from hostkv.connector.bench import MIB
from hostkv.connector.bench_disk import measure as spill_and_promote

from tests.bench import lmcache_l2
from tests.bench.peers.common import VENVS, Table, say

SIZES, TOTAL_BYTES, ROUNDS = (MIB, 4 * MIB), 512 * MIB, 5
REST_S = 15  # in which a throttled disk gathers what it gives at once: LMCache's imports alone are ten seconds of it
ADAPTER = "LMCache fs_native, O_DIRECT"


def lines(size: int) -> tuple[str, str]:
    what = f"{TOTAL_BYTES // size} x {size // MIB} MiB"
    return f"write {what} to disk", f"read {what} from disk"


def hostkv(size: int, place: Path) -> tuple[float, float]:
    # As much before the measured round as the other's: a throttled disk counts.
    found = spill_and_promote(f"{place}/tier-{size}", "auto", size, TOTAL_BYTES, 1, warm=1)
    return found["spill"][0].speed, found["promotion"][0].speed


def lmcache(size: int, place: Path) -> tuple[float, float]:
    found = lmcache_l2.lmcache(str(VENVS / "lmcache" / "bin" / "lmcache"), lmcache_l2.ADAPTERS[ADAPTER], size, TOTAL_BYTES, str(place))
    return found["to disk"], found["from disk"]


def measure(table: Table, place: Path, wanted: list[str]) -> None:
    subjects = {name: run for name, run in ((Table.OURS, hostkv), ("LMCache", lmcache)) if name in wanted}
    for size in SIZES:
        for line in lines(size):
            table.line(line, "GB/s")
        for number in range(ROUNDS):
            say(f"disk, {size // MIB} MiB, round {number + 1} of {ROUNDS}")
            names = list(subjects)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                lmcache_l2.sync(str(place))
                time.sleep(REST_S)
                try:
                    for line, speed in zip(lines(size), subjects[name](size, place), strict=True):
                        table.add(line, name, speed)
                except (SystemExit, OSError, KeyError) as error:  # how lmcache_l2 says that the command failed
                    table.note(f"{name}: disk: {str(error)[-300:]}")
                    del subjects[name]
