"""The disk tier in one process: whose directories are, what is kept of them, what comes of jobs, and who waits for whom. What crashes and
failing disks leave is in tests/crash/test_disk_files.py, what any tier promises in tests/contract/test_any_tier.py."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostkv.cext import xxh3_64
from hostkv.schemas.layout import PAGE, RECORD
from hostkv.sidecar.errors import StartupError
from hostkv.sidecar.tiers import CORRUPT, Read, ledger
from hostkv.sidecar.tiers import disk as disks
from hostkv.sidecar.tiers.directory import MAX_NAMESPACES, default_slab_bytes, slabs_of

from tests.support import PATIENCE_S
from tests.tiers import BOOT, MIB, SPACE, Rig, checksum_of, key_of, make_space, payload_of

OTHER = make_space("other", shards=1, shard_bytes=100_000)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path / "a") as rig:
        yield rig


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path / "a", tmp_path / "b", size_bytes=32 * MIB) as rig:
        yield rig


def tree(path: Path) -> dict[str, Any]:
    """All that lies there: names, kinds, bytes."""
    return {
        str(each.relative_to(path)): (stat.S_IFMT(each.lstat().st_mode), each.read_bytes() if each.is_file() else b"")
        for each in sorted(path.rglob("*"))
    }


def refused(path: Path, **arguments: Any) -> str:
    """What a start on this directory is refused with."""
    rig = Rig(path, start=False, **arguments)
    with pytest.raises(StartupError) as caught:
        rig.launch()
    rig.__exit__()
    return str(caught.value)


class Mounted:
    """A file system of its own."""

    def __init__(self, path: Path, *options: str) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mount does not work here: {done.stderr}")

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


# ---- whose a directory is ----


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_a_new_directory_and_all_in_it_is_ours_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with Rig(tmp_path / "a") as rig:
            rig.write_all([1])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "a").iterdir()} == {0o600}


def test_an_empty_directory_is_taken_and_so_is_a_new_file_system(tmp_path: Path) -> None:
    (tmp_path / "a" / "lost+found").mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    with Rig(tmp_path / "a") as rig:
        rig.write_all([1])
    assert (tmp_path / "a" / "lost+found").is_dir()


@pytest.mark.parametrize("name", ["photo.jpg", ".hidden", "00000.slab"])
def test_a_directory_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a"
    path.mkdir(0o700)
    (path / name).write_text("mine")
    before = tree(path)
    assert name in refused(path)
    assert tree(path) == before


@pytest.mark.parametrize("what", ["file", "link", "no parent", "open to others", "somebody else's"])
def test_what_cannot_be_a_directory_of_ours_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a"
    if what == "file":
        path.write_text("mine")
    elif what == "link":
        (tmp_path / "real").mkdir(0o700)
        path.symlink_to("real")
    elif what == "no parent":
        path = tmp_path / "no" / "a"
    else:
        path.mkdir(0o700)
        path.chmod(0o770 if what == "open to others" else 0o700)
        if what == "somebody else's":
            os.chown(path, 12345, 12345)
    assert str(path) in refused(path)
    assert what != "link" or not list((tmp_path / "real").iterdir())


def test_a_second_sidecar_is_refused_and_told_who_has_the_directory(rig: Rig) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from tests.tiers import Rig\n"
        "from hostkv.sidecar.errors import StartupError\n"
        "rig = Rig(Path(sys.argv[2]), start=False)\n"
        "try: rig.launch()\n"
        "except StartupError as error: print(error)"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, root, str(rig.paths[0])], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert f"{rig.paths[0]} is held by the sidecar with pid {os.getpid()} on ipc:///run/x/control.sock" in done.stdout, done
    rig.write_all([1])
    rig.reopen()
    assert rig.held([1]) == {1}


def test_one_directory_given_twice_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", tmp_path / "a", size_bytes=32 * MIB, start=False)
    with pytest.raises(StartupError, match="given twice"):
        rig.launch()
    rig.__exit__()


def test_a_directory_of_a_newer_version_is_refused_and_left_as_it_is(rig: Rig) -> None:
    rig.write_all([1])
    rig.close()
    path = rig.paths[0]
    found = json.loads((path / "directory.json").read_text())
    (path / "directory.json").write_text(json.dumps({"format": 2, "id": found["id"], "whatever": 1}))
    before = tree(path)
    assert "newer version" in refused(path)
    assert tree(path) == before


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b"[]", b'{"format": 1}', b'{"format": 0}', b"[" * 100_000, b'{"format": 1, "id": "x"}', b" " * (2 * MIB)],
    ids=range(9),
)
def test_a_damaged_list_takes_its_directory_out_of_service_and_nothing_else(two: Rig, text: bytes) -> None:
    two.write_all(range(20))
    kept = {name for name in range(20) if two.path_of(name) == two.paths[1]}
    two.close()
    (two.paths[0] / "directory.json").write_bytes(text)
    before = tree(two.paths[0])
    two.open()
    assert [each["state"] for each in two.directories()] == ["failed", "serving"]
    assert [each["retry_in_s"] > 0 for each in two.directories()] == [True, False]
    assert "directory.json" in two.directories()[0]["reason"]
    assert two.held(range(20)) == kept
    two.write_all(range(20, 40))
    two.close()
    assert {**tree(two.paths[0]), "lock": ()} == {**before, "lock": ()}


@pytest.mark.parametrize("name", ["00002.slab", "00002.records", "directory.json", "lock"])
@pytest.mark.parametrize("what", ["fifo", "directory", "link"])
def test_what_is_no_file_in_the_place_of_one_takes_its_directory_out_of_service(two: Rig, tmp_path: Path, name: str, what: str) -> None:
    two.write_all(range(20))
    two.close()
    path = two.paths[0] / name
    path.rename(tmp_path / "moved")
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    two.open()
    assert [each["state"] for each in two.directories()] == ["failed", "serving"]
    assert name in two.directories()[0]["reason"]
    assert len(two.held(range(20))) == 10
    assert (tmp_path / "moved").read_bytes() == before
    assert stat.S_IFMT(path.lstat().st_mode) == {"fifo": stat.S_IFIFO, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}[what]


# ---- how much it takes ----


@pytest.mark.parametrize("size_bytes", [16 * MIB, 100 * MIB, 511 * MIB, 512 * MIB, 1 << 34, 1 << 36, 1 << 41])
def test_slabs_and_their_records_never_take_more_than_the_size(size_bytes: int) -> None:
    slab_bytes = default_slab_bytes(size_bytes)
    slabs = slabs_of(size_bytes, slab_bytes)
    assert slabs * (slab_bytes + slab_bytes // 4096 * 64) < size_bytes
    assert slabs * slab_bytes > size_bytes * 0.9
    assert 8 <= slabs <= 256
    assert slab_bytes % 4096 == 0


def test_all_that_a_full_directory_takes_is_within_its_size(rig: Rig) -> None:
    small = make_space("small", shards=1, shard_bytes=4096)
    rig.write_all(range(4200), small)  # more than it can hold
    rig.disk.index.check()
    used = sum(each.stat().st_blocks * 512 for each in rig.paths[0].iterdir())
    assert rig.size_bytes * 0.9 < used <= rig.size_bytes
    assert len(rig.held(range(4200), small)) > 3000


def test_a_smaller_size_removes_slabs_and_a_larger_one_adds_some(tmp_path: Path) -> None:
    with Rig(tmp_path / "a", size_bytes=64 * MIB) as rig:
        rig.write_all(range(50))
        slab_bytes = rig.disk.largest_bytes
        rig.size_bytes = 36 * MIB
        rig.reopen()
        assert rig.disk.largest_bytes == slab_bytes
        assert rig.directories()[0]["slabs"] == 4
        assert sorted(each.name for each in (tmp_path / "a").glob("0*")) == [f"0000{n}.{x}" for n in range(4) for x in ("records", "slab")]
        assert rig.held(range(50)) == set(range(50))  # they lie in the first slab
        rig.size_bytes = 80 * MIB
        rig.reopen()
        assert rig.directories()[0]["slabs"] == 9 + 1
        assert rig.held(range(50)) == set(range(50))


def test_slabs_that_do_not_fit_the_size_any_more_start_the_directory_anew(tmp_path: Path) -> None:
    with Rig(tmp_path / "a", size_bytes=64 * MIB) as rig:
        rig.write_all(range(20))
        slabs = 8 * rig.disk.largest_bytes
        rig.size_bytes = 16 * MIB
        rig.reopen()
        assert rig.directories()[0]["lost_bytes"] == slabs
        assert rig.held(range(20)) == set()
        rig.write_all(range(20, 40))
        rig.reopen()
        assert rig.directories()[0]["lost_bytes"] == 0
        assert rig.held(range(40)) == set(range(20, 40))


def test_a_directory_that_comes_late_keeps_slabs_of_another_size_until_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "RETRY_S", 0.05)
    with Rig(tmp_path / "a", size_bytes=64 * MIB) as rig:
        rig.write_all(range(20))
        slab_bytes = rig.disk.largest_bytes
        rig.close()
        listed = (tmp_path / "a" / "directory.json").read_bytes()
        (tmp_path / "a" / "directory.json").write_bytes(b"")
        rig.size_bytes = 40 * MIB
        rig.open()
        assert rig.disk.largest_bytes != slab_bytes
        (tmp_path / "a" / "directory.json").write_bytes(listed)
        rig.until(lambda: "restart to keep what it has" in rig.directories()[0]["reason"])
        rig.reopen()
        assert rig.disk.largest_bytes == slab_bytes
        assert rig.held(range(20)) == set(range(20))


def test_too_small_a_size_is_refused(tmp_path: Path) -> None:
    assert "at least" in refused(tmp_path / "a", size_bytes=8 * MIB)
    assert not (tmp_path / "a").exists()


def test_a_full_file_system_keeps_what_could_be_had(tmp_path: Path) -> None:
    with Mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=20M", "tmpfs") as mount, Rig(mount / "a", size_bytes=32 * MIB) as rig:
        (found,) = rig.directories()
        assert (found["state"], found["slabs_wanted"]) == ("serving", 8)
        assert 3 <= found["slabs"] < 8
        rig.write_all(range(1500))  # it goes round
        assert 500 < len(rig.held(range(1500))) < 1500
        rig.reopen()
        assert 500 < len(rig.held(range(1500))) < 1500


def test_a_file_system_without_room_for_one_slab_is_no_reason_not_to_start(tmp_path: Path) -> None:
    with Mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=2M", "tmpfs") as mount, Rig(mount / "a") as rig:
        assert rig.directories()[0]["state"] == "failed"
        assert "no room" in rig.directories()[0]["reason"]
        assert (rig.disk.room(), rig.disk.takes(), rig.write(1)) == (0, False, None)


def test_a_file_system_without_direct_io_and_preallocation_serves_all_the_same(tmp_path: Path) -> None:
    with Mounted(tmp_path / "m", "-t", "ramfs", "ramfs") as mount, Rig(mount / "a") as rig:
        assert (rig.directories()[0]["state"], rig.directories()[0]["direct"]) == ("serving", False)
        rig.write_all(range(20))
        rig.reopen()
        assert rig.held(range(20)) == set(range(20))


def test_a_disk_with_direct_io_is_written_past_the_page_cache(rig: Rig) -> None:
    assert rig.directories()[0]["direct"]
    flags = Path("/proc/self/fdinfo").joinpath(str(rig.disk._places[0].slab_fds[0])).read_text()
    assert int(flags.split("flags:")[1].split()[0], 8) & os.O_DIRECT


# ---- jobs ----


def test_what_is_written_is_on_disk_as_the_layout_says(rig: Rig) -> None:
    rig.write_all([7])
    _, _, slab, slot, checksum = rig.disk.index.open(key_of(7), rig.disk.number(SPACE))
    path = rig.paths[0]
    with (path / f"{slab:05d}.slab").open("rb") as file:
        file.seek(slot * SPACE.slot_bytes)
        assert file.read(SPACE.slot_bytes) == payload_of(7)
    record = (path / f"{slab:05d}.records").read_bytes()[slot * 64 :][:64]
    key, found, sequence, number, pages, seal = RECORD.unpack(record)
    assert (key, found, sequence, pages) == (key_of(7), checksum, 1, SPACE.slot_bytes // 4096)
    assert checksum == checksum_of(payload_of(7))
    assert seal == xxh3_64(record[:56], slab << 32 | slot)
    (listed,) = json.loads((path / "directory.json").read_text())["namespaces"]
    assert (listed["number"], listed["fingerprint"]) == (number, SPACE.fingerprint.hex())


def test_a_number_is_on_the_list_before_its_first_record(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    assert rig.write(1) == 0
    assert [os.path.basename(each) for each in synced] == ["directory.json.new", "a"]
    rig.write_all([2, 3])
    assert len(synced) == 2


def test_blocks_of_several_sizes_and_namespaces_live_side_by_side(rig: Rig) -> None:
    rig.write_all(range(20))
    rig.write_all(range(20), OTHER)
    rig.reopen()
    assert rig.held(range(20)) == set(range(20)) == rig.held(range(20), OTHER)


def test_directories_are_filled_evenly(two: Rig) -> None:
    two.write_all(range(100))
    assert [each["blocks"] for each in two.directories()] == [50, 50]


def test_a_block_that_is_not_what_it_should_be_is_not_written(rig: Rig) -> None:
    assert rig.write(1, checksum=checksum_of(payload_of(1)) ^ 1) == CORRUPT
    assert rig.read(1) is None
    assert rig.write(1, checksum=checksum_of(payload_of(1))) == 0
    assert rig.read(1) == 0
    assert rig.directories()[0]["corrupt"] == 1


def test_a_block_as_large_as_a_slab_has_a_place(rig: Rig) -> None:
    large = make_space("large", shards=1, shard_bytes=rig.disk.largest_bytes)
    rig.write_all(range(3), large)
    rig.reopen()
    assert rig.held(range(3), large) == set(range(3))


def test_a_job_for_no_directory_is_done_all_the_same(rig: Rig) -> None:
    rig.disk.submit([Read(99, 5, 0, 0, 0, 1, 4096, 4096, 0)])
    assert rig.wait([99])[0].result == errno.ENODEV


def test_what_is_submitted_beyond_the_room_is_refused_and_the_rest_is_done(rig: Rig) -> None:
    rig.write_all([1])
    room = rig.disk.room()
    _, directory, slab, slot, checksum = rig.disk.index.open(key_of(1), rig.disk.number(SPACE))
    shape = (SPACE.shards, SPACE.shard_bytes, SPACE.slot_bytes, checksum)
    rig.disk.submit([Read(1000 + n, directory, slab, slot, n, *shape) for n in range(room + 10)])
    assert rig.disk.room() == 0
    results = [done.result for done in rig.wait(range(1000, 1000 + room + 10))]
    assert results == [0] * room + [errno.EBUSY] * 10
    assert rig.disk.room() == room


@pytest.mark.parametrize("what", ["its list cannot be written", "retired"])
def test_writes_that_get_no_number_leave_their_directory_room_for_others(rig: Rig, what: str) -> None:
    obstacle = rig.paths[0] / "directory.json.new"
    if what != "retired":
        obstacle.mkdir()
    begun = [rig.begin_write(name) for name in range(disks.QUEUE)]
    assert rig.begin_write(disks.QUEUE) is None, "no more than that"
    if what == "retired":
        assert rig.forget(SPACE) == [0]
    results = {done.result for done in rig.wait(each[0] for each in begun if each is not None)}
    assert results == {errno.ESTALE if what == "retired" else errno.EISDIR}
    for each in begun:
        assert each is not None
        rig.disk.index.settle(each[1], None)
    if what != "retired":
        obstacle.rmdir()
    rig.write_all([1])


def test_every_directory_of_a_disk_whose_queue_is_full_gets_its_turn(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    with Rig(*paths, size_bytes=48 * MIB) as rig:
        rig.write_all(range(3))
        shape = (SPACE.shards, SPACE.shard_bytes, SPACE.slot_bytes)
        reads = []
        for name in range(3):
            _, directory, slab, slot, checksum = rig.disk.index.open(key_of(name), rig.disk.number(SPACE))
            tokens = range(1000 * (name + 1), 1000 * (name + 1) + disks.QUEUE)
            reads += [Read(token, directory, slab, slot, name * SPACE.slot_bytes // PAGE, *shape, checksum) for token in tokens]
        assert len({read.directory for read in reads}) == 3
        rig.disk.submit(reads)
        assert 0 in [place.flying for place in rig.disk._places], "the queue of their disk takes less than that"
        assert {done.result for done in rig.wait(read.token for read in reads)} == {0}


# ---- namespaces ----


def test_a_namespace_that_is_forgotten_does_not_come_back_and_can_be_saved_anew(two: Rig) -> None:
    two.write_all(range(20))
    two.write_all(range(20), OTHER)
    assert two.forget(SPACE) == [0]
    assert two.held(range(20)) == set()
    two.write_all(range(10))
    two.reopen()
    assert two.held(range(20)) == set(range(10))
    assert two.held(range(20), OTHER) == set(range(20))
    assert two.forget() == [0, 0]
    two.reopen()
    assert two.held(range(20)) == set() == two.held(range(20), OTHER)


def test_numbers_on_disk_are_never_given_again(rig: Rig) -> None:
    seen: set[int] = set()
    for _ in range(5):
        rig.write_all([1])
        (listed,) = json.loads((rig.paths[0] / "directory.json").read_text())["namespaces"]
        assert listed["number"] not in seen
        seen.add(listed["number"])
        assert rig.forget(SPACE) == [0]
        rig.reopen()


def test_writes_of_a_namespace_that_was_retired_meanwhile_are_not_seen(rig: Rig) -> None:
    begun = rig.begin_write(1)
    assert begun is not None
    assert rig.forget(SPACE) == [0]
    (done,) = rig.wait([begun[0]])
    rig.disk.index.settle(begun[1], done.checksum if done.result == 0 else None)
    assert rig.held([1]) == set()
    rig.reopen()
    assert rig.held([1]) == set()
    assert json.loads((rig.paths[0] / "directory.json").read_text())["namespaces"] == []


def test_what_a_directory_out_of_service_owes_is_paid_when_it_is_back(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "RETRY_S", 0.05)
    two.write_all(range(20))
    two.close()
    path = two.paths[0] / "directory.json"
    listed = path.read_bytes()
    path.write_bytes(b"")
    two.open()
    assert two.forget(SPACE) == [errno.ENODEV]  # not durable everywhere
    assert errno.ENODEV in two.forget(SPACE), "nor is it the second time"
    path.write_bytes(listed)
    two.until(lambda: two.directories()[0]["state"] == "serving")
    assert two.held(range(20)) == set()
    two.until(lambda: json.loads(path.read_text())["namespaces"] == [])
    assert set(two.forget(SPACE)) <= {0}
    assert two.forget(SPACE) == [], "nothing is left to be told"
    two.reopen()
    assert two.held(range(20)) == set()


def test_a_forget_that_failed_is_said_and_done_when_the_directory_is_back(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "RETRY_S", 0.05)
    two.write_all(range(20))
    (two.paths[0] / "directory.json.new").mkdir()
    assert two.forget(SPACE) == [errno.EISDIR]
    assert two.held(range(20)) == set()
    assert errno.EISDIR in two.forget(SPACE), "it is still on the list"
    assert errno.EISDIR in two.forget()
    two.disk._fail(two.disk._places[0], "for the test")
    (two.paths[0] / "directory.json.new").rmdir()
    two.until(lambda: two.directories()[0]["state"] == "serving")
    assert two.held(range(20)) == set()
    two.until(lambda: json.loads((two.paths[0] / "directory.json").read_text())["namespaces"] == [])
    two.write_all(range(5))
    two.reopen()
    assert two.held(range(20)) == set(range(5))


def test_the_namespace_that_nobody_asked_for_the_longest_makes_room_for_a_new_one(rig: Rig) -> None:
    rig.write_all(range(5))
    others = [make_space(f"n{n}") for n in range(MAX_NAMESPACES)]
    for space in others:
        rig.disk.number(space)
    assert rig.held(range(5)) == set()
    assert rig.write(1, others[-1]) == 0
    rig.reopen()
    assert rig.held(range(5)) == set()
    assert rig.held([1], others[-1]) == {1}


# ---- I/O of an earlier sidecar ----


def hold(path: Path) -> int:
    """What the kernel's I/O of a killed process keeps: a description of a slab, and its lock."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def leave_ledger(rig: Rig) -> None:
    """Closes it, and leaves what a killed one leaves in the run directory."""
    text = rig.ledger.read_text()
    rig.close()
    assert not ledger.entries(str(rig.ledger), BOOT)
    rig.ledger.write_text(text)


