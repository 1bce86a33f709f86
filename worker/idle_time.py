"""Gives memory back once an engine has been idle for a while."""

from __future__ import annotations

from collections.abc import Callable

from .engine import Engine

GIVE_BACK_AFTER_S = 300.0
"""After this long without a request, known prompts and memory for reuse are freed."""


class IdleTime:
    """Counts how long an engine has had nothing to do; it gives back once in each such time.

    Args:
        engine: gives back.
        clock: monotonic seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._since: float | None = None
        self._has_given_back = False

    def ends(self) -> None:
        """There is something to do."""
        self._since = None

    def left_s(self, *, is_busy: bool) -> float | None:
        """How long until the engine gives back, which it does now if it is time; None if it has, or
        if it is busy."""
        if is_busy:
            self.ends()
            return None
        if self._since is None:
            self._since, self._has_given_back = self._clock(), False
        if self._has_given_back:
            return None
        left_s = self._since + GIVE_BACK_AFTER_S - self._clock()
        if left_s > 0:
            return left_s
        self._engine.give_back()
        self._has_given_back = True
        return None
