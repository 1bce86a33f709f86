"""What each parameter takes: the code, its errors, and the table in the documentation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.client.api import ClientBase, GenerateParameters
from mlxsup.client.streams import OnNotice
from mlxsup.protocol.body import INPUTS, RequestBody
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Generate
from mlxsup.protocol.codec import Decoder, decode_body, encode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestId, RequestKey
from mlxsup.protocol.parameters import NUMBERS, SAMPLING, NumberParameter, Sampling
from mlxsup.worker.engine import EngineFacts, Prompt
from mlxsup.worker.engines.fake.text import FakeTextCodec
from mlxsup.worker.rows import acceptance, plan_row, tools_warnings

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE_LINE = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| `(\w+)` \|$", re.MULTILINE)
FACTS = EngineFacts(context_length=100, vocabulary_size=300, fingerprint="f", backend="fake")
PROMPT = Prompt(tokens=[5])
KEY = RequestKey(1)

BODY_FIELDS = [
    *(name for name in RequestBody.__dataclass_fields__ if name not in (*INPUTS, "sampling")),
    *SAMPLING,
]


def body(**parameters: Any) -> RequestBody:
    return RequestBody.from_wire({"prompt": "x", **parameters})


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
    row = plan_row(KEY, received, PROMPT, FACTS)
    for name, value in chosen.items():
        assert getattr(row.sampling if name in SAMPLING else row, name) == value
    made = acceptance(row, received, PROMPT, FACTS)
    again = RequestBody.accepted([5], made.parameters, made.seed)
    assert plan_row(KEY, again, PROMPT, FACTS) == row


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", ["below", "above", "huge", "text", "flag", "nan", "list"])
def test_what_is_out_of_range_is_refused_by_name_and_range_C7(name: str, wrong: str) -> None:
    number = NUMBERS[name]
    values: dict[str, Any] = {
        "below": number.low if number.is_low_open else number.low - 1,
        "above": number.high + 1,
        "huge": 10**400,
        "text": "1",
        "flag": True,
        "nan": float("nan"),
        "list": [1],
    }
    with pytest.raises(RemoteError) as caught:
        body(**{name: values[wrong]})
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.detail == {"parameter": name, "expected": number.expected}
    assert caught.value.message.startswith(f"{name} takes {number.expected}, not ")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"logit_bias": [1]}, "a map of at most 1024 token ids"),
        ({"logit_bias": {"x": 1.0}}, "token ids as keys"),
        ({"logit_bias": {-1: 1.0}}, "token ids as keys"),
        ({"logit_bias": {True: 1.0}}, "token ids as keys"),
        ({"logit_bias": {"²": 1.0}}, "token ids as keys"),
        ({"logit_bias": {5: 101}}, "a number from -100 to 100"),
        ({"logit_bias": {5: float("nan")}}, "a number from -100 to 100"),
        ({"logit_bias": {5: 10**400}}, "a number from -100 to 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "at most 1024"),
        ({"logprobs": 1}, "true or false"),
        ({"top_logprobs": 3}, "0 unless logprobs is true"),
        ({"stop_token_ids": 5}, "stop_token_ids takes a list of at most 64 token ids, not 5"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids takes integers, not text"),
        ({"stop_token_ids": [True]}, "stop_token_ids takes integers, not True"),
        ({"stop_token_ids": [-1]}, "ids from 0 to 4294967295, not -1"),
        ({"stop_token_ids": [2**32]}, "ids from 0 to 4294967295"),
        ({"stop_token_ids": list(range(65))}, "at most 64 token ids, not a list of 65"),
        ({"cap_max_tokens": 1}, "true or false"),
        ({"messages_as_text": 1}, "true or false"),
        ({"messages_as_text": True}, "messages, not none of them"),
        ({"ignore_eos": 1}, "true or false"),
        ({"ignore_eos": "yes"}, "true or false"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens takes at most max_tokens, not 9"),
        ({"tool_choice": "required"}, 'tool_choice takes "auto" or "none"'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "ask with response_format",
        ),
    ],
)
def test_other_wrong_values_are_refused_C7(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteError, match=re.escape(words)):
        body(**parameters)


def test_a_bias_for_a_token_that_the_model_does_not_have_is_refused_C7() -> None:
    with pytest.raises(RemoteError, match="below this model's vocabulary of 300, not 300"):
        plan_row(KEY, body(logit_bias={"300": 1.0}), PROMPT, FACTS)


def test_a_stop_token_that_the_model_does_not_have_is_refused_C7() -> None:
    with pytest.raises(RemoteError, match="below this model's vocabulary of 300, not 300"):
        plan_row(KEY, body(stop_token_ids=[299, 300]), PROMPT, FACTS)


def test_min_tokens_must_fit_into_the_context_C7() -> None:
    assert plan_row(KEY, body(min_tokens=99), PROMPT, FACTS).min_tokens == 99
    with pytest.raises(RemoteError, match="1 prompt tokens and min_tokens 100 exceed the context"):
        plan_row(KEY, body(min_tokens=100), PROMPT, FACTS)


@given(
    st.integers(0, 99),
    st.lists(st.integers(0, 299), max_size=64),
    st.none() | st.booleans(),
    st.sampled_from([None, "auto", "none"]),
)
def test_how_an_answer_may_end_travels_and_is_accepted(
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


def test_tools_are_offered_unless_none_may_be_chosen() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert body(tools=tools).offered_tools == tools
    assert body(tools=tools, tool_choice="auto").offered_tools == tools
    assert body(tools=tools, tool_choice="none").offered_tools is None
    assert body(tool_choice="none").offered_tools is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("n", "send the request n times"), ("skip_special_tokens", "token_ids")],
)
def test_what_is_missed_is_refused_with_what_to_do_instead(name: str, words: str) -> None:
    with pytest.raises(RemoteError, match=words) as caught:
        RequestBody.from_wire({"prompt": "x", name: 2})
    assert caught.value.detail == {"parameter": name}
    assert caught.value.message.startswith(f"{name} is not supported: ")


def test_a_models_defaults_stand_behind_the_requests_own_values() -> None:
    defaults = {"temperature": 0.7, "top_k": 40}
    row = plan_row(KEY, body(top_k=3), PROMPT, FACTS, sampling=defaults)
    assert row.sampling == Sampling(temperature=0.7, top_k=3)
    zero = plan_row(KEY, body(temperature=0), PROMPT, FACTS, sampling=defaults)
    assert zero.sampling.temperature == 0, "asked for explicitly"


def test_the_client_takes_every_parameter() -> None:
    arguments = inspect.signature(ClientBase.generate).parameters
    assert set(BODY_FIELDS) <= set(arguments)
    assert set(BODY_FIELDS) <= set(GenerateParameters.__annotations__)
    assert all(arguments[name].default is None for name in BODY_FIELDS)


class EncodingClient(ClientBase[dict[str, Any]]):
    """A client whose stream is what it would have sent."""

    def _open_stream(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None
    ) -> dict[str, Any]:
        message = Decoder(CLIENT_MESSAGES, is_strict=True).decode(frames)
        assert isinstance(message, Generate)
        return decode_body(message.body).to_wire()


EXAMPLES: dict[str, Any] = {
    "messages_as_text": True,
    "logit_bias": {"5": 1.5},
    "stop": ["."],
    "stop_token_ids": [7, 7],
    "cap_max_tokens": True,
    "ignore_eos": False,
    "logprobs": True,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none",
    "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "json_object"},
}


def test_the_client_sends_every_parameter() -> None:
    asked = {name: int(number.high) for name, number in NUMBERS.items()} | EXAMPLES
    assert sorted(asked) == sorted(BODY_FIELDS)
    messages = [{"role": "user", "content": None}]
    sent = EncodingClient("ipc:///unused").generate("m", messages=messages, **asked)
    assert sent == asked | {"messages": messages}


def test_the_table_in_the_documentation_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    table = {
        name: (takes, default, test) for name, takes, default, test in TABLE_LINE.findall(text)
    }
    assert sorted(table) == sorted(BODY_FIELDS)
    sources = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    for name, (takes, default, test) in table.items():
        assert f"def {test}(" in sources, f"{name}: no test {test}"
        if name in NUMBERS:
            assert takes == NUMBERS[name].expected
            if NUMBERS[name].default is not None:
                assert default == f"{NUMBERS[name].default:g}"


def test_no_warning_comes_with_tools_that_are_not_offered() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    form = {"type": "json_object"}
    codec = FakeTextCodec()
    assert len(tools_warnings(body(tools=tools, response_format=form), codec)) == 1
    assert tools_warnings(body(tools=tools, tool_choice="none", response_format=form), codec) == ()
