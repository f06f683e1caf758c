"""`hostkv fsck` and `hostkv clear` on what a disk tier left, whole, damaged, held, strange; without a pool, and with one."""

from __future__ import annotations

import fcntl
import io
import json
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hostkv.cext import xxh3_64
from hostkv.connector import Client, Layout
from hostkv.schemas.layout import PAGE, RECORD
from hostkv.sidecar import cli, rundir
from hostkv.sidecar import fsck as module
from hostkv.sidecar.ask import NoAnswer

from tests.support import LIFE_S, PATIENCE_S, PATIENT_PROGRAM, Sidecar, hostkv, until
from tests.tiers import SPACE, Rig, key_of, make_space

LARGE = make_space("large", shards=2, shard_bytes=120_000)  # 59 pages
NAMES = range(7)  # of LARGE so many fit a slab
ALL = set(NAMES)
SHARD_BYTES = 1 << 16
LAYOUT = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=SHARD_BYTES)
IDS = [b"%d" % i for i in range(8)]
pytestmark = pytest.mark.usefixtures("patient_clients")


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A directory with NAMES of SPACE in slab 0 and of LARGE in slab 1, in their order."""
    with Rig(tmp_path / "disk") as rig:
        rig.write_all(NAMES)
        rig.write_all(NAMES, LARGE)
    return tmp_path / "disk"


def command(name: str, *paths: Path, flags: tuple[str, ...] = ()) -> tuple[int, str]:
    """Of a tier whose pool and run directory are gone, as they are after a reboot."""
    file = paths[0].parent / "hostkv.yaml"
    pool = {"name": f"hostkv-test-{os.getpid()}-{secrets.token_hex(4)}"}
    file.write_text(json.dumps({"pool": pool, "tiers": [{"type": "disk", "path": [str(path) for path in paths], "size": "64MiB"}]}))
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = cli.main([name, "--endpoint", f"ipc://{paths[0].parent}/absent/control.sock", "--config", str(file), *flags])
    return code, said.getvalue()


def fsck(*paths: Path, flags: tuple[str, ...] = ()) -> tuple[int, str]:
    return command("fsck", *paths, flags=flags)


def contents(path: Path) -> dict[str, bytes]:
    """Of all files but the lock, which says who looked."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"}


def held(path: Path) -> tuple[set[int], set[int]]:
    """What a start serves, byte for byte."""
    with Rig(path) as rig:
        return rig.held(range(20)), rig.held(range(20), LARGE)


def is_at_rest(path: Path) -> bool:
    """Whether nobody has it, also nobody who was killed and is closing its files."""
    for name in (path / "lock", *path.glob("*.slab")):
        with name.open("rb") as file:
            if rundir.is_locked(file.fileno()):
                return False
    return True


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, at: int) -> None:
    write(path, at, bytes([path.read_bytes()[at] ^ 1]))


def seal(path: Path, slab: int, slot: int, **changed: int) -> None:
    """Gives a record other fields, under a right seal."""
    names = ("key", "checksum", "sequence", "number", "slot_pages")
    raw = (path / f"{slab:05d}.records").read_bytes()[slot * RECORD.size : (slot + 1) * RECORD.size]
    fields = dict(zip(names, RECORD.unpack(raw), strict=False)) | changed
    body = RECORD.pack(*fields.values(), 0)[:-8]
    write(path / f"{slab:05d}.records", slot * RECORD.size, body + struct.pack("<Q", xxh3_64(body, slab << 32 | slot)))


# ---- what is sound ----


def test_a_sound_tier_is_sound_without_a_pool_and_no_byte_of_it_changes(tier: Path) -> None:
    before = contents(tier)
    code, text = fsck(tier)
    assert code == 0, text
    assert "14 blocks" in text
    assert "14 blocks compared with their checksums" in text
    assert "0 differ" in text
    assert "fault" not in text
    assert "unused" not in text
    assert text.endswith("result   sound\n")
    assert contents(tier) == before
    assert held(tier) == (ALL, ALL)


def test_quick_reads_no_payload(tier: Path) -> None:
    flip(tier / "00000.slab", 100)
    code, text = fsck(tier, flags=("--quick",))
    assert (code, "compared" in text) == (0, False)
    assert fsck(tier)[0] == 1


def test_what_is_evicted_or_of_another_slot_size_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with Rig(path) as rig:
        rig.write_all(range(100, 400))
        rig.write_all(range(100), LARGE)  # more than there is room for: they go round, and take slabs back
        served = len(rig.held(range(100), LARGE)) + len(rig.held(range(100, 400)))
    code, text = fsck(path)
    assert code == 0, text
    assert f"records  {served} blocks" in text
    assert "of slots before their slab got larger or smaller ones" in text


