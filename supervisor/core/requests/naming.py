"""Finds the request that a person means: by its id or number, or as `last`."""

from __future__ import annotations

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import LAST_REQUEST

from .ledger import Ledger, Request, Stage

MOST_LISTED = 8
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
    shown = ", ".join(map(_shown, candidates[:MOST_LISTED])) or "none"
    more = len(candidates) - MOST_LISTED
    rest = f" and {more} more; see `mlxsup requests`" if more > 0 else ""
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"{sentence}; open: {shown}{rest}",
        detail={
            "parameter": "request",
            "known": [request.id for request in candidates[:MOST_LISTED]],
            "numbers": [number_of(request) for request in candidates[:MOST_LISTED]],
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
