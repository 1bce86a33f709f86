"""What each error of the daemon is in OpenAI's API: status, type, and whether to try again.

OpenAI's clients repeat a request after 408, 409, 429 and 500 upwards, twice by default, unless
`x-should-retry` says otherwise. So the flag decides whether a request that kills its model, or a
model that cannot be loaded, is hammered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlxsup.client import ConnectionLost, ErrorCode, RequestError

from ..failure import Failure

MOST_RETRY_AFTER_S = 120
"""OpenAI's clients give up if they are asked to wait for longer than this."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        status: of the response.
        kind: `error.type`.
        is_retryable: the header `x-should-retry`; None for no header.
        retry_after_s: the header `Retry-After` if the error does not say; None for no header.
    """

    status: int
    kind: str
    is_retryable: bool | None = None
    retry_after_s: float | None = None


BAD = "invalid_request_error"
SERVER = "server_error"

ROWS: dict[ErrorCode, Row] = {
    ErrorCode.INVALID_REQUEST: Row(400, BAD),
    ErrorCode.UNKNOWN_MODEL: Row(404, BAD),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Row(400, BAD),
    ErrorCode.OVERLOADED: Row(429, "rate_limit_error", True, 1.0),
    ErrorCode.QUEUE_TIMEOUT: Row(503, SERVER, True, 1.0),
    ErrorCode.DEADLINE_EXCEEDED: Row(504, SERVER, False),
    ErrorCode.INSUFFICIENT_MEMORY: Row(503, SERVER, False),
    ErrorCode.LOAD_FAILED: Row(503, SERVER, False),
    ErrorCode.MODEL_FAILED: Row(503, SERVER, False),
    ErrorCode.UNLOADED: Row(503, SERVER, True, 1.0),
    ErrorCode.WORKER_CRASHED: Row(503, SERVER, True, 1.0),
    ErrorCode.QUARANTINED: Row(503, SERVER, False),
    ErrorCode.SLOW_CONSUMER: Row(503, SERVER, False),
    ErrorCode.DUPLICATE_ID: Row(400, BAD),
    ErrorCode.SUPERSEDED: Row(409, BAD, False),
    ErrorCode.UNSUPPORTED_VERSION: Row(400, BAD),
    ErrorCode.SHUTTING_DOWN: Row(503, SERVER, True, 2.0),
    ErrorCode.INTERNAL: Row(500, SERVER, False),
}

NAMES = {ErrorCode.UNKNOWN_MODEL: "model_not_found"}
"""Codes that OpenAI's clients know under another name."""

PARAMS = {"prompt_tokens": "prompt"}
"""Parameters of ours that are another field there."""

SHOWN = ("known", "close")
"""What the error of an unknown model has besides: the configured names, and those like it."""

LOST = Row(503, SERVER, True, 2.0)
"""The daemon is gone; another one may be about to start."""

CANCELLED = Row(410, BAD, False)
"""Ended by hand; clients must not bring it back."""

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def failure_of(error: RequestError | ConnectionLost) -> Failure:
    """What the client of the gateway gets for an error of the daemon."""
    if isinstance(error, ConnectionLost):
        return _failure(LOST, error.message, code="daemon_lost", param="", after_s=None)
    param, message = "", error.message
    if error.code is ErrorCode.UNKNOWN_MODEL:
        param, message = "model", message + advice_of(error.detail.get("close"))
    elif isinstance(given := error.detail.get("parameter"), str):
        param = PARAMS.get(given, given)
        message = renamed(message, given, param)
    after_s = error.detail.get("retry_after_s")
    code = NAMES.get(error.code, error.code.value)
    failure = _failure(ROWS[error.code], message, code=code, param=param, after_s=after_s)
    if error.code is ErrorCode.UNKNOWN_MODEL:
        failure.detail = {name: error.detail[name] for name in SHOWN if name in error.detail}
    return failure


def renamed(message: str, ours: str, theirs: str) -> str:
    """A message about a field under the name that it was sent with; it begins with the name."""
    return theirs + message[len(ours) :] if message.startswith(f"{ours} ") else message


def advice_of(close: Any) -> str:
    """The end of a message about a name that nothing has.

    Args:
        close: the names like it; empty or None: there is none.
    """
    return f"; did you mean {' or '.join(map(str, close))}?" if close else ""


def cancelled() -> Failure:
    """An answer that somebody else has ended by hand, and that must not be asked for again."""
    message = "this request was cancelled with `mlxsup cancel`"
    return _failure(CANCELLED, message, code="cancelled", param="", after_s=None)


def interrupted() -> Failure:
    """An answer that the gateway has ended, because it is ending itself."""
    row = ROWS[ErrorCode.SHUTTING_DOWN]
    message = "the gateway is shutting down, which ends this answer"
    return _failure(row, message, code="shutting_down", param="", after_s=None)


def body_of(failure: Failure) -> dict[str, Any]:
    """The JSON of an error."""
    kind = TYPES.get(failure.status, BAD if failure.status < 500 else SERVER)
    return {
        "error": {
            "message": failure.message,
            "type": kind,
            "param": failure.param or None,
            "code": failure.code or None,
            **failure.detail,
        }
    }


def headers_of(failure: Failure) -> dict[str, str]:
    """The headers of a response that is an error."""
    headers = dict(failure.headers)
    if failure.is_retryable is not None:
        headers["x-should-retry"] = str(failure.is_retryable).lower()
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(retry_after(failure.retry_after_s))
    return headers


def retry_after(seconds: float) -> int:
    """Whole seconds that a client still waits for."""
    return max(1, min(MOST_RETRY_AFTER_S, math.ceil(seconds)))


def _failure(row: Row, message: str, *, code: str, param: str, after_s: Any) -> Failure:
    is_known = isinstance(after_s, int | float) and row.retry_after_s is not None
    return Failure(
        row.status,
        message,
        code=code,
        param=param,
        is_retryable=row.is_retryable,
        retry_after_s=after_s if is_known else row.retry_after_s,
    )
