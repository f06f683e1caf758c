"""`hostkv fsck` and `hostkv clear` on what real sidecars and clients left, whole, killed, stopped in the middle, and damaged."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostkv.cext import xxh3_64
from hostkv.connector import Client, Layout
from hostkv.schemas import layout
from hostkv.sidecar.ask import ask_clear
from hostkv.sidecar.errors import StartupError

from tests.support import LIFE_S, PATIENCE_S, PATIENT_PROGRAM, Sidecar, hostkv

SHARD_BYTES = 1 << 16
LAYOUT = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=SHARD_BYTES)
TWO_SHARDS = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=1000, shards=2)
IDS = [b"%d" % i for i in range(8)]
pytestmark = pytest.mark.usefixtures("patient_clients")


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path) as sidecar:
        yield sidecar


@pytest.fixture
def verifying(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, config="verify: load") as sidecar:
        yield sidecar


def engine(sidecar: Sidecar, code: str, geometry: Layout = LAYOUT) -> subprocess.Popen[str]:
    """A process that runs `code` with a client and a store of its own, and lives until it is killed."""
    program = f"""
import sys, time
from hostkv.connector import Client, Layout
from hostkv.schemas.messages import Reserve
{PATIENT_PROGRAM}
client = Client(sys.argv[1])
while not client.serving():
    time.sleep(0.01)
