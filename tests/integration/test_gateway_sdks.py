"""What the packages of OpenAI and Anthropic make of deaths, reasoning, limits and errors.

What their users do on ordinary days is in `clients/`, over a real model.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.daemon.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    slow = {"step_s": 0.01}
    with HttpDaemon(
        {"m": fake(fake=slow, max_concurrency=4, context_length=4000, restart={"max_restarts": 99})}
    ) as running:
        with running.client() as client:
            client.load("m")
        yield running


@pytest.fixture
def gpt(daemon: HttpDaemon) -> Iterator[Any]:
    """OpenAI's package as its users have it; they have to name a key."""
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", timeout=60.0) as client:
        yield client


@pytest.fixture
def claude(daemon: HttpDaemon) -> Iterator[Any]:
    """Anthropic's package as its users have it."""
    with anthropic.Anthropic(base_url=daemon.url, api_key="none", timeout=60.0) as client:
        yield client


def ask(text: str, **more: Any) -> dict[str, Any]:
    """Return a request with one message."""
    messages = [{"role": "user", "content": text}]
    return {"model": "m", "max_tokens": 20, "messages": messages, **more}


# ---------------------------------------------------------------- streams


def pieces_of_a_chat(gpt: Any, claude: Any, text: str) -> Iterator[str]:
    for chunk in gpt.chat.completions.create(**ask(text, max_tokens=100, stream=True)):
        yield chunk.choices[0].delta.content or ""


def pieces_of_a_response(gpt: Any, claude: Any, text: str) -> Iterator[str]:
    events = list[str]()
    for event in gpt.responses.create(model="m", input=text, max_output_tokens=100, stream=True):
        if event.type == "response.output_text.delta":
            events.append(event.delta)
            yield event.delta
    assert event.type == "response.incomplete"
    assert event.response.incomplete_details.reason == "max_output_tokens"
    assert event.response.output_text == "".join(events)
    assert event.response.usage.output_tokens == 100


def pieces_of_a_message(gpt: Any, claude: Any, text: str) -> Iterator[str]:
    with claude.messages.stream(**ask(text, max_tokens=100)) as stream:
        yield from stream.text_stream
        assert stream.get_final_message().usage.output_tokens == 100


@pytest.mark.parametrize(
    ("pieces_of", "error"),
    [
        (pieces_of_a_chat, openai.APIError),
        (pieces_of_a_response, openai.APIError),
        (pieces_of_a_message, anthropic.APIStatusError),
    ],
)
def test_a_stream_survives_a_kill_of_its_worker_and_raises_a_crash_by_its_request(
    daemon: HttpDaemon, gpt: Any, claude: Any, pieces_of: Callable[..., Any], error: type[Exception]
) -> None:
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
        expected = "".join(pieces_of(gpt, claude, "survives"))
        pieces = pieces_of(gpt, claude, "survives")
        begun = [next(pieces) for _ in range(5)]
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        assert "".join([*begun, *pieces]) == expected
        with pytest.raises(error) as caught:
            list(pieces_of(gpt, claude, "[[fault crash=SIGKILL at=5]]"))
    body: Any = getattr(caught.value, "body", None)
    code = body["error"]["type"] if "error" in body else caught.value.code  # type: ignore[attr-defined]
    assert code in ("api_error", "quarantined", "worker_crashed")


# ---------------------------------------------------------------- OpenAI


def test_a_response_has_reasoning_and_calls_that_can_be_sent_back(gpt: Any) -> None:
    form = {"type": "object"}
    tool = {"type": "function", "name": "weather", "parameters": form, "strict": False}
    prompt = f"[[say <think>hm</think>{CALL}]]"
    with gpt.responses.stream(model="m", input=prompt, tools=[tool]) as stream:
        answer = stream.get_final_response()
    reasoning, *_, call = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    said = [item.model_dump(exclude_none=True) for item in answer.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = gpt.responses.create(
        model="m", tools=[tool], max_output_tokens=5,
        input=[{"role": "user", "content": prompt}, *said, output],
    )  # fmt: skip
    assert again.usage.output_tokens == 5


def test_several_answers_of_one_seed_differ(gpt: Any) -> None:
    asked = ask("n", max_tokens=5, n=2, seed=1, temperature=1.0)
    answer = gpt.chat.completions.create(**asked)
    assert len({choice.message.content for choice in answer.choices}) == 2


def test_a_response_to_another_one_is_refused_by_name(gpt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        gpt.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert wrong.value.param == "previous_response_id"


# ---------------------------------------------------------------- Anthropic


def test_a_message_has_its_thinking_apart_and_takes_it_back(claude: Any) -> None:
    asked = ask("[[say <think>hm</think>yes]]", thinking=THINKING, max_tokens=200)
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        thinking, text = answer.content[:2]
        assert (thinking.type, thinking.thinking) == ("thinking", "hm")
        assert (text.type, text.text) == ("text", "yes")
    back = {"role": "assistant", "content": final.content}
    messages = [*asked["messages"], back, {"role": "user", "content": "and?"}]
    claude.messages.create(model="m", max_tokens=5, thinking=THINKING, messages=messages)


def test_more_tokens_than_fit_are_cut_and_a_message_that_is_left_ends(
    daemon: HttpDaemon, claude: Any
) -> None:
    with claude.messages.stream(**ask("far", max_tokens=64_000)) as stream:
        assert next(iter(stream.text_stream))
    with daemon.client() as client:
        eventually(lambda: not row(client, "m")["running"])


def test_the_count_of_tokens_is_that_of_the_message_and_computes_nothing(
    daemon: HttpDaemon, claude: Any
) -> None:
    tool = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
    asked = ask("how many?", system="be brief", tools=[tool])
    raw = claude.messages.with_raw_response.create(**asked)
    used = raw.parse().usage
    assert raw.headers["request-id"] in raw.parse().id
    del asked["max_tokens"]
    with daemon.client() as client:
        before = row(client, "m")["steps"]
        count = claude.messages.count_tokens(**asked).input_tokens
        assert row(client, "m")["steps"] == before
    assert count == used.input_tokens + used.cache_read_input_tokens
    long = ask("x" * 9000)["messages"]
    assert claude.messages.count_tokens(model="m", messages=long).input_tokens > 9000


def test_errors_models_and_beta_headers_are_those_of_anthropic(claude: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**ask("hi", model="n"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    for wrong in ({"extra_body": {"temperature": 99}},
                  {"tools": [{"type": "bash_20250124", "name": "bash"}]}):  # fmt: skip
        with pytest.raises(anthropic.BadRequestError):
            claude.messages.create(**ask("hi", **wrong))
    assert claude.models.retrieve("m").max_input_tokens == 4000
    answer = claude.beta.messages.create(**ask("hi", betas=["something-2030-01-01"]))
    assert answer.content[0].type == "text"
