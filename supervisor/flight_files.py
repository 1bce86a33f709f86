"""The files of the flight recorder: they outlive the daemon, whatever ends it.

Models and requests have separate files, because requests come a thousand times as often. A daemon
that is killed cannot write its end; the time of the file, renewed every five seconds, says until
when it lived.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
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
from mlxsup.protocol.version import VERSION

from .log_files import LogWriter, RotatingFile, Unmade

MAX_MODELS_BYTES = 1024 * 1024
MAX_REQUESTS_BYTES = 2 * 1024 * 1024
"""The sizes at which the files are renamed; of each, `log_files.LOG_FILES` are kept."""

REQUEST_BYTES = 1024
"""As which an entry of a request counts while its disk hangs: more than almost every line takes."""

ALIVE_INTERVAL_S = 5.0
"""How often the models' file is touched, so that its time says until when the daemon lived."""


class FlightFiles:
    """Writes entries as lines, on the thread that writes the logs.

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
        """The daemon accepts clients."""
        before = None
        with contextlib.suppress(OSError):  # there was none before
            before = self._path.stat().st_mtime
        entry = DaemonStarted(pid=pid, version=VERSION, before_alive_at=before)
        line = Recorded(number=0, at=self._wall(), entry=entry).to_line()
        self._models.write(line)  # the same in both, so that what follows can be laid together
        self._requests.write(line)

    def write(self, entry: Entry) -> None:
        """Something has just happened."""
        recorded = self._next(entry)
        if isinstance(entry, OF_REQUESTS):  # so often that the loop should not make their lines
            self._requests.write(Unmade(recorded.to_line, REQUEST_BYTES))
        else:
            self._models.write(recorded.to_line())

    def alive(self) -> None:
        """The daemon is alive: the time of the models' file says so, every few seconds."""
        now = self._wall()
        # While a file system hangs nothing more is left for the thread to do.
        if abs(now - self._touched_at) >= ALIVE_INTERVAL_S and self._writer.writes_since is None:
            self._touched_at = now
            self._models.call(_touch)

    def ended(self, code: int) -> None:
        """The daemon is about to exit."""
        self._models.write(self._next(DaemonEnded(code=code)).to_line())
        self._models.close()
        self._requests.close()

    def _next(self, entry: Entry) -> Recorded:
        self._last_number += 1
        return Recorded(number=self._last_number, at=self._wall(), entry=entry)


def _touch(file: RotatingFile) -> None:
    with contextlib.suppress(OSError):  # it cannot be written either, and that is reported
        os.utime(file.path)
