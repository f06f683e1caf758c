"""A sidecar killed at 60 of its own lines, and from outside, in every stage of its life: killed.py. `make torture` and soak do more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 1800  # a hang is told by the bounds inside; this one is for their sum


def test_killed_anywhere_it_leaves_what_a_plain_start_serves_on() -> None:
    command = [sys.executable, "-m", "tests.crash.killed", "--trials", "60", "--outside", "8"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
