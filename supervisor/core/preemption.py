"""Choose the waiting request that gets a row, and the rows that leave the batch for others
(docs/decisions/0005-fairness.md, 0006-memory.md).

If a request whose own class is `interactive` finds no free row, the row of a `batch` request is
paused for it: the one dispatched last of those that have gained tokens for long enough. Only the
classes that were asked for count: what a request has gained by waiting is a place in the line. If a
row is free and there is no memory for it, as many of these rows leave as make room for the request,
or none if all of them do not. Rows that leave because other programs need memory are chosen in
`memory_plan.py`.

After crashes that accuse requests, suspects take turns (F10, P25). A suspect whose turn is due runs
while the worker holds no other request, so a crash is then its own. Turns follow
each other until none is due. Before each turn, new requests start and gain their first token; then
their rows leave, and they wait until the turns are over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mlxsup.protocol.cache_cost import cache_bytes, joining_bytes
from mlxsup.protocol.states import Priority, State

from .budget import fewest
from .model import Model
from .requests import Request, Stage

GIVES_WAY = Priority.BATCH
"""The class whose rows are freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yields:
    """The rows that give way.

    Attributes:
        rows: the running requests that must leave the batch now.
        is_for_memory: whether they leave for want of memory, so that they return only when there is
            room for them, too.
        at: when more rows may be asked to leave, in monotonic seconds; None: more are not wanted,
            or none may.
    """

    rows: tuple[Request, ...] = ()
    is_for_memory: bool = False
    at: float | None = None


NO_ROW = Yields()


def next_for_row(model: Model) -> Request | None:
    """Return the waiting request that gets a free row; None if none may start.

    A row that was freed for a higher class goes to a request of that class, even if others that
    have waited long stand before it; all other rows go to the first in line.
    """
    if model.batch.freed and not are_turns_due(model):
        model.batch.freed -= 1
        request = model.queue.urgent.first()
        if request is not None:
            return request
    return next_in_line(model)


def who_yields(model: Model, now: float) -> Yields:
    """Decide whose rows are freed, once those that are free have been given away.

    Looks at the rows only while a request of the highest class waits.
    """
    urgent = model.queue.urgent
    if not urgent or not _may_free_rows(model):
        return NO_ROW
    if model.has_room:
        return _who_makes_room(model, now)
    rows = model.batch.running.values()
    leaving = len(model.batch.leaving) + sum(one.stage is not Stage.RUNNING for one in rows)
    missing = urgent.count_startable(len(rows) + leaving) - leaving
    if missing <= 0:
        return NO_ROW
    latest_first = _latest_first(
        rows, model.queue.counters.terms.settings.min_run_s, keeps_states=model.batch.keeps_states
    )
    ripe = [one for when, one in latest_first if when <= now][:missing]
    if len(ripe) == missing:
        return Yields(rows=tuple(ripe))
    later = (when for when, _ in latest_first if when > now)
    return Yields(rows=tuple(ripe), at=min(later, default=None))


def _who_makes_room(model: Model, now: float) -> Yields:
    """Return whose rows are freed because there is no memory for one more: those served last, and
    none without which the others would be enough.

    If the first in line has come there by waiting, a request of the highest class waits behind it;
    at least one row is freed for that one then, because what becomes free by itself goes to
    the first in line.
    """
    request = model.queue.urgent.first() if model.batch.held_back is not None else None
    if request is None:
        return NO_ROW
    staying = [one for one in model.batch.running.values() if one.stage is Stage.RUNNING]
    is_next = request.key == model.batch.held_back or len(staying) < len(model.batch.held)
    if is_next and _has_memory_beside(model, request, staying):
        return NO_ROW
    latest_first = _latest_first(
        staying, model.queue.counters.terms.settings.min_run_s, keeps_states=False
    )
    leaving = [one for when, one in latest_first if when <= now]
    later = Yields(at=min((when for when, _ in latest_first if when > now), default=None))
    if not leaving or not _is_enough(model, request, staying, leaving):
        return later
    earliest_first = leaving[::-1]
    leaving = fewest(
        earliest_first, lambda rows: bool(rows) and _is_enough(model, request, staying, rows)
    )[::-1]
    return Yields(rows=tuple(leaving), is_for_memory=True)


def _is_enough(
    model: Model, request: Request, rows: Sequence[Request], leaving: Collection[Request]
) -> bool:
    """True if there is memory for the row of a request once these have left."""
    keys = {one.key for one in leaving}
    return _has_memory_beside(model, request, [one for one in rows if one.key not in keys])


def _latest_first(
    rows: Iterable[Request], min_run_s: float, *, keeps_states: bool
) -> list[tuple[float, Request]]:
    """Return the rows that may be freed at some time, and when; the one dispatched last first."""
    return sorted(
        (
            (_yields_at(one, min_run_s, keeps_states=keeps_states), one)
            for one in rows
            if _may_yield(one)
        ),
        key=lambda pair: (pair[1].run.dispatched_at or 0.0, pair[1].key),
        reverse=True,
    )


def _may_free_rows(model: Model) -> bool:
    """True if rows of this model may be freed: not next to turns of suspects, and not of one whose
    prompts are read in fixed chunks from the beginning."""
    life = model.life
    is_serving = life.state is State.READY and not model.process.is_unlinked
    return is_serving and not life.launch.deterministic and not are_turns_due(model)


def _may_yield(request: Request) -> bool:
    is_running = request.stage is Stage.RUNNING and request.run.gains_since is not None
    return is_running and request.priority is GIVES_WAY and request.may_resume


