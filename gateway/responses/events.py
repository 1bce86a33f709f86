"""What answers look like in OpenAI's API of responses: items, whole and as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxsup.client import Channel, Delta, FinishReason, Result
from mlxsup.client.tool_calls import read_tool_calls
from mlxsup.protocol.parameters import SAMPLING

from ..custom_tools import custom_input
from ..errors import openai_body
from ..failure import Failure
from ..openai.logprobs import chat_logprobs
from ..shape import Shape, arguments_of, encode, warned
from ..sse import event
from .fields import SAMPLED
from .kept import KeptResponse, named
from .requests import ResponseAsk
from .tools import Called

KINDS = {Channel.CONTENT: "message", Channel.REASONING: "reasoning"}
"""The items that grow piece by piece, and the channel of their text."""

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}

INPUTS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The kinds of calls, and the field of what they are called with."""

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True, kw_only=True)
class Item:
    """One item of the output.

    Attributes:
        id: of the item.
        kind: `message`, `reasoning`, `function_call` or `custom_tool_call`.
        pieces: of its text.
        call: of a call: `call_id`, `name` and `arguments` or `input`.
        logprobs: of a message's tokens, if they were asked for.
        status: `in_progress`, `completed` or `incomplete`.
    """

    id: str
    kind: str
    pieces: list[str] = field(default_factory=list)
    call: dict[str, str] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def part(self) -> dict[str, Any]:
        """Return its only part."""
        part: dict[str, Any] = {"type": PARTS[self.kind], "text": "".join(self.pieces)}
        if self.kind != "message":
            return part
        return part | {"annotations": [], "logprobs": self.logprobs}

    def json(self) -> dict[str, Any]:
        """Return the item as it is now."""
        head = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind in INPUTS:
            return head | self.call
        content = [self.part] if self.pieces else []
        if self.kind == "reasoning":
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}


