"""Spare workers: processes without a model that have imported everything and wait for a load.

They are counted in memory, and are the first to go when a model needs it. The core decides how many
there are and which load takes one over; from then on it is that model's worker, and nothing here
knows it any longer.

A dead one is replaced after a growing delay and never given up: if MLX cannot be imported, each
load says so itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .actions import EndSpare, StartSpare
from .deadlines import Deadlines, Housekeeping
from .lifecycle.states import Pending
from .memory.planner import Urgency
from .model import Model
from .outbox import Outbox
from .settings import CoreSettings

ENGINE = "mlx"
"""The engine that they have imported."""

FIRST_DELAY_S = 1.0
MOST_DELAY_S = 60.0
"""After a death, until the next one is started; doubled each time in between."""

STABLE_S = 60.0
"""The death of one that has waited for this long starts the delay afresh."""


class SpareState(StrEnum):
    """What a spare worker does."""

    STARTING = "starting"
    WAITING = "waiting"
    ENDING = "ending"


@dataclass(slots=True, kw_only=True)
class Spare:
    """One of them.

    Attributes:
        number: counts them.
        state: what it does.
        since: since when, monotonic seconds.
        reserved_bytes: its part of the memory budget, until its exit is seen.
        pid: of its process, once it waits.
    """

    number: int
    state: SpareState
    since: float
    reserved_bytes: int
    pid: int | None = None


class Spares:
    """All spare workers.

    Args:
        deadlines: where the time of the next attempt is kept.
        outbox: takes the actions.
    """

    def __init__(self, deadlines: Deadlines, outbox: Outbox) -> None:
        self._deadlines = deadlines
        self._outbox = outbox
        # Bounded by `spare_workers`, and those that are about to end.
        self._spares: dict[int, Spare] = {}
        self._started = 0
        self._deaths_in_a_row = 0
        self._retry_at: float | None = None
        self._measured_bytes: int | None = None

    @property
    def reserved_bytes(self) -> int:
        """Their part of the memory budget."""
        return sum(spare.reserved_bytes for spare in self._spares.values())

    @property
    def pids(self) -> list[int]:
        """Of their processes, as far as they are known."""
        return [spare.pid for spare in self._spares.values() if spare.pid is not None]

    def claimed_bytes(self, models: Iterable[Model], settings: CoreSettings) -> int:
        """What they hold, or will once they are started."""
        if not self._spares and not settings.spare_workers:
            return 0
        wanted = settings.spare_workers if _are_of_use(models) else 0
        return max(self.reserved_bytes, wanted * self._next_bytes(settings))

    # ------------------------------------------------------------ loads

    def hand_over(self, model: Model) -> int | None:
        """A model begins to load: the number of the spare that becomes its worker, or None."""
        spare = self._fit_for(model)
        if spare is None:
            return None
        self._deaths_in_a_row = 0
        return self._spares.pop(spare.number).number

    def make_room(self, left_bytes: int, now: float, *, for_whom: Model | None = None) -> bool:
        """Ends as few as are too many, those first that are not of use yet.

        Args:
            left_bytes: what the models leave of the budget, the one that is to be loaded included.
            now: monotonic seconds.
            for_whom: who is to be loaded: the spare that it takes over needs no extra room.

        Returns:
            Whether they fit already; if not, they do once the exits have been seen.
        """
        kept = self._fit_for(for_whom) if for_whom is not None else None
        others = [spare for spare in self._spares.values() if spare is not kept]
        held_bytes = sum(spare.reserved_bytes for spare in others)
        if held_bytes <= left_bytes:
            return True
        held_bytes -= sum(spare.reserved_bytes for spare in others if _is_ending(spare))
        for spare in sorted(others, key=_usefulness):
            if held_bytes > left_bytes and not _is_ending(spare):
                held_bytes -= spare.reserved_bytes
                self._end(spare, now)
        return False

    # ------------------------------------------------------------ what the shell saw

    def is_ready(self, number: int, pid: int, now: float) -> None:
        """One has imported everything, and waits."""
        spare = self._spares.get(number)
        if spare is not None and spare.state is SpareState.STARTING:
            spare.state, spare.since, spare.pid = SpareState.WAITING, now, pid

    def ended(self, number: int, now: float) -> None:
        """The process of one is gone, or could not be started."""
        spare = self._spares.pop(number, None)
        if spare is None or _is_ending(spare):
            return
        if spare.state is SpareState.WAITING and now - spare.since >= STABLE_S:
            self._deaths_in_a_row = 0
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0**self._deaths_in_a_row)
        self._deaths_in_a_row = min(self._deaths_in_a_row + 1, 16)
        self._retry_at = now + delay_s
        self._deadlines.set(Housekeeping.SPARES, self._retry_at)

    def measured(self, footprint_bytes: Mapping[int, int], settings: CoreSettings) -> bool:
        """Corrects what is reserved for them by what they were measured at.

        Returns:
            Whether any holds more than was reserved for it.
        """
        if not settings.spare_bytes:
            return False
        is_more = False
        for spare in self._spares.values():
            measured_bytes = footprint_bytes.get(spare.pid, 0) if spare.pid is not None else 0
            if measured_bytes and spare.state is SpareState.WAITING:
                is_more = is_more or measured_bytes > spare.reserved_bytes
                spare.reserved_bytes = self._measured_bytes = measured_bytes
        return is_more

    # ------------------------------------------------------------ after every event

    def settle(
        self, models: Iterable[Model], settings: CoreSettings, now: float, *, is_ending: bool
    ) -> None:
        """Starts one if it is missing and nothing loads; ends those that are too many."""
        if not self._spares and not settings.spare_workers:
            return
        everybody = list(models)
        wanted = settings.spare_workers if _are_of_use(everybody) and not is_ending else 0
        staying = [spare for spare in self._spares.values() if not _is_ending(spare)]
        for spare in sorted(staying, key=_usefulness)[: max(0, len(staying) - wanted)]:
            self._end(spare, now)
        if len(staying) < wanted and self._may_start(everybody, settings, now):
            self._start(settings, now)

    def status(self, settings: CoreSettings, now: float) -> dict[str, Any]:
        """What the status says about them."""
        is_waiting = self._retry_at is not None and now < self._retry_at
        return {
            "wanted": settings.spare_workers,
            "retry_in_s": self._retry_at - now if self._retry_at and is_waiting else None,
            "workers": [
                {
                    "pid": spare.pid,
                    "state": spare.state.value,
                    "since_s": now - spare.since,
                    "reserved_bytes": spare.reserved_bytes,
                }
                for spare in self._spares.values()
            ],
        }

    # ------------------------------------------------------------ inside

    def _fit_for(self, model: Model) -> Spare | None:
        if model.life.settings.launch.engine != ENGINE:
            return None
        waiting = (s for s in self._spares.values() if s.state is SpareState.WAITING)
        return next(waiting, None)

    def _may_start(self, models: list[Model], settings: CoreSettings, now: float) -> bool:
        """One at a time, and not while anything loads or waits for what it would take."""
        if any(spare.state is not SpareState.WAITING for spare in self._spares.values()):
            return False
        if self._retry_at is not None and now < self._retry_at:
            return False
        if any(model.life.is_loading or _waits_for_somebody(model) for model in models):
            return False
        if settings.budget is None:
            return True
        reserved_bytes = sum(model.life.reserved_bytes for model in models) + self.reserved_bytes
        return reserved_bytes + self._next_bytes(settings) <= settings.budget.size_bytes

    def _next_bytes(self, settings: CoreSettings) -> int:
        """What is reserved for one that is started: as much as the latest was measured at."""
        return settings.spare_bytes if self._measured_bytes is None else self._measured_bytes

    def _start(self, settings: CoreSettings, now: float) -> None:
        self._started += 1
        self._spares[self._started] = Spare(
            number=self._started,
            state=SpareState.STARTING,
            since=now,
            reserved_bytes=self._next_bytes(settings),
        )
        self._outbox.add(StartSpare(number=self._started))

    def _end(self, spare: Spare, now: float) -> None:
        spare.state, spare.since = SpareState.ENDING, now
        self._outbox.add(EndSpare(number=spare.number))


def _are_of_use(models: Iterable[Model]) -> bool:
    return any(model.life.settings.launch.engine == ENGINE for model in models)


def _is_ending(spare: Spare) -> bool:
    return spare.state is SpareState.ENDING


def _usefulness(spare: Spare) -> tuple[bool, int]:
    """The newest first of those that are not ready yet, then of the others."""
    return spare.state is SpareState.WAITING, -spare.number


def _waits_for_somebody(model: Model) -> bool:
    """Whether it waits for its turn, or for memory that somebody needs it to have."""
    phase = model.life.phase
    if not isinstance(phase, Pending) or phase.fetching is not None:
        return False
    return phase.lack is None or model.urgency is not Urgency.NOBODY
