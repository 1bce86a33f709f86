"""Headers of responses, and the API whose form of answers a request expects."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from . import limits

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"
"""What Anthropic's clients call the same."""
CHANGED = "x-mlxsup-changed"
"""Names what was changed in the messages, so that the model's template takes them."""
IGNORED = "x-mlxsup-ignored"
"""Names what a request has and the answer does not heed."""

ID_KEY = "mlxsup.request_id"
"""Where the scope of a request has the id that its response gets unless it names another one."""

ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_HEADER = b"anthropic-version"

OLLAMA_PATHS = "/api/"

LM_STUDIO_PATHS = ("/api/v0/", "/api/v1/")
"""LM Studio's errors are OpenAI's."""


def header_text(text: str) -> str:
    """Return a text of clients and models as a header can hold it: in printable ASCII, and cut
    where it gets long, because clients and proxies refuse long heads."""
    characters = text.encode("ascii", "backslashreplace").decode()
    shown = "".join(one if one.isprintable() else "?" for one in characters)
    most = limits.MAX_HEADER_CHARACTERS
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def is_anthropic(scope: MutableMapping[str, Any]) -> bool:
    """True if who asks expects answers in Anthropic's form."""
    if scope["path"].startswith(ANTHROPIC_PATHS):
        return True
    return any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])


def is_ollama(scope: MutableMapping[str, Any]) -> bool:
    """True if the client expects answers in Ollama's form."""
    path = scope["path"]
    return path.startswith(OLLAMA_PATHS) and not path.startswith(LM_STUDIO_PATHS)
