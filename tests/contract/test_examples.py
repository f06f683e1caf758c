"""The examples that need no engine run, and print what their docstrings say they print."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import LIFE_S, PATIENT_PROGRAM, Sidecar

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def shape(text: str) -> list[str]:
    """The lines without what differs from run to run: numbers."""
    return [re.sub(r"\d+(\.\d+)*", "N", line.strip()) for line in text.strip().splitlines()]


def promised(example: Path) -> list[str]:
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    return shape(docstring.split("Expected output", 1)[1].split("\n", 1)[1])


@pytest.mark.parametrize("name", ["quickstart.py", "raw_client.py"])
def test_an_example_prints_what_it_promises(tmp_path: Path, name: str) -> None:
    with Sidecar(tmp_path, pool_size="256MiB") as sidecar:
        environment = {**os.environ, "HOSTKV_ENDPOINT": sidecar.endpoint}
        program = f"{PATIENT_PROGRAM}\nimport runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        command = [sys.executable, "-c", program, EXAMPLES / name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIFE_S)
    assert done.returncode == 0, done.stderr
    assert shape(done.stdout) == promised(EXAMPLES / name)


@pytest.mark.parametrize("name", ["quickstart.py", "raw_client.py"])
def test_an_example_without_a_sidecar_says_how_to_start_one(tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "HOSTKV_ENDPOINT": f"ipc://{tmp_path}/control.sock"}
    done = subprocess.run([sys.executable, EXAMPLES / name], env=environment, capture_output=True, text=True, timeout=LIFE_S)
    assert done.returncode != 0
    assert "hostkv serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_sidecar_runs_a_command_beside_one_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HOSTKV_ENDPOINT"}
    command = [sys.executable, EXAMPLES / "with_sidecar.py", "--pool-size", "64MiB", "--", "sh", "-c", "echo $HOSTKV_ENDPOINT; exit 3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIFE_S)
    assert done.returncode == 3, done.stderr
    run_directory = Path(done.stdout.strip().removeprefix("ipc://")).parent
    assert run_directory.name.startswith("hostkv-")
    assert not run_directory.exists()
