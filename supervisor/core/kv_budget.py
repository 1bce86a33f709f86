"""The KV budget of each model: what its rows take and may take.

A worker that loads has one row reserved. What no model needs otherwise is divided among those that
serve: their rows may take it until it is needed elsewhere. A higher budget is reserved before a
worker is sent it; a lower one counts once the worker keeps to it. So what is reserved never exceeds
the memory budget through rows. The core plans with what a worker computes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, joining_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.states import SERVES, Priority, State, Wanted
from mlxsup.protocol.worker_messages import SetBudget

from .requests import Request, Stage

if TYPE_CHECKING:
    from .model import Model

LOWEST = Priority.BATCH
"""The class whose rows leave when memory is short."""

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

    def was_measured(self, now: float) -> bool:
        """Note that its process was measured: if it has given back, that shows from now on; return
        whether this is so."""
        if self._stage is not _GivingBack.CONFIRMED:
            return False
        self._stage, self._gave_back_at = _GivingBack.NOT_ASKED, now
        return True

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


# ---------------------------------------------------------------- what a model's rows take

SPARE_SHARE = 10
"""While others run, a row that had to leave returns only if a tenth of the budget stays free."""


def has_row_budget(model: Model) -> bool:
    """True if anything is known of what the rows of this model's live process take."""
    return (
        model.process.ready is not None
        and bool(model.process.ready.cache_layers)
        and model.life.need is not None
    )


def is_given(model: Model) -> bool:
    """True if the `memory` of its entry limits it."""
    return model.life.need is not None and model.life.need.given_bytes is not None


def fixed_bytes(model: Model) -> int:
    """Return what the live process takes without any row, and what is reserved for it besides
    because others before it ran out of memory."""
    return bare_bytes(model) + model.life.raise_bytes


def planned_bytes(model: Model) -> int:
    """Return what the live process was to hold at most, by what it was told; while it loads, or if
    its rows have no budget, what it was started with."""
    if model.batch.budget is None or not has_row_budget(model):
        return model.life.granted_bytes
    return fixed_bytes(model) + model.batch.budget.most_bytes


def bare_bytes(model: Model) -> int:
    """Return what the live process takes without any row."""
    assert model.process.ready is not None
    assert model.life.need is not None
    own_bytes = model.process.ready.own_bytes
    if own_bytes is None:
        own_bytes = model.life.need.own.size_bytes
    return model.process.ready.active_bytes + own_bytes


def _claim_of(model: Model) -> tuple[int, int]:
    """Return the bytes of one row, as long as the longest open answer, and those of all rows. With
    `memory` in its entry both are what there is; it is enough for a short row, or the load would
    have failed."""
    need = model.life.need
    assert need is not None
    if need.given_bytes is not None:
        limit_bytes = max(0, need.given_bytes - fixed_bytes(model))
        return limit_bytes, limit_bytes
    longest = min(max(need.least_tokens, model.longest_stream), need.context_tokens)
    least_bytes = _bytes_of(model, rows=1, longest=longest)
    wanted_bytes = _bytes_of(model, rows=need.max_rows, longest=need.context_tokens)
    return least_bytes, max(least_bytes, wanted_bytes)


def rows_of(model: Model) -> Rows | None:
    """Return the rows of a model that serves, and what they may take; None if nothing is known of
    that. While memory is short, rows of the lowest class may leave that can continue later."""
    if model.life.state not in SERVES or not has_row_budget(model):
        return None
    ready, budget = model.process.ready, model.batch.budget
    assert ready is not None
    may_go = model.life.state is State.READY and not model.process.is_unlinked
    least_bytes, wanted_bytes = _claim_of(model)
    return Rows(
        layers=tuple(ready.cache_layers),
        least_bytes=least_bytes,
        wanted_bytes=wanted_bytes,
        bare_bytes=bare_bytes(model),
        raise_bytes=model.life.raise_bytes,
        measured_bytes=model.measured_bytes,
        kept_bytes=model.life.pinned_bytes,
        size_bytes=None if budget is None else budget.size_bytes,
        most_bytes=0 if budget is None else budget.most_bytes,
        is_given=is_given(model),
        is_asked=budget is not None and budget.is_asked,
        rows=tuple(
            Row(
                served_at=one.run.dispatched_at or 0.0,
                key=one.key,
                tokens=one.length,
                may_go=may_go and one.priority is LOWEST and model.may_leave(one),
                is_leaving=one.stage is not Stage.RUNNING,
                is_leaving_short=one.is_leaving_short,
            )
            for one in model.batch.running.values()
        ),
    )


