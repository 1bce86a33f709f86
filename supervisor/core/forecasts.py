"""Forecasts: what a load or a reload would lead to; nothing changes.

The table of transitions and the memory plan are asked about copies, so that a forecast cannot
differ from what follows. A load with another context length is another entry, until the
configuration is read again: what could never succeed is refused before anything changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, assert_never

from mlxsup.protocol.errors import unfit
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Priority, State, Wanted

from .budget import Need, bounded
from .errors import does_not_fit, load_failed
from .life import Abandoned, Life, Swapping, Wait
from .memory_plan import (
    Admit,
    Evict,
    Reclaim,
    Refuse,
    Swap,
    Verdict,
    idle_to_evict,
    needs,
    verdict_on,
)
from .memory_view import (
    LoadedModel,
    LoadRequest,
    MemoryView,
    Standing,
    Urgency,
    loaded_models,
)
from .model import Model
from .settings import CoreSettings, ModelSettings
from .transitions import Removed, apply, reload_command

# ---------------------------------------------------------------- loads


def check_launch(
    model: Model,
    launch: LaunchSettings,
    need: Need | None,
    models: Iterable[Model],
    settings: CoreSettings,
    now: float,
) -> None:
    """Refuse another launch with which a model could never be loaded, before anything changes: with
    a longer context than it has, or if it does not fit into the whole budget next to what never
    goes, as at a reload.

    Args:
        need: what it needs then; None: its files cannot be read, which its load will say.

    Raises:
        RemoteError: `invalid_request`, `insufficient_memory`.
    """
    if need is not None and launch.context_length > need.context_tokens:
        has = f"{model.name} has a context of {need.context_tokens} tokens"
        raise unfit("context_length", f"{has}, not of {launch.context_length}")
    if need is None or settings.budget is None:
        return
    others = {one.name: one for one in models if one is not model}
    loaded = [
        _unraised(one, others[one.name]) for one in loaded_models(others.values(), settings, now)
    ]
    budget = settings.budget.whole()
    needed_bytes = need.unraised_bytes
    request = LoadRequest(name=model.name, needed_bytes=needed_bytes, urgency=Urgency.COMMAND)
    view = MemoryView(budget=budget, now=now, loaded={one.name: one for one in loaded})
    verdict = verdict_on(request, view)
    if isinstance(verdict, Refuse):
        raise does_not_fit(
            model.name,
            verdict.reason,
            needed_bytes=needed_bytes,
            budget_bytes=budget.size_bytes,
            blockers=verdict.blockers,
        )


def _unraised(one: LoadedModel, model: Model) -> LoadedModel:
    """Return what running out of memory has raised for a pinned model gives way to a load."""
    need = model.life.need
    if need is None or one.standing is not Standing.PINNED:
        return one
    return replace(one, never_bytes=one.never_bytes - need.raise_for(0))


def forecast(
    model: Model, models: Iterable[Model], settings: CoreSettings, now: float
) -> dict[str, Any]:
    """Return the answer: `model`, `outcome`, `needed_bytes`, `evicts` and `swaps` (names), and
    `reason`, a phrase.

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
        "needed_bytes": model.bytes_to_load,
        "evicts": [],
        "swaps": [],
    }
    if model.life.state in (State.LOADING, State.READY):
        return {**answer, "outcome": "loaded", "reason": f"is {model.life.state}"}
    if isinstance(model.life.phase, Swapping):
        reason = f"makes room {model.life.phase.what_for}, and is loaded again in its turn"
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
            short = needs(model.bytes_to_load, budget_bytes - reserved_bytes)
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
                needed_bytes=model.bytes_to_load,
                budget_bytes=whole_bytes,
                blockers=blockers,
            )
        case verdict:
            assert_never(verdict)


def _foresee(model: Model, models: Iterable[Model], settings: CoreSettings, now: float) -> Verdict:
    """Return what a load command for this model would lead to now; nothing changes."""
    if settings.budget is None:
        return Admit()
    request = LoadRequest(
        name=model.name,
        needed_bytes=model.bytes_to_load,
        urgency=Urgency.COMMAND,
        wants=Priority.INTERACTIVE,
        swaps_from=now + settings.swap_after_s if settings.swap else None,
    )
    loaded = {one.name: one for one in loaded_models(models, settings, now)}
    return verdict_on(request, MemoryView(budget=settings.budget, now=now, loaded=loaded))


# ---------------------------------------------------------------- reloads


