"""What the rows of a model may take beyond the one that is always reserved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.worker_messages import SetBudget

GIVES_AGAIN_AFTER_S = 10.0
"""A model that has given back what it could is asked again after this long at the earliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the rows of a model need, and what they can use.

    Attributes:
        least_bytes: for one row.
        wanted_bytes: for all of its rows, each of the whole context.
    """

    least_bytes: int
    wanted_bytes: int


def divide(free_bytes: int, claims: Mapping[ModelName, Claim]) -> dict[ModelName, int]:
    """Return what each model gets beyond its least: equal shares, and none more than it can use.

    Args:
        free_bytes: what is left once each has its least; if that is nothing, none gets any.
        claims: of the models.
    """
    extras = {name: max(0, c.wanted_bytes - c.least_bytes) for name, c in claims.items()}
    left_bytes, shares = max(0, free_bytes), {}
    order = sorted(extras, key=lambda name: (extras[name], name))
    for place, name in enumerate(order):
        shares[name] = min(extras[name], left_bytes // (len(order) - place))
        left_bytes -= shares[name]
    return shares


class _Stage(Enum):
    """How far a model is in giving back what is only kept for speed."""

    NOT_ASKED = auto()
    ASKED = auto()
    CONFIRMED = auto()


@dataclass(slots=True, kw_only=True)
class RowBudget:
    """What the rows of one process may take, and what its worker is known to keep to.

    Attributes:
        size_bytes: what it was told last.
        most_bytes: the largest of what it may still keep to: a lower budget only counts once the
            worker says that it keeps to it.
        could_bytes: what it could be told at most, if every other model kept to its least.
        number: of what it was told last.
    """

    size_bytes: int = 0
    most_bytes: int = 0
    could_bytes: int = 0
    number: int = 0
    _stage: _Stage = _Stage.NOT_ASKED
    _gave_back_at: float | None = None

    def tell(self, size_bytes: int, *, gives_back: bool = False) -> SetBudget:
        """The message that sets another budget."""
        self.number += 1
        self.size_bytes = size_bytes
        self.most_bytes = max(self.most_bytes, size_bytes)
        if gives_back:
            self._stage = _Stage.ASKED
        return SetBudget(number=self.number, rows_bytes=size_bytes, gives_back=gives_back)

    def keeps_to(self, number: int) -> bool:
        """The worker keeps to this budget; returns whether that changes anything."""
        if number != self.number:
            return False
        is_news = self.most_bytes != self.size_bytes or self._stage is _Stage.ASKED
        self.most_bytes = self.size_bytes
        if self._stage is _Stage.ASKED:
            self._stage = _Stage.CONFIRMED
        return is_news

    def was_measured(self, now: float) -> bool:
        """Its process was measured: if it has given back, that shows from now on; returns whether
        this is so."""
        if self._stage is not _Stage.CONFIRMED:
            return False
        self._stage, self._gave_back_at = _Stage.NOT_ASKED, now
        return True

    def may_give_back(self, now: float) -> bool:
        """True if it may hold anything for speed alone: not if it has only just given that back."""
        at = self._gave_back_at
        return self._stage is not _Stage.NOT_ASKED or at is None or now >= at + GIVES_AGAIN_AFTER_S

    def has_just_given_back(self, since: float, now: float) -> bool:
        """True if what it holds now is what is left after it gave back, later than that."""
        at = self._gave_back_at
        return at is not None and at > since and not self.may_give_back(now)

    @property
    def is_asked(self) -> bool:
        """True if it was asked to give back and the result is not known yet."""
        return self._stage is not _Stage.NOT_ASKED
