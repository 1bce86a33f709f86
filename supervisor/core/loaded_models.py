"""What models hold of the memory budget, as the planner sees them."""

from __future__ import annotations

from collections.abc import Iterable

from mlxsup.protocol.states import Wanted

from .kv_budget import lasting_bytes, spare_bytes
from .lifecycle.states import Abandoned, Draining, Ready, StopCause, Stopping, Swapping
from .memory.budget import Budget
from .memory.planner import LoadedModel, Standing
from .memory.residency import RESIDENCY_LOADS
from .model import Model
from .settings import CoreSettings
from .swapping import highest_class, turn_ends_at, why_it_stays


def loaded_models(models: Iterable[Model], settings: CoreSettings, now: float) -> list[LoadedModel]:
    """Return what the planner sees of those models that hold a part of the budget."""
    return [_loaded_model(model, settings, now) for model in models if model.life.reserved_bytes]


def overshoot_bytes(models: Iterable[Model], budget: Budget | None) -> int:
    """Return how much of what is reserved must still go, whoever may."""
    if budget is None:
        return 0
    staying = (one for one in models if _standing(one) is not Standing.LEAVING)
    return max(0, sum(model.life.reserved_bytes for model in staying) - budget.kept_bytes)


def _loaded_model(model: Model, settings: CoreSettings, now: float) -> LoadedModel:
    life, phase, standing = model.life, model.life.phase, _standing(model)
    ready_since = phase.since if isinstance(phase, Ready) else 0.0
    residency_s = max(settings.min_residency_s, RESIDENCY_LOADS * model.load_s)
    return LoadedModel(
        name=model.name,
        reserved_bytes=life.reserved_bytes,
        never_bytes=_never_bytes(model, standing, now),
        spare_bytes=spare_bytes(model, now),
        is_ending=isinstance(phase, Stopping),
        standing=standing,
        used_at=model.idle_since,
        ripe_at=min(model.idle_since + model.load_s, ready_since + residency_s),
        loaded_since=ready_since,
        turn_ends_at=turn_ends_at(model, settings),
        runs=highest_class(model),
        stays_because=why_it_stays(model),
    )


def _never_bytes(model: Model, standing: Standing, now: float) -> int:
    if standing is Standing.STUCK:
        return model.life.reserved_bytes
    return lasting_bytes(model, now) if standing is Standing.PINNED else 0


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
