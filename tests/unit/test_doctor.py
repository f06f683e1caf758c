"""`hostkv doctor` on hosts that really are as broken as it says; where a kernel cannot be made so, on files that say the same."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostkv.cext import Index
from hostkv.sidecar import doctor
from hostkv.sidecar.config import GIB, MIB
from hostkv.sidecar.limits import MIN_FILES
from hostkv.sidecar.page import size_text
from hostkv.sidecar.tiers.directory import default_slab_bytes
from hostkv.sidecar.tiers.disk import descriptors

from tests.support import LIFE_S, PATIENCE_S, Sidecar, hostkv
from tests.tiers import Rig

MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a tmpfs and give files away")
PAST = 10**9  # long before any file of a test, in seconds since 1970


def examined(*flags: str, before: tuple[str, ...] = ()) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and subject -> (level, the rest of the line). `before`: a command that runs it, such as prlimit."""
    program = f"from hostkv.sidecar import apart, cli; apart.HUNG_S = {PATIENCE_S}; exit(cli.main())"  # disks take what time they like
    command = [*before, sys.executable, "-c", program, "doctor", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIFE_S, check=False)
    assert done.stderr == ""
    lines = {}
    for line in done.stdout.splitlines():
        level, _, rest = line.partition(" ")
        subject, _, found = rest.strip().partition(": ")
        lines[subject] = (level, found)
    return done.returncode, lines


