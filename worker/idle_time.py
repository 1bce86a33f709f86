"""What a worker does while its engine has nothing to do: it looks at its memory again, and after a
while it gives some back."""

from __future__ import annotations

from collections.abc import Callable

from .engine import Engine

LOOK_AGAIN_AFTER_S = 0.5
"""What the last step has begun is over by then: what is held now is less than at its end."""

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
        """How long until memory is to be looked at again, or the engine gives back, which it does
        now if it is time; None if it has, or if it is busy."""
        if is_busy:
            self.ends()
            return None
        if self._since is None:
            self._since, self._has_given_back = self._clock(), False
        if self._has_given_back:
            return None
        idle_s = self._clock() - self._since
        if idle_s < LOOK_AGAIN_AFTER_S:
            return LOOK_AGAIN_AFTER_S - idle_s
        if idle_s < GIVE_BACK_AFTER_S:
            return GIVE_BACK_AFTER_S - idle_s
        self._engine.give_back()
        self._has_given_back = True
        return None
