"""The acceptance cases of Open Responses (openresponses.org, specification of 2026-04-24).

The whole response and every event have all that the schema demands.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlxsup.client import Channel, FinishReason

from support.gateway.pictures import PNG_URL
from support.gateway.played_gateway import Item, PlayedDaemon, Response, Site, delta, result

Check = Callable[[Any], bool]


def of(*kinds: type) -> Check:
    """Return a check of a value's type; true and false are no numbers."""
    return lambda value: type(value) in kinds


TEXT, NUMBER, COUNT, YES_OR_NO = of(str), of(int, float), of(int), of(bool)
NONE = type(None)


def one_of(*values: Any) -> Check:
    return lambda value: value in values


def having(**fields: Check) -> Check:
    """Return a check of an object that has these fields, and maybe others."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in fields.items())
    )


def several(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(one) for one in value)


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


USAGE = having(
    input_tokens=COUNT,
    output_tokens=COUNT,
    total_tokens=COUNT,
    input_tokens_details=having(cached_tokens=COUNT),
    output_tokens_details=having(reasoning_tokens=COUNT),
)

PART = having(
    type=one_of("output_text"), text=TEXT, annotations=several(having()), logprobs=of(list)
)

ITEMS: dict[str, Check] = {
    "message": having(id=TEXT, status=TEXT, role=one_of("assistant"), content=several(PART)),
    "function_call": having(id=TEXT, status=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT),
    "reasoning": having(id=TEXT, summary=of(list), content=of(list)),
}


def is_item(value: Any) -> bool:
    return ITEMS[value["type"]](value)


def is_part(value: Any) -> bool:
    return value["type"] == "reasoning_text" or PART(value)


RESOURCE: dict[str, Check] = {
    "id": TEXT,
    "object": one_of("response"),
    "created_at": COUNT,
    "completed_at": of(int, NONE),
    "status": one_of("in_progress", "completed", "incomplete", "failed"),
    "incomplete_details": or_none(having(reason=TEXT)),
    "model": TEXT,
    "previous_response_id": of(str, NONE),
    "instructions": of(str, NONE),
    "output": several(is_item),
    "error": or_none(having(code=TEXT, message=TEXT)),
    "tools": several(
        having(
            type=one_of("function"), name=TEXT, description=of(str, NONE),
            parameters=of(dict, NONE), strict=of(bool, NONE),
        )
    ),
    "tool_choice": of(str, dict),
    "truncation": one_of("auto", "disabled"),
    "parallel_tool_calls": YES_OR_NO,
    "text": having(format=having(type=TEXT)),
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": COUNT,
    "temperature": NUMBER,
    "reasoning": or_none(having(effort=of(str, NONE), summary=of(str, NONE))),
    "usage": or_none(USAGE),
    "max_output_tokens": of(int, NONE),
    "max_tool_calls": of(int, NONE),
    "store": YES_OR_NO,
    "background": YES_OR_NO,
    "service_tier": TEXT,
    "metadata": of(dict),
    "safety_identifier": of(str, NONE),
    "prompt_cache_key": of(str, NONE),
}  # fmt: skip
"""The schema's demands on a response."""

PLACE: dict[str, Check] = {"item_id": TEXT, "output_index": COUNT, "content_index": COUNT}
CALLED: dict[str, Check] = {"item_id": TEXT, "output_index": COUNT}

EVENTS: dict[str, dict[str, Check]] = {
    "response.output_item.added": {"output_index": COUNT, "item": is_item},
    "response.output_item.done": {"output_index": COUNT, "item": is_item},
    "response.content_part.added": {**PLACE, "part": is_part},
    "response.content_part.done": {**PLACE, "part": is_part},
    # As OpenAI's SDK has them; the specification had another name for a while.
    "response.reasoning_text.delta": {**PLACE, "delta": TEXT},
    "response.reasoning_text.done": {**PLACE, "text": TEXT},
    "response.output_text.delta": {**PLACE, "delta": TEXT, "logprobs": of(list)},
    "response.output_text.done": {**PLACE, "text": TEXT, "logprobs": of(list)},
    "response.function_call_arguments.delta": {**CALLED, "delta": TEXT},
    "response.function_call_arguments.done": {**CALLED, "arguments": TEXT},
    **{
        f"response.{state}": {"response": lambda value: not wrong_in(value, RESOURCE)}
        for state in ("created", "in_progress", "completed", "incomplete", "failed")
    },
}
"""The schema's demands on each event."""


def wrong_in(value: dict[str, Any], fields: dict[str, Check]) -> list[str]:
    """Return the names of fields that are missing, or are not as they must be."""
    return [name for name, right in fields.items() if name not in value or not right(value[name])]


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
def test_response_has_what_the_schema_demands(name: str) -> None:
    case = CASES[name]
    *_, last = responses_to(case, is_streamed=False)
    response = last.json()
    assert last.status == 200
    assert not wrong_in(response, RESOURCE)
    assert response["status"] == case.status
    assert case.shows in [item["type"] for item in response["output"]]


@pytest.mark.parametrize("name", CASES)
def test_events_have_what_the_schema_demands(name: str) -> None:
    case = CASES[name]
    *_, last = responses_to(case, is_streamed=True)
    events = last.named_events()
    wrong = [(kind, bad) for kind, data in events if (bad := wrong_in(data, EVENTS[kind]))]
    assert not wrong
    kinds = [kind for kind, _ in events]
    assert [*kinds[:2], kinds[-1]] == [
        "response.created", "response.in_progress", f"response.{case.status}"
    ]  # fmt: skip
    if case.shows == "function_call":
        assert kinds[2:-1] == [
            "response.output_item.added", "response.function_call_arguments.delta",
            "response.function_call_arguments.done", "response.output_item.done",
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
    assert not wrong_in(response, RESOURCE)
    assert len(answer.body) < 4_000
    assert response["text"]["format"] == {"type": "json_schema", "name": "n", "schema": None}
