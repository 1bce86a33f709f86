"""Errors in Ollama's form: a text. Statuses are those of OpenAI's."""

from __future__ import annotations

from typing import Any

from ..failure import Failure
from ..openai.errors import renamed

NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "penalty_window": "repeat_last_n",
    "response_format": "format",
}
"""Parameters of ours that Ollama has under another name."""


def body_of(failure: Failure) -> dict[str, Any]:
    """Return the JSON of an error."""
    message = failure.message
    for ours, theirs in NAMES.items():
        message = renamed(message, ours, theirs)
    return {"error": message}
