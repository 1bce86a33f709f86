"""Files that grow and are renamed, and the one thread that writes them.

Code that logs hands over bytes and never waits: a file system that hangs holds up this thread
alone. The handlers of `logging` are not used: what a worker prints is bytes in pieces of any size,
and on a full disk their buffered streams keep one line for later and lose others uncounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from mlxsup.protocol.folders import rotated

MAX_LOG_BYTES = 10 * 1024 * 1024
LOG_FILES = 3
"""The files that each log has: the current one, and the older `.1` and `.2`."""

MAX_WAITING_BYTES = 4 * 1024 * 1024
"""So much of each log may wait while its file system hangs; more is dropped and counted."""

STUCK_S = 1.0
"""A write that has taken this long is not waited for."""

REPORT_INTERVAL_S = 60.0

Report = Callable[[str], None]
"""Reports what cannot be logged."""


class RotatingFile:
    """An append-only file that is renamed when it has grown; never raises.

    When nothing can be written (full disk), what was to be written is dropped, that is reported
    once a minute, and the file says how much is missing once it can be written again. A line that
    was cut off, by that or by the end of an earlier daemon, is ended before the next one begins.

    Args:
        path: the current file; older ones get `.1`, `.2`.
        report: called with what went wrong.
        max_bytes: the size at which the file is renamed.
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
        self._may_be_cut_off = True
        self._reported_at: float | None = None

    def write(self, data: bytes) -> None:
        """Append, or drop."""
        try:
            if self._dropped_bytes:
                self._append(f"--- {self._dropped_bytes} bytes lost here\n".encode())
                self._dropped_bytes = 0
            self._append(data)
        except OSError as error:
            self._dropped_bytes += len(data)
            self._may_be_cut_off = True
            self._report_trouble(error)
            self.close()

    def skip(self, lost_bytes: int) -> None:
        """Record that this many bytes were dropped earlier."""
        self._dropped_bytes += lost_bytes

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.close(descriptor)
            except OSError as error:
                self._report_trouble(error)

    def _append(self, data: bytes) -> None:
        if self._descriptor is not None and self._size + len(data) > self._max_bytes:
            self._rotate()
        if self._descriptor is not None and not self._is_at_its_path(self._descriptor):
            self.close()
        if self._descriptor is None:
            # Without its parents: a disk that is not mounted is not written to the one below it.
            self.path.parent.mkdir(0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._descriptor = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._descriptor).st_size
            if self._may_be_cut_off and _ends_within_a_line(self.path):
                self._write_all(self._descriptor, b"\n")
            self._may_be_cut_off = False
        self._write_all(self._descriptor, data)

    def _is_at_its_path(self, descriptor: int) -> bool:
        """True unless the file was removed or renamed, as logrotate does. A removed one would
        take its space and all that is written with it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _write_all(self, descriptor: int, data: bytes) -> None:
        while data:
            written = os.write(descriptor, data)
            self._size += written
            data = data[written:]

    def _rotate(self) -> None:
        self.close()
        for number in range(LOG_FILES - 1, 0, -1):
            older = rotated(self.path, number - 1)
            if older.exists():
                os.replace(older, rotated(self.path, number))

    def _report_trouble(self, error: OSError) -> None:
        now = self._clock()
        if self._reported_at is None or now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            self._report(f"cannot write to {self.path}, so lines are lost: {error.strerror}")


def _ends_within_a_line(path: Path) -> bool:
    """True if what follows in this file would continue its last line."""
    if not path.is_file():  # a pipe or a device is not read
        return False
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class LogFile:
    """A log, as the code that writes to it has it; made by `LogWriter.open`.

    Attributes:
        waiting_bytes: how much waits for the writer's thread.
        lost_bytes: how much was dropped since; the file does not say so yet.

    Args:
        file: only the writer's thread touches it.
        work: what that thread does, in order.
    """

    def __init__(self, file: RotatingFile, work: SimpleQueue[Callable[[], None] | None]) -> None:
        self._file = file
        self._work = work
        self._lock = threading.Lock()
        # Bounded by MAX_WAITING_BYTES, and a few marks.
        self._pieces: list[bytes | Callable[[RotatingFile], None]] = []
        self.waiting_bytes = 0
        self.lost_bytes = 0

    def write(self, data: bytes) -> None:
        """Append, or drop and count if too much waits already."""
        with self._lock:
            if self.waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self.lost_bytes += len(data)
            else:
                self._keep(data)

    def skip(self, lost_bytes: int) -> None:
        """Record that this many bytes are dropped on purpose; the file says so."""
        with self._lock:
            self.lost_bytes += lost_bytes

    def end(self, tail: bytes) -> None:
        """Write the end of what was dropped last, if anything was.

        Args:
            tail: the latest bytes of all, including the dropped ones.
        """
        with self._lock:
            if self.lost_bytes:
                kept = tail[-self.lost_bytes :]
                self.lost_bytes -= len(kept)
                self._keep(kept)

    def call(self, function: Callable[[RotatingFile], None]) -> None:
        """Have the writer's thread call this once everything before it is written."""
        with self._lock:
            self._push(function)

    def close(self) -> None:
        """Close the file once everything is written; a later write opens it again."""
        self.call(RotatingFile.close)

    def _keep(self, data: bytes) -> None:
        if self.lost_bytes:
            lost_bytes, self.lost_bytes = self.lost_bytes, 0
            self._push(lambda file: file.skip(lost_bytes))
        self.waiting_bytes += len(data)
        self._push(data)

    def _push(self, piece: bytes | Callable[[RotatingFile], None]) -> None:
        # Waking the thread for each of ten thousand entries costs six times as much as for all.
        if not self._pieces:
            self._work.put(self._write_out)
        self._pieces.append(piece)

    def _write_out(self) -> None:
        """Write what waits, in one piece between two calls; on the writer's thread."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
            self.waiting_bytes = 0
        waiting = bytearray()
        for piece in pieces:
            if isinstance(piece, bytes):
                waiting += piece
            else:
                if waiting:
                    self._file.write(bytes(waiting))
                    waiting.clear()
                piece(self._file)
        if waiting:
            self._file.write(bytes(waiting))


class LogWriter:
    """The thread that writes every log file of this process.

    Attributes:
        writes_since: when the write under way began (monotonic); None while nothing is written.

    Args:
        report: called on this thread with what went wrong.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        # Bounded by the files, each of which is in it once.
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.writes_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="mlxsup-logs", daemon=True)
        self._thread.start()

    def open(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> LogFile:
        """Add a file, which is opened with the first write and renamed at that size."""
        return LogFile(RotatingFile(path, self._report, max_bytes=max_bytes), self._work)

    async def flushed(self, file: LogFile, limit_s: float) -> bool:
        """Wait for at most `limit_s` and return whether all of the file is written; return at once
        if a write already hangs."""
        began_at = self.writes_since
        if began_at is not None and time.monotonic() - began_at >= STUCK_S:
            return False
        loop = asyncio.get_running_loop()
        written = asyncio.Event()

        def tell(_: RotatingFile) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits in it
                loop.call_soon_threadsafe(written.set)

        file.call(tell)
        try:
            async with asyncio.timeout(limit_s):
                await written.wait()
        except TimeoutError:
            return False
        return True

    def close(self, limit_s: float) -> bool:
        """Write what waits; return whether all of it was written within the limit."""
        self._work.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.writes_since = time.monotonic()
            work()
            self.writes_since = None
