"""`python -m tests.sim`: many seeds of the simulation, on several processes, until one fails; prints how to see it again."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from .model import Violation
from .world import run

CHUNK = 25  # seeds that a process is given at a time


def run_some(first: int, count: int, steps: int) -> str:
    """What the first failing seed of these says, empty where none does."""
    for seed in range(first, first + count):
        try:
            run(seed, steps)
        except Violation as violation:
            return str(violation)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    started_s, done = time.monotonic(), 0
    last = options.first + options.seeds
    chunks = [(first, min(CHUNK, last - first)) for first in range(options.first, last, CHUNK)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for (_, count), failure in zip(chunks, pool.map(run_some, *zip(*chunks, strict=True), [options.steps] * len(chunks)), strict=True):
            if failure:
                pool.shutdown(cancel_futures=True)
                print(f"\n{failure}")
                return 1
            done += count
            passed_s = time.monotonic() - started_s
            print(f"\r{done} of {options.seeds} seeds, {1000 * passed_s / done:.0f} ms each", end="", flush=True)
    print(f"\n{options.seeds} seeds of {options.steps} steps: nothing found in {passed_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