def test_a_directory_under_old_io_is_in_quarantine_and_the_others_serve(two: Rig) -> None:
    two.write_all(range(20))
    leave_ledger(two)
    fd = hold(two.paths[0] / "00003.slab")
    two.launch()
    two.until(lambda: [each["state"] for each in two.directories()] == ["quarantine", "serving"])
    assert "00003.slab" in two.directories()[0]["reason"]
    assert not two.disk.quiet()
    assert len(two.held(range(20))) == 10
    two.write_all(range(20, 30))
    os.close(fd)
    two.until(lambda: two.directories()[0]["state"] == "serving")
    assert two.disk.quiet()
    assert two.held(range(30)) == set(range(30))


def test_old_io_in_a_directory_that_is_no_longer_given_is_waited_for(rig: Rig, tmp_path: Path) -> None:
    leave_ledger(rig)
    before = rig.paths[0]
    fd = hold(before / "00000.slab")
    rig.paths = (tmp_path / "b",)
    rig.open()
    assert not rig.disk.quiet()
    assert rig.disk.status()["not_quiet"] == [str(before)]
    rig.close()
    assert [entry.path for entry in ledger.entries(str(rig.ledger), BOOT)] == [str(before)]  # the next one has to wait for the same
    rig.open()
    assert not rig.disk.quiet()
    os.close(fd)
    rig.until(rig.disk.quiet)
    rig.close()
    assert not ledger.entries(str(rig.ledger), BOOT)


