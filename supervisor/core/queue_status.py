"""Requests as `status --json` shows them, by class and by client, and the one a person names: by
its id or number, or as `last`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import LAST_REQUEST
from mlxsup.protocol.states import PauseReason

from .model import Model
from .requests.ledger import Ledger, Request, Stage

MOST_SUGGESTED = 8
"""An error lists at most this many requests."""


def find_named(ledger: Ledger, name: str) -> Request:
    """Return the open request with this id, whoever sent it, or else with this number, `#12` or
    `12`; `last` is the one that came last, unless it is the id of another.

    Ids are unique for one connection only. If several open requests have the same one, only their
    numbers, which `status` and the error show, tell them apart.

    Raises:
        RemoteError: `invalid_request`, if none is called that, or several are.
    """
    found = [request for request in ledger if request.id == name]
    if not found:
        found = [request for request in ledger if number_of(request) in (name, f"#{name}")]
    if not found and name == LAST_REQUEST:
        found = sorted(ledger, key=lambda request: request.key)[-1:]
    if len(found) == 1:
        return found[0]
    if found:
        sentence = f"{len(found)} open requests have the id {name!r}; use the number of one"
        raise _wrong_name(sentence, found)
    raise _wrong_name(f"no open request has the id or number {name!r}", list(ledger))


def number_of(request: Request) -> str:
    """The supervisor's number for a request, as people write it: `#12`."""
    return f"#{request.key}"


def _wrong_name(sentence: str, candidates: list[Request]) -> RemoteError:
    shown = ", ".join(map(_shown, candidates[:MOST_SUGGESTED])) or "none"
    more = len(candidates) - MOST_SUGGESTED
    rest = f" and {more} more; see `mlxsup requests`" if more > 0 else ""
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"{sentence}; open: {shown}{rest}",
        detail={
            "parameter": "request",
            "known": [request.id for request in candidates[:MOST_SUGGESTED]],
            "numbers": [number_of(request) for request in candidates[:MOST_SUGGESTED]],
        },
    )


def _shown(request: Request) -> str:
    match request.stage:
        case Stage.QUEUED:
            doing = "waits for"
        case Stage.PAUSED:
            doing = "is paused on"
        case _:
            doing = "runs for"
    return f"{request.id} ({number_of(request)}, {doing} {request.model})"


MOST_LISTED = 32
"""The status lists at most this many waiting requests of a model, those that are next."""


def queue_map(models: Iterable[Model], ledger: Ledger) -> dict[str, Any]:
    """What waits, over all models; `per_client` and `waiting` leave out answers that have begun."""
    per_class: Counter[str] = Counter()
    for model in models:
        per_class.update(per_class_map(model))
    waiting, running = ledger.waiting_by_account, ledger.running_by_account
    clients = {
        account: {
            "waiting": waiting.get(account, 0),
            "running": running.get(account, 0),
            "weight": ledger.terms.of(account).weight,
        }
        for account in sorted({*waiting, *running})
    }
    return {
        "waiting": ledger.waiting,
        "per_client": waiting,
        "per_class": dict(per_class),
        "clients": clients,
    }


def per_class_map(model: Model) -> dict[str, int]:
    """Return how many requests of a model wait in each class, as they stand in the line now."""
    return {priority.value: count for priority, count in model.queue.per_class.items()}


def line_map(model: Model, now: float) -> list[dict[str, Any]]:
    """The next requests of a model, in order."""
    return [request_map(request, now) for request in islice(model.queue, MOST_LISTED)]


def rows_map(model: Model, now: float) -> list[dict[str, Any]]:
    """The running requests of a model."""
    return [request_map(request, now) for request in model.batch.running.values()]


def yielded_ids(model: Model) -> list[str]:
    """The waiting requests whose rows have left for others, so that they return by themselves."""
    again = model.queue.again
    return [r.id for r in again if r.is_paused and r.pause_reason is not PauseReason.USER]


def paused_rows_map(model: Model, now: float) -> list[dict[str, Any]]:
    """The requests of a model that a person has paused."""
    return [request_map(request, now) for request in model.paused.values()]


def paused_map(request: Request) -> dict[str, Any]:
    """The answer to a pause or a resume.

    Its `stage` is `pausing` until the row has left the batch, then `paused`; `queued` if it waits
    for a row, or will as soon as its own has left.
    """
    is_to_queue = request.stage is Stage.YIELDING
    return {
        "request": request.id,
        "number": number_of(request),
        "model": request.model,
        "stage": "queued" if is_to_queue else request.stage.name.lower(),
        "tokens_sent": request.tokens_sent,
    }


def cancelled_map(request: Request) -> dict[str, Any]:
    """Return the answer to a cancel."""
    return {
        "request": request.id,
        "number": number_of(request),
        "model": request.model,
        "tokens_sent": request.tokens_sent,
    }


def request_map(request: Request, now: float) -> dict[str, Any]:
    """One open request: how people name it, on whose behalf it is, and its class; `paused` is the
    reason why its row has left, until it has continued, `resumed` how many crashes it outlived, and
    `read_tokens` how many of its `prompt_tokens` have been read, which are None until a worker has
    accepted it."""
    acceptance = request.acceptance
    waits_s = now - request.waits_since if request.stage is Stage.QUEUED else 0.0
    return {
        "id": request.id,
        "number": number_of(request),
        "client": request.account,
        "priority": request.priority.value,
        "class": request.standing.value,
        "waited_s": request.waited_s + waits_s,
        "paused": request.pause_reason.value if request.is_paused else None,
        "resumed": request.resumed,
        "prompt_tokens": len(acceptance.prompt_tokens) // 4 if acceptance else None,
        "read_tokens": request.read_tokens,
        "tokens_sent": request.tokens_sent,
    }
