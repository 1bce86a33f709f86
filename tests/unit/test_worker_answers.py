"""What a row is planned as, what is told of it, and the deltas of its tokens, each whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import Acceptance, Resume, RowDelta
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engine import EngineBytes, EngineFacts, Prompt, Row, RowLogprobs, RowToken
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.rows import (
    NO_CALLS_KNOWN,
    NO_FORM,
    NO_ROOM_FOR_CALLS,
    RunningRow,
    acceptance,
    check_resume,
    plan_row,
    tools_warnings,
)
from mlxsup.worker.text.channels import NORMAL, REASONING, TOOL, ChannelRules, Header
from mlxsup.worker.text.tool_calls import ToolCallReader

FACTS = EngineFacts(context_length=10, vocabulary_size=300, fingerprint="f", backend="fake")
KEY = RequestKey(1)
TOOLS = [{"type": "function", "function": {"name": "time"}}]
RULES = ChannelRules(
    transitions={
        NORMAL: [("<r>", REASONING), ("<t>", TOOL)],
        REASONING: [("</r>", NORMAL)],
        TOOL: [("</t>", NORMAL)],
    },
    parse_tool_call=lambda text, tools: {"name": text, "arguments": {}},
)


class Codec(FakeTextCodec):
    """The fake engine's text side with other markers."""

    def __init__(self, rules: ChannelRules = RULES) -> None:
        super().__init__()
        self.rules = rules

    @property
    def channel_rules(self) -> ChannelRules:
        return self.rules


class Form:
    """A grammar that notes what it is given and says what it is told to."""

    def __init__(self, *, is_over_after: int = 99, has_begun: bool = True) -> None:
        self.taken: list[int] = []
        self.is_over_after = is_over_after
        self.has_begun = has_begun

    def accept(self, token: int) -> None:
        self.taken.append(token)

    @property
    def is_over(self) -> bool:
        return len(self.taken) >= self.is_over_after


def plan(tokens: int = 4, delivered: Sequence[int] = (), sampling: Any = None, **body: Any) -> Row:
    asked = RequestBody.from_wire({"prompt": "x", **body})
    prompt = Prompt(tokens=[5] * tokens, checkpoints=(2, 3))
    return plan_row(KEY, asked, prompt, FACTS, delivered=delivered, sampling=sampling)


# ---------------------------------------------------------------- plans


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
def test_what_exceeds_the_context_is_refused_with_all_numbers_I6(
    asked: dict[str, Any], message: str, more: dict[str, int]
) -> None:
    with pytest.raises(RemoteError) as caught:
        plan(**asked)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert caught.value.message == message
    numbers = {"prompt_tokens": asked["tokens"], "context_length": 10}
    assert caught.value.detail == numbers | more


def test_what_just_fits_is_planned_I6() -> None:
    assert plan(9).max_tokens == 1
    assert plan(4, max_tokens=6).max_tokens == 6
    assert plan(4, min_tokens=6).min_tokens == 6


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
    assert plan().seed == 63
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
        "the model changed while its worker was restarted, so the answer cannot go on"
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
def test_who_offers_tools_is_warned_if_no_call_can_come(
    body: dict[str, Any], rules: ChannelRules, warnings: tuple[str, ...]
) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert (
        tools_warnings(RequestBody.from_wire({"messages": messages, **body}), Codec(rules))
        == warnings
    )


def test_warnings_are_sentences_of_their_own() -> None:
    assert NO_CALLS_KNOWN == (
        "no format of tool calls is known for this model: a call that it makes stands in the text"
    )
    assert NO_ROOM_FOR_CALLS == (
        "the answer keeps to its response_format, so it can hold no tool call"
    )
    assert NO_FORM == "the answer ended before the part that response_format applies to"


# ---------------------------------------------------------------- deltas


def running(
    *, stops: Sequence[str] = (), form: Form | None = None, warnings: Sequence[str] = ()
) -> RunningRow:
    answer = AnswerText(Codec(), stops, calls=ToolCallReader(TOOLS, 1))
    return RunningRow(
        key=KEY,
        answer=answer,
        grammar=form,  # type: ignore[arg-type]
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
    assert replayed(running(stops=["b"]), "ab", 3) == [RowDelta(key=KEY, finish=FinishReason.STOP)]
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
    fresh = RunningRow(key=KEY, answer=AnswerText(Codec(), ()))
    assert (fresh.grammar, tuple(fresh.warnings), fresh.inserted_at) == (None, (), 0.0)
    assert (fresh.cached_tokens, fresh.has_token) == (0, False)


def test_what_is_not_said_of_a_load_is_nothing() -> None:
    assert (FACTS.versions, FACTS.batching.value, FACTS.batching_reason) == ({}, "together", "")
    assert (FACTS.warnings, FACTS.prefix_cache_bytes, FACTS.prefix_cache_tokens) == ((), 0, 0)
    held = EngineBytes()
    assert (held.active, held.cache, held.peak) == (0, 0, 0)
