"""Whether a request may wait, or why not; the one gate that every request passes (H2)."""

from __future__ import annotations

from collections.abc import Iterable

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import State, Wanted, Why

from .life import Life
from .recovery import Digest, Recovery
from .refusals import cut_off, model_failed, overloaded, quarantined
from .requests import Ledger
from .settings import CoreSettings


def refuse_for_state(life: Life) -> RemoteError | None:
    """Why the model's state does not let a request wait, if so."""
    if life.state is State.FAILED:
        return model_failed(life.name, life.failure)
    is_going = life.state in (State.DRAINING, State.STOPPING)
    if is_going and life.wanted is Wanted.DOWN and life.why is Why.USER:
        return cut_off(life.name, life.why)
    return None


def refuse_for_quarantine(
    name: ModelName, recovery: Recovery, digest: Digest, now: float
) -> RemoteError | None:
    """Why this very request may not run again yet, if so (F10)."""
    lifted_in_s = recovery.quarantined_for_s(digest, now)
    return None if lifted_in_s is None else quarantined(name, 0, lifted_in_s)


def refuse_for_room(
    life: Life,
    *,
    client: str,
    body_bytes: int,
    ledger: Ledger,
    running: Iterable[RequestId],
    retry_after_s: float,
    settings: CoreSettings,
) -> RemoteError | None:
    """Why the queues are too full for one more request, if so (H3, H5)."""
    if ledger.waiting >= settings.max_queue:
        limit = f"{ledger.waiting} requests are waiting, the limit (max_queue)"
    elif ledger.waiting_of(client) >= settings.max_queue_per_client:
        waiting = ledger.waiting_of(client)
        limit = f"{waiting} requests of this client are waiting, the limit (max_queue_per_client)"
    elif ledger.held_bytes + body_bytes > settings.max_queue_bytes:
        limit = f"open requests hold {ledger.held_bytes} bytes, near the limit (max_queue_bytes)"
    else:
        return None
    return overloaded(
        life.name,
        limit,
        queue_depth=ledger.waiting,
        running=list(running),
        retry_after_s=retry_after_s,
    )
