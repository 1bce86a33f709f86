"""Reads the view of the memory from the models."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority, Wanted, Why

from .budget import Budget
from .kv_budget import lasting_bytes, rows_of, spare_bytes
from .life import Abandoned, Draining, Pending, Ready, StopCause, Stopping, Swapping
from .memory_view import LoadedModel, LoadRequest, MemoryView, Place, Standing
from .model import ASK_AGAIN_S, RESIDENCY_LOADS, Model
from .settings import CoreSettings
from .warm_pool import ENGINE, WarmPool

PASSED_OVER_AGINGS = 2
"""A model that has waited for this many times `aging_s` comes before those that have not: each of
its requests has aged to the highest class by then, and clients' counters must not hold it up."""


def view_of(
    models: Iterable[Model],
    warm_pool: WarmPool,
    settings: CoreSettings,
    now: float,
    *,
    ran_out: ModelName | None,
    is_division_due: bool,
) -> MemoryView:
    """Return the memory of these models now.

    Args:
        ran_out: as in `MemoryView`.
        is_division_due: whether anything has changed that the division depends on.
    """
    everybody = list(models)
    loading = [model.life for model in everybody if model.life.is_loading]
    return MemoryView(
        budget=settings.budget,
        now=now,
        loaded={one.name: one for one in loaded_models(everybody, settings, now)},
        waiting=tuple(
            _load_request(model, everybody, settings, now)
            for model in everybody
            if model.waits_for_load
        ),
        prewarmed=tuple(warm_pool.workers.values()),
        free_turns=settings.parallel_loads - len(loading),
        free_turns_after_crash=settings.parallel_loads
        - sum(life.is_after_crash for life in loading),
        swaps=settings.swap,
        leave_s=settings.drain_timeout_s,
        is_reclaiming=any(model.process.is_giving_back(now) for model in everybody),
        ran_out=ran_out,
        is_division_due=is_division_due,
        claimed_bytes=warm_pool.claimed_bytes(everybody, settings) if settings.budget else 0,
        tried_again=frozenset(one.name for one in everybody if _is_tried_again(one)),
        are_rows_leaving=any(
            one.is_leaving_short for model in everybody for one in model.batch.running.values()
        ),
    )


def _is_tried_again(model: Model) -> bool:
    """True if a request runs, or is about to, that has run out of memory alone."""
    return any(one.crashes.shortages for one in (*model.batch.running.values(), *model.queue.again))


def at_rest(models: Iterable[Model], warm_pool: WarmPool, budget: Budget | None) -> bool:
    """True if no model waits or makes room and no more is reserved than there is, so that there is
    nothing to plan before that changes."""
    everybody = list(models)
    if any(one.waits_for_load or isinstance(one.life.phase, Swapping) for one in everybody):
        return False
    if budget is None:
        return True
    reserved_bytes = sum(model.life.reserved_bytes for model in everybody)
    return reserved_bytes + warm_pool.reserved_bytes <= budget.kept_bytes


def loaded_models(models: Iterable[Model], settings: CoreSettings, now: float) -> list[LoadedModel]:
    """Return what is known of the models that hold memory, reserved for them or not."""
    return [
        _loaded_model(model, settings, now)
        for model in models
        if model.life.reserved_bytes or isinstance(model.life.phase, Ready)
    ]


def _loaded_model(model: Model, settings: CoreSettings, now: float) -> LoadedModel:
    life, phase, standing = model.life, model.life.phase, _standing(model)
    rows = rows_of(model)
    own_spare_bytes = spare_bytes(model, rows, now)
    never_bytes = life.reserved_bytes if standing is Standing.STUCK else 0
    if standing is Standing.PINNED:
        never_bytes = lasting_bytes(model, rows, own_spare_bytes, now)
    may_be_asked = now >= model.process.asked_back_at + ASK_AGAIN_S
    ready_since = phase.since if isinstance(phase, Ready) else 0.0
    residency_s = max(settings.min_residency_s, RESIDENCY_LOADS * model.load_s)
    return LoadedModel(
        name=model.name,
        reserved_bytes=life.reserved_bytes,
        needed_bytes=model.bytes_to_load,
        never_bytes=never_bytes,
        spare_bytes=own_spare_bytes,
        reclaimable_bytes=model.process.reusable_bytes if may_be_asked else 0,
        is_ready=isinstance(phase, Ready),
        is_ending=isinstance(phase, Stopping),
        swap=phase if isinstance(phase, Swapping) else None,
        standing=standing,
        used_at=model.idle_since,
        ripe_at=min(model.idle_since + model.load_s, ready_since + residency_s),
        loaded_since=ready_since,
        turn_ends_at=turn_ends_at(model, settings),
        runs=_highest_class(model),
        stays_because=_why_it_stays(model),
        are_files_doubted=_has_begun(model) and not life.files.is_fresh(now),
        are_files_being_seen=life.files.is_being_seen,
        rows=rows,
    )


