"""The clock that deadlines are measured with: it stands still while the supervisor itself does."""

from __future__ import annotations

import time
from collections.abc import Callable

PULSE_S = 0.5
"""How often the supervisor looks at its clock even if nothing happens."""

TOLERANCE_S = 0.5
"""Being late by up to this much does not count as a pause."""


class Clock:
    """Monotonic seconds, without the time in which this process did not run (P7).

    A machine that slept, or a process tree that was stopped and continued, must not find that
    all its deadlines have passed. The first caller after a pause takes it out, so that no event
    carries a time from before that. Somebody must ask at least every `PULSE_S` seconds.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._asked_at = monotonic()
        self._paused_s = 0.0

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        current = self._monotonic()
        gap_s = current - self._asked_at
        self._asked_at = current
        if gap_s > PULSE_S + TOLERANCE_S:
            self._paused_s += gap_s - PULSE_S
        return current - self._paused_s

    def delay_until(self, when: float) -> float:
        """Seconds from now until `now` gives this value, if nothing pauses; 0 for the past."""
        return max(0.0, when - self.now())
