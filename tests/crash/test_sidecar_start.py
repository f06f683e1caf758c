"""How a sidecar starts, ends and starts again: real processes, real files. Every refusal is one clear line and exit code 2."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from hostkv.connector import Client, LoadError
from hostkv.schemas import messages as m
from hostkv.schemas.errors import Status
from hostkv.schemas.layout import HEADER, POOL_LIVE, POOL_STATE_OFFSET, STATIC_BYTES
from hostkv.schemas.namespace import Layout

from tests.support import LIFE_S, PATIENCE_S, Sidecar, Wire, disk_tier, hostkv, until

LAYOUT = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=4096)
KEYS = b"".join(n.to_bytes(32, "little") for n in range(1, 9))
KILLED_WITH_ITS_MEMBER = """
import os
from hostkv.sidecar.core import Core

class Killing:
    def __init__(self, tables):
        self.tables = tables
    def __getattr__(self, name):
        return getattr(self.tables, name)
    def member_add(self, *arguments):
        self.tables.member_add(*arguments)
        os.kill(os.getpid(), 9)

begin = Core._begin_to_move

def begin_and_die(core, tier):
    core.tables = Killing(core.tables)
    return begin(core, tier)

Core._begin_to_move = begin_and_die
"""
pytestmark = pytest.mark.usefixtures("patient_clients")


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, start=False) as sidecar:
        yield sidecar


class Holder:
    """Another process that holds a member lock of a run directory, as an engine does."""

    def __init__(self, run_directory: Path, name: bytes) -> None:
        path = run_directory / "members" / name.hex()
        program = "import sys; from hostkv.cext import lock_take; lock_take(sys.argv[1]); print(flush=True); sys.stdin.read()"
        self.process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"\n"

    def __enter__(self) -> Holder:
        return self

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self.end()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def join(wire: Wire, lock: bytes, client: bytes = b"c" * 16, pid: int = 1) -> int:
    reply = wire.ask(m.Hello([2, 0], client, b"s" * 16, lock, pid, "test"))
    assert isinstance(reply, m.HelloReply), reply
    registered = wire.ask(m.Register(LAYOUT.encode()))
    assert isinstance(registered, m.RegisterReply), registered
    return registered.index


def write(wire: Wire, index: int) -> None:
    shards = bytes(2 * 8)
    granted = wire.ask(m.Reserve(index, 1, KEYS, shards))
    assert isinstance(granted, m.HandlesReply)
    assert wire.ask(m.Commit(1, KEYS, shards, granted.generations, bytes(8 * 8))) == m.StatusesReply(bytes(8))


def refused(sidecar: Sidecar) -> str:
    """What it says when it refuses to start: one line, no traceback, exit code 2, nothing in /dev/shm that was not there."""
    before = in_memory(sidecar)
    old = len(sidecar.log())
    process = sidecar.launch()
    out, _ = process.communicate(timeout=LIFE_S)
    said = sidecar.log()[old:]
    assert (process.returncode, out) == (2, b""), said
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("hostkv: ")
    assert in_memory(sidecar) == before
    return last


def in_memory(sidecar: Sidecar) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(sidecar.pool_name)}


# ---- a good start, a good end ----


def test_a_start_takes_all_memory_and_makes_files_of_ours_alone(sidecar: Sidecar) -> None:
    os.umask(umask := os.umask(0))
    ready = sidecar.start()
    assert os.umask(umask) == umask
    assert ready["endpoint"] == sidecar.endpoint
    assert ready["pool"] == str(sidecar.pool_path)
    assert ready["adopted"] == "0"
    for path in (sidecar.pool_path, sidecar.tables_path):
        info = path.stat()
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_blocks * 512 >= info.st_size
    assert sidecar.pool_path.stat().st_size == 64 << 20
    assert "taking memory" in sidecar.log()
    for directory in (sidecar.run_directory, sidecar.run_directory / "members"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((sidecar.run_directory / "control.sock").stat().st_mode) == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_modes_do_not_depend_on_the_umask(sidecar: Sidecar, umask: int) -> None:
    old = os.umask(umask)
    try:
        sidecar.log_path.touch()
        sidecar.log_path.chmod(0o600)
        sidecar.start()
    finally:
        os.umask(old)
    assert stat.S_IMODE(sidecar.pool_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(sidecar.tables_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(sidecar.run_directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_and_exits_zero(sidecar: Sidecar, number: int) -> None:
    sidecar.start()
    assert sidecar._signal(number) == 0
    assert not sidecar.pool_path.exists()
    assert not sidecar.tables_path.exists()
    assert sorted(path.name for path in sidecar.run_directory.iterdir()) == ["lock", "members"]
    assert sidecar.start()["adopted"] == "0"


def test_whoever_still_maps_the_tables_sees_them_removed(sidecar: Sidecar) -> None:
    sidecar.start()
    with sidecar.tables_path.open("rb") as tables:
        assert os.pread(tables.fileno(), 4, POOL_STATE_OFFSET)[0] == POOL_LIVE
        sidecar.stop()
        assert os.pread(tables.fileno(), 4, POOL_STATE_OFFSET)[0] != POOL_LIVE


# ---- killed, and back ----


def test_killed_and_started_again_it_serves_the_same_blocks_at_once(sidecar: Sidecar) -> None:
    first = sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name):
        with Wire(sidecar.endpoint) as wire:
            index = join(wire, name)
            write(wire, index)
            assert isinstance(wire.ask(m.Acquire(index, 7, KEYS)), m.HandlesReply)
        sidecar.kill()
        second = sidecar.start()
        assert second["adopted"] == "8"
        assert second["instance"] != first["instance"]
        with Wire(sidecar.endpoint) as wire:
            index = join(wire, name)
            assert wire.ask(m.Lookup(index, KEYS)) == m.LookupReply(bytes(8))
            assert wire.ask(m.Release((7).to_bytes(8, "little"))) == m.CountReply(8)


def test_what_a_member_held_that_died_while_no_sidecar_ran_is_given_back(sidecar: Sidecar) -> None:
    sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name) as holder:
        with Wire(sidecar.endpoint) as wire:
            index = join(wire, name)
            write(wire, index)
            wire.ask(m.Acquire(index, 7, KEYS))
            wire.ask(m.Reserve(index, 9, b"x" * 32, bytes(2)))
        sidecar.kill()
        holder.end()
        assert sidecar.start()["adopted"] == "8"
    status = sidecar.status()
    assert (status["pins"], status["shards_in_flight"], status["sessions"]) == (0, 0, [])


def test_a_member_that_dies_is_gone_and_its_lock_file_goes_at_the_next_start(sidecar: Sidecar) -> None:
    sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name) as holder:
        with Wire(sidecar.endpoint) as wire:
            write(wire, join(wire, name))
            wire.ask(m.Reserve(0, 9, b"x" * 32, bytes(2)))
        assert sidecar.status()["shards_in_flight"] == 1
        holder.end()
        sidecar.until(lambda: sidecar.status()["members_gone"] == 1)
        assert sidecar.status()["shards_in_flight"] == 0
    with suppress(FileNotFoundError):  # it has been swept
        os.utime(sidecar.run_directory / "members" / name.hex(), (0, 0))
    sidecar.kill()
    sidecar.start()
    sidecar.until(lambda: not list((sidecar.run_directory / "members").iterdir()))


def test_a_lock_file_removed_under_a_living_member_does_not_end_it(sidecar: Sidecar) -> None:
    """Its slots may still be written; only a lock that is seen to be free proves that they are not."""
    sidecar.start()
    name, other = secrets.token_bytes(16), secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name), Holder(sidecar.run_directory, other) as second, Wire(sidecar.endpoint) as wire:
        join(wire, name)
        with Wire(sidecar.endpoint) as theirs:
            join(theirs, other, b"d" * 16)
        (sidecar.run_directory / "members" / name.hex()).unlink()
        second.end()
        sidecar.until(lambda: sidecar.status()["members_gone"] == 1)
        assert len(sidecar.status()["sessions"]) == 1
        assert isinstance(wire.ask(m.Lookup(0, KEYS)), m.LookupReply)


def test_killed_while_it_takes_memory_it_starts_again(sidecar: Sidecar) -> None:
    """In many places: after the files were made, before the tables are LIVE."""
    for wait_for in (sidecar.tables_path.exists, sidecar.pool_path.exists, lambda: size_of(sidecar.tables_path) > 0):
        process = sidecar.launch()
        until(lambda wait_for=wait_for, process=process: wait_for() or process.poll() is not None)
        sidecar.kill()
    sidecar.start()
    assert sidecar.status()["blocks"]["total"] == 0


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_tables_left_in_creation_are_replaced(sidecar: Sidecar) -> None:
    sidecar.start()
    sidecar.kill()
    with sidecar.tables_path.open("r+b") as tables:
        tables.seek(POOL_STATE_OFFSET)
        tables.write(bytes(4))
    assert sidecar.start()["adopted"] == "0"
    assert "earlier pool replaced" in sidecar.log()


def test_tables_of_junk_are_replaced(sidecar: Sidecar) -> None:
    for junk in (b"", b"x" * HEADER.size, secrets.token_bytes(100_000)):
        sidecar.tables_path.write_bytes(junk)
        sidecar.pool_path.write_bytes(b"y")
        sidecar.start()
        sidecar.kill()
        sidecar.pool_path.unlink()
        sidecar.tables_path.unlink()


@pytest.mark.parametrize("change", ["size", "version", "boot", "no checksums", "payload gone", "payload short", "payload with holes"])
def test_a_pool_that_does_not_fit_is_replaced(sidecar: Sidecar, tmp_path: Path, change: str) -> None:
    sidecar.start()
    sidecar.kill()
    if change == "size":
        sidecar.arguments += ["--pool-size", "32MiB"]
    elif change in ("version", "boot"):
        offset = {"version": 8, "boot": 48}[change]  # layout.h
        with sidecar.tables_path.open("r+b") as tables:
            byte = os.pread(tables.fileno(), 1, offset)[0]
            os.pwrite(tables.fileno(), bytes([byte ^ 1]), offset)
    elif change == "no checksums":
        config = tmp_path / "verify.yaml"
        config.write_text("verify: load\n")
        sidecar.arguments += ["--config", str(config)]
    elif change == "payload with holes":
        size = sidecar.pool_path.stat().st_size
        os.truncate(sidecar.pool_path, 4096)
        os.truncate(sidecar.pool_path, size)
    elif change == "payload gone":
        sidecar.pool_path.unlink()
    else:
        os.truncate(sidecar.pool_path, 4096)
    assert sidecar.start()["adopted"] == "0"
    assert "earlier pool replaced" in sidecar.log()


@pytest.mark.parametrize("verify", ["off", "load"])
def test_tables_with_flipped_bytes_serve_what_is_sound(tmp_path: Path, verify: str) -> None:
    """Bits of what is not checked as a whole. Each block is then as it was saved, or a miss: an entry that names another place than
    before has a broken seal, or with `verify: load` a payload of another checksum. The tables are sound again and work goes on."""
    layout = replace(LAYOUT, shard_bytes=1 << 16)
    ids = [b"%d" % i for i in range(250)]
    content = {i: random.Random(i).randbytes(layout.shard_bytes) for i in ids}
    draw = random.Random(1)
    served = wrong = 0
    with Sidecar(tmp_path, config=f"verify: {verify}\n", start=False) as sidecar:
        for _ in range(6):
            sidecar.start()
            with Client(sidecar.endpoint) as client:
                store = client.open(layout)
                found = [i for i, there in zip(ids, store.lookup(ids), strict=True) if there]
                for block_id in found:
                    target = bytearray(layout.shard_bytes)
                    with suppress(LoadError):
                        store.wait(store.load([block_id], 0, [[target]]), PATIENCE_S)
                        served += 1
                        wrong += target != content[block_id]
                store.clear()
                for first in range(0, len(ids), 50):
                    some = ids[first : first + 50]
                    assert store.wait(store.dump(some, 0, [[content[i]] for i in some]), PATIENCE_S) == ["committed"] * 50
                assert all(store.lookup(ids))
            sidecar.until(lambda: sidecar.status()["sessions"] == [])
            assert (sidecar.status()["pins"], sidecar.status()["shards_in_flight"]) == (0, 0)
            sidecar.kill()
            with sidecar.tables_path.open("r+b") as tables:
                data = bytearray(tables.read())
                for _ in range(draw.choice((10, 1000, len(data) // 1000))):
                    data[draw.randrange(STATIC_BYTES, len(data))] ^= 1 << draw.randrange(8)
                data[POOL_STATE_OFFSET : POOL_STATE_OFFSET + 4] = POOL_LIVE.to_bytes(4, "little")  # else it is replaced, and shows nothing
                os.pwrite(tables.fileno(), data, 0)
    assert served > 5 * 200, "most of it survives"
    assert wrong == 0


@pytest.mark.parametrize("pid", [0, 1 << 31, (1 << 32) - 1])
def test_a_member_that_told_a_pid_that_there_cannot_be_stops_no_start(sidecar: Sidecar, tmp_path: Path, pid: int) -> None:
    sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name), Wire(sidecar.endpoint) as wire:
        write(wire, join(wire, name, pid=pid))
        sidecar.kill()
        with Sidecar(tmp_path / "other", pool_name=sidecar.pool_name) as other:
            assert other.ready["adopted"] == "0"
            assert "another run directory" in other.log()


def test_a_pool_is_not_replaced_under_a_living_member(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name) as holder:
        sidecar.kill()
        sidecar.arguments += ["--pool-size", "32MiB"]
        assert f"still used by pid {holder.process.pid}" in refused(sidecar)
        assert sidecar.pool_path.stat().st_size == 64 << 20
        sidecar.program(f"from hostkv.sidecar import pool; pool.REPLACE_WAIT_S = {LIFE_S}")
        before = len(sidecar.log())
        process = sidecar.launch()  # it waits, and goes on as soon as the last user has ended
        until(lambda: f"waiting for pid {holder.process.pid}" in sidecar.log()[before:])
        holder.end()
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"hostkv ready")


def test_a_start_killed_as_soon_as_its_tier_has_a_member_leaves_a_pool_of_this_run_directory(tmp_path: Path) -> None:
    """That member has no lock file, which makes one of a client somebody from elsewhere."""
    with Sidecar(tmp_path, config=disk_tier(tmp_path / "disk")) as sidecar:
        name = secrets.token_bytes(16)
        with Holder(sidecar.run_directory, name), Wire(sidecar.endpoint) as wire:
            write(wire, join(wire, name))
            sidecar.kill()
            sidecar.program(f"{KILLED_WITH_ITS_MEMBER}pass")
            sidecar.launch()
            assert sidecar.wait() == -signal.SIGKILL
            sidecar.program("pass")
            assert sidecar.start()["adopted"] == "8"


def test_a_pool_used_through_another_run_directory_is_never_adopted(sidecar: Sidecar, tmp_path: Path) -> None:
    """Whether its members live cannot be seen from here, so their slots must not be given to others."""
    sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name) as holder, Wire(sidecar.endpoint) as wire:
        pid = holder.process.pid
        write(wire, join(wire, name, pid=pid))
        sidecar.kill()
        with Sidecar(tmp_path / "other", pool_name=sidecar.pool_name, start=False) as other:
            assert f"still used by pid {pid}" in refused(other)
            holder.end()
            other.start()
            assert other.ready["adopted"] == "0"
            assert "another run directory" in other.log()


def test_a_pool_that_another_run_directory_serves_by_now_is_not_ours_to_remove(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.start()
    sidecar.kill()
    with Sidecar(tmp_path / "other", pool_name=sidecar.pool_name) as other, Sidecar(tmp_path) as renamed:
        assert renamed.run_directory == sidecar.run_directory
        assert other.pool_path.exists()


def test_a_pool_that_another_run_directory_left_is_not_ours_to_remove(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.start()
    epoch = sidecar.status()["pool"]["epoch"]
    sidecar.kill()
    sidecar.pool_path.unlink()  # so that the next one makes another pool of that name
    with Sidecar(tmp_path / "other", pool_name=sidecar.pool_name) as other:
        assert other.status()["pool"]["epoch"] != epoch
        other.kill()
        with Sidecar(tmp_path):
            assert other.pool_path.exists()
            assert other.tables_path.exists()


def test_a_pool_on_a_disk_is_refused(sidecar: Sidecar, tmp_path: Path) -> None:
    config = tmp_path / "disk.yaml"
    config.write_text(f"pool: {{path: {tmp_path}}}\n")
    sidecar.arguments += ["--config", str(config)]
    assert "pool.path must be memory" in refused(sidecar)


def test_a_start_that_cannot_say_that_it_is_ready_leaves_no_pool(sidecar: Sidecar) -> None:
    command = [sys.executable, "-m", "hostkv.sidecar.cli", "serve", *sidecar.arguments]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, timeout=LIFE_S).returncode != 0
    assert not sidecar.pool_path.exists()
    assert not sidecar.tables_path.exists()


def test_hangup_restarts_it_on_the_same_pool(sidecar: Sidecar) -> None:
    sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name), Wire(sidecar.endpoint) as wire:
        write(wire, join(wire, name))
        before = sidecar.status()
        os.kill(sidecar.pid, signal.SIGHUP)
        sidecar.until(lambda: "restarting" in sidecar.log() and sidecar.log().count(" ready ") == 2)
        after = sidecar.status()
        assert after["pid"] == before["pid"]
        assert after["instance"] != before["instance"]
        assert after["pool"]["epoch"] == before["pool"]["epoch"]
        assert after["pool"]["adopted_blocks"] == 8


def test_a_restart_needs_nobody_who_reads_its_stdout(sidecar: Sidecar) -> None:
    sidecar.start()
    assert sidecar.process is not None
    assert sidecar.process.stdout is not None
    sidecar.process.stdout.close()
    for restarts in (1, 2):
        os.kill(sidecar.pid, signal.SIGHUP)
        sidecar.until(lambda restarts=restarts: sidecar.log().count(" restarting ") == restarts and answers(sidecar))
    assert "stdout is closed" in sidecar.log()
    assert sidecar.stop() == 0


def test_a_restart_imports_nothing_from_the_working_directory(sidecar: Sidecar, tmp_path: Path) -> None:
    """Which may be anybody's, and a restart is what clients can bring about."""
    command = tmp_path / "hostkv"
    command.write_text("import sys\nfrom hostkv.sidecar.cli import main\nsys.exit(main())\n")
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    (directory / "yaml.py").write_text("raise SystemExit(77)\n")
    with (
        sidecar.log_path.open("ab") as log,
        subprocess.Popen(
            [sys.executable, command, "serve", *sidecar.arguments], cwd=directory, stdout=subprocess.DEVNULL, stderr=log
        ) as sidecar.process,
    ):
        sidecar.until(lambda: answers(sidecar))
        os.kill(sidecar.pid, signal.SIGHUP)
        sidecar.until(lambda: " restarting " in sidecar.log() and answers(sidecar))
        os.kill(sidecar.pid, signal.SIGTERM)
        assert sidecar.process.wait(PATIENCE_S) == 0


