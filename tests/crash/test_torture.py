"""A short torture (torture.py tells what it is); CI runs it for a minute of each kind, `make soak` for ten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 0.25
BOUND_S = 1200  # a hang is told by the bounds inside; this one is for their sum


@pytest.mark.parametrize("flags", [["--sidecar-kills"], ["--tier", "--verify"]], ids=" ".join)
def test_whoever_dies_or_stops_every_load_is_exact_or_a_miss_and_nothing_is_left(flags: list[str]) -> None:
    command = [sys.executable, "-m", "tests.crash.torture", "--minutes", str(MINUTES), *flags]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
