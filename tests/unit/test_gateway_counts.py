"""How much of something a body may have, and how long it may take to read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from mlxsup.gateway import limits
from mlxsup.gateway.anthropic.requests import read_message
from mlxsup.gateway.ask import Ask
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.openai.requests import read_chat
from mlxsup.gateway.responses.requests import read_response
from mlxsup.gateway.turns import join_turns

MANY = limits.MAX_ITEMS
TURN = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 3200}]}
TOOL = {"type": "function", "function": {"name": "f"}}

Read = Callable[[dict[str, Any]], Ask]


def chat(**fields: Any) -> Ask:
    """A chat with these fields."""
    return read_chat({"model": "m", "messages": [TURN], **fields})


def message(**fields: Any) -> Ask:
    """A message with these fields."""
    return read_message({"model": "m", "max_tokens": 1, "messages": [TURN], **fields})


def response(**fields: Any) -> Ask:
    """A response with these fields."""
    return read_response({"model": "m", "input": "x", **fields})


def turn_of(kind: str, count: int) -> dict[str, Any]:
    """A message of so many parts."""
    return {"role": "user", "content": [{"type": kind, "text": "x"}] * count}


COUNTED: list[tuple[Callable[..., Ask], Callable[[int], dict[str, Any]], int, str]] = [
    (chat, lambda n: {"messages": [TURN] * n}, MANY, "messages"),
    (chat, lambda n: {"messages": [turn_of("text", n)]}, MANY, "messages[0].content"),
    (chat, lambda n: {"tools": [TOOL] * n}, limits.MAX_TOOLS, "tools"),
    (message, lambda n: {"messages": [TURN] * n}, MANY, "messages"),
    (message, lambda n: {"messages": [turn_of("text", n)]}, MANY, "messages[0].content"),
    (message, lambda n: {"system": turn_of("text", n)["content"]}, MANY, "system"),
    (message, lambda n: {"tools": [{"name": "f", "input_schema": {}}] * n}, limits.MAX_TOOLS,
     "tools"),
    (response, lambda n: {"input": [TURN] * n}, MANY, "input"),
    (response, lambda n: {"input": [turn_of("input_text", n)]}, MANY, "input[0].content"),
    (response, lambda n: {"tools": [{"type": "function", "name": "f"}] * n}, limits.MAX_TOOLS,
     "tools"),
    (response, lambda n: {"tools": [{"type": "namespace", "name": "s", "tools": [
        {"type": "function", "name": "f"}] * n}]}, limits.MAX_TOOLS, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "fields", "most", "path"), COUNTED)
def test_what_a_body_lists_is_counted(
    read: Callable[..., Ask], fields: Callable[[int], dict[str, Any]], most: int, path: str
) -> None:
    read(**fields(most))
    with pytest.raises(Failure) as caught:
        read(**fields(most + 1))
    assert (caught.value.status, caught.value.param) == (400, path)
    assert f"{path} takes at most {most} " in caught.value.message
    assert f"not {most + 1}: send fewer" in caught.value.message


LONG: dict[str, Callable[[], object]] = {
    "turns of one role": lambda: join_turns([{"role": "user", "content": "x" * 60}] * 100_000),
    "messages of one role": lambda: message(messages=[TURN | {"content": "x" * 800}] * MANY),
    "items of one role": lambda: response(input=[TURN | {"content": "x" * 800}] * MANY),
    "texts of the assistant": lambda: response(
        input=[{"role": "assistant", "content": "x" * 800}] * MANY
    ),
    "thoughts of the assistant": lambda: response(input=[THOUGHT, CALL] * (MANY // 2)),
    "calls among many tools": lambda: response(
        input=[CALL] * MANY, tools=[{"type": "function", "name": f"f{n}"} for n in range(1000)]
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_reading_takes_no_longer_than_the_length_calls_for(what: str) -> None:
    begun_s = time.thread_time()
    LONG[what]()
    assert time.thread_time() - begun_s < 1.0
