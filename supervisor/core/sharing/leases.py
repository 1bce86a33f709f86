"""Who may read a long prompt now: leases that go round, one chunk each; pure.

Models whose prompts take several chunks share one device. While there are more of them than may
read at the same time, each chunk takes a lease. A model that has given its lease back asks again
for the next chunk, and then stands behind all who have waited meanwhile, so they read in turns.

On a GPU two readers gain nothing by reading at once, and each chunk takes as long as both. Nothing
is taken away from a worker: a lease that is over four seconds old only no longer keeps others
waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

from mlxsup.protocol.ids import ModelName

LEASE_S = 4.0
"""A lease ends after this long: twice what a chunk should take at most (`IDLE_TARGET_S` in
worker/engines/mlx/prefill.py). A chunk that takes longer ends, too, but nobody waits for it."""


class Stage(Enum):
    """What a model that takes part does."""

    READS = auto()
    """It has a long prompt to read, and has asked for nothing."""
    WAITS = auto()
    """It has asked for a lease."""
    HOLDS = auto()
    """It has a lease."""
    OUTLASTS = auto()
    """Its lease is over, and its chunk is not."""


@dataclass(slots=True)
class _Part:
    """How one model takes part.

    Attributes:
        stage: what it does.
        order: of its asking; a lower number asked earlier.
        until: when its lease ends, in monotonic seconds.
    """

    stage: Stage
    order: int = 0
    until: float = 0.0


class Leases:
    """The leases of one device."""

    def __init__(self) -> None:
        # Bounded by the configuration: models leave with their processes.
        self._parts: dict[ModelName, _Part] = {}
        self._asked = 0

    def __contains__(self, name: ModelName) -> bool:
        return name in self._parts

    def stage(self, name: ModelName) -> Stage | None:
        """What a model does; None if it takes no part."""
        part = self._parts.get(name)
        return None if part is None else part.stage

    def until(self, name: ModelName) -> float | None:
        """When the lease of this model ends; None if it has none."""
        part = self._parts.get(name)
        return part.until if part is not None and part.stage is Stage.HOLDS else None

    def is_over(self, name: ModelName, now: float) -> bool:
        """Whether this model has a lease that has lasted long enough."""
        until = self.until(name)
        return until is not None and until <= now

    def are_needed(self, limit: int | None) -> bool:
        """Whether more models have a long prompt to read than may do so at the same time."""
        return limit is not None and len(self._parts) > limit

    def reads(self, name: ModelName, *, is_reading: bool) -> bool:
        """A model has a long prompt left to read, or none; returns whether that changes anything.

        One that has asked takes part until it has given its lease back.
        """
        part = self._parts.get(name)
        if part is None and is_reading:
            self._parts[name] = _Part(Stage.READS)
        elif part is not None and part.stage is Stage.READS and not is_reading:
            del self._parts[name]
        else:
            return False
        return True

    def ask(self, name: ModelName) -> bool:
        """A model asks for a lease; returns whether it may."""
        if self.stage(name) not in (None, Stage.READS):
            return False
        self._asked += 1
        self._parts[name] = _Part(Stage.WAITS, order=self._asked)
        return True

    def give_back(self, name: ModelName) -> bool:
        """A model gives its lease back; returns whether it had one."""
        part = self._parts.get(name)
        if part is None or part.stage not in (Stage.HOLDS, Stage.OUTLASTS):
            return False
        part.stage = Stage.READS
        return True

    def drop(self, name: ModelName) -> None:
        """A model takes no part any longer: its process ends."""
        self._parts.pop(name, None)

    def expire(self, now: float) -> None:
        """Ends the leases that have lasted long enough."""
        for part in self._parts.values():
            if part.stage is Stage.HOLDS and part.until <= now:
                part.stage = Stage.OUTLASTS

    def grant(
        self, limit: int | None, rank: Callable[[ModelName], int], now: float
    ) -> list[ModelName]:
        """Grants the leases that are free.

        Args:
            limit: how many there may be; None: any number.
            rank: of a model's turn; lower ones are first, and equal ones in the order of asking.
            now: monotonic seconds.

        Returns:
            The models that have one from now on, in order.
        """
        granted = self._in(Stage.WAITS)
        granted.sort(key=lambda name: (rank(name), self._parts[name].order))
        if limit is not None:
            del granted[max(limit - len(self._in(Stage.HOLDS)), 0) :]
        for name in granted:
            part = self._parts[name]
            part.stage, part.until = Stage.HOLDS, now + LEASE_S
        return granted

    def check_invariants(self, members: Collection[ModelName], limit: int | None) -> None:
        """Raises AssertionError if others than members take part, or one waits though a lease is
        free."""
        assert self._parts.keys() <= set(members)
        if self._in(Stage.WAITS):
            assert limit is not None, "leases are granted without a limit"
            assert len(self._in(Stage.HOLDS)) >= limit, "a model waits for a lease that is free"

    def _in(self, stage: Stage) -> list[ModelName]:
        return [name for name, part in self._parts.items() if part.stage is stage]
