"""Reads the tool calls of an answer from the lines in which they travel.

No matter what a model or a daemon has sent, the answer is not lost.
"""

from __future__ import annotations

import json
from typing import Any

NO_CALL = "a tool call could not be parsed; its text is in `arguments`, without a name"
NO_ARGUMENTS = "the arguments of a tool call are not a JSON object; they are returned unchanged"


def read_tool_calls(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the whole text of the channel `tool_call`.

    Args:
        text: one call per line, as JSON in OpenAI's form.

    Returns:
        The calls, each with `function.name` and `function.arguments` as text, and the warnings. A
        line that is not such a call becomes a call without a name, with the line as arguments.
    """
    calls: list[dict[str, Any]] = []
    warnings: dict[str, None] = {}
    for line in filter(None, text.split("\n")):
        call = _read(line)
        match call:
            case {"function": {"name": str(), "arguments": str(arguments)}}:
                if not isinstance(_read(arguments), dict):
                    warnings[NO_ARGUMENTS] = None
                calls.append(call)
            case _:
                warnings[NO_CALL] = None
                function = {"name": "", "arguments": line}
                calls.append({"id": "", "type": "function", "function": function})
    return calls, list(warnings)


def _read(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
