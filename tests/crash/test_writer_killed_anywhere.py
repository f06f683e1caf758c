"""The writer of the tables killed between any two of its instructions; see step_writer.c."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_writer_killed_after_any_instruction_leaves_tables_that_adopt_whole(tmp_path: Path) -> None:
    program = tmp_path / "step_writer"
    sources = [
        Path(__file__).with_name("step_writer.c"),
        *(ROOT / "cext" / f"{name}.c" for name in ("tables", "tables_repair", "tables_check", "hash")),
    ]
    includes = [f"-I{ROOT / folder}" for folder in ("cext", "cext/vendor", "schemas")]
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-std=c11", "-O3", *includes, "-o", str(program), *map(str, sources)], check=True)
    rebuilds = 0
    for seed in (1, 4):
        ran = subprocess.run([str(program), str(seed)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"seed {seed}: {ran.stdout}{ran.stderr}"
        _instructions, states, complaints, rebuilt, evicted, taken_back = map(int, ran.stdout.split())
        assert complaints == 0, f"seed {seed}: {ran.stderr}"
        assert states > 3000, "the writer did not do enough"
        assert evicted > 0
        assert taken_back > 0
        rebuilds += rebuilt
    assert rebuilds > 0
