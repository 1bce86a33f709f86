"""OpenAI's package asks for responses, over a real socket and a real daemon."""

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

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
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


def final(sdk: Any, **asked: Any) -> Any:
    """The response at the end of a stream, as the package puts it together."""
    with sdk.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


def test_it_gets_a_response(sdk: Any) -> None:
    answer = sdk.responses.create(model="m", input="hi", instructions="be", max_output_tokens=9)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text
    assert answer.usage.output_tokens == 9


def test_it_streams_the_same_text(sdk: Any) -> None:
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


def test_it_gets_calls_and_reasoning_and_sends_them_back(sdk: Any) -> None:
    prompt = f"[[say <think>hm</think>{CALL}]]"
    asked: dict[str, Any] = {"model": "m", "input": prompt, "tools": [TOOL]}
    answer = final(sdk, **asked)
    reasoning, *_, call = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    said = [item.model_dump(exclude_none=True) for item in answer.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = sdk.responses.create(
        model="m", tools=[TOOL], max_output_tokens=5,
        input=[{"role": "user", "content": prompt}, *said, output],
    )  # fmt: skip
    assert again.usage.output_tokens == 5


def test_errors_are_those_that_it_knows(sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.responses.create(model="n", input="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert wrong.value.param == "previous_response_id"


def test_an_error_in_mid_stream_is_raised(sdk: Any) -> None:
    with pytest.raises(openai.APIError) as caught:
        for _ in sdk.responses.create(
            model="m", input="[[fault crash=SIGKILL at=5]]", max_output_tokens=20, stream=True
        ):
            pass
    assert caught.value.code in ("quarantined", "worker_crashed")


def test_it_survives_the_death_of_a_worker(daemon: HttpDaemon, sdk: Any) -> None:
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
