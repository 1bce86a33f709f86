"""Answers in the form of responses: whole, in events, refused, broken off."""

from __future__ import annotations

import asyncio
from typing import Any

from mlxsup.client import Channel, FinishReason

from support.played_gateway import PlayedDaemon, Response, Site, delta, refused, result

CALL = '{"id":"c1","type":"function","function":{"name":"f","arguments":"{\\"a\\":1}"}}\n'
UNREAD = "no call\n"
THOUGHT = delta("hm", channel=Channel.REASONING)
CALLED = delta(CALL, channel=Channel.TOOL_CALL)


def answer(*items: Any, **fields: Any) -> Response:
    """The response to one request that goes so."""
    daemon = PlayedDaemon(list(items))
    body = {"model": "m", "input": "hi", **fields}
    return asyncio.run(Site(daemon).ask("POST", "/v1/responses", body))


def events(response: Response) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of the events, which carry their numbers."""
    named = response.named_events()
    assert all(name == data["type"] for name, data in named)
    assert [data["sequence_number"] for _, data in named] == list(range(len(named)))
    return [(name.removeprefix("response."), data) for name, data in named]


def outputs(response: Response) -> list[str]:
    return [item["type"] for item in response.json()["output"]]


# ---------------------------------------------------------------- whole


def test_a_response_has_its_items_and_what_it_took() -> None:
    response = answer(THOUGHT, delta("ye"), delta("s"), CALLED, result("yes"), instructions="be")
    assert (response.status, response.headers["x-request-id"]) == (200, "r1")
    value = response.json()
    assert (value["id"], value["object"], value["status"]) == ("resp_r1", "response", "completed")
    assert (value["instructions"], value["tools"], value["tool_choice"]) == ("be", [], "auto")
    assert value["output"] == [
        {
            "id": "rs_r1_0", "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "id": "msg_r1_1", "type": "message", "status": "completed", "role": "assistant",
            "content": [
                {"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}
            ],
        },
        {
            "id": "fc_r1_2", "type": "function_call", "status": "completed", "call_id": "c1",
            "name": "f", "arguments": '{"a":1}',
        },
    ]  # fmt: skip
    assert value["usage"] == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 8,
    }  # fmt: skip


def test_an_answer_that_is_cut_is_incomplete_with_its_last_item() -> None:
    value = answer(THOUGHT, delta("ye"), result("ye", FinishReason.LENGTH)).json()
    assert (value["status"], value["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert [item["status"] for item in value["output"]] == ["completed", "incomplete"]


def test_only_one_call_if_that_was_asked_for() -> None:
    items = (CALLED, CALLED, delta("more"), result("more"))
    assert outputs(answer(*items)) == ["function_call", "function_call", "message"]
    one = answer(*items, parallel_tool_calls=False)
    assert outputs(one) == ["function_call"]
    both = delta(CALL + CALL, channel=Channel.TOOL_CALL)
    assert outputs(answer(both, result(""), parallel_tool_calls=False)) == ["function_call"]


def test_a_call_names_the_namespace_of_its_function() -> None:
    tools = [{"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "f"}]}]
    (item,) = answer(CALLED, result(""), tools=tools).json()["output"]
    assert (item["name"], item["namespace"]) == ("f", "s")
    (item,) = answer(CALLED, result("")).json()["output"]
    assert "namespace" not in item


def test_a_call_that_cannot_be_read_is_text() -> None:
    value = answer(delta(UNREAD, channel=Channel.TOOL_CALL), result("")).json()
    (item,) = value["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "no call")


# ---------------------------------------------------------------- in events


def test_a_stream_has_the_items_one_after_the_other() -> None:
    response = answer(THOUGHT, delta("é"), delta(""), delta('"'), CALLED, result("é"), stream=True)
    found = events(response)
    assert [name for name, _ in found] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    texts = [data for name, data in found if name == "output_text.delta"]
    assert [data["delta"] for data in texts] == ["é", '"']
    assert {(data["item_id"], data["output_index"]) for data in texts} == {("msg_r1_1", 1)}
    added = [data["item"] for name, data in found if name == "output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert added[2]["arguments"] == ""
    done = [data["item"] for name, data in found if name == "output_item.done"]
    whole = found[-1][1]["response"]
    assert whole["output"] == done
    assert whole["usage"]["output_tokens"] == 1
    assert response.is_whole


def test_whole_and_streamed_are_the_same() -> None:
    items = (THOUGHT, delta("ye"), CALLED, result("ye", FinishReason.LENGTH))
    last = events(answer(*items, stream=True))[-1]
    whole = answer(*items).json()
    streamed = last[1]["response"]
    assert last[0] == "incomplete"
    assert streamed | {"created_at": 0} == whole | {"created_at": 0}


def test_a_call_is_complete_when_it_is_sent() -> None:
    def on_sent(response: Response) -> None:
        if b"function_call" in response.body:
            seen.append(response.named_events()[-1][0])

    seen: list[str] = []
    site = Site(PlayedDaemon([CALLED, delta("x"), result("x")]))
    body = {"model": "m", "input": "hi", "stream": True}
    asyncio.run(site.ask("POST", "/v1/responses", body, on_sent=on_sent))
    assert seen[0] == "response.output_item.done"


# ---------------------------------------------------------------- errors


def test_an_error_before_the_first_piece_is_a_status() -> None:
    response = answer(refused("quarantined"), stream=True)
    assert (response.status, response.error["code"]) == (503, "quarantined")


def test_an_error_in_mid_answer_is_an_event_and_the_answer_is_not_whole() -> None:
    response = answer(delta("a"), refused("worker_crashed", tokens_sent=1), stream=True)
    (_, failed), (_, error) = events(response)[-2:]
    assert (failed["response"]["status"], failed["response"]["error"]) == (
        "failed", {"code": "worker_crashed", "message": "it is worker_crashed"},
    )  # fmt: skip
    assert (error["type"], error["code"]) == ("error", "worker_crashed")
    assert error["error"]["message"] == error["message"] == "it is worker_crashed"
    assert not response.is_whole, "the server cuts the connection"
