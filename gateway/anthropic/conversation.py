"""A chat in Anthropic's form, as the daemon takes it: OpenAI's."""

from __future__ import annotations

import json
from typing import Any

from .. import limits
from ..failure import Failure, bad_field
from ..fields import check_count, check_fields
from ..turns import BETWEEN_TEXTS, Message, join_turns
from .fields import BLOCK_FIELDS, MESSAGE_FIELDS, TOOL_FIELDS

ROLES = ("user", "assistant", "system")

NOT_TEXT = {"image": "images", "document": "documents", "container_upload": "files"}

ERROR = "error: "
"""How the result of a tool begins that has failed."""

BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a line that differs from request to request."""


def read_system(system: Any) -> list[Message]:
    """The system prompt, as the first message; none if there is no text.

    Raises:
        Failure: it is something else than text.
    """
    texts = [text for text in _texts(system, "system") if not text.startswith(BILLING)]
    text = BETWEEN_TEXTS.join(texts)
    return [{"role": "system", "content": text}] if text else []


def read_messages(given: Any) -> list[Message]:
    """The messages for the chat template. Those of one role in a row are one.

    Raises:
        Failure: they are no chat, or hold what is not text; `param` names the place.
    """
    if not isinstance(given, list):
        raise bad_field("messages", "messages takes a list of messages")
    if not given:
        raise bad_field("messages", "messages takes at least one message, not an empty list")
    check_count(given, "messages", "messages")
    read = join_turns(
        one
        for place, message in enumerate(given)
        for one in _message(message, f"messages[{place}]")
    )
    if read[-1]["role"] == "assistant":
        raise bad_field(
            f"messages[{len(given) - 1}]",
            "the last message is the assistant's: an answer cannot be continued; end with the user",
        )
    return read


def read_tools(given: Any) -> list[dict[str, Any]]:
    """The tools in OpenAI's form.

    Raises:
        Failure: one of them is none that the model could call.
    """
    if not isinstance(given, list):
        raise bad_field("tools", "tools takes a list of tools")
    check_count(given, "tools", "tools", limits.MAX_TOOLS)
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(given)]


def _message(message: Any, path: str) -> list[Message]:
    if not isinstance(message, dict):
        raise bad_field(path, f"{path} takes an object with role and content")
    read = check_fields(message, MESSAGE_FIELDS, within=path)
    role, content = read.get("role"), read.get("content")
    if role not in ROLES:
        raise bad_field(f"{path}.role", f"{path}.role takes one of {', '.join(ROLES)}")
    path = f"{path}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_field(path, f"{path} takes a text, or a list of blocks")
    check_count(content, path, "blocks")
    blocks = [_block(block, f"{path}[{place}]") for place, block in enumerate(content)]
    if role == "assistant":
        return [_assistant(blocks, path)]
    return _others(role, blocks, path)


def _block(block: Any, path: str) -> dict[str, Any]:
    """A block whose fields are known.

    Raises:
        Failure: it is of a type that no model here takes.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind in NOT_TEXT:
        raise bad_field(path, f"{path}: no model here takes {NOT_TEXT[kind]}; send text")
    if not isinstance(kind, str) or kind not in BLOCK_FIELDS:
        known = ", ".join(BLOCK_FIELDS)
        raise bad_field(f"{path}.type", f"{path}.type takes one of {known}")
    return check_fields(block, BLOCK_FIELDS[kind], within=path)


def _others(role: str, blocks: list[dict[str, Any]], path: str) -> list[Message]:
    """The results of tools, each a message, and the texts between them."""
    read: list[Message] = []
    for place, block in enumerate(blocks):
        where = f"{path}[{place}]"
        match block["type"]:
            case "text":
                read.append({"role": role, "content": _text(block, "text", where)})
            case "tool_result" if role == "user":
                texts = _texts(block.get("content"), f"{where}.content")
                call = _text(block, "tool_use_id", where)
                content = _mark(block, where) + BETWEEN_TEXTS.join(texts)
                read.append({"role": "tool", "tool_call_id": call, "content": content})
            case kind:
                raise _misplaced(kind, role, where)
    return read or [{"role": role, "content": ""}]


def _mark(result: dict[str, Any], path: str) -> str:
    """What comes before the result of a tool that has failed: chat templates know no such field."""
    is_error = result.get("is_error", False)
    if not isinstance(is_error, bool):
        raise bad_field(f"{path}.is_error", f"{path}.is_error takes true or false")
    return ERROR if is_error else ""


def _assistant(blocks: list[dict[str, Any]], path: str) -> Message:
    """What the model had said, thought and called."""
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        where = f"{path}[{place}]"
        match block["type"]:
            case "text":
                texts.append(_text(block, "text", where))
            case "thinking":
                thoughts.append(_text(block, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, where))
            case kind:
                raise _misplaced(kind, "assistant", where)
    message: Message = {"role": "assistant", "content": BETWEEN_TEXTS.join(texts)}
    if thoughts:
        message["reasoning_content"] = BETWEEN_TEXTS.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise bad_field(f"{path}.input", f"{path}.input takes an object")
    function = {
        "name": _text(block, "name", path),
        "arguments": json.dumps(given, ensure_ascii=False),
    }
    return {"id": _text(block, "id", path), "type": "function", "function": function}


def _texts(content: Any, path: str) -> list[str]:
    """The texts of something that is a text, or a list of blocks of text; None is no text."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_field(path, f"{path} takes a text, or a list of blocks of type text")
    check_count(content, path, "blocks")
    texts = []
    for place, block in enumerate(content):
        where = f"{path}[{place}]"
        read = _block(block, where)
        if read["type"] != "text":
            raise bad_field(f"{where}.type", f"{where}.type takes text")
        texts.append(_text(read, "text", where))
    return texts


def _text(block: dict[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{path}.{name}", f"{path}.{name} takes a text")
    return value


def _misplaced(kind: str, role: str, path: str) -> Failure:
    message = f"{path}.type: {kind} has no place in a message of the role {role}"
    return bad_field(f"{path}.type", message)


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_field(path, f"{path} takes an object with name and input_schema")
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "custom":
        raise bad_field(
            f"{path}.type",
            f"{path}: {kind[:64]} is a tool of Anthropic's own servers; leave it out, or offer"
            " one that has an input_schema",
        )
    read = check_fields(tool, TOOL_FIELDS, within=path)
    schema = read.get("input_schema")
    if not isinstance(schema, dict):
        raise bad_field(f"{path}.input_schema", f"{path}.input_schema takes a JSON schema")
    function = {"name": _text(read, "name", path), "parameters": schema}
    if "description" in read:
        function["description"] = _text(read, "description", path)
    return {"type": "function", "function": function}
