"""When a crashed worker is started again: at once, after a delay, or not any more."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from ..settings import RestartSettings

NOW = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Too many crashes: the model becomes FAILED.

    Attributes:
        reason: one clause that says how many and in what time.
    """

    reason: str


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """Counts one model's crashes (F2, P9).

    The first crash since the first start, a clean window or a stable time is answered at once;
    the delay of later ones doubles from `backoff_initial_s` to `backoff_max_s`, of which a random
    half is taken off, so that workers that died together do not come back together.
    """

    settings: RestartSettings
    random: random.Random
    _crashes: deque[float] = field(default_factory=deque)
    """Times of crashes within the window; at most `max_restarts` + 1 of them."""
    _in_a_row: int = 0
    _load_error: str | None = None

    def after_crash(self, now: float) -> float | GiveUp:
        """The delay in seconds before the next start, `NOW` for none, or why there is none."""
        window_s = self.settings.window_s
        self._crashes.append(now)
        while self._crashes[0] <= now - window_s:
            self._crashes.popleft()
        if len(self._crashes) > self.settings.max_restarts:
            return GiveUp(reason=f"crashed {len(self._crashes)} times within {window_s:g} s")
        self._in_a_row += 1
        if self._in_a_row == 1:
            return NOW
        exponent = min(self._in_a_row - 2, 60)
        delay_s = min(self.settings.backoff_initial_s * 2.0**exponent, self.settings.backoff_max_s)
        return delay_s * self.random.uniform(0.5, 1.0)

    def fails_alike(self, load_error: str | None) -> bool:
        """Whether this load failed as the one right before it did: another attempt cannot heal it.

        Args:
            load_error: what two loads that fail alike have in common; None after an exit of
                another kind.
        """
        before, self._load_error = self._load_error, load_error
        return load_error is not None and load_error == before

    def was_stable(self) -> None:
        """READY was held for `stable_s`: the delay starts afresh; the window stays."""
        self._in_a_row = 0

    def clean(self) -> None:
        """A person asked for a start: nothing is held against the model any more."""
        self._crashes.clear()
        self._in_a_row = 0
        self._load_error = None
