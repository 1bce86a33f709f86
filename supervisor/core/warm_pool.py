"""The warm pool: prewarmed workers, which have imported everything and wait for a model to load.

The core decides how many there are and which load takes one over; from then on it is that model's
worker, and the pool no longer knows it. Their memory is counted, and they are the first to go when
a model needs it.

A dead one is replaced after a growing delay and never given up: if MLX cannot be imported, each
load says so itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .actions import EndPrewarmed, Housekeeping, Outbox, StartPrewarmed
from .settings import CoreSettings

ENGINE = "mlx"
"""The engine that they have imported."""

FREE_PART = 10
"""`warm_workers = "auto"`: beside the prewarmed worker this part of the budget must be free."""

AUTO_PAUSE_S = 60.0
"""After it was ended because less is free, and before another is started: a model whose answers
come and go would otherwise cost an import each time."""

FIRST_DELAY_S = 1.0
MOST_DELAY_S = 60.0
"""After a death, until the next one is started; doubled each time in between."""

STABLE_S = 60.0
"""The death of one that has waited for this long starts the delay afresh."""


class PrewarmedState(StrEnum):
    """The states of a prewarmed worker."""

    STARTING = "starting"
    WAITING = "waiting"
    ENDING = "ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarmed:
    """A prewarmed worker.

    Attributes:
        number: counts them.
        state: what it does.
        since: since when, monotonic seconds.
        reserved_bytes: its part of the memory budget, until its exit is seen.
        pid: of its process, once it waits.
    """

    number: int
    state: PrewarmedState
    since: float
    reserved_bytes: int
    pid: int | None = None

    @property
    def is_waiting(self) -> bool:
        """True if a model can load in it."""
        return self.state is PrewarmedState.WAITING

    @property
    def is_ending(self) -> bool:
        """True if it is on its way out."""
        return self.state is PrewarmedState.ENDING


class WarmPool:
    """All prewarmed workers.

    Attributes:
        workers: by their numbers.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        # Bounded by `warm_workers`, and those that are about to end.
        self.workers: dict[int, Prewarmed] = {}
        self._wanted = 0
        self._started = 0
        self._deaths_in_a_row = 0
        self._retry_at: float | None = None
        self._auto_pause_until = float("-inf")
        self._measured_bytes: int | None = None

    @property
    def reserved_bytes(self) -> int:
        """Their part of the memory budget."""
        return sum(worker.reserved_bytes for worker in self.workers.values())

    @property
    def pids(self) -> list[int]:
        """Return the process ids that are known."""
        return [worker.pid for worker in self.workers.values() if worker.pid is not None]

    def claimed_bytes(self, settings: CoreSettings, *, is_of_use: bool) -> int:
        """Return what they hold, or will once they are started.

        Args:
            is_of_use: whether any model could load in one.
        """
        wanted = self._wanted if settings.warm_workers is None else settings.warm_workers
        wanted = wanted if is_of_use else 0
        return max(self.reserved_bytes, wanted * self._next_bytes(settings))

    # ------------------------------------------------------------ loads

    def hand_over(self, number: int) -> None:
        """Forget a worker that a model has taken over."""
        self._deaths_in_a_row = 0
        del self.workers[number]

    def end(self, numbers: Iterable[int], now: float) -> None:
        """End these workers: a model needs their memory."""
        for number in numbers:
            self._end(self.workers[number], now)

    # ------------------------------------------------------------ what the shell saw

    def is_ready(self, number: int, pid: int, now: float) -> None:
        """Note that one has imported everything, and waits."""
        worker = self.workers.get(number)
        if worker is not None and worker.state is PrewarmedState.STARTING:
            waiting = replace(worker, state=PrewarmedState.WAITING, since=now, pid=pid)
            self.workers[number] = waiting

    def ended(self, number: int, now: float) -> None:
        """Note that the process of one is gone, or could not be started."""
        worker = self.workers.pop(number, None)
        if worker is None or worker.is_ending:
            return
        if worker.is_waiting and now - worker.since >= STABLE_S:
            self._deaths_in_a_row = 0
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0**self._deaths_in_a_row)
        self._deaths_in_a_row = min(self._deaths_in_a_row + 1, 16)
        self._retry_at = now + delay_s
        self._outbox.deadlines.set(Housekeeping.WARM_POOL, self._retry_at)

    def measured(self, footprint_bytes: Mapping[int, int], settings: CoreSettings) -> bool:
        """Correct what is reserved for them by what they were measured at.

        Returns:
            True if any holds more than was reserved for it.
        """
        if not settings.prewarmed_bytes:
            return False
        is_more = False
        for number, worker in self.workers.items():
            measured_bytes = footprint_bytes.get(worker.pid, 0) if worker.pid is not None else 0
            if measured_bytes and worker.is_waiting:
                is_more = is_more or measured_bytes > worker.reserved_bytes
                self.workers[number] = replace(worker, reserved_bytes=measured_bytes)
                self._measured_bytes = measured_bytes
        return is_more

    # ------------------------------------------------------------ now and then

    def settle(
        self,
        settings: CoreSettings,
        now: float,
        *,
        is_of_use: bool,
        is_held_up: bool,
        reserved_bytes: int,
        needed_bytes: int,
    ) -> None:
        """Start one if it is missing; end those that are too many.

        Args:
            is_of_use: whether any model could load in one.
            is_held_up: whether a model loads, or waits for that, so that none may start beside it.
            reserved_bytes: what is reserved for models.
            needed_bytes: how much of that they cannot give back.
        """
        self._wanted = self._find_wanted(settings, needed_bytes, now) if is_of_use else 0
        staying = [worker for worker in self.workers.values() if not worker.is_ending]
        for worker in sorted(staying, key=usefulness)[: max(0, len(staying) - self._wanted)]:
            self._end(worker, now)
        is_missing = len(staying) < self._wanted and not is_held_up
        if is_missing and self._may_start(settings, reserved_bytes, now):
            self._start(settings, now)

    def status(self, settings: CoreSettings, now: float) -> dict[str, Any]:
        """Return what the status says about them."""
        is_waiting = self._retry_at is not None and now < self._retry_at
        return {
            "setting": "auto" if settings.warm_workers is None else settings.warm_workers,
            "wanted": self._wanted,
            "retry_in_s": self._retry_at - now if self._retry_at and is_waiting else None,
            "workers": [
                {
                    "pid": worker.pid,
                    "state": worker.state.value,
                    "since_s": now - worker.since,
                    "reserved_bytes": worker.reserved_bytes,
                }
                for worker in self.workers.values()
            ],
        }

    # ------------------------------------------------------------ inside

    def _find_wanted(self, settings: CoreSettings, needed_bytes: int, now: float) -> int:
        """Return how many there should be; one, or none, if the configuration leaves it open."""
        if settings.warm_workers is not None:
            return settings.warm_workers
        if now < self._auto_pause_until:
            return 0
        if self._has_plenty(settings, needed_bytes):
            return 1
        if self._wanted:
            self._auto_pause_until = now + AUTO_PAUSE_S
        return 0

    def _has_plenty(self, settings: CoreSettings, needed_bytes: int) -> bool:
        """True if the models need so little of the budget that a load, or longer answers, would
        find enough beside a prewarmed worker."""
        budget, own_bytes = settings.budget, self._next_bytes(settings)
        if budget is None or not own_bytes:
            return True
        least_bytes = own_bytes + budget.whole_bytes // FREE_PART
        return not budget.is_short and needed_bytes + least_bytes <= budget.size_bytes

    def _may_start(self, settings: CoreSettings, reserved_bytes: int, now: float) -> bool:
        """True if the next may start: not beside another start, and only if there is room."""
        if not all(worker.is_waiting for worker in self.workers.values()):
            return False
        if self._retry_at is not None and now < self._retry_at:
            return False
        if settings.budget is None:
            return True
        reserved_bytes += self.reserved_bytes + self._next_bytes(settings)
        return reserved_bytes <= settings.budget.size_bytes

    def _next_bytes(self, settings: CoreSettings) -> int:
        """Return what is reserved for the next one: as much as the latest was measured at."""
        return settings.prewarmed_bytes if self._measured_bytes is None else self._measured_bytes

    def _start(self, settings: CoreSettings, now: float) -> None:
        self._started += 1
        self.workers[self._started] = Prewarmed(
            number=self._started,
            state=PrewarmedState.STARTING,
            since=now,
            reserved_bytes=self._next_bytes(settings),
        )
        self._outbox.add(StartPrewarmed(number=self._started))

    def _end(self, worker: Prewarmed, now: float) -> None:
        self.workers[worker.number] = replace(worker, state=PrewarmedState.ENDING, since=now)
        self._outbox.add(EndPrewarmed(number=worker.number))


def usefulness(worker: Prewarmed) -> tuple[bool, int]:
    """Return a key that sorts those that are not ready first, and the newest first of each kind."""
    return worker.is_waiting, -worker.number
