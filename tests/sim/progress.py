"""How far a long run is: one line that changes on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time

EVERY_S = 10.0


class Progress:
    def __init__(self) -> None:
        self.started_s = self._shown_s = time.monotonic()
        self._live = sys.stdout.isatty()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.started_s

    def __call__(self, text: str) -> None:
        if self._live or time.monotonic() - self._shown_s > EVERY_S:
            self._shown_s = time.monotonic()
            print(f"\r\x1b[K{text}" if self._live else text, end="" if self._live else "\n", flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        print(f"\r\x1b[K{text}" if self._live else text, flush=True)
