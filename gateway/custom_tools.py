"""OpenAI's custom tools, which take one text: here each is a function with one parameter."""

from __future__ import annotations

import json
from typing import Any

_INPUT = "input"

CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "the whole input, as it is"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


def form_told(form: Any) -> str:
    """Return what the model is told of the form that a custom tool's input must have."""
    match form:
        case {"type": "grammar", "grammar": dict(inner)}:  # as chats have it
            return form_told({"type": "grammar", **inner})
        case {"type": "grammar", "definition": str(definition), **rest}:
            return f"\nThe input matches this {rest.get('syntax', '')} grammar:\n{definition}"
    return ""


def custom_arguments(text: str) -> str:
    """Return the arguments of the function for the text that a custom tool was called with."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str | None:
    """Return the text that a custom tool is called with; None if it is called otherwise."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    text = value.get(_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else None
