"""Decides when a crashed worker is restarted: at once, after a delay, or never.

Delays are shortened at random, so that models that died together do not come back together.
"""

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

    After the first crash since the first start, a clean window or a stable time, the restart is
    immediate; the delay of later ones doubles from `backoff_initial_s` to `backoff_max_s`, minus a
    random part of up to half, so that workers that died together do not come back together.
    """

    settings: RestartSettings
    random: random.Random
    _crashes: deque[float] = field(default_factory=deque)
    """Times of crashes within the window; at most `max_restarts` + 1 of them."""
    _in_a_row: int = 0
    _outages_in_a_row: int = 0
    _load_error: str | None = None

    def after_crash(self, now: float) -> float | GiveUp:
        """Return the delay in seconds before the next start, `NOW` for none, or why
        there is none."""
        window_s = self.settings.window_s
        self._crashes.append(now)
        while self._crashes[0] <= now - window_s:
            self._crashes.popleft()
        if len(self._crashes) > self.settings.max_restarts:
            return GiveUp(reason=f"crashed {len(self._crashes)} times within {window_s:g} s")
        self._in_a_row += 1
        if self._in_a_row == 1:
            return NOW
        return self._delay_s(self._in_a_row - 2)

    def after_outage(self) -> float:
        """Return the delay in seconds before the next attempt at what others keep from succeeding.

        It grows like that of a crash, and is no reason to give up, however often it is asked for.
        """
        self._outages_in_a_row += 1
        return self._delay_s(self._outages_in_a_row - 1)

    def outage_ended(self) -> None:
        """Let the delay of the next outage start afresh: an attempt has succeeded."""
        self._outages_in_a_row = 0

    def fails_alike(self, load_error: str | None) -> bool:
        """True if this load failed like the one right before it: another attempt cannot help.

        Args:
            load_error: what two loads that fail alike have in common; None after an exit of
                another kind.
        """
        before, self._load_error = self._load_error, load_error
        return load_error is not None and load_error == before

    @property
    def crashes(self) -> int:
        """Return how many the window had when the latest one came."""
        return len(self._crashes)

    def was_stable(self) -> None:
        """Reset the delay, and not the window: it was READY for `stable_s`."""
        self._in_a_row = 0

    def clean(self) -> None:
        """Forget all crashes: a person asked for a start."""
        self._crashes.clear()
        self._in_a_row = 0
        self._outages_in_a_row = 0
        self._load_error = None

    def _delay_s(self, doublings: int) -> float:
        delay_s = self.settings.backoff_initial_s * 2.0 ** min(doublings, 60)
        return min(delay_s, self.settings.backoff_max_s) * self.random.uniform(0.5, 1.0)
