"""What a load or a reload would do to memory: the answers to their `--dry-run`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, assert_never

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority, State, Wanted

from .errors import does_not_fit, load_failed
from .kv_budget import bytes_to_load, longest_stream
from .lifecycle.life import Life
from .lifecycle.states import Abandoned, Shortage, Swapping, Urgency
from .lifecycle.transitions import apply
from .lifecycle.triggers import Erased
from .memory.need import Need, bounded
from .memory_plan import (
    Admit,
    Evict,
    Reclaim,
    Refuse,
    Swap,
    Verdict,
    Wait,
    idle_to_evict,
    needs,
    verdict_on,
)
from .memory_view import LoadedModel, LoadRequest, MemoryView, Standing, loaded_models
from .model import Model
from .reload import reload_trigger
from .settings import CoreSettings, ModelSettings


def forecast(
    model: Model, models: Iterable[Model], settings: CoreSettings, now: float
) -> dict[str, Any]:
    """The answer: `model`, `outcome`, `needed_bytes`, `evicts` and `swaps` (names), and `reason`, a
    phrase.

    `outcome` is `loaded` (nothing to do), `downloads` (what it needs is not known before), `fits`,
    `evicts`, `swaps` or `waits`.

    Raises:
        RemoteError: the load would be refused, with this same error.
    """
    others = list(models)
    if isinstance(model.life.phase, Abandoned):
        raise load_failed(model.name, model.life.failure, is_retryable=False)
    answer: dict[str, Any] = {
        "model": model.name,
        "needed_bytes": bytes_to_load(model),
        "evicts": [],
        "swaps": [],
    }
    if model.life.state in (State.LOADING, State.READY):
        return {**answer, "outcome": "loaded", "reason": f"is {model.life.state}"}
    if isinstance(model.life.phase, Swapping):
        cause = model.life.phase.cause
        why = cause.reason if isinstance(cause, Shortage) else f"for {cause}"
        reason = f"makes room {why}, and is loaded again in its turn"
        return {**answer, "outcome": "waits", "reason": reason}
    if model.life.settings.download is not None:
        reason = "has missing files; its memory need is known once they are downloaded"
        return {**answer, "outcome": "downloads", "reason": reason}
    budget_bytes = settings.budget.size_bytes if settings.budget else 0
    whole_bytes = settings.budget.whole_bytes if settings.budget else 0
    match _foresee(model, others, settings, now):
        case Admit() if settings.budget is None:
            return {**answer, "outcome": "fits", "reason": "there is no memory budget"}
        case Admit():
            reserved_bytes = sum(one.life.reserved_bytes for one in others if one is not model)
            short = needs(bytes_to_load(model), budget_bytes - reserved_bytes)
            return {**answer, "outcome": "fits", "reason": f"it {short}"}
        case Reclaim(reason=reason):
            return {**answer, "outcome": "fits", "reason": reason}
        case Evict(models=names, reason=reason):
            return {**answer, "outcome": "evicts", "evicts": list(names), "reason": reason}
        case Wait(swaps=names, reason=reason) | Swap(models=names, reason=reason) if names:
            return {**answer, "outcome": "swaps", "swaps": list(names), "reason": reason}
        case Wait(reason=reason) | Swap(reason=reason):
            return {**answer, "outcome": "waits", "reason": reason}
        case Refuse(reason=reason, blockers=blockers):
            raise does_not_fit(
                model.name,
                reason,
                needed_bytes=bytes_to_load(model),
                budget_bytes=whole_bytes,
                blockers=blockers,
            )
        case verdict:
            assert_never(verdict)


# ---------------------------------------------------------------- inside


def _foresee(model: Model, models: Iterable[Model], settings: CoreSettings, now: float) -> Verdict:
    """Return what a load command for this model would lead to now; nothing changes."""
    if settings.budget is None:
        return Admit()
    request = LoadRequest(
        name=model.name,
        needed_bytes=bytes_to_load(model),
        urgency=Urgency.COMMAND,
        wants=Priority.INTERACTIVE,
        swaps_from=now + settings.swap_after_s if settings.swap else None,
    )
    loaded = {one.name: one for one in loaded_models(models, settings, now)}
    return verdict_on(request, MemoryView(budget=settings.budget, now=now, loaded=loaded))


def foreseen_memory(
    models: Iterable[Model],
    settings: CoreSettings,
    entries: Sequence[ModelSettings],
    needs: Mapping[ModelName, Need],
    now: float,
) -> dict[str, Any]:
    """Return how much more than the budget would be reserved, and what follows for whom; nothing
    changes.

    The table of transitions and the memory plan are asked with copies of the lives.

    Args:
        models: those that there are.
        settings: of the configuration that was read, with its budget.
        entries: of that configuration.
        needs: what its models were appraised at.
        now: monotonic seconds.

    Returns:
        `over_budget_bytes`; `evicts`, the names of the idle models that would be evicted at once;
        `still_over_bytes`, what only busy models could free; and `refuses`: a `model` and a
        `reason`, a phrase, for each that could not be loaded, whoever goes.
    """
    budget = settings.budget
    if budget is None:
        return {"over_budget_bytes": 0, "evicts": [], "still_over_bytes": 0, "refuses": []}
    pinned = {entry.name for entry in entries if entry.pinned}
    known = bounded(needs, pinned, budget.whole_bytes)
    there = list(_after(models, settings, entries, known, now))
    added = list(_added(there, entries, known))
    loaded = [*loaded_models(there, settings, now), *_pinned(added)]
    staying = [one for one in loaded if one.standing is not Standing.LEAVING]
    view = MemoryView(budget=budget, now=now, loaded={one.name: one for one in loaded})
    evicts = idle_to_evict(view)
    reserved_bytes = sum(one.reserved_bytes for one in staying)
    busy = [one for one in staying if one.name not in evicts]
    least_bytes = sum(one.reserved_bytes - one.spare_bytes for one in busy)
    lives = [model.life for model in there if model.life.wanted is not Wanted.GONE] + added
    return {
        "over_budget_bytes": max(0, reserved_bytes - budget.kept_bytes),
        "evicts": list(evicts),
        "still_over_bytes": max(0, least_bytes - budget.kept_bytes),
        "refuses": list(_refused(lives, replace(view, budget=budget.whole()))),
    }


# ---------------------------------------------------------------- inside


def _after(
    models: Iterable[Model],
    settings: CoreSettings,
    entries: Sequence[ModelSettings],
    needs: Mapping[ModelName, Need],
    now: float,
) -> Iterator[Model]:
    """The models that there are, as they would be right after the reload."""
    by_name = {entry.name: entry for entry in entries}
    for model in models:
        life = deepcopy(model.life)
        life.stream_tokens = longest_stream(model)
        if life.name in by_name or life.wanted is not Wanted.GONE:
            outcomes = apply(life, reload_trigger(model, by_name, settings.drain_timeout_s), now)
            if any(isinstance(outcome, Erased) for outcome in outcomes):
                continue
        life.appraise(needs.get(life.name))
        yield replace(model, life=life)


def _added(
    there: Iterable[Model], entries: Sequence[ModelSettings], needs: Mapping[ModelName, Need]
) -> Iterator[Life]:
    old = {model.name for model in there}
    for entry in entries:
        if entry.name not in old:
            life = Life.new(entry, exit_grace_s=0.0, random=random.Random(0))
            life.appraise(needs.get(entry.name))
            yield life


def _pinned(added: Iterable[Life]) -> list[LoadedModel]:
    return [
        LoadedModel(
            name=one.name,
            reserved_bytes=one.reserved_bytes,
            standing=Standing.PINNED,
            never_bytes=one.pinned_bytes,
        )
        for one in added
        if one.reserved_bytes
    ]


def _refused(lives: Iterable[Life], view: MemoryView) -> Iterator[dict[str, str]]:
    """Yield the models that no load could make room for: only what never goes is in the way."""
    for life in lives:
        request = LoadRequest(
            name=life.name, needed_bytes=life.needed_bytes, urgency=Urgency.COMMAND
        )
        verdict = verdict_on(request, view)
        if isinstance(verdict, Refuse):
            yield {"model": life.name, "reason": verdict.reason}
