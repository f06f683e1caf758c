"""The loop around a core that is not there: what it does with messages that the core never sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hostkv.sidecar import loop

from tests.support import PATIENCE_S


class Core:
    """Has transfers under way until the last message has come, so that a restart waits. The messages come when it has begun to."""

    def __init__(self, send: Callable[[bytes], object], messages: list[bytes]) -> None:
        self._send, self._unsent, self._left = send, list(messages), len(messages)
        self._asked = 0
        self.seen: list[bytes | int] = []

    def handle(self, connection: bytes, payload: bytes, now_ns: int) -> bytes:
        self.seen.append(payload)
        self._left -= 1
        return b"answer to " + payload

    def moving(self) -> bool:
        self._asked += 1
        while self._asked > 1 and self._unsent:
            self._send(self._unsent.pop(0))
        return self._left > 0

    def refuse_frames(self, frames: int) -> bytes:
        self.seen.append(frames)
        return b"refused"

    def replies(self) -> list[tuple[bytes, bytes]]:
        return []

    def forget(self, connection: bytes) -> bool:
        return False


class Stop(loop.Stop):
    """Without signals."""

    _NUMBERS = ()  # type: ignore[assignment]


@pytest.fixture
def context() -> Iterator[Any]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


@pytest.mark.parametrize("frames", [loop.MAX_FRAMES + 1, loop.MAX_FRAMES + 2, 2 * loop.MAX_FRAMES + 1, 4 * loop.MAX_FRAMES])
def test_what_is_left_of_a_message_of_too_many_frames_is_nobodys_message(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    monkeypatch.setattr(loop.Loop, "_run_timers", lambda self, now: float("inf"))
    monkeypatch.setattr(loop, "RESTART_WAIT_S", 2 * PATIENCE_S)
    run: Any = SimpleNamespace(socket_path=str(tmp_path / "s"), group_id=-1, member_files=lambda: iter(()))
    socket, flood = loop.bind(context, run), context.socket(zmq.DEALER)
    core, nothing, stop = Core(flood.send, [b"first", b"last"]), SimpleNamespace(), Stop()
    flood.connect(f"ipc://{run.socket_path}")
    flood.send_multipart([b"x"] * frames)
    parts: list[Any] = [core, nothing, run, nothing, socket, nothing, stop]
    loop.Loop(*parts).run()
    assert core.seen == [b"first", b"last"]
    assert stop.restart
    assert [flood.recv() for _ in range(2) if flood.poll(int(PATIENCE_S * 1000))] == [b"answer to first", b"answer to last"]


def test_a_restart_is_not_put_off_for_the_time_for_which_the_sidecar_is_stopped_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    core, nothing, stop = SimpleNamespace(moving=lambda: True), SimpleNamespace(register=lambda *_: None), Stop()
    run = SimpleNamespace(member_files=lambda: iter(()))
    monkeypatch.setattr(loop.zmq, "Poller", lambda: nothing)
    parts: list[Any] = [core, nothing, run, nothing, nothing, nothing, stop]
    waits = loop.Loop(*parts)
    for _ in range(2):
        stop.begin_anew(patient=True)
        assert not waits._is_over()
        now += 3600.0
        for _ in range(int(loop.RESTART_WAIT_S / loop.STEP_S)):
            assert stop.restart
            assert not waits._is_over()
            now += loop.STEP_S
        assert not stop.restart, "it was put off"
