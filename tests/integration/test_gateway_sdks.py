"""The packages of OpenAI, Anthropic and Ollama at a real daemon with a real model, and a fake one
to break.

A rule that both packages share is one test with both.
"""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import re
import signal
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

import pytest
from pydantic import BaseModel

from mlxsup.gateway.anthropic.conversation import BLOCKS, OF_SERVERS
from mlxsup.gateway.anthropic.fields import COUNT_FIELDS, MESSAGES_FIELDS
from mlxsup.gateway.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from mlxsup.gateway.responses.fields import RESPONSE_FIELDS
from mlxsup.gateway.responses.input import ITEMS, REFERENCE
from mlxsup.gateway.responses.requests import read_response

from support.daemon.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon
from support.gateway.pictures import PNG, PNG_BASE64, PNG_URL
from support.models.known_model import (
    ANSWER,
    ARGUMENTS,
    FOR_EVER,
    FUNCTION,
    WORDS,
    make_known_model,
)

pytestmark = pytest.mark.mlx

# Their imports take three seconds each, and every process of a run collects this file.
import_openai, import_anthropic, import_ollama = (
    partial(pytest.importorskip, name) for name in ("openai", "anthropic", "ollama")
)

KNOWN = "known"
ROWS, WAITING = 2, 1
FIRST_FIVE, FIRST_THREE = "".join(WORDS[:5]), "".join(WORDS[:3])
LONG = 150_000
"""Tokens that take longer than any test waits for them."""

LIMIT_S = 60.0
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    folder = make_known_model(tmp_path_factory.mktemp("known"))
    models = {
        KNOWN: {"path": str(folder), "preload": True, "max_concurrency": ROWS},
        "m": fake(
            fake={"step_s": 0.01, "takes_pictures": True}, max_concurrency=4, context_length=4000,
            restart={"max_restarts": 99}, sampling={"top_p": 0.875},
        ),
    }  # fmt: skip
    with HttpDaemon(models, {"max_queue": WAITING}) as running:
        with running.client() as client:
            for name in models:
                client.load(name)
        yield running


class City(BaseModel):
    """The form of an answer."""

    city: Literal["Oslo", "Rome"]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


FUNCTION_OF_CITIES = {"name": FUNCTION, "description": "The weather of a city."}


class Gpt:
    """OpenAI's package as its users have it; they have to name a key."""

    tool: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": FUNCTION_OF_CITIES | {"parameters": SCHEMA},
    }
    no_call: ClassVar[Any] = "none"
    status_if_full = 429

    def __init__(self, url: str) -> None:
        self.package: Any = import_openai()
        self.settings = {"base_url": f"{url}/v1", "api_key": "none", "timeout": LIMIT_S}

    def client(self, **settings: Any) -> Any:
        return self.package.OpenAI(**self.settings, **settings)

    def async_client(self) -> Any:
        return self.package.AsyncOpenAI(**self.settings)

    def ask(self, client: Any, text: str = "Count.", **more: Any) -> Any:
        """Return the answer, or its stream, to one message."""
        given = {"model": KNOWN, "messages": user(text), "temperature": 0.0}
        return client.chat.completions.create(**given | more)

    def parse(self, client: Any, messages: list[dict[str, Any]]) -> Any:
        """Return an answer in the form of `City`."""
        answer = client.chat.completions.parse(
            model=KNOWN, messages=messages, response_format=City, max_tokens=100
        )
        return answer.choices[0].message.parsed

    def text(self, answer: Any) -> str:
        return str(answer.choices[0].message.content)

    def call(self, answer: Any) -> tuple[str, str, Any]:
        """Return id, name and arguments of the only call of an answer that ended with it."""
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (made,) = choice.message.tool_calls
        return made.id, made.function.name, json.loads(made.function.arguments)

    def streamed_call(self, client: Any) -> Any:
        """Return the last state of a streamed answer that is a call."""
        asked = {"model": KNOWN, "messages": user("Count."), "tools": [self.tool]}
        with client.chat.completions.stream(**asked) as pieces:
            return pieces.get_final_completion()

    def with_result(self, answer: Any, call_id: str) -> list[dict[str, Any]]:
        """Return the messages that send the result of a call back."""
        said = answer.choices[0].message.model_dump(exclude_none=True)
        return [*user("Count."), said,
                {"role": "tool", "tool_call_id": call_id, "content": "Sunny."}]  # fmt: skip


