"""Loads: what one may ask for that the configuration says otherwise, and what one would lead to.

Another context length is another entry, until the configuration is read again, under the rules of a
reload: the model is appraised anew before anything happens, and a load that could never succeed is
refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, assert_never

from mlxsup.protocol.client_messages import Load
from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH
from mlxsup.protocol.errors import unfit
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Priority, State

from .errors import does_not_fit, load_failed
from .kv_budget import bytes_to_load
from .lifecycle.states import Abandoned, Shortage, Swapping, Urgency
from .load_verdict import Admit, Evict, Refuse, Swap, Verdict, Wait, needs, verdict_on
from .memory.need import Need
from .memory_view import LoadedModel, LoadRequest, MemoryView, Standing, loaded_models
from .model import Model
from .settings import CoreSettings


def launch_asked_for(launch: LaunchSettings, context_length: int | None) -> LaunchSettings:
    """The launch of the configuration, or another one if the load asks for that.

    Raises:
        RemoteError: `invalid_request`.
    """
    if context_length is None:
        return launch
    if not 0 <= context_length <= MAX_CONTEXT_LENGTH:
        limits = f"an integer from 0 to {MAX_CONTEXT_LENGTH}"
        raise unfit("context_length", f"context_length must be {limits}, not {context_length}")
    return replace(launch, context_length=context_length)


def refuse_dry(load: Load) -> None:
    """Refuse a dry run of a load that differs from what is configured.

    Raises:
        RemoteError: `invalid_request`.
    """
    if load.context_length is None and load.keep_alive is None:
        return
    name = "keep_alive" if load.context_length is None else "context_length"
    raise unfit(name, f"a dry run uses the configured settings; remove {name}")


def check_context(model: Model, need: Need | None, launch: LaunchSettings) -> None:
    """Refuse another launch with a longer context than the model has, before its process ends.

    Args:
        need: what it needs with that launch; None: its files cannot be read.

    Raises:
        RemoteError: `invalid_request`.
    """
    if need is not None and launch.context_length > need.context_tokens:
        has = f"{model.name} has a context of {need.context_tokens} tokens"
        raise unfit("context_length", f"{has}, not of {launch.context_length}")


def check_room(
    model: Model, need: Need | None, models: Iterable[Model], settings: CoreSettings, now: float
) -> None:
    """Refuse another launch with which a model could never be loaded, before anything changes:
    what it needs must fit into the whole budget next to what never goes, as at a reload.

    Args:
        need: what it needs then; None: its files cannot be read, which its load will say.

    Raises:
        RemoteError: `insufficient_memory`.
    """
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


# ---------------------------------------------------------------- a dry run


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
        case Evict(models=(), reason=reason):
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
