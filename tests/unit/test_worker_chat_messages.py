"""What a model without a chat template continues, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.worker.text.chat_messages import text_of_messages

TOOL = {"type": "function", "function": {"name": "f"}}


def said(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire({"messages": said("Hi"), "messages_as_text": True} | values)


def test_texts_become_paragraphs_and_empty_ones_leave_no_gap() -> None:
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    messages = said("Be brief.", "", None, parts)
    assert text_of_messages(body(messages=messages)) == "Be brief.\n\nin parts"


def test_a_content_that_is_no_text_is_named() -> None:
    with pytest.raises(RemoteError) as caught:
        text_of_messages(body(messages=said(7)))
    assert caught.value.message == "messages takes content that is text, not 7"


def test_a_request_that_needs_a_template_is_told_that_there_is_none() -> None:
    expected: list[tuple[dict[str, Any], str, str]] = [
        ({"messages_as_text": False}, ": send prompt instead of messages", "messages"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            ", which chat_template_kwargs are for",
            "chat_template_kwargs",
        ),
        ({"tools": [TOOL]}, ", which tools are shown with", "tools"),
        # What is said first is what helps with all of them.
        (
            {"messages_as_text": False, "chat_template_kwargs": {"a": 1}, "tools": [TOOL]},
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


def test_tools_that_may_not_be_called_need_no_template() -> None:
    assert text_of_messages(body(tools=[TOOL], tool_choice="none")) == "Hi"