store = client.open({geometry!r})
def save(ids):
    for shard in range({geometry.shards}):
        store.wait(store.dump(ids, shard, [[(i * {geometry.shard_bytes // 4}).ljust({geometry.shard_bytes}, bytes(1))] for i in ids]))
{code}
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", program, sidecar.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def killed_with_blocks(sidecar: Sidecar, ids: list[bytes] = IDS, geometry: Layout = LAYOUT) -> None:
    """The sidecar is killed after an engine that is gone has saved these."""
    kill(engine(sidecar, f"save({ids!r})", geometry))
    sidecar.kill()


def found(sidecar: Sidecar, geometry: Layout = LAYOUT) -> list[bool]:
    """Which of IDS a new start serves, byte for byte."""
    if sidecar.process is None or sidecar.process.poll() is not None:
        sidecar.start()
    with Client(sidecar.endpoint) as client:
        sidecar.until(client.serving)
        store = client.open(geometry)
        hits = store.lookup(IDS)
        ids = [i for i, hit in zip(IDS, hits, strict=True) if hit]
        for shard in range(geometry.shards if ids else 0):
            rows = [[bytearray(geometry.shard_bytes)] for _ in ids]
            store.wait(store.load(ids, shard, rows), PATIENCE_S)
            assert [row[0] for row in rows] == [(i * (geometry.shard_bytes // 4)).ljust(geometry.shard_bytes, b"\0") for i in ids]
    return hits


def impatient(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line that waits for users of a pool only a moment."""
    program = "import sys; from hostkv.sidecar import cli, pool; pool.REPLACE_WAIT_S = 0.2; sys.exit(cli.main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=LIFE_S, check=False)


def fsck(sidecar: Sidecar, *flags: str) -> tuple[int, str]:
    done = hostkv("fsck", "--endpoint", sidecar.endpoint, *flags)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def files(sidecar: Sidecar) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (sidecar.pool_path, sidecar.tables_path) if path.exists()}


def entries(sidecar: Sidecar) -> list[tuple[int, tuple[int, ...]]]:
    """(offset in the tables file, fields) of each READY block."""
    raw = sidecar.tables_path.read_bytes()
    values = layout.HEADER.unpack_from(raw)
    at, capacity = values[23], values[17]
    places = [at + i * layout.BLOCK.size for i in range(capacity)]
    fields = [(place, layout.BLOCK.unpack_from(raw, place)) for place in places]
    return [(place, entry) for place, entry in fields if entry[1] == layout.READY]


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# ---- what is sound ------------------------------------------------------------------------------------------------------------------
def test_a_sound_pool_is_sound_and_no_byte_of_it_changes(sidecar: Sidecar) -> None:
    killed_with_blocks(sidecar)
    before = files(sidecar)
    code, text = fsck(sidecar)
    assert code == 0, text
    assert "8 ready" in text
    assert text.endswith("sound\n")
    assert files(sidecar) == before
    assert found(sidecar) == [True] * 8


def test_the_pool_that_the_run_directory_had_is_meant_where_none_is_named(sidecar: Sidecar) -> None:
    killed_with_blocks(sidecar)
    assert str(sidecar.pool_path) in fsck(sidecar)[1]
    code, text = fsck(sidecar, "--pool-name", f"{sidecar.pool_name}-other")
    assert (code, "nothing to check" in text) == (0, True)


def test_what_a_killed_writer_left_is_dropped_and_no_fault(sidecar: Sidecar) -> None:
    writer = engine(
        sidecar,
        "save([b'0']); client.call(Reserve(0, 5, store.keys([b'1', b'2']).joined, bytes(4)), fingerprint=store.fingerprint, count=2)",
    )
    os.kill(sidecar.pid, signal.SIGSTOP)  # it must not see that the writer is gone
    kill(writer)
    sidecar.kill()
    code, text = fsck(sidecar)
    assert code == 0, text
    assert f"1 dead (pid {writer.pid})" in text
    assert "2 being written, 2 shards in flight" in text.split("repair")[1]
    assert found(sidecar)[:3] == [True, False, False]


def test_a_living_reader_keeps_its_pins_through_a_repair(sidecar: Sidecar) -> None:
    reader = engine(sidecar, f"save({IDS!r}); assert store.acquire({IDS[:3]!r}, 5).run == 3")
    sidecar.kill()
    code, text = fsck(sidecar, "--fix")
    assert code == 0, text
    assert f"1 alive (pid {reader.pid})" in text
    sidecar.start()
    assert sidecar.status()["pins"] == 3
    kill(reader)
    sidecar.until(lambda: sidecar.status()["pins"] == 0)


def test_members_that_came_through_another_run_directory_are_told(sidecar: Sidecar, tmp_path: Path) -> None:
    member = engine(sidecar, "save([b'0'])")
    sidecar.kill()
    done = hostkv("fsck", "--endpoint", f"ipc://{tmp_path}/elsewhere/control.sock", "--pool-name", sidecar.pool_name)
    assert f"1 of another run directory, which --endpoint must name (pid {member.pid})" in done.stdout
    assert not (tmp_path / "elsewhere").exists()
    kill(member)


# ---- who is in the way --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [[], ["--fix"]])
def test_a_sidecar_that_serves_the_pool_is_named_and_left_alone(sidecar: Sidecar, flags: list[str]) -> None:
    code, text = fsck(sidecar, *flags)
    assert code == 2
    assert f"kill -9 {sidecar.pid}" in text
    assert sidecar.status()["pid"] == sidecar.pid


@pytest.mark.parametrize("command", ["fsck", "clear"])
def test_a_sidecar_with_another_run_directory_is_named(sidecar: Sidecar, tmp_path: Path, command: str) -> None:
    done = hostkv(command, "--endpoint", f"ipc://{tmp_path}/elsewhere/control.sock", "--pool-name", sidecar.pool_name)
    assert done.returncode == 2
    assert f"held by pid {sidecar.pid}" in done.stderr
    assert sidecar.status()["pid"] == sidecar.pid


def test_a_pool_beside_the_one_that_is_served_can_be_looked_at_and_removed(sidecar: Sidecar, tmp_path: Path) -> None:
    with Sidecar(tmp_path / "left") as left:
        living = engine(left, f"save({IDS!r})")
        left.kill()
        code, text = fsck(sidecar, "--pool-name", left.pool_name)
        assert (code, "8 ready" in text) == (0, True)
        done = impatient("clear", "--endpoint", sidecar.endpoint, "--pool-name", left.pool_name)
        assert (done.returncode, f"still used by pid {living.pid}" in done.stderr) == (2, True)
        assert len(files(left)) == 2
        kill(living)
        done = hostkv("clear", "--endpoint", sidecar.endpoint, "--pool-name", left.pool_name)
        assert done.returncode == 0, done.stderr
        assert files(left) == {}
    assert sidecar.status()["pid"] == sidecar.pid


def test_a_file_of_somebody_else_is_neither_checked_nor_removed(sidecar: Sidecar) -> None:
    killed_with_blocks(sidecar)
    sidecar.tables_path.unlink()
    for command in (["fsck"], ["fsck", "--fix"], ["clear"]):
        done = hostkv(*command, "--endpoint", sidecar.endpoint)
        assert done.returncode == 2
        assert "no pool of ours" in done.stderr
    assert sidecar.pool_path.exists()


# ---- damage -------------------------------------------------------------------------------------------------------------------------
def test_a_damaged_entry_is_a_fault_and_becomes_a_miss_with_fix(sidecar: Sidecar) -> None:
    killed_with_blocks(sidecar)
    place, _ = entries(sidecar)[3]
    write(sidecar.tables_path, place + layout.BLOCK.size - 16, struct.pack("<I", 0xFFFFFFF0))  # its page
    before = files(sidecar)
    code, text = fsck(sidecar)
    assert code == 1, text
    assert "1 block entries that no sidecar writes" in text
    assert files(sidecar) == before
    code, text = fsck(sidecar, "--fix")
    assert (code, "repaired" in text) == (0, True)
    assert fsck(sidecar)[0] == 0
    assert found(sidecar).count(True) == 7


@pytest.mark.parametrize("geometry, flipped", [(LAYOUT, 77), (TWO_SHARDS, 1024 + 999)], ids=["one shard", "the second of two"])
def test_a_byte_that_changed_in_the_payload_is_found_by_its_checksum(verifying: Sidecar, geometry: Layout, flipped: int) -> None:
    killed_with_blocks(verifying, geometry=geometry)
    assert fsck(verifying)[0] == 0
    _, entry = entries(verifying)[5]
    page, key = entry[6], bytes(entry[4])  # type: ignore[call-overload]
    write(verifying.pool_path, page * layout.PAGE + flipped, b"\xff")
    before = files(verifying)
    code, text = fsck(verifying)
    assert code == 1, text
    assert "8 blocks compared with their checksums" in text
    assert "1 differ" in text
    assert key.hex() in text
    assert files(verifying) == before
    assert fsck(verifying, "--fix")[0] == 0
    assert fsck(verifying)[0] == 0
    assert found(verifying, geometry).count(True) == 7


# ---- pools that no sidecar can serve ------------------------------------------------------------------------------------------------
def of_another_version(sidecar: Sidecar) -> None:
    raw = bytearray(sidecar.tables_path.read_bytes()[: layout.STATIC_BYTES])
    struct.pack_into("<I", raw, 8, 99)
    struct.pack_into("<Q", raw, layout.STATIC_CHECKSUM_OFFSET, xxh3_64(raw[: layout.STATIC_CHECKSUM_OFFSET]))
    write(sidecar.tables_path, 0, bytes(raw))


def of_another_boot(sidecar: Sidecar) -> None:
    raw = bytearray(sidecar.tables_path.read_bytes()[: layout.STATIC_BYTES])
    raw[48:64] = os.urandom(16)
    struct.pack_into("<Q", raw, layout.STATIC_CHECKSUM_OFFSET, xxh3_64(raw[: layout.STATIC_CHECKSUM_OFFSET]))
    write(sidecar.tables_path, 0, bytes(raw))


def never_finished(sidecar: Sidecar) -> None:
    write(sidecar.tables_path, layout.POOL_STATE_OFFSET, struct.pack("<I", layout.POOL_CREATING))


def killed_while_memory_was_taken(sidecar: Sidecar) -> None:
    os.truncate(sidecar.tables_path, 0)


def half_removed(sidecar: Sidecar) -> None:
    write(sidecar.tables_path, layout.POOL_STATE_OFFSET, struct.pack("<I", layout.POOL_REMOVED))


def without_payload(sidecar: Sidecar) -> None:
    sidecar.pool_path.unlink()


def with_payload_cut(sidecar: Sidecar) -> None:
    os.truncate(sidecar.pool_path, 4096)


def with_tables_cut(sidecar: Sidecar) -> None:
    os.truncate(sidecar.tables_path, 5000)


USELESS = [
    (of_another_version, "layout_version"),
    (of_another_boot, "another boot"),
    (never_finished, "creation was never finished"),
    (killed_while_memory_was_taken, "creation was never finished"),
    (half_removed, "removal was never finished"),
    (without_payload, "payload file is gone"),
    (with_payload_cut, "payload file has 4096 bytes"),
    (with_tables_cut, "5000 bytes"),
]


@pytest.mark.parametrize("spoil, why", USELESS, ids=[spoil.__name__ for spoil, _ in USELESS])
def test_a_pool_that_nobody_can_serve_again_is_told_and_removed_with_fix(tmp_path: Path, spoil: object, why: str) -> None:
    with Sidecar(tmp_path, pool_size="1MiB") as sidecar:
        sidecar.kill()
        assert callable(spoil)
        spoil(sidecar)
        before = files(sidecar)
        code, text = fsck(sidecar)
        assert code == 1, text
        assert why in text
        assert files(sidecar) == before
        code, text = fsck(sidecar, "--fix")
        assert (code, "is removed" in text) == (0, True), text
        assert files(sidecar) == {}
        assert (sidecar.run_directory / "lock").read_text().split("\n")[1] == ""
        sidecar.start()


# ---- clear --------------------------------------------------------------------------------------------------------------------------
def test_clear_empties_a_sidecar_that_goes_on(sidecar: Sidecar) -> None:
    kill(engine(sidecar, f"save({IDS!r})"))
    done = hostkv("clear", "--endpoint", sidecar.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"8 blocks of {sidecar.pool_path}" in done.stdout
    assert found(sidecar) == [False] * 8
    sidecar.until(lambda: not sidecar.status()["sessions"])


def test_clear_of_one_pool_is_not_taken_for_that_of_another(sidecar: Sidecar) -> None:
    """The lock file names the pool before as long as a sidecar starts on another one."""
    engine(sidecar, "save([b'0'])").kill()
    with pytest.raises(StartupError, match=f"serves {sidecar.pool_path}, not /dev/shm/another"):
        ask_clear(sidecar.endpoint, str(sidecar.run_directory / "members"), "/dev/shm/another", int(PATIENCE_S * 1000))
    assert sidecar.status()["blocks"]["ready"] == 1


def test_clear_removes_what_a_killed_sidecar_left(sidecar: Sidecar) -> None:
    killed_with_blocks(sidecar)
    done = hostkv("clear", "--endpoint", sidecar.endpoint)
    assert done.returncode == 0, done.stderr
    assert "MiB are free again" in done.stdout
    assert files(sidecar) == {}
    again = hostkv("clear", "--endpoint", sidecar.endpoint, "--pool-name", sidecar.pool_name)
    assert (again.returncode, "nothing to clear" in again.stdout) == (0, True)


def test_nothing_is_removed_under_a_living_engine(sidecar: Sidecar) -> None:
    living = engine(sidecar, "save([b'0'])")
    sidecar.kill()
    for command in (["clear"], ["fsck", "--fix"]):
        if command[0] == "fsck":
            of_another_version(sidecar)
        done = impatient(*command, "--endpoint", sidecar.endpoint)
        assert done.returncode == 2
        assert f"still used by pid {living.pid}" in done.stderr
    assert len(files(sidecar)) == 2
    kill(living)
    assert hostkv("clear", "--endpoint", sidecar.endpoint).returncode == 0


def test_clear_of_a_sidecar_that_hangs_says_so(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hostkv.sidecar import cli
    from hostkv.sidecar import fsck as module

    monkeypatch.setattr(module, "CLEAR_TIMEOUT_MS", 100)
    os.kill(sidecar.pid, signal.SIGSTOP)
    assert cli.main(["clear", "--endpoint", sidecar.endpoint]) == 1
    assert f"pid {sidecar.pid}" in capsys.readouterr().out


# ---- killed in the middle -----------------------------------------------------------------------------------------------------------
KILLED_AT = """
import os, signal, sys
from hostkv.sidecar import cli, fsck
left = int(sys.argv.pop(1))
def trace(frame, event, argument):
    global left
    if frame.f_code.co_filename != fsck.__file__:
        return None
    left -= event == "line"
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace
sys.settrace(trace)
code = cli.main(sys.argv[1:])
sys.settrace(None)
print("lines left", left, file=sys.stderr)
sys.exit(code)
"""


def test_fix_killed_at_any_line_is_done_by_running_it_again(verifying: Sidecar, tmp_path: Path) -> None:
    killed_with_blocks(verifying)
    place, _ = entries(verifying)[2]
    write(verifying.tables_path, place + layout.BLOCK.size - 16, struct.pack("<I", 0xFFFFFFF0))
    write(verifying.pool_path, int(entries(verifying)[5][1][6]) * layout.PAGE, b"\xff")
    saved = {path: tmp_path / path.name for path in (verifying.pool_path, verifying.tables_path)}
    for path, copy in saved.items():
        shutil.copyfile(path, copy)

    def run(lines: int) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", KILLED_AT, str(lines), "fsck", "--fix", "--endpoint", verifying.endpoint]
        return subprocess.run(program, capture_output=True, text=True, timeout=LIFE_S, check=False)

    whole = run(10**9)
    assert whole.returncode == 0, whole.stderr
    lines = 10**9 - int(whole.stderr.split("lines left")[1])
    for at in range(1, lines, max(1, lines // 8)):
        for path, copy in saved.items():
            write(path, 0, copy.read_bytes())
        assert run(at).returncode == -signal.SIGKILL
        code, text = fsck(verifying, "--fix")
        assert code == 0, text
    assert fsck(verifying)[0] == 0
    assert found(verifying).count(True) == 6
