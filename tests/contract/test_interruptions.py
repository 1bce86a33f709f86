"""An answer that is resumed in another life, paused or sent away for want of memory continues as if
nothing had happened; a client that joins it gets what had been shown by then. In every engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.states import Channel, FinishReason, PauseReason, Priority, RowState
from mlxsup.protocol.worker_messages import SUPERVISOR_TO_WORKER, Dispatch, Resume
from mlxsup.worker.engine import Row

from support.daemon.paused_answers import answer_with_pauses, assert_same, turn_until
from support.worker.loop_driver import (
    MAX_TURNS,
    LoopDriver,
    check_every_resume,
    text_by_channel,
)

LENGTH = 20
PROMPT = "Once upon a time there was a fox 🦊 who"
PROMPTS = ["Once upon a time", "There was a fox who", "In the deep", "It was late"]

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.2, "penalty_window": 12,
        "min_tokens": 12, "temperature": 0.9, "seed": 3, "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
    },
}  # fmt: skip
DRAWN = [
    pytest.param(name, marks=[pytest.mark.draws] if parameters else [])
    for name, parameters in CASES.items()
]
KEPT = pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])
ONE_OF_EACH_ENGINE = ["fake", pytest.param("together", marks=pytest.mark.mlx)]
SHORT = pytest.param("short", marks=pytest.mark.mlx)


NO_LIMIT = 1 << 60


def bytes_for(worker: LoopDriver, *, rows: int, longest: int) -> int:
    """Return the bytes that so many rows of a length take."""
    return cache_bytes(worker.facts.cache_layers, rows=rows, longest=longest)


def finish_in_turns(worker: LoopDriver, keys: list[int]) -> list[int]:
    """Turns until all are over; who has left returns, the first first, when another has ended or
    nobody runs.

    Returns:
        The keys of those that left for want of memory, in order, as often as they did.
    """
    answers = {key: worker.answers[key] for key in keys}
    left: list[int] = []
    outside: list[int] = []
    over = 0
    for _ in range(MAX_TURNS):
        ended = sum(answer.is_over for answer in answers.values())
        if ended == len(keys):
            return left
        if outside and (ended > over or len(outside) + ended == len(keys)):
            worker.come_back(outside.pop(0))
        over = ended
        worker.turn()
        for key, answer in answers.items():
            if answer.is_paused and key not in outside:
                assert answer.deltas[-1].pause_reason is PauseReason.MEMORY
                outside.append(key)
                left.append(key)
    raise AssertionError("no end")


@pytest.fixture(autouse=True)
def nothing_is_left(worker: LoopDriver) -> Iterator[None]:
    yield
    worker.set_budget(NO_LIMIT)
    worker.loop.drain()
    assert not worker.engine.row_count()
    assert worker.engine.bytes_held().kept == 0
    assert not worker.loop.open_keys


def half_a_stop(text: str) -> list[str]:
    """Return a stop string across a token's border, and two that only begin to match."""
    middle = len(text) // 2
    return [text[middle : middle + 7], text[3:6] + "\0", text[10:12] + "\0"]


# ---------------------------------------------------------------- resumes
@pytest.mark.bits
def test_resumed_at_every_token_equals_the_undisturbed_answer_F10(worker: LoopDriver) -> None:
    """With everything asked: see the test of parameters."""
    whole = worker.answer(prompt=PROMPT, max_tokens=LENGTH)
    assert len(whole.tokens) == LENGTH
    check_every_resume(worker, whole)


@pytest.mark.bits
@pytest.mark.parametrize("make", ONE_OF_EACH_ENGINE, indirect=True, scope="session")
def test_a_seed_that_the_worker_chose_is_kept_at_every_token_F10(worker: LoopDriver) -> None:
    """The step loop chooses it before the engine is asked, so that one model is enough."""
    whole = worker.answer(prompt=PROMPT, max_tokens=LENGTH, temperature=0.8)
    check_every_resume(worker, whole)


@pytest.mark.bits
def test_half_a_stop_string_continues_after_a_resume_and_after_a_pause_F10(
    worker: LoopDriver,
) -> None:
    """Stops are matched against text; how its tokens were drawn makes no difference."""
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH}
    text = worker.answer(**asked).text
    asked["stop"] = half_a_stop(text)
    whole = worker.answer(**asked)
    assert whole.finish is FinishReason.STOP
    assert whole.text == text[: text.index(asked["stop"][0])]
    check_every_resume(worker, whole)
    assert_same(answer_with_pauses(worker, 1, keep=True, **asked), whole)


@pytest.mark.draws
@pytest.mark.bits
def test_a_resume_and_a_pause_change_no_other_answer_F10_C10(worker: LoopDriver) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": LENGTH}
    whole = worker.answer(prompt=PROMPT, **asked)
    others = [worker.answer(prompt=prompt, **asked) for prompt in PROMPTS[:2]]
    keys = [worker.dispatch(prompt=prompt, **asked) for prompt in PROMPTS[:2]]
    first, second = (worker.answers[key] for key in keys)
    turn_until(worker, first, 5)
    resumed = worker.dispatch(whole.resume_after(14))
    worker.pause(keys[0], keep=True)
    short = worker.dispatch(prompt="short", max_tokens=3)
    turn_until(worker, second, len(second.tokens) + 3)
    worker.come_back(keys[0])
    got = worker.finish(*keys, resumed, short)
    for answer, alone in zip(got[:2], others, strict=True):
        assert_same(answer, alone)
    assert got[2].tokens == whole.tokens[14:]


