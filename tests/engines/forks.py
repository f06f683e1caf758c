"""Programs that import an engine once, which takes half a minute, listen on a Unix socket, and fork a child for each connection: engine.py
for vLLM, serve_sglang.py for SGLang. A connection carries lines of JSON, and ends its child when it is closed.

First what the two have in common, which runs in the engine's environment; then what starts and asks them.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ANSWER_S = 900  # the bound of what may hang, far above what anything takes
SHARED_MEMORY = Path("/dev/shm")


def fork_for_each_connection(child: Callable[[socket.socket], None]) -> None:
    """The rest of `PROGRAM SOCKET READY`, which says with one byte on the descriptor READY that it listens."""
    gc.collect()
    gc.freeze()  # or each child would go through all that was imported, at each collection
    gc.unfreeze = lambda: None  # as vLLM does at an engine's end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        with open(int(sys.argv[2]), "wb") as ready:
            ready.write(b"1")
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _end_with(child, connection)
            connection.close()


def _end_with(child: Callable[[socket.socket], None], connection: socket.socket) -> None:
    """Without taking apart all that was imported, which takes longer than most tests."""
    try:
        child(connection)
    except Exception:  # noqa: BLE001  it is in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def started(command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Such a program, until the end of the `with` block; the path of its socket. What it and its children print is in `log`. Raises
    ImportError."""
    before = _left_behind()
    with tempfile.TemporaryDirectory(prefix="hostkv-") as short, log.open("w") as output:
        path = Path(short) / "forks.sock"
        reader, writer = os.pipe()
        told = [*command, path, str(writer)]
        process = subprocess.Popen(
            told, env={**os.environ, **environment}, cwd=HERE, stdout=output, stderr=subprocess.STDOUT, pass_fds=[writer]
        )
        try:
            os.close(writer)
            with open(reader, "rb") as ready:
                if not ready.read(1):
                    raise ImportError(f"the engine cannot be imported: {log.read_text()[-2000:]}")
            yield path
        finally:
            process.terminate()
            process.wait()
            for left in _left_behind() - before:
                left.unlink(missing_ok=True)


def _left_behind() -> set[Path]:
    """What OpenMP and SGLang leave in shared memory where they are not ended the ordinary way: vLLM kills its workers, we kill servers."""
    openmp = SHARED_MEMORY.glob("__KMP_REGISTERED_LIB_*")
    sglang = (path for names in ("sglang_loads_*", "sgl_shm_*") for path in SHARED_MEMORY.glob(names))
    return {path for path in openmp if not Path("/proc", path.name.split("_")[5]).exists()} | set(sglang)


def reserved_port() -> tuple[socket.socket, int]:
    """A TCP port of the loopback that nobody else is given as long as this socket is open, and that a server can be told to listen at."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port, port.getsockname()[1]


class Child:
    """One child of such a program, from its start to its end."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._socket.settimeout(ANSWER_S)
        self._lines = self._socket.makefile("r")

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        self._socket.sendall(json.dumps(what).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._lines.readline() or '{"error": "the process is gone"}')
        return answer

    def ends(self, within_s: float) -> bool:
        self._socket.settimeout(within_s)
        try:
            return self._socket.recv(1) == b""
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(ANSWER_S)

    def end(self) -> None:
        """The ordinary way, and waits until each of its processes is gone."""
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(1 << 16):  # the answer that a test did not wait for
            pass
        self._lines.close()
        self._socket.close()