def spare_bytes(model: Model, rows: Rows | None, now: float) -> int:
    """Return how much less would be reserved for a model if it gave back what it does not need now;
    once its process is about to go, that is all but what the next one needs, if there is to be one,
    or what is kept for a pinned model."""
    if model.life.state is State.STOPPING:
        next_bytes = model.bytes_to_load if model.life.wanted is Wanted.UP else 0
        return max(0, model.life.reserved_bytes - max(next_bytes, model.life.pinned_bytes))
    budget = model.batch.budget
    if budget is None or rows is None or rows.is_given:
        return 0
    left_bytes = rows.fixed_bytes + rows.held_bytes
    if not budget.may_give_back(now):  # what it holds is what it needs
        left_bytes = max(left_bytes, rows.measured_bytes)
    return max(0, model.life.reserved_bytes - max(left_bytes, model.life.pinned_bytes))


def lasting_bytes(model: Model, rows: Rows | None, spare_bytes: int, now: float) -> int:
    """Return what a pinned model holds even if all of its requests end: what a load of it needs,
    because what its rows take besides comes back with them. If its process has outgrown that, it is
    all that is left once it is idle and has given back; without a budget for its rows, nothing
    comes back."""
    life, budget = model.life, model.batch.budget
    if life.state is not State.READY:
        return life.pinned_bytes
    held_bytes = life.reserved_bytes - spare_bytes
    if rows is None or rows.is_given:
        return held_bytes
    has_given_back = budget is not None and budget.has_just_given_back(model.idle_since, now)
    return held_bytes if model.is_idle and has_given_back else life.pinned_bytes


def reserve(model: Model) -> None:
    """Derive what is reserved for a process from what its rows may take, and what it holds."""
    assert model.batch.budget is not None
    model.life.reserved_bytes = max(
        fixed_bytes(model) + model.batch.budget.most_bytes,
        model.measured_bytes,
        model.life.pinned_bytes,
    )


# ---------------------------------------------------------------- one request


def is_held_back(model: Model, request: Request) -> bool:
    """True if a request that has left for want of memory must wait on: until there is room for its
    row and some to spare, or a row has ended, or nothing runs."""
    if request.run.left_short_at is None or model.batch.budget is None or not has_row_budget(model):
        return False
    if not has_memory_beside(model, request, ()):
        return True
    if model.batch.ended > request.run.left_short_at:
        return False
    return not has_memory_beside(model, request, model.batch.running.values())


def has_memory_beside(model: Model, request: Request, others: Collection[Request]) -> bool:
    """True if there is room for the row of a request next to these, and some to spare; without
    others, whether it fits alone. Its rows have a budget."""
    assert model.process.ready is not None
    assert model.batch.budget is not None
    lengths = [request.length, *(one.length for one in others)]
    room_bytes = model.batch.budget.size_bytes
    if others:
        room_bytes -= room_bytes // SPARE_SHARE
    return joining_bytes(model.process.ready.cache_layers, lengths) <= room_bytes


def needs_in_vain(model: Model, request: Request) -> int | None:
    """Return what the row of a request needs that had to leave and cannot return, because there is
    less for it alone or it must run through once it has begun; None if it may return."""
    budget = model.batch.budget
    if request.run.left_short_at is None or budget is None or not has_row_budget(model):
        return None
    needed_bytes = _bytes_of(model, rows=1, longest=request.length)
    must_run_through = request.tokens_sent > 0 and not model.may_leave(request)
    return needed_bytes if needed_bytes > budget.could_bytes or must_run_through else None


def _bytes_of(model: Model, *, rows: int, longest: int) -> int:
    assert model.process.ready is not None
    return cache_bytes(model.process.ready.cache_layers, rows=rows, longest=longest)


# ---------------------------------------------------------------- the parts of a division


def keeps_to(model: Model, budget: RowBudget) -> bool:
    """Note that a worker keeps to what it was told last; return whether that changes what is
    reserved."""
    if not budget.was_confirmed():
        return False
    if has_row_budget(model):
        reserve(model)
    return True


def was_measured(model: Model, now: float) -> bool:
    """Note that the process of a model was measured; return whether that changes what it holds, or
    what it may give back."""
    if model.batch.budget is None or not has_row_budget(model):
        return model.life.holds(model.measured_bytes, may_shrink=model.may_shrink(now))
    before = model.life.reserved_bytes
    has_given_back = model.batch.budget.was_measured(now)
    reserve(model)
    return has_given_back or model.life.reserved_bytes != before


def adopt(model: Model, part: Part) -> SetBudget | None:
    """Give a model its part of the division; return what its worker must be told."""
    if model.batch.budget is None:
        model.batch.budget = RowBudget()
    model.batch.budget.could_bytes = part.could_bytes
    model.life.raise_bytes = part.raise_bytes
    if part.size_bytes is None:
        return None
    is_more = part.size_bytes > model.batch.budget.size_bytes or not model.batch.budget.number
    message = model.batch.budget.tell(part.size_bytes, gives_back=part.gives_back)
    if is_more:
        reserve(model)
    return message


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
