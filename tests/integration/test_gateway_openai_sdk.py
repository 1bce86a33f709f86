"""OpenAI's own Python package against the gateway: chats, completions and responses."""

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
    with HttpDaemon({"m": fake(fake=slow, max_concurrency=4, context_length=4000)}) as running:
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


def test_chat(sdk: Any) -> None:
    answer = sdk.chat.completions.create(model="m", messages=user("hi"), max_tokens=9, seed=1)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 9


def test_streamed_chat_with_usage(sdk: Any) -> None:
    whole = sdk.chat.completions.create(model="m", messages=user("s"), max_tokens=20)
    stream = sdk.chat.completions.create(
        model="m", messages=user("s"), max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage.completion_tokens == 20


def test_tool_calls(sdk: Any) -> None:
    asked = {"model": "m", "messages": user(f"[[say {CALL}]]"), "tools": [TOOL], "max_tokens": 200}
    whole = sdk.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.tool_calls[0].function.name == "weather"
    with sdk.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rome"}'


def test_logprobs(sdk: Any) -> None:
    answer = sdk.chat.completions.create(
        model="m", messages=user("l"), max_tokens=3, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]


def test_several_answers_and_completions(sdk: Any) -> None:
    answer = sdk.chat.completions.create(
        model="m", messages=user("n"), max_tokens=5, n=2, seed=1, temperature=1.0
    )
    assert len({choice.message.content for choice in answer.choices}) == 2
    text = sdk.completions.create(model="m", prompt="once", max_tokens=5).choices[0].text
    pieces = sdk.completions.create(model="m", prompt="once", max_tokens=5, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text


def test_models(sdk: Any) -> None:
    assert [model.id for model in sdk.models.list()] == ["m"]
    assert sdk.models.retrieve("m").owned_by == "mlxsup"


def test_errors_of_chats(sdk: Any) -> None:
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


def test_error_in_a_streamed_chat_is_raised(sdk: Any) -> None:
    prompt = "[[fault crash=SIGKILL at=5]]"
    with pytest.raises(openai.APIError) as caught:
        for _ in sdk.chat.completions.create(
            model="m", messages=user(prompt), max_tokens=20, stream=True
        ):
            pass
    assert caught.value.code in ("quarantined", "worker_crashed")


def test_closed_stream_frees_its_row(daemon: HttpDaemon, sdk: Any) -> None:
    with daemon.client() as client:
        eventually(lambda: row(client, "m")["state"] == "READY")
        stream = sdk.chat.completions.create(
            model="m", messages=user("closed"), max_tokens=3000, stream=True
        )
        next(iter(stream))
        assert row(client, "m")["running"]
        stream.close()
        eventually(lambda: not row(client, "m")["running"])


def test_chat_survives_the_death_of_a_worker(daemon: HttpDaemon, sdk: Any) -> None:
    asked = {"model": "m", "messages": user("survives"), "max_tokens": 100, "stream": True}
    expected = [chunk.choices[0].delta.content for chunk in sdk.chat.completions.create(**asked)]
    with daemon.client() as client:
        stream = iter(sdk.chat.completions.create(**asked))
        got = [next(stream).choices[0].delta.content for _ in range(5)]
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        got += [chunk.choices[0].delta.content for chunk in stream]
    assert "".join(filter(None, got)) == "".join(filter(None, expected))


# ---------------------------------------------------------------- responses


FLAT_TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object"},
    "strict": False,
}


def final(sdk: Any, **asked: Any) -> Any:
    """The response at the end of a stream, as the package puts it together."""
    with sdk.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


def test_response(sdk: Any) -> None:
    answer = sdk.responses.create(model="m", input="hi", instructions="be", max_output_tokens=9)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text
    assert answer.usage.output_tokens == 9


def test_streamed_response_is_the_same(sdk: Any) -> None:
    asked = {"model": "m", "input": "s", "max_output_tokens": 20}
    whole = sdk.responses.create(**asked)
    pieces = [
        event.delta
        for event in sdk.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == whole.output_text
    again = list(sdk.responses.create(**asked, stream=True))[-1]
    assert again.type == "response.incomplete"
    assert again.response.output_text == whole.output_text


def test_response_with_calls_and_reasoning(sdk: Any) -> None:
    prompt = f"[[say <think>hm</think>{CALL}]]"
    asked: dict[str, Any] = {"model": "m", "input": prompt, "tools": [FLAT_TOOL]}
    answer = final(sdk, **asked)
    reasoning, *_, call = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    said = [item.model_dump(exclude_none=True) for item in answer.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = sdk.responses.create(
        model="m", tools=[FLAT_TOOL], max_output_tokens=5,
        input=[{"role": "user", "content": prompt}, *said, output],
    )  # fmt: skip
    assert again.usage.output_tokens == 5


def test_errors_of_responses(sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.responses.create(model="n", input="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert wrong.value.param == "previous_response_id"


def test_error_in_a_streamed_response_is_raised(sdk: Any) -> None:
    with pytest.raises(openai.APIError) as caught:
        for _ in sdk.responses.create(
            model="m", input="[[fault crash=SIGKILL at=5]]", max_output_tokens=20, stream=True
        ):
            pass
    assert caught.value.code in ("quarantined", "worker_crashed")


def test_response_survives_the_death_of_a_worker(daemon: HttpDaemon, sdk: Any) -> None:
    with daemon.client() as client:
        eventually(lambda: row(client, "m")["state"] == "READY")
        asked = {"model": "m", "input": "survives", "max_output_tokens": 100}
        expected = sdk.responses.create(**asked).output_text
        stream = sdk.responses.create(**asked, stream=True)
        last = None
        for event in stream:
            if event.type == "response.output_text.delta" and last is None:
                os.kill(row(client, "m")["pid"], signal.SIGKILL)
            last = event if event.type == "response.output_text.delta" or last else None
    assert last is not None
    assert last.response.output_text == expected