def test_of_a_block_that_lies_there_twice_one_counts(tier: Path) -> None:
    with Rig(tier) as rig:
        number = rig.disk.number(SPACE)
        for name in (0, 1):
            assert rig.disk.index.remove(key_of(name), number)
        rig.write_all([0])  # where 1 was
    code, text = fsck(tier)
    assert code == 0, text
    assert "records  13 blocks" in text
    assert "unused   1 more of the same blocks:" in text
    assert "14 blocks compared" in text
    assert held(tier) == (ALL - {1}, ALL)


def test_a_tier_that_is_not_there_yet_is_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, text = fsck(tmp_path / "absent", tmp_path / "empty")
    assert code == 0, text
    assert text.count("nothing of a disk tier is there") == 2
    assert not (tmp_path / "absent").exists()
    assert list((tmp_path / "empty").iterdir()) == []


# ---- damage ----


@pytest.mark.parametrize("at", [3 * SPACE.slot_bytes, 3 * SPACE.slot_bytes + 7999, 3 * SPACE.slot_bytes + 8000])
def test_a_byte_that_changed_in_the_payload_is_found_and_fix_makes_it_a_miss(tier: Path, at: int) -> None:
    flip(tier / "00000.slab", at)
    before = contents(tier)
    code, text = fsck(tier)
    assert code == 1, text
    assert "1 differ" in text
    assert f"block {key_of(3).hex()} in slot 3 of 00000.slab: its bytes are not those that were saved" in text
    assert contents(tier) == before
    code, text = fsck(tier, flags=("--fix",))
    assert (code, "repaired" in text) == (0, True), text
    after = contents(tier)
    assert {name for name in after if after[name] != before[name]} == {"00000.records"}
    assert after["00000.records"] == before["00000.records"][: 3 * 64] + bytes(64) + before["00000.records"][4 * 64 :]
    code, text = fsck(tier)
    assert (code, "sound" in text) == (0, True), text
    assert held(tier) == (ALL - {3}, ALL)


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("a flipped bit", lambda path: flip(path / "00000.records", 3 * 64 + 40), "its seal is wrong"),
    ("an unknown namespace", lambda path: seal(path, 0, 3, number=77), "its namespace 77 never was"),
    ("namespace zero", lambda path: seal(path, 0, 3, number=0), "its namespace 0 never was"),
    ("another slot size", lambda path: seal(path, 0, 3, slot_pages=1), "its slot has 4096 bytes, those of its namespace"),
    ("no slot size", lambda path: seal(path, 0, 3, slot_pages=0), "its seal is wrong"),
    (
        "a hundred times as large",
        lambda path: seal(path, 0, 3, slot_pages=SPACE.slot_bytes // PAGE * 100),
        "its slot has 1638400 bytes, those of its namespace",
    ),
    ("the newest, of another slot size", lambda path: seal(path, 0, 3, slot_pages=1, sequence=10**9), "its slot has 4096 bytes"),
]


@pytest.mark.parametrize("damage, words", [each[1:] for each in DAMAGE], ids=[each[0] for each in DAMAGE])
def test_a_record_that_no_sidecar_writes_is_a_fault_and_fix_erases_it_alone(tier: Path, damage: Callable[[Path], None], words: str) -> None:
    sound = contents(tier)["00000.records"]
    damage(tier)
    code, text = fsck(tier)
    assert code == 1, text
    assert f"record 3 of 00000.records: {words}" in text
    code, text = fsck(tier, flags=("--fix",))
    assert (code, "repair   1 records are erased" in text) == (0, True), text
    assert contents(tier)["00000.records"] == sound[: 3 * 64] + bytes(64) + sound[4 * 64 :]
    assert fsck(tier)[0] == 0
    assert held(tier) == (ALL - {3}, ALL)


def test_records_of_a_slot_size_that_count_again_are_compared_before_fix_is_done(tier: Path) -> None:
    """The one record that said that slab 0 has larger slots is bad: those before it count again, and one of them is bad, too."""
    seal(
        tier,
        0,
        6,
        sequence=10**9,
        slot_pages=LARGE.slot_bytes // PAGE,
        number=json.loads(contents(tier)["directory.json"])["next_number"] - 1,
    )
    flip(tier / "00000.slab", 5 * SPACE.slot_bytes)
    code, text = fsck(tier)
    assert (code, "8 blocks" in text) == (1, True), text
    code, text = fsck(tier, flags=("--fix",))
    assert (code, "repair   2 records are erased" in text) == (0, True), text
    assert fsck(tier)[0] == 0
    assert held(tier) == (ALL - {5, 6}, ALL)


