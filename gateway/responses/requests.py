"""What a request for a response asks of the daemon. Pure: a map in, an `Ask` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxsup.protocol.codec import pack
from mlxsup.protocol.parameters import MOST_TOKENS

from .. import limits
from ..ask import Ask, add_to_template, effort_arguments
from ..failure import bad_field
from ..fields import check_fields, read_model, whole_numbers
from ..turns import join_turns
from .fields import REASONING_FIELDS, RESPONSE_FIELDS, TEXT_FIELDS
from .input import read_input
from .tools import Called, Tools, read_tools

NOT_INCLUDED = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAsk(Ask):
    """A request for a response.

    Attributes:
        called: for names that the client does not know, the functions that they stand for.
        customs: the names of functions that stand for custom tools.
        echo: what the response says of the request; null, or no tools, for what is long.
    """

    called: dict[str, Called] = field(default_factory=dict)
    customs: Sequence[str] = ()
    echo: dict[str, Any] = field(default_factory=dict)


def read_response(body: dict[str, Any]) -> ResponseAsk:
    """Reads the body of `POST /v1/responses`.

    Raises:
        Failure: a field is missing, unknown or of another type; `param` names it.
    """
    unread: list[str] = []
    given = check_fields(body, RESPONSE_FIELDS, unread)
    whole_numbers(given)
    model = read_model(given)
    is_streamed = _flag(given, "stream", default=False)
    is_parallel = _flag(given, "parallel_tool_calls", default=True)
    echo = {"parallel_tool_calls": is_parallel, **_echo(given)}
    tools = _read_tools(given, echo, unread)
    messages = _read_messages(given, tools, unread)
    _read_limit(given)
    _read_text(given, unread)
    _read_reasoning(given, unread)
    _read_include(given)
    return ResponseAsk(
        model=model,
        inputs=({"messages": messages},),
        parameters=given,
        is_streamed=is_streamed,
        has_one_call=not is_parallel,
        unread=unread,
        called=tools.called,
        customs=sorted(tools.customs),
        echo=echo,
    )


def _echo(given: dict[str, Any]) -> dict[str, Any]:
    names = ("instructions", "max_output_tokens", "temperature", "top_p", "text", "reasoning")
    return {name: value if _is_short(value := given.get(name)) else None for name in names}


def _is_short(value: Any) -> bool:
    """True if a response may repeat this in three of its events."""
    try:
        return len(pack(value)) <= limits.MAX_ECHO_BYTES
    except (ValueError, OverflowError):
        return False  # too deep, or a number that nothing takes


def _flag(given: dict[str, Any], name: str, *, default: bool) -> bool:
    value = given.pop(name, default)
    if not isinstance(value, bool):
        raise bad_field(name, f"{name} takes true or false")
    return value


def _read_messages(given: dict[str, Any], tools: Tools, unread: list[str]) -> list[dict[str, Any]]:
    instructions = given.pop("instructions", "")
    if not isinstance(instructions, str):
        raise bad_field("instructions", "instructions takes a text")
    if "input" not in given:
        raise bad_field("input", "input is missing; it takes a text")
    messages = read_input(given.pop("input"), tools, unread)
    system = [{"role": "system", "content": instructions}] if instructions else []
    return join_turns([*system, *messages])


def _read_limit(given: dict[str, Any]) -> None:
    most = given.pop("max_output_tokens", None)
    if most is None:
        return
    if type(most) is not int or most < 1:
        raise bad_field("max_output_tokens", "max_output_tokens takes an integer from 1 up")
    given |= {"max_tokens": min(most, MOST_TOKENS), "cap_max_tokens": True}


def _read_tools(given: dict[str, Any], echo: dict[str, Any], unread: list[str]) -> Tools:
    tools = read_tools(given.pop("tools", []), unread)
    shown = [{"type": "function", "strict": False, **one} for one in tools.functions]
    echo["tools"] = shown if _is_short(shown) else []
    if tools.functions:
        given["tools"] = [{"type": "function", "function": one} for one in tools.functions]
    choice = given.get("tool_choice", "auto")
    if "tool_choice" in given:
        given["tool_choice"] = _choice(choice, tools)
    echo["tool_choice"] = choice
    return tools


def _choice(choice: Any, tools: Tools) -> Any:
    """Return a `tool_choice` as the daemon takes it.

    Raises:
        Failure: it is of no form that it could have.
    """
    match choice:
        case "auto" | "none" | "required":
            return choice
        case {"type": "function" | "custom", "name": str()}:
            return _function(choice, tools)
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            named = [_function(one, tools) for one in allowed if isinstance(one, dict)]
            called = [one for one in named if one is not None]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": called}}
    raise bad_field(
        "tool_choice",
        "tool_choice takes auto, none, required, or an object of type function, custom or"
        " allowed_tools",
    )


def _function(chosen: dict[str, Any], tools: Tools) -> dict[str, Any] | None:
    """A choice of one function; None for a tool that runs elsewhere."""
    match chosen:
        case {"type": "function" | "custom", "name": str(name), **rest}:
            called = Called(name, str(rest.get("namespace") or ""))
            return {"type": "function", "function": {"name": tools.shown(called)}}
    return None


def _read_text(given: dict[str, Any], unread: list[str]) -> None:
    text = given.pop("text", {})
    if not isinstance(text, dict):
        raise bad_field("text", "text takes an object")
    match check_fields(text, TEXT_FIELDS, unread, within="text").get("format", {"type": "text"}):
        case {"type": "text"}:
            pass
        case {"type": "json_object"}:
            given["response_format"] = {"type": "json_object"}
        case {"type": "json_schema", "schema": dict(schema), **rest}:
            form = {"schema": schema, "strict": rest.get("strict") is True}
            given["response_format"] = {"type": "json_schema", "json_schema": form}
        case _:
            raise bad_field(
                "text.format",
                "text.format takes the type text, json_object or json_schema (with schema)",
            )


def _read_reasoning(given: dict[str, Any], unread: list[str]) -> None:
    reasoning = given.pop("reasoning", {})
    if not isinstance(reasoning, dict):
        raise bad_field("reasoning", "reasoning takes an object")
    effort = check_fields(reasoning, REASONING_FIELDS, unread, within="reasoning").get("effort")
    if effort is not None:
        add_to_template(given, effort_arguments(effort, "reasoning.effort"))


def _read_include(given: dict[str, Any]) -> None:
    include = given.pop("include", [])
    if not isinstance(include, list):
        raise bad_field("include", "include takes a list")
    if NOT_INCLUDED in include:
        message = f"include: {NOT_INCLUDED} is not there yet; /v1/chat/completions has `logprobs`"
        raise bad_field("include", message)
