"""What a request in Anthropic's form asks of the daemon. Pure: a map in, an `Ask` out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlxsup.client.thinking import thinking_arguments
from mlxsup.protocol.parameters import MOST_TOKENS

from ..ask import Ask
from ..content import read_text
from ..failure import bad_value, check_choice
from ..fields import (
    add_to_template,
    check_fields,
    effort_arguments,
    read_format,
    read_model,
    whole_numbers,
)
from ..openai.tokens import COUNTED
from .conversation import read_messages, read_system, read_tools
from .fields import COUNT_FIELDS, MESSAGES_FIELDS

THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}

CHOICES = {"auto": "auto", "none": "none", "any": "required"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAsk(Ask):
    """A request for a message.

    Attributes:
        shows_thinking: whether the reasoning is a part of the answer.
        max_tokens: as they were asked for.
    """

    shows_thinking: bool = False
    max_tokens: int = 0


def read_message(body: dict[str, Any]) -> MessageAsk:
    """Read the body of `POST /v1/messages`.

    Raises:
        Failure: a field is missing, unknown or of another type; `param` names it.
    """
    unread: list[str] = []
    given = check_fields(body, MESSAGES_FIELDS, unread)
    whole_numbers(given)
    max_tokens = given.pop("max_tokens", None)
    if type(max_tokens) is not int or max_tokens < 1:
        raise bad_value("max_tokens", "an integer of 1 or more", max_tokens)
    is_streamed = given.pop("stream", False)
    if "stop_sequences" in given:
        given["stop"] = given.pop("stop_sequences")
        if not isinstance(given["stop"], list):
            raise bad_value("stop_sequences", "a list of texts", given["stop"])
    given["max_tokens"] = max_tokens
    return _ask(given, unread, is_streamed=is_streamed, max_tokens=max_tokens)


def read_count(body: dict[str, Any]) -> MessageAsk:
    """Read the body of `POST /v1/messages/count_tokens`: as a message, without an answer."""
    unread: list[str] = []
    given = check_fields(body, COUNT_FIELDS, unread) | {"tokenize": COUNTED}
    return replace(_ask(given, unread, is_streamed=False, max_tokens=0), is_counted=False)


def _ask(
    given: dict[str, Any], unread: list[str], *, is_streamed: bool, max_tokens: int
) -> MessageAsk:
    model = read_model(given)
    system = read_system(given.pop("system", None))
    chat = given.pop("messages", [])
    messages = [*system, *read_messages(chat)]
    has_one_call = _read_tools(given, chat, unread)
    asked, shows_thinking = _thinking(given.pop("thinking", None))
    _read_output(given, asked, unread)
    add_to_template(given, asked)
    return MessageAsk(
        model=model,
        inputs=({"messages": messages},),
        parameters=given,
        template=thinking_arguments(thinks=False),
        is_streamed=is_streamed,
        has_one_call=has_one_call,
        shows_thinking=shows_thinking,
        max_tokens=min(max_tokens, MOST_TOKENS),
        names=NAMES,
        unread=unread,
    )


def _read_tools(given: dict[str, Any], chat: Any, unread: list[str]) -> bool:
    """Read the tools and the choice between them; return whether one call is enough."""
    if "tools" in given:
        given["tools"] = read_tools(given["tools"], chat, given.get("tool_choice"), unread)
        if not given["tools"]:
            del given["tools"]
    choice = given.pop("tool_choice", None)
    if choice is None:
        return False
    kind = check_choice("tool_choice.type", (*CHOICES, "tool"), choice.get("type"))
    if kind == "tool":
        name = read_text(choice, "name", "tool_choice")
        given["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        given["tool_choice"] = CHOICES[kind]
    has_one_call: bool = choice.get("disable_parallel_tool_use", False)
    return has_one_call


def _thinking(thinking: dict[str, Any] | None) -> tuple[dict[str, Any], bool]:
    """Return what the chat template is to be given, and whether the reasoning is shown."""
    if thinking is None:
        return {}, False
    thinks = THINKS[check_choice("thinking.type", THINKS, thinking.get("type"))]
    is_shown = thinks and thinking.get("display") != "omitted"
    return thinking_arguments(thinks=thinks), is_shown


def _read_output(given: dict[str, Any], template: dict[str, Any], unread: list[str]) -> None:
    """Read `output_config`: the effort is for the template, the format for the daemon."""
    config = given.pop("output_config", {})
    if "effort" in config:
        template |= effort_arguments(config["effort"], "output_config.effort")
    if "format" in config:
        given["response_format"] = read_format(config["format"], "output_config.format", unread)
