"""`python -m tests.sim`: many seeds of the simulation, on several processes, until one fails; prints how to see it again."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from .model import Violation
from .progress import Progress
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
    progress, done = Progress(), 0
    last = options.first + options.seeds
    chunks = [(first, min(CHUNK, last - first)) for first in range(options.first, last, CHUNK)]
    with ProcessPoolExecutor(options.jobs) as pool:
        results = pool.map(run_some, *zip(*chunks, strict=True), [options.steps] * len(chunks))
        for (_, count), failure in zip(chunks, results, strict=True):
            if failure:
                pool.shutdown(cancel_futures=True)
                progress.say(failure)
                return 1
            done += count
            progress(f"{done} of {options.seeds} seeds, {1000 * progress.passed_s / done:.0f} ms each")
    progress.say(f"{options.seeds} seeds of {options.steps} steps: nothing found in {progress.passed_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
