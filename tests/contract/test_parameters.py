"""Every parameter, through the worker's loop, in both engines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlxsup.protocol.parameters import NUMBERS, NumberParameter
from mlxsup.protocol.states import FinishReason
from support.loop_driver import LoopDriver, check_every_resume

ALL_AT_ONCE: dict[str, Any] = {
    "temperature": 1.1,
    "top_k": 200,
    "top_p": 0.97,
    "min_p": 0.01,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.05,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "penalty_window": 30,
    "logit_bias": {"100": 3.5, "120": -5},
    "seed": 12,
    "logprobs": True,
    "top_logprobs": 3,
}

BORDERS = [
    {name: value}
    for name, number in NUMBERS.items()
    if name not in ("max_tokens", "top_logprobs")
    for value in (1e-300 if number.is_low_open else number.low, number.high)
]


@pytest.mark.parametrize("border", BORDERS, ids=str)
def test_no_border_of_a_range_breaks_a_step_C7(worker: LoopDriver, border: dict[str, Any]) -> None:
    parameters = {"temperature": 1.0, "seed": 1} | border
    if any(NUMBERS[name].is_integer for name in border):
        parameters = {name: int(v) if name in border else v for name, v in parameters.items()}
    neighbour = worker.dispatch(prompt="beside it", max_tokens=6)
    got, beside = worker.finish(
        worker.dispatch(prompt="a prompt", max_tokens=6, **parameters), neighbour
    )
    assert got.error is None
    assert (len(got.tokens), got.finish) == (6, FinishReason.LENGTH)
    assert len(beside.tokens) == 6


def values_of(number: NumberParameter) -> st.SearchStrategy[Any]:
    if number.is_integer:
        return st.integers(int(number.low), int(number.high))
    return st.floats(number.low, number.high, exclude_min=number.is_low_open)


RANDOM = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0])},
    optional={
        name: values_of(number)
        for name, number in NUMBERS.items()
        if name not in ("max_tokens", "temperature", "top_logprobs")
    }
    | {
        "logit_bias": st.dictionaries(st.integers(0, 255), st.floats(-100, 100), max_size=8),
        "logprobs": st.booleans(),
    },
)


@pytest.mark.bits
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=st.lists(RANDOM, min_size=1, max_size=4))
def test_random_parameters_give_the_same_answer_alone_and_together_C8_C10(
    worker: LoopDriver, drawn: list[dict[str, Any]]
) -> None:
    requests = [
        {"prompt": f"prompt {number}", "max_tokens": 8, "seed": number} | parameters
        for number, parameters in enumerate(drawn)
    ]
    keys = [worker.dispatch(**request) for request in requests]
    together = worker.finish(*keys)
    for request, got in zip(requests, together, strict=True):
        assert got.error is None
        alone = worker.answer(**request)
        assert (alone.tokens, alone.finish) == (got.tokens, got.finish)
    assert not worker.engine.has_rows()


@pytest.mark.bits
def test_resumed_at_every_token_with_everything_asked_F10(worker: LoopDriver) -> None:
    whole = worker.answer(prompt="a fox 🦊 and an owl", max_tokens=48, **ALL_AT_ONCE)
    assert len(whole.tokens) == 48
    check_every_resume(worker, whole)
    rest = worker.answer(whole.resume_after(20))
    assert logprobs_of(rest.deltas) == logprobs_of(whole.deltas)[20:]


def logprobs_of(deltas: list[Any]) -> list[Any]:
    return [one for delta in deltas for one in delta.logprobs or ()]


def test_every_token_has_its_logprob_where_asked(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=9, logprobs=True, top_logprobs=4)
    entries = logprobs_of(got.deltas)
    assert [entry.chosen.token for entry in entries] == got.tokens
    for entry in entries:
        assert entry.chosen.logprob <= 0
        assert entry.chosen.text
        values = [other.logprob for other in entry.top]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry.top[0].token == entry.chosen.token, "greedy"
    without_top = worker.answer(prompt="x", max_tokens=9, logprobs=True)
    assert all(entry.top == [] for entry in logprobs_of(without_top.deltas))
    nothing = worker.answer(prompt="x", max_tokens=9)
    assert logprobs_of(nothing.deltas) == []
    assert nothing.tokens == got.tokens


def test_what_a_request_alone_gets_wrong_is_its_own_error_C7(worker: LoopDriver) -> None:
    good = worker.dispatch(prompt="fine", max_tokens=3)
    bad = worker.dispatch(prompt="x", logit_bias={"4000000": 1.0})
    answers = worker.finish(good, bad)
    assert len(answers[0].tokens) == 3
    assert answers[1].error is not None
    assert answers[1].error["detail"]["parameter"] == "logit_bias"
