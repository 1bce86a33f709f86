"""The clock of every process: it stands still while the process itself does.

A stop by a signal is noticed because the heartbeats ask for the time every half second: a longer
gap was no running time. Processor time would say nothing about a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PULSE_S = 0.5
"""How often the time must be asked for, even if nothing happens."""

TOLERANCE_S = 0.5
"""Being late by up to this much does not count as a pause."""


class Clock:
    """Monotonic seconds without those in which this process did not run (P7); for any thread.

    A machine that slept, or a process that was stopped and continued, must not find that all its
    deadlines have passed. If nothing has asked for longer than a pulse and the tolerance, the
    process did not run, and all of that except for one pulse is left out. The first caller after a
    pause takes it out, so that no event carries a time from before that. So a pause is known to
    half a second, and one of less than half a second may count as time.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._asked_at = monotonic()
        self._paused_s = 0.0

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        with self._lock:
            current = self._monotonic()
            gap_s = current - self._asked_at
            self._asked_at = current
            if gap_s > PULSE_S + TOLERANCE_S:
                self._paused_s += gap_s - PULSE_S
            return current - self._paused_s

    def delay_until(self, when: float) -> float:
        """Return the seconds until `now` returns this value, if nothing pauses; 0 for the past."""
        return max(0.0, when - self.now())
