"""The pieces of a prompt that its client is shown, in every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.message import Logprobs
from mlxsup.protocol.states import Channel, FinishReason, RowState
from mlxsup.protocol.worker_messages import RowDelta
from mlxsup.worker import prompt_pieces, text_threads
from mlxsup.worker.engines.mlx.prefill import CostModel
from mlxsup.worker.prompt_pieces import IDS_PER_PIECE

from support.worker.loop_driver import Answer, LoopDriver, check_every_resume

TOKENS_PER_PIECE = 16
"""A quarter of the real size, so that a short prompt has several pieces."""

LONG = "a fox 🦊 and an owl, and then " * 3
ASKED: dict[str, Any] = {"max_tokens": 6, "prompt_logprobs": 3, "echo": True}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pieces, "TOKENS_PER_PIECE", TOKENS_PER_PIECE)


@pytest.fixture(autouse=True)
def nothing_is_left(worker: LoopDriver) -> Iterator[None]:
    yield
    worker.loop.drain()
    assert not worker.engine.row_count()
    assert worker.engine.bytes_held().kept == 0


def pieces(answer: Answer) -> list[RowDelta]:
    return [delta for delta in answer.deltas if delta.is_prompt]


def told(deltas: Sequence[RowDelta]) -> list[Logprobs]:
    return [one for delta in deltas if delta.is_prompt for one in delta.logprobs or ()]


def check_same(got: Sequence[Logprobs], expected: Sequence[Logprobs]) -> None:
    assert [one.chosen.token for one in got] == [one.chosen.token for one in expected]
    assert values_of(got) == pytest.approx(values_of(expected), abs=1e-3)


def values_of(told: Sequence[Logprobs]) -> list[float | None]:
    return [one.logprob for each in told for one in (each.chosen, *each.top)]


def prompt_of(answer: Answer) -> list[int]:
    assert answer.acceptance is not None
    packed = answer.acceptance.prompt_tokens
    return [int.from_bytes(packed[n : n + 4], "little") for n in range(0, len(packed), 4)]


@pytest.mark.parametrize("count", [0, 1, 20])
def test_each_token_of_the_prompt_is_told_once_and_in_order(worker: LoopDriver, count: int) -> None:
    got = worker.answer(prompt=LONG, **ASKED | {"prompt_logprobs": count})
    shown = told(got.deltas)
    assert [one.chosen.token for one in shown] == prompt_of(got)
    first, *others = shown
    assert (first.chosen.logprob, first.top) == (None, [])
    for one in others:
        assert one.chosen.logprob is not None
        assert one.chosen.logprob <= 0
        values = [other.logprob or 0 for other in one.top]
        assert len(values) == count
        assert values == sorted(values, reverse=True)
        inside = [other.logprob for other in one.top if other.token == one.chosen.token]
        assert inside in ([], [one.chosen.logprob])
    assert got.text_of(Channel.PROMPT) == LONG
    assert max(len(delta.logprobs or ()) for delta in pieces(got)) == TOKENS_PER_PIECE
    places = [delta.is_prompt for delta in got.deltas]
    assert places == sorted(places, reverse=True), "all of it before the answer"
    assert got.tokens == worker.answer(prompt=LONG, max_tokens=6).tokens


@pytest.mark.parametrize("length", [1, 2, TOKENS_PER_PIECE, TOKENS_PER_PIECE + 1])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_of_any_length_is_told_in_full(
    worker: LoopDriver, length: int, max_tokens: int
) -> None:
    tokens = [40 + n % 50 for n in range(length)]
    got = worker.answer(prompt_tokens=tokens, max_tokens=max_tokens, prompt_logprobs=1)
    assert [one.chosen.token for one in told(got.deltas)] == tokens
    assert (len(got.tokens), got.finish) == (max_tokens, FinishReason.LENGTH)
    assert got.text_of(Channel.PROMPT) == ""


def test_company_changes_nothing_and_is_not_changed(worker: LoopDriver) -> None:
    asked = [ASKED | {"prompt": LONG[: 20 + 70 * n], "prompt_logprobs": n} for n in range(3)]
    alone = [worker.answer(**one) for one in asked]
    plain = worker.answer(prompt=LONG[5:], max_tokens=6)
    keys = [worker.dispatch(**one) for one in asked]
    *together, beside = worker.finish(*keys, worker.dispatch(prompt=LONG[5:], max_tokens=6))
    for one, other in zip(together, alone, strict=True):
        check_same(told(one.deltas), told(other.deltas))
        assert one.tokens == other.tokens
    assert beside.tokens == plain.tokens
    assert not told(beside.deltas)


@pytest.mark.bits
def test_a_resume_continues_with_the_next_piece_F10(worker: LoopDriver) -> None:
    whole = worker.answer(prompt=LONG, **ASKED)
    everything = pieces(whole)
    assert len(everything) > 4
    for shown in range(len(everything) + 1):
        resume = replace(whole.resume_after(0), shown=shown)
        rest = worker.answer(resume)
        both = [*everything[:shown], *pieces(rest)]
        assert [len(one.logprobs or ()) for one in both] == [
            len(one.logprobs or ()) for one in everything
        ]
        check_same(told(both), told(everything))
        assert "".join(one.text for one in both) == LONG
        assert rest.tokens == whole.tokens
    check_every_resume(worker, whole)


@pytest.mark.bits
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])
def test_a_pause_at_any_time_loses_and_repeats_nothing(
    worker: LoopDriver, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's engine reads the prompt in several steps, however fast this machine is."""
    whole = worker.answer(prompt=LONG, **ASKED)
    monkeypatch.setattr(CostModel, "chunk", lambda *_, **__: TOKENS_PER_PIECE)
    for turns in range(1 + keep, 12, 2):  # each time is tried in one of the two ways
        key = worker.dispatch_together({"prompt": LONG, **ASKED})[0]
        for _ in range(turns):
            worker.turn()
        got = worker.pause(key, keep=keep)
        if got.is_paused:
            is_told = len(told(got.deltas)) == len(told(whole.deltas))
            assert is_told or got.deltas[-1].paused is RowState.DROPPED
            worker.come_back(key)
            worker.finish(key)
        check_same(told(got.deltas), told(whole.deltas))
        assert (got.tokens, got.finish) == (whole.tokens, whole.finish)


