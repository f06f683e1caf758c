"""The member lock, with real processes: what the kernel says about one that is alive, dead, forked or exec'd."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostkv.cext import lock_holder, lock_take

HOLD = "import sys; from hostkv.cext import lock_take; lock_take(sys.argv[1]); print('held', flush=True); "


@contextmanager
def process(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs HOLD and `code`, entered once it holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD + code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "held\n"
        try:
            yield running
        finally:
            running.kill()


def test_the_holder_is_named_while_it_lives_and_gone_when_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process("sys.stdin.read()", path) as running:
        assert lock_holder(str(path)) == running.pid
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        running.kill()
        running.wait()
        assert lock_holder(str(path)) == -1


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process(
        "import os; os.fork() and print('forked', flush=True); sys.stdin.read(); print('child ends', flush=True)", path
    ) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        assert running.stdout.readline() == "forked\n"
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert lock_holder(str(path)) == -1
        running.stdin.close()
        assert running.stdout.readline() == "child ends\n"


def test_a_forked_child_that_ends_does_not_drop_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process(
        "import os; child = os.fork(); child or os._exit(0); os.waitpid(child, 0); print(1, flush=True); sys.stdin.read()", path
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "1\n"
        assert lock_holder(str(path)) == running.pid


def test_exec_drops_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process("import os; os.execvp('sh', ['sh', '-c', 'echo replaced; read line'])", path) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "replaced\n"
        assert lock_holder(str(path)) == -1


def test_a_lock_file_is_never_taken_twice(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process("sys.stdin.read()", path) as running:
        with pytest.raises(FileExistsError) as refusal:
            lock_take(str(path))
        assert refusal.value.filename == str(path)
        assert lock_holder(str(path)) == running.pid
    with pytest.raises(FileExistsError):
        lock_take(str(path))


def test_nobody_holds_an_absent_or_unlocked_file(tmp_path: Path) -> None:
    assert lock_holder(str(tmp_path / "absent")) == -1
    (tmp_path / "file").touch()
    assert lock_holder(str(tmp_path / "file")) == -1


def test_what_is_not_a_lock_file_neither_hangs_nor_is_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert lock_holder(str(tmp_path / "fifo")) == -1
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with pytest.raises(OSError, match="link"):
        lock_holder(str(tmp_path / "link"))
    with pytest.raises(NotADirectoryError):
        lock_holder(str(tmp_path / "fifo" / "lock"))


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as refusal:
        lock_take(str(tmp_path / "no" / "lock"))
    assert refusal.value.filename == str(tmp_path / "no" / "lock")
    with pytest.raises(ValueError, match="null"):
        lock_take("a\0b")
    with pytest.raises(TypeError):
        lock_holder(3)  # type: ignore[arg-type]
