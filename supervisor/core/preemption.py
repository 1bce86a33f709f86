"""Which rows leave the batch for others (docs/decisions/0005-fairness.md, 0006-memory.md).

If a request whose own class is `interactive` finds no free row, the row of a `batch` request is
paused for it: the one dispatched last of those that have gained tokens for long enough. Only the
classes that were asked for count: what a request has gained by waiting is a place in the line. If a
row is free and there is no memory for it, as many of these rows leave as make room for the request,
or none if all of them do not.

Rows that leave because other programs need memory are chosen in `memory_plan.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mlxsup.protocol.states import Priority, State

from .kv_budget import has_memory_beside
from .memory.fit import fewest
from .model import Model
from .probation import are_turns_due, next_in_line
from .requests.ledger import Ledger, Request, Stage

GIVES_WAY = Priority.BATCH
"""The class whose rows are freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yields:
    """Who gives way.

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


NOBODY = Yields()


def next_for_row(model: Model, ledger: Ledger) -> Request | None:
    """The waiting request that gets a free row; None if none may start.

    A row that was freed for a higher class goes to a request of that class, even if others that
    have waited long stand before it; all other rows go to the first in line.
    """
    if model.batch.freed and not are_turns_due(model, ledger):
        model.batch.freed -= 1
        request = model.queue.urgent.first(ledger.may_run)
        if request is not None:
            return request
    return next_in_line(model, ledger)


def who_yields(model: Model, ledger: Ledger, now: float) -> Yields:
    """Decide whose rows are freed, once those that are free have been given away.

    Looks at the rows only while a request of the highest class waits.
    """
    urgent = model.queue.urgent
    if not urgent or not _may_free_rows(model, ledger):
        return NOBODY
    if model.has_room:
        return _who_makes_room(model, ledger, now)
    rows = model.batch.running.values()
    leaving = len(model.batch.leaving) + sum(one.stage is not Stage.RUNNING for one in rows)
    missing = urgent.count_startable(ledger.may_run_more, len(rows) + leaving) - leaving
    if missing <= 0:
        return NOBODY
    latest_first = _latest_first(
        rows, ledger.terms.min_run_s, keeps_states=model.batch.keeps_states
    )
    ripe = [one for when, one in latest_first if when <= now][:missing]
    if len(ripe) == missing:
        return Yields(rows=tuple(ripe))
    later = (when for when, _ in latest_first if when > now)
    return Yields(rows=tuple(ripe), at=min(later, default=None))


def _who_makes_room(model: Model, ledger: Ledger, now: float) -> Yields:
    """Return whose rows are freed because there is no memory for one more: those served last, and
    none without which the others would be enough.

    If the first in line has come there by waiting, a request of the highest class waits behind it;
    at least one row is freed for that one then, because what becomes free by itself goes to
    whoever is first.
    """
    request = (
        model.queue.urgent.first(ledger.may_run) if model.batch.held_back is not None else None
    )
    if request is None:
        return NOBODY
    staying = [one for one in model.batch.running.values() if one.stage is Stage.RUNNING]
    is_next = request.key == model.batch.held_back or len(staying) < len(model.batch.held)
    if is_next and has_memory_beside(model, request, staying):
        return NOBODY
    latest_first = _latest_first(staying, ledger.terms.min_run_s, keeps_states=False)
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
    return has_memory_beside(model, request, [one for one in rows if one.key not in keys])


def _latest_first(
    rows: Iterable[Request], min_run_s: float, *, keeps_states: bool
) -> list[tuple[float, Request]]:
    """The rows that may be freed at some time, and when; the one dispatched last first."""
    return sorted(
        (
            (_yields_at(one, min_run_s, keeps_states=keeps_states), one)
            for one in rows
            if _may_yield(one)
        ),
        key=lambda pair: (pair[1].run.dispatched_at or 0.0, pair[1].key),
        reverse=True,
    )


def _may_free_rows(model: Model, ledger: Ledger) -> bool:
    """True if rows of this model may be freed: not next to turns of suspects, and not of one whose
    prompts are read in fixed chunks from the beginning."""
    life = model.life
    is_serving = life.state is State.READY and not model.process.is_unlinked
    return is_serving and not life.launch.deterministic and not are_turns_due(model, ledger)


def _may_yield(request: Request) -> bool:
    is_running = request.stage is Stage.RUNNING and request.run.gains_since is not None
    return is_running and request.priority is GIVES_WAY and request.may_resume


def _yields_at(request: Request, min_run_s: float, *, keeps_states: bool) -> float:
    """Return when a row that gains tokens may be freed: after `min_run_s`, and if its state would
    be lost, after as long as reading everything again would take."""
    assert request.run.gains_since is not None
    run_s = min_run_s if keeps_states else max(min_run_s, request.repeat_s)
    return request.run.gains_since + run_s
