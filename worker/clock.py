"""The clock that steps are timed with: it stands still while this process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .heartbeat import BEAT_INTERVAL_S

TOLERANCE_S = 0.5
"""A beat that is late by up to this much does not count as a stop."""


class Clock:
    """Monotonic seconds without those in which this process was stopped; for any thread.

    A machine that sleeps stops the monotonic clock itself. A process that was stopped by a signal
    is noticed because every beat asks for the time: if nobody has asked for longer than a beat
    and the tolerance, the process did not run, and all of that except for one beat is left out.
    So a stop is known to half a second, and one of less than half a second may count as work.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._asked_at = monotonic()
        self._stopped_s = 0.0

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        with self._lock:
            current = self._monotonic()
            gap_s = current - self._asked_at
            self._asked_at = current
            if gap_s > BEAT_INTERVAL_S + TOLERANCE_S:
                self._stopped_s += gap_s - BEAT_INTERVAL_S
            return current - self._stopped_s
