"""The form of the answers to one HTTP request. Pure: deltas in, JSON out."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from mlxsup.client import Delta, Result

from .failure import Failure
from .sse import comment

encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""A value as JSON."""


class WholeShape(ABC):
    """One response that is sent as a whole; each API has its own.

    Attributes:
        IS_LONG: true if others get their turn of the event loop between two of its pieces.
    """

    IS_LONG: ClassVar[bool] = False

    def take(self, index: int, delta: Delta) -> None:  # noqa: B027 (most results say it all)
        """Take a piece of an answer, whose result has the texts."""

    @abstractmethod
    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON."""


class Shape(WholeShape):
    """One response that may be streamed, too. Bytes are whole events.

    Attributes:
        STREAM_TYPE: the type of content of a streamed one.
    """

    STREAM_TYPE: ClassVar[str] = "text/event-stream; charset=utf-8"

    def first(self, index: int) -> bytes:
        """Return what comes before the first piece of a choice."""
        return b""

    @abstractmethod
    def piece(self, index: int, delta: Delta) -> bytes | None:
        """Return a piece; None if there is nothing to show yet."""

    @abstractmethod
    def last(self, index: int, result: Result) -> bytes:
        """Return the end of a choice."""

    def end(self, results: Sequence[Result]) -> bytes:
        """Return what comes after all choices: the answer is complete."""
        return b""

    @abstractmethod
    def broken(self, failure: Failure) -> bytes:
        """Return the end of an answer that breaks off."""

    def waits(self, text: str) -> bytes:
        """Return a sign that the request makes progress: the connection is alive."""
        return comment(text)


def warned(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return `warnings`, each once, as a field of an answer; nothing if there are none."""
    warnings = dict.fromkeys(warning for result in results for warning in result.warnings)
    return {"warnings": list(warnings)} if warnings else {}


def arguments_of(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a tool call as a map; None if it has no name, or they are none."""
    try:
        value = json.loads(call["function"]["arguments"])
        # What Python reads and JSON has not: NaN, infinities, halves of characters.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if call["function"]["name"] and isinstance(value, dict) else None
