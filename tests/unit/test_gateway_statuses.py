"""The HTTP status of every error code, in OpenAI's API and in Anthropic's."""

from __future__ import annotations

import pytest

from mlxsup.client import ErrorCode, RequestError
from mlxsup.gateway.anthropic.errors import kind_of, status_of
from mlxsup.gateway.openai.errors import failure_of

STATUSES = {
    "invalid_request": (400, 400, "invalid_request_error"),
    "unknown_model": (404, 404, "not_found_error"),
    "context_length_exceeded": (400, 400, "invalid_request_error"),
    "overloaded": (429, 529, "overloaded_error"),
    "queue_timeout": (503, 529, "overloaded_error"),
    "deadline_exceeded": (504, 504, "timeout_error"),
    "insufficient_memory": (503, 503, "api_error"),
    "load_failed": (503, 503, "api_error"),
    "model_failed": (503, 503, "api_error"),
    "unloaded": (503, 503, "api_error"),
    "worker_crashed": (503, 503, "api_error"),
    "quarantined": (503, 503, "api_error"),
    "slow_consumer": (503, 503, "api_error"),
    "duplicate_id": (400, 400, "invalid_request_error"),
    "superseded": (409, 409, "invalid_request_error"),
    "unsupported_version": (400, 400, "invalid_request_error"),
    "shutting_down": (503, 503, "api_error"),
    "internal": (500, 500, "api_error"),
}


@pytest.mark.parametrize("code", ErrorCode)
def test_status(code: ErrorCode) -> None:
    failure = failure_of(RequestError(code, ""))
    assert (failure.status, status_of(failure), kind_of(failure)) == STATUSES[code.value]
