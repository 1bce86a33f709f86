"""The input of a response: a conversation in items, as the daemon takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..content import BETWEEN_TEXTS, Message, Part, join_parts, media_part, read_parts, read_text
from ..custom_tools import custom_arguments
from ..failure import bad_field, bad_value, check_choice
from ..fields import add_unread, check_count
from .kept import Item
from .tools import Called, Tools

ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}

TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""The types of parts that are text, and the field that has it."""

ACTIONS = {
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
"""The calls of OpenAI's tools that run at the client, and the field with what is to be done."""

CALLS = ("function_call", "custom_tool_call", "mcp_call", *ACTIONS)
OUTPUTS = ("function_call_output", "custom_tool_call_output", *(f"{one}_output" for one in ACTIONS))
ITEMS = ("message", "reasoning", *CALLS, *OUTPUTS)
"""The types of items that are read."""

REFERENCE = "item_reference"
"""The type of items that stand for one that is kept."""


def read_items(given: Any) -> list[Any]:
    """Return an input as a list of items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_value("input", "text or a list of items", given)
    if not given:
        raise bad_field("input", "input must be a list of at least one item, not an empty list")
    check_count(given, "input", "items")
    return given


def references_in(items: Sequence[Any]) -> list[tuple[int, str]]:
    """Return the ids of the items that are kept, each with its place."""
    return [
        (place, read_text(item, "id", f"input[{place}]"))
        for place, item in enumerate(items)
        if _is_reference(item)
    ]


def refer(items: Sequence[Any], referred: Sequence[Any]) -> list[Any]:
    """Return the items, with those that are kept in their places."""
    kept = iter(referred)
    return [next(kept) if _is_reference(item) else item for item in items]


def to_keep(items: Iterable[dict[str, Any]]) -> list[Item]:
    """Return the items as they are kept: messages as OpenAI lists them."""
    return [_to_keep(item) for item in items]


def read_input(items: Iterable[Any], tools: Tools, unread: list[str]) -> list[Message]:
    """Return the messages for the chat template.

    Args:
        items: the input; references in it are left out.
        tools: what the model may call.
        unread: gets the paths of items that other servers have written about their own tools.

    Raises:
        Failure: it is no conversation; `param` names the place.
    """
    conversation, has_reference = _Conversation(tools), False
    for place, item in enumerate(items):
        if _is_reference(item):
            has_reference = True
        elif not conversation.add(item, f"input[{place}]"):
            add_unread(unread, f"input[{place}] ({item['type'][:64]})")
    if not conversation.turns and not has_reference:
        raise bad_field("input", "input must have at least one message")
    return conversation.joined()


def read_history(items: Iterable[Any], tools: Tools) -> list[Message]:
    """Return the messages for items that were read before; what was left out is so again."""
    conversation = _Conversation(tools)
    for place, item in enumerate(items):
        conversation.add(item, f"history[{place}]")
    return conversation.joined()


class _Conversation:
    """Items become messages: reasoning, text and calls of one turn are one of them.

    Attributes:
        turns: the messages so far; the texts of the assistant's are still lists.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.turns: list[Message] = []
        self._reasoning: list[str] = []  # belongs to what the assistant does next

    def add(self, item: Any, path: str) -> bool:
        """Add one more item; return False if it is of a type that is left out.

        Raises:
            Failure: it is none that can be used.
        """
        if not isinstance(item, dict):
            raise bad_value(path, "an object", item)
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            raise bad_value(f"{path}.type", "text", kind)
        if kind not in ITEMS:
            return False
        if kind == "message":
            self._add_message(item, path)
        elif kind == "reasoning":
            shown = item.get("content") or item.get("summary")
            parts = read_parts(shown, f"{path}.content", _part)
            self._reasoning += [part for part in parts if isinstance(part, str)]
        elif kind in CALLS:
            self._add_call(item, kind, path)
        else:
            output = _output(item.get("output"), f"{path}.output")
            name = _id_of(item) if kind == "local_shell_call_output" else "call_id"
            call = read_text(item, name, path)
            self.turns.append({"role": "tool", "tool_call_id": call, "content": output})
        return True

    def joined(self) -> list[Message]:
        """Return the messages with their texts as one each."""
        return [_joined(turn) for turn in self.turns]

    def _add_message(self, read: dict[str, Any], path: str) -> None:
        role = check_choice(f"{path}.role", ROLES, read.get("role"))
        if read.get("content") is None:
            raise bad_value(f"{path}.content", "text", None)
        parts = read_parts(read["content"], f"{path}.content", _part)
        if role == "assistant":
            joined = join_parts(parts)
            self._assistant()["content"] += [joined] if isinstance(joined, str) else joined
        else:
            self.turns.append({"role": ROLES[role], "content": join_parts(parts)})

    def _add_call(self, read: dict[str, Any], kind: str, path: str) -> None:
        if kind in ACTIONS:
            name = kind.removesuffix("_call")
            arguments = json.dumps(read.get(ACTIONS[kind]) or {}, ensure_ascii=False)
        else:
            namespace = read_text(read, "namespace", path) if read.get("namespace") else ""
            name = self._tools.shown(Called(read_text(read, "name", path), namespace))
            if kind == "custom_tool_call":
                arguments = custom_arguments(read_text(read, "input", path))
            else:
                arguments = read_text(read, "arguments", path)
        function = {"name": name, "arguments": arguments}
        id = read_text(read, "id" if kind == "mcp_call" else "call_id", path)
        call = {"id": id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)
        if kind == "mcp_call":  # another server has run it
            told = read.get("output") or read.get("error")
            shown = told if isinstance(told, str) else ""
            self.turns.append({"role": "tool", "tool_call_id": id, "content": shown})

    def _assistant(self) -> Message:
        """Return the assistant's turn that continues, or a new one."""
        last = self.turns[-1] if self.turns else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": []}
            self.turns.append(last)
        if self._reasoning:
            last.setdefault("reasoning_content", []).extend(self._reasoning)
            self._reasoning = []
        return last


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    # Open Responses lets the type out, too.
    return item.get("type") == REFERENCE or (
        item.get("type") is None and item.get("role") is None and "id" in item
    )


def _to_keep(item: dict[str, Any]) -> Item:
    kind, id, content = item.get("type") or "message", item.get("id"), item.get("content")
    kept = {"type": kind, **item}
    if kind == "message":
        kept["status"] = "completed"
        if isinstance(content, str):
            is_said = item.get("role") == "assistant"  # a reference may have none
            part = {"type": "output_text" if is_said else "input_text", "text": content}
            kept["content"] = [part | {"annotations": []} if is_said else part]
    if not isinstance(id, str):
        id, _ = "", kept.pop("id", None)
    return Item(id, json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode())


def _joined(turn: Message) -> Message:
    """Return a turn of the assistant with its texts as one each; another one as it is."""
    if turn["role"] != "assistant":
        return turn
    joined = turn | {"content": join_parts(turn["content"], between="")}
    if "reasoning_content" in turn:
        joined["reasoning_content"] = BETWEEN_TEXTS.join(turn["reasoning_content"])
    return joined


def _id_of(item: dict[str, Any]) -> str:
    """Return the field with the id of a local shell's call: OpenAI's clients have it in `id`."""
    return "id" if item.get("call_id") is None else "call_id"


def _output(output: Any, path: str) -> str | list[dict[str, Any]]:
    """Return the content of a call's output; of a shell, its streams one after the other."""
    match output:
        case [{"stdout": _}, *_]:
            streams = [
                one.get(name)
                for one in output
                if isinstance(one, dict)
                for name in ("stdout", "stderr")
            ]
            return BETWEEN_TEXTS.join(text for text in streams if isinstance(text, str) and text)
    return join_parts(read_parts(output, path, _part))


def _part(part: Any, path: str) -> list[Part]:
    kind = part.get("type") if isinstance(part, dict) else None
    if (media := media_part(part, path)) is not None:
        return [media]
    if not isinstance(kind, str) or kind not in TEXTS:
        raise bad_field(path, f'{path} must be a part such as {{"type": "input_text", "text": …}}')
    return [read_text(part, TEXTS[kind], path)]
