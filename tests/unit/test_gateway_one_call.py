"""An answer with at most one call, in each API: what comes after it is left out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxsup.client import Channel, FinishReason
from mlxsup.protocol.message import Logprobs, TokenLogprob

from support.played_gateway import PlayedDaemon, Response, Site, delta, result

HI = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "parallel_tool_calls": False},
    MESSAGES: {
        "messages": HI,
        "max_tokens": 99,
        "thinking": {"type": "enabled"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
    RESPONSES: {"input": "hi", "parallel_tool_calls": False},
}


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}


def line(name: str) -> str:
    function = f'{{"name":"{name}","arguments":"{{}}"}}'
    return f'{{"id":"{name}","type":"function","function":{function}}}\n'


def items_of(*called: str) -> list[Any]:
    """An answer that thinks, speaks, calls, and does all of that once more."""
    return [
        delta("hm", channel=Channel.REASONING),
        delta("yes"),
        *(delta(one, channel=Channel.TOOL_CALL) for one in called),
        delta("more", channel=Channel.REASONING),
        delta("more"),
        result(
            "yesmore",
            FinishReason.TOOL_CALLS,
            reasoning="hmmore",
            tool_calls=[call("f"), call("g")],
        ),
    ]


def asked(path: str, items: list[Any], **more: Any) -> Response:
    body = {"model": "m", **BODIES[path], **more}
    return asyncio.run(Site(PlayedDaemon(items)).ask("POST", path, body))


@pytest.mark.parametrize("called", [(line("f"), line("g")), (line("f") + line("g"),)])
def test_a_whole_answer_ends_with_the_first_call(called: tuple[str, ...]) -> None:
    items = items_of(*called)
    (choice,) = asked(CHAT, items).json()["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": [call("f")],
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    blocks = asked(MESSAGES, items).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"], blocks[2]["name"]) == ("hm", "yes", "f")
    output = asked(RESPONSES, items).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[2]["name"] == "f"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("called", [(line("f"), line("g")), (line("f") + line("g"),)])
def test_a_stream_ends_with_the_first_call(path: str, called: tuple[str, ...]) -> None:
    body = asked(path, items_of(*called), stream=True).body
    assert b'"name":"f"' in body
    assert b'"name":"g"' not in body
    assert b"yes" in body
    assert b"more" not in body


@pytest.mark.parametrize("path", BODIES)
def test_what_is_left_out_counts(path: str) -> None:
    usage = asked(path, items_of(line("f"), line("g"))).json()["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    assert 6 in details.values(), "both pieces of the reasoning"


def test_a_call_that_cannot_be_read_is_none() -> None:
    (choice,) = asked(CHAT, items_of("no call\n", line("f"), line("g"))).json()["choices"]
    names = [one["function"]["name"] for one in choice["message"]["tool_calls"]]
    assert names == ["", "f"]


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_without_a_call_is_whole(path: str) -> None:
    items = [delta("yes"), delta("more"), result("yesmore")]
    assert b"yesmore" in asked(path, items).body


def test_each_choice_has_its_call() -> None:
    daemon = PlayedDaemon(items_of(line("f"), line("g")), items_of(line("g"), line("f")))
    body = {"model": "m", **BODIES[CHAT], "n": 2}
    choices = asyncio.run(Site(daemon).ask("POST", CHAT, body)).json()["choices"]
    calls = [choice["message"]["tool_calls"] for choice in choices]
    assert calls == [[call("f")], [call("g")]]


def test_what_is_left_out_has_no_log_probabilities() -> None:
    def scores(text: str) -> list[Logprobs]:
        return [Logprobs(chosen=TokenLogprob(token=0, text=text, logprob=-1.0), top=[])]

    pieces = [
        delta("y", logprobs=scores("y")),
        delta(line("f"), channel=Channel.TOOL_CALL, logprobs=scores("f")),
        delta("z", logprobs=scores("z")),
    ]
    end = result("yz", logprobs=[*scores("y"), *scores("f"), *scores("z")])
    (choice,) = asked(CHAT, [*pieces, end], logprobs=True).json()["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["y", "f"]
