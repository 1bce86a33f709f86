"""Answers in Anthropic's form: whole, in events, refused, broken off; and the count of tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mlxsup.client import Channel, ErrorCode, FinishReason, Notice, NoticeKind
from mlxsup.gateway import limits
from mlxsup.gateway.anthropic.errors import KINDS
from mlxsup.gateway.openai.errors import ROWS

from support.played_gateway import PlayedDaemon, Response, Site, delta, refused, result

PATH = "/v1/messages"
BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
CALL = '{"id":"c1","type":"function","function":{"name":"f","arguments":"{\\"a\\":1}"}}'
BROKEN = '{"id":"c2","type":"function","function":{"name":"f","arguments":"{a"}}'
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
NAMELESS = '{"id":"c3","type":"function","function":{"name":"","arguments":"{}"}}'
UNREAD = [{"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{a"}}]


def answer(*items: Any, **fields: Any) -> Response:
    """The response to one request that goes so."""
    daemon = PlayedDaemon(list(items))
    return asyncio.run(Site(daemon).ask("POST", PATH, {**BODY, **fields}))


def events(response: Response) -> list[str]:
    """The types of the events, which are also their names."""
    named = response.named_events()
    assert all(name == data["type"] for name, data in named)
    return [name for name, _ in named]


def data_of(response: Response, kind: str) -> list[dict[str, Any]]:
    return [data for name, data in response.named_events() if name == kind]


# ---------------------------------------------------------------- whole


def test_a_message_has_its_blocks_and_what_it_took() -> None:
    response = answer(
        delta("hm", channel=Channel.REASONING),
        delta("yes"),
        result("yes", FinishReason.TOOL_CALLS, reasoning="hm", tool_calls=CALLS),
        **THINKING,
    )
    assert (response.status, response.headers["x-request-id"]) == (200, "r1")
    assert response.headers["request-id"] == "r1"
    assert response.json() == {
        "id": "msg_r1", "type": "message", "role": "assistant", "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "mlxsup"},
            {"type": "text", "text": "yes"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use", "stop_sequence": None,
        "usage": {
            "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2,
            "output_tokens": 3, "output_tokens_details": {"thinking_tokens": 2},
        },
    }  # fmt: skip


def test_reasoning_that_nobody_asked_for_is_counted_and_not_shown() -> None:
    items = (delta("hm", channel=Channel.REASONING), result("yes", reasoning="hm"))
    value = answer(*items).json()
    assert value["content"] == [{"type": "text", "text": "yes"}]
    assert value["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    assert events(answer(*items, stream=True)) == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("end", "reason", "stop"),
    [
        (result("abc"), "end_turn", None),
        (result("abc", stop="x"), "stop_sequence", "x"),
        (result("a" * 9, FinishReason.LENGTH), "max_tokens", None),
        (result("a" * 8, FinishReason.LENGTH), "model_context_window_exceeded", None),
        (result("", FinishReason.TOOL_CALLS, tool_calls=CALLS), "tool_use", None),
        (result("", FinishReason.TOOL_CALLS, tool_calls=UNREAD), "end_turn", None),
    ],
)
def test_why_an_answer_has_ended(end: Any, reason: str, stop: str | None) -> None:
    value = answer(end).json()
    assert (value["stop_reason"], value["stop_sequence"]) == (reason, stop)
    last = data_of(answer(end, stream=True), "message_delta")[0]
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": stop}


def test_a_call_that_cannot_be_read_is_text() -> None:
    value = answer(result("", FinishReason.TOOL_CALLS, tool_calls=UNREAD)).json()
    assert value["content"] == [{"type": "text", "text": "f{a"}]
    streamed = answer(delta(BROKEN + "\n", channel=Channel.TOOL_CALL), result(""), stream=True)
    deltas = [data["delta"] for data in data_of(streamed, "content_block_delta")]
    assert deltas == [{"type": "text_delta", "text": "f{a"}]


@pytest.mark.parametrize("arguments", ['{"x": NaN}', '{"x": 1e999}', '{"x": "\\ud83d"}'])
def test_what_only_python_reads_as_json_is_text(arguments: str) -> None:
    call = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": arguments}}
    value = answer(result("", FinishReason.TOOL_CALLS, tool_calls=[call])).json()
    assert value["content"] == [{"type": "text", "text": f"f{arguments}"}]
    piece = delta(json.dumps(call) + "\n", channel=Channel.TOOL_CALL)
    streamed = answer(piece, result(""), stream=True)
    deltas = [data["delta"] for data in data_of(streamed, "content_block_delta")]
    assert deltas == [{"type": "text_delta", "text": f"f{arguments}"}]


def test_a_call_without_a_name_is_text() -> None:
    response = answer(delta(NAMELESS, channel=Channel.TOOL_CALL), result(""), stream=True)
    assert [data["content_block"]["type"] for data in data_of(response, "content_block_start")] == [
        "text"
    ]
    deltas = [data["delta"] for data in data_of(response, "content_block_delta")]
    assert deltas == [{"type": "text_delta", "text": "{}"}]


# ---------------------------------------------------------------- in events


def test_a_stream_has_the_blocks_one_after_the_other() -> None:
    response = answer(
        delta("h", channel=Channel.REASONING),
        delta("m", channel=Channel.REASONING),
        delta("é\n"),
        delta(""),
        delta('"'),
        delta(CALL + "\n" + CALL + "\n", channel=Channel.TOOL_CALL),
        delta("end"),
        result("yes", FinishReason.TOOL_CALLS, tool_calls=CALLS),
        stream=True,
        **THINKING,
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    shown = [
        (data["index"], data.get("content_block") or data.get("delta"))
        for name, data in response.named_events()
        if name in ("content_block_start", "content_block_delta", "content_block_stop")
    ]
    call = (
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"a": 1}'},
        None,
    )
    assert shown == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (0, {"type": "thinking_delta", "thinking": "h"}),
        (0, {"type": "thinking_delta", "thinking": "m"}),
        (0, {"type": "signature_delta", "signature": "mlxsup"}),
        (0, None),
        (1, {"type": "text", "text": ""}),
        (1, {"type": "text_delta", "text": "é\n"}),
        (1, {"type": "text_delta", "text": '"'}),
        (1, None),
        *((2, part) for part in call),
        *((3, part) for part in call),
        (4, {"type": "text", "text": ""}),
        (4, {"type": "text_delta", "text": "end"}),
        (4, None),
    ]
    names = events(response)
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    (start,) = data_of(response, "message_start")
    assert start["message"]["content"] == []
    assert start["message"]["id"] == "msg_r1"
    (last,) = data_of(response, "message_delta")
    assert last["usage"]["input_tokens"] == 3
    assert response.is_whole


def test_a_call_is_complete_when_it_is_sent() -> None:
    seen: list[str] = []

    def on_sent(response: Response) -> None:
        if b"tool_use" in response.body:
            seen.append(events(response)[-1])

    site = Site(PlayedDaemon([delta(CALL, channel=Channel.TOOL_CALL), delta("x"), result("x")]))
    asyncio.run(site.ask("POST", PATH, {**BODY, "stream": True}, on_sent=on_sent))
    assert seen[0] == "content_block_stop"


def test_an_empty_answer_has_a_beginning_and_an_end() -> None:
    response = answer(result(""), stream=True)
    assert events(response) == ["message_start", "message_delta", "message_stop"]


def test_a_stream_that_waits_gets_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)
    queued = Notice(kind=NoticeKind.QUEUED, detail={"position": 3, "reason": "rows"})
    step = asyncio.Event()
    step.set()
    response = answer(queued, step, delta("a"), result("a"), stream=True)
    assert events(response)[0] == "ping"
    assert response.comments() == ["queued, place 3"]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_piece_is_a_status(code: ErrorCode, stream: bool) -> None:
    response = answer(refused(code.value), stream=stream)
    row, is_busy = ROWS[code], code in (ErrorCode.OVERLOADED, ErrorCode.QUEUE_TIMEOUT)
    assert response.status == (529 if is_busy else row.status)
    kind = KINDS.get(response.status, "invalid_request_error" if row.status < 500 else "api_error")
    assert response.json() == {
        "type": "error",
        "error": {"type": kind, "message": f"it is {code}"},
        "request_id": "r1",
    }
    should = response.headers.get("x-should-retry")
    assert should == (None if row.is_retryable is None else str(row.is_retryable).lower())
    assert response.headers["x-request-id"] == "r1"


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"temperature": 99}, 400, "invalid_request_error"),
    ],
)
def test_a_refusal_of_the_gateway_has_the_form_of_this_api(
    fields: dict[str, Any], status: int, kind: str
) -> None:
    response = answer(result(""), **fields)
    assert (response.status, response.error["type"]) == (status, kind)
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "method", "headers", "status", "kind"),
    [
        (PATH, "GET", {}, 405, "invalid_request_error"),
        (f"{PATH}/batches", "GET", {}, 404, "not_found_error"),
        ("/v1/nothing", "GET", {"anthropic-version": "2023-06-01"}, 404, "not_found_error"),
        (PATH, "POST", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        (PATH, "POST", {"host": "evil.example"}, 403, "permission_error"),
    ],
)
def test_so_has_every_other(
    path: str, method: str, headers: dict[str, str], status: int, kind: str
) -> None:
    response = asyncio.run(Site(PlayedDaemon()).ask(method, path, b"", headers=headers))
    assert (response.status, response.json()["type"]) == (status, "error")
    assert response.error["type"] == kind
    assert response.json()["request_id"] == response.headers["x-request-id"]


def test_an_error_in_mid_answer_is_an_event_and_the_answer_is_not_whole() -> None:
    response = answer(delta("a"), refused("worker_crashed", tokens_sent=1), stream=True)
    name, data = response.named_events()[-1]
    assert (name, data["error"]["type"], data["request_id"]) == ("error", "api_error", "r1")
    assert not response.is_whole, "the server cuts the connection"
    assert "message_stop" not in events(response)


# ---------------------------------------------------------------- models


def test_models_are_listed_in_the_form_of_who_asks() -> None:
    site = Site(PlayedDaemon())
    version = {"anthropic-version": "2023-06-01"}
    listed = asyncio.run(site.ask("GET", "/v1/models", headers=version)).json()
    (model,) = listed["data"]
    assert (model["id"], model["type"], model["display_name"]) == ("m", "model", "m")
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("m", "m", False)
    one = asyncio.run(Site(PlayedDaemon()).ask("GET", "/v1/models/m", headers=version)).json()
    assert one == model | {"created_at": one["created_at"]}


# ---------------------------------------------------------------- counting


def count(*items: Any) -> tuple[Response, PlayedDaemon]:
    """The response to a count whose request goes so."""
    daemon = PlayedDaemon(list(items))
    body = {name: value for name, value in BODY.items() if name != "max_tokens"}
    return asyncio.run(Site(daemon).ask("POST", f"{PATH}/count_tokens", body)), daemon


def test_a_count_is_what_the_refusal_says() -> None:
    response, daemon = count(refused("context_length_exceeded", prompt_tokens=12))
    assert (response.status, response.json()) == (200, {"input_tokens": 12})
    assert response.headers["x-request-id"] == "r1"
    assert daemon.asked[0]["max_tokens"] == 2**31 - 1


@pytest.mark.parametrize("code", ["unknown_model", "load_failed"])
def test_a_count_that_is_refused_for_another_reason_says_so(code: str) -> None:
    response, _ = count(refused(code, prompt_tokens=12))
    assert response.status == ROWS[ErrorCode(code)].status
    assert response.error["message"] == f"it is {code}"
