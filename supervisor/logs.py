"""The logs of the workers and of the daemon, and the flight recorder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxsup.protocol.flight import (
    MODELS_FILE_NAME,
    OF_REQUESTS,
    REQUESTS_FILE_NAME,
    DaemonEnded,
    DaemonStarted,
    Entry,
    Recorded,
)
from mlxsup.protocol.folders import DAEMON_LOG_NAME, generation_header, log_path
from mlxsup.protocol.text import LOG_LEVELS, escaped, log_line, timestamp
from mlxsup.protocol.version import VERSION

from .log_files import LogWriter, RotatingFile

LAST_LINES = 1000
"""The stacks of all threads, which say nothing of a cause, may follow what names it."""

MAX_LAST_LINE_BYTES = 2048
TAIL_BYTES = 200 * 1024
"""So much of a worker's last output is kept, written or not: it shows the cause of its death."""

SMALL_PIECE_BYTES = 4096

MAX_LOG_BYTES_PER_S = 8 * 1024 * 1024
"""The output rate of each model's workers; what they print beyond it is read and dropped."""

MAX_MODELS_BYTES = 1024 * 1024
MAX_REQUESTS_BYTES = 2 * 1024 * 1024
"""The sizes at which the files of the recorder are renamed."""

ALIVE_INTERVAL_S = 5.0
"""Between two touches of the models' file, whose time says until when the daemon lived."""


class ModelLog:
    """Everything that one model's workers print, over all generations.

    Attributes:
        file: what it is written to.
        tail: what was printed last, in pieces.

    Args:
        log_dir: where the file is.
        model: its name.
        writer: writes the file.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        log_dir: Path,
        model: str,
        writer: LogWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self.file = writer.open(log_path(log_dir, model))
        self._clock = clock
        self._second = clock()
        self._second_bytes = 0
        # Bounded by TAIL_BYTES and the length of one piece.
        self.tail: deque[bytes] = deque()
        self._tail_bytes = 0

    @property
    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of the current generation, oldest first."""
        *lines, rest = b"".join(self.tail).split(b"\n")
        latest = [*lines, rest] if rest else lines
        return tuple(_readable(line) for line in latest[-LAST_LINES:])

    def begin(self, generation: int, pid: int) -> None:
        """Write the rule line above a new generation's output."""
        header = generation_header(generation, pid, timestamp(time.time()))
        gap = b"\n" if self.tail and not self.tail[-1].endswith(b"\n") else b""
        self.tail.clear()
        self._tail_bytes = 0
        self.file.write(gap + header.encode() + b"\n")

    def write(self, data: bytes) -> None:
        """Take output from the worker's pipe, in pieces of any size."""
        self._keep(data)
        now = self._clock()
        if now - self._second >= 1.0:
            self._second, self._second_bytes = now, 0
        self._second_bytes += len(data)
        if self._second_bytes > MAX_LOG_BYTES_PER_S:
            self.file.skip(len(data))
        else:
            self.file.write(data)

    async def ended(self, limit_s: float) -> None:
        """Write the rest of a worker's output; return after `limit_s` at most."""
        self.file.end(b"".join(self.tail))
        await self._writer.flushed(self.file, limit_s)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _keep(self, data: bytes) -> None:
        if self.tail and len(self.tail[-1]) < SMALL_PIECE_BYTES:
            self.tail[-1] += data
        else:
            self.tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self.tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self.tail.popleft())