@pytest.mark.parametrize("size", [0, 5 * SPACE.slot_bytes - 1])
def test_a_slab_that_was_cut_loses_the_blocks_behind_the_cut(tier: Path, size: int) -> None:
    os.truncate(tier / "00000.slab", size)
    code, text = fsck(tier, flags=("--quick",))
    assert code == 1, text
    assert f"record 6 of 00000.records: its slab has {size} bytes" in text
    assert fsck(tier, flags=("--fix",))[0] == 0
    assert fsck(tier)[0] == 0
    assert held(tier) == (set(range(size // SPACE.slot_bytes)), ALL)


def test_a_slab_that_is_gone_is_told(tier: Path) -> None:
    (tier / "00000.slab").unlink()
    code, text = fsck(tier)
    assert code == 1, text
    assert "record 0 of 00000.records: its slab has 0 bytes" in text
    assert fsck(tier, flags=("--fix",))[0] == 0
    assert not (tier / "00000.slab").exists()
    assert held(tier) == (set(), ALL)


def test_fix_erases_what_was_cleared(tier: Path) -> None:
    with Rig(tier) as rig:
        assert rig.forget(LARGE) == [0]
    code, text = fsck(tier)
    assert code == 0, text
    assert "7 of namespaces that were cleared" in text
    code, text = fsck(tier, flags=("--fix",))
    assert (code, "repair   7 records are erased" in text) == (0, True), text
    assert "unused" not in fsck(tier)[1]
    assert held(tier) == (ALL, set())


def test_many_faults_are_counted_and_the_first_shown(tier: Path) -> None:
    for slot in NAMES:
        flip(tier / "00000.slab", slot * SPACE.slot_bytes)
        flip(tier / "00001.slab", slot * LARGE.slot_bytes)
    code, text = fsck(tier)
    assert (code, text.count("fault ")) == (1, 11), text
    assert "and 4 more" in text


KILLED_AT = """
import mmap, os, signal, sys
from hostkv.sidecar import cli, fsck
from hostkv.sidecar.tiers import directory
left = memoryview(mmap.mmap(-1, 8)).cast("q")  # also the child's that looks at a directory
left[0] = int(sys.argv.pop(1))
def trace(frame, event, argument):
    if frame.f_code.co_filename not in (fsck.__file__, directory.__file__):
        return None
    left[0] -= event == "line"
    if left[0] <= 0:
        os.killpg(0, signal.SIGKILL)
    return trace
sys.settrace(trace)
code = cli.main(sys.argv[1:])
sys.settrace(None)
print("lines left", left[0], file=sys.stderr)
sys.exit(code)
"""


def test_fix_killed_at_any_line_is_done_by_running_it_again(tier: Path) -> None:
    flip(tier / "00000.slab", 2 * SPACE.slot_bytes)
    flip(tier / "00001.records", 4 * 64)
    saved = shutil.copytree(tier, tier.parent / "saved")
    assert fsck(tier)[0] == 1  # and leaves the configuration there

    def run(lines: int) -> subprocess.CompletedProcess[str]:
        flags = ("--endpoint", f"ipc://{tier.parent}/absent/control.sock", "--config", str(tier.parent / "hostkv.yaml"))
        program = [sys.executable, "-c", KILLED_AT, str(lines), "fsck", "--fix", *flags]
        return subprocess.run(program, capture_output=True, text=True, timeout=LIFE_S, check=False, start_new_session=True)

    whole = run(10**9)
    assert whole.returncode == 0, whole.stderr
    lines = 10**9 - int(whole.stderr.split("lines left")[1])
    for at in range(lines // 2, lines, max(1, lines // 12)):
        for file in tier.glob("*.records"):
            shutil.copy(saved / file.name, file)
        assert run(at).returncode == -signal.SIGKILL
        until(lambda: is_at_rest(tier))
        code, text = fsck(tier, flags=("--fix",))
        assert code == 0, text
    assert held(tier) == (ALL - {2}, ALL - {4})


# ---- who is in the way ----


def test_transfers_of_a_killed_sidecar_are_waited_for(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "FREED_WAIT_S", 0.5)
    fd = os.open(tier / "00001.slab", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    code, text = fsck(tier)
    assert (code, f"still under way on {tier}/00001.slab" in text) == (2, True), text
    os.close(fd)
    assert fsck(tier)[0] == 0


@pytest.mark.parametrize("name", ["lock", "00001.slab"])
def test_a_process_that_dies_closes_its_files_one_after_the_other_and_is_waited_for(
    tier: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rundir, "FREED_WAIT_S", PATIENCE_S)
    with subprocess.Popen(["true"]) as gone:
        pass
    (tier / "lock").write_text(f"{gone.pid}\n")
    with (tier / name).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        keeper = subprocess.Popen(["sleep", "1"], pass_fds=(file.fileno(),))
    code, text = fsck(tier)
    keeper.wait()
    assert code == 0, text


def newer(path: Path) -> None:
    tree = json.loads((path / "directory.json").read_text())
    (path / "directory.json").write_text(json.dumps(tree | {"format": 2}))


def without_list(path: Path) -> None:
    (path / "directory.json").unlink()


def damaged_list(path: Path) -> None:
    os.truncate(path / "directory.json", 100)


def link_for_a_slab(path: Path) -> None:
    (path / "00001.slab").rename(path.parent / "elsewhere")
    (path / "00001.slab").symlink_to(path.parent / "elsewhere")


def fifo_for_records(path: Path) -> None:
    (path / "00001.records").unlink()
    os.mkfifo(path / "00001.records")


def directory_for_a_slab(path: Path) -> None:
    (path / "00001.slab").unlink()
    (path / "00001.slab").mkdir()


def others_may_write(path: Path) -> None:
    path.chmod(0o777)


def somebody_elses(path: Path) -> None:
    os.chown(path, 12345, -1)


STRANGE = [
    (newer, "newer version of hostkv"),
    (without_list, "it has no directory.json but holds 00000.records"),
    (damaged_list, "directory.json: is damaged"),
    (link_for_a_slab, "00001.slab: is not a regular file"),
    (fifo_for_records, "00001.records: is not a regular file"),
    (directory_for_a_slab, "00001.slab: is not a regular file"),
    (others_may_write, "others may write to it; chmod 0700"),
    (somebody_elses, "belongs to uid 12345"),
]


@pytest.mark.parametrize("change, words", STRANGE, ids=[change.__name__ for change, _ in STRANGE])
def test_what_is_strange_is_refused_by_name_and_nothing_is_lost(
    tier: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    if change is somebody_elses and os.geteuid() != 0:
        pytest.skip("only root may give files away")
    with Rig(tmp_path / "other") as rig:
        rig.write_all(NAMES)
    change(tier)
    before = {file.name: file.lstat().st_mtime_ns for file in tier.iterdir() if file.name != "lock"}
    code, text = fsck(tier, tmp_path / "other", flags=("--fix",))
    assert code == 2, text
    assert words in text
    assert "7 blocks compared with their checksums" in text, "the other one is looked at all the same"
    assert {file.name: file.lstat().st_mtime_ns for file in tier.iterdir() if file.name != "lock"} == before


def test_a_link_to_a_directory_is_not_followed(tier: Path) -> None:
    (tier.parent / "link").symlink_to(tier)
    code, text = fsck(tier.parent / "link")
    assert (code, "links are not followed" in text) == (2, True), text


# ---- clear ----


def test_clear_without_a_sidecar_empties_the_tier_for_good(tier: Path) -> None:
    code, text = command("clear", tier)
    assert code == 0, text
    assert f"disk {tier} is empty, 2 namespaces are forgotten" in text
    assert held(tier) == (set(), set())
    with Rig(tier) as rig:
        rig.write_all(NAMES)
    assert held(tier) == (ALL, set())


# ---- with the sidecar that was there ----


ENGINE = f"""
import sys
from hostkv.connector import Client, Layout
{PATIENT_PROGRAM}
client = Client(sys.argv[1])
store = client.open({LAYOUT!r})
print(store.wait(store.dump({IDS!r}, 0, [[(i * {SHARD_BYTES})[:{SHARD_BYTES}]] for i in {IDS!r}])))
"""


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    """With IDS on its disk, by an engine that has ended."""
    with Sidecar(tmp_path / "sidecar", config=f"tiers: [{{type: disk, path: {tmp_path}/disk, size: 64MiB}}]") as sidecar:
        subprocess.run([sys.executable, "-c", ENGINE, sidecar.endpoint], timeout=LIFE_S, check=True)
        sidecar.until(lambda: sidecar.status()["tiers"][0]["spilled"] == len(IDS))
        yield sidecar


def found(sidecar: Sidecar) -> list[bool]:
    with Client(sidecar.endpoint) as client:
        sidecar.until(client.serving)
        return client.open(LAYOUT).lookup(IDS)


@pytest.mark.parametrize("name", ["fsck", "clear"])
def test_a_directory_that_a_sidecar_has_is_left_alone_and_its_holder_named(sidecar: Sidecar, tmp_path: Path, name: str) -> None:
    code, text = command(name, tmp_path / "disk")
    assert code == 2
    assert f"{tmp_path}/disk is held by the sidecar with pid {sidecar.pid} on {sidecar.endpoint}" in text
    assert found(sidecar) == [True] * 8


def test_the_tier_that_a_killed_sidecar_had_is_meant_where_none_is_named(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.kill()
    done = hostkv("fsck", "--endpoint", sidecar.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pool     {sidecar.pool_path}" in done.stdout
    assert f"disk     {tmp_path}/disk" in done.stdout
    assert done.stdout.count("result   sound") == 2
    flip(tmp_path / "disk" / "00000.slab", 5)
    assert hostkv("fsck", "--endpoint", sidecar.endpoint).returncode == 1
    assert hostkv("fsck", "--fix", "--endpoint", sidecar.endpoint).returncode == 0
    assert hostkv("fsck", "--endpoint", sidecar.endpoint).returncode == 0
    sidecar.start()
    assert found(sidecar) == [True] * 8, "the pool has them all"


def test_clear_of_what_a_killed_sidecar_left_leaves_nothing(sidecar: Sidecar) -> None:
    sidecar.kill()
    done = hostkv("clear", "--endpoint", sidecar.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MiB are free again" in done.stdout
    assert "1 namespaces are forgotten" in done.stdout
    sidecar.start()
    assert found(sidecar) == [False] * 8


def test_a_directory_that_the_killed_sidecar_could_not_open_is_cleared_too(sidecar: Sidecar, tmp_path: Path) -> None:
    assert sidecar.stop() == 0
    with (tmp_path / "disk" / "00000.slab").open("rb") as slab:
        fcntl.flock(slab, fcntl.LOCK_EX)
        sidecar.start()
        sidecar.until(lambda: sidecar.tier()["directories"][0]["state"] == "quarantine")
        sidecar.kill()
    done = hostkv("clear", "--endpoint", sidecar.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 namespaces are forgotten" in done.stdout
    sidecar.start()
    sidecar.until_tier_serves()
    assert found(sidecar) == [False] * 8


def test_a_pool_is_removed_by_its_name_without_touching_a_tier(sidecar: Sidecar) -> None:
    sidecar.kill()
    done = hostkv("clear", "--endpoint", sidecar.endpoint, "--pool-name", sidecar.pool_name)
    assert (done.returncode, "disk" in done.stdout) == (0, False), done.stdout + done.stderr
    sidecar.start()
    sidecar.until(lambda: found(sidecar) == [True] * 8)


def test_clear_of_a_running_sidecar_reaches_its_tier(sidecar: Sidecar) -> None:
    done = hostkv("clear", "--endpoint", sidecar.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    sidecar.kill()
    sidecar.start()
    assert found(sidecar) == [False] * 8


def test_a_clear_that_a_directory_does_not_take_note_of_says_what_to_do(sidecar: Sidecar, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "disk")
    done = hostkv("clear", "--endpoint", sidecar.endpoint)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the pool is empty, but a directory of the disk tier has not taken note of it (hostkv status says which" in done.stdout
    assert found(sidecar) == [False] * 8


def test_a_clear_that_waits_for_a_disk_is_told_from_a_sidecar_that_hangs(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unanswered(*_: object) -> None:
        raise NoAnswer

    monkeypatch.setattr(module, "ask_clear", unanswered)
    monkeypatch.setattr(module, "STATUS_TIMEOUT_MS", int(PATIENCE_S * 1000))
    assert cli.main(["clear", "--endpoint", sidecar.endpoint]) == 1
    assert f"pid {sidecar.pid} serves, but has not ended it within 30 s: a directory of the disk tier" in capsys.readouterr().out
    monkeypatch.setattr(module, "STATUS_TIMEOUT_MS", 100)
    os.kill(sidecar.pid, signal.SIGSTOP)
    assert cli.main(["clear", "--endpoint", sidecar.endpoint]) == 1
    assert "kill -9 it" in capsys.readouterr().out
