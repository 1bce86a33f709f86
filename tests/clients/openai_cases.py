"""What people do with OpenAI's package: chats, tools, formats, errors, retries, leaving."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from pydantic import BaseModel

from .case import Cases, Place, same
from .crowd import Counted, crowd
from support.eventually import eventually
from support.models.known_model import ANSWER, ARGUMENTS, FOR_EVER, FUNCTION, WORDS

CASES = Cases("openai")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
FIRST_FIVE = "".join(WORDS[:5])
LONG = 150_000
"""Tokens that take longer than any case waits for them."""

LEFT_S = 30.0
"""By when a server has noticed that its client has left."""


class City(BaseModel):
    """The form of an answer."""

    city: Literal["Oslo", "Rome"]


def user(text: str) -> list[dict[str, Any]]:
    """A chat with one message."""
    return [{"role": "user", "content": text}]


def ask(place: Place, text: str = "Count.", **more: Any) -> dict[str, Any]:
    """What every chat asks for."""
    return {"model": place.model, "messages": user(text), "temperature": 0.0, **more}


@CASES.add("chat")
def chat(place: Place) -> None:
    with place.openai() as sdk:
        messages = [{"role": "system", "content": "Be brief."}, *user("Count.")]
        answer = sdk.chat.completions.create(**ask(place, max_tokens=5) | {"messages": messages})
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", FIRST_FIVE)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


@CASES.add("chat, with the role `developer` and a list of parts")
def chat_of_parts(place: Place) -> None:
    parts = [{"type": "text", "text": "Count"}, {"type": "text", "text": " now."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    with place.openai() as sdk:
        answer = sdk.chat.completions.create(**ask(place) | {"messages": messages})
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"


@CASES.add("chat, streamed, with usage")
def stream(place: Place) -> None:
    asked = ask(place, stream=True, max_tokens=5, stream_options={"include_usage": True})
    with place.openai() as sdk:
        *chunks, last = sdk.chat.completions.create(**asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == FIRST_FIVE
    assert [c for chunk in chunks if (c := chunk.choices[0].finish_reason)] == ["length"]
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 2, "it came at once"
    assert (last.choices, last.usage.completion_tokens) == ([], 5)


@CASES.add("chats side by side, with coroutines")
def side_by_side(place: Place) -> None:
    async def all_of_them() -> list[Any]:
        async with place.async_openai() as sdk:
            return await asyncio.gather(
                *(sdk.chat.completions.create(**ask(place, f"Count, {n}.")) for n in range(3))
            )

    answers = asyncio.run(all_of_them())
    assert [answer.choices[0].message.content for answer in answers] == [ANSWER] * 3


@CASES.add("`stop`")
def stop(place: Place) -> None:
    with place.openai() as sdk:
        answer = sdk.chat.completions.create(**ask(place, stop=[" four", "xx"]))
    same(answer.choices[0].message.content, "".join(WORDS[:3]))
    assert answer.choices[0].finish_reason == "stop"


@CASES.add("`n`: several answers")
def several(place: Place) -> None:
    with place.openai() as sdk:
        answer = sdk.chat.completions.create(**ask(place, n=2, max_tokens=5))
    same([choice.message.content for choice in answer.choices], [FIRST_FIVE] * 2)


# ---------------------------------------------------------------- tools and forms


@CASES.add("tools: a call")
def call(place: Place) -> None:
    with place.openai() as sdk:
        answer = sdk.chat.completions.create(**ask(place, tools=[TOOL]))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    _check_call(choice.message.tool_calls)


@CASES.add("tools: a call, streamed")
def streamed_call(place: Place) -> None:
    with place.openai() as sdk, sdk.chat.completions.stream(**ask(place, tools=[TOOL])) as pieces:
        final = pieces.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    _check_call(final.choices[0].message.tool_calls)


@CASES.add("tools: the result goes back")
def result(place: Place) -> None:
    with place.openai() as sdk:
        asked = ask(place, tools=[TOOL])
        message = sdk.chat.completions.create(**asked).choices[0].message
        (made,) = message.tool_calls
        back = {"role": "tool", "tool_call_id": made.id, "content": "Sunny."}
        messages = [*asked["messages"], message.model_dump(exclude_none=True), back]
        answer = sdk.chat.completions.create(**asked | {"messages": messages})
    assert answer.choices[0].message.content == ANSWER


@CASES.add('tools: `tool_choice="none"`')
def no_call(place: Place) -> None:
    with place.openai() as sdk:
        answer = sdk.chat.completions.create(**ask(place, tools=[TOOL], tool_choice="none"))
    same(len(answer.choices[0].message.tool_calls or []), 0)
    assert answer.choices[0].message.content == ANSWER


@CASES.add("JSON schema, as a class of Pydantic")
def form(place: Place) -> None:
    with place.openai() as sdk:
        asked = ask(place, response_format=City, max_tokens=100)
        answer = sdk.chat.completions.parse(**asked)
    assert isinstance(answer.choices[0].message.parsed, City)


def _check_call(calls: Any) -> None:
    assert calls, "there is no call"
    (made,) = calls
    assert made.id
    assert made.function.name == FUNCTION
    assert json.loads(made.function.arguments) == ARGUMENTS


# ---------------------------------------------------------------- log-probabilities


@CASES.add("log-probabilities of a chat")
def logprobs(place: Place) -> None:
    with place.openai() as sdk:
        asked = ask(place, max_tokens=3, logprobs=True, top_logprobs=2)
        answer = sdk.chat.completions.create(**asked)
    _check_logprobs(answer.choices[0].logprobs.content)


@CASES.add("log-probabilities of a chat, streamed")
def streamed_logprobs(place: Place) -> None:
    with place.openai() as sdk:
        asked = ask(place, max_tokens=3, logprobs=True, top_logprobs=2, stream=True)
        chunks = list(sdk.chat.completions.create(**asked))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    tokens = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    _check_logprobs(tokens)


def _check_logprobs(tokens: Any) -> None:
    same([one.token for one in tokens], list(WORDS[:3]))
    assert all(one.logprob <= 0.0 for one in tokens)
    assert [len(one.top_logprobs) for one in tokens] == [2, 2, 2]
    assert [one.top_logprobs[0].token for one in tokens] == list(WORDS[:3])


# ---------------------------------------------------------------- other routes


@CASES.add("completion, whole and streamed")
def completion(place: Place) -> None:
    asked = {"model": place.model, "prompt": "once", "max_tokens": 5, "temperature": 0.0}
    with place.openai() as sdk:
        whole = sdk.completions.create(**asked)
        pieces = list(sdk.completions.create(**asked, stream=True))
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (FIRST_FIVE, "length")
    assert "".join(piece.choices[0].text for piece in pieces) == FIRST_FIVE


@CASES.add("completion, with log-probabilities")
def completion_logprobs(place: Place) -> None:
    with place.openai() as sdk:
        answer = sdk.completions.create(
            model=place.model, prompt="once", max_tokens=3, logprobs=2, temperature=0.0
        )
    listed = answer.choices[0].logprobs
    assert listed.tokens == list(WORDS[:3])
    assert [len(top) for top in listed.top_logprobs] == [2, 2, 2]


@CASES.add("completion of several prompts")
def prompts(place: Place) -> None:
    with place.openai() as sdk:
        answer = sdk.completions.create(
            model=place.model, prompt=["once", "twice"], max_tokens=5, temperature=0.0
        )
    assert [choice.text for choice in answer.choices] == [FIRST_FIVE] * 2


@CASES.add("response, whole and streamed")
def response(place: Place) -> None:
    asked = {"model": place.model, "input": "Count.", "instructions": "Be brief.", "temperature": 0}
    with place.openai() as sdk:
        whole = sdk.responses.create(**asked)
        with sdk.responses.stream(**asked) as events:
            streamed = events.get_final_response()
    assert [one.output_text for one in (whole, streamed)] == [ANSWER] * 2
    assert whole.status == "completed"


@CASES.add("response, with a call and its result")
def response_call(place: Place) -> None:
    tool = {"type": "function", **TOOL["function"], "strict": False}
    asked: dict[str, Any] = {"model": place.model, "tools": [tool], "temperature": 0.0}
    question = user("What is it like in Rome?")
    with place.openai() as sdk:
        first = sdk.responses.create(**asked, input=question)
        (made,) = [item for item in first.output if item.type == "function_call"]
        assert (made.name, json.loads(made.arguments)) == (FUNCTION, ARGUMENTS)
        said = [item.model_dump(exclude_none=True) for item in first.output]
        back = {"type": "function_call_output", "call_id": made.call_id, "output": "Sunny."}
        answer = sdk.responses.create(**asked, input=[*question, *said, back])
    assert answer.output_text == ANSWER


@CASES.add("list of models")
def models(place: Place) -> None:
    with place.openai() as sdk:
        same([model.id for model in sdk.models.list()], [place.model])


@CASES.add("one of the models")
def one_model(place: Place) -> None:
    with place.openai() as sdk:
        same(sdk.models.retrieve(place.model).id, place.model)


# ---------------------------------------------------------------- what goes wrong


@CASES.add("error: a model that is not there")
def unknown_model(place: Place) -> None:
    error = _error(place, openai.NotFoundError, model="no/such-model")
    assert error.body["code"] == "model_not_found"


@CASES.add("error: a parameter out of its range")
def wrong_parameter(place: Place) -> None:
    assert _error(place, openai.BadRequestError, temperature=-1.0).param == "temperature"


@CASES.add("error: an image, for a model that reads text")
def image(place: Place) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    _error(place, openai.BadRequestError, messages=[{"role": "user", "content": [part]}])


@CASES.add("error: a field that nobody knows, but that may matter")
def unknown_field(place: Place) -> None:
    _error(place, openai.BadRequestError, extra_body={"guided_regex": "[a-z]+"})


def _error(place: Place, kind: type[openai.APIStatusError], **asked: Any) -> Any:
    """What a request is refused with."""
    with place.openai() as sdk:
        try:
            sdk.chat.completions.create(**ask(place, max_tokens=5) | asked)
        except kind as error:
            seen = error
        else:
            raise AssertionError("it was answered")
    assert isinstance(seen.body, dict), f"not in OpenAI's form: {seen.body!r}"
    assert seen.body.get("message"), seen.body
    return seen


@CASES.add("retries: what is hopeless is sent once")
def hopeless(place: Place) -> None:
    counted = Counted()
    http = openai.DefaultHttpxClient(event_hooks=counted.hooks)
    with place.openai(http_client=http) as sdk:
        for wrong in ({"model": "no/such-model"}, {"temperature": -1.0}):
            try:
                sdk.chat.completions.create(**ask(place) | wrong)
            except openai.APIStatusError:
                pass
    assert len(counted.statuses) == 2, counted.statuses
    assert all(400 <= status < 500 for status in counted.statuses), counted.statuses


@CASES.add("retries: a server that is full answers in the end")
def full(place: Place) -> None:
    with place.openai(max_retries=0) as other:
        asked = ask(place, FOR_EVER, stream=True, max_tokens=LONG)
        with crowd(lambda: other.chat.completions.create(**asked), openai.RateLimitError) as taken:
            counted = Counted(on_error=taken.leave)
            http = openai.DefaultHttpxClient(event_hooks=counted.hooks)
            with place.openai(http_client=http) as sdk:
                answer = sdk.chat.completions.create(**ask(place))
            assert answer.choices[0].message.content == ANSWER
            assert len(counted.statuses) == 1 + bool(taken.refused), counted.statuses


@CASES.add("cancel: a stream that is closed")
def closed(place: Place) -> None:
    with place.openai() as sdk:
        asked = ask(place, FOR_EVER, stream=True, max_tokens=LONG)
        pieces = sdk.chat.completions.create(**asked)
        next(iter(pieces))
        assert not place.is_idle(), "it does not answer"
        pieces.close()
        eventually(place.is_idle, LEFT_S, "a server whose client has left")


@CASES.add("cancel: a task that waits for a whole answer")
def cancelled(place: Place) -> None:
    async def leave() -> None:
        async with place.async_openai() as sdk:
            asked = ask(place, FOR_EVER, max_tokens=LONG)
            task = asyncio.create_task(sdk.chat.completions.create(**asked))
            await asyncio.to_thread(eventually, lambda: not place.is_idle())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    eventually(place.is_idle, LEFT_S, "a server whose client has left")