@pytest.mark.parametrize("gone", ["slab", "directory", "another", "another, not ours", "moved"])
def test_what_cannot_be_looked_at_is_not_quiet(rig: Rig, tmp_path: Path, gone: str) -> None:
    leave_ledger(rig)
    path = rig.paths[0]
    if gone == "slab":
        (path / "00004.slab").unlink()
    elif gone == "directory":
        shutil.rmtree(path)
    elif "another" in gone:
        found = json.loads((path / "directory.json").read_text())
        (path / "directory.json").write_text(json.dumps({**found, "id": "0" * 32}))
        rig.paths = (path,) if gone == "another" else (tmp_path / "b",)
    else:
        path.rename(tmp_path / "elsewhere")
        rig.paths = (tmp_path / "b",)
    for _ in range(2):
        rig.open()
        for _ in range(20):
            rig.turn()
        assert not rig.disk.quiet()
        rig.write_all([1])
        rig.close()
        for each in rig.paths[0].glob("*"):
            each.unlink()  # as if there had been nothing


def test_io_of_an_earlier_boot_has_ended(rig: Rig) -> None:
    leave_ledger(rig)
    shutil.rmtree(rig.paths[0])
    rig.ledger.write_text(rig.ledger.read_text().replace(BOOT.hex(), "00" * 16))
    rig.open()
    assert rig.disk.quiet()


