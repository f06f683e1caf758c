"""The member lock and its heartbeat, with real processes: what can be told of one that is alive, stopped, dead, forked or exec'd."""

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostkv.cext import lock_look, lock_take

from tests.support import until

HOLD = "import sys; from hostkv.cext import lock_take; lock_take(sys.argv[1]); print('held', flush=True)\n"


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
        assert lock_look(str(path))[0] == running.pid
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        running.kill()
        running.wait()
        assert lock_look(str(path))[0] == -1


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
        assert lock_look(str(path))[0] == -1
        running.stdin.close()
        assert running.stdout.readline() == "child ends\n"


def test_a_forked_child_that_ends_does_not_drop_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process(
        "import os; child = os.fork(); child or os._exit(0); os.waitpid(child, 0); print(1, flush=True); sys.stdin.read()", path
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "1\n"
        assert lock_look(str(path))[0] == running.pid


def test_exec_drops_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process("import os; os.execvp('sh', ['sh', '-c', 'echo replaced; read line'])", path) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "replaced\n"
        assert lock_look(str(path))[0] == -1


def test_a_lock_file_is_never_taken_twice(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process("sys.stdin.read()", path) as running:
        with pytest.raises(FileExistsError) as refusal:
            lock_take(str(path))
        assert refusal.value.filename == str(path)
        assert lock_look(str(path))[0] == running.pid
    with pytest.raises(FileExistsError):
        lock_take(str(path))


def test_nobody_holds_an_absent_or_unlocked_file(tmp_path: Path) -> None:
    assert lock_look(str(tmp_path / "absent")) == (-1, 0)
    (tmp_path / "file").touch()
    assert lock_look(str(tmp_path / "file")) == (-1, 0)


def test_what_is_not_a_lock_file_neither_hangs_nor_is_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert lock_look(str(tmp_path / "fifo")) == (-1, 0)
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with pytest.raises(OSError, match="link"):
        lock_look(str(tmp_path / "link"))
    with pytest.raises(NotADirectoryError):
        lock_look(str(tmp_path / "fifo" / "lock"))


def beat(path: Path) -> int:
    return lock_look(str(path))[1]


def moves_on(path: Path) -> None:
    """Waits until the heartbeat is another one."""
    before = beat(path)
    assert before != 0
    until(lambda: beat(path) not in (0, before))


def test_the_mode_is_the_same_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o077, 0o777, 0):
        path = tmp_path / str(umask)
        code = f"import os; os.umask({umask}); {HOLD}"
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, stdout=subprocess.DEVNULL)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_heartbeat_is_there_at_once_and_moves_while_the_process_holds_its_gil(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    hold_gil = "import re; re.match('(a*)*$', 'a' * 60 + 'b')"  # one call that never gives it back
    with process(hold_gil, path):
        moves_on(path)
        moves_on(path)


def test_the_heartbeat_stands_still_while_the_process_is_stopped_and_moves_when_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    witness = tmp_path / "witness"
    with process("sys.stdin.read()", path) as running, process("sys.stdin.read()", witness):
        running.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)
        before = beat(path)
        moves_on(witness)
        moves_on(witness)
        assert beat(path) == before != 0
        assert lock_look(str(path))[0] == running.pid
        running.send_signal(signal.SIGCONT)
        moves_on(path)


def test_a_forked_child_has_neither_lock_nor_heartbeat_and_may_take_its_own(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import os; os.fork() and os._exit(0); lock_take(sys.argv[1] + '.child'); print(os.getpid(), flush=True); sys.stdin.read()"
    with process(code, path) as running:
        assert running.stdout is not None
        child = int(running.stdout.readline())
        assert running.wait() == 0
        own = Path(f"{path}.child")
        before = beat(path)
        moves_on(own)
        moves_on(own)
        assert lock_look(str(own))[0] == child
        assert (lock_look(str(path))[0], beat(path)) == (-1, before)


def test_signals_are_never_handled_in_the_thread_of_the_heartbeat(tmp_path: Path) -> None:
    code = """if True:
        import os, signal
        blocked = [l.split()[1] for t in os.listdir('/proc/self/task') if int(t) != os.getpid()
                   for l in open(f'/proc/self/task/{t}/status') if l.startswith('SigBlk')]
        print(blocked, signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
        sys.stdin.read()"""
    with process(code, tmp_path / "lock") as running:
        assert running.stdout is not None
        mask, own = running.stdout.readline().split(" ", 1)
        blocked = int(mask.strip("[]'"), 16)
        assert all(blocked >> signum - 1 & 1 for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD))
        assert own == "set()\n"  # that of the caller is as it was


TRY = """
try:
    lock_take(sys.argv[1])
except OSError as error:
    print(error.errno, error.filename)
"""


def failing(limit: str, path: Path) -> str:
    """What `lock_take` raises in a process under a limit."""
    code = f"import resource, signal, sys; from hostkv.cext import lock_take\n{limit}{TRY}"
    return subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True).stdout


def test_a_heartbeat_that_cannot_be_written_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    limit = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    assert failing(limit, path) == f"{errno.EFBIG} {path}\n"
    assert not path.exists()


def test_a_heartbeat_whose_thread_cannot_start_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    limit = "now = int(open('/proc/self/statm').read().split()[0]) * 4096; resource.setrlimit(resource.RLIMIT_AS, (now, now))"
    assert failing(limit, path) == f"{errno.EAGAIN} {path}\n"
    assert not path.exists()


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as refusal:
        lock_take(str(tmp_path / "no" / "lock"))
    assert refusal.value.filename == str(tmp_path / "no" / "lock")
    with pytest.raises(ValueError, match="null"):
        lock_take("a\0b")
    with pytest.raises(TypeError):
        lock_look(3)  # type: ignore[arg-type]
