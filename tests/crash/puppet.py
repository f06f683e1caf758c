"""Processes that do what a test tells them, statement by statement, so that it can stop or kill them between any two."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostkv.connector import Layout

from tests.support import LIFE_S, PATIENCE_S, PATIENT_PROGRAM, until

LAYOUT = Layout(model="m", revision="1", kv_dtype="uint8", layout_id="opaque", block_tokens=16, shard_bytes=1 << 20)

_PROGRAM = f"""
from ast import literal_eval
import ctypes, os, random, signal, socket, sys, threading, time, traceback
from hostkv.cext import buffer_address
from hostkv.connector import Client, Layout, LoadError, DumpError, SidecarUnavailable
from hostkv.schemas.errors import Status
from hostkv.schemas.messages import Abort, Commit, Reserve
{PATIENT_PROGRAM}
LAYOUT = {LAYOUT!r}

def content(block_id, size=LAYOUT.shard_bytes):
    return random.Random(block_id).randbytes(size)

def rows(buffers):
    return [[buffer_address(buffer, True)[0]] for buffer in buffers]

def save(store, ids):
    return store.wait(store.dump(ids, 0, [[content(i)] for i in ids]), {PATIENCE_S})

def load(store, ids):
    buffers = [[bytearray(LAYOUT.shard_bytes)] for _ in ids]
    store.wait(store.load(ids, 0, buffers), {PATIENCE_S})
    return [bytes(row[0]) == content(i) for i, row in zip(ids, buffers)]

def reserve(client, store, ids, tag):
    reply, link = client.call(
        Reserve(0, tag, store.keys(ids).joined, bytes(2 * len(ids))), fingerprint=store.fingerprint, count=len(ids))
    return reply

def commit(client, store, ids, tag, reply):
    request = Commit(tag, store.keys(ids).joined, bytes(2 * len(ids)), reply.generations, bytes(8 * len(ids)))
    return list(client.call(request, count=len(ids))[0].statuses)

def stop_here():
    os.kill(os.getpid(), signal.SIGSTOP)

def obey(fd):
    commands = socket.socket(fileno=fd).makefile("rw")
    for line in commands:
        scope = globals()
        scope["answer"] = None
        try:
            exec(literal_eval(line), scope)
            said = repr(scope["answer"])
        except BaseException:
            said = "!" + repr(traceback.format_exc())
        commands.write(said + chr(10))
        commands.flush()

obey(int(sys.argv[1]))
"""


class Puppet:
    """A process that executes what `do` sends it. `wrapper`: a command line in front of that of `python`. Its `understudy` is a child that
    it forks, and that says `obey(SPARE)`."""

    def __init__(self, endpoint: str = "", wrapper: Sequence[str] = (), python: str = sys.executable) -> None:
        ours, theirs = socket.socketpair()
        spare, their_spare = socket.socketpair()
        command = [*wrapper, python, "-c", _PROGRAM, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(), their_spare.fileno()), cwd="/")
        self._files = [ours, spare]
        self._lines = ours.makefile("rw")
        self.understudy = Understudy(spare)
        theirs.close()
        self.do(f"SPARE = {their_spare.fileno()}")
        their_spare.close()
        if endpoint:
            self.do(f"client = Client({endpoint!r}); store = client.open(LAYOUT)")

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, code: str) -> None:
        """Starts it; `answer` waits for its end."""
        self._lines.write(repr(code) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        return _heard(self._files[0], self._lines)

    def do(self, code: str) -> Any:
        """What the code put into `answer`."""
        self.send(code)
        return self.answer()

    def until_stopped(self) -> None:
        """Waits until it has stopped itself (stop_here())."""
        until(lambda: _state(self.pid) == "T")

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.until_stopped()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.understudy.kill()
        self._lines.close()
        for file in self._files:
            file.close()


class Understudy:
    """A forked child of a Puppet."""

    def __init__(self, spare: socket.socket) -> None:
        self._spare, self._lines, self.pid = spare, spare.makefile("rw"), 0

    def do(self, code: str) -> Any:
        self._lines.write(repr(code) + "\n")
        self._lines.flush()
        return _heard(self._spare, self._lines)

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0
        self._lines.close()


def _heard(sock: socket.socket, lines: Any) -> Any:
    sock.settimeout(LIFE_S)
    line = lines.readline()
    assert line, "the process ended"
    assert not line.startswith("!"), ast.literal_eval(line[1:])
    return ast.literal_eval(line)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
