"""`hostkv fsck`, `clear` and `doctor` on a disk that does not answer: they say so, go on with the rest, and end. And what a directory says
while it takes long."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import current_thread
from typing import NamedTuple

import pytest
from hostkv.sidecar import rundir
from hostkv.sidecar.apart import UNANSWERED
from hostkv.sidecar.tiers import directory

from tests.crash.slow_disk import SlowDisk
from tests.crash.test_fsck_disk import flip, is_at_rest
from tests.support import LIFE_S, MEMORY, PATIENCE_S, Sidecar, disk_tier, until
from tests.tiers import MIB, Rig

HASTY = "from hostkv.sidecar import apart, cli; apart.HUNG_S = 3.0; exit(cli.main())"
PATIENT = "from hostkv.sidecar import apart, cli; apart.HUNG_S = 3600.0; exit(cli.main())"
NAMES = range(7)


class Host(NamedTuple):
    """A tier of two directories without a sidecar: one on a disk that may hang, and one on another."""

    disk: SlowDisk
    other: Path
    flags: tuple[str, ...]

    def start(self, name: str, *flags: str, program: str = HASTY) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, name, *self.flags, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, name: str, *flags: str) -> tuple[int, str]:
        """To its end, which is also that of all who might write to its stdout."""
        return ended(self.start(name, *flags))

    def run_obeyed(self, name: str, *flags: str) -> tuple[int, str]:
        """The same on a disk that answers, also those who were left behind, and they have ended."""
        self.disk.obey()
        until(lambda: is_at_rest(self.disk.path))
        return ended(self.start(name, *flags, program=PATIENT))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=LIFE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # and it is not waited for: the disk may keep it
        raise
    return process.returncode, said


@pytest.fixture
def other() -> Iterator[Path]:
    """A directory of a disk that answers at once."""
    with tempfile.TemporaryDirectory(prefix="hostkv-test-", dir=MEMORY) as name:
        yield Path(name, "other")


@pytest.fixture
def host(tmp_path: Path, other: Path) -> Iterator[Host]:
    with SlowDisk(tmp_path / "disk") as disk:
        for path in (disk.path, other):
            with Rig(path, size_bytes=64 * MIB) as rig:
                rig.write_all(NAMES)
        tier = {"type": "disk", "path": [str(disk.path), str(other)], "size": "128MiB"}
        (tmp_path / "hostkv.yaml").write_text(json.dumps({"pool": {"name": f"hostkv-test-{os.getpid()}-hung"}, "tiers": [tier]}))
        yield Host(disk, other, ("--config", f"{tmp_path}/hostkv.yaml", "--endpoint", f"ipc://{tmp_path}/absent/control.sock"))


@pytest.mark.parametrize("kind", ["look", "open", "read"])
def test_fsck_says_of_a_directory_that_it_does_not_answer_and_looks_at_the_others(host: Host, kind: str) -> None:
    host.disk.hold(kind)
    code, said = host.run("fsck")
    assert code == 2, said
    assert f"disk     {host.disk.path}\nresult   cannot be looked at: it {UNANSWERED}\n" in said
    assert f"disk     {host.other}: 8 slabs" in said
    assert "7 blocks compared with their checksums" in said
    assert said.endswith("result   sound\n")
    code, said = host.run_obeyed("fsck")
    assert (code, said.count("result   sound")) == (0, 2), said


@pytest.mark.parametrize("kind", ["look", "open", "read"])
def test_doctor_says_of_a_directory_that_it_does_not_answer_and_checks_the_rest(host: Host, kind: str) -> None:
    host.disk.hold(kind)
    code, said = host.run("doctor")
    lines = said.splitlines()
    assert (code, [line for line in lines if line.startswith("problem")]) == (1, [f"problem  disk {host.disk.path}: {UNANSWERED}"])
    assert f"ok       O_DIRECT on {host.other}: works" in lines
    assert any(line.startswith(f"ok       room on {host.other}: ") for line in lines)
    assert lines[-1].split()[1] in ("left", "pool", "file"), "the last check was made; other tests may have pools at this moment"


def test_clear_empties_the_directories_that_answer(host: Host) -> None:
    host.disk.hold("look")
    code, said = host.run("clear")
    assert code == 2, said
    assert f"cannot be looked at: it {UNANSWERED}\n" in said
    assert f"disk {host.other} is empty, 1 namespaces are forgotten" in said
    code, said = host.run_obeyed("clear")
    assert code == 0, said
    assert f"disk {host.disk.path} is empty, 1 namespaces are forgotten" in said


def test_a_repair_that_hangs_is_done_by_running_it_again(host: Host) -> None:
    flip(host.disk.behind / "00000.records", 3 * 64 + 40)
    host.disk.hold("sync")
    code, said = host.run("fsck", "--fix")
    assert code == 2, said
    assert "record 3 of 00000.records: its seal is wrong" in said
    assert f"cannot be looked at: it {UNANSWERED}\n" in said
    assert host.run_obeyed("fsck", "--fix")[0] == 0
    code, said = host.run_obeyed("fsck")
    assert (code, said.count("result   sound")) == (0, 2), said
    assert "records  6 blocks" in said


@pytest.mark.parametrize("name", ["fsck", "doctor"])
def test_ctrl_c_ends_what_waits_for_a_disk(host: Host, name: str) -> None:
    host.disk.hold("open")
    process = host.start(name, program=PATIENT)
    host.disk.until_held(1)
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert (code, "Traceback" in said) == (130, False), said
    assert host.run_obeyed("fsck")[0] == 0


def test_who_was_killed_is_known_to_be_dying_before_it_has_ended(tmp_path: Path) -> None:
    with SlowDisk(tmp_path / "disk") as disk:
        (disk.behind / "file").touch()
        disk.hold("open")
        with subprocess.Popen([sys.executable, "-c", f"open('{disk.path}/file')"]) as process:
            disk.until_held(1)
            dying = [rundir._is_dying(process.pid)]
            process.kill()
            dying.append(rundir._is_dying(process.pid))
            lives = process.poll() is None
            disk.obey()
        assert (dying, lives) == ([False, True], True)


def test_what_a_killed_sidecar_left_on_a_disk_that_hangs_keeps_nothing_from_its_pool(tmp_path: Path, other: Path) -> None:
    """No configuration names the directories here: the ledger does."""
    with SlowDisk(tmp_path / "disk") as disk:
        with Sidecar(tmp_path / "sidecar", config=disk_tier(disk.path, other, size="128MiB")) as sidecar:
            sidecar.until_tier_serves()
            sidecar.kill()
            host = Host(disk, other, ("--endpoint", sidecar.endpoint))
            disk.hold("look")
            code, said = host.run("fsck")
            assert code == 2, said
            assert f"pool     {sidecar.pool_path}: " in said
            assert f"disk     {disk.path}\nresult   cannot be looked at: it {UNANSWERED}\n" in said
            assert said.count("result   sound") == 2
            code, said = host.run("doctor")
            assert (code, said.count(f"problem  disk {disk.path}: {UNANSWERED}")) == (1, 1), said
            assert f"left transfers: of a killed sidecar may be under way in {disk.path};" in said
            assert f"under way in {host.other}" not in said
            assert host.run_obeyed("fsck")[0] == 0


def test_a_directory_says_how_much_of_its_room_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str, dict[str, object]]] = []

    def event(level: int, name: str, **data: object) -> None:
        assert level == logging.INFO
        said.append((current_thread().name, name, data))

    monkeypatch.setattr(directory, "event", event)
    monkeypatch.setattr(directory, "PROGRESS_S", PATIENCE_S)
    with Rig(tmp_path / "quick"):
        assert said == [], "not where it does not take long"
    monkeypatch.setattr(directory, "PROGRESS_S", -1.0)
    monkeypatch.setattr(directory, "TAKEN_BYTES", MIB)
    with Rig(tmp_path / "disk", size_bytes=32 * MIB) as rig:
        slabs, slab_bytes = rig.directories()[0]["slabs"], rig.disk.status()["slab_bytes"]
        assert {(thread, name, data["directory"]) for thread, name, data in said} == {
            (f"disk {tmp_path}/disk", "disk room is being taken", str(tmp_path / "disk"))
        }
        taken = [data["bytes"] for _, _, data in said]
        assert {data["of"] for _, _, data in said} == {slabs * slab_bytes}
        assert taken == [slab * slab_bytes + at for slab in range(slabs) for at in [*range(MIB, slab_bytes, MIB), slab_bytes]]
        assert all((tmp_path / "disk" / f"{slab:05d}.slab").stat().st_blocks * 512 >= slab_bytes for slab in range(slabs))
        said.clear()
        rig.reopen()
        assert said == [], "what is there need not be taken"