class FlightRecorder:
    """Writes the facts of the core's journal to files, which outlive the daemon whatever ends it.

    Models and requests have separate files, because requests come a thousand times as often and
    would push the deaths out. A daemon that is killed cannot write its end; the time of the models'
    file, renewed every five seconds, says until when it lived.

    Args:
        log_dir: where the files are.
        writer: writes them.
        wall: seconds since the epoch.
    """

    def __init__(
        self, log_dir: Path, writer: LogWriter, wall: Callable[[], float] = time.time
    ) -> None:
        self._path = log_dir / MODELS_FILE_NAME
        self._writer = writer
        self._wall = wall
        self._models = writer.open(self._path, MAX_MODELS_BYTES)
        self._requests = writer.open(log_dir / REQUESTS_FILE_NAME, MAX_REQUESTS_BYTES)
        self._last_number = 0
        self._touched_at = 0.0

    def started(self, pid: int) -> None:
        """Write that the daemon accepts clients."""
        before = None
        with contextlib.suppress(OSError):  # there was none before
            before = self._path.stat().st_mtime
        entry = DaemonStarted(pid=pid, version=VERSION, before_alive_at=before)
        line = Recorded(number=0, at=self._wall(), entry=entry).to_line()
        self._models.write(line)  # the same in both, so that what follows can be laid together
        self._requests.write(line)

    def write(self, entry: Entry) -> None:
        """Write what has just happened."""
        file = self._requests if isinstance(entry, OF_REQUESTS) else self._models
        file.write(self._next(entry))

    def alive(self) -> None:
        """Have the time of the models' file say that the daemon is alive, every few seconds."""
        now = self._wall()
        # While a file system hangs nothing more is left for the thread to do.
        if abs(now - self._touched_at) >= ALIVE_INTERVAL_S and self._writer.writes_since is None:
            self._touched_at = now
            self._models.call(_touch)

    def ended(self, code: int) -> None:
        """Write that the daemon is about to exit."""
        self._models.write(self._next(DaemonEnded(code=code)))
        self._models.close()
        self._requests.close()

    def _next(self, entry: Entry) -> bytes:
        """Return the line of the next entry."""
        self._last_number += 1
        return Recorded(number=self._last_number, at=self._wall(), entry=entry).to_line()


def _touch(file: RotatingFile) -> None:
    with contextlib.suppress(OSError):  # it cannot be written either, and that is reported
        os.utime(file.path)


class DaemonLog:
    """The daemon's own log: one line per event, `message key=value`.

    Args:
        log_dir: where the file `mlxsup.log` is.
        level: one of `LOG_LEVELS`; lines below it are left out.
        writer: writes the file.
        is_json: whether each line is an object, for programs.

    Attributes:
        flight: the flight recorder, in files next to it.
    """

    def __init__(
        self, log_dir: Path, level: str, writer: LogWriter, *, is_json: bool = False
    ) -> None:
        self.flight = FlightRecorder(log_dir, writer)
        self._file = writer.open(log_path(log_dir, DAEMON_LOG_NAME))
        self._level = LOG_LEVELS.index(level)
        self._is_json = is_json

    @property
    def level(self) -> str:
        """Return the lowest level that is written."""
        return LOG_LEVELS[self._level]

    def change_level(self, level: str) -> None:
        """Write from this level on."""
        self._level = LOG_LEVELS.index(level)

    def write(self, level: str, message: str, **facts: object) -> None:
        """Write one line."""
        if LOG_LEVELS.index(level) >= self._level:
            line_of = json_line if self._is_json else text_line
            self._file.write(line_of(time.time(), level, message, facts))

    def block(self, text: str) -> None:
        """Write printable lines below the line that announced them; as JSON, in one line."""
        if self._is_json:
            self._file.write(json_line(time.time(), "", "details", {"text": text}))
        else:
            self._file.write("".join(f"  {escaped(line)}\n" for line in text.splitlines()).encode())

    def bug(self, error: Exception, then: str, stories: Mapping[str, Sequence[str]]) -> None:
        """Write where a bug was met, and the stories of all models.

        Args:
            then: what follows from it, a phrase.
        """
        self.write("error", f"internal error: {then}", error=type(error).__name__)
        self.block("".join(traceback.format_exception(error)))
        for name, story in stories.items():
            self.block("\n".join([f"story of {name}:", *story]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _readable(line: bytes) -> str:
    return line[:MAX_LAST_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")


def text_line(moment: float, level: str, message: str, facts: Mapping[str, object]) -> bytes:
    """Return `2026-11-21T09:30:00.123Z INFO message key=value`, and a line break.

    Args:
        moment: seconds since the epoch.
        level: one of `LOG_LEVELS`.
        message: what happened.
        facts: what is said about it.
    """
    stamp = timestamp(moment, has_milliseconds=True)
    return f"{stamp} {level.upper()} {log_line(message, **facts)}\n".encode()


def json_line(moment: float, level: str, message: str, facts: Mapping[str, object]) -> bytes:
    """Return `{"at": "2026-11-21T09:30:00.123Z", "level": "info", "message": …, "key": …}`, and a
    line break.

    Args:
        moment, level, message, facts: as for `text_line`; without a level, the line has none.
    """
    begin = {"at": timestamp(moment, has_milliseconds=True), "level": level, "message": message}
    if not level:
        del begin["level"]
    values = {name: _plain(value) for name, value in facts.items()}
    return (escaped(json.dumps(begin | values, ensure_ascii=False)) + "\n").encode()


def _plain(value: object) -> object:
    """Return the value if JSON has it; otherwise as people read it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return str(value)
