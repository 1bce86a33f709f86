"""What answers look like in OpenAI's API: pieces of a stream, and whole ones."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from mlxsup.client import Channel, Delta, Logprobs, Result, TokenLogprob
from mlxsup.client.tool_calls import read_tool_calls
from mlxsup.protocol.version import VERSION

from ..failure import Failure
from ..shape import Shape, warned
from ..sse import event
from .errors import body_of
from .text_offsets import TextOffsets

FINGERPRINT = f"mlxsup-{VERSION}"

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Counted:
    """What the pieces of one choice say so far.

    Attributes:
        reasoning_tokens: generated as reasoning.
        calls: tool calls that were sent.
        offsets: finds where a completion's tokens begin.
        begins: where those begin that have log-probabilities.
    """

    reasoning_tokens: int = 0
    calls: int = 0
    offsets: TextOffsets = field(default_factory=TextOffsets)
    begins: list[int] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        """One more piece has come."""
        if delta.channel is Channel.REASONING:
            self.reasoning_tokens += len(delta.token_ids)

    def take_text(self, delta: Delta) -> list[int]:
        """The same of a completion; gives where each token begins that has log-probabilities."""
        self.take(delta)
        tokens = [one.chosen.text for one in delta.logprobs or ()]
        if delta.channel is Channel.CONTENT:
            return self.offsets.take(delta.text, tokens)
        return [self.offsets.shown] * len(tokens)  # no part of the text


@dataclass(slots=True)
class OpenAiShape(Shape):
    """The answers to one HTTP request.

    Attributes:
        id: of the answer.
        created: seconds since the epoch.
        model: as it was asked for.
        prompts: how many answers belong to one prompt: `n`.
        has_usage: whether a stream ends with its usage.
        counted: of each choice, by its number.
        begin: of the event of every chunk: made once, because there is a chunk for each token.
        close: its end; if a stream ends with its usage, all others have none yet.
    """

    id: str
    created: int
    model: str
    prompts: int = 1
    has_usage: bool = False
    counted: dict[int, Counted] = field(default_factory=dict)
    begin: str = field(init=False)
    close: str = field(init=False)

    KIND = ""
    CHUNK_KIND = ""

    def __post_init__(self) -> None:
        self.begin = "data: " + _encode(self._head(self.CHUNK_KIND)).removesuffix("}")
        self.close = ',"usage":null}\n\n' if self.has_usage else "}\n\n"

    def count(self, index: int) -> Counted:
        """What is known of one choice."""
        counted = self.counted.get(index)
        if counted is None:
            counted = self.counted[index] = Counted()
        return counted

    # ------------------------------------------------------------ pieces

    def end(self, results: Sequence[Result]) -> bytes:
        """The chunk with the usage, if it was asked for, and the mark."""
        usage = f'{self.begin},"choices":[],"usage":{_encode(self._usage(results))}}}\n\n'
        return (usage.encode() if self.has_usage else b"") + DONE

    def broken(self, failure: Failure) -> bytes:
        """An event that holds the error."""
        return event(_encode(body_of(failure)).encode())

    # ------------------------------------------------------------ whole

    def take(self, index: int, delta: Delta) -> None:
        """Counts it."""
        self.count(index).take(delta)

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head(self.KIND),
            "choices": [self._choice(index, result) for index, result in enumerate(results)],
            "usage": self._usage(results),
        }

    @abstractmethod
    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        """One choice of a whole answer."""

    # ------------------------------------------------------------ inside

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return f'{self.begin},"choices":[{_encode(choice)}]{self.close}'.encode()

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        """Each prompt counts once, however many answers it has."""
        firsts = results[:: self.prompts]
        prompt = sum(result.usage.prompt_tokens for result in firsts)
        completion = sum(result.usage.completion_tokens for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(result.usage.cached_tokens for result in firsts)
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(one.reasoning_tokens for one in self.counted.values())
            },
        }


class ChatShape(OpenAiShape):
    """`/v1/chat/completions`."""

    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"

    def first(self, index: int) -> bytes | None:
        """The role."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """New text, reasoning, or whole tool calls."""
        if delta.channel is Channel.CONTENT and delta.logprobs is None:
            # Nearly every piece, written without a map of its parts.
            if not (text := delta.text):
                return None
            return (
                f'{self.begin},"choices":[{{"index":{index},"delta":{{"content":'
                f'{encode_basestring(text)}}},"finish_reason":null}}]{self.close}'
            ).encode()
        counted = self.count(index)
        counted.take(delta)
        if not delta.text and delta.logprobs is None:
            return None
        if delta.channel is Channel.TOOL_CALL:
            calls, _ = read_tool_calls(delta.text)
            numbered = [{"index": counted.calls + nth, **call} for nth, call in enumerate(calls)]
            counted.calls += len(calls)
            content: dict[str, Any] = {"tool_calls": numbered} if numbered else {}
        elif delta.channel is Channel.REASONING:
            content = {"reasoning_content": delta.text}
        else:
            content = {"content": delta.text}
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs)
        return self._delta(index, content, logprobs)

    def last(self, index: int, result: Result) -> bytes:
        """Why it ended."""
        reason = result.finish_reason.value
        choice = {"index": index, "delta": {}, "finish_reason": reason}
        return self._chunk(choice | warned([result]))

    def _delta(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": content}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self._chunk({**choice, "finish_reason": None})

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": result.text if result.text or not result.tool_calls else None,
        }
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["tool_calls"] = result.tool_calls
        return {
            "index": index,
            "message": message,
            "logprobs": None if result.logprobs is None else chat_logprobs(result.logprobs),
            "finish_reason": result.finish_reason.value,
            **warned([result]),
        }


class CompletionShape(OpenAiShape):
    """`/v1/completions`: one text, whatever its parts are."""

    KIND = "text_completion"
    CHUNK_KIND = "text_completion"

    def first(self, index: int) -> bytes | None:
        """Nothing: there is no role."""
        return None

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """New text of the answer; reasoning and calls of a bare prompt are no part of it."""
        offsets = self.count(index).take_text(delta)
        text = delta.text if delta.channel is Channel.CONTENT else ""
        if delta.logprobs is None:
            return self._text(index, text) if text else None
        logprobs = completion_logprobs(delta.logprobs, offsets)
        return self._chunk(
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        )

    def take(self, index: int, delta: Delta) -> None:
        """Counts it, and where its tokens begin."""
        counted = self.count(index)
        counted.begins += counted.take_text(delta)

    def _text(self, index: int, text: str) -> bytes:
        return (
            f'{self.begin},"choices":[{{"index":{index},"text":{encode_basestring(text)},'
            f'"logprobs":null,"finish_reason":null}}]{self.close}'
        ).encode()

    def last(self, index: int, result: Result) -> bytes:
        """Why it ended."""
        reason = result.finish_reason.value
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
        return self._chunk(choice | warned([result]))

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        logprobs, begins = result.logprobs, self.count(index).begins
        return {
            "index": index,
            "text": result.text,
            "logprobs": None if logprobs is None else completion_logprobs(logprobs, begins),
            "finish_reason": result.finish_reason.value,
            **warned([result]),
        }


def chat_logprobs(logprobs: Sequence[Logprobs]) -> dict[str, Any]:
    """The log-probabilities of tokens, as a chat has them."""
    content = [
        {**_token(one.chosen), "top_logprobs": [_token(other) for other in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Sequence[Logprobs], offsets: list[int]) -> dict[str, Any]:
    """The log-probabilities of tokens, as a completion has them.

    Args:
        logprobs: of the tokens.
        offsets: characters of the text before each of them.
    """
    return {
        "tokens": [_name(one.chosen) for one in logprobs],
        "token_logprobs": [one.chosen.logprob for one in logprobs],
        "top_logprobs": [{_name(other): other.logprob for other in one.top} for one in logprobs],
        "text_offset": offsets,
    }


def _name(token: TokenLogprob) -> str:
    """One that is no whole text has its bytes as its name, or several would have the same one."""
    return f"bytes:{repr(token.raw_bytes)[2:-1]}" if token.raw_bytes else token.text


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw_bytes or token.text.encode("utf-8", "replace")),
    }
