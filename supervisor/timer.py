"""The one timer of the core: it only wakes, and the core looks at its own deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlxsup.protocol.clock import Clock


class Timer:
    """Calls back at a time of the clock, or a little later.

    Args:
        clock: gives the time; it may have stood still while the machine slept.
        on_due: called with the time.
    """

    def __init__(self, clock: Clock, on_due: Callable[[float], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0

    def wake_at(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        """Ask for a call at this time; an earlier one stays.

        Args:
            when: monotonic seconds.
            loop: makes the call.
        """
        if self._handle is not None:
            if self._wakes_at <= when:
                return
            self._handle.cancel()
        self._wakes_at = when
        self._handle = loop.call_later(self._clock.delay_until(when), lambda: self._wake(loop))

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = None
        now = self._clock.now()
        if now < self._wakes_at:  # the clock stood still in the meantime
            self.wake_at(self._wakes_at, loop)
        else:
            self._on_due(now)