def answers(sidecar: Sidecar) -> bool:
    """Whether the start that the log tells of last has come to its loop."""
    return hostkv("status", "--endpoint", sidecar.endpoint).returncode == 0


def test_at_its_end_it_leaves_alone_what_another_made_where_its_own_files_were(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.start()
    sidecar.pool_path.unlink()
    sidecar.tables_path.unlink()
    with Sidecar(tmp_path / "other", pool_name=sidecar.pool_name) as other:
        assert sidecar.stop() == 0
        assert other.pool_path.exists()
        assert other.tables_path.exists()


def test_a_pool_left_under_another_name_is_removed(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.start()
    sidecar.kill()
    with Sidecar(tmp_path) as renamed:
        assert renamed.run_directory == sidecar.run_directory
        assert not sidecar.pool_path.exists()
        assert not sidecar.tables_path.exists()


# ---- two of them ----


def test_two_sidecars_on_one_run_directory_the_second_names_the_first(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.start()
    with Sidecar(tmp_path, start=False) as second:
        assert f"held by pid {sidecar.pid}" in refused(second)
    assert sidecar.status()["pid"] == sidecar.pid


def test_two_sidecars_on_one_pool_name_the_second_names_the_first(sidecar: Sidecar, tmp_path: Path) -> None:
    sidecar.start()
    second = Sidecar(tmp_path / "b", pool_name=sidecar.pool_name, start=False)
    assert f"held by pid {sidecar.pid}" in refused(second)
    assert sidecar.status()["pid"] == sidecar.pid
    assert sidecar.pool_path.exists()


def test_a_lock_that_is_tested_for_an_instant_does_not_stop_a_start(sidecar: Sidecar) -> None:
    sidecar.run_directory.mkdir(mode=0o700)
    sidecar.program(f"from hostkv.sidecar import rundir; rundir.LOOK_WAIT_S = {LIFE_S}")  # however long our instant is
    with (sidecar.run_directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        process = sidecar.launch()
        until(lambda: (sidecar.run_directory / "members").exists())
        fcntl.flock(file, fcntl.LOCK_UN)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"hostkv ready")


# ---- what is in the way ----


@pytest.mark.parametrize("which", ["pool_path", "tables_path"])
@pytest.mark.parametrize("what", ["symlink", "directory", "fifo"])
def test_a_strange_file_in_the_place_of_the_pool_is_left_alone_and_named(sidecar: Sidecar, tmp_path: Path, which: str, what: str) -> None:
    path: Path = getattr(sidecar, which)
    target = tmp_path / "precious"
    target.write_text("precious")
    if what == "symlink":
        path.symlink_to(target)
    elif what == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    try:
        assert str(path) in refused(sidecar)
        assert target.read_text() == "precious"
        assert os.path.lexists(path)
    finally:
        path.rmdir() if what == "directory" else path.unlink()


@pytest.mark.parametrize("where", ["run", "run/members", "run/lock"])
def test_a_symlink_in_the_run_directory_is_refused(sidecar: Sidecar, tmp_path: Path, where: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link = tmp_path / where
    if where != "run":
        sidecar.run_directory.mkdir(mode=0o700)
    link.symlink_to(elsewhere)
    assert str(link) in refused(sidecar)


def test_a_run_directory_that_others_may_write_is_refused(sidecar: Sidecar) -> None:
    sidecar.run_directory.mkdir()
    sidecar.run_directory.chmod(0o777)
    assert "chmod 0700" in refused(sidecar)


def test_a_run_directory_without_a_parent_is_refused(sidecar: Sidecar) -> None:
    sidecar.arguments += ["--endpoint", "ipc:///nowhere/at/all/control.sock"]
    assert "/nowhere/at/all" in refused(sidecar)


def test_a_run_directory_that_is_read_only_is_refused(sidecar: Sidecar) -> None:
    sidecar.arguments += ["--endpoint", "ipc:///proc/hostkv/control.sock"]
    assert "/proc/hostkv" in refused(sidecar)


@pytest.mark.parametrize("name", ["control.sock", "attach.sock"])
def test_a_directory_in_the_place_of_a_socket_is_refused_and_no_pool_is_left(sidecar: Sidecar, name: str) -> None:
    (sidecar.run_directory / name).mkdir(parents=True, mode=0o700)
    sidecar.run_directory.chmod(0o700)
    assert name in refused(sidecar)


def test_a_payload_without_tables_is_left_alone_and_named(sidecar: Sidecar) -> None:
    sidecar.pool_path.write_text("precious")
    assert f"{sidecar.pool_path} is in the way" in refused(sidecar)
    assert sidecar.pool_path.read_text() == "precious"


def test_stale_sockets_are_replaced(sidecar: Sidecar) -> None:
    sidecar.run_directory.mkdir(mode=0o700)
    for name in ("control.sock", "attach.sock"):
        (sidecar.run_directory / name).write_text("")
    sidecar.start()
    assert sidecar.status()["pid"] == sidecar.pid


def test_a_pool_larger_than_shared_memory_is_refused_with_the_fix(sidecar: Sidecar) -> None:
    sidecar.arguments += ["--pool-size", "14TiB"]
    message = refused(sidecar)
    assert "/dev/shm is too small" in message
    assert "--shm-size" in message


def test_a_pool_that_cannot_be_taken_whole_is_refused_and_leaves_nothing(sidecar: Sidecar) -> None:
    """The limit on file sizes stands for a tmpfs that others fill between our look and our use of it."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
        assert "too small" in refused(sidecar)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


@pytest.mark.parametrize(
    "flags, names",
    [
        (["--pool-name", "a/b"], "pool.name"),
        (["--pool-name", "x" * 300], "pool.name"),
        (["--pool-size", "16GB"], "16GiB"),
        (["--endpoint", "tcp://127.0.0.1:5555"], "tcp.listen"),
        (["--endpoint", "ipc:///tmp/" + "x" * 100 + "/control.sock"], "107"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(sidecar: Sidecar, flags: list[str], names: str) -> None:
    sidecar.arguments += flags
    assert names in refused(sidecar)


def test_a_pool_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with Sidecar(tmp_path, config="pool: {path: /nowhere/at/all}", start=False) as sidecar:
        assert "/nowhere/at/all" in refused(sidecar)


def test_a_signal_during_the_start_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    with Sidecar(tmp_path, pool_size="1GiB", start=False) as sidecar:
        process = sidecar.launch()
        until(lambda: "taking memory" in sidecar.log())
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIFE_S)
        assert (process.returncode == 2 and out == b"") or process.returncode == 0
        assert not sidecar.pool_path.exists()
        assert not sidecar.tables_path.exists()


# ---- while it runs ----


def test_a_client_that_does_not_read_is_forgotten_and_the_others_are_served(sidecar: Sidecar) -> None:
    sidecar.start()
    name = secrets.token_bytes(16)
    context = zmq.Context()
    with Holder(sidecar.run_directory, name), Wire(sidecar.endpoint) as wire:
        join(wire, name)
        deaf = context.socket(zmq.DEALER)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.SNDHWM, 10_000)
        deaf.connect(sidecar.endpoint)
        hello = m.encode_request(m.Hello([2, 0], b"d" * 16, b"t" * 16, name, 1, "deaf"), 1)
        deaf.send(hello)
        status = m.encode_request(m.StatusRequest(), 2)

        def flooded() -> bool:
            for _ in range(500):
                try:
                    deaf.send(status, zmq.NOBLOCK)
                except zmq.Again:
                    break
            return "connection forgotten" in sidecar.log()

        sidecar.until(flooded)
        assert isinstance(wire.ask(m.Lookup(0, KEYS)), m.LookupReply)
        deaf.close()
    context.term()


def test_memory_does_not_grow_with_traffic(sidecar: Sidecar) -> None:
    sidecar.start()
    name = secrets.token_bytes(16)
    with Holder(sidecar.run_directory, name), Wire(sidecar.endpoint) as wire:
        index = join(wire, name)

        def work(rounds: int) -> int:
            for n in range(rounds):
                keys = b"".join(secrets.token_bytes(32) for _ in range(64))
                granted = wire.ask(m.Reserve(index, n, keys, bytes(128)))
                assert isinstance(granted, m.HandlesReply)
                done = wire.ask(m.Commit(n, keys, bytes(128), granted.generations, bytes(8 * 64)))
                assert isinstance(done, m.StatusesReply)
                assert set(done.statuses) == {Status.OK}
                wire.ask(m.Acquire(index, n, keys))
                wire.ask(m.Release(n.to_bytes(8, "little")))
            return anonymous_kib(sidecar.pid)

        before = work(300)
        assert work(600) - before < 2048
        assert resident_kib(sidecar.pid) < 60 * 1024


def anonymous_kib(pid: int) -> int:
    return status_kib(pid, "RssAnon")


def resident_kib(pid: int) -> int:
    """Beside pool and tables."""
    return status_kib(pid, "RssAnon") + status_kib(pid, "RssFile")


def status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise AssertionError(name)
