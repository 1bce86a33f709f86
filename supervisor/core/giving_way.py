"""Which rows leave because other programs need memory (docs/decisions/0006-memory.md).

If nothing is left that workers keep for speed and nobody idle is left to go, rows of the lowest
class leave before a busy model is swapped out. What they have computed is dropped; they return when
there is memory for them, as rows do that a worker had no memory for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mlxsup.protocol.ids import ModelName, RequestKey

from .lifecycle.states import Ready
from .lifecycle.triggers import RowsGiveWay
from .memory.budget import Budget
from .memory.planner import Resident
from .model import Model
from .requests.ledger import Request, Stage
from .rows_memory import has_row_budget, is_leaving_short, may_leave, needed_bytes
from .shortage import OTHERS, counted_bytes, shortage_text
from .yielding import GIVES_WAY

Leaving = list[tuple[Model, Request]]


def who_gives_way(
    models: Mapping[ModelName, Model], residents: Mapping[ModelName, Resident], budget: Budget
) -> dict[ModelName, RowsGiveWay]:
    """The rows that must leave now, by model: those served last, and none without which the others
    would free as much as is missing. If all of them are not enough, those that free any.

    One row of each model stays, so that its work continues.

    Args:
        models: all of them, by name.
        residents: those that hold memory; who has to go already is LEAVING, idle ones among them.
        budget: what may be kept.
    """
    missing_bytes = sum(counted_bytes(models, residents, budget).values()) - budget.kept_bytes
    if missing_bytes <= 0 or not budget.is_short:
        return {}
    leaving = [(model, request) for model in models.values() for request in _may_go(model)]
    enough_bytes = min(missing_bytes, _freed_bytes(leaving))
    for pair in sorted(leaving, key=lambda pair: _served_at(pair[1])):
        others = [one for one in leaving if one is not pair]
        if _freed_bytes(others) >= enough_bytes:
            leaving = others
    why = f"{OTHERS}: {shortage_text(residents, budget)}"
    return {model.name: _trigger(requests, why) for model, requests in _by_model(leaving)}


def are_rows_leaving(models: Iterable[Model]) -> bool:
    """Whether rows have been asked to leave for want of memory, and have not left yet."""
    return any(is_leaving_short(one) for model in models for one in model.running.values())


# ---------------------------------------------------------------- inside


def _trigger(requests: Sequence[Request], why: str) -> RowsGiveWay:
    rows = (
        "1 batch request leaves" if len(requests) == 1 else f"{len(requests)} batch requests leave"
    )
    return RowsGiveWay(keys=tuple(one.key for one in requests), reason=f"{rows} {why}")


def _may_go(model: Model) -> Sequence[Request]:
    """Rows of the lowest class that may leave, but never all that run."""
    is_serving = isinstance(model.life.phase, Ready) and not model.is_unlinked
    if not is_serving or not has_row_budget(model):
        return ()
    staying = [one for one in model.running.values() if one.stage is Stage.RUNNING]
    may_go = [one for one in staying if one.priority is GIVES_WAY and may_leave(model, one)]
    return sorted(may_go, key=_served_at)[1:] if len(may_go) == len(staying) else may_go


def _served_at(request: Request) -> tuple[float, RequestKey]:
    return request.dispatched_at or 0.0, request.key


def _freed_bytes(leaving: Leaving) -> int:
    """How much less must be reserved once these rows have left."""
    return sum(
        _kept_bytes(model) - _kept_bytes(model, frozenset(one.key for one in requests))
        for model, requests in _by_model(leaving)
    )


def _kept_bytes(model: Model, without: Collection[RequestKey] = ()) -> int:
    """Rows that are leaving, as for a pause by hand, free what they hold without anybody's help."""
    leaving = {one.key for one in model.running.values() if one.stage is not Stage.RUNNING}
    return min(model.life.reserved_bytes, needed_bytes(model, leaving.union(without)))


def _by_model(leaving: Leaving) -> list[tuple[Model, list[Request]]]:
    found: dict[ModelName, tuple[Model, list[Request]]] = {}
    for model, request in leaving:
        found.setdefault(model.name, (model, []))[1].append(request)
    return list(found.values())
