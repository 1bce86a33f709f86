"""How long each phase of a load took, by the supervisor's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlxsup.protocol.states import LoadPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """The phases of one load, in the order in which they began.

    Attributes:
        took_s: seconds of each phase that is over.
        phase: the one that lasts; None once the load has ended, or before there was any.
        since: when that one began, monotonic seconds.
    """

    took_s: Mapping[LoadPhase, float] = field(default_factory=dict)
    phase: LoadPhase | None = None
    since: float = 0.0

    @classmethod
    def begun(cls, now: float) -> LoadTimes:
        """A load whose process is being spawned."""
        return cls(phase=LoadPhase.SPAWN, since=now)

    def entered(self, phase: LoadPhase, now: float) -> LoadTimes:
        """The load is in this phase now; one that comes again is counted as one."""
        if phase is self.phase:
            return self
        return replace(self.ended(now), phase=phase, since=now)

    def ended(self, now: float) -> LoadTimes:
        """The load has ended, however it did; nothing changes if it had ended before."""
        if self.phase is None:
            return self
        return LoadTimes(took_s=self.seconds(now))

    def seconds(self, now: float) -> dict[LoadPhase, float]:
        """Seconds of each phase, of the one that lasts until now."""
        if self.phase is None:
            return dict(self.took_s)
        before_s = self.took_s.get(self.phase, 0.0)
        return {**self.took_s, self.phase: before_s + now - self.since}


NO_LOAD = LoadTimes()
"""There has been none yet."""
