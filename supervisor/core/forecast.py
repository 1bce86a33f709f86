"""What a load would lead to, without doing it: the answer to `load --dry-run`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from mlxsup.protocol.states import Priority, State

from .errors import does_not_fit, load_failed
from .lifecycle.states import Abandoned, Shortage, Swapping
from .memory.planner import (
    Admit,
    Evict,
    GiveBack,
    Refuse,
    Swap,
    Urgency,
    Verdict,
    Wait,
    Wish,
    plan,
)
from .memory.sentences import needs
from .model import Model
from .residents import residents_of
from .rows_memory import bytes_to_load
from .settings import CoreSettings


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
        case GiveBack(reason=reason):
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
    """What a load command for this model would lead to now; nothing changes."""
    if settings.budget is None:
        return Admit()
    others = residents_of((one for one in models if one is not model), settings, now)
    wish = Wish(
        name=model.name,
        needed_bytes=bytes_to_load(model),
        urgency=Urgency.COMMAND,
        priority=Priority.INTERACTIVE,
        swaps_from=now + settings.swap_after_s if settings.swap else None,
    )
    budget = settings.budget
    return plan(
        wish, others, budget_bytes=budget.size_bytes, whole_bytes=budget.whole_bytes, now=now
    )