def test_a_damaged_ledger_is_not_quiet(rig: Rig) -> None:
    rig.close()
    rig.ledger.write_text('{"boot_id": "' + BOOT.hex() + '"}')
    rig.open()
    for name in (1, 2):
        assert not rig.disk.quiet()
        assert rig.disk.status()["not_quiet"] == [str(rig.ledger)]
        rig.write_all([name])
        rig.reopen()


def test_a_directory_is_in_the_ledger_before_its_first_job(rig: Rig) -> None:
    (listed,) = json.loads(rig.ledger.read_text())["directories"]
    found = json.loads((rig.paths[0] / "directory.json").read_text())
    assert listed == {"path": str(rig.paths[0]), "id": found["id"], "slabs": 8}


def test_all_directories_are_named_in_the_ledger_whatever_became_of_them(two: Rig) -> None:
    both = [str(path) for path in two.paths]
    two.close()
    fd = hold(two.paths[0] / "00000.slab")
    two.launch()
    assert ledger.paths(str(two.ledger)) == both
    two.until(lambda: [each["state"] for each in two.directories()] == ["quarantine", "serving"])
    assert ledger.paths(str(two.ledger)) == both
    assert [entry.path for entry in ledger.entries(str(two.ledger), BOOT)] == both[1:]
    two.close()
    os.close(fd)
    assert ledger.paths(str(two.ledger)) == both  # the pool may be there still
    assert not ledger.entries(str(two.ledger), BOOT)


