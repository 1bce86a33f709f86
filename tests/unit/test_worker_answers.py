"""From a request to its row, and from tokens to deltas: plans, acceptances, ends, replays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import MAX_FRAME_BYTES, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import Generation, ModelName, RequestKey, pack_tokens
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import Acceptance, Accepted, Dispatch, Resume, RowDelta
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engine import EngineFacts, Prompt, Row, RowLogprobs, RowToken
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.rows import (
    NO_CALLS_KNOWN,
    NO_FORM,
    NO_ROOM_FOR_CALLS,
    RunningRow,
    acceptance,
    check_resume,
    plan_row,
    running_row,
    tools_warnings,
)
from mlxsup.worker.text.channels import HEADER, NORMAL, REASONING, TOOL, ChannelRules, Header
from mlxsup.worker.text.detokenizer import ByteDetokenizer
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text.tool_calls import ToolCallReader

from support.worker.loop_driver import LoopDriver, check_every_resume

FACTS = EngineFacts(context_length=10, vocabulary_size=300, fingerprint="f", backend="fake")


KEY = RequestKey(1)


TOOLS = [{"type": "function", "function": {"name": "time"}}]


RULES = ChannelRules(
    transitions={
        NORMAL: [("<r>", REASONING), ("<t>", TOOL)],
        REASONING: [("</r>", NORMAL)],
        TOOL: [("</t>", NORMAL)],
    },
    parse_tool_call=lambda text, tools, is_lenient: [{"name": text, "arguments": {}}],
)


class Codec(FakeTextCodec):
    """The fake engine's text side with other markers."""

    def __init__(self, rules: ChannelRules = RULES) -> None:
        super().__init__()
        self.rules = rules

    @property
    def channel_rules(self) -> ChannelRules:
        return self.rules


def plan(tokens: int = 4, delivered: Sequence[int] = (), sampling: Any = None, **body: Any) -> Row:
    asked = RequestBody.from_wire({"prompt": "x", **body})
    prompt = Prompt(tokens=[5] * tokens, checkpoints=(2, 3))
    return plan_row(KEY, asked, prompt, FACTS, delivered=delivered, sampling=sampling)


def test_a_row_has_what_was_asked_for_and_defaults_for_the_rest() -> None:
    plain = plan(seed=3)
    assert plain == Row(key=KEY, tokens=[5] * 4, max_tokens=6, seed=3, checkpoints=(2, 3))
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
    ) == Row(
        key=KEY,
        tokens=[5] * 4,
        max_tokens=5,
        min_tokens=2,
        seed=3,
        delivered=[7, 8],
        stop_token_ids=(4, 9),
        ignore_eos=True,
        logit_bias={7: 1.0, 8: -2.5},
        top_logprobs=0,
        checkpoints=(2, 3),
        sampling=Sampling(temperature=0.5, top_k=0, min_p=0.25),
    )


