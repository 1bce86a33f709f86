"""The acceptance cases of Open Responses (openresponses.org, specification of 2026-04-24).

The whole response and every event have all that the schema demands.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlxsup.client import Channel, FinishReason

from support.gateway.pictures import PNG_URL
from support.gateway.played_gateway import Item, PlayedDaemon, Response, Site, delta, result

RESPONSE = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model",
    "previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation",
    "parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty",
    "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens", "max_tool_calls",
    "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
"""The fields that the schema demands of a response, and of what is within; their types and values
are in the snapshots of `test_gateway_answers`."""

WITHIN: dict[str, set[str]] = {
    "message": {"id", "status", "role", "content"},
    "output_text": {"text", "annotations", "logprobs"},
    "function_call": {"id", "status", "call_id", "name", "arguments"},
    "reasoning": {"id", "summary", "content"},
    "function": {"name", "description", "parameters", "strict"},
    "reasoning_text": {"text"},
}

PLACE = {"item_id", "output_index", "content_index"}
CALLED = {"item_id", "output_index"}
EVENTS: dict[str, set[str]] = {
    "output_item.added": {"output_index", "item"},
    "output_item.done": {"output_index", "item"},
    "content_part.added": {*PLACE, "part"},
    "content_part.done": {*PLACE, "part"},
    # As OpenAI's SDK has them; the specification had another name for a while.
    "reasoning_text.delta": {*PLACE, "delta"},
    "reasoning_text.done": {*PLACE, "text"},
    "output_text.delta": {*PLACE, "delta", "logprobs"},
    "output_text.done": {*PLACE, "text", "logprobs"},
    "function_call_arguments.delta": {*CALLED, "delta"},
    "function_call_arguments.done": {*CALLED, "arguments"},
    **{state: {"response"} for state in ("created", "in_progress", "completed", "incomplete")},
}


def missing(value: Any) -> list[tuple[str, str]]:
    """Return each field that the schema demands of a value, or of one within, and it has not."""
    if isinstance(value, list):
        return [one for item in value for one in missing(item)]
    if not isinstance(value, dict):
        return []
    kind = "response" if value.get("object") == "response" else str(value.get("type", ""))
    demanded = {"response": RESPONSE, **WITHIN}.get(kind, set())
    if kind.startswith("response."):
        demanded = EVENTS[kind.removeprefix("response.")]
    own = [(kind, name) for name in sorted(demanded - value.keys())]
    return own + missing(list(value.values()))


def said(text: str, end: FinishReason = FinishReason.STOP) -> list[Item]:
    return [delta(text), result(text, end)]


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
CALLING: list[Item] = [
    delta(json.dumps(CALL), channel=Channel.TOOL_CALL),
    result("", FinishReason.TOOL_CALLS, tool_calls=[CALL]),
]
WEATHER = {
    "type": "function", "name": "get_weather", "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}},
                   "required": ["place"]},
}  # fmt: skip
ASKED = [message("user", "How is the weather in Oslo?")]


@dataclass(frozen=True)
class Case:
    """One case: bodies that are sent one after the other, the answers of the daemon to them, and
    the type of item that the last response must have."""

    bodies: list[dict[str, Any]]
    answers: list[list[Item]] = field(default_factory=lambda: [said("Hi.")])
    shows: str = "message"
    status: str = "completed"


CASES = {
    "basic text": Case([{"input": [message("user", "Say hello.")]}]),
    "system prompt": Case([
        {"input": [message("system", "Talk like a pirate."), message("user", "Say hello.")]}
    ]),
    "tool call": Case([{"input": ASKED, "tools": [WEATHER]}], [CALLING], "function_call"),
    "forced call": Case(
        [{"input": ASKED, "tools": [WEATHER], "tool_choice": "required"}], [CALLING],
        "function_call",
    ),
    "result of a call": Case(
        [{"tools": [WEATHER], "input": [
            *ASKED,
            {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"}]}],
    ),
    "turns": Case([{"input": [
        message("user", "I am Ann."), message("assistant", "Hello Ann."),
        message("user", "Who am I?")]}]),
    "image input": Case([{"input": [message("user", [
        {"type": "input_text", "text": "What is in this image?"},
        {"type": "input_image", "image_url": PNG_URL}])]}]),
    "previous response": Case(
        [{"input": "I am Ann."}, {"input": "Who am I?", "previous_response_id": "resp_r1"}],
        [said("Hello."), said("Ann.")],
    ),
    "reasoning": Case(
        [{"input": "Think.", "reasoning": {"effort": "low", "summary": "auto"}}],
        [[delta("hm", channel=Channel.REASONING), *said("Yes.")]], "reasoning",
    ),
    "every field": Case([{
        "input": "a", "temperature": 0.7, "top_p": 0.9, "presence_penalty": 1, "store": False,
        "frequency_penalty": -1, "max_tool_calls": 3, "safety_identifier": "s", "top_logprobs": 2,
        "prompt_cache_key": "k", "service_tier": "auto", "truncation": "auto",
        "metadata": {"a": "b"}, "instructions": "be brief", "max_output_tokens": 16,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "background": False,
        "include": ["message.output_text.logprobs"], "parallel_tool_calls": False,
        "stream_options": {"include_obfuscation": False},
    }]),
    "limit": Case(
        [{"input": "a"}], [said("b", FinishReason.LENGTH)], status="incomplete"
    ),
}  # fmt: skip


def responses_to(case: Case, *, is_streamed: bool) -> list[Response]:
    async def ask() -> list[Response]:
        site = Site(PlayedDaemon(*case.answers))
        bodies = [{"model": "m", "stream": is_streamed, **body} for body in case.bodies]
        return [await site.ask("POST", "/v1/responses", body) for body in bodies]

    return asyncio.run(ask())


@pytest.mark.parametrize("name", CASES)
def test_response_and_events_have_what_the_schema_demands(name: str) -> None:
    case = CASES[name]
    *_, last = responses_to(case, is_streamed=False)
    response = last.json()
    assert (last.status, response["status"], missing(response)) == (200, case.status, [])
    assert case.shows in [item["type"] for item in response["output"]]
    assert (response["completed_at"] is None) is (case.status == "incomplete")
    *_, last = responses_to(case, is_streamed=True)
    events = last.named_events()
    assert missing([data for _, data in events]) == []
    kinds = [kind.removeprefix("response.") for kind, _ in events]
    assert [*kinds[:2], kinds[-1]] == ["created", "in_progress", case.status]
    if case.shows == "function_call":
        assert kinds[2:-1] == [
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done",
        ]  # fmt: skip


def test_what_is_long_is_not_repeated_and_nothing_else_is_said_of_it() -> None:
    long = "x" * 70_000
    form = {"type": "json_schema", "name": "n", "schema": {"description": long}, "strict": True}
    body = {
        "input": "a", "instructions": long, "metadata": {"a": long}, "text": {"format": form},
        "tools": [WEATHER | {"description": long}], "user": long,
    }  # fmt: skip
    (answer,) = responses_to(Case([body]), is_streamed=False)
    response = answer.json()
    assert missing(response) == []
    assert len(answer.body) < 4_000
    assert response["text"]["format"] == {"type": "json_schema", "name": "n", "schema": None}
