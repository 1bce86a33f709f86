"""OpenAI's own Python package against the gateway, over a real socket and a real daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.daemon import fake, row
from support.eventually import eventually
from support.http_daemon import HttpDaemon

openai = pytest.importorskip("openai")

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    slow = {"step_s": 0.01}
    with HttpDaemon({"m": fake(fake=slow, max_concurrency=4)}, {"max_queue": 1}) as running:
        with running.client() as client:
            client.load("m")
        yield running


@pytest.fixture
def sdk(daemon: HttpDaemon) -> Iterator[Any]:
    """The package as its users have it; they have to name a key."""
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", timeout=60.0) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_it_chats(sdk: Any) -> None:
    answer = sdk.chat.completions.create(model="m", messages=user("hi"), max_tokens=9, seed=1)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 9


def test_it_streams_with_usage(sdk: Any) -> None:
    whole = sdk.chat.completions.create(model="m", messages=user("s"), max_tokens=20)
    stream = sdk.chat.completions.create(
        model="m", messages=user("s"), max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage.completion_tokens == 20


def test_it_gets_tool_calls_whole_and_in_pieces(sdk: Any) -> None:
    asked = {"model": "m", "messages": user(f"[[say {CALL}]]"), "tools": [TOOL], "max_tokens": 200}
    whole = sdk.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.tool_calls[0].function.name == "weather"
    with sdk.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rome"}'


def test_it_gets_logprobs(sdk: Any) -> None:
    answer = sdk.chat.completions.create(
        model="m", messages=user("l"), max_tokens=3, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]


def test_it_gets_several_answers_and_completions(sdk: Any) -> None:
    answer = sdk.chat.completions.create(
        model="m", messages=user("n"), max_tokens=5, n=2, seed=1, temperature=1.0
    )
    assert len({choice.message.content for choice in answer.choices}) == 2
    text = sdk.completions.create(model="m", prompt="once", max_tokens=5).choices[0].text
    pieces = sdk.completions.create(model="m", prompt="once", max_tokens=5, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text


def test_it_lists_models(sdk: Any) -> None:
    assert [model.id for model in sdk.models.list()] == ["m"]
    assert sdk.models.retrieve("m").owned_by == "mlxsup"


def test_errors_are_those_that_it_knows(sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="n", messages=user("hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model="m", messages=user("hi"), temperature=99)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        )  # fmt: skip


def test_an_error_in_mid_stream_is_raised(sdk: Any) -> None:
    prompt = "[[fault crash=SIGKILL at=5]]"
    with pytest.raises(openai.APIError) as caught:
        for _ in sdk.chat.completions.create(
            model="m", messages=user(prompt), max_tokens=20, stream=True
        ):
            pass
    assert caught.value.code in ("quarantined", "worker_crashed")


def test_closing_a_stream_frees_its_row(daemon: HttpDaemon, sdk: Any) -> None:
    with daemon.client() as client:
        eventually(lambda: row(client, "m")["state"] == "READY")
        stream = sdk.chat.completions.create(
            model="m", messages=user("closed"), max_tokens=3000, stream=True
        )
        next(iter(stream))
        assert row(client, "m")["running"]
        stream.close()
        eventually(lambda: not row(client, "m")["running"])


def test_it_survives_the_death_of_a_worker(daemon: HttpDaemon, sdk: Any) -> None:
    asked = {"model": "m", "messages": user("survives"), "max_tokens": 100, "stream": True}
    expected = [chunk.choices[0].delta.content for chunk in sdk.chat.completions.create(**asked)]
    with daemon.client() as client:
        stream = iter(sdk.chat.completions.create(**asked))
        got = [next(stream).choices[0].delta.content for _ in range(5)]
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        got += [chunk.choices[0].delta.content for chunk in stream]
    assert "".join(filter(None, got)) == "".join(filter(None, expected))
