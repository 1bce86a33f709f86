"""From a request to its row, and from tokens to deltas: plans, acceptances, ends, replays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import MAX_FRAME_BYTES, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.step_batch import Row as StepRow
from mlxsup.protocol.step_batch import pack_rows
from mlxsup.protocol.tool_choice import UNFIT_CALL
from mlxsup.protocol.worker_messages import Acceptance, Accepted, Dispatch, RowDelta
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engine import EngineFacts, Prompt, Row, RowLogprobs, RowToken
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.rows import (
    NO_CALLS_KNOWN,
    NO_FORMAT_OF_CALLS,
    NO_STRICT,
    RunningRow,
    acceptance,
    plan_row,
    running_row,
    tools_warnings,
)
from mlxsup.worker.running_rows import RunningRows
from mlxsup.worker.text.channels import HEADER, NORMAL, REASONING, TOOL, ChannelRules, Header
from mlxsup.worker.text.detokenizer import ByteDetokenizer
from mlxsup.worker.text.grammar import Grammar, StrictSchemas
from mlxsup.worker.text.tool_calls import ToolCallReader
from mlxsup.worker.text.tool_formats import ToolFormat

from support.client.pieces import unpacked
from support.worker.loop_driver import LoopDriver, check_every_resume, check_resumes
from support.worker.turn_bench import make_spec

CANCELLED, LENGTH, STOP, TOOL_CALLS = (
    FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP, FinishReason.TOOL_CALLS
)  # fmt: skip
FACTS = EngineFacts(context_length=10, vocabulary_size=300, fingerprint="f", backend="fake")
KEY = RequestKey(1)
TOOLS = [{"type": "function", "function": {"name": "time"}}]
RULES = ChannelRules(
    transitions={
        NORMAL: [("<r>", REASONING), ("<t>", TOOL)],
        REASONING: [("</r>", NORMAL)],
        TOOL: [("</t>", NORMAL)],
    },
    tool_format=ToolFormat(
        name="t", parse=lambda text, tools, is_lenient: [{"name": text, "arguments": {}}]
    ),
)


class Codec(FakeTextCodec):
    """The fake engine's text side with other markers."""

    def __init__(self, rules: ChannelRules = RULES) -> None:
        super().__init__()
        self.rules = rules

    @property
    def channel_rules(self) -> ChannelRules:
        return self.rules


# ---------------------------------------------------------------- plans
def plan(
    tokens: int = 4,
    delivered: Sequence[int] = (),
    sampling: Any = None,
    facts: EngineFacts = FACTS,
    **body: Any,
) -> Row:
    asked = RequestBody.from_wire({"prompt": "x", **body})
    prompt = Prompt(tokens=[5] * tokens, checkpoints=(2, 3))
    return plan_row(KEY, asked, prompt, facts, delivered=delivered, sampling=sampling)


def test_a_row_has_what_was_asked_for_and_defaults_for_the_rest() -> None:
    plain = Row(key=KEY, tokens=[5] * 4, max_tokens=6, seed=3, checkpoints=(2, 3))
    assert plan(seed=3) == plain
    assert plan(
        delivered=(7, 8),
        sampling={"temperature": 0.5, "top_k": 9},
        seed=3,
        max_tokens=5,
        min_tokens=2,
        top_k=0,
        min_p=0.25,
        stop_token_ids=[9, 4, 9],
        ignore_eos=True,
        logit_bias={"7": 1, 8: -2.5},
        logprobs=True,
    ) == replace(
        plain,
        max_tokens=5,
        min_tokens=2,
        delivered=[7, 8],
        stop_token_ids=(4, 9),
        ignore_eos=True,
        logit_bias={7: 1.0, 8: -2.5},
        top_logprobs=0,
        sampling=Sampling(temperature=0.5, top_k=0, min_p=0.25),
    )
    assert plan(logprobs=False).top_logprobs is None
    assert plan(logprobs=True, top_logprobs=3).top_logprobs == 3


def test_a_drawn_seed_uses_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: bits)
    assert plan().seed == 53
    assert plan(seed=0).seed == 0


FULL = (
    "prompt is too long: 10 tokens > 9; this model's maximum context length is 10 tokens, with room"
    " for an answer"
)
TOO_LONG = "4 prompt tokens and {} 7 exceed the context of 10; at most 6 fit"