class Claude:
    """Anthropic's package, with the same methods."""

    tool: ClassVar[dict[str, Any]] = FUNCTION_OF_CITIES | {"input_schema": SCHEMA}
    no_call: ClassVar[Any] = {"type": "none"}
    status_if_full = 529

    def __init__(self, url: str) -> None:
        self.package: Any = import_anthropic()
        self.settings = {"base_url": url, "api_key": "none", "timeout": LIMIT_S}

    def client(self, **settings: Any) -> Any:
        return self.package.Anthropic(**self.settings, **settings)

    def async_client(self) -> Any:
        return self.package.AsyncAnthropic(**self.settings)

    def ask(self, client: Any, text: str = "Count.", **more: Any) -> Any:
        # The package of this version has no parameter of that name.
        given = {"model": KNOWN, "max_tokens": 100, "messages": user(text),
                 "extra_body": {"temperature": more.pop("temperature", 0.0)}}  # fmt: skip
        return client.messages.create(**given | more)

    def parse(self, client: Any, messages: list[dict[str, Any]]) -> Any:
        return client.messages.parse(
            model=KNOWN, max_tokens=100, messages=messages, output_format=City
        ).parsed_output

    def text(self, answer: Any) -> str:
        (block,) = answer.content
        assert block.type == "text"
        return str(block.text)

    def call(self, answer: Any) -> tuple[str, str, Any]:
        assert answer.stop_reason == "tool_use"
        (made,) = [block for block in answer.content if block.type == "tool_use"]
        return made.id, made.name, made.input

    def streamed_call(self, client: Any) -> Any:
        asked = {"model": KNOWN, "max_tokens": 100, "messages": user("Count.")}
        with client.messages.stream(**asked, tools=[self.tool]) as events:
            return events.get_final_message()

    def with_result(self, answer: Any, call_id: str) -> list[dict[str, Any]]:
        back = {"type": "tool_result", "tool_use_id": call_id, "content": "Sunny."}
        return [*user("Count."), {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [back]}]  # fmt: skip


Sdk = Gpt | Claude
Clients = dict[str, Any]


@pytest.fixture(params=[Gpt, Claude], ids=["openai", "anthropic"])
def sdk(request: pytest.FixtureRequest, daemon: HttpDaemon) -> Sdk:
    made: Sdk = request.param(daemon.url)
    return made


@pytest.fixture
def gpt(daemon: HttpDaemon) -> Iterator[Any]:
    with Gpt(daemon.url).client() as client:
        yield client


@pytest.fixture
def claude(daemon: HttpDaemon) -> Iterator[Any]:
    with Claude(daemon.url).client() as client:
        yield client


@pytest.fixture
def llama(daemon: HttpDaemon) -> Iterator[Any]:
    package = import_ollama()
    with package.Client(daemon.url, timeout=LIMIT_S) as client:
        yield client


# ---------------------------------------------------------------- rules of both packages


def test_answers_come_side_by_side(sdk: Sdk) -> None:
    async def all_of_them() -> list[Any]:
        async with sdk.async_client() as client:
            return await asyncio.gather(*(sdk.ask(client, f"Count, {n}.") for n in range(3)))

    assert [sdk.text(answer) for answer in asyncio.run(all_of_them())] == [ANSWER] * 3


def test_call_is_made_and_its_result_goes_back(sdk: Sdk) -> None:
    with sdk.client() as client:
        first = sdk.ask(client, tools=[sdk.tool])
        for answer in (first, sdk.streamed_call(client)):
            call_id, *called = sdk.call(answer)
            assert call_id
            assert called == [FUNCTION, ARGUMENTS]
        messages = sdk.with_result(first, sdk.call(first)[0])
        assert sdk.text(sdk.ask(client, tools=[sdk.tool], messages=messages)) == ANSWER
        none = sdk.ask(client, tools=[sdk.tool], tool_choice=sdk.no_call)
        assert sdk.text(none) == ANSWER, "no call may be made"


