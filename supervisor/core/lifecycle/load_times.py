"""How long each phase of a load took, by the supervisor's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlxsup.protocol.states import LoadPhase

STEP = 0.01
"""Between two places that are kept: at most a hundred of them."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """The phases of one load, in the order in which they began.

    Attributes:
        took_s: seconds of each phase that is over.
        phase: the one that lasts; None once the load has ended, or before there was any.
        since: when that one began, monotonic seconds.
        places: how far the engine said it was, from 0 to 1, and after how many seconds.
        usual: the places of the latest load that came to its end, and the share of its time.
    """

    took_s: Mapping[LoadPhase, float] = field(default_factory=dict)
    phase: LoadPhase | None = None
    since: float = 0.0
    places: Points = ()
    usual: Points = ()

    @classmethod
    def begun(cls, now: float, before: LoadTimes | None = None) -> LoadTimes:
        """Return a load whose process is being spawned, after another one."""
        usual = () if before is None else before.usual
        if before is not None and before.places and before.places[-1][0] >= 1.0:
            whole_s = sum(before.took_s.values()) or 1.0
            usual = tuple((place, min(after_s / whole_s, 1.0)) for place, after_s in before.places)
        return cls(phase=LoadPhase.SPAWN, since=now, usual=usual)

    def reached(self, place: float, now: float) -> LoadTimes:
        """Return the load at this place; a small step is not kept."""
        if self.phase is None or (self.places and place < min(self.places[-1][0] + STEP, 1.0)):
            return self
        after_s = sum(self.seconds(now).values())
        return replace(self, places=(*self.places, (place, after_s)))

    def share_of_time(self, place: float) -> float:
        """Return how much of the time of a load is usually over at this place, from 0 to 1.

        Engines count bytes and steps: half of those may take a tenth of the time.
        """
        (low, begin), points = (0.0, 0.0), (*self.usual, (1.0, 1.0))
        for high, end in points if self.usual else ():
            if place <= high:
                part = (place - low) / (high - low) if high > low else 1.0
                return begin + (end - begin) * part
            low, begin = high, end
        return place

    def entered(self, phase: LoadPhase, now: float) -> LoadTimes:
        """The load is in this phase now; one that comes again is counted as one."""
        if phase is self.phase:
            return self
        return replace(self.ended(now), phase=phase, since=now)

    def ended(self, now: float) -> LoadTimes:
        """The load has ended, however it did; nothing changes if it had ended before."""
        if self.phase is None:
            return self
        return replace(self, took_s=self.seconds(now), phase=None)

    def seconds(self, now: float) -> dict[LoadPhase, float]:
        """Seconds of each phase, of the one that lasts until now."""
        if self.phase is None:
            return dict(self.took_s)
        before_s = self.took_s.get(self.phase, 0.0)
        return {**self.took_s, self.phase: before_s + now - self.since}


NO_LOAD = LoadTimes()
"""There has been none yet."""