def test_a_start_that_may_be_refused_takes_no_directory_of_the_one_before_out_of_the_ledger(
    two: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, looked = [], disks.Disk._looked_first

    def seen(disk: disks.Disk, *arguments: Any) -> None:
        named.append(ledger.paths(str(two.ledger)))
        looked(disk, *arguments)

    monkeypatch.setattr(disks.Disk, "_looked_first", seen)
    one, other = two.paths
    leave_ledger(two)
    strange = tmp_path / "strange"
    strange.mkdir(mode=0o700)
    (strange / "file").touch()
    two.paths = one, strange
    with pytest.raises(StartupError, match="strange"):
        two.launch()
    assert named == [[str(one), str(other), str(strange)]] * 2, "it may be killed first"
    assert ledger.paths(str(two.ledger)) == [str(one), str(other)]
    text = two.ledger.read_text()
    two.ledger.unlink()
    with pytest.raises(StartupError, match="strange"):
        two.launch()
    assert not two.ledger.exists(), "it had nothing"
    two.ledger.write_text(text)
    two.paths = (one,)
    two.open()
    assert ledger.paths(str(two.ledger)) == [str(one)]


def test_a_ledger_that_names_no_directories_of_its_own_means_those_that_had_transfers(two: Rig) -> None:
    tree = json.loads(two.ledger.read_text())
    del tree["paths"]
    two.ledger.write_text(json.dumps(tree))
    assert ledger.paths(str(two.ledger)) == [str(path) for path in two.paths]


def test_a_directory_that_cannot_be_in_the_ledger_gets_no_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", start=False)
    rig.ledger = tmp_path / "no" / "tiers"
    rig.open()
    assert rig.directories()[0]["state"] == "failed"
    assert rig.write(1) is None
    rig.__exit__()
