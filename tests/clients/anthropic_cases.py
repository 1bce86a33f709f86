"""What people do with Anthropic's package: messages, tools, formats, errors, retries, leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic

from .case import Cases, Place
from .crowd import Counted, crowd
from .openai_cases import FIRST_FIVE, LEFT_S, LONG, City, user
from support.eventually import eventually
from support.models.known_model import ANSWER, ARGUMENTS, FOR_EVER, FUNCTION, WORDS

CASES = Cases("anthropic")

TOOL: dict[str, Any] = {
    "name": FUNCTION,
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def ask(place: Place, text: str = "Count.", **more: Any) -> dict[str, Any]:
    """What every message asks for."""
    given = {"model": place.model, "max_tokens": 100, "messages": user(text)}
    # The package of this version has no parameter of that name.
    return given | {"extra_body": {"temperature": 0.0}} | more


@CASES.add("message")
def message(place: Place) -> None:
    with place.anthropic() as sdk:
        answer = sdk.messages.create(**ask(place, max_tokens=5, system="Be brief."))
    (block,) = answer.content
    assert (block.type, block.text, answer.stop_reason) == ("text", FIRST_FIVE, "max_tokens")
    assert answer.usage.output_tokens == 5
    assert answer.usage.input_tokens > 0


@CASES.add("message, with blocks and `cache_control`")
def blocks(place: Place) -> None:
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Count."}, block]}]
    with place.anthropic() as sdk:
        answer = sdk.messages.create(**ask(place, system=[block]) | {"messages": messages})
    assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")


@CASES.add("message, streamed")
def stream(place: Place) -> None:
    with place.anthropic() as sdk, sdk.messages.stream(**ask(place)) as events:
        pieces = list(events.text_stream)
        final = events.get_final_message()
    assert "".join(pieces) == final.content[0].text == ANSWER
    assert len(pieces) > 2, "the text came at once"
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens >= len(WORDS)


@CASES.add("messages side by side, with coroutines")
def side_by_side(place: Place) -> None:
    async def all_of_them() -> list[Any]:
        async with place.async_anthropic() as sdk:
            return await asyncio.gather(
                *(sdk.messages.create(**ask(place, f"Count, {n}.")) for n in range(3))
            )

    answers = asyncio.run(all_of_them())
    assert [answer.content[0].text for answer in answers] == [ANSWER] * 3


@CASES.add("`stop_sequences`")
def stop(place: Place) -> None:
    with place.anthropic() as sdk:
        answer = sdk.messages.create(**ask(place, stop_sequences=["xx", " four"]))
    assert answer.content[0].text == "".join(WORDS[:3])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " four")


# ---------------------------------------------------------------- tools and forms


@CASES.add("tools: a call")
def call(place: Place) -> None:
    with place.anthropic() as sdk:
        _check_call(sdk.messages.create(**ask(place, tools=[TOOL])))


@CASES.add("tools: a call, streamed")
def streamed_call(place: Place) -> None:
    with place.anthropic() as sdk, sdk.messages.stream(**ask(place, tools=[TOOL])) as events:
        _check_call(events.get_final_message())


@CASES.add("tools: the result goes back")
def result(place: Place) -> None:
    with place.anthropic() as sdk:
        asked = ask(place, tools=[TOOL])
        first = sdk.messages.create(**asked)
        made = _check_call(first)
        back = {"type": "tool_result", "tool_use_id": made.id, "content": "Sunny."}
        messages = [
            *asked["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [back]},
        ]
        answer = sdk.messages.create(**asked | {"messages": messages})
    assert answer.content[0].text == ANSWER


@CASES.add("tools: `tool_choice` of the type `none`")
def no_call(place: Place) -> None:
    with place.anthropic() as sdk:
        answer = sdk.messages.create(**ask(place, tools=[TOOL], tool_choice={"type": "none"}))
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == ANSWER


@CASES.add("JSON schema, as a class of Pydantic")
def form(place: Place) -> None:
    with place.anthropic() as sdk:
        answer = sdk.messages.parse(
            model=place.model, max_tokens=100, messages=user("Where?"), output_format=City
        )
    assert isinstance(answer.parsed_output, City)


def _check_call(answer: Any) -> Any:
    assert answer.stop_reason == "tool_use"
    (made,) = [block for block in answer.content if block.type == "tool_use"]
    assert made.id
    assert (made.name, made.input) == (FUNCTION, ARGUMENTS)
    return made


# ---------------------------------------------------------------- other routes


@CASES.add("count of tokens")
def count(place: Place) -> None:
    with place.anthropic() as sdk:
        used = sdk.messages.create(**ask(place)).usage
        counted = sdk.messages.count_tokens(model=place.model, messages=user("Count."))
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


@CASES.add("list of models, and one of them")
def models(place: Place) -> None:
    with place.anthropic() as sdk:
        assert place.model in [model.id for model in sdk.models.list()]
        assert sdk.models.retrieve(place.model).id == place.model


# ---------------------------------------------------------------- what goes wrong


@CASES.add("error: a model that is not there")
def unknown_model(place: Place) -> None:
    _check_error(place, anthropic.NotFoundError, "not_found_error", model="no/such-model")


@CASES.add("error: a parameter out of its range")
def wrong_parameter(place: Place) -> None:
    wrong = {"extra_body": {"temperature": -1.0}}
    _check_error(place, anthropic.BadRequestError, "invalid_request_error", **wrong)


@CASES.add("error: an image, for a model that reads text")
def image(place: Place) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    _check_error(place, anthropic.BadRequestError, "invalid_request_error", messages=messages)


def _check_error(
    place: Place, kind: type[anthropic.APIStatusError], name: str, **asked: Any
) -> None:
    """Fails unless a request is refused with this."""
    with place.anthropic() as sdk:
        try:
            sdk.messages.create(**ask(place) | asked)
        except kind as error:
            if not isinstance(error.body, dict):
                raise  # the route is not there
            seen = error.body
        else:
            raise AssertionError("it was answered")
    assert seen["error"]["type"] == name


@CASES.add("retries: what is hopeless is sent once")
def hopeless(place: Place) -> None:
    counted = Counted()
    http = anthropic.DefaultHttpxClient(event_hooks=counted.hooks)
    with place.anthropic(http_client=http) as sdk:
        sdk.messages.create(**ask(place))
        hopeless_ones: tuple[dict[str, Any], ...] = ({"model": "no/such-model"}, {"messages": []})
        for wrong in hopeless_ones:
            try:
                sdk.messages.create(**ask(place) | wrong)
            except anthropic.APIStatusError:
                pass
    assert counted.statuses == [200, 404, 400]


@CASES.add("retries: a server that is full answers in the end")
def full(place: Place) -> None:
    refusal = anthropic.InternalServerError  # and what is derived from it, for 529
    with place.anthropic(max_retries=0) as other:
        asked = ask(place, FOR_EVER, stream=True, max_tokens=LONG)
        with crowd(lambda: other.messages.create(**asked), refusal) as taken:
            counted = Counted(on_error=taken.leave)
            http = anthropic.DefaultHttpxClient(event_hooks=counted.hooks)
            with place.anthropic(http_client=http) as sdk:
                answer = sdk.messages.create(**ask(place))
            assert answer.content[0].text == ANSWER
            assert len(counted.statuses) == 1 + bool(taken.refused), counted.statuses


@CASES.add("cancel: a stream that is closed")
def closed(place: Place) -> None:
    with place.anthropic() as sdk:
        with sdk.messages.stream(**ask(place, FOR_EVER, max_tokens=LONG)) as events:
            next(iter(events.text_stream))
            assert not place.is_idle(), "it does not answer"
        eventually(place.is_idle, LEFT_S, "a server whose client has left")


@CASES.add("cancel: a task that waits for a whole answer")
def cancelled(place: Place) -> None:
    async def leave() -> None:
        async with place.async_anthropic() as sdk:
            await sdk.messages.create(**ask(place))
            task = asyncio.create_task(
                sdk.messages.create(**ask(place, FOR_EVER, max_tokens=LONG, timeout=600.0))
            )
            await asyncio.to_thread(eventually, lambda: not place.is_idle())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    eventually(place.is_idle, LEFT_S, "a server whose client has left")
