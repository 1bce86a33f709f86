"""Turns the arguments of `generate` into frames, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxsup.protocol.client_messages import (
    AddModel,
    Configure,
    Generate,
    Load,
    Ping,
    Prioritize,
    Reload,
    RemoveModel,
    SettingsQuery,
    StatusQuery,
    Stop,
    Unload,
)
from mlxsup.protocol.codec import body_of, encode, encode_body
from mlxsup.protocol.errors import RemoteError, invalid
from mlxsup.protocol.ids import MAX_ID_CHARACTERS, ModelName, RequestId
from mlxsup.protocol.log_level import ChangeLogLevel
from mlxsup.protocol.message import Message
from mlxsup.protocol.parameters import MOST_TOKENS
from mlxsup.protocol.request_messages import (
    CancelRequest,
    PauseRequest,
    RequestsQuery,
    ResumeRequest,
)
from mlxsup.protocol.states import Priority

from .errors import ConnectionLost, RequestError

MAX_CLIENT_CHARACTERS = 1024
"""A header string may have 4096 bytes, and a character up to four of them."""

Command = (
    Ping
    | StatusQuery
    | Prioritize
    | Load
    | Unload
    | PauseRequest
    | ResumeRequest
    | RequestsQuery
    | CancelRequest
    | ChangeLogLevel
    | Stop
    | Reload
    | AddModel
    | RemoveModel
    | Configure
    | SettingsQuery
)
"""What is answered with one reply, whatever comes before it."""

QUERIES = (Ping, StatusQuery, RequestsQuery)
"""A daemon answers these at once, whatever it does."""

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
    """The frames of a request.

    Raises:
        RequestError: `invalid_request`, naming the parameter and what it takes.
    """
    try:
        if client is not None:
            _check_name("client", client, MAX_CLIENT_CHARACTERS)
        message = Generate(
            id=id,
            model=check_model(model),
            client=client,
            priority=None if priority is None else _check_priority(priority),
            timeout_s=_check_limit("timeout_s", timeout_s),
            queue_timeout_s=_check_limit("queue_timeout_s", queue_timeout_s),
            first_token_timeout_s=_check_limit("first_token_timeout_s", first_token_timeout_s),
            notices=notices,
            resume=_check_flag("resume", resume),
            keep_alive=_check_keep_alive(keep_alive),
            body=encode_body(body_of(body)),
        )
        return encode(message)
    except RemoteError as error:
        raise RequestError.of(error) from None


def encode_command(message: Message) -> list[bytes]:
    """The frames of a command."""
    return encode(message)


def check_model(model: str) -> ModelName:
    """Returns the name if it is valid for a model.

    Raises:
        RequestError: `invalid_request`.
    """
    try:
        return ModelName(_check_name("model", model, MAX_ID_CHARACTERS))
    except RemoteError as error:
        raise RequestError.of(error) from None


def check_request(request: str) -> RequestId:
    """Returns the name if it is valid for a request: an id, or a number like `#12`.

    Raises:
        RequestError: `invalid_request`.
    """
    try:
        return RequestId(_check_name("request", request, MAX_ID_CHARACTERS))
    except RemoteError as error:
        raise RequestError.of(error) from None


def check_client(client: str | None) -> str | None:
    """Returns the name if it is valid for a client; None stays None.

    Raises:
        RequestError: `invalid_request`.
    """
    try:
        return None if client is None else _check_name("client", client, MAX_CLIENT_CHARACTERS)
    except RemoteError as error:
        raise RequestError.of(error) from None


def check_level(level: str) -> str:
    """Returns the level if it is text that a header may have; the daemon knows which there are.

    Raises:
        RequestError: `invalid_request`.
    """
    try:
        return _check_name("level", level, MAX_ID_CHARACTERS)
    except RemoteError as error:
        raise RequestError.of(error) from None


def prioritize(id: RequestId, request: str, priority: str) -> Prioritize:
    """The command that gives a request another class.

    Raises:
        RequestError: `invalid_request`, naming the parameter and what it takes.
    """
    name = check_request(request)
    try:
        return Prioritize(id=id, request=name, priority=_check_priority(priority))
    except RemoteError as error:
        raise RequestError.of(error) from None


def check_limit(name: str, value: float | None) -> float | None:
    """Returns seconds if they are finite and not negative.

    Raises:
        RequestError: `invalid_request`.
    """
    try:
        return _check_limit(name, value)
    except RemoteError as error:
        raise RequestError.of(error) from None


def add_model(id: RequestId, model: str, *, name: str | None, revision: str | None) -> AddModel:
    """The command that adds a model to those that the daemon serves.

    Raises:
        RequestError: `invalid_request`, naming the parameter and what it takes.
    """
    try:
        return AddModel(
            id=id,
            model=_check_name("model", model, MAX_CLIENT_CHARACTERS),
            name=None if name is None else _check_name("name", name, MAX_ID_CHARACTERS),
            revision=None
            if revision is None
            else _check_name("revision", revision, MAX_CLIENT_CHARACTERS),
        )
    except RemoteError as error:
        raise RequestError.of(error) from None


def configure(id: RequestId, changes: Mapping[str, str | None]) -> Configure:
    """The command that changes keys of the configuration file.

    Raises:
        RequestError: `invalid_request`, naming the parameter and what it takes.
    """
    try:
        for key, value in changes.items():
            _check_name("the key", key, MAX_CLIENT_CHARACTERS)
            if value is not None and not isinstance(value, str):
                raise invalid("changes", "texts by key", value, subject=f"the value of {key}")
    except RemoteError as error:
        raise RequestError.of(error) from None
    return Configure(id=id, changes=dict(changes))


def load(
    id: RequestId,
    model: str,
    *,
    dry_run: bool,
    keep_alive: float | None,
    context_length: int | None,
) -> Load:
    """The command that loads a model.

    Raises:
        RequestError: `invalid_request`, naming the parameter and what it takes.
    """
    name = check_model(model)
    try:
        return Load(
            id=id,
            model=name,
            dry_run=dry_run,
            keep_alive=_check_keep_alive(keep_alive),
            context_length=_check_count("context_length", context_length),
        )
    except RemoteError as error:
        raise RequestError.of(error) from None


def _check_name(parameter: str, value: object, max_characters: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= max_characters:
        shown = (f"text of {len(value)}" if value else "empty") if isinstance(value, str) else ""
        raise invalid(parameter, f"text of 1 to {max_characters} characters", value, shown=shown)
    try:
        value.encode()
    except UnicodeEncodeError:
        expected = "text that can be encoded as UTF-8"
        raise invalid(parameter, expected, shown="lone surrogates") from None
    return value


def _check_priority(value: object) -> Priority:
    known = {priority.value: priority for priority in Priority}
    if not isinstance(value, str) or value not in known:
        shown = repr(value[:60]) if isinstance(value, str) else ""
        raise invalid("priority", f"one of {', '.join(known)}", value, shown=shown)
    return known[value]


def _check_flag(parameter: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(parameter, "true or false", value)
    return value


def _check_limit(parameter: str, value: float | None) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_LIMIT_S:
        raise invalid(parameter, "a number of seconds, 0 or more", value)
    return float(value)


def _check_keep_alive(value: float | None) -> float | None:
    """Seconds, or -1 for ever."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (is_number and value == FOR_EVER):
        return value
    if not is_number or not 0 <= value <= MAX_LIMIT_S:
        raise invalid("keep_alive", "a number of seconds, or -1 to keep the model loaded", value)
    return float(value)


def _check_count(parameter: str, value: int | None) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_count and 0 <= value <= MOST_TOKENS):
        raise invalid(parameter, f"an integer from 0 to {MOST_TOKENS}", value)
    return value
