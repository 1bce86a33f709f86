"""The logs: one file per model with everything its workers print, and the daemon's own."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxsup.protocol.folders import DAEMON_LOG_NAME, generation_header, log_path
from mlxsup.protocol.text import LOG_LEVELS, escaped, timestamp

from .flight_files import FlightFiles
from .log_files import LogWriter
from .log_lines import json_line, text_line

LAST_LINES = 50
MAX_LAST_LINE_BYTES = 2048
TAIL_BYTES = 2 * LAST_LINES * MAX_LAST_LINE_BYTES
"""How much of a worker's last output is kept, written or not: it shows the cause of its death."""

SMALL_PIECE_BYTES = 4096

MAX_LOG_BYTES_PER_S = 8 * 1024 * 1024
"""The output rate of each model's workers; what they print beyond it is read and dropped."""


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
        """The last lines of the current generation, oldest first."""
        *lines, rest = b"".join(self.tail).split(b"\n")
        latest = [*lines, rest] if rest else lines
        return tuple(_readable(line) for line in latest[-LAST_LINES:])

    def begin(self, generation: int, pid: int) -> None:
        """Writes the rule line above a new generation's output."""
        header = generation_header(generation, pid, timestamp(time.time()))
        gap = b"\n" if self.tail and not self.tail[-1].endswith(b"\n") else b""
        self.tail.clear()
        self._tail_bytes = 0
        self.file.write(gap + header.encode() + b"\n")

    def write(self, data: bytes) -> None:
        """Takes output from the worker's pipe, in pieces of any size."""
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
        """A worker's output has ended: returns when it is written, after `limit_s` at most."""
        self.file.end(b"".join(self.tail))
        await self._writer.flushed(self.file, limit_s)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def _keep(self, data: bytes) -> None:
        if self.tail and len(self.tail[-1]) < SMALL_PIECE_BYTES:
            self.tail[-1] += data
        else:
            self.tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self.tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self.tail.popleft())


class DaemonLog:
    """The daemon's own log: one line per event, `message key=value`.

    Args:
        log_dir: where the file `mlxsup.log` is.
        level: one of `LOG_LEVELS`; lines below it are left out.
        writer: writes the file.
        is_json: whether each line is an object, for programs.

    Attributes:
        flight: the files of the flight recorder, next to it.
    """

    def __init__(
        self, log_dir: Path, level: str, writer: LogWriter, *, is_json: bool = False
    ) -> None:
        self.flight = FlightFiles(log_dir, writer)
        self._file = writer.open(log_path(log_dir, DAEMON_LOG_NAME))
        self._level = LOG_LEVELS.index(level)
        self._is_json = is_json

    @property
    def level(self) -> str:
        """The lowest level that is written."""
        return LOG_LEVELS[self._level]

    def change_level(self, level: str) -> None:
        """Writes from this level on."""
        self._level = LOG_LEVELS.index(level)

    def write(self, level: str, message: str, **facts: object) -> None:
        """Writes one line."""
        if LOG_LEVELS.index(level) >= self._level:
            line_of = json_line if self._is_json else text_line
            self._file.write(line_of(time.time(), level, message, facts))

    def block(self, text: str) -> None:
        """Write printable lines below the line that announced them; as JSON, in one line."""
        if self._is_json:
            self._file.write(json_line(time.time(), "", "details", {"text": text}))
        else:
            self._file.write("".join(f"  {escaped(line)}\n" for line in text.splitlines()).encode())

    def bug(self, error: Exception, stories: Mapping[str, Sequence[str]]) -> None:
        """Writes where a bug was met, and the stories of all models."""
        self.write("error", "internal error: the daemon ends", error=type(error).__name__)
        self.block("".join(traceback.format_exception(error)))
        for name, story in stories.items():
            self.block("\n".join([f"story of {name}:", *story]))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _readable(line: bytes) -> str:
    return line[:MAX_LAST_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
