"""Anthropic's own Python package against the gateway, over a real socket and a real daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.daemon import fake, row
from support.eventually import eventually
from support.http_daemon import HttpDaemon

anthropic = pytest.importorskip("anthropic")

TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    slow = {"step_s": 0.01}
    with HttpDaemon({"m": fake(fake=slow, max_concurrency=4, context_length=4000)}) as running:
        with running.client() as client:
            client.load("m")
        yield running


@pytest.fixture
def sdk(daemon: HttpDaemon) -> Iterator[Any]:
    """The package as its users have it; they have to name a key."""
    with anthropic.Anthropic(base_url=daemon.url, api_key="none", timeout=60.0) as client:
        yield client


def ask(text: str, **more: Any) -> dict[str, Any]:
    """A request with one message."""
    messages = [{"role": "user", "content": text}]
    return {"model": "m", "max_tokens": 20, "messages": messages, **more}


def test_message(sdk: Any) -> None:
    raw = sdk.messages.with_raw_response.create(**ask("hi", system="be brief", max_tokens=9))
    answer = raw.parse()
    assert (answer.content[0].type, answer.stop_reason) == ("text", "max_tokens")
    assert answer.usage.output_tokens == 9
    assert raw.headers["request-id"] in answer.id


def test_streamed_message_is_the_same(sdk: Any) -> None:
    whole = sdk.messages.create(**ask("s"))
    with sdk.messages.stream(**ask("s")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == 20
    seen = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert seen == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_tool_calls_and_their_results(sdk: Any) -> None:
    asked = ask(f"[[say {CALL}]]", tools=[TOOL], max_tokens=200)
    whole = sdk.messages.create(**asked)
    with sdk.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        assert answer.stop_reason == "tool_use"
        (block,) = [one for one in answer.content if one.type == "tool_use"]
        assert (block.name, block.input) == ("weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    answer = sdk.messages.create(
        model="m", max_tokens=5, tools=[TOOL],
        messages=[
            *asked["messages"],
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ],
    )  # fmt: skip
    assert answer.usage.output_tokens == 5


def test_reasoning_apart_and_back(sdk: Any) -> None:
    asked = ask("[[say <think>hm</think>yes]]", thinking=THINKING, max_tokens=200)
    whole = sdk.messages.create(**asked)
    with sdk.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        thinking, text = answer.content[:2]
        assert (thinking.type, thinking.thinking) == ("thinking", "hm")
        assert (text.type, text.text) == ("text", "yes")
    sdk.messages.create(
        model="m", max_tokens=5, thinking=THINKING,
        messages=[
            *asked["messages"],
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": "and?"},
        ],
    )  # fmt: skip


def test_stop_sequence_that_was_found(sdk: Any) -> None:
    asked = ask("[[say one two three]]", stop_sequences=["xx", " thr"], max_tokens=200)
    answer = sdk.messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " thr")
    assert answer.content[0].text == "one two"
    with sdk.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_sequence == " thr"


def test_more_tokens_than_fit_are_cut(daemon: HttpDaemon, sdk: Any) -> None:
    with sdk.messages.stream(**ask("far", max_tokens=64_000)) as stream:
        assert next(iter(stream.text_stream))
    with daemon.client() as client:
        eventually(lambda: not row(client, "m")["running"])


def test_count_of_tokens(daemon: HttpDaemon, sdk: Any) -> None:
    asked = ask("how many?", system="be brief", tools=[TOOL])
    used = sdk.messages.create(**asked).usage
    del asked["max_tokens"]
    with daemon.client() as client:
        before = row(client, "m")["steps"]
        count = sdk.messages.count_tokens(**asked).input_tokens
        assert row(client, "m")["steps"] == before, "nothing was computed"
    assert count == used.input_tokens + used.cache_read_input_tokens
    long = ask("x" * 9000)
    assert sdk.messages.count_tokens(model="m", messages=long["messages"]).input_tokens > 9000


def test_errors(sdk: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        sdk.messages.create(**ask("hi", model="n"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError):
        sdk.messages.create(**ask("hi", extra_body={"temperature": 99}))
    with pytest.raises(anthropic.BadRequestError):
        sdk.messages.create(**ask("hi", tools=[{"type": "bash_20250124", "name": "bash"}]))


def test_models(sdk: Any) -> None:
    assert [model.id for model in sdk.models.list()] == ["m"]
    assert sdk.models.retrieve("m").max_input_tokens == 4000


def test_beta_requests(sdk: Any) -> None:
    answer = sdk.beta.messages.create(**ask("hi", betas=["something-2030-01-01"]))
    assert answer.content[0].type == "text"


def test_error_in_a_stream_is_raised(sdk: Any) -> None:
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        sdk.messages.stream(**ask("[[fault crash=SIGKILL at=5]]")) as stream,
    ):
        for _ in stream:
            pass
    assert caught.value.body["error"]["type"] == "api_error"


def test_stream_survives_the_death_of_a_worker(daemon: HttpDaemon, sdk: Any) -> None:
    with daemon.client() as client:
        eventually(lambda: row(client, "m")["state"] == "READY")
        asked = ask("survives", max_tokens=100)
        expected = sdk.messages.create(**asked).content[0].text
        with sdk.messages.stream(**asked) as stream:
            pieces = stream.text_stream
            got = [next(pieces) for _ in range(5)]
            os.kill(row(client, "m")["pid"], signal.SIGKILL)
            got += list(pieces)
    assert "".join(got) == expected
