"""What requests in OpenAI's form ask of the daemon, and that none of them can raise a bug."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.gateway.ask import Ask
from mlxsup.gateway.body import parse_object
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.fields import Use
from mlxsup.gateway.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, MESSAGE_FIELDS
from mlxsup.gateway.openai.requests import read_chat, read_completion

from support.sent_requests import JSON, outcome, sent

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Ask:
    """A chat with these fields besides the model and a message."""
    return read_chat({"model": "m", "messages": HELLO, **fields})


def completion(**fields: Any) -> Ask:
    """A completion with these fields besides the model and a prompt."""
    return read_completion({"model": "m", "prompt": "hello", **fields})


def refusal(read: Any, body: Any) -> Failure:
    """The refusal of a body."""
    with pytest.raises(Failure) as caught:
        read(body)
    assert caught.value.status == 400
    return caught.value


# ---------------------------------------------------------------- chats


def test_a_chat_becomes_messages_and_parameters() -> None:
    ask = chat(temperature=0.5, top_p=0.9, seed=3, max_completion_tokens=9, stop="\n", user="u")
    assert ask == Ask(
        model="m",
        inputs=({"messages": HELLO},),
        parameters={"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 9, "stop": ["\n"]},
    )
    assert sent(ask)


@pytest.mark.parametrize(
    ("value", "expected_s"),
    [(0, 0.0), (300, 300.0), ("5m", 300.0), ("90", 90.0), (-1, -1.0), (-7.5, -1.0), ("-1m", -1.0)],
)
@pytest.mark.parametrize("name", ["keep_alive", "ttl"])
@pytest.mark.parametrize("ask", [chat, completion])
def test_how_long_a_model_stays_is_read_as_other_programs_write_it(
    ask: Any, name: str, value: Any, expected_s: float
) -> None:
    asked = ask(**{name: value})
    assert asked.parameters["keep_alive"] == expected_s
    assert "ttl" not in asked.parameters
    assert sent(asked)


@pytest.mark.parametrize("value", ["soon", True, [1], float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["keep_alive", "ttl"])
def test_what_is_no_time_is_refused_by_its_name(name: str, value: Any) -> None:
    body = {"model": "m", "messages": HELLO, name: value}
    assert refusal(read_chat, body).param == name
    both = {"model": "m", "messages": HELLO, "keep_alive": 1, "ttl": 1}
    assert refusal(read_chat, both).param == "ttl"


def test_null_is_as_good_as_nothing() -> None:
    fields = {field.name: None for field in CHAT_FIELDS if field.name not in ("model", "messages")}
    assert chat(**fields) == chat()


def test_a_developer_is_a_system_and_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    ask = read_chat(
        {"model": "m", "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "ada"},
        ]}
    )  # fmt: skip
    assert ask.inputs[0]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "ada"},
    ]


def test_calls_and_their_results_are_passed_on() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    read = read_chat({"model": "m", "messages": messages}).inputs[0]["messages"]
    assert read[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert read[2] == {"role": "tool", "tool_call_id": "c", "content": "42"}


def test_tools_lose_what_is_no_description() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    ask = chat(tools=[tool], tool_choice="auto", parallel_tool_calls=True)
    assert ask.parameters["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": {}}}
    ]
    assert not ask.has_one_call
    assert chat(parallel_tool_calls=False).has_one_call
    assert "tools" not in chat(tools=[]).parameters


def test_reasoning_effort_goes_to_the_template_and_what_the_request_says_there_wins() -> None:
    assert chat(reasoning_effort="low").parameters["chat_template_kwargs"] == {
        "reasoning_effort": "low"
    }
    extra = {"reasoning_effort": "high", "enable_thinking": False}
    ask = chat(reasoning_effort="low", chat_template_kwargs=extra)
    assert ask.parameters["chat_template_kwargs"] == extra


def test_n_answers_are_n_requests_with_seeds_of_their_own() -> None:
    assert [choice["seed"] for choice in chat(n=3, seed=5).choices()] == [5, 6, 7]
    assert ["seed" in choice for choice in chat(n=2).choices()] == [False, False]


def test_a_stream_may_end_with_its_usage() -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    ask = chat(stream=True, stream_options=options)
    assert (ask.is_streamed, ask.has_usage) == (True, True)
    assert not chat(stream=True).has_usage


# ---------------------------------------------------------------- completions


def test_a_completion_has_sixteen_tokens_unless_it_says_otherwise() -> None:
    assert completion().choices()[0]["max_tokens"] == 16
    assert completion(max_tokens=3).parameters == {"max_tokens": 3}


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", [{"prompt": "a"}]),
        ([1, 2], [{"prompt_tokens": [1, 2]}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([[1], [2, 3]], [{"prompt_tokens": [1]}, {"prompt_tokens": [2, 3]}]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_or_several(prompt: Any, inputs: list[Any]) -> None:
    assert list(completion(prompt=prompt).inputs) == inputs


def test_several_prompts_have_n_answers_each_in_their_order() -> None:
    choices = completion(prompt=["a", "b"], n=2, seed=1).choices()
    assert [(choice["prompt"], choice["seed"]) for choice in choices] == [
        ("a", 1), ("a", 2), ("b", 1), ("b", 2),
    ]  # fmt: skip


def test_logprobs_of_a_completion_are_a_number() -> None:
    assert completion(logprobs=2).parameters["top_logprobs"] == 2
    assert completion(logprobs=0).parameters["logprobs"] is True


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": ""}, "model", "GET /v1/models lists them"),
        ({"model": 3}, "model", "the name of a model"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "a list of messages"),
        ({"messages": ["hi"]}, "messages[0]", "an object with role and content"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role", "developer"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "takes one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content", "a text"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood",
         "unknown field"),
        ({"n": 0}, "n", "from 1 to 16"),
        ({"n": 17}, "n", "from 1 to 16"),
        ({"n": True}, "n", "from 1 to 16"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "streamed answers only"),
        ({"stream": True, "stream_options": []}, "stream_options", "takes an object"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "send one"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"modalities": ["text", "audio"]}, "modalities", "has no effect here"),
        ({"verbosity": "low"}, "verbosity", "say it in a message"),
        ({"functions": [{}]}, "functions", "use that"),
        ({"temprature": 1}, "temprature", "unknown field"),
        ({"reasoning_effort": 3}, "reasoning_effort", "takes a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_place(
    fields: dict[str, Any], param: str, words: str
) -> None:
    failure = refusal(read_chat, {"model": "m", "messages": HELLO, **fields})
    assert failure.param == param
    assert words in failure.message


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_what_is_not_text_is_refused_with_its_place(kind: str) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:,x"}}]
    body = {"model": "m", "messages": [*HELLO, {"role": "user", "content": parts}]}
    failure = refusal(read_chat, body)
    assert failure.param == "messages[1].content[1]"
    assert "send text" in failure.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 16, "n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"echo": 0}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_completions_are_refused_in_the_same_way(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "prompt": "hello", **fields}
    assert refusal(read_completion, body).param == param


@pytest.mark.parametrize(
    "field", [field for field in CHAT_FIELDS if field.use is Use.NEUTRAL], ids=lambda f: f.name
)
def test_what_is_neutral_changes_nothing_and_all_else_is_refused(field: Any) -> None:
    for value in field.neutral:
        assert chat(**{field.name: value}) == chat()
    assert refusal(chat_of, {field.name: {"x": 1}}).param == field.name


def chat_of(fields: dict[str, Any]) -> Ask:
    """A chat with these fields."""
    return chat(**fields)


@pytest.mark.parametrize(
    "field", [field for field in CHAT_FIELDS if field.use is Use.IGNORED], ids=lambda f: f.name
)
@pytest.mark.parametrize("value", ["x", {"a": 1}, True, 3])
def test_what_cannot_change_the_text_is_accepted(field: Any, value: Any) -> None:
    assert chat(**{field.name: value}) == chat()


# ---------------------------------------------------------------- junk

NAMES = sorted({field.name for field in (*CHAT_FIELDS, *COMPLETION_FIELDS)})
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from([field.name for field in MESSAGE_FIELDS]), JSON)
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool", "assistant"]), "content": JSON | st.text()}
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={"model": st.just("m") | JSON, "messages": MESSAGES | JSON, "prompt": st.text() | JSON}
    | {name: JSON for name in NAMES if name not in ("model", "messages", "prompt")},
)


@given(BODIES)
def test_junk_is_either_refused_or_sent(body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    for read in (read_chat, read_completion):
        found = outcome(lambda read=read: sent(read(parse_object(text))))  # type: ignore[misc]
        assert found == 400 or isinstance(found, list)


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_bytes_are_an_object_or_refused(data: bytes) -> None:
    found = outcome(lambda: parse_object(data))
    assert found == 400 or isinstance(found, dict)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "takes an object"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": \xff}', "not UTF-8 text (byte 6)"),
        (b'{"a": 1,}', "line 1, column"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' * 5_000 + b"1" + b"}" * 5_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "has more digits"),
        (rb'{"a": "\ud800"}', "half a surrogate pair"),
    ],
)
def test_what_is_no_object_is_refused_with_the_reason(data: bytes, words: str) -> None:
    assert words in refusal(parse_object, data).message
