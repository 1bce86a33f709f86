"""The text side of a worker: the threads that prepare prompts, messages, detokenizers, stop strings
and what is rendered again for people who join an answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import encode, encode_body
from mlxsup.protocol.delta import read_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.protocol.states import Channel
from mlxsup.protocol.worker_messages import Acceptance, Rejected, Render, Rendered, Resume
from mlxsup.worker.engine import Picture, Prompt, StepResult
from mlxsup.worker.engines.fake.text import TOKEN_BYTES, FakeTextCodec, encode_text
from mlxsup.worker.rendering import TOKENS_PER_TURN, Rendering
from mlxsup.worker.text.chat_messages import (
    plain_messages,
    text_of_messages,
    with_text_arguments,
    without_media,
)
from mlxsup.worker.text.detokenizer import (
    MAX_WAITING_TOKENS,
    REPLACEMENT,
    ByteDetokenizer,
    WindowDetokenizer,
)
from mlxsup.worker.text.fitting import STEPS, fit
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text.stops import StopMatcher, find_first, undecided
from mlxsup.worker.text.tool_calls import CallIds
from mlxsup.worker.text_threads import LONG_BODY_BYTES, Refused, TextThreads, Tokenised

from support.eventually import eventually
from support.worker.turn_bench import FACTS, A, B, Bench, C, x


# ---------------------------------------------------------------- threads
class ScriptedCodec(FakeTextCodec):
    """Encodes to the prompt's length; can be held, or told to raise.

    Attributes:
        for_long: the twin that was asked for; held by its own gate.
        form: what every grammar is; `asked`: what each was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.for_long: ScriptedCodec | None = None
        self.form: Grammar | None = None
        self.asked: list[tuple[object, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.raises: BaseException | None = None
        self.threads: set[int] = set()
        self.seen: list[str] = []

    def encode(self, body: RequestBody) -> Prompt:
        self.threads.add(threading.get_ident())
        assert body.prompt is not None
        self.seen.append(body.prompt[:8])
        assert self.gate.wait(60)
        if self.raises is not None:
            raise self.raises
        return Prompt(tokens=[len(body.prompt)])

    def twin(self) -> ScriptedCodec:
        assert self.for_long is None, "two twins"
        self.for_long = ScriptedCodec()
        self.for_long.gate.clear()
        return self.for_long

    def constrain(self, body: RequestBody, prompt: Prompt) -> Prompt:
        self.asked.append((body.response_format, prompt.opening))
        return replace(prompt, grammar=self.form)


class Text:
    """Running text threads with what they produced."""

    def __init__(self) -> None:
        self.codec = ScriptedCodec()
        self.wakes = threading.Semaphore(0)
        self.threads = TextThreads(self.codec, self.wakes.release)
        self.threads.start()

    def submit(self, key: RequestKey, prompt: str) -> None:
        self.threads.submit(key, encode_body(RequestBody(prompt=prompt)))

    def results(self, count: int) -> list[Tokenised | Refused]:
        """Wait for that many wakes and take what is there."""
        for _ in range(count):
            assert self.wakes.acquire(timeout=60)
        return self.threads.take()

    def tokenised(self) -> Tokenised:
        [result] = self.results(1)
        assert isinstance(result, Tokenised)
        return result

    def refused(self) -> RemoteError:
        [result] = self.results(1)
        assert isinstance(result, Refused)
        return result.error

    def hold_with_a_first_one(self) -> None:
        self.codec.gate.clear()
        self.submit(A, "first")
        eventually(lambda: self.codec.seen)

    def hold_with_a_long_one(self) -> ScriptedCodec:
        """Return the codec of the long ones, which waits at its gate."""
        self.submit(A, long_prompt())
        eventually(lambda: self.codec.for_long is not None and self.codec.for_long.seen)
        assert self.codec.for_long is not None
        return self.codec.for_long

    def close(self) -> None:
        self.threads.close()
        self.codec.gate.set()
        if self.codec.for_long is not None:
            self.codec.for_long.gate.set()
        for lane in self.threads.lanes:
            lane.thread.join(60)
            assert not lane.thread.is_alive()


def long_prompt(bodies: float = 1) -> str:
    return "L" * int(LONG_BODY_BYTES * bodies + 1)


@pytest.fixture
def text() -> Iterator[Text]:
    made = Text()
    yield made
    made.close()


def test_encodes_beside_the_calling_thread_and_wakes_it_A7(text: Text) -> None:
    text.submit(A, "abc")
    result = text.tokenised()
    assert (result.key, result.prompt.tokens) == (A, [3])
    assert threading.get_ident() not in text.codec.threads


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (RemoteError(ErrorCode.INVALID_REQUEST, "no template"), "invalid_request", "no template"),
        (KeyError("y" * 400), "invalid_request",
         "the prompt could not be prepared: KeyError: '" + "y" * 299),
        (RecursionError(), "invalid_request", "the prompt could not be prepared: RecursionError: "),
        (ValueError("half a letter: \ud83e"), "invalid_request",
         "the prompt could not be prepared: ValueError: half a letter: ?"),
        (MemoryError("x"), "insufficient_memory",
         "there is not enough memory to prepare the prompt"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_a_template_error_is_the_requests_own_and_travels_G6(
    text: Text, raised: BaseException, code: str, message: str
) -> None:
    text.codec.raises = raised
    text.submit(A, "abc")
    error = text.refused()
    assert (error.code, error.message) == (code, message)
    encode(Rejected(key=A, error=error))
    text.codec.raises = None
    text.submit(B, "abcd")
    assert text.tokenised().key == B


def test_a_body_that_is_not_msgpack_is_refused_C7(text: Text) -> None:
    text.threads.submit(A, b"\xc1")
    assert text.refused().code is ErrorCode.INVALID_REQUEST


def test_a_forgotten_request_is_not_begun_G5(text: Text) -> None:
    text.hold_with_a_first_one()
    text.submit(B, "second")
    text.threads.forget(B)
    text.submit(C, "third")
    text.codec.gate.set()
    assert [result.key for result in text.results(2)] == [A, C]
    assert text.codec.seen == ["first", "third"]


def test_a_forgotten_long_request_is_not_begun_either_G5(text: Text) -> None:
    for_long = text.hold_with_a_long_one()
    text.submit(B, long_prompt())
    text.threads.forget(B)
    text.submit(C, long_prompt())
    for_long.gate.set()
    assert [result.key for result in text.results(2)] == [A, C]


def test_small_and_long_prompts_never_wait_for_each_other_G7(text: Text) -> None:
    for_long = text.hold_with_a_long_one()
    text.submit(B, long_prompt())
    small = [RequestKey(number) for number in range(10, 20)]
    for key in small:
        text.submit(key, "small")
    assert [result.key for result in text.results(10)] == small, "in order, the long ones held"
    text.codec.gate.clear()
    text.submit(C, "small")
    for_long.gate.set()
    assert [result.key for result in text.results(2)] == [A, B], "the small one held"
    text.codec.gate.set()
    assert text.tokenised().key == C


def test_a_long_prompt_is_overtaken_by_shorter_ones_but_not_for_ever_G7(text: Text) -> None:
    for_long = text.hold_with_a_long_one()
    text.submit(B, long_prompt(4))
    shorter = [RequestKey(number) for number in range(10, 20)]
    for key in shorter:
        text.submit(key, long_prompt())
    for_long.gate.set()
    order = [result.key for result in text.results(12)]
    assert order.index(B) == 3, "A had begun, and two went first"
    assert [key for key in order if key >= 10] == shorter


def test_the_oldest_preparation_is_the_busy_one(text: Text) -> None:
    def busy() -> RequestKey | None:
        found = text.threads.busy()
        return None if found is None else found[0]

    assert busy() is None
    for_long = text.hold_with_a_long_one()
    text.codec.gate.clear()
    text.submit(B, "small")
    eventually(lambda: text.codec.seen)
    assert busy() == A
    for_long.gate.set()
    text.results(1)
    assert busy() == B


def test_slow_preprocessing_is_logged_without_its_text_G4(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter([0.0, 0.0, 2.5, 2.5, 2.5])
    text = Text.__new__(Text)
    text.codec, text.wakes = ScriptedCodec(), threading.Semaphore(0)
    text.threads = TextThreads(text.codec, text.wakes.release, clock=lambda: next(times))
    text.submit(A, "secret words")
    text.threads.start()
    text.results(1)
    eventually(lambda: "slow preprocessing key=1 tokens=1 seconds=2.500" in caplog.text)
    assert "secret" not in caplog.text
    text.close()


def test_a_resumed_request_is_not_encoded_again_F10(text: Text) -> None:
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5, 6]),
        opening="<think>",
        parameters={"max_tokens": 9, "stop": ["z"]},
        seed=7,
        fingerprint="f",
    )
    resume = Resume(acceptance=acceptance, delivered=b"")
    text.threads.submit(A, b"unread", resume)
    result = text.tokenised()
    assert result.prompt == Prompt(tokens=[5, 6], opening="<think>")
    assert result.body == RequestBody(prompt_tokens=[5, 6], max_tokens=9, stop=["z"], seed=7)
    assert result.resume is resume
    assert text.codec.seen == []


@pytest.mark.parametrize("tokens", [[5, 6], [5, 7]])
def test_a_resumed_prompt_reads_its_pictures_again_and_ends_if_they_are_others_F10(
    text: Text, monkeypatch: pytest.MonkeyPatch, tokens: list[int]
) -> None:
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5, 6]), opening="", parameters={}, seed=7, fingerprint="f",
        needs_body=True,
    )  # fmt: skip
    seen = Prompt(tokens=tokens, pictures=(Picture(begin=0, tokens=(5,), digest=b"d", arrays={}),))
    monkeypatch.setattr(text.codec, "encode", lambda body: seen)
    body = encode_body(RequestBody(prompt="p"))
    text.threads.submit(A, body, Resume(acceptance=acceptance, delivered=b""))
    if tokens == [5, 6]:
        assert text.tokenised().prompt == seen
    else:
        assert text.refused().code is ErrorCode.WORKER_CRASHED


