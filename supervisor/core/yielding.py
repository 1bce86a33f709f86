"""Which rows are freed for requests of a higher class (docs/decisions/0033-higher-class.md).

If a request whose own class is `interactive` finds no free row, the row of a `batch` request is
paused for it: the one dispatched last of those that have gained tokens for long enough. Only the
classes that were asked for count: what a request has gained by waiting is a place in the line.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxsup.protocol.states import Priority, State

from .model import Model
from .requests.ledger import Ledger, Request, Stage
from .suspects import are_turns_due, next_in_line

GIVES_WAY = Priority.BATCH
"""The class whose rows are freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yields:
    """Who gives way.

    Attributes:
        rows: the running requests that must leave the batch now.
        at: when more rows may be asked to leave, in monotonic seconds; None: more are not wanted,
            or none may.
    """

    rows: tuple[Request, ...] = ()
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
    """Decides whose rows are freed, once those that are free have been given away.

    Looks at the rows only while a request of the highest class waits.
    """
    urgent = model.queue.urgent
    if not urgent or not _may_free_rows(model, ledger):
        return NOBODY
    rows = model.running.values()
    leaving = len(model.leaving) + sum(one.stage is not Stage.RUNNING for one in rows)
    missing = urgent.count_startable(ledger.may_run_more, len(rows) + leaving) - leaving
    if missing <= 0:
        return NOBODY
    latest_first = sorted(
        ((_yields_at(model, one, ledger.terms.min_run_s), one) for one in rows if _may_yield(one)),
        key=lambda pair: (pair[1].dispatched_at or 0.0, pair[1].key),
        reverse=True,
    )
    ripe = [one for when, one in latest_first if when <= now][:missing]
    if len(ripe) == missing:
        return Yields(rows=tuple(ripe))
    later = (when for when, _ in latest_first if when > now)
    return Yields(rows=tuple(ripe), at=min(later, default=None))


def _may_free_rows(model: Model, ledger: Ledger) -> bool:
    """Whether rows of this model may be freed: not next to turns of suspects, and not of one whose
    prompts are read in fixed chunks from the beginning."""
    life = model.life
    is_serving = life.state is State.READY and not model.is_unlinked and not model.has_room
    return is_serving and not life.launch.deterministic and not are_turns_due(model, ledger)


def _may_yield(request: Request) -> bool:
    is_running = request.stage is Stage.RUNNING and request.gains_since is not None
    return is_running and request.priority is GIVES_WAY and request.may_resume


def _yields_at(model: Model, request: Request, min_run_s: float) -> float:
    """When a row that gains tokens may be freed: after `min_run_s`, and if its state would be lost,
    after as long as reading everything again would take."""
    assert request.gains_since is not None
    run_s = min_run_s if model.keeps_states else max(min_run_s, request.repeat_s)
    return request.gains_since + run_s
