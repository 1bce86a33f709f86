"""The KV budget of each model: what its rows may take, and the division of what is free for them.

A worker that loads has one row reserved. What no model needs otherwise is divided among those that
serve: their rows may take it until it is needed elsewhere. A higher budget is reserved before a
worker is sent it; a lower one counts once the worker keeps to it. So what is reserved never exceeds
the memory budget through rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
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


def rows_need(layers: tuple[CacheLayers, ...], claim: Claim, lengths: Collection[int]) -> int:
    """Return what rows of these lengths, in tokens, hold and need to grow by one step; no less than
    the least of their model, and no more than it can use."""
    longest = max(lengths, default=0) + GROWTH_TOKENS
    rows_bytes = cache_bytes(layers, rows=len(lengths), longest=longest)
    return min(max(claim.least_bytes, rows_bytes), claim.wanted_bytes)


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


# ---------------------------------------------------------------- the division

LEAST_CHANGE = 8
"""Divides a KV budget: it is lowered only by at least one part, unless memory is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A model that serves and whose rows have a budget, at one moment.

    Attributes:
        name: its name.
        claim: what its rows need and can use.
        bare_bytes: what it takes without any row.
        raise_bytes: what is reserved besides because processes before this one ran out of memory.
        rows_bytes: what its rows hold, and need to grow by one step.
        reserved_bytes: what is reserved for it.
        measured_bytes: what its process was measured at.
        kept_bytes: what stays reserved however few rows there are: it is pinned, or was given it.
        size_bytes: what its rows were told to take; None: they have not been told yet.
        most_bytes: the largest budget that its worker may still keep to.
        has_spare: whether it could give anything back, and has not been asked to.
        is_given: whether the `memory` of its entry limits it.
    """

    name: ModelName
    claim: Claim
    bare_bytes: int
    raise_bytes: int
    rows_bytes: int
    reserved_bytes: int
    measured_bytes: int
    kept_bytes: int
    size_bytes: int | None
    most_bytes: int
    has_spare: bool
    is_given: bool

    @property
    def fixed_bytes(self) -> int:
        """Return what is reserved for it without any row."""
        return self.bare_bytes + self.raise_bytes

    def reserved_with(self, rows_bytes: int) -> int:
        """Return what is reserved for it once its rows may take so much."""
        most_bytes = max(self.most_bytes, rows_bytes)
        return max(self.fixed_bytes + most_bytes, self.measured_bytes, self.kept_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What is divided.

    Attributes:
        members: the models.
        others_bytes: what is reserved for all other models.
        whole_bytes: the memory budget while memory is not short; None: there is none.
        size_bytes: what models may take now, less what prewarmed workers hold or will; None as
            before.
        is_awaited: whether a model waits for memory that a request or a command needs it to have.
        tried_again: the models that try a request again that has run out of memory alone.
    """

    members: tuple[Member, ...]
    others_bytes: int
    whole_bytes: int | None
    size_bytes: int | None
    is_awaited: bool
    tried_again: frozenset[ModelName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one model gets of the division.

    Attributes:
        name: of the model.
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


def divide(division: Division, *, is_short: bool) -> list[Part]:
    """Divide the memory that is free for rows.

    Args:
        division: the facts.
        is_short: whether every model must give back what it does not need now.

    Returns:
        A part for each member, in the order in which they are told: lower budgets come first.
    """
    coulds = {one.name: _could_bytes(one, division) for one in division.members}
    raises = {one.name: one.raise_bytes for one in division.members}
    if division.whole_bytes is not None:
        # What was raised gives way to a row that could not run otherwise, until the next load.
        for one in division.members:
            room_bytes = max(0, coulds[one.name] - one.claim.least_bytes)
            raises[one.name] = min(one.raise_bytes, room_bytes)
    members = [replace(one, raise_bytes=raises[one.name]) for one in division.members]
    targets = _targets(replace(division, members=tuple(members)), is_short=is_short)
    parts = {n: Part(name=n, could_bytes=coulds[n], raise_bytes=raises[n]) for n in coulds}
    lowered = {}
    for one in members:
        size_bytes = _lowered(one, targets[one.name], is_short=is_short)
        if size_bytes is not None:
            lowered[one.name] = replace(
                parts.pop(one.name), size_bytes=size_bytes, gives_back=is_short
            )
    free_bytes = None
    if division.size_bytes is not None:
        reserved_bytes = sum(one.reserved_bytes for one in division.members)
        free_bytes = division.size_bytes - division.others_bytes - reserved_bytes
    raised = []
    for one in members:
        target_bytes = targets[one.name]
        if free_bytes is not None:
            held_bytes = one.reserved_bytes - one.fixed_bytes
            target_bytes = min(target_bytes, held_bytes + max(0, free_bytes))
        if one.size_bytes is None:  # the first row needs nothing that is free
            target_bytes = max(target_bytes, one.claim.least_bytes)
        elif target_bytes <= one.size_bytes or one.name in lowered:
            continue
        raised.append(replace(parts.pop(one.name), size_bytes=target_bytes))
        if free_bytes is not None:
            free_bytes -= one.reserved_with(target_bytes) - one.reserved_bytes
    return [*lowered.values(), *raised, *parts.values()]


def _could_bytes(one: Member, division: Division) -> int:
    if division.whole_bytes is None or one.is_given:
        return one.claim.wanted_bytes
    others = [other for other in division.members if other is not one]
    taken_bytes = sum(other.fixed_bytes + other.claim.least_bytes for other in others)
    return division.whole_bytes - taken_bytes - division.others_bytes - one.bare_bytes


def _lowered(one: Member, target_bytes: int, *, is_short: bool) -> int | None:
    """Return a lower budget, or the same if the worker must give back what it keeps for speed; None
    for no news. It is lowered by little only if that is needed elsewhere."""
    if one.size_bytes is None:
        return None
    target_bytes = min(target_bytes, one.size_bytes)
    if is_short:
        return target_bytes if target_bytes < one.size_bytes or one.has_spare else None
    return target_bytes if target_bytes < one.size_bytes - one.size_bytes // LEAST_CHANGE else None


def _targets(division: Division, *, is_short: bool) -> dict[ModelName, int]:
    """Return what the rows of each model should be allowed to take: what they hold if memory is
    short or a request of another model has run out of memory alone, no more than now while a model
    waits for memory, or else also an equal share of what is free."""
    held = {one.name: one.rows_bytes for one in division.members}
    if is_short:
        return held
    shares = _shares(division)
    tried = division.tried_again
    if not tried:
        return shares
    return {n: shares[n] if tried <= {n} else min(shares[n], held[n]) for n in shares}


def _shares(division: Division) -> dict[ModelName, int]:
    """Return what the rows of each model should be allowed to take while memory is not short."""
    members = division.members
    if division.size_bytes is None:
        return {one.name: one.claim.wanted_bytes for one in members}
    if division.is_awaited:
        return {one.name: one.size_bytes or 0 for one in members}
    least_bytes = sum(one.fixed_bytes + one.claim.least_bytes for one in members)
    free_bytes = division.size_bytes - division.others_bytes - least_bytes
    extras = equal_shares(free_bytes, {one.name: one.claim for one in members})
    return {
        one.name: max(one.claim.least_bytes + extras[one.name], one.rows_bytes) for one in members
    }


def equal_shares(free_bytes: int, claims: Mapping[ModelName, Claim]) -> dict[ModelName, int]:
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