def test_a_resumed_request_for_vectors_has_its_texts_as_they_were_split(text: Text) -> None:
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5, 6, 7]), opening="", parameters={"lengths": [1, 2]}, seed=0,
        fingerprint="f",
    )  # fmt: skip
    text.threads.submit(A, b"unread", Resume(acceptance=acceptance, delivered=b""))
    result = text.tokenised()
    assert result.prompt == Prompt(tokens=[5, 6, 7], lengths=(1, 2))
    assert result.body == PoolingBody(texts=[[5], [6, 7]])


def test_a_form_is_compiled_if_one_is_asked_for(text: Text) -> None:
    text.codec.form = Grammar(None, [])
    form = {"type": "json_object"}
    text.threads.submit(A, encode_body(RequestBody(prompt="abc", response_format=form)))
    assert text.tokenised().prompt == Prompt(tokens=[3], grammar=text.codec.form)
    text.submit(B, "abc")
    assert text.tokenised().prompt.grammar is None
    assert text.codec.asked == [(form, "")]


class Matcher:
    """Allows two tokens for ever, and notes what it is given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def compute_bitmask(self) -> bytes:
        return bytes([0b0000_0110, 0])

    def consume_token(self, token: int) -> None:
        self.given.append(token)

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False


def test_a_mark_where_a_form_begins_sets_the_rest_of_the_answer_free() -> None:
    def allowed() -> set[int]:
        mask = int.from_bytes(grammar.mask() or b"\xff\xff", "little")
        return {token for token in range(16) if mask >> token & 1}

    marks = [[5, 6], [5, 7], [2, 9]]  # the last one is none: the form may begin with 2
    matcher = Matcher()
    grammar = Grammar(matcher, [0], calls=marks)
    assert allowed() == {1, 2, 5}
    grammar.accept(5)
    assert (allowed(), grammar.is_over) == ({6, 7}, False)
    grammar.accept(7)
    grammar.accept(9)
    assert (grammar.mask(), grammar.is_over, matcher.given) == (None, False, [])
    grammar = Grammar(matcher, [0], calls=marks)
    for token in (2, 1):
        grammar.accept(token)
        assert allowed() == {1, 2}
    assert matcher.given == [2, 1]


def test_threads_are_daemons_and_are_alive_together(text: Text) -> None:
    assert all(lane.thread.daemon for lane in text.threads.lanes)
    assert text.threads.is_alive()
    short, _ = text.threads.lanes
    short.close()
    short.thread.join(60)
    assert not text.threads.is_alive(), "one is not enough"


def test_closed_threads_begin_nothing(text: Text) -> None:
    text.hold_with_a_first_one()
    text.submit(B, "second")
    text.close()
    assert text.codec.seen == ["first"]
    assert [result.key for result in text.threads.take()] == [A]


# ---------------------------------------------------------------- detokenizers
BYTES = [bytes([n]) for n in range(256)]


def decode(tokens: list[int]) -> str:
    """Decode as a tokenizer does whose tokens are bytes, which marks what is no text."""
    return bytes(tokens).decode(errors="replace")


def both() -> list[ByteDetokenizer | WindowDetokenizer]:
    return [ByteDetokenizer(BYTES), WindowDetokenizer(decode)]


@given(st.text())
def test_pieces_are_the_whole_text(text: str) -> None:
    for detokenizer in both():
        pieces = [detokenizer.add(token) for token in text.encode()]
        assert "".join(pieces) + detokenizer.finish() == text


@pytest.mark.parametrize(
    ("said", "pieces", "rest"),
    [
        ("aé🦊".encode(), ["a", "", "é", "", "", "", "🦊"], ""),
        ("x🦊".encode()[:3], ["x", "", ""], REPLACEMENT),
    ],
)
@pytest.mark.parametrize("kind", [0, 1])
def test_half_a_character_waits_for_its_other_half_or_the_end(
    kind: int, said: bytes, pieces: list[str], rest: str
) -> None:
    detokenizer = both()[kind]
    assert [detokenizer.add(token) for token in said] == pieces
    assert detokenizer.finish() == rest


@pytest.mark.parametrize(
    ("strips", "said", "text"),
    [(True, b" a b", "a b"), (False, b" a b", " a b"), (True, b"x y", "x y")],
)
def test_one_space_at_the_very_start_is_dropped_where_the_tokenizer_does(
    strips: bool, said: bytes, text: str
) -> None:
    detokenizer = ByteDetokenizer(BYTES, strips_first_space=strips)
    assert "".join(detokenizer.add(token) for token in said) == text


def test_endless_half_characters_are_shown() -> None:
    detokenizer = WindowDetokenizer(lambda tokens: REPLACEMENT * len(tokens))
    pieces = [detokenizer.add(7) for _ in range(2 * (MAX_WAITING_TOKENS + 1))]
    assert pieces == 2 * [*[""] * MAX_WAITING_TOKENS, REPLACEMENT * (MAX_WAITING_TOKENS + 1)]


def test_the_window_stays_small_and_keeps_the_token_before() -> None:
    """The space before a token may depend on the token before it."""
    seen: list[int] = []

    def spaced(tokens: list[int]) -> str:
        seen.append(len(tokens))
        return " ".join(map(str, tokens))

    detokenizer = WindowDetokenizer(spaced)
    assert "".join(detokenizer.add(token) for token in range(50)) == " ".join(map(str, range(50)))
    assert max(seen) == 2


# ---------------------------------------------------------------- stop strings
ALPHABET = "ab🦊"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)
PIECES = st.lists(st.text(ALPHABET, max_size=5), max_size=12)


def reference(text: str, stops: list[str], exempt: int) -> tuple[str, bool]:
    """Character by character: the first stop string that is complete cuts, the longest at a tie;
    none ends within the first `exempt` characters."""
    for end in range(exempt + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(max_examples=150)
@given(pieces=PIECES, stops=STOPS, early=st.integers(0, 6))
def test_pieces_show_what_the_whole_text_shows(
    pieces: list[str], stops: list[str], early: int
) -> None:
    whole, is_stopped = reference("".join(pieces), stops, len("".join(pieces[:early])))
    matcher = StopMatcher(stops)
    shown = ""
    for place, piece in enumerate(pieces):
        shown += matcher.add(piece, may_stop=place >= early)
        assert whole.startswith(shown), "a part of a stop string leaked"
    assert matcher.is_stopped == is_stopped
    assert shown + matcher.finish() == whole


@settings(max_examples=80)
@given(pieces=PIECES, stops=STOPS, early=st.integers(0, 12))
def test_nothing_is_held_back_without_need(pieces: list[str], stops: list[str], early: int) -> None:
    matcher = StopMatcher(stops)
    shown, came = "", ""
    for place, piece in enumerate(pieces):
        shown += matcher.add(piece, may_stop=place >= early)
        came += piece
        if matcher.is_stopped:
            return
        held = came[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "found"),
    [
        (["abcd", "c"], (3, "c")), (["c", "abcd"], (3, "c")), (["bc", "c", "abc"], (1, "abc")),
        (["abc", "bc", "c"], (1, "abc")), (["f"], None), ([], None),
    ],
)  # fmt: skip
def test_the_first_stop_string_is_complete_first_and_the_longest(
    stops: list[str], found: tuple[int, str] | None
) -> None:
    assert find_first("xabcde", stops) == found


@pytest.mark.parametrize(
    ("pending", "texts", "count"),
    [("xab", ["abc"], 2), ("xab", ["ab"], 0), ("aab", ["aabc", "abx"], 3), ("xa", [], 0),
     ("aa", ["ab"], 1)],
)  # fmt: skip
def test_a_possible_beginning_is_undecided(pending: str, texts: list[str], count: int) -> None:
    assert undecided(pending, texts) == count


# ---------------------------------------------------------------- messages
Message = dict[str, Any]


def called(call_id: Any = None, **function: Any) -> Message:
    return ({} if call_id is None else {"id": call_id}) | {"function": function}


def call(call_id: str | None, name: str = "weather") -> Message:
    return called(call_id, name=name, arguments='{"city": "Rome"}')


@pytest.mark.parametrize("ids", list(CallIds))
@pytest.mark.parametrize(
    "given_id", ["call_0123456789abcdef01234567", "functions.f:3", "Ab3dE6gH9"]
)
def test_results_find_their_calls_under_ids_that_fit(ids: CallIds, given_id: str) -> None:
    messages: list[Message] = [
        {"role": "assistant", "content": None, "tool_calls": [call(given_id), call("z", "time")]},
        {"role": "tool", "tool_call_id": "z", "content": "noon"},
        {"role": "tool", "tool_call_id": given_id, "content": "rain"},
    ]
    said, second, first = plain_messages(messages, ids)
    assert said["content"] == ""
    made = [one["id"] for one in said["tool_calls"]]
    assert (made[0] == given_id) is ids.fits(given_id)
    assert all(ids.fits(one) for one in made)
    assert len(set(made)) == 2
    assert [first["tool_call_id"], second["tool_call_id"]] == made
    assert (first["name"], second["name"]) == ("weather", "time")
    assert said["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    text = with_text_arguments([said])[0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(text) == {"city": "Rome"}


def test_calls_and_results_without_ids_go_by_their_order() -> None:
    messages: list[Message] = [
        {"role": "assistant", "tool_calls": [call(None), call(None, "time")]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "one too many"},
        {"role": "assistant", "tool_calls": [call(None)]},
    ]
    said, rain, noon, odd, again = plain_messages(messages)
    made = [one["id"] for one in [*said["tool_calls"], *again["tool_calls"]]]
    assert [rain["tool_call_id"], noon["tool_call_id"]] == made[:2]
    assert len(set(made)) == 3
    assert (rain["name"], noon["name"]) == ("weather", "time")
    assert odd == {"role": "tool", "content": "one too many"}


def test_result_without_an_id_goes_to_the_next_call_of_its_name() -> None:
    called: list[dict[str, Any]] = [
        {"function": {"name": name, "arguments": {}}} for name in ("f", "g", "g")
    ]
    results: list[dict[str, Any]] = [
        {"role": "tool", "name": "g", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "name": "other", "content": "3"},
    ]
    message = {"role": "assistant", "tool_calls": called}
    said, *answers = plain_messages([message, *results])
    first, second, third = (call["id"] for call in said["tool_calls"])
    assert [one["tool_call_id"] for one in answers] == [second, first, third]
    assert [one["name"] for one in answers] == ["g", "f", "other"]


def test_results_belong_to_the_latest_calls_and_each_to_one() -> None:
    messages: list[Message] = [
        {"role": "assistant", "tool_calls": [called("a", name="f")]},
        {"role": "assistant", "tool_calls": [called("b", name="g"), called("c", name="h")]},
        {"role": "tool", "tool_call_id": "a", "content": "too late"},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "name": "own", "content": "3"},
    ]
    assert plain_messages(messages)[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "too late"},
        {"role": "tool", "tool_call_id": "c", "content": "1", "name": "h"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "tool_call_id": "b", "content": "3", "name": "own"},
    ]


def test_messages_become_plain_and_keep_what_else_they_say() -> None:
    given: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "x": 1},
        {"role": "system", "content": None},
        {"role": "assistant", "tool_calls": None},
    ]
    assert plain_messages(given) == [
        {"role": "user", "content": "ab", "x": 1},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    assert given[1] == {"role": "system", "content": None}, "the request's own stay as they are"


@pytest.mark.parametrize(
    "content", [5, {}, [{"type": "poem"}], [{"text": "a"}, {"text": 5}], [{"text": "a"}, "b"]]
)
def test_content_that_is_no_text_is_refused_C7(content: Any) -> None:
    with pytest.raises(
        RemoteError, match=r"^the content of a message must be text, not "
    ) as caught:
        plain_messages([{"role": "user", "content": content}])
    assert caught.value.code is ErrorCode.INVALID_REQUEST


LOOK = {"type": "text", "text": "look: "}


@pytest.mark.parametrize(
    ("kind", "mark"),
    [("image", "image"), ("image_url", "image"), ("input_image", "image"), ("file", "file"),
     ("input_audio", "audio"), ("document", "document")],
)  # fmt: skip
def test_what_is_no_text_is_marked_but_in_the_clients_last_message(kind: str, mark: str) -> None:
    part = {"type": kind, "data": b"x"}
    answered = {"role": "assistant", "content": "a"}
    result = {"role": "tool", "content": [part]}
    asked = {"role": "user", "content": "q"}
    picture: Message = {"role": "user", "content": [LOOK, part]}
    said, changes = without_media([picture, answered, asked, result])
    assert said[0]["content"] == [LOOK, {"type": "text", "text": f"[{mark}: not shown]"}]
    assert said[3]["content"] == [{"type": "text", "text": f"[{mark}: not shown]"}]
    assert changes == (f"what the model does not take was given as [{mark}: not shown]",)
    assert said[1:3] == [answered, asked]
    assert without_media([answered, picture, result])[1] == changes, "an agent goes on"
    for end in ([], [answered], [{"role": "system", "content": "s"}]):
        with pytest.raises(RemoteError, match=r"messages\[1\]\.content\[1\]: this model does "):
            without_media([answered, picture, *end])
    picture["content"][1] = part | {"at": "input[7]"}
    with pytest.raises(RemoteError, match=r"^input\[7\]: this model does not take ") as caught:
        without_media([picture], "install it")
    assert caught.value.message.endswith("; install it" if mark == "image" else "; send text")
    assert caught.value.detail == {"parameter": "input[7]"}


def test_an_unknown_part_is_no_media() -> None:
    messages = [{"role": "user", "content": [{"type": "poem"}, LOOK]}]
    assert without_media(messages) == (messages, ())


# ---------------------------------------------------------------- chats that do not fit


def test_a_template_is_not_asked_any_longer_than_it_may_take() -> None:
    """However slow it is: what it refused, it refuses in its own words."""
    now_s = 0.0
    asked: list[Any] = []

    def refuse(messages: list[Message]) -> str:
        nonlocal now_s
        now_s += 4.0
        asked.append(messages)
        raise ValueError(f"number {len(asked)}")

    chat = [{"role": role, "content": "x"} for role in ("system", "user", "user", "tool") * 2]
    with pytest.raises(ValueError, match="number 1"):
        fit(chat, refuse, lambda: now_s)
    assert len(asked) == 3
    with pytest.raises(ValueError, match="number 4"):
        fit(chat, refuse, lambda: 0.0)
    assert len(asked) < 3 + 1 + len(STEPS)


def test_running_out_of_memory_is_no_refusal() -> None:
    asked = []

    def burst(messages: list[Message]) -> str:
        asked.append(messages)
        raise MemoryError

    with pytest.raises(MemoryError):
        fit([{"role": role, "content": "x"} for role in ("user", "user")], burst)
    assert len(asked) == 1


def _answer(text: str, *ids: str, **more: Any) -> Message:
    calls = {"tool_calls": [{"id": one, "function": {"name": "f"}} for one in ids]} if ids else {}
    return {"role": "assistant", "content": text, **calls, **more}


def _result(call_id: str, text: str = "r") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


ASKED = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("given", "fitted"),
    [
        ([ASKED, _answer("a", "1", "2", reasoning_content="t"), _result("2"), _result("1"),
          _result("3"), ASKED],
         [ASKED, _answer("a", "1", reasoning_content="t"), _result("1"), _answer("", "2"),
          _result("2"), _result("3"), ASKED]),
        ([ASKED, _answer("a", "1", "2")], [ASKED, _answer("a", "1"), _answer("", "2")]),
    ],
    ids=["with results", "without"],
)  # fmt: skip
def test_calls_are_given_one_by_one(given: list[Message], fitted: list[Message]) -> None:
    def render(messages: list[Message]) -> str:
        assert all(len(message.get("tool_calls", ())) < 2 for message in messages)
        return json.dumps(messages)

    assert fit(given, render).messages == fitted


def test_neighbours_of_one_role_are_joined_with_all_that_they_say() -> None:
    def render(messages: list[Message]) -> str:
        roles = [message["role"] for message in messages if message["role"] != "tool"]
        assert all(one != other for one, other in pairwise(roles))
        return json.dumps(messages)

    given = [
        ASKED | {"name": "ann"}, ASKED | {"name": "bob"}, _answer("a"), _answer("", "1"),
        _answer("b", "2", reasoning_content="t"), _result("1"), _result("2"), ASKED,
    ]  # fmt: skip
    assert fit(given, render).messages == [
        {"role": "user", "content": "q\n\nq"}, _answer("a\n\nb", "1", "2", reasoning_content="t"),
        _result("1"), _result("2"), ASKED,
    ]  # fmt: skip


def test_a_long_chat_is_fitted_in_linear_time() -> None:
    """CPU time of this thread alone; squared, each of these takes minutes."""
    begun_s = time.thread_time()
    for roles in (("user", "user"), ("system", "tool"), ("user", "system")):
        chat = [{"role": roles[n % 2], "content": f"word{n} " * 60} for n in range(10_000)]
        for most in (1, 0):
            with suppress(ValueError):
                fit(chat, partial(_rendered, most=most))
        fit(chat, lambda messages: _rendered(messages)[:100_000])
    assert time.thread_time() - begun_s < 10.0


def _rendered(messages: list[Message], most: int = 10_000) -> str:
    if len(messages) > most:
        raise ValueError
    return "".join(message["content"] for message in messages)


@pytest.mark.parametrize(
    ("arguments", "plain"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("{", "{"), ("[" * 100_000, "[" * 100_000), ({"b": 2},) * 2],
    ids=["map", "empty", "half", "deep", "not text"],
)
def test_arguments_are_maps_if_they_can_be(arguments: Any, plain: Any) -> None:
    messages = [{"role": "assistant", "tool_calls": [called("i", name="f", arguments=arguments)]}]
    [message] = plain_messages(messages)
    assert message["tool_calls"] == [
        {"type": "function", "id": "i", "function": {"name": "f", "arguments": plain}}
    ]


def test_arguments_are_text_for_templates_that_need_it() -> None:
    calls = [called("i", name="f", arguments={"a": "é"}), called("j", arguments="x"), {"id": 5}]
    messages: list[Message] = [
        {"role": "user"}, {"role": "assistant", "tool_calls": calls, "x": 1}
    ]  # fmt: skip
    as_text = called("i", name="f", arguments='{"a": "é"}')
    assert with_text_arguments(messages) == [
        {"role": "user"}, {"role": "assistant", "x": 1, "tool_calls": [as_text, *calls[1:]]}
    ]  # fmt: skip


def without_template(**values: Any) -> RequestBody:
    messages = [{"role": "user", "content": "Hi"}]
    return RequestBody.from_wire({"messages": messages, "messages_as_text": True} | values)


def test_texts_become_paragraphs_and_empty_ones_leave_no_gap() -> None:
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    contents = ("Be brief.", "", None, parts)
    messages = [{"role": "user", "content": content} for content in contents]
    assert text_of_messages(without_template(messages=messages)) == "Be brief.\n\nin parts"


OFFERED = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("asked", "problem", "parameter"),
    [
        ({"messages_as_text": False}, ": send prompt instead of messages", "messages"),
        ({"chat_template_kwargs": {"enable_thinking": False}},
         ", which chat_template_kwargs are for", "chat_template_kwargs"),
        ({"tools": OFFERED}, ", which tools are shown with", "tools"),
        # What is said first is what helps with all of them.
        ({"messages_as_text": False, "chat_template_kwargs": {"a": 1}, "tools": OFFERED},
         ": send prompt instead of messages", "messages"),
    ],
)  # fmt: skip
def test_a_request_that_needs_a_template_is_told_that_there_is_none(
    asked: dict[str, Any], problem: str, parameter: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        text_of_messages(without_template(**asked))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message == f"this model has no chat template{problem}"
    assert caught.value.detail == {"parameter": parameter}


# ---------------------------------------------------------------- rendering for people who join
def asked(text: str, *, number: int = 1, **parameters: Any) -> Render:
    return Render(
        number=number, opening="", parameters=parameters, seed=5, fingerprint="f",
        delivered=pack_tokens(encode_text(text)),
    )  # fmt: skip


def rendering() -> tuple[Rendering, list[Rendered]]:
    sent: list[Rendered] = []
    engine: Any = SimpleNamespace(text=FakeTextCodec())
    facts = replace(FACTS, adapters={"one": "f with one"})
    return Rendering(engine, facts, sent.append), sent


def shown(answer: Rendered) -> list[tuple[Channel, str]]:
    return [(body.channel, body.text) for body in map(read_body, answer.bodies)]


def test_each_tool_call_is_a_piece_of_its_own() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    one = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    work, sent = rendering()
    work.begin(asked(f"well{one}{one}", tools=tools))
    work.advance()
    content, *calls = shown(sent[0])
    assert content == (Channel.CONTENT, "well")
    assert [channel for channel, _ in calls] == [Channel.TOOL_CALL] * 2
    assert [json.loads(text)["function"]["name"] for _, text in calls] == ["look"] * 2


@pytest.mark.parametrize(("text", "seen"), [("one, EN", "one, "), ("EN", "")])
def test_rendering_holds_back_like_the_stream(text: str, seen: str) -> None:
    work, sent = rendering()
    work.begin(asked(text, stop=["END"]))
    work.advance()
    assert shown(sent[0]) == [(Channel.CONTENT, seen)], "there is always a piece, for the tokens"


@pytest.mark.parametrize(("echo", "seen"), [(True, " there"), (False, "there")])
def test_an_answer_behind_a_prompt_that_was_shown_keeps_its_first_space(
    echo: bool, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def detokenizer(self: FakeTextCodec) -> ByteDetokenizer:
        return ByteDetokenizer(TOKEN_BYTES, strips_first_space=True)

    monkeypatch.setattr(FakeTextCodec, "detokenizer", detokenizer)
    work, sent = rendering()
    work.begin(replace(asked(" there", echo=echo), before=pack_tokens(encode_text("i"))))
    work.advance()
    assert shown(sent[0]) == [(Channel.CONTENT, seen)]


def test_a_long_answer_takes_several_turns_and_later_ones_wait() -> None:
    work, sent = rendering()
    work.begin(asked("x" * (2 * TOKENS_PER_TURN + 1), number=1))
    work.begin(asked("y", number=2))
    turns = []
    while work.is_busy:
        work.advance()
        turns.append(len(sent))
    assert turns == [0, 0, 1, 2]
    assert [answer.number for answer in sent] == [1, 2]
    assert shown(sent[0]) == [(Channel.CONTENT, "x" * (2 * TOKENS_PER_TURN + 1))]


def test_an_answer_with_an_adapter_is_rendered() -> None:
    work, sent = rendering()
    work.begin(replace(asked("x"), fingerprint="f with one"))
    work.advance()
    assert shown(sent[0]) == [(Channel.CONTENT, "x")]


def test_an_answer_of_another_engine_or_another_version_is_not_rendered() -> None:
    work, sent = rendering()
    work.begin(replace(asked("x"), fingerprint="g"))
    work.begin(asked("x", number=2, colour="red"))
    assert [(answer.number, answer.bodies) for answer in sent] == [(1, []), (2, [])]
    assert not work.is_busy


@pytest.mark.parametrize("has_row", [True, False])
def test_the_loop_renders_between_its_steps_and_does_not_wait_while_it_does(has_row: bool) -> None:
    bench = Bench()
    if has_row:
        bench.start(A)
        bench.engine.results = [StepResult(tokens=[x(A)]) for _ in range(2)]
    bench.turn(asked("x" * (TOKENS_PER_TURN + 1)))
    assert (bench.loop.wait_s() == 0.0, bench.has_stepped) == (True, has_row)
    bench.turn()
    assert (bench.loop.wait_s() == 0.0, bench.has_stepped) == (False, has_row)
    assert len([one for one in bench.said if isinstance(one, Rendered)]) == 1
