"""What the parts of `make bench-peers` share: processes of peers that are started, told about and ended by their own pid, and the table."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VENVS = ROOT / ".venvs"
START_S, ANSWER_S = 180, 300
QUIET = {  # nobody's use is reported to anybody
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class Unavailable(Exception):
    """A peer is not there or failed; says why."""


def say(what: str) -> None:
    print(f"== {what}", flush=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def tail(path: Path, lines: int = 3) -> str:
    return " / ".join(path.read_text(errors="replace").split("\n")[-lines - 1 :]).strip()


class Process:
    """A server, ended by its own pid. What it prints is in a file."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path, environment: dict[str, str] | None = None, **more: Any) -> None:
        self.name, self.log_path = name, log
        with log.open("a") as output:
            more = {"stdout": output, "stdin": subprocess.DEVNULL, **more}
            self.process = subprocess.Popen(command, env={**os.environ, **QUIET, **(environment or {})}, stderr=output, **more)

    def until(self, port: int) -> None:
        """Waits until it listens there."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Unavailable(f"{self.name} ended with {self.process.returncode}: {tail(self.log_path)}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise Unavailable(f"{self.name} did not listen within {START_S} s: {tail(self.log_path)}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Side(Process):
    """A client of a peer in the peer's own environment (side.py): does what it is asked, and times it itself."""

    def __init__(self, name: str, python: Path, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        program = HERE / f"{name.lower()}_side.py"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__(f"{name}'s client", [python, program, *arguments], log, environment, **pipes)

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline() or '{"error": "it is gone"}')
        except OSError as error:
            answer = {"error": str(error)}
        if "error" in answer:
            raise Unavailable(f"{self.name}: {do} {arguments}: {answer['error']}")
        return answer["done"]

    def stop(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()  # its ordinary end
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                super().stop()
            self.process.stdout.close()


class Table:
    """Lines of work, columns of whoever does it; a cell is the median of what was seen, beside HostKV's."""

    OURS = "HostKV"

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = [self.OURS, *columns]
        self.notes: list[str] = []
        self._units: dict[str, str] = {}
        self._seen: dict[tuple[str, str], list[float]] = defaultdict(list)

    def line(self, what: str, unit: str) -> None:
        self._units[what] = unit

    def add(self, what: str, who: str, value: float) -> None:
        self._seen[what, who].append(value)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"   {text}", flush=True)

    def cell(self, what: str, who: str) -> str:
        values = self._seen[what, who]
        if not values:
            return "–"
        value = statistics.median(values)
        text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        ours = self._seen[what, self.OURS]
        if who == self.OURS or not ours:
            return text
        ratio = statistics.median(ours) / value
        ahead = ratio if self._units[what] == "GB/s" else 1 / ratio
        return f"{text} ({ahead:.2g}x)" if ahead < 100 else f"{text} ({ahead:.0f}x)"

    def text(self, names: dict[str, str]) -> str:
        """As Markdown; `names`: what to call the columns."""
        lines = [["work", *(names.get(who, who) for who in self.columns)], ["---"] * (len(self.columns) + 1)]
        lines += [[f"{what}, {unit}", *(self.cell(what, who) for who in self.columns)] for what, unit in self._units.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
