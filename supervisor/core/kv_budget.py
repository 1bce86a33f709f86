"""The KV budget of each model: what its rows take and may take, as values.

A worker that loads has one row reserved. What no model needs otherwise is divided among those that
serve: their rows may take it until it is needed elsewhere. A higher budget is reserved before a
worker is sent it; a lower one counts once the worker keeps to it. So what is reserved never exceeds
the memory budget through rows. The core plans with what a worker computes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.worker_messages import SetBudget

GIVES_AGAIN_AFTER_S = 10.0
"""A model that has given back what it could is asked again after this long at the earliest."""


class Row(NamedTuple):
    """A row of a batch.

    Attributes:
        served_at: when it was dispatched, monotonic seconds.
        key: of its request.
        tokens: its length.
        may_go: whether it may be asked to leave because memory is short.
        is_leaving: whether it has been asked to leave, for any reason.
        is_leaving_short: whether for want of memory: then it needs none.
    """

    served_at: float
    key: RequestKey
    tokens: int
    may_go: bool = False
    is_leaving: bool = False
    is_leaving_short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a live process at one moment: what they take, need and may take.

    Attributes:
        layers: what each layer keeps for a row.
        least_bytes: what one row needs, as long as the longest open answer.
        wanted_bytes: what they can use: all rows, each of the whole context.
        bare_bytes: what the process takes without any row.
        raise_bytes: what is reserved besides because processes before it ran out of memory.
        measured_bytes: what the process holds.
        kept_bytes: what stays reserved however few rows there are, because the model is pinned.
        size_bytes: what they were told to take; None: they have not been told yet.
        most_bytes: the largest budget that the worker may still keep to.
        is_given: whether the `memory` of the entry limits them.
        is_asked: whether the worker was asked to give back, and has not been measured since.
        rows: all that the worker holds for an open request.
    """

    layers: tuple[CacheLayers, ...]
    least_bytes: int
    wanted_bytes: int
    bare_bytes: int = 0
    raise_bytes: int = 0
    measured_bytes: int = 0
    kept_bytes: int = 0
    size_bytes: int | None = None
    most_bytes: int = 0
    is_given: bool = False
    is_asked: bool = False
    rows: tuple[Row, ...] = ()

    @property
    def fixed_bytes(self) -> int:
        """Return what is reserved without any row."""
        return self.bare_bytes + self.raise_bytes

    @property
    def held_bytes(self) -> int:
        """Return what the rows hold, and need to grow by one step."""
        return self._need([one.tokens for one in self.rows if not one.is_leaving_short])

    def needed_bytes(self, without: Collection[RequestKey] = ()) -> int:
        """Return what is needed once those that leave, and the rows `without`, have left: for the
        process itself, and for the other rows with a step of growth."""
        staying = [one.tokens for one in self.rows if not one.is_leaving and one.key not in without]
        return max(self.fixed_bytes + self._need(staying), self.kept_bytes)

    def reserved_with(self, rows_bytes: int) -> int:
        """Return what is reserved once the rows may take so much."""
        most_bytes = max(self.most_bytes, rows_bytes)
        return max(self.fixed_bytes + most_bytes, self.measured_bytes, self.kept_bytes)

    def _need(self, lengths: Collection[int]) -> int:
        """Return what rows of these lengths, in tokens, hold and need to grow by one step; no less
        than the least of their model, and no more than it can use."""
        longest = max(lengths, default=0) + GROWTH_TOKENS
        rows_bytes = cache_bytes(self.layers, rows=len(lengths), longest=longest)
        return min(max(self.least_bytes, rows_bytes), self.wanted_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of one model in the division.

    Attributes:
        could_bytes: what its rows could take if all others gave back what they may.
        raise_bytes: what stays reserved because processes before this one ran out of memory.
        size_bytes: what its worker is told now; None: nothing.
        gives_back: whether the worker must also give back what it keeps for speed.
    """

    name: ModelName
    could_bytes: int
    raise_bytes: int
    size_bytes: int | None = None
    gives_back: bool = False


class _GivingBack(Enum):
    """The progress of a model in giving back memory that it keeps only for speed."""

    NOT_ASKED = auto()
    ASKED = auto()
    CONFIRMED = auto()


@dataclass(slots=True, kw_only=True)
class RowBudget:
    """The memory that the rows of one process may take, and the limit its worker has confirmed.

    Attributes:
        size_bytes: what it was told last.
        most_bytes: the largest of what it may still keep to: a lower budget only counts once the
            worker says that it keeps to it.
        could_bytes: what it could be told at most, if every other model kept to its least.
        number: of what it was told last.
        awaited: that number, until the worker has said that it keeps to it.
    """

    size_bytes: int = 0
    most_bytes: int = 0
    could_bytes: int = 0
    number: int = 0
    awaited: int | None = None
    _stage: _GivingBack = _GivingBack.NOT_ASKED
    _gave_back_at: float | None = None

    def tell(self, size_bytes: int, *, gives_back: bool = False) -> SetBudget:
        """Return the message that sets another budget."""
        self.number += 1
        self.awaited = self.number
        self.size_bytes = size_bytes
        self.most_bytes = max(self.most_bytes, size_bytes)
        if gives_back:
            self._stage = _GivingBack.ASKED
        return SetBudget(number=self.number, rows_bytes=size_bytes, gives_back=gives_back)

    def was_confirmed(self) -> bool:
        """Note that the worker keeps to what it was told last; return whether that changes
        anything."""
        self.awaited = None
        is_news = self.most_bytes != self.size_bytes or self._stage is _GivingBack.ASKED
        self.most_bytes = self.size_bytes
        if self._stage is _GivingBack.ASKED:
            self._stage = _GivingBack.CONFIRMED
        return is_news

    def was_measured(self, now: float) -> None:
        """Note that its process was measured: if it has given back, that shows from now on."""
        if self._stage is _GivingBack.CONFIRMED:
            self._stage, self._gave_back_at = _GivingBack.NOT_ASKED, now

    def may_give_back(self, now: float) -> bool:
        """True if it may hold anything for speed alone: not if it has only just given that back."""
        at = self._gave_back_at
        return (
            self._stage is not _GivingBack.NOT_ASKED
            or at is None
            or now >= at + GIVES_AGAIN_AFTER_S
        )

    def has_just_given_back(self, since: float, now: float) -> bool:
        """True if what it holds now is what is left after it gave back, later than that."""
        at = self._gave_back_at
        return at is not None and at > since and not self.may_give_back(now)

    @property
    def is_asked(self) -> bool:
        """True if it was asked to give back and the result is not known yet."""
        return self._stage is not _GivingBack.NOT_ASKED
