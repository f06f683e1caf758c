"""The tables' writer killed, and a reader stopped, between any two of their instructions; see step_writer.c and step_reader.c."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(name: str, folder: Path) -> Path:
    cext = [ROOT / "cext" / f"{source}.c" for source in ("tables", "tables_repair", "tables_check", "hash")]
    includes = [f"-I{ROOT / each}" for each in ("cext", "cext/vendor", "schemas")]
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-std=c11", "-O3", *includes, "-o", str(folder / name), str(source), *map(str, cext)], check=True)
    return folder / name


def test_a_writer_killed_after_any_instruction_leaves_tables_that_adopt_whole(tmp_path: Path) -> None:
    program = build("step_writer", tmp_path)
    for seed, verify in ((10, "1"), (17, "0")):
        ran = subprocess.run([str(program), str(seed), "writer", verify, verify], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"seed {seed}: {ran.stdout}{ran.stderr}"
        _instructions, states, complaints, moved, evicted, taken_back = map(int, ran.stdout.split())
        assert complaints == 0, f"seed {seed}: {ran.stderr}"
        assert states > 3000, "the writer did not do enough"
        assert evicted > 0
        assert taken_back > 0
        assert moved > 0


@pytest.mark.parametrize("verify", ["11", "00", "10"], ids=["checksums", "seals", "checksums that become seals"])
def test_a_repair_killed_after_any_instruction_leaves_tables_that_adopt_whole(tmp_path: Path, verify: str) -> None:
    command = [str(build("step_writer", tmp_path)), "10", "repair", *verify]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
    _instructions, states, complaints, *_ = map(int, ran.stdout.split())
    assert complaints == 0, ran.stderr
    assert states > 50, "the repair did not do enough"


@pytest.mark.parametrize("case", ["reuse", "move"])
def test_a_reader_stopped_at_any_instruction_neither_finds_what_was_never_ready_nor_misses_what_always_was(
    tmp_path: Path, case: str
) -> None:
    ran = subprocess.run([str(build("step_reader", tmp_path)), case], capture_output=True, text=True, check=True)
    stops, wrong = map(int, ran.stdout.split())
    assert stops > 50
    assert wrong == 0