@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": 2}], ids=["text", "log-probabilities"])
def test_without_an_answer_the_prompt_is_all(worker: LoopDriver, asked: dict[str, Any]) -> None:
    got = worker.answer(prompt=LONG, max_tokens=0, echo=True, **asked)
    assert (got.tokens, got.text, got.finish) == ([], "", FinishReason.LENGTH)
    assert got.text_of(Channel.PROMPT) == LONG
    assert len(told(got.deltas)) == (len(prompt_of(got)) if asked else 0)
    nothing = worker.answer(prompt=LONG, max_tokens=0)
    assert (nothing.tokens, nothing.finish) == ([], FinishReason.LENGTH)
    assert not pieces(nothing)


def test_the_text_of_token_ids_is_what_they_say(worker: LoopDriver) -> None:
    whole = worker.answer(prompt=LONG, max_tokens=0, echo=True)
    again = worker.answer(prompt_tokens=prompt_of(whole), max_tokens=0, echo=True)
    assert again.text_of(Channel.PROMPT) == LONG


def test_a_text_that_is_too_long_for_one_piece_is_refused_alone(
    worker: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_threads, "MAX_TEXT_BYTES", len(LONG.encode()) - 1)
    got, beside = worker.finish(
        worker.dispatch(prompt=LONG, **ASKED), worker.dispatch(prompt=LONG[1:], **ASKED)
    )
    assert got.error is not None
    assert got.error.detail["parameter"] == "echo"
    assert beside.text_of(Channel.PROMPT) == LONG[1:]


def test_a_stop_string_in_the_prompt_ends_nothing(worker: LoopDriver) -> None:
    got = worker.answer(prompt=LONG, stop=["fox"], **ASKED)
    assert got.text_of(Channel.PROMPT) == LONG
    assert len(got.tokens) == 6


def test_the_stop_token_that_ended_an_answer_is_named(worker: LoopDriver) -> None:
    asked: dict[str, Any] = {"prompt": LONG, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    free = worker.answer(**asked)
    place = next(n for n in range(1, 12) if free.tokens[n] not in free.tokens[:n])
    got = worker.answer(stop_token_ids=[free.tokens[place]], **asked)
    assert got.tokens == free.tokens[:place]
    assert [delta.stop_token for delta in got.deltas if delta.finish] == [free.tokens[place]]
    assert {delta.stop_token for delta in free.deltas} == {None}


def shown_ids(answer: Answer) -> list[int]:
    return [one for delta in pieces(answer) for one in unpack_tokens(delta.prompt_tokens)]


@pytest.mark.parametrize(
    "length", [0, 1, IDS_PER_PIECE, IDS_PER_PIECE + 1, 40_000], ids="{} tokens".format
)
def test_tokens_of_a_prompt_of_any_length_are_the_answer(worker: LoopDriver, length: int) -> None:
    tokens = [40 + n % 50 for n in range(length)]
    answers: dict[str, Any] = {
        "max_tokens": 3,
        "prompt_logprobs": 2,
        "response_format": {"type": "json_object"},
    }
    got = worker.answer(prompt_tokens=tokens, tokenize={}, **answers)
    assert (got.tokens, got.text, got.finish) == ([], "", FinishReason.LENGTH)
    assert shown_ids(got) == tokens
    text = worker.answer(prompt_tokens=tokens, tokenize={"ids": False}, echo=True)
    assert (shown_ids(text), text.finish) == ([], FinishReason.LENGTH)


def test_tokens_are_those_that_an_answer_would_begin_with(worker: LoopDriver) -> None:
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}], "messages_as_text": True,
    }  # fmt: skip
    for asked in ({"prompt": LONG}, chat):
        assert shown_ids(worker.answer(**asked, tokenize={})) == prompt_of(
            worker.answer(**asked, max_tokens=1)
        )
        counted = worker.answer(**asked, tokenize={"ids": False})
        assert (pieces(counted), counted.error) == ([], None)


def test_too_many_ids_are_refused_alone(
    worker: LoopDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_threads, "MAX_SHOWN_IDS", 2)
    got, counted = worker.finish(
        worker.dispatch(prompt=LONG, tokenize={}),
        worker.dispatch(prompt=LONG, tokenize={"ids": False}),
    )
    assert got.error is not None
    assert "at most 2 tokens" in got.error.message
    assert counted.finish is FinishReason.LENGTH
