"""The arguments of requests and commands, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxsup.protocol.client_messages import Generate, Ping, RequestsQuery, StatusQuery
from mlxsup.protocol.codec import body_of, encode, encode_body
from mlxsup.protocol.errors import RemoteError, invalid
from mlxsup.protocol.ids import MAX_ID_CHARACTERS, ModelName, RequestId
from mlxsup.protocol.message import Command
from mlxsup.protocol.parameters import MOST_TOKENS
from mlxsup.protocol.states import Priority

from .errors import ConnectionLost, RequestError

MAX_CLIENT_CHARACTERS = 1024
"""A header string may have 4096 bytes, and a character up to four of them."""

QUERIES = (Ping, StatusQuery, RequestsQuery)
"""A daemon answers these at once, even while it is busy."""

ANSWER_LIMIT_S = 30.0
"""So long a daemon that gives signs of life may owe the answer to a query. The loop that sends
those is not the one thing that may be broken."""

MAX_LIMIT_S = 1e9
"""Longer than any daemon runs."""

FOR_EVER = -1.0
"""The `keep_alive` of a model that is not to be unloaded as idle."""


def answer_limit_s(message: Command) -> float | None:
    """Return how long to wait for the reply; None for a command that may take any time."""
    return ANSWER_LIMIT_S if isinstance(message, QUERIES) else None


def unanswered(message: Command, endpoint: str) -> ConnectionLost:
    """Return the error of a query that was not answered in time."""
    what = f"`{message.TYPE}` for {ANSWER_LIMIT_S:.0f} s"
    hint = "`mlxsup logs` may show the cause; `mlxsup stop` ends it"
    return ConnectionLost(f"the daemon at {endpoint} has not answered {what}", endpoint, hint)


def encode_generate(
    id: RequestId,
    model: str,
    body: dict[str, Any],
    *,
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
    first_token_timeout_s: float | None = None,
    priority: str | None = None,
    client: str | None = None,
    resume: bool = True,
    keep_alive: float | None = None,
    notices: bool = False,
) -> list[bytes]:
    """Return the frames of a request.

    Raises:
        RequestError: `invalid_request`, naming the parameter and what it takes.
    """
    name, account = check_model(model), check_client(client)
    message = Generate(
        id=id,
        model=name,
        client=account,
        priority=None if priority is None else check_priority(priority),
        timeout_s=check_limit("timeout_s", timeout_s),
        queue_timeout_s=check_limit("queue_timeout_s", queue_timeout_s),
        first_token_timeout_s=check_limit("first_token_timeout_s", first_token_timeout_s),
        notices=notices,
        resume=_check_flag("resume", resume),
        keep_alive=check_keep_alive(keep_alive),
        body=_encoded(body),
    )
    return encode(message)


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return encode_body(body_of(body))
    except RemoteError as error:
        raise RequestError.of(error) from None


# ---------------------------------------------------------------- single arguments
# Each function returns its value as a message takes it, or raises RequestError: `invalid_request`.


def check_name(parameter: str, value: object, max_characters: int = MAX_CLIENT_CHARACTERS) -> str:
    """Return the value of a parameter that takes a short text."""
    if not isinstance(value, str) or not 1 <= len(value) <= max_characters:
        shown = (f"text of {len(value)}" if value else "empty") if isinstance(value, str) else ""
        raise _wrong(parameter, f"text of 1 to {max_characters} characters", value, shown=shown)
    try:
        value.encode()
    except UnicodeEncodeError:
        expected = "text that can be encoded as UTF-8"
        raise _wrong(parameter, expected, shown="lone surrogates") from None
    return value


def check_model(model: object, parameter: str = "model") -> ModelName:
    """Return the name of a model."""
    return ModelName(check_name(parameter, model, MAX_ID_CHARACTERS))


def check_request(request: object) -> RequestId:
    """Return the name of a request: an id, or a number like `#12`."""
    return RequestId(check_name("request", request, MAX_ID_CHARACTERS))


def check_client(client: object) -> str | None:
    """Return the name of a client; None stays None."""
    return None if client is None else check_name("client", client)


def check_priority(value: object) -> Priority:
    """Return the class of that name."""
    known = {priority.value: priority for priority in Priority}
    if not isinstance(value, str) or value not in known:
        shown = repr(value[:60]) if isinstance(value, str) else ""
        raise _wrong("priority", f"one of {', '.join(known)}", value, shown=shown)
    return known[value]


def check_limit(parameter: str, value: float | None) -> float | None:
    """Return seconds, which are finite and not negative; None stays None."""
    if value is None:
        return None
    if not _is_seconds(value):
        raise _wrong(parameter, "a number of seconds, 0 or more", value)
    return float(value)


def check_keep_alive(value: float | None) -> float | None:
    """Return seconds, or -1 for ever; None stays None."""
    is_for_ever = type(value) in (int, float) and value == FOR_EVER
    if value is None or is_for_ever:
        return value
    if not _is_seconds(value):
        raise _wrong("keep_alive", "a number of seconds, or -1 to keep the model loaded", value)
    return float(value)


def check_count(parameter: str, value: int | None) -> int | None:
    """Return a number of tokens; None stays None."""
    if value is not None and not (type(value) is int and 0 <= value <= MOST_TOKENS):
        raise _wrong(parameter, f"an integer from 0 to {MOST_TOKENS}", value)
    return value


def check_changes(changes: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return changes of a configuration: by the name of the key, its value as text, or None."""
    if not isinstance(changes, Mapping):
        raise _wrong("changes", "a map of texts by key", changes)
    for key, value in changes.items():
        check_name("the key", key)
        if value is not None and not isinstance(value, str):
            raise _wrong("changes", "texts by key", value, subject=f"the value of {key}")
    return dict(changes)


def _check_flag(parameter: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(parameter, "true or false", value)
    return value


def _is_seconds(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= MAX_LIMIT_S  # type: ignore[operator]


def _wrong(
    parameter: str, expected: str, got: object = None, *, shown: str = "", subject: str = ""
) -> RequestError:
    return RequestError.of(invalid(parameter, expected, got, shown=shown, subject=subject))
