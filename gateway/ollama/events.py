"""Answers in Ollama's form: one object, or a line of JSON for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mlxsup.client import Channel, Delta, FinishReason, Result
from mlxsup.client.tool_calls import read_tool_calls
from mlxsup.protocol.text import timestamp

from ..errors import ollama_body
from ..failure import Failure
from ..openai.logprobs import chat_logprobs
from ..shape import Shape, arguments_of, encode, warned
from .requests import OllamaAsk


class OllamaShape(Shape):
    """The answer to one request."""

    STREAM_TYPE: ClassVar[str] = "application/x-ndjson"

    def __init__(self, ask: OllamaAsk, name: str, created: int) -> None:
        self._ask = ask
        self._head = {"model": ask.model, "created_at": timestamp(created)}
        self._calls = 0  # that were sent
        # Of a piece of text, made once: there is one for each token.
        head, _, end = _line(self._piece(text="\0")).rpartition(b'"\\u0000"')
        self._begin, self._end = head.decode(), end.decode()

    # ------------------------------------------------------------ pieces

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """Return new text, reasoning, or whole tool calls."""
        if not delta.text and delta.logprobs is None:
            return None
        if delta.logprobs is None and delta.channel is Channel.CONTENT:
            return f"{self._begin}{encode(delta.text)}{self._end}".encode()
        more = {} if delta.logprobs is None else _logprobs(delta.logprobs)
        match delta.channel:
            case Channel.TOOL_CALL:
                calls, _ = read_tool_calls(delta.text)
                text, made = self._made(calls)
                return _line(self._piece(text=text, calls=made) | more)
            case Channel.REASONING:
                return _line(self._piece(thinking=delta.text) | more)
        return _line(self._piece(text=delta.text) | more)

    def last(self, index: int, result: Result) -> bytes:
        """Return why it ended, and what it took."""
        return _line(self._piece() | self._ending(result) | warned([result]))

    def broken(self, failure: Failure) -> bytes:
        """Return a line that holds the error."""
        return _line(ollama_body(failure))

    def waits(self, text: str) -> bytes:
        """Return a blank before the next line: no client sees it, and the connection is alive."""
        return b" "

    # ------------------------------------------------------------ whole

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON."""
        if self._ask.is_empty:
            return encode(self.emptied()).encode()
        (result,) = results
        text, made = self._made(result.tool_calls)
        said = self._piece(text=result.text + text, thinking=result.reasoning, calls=made)
        more = {} if result.logprobs is None else _logprobs(result.logprobs)
        return encode(said | self._ending(result) | more | warned(results)).encode()

    def emptied(self) -> dict[str, Any]:
        """Return the answer to an empty request: what has become of its model."""
        reason = "unload" if self._ask.parameters.get("keep_alive") == 0 else "load"
        return self._piece() | {"done": True, "done_reason": reason}

    def _piece(
        self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"content" if self._ask.is_chat else "response": text}
        if thinking:
            said["thinking"] = thinking
        if calls:
            said["tool_calls"] = calls
        if self._ask.is_chat:
            said = {"message": {"role": "assistant", **said}}
        return {**self._head, **said, "done": False}

    def _made(self, calls: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """Return tool calls with their arguments as objects, after the text of those that have
        none."""
        text, made = "", []
        for call in calls:
            function, arguments = call["function"], arguments_of(call)
            if arguments is None:
                text += f"{function['name']}{function['arguments']}"
                continue
            numbered = {"index": self._calls, "name": function["name"], "arguments": arguments}
            made.append({"id": call["id"], "function": numbered})
            self._calls += 1
        return text, made

    def _ending(self, result: Result) -> dict[str, Any]:
        """Return the end of an answer.

        Durations are nanoseconds, and those that clients divide by are never 0.
        """
        usage, times = result.usage, result.timings
        prompt_s = times.tokenize_s + times.prefill_s
        answer_s = times.total_s - times.queued_s - times.paused_s - prompt_s
        is_cut = result.finish_reason is FinishReason.LENGTH
        return {
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": max(1, _nanoseconds(times.total_s)),
            "load_duration": _nanoseconds(times.queued_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(1, _nanoseconds(prompt_s)),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(1, _nanoseconds(answer_s)),
        }


def _logprobs(logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(logprobs)["content"]}


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _line(value: dict[str, Any]) -> bytes:
    return f"{encode(value)}\n".encode()
