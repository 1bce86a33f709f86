"""Which busy models make room: for a model that waits, or because memory is short.

Answers that a swap has interrupted do not come before new ones of other models: two models with
open streams would otherwise pass the memory to each other for ever. The class that was asked for
decides who makes room, or a stream that has once waited long would never make room again.

A model whose files have changed since it loaded them stays while its answers are open, because no
other process could continue those; files are looked at only when a swap depends on it. One READY
model always stays in a shortage: with none, nothing is served, and the load that follows needs as
much memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority, Why
from mlxsup.protocol.text import size_text

from .kv_budget import bytes_to_load
from .lifecycle.states import Ready, Shortage, Swapping
from .memory.budget import Budget
from .memory.planner import LoadedModel, LoadRequest, Standing
from .model import Model
from .requests.ledger import Request
from .requests.queue import MayRun
from .settings import CoreSettings


def why_it_stays(model: Model) -> str:
    """Return what has changed, if the model must stay for that; empty if it need not."""
    change = model.life.files.change
    return change if change and _has_begun(model) else ""


def must_be_compared(model: Model, now: float) -> bool:
    """True if its files must be looked at before it may be swapped out."""
    return _has_begun(model) and not model.life.files.is_fresh(now)


def may_have_been_restored(model: Model, now: float) -> bool:
    """True if it is time to look again at files that have kept a model from being swapped out."""
    is_ready = isinstance(model.life.phase, Ready)
    return is_ready and bool(why_it_stays(model)) and model.life.files.may_be_asked(now)


def _has_begun(model: Model) -> bool:
    """True if it has open answers that a worker has accepted, or is about to."""
    if model.running:
        return True
    waiting = chain(model.queue.again, model.paused.values())
    return any(request.acceptance is not None for request in waiting)


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


def load_request_of(model: Model, settings: CoreSettings, may_run: MayRun) -> LoadRequest:
    """Return what a model that waits for memory asks for."""
    wants = _priority(model, may_run)
    return LoadRequest(
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
    """True if the model that another one makes room for still waits for that, and may have it."""
    lack = target.lack
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
    lack = model.lack
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


OTHERS = "because other programs need memory"
BUDGET = "because the loaded models need more than memory_budget"


def goes_for_shortage(
    models: Mapping[ModelName, Model],
    loaded: Mapping[ModelName, LoadedModel],
    budget: Budget,
    now: float,
) -> tuple[Model, Shortage] | None:
    """Return who is to be swapped out because more is needed than may be kept; None: nobody may, or
    what is leaving is enough.

    One model that is READY always stays: with none, nothing would be served until memory is there
    again. So does one that could not return.

    Args:
        models: all of them, by name.
        loaded: those that hold memory; who has to go already is LEAVING, idle ones among them.
        budget: what may be kept.
        now: monotonic seconds.
    """
    counted = counted_bytes(models, loaded, budget)
    staying = [loaded[name] for name in counted]
    if sum(counted.values()) <= budget.kept_bytes:
        return None
    ready = [one for one in staying if isinstance(models[one.name].life.phase, Ready)]
    left_bytes = budget.whole_bytes - sum(one.never_bytes for one in staying)
    may_go = [
        one
        for one in ready
        if one.turn_ends_at is not None
        and one.turn_ends_at <= now
        and bytes_to_load(models[one.name]) <= left_bytes
    ]
    if not may_go or len(ready) < 2:
        return None
    first = min(may_go, key=_goes_first)
    reason = OTHERS if budget.is_short else BUDGET
    return models[first.name], Shortage(reason=reason, counted_bytes=counted[first.name])


def lasts(
    cause: Shortage,
    models: Mapping[ModelName, Model],
    loaded: Mapping[ModelName, LoadedModel],
    budget: Budget | None,
) -> bool:
    """True if a model that is on its way out for a shortage could still not stay."""
    if budget is None:
        return False
    staying_bytes = sum(counted_bytes(models, loaded, budget).values())
    return staying_bytes + cause.counted_bytes > budget.kept_bytes


def counted_bytes(
    models: Mapping[ModelName, Model], loaded: Mapping[ModelName, LoadedModel], budget: Budget
) -> dict[ModelName, int]:
    """Return what each of those that stay cannot give back without going, by name."""
    staying = (one for one in loaded.values() if one.standing is not Standing.LEAVING)
    return {one.name: _counted_bytes(one, models[one.name], budget) for one in staying}


def shortage_text(loaded: Mapping[ModelName, LoadedModel], budget: Budget) -> str:
    """Return how much is reserved, how much may be kept, and why it is no more, a phrase."""
    reserved_bytes = sum(one.reserved_bytes for one in loaded.values())
    sizes = f"{size_text(reserved_bytes)} of {size_text(budget.kept_bytes)} are reserved"
    return f"{sizes} and {budget.shortage}" if budget.is_short else sizes


# ---------------------------------------------------------------- inside


def _counted_bytes(one: LoadedModel, model: Model, budget: Budget) -> int:
    """Return what a model cannot give back without going. While others do not lack memory, what it
    has grown by does not count: it would be let in again at once, and grow again."""
    least_bytes = one.reserved_bytes - one.spare_bytes
    return least_bytes if budget.is_short else min(least_bytes, bytes_to_load(model))


def _goes_first(one: LoadedModel) -> tuple[int, float]:
    """Sort models that run nothing first, then by class from the lowest; then by how long they have
    been loaded."""
    rank = len(CLASSES) if one.runs is None else CLASSES.index(one.runs)
    return -rank, one.loaded_since
