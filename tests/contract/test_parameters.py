"""Every parameter, through the worker's loop, in both engines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxsup.protocol.parameters import NUMBERS, NumberParameter
from mlxsup.protocol.states import FinishReason

from support.worker.loop_driver import Answer, LoopDriver, check_every_resume, check_resumes

PROMPT = "a fox 🦊 and an owl"
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
    "penalty_window": 12,
    "logit_bias": {"100": 3.5, "120": -5},
    "seed": 12,
    "logprobs": True,
    "top_logprobs": 3,
}

BORDERS = [
    {name: value}
    for name, number in NUMBERS.items()
    if name not in ("max_tokens", "min_tokens", "top_logprobs")
    for value in (1e-300 if number.is_low_open else number.low, number.high)
]


@pytest.mark.parametrize("border", BORDERS, ids=str)
def test_no_border_of_a_range_breaks_a_step_C7(worker: LoopDriver, border: dict[str, Any]) -> None:
    parameters = {"temperature": 1.0, "seed": 1} | border
    if any(NUMBERS[name].is_integer for name in border):
        parameters = {name: int(v) if name in border else v for name, v in parameters.items()}
    neighbour = worker.dispatch(prompt="beside it", max_tokens=3)
    got, beside = worker.finish(
        worker.dispatch(prompt="a prompt", max_tokens=3, **parameters), neighbour
    )
    assert got.error is None
    assert (len(got.tokens), got.finish) == (3, FinishReason.LENGTH)
    assert len(beside.tokens) == 3


def values_of(number: NumberParameter) -> st.SearchStrategy[Any]:
    if number.is_integer:
        return st.integers(int(number.low), int(number.high))
    return st.floats(number.low, number.high, exclude_min=number.is_low_open)


RANDOM = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0])},
    optional={
        name: values_of(number)
        for name, number in NUMBERS.items()
        if name not in ("max_tokens", "min_tokens", "temperature", "top_logprobs")
    }
    | {
        "logit_bias": st.dictionaries(st.integers(0, 255), st.floats(-100, 100), max_size=8),
        "logprobs": st.booleans(),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(st.integers(0, 255), max_size=64),
        "ignore_eos": st.booleans(),
    },
)


@pytest.mark.draws
@pytest.mark.bits
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=st.lists(RANDOM, min_size=1, max_size=4))
def test_random_parameters_give_the_same_answer_alone_and_together_C8_C10(
    worker: LoopDriver, drawn: list[dict[str, Any]]
) -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": f"prompt {number}", "max_tokens": 8, "seed": number} | parameters
        for number, parameters in enumerate(drawn)
    ]
    keys = [worker.dispatch(**request) for request in requests]
    together = worker.finish(*keys)
    for request, got in zip(requests, together, strict=True):
        assert got.error is None
        alone = worker.answer(**request)
        assert (alone.tokens, alone.finish) == (got.tokens, got.finish)
    assert not worker.engine.row_count()


@pytest.mark.draws
@pytest.mark.bits
def test_resumed_at_every_token_with_everything_asked_F10(worker: LoopDriver) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=20, **ALL_AT_ONCE)
    assert len(whole.tokens) == 20
    check_every_resume(worker, whole)
    rest = worker.answer(whole.resume_after(14))
    assert logprobs_of(rest.deltas) == logprobs_of(whole.deltas)[14:]


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


@pytest.mark.parametrize(
    ("parameter", "value"), [("logit_bias", {"4000000": 1.0}), ("stop_token_ids", [1, 4_000_000])]
)
def test_ids_that_the_model_does_not_have_fail_alone_C7(
    worker: LoopDriver, parameter: str, value: Any
) -> None:
    good = worker.dispatch(prompt="fine", max_tokens=3)
    bad = worker.dispatch(prompt="x", **{parameter: value})
    answers = worker.finish(good, bad)
    assert len(answers[0].tokens) == 3
    assert answers[1].error is not None
    assert answers[1].error.detail["parameter"] == parameter


def around(border: int, answer: Answer) -> list[int]:
    """Return where to resume an answer: at its beginning, around the border, before its end."""
    count = len(answer.tokens)
    near = {0, 1, 2, *range(border - 2, border + 2), count - 1}
    return sorted(near & set(range(count)))


def first_new_token(tokens: list[int], after: int) -> int:
    """The place, from `after` on, of a token that was not there before."""
    return next(place for place in range(after, len(tokens)) if tokens[place] not in tokens[:place])


@pytest.mark.bits
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(
    worker: LoopDriver, temperature: float
) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "temperature": temperature, "seed": 3}
    free = worker.answer(max_tokens=24, **asked)
    place = first_new_token(free.tokens, 4)
    ends = [free.tokens[place]] * 2
    got = worker.answer(max_tokens=24, stop_token_ids=ends, **asked)
    assert (got.tokens, got.finish) == (free.tokens[:place], FinishReason.STOP)
    assert free.text.startswith(got.text.rstrip("\ufffd")), "half a character at the end"
    check_every_resume(worker, got)
    for most, stops, count, finish in [
        (24, [free.tokens[0]], 0, FinishReason.STOP),
        (place + 1, ends, place, FinishReason.STOP),
        (place, ends, place, FinishReason.LENGTH),
        (24, [], 24, FinishReason.LENGTH),
    ]:
        got = worker.answer(max_tokens=most, stop_token_ids=stops, **asked)
        assert (got.tokens, got.finish) == (free.tokens[:count], finish)


@pytest.mark.bits
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_comes_before_min_tokens(worker: LoopDriver, temperature: float) -> None:
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 40,
        "logprobs": True,
    }
    free = worker.answer(**asked)
    ends = sorted(set(free.tokens))[:64]
    got = worker.answer(min_tokens=9, stop_token_ids=ends, **asked)
    assert len(got.tokens) >= 9
    assert not set(got.tokens) & set(ends)
    check_resumes(worker, got, around(9, got))
    rest = logprobs_of(worker.answer(got.resume_after(4)).deltas)
    expected = logprobs_of(got.deltas)[4:]
    assert [one.chosen.token for one in rest] == [one.chosen.token for one in expected]
    values = [one.chosen.logprob for one in expected]
    assert [one.chosen.logprob for one in rest] == pytest.approx(values, abs=1e-3)


@pytest.mark.bits
def test_a_stop_string_that_is_complete_before_min_tokens_is_text(worker: LoopDriver) -> None:
    free = worker.answer(prompt=PROMPT, max_tokens=40)
    text = free.text
    early = text[2:5]
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40}
    assert worker.answer(stop=[early], **asked).text == text[: text.index(early)]
    late = text[-12:-6]
    got = worker.answer(stop=[early + "\0", late, early], min_tokens=20, **asked)
    assert got.tokens == free.tokens[: len(got.tokens)]
    assert len(got.tokens) >= 20
    if early not in text[5:]:
        assert got.text == text[: text.index(late)]
        assert got.finish is FinishReason.STOP
    check_resumes(worker, got, around(20, got))


def test_a_stop_string_that_ends_with_token_min_tokens_ends_the_answer(worker: LoopDriver) -> None:
    free = worker.answer(prompt=PROMPT, max_tokens=12)
    shown = ["".join(delta.text for delta in free.until(count)) for count in range(13)]
    number = next(n for n in range(6, 13) if len(shown[n]) > len(shown[n - 1]))
    stop = shown[number][-4:]
    if stop in shown[number - 1]:
        pytest.skip("the text repeats itself")
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "stop": [stop]}
    ended = worker.answer(min_tokens=number, **asked)
    assert (len(ended.tokens), ended.finish) == (number, FinishReason.STOP)
    later = worker.answer(min_tokens=number + 1, **asked)
    assert later.tokens[:number] == free.tokens[:number]
    assert len(later.tokens) > number


def test_a_row_with_ends_of_its_own_changes_no_other_row(worker: LoopDriver) -> None:
    free = [worker.answer(prompt=f"row {n}", max_tokens=16).tokens for n in range(3)]
    keys = [worker.dispatch(prompt=f"row {n}", max_tokens=16) for n in range(3)]
    own = worker.dispatch(
        prompt=PROMPT, max_tokens=16, min_tokens=12, stop_token_ids=[free[0][0]], ignore_eos=True
    )
    assert [answer.tokens for answer in worker.finish(*keys)] == free
    assert len(worker.finish(own)[0].tokens) >= 12


def test_min_tokens_that_do_not_fit_into_the_context_are_refused(worker: LoopDriver) -> None:
    refused = worker.answer(prompt_tokens=[40] * 4000, min_tokens=97)
    assert refused.error is not None
    assert refused.error.code == "context_length_exceeded"
    assert refused.error.detail["min_tokens"] == 97


def test_a_message_without_content_is_a_message(worker: LoopDriver) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    got = worker.answer(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": "go on"},
        ],
        max_tokens=3,
    )
    assert got.error is None
    assert len(got.tokens) == 3


def test_tools_that_may_not_be_chosen_are_not_offered(worker: LoopDriver) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    without = worker.answer(**chat)
    none = worker.answer(tools=tools, tool_choice="none", **chat)
    auto = worker.answer(tools=tools, tool_choice="auto", **chat)
    assert none.acceptance is not None
    assert without.acceptance is not None
    assert none.acceptance.prompt_tokens == without.acceptance.prompt_tokens
    assert auto.tokens == worker.answer(tools=tools, **chat).tokens
    assert worker.answer(none.resume_after(1)).tokens == none.tokens[1:]
