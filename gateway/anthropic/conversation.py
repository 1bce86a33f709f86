"""A chat in Anthropic's form, as the daemon takes it: OpenAI's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from .. import limits
from ..content import BETWEEN_TEXTS, Message, Part, join_parts, media_part, read_parts, read_text
from ..failure import Failure, bad_field, bad_value, check_choice
from ..fields import add_unread, check_chat, check_count, check_fields, check_list
from .client_tools import CLIENT_TOOLS
from .fields import TOOL_FIELDS

ROLES = ("user", "assistant", "system")

MEDIA = ("image", "container_upload")
"""The types of blocks that are no text."""

TEXTS = ("text", "document", "search_result", "tool_reference")
"""The types of blocks that are text, or become it."""

BLOCKS = (*TEXTS, *MEDIA, "thinking", "redacted_thinking", "tool_use", "tool_result")
"""The types of blocks that are read."""

OF_SERVERS = re.compile(
    r"server_tool_use|mcp_tool_use|\w+_tool_result|mcp_tool_listing|tool_addition|tool_removal"
    r"|compaction|fallback"
)
"""The types of blocks that Anthropic's servers have written about their own tools: left out."""

_DATED = re.compile(r"(?P<tool>[a-z_]+?)_\d{8}")

ERROR = "error: "
"""How the result of a tool begins that has failed."""

BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a line that differs from request to request."""


def read_system(system: Any) -> list[Message]:
    """Return the system prompt, as the first message; none if there is no text.

    Raises:
        Failure: it is something else than text.
    """
    parts = _parts(system, "system")
    content = join_parts([p for p in parts if not (isinstance(p, str) and p.startswith(BILLING))])
    return [{"role": "system", "content": content}] if content else []


def read_messages(given: Any) -> list[Message]:
    """Return the messages for the chat template.

    Raises:
        Failure: they are no chat; `param` names the place.
    """
    return [
        one
        for place, message in enumerate(check_chat(given))
        for one in _message(message, f"messages[{place}]")
    ]


def read_tools(given: Any, messages: Any, choice: Any, unread: list[str]) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's form: without those that run on Anthropic's servers, and of the
    deferred ones those that the chat or the choice refers to.

    Raises:
        Failure: one of them is none that the model could call.
    """
    check_list(given, "tools", "tools", limits.MAX_TOOLS)
    named = {*_named_tools(messages), *_named_tools(choice)}
    tools = []
    for place, tool in enumerate(given):
        read = _tool(tool, f"tools[{place}]", named, unread)
        if read is not None:
            tools.append(read)
    return tools


def _named_tools(value: Any) -> Iterator[str]:
    """Yield the names of tools that a chat refers to or calls."""
    match value:
        case {"type": "tool_reference", "tool_name": str(name)}:
            yield name
        case {"type": "tool_use" | "tool", "name": str(name)}:
            yield name
        case {"type": "tool_addition", "tool": {"name": str(name)} | {"tool_name": str(name)}}:
            yield name
        case {"content": list(blocks)} | list(blocks):
            for block in blocks:
                yield from _named_tools(block)


def _message(message: Any, path: str) -> list[Message]:
    if not isinstance(message, dict):
        raise bad_value(path, "an object with role and content", message)
    role = check_choice(f"{path}.role", ROLES, message.get("role"))
    content = message.get("content")
    path = f"{path}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_value(path, "text or a list of blocks", content)
    check_count(content, path, "blocks")
    blocks = {f"{path}[{place}]": block for place, block in enumerate(content)}
    read = {where: block for where, block in blocks.items() if _is_read(block, where)}
    return [_assistant(read)] if role == "assistant" else _others(role, read)


