"""Requests as `status --json` and `mlxsup requests` show them, and the one a person names: by
its id or number, or as `last`.

The list of all open requests is no part of the status, which is asked for every second: it is made
only on request, and nothing is kept for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import LAST_REQUEST
from mlxsup.protocol.states import PauseReason, State, WaitReason, Why

from .lifecycle.states import Backoff, Loading, Pending
from .model import SHORTEST_FREE_S, Model
from .requests.ledger import Ledger, Request, Stage
from .requests.queue import URGENT
from .sharing.accounts import Account

MOST_SUGGESTED = 8
"""An error lists at most this many requests."""


def find_named(ledger: Ledger, name: str) -> Request:
    """Return the open request with this id, of any client, or else with this number, `#12` or
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
    return [r.id for r in again if r.pauses.is_paused and r.pauses.reason is not PauseReason.USER]


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
    waits_s = now - request.waiting.since if request.stage is Stage.QUEUED else 0.0
    return {
        "id": request.id,
        "number": number_of(request),
        "client": request.account,
        "priority": request.priority.value,
        "class": request.waiting.standing.value,
        "waited_s": request.waiting.waited_s + waits_s,
        "paused": request.pauses.reason.value if request.pauses.is_paused else None,
        "resumed": request.crashes.resumed,
        "prompt_tokens": len(acceptance.prompt_tokens) // 4 if acceptance else None,
        "read_tokens": request.cost.read_tokens,
        "tokens_sent": request.tokens_sent,
    }


# ---------------------------------------------------------------- what a request waits for


def wait_reason(model: Model) -> WaitReason:
    """Why the requests of this model are waiting."""
    phase = model.life.phase
    if model.life.why is Why.SWAP and not isinstance(phase, Loading):
        return WaitReason.SWAP
    if isinstance(phase, Pending) and phase.lack is not None:
        return WaitReason.MEMORY
    if model.serves_queue:
        if model.batch.held_back is not None:
            return WaitReason.MEMORY
        has_turns = model.has_room and model.blame.is_anyone_on_probation
        return WaitReason.TURN if has_turns else WaitReason.ROWS
    match model.life.state:
        case State.BACKOFF:
            is_crash = not (isinstance(phase, Backoff) and phase.download_cause)
            return WaitReason.BACKOFF if is_crash else WaitReason.DOWNLOAD
        case State.DRAINING | State.STOPPING:
            return WaitReason.RESTART
        case _:
            return WaitReason.LOAD


def expected_s(model: Model, request: Request, place: int, now: float) -> float | None:
    """Seconds until a waiting request should get a row; None if that is not known.

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
        if any(_gives_way(one) for one in model.batch.running.values()):
            return 0.0
        if model.batch.yields_at is not None:
            return max(model.batch.yields_at - now, 0.0)
    cost_s = model.queue.counters.cost_s
    return None if cost_s is None else place * max(cost_s, SHORTEST_FREE_S)


def _gives_way(request: Request) -> bool:
    return request.stage is Stage.YIELDING and request.pauses.reason is PauseReason.CLASS


# ---------------------------------------------------------------- all open requests

MOST_ASKED_FOR = 256
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
            if len(listed) < MOST_ASKED_FOR:
                listed.append(_map(model, ledger, request, place, now))
            else:
                more += 1
    return {"requests": listed, "more": more}


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
        "engine_s": request.cost.engine_s,
        "age_s": now - request.arrived_at,
    }


def _tokens_per_s(request: Request, now: float) -> float | None:
    """Return how fast its answer has come since its first token, pauses and crashes included; None
    before its second token."""
    if request.cost.first_token_at is None or request.tokens_sent < 2:
        return None
    took_s = now - request.cost.first_token_at
    return (request.tokens_sent - 1) / took_s if took_s > 0 else None


def _state(request: Request) -> str:
    match request.stage:
        case Stage.QUEUED:
            return "waiting"
        case Stage.PAUSING | Stage.PAUSED:
            return request.stage.name.lower()
        case _:
            return "reading" if request.run.gains_since is None else "answering"


def _reason(model: Model, is_limited: bool) -> WaitReason:
    return WaitReason.LIMIT if is_limited else wait_reason(model)


def _read_share(request: Request) -> float | None:
    """How much of its prompt has been read, from 0 to 1; None unless it is being read now, for the
    first time."""
    if _state(request) != "reading" or request.acceptance is None or request.sent.tokens:
        return None
    return min(request.cost.read_tokens / request.usage().prompt_tokens, 1.0)


def _reading_s(request: Request, prefill: float | None, now: float) -> float | None:
    """Seconds until the first token, if the rest of the prompt is read at the same pace; None if
    nobody can tell."""
    if prefill is None or prefill < LEAST_READ or request.run.dispatched_at is None:
        return None
    return (now - request.run.dispatched_at) * (1.0 - prefill) / prefill