def _standing(model: Model) -> Standing:
    life, phase = model.life, model.life.phase
    if isinstance(phase, Abandoned):
        return Standing.STUCK
    if isinstance(phase, Swapping):
        return Standing.LEAVING
    is_ending = isinstance(phase, Draining | Stopping)
    if is_ending and life.wanted is Wanted.GONE:
        return Standing.LEAVING
    if life.settings.pinned:
        return Standing.PINNED
    if is_ending and life.wanted is Wanted.DOWN:
        return Standing.LEAVING
    if isinstance(phase, Stopping) and phase.cause is StopCause.SWAP:
        return Standing.LEAVING
    if isinstance(phase, Stopping) and phase.cause is StopCause.ASKED and not phase.is_restart:
        return Standing.LEAVING  # it is wanted again, and starts from nothing
    return Standing.IDLE if isinstance(phase, Ready) and model.is_idle else Standing.BUSY


# ---------------------------------------------------------------- models that wait


def _load_request(
    model: Model,
    models: Iterable[Model],
    settings: CoreSettings,
    now: float,
) -> LoadRequest:
    life, phase = model.life, model.life.phase
    assert isinstance(phase, Pending)
    wants = _wanted_class(model)
    is_unasked = not (model.is_asked_for or model.paused)
    return LoadRequest(
        name=model.name,
        needed_bytes=life.needed_bytes,
        urgency=model.urgency,
        wants=wants,
        swaps_from=None if wants is None else _swaps_from(model, settings),
        since=phase.since,
        reserved_bytes=life.reserved_bytes,
        pinned_bytes=life.pinned_bytes if life.settings.pinned else None,
        lack=phase.lack,
        place=_place_in_line(model, models, settings, now) if settings.swap else None,
        is_after_crash=phase.is_after_crash,
        is_unwanted=life.why is Why.SWAP and is_unasked,
        takes_prewarmed=life.settings.launch.engine == ENGINE,
    )


def _place_in_line(
    model: Model, models: Iterable[Model], settings: CoreSettings, now: float
) -> Place | None:
    """Return its place among those that wait for a turn; None if it does not, or not for long
    enough.

    Answers that a swap has interrupted do not come before new ones of other models: two models with
    open streams would otherwise pass the memory to each other for ever.
    """
    phase, swaps_from = model.life.phase, _swaps_from(model, settings)
    if swaps_from is None or now < swaps_from:
        return None
    request = model.queue.first()
    if request is None and not model.up_callers:
        return None
    longest_s = PASSED_OVER_AGINGS * settings.aging_s
    if settings.aging_s > 0 and now >= phase.since + longest_s:
        rank = 0 if request is None else request.waiting.standing.rank
        return Place(rank, False, False, 0.0, phase.since, 0.0)
    if request is None:
        return Place(0, True, True, 0.0, phase.since, phase.since)
    has_begun = request.acceptance is not None and model.life.why is not Why.SWAP
    return Place(
        rank=request.waiting.standing.rank,
        has_patience=True,
        is_new=not has_begun,
        counter=sum(one.queue.counters.of(request.account) for one in models),
        since=phase.since,
        arrived_at=request.waiting.arrived_at,
    )


def _swaps_from(model: Model, settings: CoreSettings) -> float | None:
    """Return from when on others may be swapped out for it; None: no request waits for it."""
    lack = model.lack
    if lack is None or lack.asked_since is None:
        return None
    return lack.asked_since + settings.swap_after_s


def _wanted_class(model: Model) -> Priority | None:
    """Return the class of the request that waits first, as it was asked for: otherwise a stream
    that has once waited long would never make room again. A load command counts as interactive.
    None: no request waits that may run."""
    if model.up_callers:
        return Priority.INTERACTIVE
    request = model.queue.first()
    return None if request is None else request.priority


# ---------------------------------------------------------------- models that may be swapped out


def turn_ends_at(model: Model, settings: CoreSettings) -> float | None:
    """Return from when on it may be swapped out; infinite if that is not known yet, None if it may
    not as things are: it is not READY, is pinned, runs what must not be interrupted, or has open
    answers and changed files."""
    life = model.life
    if not isinstance(life.phase, Ready) or life.settings.pinned or model.process.residency is None:
        return None
    running = model.batch.running.values()
    if running and (life.launch.deterministic or not all(one.may_resume for one in running)):
        return None
    if _why_it_stays(model):
        return None
    return model.process.residency.ends_at(
        load_s=model.load_s, min_residency_s=settings.min_residency_s
    )


def may_have_been_restored(model: Model, now: float) -> bool:
    """True if it is time to look again at files that have kept a model from being swapped out."""
    is_ready = isinstance(model.life.phase, Ready)
    return is_ready and bool(_why_it_stays(model)) and model.life.files.may_be_asked(now)


def _why_it_stays(model: Model) -> str:
    """Return what has changed in its files, if the model must stay for that: no other process could
    continue its open answers. Empty if it need not."""
    change = model.life.files.change
    return change if change and _has_begun(model) else ""


def _has_begun(model: Model) -> bool:
    """True if it has open answers that a worker has accepted, or is about to. Its files are looked
    at only when a swap depends on it."""
    if model.batch.running:
        return True
    waiting = chain(model.queue.again, model.paused.values())
    return any(request.acceptance is not None for request in waiting)


def _highest_class(model: Model) -> Priority | None:
    """Return the highest class of what it runs, as it was asked for; None if it runs nothing."""
    classes = (request.priority for request in model.batch.running.values())
    return min(classes, key=lambda one: one.rank, default=None)