@pytest.mark.parametrize(
    ("asked", "message", "more"),
    [
        ({"tokens": 10}, FULL, {}),
        ({"tokens": 10, "max_tokens": 7, "cap_max_tokens": True}, FULL, {}),
        ({"max_tokens": 7}, TOO_LONG.format("max_tokens"), {"max_tokens": 7}),
        ({"max_tokens": 7, "cap_max_tokens": False}, TOO_LONG.format("max_tokens"),
         {"max_tokens": 7}),
        ({"min_tokens": 7}, TOO_LONG.format("min_tokens"), {"min_tokens": 7}),
    ],
)  # fmt: skip
def test_a_request_above_the_context_names_all_numbers_I6(
    asked: dict[str, Any], message: str, more: dict[str, int]
) -> None:
    with pytest.raises(RemoteError) as caught:
        plan(**asked)
    assert (caught.value.code, caught.value.message) == (
        ErrorCode.CONTEXT_LENGTH_EXCEEDED, message
    )  # fmt: skip
    numbers = {"prompt_tokens": asked.get("tokens", 4), "context_length": 10}
    assert caught.value.detail == numbers | more


@pytest.mark.parametrize(
    "looked_for",
    [
        r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",  # Claude Code
        "prompt is too long:",  # LiteLLM, LangChain, Strands, opencode
        "this model's maximum context length is",  # LiteLLM
        r"maximum context length is\s*(\d[\d,]*)\s*tokens?",  # opencode, Qwen Code
        "maximum context length",  # CrewAI, Strands
    ],
)
def test_programs_that_compact_their_history_find_their_words(looked_for: str) -> None:
    with pytest.raises(RemoteError, match=looked_for):
        plan(tokens=10)


@pytest.mark.parametrize(
    ("asked", "max_tokens"),
    [
        ({"tokens": 9}, 1),
        ({"tokens": 10, "max_tokens": 0}, 0),
        ({"max_tokens": 6}, 6),
        ({"max_tokens": 7, "cap_max_tokens": True}, 6),
        ({"max_tokens": 5, "cap_max_tokens": True}, 5),
    ],
    ids=str,
)
def test_the_whole_context_can_be_used(asked: dict[str, Any], max_tokens: int) -> None:
    assert plan(**asked).max_tokens == max_tokens


def test_a_row_has_no_more_tokens_than_one_frame_carries() -> None:
    facts = replace(FACTS, context_length=10_000_000)
    most = plan(1, facts=facts).max_tokens + 1
    row = plan(most - 1, facts=facts)
    accepted = acceptance(row, RequestBody(prompt="x"), Prompt(tokens=list(row.tokens)), facts)
    said = Accepted(key=KEY, acceptance=accepted, tokenize_s=0.0)
    assert sum(map(len, encode(said))) < MAX_FRAME_BYTES
    with pytest.raises(RemoteError, match="prompt is too long"):
        plan(most, facts=facts)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("stop_token_ids", [299], [1, 300, 2]), ("logit_bias", {"299": 1.0}, {"1": 1.0, "300": 1.0})],
)
def test_ids_outside_the_vocabulary_are_refused_by_name_C7(
    name: str, right: Any, wrong: Any
) -> None:
    plan(**{name: right})
    with pytest.raises(RemoteError) as caught:
        plan(**{name: wrong})
    expected = "must be ids below this model's vocabulary of 300, not 300"
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message == f"{name} {expected}"


def test_an_acceptance_holds_what_another_life_needs_F10() -> None:
    body = RequestBody(prompt="x", seed=3, stop=["z"])
    prompt = Prompt(tokens=[5, 6], opening="<think>")
    row = plan(2, seed=3, sampling={"temperature": 0.5})
    assert acceptance(row, body, prompt, FACTS) == Acceptance(
        prompt_tokens=pack_tokens([5] * 2),
        opening="<think>",
        parameters=asdict(Sampling(temperature=0.5)) | {"stop": ["z"], "max_tokens": 8},
        seed=3,
        fingerprint="f",
    )


JSON = {"type": "json_object"}
STRICT = [{"type": "function", "function": {"name": "time", "strict": True}}]


class Never(StrictSchemas):
    """Schemas that no call matches."""

    def __init__(self) -> None:
        super().__init__(None, None, {})

    def fit(self, line: str) -> bool:
        return False