def _is_read(block: Any, path: str) -> bool:
    """True if a block is read; false if it is about a tool of Anthropic's servers."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and OF_SERVERS.fullmatch(kind):
        return False
    check_choice(f"{path}.type", BLOCKS, kind)
    return True


def _others(role: str, blocks: dict[str, dict[str, Any]]) -> list[Message]:
    """Return the results of tools, each a message, and what stands between them."""
    read: list[Message] = []
    parts: list[Part] = []
    for where, block in blocks.items():
        match block["type"]:
            case kind if kind in (*TEXTS, *MEDIA):
                parts += _shown(block, where)
            case "tool_result" if role == "user":
                if parts:
                    read.append({"role": role, "content": join_parts(parts)})
                parts = []
                read.append(_result(block, where))
            case kind:
                raise _misplaced(kind, role, where)
    if parts or not read:
        read.append({"role": role, "content": join_parts(parts)})
    return read


def _result(block: dict[str, Any], path: str) -> Message:
    """Return the result of a tool, marked if it has failed: chat templates know no such field."""
    is_error = block.get("is_error") or False
    if not isinstance(is_error, bool):
        raise bad_value(f"{path}.is_error", "true or false", is_error)
    first, *rest = _parts(block.get("content"), f"{path}.content") or [""]
    if is_error:
        first, rest = (ERROR + first, rest) if isinstance(first, str) else (ERROR, [first, *rest])
    call = read_text(block, "tool_use_id", path)
    return {"role": "tool", "tool_call_id": call, "content": join_parts([first, *rest])}


def _assistant(blocks: dict[str, dict[str, Any]]) -> Message:
    """Return what the model had said, thought and called."""
    texts, thoughts, calls = [], [], []
    for where, block in blocks.items():
        match block["type"]:
            case "text":
                texts.append(read_text(block, "text", where))
            case "thinking":
                thoughts.append(read_text(block, "thinking", where))
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
    given = block.get("input") or {}
    if not isinstance(given, dict):
        raise bad_value(f"{path}.input", "an object", given)
    function = {
        "name": read_text(block, "name", path),
        "arguments": json.dumps(given, ensure_ascii=False),
    }
    return {"id": read_text(block, "id", path), "type": "function", "function": function}


def _parts(content: Any, path: str) -> list[Part]:
    return read_parts(content, path, _text_block, "blocks of type text")


def _text_block(block: Any, path: str) -> list[Part]:
    if not _is_read(block, path):
        return []
    check_choice(f"{path}.type", (*TEXTS, *MEDIA), block["type"])
    return _shown(block, path)


def _shown(block: dict[str, Any], path: str) -> list[Part]:
    """Return the parts of a block of `TEXTS` or `MEDIA`, with its title and source."""
    match block:
        case {"type": "text"}:
            return [read_text(block, "text", path)]
        case {"type": "tool_reference"}:
            return [f"the tool {read_text(block, 'tool_name', path)} is available"]
        case {"type": "search_result", "content": content}:
            parts = _parts(content, f"{path}.content")
        case {"type": "document", "source": {"type": "text", "data": str(data)}}:
            parts = [data]
        case {"type": "document", "source": {"type": "content", "content": content}}:
            parts = _parts(content, f"{path}.source.content")
        case _:
            media = media_part(block, path)
            if media is None:
                raise bad_field(f"{path}.content", f"{path}.content must be a list of blocks")
            parts = [media]
    heads = [
        block[name] for name in ("title", "source", "context") if isinstance(block.get(name), str)
    ]
    return [*heads, *parts]


def _misplaced(kind: str, role: str, path: str) -> Failure:
    message = f"{path}.type must not be {kind} in a message of role {role}"
    return bad_field(f"{path}.type", message)


def _tool(tool: Any, path: str, named: set[str], unread: list[str]) -> dict[str, Any] | None:
    """Return a tool in OpenAI's form; None if it is not shown to the model."""
    if not isinstance(tool, dict):
        raise bad_value(path, "an object with name and input_schema", tool)
    kind = tool.get("type") or "custom"
    if kind != "custom" and "input_schema" not in tool:
        dated = _DATED.fullmatch(kind) if isinstance(kind, str) else None
        if dated is None or dated["tool"] not in CLIENT_TOOLS:  # it runs on Anthropic's servers
            add_unread(unread, f"{path} ({str(kind)[:64]})")
            return None
        description, schema = CLIENT_TOOLS[dated["tool"]]
        read: dict[str, Any] = {"name": tool.get("name", dated["tool"])}
        read |= {"description": description, "input_schema": schema}
    else:
        read = check_fields(tool, TOOL_FIELDS, unread, within=path)
    parameters = read.get("input_schema")
    if not isinstance(parameters, dict):
        raise bad_value(f"{path}.input_schema", "a JSON schema", parameters)
    name = read_text(read, "name", path)
    if tool.get("defer_loading") and name not in named:
        return None
    function = {"name": name, "parameters": parameters}
    if "strict" in read:
        function["strict"] = read["strict"]
    if "description" in read:
        function["description"] = read_text(read, "description", path)
    return {"type": "function", "function": function}
