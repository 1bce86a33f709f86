"""What a request asks of the engine, and the text of its answer."""

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import MAX_FRAME_BYTES, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.parameters import MAX_SEED, sampling_defaults
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Accepted, RowDelta
from mlxsup.worker.answer import AnswerText
from mlxsup.worker.engine import EngineFacts, Prompt, RowToken
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.rows import RunningRow, acceptance, plan_row
from mlxsup.worker.text.tool_calls import ToolCallReader

FACTS = EngineFacts(context_length=10, vocabulary_size=300, fingerprint="f", backend="fake")
KEY = RequestKey(1)


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
            row, RowToken(key=KEY, token=token, finish=finish if i == len(tokens) - 1 else None)
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


def test_an_absent_max_tokens_is_what_fits() -> None:
    row = plan_row(KEY, RequestBody(prompt="x"), Prompt(tokens=[5] * 4), FACTS)
    assert row.max_tokens == 6


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


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"),
    [
        (10, None, ("the prompt has 10 tokens; the context of 10 leaves no room",)),
        (12, 1, ("the prompt has 12 tokens",)),
        (4, 7, ("4 prompt tokens and max_tokens 7 exceed the context of 10; ", "at most 6")),
    ],
)
def test_over_the_context_is_refused_with_numbers_I6_C7(
    length: int, max_tokens: int | None, numbers: tuple[str, ...]
) -> None:
    body = RequestBody(prompt="x", max_tokens=max_tokens)
    with pytest.raises(RemoteError) as caught:
        plan_row(KEY, body, Prompt(tokens=[5] * length), FACTS)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert all(number in caught.value.message for number in numbers)
    assert caught.value.message.startswith(numbers[0])
    assert caught.value.detail["prompt_tokens"] == length
    assert caught.value.detail["context_length"] == 10


def test_the_whole_context_can_be_used() -> None:
    body = RequestBody(prompt="x", max_tokens=1)
    assert plan_row(KEY, body, Prompt(tokens=[5] * 9), FACTS).max_tokens == 1


def test_a_given_seed_is_kept_and_an_absent_one_drawn() -> None:
    prompt = Prompt(tokens=[5])
    assert plan_row(KEY, RequestBody(prompt="x", seed=7), prompt, FACTS).seed == 7
    drawn = {plan_row(KEY, RequestBody(prompt="x"), prompt, FACTS).seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed <= MAX_SEED for seed in drawn)


def test_acceptance_says_everything_that_a_resume_needs() -> None:
    body, prompt = (
        RequestBody(prompt="x", sampling={"temperature": 1}, stop=["z"], seed=3),
        Prompt(tokens=[5]),
    )
    made = acceptance(plan_row(KEY, body, prompt, FACTS), body, prompt, FACTS)
    assert made.prompt_tokens == pack_tokens([5])
    assert (made.seed, made.fingerprint) == (3, "f")
    assert made.parameters == sampling_defaults() | {
        "max_tokens": 9,
        "temperature": 1.0,
        "stop": ["z"],
    }


def test_a_character_split_over_tokens_is_shown_whole_G7() -> None:
    texts = [delta.text for delta in advance(running(), "a🦊b")]
    assert texts == ["a", "", "", "", "🦊", "b"]


def test_half_a_character_at_the_end_is_flushed() -> None:
    row = running()
    half = encode_text("🦊")[0]
    delta = one_delta(row, RowToken(key=KEY, token=half, finish=FinishReason.LENGTH))
    assert delta.text == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_ends_the_answer_and_its_token_counts() -> None:
    deltas = advance(running(["STOP"]), "abSTOP")
    assert "".join(delta.text for delta in deltas) == "ab"
    assert deltas[-1].finish is FinishReason.STOP
    assert all(delta.tokens for delta in deltas)


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


def test_an_end_without_a_token_shows_none() -> None:
    row = running()
    delta = one_delta(row, RowToken(key=KEY, token=None, finish=FinishReason.STOP))
    assert (delta.text, delta.tokens, delta.finish) == ("", b"", FinishReason.STOP)
    assert delta.prefill_s == 2.5


def test_prefill_time_comes_with_the_first_token_only() -> None:
    assert [delta.prefill_s for delta in advance(running(), "abc")] == [2.5, None, None]


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
