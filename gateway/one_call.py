"""Answers that end with their first tool call, for clients that take one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Self

from mlxsup.client import Channel, Delta, Logprobs, Result
from mlxsup.client.async_streams import AsyncStream
from mlxsup.client.tool_calls import read_tool_calls


class UpToOneCall:
    """An answer under way, without what comes after its first call; all of its tokens count."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._texts: dict[Channel, list[str]] = {channel: [] for channel in Channel}
        self._logprobs: list[Logprobs] = []
        self._is_over = False  # the call was made

    @property
    def request_id(self) -> str:
        """Return the id of its request."""
        return self._stream.request_id

    def cancel(self) -> None:
        """End it."""
        self._stream.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return self._take(await anext(self._stream))

    async def forward(self, take: Callable[[Delta], None]) -> None:
        """Read to the end; see `AsyncStream`."""
        await self._stream.forward(lambda delta: take(self._take(delta)))

    @cached_property
    def result(self) -> Result:
        """Return the result, once the answer has ended."""
        result = self._stream.result
        if not self._is_over:
            return result
        texts = {channel: "".join(pieces) for channel, pieces in self._texts.items()}
        calls, _ = read_tool_calls(texts[Channel.TOOL_CALL])
        return replace(
            result,
            text=texts[Channel.CONTENT],
            reasoning=texts[Channel.REASONING],
            tool_calls=calls,
            logprobs=None if result.logprobs is None else self._logprobs,
        )

    def _take(self, delta: Delta) -> Delta:
        if self._is_over:
            return replace(delta, text="", logprobs=None)
        if delta.channel is Channel.TOOL_CALL:
            delta = replace(delta, text=self._cut(delta.text))
        self._texts[delta.channel].append(delta.text)
        self._logprobs += delta.logprobs or []
        return delta

    def _cut(self, text: str) -> str:
        """Return the lines up to the first call; one without a name is text, and unreadable."""
        lines = text.split("\n")
        for count, line in enumerate(lines, 1):
            calls, _ = read_tool_calls(line)
            if any(call["function"]["name"] for call in calls):
                self._is_over = True
                return "\n".join([*lines[:count], ""])
        return text
