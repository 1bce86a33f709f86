"""Answers and the list of models in the form of Anthropic's API: blocks, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mlxsup.client import Channel, Delta, FinishReason, Result
from mlxsup.client.tool_calls import read_tool_calls

from ..errors import anthropic_body
from ..failure import Failure
from ..shape import Shape, arguments_of, encode, warned
from ..sse import comment, event
from .requests import MessageAsk

SIGNATURE = "mlxsup"
"""Nothing is signed here. But some clients do not send back reasoning without a signature, and
models that call tools need theirs."""

KINDS = {Channel.CONTENT: "text", Channel.REASONING: "thinking"}
"""The blocks that grow piece by piece, and the channel of their text."""


class MessageShape(Shape):
    """The answer to one request for a message."""

    def __init__(self, ask: MessageAsk, name: str, created: int) -> None:
        self._name = name
        self._ask = ask
        self._thinking_tokens = 0
        self._blocks = 0  # how many have begun
        self._open = ""  # the type of the block that is growing
        self._begin = ""  # of the event of each of its pieces, made once

    # ------------------------------------------------------------ pieces

    def first(self, index: int) -> bytes:
        """Return an empty message. How long the prompt is will be known at the end."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage))

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """Return new text of a block, or a whole tool call."""
        self.take(index, delta)
        if not delta.text:
            return None
        if delta.channel is Channel.TOOL_CALL:
            calls, _ = read_tool_calls(delta.text)
            return b"".join(self._block(_block_of(call)) for call in calls)
        if delta.channel is Channel.REASONING and not self._ask.shows_thinking:
            return None
        return self._grow(KINDS[delta.channel], delta.text)

    def last(self, index: int, result: Result) -> bytes:
        """Return why it ended, and what it took."""
        reason, stop = self._end_of(result)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return self._close() + _event(
            "message_delta", delta=delta, usage=self._usage(result), **warned([result])
        )

    def end(self, results: Sequence[Result]) -> bytes:
        """Return the mark of a complete answer."""
        return _event("message_stop")

    def broken(self, failure: Failure) -> bytes:
        """Return an event that holds the error."""
        return event(encode(anthropic_body(failure, self._name)).encode(), b"error")

    def waits(self, text: str) -> bytes:
        """Return a comment, and the event that clients of this API know."""
        return comment(text) + _event("ping")

    # ------------------------------------------------------------ whole

    def take(self, index: int, delta: Delta) -> None:
        """Count it."""
        if delta.channel is Channel.REASONING:
            self._thinking_tokens += len(delta.token_ids)

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the message as JSON."""
        (result,) = results
        content: list[dict[str, Any]] = []
        if result.reasoning and self._ask.shows_thinking:
            content.append(_empty("thinking") | {"thinking": result.reasoning})
        if result.text:
            content.append(_empty("text") | {"text": result.text})
        content += [_block_of(call) for call in result.tool_calls]
        reason, stop = self._end_of(result)
        message = self._message(content, reason, stop, self._usage(result))
        return encode(message | warned(results)).encode()

    def _message(
        self,
        content: list[dict[str, Any]],
        reason: str | None,
        stop: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _end_of(self, result: Result) -> tuple[str, str | None]:
        """`stop_reason` and `stop_sequence`."""
        match result.finish_reason:
            case FinishReason.TOOL_CALLS if any(
                arguments_of(call) is not None for call in result.tool_calls
            ):
                return "tool_use", None
            case FinishReason.LENGTH if result.usage.completion_tokens < self._ask.max_tokens:
                return "model_context_window_exceeded", None
            case FinishReason.LENGTH:
                return "max_tokens", None
        return ("end_turn", None) if result.stop is None else ("stop_sequence", result.stop)

    def _usage(self, result: Result) -> dict[str, Any]:
        """`input_tokens` are those that were computed."""
        usage = result.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._thinking_tokens},
        }

    def _grow(self, kind: str, text: str) -> bytes:
        """Return more text for the block of this type that is open, or for a new one."""
        opening = b""
        if self._open != kind:
            opening = self._close() + self._start(_empty(kind, signature=""))
            self._open = kind
            head = {"type": "content_block_delta", "index": self._blocks - 1}
            start = encode(head).removesuffix("}")
            delta = encode({"type": f"{kind}_delta"}).removesuffix("}")
            self._begin = f'event: content_block_delta\ndata: {start},"delta":{delta},"{kind}":'
        return opening + f"{self._begin}{encode(text)}}}}}\n\n".encode()

    def _block(self, block: dict[str, Any]) -> bytes:
        """Return a block that comes whole: a tool call, or the text of one that cannot be read."""
        if block["type"] == "text":
            return self._grow("text", block["text"])
        given = json.dumps(block["input"], ensure_ascii=False)
        begin = self._close() + self._start(block | {"input": {}})
        self._open = block["type"]
        delta = {"type": "input_json_delta", "partial_json": given}
        piece = _event("content_block_delta", index=self._blocks - 1, delta=delta)
        return begin + piece + self._close()

    def _start(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _close(self) -> bytes:
        """End the block that is open, if one is."""
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=self._blocks - 1, delta=delta)
        self._open = ""
        return signed + _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **values: Any) -> bytes:
    return event(encode({"type": kind, **values}).encode(), kind.encode())


def _empty(kind: str, signature: str = SIGNATURE) -> dict[str, Any]:
    """Return a block of text without its text."""
    block: dict[str, Any] = {"type": kind, kind: ""}
    return block | {"signature": signature} if kind == "thinking" else block


def _block_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as a block: text if it has no name. `input` is an object, and an empty one
    if the arguments were cut off: so no client takes a part of them for the whole."""
    name = call["function"]["name"]
    if not name:
        return {"type": "text", "text": call["function"]["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments_of(call) or {}}


# ---------------------------------------------------------------- models


def model_list(listed: Mapping[str, Any]) -> dict[str, Any]:
    """`GET /v1/models`, from what it is in OpenAI's API."""
    models = [one_model(model) for model in listed["data"]]
    return {
        "data": models,
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }


def one_model(listed: Mapping[str, Any]) -> dict[str, Any]:
    """`GET /v1/models/{id}`, from what it is in OpenAI's API."""
    created = datetime.fromtimestamp(listed["created"], UTC)
    return {
        "type": "model",
        "id": listed["id"],
        "display_name": listed["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": listed["meta"]["n_ctx"],
    }
