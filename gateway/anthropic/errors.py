"""What errors are in Anthropic's API. Statuses are those of OpenAI's, but for two."""

from __future__ import annotations

from typing import Any

from mlxsup.client import ErrorCode

from ..failure import Failure
from ..openai.errors import renamed

OVERLOADED = 529
"""What Anthropic's servers answer if they are too busy; its clients try again."""

TOO_BUSY = frozenset({ErrorCode.OVERLOADED.value, ErrorCode.QUEUE_TIMEOUT.value})

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def status_of(failure: Failure) -> int:
    """The status of a response that is this error."""
    return OVERLOADED if failure.code in TOO_BUSY else failure.status


def kind_of(failure: Failure) -> str:
    """`error.type`."""
    status = status_of(failure)
    return KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")


def body_of(failure: Failure, request_id: str) -> dict[str, Any]:
    """The JSON of an error."""
    message = renamed(failure.message, "stop", "stop_sequences")
    return {
        "type": "error",
        "error": {"type": kind_of(failure), "message": message},
        "request_id": request_id,
    }