def test_an_acceptance_holds_all_that_was_asked_F10(worker: LoopDriver) -> None:
    asked: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "stop": ["zz"]}
    made = worker.answer(prompt=PROMPT, seed=9, **asked).acceptance
    assert made is not None
    assert made.seed == 9
    assert made.parameters.items() >= asked.items()
    assert not made.parameters.keys() & {"prompt", "messages", "prompt_tokens"}


@pytest.mark.parametrize("make", ["fake", SHORT], indirect=True, scope="session")
def test_the_budget_of_a_default_max_tokens_counts_from_the_prompt_F10(worker: LoopDriver) -> None:
    """The room in the context is decided once: a longer prompt does not shorten the answer.

    The step loop decides it before the engine is asked, so that one model is enough.
    """
    whole = worker.answer(prompt_tokens=[40] * (worker.facts.context_length - 96))
    assert whole.acceptance is not None
    assert len(whole.tokens) == whole.acceptance.parameters["max_tokens"] == 96
    rest = worker.answer(whole.resume_after(50))
    assert rest.tokens == whole.tokens[50:]
    assert rest.finish is FinishReason.LENGTH


def test_a_changed_model_is_told_with_the_tokens_sent_F10(worker: LoopDriver) -> None:
    resume = worker.answer(prompt=PROMPT, max_tokens=8).resume_after(3)
    other = replace(resume.acceptance, fingerprint="another")
    error = worker.answer(replace(resume, acceptance=other)).error
    assert error is not None
    assert (error.code, error.detail) == ("worker_crashed", {"tokens_sent": 3})
    assert "the model changed" in error.message


@pytest.mark.parametrize("extra", [0, 1])
def test_an_answer_that_was_complete_ends_without_a_row_F10(worker: LoopDriver, extra: int) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=6)
    assert whole.acceptance is not None
    delivered = pack_tokens((whole.tokens * 2)[: 6 + extra])
    rest = worker.answer(Resume(acceptance=whole.acceptance, delivered=delivered))
    assert (rest.tokens, rest.finish) == ([], FinishReason.LENGTH)


@pytest.mark.parametrize("make", ["fake"], indirect=True, scope="session")
def test_a_resume_travels_F10(worker: LoopDriver) -> None:
    resume = worker.answer(prompt=PROMPT, max_tokens=8, stop=["zz"]).resume_after(8)
    sent = Dispatch(key=RequestKey(3), resume=replace(resume, delivered=pack_tokens([70_000])))
    received = Decoder(SUPERVISOR_TO_WORKER, is_strict=False).decode(encode(sent))
    assert received == sent


# ---------------------------------------------------------------- pauses
@KEPT
@pytest.mark.bits
@pytest.mark.parametrize("case", DRAWN)
def test_paused_again_and_again_equals_the_undisturbed_answer_C11(
    worker: LoopDriver, case: str, keep: bool
) -> None:
    asked = {"prompt": PROMPT, "max_tokens": LENGTH, **CASES[case]}
    whole = worker.answer(**asked)
    assert len(whole.tokens) == LENGTH
    assert_same(answer_with_pauses(worker, 2, keep=keep, **asked), whole)


@KEPT
@pytest.mark.bits
@pytest.mark.parametrize("turns", range(6))
def test_paused_before_its_first_token_equals_the_undisturbed_answer(
    worker: LoopDriver, turns: int, keep: bool
) -> None:
    """While its prompt is prepared, waits for a row, is read, or gives its first token."""
    asked: dict[str, Any] = {"prompt": PROMPT * 4, "max_tokens": 8}
    whole = worker.answer(**asked)
    key = worker.dispatch(**asked)
    for _ in range(turns):
        worker.turn()
    answer = worker.pause(key, keep=keep)
    if answer.acceptance is None:
        assert answer.deltas[-1].paused is RowState.DROPPED, "it has not been read yet"
        return
    worker.come_back(key)
    assert_same(worker.finish(key)[0], whole)


def paused(worker: LoopDriver, tokens: int = 4) -> int:
    """Return the key of a request whose state is kept."""
    key = worker.dispatch(prompt=PROMPT, max_tokens=LENGTH)
    turn_until(worker, worker.answers[key], tokens)
    assert worker.pause(key, keep=True).deltas[-1].paused is RowState.KEPT
    assert worker.engine.bytes_held().kept > 0
    assert not worker.engine.row_count()
    return key