class ResponseShape(Shape):
    """The answer to one request for a response.

    Args:
        ask: what was asked for.
        name: of the request.
        created: seconds since the epoch.
        keep: takes the response when it is over, if it is to be kept.
    """

    def __init__(
        self,
        ask: ResponseAsk,
        name: str,
        created: int,
        keep: Callable[[KeptResponse], None] = lambda kept: None,
    ) -> None:
        self._name = name
        self._created = created
        self._ask = ask
        self._keep = keep
        self._reasoning_tokens = 0
        self._items: list[Item] = []
        self._sent = 0  # events
        self._begin = ""  # of the event of each piece of the item that is growing
        self._sampling: dict[str, float | None] = {}
        self._unshown: list[dict[str, Any]] = []  # of tokens whose text has not come

    # ------------------------------------------------------------ pieces

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """Return new text of an item, or whole calls."""
        if not self._sampling:
            picked = delta.sampling or {}
            self._sampling = {name: picked.get(name, SAMPLING[name].default) for name in SAMPLED}
        if delta.channel is Channel.REASONING:
            self._reasoning_tokens += len(delta.token_ids)
        elif delta.channel is Channel.CONTENT and delta.logprobs is not None:
            self._unshown += chat_logprobs(delta.logprobs)["content"]
        if not delta.text:
            return None
        if delta.channel is not Channel.TOOL_CALL:
            opening = b"" if self._sent else self._opening()
            return opening + self._grow(KINDS[delta.channel], delta.text)
        calls, _ = read_tool_calls(delta.text)
        return self._opening() + b"".join(self._call(call) for call in calls)

    def last(self, index: int, result: Result) -> bytes:
        """Return the end of the item that is growing."""
        return self._opening() + self._close("incomplete" if _is_cut(result) else "completed")

    def end(self, results: Sequence[Result]) -> bytes:
        """Return the whole response."""
        response = self.whole(results)
        return self._event(f"response.{response['status']}", response=response)

    def broken(self, failure: Failure) -> bytes:
        """Return the response that has failed, and an event that OpenAI's clients raise."""
        error = openai_body(failure)["error"]
        code = error["code"] or error["type"]
        sent = self._opening()
        if (item := self._open) is not None:
            item.status = "incomplete"
        response = self._over("failed", error={"code": code, "message": failure.message})
        sent += self._event("response.failed", response=response)
        return sent + self._event("error", **error | {"type": "error"}, error=error)

    # ------------------------------------------------------------ whole

    def take(self, index: int, delta: Delta) -> None:
        """Keep it."""
        self.piece(index, delta)

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the response as JSON."""
        return encode(self.whole(results)).encode()

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the response."""
        (result,) = results
        is_cut = _is_cut(result)
        status = "incomplete" if is_cut else "completed"
        self._close(status)
        done_at = self._created + int(result.timings.total_s)
        return self._over(
            status,
            usage=self._usage(result),
            completed_at=None if is_cut else done_at,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            **warned(results),
        )

    @property
    def _open(self) -> Item | None:
        """Return the item that is growing."""
        last = self._items[-1] if self._items else None
        return last if last is not None and last.status == "in_progress" else None

    def _opening(self) -> bytes:
        """Return an empty response, in the first two events."""
        if self._sent:
            return b""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _over(self, status: str, **known: Any) -> dict[str, Any]:
        """Return the response, which is kept if it should be."""
        response = self._response(status, **known)
        if self._ask.is_stored:
            kept = KeptResponse(
                id=response["id"],
                previous=self._ask.previous,
                json=encode(response).encode(),
                inputs=named(self._ask.items, self._name),
                outputs={item["id"]: encode(item).encode() for item in response["output"]},
                has_failed=status == "failed",
            )
            self._keep(kept)
        return response

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._ask.model,
            "output": [item.json() for item in self._items],
            "usage": None,
            **self._ask.echo,
            **self._sampling,
            **known,
        }

    def _usage(self, result: Result) -> dict[str, Any]:
        usage = result.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sent, **values}
        self._sent += 1
        return event(encode(data).encode(), kind.encode())

    def _add(self, kind: str) -> Item:
        number = len(self._items)
        item = Item(id=f"{PREFIXES[kind]}_{self._name}_{number}", kind=kind)
        self._items.append(item)
        return item

    def _place(self, item: Item) -> dict[str, Any]:
        """Return where the only part of the item is; it is the last one."""
        return {"item_id": item.id, "output_index": len(self._items) - 1, "content_index": 0}

    def _grow(self, kind: str, text: str) -> bytes:
        """Return more text for the item of this kind that is open, or for a new one."""
        opening, item = b"", self._open
        if item is None or item.kind != kind:
            opening = self._close("completed")
            item = self._add(kind)
            place, number = self._place(item), len(self._items) - 1
            shown, part = item.json(), item.part
            opening += self._event("response.output_item.added", output_index=number, item=shown)
            opening += self._event("response.content_part.added", **place, part=part)
            name = f"response.{PARTS[kind]}.delta"
            scores: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            start = encode({"type": name, **place, **scores}).removesuffix("}")
            self._begin = f"event: {name}\ndata: {start}"
        item.pieces.append(text)
        begin = self._begin
        if self._unshown and kind == "message":
            begin = begin.removesuffix("[]") + encode(self._scored(item))
        piece = f'{begin},"sequence_number":{self._sent},"delta":{encode(text)}}}\n\n'
        self._sent += 1
        return opening + piece.encode()

    def _scored(self, item: Item) -> list[dict[str, Any]]:
        """Return the log-probabilities that belong to the newest text of a message."""
        scored, self._unshown = self._unshown, []
        item.logprobs += scored
        return scored

    def _call(self, call: dict[str, Any]) -> bytes:
        """Return a whole call; one that cannot be read is text."""
        function = call["function"]
        if not function["name"]:
            return self._grow("message", function["arguments"])
        sent = self._close("completed")
        arguments, text = function["arguments"], None
        if function["name"] in self._ask.customs:
            text = custom_input(arguments)
        item = self._add("function_call" if text is None else "custom_tool_call")
        number, name = len(self._items) - 1, INPUTS[item.kind]
        # A list, if a converter has read the request.
        called = Called(*self._ask.called.get(function["name"], [function["name"]]))
        item.call = {"call_id": call["id"], "name": called.name, name: ""}
        if called.namespace:
            item.call["namespace"] = called.namespace
        place = {"item_id": item.id, "output_index": number}
        sent += self._event("response.output_item.added", output_index=number, item=item.json())
        item.call[name] = arguments if text is None else text
        sent += self._event(f"{_event_of(item)}.delta", **place, delta=item.call[name])
        # Arguments that end early are those of a call that was cut off.
        return sent + self._close("incomplete" if arguments_of(call) is None else "completed")

    def _close(self, status: str) -> bytes:
        """End the item that is open, if one is."""
        item, number = self._open, len(self._items) - 1
        if item is None:
            return b""
        item.status = status
        if item.kind in INPUTS:
            place = {"item_id": item.id, "output_index": number}
            called = {name: item.call[name] for name in ("name", INPUTS[item.kind])}
            sent = self._event(f"{_event_of(item)}.done", **place, **called)
        else:
            more: dict[str, Any] = {}
            if item.kind == "message":
                self._scored(item)
                more["logprobs"] = item.logprobs
            place, part = self._place(item), item.part
            name = f"response.{PARTS[item.kind]}.done"
            sent = self._event(name, **place, text=part["text"], **more)
            sent += self._event("response.content_part.done", **place, part=part)
        return sent + self._event(
            "response.output_item.done", output_index=number, item=item.json()
        )


def _event_of(item: Item) -> str:
    return f"response.{item.kind}_{INPUTS[item.kind]}"


def _is_cut(result: Result) -> bool:
    return result.finish_reason is FinishReason.LENGTH
