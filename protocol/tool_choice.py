"""A request's `tool_choice`: the functions that an answer may call, and whether it must.

Also the warnings about calls that are none, or not what a schema demands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RemoteError, invalid, unfit

UNREADABLE_CALL = "the model began a tool call that cannot be read; it is left in the text"
"""The warning of an answer with a call that is none, which metrics count."""

UNFIT_CALL = "the arguments of a call do not match the schema of its strict tool"
"""The warning of an answer with such a call, which metrics count."""

EXPECTED = (
    '"auto", "none", "required", {"type": "function", "function": {"name": …}} or {"type":'
    ' "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Functions that an answer may call.

    Attributes:
        names: of the functions that may be called.
        is_forced: true if the answer must be a call.
    """

    names: frozenset[str] = frozenset()
    is_forced: bool = False


def read_tool_choice(value: object, offered: Sequence[str]) -> ToolChoice:
    """Read the value of `tool_choice`: in the form of OpenAI's chats, or of its responses, or of
    Anthropic.

    Args:
        value: of the field; None if it is absent.
        offered: the names of the request's tools.

    Raises:
        RemoteError: `invalid_request`: it is of another form, names a function that the request
            does not offer, or forces a call of none.
    """
    match value:
        case {"type": "auto" | "none" | "required" | "any" as kind, **rest} if not rest:
            value = kind  # as Anthropic has it
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            value = {"type": "allowed_tools", **allowed}
    match value:
        case None | "auto":
            return ToolChoice(names=frozenset(offered))
        case "none":
            return ToolChoice()
        case "required" | "any":
            names: list[Any] = list(offered)
            is_forced = True
        case (
            {"type": "function", "function": {"name": name}}
            | {"type": "custom", "custom": {"name": name}}
            | {"type": "function" | "tool", "name": name}
        ):
            names, is_forced = [name], True
        case {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": list(tools),
        }:
            names, is_forced = [_name_in(tool) for tool in tools], mode == "required"
        case _:
            shown = repr(value)[:40] if isinstance(value, str) else ""
            raise invalid("tool_choice", EXPECTED, value, shown=shown)
    for name in names:
        if name not in offered:
            raise _unknown(name, offered)
    if is_forced and not names:
        raise unfit("tool_choice", "tool_choice needs tools to choose from, and there are none")
    return ToolChoice(names=frozenset(names), is_forced=is_forced)


def _name_in(tool: object) -> Any:
    match tool:
        case {"function": {"name": name}} | {"custom": {"name": name}} | {"name": name}:
            return name
    return tool


def _unknown(name: object, offered: Sequence[str]) -> RemoteError:
    expected = f"the name of one of the tools ({', '.join(offered)[:200] or 'there are none'})"
    return invalid("tool_choice", expected, shown=repr(name)[:60])
