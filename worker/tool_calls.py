"""Tool calls out of a model's text, in the one form in which clients see them. No MLX here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

ToolCallParser = Callable[[str, Any], Any]
"""Takes the text of a call and the request's tools; returns a call, or a list of them, each with
`name` and `arguments`. mlx-lm has one for each family of models."""


class ToolCallReader:
    """Reads the calls of one answer.

    Args:
        tools: of the request; they tell some formats which argument is a number.
        seed: of the request: a call's id follows from it, so that it is the same when the answer
            is made again.
    """

    def __init__(self, tools: list[dict[str, Any]] | None, seed: int) -> None:
        self._tools = tools
        self._seed = seed
        self._count = 0

    @property
    def count(self) -> int:
        """Calls read so far."""
        return self._count

    def read(self, text: str, parse: ToolCallParser | None) -> list[str] | None:
        """Each call as a line of JSON in OpenAI's form; None if the text is no call."""
        if parse is None:
            return None
        try:
            parsed = parse(text, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            lines = [self._line(call, self._count + place) for place, call in enumerate(calls)]
        except Exception:  # noqa: BLE001
            # A parser meets whatever a model has written: it is text then, never an error.
            return None
        self._count += len(lines)
        return lines or None

    def _line(self, call: dict[str, Any], number: int) -> str:
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str) or not name:
            raise ValueError("a call has a name")
        if not isinstance(arguments, str):
            if not isinstance(arguments, dict):
                raise ValueError("a call's arguments are a map")
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        digest = hashlib.blake2b(f"{self._seed}:{number}".encode(), digest_size=12).hexdigest()
        whole = {
            "id": f"call_{digest}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        line = json.dumps(whole, ensure_ascii=False) + "\n"
        line.encode()  # lone surrogates do not travel
        return line
