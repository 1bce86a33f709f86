"""What each parameter takes: the code, its errors, and the table in the documentation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlxsup.client.api import ClientBase
from mlxsup.client.parameters import GenerateParameters
from mlxsup.protocol.body import INPUTS, RequestBody
from mlxsup.protocol.codec import decode_body, encode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.parameters import NUMBERS, SAMPLING, NumberParameter, sampling_defaults
from mlxsup.worker.engine import EngineFacts, Prompt, Row
from mlxsup.worker.rows import acceptance, plan_row

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE_LINE = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| `(\w+)` \|$", re.MULTILINE)
FACTS = EngineFacts(context_length=100, vocabulary_size=300, fingerprint="f", backend="fake")
PROMPT = Prompt(tokens=[5])
KEY = RequestKey(1)

BODY_FIELDS = [name for name in RequestBody.__dataclass_fields__ if name not in INPUTS]


def body(**parameters: Any) -> RequestBody:
    return RequestBody(prompt="x", **parameters)


def values_of(number: NumberParameter) -> st.SearchStrategy[Any]:
    if number.is_integer:
        return st.integers(int(number.low), int(number.high))
    return st.floats(number.low, number.high, exclude_min=number.is_low_open)


def parameters() -> st.SearchStrategy[dict[str, Any]]:
    numbers = {name: values_of(n) for name, n in NUMBERS.items() if name != "top_logprobs"}
    bias = st.dictionaries(st.integers(0, 299), st.floats(-100, 100), max_size=5)
    return st.fixed_dictionaries({}, optional={**numbers, "logit_bias": bias})


@given(parameters())
def test_every_value_in_range_travels_and_is_accepted(chosen: dict[str, Any]) -> None:
    chosen.pop("max_tokens", None)
    received = decode_body(encode_body(body(**chosen)))
    row = plan_row(KEY, received, PROMPT, FACTS)
    for name, value in chosen.items():
        assert getattr(row, name) == value
    made = acceptance(row, received, PROMPT, FACTS)
    again = RequestBody.accepted([5], made.parameters, made.seed)
    assert plan_row(KEY, again, PROMPT, FACTS) == row


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", ["below", "above", "text", "flag", "nan", "list"])
def test_what_is_out_of_range_is_refused_by_name_and_range_C7(name: str, wrong: str) -> None:
    number = NUMBERS[name]
    values: dict[str, Any] = {
        "below": number.low if number.is_low_open else number.low - 1,
        "above": number.high + 1,
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
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "at most 1024"),
        ({"logprobs": 1}, "true or false"),
        ({"top_logprobs": 3}, "0 unless logprobs is true"),
    ],
)
def test_other_wrong_values_are_refused_C7(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteError, match=re.escape(words)):
        body(**parameters)


def test_a_bias_for_a_token_that_the_model_does_not_have_is_refused_C7() -> None:
    with pytest.raises(RemoteError, match="below this model's vocabulary of 300, not 300"):
        plan_row(KEY, body(logit_bias={"300": 1.0}), PROMPT, FACTS)


def test_a_models_defaults_stand_behind_the_requests_own_values() -> None:
    defaults = {"temperature": 0.7, "top_k": 40}
    row = plan_row(KEY, body(top_k=3), PROMPT, FACTS, sampling=defaults)
    assert (row.temperature, row.top_k, row.top_p) == (0.7, 3, 1.0)
    zero = plan_row(KEY, body(temperature=0), PROMPT, FACTS, sampling=defaults)
    assert zero.temperature == 0, "asked for explicitly"


def test_the_engines_defaults_are_the_same() -> None:
    for name, value in sampling_defaults().items():
        default = Row.__dataclass_fields__[name].default
        assert name in ("temperature", "top_p") or default == value
    assert set(SAMPLING) <= set(NUMBERS)


def test_the_client_takes_every_parameter() -> None:
    arguments = inspect.signature(ClientBase.generate).parameters
    assert set(BODY_FIELDS) <= set(arguments)
    assert set(BODY_FIELDS) <= set(GenerateParameters.__annotations__)
    assert all(arguments[name].default is None for name in BODY_FIELDS)


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
