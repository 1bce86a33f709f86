"""How long a request that waits for a row is expected to wait, from what others have cost."""

from __future__ import annotations

from mlxsup.protocol.states import PauseReason, WaitReason

from .model import SHORTEST_FREE_S, Model
from .requests.ledger import Request, Stage
from .requests.queue import URGENT
from .status import wait_reason


def expected_s(model: Model, request: Request, place: int, now: float) -> float | None:
    """Seconds until a waiting request should get a row; None if nobody can tell.

    Rows share the seconds of one engine, so one becomes free each time as many have passed as a
    request costs on average. For a request of the highest class a row may be freed earlier.

    Args:
        model: whose row it waits for.
        request: in its queue.
        place: in the line, from 1.
        now: monotonic seconds.
    """
    if wait_reason(model) is not WaitReason.ROWS:
        return None
    if request.priority is URGENT:
        if any(_gives_way(one) for one in model.running.values()):
            return 0.0
        if model.yields_at is not None:
            return max(model.yields_at - now, 0.0)
    cost_s = model.queue.counters.cost_s
    return None if cost_s is None else place * max(cost_s, SHORTEST_FREE_S)


def _gives_way(request: Request) -> bool:
    return request.stage is Stage.YIELDING and request.pause_reason is PauseReason.CLASS
