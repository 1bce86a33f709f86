"""A chat in OpenAI's form, as the daemon takes it."""

from __future__ import annotations

from typing import Any

from .. import limits
from ..content import Part, join_parts, media_part, read_parts
from ..custom_tools import CUSTOM_PARAMETERS, custom_arguments, form_told
from ..failure import bad_field, bad_value, check_choice
from ..fields import add_unread, check_chat, check_count

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""The roles, and what chat templates call them."""

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""The types of parts that are text, and the field that has it."""

READ = (
    "tool_calls", "function_call", "refusal", "name", "tool_call_id",
    "reasoning_content", "reasoning", "thinking",
)  # fmt: skip
"""Fields of a message besides `role` and `content`; others describe it, and are ignored."""

THOUGHT_PARTS = ("thinking", "redacted_thinking")

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that servers have for what a model thought."""


def read_messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages for the chat template.

    Raises:
        Failure: they are no chat; `param` names the place.
    """
    chat = check_chat(given)
    return [_message(message, f"messages[{place}]") for place, message in enumerate(chat)]


def read_tools(given: Any, unread: list[str]) -> tuple[Any, list[str]]:
    """Check that there are not too many tools; return them, and the names of custom ones, for
    which there is a function.
    """
    if not isinstance(given, list):
        return given, []
    check_count(given, "tools", "tools", limits.MAX_TOOLS)
    tools, customs = [], []
    for place, tool in enumerate(given):
        match tool:
            case {"type": "custom", "custom": {"name": str(name), **rest}}:
                if told := form_told(rest.get("format")):
                    add_unread(unread, f"tools[{place}].custom.format")
                function = {
                    "name": name,
                    "description": f"{rest.get('description') or ''}{told}",
                    "parameters": CUSTOM_PARAMETERS,
                }
                tools.append({"type": "function", "function": function})
                customs.append(name)
            case _:
                tools.append(tool)
    return tools, customs


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_value(path, "an object with role and content", message)
    given = {name: message[name] for name in READ if message.get(name)}
    role = check_choice(f"{path}.role", ROLES, message.get("role"))
    calls = given.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise bad_value(f"{path}.tool_calls", "a list of calls", calls)
    if calls is None and "function_call" in given:
        calls = [{"id": "call_0", "type": "function", "function": given["function_call"]}]
    calls = [_call(one) for one in calls or ()]
    content = message.get("content")
    if content is None and role != "assistant":
        raise bad_value(f"{path}.content", "text", None)
    text = content
    if content is not None:
        text = join_parts(read_parts(content, f"{path}.content", _part), between="")
    elif isinstance(given.get("refusal"), str):
        text = given["refusal"]
    read: dict[str, Any] = {"role": ROLES[role], "content": text}
    thought = next((given[name] for name in REASONING if isinstance(given.get(name), str)), None)
    if thought is not None:
        read["reasoning_content"] = thought
    if calls:
        read["tool_calls"] = calls
    return read | {name: given[name] for name in ("name", "tool_call_id") if name in given}


def _call(call: Any) -> Any:
    """Return a call as the call of a function, also if it is one of a custom tool."""
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}, **rest}:
            function = {"name": name, "arguments": custom_arguments(text)}
            return rest | {"type": "function", "function": function}
    return call


def _part(part: Any, path: str) -> list[Part]:
    kind = part.get("type") if isinstance(part, dict) else None
    if (media := media_part(part, path)) is not None:
        return [media]
    if kind in THOUGHT_PARTS:
        return [""]
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise bad_field(path, f'{path} must be a part such as {{"type": "text", "text": …}}')
    return [text]
