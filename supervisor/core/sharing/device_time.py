"""Divides the time of one device among the engines that work on it at once.

While several engines work on a backend, each is given an equal part of each moment. To intersect
their steps would miss half of the overlap, because the step that another engine is making has not
been reported yet.
"""

from __future__ import annotations

from mlxsup.protocol.ids import ModelName


class DeviceTime:
    """The time of one device.

    An engine works from the first request that it accepts until it holds none: then its steps
    follow each other without a gap, and a step of another engine meets one of its own, whether
    that has been heard of yet or not. While n engines work, each is given 1/n of the time.
    """

    def __init__(self) -> None:
        # When an engine began or rested last, and what one that has worked all the time had been
        # given until then.
        self._at = 0.0
        self._given_s = 0.0
        # When each working engine was last heard of, and the same for that moment.
        self._heard: dict[ModelName, tuple[float, float]] = {}

    def begins(self, engine: ModelName, now: float) -> None:
        """An engine has something to do; it may have had before."""
        if engine not in self._heard:
            self._changes(now)
            self._heard[engine] = now, self._given_s

    def rests(self, engine: ModelName, now: float) -> None:
        """An engine has nothing to do, or is gone."""
        if engine in self._heard:
            self._changes(now)
            del self._heard[engine]

    def cost_s(self, engine: ModelName, took_s: float, at: float) -> float:
        """What the steps of an engine cost that it has made since it was last heard of: their
        duration, of which each moment counts as much as the engine was given of it.

        Args:
            engine: has made the steps.
            took_s: seconds that they took.
            at: when the last of them was heard of, in monotonic seconds; since then no engine has
                begun or rested.
        """
        self.begins(engine, at)
        heard_at, before_s = self._heard[engine]
        given_s = self._given_until(at)
        passed_s = at - heard_at
        share = (given_s - before_s) / passed_s if passed_s > 0 else 1 / len(self._heard)
        self._heard[engine] = at, given_s
        return took_s * min(share, 1.0)

    def _changes(self, now: float) -> None:
        if self._heard:
            self._given_s = self._given_until(now)
        self._at = now

    def _given_until(self, now: float) -> float:
        return self._given_s + (now - self._at) / len(self._heard)
