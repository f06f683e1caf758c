"""What is done in a process of its own, and what comes out when that works, fails, hangs or is ended. Disks that hang are in
tests/crash/test_hung_disk.py."""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostkv.sidecar import apart

from tests.support import PATIENCE_S, until


def test_it_returns_what_was_returned_and_prints_what_was_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def what() -> int:
        print("one", 1)
        print("zwei\udc80ö", file=sys.stderr, end="")
        print("three", flush=True)
        return 7

    assert apart.run(what) == 7
    out, err = capfd.readouterr()
    assert out == "one 1\nthree\n"
    assert err == "zwei?ö"


def test_nothing_else_is_seen_here() -> None:
    seen = []
    assert apart.run(lambda: seen.append(1) or 0) == 0
    assert seen == []


def hangs() -> int:
    print("it begins")
    read, _write = os.pipe()
    os.read(read, 1)
    return 0


class Heard(io.StringIO):
    """A child may hang from when it said that it begins, however late it comes to that."""

    def write(self, text: str) -> int:
        if "it begins" in text:
            apart.HUNG_S = 1.0
        return super().write(text)


def hung(what: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> str:
    """Does what hangs; what was said."""
    monkeypatch.setattr(apart, "HUNG_S", 2 * PATIENCE_S)
    with redirect_stdout(Heard()) as heard:
        assert apart.run(what) is None
    return heard.getvalue()


def test_who_does_nothing_hangs_and_is_told_to_end_and_what_it_said_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = hung(lambda: print(os.getpid()) or hangs(), monkeypatch)
    child, words = said.splitlines()
    assert words == "it begins"
    until(lambda: os.waitpid(int(child), os.WNOHANG)[0] == int(child))


def test_it_knows_whether_a_terminal_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert apart.run(lambda: sys.stderr.isatty()) == 0
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert apart.run(lambda: sys.stderr.isatty()) == 1


def test_who_gets_an_answer_now_and_then_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing for three times as long as one may hang. It works once between two looks, whenever that is."""
    monkeypatch.setattr(apart, "STEP_S", apart.HUNG_S / 10)
    looked, worked = (memoryview(mmap.mmap(-1, 8)).cast("Q") for _ in range(2))
    select_ = select.select

    def look(sockets: list[object], *others: object) -> tuple[list[object], ...]:
        looked[0] += 1
        until(lambda: worked[0] == looked[0])
        return ([], [], []) if looked[0] < 30 else select_(sockets, [], [])

    monkeypatch.setattr(apart, "select", SimpleNamespace(select=look))

    def what() -> int:
        while worked[0] < 30:
            while worked[0] == looked[0]:
                time.sleep(0.001)
            worked[0] += 1
        return 0

    assert apart.run(what) == 0


def test_who_waits_for_a_processor_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the child stands still, as that of one does that gets no processor for as long."""
    monkeypatch.setattr(apart, "STEP_S", 0.02)
    monkeypatch.setattr(apart, "HUNG_S", 0.2)
    monkeypatch.setattr(apart, "time", SimpleNamespace(clock_gettime_ns=lambda _: 0))

    def spins() -> int:
        end = time.monotonic() + 10 * apart.HUNG_S
        while time.monotonic() < end:
            pass
        return 0

    assert apart.run(spins) == 0


def test_a_fault_is_told_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="ended by a fault"):
        apart.run(lambda: [][1])
    assert "IndexError: list index out of range" in capsys.readouterr().err


def test_one_that_is_killed_is_a_fault() -> None:
    with pytest.raises(RuntimeError, match="-9"):
        apart.run(lambda: os.kill(os.getpid(), signal.SIGKILL) or 0)


def test_who_hangs_keeps_no_lock_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def outlives() -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a disk does that does not answer
        (tmp_path / "pid").write_text(str(os.getpid()))
        return hangs()

    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hung(outlives, monkeypatch)
    child = int((tmp_path / "pid").read_text())
    try:
        assert os.path.exists(f"/proc/{child}")
        with (tmp_path / "lock").open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


CLEANS = """
import sys, time
from pathlib import Path
from hostkv.sidecar import apart
def what():
    try:
        Path(sys.argv[1]).write_text("")
        while True:
            time.sleep(0.1)  # Python does not see a signal that comes just before a sleep until that is over
    finally:
        Path(sys.argv[1]).unlink()
apart.run(what)
"""


@contextmanager
def running(program: str, made: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", program, str(made)], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()  # its child ends with it
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_whoever_waits_is_its_end_and_it_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    with running(CLEANS, tmp_path / "made") as process:
        until((tmp_path / "made").exists)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == -number
        until(lambda: not (tmp_path / "made").exists())


def test_an_interrupt_that_comes_while_it_forks_is_not_lost(tmp_path: Path) -> None:
    """Python runs callbacks then, and writes off what they raise."""
    program = f"import os\nos.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), {int(signal.SIGINT)}))\n{CLEANS}"
    with running(program, tmp_path / "made") as process:
        assert process.wait(PATIENCE_S) == -signal.SIGINT
        until(lambda: not (tmp_path / "made").exists())


ORPHANED = """
import os, signal, sys, time
from pathlib import Path
from hostkv.sidecar import apart
parent = os.getpid()
def orphan():
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.001)
    Path(sys.argv[1], "pid.new").write_text(str(os.getpid()))
    Path(sys.argv[1], "pid.new").rename(Path(sys.argv[1], "pid"))
os.register_at_fork(after_in_child=orphan)
apart.run(lambda: Path(sys.argv[1], "worked").touch() or 0)
"""


def test_whose_parent_is_killed_before_it_could_say_that_it_ends_with_it_does_nothing(tmp_path: Path) -> None:
    with running(ORPHANED, tmp_path) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        until((tmp_path / "pid").exists)
        child = int((tmp_path / "pid").read_text())
        until(lambda: has_ended(child))
    assert not (tmp_path / "worked").exists()


def has_ended(pid: int) -> bool:
    """Whether somebody reaps it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