@pytest.mark.parametrize(
    ("asked", "planned"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs_are_told_of_if_they_were_asked_for(
    asked: dict[str, Any], planned: int | None
) -> None:
    assert plan(**asked).top_logprobs == planned


@pytest.mark.parametrize(
    ("asked", "message", "more"),
    [
        (
            {"tokens": 10},
            "the prompt has 10 tokens; the context of 10 leaves no room for an answer",
            {},
        ),
        (
            {"tokens": 4, "max_tokens": 7},
            "4 prompt tokens and max_tokens 7 exceed the context of 10; at most 6 fit",
            {"max_tokens": 7},
        ),
        (
            {"tokens": 4, "min_tokens": 7},
            "4 prompt tokens and min_tokens 7 exceed the context of 10; at most 6 fit",
            {"min_tokens": 7},
        ),
    ],
)
def test_a_request_above_the_context_names_all_numbers_I6(
    asked: dict[str, Any], message: str, more: dict[str, int]
) -> None:
    with pytest.raises(RemoteError) as caught:
        plan(**asked)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert caught.value.message == message
    numbers = {"prompt_tokens": asked["tokens"], "context_length": 10}
    assert caught.value.detail == numbers | more


def test_max_tokens_is_capped_on_demand() -> None:
    assert plan(4, max_tokens=7, cap_max_tokens=True).max_tokens == 6
    assert plan(4, max_tokens=5, cap_max_tokens=True).max_tokens == 5
    with pytest.raises(RemoteError, match="the prompt has 10 tokens"):
        plan(10, max_tokens=7, cap_max_tokens=True)
    with pytest.raises(RemoteError, match="max_tokens 7 exceed"):
        plan(4, max_tokens=7, cap_max_tokens=False)


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
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    expected = "takes ids below this model's vocabulary of 300, not 300"
    assert caught.value.message == f"{name} {expected}"


def test_a_drawn_seed_uses_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: bits)
    assert plan().seed == 53
    assert plan(seed=0).seed == 0


def test_an_acceptance_holds_what_another_life_needs_F10() -> None:
    body = RequestBody(prompt="x", seed=3, stop=["z"])
    prompt = Prompt(tokens=[5, 6], opening="<think>")
    assert acceptance(plan(2, seed=3), body, prompt, FACTS) == Acceptance(
        prompt_tokens=pack_tokens([5] * 2),
        opening="<think>",
        parameters=asdict(Sampling()) | {"stop": ["z"], "max_tokens": 8},
        seed=3,
        fingerprint="f",
    )


def test_an_answer_resumes_in_the_same_model_alone_F10() -> None:
    def resume(fingerprint: str) -> Resume:
        accepted = Acceptance(
            prompt_tokens=b"", opening="", parameters={}, seed=1, fingerprint=fingerprint
        )
        return Resume(acceptance=accepted, delivered=pack_tokens([1, 2, 3]))

    assert check_resume(resume("f"), FACTS) is None
    error = check_resume(resume("g"), FACTS)
    assert error is not None
    assert (error.code, error.detail) == (ErrorCode.WORKER_CRASHED, {"tokens_sent": 3})
    assert error.message == (
        "the model changed while its worker was restarted, so the answer cannot continue"
    )


JSON = {"type": "json_object"}

HEADED = ChannelRules(
    header=Header(end=">", read=lambda header, has_form: None),
    parse_tool_call=RULES.parse_tool_call,
)


@pytest.mark.parametrize(
    ("body", "rules", "warnings"),
    [
        ({}, RULES, ()),
        ({"response_format": JSON}, RULES, ()),
        ({"tools": TOOLS}, RULES, ()),
        ({"tools": TOOLS}, ChannelRules(), (NO_CALLS_KNOWN,)),
        ({"tools": TOOLS, "tool_choice": "none"}, ChannelRules(), ()),
        ({"tools": TOOLS, "response_format": JSON}, RULES, (NO_ROOM_FOR_CALLS,)),
        ({"tools": TOOLS, "response_format": JSON}, ChannelRules(), (NO_CALLS_KNOWN,)),
        ({"tools": TOOLS, "response_format": {"type": "text"}}, RULES, ()),
        ({"tools": TOOLS, "response_format": JSON}, HEADED, ()),
    ],
)
def test_tools_without_a_format_are_warned_of(
    body: dict[str, Any], rules: ChannelRules, warnings: tuple[str, ...]
) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert (
        tools_warnings(RequestBody.from_wire({"messages": messages, **body}), Codec(rules))
        == warnings
    )


@pytest.mark.parametrize(("delivered", "warnings"), [((), (NO_CALLS_KNOWN,)), ((7,), ())])
def test_warnings_are_not_said_again_after_a_resume(
    delivered: tuple[int, ...], warnings: tuple[str, ...]
) -> None:
    body = RequestBody(messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    dispatched = Dispatch(key=KEY, body=b"")
    row = running_row(plan(delivered=delivered), body, "", Codec(ChannelRules()), dispatched)
    assert row.warnings == warnings


def running(stops: list[str] | None = None) -> RunningRow:
    answer = AnswerText(
        FakeTextCodec(), stops or [], "", ToolCallReader(None, 0), has_form=False, min_tokens=0
    )
    return RunningRow(key=KEY, answer=answer, inserted_at=100.0)


def advance(row: RunningRow, text: str, finish: FinishReason | None = None) -> list[RowDelta]:
    """Feeds a text byte by byte; the finish comes with the last."""
    tokens = encode_text(text)
    return [
        one_delta(
            row,
            RowToken(key=KEY, token=token, finish=finish if i == len(tokens) - 1 else None),
        )
        for i, token in enumerate(tokens)
    ]


def token_of(token: int, finish: FinishReason | None = None) -> RowToken:
    """What a step gives for it."""
    return RowToken(key=KEY, token=token, finish=finish)


def one_delta(row: RunningRow, token: RowToken) -> RowDelta:
    """What one token gives, joined where the end showed more."""
    first, *rest = row.advance(token, 102.5)
    for delta in rest:
        first.text += delta.text
        first.finish = delta.finish
    return first


def test_a_row_has_no_more_tokens_than_one_frame_carries() -> None:
    facts = EngineFacts(
        context_length=10_000_000, vocabulary_size=300, fingerprint="f", backend="fake"
    )
    most = plan_row(KEY, RequestBody(prompt="x"), Prompt(tokens=[5]), facts).max_tokens + 1
    body, prompt = RequestBody(prompt="x"), Prompt(tokens=[5] * (most - 1))
    row = plan_row(KEY, body, prompt, facts)
    accepted = acceptance(row, body, prompt, facts)
    said = Accepted(key=KEY, acceptance=accepted, tokenize_s=0.0)
    assert sum(map(len, encode(said))) < MAX_FRAME_BYTES
    with pytest.raises(RemoteError) as caught:
        plan_row(KEY, RequestBody(prompt="x"), Prompt(tokens=[5] * most), facts)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_the_whole_context_can_be_used() -> None:
    body = RequestBody(prompt="x", max_tokens=1)
    assert plan_row(KEY, body, Prompt(tokens=[5] * 9), FACTS).max_tokens == 1


def test_a_stop_string_wins_over_length_on_the_same_token() -> None:
    assert advance(running(["b"]), "ab", FinishReason.LENGTH)[-1].finish is FinishReason.STOP


def test_held_text_is_flushed_with_the_end() -> None:
    deltas = advance(running(["bcd"]), "abc", FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["a", "", "bc"]
    assert deltas[-1].finish is FinishReason.LENGTH


def test_the_end_names_the_stop_string_that_was_found() -> None:
    row = running(["bc", "x"])
    deltas = [one for token in encode_text("abc") for one in row.advance(token_of(token), 102.5)]
    assert [delta.stop for delta in deltas] == [None, None, "bc"]
    deltas = running(["x"]).advance(token_of(encode_text("a")[0], FinishReason.STOP), 102.5)
    assert [delta.stop for delta in deltas] == [None]


@pytest.mark.parametrize(("min_tokens", "is_stopped"), [(0, True), (4, True), (5, False)])
def test_a_stop_string_counts_from_the_token_that_fills_min_tokens(
    min_tokens: int, is_stopped: bool
) -> None:
    answer = AnswerText(
        FakeTextCodec(), ["cd"], "", ToolCallReader(None, 0), has_form=False, min_tokens=min_tokens
    )
    text = "".join(piece.text for token in encode_text("abcd") for piece in answer.add(token))
    text += "".join(piece.text for piece in answer.finish())
    assert (text, answer.is_stopped) == ("ab" if is_stopped else "abcd", is_stopped)


@pytest.mark.parametrize(
    ("text", "max_tokens", "finish", "shown"),
    [
        ("abcd", 5, None, ""),
        ("abcd", 4, FinishReason.LENGTH, ""),
        ("abcs", 4, FinishReason.LENGTH, "s"),
        ("astop", 5, FinishReason.STOP, ""),
    ],
)
def test_delivered_tokens_that_were_the_whole_answer_end_it_as_it_would_have_ended(
    text: str, max_tokens: int, finish: FinishReason | None, shown: str
) -> None:
    facts = EngineFacts(context_length=99, vocabulary_size=300, fingerprint="f", backend="fake")
    body = RequestBody(prompt="x", max_tokens=max_tokens)
    row = plan_row(KEY, body, Prompt(tokens=[5]), facts, delivered=encode_text(text))
    deltas = running(["stop"]).replay(row)
    if finish is None:
        assert deltas is None
        return
    assert deltas is not None
    assert (deltas[-1].finish, "".join(delta.text for delta in deltas)) == (finish, shown)


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
def running_form(
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


def letter_token(letter: str | None, finish: FinishReason | None = None, **more: Any) -> RowToken:
    token = None if letter is None else encode_text(letter)[0]
    return RowToken(key=KEY, token=token, finish=finish, **more)


def say(row: RunningRow, text: str, finish: FinishReason | None = None) -> list[RowDelta]:
    """The deltas of the last character."""
    deltas: list[RowDelta] = []
    for number, letter in enumerate(text, 1):
        deltas = row.advance(letter_token(letter, finish if number == len(text) else None), 102.5)
    return deltas


def packed(letter: str) -> bytes:
    return pack_tokens(encode_text(letter))


def test_the_first_delta_says_how_long_the_prompt_took_and_the_next_does_not() -> None:
    row = running_form()
    assert say(row, "a") == [
        RowDelta(key=KEY, text="a", tokens=packed("a"), prefill_s=2.5, cached_tokens=3)
    ]
    assert say(row, "b") == [RowDelta(key=KEY, text="b", tokens=packed("b"))]


def test_warnings_come_before_the_first_text_and_once() -> None:
    row = running_form(warnings=("mind", "this"))
    assert say(row, "a") == [
        RowDelta(key=KEY, warning="mind", tokens=packed("a"), prefill_s=2.5, cached_tokens=3),
        RowDelta(key=KEY, warning="this"),
        RowDelta(key=KEY, text="a"),
    ]
    assert say(row, "b") == [RowDelta(key=KEY, text="b", tokens=packed("b"))]


def test_logprobs_come_with_their_token_and_the_texts() -> None:
    row = running_form()
    asked = RowLogprobs(logprob=-0.5, top=[(encode_text("z")[0], -0.25)])
    [delta] = row.advance(letter_token("a", logprobs=asked), 102.5)
    assert delta.logprobs == [
        Logprobs(
            chosen=TokenLogprob(token=encode_text("a")[0], logprob=-0.5, text="a"),
            top=[TokenLogprob(token=encode_text("z")[0], logprob=-0.25, text="z")],
        )
    ]
    [delta] = row.advance(letter_token("b"), 102.5)
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
def test_an_end_follows_from_the_answer(
    text: str, last: str | None, finish: FinishReason, expected: FinishReason
) -> None:
    row = running_form()
    assert [delta.finish for delta in say(row, text)][-1] is None
    deltas = row.advance(letter_token(last, finish), 102.5)
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
    row = running_form(form=form)
    say(row, text)
    deltas = row.advance(letter_token(None, finish), 102.5)
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
    assert replayed(running_form(), "ab", 3) is None
    assert replayed(running_form(), "ab", 2) == [RowDelta(key=KEY, finish=FinishReason.LENGTH)]
    stopped = RowDelta(key=KEY, finish=FinishReason.STOP, stop="b")
    assert replayed(running_form(stops=["b"]), "ab", 3) == [stopped]
    assert replayed(running_form(), "<t>time</t>", 11) == [
        RowDelta(key=KEY, finish=FinishReason.LENGTH)
    ]


def test_a_replay_takes_the_form_along_F10() -> None:
    form = Form(is_over_after=2)
    assert replayed(running_form(form=form), "a", 9) is None
    assert form.taken == encode_text("a")
    over = Form(is_over_after=2)
    assert replayed(running_form(form=over), "ab", 9) == [
        RowDelta(key=KEY, finish=FinishReason.STOP)
    ]
    before = Form(is_over_after=2, has_begun=False)
    assert replayed(running_form(form=before), "ab", 9) == [
        RowDelta(key=KEY, warning=NO_FORM, finish=FinishReason.STOP)
    ]
    call = Form(is_over_after=11)
    deltas = replayed(running_form(form=call), "<t>time</t>", 99)
    assert deltas is not None
    assert deltas[-1].finish is FinishReason.TOOL_CALLS


@pytest.mark.parametrize(("count", "reports"), [(1, 1), (1024, 1), (1025, 2), (2049, 3)])
def test_a_replay_reports_before_each_1024_tokens_P7(count: int, reports: int) -> None:
    row, told = running_form(), []
    planned = Row(
        key=KEY, tokens=[5], max_tokens=9999, seed=1,
        delivered=[100] * count,
    )  # fmt: skip
    row.replay(planned, lambda: told.append(row.answer.count))
    assert told == [1024 * number for number in range(reports)]


CALL = '{"name": "weather", "arguments": {"city": "Köln 🦊"}}'

WEATHER = [{"type": "function", "function": {"name": "weather"}}]
SAID = f"<think>hm, \U0001f98a</think>Sure: <tool_call>{CALL}</tool_call> wait"
ASKED = [{"role": "user", "content": f"[[say {SAID}]]"}]

SPEC = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///x",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
)


@pytest.fixture(scope="module")
def fake() -> Iterator[LoopDriver]:
    """The fake engine says what the prompt asks for; tests/mlx/test_channels.py has real tokens."""
    engine = FakeEngine(SPEC)
    driver = LoopDriver(engine, engine.load(lambda phase, at: None))
    yield driver
    driver.close()
    engine.close()


def test_the_parts_of_an_answer_have_their_channels(fake: LoopDriver) -> None:
    got = fake.answer(messages=ASKED, tools=WEATHER, seed=3)
    assert got.text_of(Channel.REASONING) == "hm, 🦊"
    assert got.text == "Sure:  wait"
    call = json.loads(got.text_of(Channel.TOOL_CALL))
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln 🦊"}'}
    assert got.finish is FinishReason.TOOL_CALLS


def test_resumed_in_every_half_of_a_call_F10(fake: LoopDriver) -> None:
    whole = fake.answer(messages=ASKED, tools=WEATHER, seed=3)
    check_every_resume(fake, whole)


def test_a_call_cut_off_by_the_budget_is_text_with_a_warning(fake: LoopDriver) -> None:
    got = fake.answer(messages=ASKED, tools=WEATHER, max_tokens=60)
    assert got.finish is FinishReason.LENGTH
    assert "<tool_call>" in got.text
    assert [delta.warning for delta in got.deltas if delta.warning]
    assert sum(bool(delta.tokens) for delta in got.deltas) == 60
    check_every_resume(fake, got)


def test_a_stop_string_ends_reasoning_too(fake: LoopDriver) -> None:
    got = fake.answer(prompt="[[say <think>one two three</think>x]]", stop=["two"])
    assert (got.text_of(Channel.REASONING), got.text) == ("one ", "")
    assert got.finish is FinishReason.STOP


PLAIN_CALL = b'{"name": "time"}'

WORDS = [
    b"a", b" of", b"<", b"r>", b"<r>", b"b</r", b">c", b"<t>time", b"</t>d", b"\xc3", b"\xb6", b"E",
    b"ND", b"END", PLAIN_CALL, b"<h>", b"content", b"nonsense", b"|", b"\n", b"<x>", b"",
]  # fmt: skip

PLAIN_HEADED = ChannelRules(
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
    "headers": PLAIN_HEADED,
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


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([[], ["END"], ["ND", "a of"]]),
    st.lists(st.tuples(st.integers(0, len(WORDS) - 1), st.booleans()), max_size=30),
    st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]),
)
@example("markers", [], [(number(b"a"), False), (number(b"<"), False), (number(b"a"), False)], None)
@example("calls without markers", [], [(number(PLAIN_CALL), False), (number(b"\n"), False)], None)
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
