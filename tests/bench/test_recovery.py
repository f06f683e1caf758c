"""The benchmark of recovery runs through on a small scale: every block it made comes back. What the figures are is not tested."""

from pathlib import Path

from tests.bench import recovery


def test_every_record_is_recovered_and_every_figure_measured(tmp_path: Path) -> None:
    paths, slots = recovery.make_records(tmp_path, 2001, slabs=4)
    assert [path.stat().st_size // 64 for path in paths] == [501, 501, 501, 498]
    figures = recovery.recover(paths, slots, 2001)
    assert len(figures) == 8
    del figures["bytes a block"]  # this process may meanwhile free what other tests left
    assert all(value > 0 for value in figures.values())
