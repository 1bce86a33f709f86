"""The form of the answers to one HTTP request. Pure: deltas in, JSON out."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mlxsup.client import Channel, Delta, Logprobs, Result
from mlxsup.client.tool_calls import read_tool_calls

from .failure import Failure
from .sse import comment

encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""A value as JSON."""


class Shape(ABC):
    """One response; each API has its own. Bytes are whole events.

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

    @abstractmethod
    def take(self, index: int, delta: Delta) -> None:
        """Take a piece of an answer that is sent as a whole."""

    @abstractmethod
    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON."""


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


@dataclass(slots=True)
class _UpToCall:
    """The pieces of one choice up to its first call, and with it.

    Attributes:
        texts: of each channel, in pieces.
        logprobs: of these tokens.
        is_over: whether the call was made.
    """

    texts: dict[Channel, list[str]] = field(default_factory=dict)
    logprobs: list[Logprobs] = field(default_factory=list)
    is_over: bool = False

    def take(self, delta: Delta) -> Delta:
        """Return a piece without what comes after the call; its tokens count all the same."""
        if self.is_over:
            return replace(delta, text="", logprobs=None)
        if delta.channel is Channel.TOOL_CALL:
            delta = replace(delta, text=self._cut(delta.text))
        self.texts.setdefault(delta.channel, []).append(delta.text)
        self.logprobs += delta.logprobs or []
        return delta

    def result(self, result: Result) -> Result:
        """Return the result without what comes after the call."""
        if not self.is_over:
            return result
        calls, _ = read_tool_calls(self._text(Channel.TOOL_CALL))
        return replace(
            result,
            text=self._text(Channel.CONTENT),
            reasoning=self._text(Channel.REASONING),
            tool_calls=calls,
            logprobs=None if result.logprobs is None else self.logprobs,
        )

    def _cut(self, text: str) -> str:
        """Return the lines up to the first call; one without a name is text, and unreadable."""
        lines = text.split("\n")
        for count, line in enumerate(lines, 1):
            calls, _ = read_tool_calls(line)
            if any(call["function"]["name"] for call in calls):
                self.is_over = True
                return "\n".join([*lines[:count], ""])
        return text

    def _text(self, channel: Channel) -> str:
        return "".join(self.texts.get(channel, []))


class OneCall(Shape):
    """Another shape, which does not see what comes after the first call of a choice.

    Args:
        shape: the other one.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._kept: defaultdict[int, _UpToCall] = defaultdict(_UpToCall)

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """See `Shape`, as for the others."""
        return self._shape.piece(index, self._kept[index].take(delta))

    def last(self, index: int, result: Result) -> bytes:
        """Return the end of a choice."""
        return self._shape.last(index, self._kept[index].result(result))

    def end(self, results: Sequence[Result]) -> bytes:
        """Return the end of the answer."""
        return self._shape.end(self._results(results))

    def take(self, index: int, delta: Delta) -> None:
        """Take a piece of a whole answer."""
        self._shape.take(index, self._kept[index].take(delta))

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer."""
        return self._shape.body(self._results(results))

    def first(self, index: int) -> bytes:
        """Return what comes before the first piece."""
        return self._shape.first(index)

    def broken(self, failure: Failure) -> bytes:
        """Return the end of an answer that breaks off."""
        return self._shape.broken(failure)

    def waits(self, text: str) -> bytes:
        """Return a sign of progress."""
        return self._shape.waits(text)

    def _results(self, results: Sequence[Result]) -> list[Result]:
        return [self._kept[index].result(result) for index, result in enumerate(results)]
