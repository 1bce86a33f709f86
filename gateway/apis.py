"""Which API a request came through, and errors in the form of that one."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from . import ollama
from .anthropic import errors as anthropic_errors
from .failure import Failure
from .ollama import errors as ollama_errors
from .openai import errors as openai_errors

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"
"""What Anthropic's clients call the same."""
WARNINGS = "x-mlxsup-warnings"
"""Of a whole answer; a streamed one has its warnings at its end."""
CHANGED = "x-mlxsup-changed"
"""Names what was changed in the messages, so that the model's template takes them."""
IGNORED = "x-mlxsup-ignored"
"""Names what a request has and the answer does not heed."""

ID_KEY = "mlxsup.request_id"
"""Where the scope of a request has the id that its response gets unless it names another one."""

ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_HEADER = b"anthropic-version"

LM_STUDIO_PATHS = ("/api/v0/", "/api/v1/")
"""LM Studio's errors are OpenAI's."""


def is_anthropic(scope: MutableMapping[str, Any]) -> bool:
    """Whether who asks expects answers in Anthropic's form."""
    if scope["path"].startswith(ANTHROPIC_PATHS):
        return True
    return any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])


def is_ollama(scope: MutableMapping[str, Any]) -> bool:
    """True if the client expects answers in Ollama's form."""
    path = scope["path"]
    return path.startswith(ollama.PATHS) and not path.startswith(LM_STUDIO_PATHS)


def error_response(scope: MutableMapping[str, Any], failure: Failure) -> JSONResponse:
    """The response that is this error."""
    headers = openai_errors.headers_of(failure)
    if is_ollama(scope):
        return JSONResponse(ollama_errors.body_of(failure), failure.status, headers)
    if not is_anthropic(scope):
        return JSONResponse(openai_errors.body_of(failure), failure.status, headers)
    name = failure.headers.get(REQUEST_ID) or scope[ID_KEY]
    body = anthropic_errors.body_of(failure, name)
    return JSONResponse(body, anthropic_errors.status_of(failure), headers)
