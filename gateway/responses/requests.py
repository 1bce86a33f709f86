"""What a request for a response asks of the daemon. Pure: a map in, an `Ask` out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from mlxsup.protocol.codec import pack
from mlxsup.protocol.parameters import SAMPLING

from .. import limits
from ..ask import Ask
from ..failure import bad_field, bad_value
from ..fields import (
    add_to_template,
    check_fields,
    effort_arguments,
    read_format,
    read_model,
    whole_numbers,
)
from ..openai.tokens import COUNTED
from ..pictures import name_details
from .fields import ECHOED, RESPONSE_FIELDS, SAMPLED
from .input import read_history, read_input, read_items, refer, references_in, to_keep
from .kept import Item, Recalled
from .tools import READ, Called, Tools, read_tools, shown_tool

LOGPROBS = "message.output_text.logprobs"
"""The values of `include` that an answer can satisfy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAsk(Ask):
    """A request for a response.

    Attributes:
        called: for names that the client does not know, the functions that they stand for.
        echo: the fields of the response that the request decides; what is long is left out.
        is_stored: true if the response is kept.
        references: the ids of kept items in the input, each with its place.
        items: of the input, as they are kept; empty unless the response is.
    """

    called: dict[str, Called] = field(default_factory=dict)
    echo: dict[str, Any] = field(default_factory=dict)
    is_stored: bool = False
    references: Sequence[tuple[int, str]] = ()
    items: Sequence[Item] = ()

    @property
    def previous(self) -> str:
        """Return the id of the response that this one continues; empty for none."""
        return self.echo.get("previous_response_id") or ""

    def head(self) -> Self:
        """See `Ask`."""
        return replace(Ask.head(self), items=())  # no `super` in a class with slots


def read_response(body: dict[str, Any], recalled: Recalled | None = None) -> ResponseAsk:
    """Read the body of `POST /v1/responses`.

    Args:
        body: of the request.
        recalled: what it refers to; None: it is not known yet, and left out.

    Raises:
        Failure: a field is missing, unknown or of another type; `param` names it.
    """
    unread: list[str] = []
    given = check_fields(body, RESPONSE_FIELDS, unread)
    name_details(given.get("input"), "input", unread)
    whole_numbers(given)
    said = dict(given)
    model = read_model(given)
    is_streamed = given.pop("stream", False)
    is_parallel = given.pop("parallel_tool_calls", True)
    tools = _read_tools(given, unread)
    is_stored = given.pop("store", True)
    if "input" not in given:
        raise bad_value("input", "text", None)
    items = read_items(given.pop("input"))
    references = references_in(items)
    history = []
    if recalled is not None:
        items = refer(items, json.loads(recalled.referred))
        history = read_history(json.loads(recalled.history), tools)
    instructions = given.pop("instructions", "")
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*system, *history, *read_input(items, tools, unread)]
    most = given.pop("max_output_tokens", None)
    if most is not None:
        if type(most) is not int or most < 1:
            raise bad_value("max_output_tokens", "an integer of 1 or more", most)
        given["max_tokens"] = most
    text, reasoning = given.pop("text", {}), given.pop("reasoning", {})
    if "format" in text:
        given["response_format"] = read_format(text["format"], "text.format", unread)
    if "effort" in reasoning:
        add_to_template(given, effort_arguments(reasoning["effort"], "reasoning.effort"))
    if LOGPROBS in given.pop("include", []) or given.get("top_logprobs"):
        given["logprobs"] = True
    for name in (*ECHOED, "previous_response_id"):
        given.pop(name, None)
    return ResponseAsk(
        model=model,
        inputs=({"messages": messages},),
        parameters=given,
        is_streamed=is_streamed,
        has_one_call=not is_parallel,
        names={"response_format": "text.format"},
        unread=unread,
        called=tools.called,
        customs=sorted(tools.customs),
        echo=_echo(said),
        is_stored=is_stored,
        references=references,
        items=to_keep(items) if is_stored else (),
    )


def read_response_count(body: dict[str, Any], recalled: Recalled | None = None) -> ResponseAsk:
    """Read the body of `POST /v1/responses/input_tokens`: the same as a response, without an
    answer.
    """
    ask = read_response({**body, "store": False, "stream": False}, recalled)
    return replace(ask, parameters={**ask.parameters, "tokenize": COUNTED}, is_counted=False)


def _echo(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that its request decides, with the values in effect.

    Sampling is here as it was asked for: what the model's entry adds comes with the first piece.
    """

    def shown(name: str, default: Any = None) -> Any:
        return value if _is_short(value := given.get(name, default)) else default

    reasoning = shown("reasoning", {})
    form = given.get("text", {}).get("format") or {"type": "text"}
    if not _is_short(form):
        form = {"type": form["type"], "name": str(form.get("name", ""))[:64], "schema": None}
    return {
        "previous_response_id": given.get("previous_response_id") or None,
        "instructions": shown("instructions") or None,
        "max_output_tokens": shown("max_output_tokens"),
        "max_tool_calls": shown("max_tool_calls"),
        "tools": [shown_tool(one) for one in shown("tools", []) if one["type"] in READ],
        "tool_choice": shown("tool_choice", "auto"),
        "parallel_tool_calls": shown("parallel_tool_calls", True),
        "text": {"format": form, "verbosity": "medium"},
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        **{name: shown(name, SAMPLING[name].default) for name in SAMPLED},
        "top_logprobs": shown("top_logprobs", 0),
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "store": given.get("store", True),
        "metadata": shown("metadata", {}),
        "user": shown("user"),
        "safety_identifier": shown("safety_identifier"),
        "prompt_cache_key": shown("prompt_cache_key"),
    }


def _is_short(value: Any) -> bool:
    """True if a response may repeat this in three of its events."""
    try:
        return len(pack(value)) <= limits.MAX_ECHO_BYTES
    except (ValueError, OverflowError):
        return False  # too deep, or a number that nothing takes


def _read_tools(given: dict[str, Any], unread: list[str]) -> Tools:
    tools = read_tools(given.pop("tools", []), unread)
    if tools.functions:
        given["tools"] = [{"type": "function", "function": one} for one in tools.functions]
    if "tool_choice" in given:
        given["tool_choice"] = _choice(given["tool_choice"], tools)
    return tools


def _choice(choice: Any, tools: Tools) -> Any:
    """Return a `tool_choice` as the daemon takes it."""
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
        "tool_choice must be auto, none, required, or an object of type function, custom or"
        " allowed_tools",
    )


def _function(chosen: dict[str, Any], tools: Tools) -> dict[str, Any] | None:
    """Return a choice of one function; None for a tool that runs elsewhere."""
    match chosen:
        case {"type": "function" | "custom", "name": str(name), **rest}:
            called = Called(name, str(rest.get("namespace") or ""))
            return {"type": "function", "function": {"name": tools.shown(called)}}
    return None
