"""Which busy model goes because memory is short, though no other one waits for what it holds.

One READY model always stays: with none, nothing is served, and the load that follows needs as much
memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text

from .lifecycle.states import Ready, Shortage
from .memory.budget import Budget
from .memory.planner import Resident, Standing
from .model import Model
from .rows_memory import bytes_to_load
from .swapping import CLASSES

OTHERS = "because other programs need memory"
BUDGET = "because the loaded models need more than memory_budget"


def goes_for_shortage(
    models: Mapping[ModelName, Model],
    residents: Mapping[ModelName, Resident],
    budget: Budget,
    now: float,
) -> tuple[Model, Shortage] | None:
    """Who is to be swapped out because more is needed than may be kept; None: nobody may, or what
    is leaving is enough.

    One model that is READY always stays: with none, nothing would be served until memory is there
    again. So does one that could not return.

    Args:
        models: all of them, by name.
        residents: those that hold memory; who has to go already is LEAVING, idle ones among them.
        budget: what may be kept.
        now: monotonic seconds.
    """
    counted = counted_bytes(models, residents, budget)
    staying = [residents[name] for name in counted]
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
    residents: Mapping[ModelName, Resident],
    budget: Budget | None,
) -> bool:
    """Whether a model that is on its way out for a shortage could still not stay."""
    if budget is None:
        return False
    staying_bytes = sum(counted_bytes(models, residents, budget).values())
    return staying_bytes + cause.counted_bytes > budget.kept_bytes


def counted_bytes(
    models: Mapping[ModelName, Model], residents: Mapping[ModelName, Resident], budget: Budget
) -> dict[ModelName, int]:
    """What each of those that stay cannot give back without going, by name."""
    staying = (one for one in residents.values() if one.standing is not Standing.LEAVING)
    return {one.name: _counted_bytes(one, models[one.name], budget) for one in staying}


def shortage_text(residents: Mapping[ModelName, Resident], budget: Budget) -> str:
    """How much is reserved, how much may be kept, and why it is no more, a phrase."""
    reserved_bytes = sum(resident.reserved_bytes for resident in residents.values())
    sizes = f"{size_text(reserved_bytes)} of {size_text(budget.kept_bytes)} are reserved"
    return f"{sizes} and {budget.shortage}" if budget.is_short else sizes


# ---------------------------------------------------------------- inside


def _counted_bytes(resident: Resident, model: Model, budget: Budget) -> int:
    """What a model cannot give back without going. While others do not lack memory, what it has
    grown by does not count: it would be let in again at once, and grow again."""
    least_bytes = resident.reserved_bytes - resident.spare_bytes
    return least_bytes if budget.is_short else min(least_bytes, bytes_to_load(model))


def _goes_first(resident: Resident) -> tuple[int, float]:
    """Who runs nothing, then who runs the lowest class; then who has been loaded for longest."""
    rank = len(CLASSES) if resident.runs is None else CLASSES.index(resident.runs)
    return -rank, resident.resident_since
