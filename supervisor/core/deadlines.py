"""The times at which something may be due, earliest first."""

from __future__ import annotations

import heapq
from enum import Enum, auto
from typing import NamedTuple

from mlxsup.protocol.ids import ModelName, RequestKey


class Housekeeping(Enum):
    """The subjects that are no model and no request."""

    WARM_POOL = auto()
    """The next attempt to start a prewarmed worker."""
    GATEWAY = auto()
    """The next attempt to start the gateway, or its next sign of life."""


class SignsOf(NamedTuple):
    """The signs of life of a model's process. Each beat moves their time, and no other."""

    model: ModelName


Subject = ModelName | SignsOf | RequestKey | Housekeeping
"""A model (text), its process, a request (integer), or none of them."""


class _Due(NamedTuple):
    when: float
    order: int
    subject: Subject


class Deadlines:
    """Keeps one time per subject: its earliest deadline that still applies.

    Attributes:
        has_changed: whether the earliest time may be another one since this was last set to false.
    """

    def __init__(self) -> None:
        self._when: dict[Subject, float] = {}
        self._heap: list[_Due] = []
        self._order = 0
        self.has_changed = False

    def __len__(self) -> int:
        return len(self._when)

    @property
    def held(self) -> int:
        """Return how many times it keeps, with those that were replaced and not yet forgotten."""
        return len(self._heap)

    def of(self, subject: Subject) -> float | None:
        """Return the subject's time; None for none."""
        return self._when.get(subject)

    def set(self, subject: Subject, when: float | None) -> None:
        """Replace the subject's time; None for none."""
        if when is None:
            self._when.pop(subject, None)  # a wake too many does no harm
        elif self._when.get(subject) != when:
            self._when[subject] = when
            self.has_changed = True
            self._order += 1
            heapq.heappush(self._heap, _Due(when, self._order, subject))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._when):
            self._heap = [due for due in self._heap if self._is_current(due)]
            heapq.heapify(self._heap)

    def earliest(self) -> float | None:
        """Return the next time at which something may be due."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].when if self._heap else None

    def take_due(self, now: float) -> list[Subject]:
        """Remove and return the subjects whose time has come."""
        due = []
        self.has_changed = True
        while (when := self.earliest()) is not None and when <= now:
            subject = heapq.heappop(self._heap).subject
            del self._when[subject]
            due.append(subject)
        return due

    def _is_current(self, due: _Due) -> bool:
        return self._when.get(due.subject) == due.when
