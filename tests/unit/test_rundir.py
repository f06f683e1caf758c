"""What others put into a run directory, and what is read back from it; the sidecar on it is a fake."""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP, SIGTERM
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hostkv.sidecar import attach, loop, pool, rundir
from hostkv.sidecar.errors import StartupError
from hostkv.sidecar.rundir import RunDirectory

from tests.support import LIFE_S, PATIENCE_S


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "members").mkdir()
    return RunDirectory(str(tmp_path), str(tmp_path / "control.sock"), -1, -1, "", "")


def put(run: RunDirectory, *, link: bool, age_s: float) -> Path:
    path = Path(run.member_path(secrets.token_bytes(16)))
    if link:
        path.symlink_to("nowhere")
    else:
        path.touch()
    at = time.time() - age_s
    os.utime(path, (at, at), follow_symlinks=False)
    return path


def test_a_sweep_removes_links_too_but_nothing_young_and_nothing_of_a_member(run: RunDirectory) -> None:
    old, young, of_member = (put(run, link=True, age_s=age_s) for age_s in (60, -3600, 60))
    run.sweep(run.member_files(), time.time(), {bytes.fromhex(of_member.name)})
    assert [os.path.lexists(path) for path in (old, young, of_member)] == [False, True, True]


def test_a_lock_that_is_late_because_the_machine_is_busy_is_no_reason_not_to_start(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    waiting = SimpleNamespace(select=lambda *arguments: (waits.append(arguments[3]), select.select(*arguments))[1])
    monkeypatch.setattr(rundir, "select", waiting)
    rundir.check_locks(run.path)
    assert waits[0] >= 30


def test_the_process_that_tries_a_lock_keeps_nothing_of_ours(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be kept on where we are killed meanwhile."""
    ours = os.open(f"{run.path}/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(ours, fcntl.LOCK_EX)
    freed = []

    def told(*arguments: Any) -> tuple[list[int], ...]:
        found = select.select(*arguments)
        os.close(ours)
        with open(f"{run.path}/lock") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            freed.append(True)
        return found

    monkeypatch.setattr(rundir, "select", SimpleNamespace(select=told))
    rundir.check_locks(run.path)
    assert freed


@contextmanager
def orphaned(path: Path, seconds: float) -> Iterator[int]:
    """The flock of a file is kept for so long by what a process left that has ended, whose pid is written there."""
    with subprocess.Popen(["true"]) as gone:
        pass
    path.write_text(f"{gone.pid}\n")
    with path.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keeper = subprocess.Popen(["sleep", str(seconds)], pass_fds=(lock.fileno(),))
    try:
        yield gone.pid
    finally:
        keeper.kill()
        keeper.wait()


def test_a_lock_that_a_process_left_which_has_ended_is_waited_for(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "FREED_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(rundir, "GONE_WAIT_S", PATIENCE_S)
    endpoint = f"ipc://{run.path}/control.sock"
    with orphaned(Path(run.path, "lock"), 1.0):
        assert rundir.holder(endpoint) is None
    with orphaned(Path(run.path, "lock"), 1.0):
        os.close(rundir.borrow(endpoint).lock_fd)


def test_a_holder_that_cannot_be_seen_from_here_is_one_all_the_same(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one in another container."""
    monkeypatch.setattr(rundir, "FREED_WAIT_S", 0.5)
    endpoint = f"ipc://{run.path}/control.sock"
    with orphaned(Path(run.path, "lock"), LIFE_S) as pid:
        assert rundir.holder(endpoint) == pid
        with pytest.raises(StartupError, match=f"held by pid {pid}; run hostkv stop"):
            rundir.borrow(endpoint)


def test_who_only_looks_at_a_lock_however_long_does_not_keep_it_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []
    with (tmp_path / "lock").open("w") as wanted, (tmp_path / "lock").open() as other:

        def pause(_: float) -> None:
            pauses.append(1)
            if len(pauses) == 5 * rundir.LOCK_TRIES:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(rundir, "time", SimpleNamespace(sleep=pause, monotonic=lambda: 0.0))
        fcntl.flock(other, fcntl.LOCK_SH)
        assert rundir.try_lock(wanted.fileno())
        assert len(pauses) == 5 * rundir.LOCK_TRIES
        fcntl.flock(wanted, fcntl.LOCK_UN)
        pauses.clear()
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not rundir.try_lock(wanted.fileno())
        assert len(pauses) == rundir.LOCK_TRIES


def test_however_many_files_there_are_one_sweep_looks_at_a_bounded_number(run: RunDirectory) -> None:
    for _ in range(loop.SWEEP_FILES + 10):
        put(run, link=False, age_s=60)
    nothing = cast(Any, None)
    swept = loop.Loop(cast(Any, SimpleNamespace(locks=set)), nothing, run, nothing, nothing, nothing, nothing)
    swept._sweep()
    assert len(list(run.member_files())) == 10
    swept._sweep()
    assert not list(run.member_files())
    late = put(run, link=False, age_s=60)
    swept._sweep()
    assert not late.exists()


@pytest.mark.parametrize(
    "text, told",
    [
        (b"", (0, "", "")),
        (b"12\n/dev/shm/a\nff\n", (12, "/dev/shm/a", "ff")),
        (b"9" * 5000, (0, "", "")),
        (b"-1\n/a", (0, "/a", "")),
        (b"1\n/a\0b\nff", (1, "", "ff")),
        (b"\xff\n\xff", (0, "\ufffd", "")),
    ],
)
def test_whatever_the_lock_file_holds_is_read(tmp_path: Path, text: bytes, told: tuple[int, str, str]) -> None:
    with (tmp_path / "lock").open("w+b") as file:
        file.write(text)
        file.flush()
        assert rundir.read_lock_file(file.fileno()) == told


@pytest.mark.parametrize("path", ["/" + "x" * 6000, "/proc/version/x", "relative"])
def test_an_earlier_pool_that_cannot_be_looked_at_is_left_alone(run: RunDirectory, path: str) -> None:
    pool._discard(run, path, "ff", lambda text, last: None)


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(StartupError, match="No space left"):
        RunDirectory(str(tmp_path), "", -1, full.fileno(), "", "").write_lock_file()


def test_of_a_descriptor_that_is_no_pidfd_not_even_the_facts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an epoll or inotify descriptor are as long as its owner likes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open("/dev/null") as file:
        pidfd = os.pidfd_open(os.getpid())
        try:
            assert attach._is_of_sender(ours, pidfd) is True
        finally:
            os.close(pidfd)
        monkeypatch.setattr(attach, "open", None, raising=False)
        assert attach._is_of_sender(ours, file.fileno()) is False


def test_who_was_told_to_end_does_not_begin_anew_and_who_begins_anew_can_be_told_to_end() -> None:
    stop = loop.Stop.__new__(loop.Stop)  # without its handlers
    stop.requested = stop.restart = False
    for number, restart in ((SIGHUP, True), (SIGHUP, True), (SIGTERM, False), (SIGHUP, False)):
        stop._handle(number, None)
        assert stop.requested
        assert stop.restart is restart