def test_call_that_does_not_match_its_strict_schema_comes_with_a_warning() -> None:
    body = RequestBody(prompt="x", tools=STRICT, seed=1)
    prompt = Prompt(tokens=[5], strict=Never())
    row = plan_row(KEY, body, prompt, FACTS)
    running = running_row(row, body, prompt, Codec(), Dispatch(key=KEY, body=b""))
    deltas: list[StepRow] = []
    for place, token in enumerate(tokens := encode_text("a<t>time</t>")):
        finish = FinishReason.STOP if place == len(tokens) - 1 else None
        deltas += running.advance(RowToken(key=KEY, token=token, finish=finish), 1.0)
    warned = [(delta.channel, delta.warning) for delta in unpacked(deltas) if delta.warning]
    assert warned == [(Channel.TOOL_CALL, UNFIT_CALL)]
    assert deltas[-1].finish is FinishReason.TOOL_CALLS


@pytest.mark.parametrize(
    ("body", "rules", "warnings"),
    [
        ({}, RULES, ()),
        ({"response_format": JSON}, RULES, ()),
        ({"tools": TOOLS}, RULES, ()),
        ({"tools": TOOLS}, ChannelRules(), (NO_CALLS_KNOWN,)),
        ({"tools": STRICT}, RULES, (NO_STRICT,)),
        ({"tools": STRICT, "tool_choice": "none"}, RULES, ()),
        ({"tools": TOOLS, "tool_choice": "none"}, ChannelRules(), ()),
        ({"tools": TOOLS, "response_format": JSON}, RULES, ()),
        ({"tools": TOOLS, "response_format": JSON}, ChannelRules(), (NO_CALLS_KNOWN,)),
        ({"tools": TOOLS, "response_format": {"type": "text"}}, RULES, ()),
        ({"tools": TOOLS, "tool_choice": "required"}, RULES, ()),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": JSON},
            RULES,
            (NO_FORMAT_OF_CALLS,),
        ),
    ],
)
def test_tools_without_a_format_are_warned_of(
    body: dict[str, Any], rules: ChannelRules, warnings: tuple[str, ...]
) -> None:
    asked = RequestBody.from_wire({"messages": [{"role": "user", "content": "x"}], **body})
    assert tools_warnings(asked, Prompt(tokens=[1]), Codec(rules)) == warnings