@pytest.mark.parametrize("said", [[], [{"role": "assistant", "content": "In Rome."}]])
def test_answer_has_the_form_of_a_class_of_pydantic(sdk: Sdk, said: list[dict[str, Any]]) -> None:
    """Also after the model's last words, as LangGraph's agents ask for their outcome."""
    with sdk.client() as client:
        assert isinstance(sdk.parse(client, [*user("Where?"), *said]), City)


REFUSED_FIELD: dict[str, Any] = {"openai": {"grammar": "x"}, "anthropic": {"container": "x"}}

IMAGE: dict[str, Any] = {
    "openai": {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
    "anthropic": {
        "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}
    },
}  # fmt: skip


def test_hopeless_request_is_an_error_of_the_package_and_sent_once(sdk: Sdk) -> None:
    package = sdk.package
    part = {"role": "user", "content": [IMAGE[package.__name__]]}
    wrong: list[tuple[dict[str, Any], Any]] = [
        ({"model": "no/such-model"}, package.NotFoundError),
        ({"temperature": -1.0}, package.BadRequestError),
        ({"messages": [part]}, package.BadRequestError),
        ({"extra_body": REFUSED_FIELD[package.__name__]}, package.BadRequestError),
    ]
    seen: list[int] = []
    hooks = {"response": [lambda response: seen.append(response.status_code)]}
    with sdk.client(http_client=package.DefaultHttpxClient(event_hooks=hooks)) as client:
        for more, error in wrong:
            with pytest.raises(error) as caught:
                sdk.ask(client, **more)
            assert isinstance(caught.value.body, dict), "it is in the form of this API"
    assert seen == [404, 400, 400, 400]


def test_full_daemon_answers_a_repeated_request(sdk: Sdk, daemon: HttpDaemon) -> None:
    with daemon.client() as own:
        streams = [own.generate(KNOWN, prompt=FOR_EVER, max_tokens=LONG, ignore_eos=True)
                   for _ in range(ROWS + WAITING)]  # fmt: skip
        eventually(lambda: row(own, KNOWN)["queued"] == WAITING, what="a daemon that is full")
        seen: list[int] = []

        def on_response(response: Any) -> None:
            seen.append(response.status_code)
            for stream in streams:
                stream.cancel()

        http = sdk.package.DefaultHttpxClient(event_hooks={"response": [on_response]})
        with sdk.client(http_client=http) as client:
            assert sdk.text(sdk.ask(client)) == ANSWER
        assert seen == [sdk.status_if_full, 200]


# ---------------------------------------------------------------- streams and deaths


def pieces_of_a_chat(clients: Clients, text: str) -> Iterator[str]:
    asked = {"model": "m", "messages": user(text), "max_tokens": 100}
    for chunk in clients["openai"].chat.completions.create(**asked, stream=True):
        yield chunk.choices[0].delta.content or ""


def pieces_of_a_response(clients: Clients, text: str) -> Iterator[str]:
    events = list[str]()
    asked = {"model": "m", "input": text, "max_output_tokens": 100}
    for event in clients["openai"].responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            events.append(event.delta)
            yield event.delta
    assert event.type == "response.incomplete"
    assert event.response.incomplete_details.reason == "max_output_tokens"
    assert event.response.output_text == "".join(events)
    assert event.response.usage.output_tokens == 100


def pieces_of_a_message(clients: Clients, text: str) -> Iterator[str]:
    asked = {"model": "m", "messages": user(text), "max_tokens": 100}
    with clients["anthropic"].messages.stream(**asked) as stream:
        yield from stream.text_stream
        assert stream.get_final_message().usage.output_tokens == 100


def pieces_for_ollama(clients: Clients, text: str) -> Iterator[str]:
    asked = {"options": {"num_predict": 100}, "stream": True}
    for line in clients["ollama"].chat("m", user(text), **asked):
        yield line.message.content


@pytest.mark.parametrize(
    ("pieces_of", "package", "error"),
    [
        (pieces_of_a_chat, import_openai, "APIError"),
        (pieces_of_a_response, import_openai, "APIError"),
        (pieces_of_a_message, import_anthropic, "APIStatusError"),
        (pieces_for_ollama, import_ollama, "ResponseError"),
    ],
    ids=["chat", "response", "message", "ollama"],
)
def test_stream_survives_a_kill_of_its_worker_and_raises_its_own_end(
    daemon: HttpDaemon,
    gpt: Any,
    claude: Any,
    llama: Any,
    pieces_of: Callable[..., Any],
    package: Callable[[], Any],
    error: str,
) -> None:
    clients = {"openai": gpt, "anthropic": claude, "ollama": llama}
    with daemon.client() as client:
        client.load("m")
        wait_for_state(client, "m", "READY")
        expected = "".join(pieces_of(clients, "survives"))
        pieces = pieces_of(clients, "survives")
        begun = [next(pieces) for _ in range(5)]
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        assert "".join([*begun, *pieces]) == expected
        pieces = pieces_of(clients, "is ended by hand")
        next(pieces)
        client.cancel(row(client, "m")["running"][0])
        with pytest.raises(getattr(package(), error), match="mlxsup cancel"):
            list(pieces)


# ---------------------------------------------------------------- OpenAI


def test_chat_counts_its_tokens_whole_and_streamed(gpt: Any) -> None:
    parts = [{"type": "text", "text": "Count"}, {"type": "text", "text": " now."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    asked = {"model": KNOWN, "messages": messages, "max_tokens": 5, "temperature": 0.0}
    whole = gpt.chat.completions.create(**asked, n=2)
    assert [choice.message.content for choice in whole.choices] == [FIRST_FIVE] * 2
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage.completion_tokens == 10
    *chunks, last = gpt.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == FIRST_FIVE
    assert sum(map(bool, texts)) > 2, "it came at once"
    assert [c for chunk in chunks if (c := chunk.choices[0].finish_reason)] == ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 5)
    asked |= {"max_tokens": 100, "stop": [" four", "xx"]}
    (stopped,) = gpt.chat.completions.create(**asked).choices
    assert (stopped.message.content, stopped.finish_reason) == (FIRST_THREE, "stop")


def test_logprobs_name_the_tokens_whole_and_streamed(gpt: Any) -> None:
    asked = {"model": KNOWN, "messages": user("Count."), "max_tokens": 3, "temperature": 0.0,
             "logprobs": True, "top_logprobs": 2}  # fmt: skip
    whole = gpt.chat.completions.create(**asked).choices
    chunks = gpt.chat.completions.create(**asked, stream=True)
    for choices in (whole, [choice for chunk in chunks for choice in chunk.choices]):
        tokens = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
        assert [one.token for one in tokens] == list(WORDS[:3])
        assert [one.top_logprobs[0].token for one in tokens] == list(WORDS[:3])
        assert [len(one.top_logprobs) for one in tokens] == [2, 2, 2]
        assert all(one.logprob <= 0.0 for one in tokens)


def test_completion_of_prompts_whole_and_streamed(gpt: Any) -> None:
    asked = {"model": KNOWN, "prompt": ["once", "twice"], "max_tokens": 3, "temperature": 0.0}
    whole = gpt.completions.create(**asked, logprobs=2)
    for choice in whole.choices:
        assert (choice.text, choice.finish_reason) == (FIRST_THREE, "length")
        assert choice.logprobs.tokens == list(WORDS[:3])
        assert [len(top) for top in choice.logprobs.top_logprobs] == [2, 2, 2]
    pieces = list(gpt.completions.create(**asked | {"prompt": "once"}, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == FIRST_THREE


def test_response_whole_and_streamed(gpt: Any) -> None:
    asked = {"model": KNOWN, "input": "Count.", "instructions": "Be brief.", "temperature": 0}
    whole = gpt.responses.create(**asked)
    with gpt.responses.stream(**asked) as events:
        streamed = events.get_final_response()
    assert [one.output_text for one in (whole, streamed)] == [ANSWER] * 2
    assert whole.status == "completed"


def test_response_is_kept_continued_and_deleted(gpt: Any) -> None:
    first = gpt.responses.create(model=KNOWN, input="Count.", metadata={"a": "b"})
    assert gpt.responses.retrieve(first.id) == first
    then = {"model": KNOWN, "input": "Again.", "previous_response_id": first.id}
    second = gpt.responses.create(**then)
    assert second.usage.input_tokens > 2 * first.usage.input_tokens
    assert gpt.responses.input_tokens.count(**then).input_tokens == second.usage.input_tokens
    (item,) = gpt.responses.input_items.list(second.id).data
    assert item.content[0].text == "Again."
    gpt.responses.delete(first.id)
    with pytest.raises(import_openai().NotFoundError):
        gpt.responses.retrieve(first.id)
    with pytest.raises(import_openai().NotFoundError) as wrong:
        gpt.responses.create(**then)
    assert wrong.value.code == "previous_response_not_found"
    assert wrong.value.param == "previous_response_id"


def test_response_has_reasoning_and_calls_that_can_be_sent_back(gpt: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    prompt = f"[[say <think>hm</think>{CALL}]]"
    with gpt.responses.stream(model="m", input=prompt, tools=[tool]) as stream:
        answer = stream.get_final_response()
    reasoning, *_, call = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    said = [item.model_dump(exclude_none=True) for item in answer.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = gpt.responses.create(
        model="m", tools=[tool], max_output_tokens=5, input=[*user(prompt), *said, output]
    )
    assert again.usage.output_tokens == 5
    kept = gpt.responses.create(
        model="m", tools=[tool], max_output_tokens=5, previous_response_id=answer.id, input=[output]
    )
    assert kept.usage.input_tokens == again.usage.input_tokens
    assert (kept.temperature, kept.top_p) == (0, 0.875), "as the model's entry has it"


def test_models_are_listed_in_both_apis(gpt: Any, claude: Any) -> None:
    for client in (gpt, claude):
        assert [model.id for model in client.models.list()] == [KNOWN, "m"]
        assert client.models.retrieve(KNOWN).id == KNOWN
    assert claude.models.retrieve("m").max_input_tokens == 4000


# ---------------------------------------------------------------- Anthropic


def test_message_of_blocks_whole_and_streamed(claude: Any) -> None:
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Count."}, block]}]
    asked = {"model": KNOWN, "system": [block], "messages": messages, "max_tokens": 100,
             "extra_body": {"temperature": 0.0}}  # fmt: skip
    with claude.messages.stream(**asked) as events:
        pieces = list(events.text_stream)
        streamed = events.get_final_message()
    assert ("".join(pieces), len(pieces) > 2) == (ANSWER, True)
    for answer in (streamed, claude.messages.create(**asked)):
        assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")
        assert answer.usage.output_tokens >= len(WORDS)
    cut = claude.messages.create(**asked | {"max_tokens": 5})
    assert (cut.content[0].text, cut.stop_reason) == (FIRST_FIVE, "max_tokens")
    stopped = claude.messages.create(**asked, stop_sequences=["xx", " four"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " four")
    assert stopped.content[0].text == FIRST_THREE


THINKING = {"type": "enabled", "budget_tokens": 1024}


def test_message_has_its_thinking_apart_and_takes_it_back(claude: Any) -> None:
    asked = {"model": "m", "messages": user("[[say <think>hm</think>yes]]"), "thinking": THINKING,
             "max_tokens": 200}  # fmt: skip
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        thinking, text = answer.content[:2]
        assert (thinking.type, thinking.thinking) == ("thinking", "hm")
        assert (text.type, text.text) == ("text", "yes")
    back = {"role": "assistant", "content": final.content}
    claude.messages.create(**asked | {
        "max_tokens": 5, "messages": [*user("hi"), back, *user("and?")]})  # fmt: skip


def test_count_of_tokens_is_that_of_the_message_and_computes_nothing(
    daemon: HttpDaemon, claude: Any
) -> None:
    tool = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
    asked = {"model": "m", "messages": user("how many?"), "system": "be brief", "tools": [tool]}
    raw = claude.messages.with_raw_response.create(**asked, max_tokens=20)
    used = raw.parse().usage
    assert raw.headers["request-id"] in raw.parse().id
    with daemon.client() as client:
        before = row(client, "m")["steps"]
        count = claude.messages.count_tokens(**asked).input_tokens
        assert row(client, "m")["steps"] == before
    assert count == used.input_tokens + used.cache_read_input_tokens
    long = claude.messages.count_tokens(model="m", messages=user("x" * 9000))
    assert long.input_tokens > 9000, "more than the context"


def test_errors_and_beta_headers_are_those_of_anthropic(claude: Any) -> None:
    asked = {"model": "m", "max_tokens": 20, "messages": user("hi")}
    with pytest.raises(import_anthropic().NotFoundError) as missing:
        claude.messages.create(**asked | {"model": "n"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(import_anthropic().BadRequestError):
        claude.messages.create(**asked, tools=[{"name": "bash"}])
    answer = claude.beta.messages.create(**asked, betas=["something-2030-01-01"])
    assert answer.content[0].type == "text"
    with claude.messages.stream(**asked | {"max_tokens": 64_000}) as stream:
        assert next(iter(stream.text_stream)), "more than fits is cut, and not refused"


# ---------------------------------------------------------------- Ollama


def test_ollamas_package_chats_and_generates(llama: Any) -> None:
    whole = llama.chat(KNOWN, user("Count."), options={"temperature": 0.0})
    assert (whole.message.content, whole.done_reason, whole.eval_count) == (ANSWER, "stop", 10)
    assert whole.eval_duration > 0
    asked = {"options": {"temperature": 0.0, "num_predict": 5}, "stream": True}
    *lines, last = llama.chat(f"{KNOWN}:latest", user("Count."), **asked)
    assert [line.message.content for line in lines] == list(WORDS[:5])
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 5)
    assert llama.generate(KNOWN, "Count.", options={"stop": [" four"]}).response == FIRST_THREE
    thought = llama.chat("m", user("[[say <think>hm</think>yes]]"), think="low").message
    assert (thought.thinking, thought.content) == ("hm", "yes")
    (score, *_) = llama.chat(KNOWN, user("Count."), logprobs=True, top_logprobs=1).logprobs
    assert (score.token, score.top_logprobs[0].token) == (WORDS[0], WORDS[0])
    city = llama.chat(KNOWN, user("Where?"), format=City.model_json_schema())
    assert City.model_validate_json(city.message.content)


def test_ollamas_package_takes_calls_and_sends_results_back(llama: Any) -> None:
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"Sunny in {city}."

    whole = llama.chat(KNOWN, user("Count."), tools=[weather]).message
    *_, line, _ = llama.chat(KNOWN, user("Count."), tools=[weather], stream=True)
    for message in (whole, line.message):
        (call,) = message.tool_calls
        assert (call.function.name, dict(call.function.arguments)) == (FUNCTION, ARGUMENTS)
    result = {"role": "tool", "tool_name": FUNCTION, "content": weather(**ARGUMENTS)}
    answer = llama.chat(KNOWN, [*user("Count."), whole, result], tools=[weather])
    assert answer.message.content == ANSWER


def test_ollamas_package_lists_loads_and_unloads(daemon: HttpDaemon, llama: Any) -> None:
    def loaded() -> list[str]:
        return [model.name for model in llama.ps().models]

    assert [model.model for model in llama.list().models] == [f"{KNOWN}:latest", "m:latest"]
    shown = llama.show(KNOWN)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["llama.context_length"] == 200_000
    assert llama.generate("m", keep_alive=0).done_reason == "unload"
    eventually(lambda: loaded() == [f"{KNOWN}:latest"], what="one model that is loaded")
    assert llama.generate("m", keep_alive="5m").done_reason == "load"
    assert loaded() == [f"{KNOWN}:latest", "m:latest"]
    for ask, status in ((llama.show, 404), (llama.pull, 403)):
        with pytest.raises(import_ollama().ResponseError) as refused:
            ask("x")
        assert refused.value.status_code == status


# ---------------------------------------------------------------- pictures


def test_pictures_reach_the_worker_from_each_package(gpt: Any, claude: Any, llama: Any) -> None:
    look = {"type": "text", "text": "look"}

    def asked(picture: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [picture, look]}]

    picture = {"type": "image_url", "image_url": {"url": PNG_URL}}
    chat = gpt.chat.completions.create(model="m", messages=asked(picture), max_tokens=8)
    shown = [{"type": "input_image", "image_url": PNG_URL, "detail": "auto"},
             {"type": "input_text", "text": "look"}]  # fmt: skip
    first = gpt.responses.create(
        model="m", input=[{"role": "user", "content": shown}], max_output_tokens=8
    )
    second = gpt.responses.create(model="m", input="and?", previous_response_id=first.id)
    source = {"type": "base64", "media_type": "image/png", "data": PNG_BASE64}
    message = claude.messages.create(
        model="m", messages=asked({"type": "image", "source": source}), max_tokens=8
    )
    told = llama.chat("m", [user("look")[0] | {"images": [PNG]}], options={"num_predict": 8})
    prompts = {chat.usage.prompt_tokens, first.usage.input_tokens, message.usage.input_tokens,
               told.prompt_eval_count}  # fmt: skip
    assert prompts == {len(f"user: [{len(PNG)} bytes]look\nassistant:")}
    assert second.usage.input_tokens > first.usage.input_tokens, "the picture is kept with it"
    assert "vision" in llama.show("m").capabilities
    far = {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}
    for model, sent, words in (
        (KNOWN, picture, "takes text only"), ("m", far, "nothing is fetched here"),
    ):  # fmt: skip
        with pytest.raises(import_openai().BadRequestError, match=words):
            gpt.chat.completions.create(model=model, messages=asked(sent))


# ---------------------------------------------------------------- the types of the packages


LEFT_OUT = {
    "file_search_call", "computer_call", "computer_call_output", "web_search_call",
    "tool_search_call", "tool_search_output", "additional_tools", "configuration_update",
    "compaction", "compaction_trigger", "image_generation_call", "code_interpreter_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program", "program_output",
}  # fmt: skip
"""Items of tools that do not run here: left out, and named in the header."""

PARAMETERS = [
    ("openai.types.chat.completion_create_params.CompletionCreateParamsBase", CHAT_FIELDS),
    ("openai.types.completion_create_params.CompletionCreateParamsBase", COMPLETION_FIELDS),
    ("openai.types.responses.response_create_params.ResponseCreateParamsBase", RESPONSE_FIELDS),
    ("openai.types.responses.input_token_count_params.InputTokenCountParams", RESPONSE_FIELDS),
    ("anthropic.types.beta.message_create_params.MessageCreateParamsBase", MESSAGES_FIELDS),
    ("anthropic.types.beta.message_count_tokens_params.MessageCountTokensParams", COUNT_FIELDS),
]


@pytest.mark.parametrize(("params", "fields"), PARAMETERS)
def test_every_field_of_the_installed_sdks_is_in_a_table(params: str, fields: Any) -> None:
    """A new field of a client shows up here before users meet it in a header."""
    hints = typing.get_type_hints(pkgutil.resolve_name(params))
    assert not hints.keys() - {field.name for field in fields}


def kinds_of(union: Any) -> set[str]:
    """Return the values of `type` in the members of a union of typed dictionaries."""
    found: set[str] = set()
    for member in typing.get_args(union):
        kind = getattr(member, "__annotations__", {}).get("type")
        if kind is None:
            found |= kinds_of(member)
        else:
            text = getattr(kind, "__forward_arg__", str(kind))
            found |= set(re.findall(r"['\"](\w+)['\"]", text))
    return found


def test_every_item_and_block_of_the_sdks_has_its_treatment() -> None:
    items = kinds_of(pkgutil.resolve_name("openai.types.responses.ResponseInputItemParam"))
    assert len(items) > 20
    assert not items - {*ITEMS, REFERENCE, *LEFT_OUT}
    left = [{"type": kind, "id": "x", "call_id": "x", "output": {}} for kind in sorted(LEFT_OUT)]
    ask = read_response({"model": "m", "input": [*user("hi"), *left]})
    assert ask.unread == [f"input[{at}] ({one['type']})" for at, one in enumerate(left, 1)]
    assert ask.inputs[0]["messages"] == user("hi")
    blocks = kinds_of(pkgutil.resolve_name("anthropic.types.beta.BetaContentBlockParam"))
    assert len(blocks) > 10
    assert not {one for one in blocks if one not in BLOCKS and not OF_SERVERS.fullmatch(one)}
