"""Who gets the next turn when models do not fit together, and who may be asked to go for it.

Answers that a swap has interrupted do not come before new ones of other models: two models with
open streams would otherwise pass the memory to each other for ever. The class that was asked for
decides who makes room, or a stream that has once waited long would never make room again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mlxsup.protocol.states import Priority, Why

from .changed_files import why_it_stays
from .lifecycle.states import Lack, Pending, Ready, Swapping
from .memory.planner import Wish
from .model import Model
from .requests.ledger import Request
from .requests.line import MayRun
from .settings import CoreSettings

CLASSES = tuple(Priority)

PASSED_OVER_AGINGS = 2
"""A model that has waited for this many times `aging_s` comes before those that have not: whatever
waits for it has aged to the highest class by then, and clients' counters must not hold it up."""


class Place(NamedTuple):
    """The place of a model in the line for the next turn; lower ones come first.

    Attributes:
        rank: the class in which its first request waits, from 0 for the highest.
        has_patience: whether it has not waited for very long.
        is_new: whether its first request has not begun, or has had a turn already.
        counter: what the account of that request has received from all models.
        since: when the model began to wait.
        arrived_at: when that request came.
    """

    rank: int
    has_patience: bool
    is_new: bool
    counter: float
    since: float
    arrived_at: float


def wish_of(model: Model, settings: CoreSettings, may_run: MayRun) -> Wish:
    """What a model that waits for memory asks for."""
    wants = _priority(model, may_run)
    return Wish(
        name=model.name,
        needed_bytes=model.life.needed_bytes,
        urgency=model.urgency,
        priority=wants or Priority.BATCH,
        swaps_from=None if wants is None else _swaps_from(model, settings),
    )


def place_in_line(
    model: Model, models: Iterable[Model], settings: CoreSettings, may_run: MayRun, now: float
) -> Place | None:
    """Its place among those that wait for a turn; None if it does not, or not for long enough."""
    phase, swaps_from = model.life.phase, _swaps_from(model, settings)
    if swaps_from is None or now < swaps_from:
        return None
    request = model.queue.first(may_run)
    if request is None and not model.up_callers:
        return None
    longest_s = PASSED_OVER_AGINGS * settings.aging_s
    if settings.aging_s > 0 and now >= phase.since + longest_s:
        rank = 0 if request is None else CLASSES.index(request.standing)
        return Place(rank, False, False, 0.0, phase.since, 0.0)
    if request is None:
        return Place(0, True, True, 0.0, phase.since, phase.since)
    return _place(request, model, models)


def is_still_wanted(phase: Swapping, target: Model, may_run: MayRun) -> bool:
    """Whether the model that another one makes room for still waits for that, and may have it."""
    lack = _lack(target)
    if lack is None or not lack.is_promised:
        return False
    wants = _priority(target, may_run)
    return wants is not None and not (phase.ran is not None and phase.ran.is_above(wants))


def turn_ends_at(model: Model, settings: CoreSettings) -> float | None:
    """From when on it may be swapped out; infinite if that is not known yet, None if it may not as
    things are: it is not READY, is pinned, runs what must not be interrupted, or has open answers
    and changed files."""
    life = model.life
    if not isinstance(life.phase, Ready) or life.settings.pinned or model.residency is None:
        return None
    running = model.running.values()
    if running and (life.launch.deterministic or not all(one.may_resume for one in running)):
        return None
    if why_it_stays(model):
        return None
    return model.residency.ends_at(load_s=model.load_s, min_residency_s=settings.min_residency_s)


def highest_class(model: Model) -> Priority | None:
    """The highest class of what it runs, as it was asked for; None if it runs nothing."""
    ranks = [CLASSES.index(request.priority) for request in model.running.values()]
    return CLASSES[min(ranks)] if ranks else None


# ---------------------------------------------------------------- inside


def _place(request: Request, model: Model, models: Iterable[Model]) -> Place:
    has_begun = request.acceptance is not None and model.life.why is not Why.SWAP
    return Place(
        rank=CLASSES.index(request.standing),
        has_patience=True,
        is_new=not has_begun,
        counter=sum(one.queue.counters.of(request.account) for one in models),
        since=model.life.phase.since,
        arrived_at=request.arrived_at,
    )


def _swaps_from(model: Model, settings: CoreSettings) -> float | None:
    """From when on others may be swapped out for it; None: nobody waits for it."""
    lack = _lack(model)
    if lack is None or lack.asked_since is None:
        return None
    return lack.asked_since + settings.swap_after_s


def _priority(model: Model, may_run: MayRun) -> Priority | None:
    """The class of whoever waits first, as it was asked for; a load command counts as interactive.
    None: nobody waits who may run."""
    if model.up_callers:
        return Priority.INTERACTIVE
    request = model.queue.first(may_run)
    return None if request is None else request.priority


def _lack(model: Model) -> Lack | None:
    phase = model.life.phase
    return phase.lack if isinstance(phase, Pending) else None