def changed_settings(old: CoreSettings, new: CoreSettings) -> list[str]:
    """Return the settings, by their keys, that a reload changes at once and that are about no
    model."""
    names = [
        one.name for one in fields(CoreSettings) if one.name not in ("budget", "prewarmed_bytes")
    ]
    changed = [name for name in names if getattr(old, name) != getattr(new, name)]
    is_other_budget = _size_of(old) != _size_of(new)
    return [*changed, "memory_budget"] if is_other_budget else changed


def _size_of(settings: CoreSettings) -> int | None:
    return None if settings.budget is None else settings.budget.whole_bytes


def differences(models: Iterable[Model], entries: Sequence[ModelSettings]) -> dict[str, list[str]]:
    """Return the names of the models that a reload adds, changes and removes."""
    old = {m.name: m.life.settings for m in models if m.life.wanted is not Wanted.GONE}
    new = {entry.name: entry for entry in entries}
    return {
        "added": [name for name in new if name not in old],
        "changed": [name for name in new if name in old and new[name] != old[name]],
        "removed": [name for name in old if name not in new],
    }


def foreseen(
    models: Iterable[Model],
    settings: CoreSettings,
    entries: Sequence[ModelSettings],
    needs: Mapping[ModelName, Need],
    now: float,
) -> dict[str, Any]:
    """Return what a reload would do, for `reload --dry-run`.

    Args:
        needs: what its models were appraised at.

    Returns:
        `foreseen`: for each model that it concerns `model`, `change` (`added`, `changed` or
        `removed`), `state` (None if it is new), `becomes` (None if nothing is left of it at once)
        and how many requests are `running`. `over_budget_bytes`, how much more than the budget
        would be reserved; `evicts`, the names of the idle models that would be evicted, unless
        workers give back enough of what they keep for reuse;
        `still_over_bytes`, what only busy models could free; and `refuses`: a `model` and a
        `reason`, a phrase, for each that could not be loaded with all others gone.
    """
    by_name = {entry.name: entry for entry in entries}
    known = {model.name for model in models if model.life.wanted is not Wanted.GONE}
    if settings.budget is not None:
        pinned = {entry.name for entry in entries if entry.pinned}
        needs = bounded(needs, pinned, settings.budget.whole_bytes)
    changes: list[dict[str, Any]] = []
    there: list[Model] = []
    for model in models:
        life = deepcopy(model.life)
        life.stream_tokens = model.longest_stream
        trigger = reload_command(life.name, by_name, settings.drain_timeout_s)
        if life.name in by_name or life.name in known:
            apply(life, trigger, now)
        is_erased = life.wanted is Wanted.GONE and not life.has_process
        if life.name in known and by_name.get(life.name) != model.life.settings:
            change = {
                "model": life.name,
                "change": "removed" if isinstance(trigger, Removed) else "changed",
                "state": model.life.state.value,
                "becomes": None if is_erased else life.state.value,
                "running": len(model.batch.running),
            }
            changes.append(change)
        if not is_erased:
            life.appraise(needs.get(life.name))
            there.append(replace(model, life=life))
    for entry in entries:
        if entry.name not in known:
            state = State.PENDING if entry.preload else State.STOPPED
            change = {"model": entry.name, "change": "added", "state": None}
            changes.append({**change, "becomes": state.value, "running": 0})
    added = list(_added(there, entries, needs))
    return {"foreseen": changes, **_memory(there, added, settings, now)}


def _memory(
    there: list[Model], added: list[Life], settings: CoreSettings, now: float
) -> dict[str, Any]:
    budget = settings.budget
    if budget is None:
        return {"over_budget_bytes": 0, "evicts": [], "still_over_bytes": 0, "refuses": []}
    loaded = [*loaded_models(there, settings, now), *_pinned(added)]
    view = MemoryView(budget=budget, now=now, loaded={one.name: one for one in loaded})
    evicts = idle_to_evict(view)
    busy = [one for one in loaded if not one.is_leaving and one.name not in evicts]
    least_bytes = sum(one.least_bytes for one in busy)
    lives = [model.life for model in there if model.life.wanted is not Wanted.GONE] + added
    return {
        "over_budget_bytes": view.overshoot_bytes,
        "evicts": list(evicts),
        "still_over_bytes": max(0, least_bytes - budget.kept_bytes),
        "refuses": list(_refused(lives, replace(view, budget=budget.whole()))),
    }


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
