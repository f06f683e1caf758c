"""`lmcache bench l2` and HostKV's disk tier by turns on one disk: `python -m tests.bench.lmcache_l2 --lmcache BIN [--dir DIR]`.

LMCache lives in an environment of its own; only its command is run. A CPU build of torch will do:

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 aiofiles aiohttp cachetools cryptography numba 'numpy<=2.2.6' nvtx opentelemetry-sdk==1.40.0 \\
        'prometheus_client<=0.24.1' psutil py-cpuinfo pyyaml requests sortedcontainers
    VENV/bin/pip install --no-deps lmcache==0.5.6

What LMCache's figures are: a file per block, written and read in its own process, from and to memory it has touched before, IN_FLIGHT at a
time, after a round to warm up. Its clock runs until the last file has its name. It never syncs and has no checksum, so `store` without
O_DIRECT counts copies into the page cache; `to disk` adds what writing those pages out takes, and with O_DIRECT the two are one. `load`
follows at once, so without O_DIRECT it counts copies out of the page cache; `from disk` is a run of its own, after the files have left it.

HostKV is measured as by `hostkv bench`: `to disk` is its spill, from an engine's memory through the pool until the last block is written
with its checksum, with O_DIRECT and no sync either; `from disk` is its promotion into the pool, each block verified. Its blocks are of
random bytes, LMCache's of one value each.

Every turn begins with nothing left to write and warms up with as much as is measured, and each round begins with another of the subjects: a
throttled disk gives more to whoever comes after a pause.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from hostkv.connector.bench import machine
from hostkv.connector.bench_disk import GB, MIB, ROUNDS, limit, measure

SIZES = (MIB, 2 * MIB, 4 * MIB)
TOTAL_BYTES = 512 * MIB  # of a round
IN_FLIGHT = 16
ADAPTERS = {
    "LMCache fs": {"type": "fs"},
    "LMCache fs, O_DIRECT": {"type": "fs", "use_odirect": True},
    "LMCache fs_native": {"type": "fs_native", "num_workers": IN_FLIGHT},
    "LMCache fs_native, O_DIRECT": {"type": "fs_native", "num_workers": IN_FLIGHT, "use_odirect": True},
}
HOSTKV, PLAIN = "HostKV", "the disk itself, O_DIRECT"
COLUMNS = ("store", "to disk", "load", "from disk")
NOTES = {True: "no checksum", False: "no checksum; store and load are of the page cache"}
Figures = dict[str, float]  # GB/s by column


def run(binary: str, adapter: dict[str, object], size: int, total: int, place: str, only: list[str]) -> dict[str, float]:
    """Seconds of what was run, by its name in LMCache's report, without the round to warm up."""
    output = os.path.join(place, "figures.json")
    command = [binary, "bench", "l2", "--l2-adapter", json.dumps(adapter), "--data-size-kb", str(size >> 10), "--l1-align-bytes", "4096"]
    command += ["--in-flight", str(IN_FLIGHT), "--num-keys", str(total // size // IN_FLIGHT), "--rounds", "1", "--warmup-rounds", "1"]
    command += ["--format", "json", "--output", output, *only]
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    with open(output) as file:
        sections = [section for name, section in json.load(file)["metrics"].items() if name != "config"]
    for section in sections:
        if section["operation"] != "Lookup" and section["total_success"] * size != total:
            sys.exit(f"{' '.join(command)}: {section['operation']} of {section['total_success']} of {total // size} blocks:\n{done.stdout}")
    return {section["operation"]: section["duration_avg_ms"] / 1000 for section in sections}


def sync(place: str) -> float:
    """Seconds until the file system of `place` has written all it has."""
    began = time.perf_counter()
    subprocess.run(["sync", "-f", place], check=True)
    return time.perf_counter() - began


def forget_pages(directory: str) -> None:
    """Puts the files below it out of the page cache, once they are on the disk."""
    sync(directory)
    for path in Path(directory).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def lmcache(binary: str, options: dict[str, object], size: int, total: int, place: str) -> Figures:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        adapter = {**options, "base_path": os.path.join(directory, "files")}
        first = run(binary, adapter, size, total, directory, [])
        synced = sync(place)
        forget_pages(directory)
        again = run(binary, adapter, size, total, directory, ["--only", "load"])
    # The pages of both rounds were synced, so half of it is this round's.
    to_disk = first["Store"] + (0 if "use_odirect" in options else synced / 2)
    seconds = {"store": first["Store"], "to disk": to_disk, "load": first["Load"], "from disk": again["Load"]}
    return {column: total / GB / value for column, value in seconds.items()}


def one_round(binary: str, place: str, size: int, total: int, number: int) -> dict[str, Figures]:
    subjects = [HOSTKV, *ADAPTERS]
    first = number % len(subjects)
    figures: dict[str, Figures] = {}
    for name in subjects[first:] + subjects[:first]:
        sync(place)
        if name == HOSTKV:
            plain = dict.fromkeys(("spill", "promotion"), 0.0)

            def beside(what: str, plain: Figures = plain) -> None:
                plain[what] = limit(place, what, size, total).speed

            ours = measure(f"{place}/tier", "auto", size, total, 1, beside, warm=1)
            for whose, found in ((HOSTKV, {what: rates[0].speed for what, rates in ours.items()}), (PLAIN, plain)):
                figures[whose] = {"to disk": found["spill"], "from disk": found["promotion"]}
        else:
            figures[name] = lmcache(binary, ADAPTERS[name], size, total, place)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lmcache", required=True, metavar="PATH", help="the lmcache command")
    parser.add_argument("--dir", default=".", help="on the disk to measure, which needs 3 GiB. Default: this one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    logging.getLogger("hostkv").addHandler(logging.NullHandler())  # that its sidecars end is our own doing
    print(f"{machine()}\n{TOTAL_BYTES // MIB} MiB a round, medians of {ROUNDS} rounds, GB/s")
    for size in SIZES:
        seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        with tempfile.TemporaryDirectory(prefix="hostkv-lmcache-", dir=os.path.abspath(options.dir)) as place:
            for number in range(ROUNDS):
                for name, figures in one_round(options.lmcache, place, size, TOTAL_BYTES, number).items():
                    for column, value in figures.items():
                        seen[name][column].append(value)
        medians = {name: {column: statistics.median(values) for column, values in found.items()} for name, found in seen.items()}
        print(f"\n{f'{size // MIB} MiB blocks':<30}" + "".join(f"{column:>11}" for column in COLUMNS))
        for name in (PLAIN, HOSTKV, *ADAPTERS):
            note = NOTES["use_odirect" in ADAPTERS[name]] if name in ADAPTERS else "checksum" if name == HOSTKV else ""
            cells = (f"{medians[name][column]:11.2f}" if column in medians[name] else f"{'–':>11}" for column in COLUMNS)
            print(f"{name:<30}{''.join(cells)}   {note}", flush=True)
        beside = ", ".join(
            f"{medians[HOSTKV][column] / max(medians[name][column] for name in ADAPTERS):.2f} {column}"
            for column in ("to disk", "from disk")
        )
        print(f"HostKV, times the best LMCache: {beside}", flush=True)


if __name__ == "__main__":
    main()