def test_a_kept_state_is_all_but_the_last_token(
    worker: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_read: list[int] = []
    insert = worker.engine.insert

    def noted(row: Row) -> int:
        known = insert(row)
        to_read.append(len(row.tokens) + len(row.delivered) - known)
        return known

    monkeypatch.setattr(worker.engine, "insert", noted)
    key = paused(worker)
    worker.come_back(key)
    worker.finish(key)
    assert to_read[1:] == [1], "only the token that the pause delivered last"


@pytest.mark.parametrize("how", ["drop", "cancel"])
def test_a_paused_request_that_does_not_come_back_leaves_nothing_D3(
    worker: LoopDriver, how: str
) -> None:
    key = paused(worker)
    if how == "drop":
        worker.drop(key)
        return
    worker.come_back(key)
    worker.cancel(key)
    assert worker.finish(key)[0].finish is FinishReason.CANCELLED


def test_log_probabilities_come_with_the_token_that_a_pause_delivers(worker: LoopDriver) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    answer = answer_with_pauses(worker, 1, keep=True, prompt=PROMPT, **asked)
    told = [len(delta.logprobs or []) for delta in answer.deltas if delta.tokens]
    assert told == [len(unpack_tokens(delta.tokens)) for delta in answer.deltas if delta.tokens]
    assert sum(told) == 6


# ---------------------------------------------------------------- too little memory
def length_of(worker: LoopDriver, prompt: str) -> int:
    accepted = worker.answer(prompt=prompt, max_tokens=1).acceptance
    assert accepted is not None
    return len(accepted.prompt_tokens) // 4


@pytest.mark.bits
def test_answers_in_too_little_memory_equal_the_undisturbed_ones(worker: LoopDriver) -> None:
    whole = [worker.answer(prompt=prompt, max_tokens=LENGTH) for prompt in PROMPTS]
    longest = max(length_of(worker, prompt) for prompt in PROMPTS)
    # Two rows join; then they grow, and there is too little for both.
    worker.set_budget(bytes_for(worker, rows=2, longest=longest + GROWTH_TOKENS))
    asked = [{"prompt": prompt, "max_tokens": LENGTH} for prompt in PROMPTS]
    keys = worker.dispatch_together(*asked)
    turn_until(worker, worker.answers[keys[0]], 5)
    worker.set_budget(bytes_for(worker, rows=2, longest=longest + 8))
    left = finish_in_turns(worker, keys)
    assert left[:2] == keys[2:], "no room for them at first"
    grows = bytes_for(worker, rows=1, longest=1) < bytes_for(worker, rows=1, longest=2)
    assert (keys[1] in left) is grows, "it left in the middle of its answer"
    assert keys[0] not in left, "it was the first, and ran through"
    for key, alone in zip(keys, whole, strict=True):
        assert_same(worker.answers[key], alone)


def test_the_lowest_class_leaves_first_and_the_last_served_of_it(worker: LoopDriver) -> None:
    longest = length_of(worker, PROMPTS[0])
    classes = [Priority.BATCH, Priority.BATCH, Priority.INTERACTIVE, Priority.NORMAL]
    asked = {"prompt": PROMPTS[0], "max_tokens": LENGTH}
    keys = worker.dispatch_together(*({**asked, "as_class": one} for one in classes))
    for key in keys:
        turn_until(worker, worker.answers[key], 1)
    left: list[int] = []
    for rows in (3, 2, 1):
        worker.set_budget(bytes_for(worker, rows=rows, longest=longest + LENGTH))
        while len(left) < 4 - rows:
            worker.turn()
            left += [k for k in keys if worker.answers[k].is_paused and k not in left]
    assert left == [keys[1], keys[0], keys[3]]
    for key in left:
        worker.come_back(key)
    worker.set_budget(NO_LIMIT)
    worker.finish(*keys)


def test_kept_states_go_before_rows_do(worker: LoopDriver) -> None:
    key = paused(worker)
    other = worker.dispatch(prompt=PROMPTS[1], max_tokens=LENGTH)
    answer = worker.answers[other]
    turn_until(worker, answer, 1)
    assert answer.acceptance is not None
    length = len(answer.acceptance.prompt_tokens) // 4 + len(answer.tokens)
    worker.set_budget(bytes_for(worker, rows=1, longest=length + 2))
    turn_until(worker, answer, len(answer.tokens) + 1)
    assert worker.engine.bytes_held().kept == 0
    assert not answer.is_paused
    worker.set_budget(NO_LIMIT)
    worker.come_back(key)
    worker.finish(key, other)


# ---------------------------------------------------------------- clients that join
@pytest.mark.parametrize("make", ONE_OF_EACH_ENGINE, indirect=True, scope="session")
@pytest.mark.parametrize("has_stop", [False, True])
def test_rendering_equals_the_stream_at_every_token(worker: LoopDriver, has_stop: bool) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH, "seed": 3}
    if has_stop:  # one that only begins to match, so that text is held back
        asked["stop"] = [worker.answer(**asked).text[3:6] + "\0"]
    whole = worker.answer(**asked)
    assert len(whole.tokens) == LENGTH
    for tokens in range(1, LENGTH):
        rendered = text_by_channel(worker.render(whole.resume_after(tokens)))
        assert rendered == text_by_channel(whole.until(tokens)), tokens
    assert set(text_by_channel(whole.deltas)) == {Channel.CONTENT}
