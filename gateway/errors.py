"""Errors, in the form of the API that a request came through.

OpenAI's clients repeat a request after 408, 409, 429 and 500 upwards, twice by default, unless
`x-should-retry` says otherwise. So the flag decides whether a request that kills its model, or a
model that cannot be loaded, is hammered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from mlxsup.client import ConnectionLost, ErrorCode, RequestError
from mlxsup.protocol.suggestions import did_you_mean

from .failure import Failure
from .headers import ID_KEY, REQUEST_ID, is_anthropic, is_ollama

MOST_RETRY_AFTER_S = 120
"""OpenAI's clients give up if they are asked to wait for longer than this."""


class Row(NamedTuple):
    """The response for an error code.

    Attributes:
        status: of the response.
        is_retryable: the header `x-should-retry`; None for no header.
        retry_after_s: the header `Retry-After` if the error does not say; None for no header.
    """

    status: int
    is_retryable: bool | None = None
    retry_after_s: float | None = None


ROWS: dict[ErrorCode, Row] = {
    ErrorCode.INVALID_REQUEST: Row(400),
    ErrorCode.UNKNOWN_MODEL: Row(404),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Row(400),
    ErrorCode.OVERLOADED: Row(429, True, 1.0),
    ErrorCode.QUEUE_TIMEOUT: Row(503, True, 1.0),
    ErrorCode.DEADLINE_EXCEEDED: Row(504, False),
    ErrorCode.INSUFFICIENT_MEMORY: Row(503, False),
    ErrorCode.LOAD_FAILED: Row(503, False),
    ErrorCode.MODEL_FAILED: Row(503, False),
    ErrorCode.UNLOADED: Row(503, True, 1.0),
    ErrorCode.WORKER_CRASHED: Row(503, True, 1.0),
    ErrorCode.QUARANTINED: Row(503, False),
    ErrorCode.SLOW_CONSUMER: Row(503, False),
    ErrorCode.DUPLICATE_ID: Row(400),
    ErrorCode.SUPERSEDED: Row(409, False),
    ErrorCode.UNSUPPORTED_VERSION: Row(400),
    ErrorCode.SHUTTING_DOWN: Row(503, True, 2.0),
    ErrorCode.INTERNAL: Row(500, False),
}

NAMES = {ErrorCode.UNKNOWN_MODEL: "model_not_found"}
"""Codes that OpenAI's clients know under another name."""

NO_NAMES: Mapping[str, str] = {}

SHOWN = ("known", "close")
"""What the error of an unknown model has besides: the configured names, and those like it."""

LOST = Row(503, True, 2.0)
"""The daemon is gone; another one may be about to start."""

CANCELLED = Row(410, False)
"""Ended by hand; clients must not bring it back."""

OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}

OVERLOADED = 529
"""What Anthropic's servers answer if they are too busy; its clients try again."""

TOO_BUSY = frozenset({ErrorCode.OVERLOADED.value, ErrorCode.QUEUE_TIMEOUT.value})

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

HOW_TO_ADD = "; `mlxsup add MODEL` serves another one, while the daemon runs"


def failure_of(
    error: RequestError | ConnectionLost, names: Mapping[str, str] = NO_NAMES
) -> Failure:
    """Return what the client of the gateway gets for an error of the daemon.

    Args:
        error: of the daemon.
        names: see `Ask`.
    """
    if isinstance(error, ConnectionLost):
        return _failure(LOST, str(error), "daemon_lost")
    param, message = "", error.message
    if error.code is ErrorCode.UNKNOWN_MODEL:
        param = "model"
        if "close" in error.detail:
            message += advice_of(error.detail["close"]) or HOW_TO_ADD
    elif isinstance(given := error.detail.get("parameter"), str):
        param = names.get(given, given)
        # Once: a text of the client's may follow.
        message = re.sub(rf"\b{re.escape(given)}\b", lambda _: param, message, count=1)
    code = NAMES.get(error.code, error.code.value)
    after_s = error.detail.get("retry_after_s")
    failure = _failure(ROWS[error.code], message, code, param, after_s)
    if error.code is ErrorCode.UNKNOWN_MODEL:
        failure.detail = {name: error.detail[name] for name in SHOWN if name in error.detail}
    return failure


def advice_of(close: Any) -> str:
    """Return the end of a message about a name that nothing has.

    Args:
        close: the names like it; empty or None: there is none.
    """
    return f"; {did_you_mean(list(map(str, close)))}" if close else ""


def cancelled() -> Failure:
    """Return the failure of an answer that was ended by hand, not to be asked for again."""
    return _failure(CANCELLED, "this request was cancelled with `mlxsup cancel`", "cancelled")


def interrupted() -> Failure:
    """Return the failure of an answer that the gateway has ended, because it ends itself."""
    return _shutting_down("the gateway is shutting down, which ends this answer")


def draining() -> Failure:
    """Return the failure of a gateway whose daemon ends: others must be asked from now on."""
    return _shutting_down("the daemon is shutting down")


def _shutting_down(message: str) -> Failure:
    return _failure(ROWS[ErrorCode.SHUTTING_DOWN], message, ErrorCode.SHUTTING_DOWN.value)


def error_response(scope: MutableMapping[str, Any], failure: Failure) -> JSONResponse:
    """Return the response that is this error."""
    headers = _headers(failure)
    if is_ollama(scope):
        return JSONResponse(ollama_body(failure), failure.status, headers)
    if not is_anthropic(scope):
        return JSONResponse(openai_body(failure), failure.status, headers)
    request_id = failure.headers.get(REQUEST_ID) or scope[ID_KEY]
    body = anthropic_body(failure, request_id)
    return JSONResponse(body, anthropic_status(failure), headers)


def openai_body(failure: Failure) -> dict[str, Any]:
    """Return the JSON of an error in OpenAI's API, and in LM Studio's."""
    other = "invalid_request_error" if failure.status < 500 else "server_error"
    return {
        "error": {
            "message": failure.message,
            "type": OPENAI_TYPES.get(failure.status, other),
            "param": failure.param or None,
            "code": failure.code or None,
            **failure.detail,
        }
    }


def anthropic_status(failure: Failure) -> int:
    """Return the status of a response that is this error."""
    return OVERLOADED if failure.code in TOO_BUSY else failure.status


def anthropic_type(failure: Failure) -> str:
    """`error.type`."""
    status = anthropic_status(failure)
    return ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def anthropic_body(failure: Failure, request_id: str) -> dict[str, Any]:
    """Return the JSON of an error in Anthropic's API."""
    return {
        "type": "error",
        "error": {"type": anthropic_type(failure), "message": failure.message},
        "request_id": request_id,
    }


def ollama_body(failure: Failure) -> dict[str, Any]:
    """Return the JSON of an error in Ollama's API."""
    return {"error": failure.message}


def _headers(failure: Failure) -> dict[str, str]:
    """Return the headers of a response that is an error."""
    headers = dict(failure.headers)
    if failure.is_retryable is not None:
        headers["x-should-retry"] = str(failure.is_retryable).lower()
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(_retry_after(failure.retry_after_s))
    return headers


def _retry_after(seconds: float) -> int:
    """Return whole seconds that a client still waits for."""
    return max(1, min(MOST_RETRY_AFTER_S, math.ceil(seconds)))


def _failure(row: Row, message: str, code: str, param: str = "", after_s: Any = None) -> Failure:
    is_known = isinstance(after_s, int | float) and row.retry_after_s is not None
    return Failure(
        row.status,
        message,
        code=code,
        param=param,
        is_retryable=row.is_retryable,
        retry_after_s=after_s if is_known else row.retry_after_s,
    )
