"""One line per event on stderr: `time level event key=value ...`, or the same as a JSON object. Callers pass the event as the message
and the rest as `extra={"data": {...}}`; `event` below spells that. And the line that shows a person how far long work is."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable

PROGRESS_S = 5.0  # between two lines where stderr is no terminal
_logger = logging.getLogger("hostkv.sidecar")


def setup(level: str, style: str) -> None:
    """`level`: debug, info, warning or error; `style`: text or json. An exception nobody catches is logged too."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if style == "json" else _Text())
    _logger.handlers[:] = [handler]
    _logger.propagate = False
    _logger.setLevel(level.upper())
    sys.excepthook = lambda kind, error, trace: event(logging.CRITICAL, "fault", failed=error)


def event(level: int, name: str, /, *, failed: BaseException | None = None, **data: object) -> None:
    """Logs `name` with its data; `failed` adds a traceback."""
    _logger.log(level, name, extra={"data": data}, exc_info=failed)


class Progress:
    """A line on stderr that follows long work: `progress(text, whether it is the last of its kind)`. `look` is called each time and may
    raise to end the work."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look
        self._live = sys.stderr.isatty()
        self._shown = float("-inf")

    def __call__(self, text: str, last: bool) -> None:
        self._look()
        now = time.monotonic()
        if last or now - self._shown > (0.1 if self._live else PROGRESS_S):
            self._shown = float("-inf") if last else now
            print(
                f"\r\x1b[Khostkv: {text}" if self._live else f"hostkv: {text}",
                end="\n" if last or not self._live else "",
                file=sys.stderr,
                flush=True,
            )


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        words = [f"{key}={_quoted(value)}" for key, value in getattr(record, "data", {}).items()]
        line = " ".join([_time(record), record.levelname.lower(), record.getMessage(), *words])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage(), **getattr(record, "data", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and not any(c.isspace() or c in '"=' or not c.isprintable() for c in text) else json.dumps(text)
