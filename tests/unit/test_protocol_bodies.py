"""Bodies of requests and their parameters: what is taken, what is refused, and what is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from mlxsup.client import RequestError
from mlxsup.client.api import ClientBase
from mlxsup.client.streams import OnNotice
from mlxsup.protocol.body import INPUTS, RESERVED_TEMPLATE_NAMES, RequestBody
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Generate
from mlxsup.protocol.codec import Decoder, decode_body, encode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError, invalid
from mlxsup.protocol.ids import RequestId, RequestKey
from mlxsup.protocol.message import Command
from mlxsup.protocol.parameters import (
    NUMBERS,
    SAMPLING,
    NumberParameter,
    Sampling,
    makers_sampling,
)
from mlxsup.protocol.tool_choice import ToolChoice, read_tool_choice
from mlxsup.worker.engine import EngineFacts, Prompt
from mlxsup.worker.engines.fake.text import FakeTextCodec
from mlxsup.worker.rows import acceptance, plan_row, tools_warnings


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire({"prompt": "p"} | values)


def shown(values: dict[str, Any]) -> str:
    text = repr(values)
    return text if len(text) < 200 else f"{text[:180]} … {len(text)}"


def refusal(**values: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        RequestBody.from_wire(values)
    error = caught.value
    assert error.code is ErrorCode.INVALID_REQUEST
    assert error.detail["parameter"] in {*values, "prompt"}
    assert error.detail.get("expected", "") in error.message
    return error.message


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_a_range_are_taken_C7(name: str) -> None:
    number = NUMBERS[name]
    ends = [number.high] if number.is_low_open else [number.low, number.high]
    beside: dict[str, Any] = {"logprobs": True} if name == "top_logprobs" else {}
    for value in ends:
        if name == "min_tokens":
            beside = {"max_tokens": max(1, int(value))}
        exact = int(value) if number.is_integer else value
        assert body(**beside, **{name: exact}).to_wire()[name] == exact


@pytest.mark.parametrize(
    "values",
    [
        {"stop": ["x" * 256] * 16},
        {"stop": []},
        {"stop_token_ids": list(range(64))},
        {"stop_token_ids": [0, 2**32 - 1]},
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"logit_bias": {0: -100.0, 2**32 - 1: 100, "4294967295": 1.0, "0000000001": 1.0}},
        {"min_tokens": 8, "max_tokens": 8},
        {"top_logprobs": 0},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "regex", "regex": "a+"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"ignore_eos": True, "logprobs": False, "cap_max_tokens": True},
        {"prompt": None, "prompt_tokens": [0, 2**32 - 1]},
        {
            "prompt": None,
            "messages": [{"role": "user", "content": None}],
            "messages_as_text": True,
            "chat_template_kwargs": {"thinking": False},
        },
    ],
)
def test_largest_values_are_taken_and_travel_C7(values: dict[str, Any]) -> None:
    made = body(**values)
    again = decode_body(encode_body(made))
    as_sent = {
        name: {str(key): one for key, one in value.items()} if name == "logit_bias" else value
        for name, value in values.items()
    }
    for name, value in as_sent.items():
        assert again.to_wire().get(name) == value


WRONG: list[dict[str, Any]] = [
    {"prompt": "a", "messages": [1]},
    {},
    {"prompt": b"a"},
    {"prompt": ""},
    {"prompt": "\ud83e"},
    {"prompt_tokens": (1,)},
    {"prompt_tokens": [1, True]},
    {"prompt_tokens": []},
    {"prompt_tokens": [5, 2**32]},
    {"prompt_tokens": [5, -1]},
    {"messages": {}},
    {"messages": []},
    {"messages": ["x"]},
    {"messages": [{"role": 1}]},
    {"prompt": "p", "stop": "x"},
    {"prompt": "p", "stop": ["x", ""]},
    {"prompt": "p", "stop": ["x", 1]},
    {"prompt": "p", "stop": ["ab"] * 17},
    {"prompt": "p", "stop": ["x" * 257]},
    {"prompt": "p", "stop": ["\ud83e"]},
    {"prompt": "p", "logit_bias": {2**32: 1.0}},
    {"prompt": "p", "logit_bias": {"00000000001": 1}},
    {"prompt": "p", "logit_bias": {"": 1}},
    {"prompt": "p", "logit_bias": {-1: 1}},
    {"prompt": "p", "logit_bias": {True: 1}},
    {"prompt": "p", "logit_bias": {"٣": 1}},
    {"prompt": "p", "logit_bias": {1: "x"}},
    {"prompt": "p", "tools": {}},
    {"prompt": "p", "tools": [{"type": "function", "function": {"name": ""}}]},
    {"prompt": "p", "tools": [{"type": "tool", "function": {"name": "f"}}]},
    {"prompt": "p", "tools": [1]},
    {"prompt": "p", "chat_template_kwargs": []},
    {"prompt": "p", "chat_template_kwargs": {"a": 1}},
    {"prompt": "p", "response_format": "json"},
    {"prompt": "p", "response_format": {"type": "text", "x": 1}},
    {"prompt": "p", "response_format": {"type": "regex", "regex": ""}},
    {"prompt": "p", "response_format": {"type": "regex", "regex": "a", "x": 1}},
    {"prompt": "p", "response_format": {"type": "json_schema", "json_schema": {}}},
    {
        "prompt": "p",
        "response_format": {"type": "json_schema", "x": 1, "json_schema": {"schema": {}}},
    },
    {"prompt": "p", "min_tokens": 9, "max_tokens": 8},
    {"prompt": "p", "top_logprobs": 2},
    {"prompt": "p", "ignore_eos": 1},
    {"prompt": "p", "stop_token_ids": ["x"]},
    {"prompt": "p", "stop_token_ids": [1, True]},
    {"prompt": "p", "stop_token_ids": [2**32]},
    {"prompt": "p", "stop_token_ids": [-1]},
    {"prompt": "p", "stop_token_ids": [1] * 65},
    {"prompt": "p", "logit_bias": []},
    {"prompt": "p", "stop_token_ids": {}},
    {"prompt": "p", "logit_bias": dict.fromkeys(range(1025), 1.0)},
    {"prompt": "p", "logprobs": 1},
    {"prompt": "p", "prompt_logprobs": 21},
    {"prompt": "p", "prompt_logprobs": True},
    {"prompt": "p", "echo": 1},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
    {"prompt": "p", "messages_as_text": 1},
    {"prompt": "p", "messages_as_text": True},
    {"prompt": "p", "cap_max_tokens": 1},
    {"prompt": "p", "logit_bias": {5: float("nan")}},
    {"prompt": "p", "logit_bias": {5: 101}},
    {"prompt": "p", "logit_bias": {5: 10**400}},
    {"prompt": "p", "seed": 2**63},
    {"prompt": "p", "top_p": 0},
    {"prompt": "p", "xtc_threshold": 0.51},
    {"prompt": "p", "tool_choice": "required"},
    {"prompt": "p", "tool_choice": {"type": "function"}},
    {"prompt": "p", "tool_choice": "c" * 50},
    {"prompt": "p", "tools": [{"type": "function", "function": {"name": "f"}}] * 2},
    {"prompt": "p", "logit_bias": {"c" * 50: 1.0}},
    {"messages": [{"role": "user", "content": "x"}],
     "chat_template_kwargs": dict.fromkeys((*sorted(RESERVED_TEMPLATE_NAMES), "other"), 1)},
    {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
    {"messages": [{"role": "assistant", "content": " "}], "continue_final_message": True},
    {"messages": [{"role": "user", "content": "x"}], "continue_final_message": "no"},
    {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True,
     "response_format": {"type": "json_object"}},
    {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True,
     "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
]  # fmt: skip


def test_smallest_wrong_values_are_refused_by_name_C7(snapshot: SnapshotAssertion) -> None:
    assert {shown(values): refusal(**values) for values in WRONG} == snapshot
    named = {name for values in WRONG for name in values} | NUMBERS.keys()
    assert named >= {*BODY_FIELDS, *INPUTS}, "each parameter has a case"


def test_client_raises_the_same_errors_before_it_sends_C7() -> None:
    client = EncodingClient("ipc:///unused")
    for values in WRONG:
        with pytest.raises(RequestError) as caught:
            client.generate("m", **values)
        assert (caught.value.code, caught.value.message) == ("invalid_request", refusal(**values))


def test_refusal_shows_numbers_and_kinds_and_no_text() -> None:
    shown = [1.5, None, True, "secret", ["secret"], {"secret": 1}, b"secret", ("secret",)]
    said = [invalid("x", "y", value).message.removeprefix("x must be y, not ") for value in shown]
    assert said == ["1.5", "None", "True", "text", "a list", "a map", "bytes", "a tuple"]
    assert invalid("x", "y", 10**60).message == "x must be y, not 1" + 39 * "0"
    assert invalid("x", "y").detail == {"parameter": "x", "expected": "y"}


def test_accepted_request_keeps_all_but_input_and_seed() -> None:
    asked = body(seed=5, max_tokens=3, logit_bias={7: 1.0}, stop=["x"])
    assert asked.parameters() == {"max_tokens": 3, "logit_bias": {"7": 1.0}, "stop": ["x"]}
    chat = [{"role": "assistant", "content": "x"}]
    ends = {"chat_template_kwargs": {"thinking": True}, "continue_final_message": True}
    told = body(prompt=None, messages=chat, **ends, top_k=2)
    assert told.parameters() == {"top_k": 2}
    again = RequestBody.accepted([1, 2], asked.parameters(), 9)
    assert (again.prompt_tokens, again.seed, again.max_tokens) == ([1, 2], 9, 3)
    assert again.bias_by_token() == {7: 1.0}
    assert body().bias_by_token() == {}


# ---------------------------------------------------------------- the end of a chat

SAID = {"role": "assistant", "content": "x"}
ENDS_SAID: dict[str, Any] = {"prompt": None, "messages": [SAID]}
FORCED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
}


@pytest.mark.parametrize(
    ("asked", "continues"),
    [
        ({}, True),
        ({"continue_final_message": True}, True),
        ({"continue_final_message": False}, False),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        (FORCED, False),
        (FORCED | {"tool_choice": "auto"}, True),
        ({"messages": [SAID | {"tool_calls": [{"id": "c"}]}]}, False),
        ({"messages": [SAID | {"content": " \n"}]}, False),
        ({"messages": [SAID | {"role": "user"}]}, False),
        ({"prompt": "x", "messages": None}, False),
    ],
)
def test_answer_in_a_form_begins_a_turn_after_a_text_of_the_assistant(
    asked: dict[str, Any], continues: bool
) -> None:
    assert body(**{**ENDS_SAID, **asked}).continues is continues


# ---------------------------------------------------------------- parameters

FACTS = EngineFacts(context_length=100, vocabulary_size=300, fingerprint="f", backend="fake")

PROMPT = Prompt(tokens=[5])

KEY = RequestKey(1)

NOT_OF_GENERATE = (*INPUTS, "sampling", "tokenize")
BODY_FIELDS = [
    *(name for name in RequestBody.__dataclass_fields__ if name not in NOT_OF_GENERATE),
    *SAMPLING,
]

KNOWN = sorted({*BODY_FIELDS, *INPUTS, "tokenize"})


def values_of(number: NumberParameter) -> st.SearchStrategy[Any]:
    if number.is_integer:
        return st.integers(int(number.low), int(number.high))
    return st.floats(number.low, number.high, exclude_min=number.is_low_open)


def parameters() -> st.SearchStrategy[dict[str, Any]]:
    numbers = {
        name: values_of(n)
        for name, n in NUMBERS.items()
        if name not in ("min_tokens", "top_logprobs")
    }
    bias = st.dictionaries(st.integers(0, 299), st.floats(-100, 100), max_size=5)
    return st.fixed_dictionaries({}, optional={**numbers, "logit_bias": bias})


@given(parameters())
def test_every_value_in_range_travels_and_is_accepted(chosen: dict[str, Any]) -> None:
    chosen.pop("max_tokens", None)
    received = decode_body(encode_body(body(**chosen)))
    assert isinstance(received, RequestBody)
    row = plan_row(KEY, received, PROMPT, FACTS)
    for name, value in chosen.items():
        assert getattr(row.sampling if name in SAMPLING else row, name) == value
    made = acceptance(row, received, PROMPT, FACTS)
    again = RequestBody.accepted([5], made.parameters, made.seed)
    assert plan_row(KEY, again, PROMPT, FACTS) == row


@pytest.mark.parametrize(
    ("values", "detail", "message"),
    [
        ([], {"parameter": "body", "expected": "a map"}, "body must be a map, not a list"),
        ({"c" * 100: 1}, {"parameter": "c" * 64},
         f"unknown parameter {'c' * 64!r}; known are {', '.join(KNOWN)}"),
        ({"sampling": {"top_k": 1}}, {"parameter": "sampling"},
         f"unknown parameter 'sampling'; known are {', '.join(KNOWN)}"),
        ({"n": 2}, {"parameter": "n"},
         "n is not supported: send the request n times with different seeds; one batch answers"
         " them"),
        ({"skip_special_tokens": 2}, {"parameter": "skip_special_tokens"},
         "skip_special_tokens is not supported: the text leaves out end-of-text tokens and the"
         " markers of an answer's parts, and shows every other token; to leave out more, use the"
         " ids in token_ids"),
    ],
    ids=["a list", "a long name", "sampling", "n", "skip_special_tokens"],
)  # fmt: skip
def test_other_parameters_are_refused_with_advice(
    values: Any, detail: dict[str, str], message: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        RequestBody.from_wire({"prompt": "p"} | values if isinstance(values, dict) else values)
    assert (caught.value.detail, caught.value.message) == (detail, message)


@pytest.mark.parametrize("name", NUMBERS)
def test_value_out_of_range_is_refused_by_name_and_range_C7(name: str) -> None:
    number = NUMBERS[name]
    below = number.low if number.is_low_open else number.low - 1
    for wrong in (below, number.high + 1, 10**400, "1", True, float("nan"), [1]):
        with pytest.raises(RemoteError) as caught:
            body(**{name: wrong})
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert caught.value.detail == {"parameter": name, "expected": number.expected}
        assert caught.value.message.startswith(f"{name} must be {number.expected}, not ")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"logit_bias": {"300": 1.0}}, "below this model's vocabulary of 300, not 300"),
        ({"stop_token_ids": [299, 300]}, "below this model's vocabulary of 300, not 300"),
        ({"min_tokens": 100}, "1 prompt tokens and min_tokens 100 exceed the context"),
    ],
)
def test_what_a_model_does_not_have_is_refused_C7(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteError, match=words):
        plan_row(KEY, body(**asked), PROMPT, FACTS)
    assert plan_row(KEY, body(min_tokens=99), PROMPT, FACTS).min_tokens == 99


@given(
    st.integers(0, 99),
    st.lists(st.integers(0, 299), max_size=64),
    st.none() | st.booleans(),
    st.sampled_from([None, "auto", "none"]),
)
def test_ends_of_an_answer_travel_and_are_accepted(
    min_tokens: int, ends: list[int], ignore_eos: bool | None, tool_choice: str | None
) -> None:
    asked = body(
        min_tokens=min_tokens, stop_token_ids=ends, ignore_eos=ignore_eos, tool_choice=tool_choice
    )
    received = decode_body(encode_body(asked))
    assert received == asked
    row = plan_row(KEY, received, PROMPT, FACTS)
    assert (row.min_tokens, set(row.stop_token_ids), row.ignore_eos) == (
        min_tokens,
        set(ends),
        ignore_eos is True,
    )
    made = acceptance(row, received, PROMPT, FACTS)
    again = RequestBody.accepted([5], made.parameters, made.seed)
    assert plan_row(KEY, again, PROMPT, FACTS) == row
    assert again.tool_choice == tool_choice


_F = {"type": "function", "function": {"name": "f"}}
_FLAT = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("value", "names", "is_forced"),
    [
        (None, "fg", False), ("auto", "fg", False), ({"type": "auto"}, "fg", False),
        ("none", "", False), ({"type": "none"}, "", False), ("required", "fg", True),
        ("any", "fg", True), ({"type": "any"}, "fg", True), (_F, "f", True), (_FLAT, "f", True),
        ({"type": "tool", "name": "f"}, "f", True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_F]}}, "f", False),
        ({"type": "allowed_tools", "mode": "required", "tools": [_FLAT]}, "f", True),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "", False),
    ],
)  # fmt: skip
def test_choice_has_the_form_of_any_api(value: Any, names: str, is_forced: bool) -> None:
    assert read_tool_choice(value, "fg") == ToolChoice(names=frozenset(names), is_forced=is_forced)


@pytest.mark.parametrize(
    "value",
    ["h", {"type": "any", "x": 1}, {"type": "tool"}, 5, [],
     {"type": "allowed_tools", "mode": "any", "tools": []}],
)  # fmt: skip
def test_another_choice_is_refused(value: Any) -> None:
    with pytest.raises(RemoteError, match="tool_choice "):
        read_tool_choice(value, "fg")


def test_tools_are_offered_unless_none_may_be_chosen() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    form, codec = {"type": "json_object"}, FakeTextCodec()
    for choice in (None, "auto"):
        asked = body(tools=tools, tool_choice=choice, response_format=form)
        assert asked.offered_tools == tools
        assert (asked.may_call, tools_warnings(asked, PROMPT, codec)) == (True, ())
    for offered in (tools, None):
        asked = body(tools=offered, tool_choice="none", response_format=form)
        assert (asked.offered_tools, asked.may_call) == (None, False)
        assert tools_warnings(asked, PROMPT, codec) == ()


def test_defaults_of_a_model_stand_behind_the_request() -> None:
    defaults = {"temperature": 0.7, "top_k": 40}
    row = plan_row(KEY, body(top_k=3), PROMPT, FACTS, sampling=defaults)
    assert row.sampling == Sampling(temperature=0.7, top_k=3)
    zero = plan_row(KEY, body(temperature=0), PROMPT, FACTS, sampling=defaults)
    assert zero.sampling.temperature == 0, "asked for explicitly"


class EncodingClient(ClientBase[dict[str, Any], None]):
    """A client whose stream is what it would have sent."""

    def _open_stream(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None
    ) -> dict[str, Any]:
        message = Decoder(CLIENT_MESSAGES, is_strict=True).decode(frames)
        assert isinstance(message, Generate)
        return decode_body(message.body).to_wire()

    def _call(self, message: Command, *, wait: bool = True) -> None:
        raise AssertionError(message)


def test_generate_takes_options_apart_and_refuses_unknown_parameters() -> None:
    client = EncodingClient("ipc:///unused")
    sent = client.generate("m", prompt="p", top_k=3, seed=None, priority="batch", resume=False)
    assert sent == {"prompt": "p", "top_k": 3}
    with pytest.raises(RequestError, match="unknown parameter 'promt'; known are "):
        client.generate("m", promt="p")  # type: ignore[call-arg]


HI = [{"role": "user", "content": "Hi"}]

EXAMPLES: dict[str, Any] = {
    "messages_as_text": True,
    "logit_bias": {"5": 1.5},
    "stop": ["."],
    "stop_token_ids": [7, 7],
    "cap_max_tokens": True,
    "echo": True,
    "ignore_eos": False,
    "logprobs": True,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": False,
    "response_format": {"type": "json_object"},
}


def test_the_client_sends_every_parameter() -> None:
    asked = {name: int(number.high) for name, number in NUMBERS.items()} | EXAMPLES
    assert sorted(asked) == sorted(BODY_FIELDS)
    messages = [{"role": "user", "content": None}]
    sent = EncodingClient("ipc:///unused").generate("m", messages=messages, **asked)
    assert sent == asked | {"messages": messages}


# ---------------------------------------------------------------- generation_config.json


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
         {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}),
        ({"do_sample": True, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": 0, "repetition_penalty": 1.05},
         {"temperature": 0, "repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": None, "min_p": -1},
         {"temperature": 1.0}),
        ({"do_sample": True, "temperature": float("nan"), "top_p": True}, {"temperature": 1.0}),
    ],
)  # fmt: skip
def test_makers_sampling_is_read_without_what_no_request_may_have(
    said: dict[str, Any], meant: dict[str, Any]
) -> None:
    assert makers_sampling(said) == meant