def in_a_child(what: Callable[[], str]) -> str:
    """What it says in a process that may spoil itself."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, what().encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path / "sidecar") as sidecar:
        yield sidecar


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def at(directory: Path) -> tuple[str, ...]:
    return ("--endpoint", f"ipc://{directory}/control.sock", "--pool-size", "64MiB")


# ---- a host that is well ------------------------------------------------------------------------------------------------------------
def test_a_host_that_is_well_has_no_problem_and_a_line_for_each_check(tmp_path: Path) -> None:
    code, lines = examined(*at(tmp_path / "run"), "--disk", str(tmp_path))
    assert (code, [line for line in lines.values() if line[0] == "problem"]) == (0, [])
    for subject in ("versions", "kernel", "memory", "locked memory", "open files", "io_uring", "huge pages"):
        assert subject in lines
    assert "the first start makes it" in lines[f"run directory {tmp_path}/run"][1]
    assert not (tmp_path / "run").exists()


def test_a_sidecar_that_runs_is_named_and_no_file_of_it_changes(sidecar: Sidecar) -> None:
    before = {path: path.stat() for path in sidecar.run_directory.rglob("*") if path.is_file()}
    code, lines = examined(*at(sidecar.run_directory), "--pool-name", sidecar.pool_name)
    assert code == 0
    assert f"held by pid {sidecar.pid}" in lines[f"run directory {sidecar.run_directory}"][1]
    assert lines[f"file {sidecar.tables_path}"][0] == "ok"
    assert f"pool {sidecar.pool_path}" not in lines
    after = {path: path.stat() for path in sidecar.run_directory.rglob("*") if path.is_file()}
    assert {path: (info.st_ino, info.st_size, info.st_mode) for path, info in after.items()} == {
        path: (info.st_ino, info.st_size, info.st_mode) for path, info in before.items()
    }


# ---- memory -------------------------------------------------------------------------------------------------------------------------
@MOUNTS
def test_a_tmpfs_of_64_mib_is_too_small_as_it_is_in_a_container(tmp_path: Path, small_tmpfs: Path) -> None:
    file = tmp_path / "hostkv.yaml"
    file.write_text(f"pool: {{path: {small_tmpfs}}}")
    code, lines = examined(*at(tmp_path / "run"), "--config", str(file))
    assert code == 1
    assert lines[f"memory file system {small_tmpfs}"][0] == "problem"
    assert "--shm-size=" in lines[f"memory file system {small_tmpfs}"][1]


@MOUNTS
def test_memory_that_the_pool_has_already_is_not_asked_for_again(tmp_path: Path, small_tmpfs: Path) -> None:
    config = f"pool: {{path: {small_tmpfs}, size: 48MiB}}"
    with Sidecar(tmp_path / "sidecar", pool_size="48MiB", config=config) as sidecar:
        sidecar.kill()
        flags = ("--config", f"{sidecar.directory}/hostkv.yaml", "--endpoint", sidecar.endpoint)
        assert examined(*flags)[0] == 1  # room for a second one is not there
        assert examined(*flags, "--pool-name", sidecar.pool_name)[0] == 0
        assert hostkv("clear", "--endpoint", sidecar.endpoint).returncode == 0


@pytest.mark.parametrize("path", ["/proc", "/nonexistent"])
def test_a_pool_path_that_is_no_memory_is_a_problem(tmp_path: Path, path: str) -> None:
    file = tmp_path / "hostkv.yaml"
    file.write_text(f"pool: {{path: {path}}}")
    code, lines = examined(*at(tmp_path / "run"), "--config", str(file))
    assert (code, lines[f"memory file system {path}"][0]) == (1, "problem")
    assert "tmpfs" in lines[f"memory file system {path}"][1]


@MOUNTS
def test_huge_pages_are_told_as_mounted(small_tmpfs: Path, tmp_path: Path) -> None:
    switch = tmp_path / "shmem_enabled"
    switch.write_text("always within_size advise [never] deny force\n")
    assert "mount -t tmpfs -o huge=advise" in doctor.huge_pages(str(small_tmpfs), str(switch)).found
    subprocess.run(["mount", "-o", "remount,huge=advise", str(small_tmpfs)], check=True)
    assert "mount -t" not in doctor.huge_pages(str(small_tmpfs), str(switch)).found
    switch.write_text("always within_size advise never [deny] force\n")
    assert "none for a pool" in doctor.huge_pages(str(small_tmpfs), str(switch)).found


@pytest.mark.parametrize(
    "available_kib, limit, level",
    [
        (64 * GIB >> 10, None, "ok"),
        (3 * GIB >> 10, None, "problem"),
        (64 * GIB >> 10, 2 * GIB, "problem"),
        ((4 * GIB >> 10) + 9, None, "warning"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_what_host_and_control_group_leave(
    tmp_path: Path, available_kib: int, limit: int | None, level: str, version: int
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    (tmp_path / "cgroup").write_text("0::/a/b\n" if version == 2 else "9:cpu:/x\n4:memory:/a/b\n")
    group = tmp_path / "mounted" / ("" if version == 2 else "memory") / "a"  # a limit of the outer group counts
    group.mkdir(parents=True)
    name, none = ("memory.max", "max") if version == 2 else ("memory.limit_in_bytes", str((1 << 63) - 4096))
    (group / name).write_text(f"{none if limit is None else limit}\n")
    files = (str(tmp_path / "meminfo"), str(tmp_path / "cgroup"), str(tmp_path / "mounted"))
    line = doctor.memory(4 * GIB, *files)
    assert line.level == level
    assert ("control group" in line.found) == (limit is not None)


# ---- limits of the process ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("files, level", [(64, "warning"), (40, "problem")])
def test_few_descriptors_are_a_warning_and_too_few_a_problem(tmp_path: Path, files: int, level: str) -> None:
    _, lines = examined(*at(tmp_path / "run"), before=("prlimit", f"--nofile={files}:{files}"))
    assert lines["open files"][0] == level
    assert "LimitNOFILE=" in lines["open files"][1]


def test_little_locked_memory_is_a_warning_that_says_whom_it_concerns(tmp_path: Path) -> None:
    _, lines = examined(*at(tmp_path / "run"), before=("prlimit", "--memlock=65536:65536"))
    assert lines["locked memory"][0] == "warning"
    assert "only engines with a device" in lines["locked memory"][1]


def test_enough_locked_memory_is_ok(tmp_path: Path) -> None:
    _, lines = examined(*at(tmp_path / "run"), "--pool-size", "1MiB", before=("prlimit", f"--memlock={MIB}:{MIB}"))
    assert lines["locked memory"][0] == "ok"


# ---- the run directory --------------------------------------------------------------------------------------------------------------
def test_a_run_directory_that_others_may_write_to_is_a_problem(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o777)
    code, lines = examined(*at(run))
    assert (code, lines[f"run directory {run}"][0]) == (1, "problem")
    assert f"chmod 0700 {run}" in lines[f"run directory {run}"][1]


@MOUNTS
def test_a_run_directory_of_somebody_else_is_a_problem(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    os.chown(run, 12345, -1)
    code, lines = examined(*at(run))
    assert (code, lines[f"run directory {run}"][0]) == (1, "problem")
    assert "uid 12345" in lines[f"run directory {run}"][1]


def test_a_run_directory_that_cannot_be_made_is_a_problem_with_its_command(tmp_path: Path) -> None:
    code, lines = examined(*at(tmp_path / "absent" / "run"))
    assert (code, lines[f"run directory {tmp_path}/absent/run"][0]) == (1, "problem")
    assert f"mkdir -p {tmp_path}/absent" in lines[f"run directory {tmp_path}/absent/run"][1]


def test_what_a_killed_sidecar_left_in_its_run_directory_is_told(sidecar: Sidecar) -> None:
    program = (
        "import sys, time; from hostkv.connector import Client; client = Client(sys.argv[1])\n"
        "while not client.serving(): time.sleep(0.01)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program, sidecar.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline()
        sidecar.kill()
        (lock,) = (sidecar.run_directory / "members").iterdir()
        os.utime(lock, (PAST, PAST))
        assert "left lock files" not in examined(*at(sidecar.run_directory))[1]
        client.kill()
    os.utime(lock, (PAST, PAST))
    _, lines = examined(*at(sidecar.run_directory))
    assert lines["left lock files"] == ("warning", "1 of processes that have ended; the next hostkv serve removes them")
    assert f"{sidecar.run_directory}/control.sock" in lines["left sockets"][1]
    sidecar.start()
    _, lines = examined(*at(sidecar.run_directory))
    assert "left lock files" not in lines
    assert "left sockets" not in lines


@MOUNTS
@pytest.mark.parametrize("groups, level", [([4242], "ok"), ([], "problem")])
def test_a_group_must_be_one_of_ours_where_we_are_not_root(groups: list[int], level: str) -> None:
    assert [line.level for line in doctor.group(4242)] == ["ok"]

    def line() -> str:
        os.setgroups(groups)
        os.setgid(12345)
        os.setuid(12345)
        return "".join(map(str, doctor.group(4242)))

    assert in_a_child(line).startswith(level)


def test_keys_for_tcp_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "hostkv.yaml"
    file.write_text(f"tcp: {{listen: '127.0.0.1:9401', keys: {tmp_path}/keys}}")
    flags = (*at(tmp_path / "run"), "--config", str(file))
    code, lines = examined(*flags)
    assert (code, lines["keys for TCP"][0]) == (1, "problem")
    assert f"hostkv keygen {tmp_path}/keys" in lines["keys for TCP"][1]
    assert hostkv("keygen", f"{tmp_path}/keys", "--client", "a").returncode == 0
    assert examined(*flags)[0] == 0
    (tmp_path / "keys" / "server.key_secret").chmod(0o644)
    code, lines = examined(*flags)
    assert (code, "chmod 0600" in lines["keys for TCP"][1]) == (1, True)


# ---- files of pools -----------------------------------------------------------------------------------------------------------------
def test_a_pool_that_a_killed_sidecar_left_is_told_with_the_command_that_removes_it(sidecar: Sidecar) -> None:
    sidecar.kill()
    _, lines = examined(*at(sidecar.run_directory))
    level, found = lines[f"pool {sidecar.pool_path}"]
    assert level == "warning"
    assert found.startswith("65.")  # MiB, of payload and tables
    assert "hostkv serve serves it again" in found
    command = shlex.split(found.partition("; ")[2].removesuffix(" removes it"))
    assert hostkv(*command[1:]).returncode == 0
    assert f"pool {sidecar.pool_path}" not in examined(*at(sidecar.run_directory))[1]


@pytest.mark.parametrize("size, why", [(0, "creation was never finished"), (4096, "4096 bytes"), (100, "100 bytes")])
def test_a_pool_whose_tables_are_cut_is_told_to_be_useless(sidecar: Sidecar, size: int, why: str) -> None:
    sidecar.kill()
    os.truncate(sidecar.tables_path, size)
    _, lines = examined(*at(sidecar.run_directory))
    assert "useless (" in lines[f"pool {sidecar.pool_path}"][1]
    assert why in lines[f"pool {sidecar.pool_path}"][1]


def test_a_pool_that_a_sidecar_of_another_run_directory_serves_is_a_problem(sidecar: Sidecar, tmp_path: Path) -> None:
    code, lines = examined(*at(tmp_path), "--pool-name", sidecar.pool_name)
    assert code == 1
    level, found = lines[f"pool {sidecar.pool_path}"]
    assert level == "problem"
    assert "another run directory" in found


def test_files_of_others_beside_the_pools_are_not_pools(tmp_path: Path) -> None:
    other = Path("/dev/shm") / f"hostkv-test-{os.getpid()}-foreign"
    tables = other.with_name(f"{other.name}.tables")
    link = other.with_name(f"{other.name}-link.tables")
    try:
        other.write_text("not ours")
        tables.write_text("neither is this")
        link.symlink_to(tables)
        _, lines = examined(*at(tmp_path / "run"))
        assert not [subject for subject in lines if other.name in subject]
    finally:
        for path in (other, tables, link):
            path.unlink(missing_ok=True)


def test_a_pool_that_others_may_write_to_is_a_problem_with_its_command(sidecar: Sidecar) -> None:
    sidecar.tables_path.chmod(0o666)
    flags = (*at(sidecar.run_directory), "--pool-name", sidecar.pool_name)
    code, lines = examined(*flags)
    level, found = lines[f"file {sidecar.tables_path}"]
    assert (code, level) == (1, "problem")
    subprocess.run(shlex.split(found.partition("; ")[2]), check=True)
    assert examined(*flags)[0] == 0


# ---- the disk tier ------------------------------------------------------------------------------------------------------------------
def deny(system_call: int, code: int) -> None:
    """Makes one system call of this process fail, as a container's seccomp profile does. A filter of struct sock_filter
    (linux/filter.h): load the number, compare, return SECCOMP_RET_ERRNO or SECCOMP_RET_ALLOW."""
    program = b"".join(
        struct.pack("<HBBI", *step)
        for step in ((0x20, 0, 0, 0), (0x15, 0, 1, system_call), (0x06, 0, 0, 0x50000 | code), (0x06, 0, 0, 0x7FFF0000))
    )
    steps = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        os._exit(99)


@pytest.mark.parametrize(
    "code, words", [(errno.EPERM, "denied by seccomp"), (errno.ENOSYS, "not in this kernel"), (errno.EMFILE, "Too many")]
)
@pytest.mark.parametrize("asked_for, level", [(False, "warning"), (True, "problem")])
def test_io_uring_that_is_denied_is_a_warning_and_a_problem_where_it_must_be(
    tmp_path: Path, code: int, words: str, asked_for: bool, level: str
) -> None:
    switch = tmp_path / "io_uring_disabled"

    def lines() -> str:
        deny(doctor.IO_URING_SETUP, code)
        switch.write_text("0\n")
        line = str(doctor.io_uring(asked_for, str(switch)))
        switch.write_text("2\n")
        return line + (str(doctor.io_uring(asked_for, str(switch))) if code == errno.EPERM else "")

    line = in_a_child(lines)
    assert line.startswith(f"{level:8} io_uring: ")
    assert words in line
    assert "falls back to threads" in line
    assert code != errno.EPERM or "sysctl kernel.io_uring_disabled=0" in line


def test_a_build_without_liburing_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        why = "built without liburing"

        def __init__(self, fd: int, size: int) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(doctor, "Io", Without)
    line = doctor.io_uring(False)
    assert line[:3] == ("warning", "io_uring", "hostkv was built without liburing")
    assert "apt-get install liburing-dev" in line.fix


def with_tier(tmp_path: Path, *paths: Path, **more: object) -> tuple[str, ...]:
    """Flags of a configuration with a disk tier of 64 MiB in each of these."""
    tier = {"type": "disk", "path": [str(path) for path in paths], "size": f"{64 * len(paths)}MiB", **more}
    (tmp_path / "tier.yaml").write_text(json.dumps({"tiers": [tier]}))
    return (*at(tmp_path / "run"), "--config", str(tmp_path / "tier.yaml"))


def test_directories_of_the_configured_tier_are_looked_at_and_not_changed(tmp_path: Path) -> None:
    with Rig(tmp_path / "a", size_bytes=64 * MIB) as rig:
        rig.write_all(range(3))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    code, lines = examined(*with_tier(tmp_path, tmp_path / "a", tmp_path / "b"))
    assert (code, [line for line in lines.values() if line[0] == "problem"]) == (0, [])
    assert f"8 slabs of {size_text(default_slab_bytes(64 * MIB))}, 1 namespaces, nobody has it" in lines[f"disk {tmp_path}/a"][1]
    assert "the first start makes it" in lines[f"disk {tmp_path}/b"][1]
    assert lines[f"O_DIRECT on {tmp_path}/a"] == ("ok", "works")
    assert lines[f"O_DIRECT on {tmp_path}/b"] == ("ok", "works")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == before
    assert not (tmp_path / "b").exists()
    level, found = lines[f"room on {tmp_path}/a, {tmp_path}/b"]
    assert (level, "are to be taken; all on one file system" in found) == ("warning", True), found


def test_who_has_a_directory_is_named(tmp_path: Path) -> None:
    flags = with_tier(tmp_path, tmp_path / "a")
    with Rig(tmp_path / "a", size_bytes=64 * MIB):
        code, lines = examined(*flags)
        assert (code, lines[f"disk {tmp_path}/a"][0]) == (1, "problem")
        assert f"held by pid {os.getpid()}, a sidecar on ipc:///run/x/control.sock" in lines[f"disk {tmp_path}/a"][1]
    with Sidecar(tmp_path / "sidecar", config=(tmp_path / "tier.yaml").read_text()) as sidecar:
        sidecar.until(lambda: sidecar.status()["tiers"][0]["directories"][0]["state"] == "serving")
        code, lines = examined(*at(sidecar.run_directory), "--pool-name", sidecar.pool_name, "--config", flags[-1])
        assert code == 0
        assert f"held by pid {sidecar.pid}" in lines[f"disk {tmp_path}/a"][1]
        assert lines[f"file /dev/shm/{sidecar.pool_name}.index"][0] == "ok"


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: (path / "directory.json").unlink(), "no directory of a disk tier"),
        (lambda path: (path / "directory.json").write_text('{"format": 99}'), "newer version of hostkv (format 99"),
        (lambda path: (path / "directory.json").write_text("{"), "directory.json: is damaged"),
        (lambda path: path.chmod(0o770), "chmod 0700"),
        (lambda path: shutil.rmtree(path) or path.write_text(""), "is not a directory"),
    ],
    ids=["no list", "newer", "damaged", "mode", "a file"],
)
def test_a_directory_that_the_tier_cannot_have_is_a_problem(tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    with Rig(tmp_path / "a", size_bytes=64 * MIB):
        pass
    spoil(tmp_path / "a")
    code, lines = examined(*with_tier(tmp_path, tmp_path / "a"))
    assert (code, lines[f"disk {tmp_path}/a"][0]) == (1, "problem")
    assert words in lines[f"disk {tmp_path}/a"][1]


def test_slabs_that_a_smaller_size_has_no_room_for_are_told(tmp_path: Path) -> None:
    with Rig(tmp_path / "a", size_bytes=96 * MIB):
        pass
    with Rig(tmp_path / "b", size_bytes=GIB):
        pass
    _, lines = examined(*with_tier(tmp_path, tmp_path / "a", tmp_path / "b"))
    assert lines[f"slabs in {tmp_path}/a"] == ("warning", "3 are more than its size allows; the next hostkv serve removes them")
    assert lines[f"slabs in {tmp_path}/b"][0] == "warning"
    assert "start it anew" in lines[f"slabs in {tmp_path}/b"][1]


@MOUNTS
def test_a_file_system_with_too_little_room_or_of_a_strange_kind_is_told(tmp_path: Path, small_tmpfs: Path) -> None:
    (small_tmpfs / "fill").write_bytes(bytes(40 * MIB))
    _, lines = examined(*with_tier(tmp_path, small_tmpfs / "a"))
    assert lines[f"room on {small_tmpfs}/a"][0] == "warning"
    assert "24 MiB free, 64 MiB are to be taken; the tier will have less than its size" in lines[f"room on {small_tmpfs}/a"][1]
    assert lines[f"disk {small_tmpfs}/a"][0] == "warning"
    assert "no reboot survives" in lines[f"disk {small_tmpfs}/a"][1]


@MOUNTS
def test_a_file_system_without_direct_io_is_a_warning(tmp_path: Path) -> None:
    place = tmp_path / "ramfs"
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", str(place)], check=True)
    try:
        level, found = examined(*with_tier(tmp_path, place / "a"))[1][f"O_DIRECT on {place}/a"]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    assert level == "warning"
    assert "ramfs does not offer it; blocks go through the page cache" in found


def test_the_index_of_the_tier_needs_room_in_memory(tmp_path: Path) -> None:
    _, without = examined(*at(tmp_path / "run"))
    _, lines = examined(*with_tier(tmp_path, tmp_path / "a", max_blocks=1 << 24))
    assert "GiB" in lines["memory"][1].split("the pool needs")[1]
    assert "GiB" not in without["memory"][1].split("the pool needs")[1]


def test_a_tier_needs_files_and_without_them_does_not_start(tmp_path: Path) -> None:
    flags = with_tier(tmp_path, tmp_path / "a")
    files = MIN_FILES + descriptors(1)
    for limit, level in ((files - 1, "problem"), (files, "warning")):
        _, lines = examined(*flags, before=("prlimit", f"--nofile={limit}:{limit}"))
        assert lines["open files"][0] == level
        assert f"and {descriptors(1)} for the disk tier" in lines["open files"][1]


def test_little_locked_memory_concerns_io_uring_too_where_there_is_a_tier(tmp_path: Path) -> None:
    _, lines = examined(*with_tier(tmp_path, tmp_path / "a"), before=("prlimit", "--memlock=65536:65536"))
    assert "and io_uring" in lines["locked memory"][1]


def test_transfers_of_a_killed_sidecar_are_told_until_they_have_ended(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "sidecar", config=f"tiers: [{{type: disk, path: {tmp_path}/a, size: 64MiB}}]") as sidecar:
        sidecar.until(lambda: sidecar.status()["tiers"][0]["directories"][0]["state"] == "serving")
        sidecar.kill()
        flags = at(sidecar.run_directory)
        assert "left transfers" not in examined(*flags)[1]
        with (tmp_path / "a" / "00000.slab").open("r+b") as transfer:
            fcntl.flock(transfer, fcntl.LOCK_EX)
            level, found = examined(*flags)[1]["left transfers"]
            assert (level, f"under way in {tmp_path}/a" in found) == ("warning", True), found
        assert "left transfers" not in examined(*flags)[1]
        (sidecar.run_directory / "tiers").write_text("{")
        assert "tiers says nothing" in examined(*flags)[1]["left transfers"][1]
        level, found = examined(*flags)[1][f"pool {sidecar.pool_path}"]
        assert f"hostkv clear --pool-name {sidecar.pool_name}" in found


def test_a_pipe_and_a_folder_among_the_pools_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tables")
    os.mkfifo(tmp_path / "b.index")
    (tmp_path / "c.tables").mkdir()
    assert [(line.level, line.subject) for line in doctor.left_pools(str(tmp_path), "")] == [("ok", "left pools")]


def test_what_removes_a_left_pool_empties_no_tier(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "sidecar", config=f"tiers: [{{type: disk, path: {tmp_path}/a, size: 64MiB}}]") as sidecar:
        sidecar.until(lambda: sidecar.status()["tiers"][0]["directories"][0]["state"] == "serving")
        sidecar.kill()
        _, lines = examined(*at(sidecar.run_directory), "--config", f"{sidecar.directory}/hostkv.yaml")
        command = shlex.split(lines[f"pool {sidecar.pool_path}"][1].partition("; ")[2].removesuffix(" removes it"))
        done = hostkv(*command[1:])
        assert (done.returncode, "disk" in done.stdout) == (0, False)
        assert not sidecar.pool_path.exists()


def test_the_index_of_a_pool_that_is_gone_is_told(tmp_path: Path) -> None:
    left = Path("/dev/shm") / f"hostkv-test-{os.getpid()}-left.index"
    other = left.with_name(f"hostkv-test-{os.getpid()}-other.index")
    try:
        with left.open("w+b") as file:
            file.truncate(Index.bytes_needed(1024))
            Index(file.fileno(), 1024, 1 << 20)
        other.write_text("somebody's")
        _, lines = examined(*at(tmp_path / "run"))
        assert lines[f"file {left}"][0] == "warning"
        assert f"rm {left}" in lines[f"file {left}"][1]
        assert f"file {other}" not in lines
    finally:
        left.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_a_directory_that_cannot_be_written_to_is_no_place_for_the_disk_tier(tmp_path: Path) -> None:
    code, lines = examined(*at(tmp_path / "run"), "--disk", str(tmp_path), "--disk", str(tmp_path / "absent" / "a"))
    assert lines[f"O_DIRECT on {tmp_path}"][0] == "ok"
    assert (code, lines[f"disk {tmp_path}/absent/a"]) == (1, ("problem", f"{tmp_path}/absent is not there; mkdir -p {tmp_path}/absent"))
    assert list(tmp_path.iterdir()) == []


@MOUNTS
def test_a_full_disk_is_no_place_for_the_disk_tier(tmp_path: Path, small_tmpfs: Path) -> None:
    (small_tmpfs / "fill").write_bytes(bytes(64 * MIB))
    _, lines = examined(*at(tmp_path / "run"), "--disk", str(small_tmpfs))
    assert lines[f"O_DIRECT on {small_tmpfs}"] == ("problem", "No space left on device; the disk tier must be able to write there")
