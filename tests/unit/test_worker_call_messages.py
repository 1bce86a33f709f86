"""Calls and results in the messages of a request, as templates are given them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.worker.text.chat_messages import plain_messages, with_text_arguments
from mlxsup.worker.text.tool_calls import CallIds


def called(call_id: Any = None, **function: Any) -> dict[str, Any]:
    return ({} if call_id is None else {"id": call_id}) | {"function": function}


def test_messages_become_plain_and_keep_what_else_they_say() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "x": 1},
        {"role": "system", "content": None},
        {"role": "assistant", "tool_calls": None},
    ]
    assert plain_messages(given) == [
        {"role": "user", "content": "ab", "x": 1},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    assert given[1] == {"role": "system", "content": None}, "the request's own stay as they are"


@pytest.mark.parametrize(
    "content", [5, {}, [{"type": "image"}], [{"text": "a"}, {"text": 5}], [{"text": "a"}, "b"]]
)
def test_content_that_is_no_text_is_refused_C7(content: Any) -> None:
    with pytest.raises(RemoteError) as caught:
        plain_messages([{"role": "user", "content": content}])
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message.startswith("messages takes content that is text, not ")


@pytest.mark.parametrize(
    ("arguments", "plain"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("{", "{"), ("[" * 100_000, "[" * 100_000), ({"b": 2},) * 2],
)
def test_arguments_are_maps_if_they_can_be(arguments: Any, plain: Any) -> None:
    messages = [{"role": "assistant", "tool_calls": [called("i", name="f", arguments=arguments)]}]
    [message] = plain_messages(messages)
    assert message["tool_calls"] == [
        {"type": "function", "id": "i", "function": {"name": "f", "arguments": plain}}
    ]


def test_arguments_are_text_for_templates_that_need_it() -> None:
    calls = [called("i", name="f", arguments={"a": "é"}), called("j", arguments="x"), {"id": 5}]
    messages: list[dict[str, Any]] = [
        {"role": "user"},
        {"role": "assistant", "tool_calls": calls, "x": 1},
    ]
    assert with_text_arguments(messages) == [
        {"role": "user"},
        {"role": "assistant", "x": 1,
         "tool_calls": [called("i", name="f", arguments='{"a": "é"}'), *calls[1:]]},
    ]  # fmt: skip


def ids_of(messages: list[dict[str, Any]], ids: CallIds) -> list[Any]:
    found: list[Any] = []
    for message in plain_messages(messages, ids):
        found += [call["id"] for call in message.get("tool_calls", ())]
        found += [message["tool_call_id"]] if "tool_call_id" in message else []
    return found


def test_ids_of_calls_follow_from_those_given_or_from_their_place() -> None:
    turn = {"role": "assistant", "tool_calls": [called("a b", name="f"), called(None, name="g")]}
    assert ids_of([turn, turn], CallIds.OURS) == [
        CallIds.OURS.make("f", 0, "a b"),
        CallIds.OURS.make("g", 1, "call"),
        CallIds.OURS.make("f", 0, "a b"),
        CallIds.OURS.make("g", 3, "call"),
    ]
    assert ids_of([turn, turn], CallIds.NUMBERED) == [
        f"functions.{name}:{number}" for number, name in enumerate("fgfg")
    ]
    nameless = {"role": "assistant", "tool_calls": [called("", x=1), called(5, name=6)]}
    assert ids_of([nameless], CallIds.NUMBERED) == ["functions.:0", "functions.6:1"]
    assert ids_of([nameless], CallIds.OURS) == [
        CallIds.OURS.make("", number, "call") for number in (0, 1)
    ]


def test_a_type_that_was_given_is_kept() -> None:
    call = {"type": "other", **called("i", name="f")}
    [message] = plain_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [call]


def test_results_belong_to_the_latest_calls_and_each_to_one() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [called("a", name="f")]},
        {"role": "assistant", "tool_calls": [called("b", name="g"), called("c", name="h")]},
        {"role": "tool", "tool_call_id": "a", "content": "too late"},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "name": "own", "content": "3"},
    ]
    assert plain_messages(messages)[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "too late"},
        {"role": "tool", "tool_call_id": "c", "content": "1", "name": "h"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "tool_call_id": "b", "content": "3", "name": "own"},
    ]
