"""A paused answer continues as if nothing had happened, with its state and without."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.states import FinishReason, RowState
from mlxsup.worker.engine import Row

from support.daemon.paused_answers import answer_with_pauses, assert_same, turn_until
from support.worker.loop_driver import LoopDriver

LENGTH = 32
PROMPT = "Once upon a time there was a fox 🦊 who"

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
    "penalties": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.2, "penalty_window": 12,
        "min_tokens": 20, "temperature": 0.9, "seed": 3, "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
    },
}  # fmt: skip
DRAWN = [
    pytest.param(name, marks=[pytest.mark.draws] if parameters else [])
    for name, parameters in CASES.items()
]
KEPT = pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])


@pytest.fixture
def reads(worker: LoopDriver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each row that is inserted has yet to read."""
    seen: list[int] = []
    insert = worker.engine.insert

    def noted(row: Row) -> int:
        known = insert(row)
        seen.append(len(row.tokens) + len(row.delivered) - known)
        return known

    monkeypatch.setattr(worker.engine, "insert", noted)
    return seen


@KEPT
@pytest.mark.bits
@pytest.mark.parametrize("case", DRAWN)
@pytest.mark.parametrize("every", [2])
def test_paused_again_and_again_equals_the_undisturbed_answer_C11(
    worker: LoopDriver, case: str, every: int, keep: bool
) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=LENGTH, **CASES[case])
    assert len(whole.tokens) == LENGTH
    answer = answer_with_pauses(
        worker, every, keep=keep, prompt=PROMPT, max_tokens=LENGTH, **CASES[case]
    )
    assert_same(answer, whole)
    assert worker.engine.bytes_held().kept == 0
    assert not worker.engine.has_rows()


@KEPT
@pytest.mark.bits
@pytest.mark.parametrize("turns", range(6))
def test_paused_before_its_first_token_equals_the_undisturbed_answer(
    worker: LoopDriver, turns: int, keep: bool
) -> None:
    """While its prompt is prepared, waits for a row, is read, or gives its first token."""
    parameters: dict[str, Any] = {"prompt": PROMPT * 4, "max_tokens": 8}
    whole = worker.answer(**parameters)
    key = worker.dispatch(**parameters)
    for _ in range(turns):
        worker.turn()
    answer = worker.pause(key, keep=keep)
    if answer.acceptance is None:
        assert answer.deltas[-1].paused is RowState.DROPPED, "it has not been read yet"
        return
    worker.come_back(key)
    assert_same(worker.finish(key)[0], whole)


def test_a_kept_state_is_all_but_the_last_token(worker: LoopDriver, reads: list[int]) -> None:
    key = worker.dispatch(prompt=PROMPT, max_tokens=LENGTH)
    answer = worker.answers[key]
    turn_until(worker, answer, 4)
    worker.pause(key, keep=True)
    assert answer.deltas[-1].paused is RowState.KEPT
    assert worker.engine.bytes_held().kept > 0
    assert not worker.engine.has_rows()
    worker.come_back(key)
    worker.finish(key)
    assert reads[1:] == [1], "only the token that the pause delivered last"
    assert worker.engine.bytes_held().kept == 0


@pytest.mark.bits
def test_half_a_stop_string_is_completed_after_a_pause(worker: LoopDriver) -> None:
    free = worker.answer(prompt=PROMPT, max_tokens=LENGTH)
    stop = free.text[len(free.text) // 2 : len(free.text) // 2 + 7]
    stops = [stop, free.text[3:6] + "\0"]
    whole = worker.answer(prompt=PROMPT, max_tokens=LENGTH, stop=stops)
    assert whole.finish is FinishReason.STOP
    answer = answer_with_pauses(worker, 1, keep=True, prompt=PROMPT, max_tokens=LENGTH, stop=stops)
    assert_same(answer, whole)
    assert worker.engine.bytes_held().kept == 0


@pytest.mark.draws
@pytest.mark.bits
def test_a_pause_changes_no_other_answer(worker: LoopDriver) -> None:
    parameters: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": LENGTH}
    whole = [worker.answer(prompt=prompt, **parameters) for prompt in (PROMPT, "another")]
    keys = [worker.dispatch(prompt=prompt, **parameters) for prompt in (PROMPT, "another")]
    answers = [worker.answers[key] for key in keys]
    turn_until(worker, answers[0], 9)
    worker.pause(keys[0], keep=True)
    turn_until(worker, answers[1], len(answers[1].tokens) + 5)
    worker.come_back(keys[0])
    worker.finish(*keys)
    for answer, alone in zip(answers, whole, strict=True):
        assert_same(answer, alone)


def test_log_probabilities_come_with_the_token_that_a_pause_delivers(worker: LoopDriver) -> None:
    parameters: dict[str, Any] = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    answer = answer_with_pauses(worker, 1, keep=True, prompt=PROMPT, **parameters)
    told = [len(delta.logprobs or []) for delta in answer.deltas if delta.tokens]
    assert told == [len(unpack_tokens(delta.tokens)) for delta in answer.deltas if delta.tokens]
    assert sum(told) == 6


def test_a_paused_request_that_does_not_come_back_leaves_nothing(worker: LoopDriver) -> None:
    key = worker.dispatch(prompt=PROMPT, max_tokens=LENGTH)
    turn_until(worker, worker.answers[key], 3)
    worker.pause(key, keep=True)
    worker.drop(key)
    assert worker.engine.bytes_held().kept == 0
    assert not worker.loop.open_keys


def test_a_cancel_before_it_runs_again_drops_its_state(worker: LoopDriver) -> None:
    key = worker.dispatch(prompt=PROMPT, max_tokens=LENGTH)
    turn_until(worker, worker.answers[key], 3)
    worker.pause(key, keep=True)
    worker.come_back(key)
    worker.cancel(key)
    assert worker.finish(key)[0].finish is FinishReason.CANCELLED
    assert worker.engine.bytes_held().kept == 0


@pytest.mark.parametrize("make", ["fake"], indirect=True, scope="module")
def test_pauses_that_a_worker_does_not_know_are_ignored(worker: LoopDriver) -> None:
    key = worker.dispatch(prompt=PROMPT, max_tokens=2)
    worker.finish(key)
    worker.drop(key)
    assert worker.engine.set_aside(*worker.loop.open_keys, keep=True) == []
