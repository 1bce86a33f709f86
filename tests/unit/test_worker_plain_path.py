"""Tokens that are only text take a shorter way, which says the same and costs little."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.protocol.ids import RequestKey, pack_token, pack_tokens
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engine import RowLogprobs, RowToken, StepResult
from mlxsup.worker.rows import RunningRow
from mlxsup.worker.text.channels import HEADER, NORMAL, REASONING, ChannelRules, Header
from mlxsup.worker.text.detokenizer import ByteDetokenizer
from mlxsup.worker.text.tool_calls import ToolCallReader

from support.calls import calls_of
from support.planned_rows import KEY, RULES, TOOLS, Codec
from support.turn_bench import Bench

CALL = b'{"name": "time"}'
WORDS = [
    b"a", b" of", b"<", b"r>", b"<r>", b"b</r", b">c", b"<t>time", b"</t>d", b"\xc3", b"\xb6", b"E",
    b"ND", b"END", CALL, b"<h>", b"content", b"nonsense", b"|", b"\n", b"<x>", b"",
]  # fmt: skip

HEADED = ChannelRules(
    transitions={NORMAL: [("<h>", HEADER)], REASONING: [("<h>", HEADER)]},
    header=Header(
        end="|",
        read=lambda text, has_form: NORMAL if "<h>content".startswith(text) else None,
    ),
)
HIDDEN = ChannelRules(transitions={NORMAL: [("<x>", "hidden")], "hidden": [("<r>", NORMAL)]})
KINDS = {
    "markers": RULES,
    "reasoning first": replace(RULES, initial=REASONING),
    "calls without markers": replace(RULES, has_bare_calls=True),
    "headers": HEADED,
    "hidden parts": HIDDEN,
    "no markers": ChannelRules(),
}


class Words(Codec):
    """Tokens of several characters, and of parts of one."""

    def detokenizer(self) -> ByteDetokenizer:  # type: ignore[override]
        return ByteDetokenizer(WORDS)


class AllSorted(AnswerText):
    """The long way for every token."""

    def plain_channel(self, text: str) -> Channel | None:
        return None


def row_of(kind: type[AnswerText], rules: ChannelRules, stops: list[str]) -> RunningRow:
    calls = ToolCallReader(TOOLS, 1)
    answer = kind(Words(rules), stops, "", calls, has_form=False, min_tokens=2)
    return RunningRow(key=KEY, answer=answer, inserted_at=1.0, warnings=("mind",))


def number(word: bytes) -> int:
    return WORDS.index(word)


@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([[], ["END"], ["ND", "a of"]]),
    st.lists(st.tuples(st.integers(0, len(WORDS) - 1), st.booleans()), max_size=30),
    st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]),
)
@example("markers", [], [(number(b"a"), False), (number(b"<"), False), (number(b"a"), False)], None)
@example("calls without markers", [], [(number(CALL), False), (number(b"\n"), False)], None)
@example("hidden parts", [], [(number(b"<x>"), False), (number(b"a"), False)], None)
def test_the_short_way_says_what_the_long_one_does(
    name: str, stops: list[str], tokens: list[tuple[int, bool]], finish: FinishReason | None
) -> None:
    short = row_of(AnswerText, KINDS[name], stops)
    long = row_of(AllSorted, KINDS[name], stops)
    for place, (token, has_logprobs) in enumerate(tokens, 1):
        logprobs = RowLogprobs(logprob=-0.5) if has_logprobs else None
        end = finish if place == len(tokens) else None
        given_token = RowToken(key=KEY, token=token, finish=end, logprobs=logprobs)
        said = short.advance(given_token, 2.0)
        assert said == long.advance(given_token, 2.0)
        assert (short.tokens, short.answer.channel) == (long.tokens, long.answer.channel)
        if said[-1].finish is not None:
            return


@pytest.mark.parametrize("token", [0, 1, 70_000, 2**32 - 1])
def test_one_token_is_packed_as_several_are(token: int) -> None:
    assert pack_token(token) == pack_tokens([token])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_is_not_packed(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_token(token)


# ---------------------------------------------------------------- what a step costs


def calls_of_step(rows: int, **body: object) -> int:
    """Calls of functions in one turn that gives each row a token, the engine's left out."""
    bench = Bench(places=rows)
    keys = [RequestKey(key) for key in range(1, rows + 1)]
    bench.start(*keys, **body)
    tokens = [RowToken(key=key, token=80) for key in keys]
    for _ in range(2):  # the first token of a row costs more than the others
        bench.engine.results = [StepResult(tokens=tokens)]
        bench.loop.turn()
    bench.engine.results = [StepResult(tokens=tokens)]
    return calls_of(bench.loop.turn)


def test_a_step_costs_the_same_for_each_of_its_rows() -> None:
    one, two, many = (calls_of_step(rows) for rows in (1, 2, 32))
    assert many - one == 31 * (two - one)