def _yields_at(request: Request, min_run_s: float, *, keeps_states: bool) -> float:
    """Return when a row that gains tokens may be freed: after `min_run_s`, and if its state would
    be lost, after as long as reading everything again would take."""
    assert request.run.gains_since is not None
    run_s = min_run_s if keeps_states else max(min_run_s, request.repeat_s)
    return request.run.gains_since + run_s


# ---------------------------------------------------------------- rows that had to leave

SPARE_SHARE = 10
"""While others run, a row that had to leave returns only if a tenth of the budget stays free."""


def is_held_back(model: Model, request: Request) -> bool:
    """True if a request that has left for want of memory must wait on: until there is room for its
    row and some to spare, or a row has ended, or nothing runs."""
    left_short_at = request.run.left_short_at
    if left_short_at is None or model.batch.budget is None or not model.has_row_budget:
        return False
    if not _has_memory_beside(model, request, ()):
        return True
    if model.batch.ended > left_short_at:
        return False
    return not _has_memory_beside(model, request, model.batch.running.values())


def needs_in_vain(model: Model, request: Request) -> int | None:
    """Return what the row of a request needs that had to leave and cannot return, because there is
    less for it alone or it must run through once it has begun; None if it may return."""
    budget, ready = model.batch.budget, model.process.ready
    if request.run.left_short_at is None or budget is None or not model.has_row_budget:
        return None
    assert ready is not None
    needed_bytes = cache_bytes(ready.cache_layers, rows=1, longest=request.length)
    must_run_through = request.tokens_sent > 0 and not model.may_leave(request)
    return needed_bytes if needed_bytes > budget.could_bytes or must_run_through else None


def _has_memory_beside(model: Model, request: Request, others: Collection[Request]) -> bool:
    """True if there is room for the row of a request next to these, and some to spare; without
    others, whether it fits alone. Its rows have a budget."""
    assert model.process.ready is not None
    assert model.batch.budget is not None
    lengths = [request.length, *(one.length for one in others)]
    room_bytes = model.batch.budget.size_bytes
    if others:
        room_bytes -= room_bytes // SPARE_SHARE
    return joining_bytes(model.process.ready.cache_layers, lengths) <= room_bytes


# ---------------------------------------------------------------- turns of suspects


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The state of a model's turns.

    Attributes:
        waiting: the waiting requests whose accounts may run more, in order.
        due: those of them whose turn is due.
        is_taken: whether the worker holds a request whose turn is due.
        is_held_up: whether a row that no crash accuses cannot be asked to leave, because its
            client wants no continuation.
    """

    waiting: list[Request]
    due: list[Request]
    is_taken: bool
    is_held_up: bool

    @classmethod
    def of(cls, model: Model) -> Turns:
        """Return the current state; only worth computing while a request is on probation."""
        is_due = model.blame.is_due
        waiting = model.queue.startable
        return cls(
            waiting=waiting,
            due=[request for request in waiting if is_due(request.held)],
            is_taken=any(is_due(one) for one in model.batch.held),
            is_held_up=any(
                not _may_leave(model, request) for request in model.batch.running.values()
            ),
        )

    @property
    def are_on(self) -> bool:
        """True if any turn is due and can begin."""
        return self.is_taken or (bool(self.due) and not self.is_held_up)


def are_turns_due(model: Model) -> bool:
    """True if the turn of any request that waits or runs is due."""
    if not model.blame.is_anyone_on_probation:
        return False
    turns = Turns.of(model)
    return turns.is_taken or bool(turns.due)


def next_in_line(model: Model) -> Request | None:
    """Return the waiting request that may start now, next to what runs already; None if
    none may."""
    if not model.queue:
        return None
    if not model.blame.is_anyone_on_probation:
        return model.queue.first()
    turns = Turns.of(model)
    if turns.is_taken:
        return None
    if not turns.are_on:
        others = (request for request in turns.waiting if request not in turns.due)
        return next((r for r in others if not turns.due or _may_leave(model, r)), None)
    if model.batch.lets_newcomers_in:
        newcomer = next((r for r in turns.waiting if _is_newcomer(model, r)), None)
        if newcomer is not None:
            return newcomer
    return None if model.batch.held else turns.due[0]


def end_intake(model: Model, *, had_room: bool) -> list[Request]:
    """Begin the next turn: newcomers have had their chance if there was room for them, and get
    another one after it.

    Args:
        had_room: whether a row was free before any was given away.

    Returns:
        The running requests whose rows must leave the batch for the turn to begin.
    """
    if not model.blame.is_anyone_on_probation:
        return []
    turns = Turns.of(model)
    model.batch.lets_newcomers_in = turns.is_taken or (
        model.batch.lets_newcomers_in and not had_room
    )
    if not turns.are_on:
        return []
    is_alone = len(model.batch.held) == 1

    def is_to_leave(request: Request) -> bool:
        if model.blame.is_due(request.held):
            return not is_alone
        return not turns.is_held_up and request.tokens_sent > 0

    running = [r for r in model.batch.running.values() if r.stage is Stage.RUNNING]
    return [request for request in running if _may_leave(model, request) and is_to_leave(request)]


def _may_leave(model: Model, request: Request) -> bool:
    return request.may_resume or model.blame.is_suspect(request.digest)


def _is_newcomer(model: Model, request: Request) -> bool:
    is_new = request.acceptance is None and request.may_resume
    return is_new and not model.blame.is_suspect(request.digest)
