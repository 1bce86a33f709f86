"""Answers in OpenAI's form: whole, in pieces, refused, broken off, and left by their readers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxsup.client import (
    Channel,
    ConnectionLost,
    ErrorCode,
    FinishReason,
    Logprobs,
    Notice,
    NoticeKind,
    TokenLogprob,
)
from mlxsup.gateway import limits
from mlxsup.gateway.openai.chunks import completion_logprobs
from mlxsup.gateway.openai.errors import ROWS

from support.played_gateway import (
    Item,
    PlayedDaemon,
    Response,
    Site,
    answer,
    delta,
    refused,
    result,
)

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = '{"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}'
LOGPROBS = [
    Logprobs(
        chosen=TokenLogprob(token=1, logprob=-0.5, text="é"),
        top=[TokenLogprob(token=2, logprob=-0.1, text="a")],
    )
]


def deltas_of(response: Response) -> list[dict[str, Any]]:
    """The `delta` of each chunk that has a choice."""
    chunks = [event for event in response.events() if event != "[DONE]"]
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


# ---------------------------------------------------------------- whole


def test_a_whole_answer_has_its_parts_and_what_it_took() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    response = answer(
        delta("hm", channel=Channel.REASONING),
        delta("yes"),
        result("yes", FinishReason.TOOL_CALLS, reasoning="hm", tool_calls=calls),
    )
    assert (response.status, response.headers["x-request-id"]) == (200, "r1")
    value = response.json()
    assert (value["id"], value["object"], value["model"]) == ("chatcmpl-r1", "chat.completion", "m")
    (choice,) = value["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": calls,
    }  # fmt: skip
    assert (choice["index"], choice["finish_reason"]) == (0, "tool_calls")
    assert value["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip


def test_several_answers_count_their_prompt_once() -> None:
    value = answer(delta("ab"), result("ab"), n=3).json()
    assert [choice["index"] for choice in value["choices"]] == [0, 1, 2]
    assert (value["usage"]["prompt_tokens"], value["usage"]["completion_tokens"]) == (5, 6)


def test_an_answer_that_is_only_a_call_has_no_content() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    value = answer(result("", FinishReason.TOOL_CALLS, tool_calls=calls)).json()
    assert value["choices"][0]["message"]["content"] is None


def test_logprobs_have_tokens_bytes_and_rivals() -> None:
    value = answer(result("é", logprobs=LOGPROBS), logprobs=True, top_logprobs=1).json()
    assert value["choices"][0]["logprobs"]["content"] == [
        {
            "token": "é", "logprob": -0.5, "bytes": [195, 169],
            "top_logprobs": [{"token": "a", "logprob": -0.1, "bytes": [97]}],
        }
    ]  # fmt: skip


def test_a_completion_is_one_text_with_offsets() -> None:
    body = {"model": "m", "prompt": "p", "logprobs": 1}
    pieces = [delta("é", logprobs=LOGPROBS), delta("é", logprobs=LOGPROBS)]
    daemon = PlayedDaemon([*pieces, result("éé", logprobs=LOGPROBS * 2)])
    response = asyncio.run(Site(daemon).ask("POST", "/v1/completions", body))
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("éé", "stop")
    assert choice["logprobs"] == {
        "tokens": ["é", "é"], "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.1}, {"a": -0.1}], "text_offset": [0, 1],
    }  # fmt: skip


def test_tokens_that_are_no_whole_text_are_told_apart_by_their_bytes() -> None:
    halves = [
        TokenLogprob(token=nth, logprob=-nth, text=" \ufffd", raw_bytes=content)
        for nth, content in enumerate((b" \xc3", b" \xe2"))
    ]
    logprobs = [Logprobs(chosen=halves[0], top=halves)]
    value = answer(result("", logprobs=logprobs), logprobs=True, top_logprobs=2).json()
    (token,) = value["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == (" \ufffd", [32, 0xC3])
    assert [other["bytes"] for other in token["top_logprobs"]] == [[32, 0xC3], [32, 0xE2]]
    found = completion_logprobs(logprobs, [0])
    assert found["tokens"] == [r"bytes: \xc3"]
    assert found["top_logprobs"] == [{r"bytes: \xc3": 0, r"bytes: \xe2": -1}]


# ---------------------------------------------------------------- in pieces


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_done() -> None:
    response = answer(delta("a"), delta(""), delta("b"), result("ab"), stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == "r1"
    assert deltas_of(response) == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {},
    ]  # fmt: skip
    *chunks, done = response.events()
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-r1"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert response.is_whole


def test_reasoning_and_calls_are_pieces_of_their_own_kinds() -> None:
    response = answer(
        delta("hm", channel=Channel.REASONING),
        delta(CALL + "\n", channel=Channel.TOOL_CALL),
        delta(CALL + "\n", channel=Channel.TOOL_CALL),
        result("", FinishReason.TOOL_CALLS),
        stream=True,
    )
    _, reasoning, first, second, _ = deltas_of(response)
    assert reasoning == {"reasoning_content": "hm"}
    assert [one["tool_calls"][0]["index"] for one in (first, second)] == [0, 1]
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_usage_comes_as_one_more_chunk_if_it_was_asked_for() -> None:
    items = (delta("a"), result("a"))
    *others, usage, done = answer(
        *items, stream=True, stream_options={"include_usage": True}
    ).events()
    assert (usage["choices"], usage["usage"]["total_tokens"], done) == ([], 6, "[DONE]")
    assert {one["usage"] for one in others} == {None}
    assert all("usage" not in one for one in answer(*items, stream=True).events()[:-1])


def test_an_empty_answer_still_has_a_role_and_an_end() -> None:
    response = answer(result(""), stream=True)
    assert deltas_of(response) == [{"role": "assistant", "content": ""}, {}]


def test_several_streamed_answers_carry_their_numbers() -> None:
    response = answer(delta("a"), result("a"), stream=True, n=2)
    chunks = [event for event in response.events() if event != "[DONE]"]
    numbers = [chunk["choices"][0]["index"] for chunk in chunks]
    assert sorted(numbers) == [0, 0, 0, 1, 1, 1]
    assert response.events().count("[DONE]") == 1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_piece_is_a_status(code: ErrorCode, stream: bool) -> None:
    response = answer(refused(code.value), stream=stream)
    row = ROWS[code]
    assert response.status == row.status
    assert response.error["message"] == f"it is {code}"
    assert response.error["type"] == row.kind
    should = response.headers.get("x-should-retry")
    assert should == (None if row.is_retryable is None else str(row.is_retryable).lower())
    assert ("retry-after" in response.headers) == bool(row.is_retryable)
    assert response.headers["x-request-id"] == "r1"
    assert response.is_whole


@pytest.mark.parametrize(("seconds", "shown"), [(0.2, "1"), (7.1, "8"), (9000.0, "120")])
def test_an_overload_says_when_to_come_back_and_never_later_than_clients_wait(
    seconds: float, shown: str
) -> None:
    response = answer(refused("overloaded", retry_after_s=seconds))
    assert (response.status, response.headers["retry-after"]) == (429, shown)


def test_the_field_that_is_wrong_is_named() -> None:
    response = answer(result(""), temperature=99)
    assert (response.status, response.error["param"]) == (400, "temperature")
    assert answer(refused("unknown_model")).error["code"] == "model_not_found"
    assert answer(refused("unknown_model")).error["param"] == "model"


@pytest.mark.parametrize(
    "error", [refused("worker_crashed", tokens_sent=1), ConnectionLost("it is gone", "ipc:///x")]
)
def test_an_error_in_mid_answer_is_an_event_and_the_answer_is_not_whole(error: Exception) -> None:
    response = answer(delta("a"), error, stream=True)
    *_, last = response.events()
    assert response.status == 200
    assert last["error"]["code"] in ("worker_crashed", "daemon_lost")
    assert "[DONE]" not in response.events()
    assert not response.is_whole, "the server cuts the connection"


def test_one_of_several_that_fails_ends_them_all() -> None:
    async def run() -> PlayedDaemon:
        daemon = PlayedDaemon([refused("quarantined")], [delta("a"), asyncio.Event()])
        response = await Site(daemon).ask("POST", CHAT, {**BODY, "n": 2})
        assert (response.status, response.error["code"]) == (503, "quarantined")
        return daemon

    assert asyncio.run(run()).streams[1].is_cancelled


def test_an_answer_that_somebody_else_ends_is_not_whole() -> None:
    async def run() -> Response:
        site = Site(PlayedDaemon([delta("a"), asyncio.Event()]))

        def on_sent(response: Response) -> None:
            if b'"a"' in response.body:
                site.gateway.open_answers.cancel()

        return await site.ask("POST", CHAT, {**BODY, "stream": True}, on_sent=on_sent)

    response = asyncio.run(run())
    *chunks, last = response.events()
    assert last["error"]["code"] == "shutting_down"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    assert not response.is_whole


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_ended_by_hand_is_not_to_be_asked_for_again(stream: bool) -> None:
    response = answer(delta("a"), result("a", FinishReason.CANCELLED), stream=stream)
    if stream:
        assert response.events()[-1]["error"]["code"] == "cancelled"
        assert not response.is_whole
    else:
        assert (response.status, response.error["code"]) == (410, "cancelled")
        assert response.headers["x-should-retry"] == "false"
        assert "mlxsup cancel" in response.error["message"]


ENDS: dict[str, list[Item]] = {
    "answered": [delta("a"), result("a")],
    "refused": [refused("overloaded")],
    "broken off": [delta("a"), refused("worker_crashed", tokens_sent=1)],
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_ended_is_forgotten(end: str, stream: bool) -> None:
    async def run() -> None:
        site = Site(PlayedDaemon(ENDS[end]))
        async with site.life():
            await site.ask("POST", CHAT, {**BODY, "stream": stream}, has_life=False)
            cancels = site.daemon.streams[0].cancels
            site.gateway.open_answers.cancel()
            assert site.daemon.streams[0].cancels == cancels

    asyncio.run(run())


# ---------------------------------------------------------------- readers that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_leaves_ends_its_request(stream: bool) -> None:
    async def run() -> PlayedDaemon:
        daemon = PlayedDaemon([delta("a"), asyncio.Event()])
        body = {**BODY, "stream": stream}
        response = await Site(daemon).ask("POST", CHAT, body, until=asyncio.sleep(0.01))
        assert not stream or not response.is_whole
        return daemon

    daemon = asyncio.run(asyncio.wait_for(run(), 60))
    assert daemon.streams[0].is_cancelled


# ---------------------------------------------------------------- waiting

QUEUED = Notice(kind=NoticeKind.QUEUED, detail={"position": 3, "reason": "rows"})
LOADING = Notice(kind=NoticeKind.LOADING, detail={"state": "LOADING", "fraction": 0.5})
READING = Notice(kind=NoticeKind.PREFILLING, detail={"done": 10, "total": 90})
PAUSED = Notice(kind=NoticeKind.PAUSED, detail={"reason": "swap", "tokens_sent": 1})


async def comments_of(*notices: Notice) -> list[str]:
    """The comments of a stream that gets these notices, and of an error after them."""
    step = asyncio.Event()
    step.set()
    items = [one for notice in notices for one in (notice, step)]
    response = await Site(PlayedDaemon([*items, delta("a"), result("a")])).ask(
        "POST", CHAT, {**BODY, "stream": True}
    )
    assert response.events()[-1] == "[DONE]"
    return response.comments()


def test_at_first_nothing_is_sent_so_that_a_refusal_can_be_a_status() -> None:
    assert asyncio.run(comments_of(QUEUED, LOADING)) == []


def test_a_stream_that_waits_gets_a_comment_for_its_progress_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)
    monkeypatch.setattr(limits, "COMMENT_INTERVAL_S", 0.0)
    assert asyncio.run(comments_of(QUEUED, PAUSED, LOADING, READING)) == [
        "queued, place 3",
        "loading, 50%",
        "reading the prompt, 10 of 90 tokens",
    ]


def test_comments_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)
    assert asyncio.run(comments_of(QUEUED, LOADING, READING)) == ["queued, place 3"]
