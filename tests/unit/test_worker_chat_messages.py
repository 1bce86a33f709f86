"""Messages as templates take them: calls and results under ids that fit, texts, arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.worker.text.chat_messages import plain_messages, text_of_messages, with_text_arguments
from mlxsup.worker.text.tool_calls import CallIds


def call(call_id: str | None, name: str = "weather") -> dict[str, Any]:
    function = {"name": name, "arguments": '{"city": "Rome"}'}
    return ({} if call_id is None else {"id": call_id}) | {"function": function}


@pytest.mark.parametrize("ids", list(CallIds))
@pytest.mark.parametrize(
    "given_id", ["call_0123456789abcdef01234567", "functions.f:3", "Ab3dE6gH9"]
)
def test_results_find_their_calls_under_ids_that_fit(ids: CallIds, given_id: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call(given_id), call("z", "time")]},
        {"role": "tool", "tool_call_id": "z", "content": "noon"},
        {"role": "tool", "tool_call_id": given_id, "content": "rain"},
    ]
    said, second, first = plain_messages(messages, ids)
    assert said["content"] == ""
    made = [one["id"] for one in said["tool_calls"]]
    assert all(ids.fits(one) for one in made)
    assert len(set(made)) == 2
    assert [first["tool_call_id"], second["tool_call_id"]] == made
    assert (first["name"], second["name"]) == ("weather", "time")
    assert said["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    text = with_text_arguments([said])[0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(text) == {"city": "Rome"}


def test_calls_and_results_without_ids_go_by_their_order() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call(None), call(None, "time")]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "one too many"},
    ]
    said, rain, noon, odd = plain_messages(messages)
    assert [rain["tool_call_id"], noon["tool_call_id"]] == [c["id"] for c in said["tool_calls"]]
    assert (rain["name"], noon["name"]) == ("weather", "time")
    assert odd == {"role": "tool", "content": "one too many"}


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


CHAT_TOOL = {"type": "function", "function": {"name": "f"}}


def said(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire({"messages": said("Hi"), "messages_as_text": True} | values)


def test_texts_become_paragraphs_and_empty_ones_leave_no_gap() -> None:
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    messages = said("Be brief.", "", None, parts)
    assert text_of_messages(body(messages=messages)) == "Be brief.\n\nin parts"


def test_a_request_that_needs_a_template_is_told_that_there_is_none() -> None:
    expected: list[tuple[dict[str, Any], str, str]] = [
        ({"messages_as_text": False}, ": send prompt instead of messages", "messages"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            ", which chat_template_kwargs are for",
            "chat_template_kwargs",
        ),
        ({"tools": [CHAT_TOOL]}, ", which tools are shown with", "tools"),
        # What is said first is what helps with all of them.
        (
            {
                "messages_as_text": False,
                "chat_template_kwargs": {"a": 1},
                "tools": [CHAT_TOOL],
            },
            ": send prompt instead of messages",
            "messages",
        ),
    ]
    for asked, problem, parameter in expected:
        with pytest.raises(RemoteError) as caught:
            text_of_messages(body(**asked))
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert caught.value.message == f"this model has no chat template{problem}"
        assert caught.value.detail == {"parameter": parameter}