@pytest.mark.parametrize(
    ("delivered", "warnings", "sampling"),
    [((), (NO_CALLS_KNOWN,), {"temperature": 0.5}), ((7, 8), (), None)],
)
def test_what_comes_with_the_first_token_is_not_said_again_after_a_resume(
    delivered: tuple[int, ...], warnings: tuple[str, ...], sampling: Any
) -> None:
    body = RequestBody(messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    dispatched = Dispatch(key=KEY, body=b"")
    planned = plan(delivered=delivered, sampling={"temperature": 0.5})
    row = running_row(planned, body, Prompt(tokens=[5]), Codec(ChannelRules()), dispatched)
    assert (row.warnings, row.sampling) == (warnings, sampling)
    assert row.tokens == len(planned.tokens) + len(delivered), "what its memory is computed from"


# ---------------------------------------------------------------- deltas
class Form(Grammar):
    """A grammar that notes its tokens and is over after a given number of them."""

    error = ""

    def __init__(self, *, is_over_after: int = 99, has_begun: bool = True, error: str = "") -> None:
        super().__init__(None, [], begins_after=() if has_begun else [[0]])
        self.error = error
        self.taken: list[int] = []
        self.is_over_after = is_over_after

    def accept(self, token: int) -> None:
        self.taken.append(token)

    @property
    def is_over(self) -> bool:
        return len(self.taken) >= self.is_over_after


def running(
    *stops: str,
    form: Form | None = None,
    warnings: Sequence[str] = (),
    min_tokens: int = 0,
    rules: ChannelRules = RULES,
) -> RunningRow:
    calls = ToolCallReader(TOOLS, 1)
    answer = AnswerText(Codec(rules), stops, "", calls, min_tokens=min_tokens)
    return RunningRow(
        key=KEY, answer=answer, grammar=form, warnings=warnings, inserted_at=100.0, cached_tokens=3
    )


def say(row: RunningRow, text: str, finish: FinishReason | None = None) -> list[list[RowDelta]]:
    """Return the deltas of each byte; the finish comes with the last, or alone without text."""
    tokens: list[int | None] = [*encode_text(text)] or [None]
    return [
        unpacked(
            row.advance(
                RowToken(key=KEY, token=token, finish=finish if at == len(tokens) else None), 102.5
            )
        )
        for at, token in enumerate(tokens, 1)
    ]


def texts(deltas: list[list[RowDelta]]) -> list[str]:
    return ["".join(delta.text for delta in some) for some in deltas]


def packed(letter: str) -> bytes:
    return pack_tokens(encode_text(letter))


def test_the_first_delta_says_how_long_the_prompt_took_and_warns_the_next_does_not() -> None:
    row = running()
    first = RowDelta(key=KEY, text="a", tokens=packed("a"), prefill_s=2.5, cached_tokens=3)
    then = RowDelta(key=KEY, text="b", tokens=packed("b"))
    assert say(row, "ab") == [[first], [then]]
    warned = [
        RowDelta(key=KEY, warning="mind", tokens=packed("a"), prefill_s=2.5, cached_tokens=3),
        RowDelta(key=KEY, warning="this"),
        RowDelta(key=KEY, text="a"),
    ]
    assert say(running(warnings=("mind", "this")), "ab") == [warned, [then]]


def test_logprobs_come_with_their_token_and_the_texts() -> None:
    row = running()
    [a], [z] = encode_text("a"), encode_text("z")
    asked = RowLogprobs(logprob=-0.5, top=[(z, -0.25)])
    [delta] = unpacked(row.advance(RowToken(key=KEY, token=a, logprobs=asked), 102.5))
    assert delta.logprobs == [
        Logprobs(
            chosen=TokenLogprob(token=a, logprob=-0.5, text="a"),
            top=[TokenLogprob(token=z, logprob=-0.25, text="z")],
        )
    ]
    [[delta]] = say(row, "b")
    assert delta.logprobs is None


@pytest.mark.parametrize(("finish", "expected"), [(STOP, TOOL_CALLS), (LENGTH, LENGTH)])
def test_a_call_whose_format_does_not_show_its_end_is_text_in_a_cut_answer(
    finish: FinishReason, expected: FinishReason
) -> None:
    tags = replace(RULES.tool_format, shows_its_end=False)
    row = running(rules=replace(RULES, tool_format=tags))
    assert texts(say(row, "<t>time</t>")) == [""] * 11
    [deltas] = say(row, "", finish)
    assert deltas[-1].finish is expected
    assert (texts([deltas]) == ["<t>time</t>"]) is (finish is LENGTH)


@pytest.mark.parametrize(
    ("stops", "text", "finish", "shown", "end"),
    [
        (["b"], "ab", LENGTH, ["a", ""], (STOP, "b")),
        (["bcd"], "abc", LENGTH, ["a", "", "bc"], (LENGTH, None)),
        (["bc", "x"], "abc", None, ["a", "", ""], (STOP, "bc")),
        (["x"], "a", STOP, ["a"], (STOP, None)),
        (["x"], "<t>1x2", LENGTH, [""] * 5 + ["<t>1"], (STOP, "x")),
    ],
    ids=["with the length", "half of it", "names the one found", "none", "in a call cut off"],
)
def test_a_stop_string_ends_an_answer_and_what_it_held_back_is_shown_at_another_end(
    stops: list[str],
    text: str,
    finish: FinishReason | None,
    shown: list[str],
    end: tuple[FinishReason, str | None],
) -> None:
    deltas = say(running(*stops), text, finish)
    assert texts(deltas) == shown
    assert (deltas[-1][-1].finish, deltas[-1][-1].stop) == end
    assert not any(delta.stop for some in deltas[:-1] for delta in some)


def test_the_token_that_ended_an_answer_is_named_with_its_end() -> None:
    row = running(warnings=["mind", "this"])
    row.stop_token_ids = (9,)
    for ended_by, named in ((9, 9), (8, None)):
        end = RowToken(key=KEY, token=None, finish=STOP, ended_by=ended_by)
        deltas = unpacked(row.advance(end, 102.5))
        assert [(one.finish, one.stop_token) for one in deltas][-1] == (STOP, named)


@pytest.mark.parametrize(
    ("form", "text", "finish", "is_refused"),
    [
        (None, "a", STOP, False),
        (Form(), "a", STOP, False),
        (Form(has_begun=False), "a", STOP, True),
        (Form(has_begun=False), "a", LENGTH, False),
        (Form(has_begun=False), "<t>time</t>", STOP, False),
        (Form(error="no"), "a", LENGTH, True),
    ],
    ids=["no form", "it has begun", "in the reasoning", "cut off", "a call instead", "given up"],
)
@pytest.mark.parametrize("is_replayed", [False, True])
def test_an_answer_that_ends_without_its_form_is_an_error(
    form: Form | None, text: str, finish: FinishReason, is_refused: bool, is_replayed: bool
) -> None:
    row, rows = running(form=form), RunningRows()
    say(row, text)
    if is_replayed:
        rows.end_without_row(row, row.advance(RowToken(key=KEY, token=None, finish=finish), 1.0))
    else:
        rows.join(row)
    deltas, _, _ = rows.take([RowToken(key=KEY, token=None, finish=finish)] * len(rows), 1.0)
    assert [key for key, _ in rows.take_refused()] == [KEY] * is_refused
    assert (deltas[-1].finish is None) is is_refused


# ---------------------------------------------------------------- replays
def replayed(row: RunningRow, tokens: list[int], max_tokens: int) -> list[RowDelta] | None:
    planned = Row(key=KEY, tokens=[5], max_tokens=max_tokens, seed=1, delivered=tokens,
                  grammar=row.grammar)  # fmt: skip
    return row.replay(planned)


@pytest.mark.parametrize(
    ("row", "text", "max_tokens", "end"),
    [
        (running(), "ab", 3, None),
        (running(), "ab", 2, {"finish": LENGTH}),
        (running("stop"), "abcs", 4, {"text": "s", "finish": LENGTH}),
        (running("b"), "ab", 3, {"finish": STOP, "stop": "b"}),
        (running("top"), "astop", 5, {"finish": STOP, "stop": "top"}),
        (running(), "<t>time</t>", 11, {"finish": LENGTH}),
        (running(form=Form(is_over_after=2)), "a", 9, None),
        (running(form=Form(is_over_after=2)), "ab", 9, {"finish": STOP}),
        (running(form=Form(is_over_after=11)), "<t>time</t>", 99, {"finish": TOOL_CALLS}),
    ],
)  # fmt: skip
def test_delivered_tokens_that_were_the_whole_answer_end_it_as_it_would_have_ended_F10(
    row: RunningRow, text: str, max_tokens: int, end: dict[str, Any] | None
) -> None:
    deltas = replayed(row, encode_text(text), max_tokens)
    assert deltas == (None if end is None else [RowDelta(key=KEY, **end)])
    if isinstance(row.grammar, Form):
        assert row.grammar.taken == encode_text(text)


# ---------------------------------------------------------------- whole answers of the fake engine
CALL = '{"name": "weather", "arguments": {"city": "Köln 🦊"}}'
WEATHER = [{"type": "function", "function": {"name": "weather"}}]
SAID = f"<think>hm, \U0001f98a</think>Sure: <tool_call>{CALL}</tool_call> wait"
ASKED = [{"role": "user", "content": f"[[say {SAID}]]"}]


@pytest.fixture(scope="module")
def fake() -> Iterator[LoopDriver]:
    """The fake engine says what the prompt asks for; tests/mlx has real tokens."""
    engine = FakeEngine(make_spec())
    driver = LoopDriver(engine, engine.load(lambda phase, at: None))
    yield driver
    driver.close()
    engine.close()


def test_the_parts_of_an_answer_have_their_channels_and_resume_in_every_half_F10(
    fake: LoopDriver,
) -> None:
    got = fake.answer(messages=ASKED, tools=WEATHER, seed=3)
    assert got.text_of(Channel.REASONING) == "hm, 🦊"
    assert got.text == "Sure:  wait"
    call = json.loads(got.text_of(Channel.TOOL_CALL))
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln 🦊"}'}
    assert got.finish is TOOL_CALLS
    check_every_resume(fake, got)


@pytest.mark.parametrize(
    ("said", "stop", "shown", "end"),
    [
        ("<think>one two</think>three two x", "two", ("one two", "three ", 0), STOP),
        ("<think>one</think>a\n<tool_call>CALL</tool_call>\nb", "\n", ("one", "a", 0), STOP),
        ("<tool_call>CALL</tool_call>b\nc", "weather", ("", "b\nc", 1), TOOL_CALLS),
        ("<tool_call>CALL</tool_call>b\nc", "\n", ("", "b", 1), TOOL_CALLS),
        ("<tool_call>CALL</tool_call>b", "tool_call", ("", "b", 1), TOOL_CALLS),
        ("EN<think>D</think>D", "END", ("D", "END", 0), STOP),
        ("EN<tool_call>CALL</tool_call>D", "END", ("", "END", 1), TOOL_CALLS),
        ("<tool_call>{no</tool_call> END<tool_call>CALL</tool_call>", "END",
         ("", "<tool_call>{no</tool_call> ", 0), STOP),
        ("<tool_call>{no END", "END", ("", "<tool_call>{no ", 0), STOP),
    ],
    ids=["reasoning", "before a call", "in a call", "behind a call", "a marker", "over a thought",
         "over a call", "before a call that was read again", "in half a call"],
)  # fmt: skip
def test_a_stop_string_looks_at_the_content_alone(
    fake: LoopDriver, said: str, stop: str, shown: tuple[str, str, int], end: FinishReason
) -> None:
    said = said.replace("CALL", CALL)
    got = fake.answer(prompt=f"[[say {said}]]", stop=[stop], tools=WEATHER, seed=3)
    calls = got.text_of(Channel.TOOL_CALL).count("\n")
    assert (got.text_of(Channel.REASONING), got.text, calls) == shown
    assert got.finish is end
    check_resumes(fake, got, range(0, len(got.tokens), 3))


# ---------------------------------------------------------------- the short way of most tokens
PLAIN_CALL = b'{"name": "time"}'
WORDS = [
    b"a", b" of", b"<", b"r>", b"<r>", b"b</r", b">c", b"<t>time", b"</t>d", b"\xc3", b"\xb6", b"E",
    b"ND", b"END", PLAIN_CALL, b"<h>", b"content", b"nonsense", b"|", b"\n", b"<x>", b"",
]  # fmt: skip
KINDS = {
    "markers": RULES,
    "reasoning first": replace(RULES, initial=REASONING),
    "calls without markers": replace(
        RULES, tool_format=replace(RULES.tool_format, has_bare_calls=True)
    ),
    "headers": ChannelRules(
        transitions={NORMAL: [("<h>", HEADER)], REASONING: [("<h>", HEADER)]},
        header=Header(
            end="|",
            read=lambda text, has_form: NORMAL if "<h>content".startswith(text) else None,
        ),
    ),
    "hidden parts": ChannelRules(
        transitions={NORMAL: [("<x>", "hidden")], "hidden": [("<r>", NORMAL)]}
    ),
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
    answer = kind(Words(rules), stops, "", calls, min_tokens=2)
    return RunningRow(key=KEY, answer=answer, inserted_at=1.0, warnings=("mind",))


def words(*said: bytes) -> list[tuple[int, bool]]:
    return [(WORDS.index(word), False) for word in said]


@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([[], ["END"], ["ND", "a of"]]),
    st.lists(st.tuples(st.integers(0, len(WORDS) - 1), st.booleans()), max_size=30),
    st.sampled_from([None, STOP, LENGTH]),
)
@example("markers", [], words(b"a", b"<", b"a"), None)
@example("calls without markers", [], words(PLAIN_CALL, b"\n"), None)
@example("calls without markers", [], words(b"a", PLAIN_CALL), None)
@example("hidden parts", [], words(b"<x>", b"a"), None)
def test_the_short_way_says_what_the_long_one_does(
    name: str, stops: list[str], tokens: list[tuple[int, bool]], finish: FinishReason | None
) -> None:
    short = row_of(AnswerText, KINDS[name], stops)
    long = row_of(AllSorted, KINDS[name], stops)
    for place, (token, has_logprobs) in enumerate(tokens, 1):
        given_token = RowToken(
            key=KEY,
            token=token,
            finish=finish if place == len(tokens) else None,
            logprobs=RowLogprobs(logprob=-0.5) if has_logprobs else None,
        )
        said = short.advance(given_token, 2.0)
        assert pack_rows(said) == pack_rows(long.advance(given_token, 2.0))
        assert (short.tokens, short.answer.channel) == (long.tokens, long.answer.channel)
        if said[-1].finish is not None:
            return
