"""Every open request and how far it is: the answer to `mlxsup requests`.

It is no part of the status, which is asked for every second: the list is made only on request, and
nothing is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlxsup.protocol.states import WaitReason

from .model import Model
from .queue_status import request_map
from .requests.ledger import Ledger, Request, Stage
from .sharing.accounts import Account
from .status import expected_s, wait_reason

MOST_LISTED = 256
"""One answer lists at most this many requests, and counts the others."""

LEAST_READ = 0.02
"""Before this share of a prompt has been read, it is not known how long the rest will take."""


def requests_map(
    models: Iterable[Model], ledger: Ledger, client: str | None, now: float
) -> dict[str, Any]:
    """The answer: `requests`, model by model what runs, what is paused, and what waits in the order
    of the line; and `more`, how many were left out.

    Args:
        models: all.
        ledger: the open requests.
        client: only those of this account, or of the process or terminal with this number; None
            for all.
        now: monotonic seconds.
    """
    listed: list[dict[str, Any]] = []
    more = 0
    for model in models:
        model.settle()
        model.queue.age(now)
        for request, place in _in_order(model):
            if client is not None and not _is_of(request.account, client):
                continue
            if len(listed) < MOST_LISTED:
                listed.append(_map(model, ledger, request, place, now))
            else:
                more += 1
    return {"requests": listed, "more": more}


# ---------------------------------------------------------------- inside


def _in_order(model: Model) -> Iterator[tuple[Request, int | None]]:
    """The requests of a model; those in its line with their place, from 1."""
    for request in (*model.batch.running.values(), *model.paused.values()):
        yield request, None
    for place, request in enumerate(model.queue, start=1):
        yield request, place


def _is_of(account: Account, client: str) -> bool:
    """True if `client` means this account: `team`, `process 12@34`, or `12`."""
    number = account.partition("@")[0].rpartition(" ")[2]
    return client in (account, number)


def _map(
    model: Model, ledger: Ledger, request: Request, place: int | None, now: float
) -> dict[str, Any]:
    prefill = _read_share(request)
    is_limited = model.serves_queue and not ledger.may_run(request.account)
    wait_s = _reading_s(request, prefill, now)
    if place is not None and not is_limited:
        wait_s = expected_s(model, request, place, now)
    return {
        **request_map(request, now),
        "model": request.model,
        "state": _state(request),
        "place": place,
        "reason": _reason(model, is_limited).value if place is not None else None,
        "prefill": prefill,
        "expected_s": wait_s,
        "tokens_per_s": _tokens_per_s(request, now),
        "engine_s": request.engine_s,
        "age_s": now - request.arrived_at,
    }


def _tokens_per_s(request: Request, now: float) -> float | None:
    """Return how fast its answer has come since its first token, pauses and crashes included; None
    before its second token."""
    if request.first_token_at is None or request.tokens_sent < 2:
        return None
    took_s = now - request.first_token_at
    return (request.tokens_sent - 1) / took_s if took_s > 0 else None


def _state(request: Request) -> str:
    match request.stage:
        case Stage.QUEUED:
            return "waiting"
        case Stage.PAUSING | Stage.PAUSED:
            return request.stage.name.lower()
        case _:
            return "reading" if request.gains_since is None else "answering"


def _reason(model: Model, is_limited: bool) -> WaitReason:
    return WaitReason.LIMIT if is_limited else wait_reason(model)


def _read_share(request: Request) -> float | None:
    """How much of its prompt has been read, from 0 to 1; None unless it is being read now, for the
    first time."""
    if _state(request) != "reading" or request.acceptance is None or request.sent_tokens:
        return None
    return min(request.read_tokens / request.usage().prompt_tokens, 1.0)


def _reading_s(request: Request, prefill: float | None, now: float) -> float | None:
    """Seconds until the first token, if the rest of the prompt is read at the same pace; None if
    nobody can tell."""
    if prefill is None or prefill < LEAST_READ or request.dispatched_at is None:
        return None
    return (now - request.dispatched_at) * (1.0 - prefill) / prefill
