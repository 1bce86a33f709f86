"""What a row says of each token: deltas, ends and replays, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import RowDelta
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engine import EngineBytes, Prompt, Row, RowLogprobs, RowToken
from mlxsup.worker.engines.fake.text import encode_text
from mlxsup.worker.rows import (
    NO_FORM,
    RunningRow,
)
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text.tool_calls import ToolCallReader

from support.planned_rows import FACTS, KEY, TOOLS, Codec


class Form(Grammar):
    """A grammar that notes its tokens and is over after a given number of them."""

    def __init__(self, *, is_over_after: int = 99, has_begun: bool = True) -> None:
        super().__init__(None, [], begins_after=() if has_begun else [[0]])
        self.taken: list[int] = []
        self.is_over_after = is_over_after

    def accept(self, token: int) -> None:
        self.taken.append(token)

    @property
    def is_over(self) -> bool:
        return len(self.taken) >= self.is_over_after


# ---------------------------------------------------------------- deltas


def running(
    *, stops: Sequence[str] = (), form: Form | None = None, warnings: Sequence[str] = ()
) -> RunningRow:
    answer = AnswerText(Codec(), stops, "", ToolCallReader(TOOLS, 1), has_form=False, min_tokens=0)
    return RunningRow(
        key=KEY,
        answer=answer,
        grammar=form,
        warnings=warnings,
        inserted_at=100.0,
        cached_tokens=3,
    )


def token_of(letter: str | None, finish: FinishReason | None = None, **more: Any) -> RowToken:
    token = None if letter is None else encode_text(letter)[0]
    return RowToken(key=KEY, token=token, finish=finish, **more)


def say(row: RunningRow, text: str, finish: FinishReason | None = None) -> list[RowDelta]:
    """The deltas of the last character."""
    deltas: list[RowDelta] = []
    for number, letter in enumerate(text, 1):
        deltas = row.advance(token_of(letter, finish if number == len(text) else None), 102.5)
    return deltas


def packed(letter: str) -> bytes:
    return pack_tokens(encode_text(letter))


def test_the_first_delta_says_how_long_the_prompt_took_and_the_next_does_not() -> None:
    row = running()
    assert say(row, "a") == [
        RowDelta(key=KEY, text="a", tokens=packed("a"), prefill_s=2.5, cached_tokens=3)
    ]
    assert say(row, "b") == [RowDelta(key=KEY, text="b", tokens=packed("b"))]


def test_warnings_come_before_the_first_text_and_once() -> None:
    row = running(warnings=("mind", "this"))
    assert say(row, "a") == [
        RowDelta(key=KEY, warning="mind", tokens=packed("a"), prefill_s=2.5, cached_tokens=3),
        RowDelta(key=KEY, warning="this"),
        RowDelta(key=KEY, text="a"),
    ]
    assert say(row, "b") == [RowDelta(key=KEY, text="b", tokens=packed("b"))]


def test_a_token_that_shows_nothing_has_its_channel_and_its_id() -> None:
    row = running()
    say(row, "<r>")
    assert say(row, "why<") == [RowDelta(key=KEY, channel=Channel.REASONING, tokens=packed("<"))]
    assert say(row, "/r>b") == [RowDelta(key=KEY, text="b", tokens=packed("b"))]


def test_logprobs_come_with_their_token_and_the_texts() -> None:
    row = running()
    asked = RowLogprobs(logprob=-0.5, top=[(encode_text("z")[0], -0.25)])
    [delta] = row.advance(token_of("a", logprobs=asked), 102.5)
    assert delta.logprobs == [
        Logprobs(
            chosen=TokenLogprob(token=encode_text("a")[0], logprob=-0.5, text="a"),
            top=[TokenLogprob(token=encode_text("z")[0], logprob=-0.25, text="z")],
        )
    ]
    [delta] = row.advance(token_of("b"), 102.5)
    assert delta.logprobs is None


@pytest.mark.parametrize(
    ("text", "last", "finish", "expected"),
    [
        ("ab", "c", FinishReason.LENGTH, FinishReason.LENGTH),
        ("ab", None, FinishReason.STOP, FinishReason.STOP),
        ("<t>time</t>", None, FinishReason.STOP, FinishReason.TOOL_CALLS),
        ("<t>time</t>", "x", FinishReason.LENGTH, FinishReason.LENGTH),
        ("a", None, FinishReason.CANCELLED, FinishReason.CANCELLED),
    ],
)
def test_an_end_is_what_the_answer_makes_of_it(
    text: str, last: str | None, finish: FinishReason, expected: FinishReason
) -> None:
    row = running()
    assert [delta.finish for delta in say(row, text)][-1] is None
    deltas = row.advance(token_of(last, finish), 102.5)
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + [expected]
    assert deltas[0].tokens == (b"" if last is None else packed(last))


@pytest.mark.parametrize(
    ("form", "text", "finish", "warning"),
    [
        (None, "a", FinishReason.STOP, None),
        (Form(has_begun=True), "a", FinishReason.STOP, None),
        (Form(has_begun=False), "a", FinishReason.STOP, NO_FORM),
        (Form(has_begun=False), "a", FinishReason.LENGTH, None),
        (Form(has_begun=False), "<t>time</t>", FinishReason.STOP, None),
    ],
)
def test_an_answer_that_stopped_before_its_form_says_so(
    form: Form | None, text: str, finish: FinishReason, warning: str | None
) -> None:
    row = running(form=form)
    say(row, text)
    deltas = row.advance(token_of(None, finish), 102.5)
    assert [delta.warning for delta in deltas if delta.warning] == ([warning] if warning else [])
    assert deltas[-1].finish is not None


# ---------------------------------------------------------------- replays


def replayed(row: RunningRow, text: str, max_tokens: int) -> list[RowDelta] | None:
    planned = Row(
        key=KEY, tokens=[5], max_tokens=max_tokens, seed=1,
        delivered=encode_text(text), grammar=row.grammar,
    )  # fmt: skip
    return row.replay(planned)


def test_a_replay_ends_as_the_answer_had_ended_F10() -> None:
    assert replayed(running(), "ab", 3) is None
    assert replayed(running(), "ab", 2) == [RowDelta(key=KEY, finish=FinishReason.LENGTH)]
    stopped = RowDelta(key=KEY, finish=FinishReason.STOP, stop="b")
    assert replayed(running(stops=["b"]), "ab", 3) == [stopped]
    assert replayed(running(), "<t>time</t>", 11) == [RowDelta(key=KEY, finish=FinishReason.LENGTH)]


def test_a_replay_takes_the_form_along_F10() -> None:
    form = Form(is_over_after=2)
    assert replayed(running(form=form), "a", 9) is None
    assert form.taken == encode_text("a")
    over = Form(is_over_after=2)
    assert replayed(running(form=over), "ab", 9) == [RowDelta(key=KEY, finish=FinishReason.STOP)]
    before = Form(is_over_after=2, has_begun=False)
    assert replayed(running(form=before), "ab", 9) == [
        RowDelta(key=KEY, warning=NO_FORM, finish=FinishReason.STOP)
    ]
    call = Form(is_over_after=11)
    deltas = replayed(running(form=call), "<t>time</t>", 99)
    assert deltas is not None
    assert deltas[-1].finish is FinishReason.TOOL_CALLS


@pytest.mark.parametrize(("count", "reports"), [(1, 1), (1024, 1), (1025, 2), (2049, 3)])
def test_a_replay_reports_before_each_1024_tokens_P7(count: int, reports: int) -> None:
    row, told = running(), []
    planned = Row(
        key=KEY, tokens=[5], max_tokens=9999, seed=1,
        delivered=[100] * count,
    )  # fmt: skip
    row.replay(planned, lambda: told.append(row.answer.count))
    assert told == [1024 * number for number in range(reports)]


# ---------------------------------------------------------------- what is left out


def test_what_is_not_said_of_a_row_has_no_effect() -> None:
    row = Row(key=KEY, tokens=[5], max_tokens=1, seed=0)
    assert row.sampling == Sampling()
    assert (row.delivered, row.logit_bias, row.min_tokens) == ([], {}, 0)
    assert (row.stop_token_ids, row.ignore_eos, row.top_logprobs) == ((), False, None)
    assert (row.grammar, row.checkpoints) == (None, ())
    assert Prompt(tokens=[5]) == Prompt(tokens=[5], opening="", grammar=None, checkpoints=())
    fresh = RunningRow(
        key=KEY,
        answer=AnswerText(Codec(), (), "", ToolCallReader(None, 0), has_form=False, min_tokens=0),
    )
    assert (fresh.grammar, tuple(fresh.warnings), fresh.inserted_at) == (None, (), 0.0)
    assert (fresh.cached_tokens, fresh.has_token) == (0, False)


def test_what_is_not_said_of_a_load_is_nothing() -> None:
    assert (FACTS.versions, FACTS.batching.value, FACTS.batching_reason) == ({}, "together", "")
    assert (FACTS.warnings, FACTS.prefix_cache_bytes, FACTS.prefix_cache_tokens) == ((), 0, 0)
    held = EngineBytes()
    assert (held.active, held.cache, held.peak) == (0, 0, 0)
