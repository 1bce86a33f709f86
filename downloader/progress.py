"""Counts what arrives, over all files, and reports it now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mlxsup.protocol.download import DownloadProgress, DownloadReport

REPORT_INTERVAL_S = 0.25


class Meter:
    """How far a download has come.

    Args:
        total_bytes: of the model.
        done_bytes: of it, before.
        report: called with the progress, from any thread, one call at a time.
    """

    def __init__(
        self, total_bytes: int, done_bytes: int, report: Callable[[DownloadReport], None]
    ) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = done_bytes
        self._report = report
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self.add(0)

    def add(self, count: int) -> None:
        """Counts bytes that have arrived; fewer than 0 if some were in vain."""
        with self._lock:
            self._done_bytes += count
            now = time.monotonic()
            if now < self._reported_at + REPORT_INTERVAL_S:
                return
            self._reported_at = now
            self._report(
                DownloadProgress(done_bytes=self._done_bytes, total_bytes=self._total_bytes)
            )
