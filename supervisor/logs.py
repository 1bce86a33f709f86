"""Log files: one for each model with all that its workers print, and the daemon's own."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_LOG_BYTES = 10 * 1024 * 1024
LOG_FILES = 3
"""Of each log: the current one, and the older `.1` and `.2`."""

LAST_LINES = 50
MAX_LAST_LINE_BYTES = 2048
REPORT_INTERVAL_S = 60.0

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

Report = Callable[[str], None]
"""Tells people of what cannot be told in a log."""


class RotatingFile:
    """An append-only file that is renamed when it has grown; never raises, never blocks for long.

    Where nothing can be written (full disk), what was to be written is dropped, that is reported
    once a minute, and the file says how much is missing once it can be written again.

    Args:
        path: the current file; older ones get `.1`, `.2`.
        report: told of trouble.
        max_bytes: at which the file is renamed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        report: Report,
        *,
        max_bytes: int = MAX_LOG_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._report = report
        self._max_bytes = max_bytes
        self._clock = clock
        self._descriptor: int | None = None
        self._size = 0
        self._dropped_bytes = 0
        self._reported_at: float | None = None

    def write(self, data: bytes) -> None:
        """Appends, or drops."""
        try:
            if self._dropped_bytes:
                self._append(f"--- {self._dropped_bytes} bytes lost here\n".encode())
                self._dropped_bytes = 0
            self._append(data)
        except OSError as error:
            self._dropped_bytes += len(data)
            self.close()
            self._report_trouble(error)

    def close(self) -> None:
        """Closes the file; a later write opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, data: bytes) -> None:
        if self._descriptor is not None and self._size + len(data) > self._max_bytes:
            self._rotate()
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._descriptor = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._descriptor).st_size
        while data:
            written = os.write(self._descriptor, data)
            self._size += written
            data = data[written:]

    def _rotate(self) -> None:
        self.close()
        for number in range(LOG_FILES - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                os.replace(older, self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")

    def _report_trouble(self, error: OSError) -> None:
        now = self._clock()
        if self._reported_at is None or now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            self._report(f"{self.path} cannot be written, lines are lost: {error.strerror}")


class ModelLog:
    """Everything that one model's workers print, over all generations.

    Args:
        log_dir: where the file is.
        model: whose.
        report: told of trouble.
    """

    def __init__(self, log_dir: Path, model: str, report: Report) -> None:
        self._file = RotatingFile(log_dir / f"{model}.log", report)
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._unfinished = b""

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The latest lines of the current generation, oldest first."""
        rest = (_readable(self._unfinished),) if self._unfinished else ()
        return (*self._last_lines, *rest)[-LAST_LINES:]

    def begin(self, generation: int, pid: int) -> None:
        """Draws the rule under which a new generation writes."""
        self._last_lines.clear()
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        gap = b"\n" if self._unfinished else b""
        self._unfinished = b""
        self._file.write(gap + f"--- generation {generation} pid {pid} {started}\n".encode())

    def write(self, data: bytes) -> None:
        """Takes what came out of the worker's pipe, in whatever pieces."""
        self._file.write(data)
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._unfinished + lines[0]
            self._last_lines.extend(_readable(line) for line in lines[-LAST_LINES:])
            self._unfinished = rest[:MAX_LAST_LINE_BYTES]
        else:
            self._unfinished = (self._unfinished + rest)[:MAX_LAST_LINE_BYTES]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class DaemonLog:
    """The daemon's own log: one line for each thing that happened, `message key=value`.

    Args:
        log_dir: where the file `mlxsup.log` is.
        level: a key of `LEVELS`; lines below it are left out.
        report: told of trouble.
    """

    def __init__(self, log_dir: Path, level: str, report: Report) -> None:
        self._file = RotatingFile(log_dir / "mlxsup.log", report)
        self._level = LEVELS[level]

    def write(self, level: str, message: str, **facts: object) -> None:
        """Writes one line."""
        if LEVELS[level] >= self._level:
            moment = time.time()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
            text = " ".join([message, *(f"{name}={_shown(v)}" for name, v in facts.items())])
            milliseconds = int(moment % 1 * 1000)
            self._file.write(f"{stamp}.{milliseconds:03d}Z {level.upper()} {text}\n".encode())

    def block(self, text: str) -> None:
        """Writes lines as they are, below the line that announced them."""
        self._file.write("".join(f"  {line}\n" for line in text.splitlines()).encode())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _readable(line: bytes) -> str:
    return line[:MAX_LAST_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    if not text or any(character.isspace() or character in '"=' for character in text):
        return json.dumps(text, ensure_ascii=False)
    return text
