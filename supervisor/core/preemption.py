"""Which rows leave the batch for others (docs/decisions/0005-fairness.md, 0006-memory.md).

If a request whose own class is `interactive` finds no free row, the row of a `batch` request is
paused for it: the one dispatched last of those that have gained tokens for long enough. Only the
classes that were asked for count: what a request has gained by waiting is a place in the line. If a
row is free and there is no memory for it, as many of these rows leave as make room for the request,
or none if all of them do not.

If other programs need memory, rows of the lowest class leave before a busy model is swapped out.
What they have computed is dropped; they return when there is memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.states import Priority, State

from .kv_budget import has_memory_beside, has_row_budget, is_leaving_short, may_leave, needed_bytes
from .lifecycle.states import Ready
from .lifecycle.triggers import RowsGiveWay
from .memory.budget import Budget
from .memory.planner import LoadedModel
from .model import Model
from .requests.ledger import Ledger, Request, Stage
from .suspects import are_turns_due, next_in_line
from .swapping import OTHERS, counted_bytes, shortage_text

T = TypeVar("T")

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
    have waited long stand before it; all other rows go to whoever is first.
    """
    if model.freed_rows and not are_turns_due(model, ledger):
        model.freed_rows -= 1
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
    rows = model.running.values()
    leaving = len(model.leaving) + sum(one.stage is not Stage.RUNNING for one in rows)
    missing = urgent.count_startable(ledger.may_run_more, len(rows) + leaving) - leaving
    if missing <= 0:
        return NOBODY
    latest_first = _latest_first(rows, ledger.terms.min_run_s, keeps_states=model.keeps_states)
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
    request = model.queue.urgent.first(ledger.may_run) if model.held_back is not None else None
    if request is None:
        return NOBODY
    staying = [one for one in model.running.values() if one.stage is Stage.RUNNING]
    is_next = request.key == model.held_back or len(staying) < len(model.held)
    if is_next and has_memory_beside(model, request, staying):
        return NOBODY
    latest_first = _latest_first(staying, ledger.terms.min_run_s, keeps_states=False)
    leaving = [one for when, one in latest_first if when <= now]
    later = Yields(at=min((when for when, _ in latest_first if when > now), default=None))
    if not leaving or not _is_enough(model, request, staying, leaving):
        return later
    earliest_first = leaving[::-1]
    leaving = _fewest(
        earliest_first, lambda rows: bool(rows) and _is_enough(model, request, staying, rows)
    )[::-1]
    return Yields(rows=tuple(leaving), is_for_memory=True)


def _fewest(rows: list[T], is_enough: Callable[[list[T]], bool]) -> list[T]:
    """Return the rows, all of which are enough, without those that may as well stay: the first ones
    are kept first."""
    for one in list(rows):
        others = [other for other in rows if other is not one]
        if is_enough(others):
            rows = others
    return rows


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
        key=lambda pair: (pair[1].dispatched_at or 0.0, pair[1].key),
        reverse=True,
    )


def _may_free_rows(model: Model, ledger: Ledger) -> bool:
    """True if rows of this model may be freed: not next to turns of suspects, and not of one whose
    prompts are read in fixed chunks from the beginning."""
    life = model.life
    is_serving = life.state is State.READY and not model.is_unlinked
    return is_serving and not life.launch.deterministic and not are_turns_due(model, ledger)


def _may_yield(request: Request) -> bool:
    is_running = request.stage is Stage.RUNNING and request.gains_since is not None
    return is_running and request.priority is GIVES_WAY and request.may_resume


def _yields_at(request: Request, min_run_s: float, *, keeps_states: bool) -> float:
    """Return when a row that gains tokens may be freed: after `min_run_s`, and if its state would
    be lost, after as long as reading everything again would take."""
    assert request.gains_since is not None
    run_s = min_run_s if keeps_states else max(min_run_s, request.repeat_s)
    return request.gains_since + run_s


Leaving = list[tuple[Model, Request]]


def who_gives_way(
    models: Mapping[ModelName, Model], loaded: Mapping[ModelName, LoadedModel], budget: Budget
) -> dict[ModelName, RowsGiveWay]:
    """The rows that must leave now, by model: those served last, and none without which the others
    would free as much as is missing. If all of them are not enough, those that free any.

    One row of each model stays, so that its work continues.

    Args:
        models: all of them, by name.
        loaded: those that hold memory; who has to go already is LEAVING, idle ones among them.
        budget: what may be kept.
    """
    missing_bytes = sum(counted_bytes(models, loaded, budget).values()) - budget.kept_bytes
    if missing_bytes <= 0 or not budget.is_short:
        return {}
    leaving = [(model, request) for model in models.values() for request in _may_go(model)]
    enough_bytes = min(missing_bytes, _freed_bytes(leaving))
    leaving.sort(key=lambda pair: _served_at(pair[1]))
    leaving = _fewest(leaving, lambda rows: _freed_bytes(rows) >= enough_bytes)
    why = f"{OTHERS}: {shortage_text(loaded, budget)}"
    return {model.name: _trigger(requests, why) for model, requests in _by_model(leaving)}


def are_rows_leaving(models: Iterable[Model]) -> bool:
    """True if rows have been asked to leave for want of memory, and have not left yet."""
    return any(is_leaving_short(one) for model in models for one in model.running.values())


# ---------------------------------------------------------------- inside


def _trigger(requests: Sequence[Request], why: str) -> RowsGiveWay:
    rows = (
        "1 batch request leaves" if len(requests) == 1 else f"{len(requests)} batch requests leave"
    )
    return RowsGiveWay(keys=tuple(one.key for one in requests), reason=f"{rows} {why}")


def _may_go(model: Model) -> Sequence[Request]:
    """Rows of the lowest class that may leave, but never all that run."""
    is_serving = isinstance(model.life.phase, Ready) and not model.is_unlinked
    if not is_serving or not has_row_budget(model):
        return ()
    staying = [one for one in model.running.values() if one.stage is Stage.RUNNING]
    may_go = [one for one in staying if one.priority is GIVES_WAY and may_leave(model, one)]
    return sorted(may_go, key=_served_at)[1:] if len(may_go) == len(staying) else may_go


def _served_at(request: Request) -> tuple[float, RequestKey]:
    return request.dispatched_at or 0.0, request.key


def _freed_bytes(leaving: Leaving) -> int:
    """Return how much less must be reserved once these rows have left."""
    return sum(
        _kept_bytes(model) - _kept_bytes(model, frozenset(one.key for one in requests))
        for model, requests in _by_model(leaving)
    )


def _kept_bytes(model: Model, without: Collection[RequestKey] = ()) -> int:
    """Rows that are leaving, as for a pause by hand, free what they hold without anybody's help."""
    leaving = {one.key for one in model.running.values() if one.stage is not Stage.RUNNING}
    return min(model.life.reserved_bytes, needed_bytes(model, leaving.union(without)))


def _by_model(leaving: Leaving) -> list[tuple[Model, list[Request]]]:
    found: dict[ModelName, tuple[Model, list[Request]]] = {}
    for model, request in leaving:
        found.setdefault(model.name, (model, []))[1].append(request)
    return list(found.values())
