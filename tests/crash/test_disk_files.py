"""What crashes, lost power and strange hands leave of a disk tier's files, and what failing disks do to a running one. Whatever it is, a
block has its bytes or is a miss (Rig.held compares them), and what was not touched is served."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostkv.sidecar.errors import StartupError
from hostkv.sidecar.rundir import is_locked
from hostkv.sidecar.tiers import Space
from hostkv.sidecar.tiers import disk as disks

from tests.fusefs import READ, WRITE, FuseFile, everything
from tests.support import MEMORY, PATIENCE_S
from tests.tiers import MIB, SPACE, Rig, key_of, make_space, payload_of

LARGE = make_space("large", shards=2, shard_bytes=120_000)  # 59 pages
NAMES = range(12)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Whole directories are copied, again and again."""
    with tempfile.TemporaryDirectory(prefix="hostkv-test-", dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def written(base: Path) -> Path:
    """A directory with NAMES of SPACE in slab 0 and of LARGE in slab 1 and the next ones, in their order."""
    with Rig(base / "written") as rig:
        rig.write_all(NAMES)
        rig.write_all(NAMES, LARGE)
        for name in NAMES:
            assert place_of(rig, name, SPACE) == (0, name)
            assert place_of(rig, name, LARGE) == (1, name) or name >= per_slab(rig)
    return base / "written"


def place_of(rig: Rig, name: int, space: Space) -> tuple[int, int]:
    entry, _, slab, slot, _ = rig.disk.index.open(key_of(name, space), rig.disk.number(space))
    rig.disk.index.close(entry, True)
    return slab, slot


def per_slab(rig: Rig) -> int:
    """Blocks of LARGE in a slab."""
    return int(rig.disk.largest_bytes // LARGE.slot_bytes)


@contextmanager
def damaged(written: Path, damage: Callable[[Path], None]) -> Iterator[Rig]:
    """A tier on a copy that `damage` was done to."""
    path = written.parent / "copy"
    shutil.copytree(written, path)
    try:
        damage(path)
        with Rig(path) as rig:
            yield rig
            assert rig.disk.index.check() == []
    finally:
        shutil.rmtree(path)


def expect(rig: Rig, small: set[int], large: set[int]) -> None:
    assert rig.held(range(20)) == small
    assert rig.held(range(20), LARGE) == large
    rig.write_all([name for name in NAMES if name not in small])  # and it takes them again
    rig.write_all([name for name in NAMES if name not in large], LARGE)
    assert rig.held(range(20)) == set(NAMES) == rig.held(range(20), LARGE)


ALL = set(NAMES)


# ---- files cut ----


@pytest.mark.parametrize("size", sorted({at + d for at in range(0, 13 * 64, 64) for d in (-1, 0, 1, 32) if 0 <= at + d <= 12 * 64}))
def test_records_cut_anywhere_lose_the_blocks_behind_the_cut_and_no_other(written: Path, size: int) -> None:
    with damaged(written, lambda path: os.truncate(path / "00000.records", size)) as rig:
        expect(rig, set(range(size // 64)), ALL)


@pytest.mark.parametrize("at", range(13))
@pytest.mark.parametrize("by", [-4096, -1, 0, 1, 4096])
def test_payload_cut_anywhere_loses_the_blocks_behind_the_cut_and_no_other(written: Path, at: int, by: int) -> None:
    size = max(0, at * SPACE.slot_bytes + by)
    with damaged(written, lambda path: os.truncate(path / "00000.slab", size)) as rig:
        held = rig.held(range(20))
        whole = {name for name in NAMES if (name + 1) * SPACE.slot_bytes <= size}
        assert whole <= held <= whole | {at - 1}, "what lies behind a block's shards is nobody's"
        expect(rig, held, ALL)


@pytest.mark.parametrize("name", ["00000.slab", "00000.records", "00001.slab", "00001.records", "00005.slab", "00005.records", "lock"])
def test_a_file_that_is_gone_costs_its_blocks(written: Path, name: str) -> None:
    with damaged(written, lambda path: (path / name).unlink()) as rig:
        first = set(range(per_slab(rig)))
        expect(rig, set() if "00000" in name else ALL, ALL - first if "00001" in name else ALL)
        assert rig.directories()[0]["corrupt"] == 0, "records without their payload are not believed first"


def test_without_its_list_a_directory_is_not_ours(written: Path) -> None:
    with pytest.raises(Exception, match=r"no directory\.json"), damaged(written, lambda path: (path / "directory.json").unlink()):
        pass


@pytest.mark.parametrize("name", ["00000.slab", "00000.records"])
def test_a_file_that_grew_is_used_as_if_it_had_not(written: Path, name: str) -> None:
    with damaged(written, lambda path: os.truncate(path / name, 40 * MIB)) as rig:
        expect(rig, ALL, ALL)
        assert (rig.paths[0] / "00000.slab").stat().st_size == rig.disk.largest_bytes


# ---- bytes changed ----


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("byte", range(64))
def test_one_flipped_bit_in_a_record_is_a_miss(written: Path, byte: int) -> None:
    with damaged(written, lambda path: flip(path / "00000.records", 3 * 64 + byte, byte % 8)) as rig:
        expect(rig, ALL - {3}, ALL)


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 7999, 8000 - 8000 % 64 + 64 + 64, 15_999])
def test_one_flipped_bit_in_a_payload_is_corrupt_and_then_a_miss(written: Path, at: int) -> None:
    with damaged(written, lambda path: flip(path / "00000.slab", 3 * SPACE.slot_bytes + at, at % 8)) as rig:
        assert rig.read(3) == -1
        assert rig.read(3) is None
        expect(rig, ALL - {3}, ALL)


def test_random_damage_anywhere_is_never_presented_as_good(written: Path) -> None:
    chance = random.Random(4)
    for _ in range(40):

        def damage(path: Path) -> None:
            for _ in range(chance.randrange(1, 30)):
                file = path / chance.choice(["00000.slab", "00000.records", "00001.slab", "00001.records"])
                size = min(file.stat().st_size, 12 * LARGE.slot_bytes)
                with file.open("r+b") as opened:
                    opened.seek(chance.randrange(size))
                    opened.write(chance.randbytes(chance.choice([1, 8, 64, 4096])))

        with damaged(written, damage) as rig:
            assert rig.held(range(20)) <= ALL
            assert rig.held(range(20), LARGE) <= ALL


# ---- files in each other's place ----


def swap(path: Path, one: str, other: str) -> None:
    (path / one).rename(path / "x")
    (path / other).rename(path / one)
    (path / "x").rename(path / other)


def test_swapped_records_prove_nothing(written: Path) -> None:
    with damaged(written, lambda path: swap(path, "00000.records", "00001.records")) as rig:
        first = set(range(per_slab(rig)))
        expect(rig, set(), ALL - first)


def test_swapped_slabs_are_corrupt(written: Path) -> None:
    with damaged(written, lambda path: swap(path, "00000.slab", "00001.slab")) as rig:
        first = set(range(per_slab(rig)))
        expect(rig, set(), ALL - first)


def test_slabs_that_changed_places_with_their_records_are_misses(written: Path) -> None:
    def damage(path: Path) -> None:
        swap(path, "00000.records", "00001.records")
        swap(path, "00000.slab", "00001.slab")

    with damaged(written, damage) as rig:
        first = set(range(per_slab(rig)))
        expect(rig, set(), ALL - first)


def test_records_of_another_directory_find_nothing_of_theirs(written: Path) -> None:
    """Same places, same numbers, right seals; other payload."""
    other = written.parent / "other"
    with Rig(other) as rig:
        rig.write_all(range(100, 112))
    try:
        with damaged(written, lambda path: shutil.copy(other / "00000.records", path)) as rig:
            assert rig.held(range(120)) == set()
            expect(rig, set(), ALL)
    finally:
        shutil.rmtree(other)


def test_a_slab_of_another_directory_whose_namespace_is_another_one_here_is_a_miss(written: Path) -> None:
    other = written.parent / "other"
    strange = make_space("strange")  # of the same size
    with Rig(other) as rig:
        rig.write_all(range(100, 112), strange)

    def damage(path: Path) -> None:
        shutil.copy(other / "00000.records", path)
        shutil.copy(other / "00000.slab", path)

    try:
        with damaged(written, damage) as rig:
            assert rig.held(range(120), strange) == set() == rig.held(range(120))
    finally:
        shutil.rmtree(other)


def test_files_of_others_in_our_directory_stay(written: Path) -> None:
    def damage(path: Path) -> None:
        (path / "notes.txt").write_text("mine")
        (path / "0.slab").write_text("mine")
        (path / "000000.slab").write_text("mine")

    with damaged(written, damage) as rig:
        expect(rig, ALL, ALL)
        for name in ("notes.txt", "0.slab", "000000.slab"):
            assert (rig.paths[0] / name).read_text() == "mine"


def test_slabs_of_ours_beyond_the_size_go(written: Path) -> None:
    with damaged(written, lambda path: shutil.copy(path / "00000.slab", path / "00042.slab")) as rig:
        expect(rig, ALL, ALL)
        assert not (rig.paths[0] / "00042.slab").exists()


# ---- lost power ----


def sectors_that_differ(before: Path, after: Path, sector: int) -> list[int]:
    a, b = before.read_bytes(), after.read_bytes()
    b = b.ljust(len(a), b"\0")
    return [at for at in range(0, len(b), sector) if a[at : at + sector].ljust(sector, b"\0") != b[at : at + sector].ljust(sector, b"\0")]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_part_of_the_writes_lost_power_lets_through_is_right_or_a_miss(base: Path, seed: int) -> None:
    """Payload and records are in no order, and a sector is written or not. The list is replaced as a whole, before the first record that
    relies on it, so it is old or new, and new where any record of the new namespace may be there: both are tried with everything."""
    chance = random.Random(seed)
    before, after, mixed = base / "before", base / "after", base / "mixed"
    with Rig(before) as rig:
        rig.write_all(range(80), LARGE)  # more than all slots: they go round
    shutil.copytree(before, after)
    late = make_space("late", shards=1, shard_bytes=60_000)
    with Rig(after) as rig:
        rig.write_all(range(80, 110), LARGE)
        rig.write_all(range(40))
        rig.write_all(range(20), late)
        most = len(rig.held(range(110), LARGE)), len(rig.held(range(40))), len(rig.held(range(20), late))
    assert min(most) > 0
    names = [each.name for each in after.glob("0*")]
    differing = {name: sectors_that_differ(before / name, after / name, 64 if name.endswith("records") else 512) for name in names}
    seen: set[tuple[int, int, int]] = set()
    try:
        for trial in range(12):
            shutil.copytree(before, mixed)
            if trial % 2:
                shutil.copy(after / "directory.json", mixed)
            let_through = {"records": chance.choice([0, 0.5, 0.9, 1]), "slab": chance.choice([0, 0.5, 0.999, 1])}
            for name in names:
                size = 64 if name.endswith("records") else 512
                with (after / name).open("rb") as source, (mixed / name).open("r+b") as target:
                    for at in differing[name]:
                        if chance.random() < let_through[name.split(".")[1]]:
                            source.seek(at)
                            target.seek(at)
                            target.write(source.read(size))
            with Rig(mixed) as rig:
                seen.add((len(rig.held(range(120), LARGE)), len(rig.held(range(60))), len(rig.held(range(40), late))))
                assert rig.held(range(110, 120), LARGE) == set()
                rig.write_all([1000, 1001], LARGE)
                rig.reopen()
                assert rig.held([1000, 1001], LARGE) == {1000, 1001}
            shutil.rmtree(mixed)
    finally:
        for path in (before, after, mixed):
            shutil.rmtree(path, ignore_errors=True)
    assert len(seen) > 3, "the trials were not all the same"


# ---- killed ----

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.tiers import SPACE, Rig, make_space
rig = Rig(*map(Path, sys.argv[3:]), size_bytes=32 << 20)
print("ready", flush=True)
for name in range(int(sys.argv[2]), 10**9):
    if rig.write(name) == 0:
        print(name, flush=True)
    if name % 50 == 0 and rig.forget(make_space(f"n{name - 50}")) in ([], [0]) and rig.write(name, make_space(f"n{name}")) == 0:
        print(-name, flush=True)
"""


def test_killed_at_any_instant_all_that_was_acknowledged_is_there(tmp_path: Path) -> None:
    chance = random.Random(7)
    paths = (tmp_path / "a", tmp_path / "b")
    for start in range(1, 8000, 1000):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(ROOT), str(start), *map(str, paths)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(chance.randrange(1, 150))]
        assert lines[0] == "ready\n"
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        process.stdout.close()
        told = [int(line) for line in lines[1:] if line.endswith("\n")]
        with Rig(*paths, size_bytes=32 * MIB) as rig:
            rig.until(rig.disk.quiet)
            assert {name for name in told if name > 0} <= rig.held(range(start, start + 1000))
            written = [-name for name in told if name < 0]
            held = [name for name in written if rig.held([name], make_space(f"n{name}"))]
            begun = written and written[-1] + 50 in told  # to forget the last one, and killed before that could be said
            assert held == written[-1:] or (begun and not held), "forgotten ones are"


def test_killed_while_it_makes_its_files_it_starts_anew(tmp_path: Path) -> None:
    for wanted in (0, 1, 3, 8):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(ROOT), "1", str(tmp_path / "a")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and len(list(tmp_path.glob("a/*.slab"))) < wanted:
            pass
        process.kill()
        process.wait(PATIENCE_S)
        with Rig(tmp_path / "a", size_bytes=32 * MIB) as rig:
            assert rig.directories()[0]["state"] == "serving"
            assert rig.directories()[0]["slabs"] == 8
            rig.write_all([1])
        shutil.rmtree(tmp_path / "a")


READER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.tiers import Rig, make_space
large = make_space("large", shards=2, shard_bytes=120_000)
rig = Rig(Path(sys.argv[3]), engine=sys.argv[2])
Path(sys.argv[4]).write_text(str(os.getpid()))
def asked_of_devices():
    return int(Path("/proc/self/io").read_text().split("\\nread_bytes: ")[1].split()[0])
before = asked_of_devices()
assert all(rig.begin_read(name, large, 60 * name) for name in range(16))
while asked_of_devices() < before + (1 << 18):
    pass
print("submitted", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_killed_with_reads_in_flight_nothing_of_it_is_used_before_they_have_ended(tmp_path: Path, engine: str) -> None:
    """On a disk that is throttled, so that they outlive the process, or keep it from ending."""
    with Rig(tmp_path / "a", engine="auto") as rig:
        if engine == "io_uring" and rig.disk.status()["engine"] != engine:
            pytest.skip(rig.disk.status()["engine_why"])
        rig.write_all(range(16), LARGE)
        rig.close()
        device = os.stat(tmp_path).st_dev
        group = Path("/sys/fs/cgroup/blkio") / f"hostkv-test-{os.getpid()}"
        limit = group / "blkio.throttle.read_bps_device"
        try:
            group.mkdir()
            limit.write_text(f"{os.major(device)}:{os.minor(device)} {16 << 10}")
        except OSError as error:
            pytest.skip(f"no throttling of block devices here: {error}")
        command = [sys.executable, "-c", READER, str(ROOT), engine, str(tmp_path / "a"), str(group / "cgroup.procs")]
        try:
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "submitted\n"
                process.kill()
                slabs = sorted((tmp_path / "a").glob("*.slab"))
                assert any(map(locked, slabs))
                held_up = False  # by the process that does not end, or by its I/O
                while not held_up:  # of four minutes
                    if rig.disk is None and not launched(rig, process.pid):
                        break
                    assert not rig.disk.quiet()
                    held_up = rig.directories()[0]["state"] == "quarantine"
                    rig.turn()
                limit.write_text(f"{os.major(device)}:{os.minor(device)} 0")  # none
                while rig.disk is None:
                    launched(rig, process.pid)
                rig.until(lambda: rig.directories()[0]["state"] == "serving")
                assert rig.held(range(16), LARGE) == set(range(16))
        finally:
            group.rmdir()


def launched(rig: Rig, pid: int) -> bool:
    """False where that process still has the directories."""
    try:
        rig.launch()
    except StartupError as error:
        if f"pid {pid}" not in str(error):
            raise
        return False
    return True


def locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


# ---- disks that fail or hang while it runs ----


class Image:
    """An ext4 file system of its own, in a file."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.path = folder / "mount"
        self.path.mkdir()
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(size_mib * MIB)
        self._run("mkfs.ext4", "-q", "-F", str(image))
        self._run("mount", "-o", "loop", str(image), str(self.path))

    @staticmethod
    def _run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command[0]} does not work here: {done.stderr}")

    def freeze(self) -> None:
        """From now on a write waits."""
        self._run("fsfreeze", "-f", str(self.path))

    def thaw(self) -> None:
        self._run("fsfreeze", "-u", str(self.path))

    def abort(self) -> None:
        """As after an error of the disk: read-only."""
        self._run("mount", "-o", "remount,abort", str(self.path))

    def close(self) -> None:
        subprocess.run(["fsfreeze", "-u", str(self.path)], capture_output=True, check=False)
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def memory() -> Iterator[Path]:
    """For what answers at once as long as it is not told to do otherwise."""
    with tempfile.TemporaryDirectory(prefix="hostkv-test-", dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture
def image(memory: Path) -> Iterator[Image]:
    image = Image(memory, 40)
    yield image
    image.close()


@pytest.fixture
def two(memory: Path, image: Image) -> Iterator[Rig]:
    """The first directory on the image."""
    with Rig(image.path / "a", memory / "b", size_bytes=32 * MIB) as rig:
        yield rig


def first(rig: Rig) -> dict[str, object]:
    return rig.directories()[0]


def write_until_failed(rig: Rig) -> list[int]:
    """Results of writes until the first directory is out of service."""
    results: list[int] = []
    while first(rig)["state"] != "failed":
        assert len(results) < 200, rig.disk.status()
        result = rig.write(1000 + len(results))
        assert result is not None
        results.append(result)
    return results


def test_a_read_only_file_system_is_out_of_service_at_once_and_the_other_serves(two: Rig, image: Image) -> None:
    two.write_all(range(20))
    kept = {name for name in range(20) if two.path_of(name) == two.paths[1]}
    image.abort()
    results = write_until_failed(two)
    assert results == [0] * (len(results) - 1) + [errno.EROFS], "the first write there fails, those to the other one before it do not"
    assert "Read-only" in str(first(two)["reason"])
    assert two.held(range(20)) == kept
    assert two.disk.takes()
    two.write_all(range(2000, 2020))
    assert two.disk.index.check() == []


def test_errors_in_a_row_take_a_directory_out_of_service_and_it_comes_back(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "RETRY_S", 3600.0)
    two.write_all(range(40))
    there = [name for name in range(40) if two.path_of(name) == two.paths[0]]
    for slab in two.paths[0].glob("*.slab"):
        os.truncate(slab, 0)
    results = [two.read(name) for name in there]
    assert results[: disks.ERRORS_IN_ROW] == [errno.EIO] * disks.ERRORS_IN_ROW
    assert results[disks.ERRORS_IN_ROW] is None, "it is out of service"
    assert len(two.held(range(40))) == 40 - len(there)
    two.disk._places[0].retry_s = 0.0  # now
    two.until(lambda: first(two)["state"] == "serving")
    assert (first(two)["failures"], first(two)["errors"]) == (1, disks.ERRORS_IN_ROW)
    assert two.held(there) == set(), "its payload is gone, whatever its records say"
    two.write_all(there)
    assert two.held(range(40)) == set(range(40))


def test_a_limit_on_the_size_of_files_is_an_error_like_any_other(two: Rig) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    two.write_all(range(4))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert [two.write(name) for name in range(100, 104)] == [errno.EFBIG] * 4
        assert two.held(range(200)) == set(range(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    two.write_all(range(100, 104))


def test_slabs_that_a_limit_does_not_allow_are_not_left_half_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", start=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        rig.open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (first(rig)["state"], first(rig)["slabs"]) == ("failed", 0)
    assert "no room" in str(first(rig)["reason"])
    assert list((tmp_path / "a").glob("*.slab")) == []
    rig.__exit__()


def test_a_disk_that_hangs_keeps_its_jobs_and_nobody_else_waits(two: Rig, image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "HUNG_S", 2.0)
    monkeypatch.setattr(disks, "RETRY_S", 0.1)
    two.write_all(range(20))
    stuck_before = {name for name in range(20) if two.path_of(name) == two.paths[0]}
    image.freeze()
    begun = [two.begin_write(name, page=16 * (name - 100)) for name in range(100, 140)]
    two.until(lambda: first(two)["in_flight"] == 20 and two.directories()[1]["in_flight"] == 0)
    assert two.held(set(range(20)) - stuck_before) == set(range(20)) - stuck_before
    two.until(lambda: first(two)["state"] == "failed")
    assert "no answer" in str(first(two)["reason"])
    assert two.disk.takes()
    assert two.disk.room() > 0
    two.write_all(range(200, 220))
    assert first(two)["in_flight"] == 20
    image.thaw()
    done = two.wait(token for token, _ in filter(None, begun))
    assert {each.result for each in done} == {0}
    for (_, entry), each in zip(filter(None, begun), done, strict=True):
        two.disk.index.settle(entry, each.checksum)
    two.until(lambda: first(two)["state"] == "serving")
    assert stuck_before <= two.held(range(300))


def test_a_directory_whose_queue_is_full_gets_no_more_and_the_other_takes_all(
    two: Rig, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "HUNG_S", 3600.0)
    two.write_all(range(20))
    image.freeze()
    begun = []
    for name in range(100, 100 + 3 * disks.QUEUE):
        two.until(two.disk.room)
        begun.append(two.begin_write(name))
    assert None not in begun
    two.until(lambda: first(two)["in_flight"] == disks.QUEUE and two.directories()[1]["in_flight"] == 0)
    assert {done.result for done in two.done.values()} == {0}
    assert len(two.done) == 2 * disks.QUEUE
    image.thaw()
    assert {done.result for done in two.wait(token for token, _ in filter(None, begun))} == {0}


def test_an_end_does_not_wait_for_a_disk_that_hangs_and_the_next_start_knows(
    two: Rig, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "CLOSE_S", 0.5)
    two.write_all(range(20))
    image.freeze()
    begun = [two.begin_write(name, page=16 * (name - 100)) for name in range(100, 110)]
    two.until(lambda: two.directories()[1]["in_flight"] == 0)
    assert len(begun) == 10
    two.close()
    assert two.ledger.exists(), "the next one has to wait for what is in flight"
    image.thaw()
    for thread in threading.enumerate():
        if thread.name.startswith("disk "):
            thread.join(PATIENCE_S)
    two.open()
    assert two.disk.quiet()
    assert two.held(range(20)) == set(range(20))


def test_a_disk_that_hangs_at_the_start_is_waited_for_no_longer_than_others_need(
    two: Rig, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "START_S", 1.0)
    two.write_all(range(20))
    two.close()
    image.freeze()
    two.launch()
    two.until(lambda: two.directories()[1]["state"] == "serving")
    assert first(two)["state"] == "opening"
    assert "no answer" in str(first(two)["reason"])
    assert len(two.held(range(20))) == 10
    two.write_all(range(100, 120))
    image.thaw()
    two.until(lambda: first(two)["state"] == "serving")
    assert two.held(range(20)) == set(range(20))


class FuseSlab(FuseFile):
    """Says that it is allocated."""

    def attributes(self, node: int) -> bytes:
        found = bytearray(super().attributes(node))
        struct.pack_into("<Q", found, 16, len(self.content) // 512)
        return bytes(found)


@pytest.fixture
def ruled(memory: Path) -> Iterator[tuple[Rig, FuseFile]]:
    """Two directories; of the first one, slab 0 lies on a disk that does what a test says."""
    with Rig(memory / "a", memory / "b", size_bytes=32 * MIB) as rig:
        slab = memory / "a" / "00000.slab"
        rig.close()
        fuse = FuseSlab(memory / "fuse", slab.stat().st_size)
        try:
            subprocess.run(["mount", "--bind", str(fuse.path), str(slab)], check=True)
            rig.open()
            assert first(rig)["state"] == "serving", first(rig)
            rig.write_all(range(40))
            yield rig, fuse
            fuse.rule = everything
            rig.close()
        finally:
            subprocess.run(["umount", "-l", str(slab)], check=False)
            fuse.close()


def test_reads_that_hang_hold_up_no_other_and_are_right_when_they_come(
    ruled: tuple[Rig, FuseFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, fuse = ruled
    monkeypatch.setattr(disks, "HUNG_S", 2.0)
    monkeypatch.setattr(disks, "RETRY_S", 0.1)
    there = [name for name in range(40) if rig.path_of(name) == rig.paths[0]]
    answers = threading.Event()

    def rule(kind: int, offset: int, size: int) -> int:
        answers.wait(PATIENCE_S)
        return size

    fuse.rule = rule
    begun = [rig.begin_read(name, page=8 * n) for n, name in enumerate(there[:8])]
    assert rig.held(set(range(40)) - set(there)) == set(range(40)) - set(there)
    rig.until(lambda: first(rig)["state"] == "failed")
    assert rig.held(there) == set(), "misses, and no longer waits"
    assert (first(rig)["in_flight"], rig.disk.takes()) == (8, True)
    answers.set()
    for n, (token, entry) in enumerate(filter(None, begun)):
        (done,) = rig.wait([token])
        rig.disk.index.close(entry, True)
        at = 8 * n * 4096
        assert (done.result, rig.pool[at : at + 8000]) == (0, payload_of(there[n])[:8000])
    rig.until(lambda: first(rig)["state"] == "serving")
    assert rig.held(range(40)) == set(range(40))


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_errors_of_the_disk_are_misses_and_drops_until_it_is_given_up(ruled: tuple[Rig, FuseFile], kind: int) -> None:
    rig, fuse = ruled
    there = [name for name in range(40) if rig.path_of(name) == rig.paths[0]]
    fuse.rule = lambda asked, offset, size: -errno.EIO if asked == kind else size
    if kind == READ:
        results = [rig.read(name) for name in there]
        assert results[: disks.ERRORS_IN_ROW] == [errno.EIO] * disks.ERRORS_IN_ROW
    else:
        results = list(write_until_failed(rig))
        assert results.count(errno.EIO) == disks.ERRORS_IN_ROW
        assert set(results) <= {0, errno.EIO}
    assert first(rig)["state"] == "failed"
    assert str(first(rig)["reason"]).startswith("Input/output error")
    assert rig.held(set(range(40)) - set(there)) == set(range(40)) - set(there)


def test_one_bad_place_on_a_disk_costs_one_block(ruled: tuple[Rig, FuseFile]) -> None:
    rig, fuse = ruled
    bad = 3 * SPACE.slot_bytes
    fuse.rule = lambda asked, offset, size: -errno.EIO if asked == READ and offset <= bad < offset + size else size
    assert len(rig.held(range(40))) == 39
    assert first(rig)["state"] == "serving"
    assert first(rig)["errors"] == 1


def test_a_directory_deleted_under_it_costs_its_blocks_at_the_next_start(two: Rig) -> None:
    two.write_all(range(20))
    kept = {name for name in range(20) if two.path_of(name) == two.paths[1]}
    shutil.rmtree(two.paths[0])
    two.write_all(range(20, 40))
    assert two.held(range(40)) == set(range(40)), "files without a name are files"
    two.reopen()
    assert kept <= two.held(range(40))
    two.write_all(range(100, 140))
