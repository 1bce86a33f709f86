"""An answer that makes at most one call, because the request wants no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxsup.client import Channel, Delta, Logprobs, Result
from mlxsup.client.tool_calls import read_tool_calls

from .failure import Failure
from .shape import Shape


@dataclass(slots=True)
class Kept:
    """What one choice has up to its first call, and with it.

    Attributes:
        texts: of each channel, in pieces.
        logprobs: of these tokens.
        is_over: whether the call was made.
    """

    texts: dict[Channel, list[str]] = field(default_factory=dict)
    logprobs: list[Logprobs] = field(default_factory=list)
    is_over: bool = False

    def take(self, delta: Delta) -> Delta:
        """The piece, without what comes after the call; its tokens count all the same."""
        if self.is_over:
            return replace(delta, text="", logprobs=None)
        if delta.channel is Channel.TOOL_CALL:
            delta = replace(delta, text=self._cut(delta.text))
        self.texts.setdefault(delta.channel, []).append(delta.text)
        self.logprobs += delta.logprobs or []
        return delta

    def result(self, result: Result) -> Result:
        """The result, without what comes after the call."""
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
        """The lines up to the first call; one without a name is text that could not be read."""
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
        self._kept: dict[int, Kept] = {}

    def first(self, index: int) -> bytes | None:
        """See `Shape`, as for all others."""
        return self._shape.first(index)

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """A piece, as far as it is kept."""
        return self._shape.piece(index, self._of(index).take(delta))

    def last(self, index: int, result: Result) -> bytes:
        """The end of a choice."""
        return self._shape.last(index, self._of(index).result(result))

    def end(self, results: Sequence[Result]) -> bytes:
        """The end of the answer."""
        return self._shape.end(self._results(results))

    def broken(self, failure: Failure) -> bytes:
        """The answer breaks off."""
        return self._shape.broken(failure)

    def waits(self, text: str) -> bytes:
        """The request makes progress."""
        return self._shape.waits(text)

    def take(self, index: int, delta: Delta) -> None:
        """A piece of a whole answer, as far as it is kept."""
        self._shape.take(index, self._of(index).take(delta))

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The whole answer."""
        return self._shape.whole(self._results(results))

    def body(self, results: Sequence[Result]) -> bytes:
        """The whole answer as JSON."""
        return self._shape.body(self._results(results))

    def _of(self, index: int) -> Kept:
        return self._kept.setdefault(index, Kept())

    def _results(self, results: Sequence[Result]) -> list[Result]:
        return [self._of(index).result(result) for index, result in enumerate(results)]
