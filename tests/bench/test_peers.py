"""What the comparison does without any peer: HostKV's column is filled, and who is not there is a line that says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hostkv.connector.bench import MIB

from tests.bench.peers import common, memory
from tests.bench.peers.__main__ import tidy


def test_a_peer_that_is_not_there_is_a_line_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {"POOL_BYTES": 256 * MIB, "BATCH_BYTES": 8 * MIB, "SIZES": (MIB,), "LOOKUPS": (4,), "ROUNDS": 1, "VENVS": tmp_path}
    for name, value in small.items():
        monkeypatch.setattr(memory, name, value)
    table = common.Table(["LMCache", "Mooncake"])
    memory.measure(table, tmp_path, ["HostKV", "Mooncake", "LMCache"])
    lines = [*memory.copies(MIB), *memory.look(4), memory.TRIP]
    assert all(float(table.cell(line, "HostKV")) > 0 for line in lines)
    assert {table.cell(line, peer) for line in lines for peer in ("LMCache", "Mooncake")} == {"–"}
    assert [note.split(":")[0] for note in table.notes] == ["Mooncake", "LMCache"]


def test_the_ratio_says_how_far_hostkv_is_ahead() -> None:
    table = common.Table(["other"])
    table.line("speed", "GB/s")
    table.line("time", "ms")
    for value in (4.0, 1.0, 8.0):
        table.add("speed", "HostKV", value)
        table.add("time", "HostKV", value)
    table.add("speed", "other", 2.0)
    table.add("time", "other", 2.0)
    assert table.cell("speed", "other") == "2 (2x)"
    assert table.cell("time", "other") == "2 (0.5x)"
    assert table.text({}).splitlines()[2] == "| speed, GB/s | 4 | 2 (2x) |"


def test_what_a_peer_left_in_shared_memory_is_removed_unless_in_use() -> None:
    left, used = (Path(f"/dev/shm/hostkv-peers-test-{os.getpid()}-{what}") for what in ("left", "used"))
    table = common.Table([])
    before = set(os.listdir("/dev/shm"))
    try:
        left.write_bytes(b"1")
        with used.open("wb"):
            tidy(table, before)
            assert used.exists()
        assert not left.exists()
        assert len(table.notes) == 1
    finally:
        left.unlink(missing_ok=True)
        used.unlink(missing_ok=True)
