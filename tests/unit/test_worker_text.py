"""The threads beside the step loop that render templates and tokenise."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import encode, encode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.worker_messages import Acceptance, Rejected, Resume
from mlxsup.worker.engine import Prompt
from mlxsup.worker.engines.fake.text import FakeTextCodec
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text_threads import LONG_BODY_BYTES, Refused, TextThreads, Tokenised

from support.eventually import eventually

A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)


class ScriptedCodec(FakeTextCodec):
    """Encodes to the prompt's length; can be held, or told to raise.

    Attributes:
        for_long: the twin that was asked for; held by its own gate.
        form: what every grammar is, and what each was asked for.
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

    def grammar(self, body: RequestBody, opening: str) -> Grammar | None:
        self.asked.append((body.response_format, opening))
        return self.form


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
        """Waits for that many wakes and takes what is there."""
        for _ in range(count):
            assert self.wakes.acquire(timeout=60)
        return self.threads.take()


def join(threads: TextThreads) -> None:
    for lane in threads.lanes:
        lane.thread.join(60)
        assert not lane.thread.is_alive()


@pytest.fixture
def text() -> Iterator[Text]:
    made = Text()
    yield made
    made.codec.gate.set()
    if made.codec.for_long is not None:
        made.codec.for_long.gate.set()
    made.threads.close()
    join(made.threads)


def test_encodes_beside_the_calling_thread_and_wakes_it_A7(text: Text) -> None:
    text.submit(A, "abc")
    (result,) = text.results(1)
    assert isinstance(result, Tokenised)
    assert (result.key, result.prompt.tokens) == (A, [3])
    assert threading.get_ident() not in text.codec.threads


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RemoteError(ErrorCode.INVALID_REQUEST, "no template"), ErrorCode.INVALID_REQUEST),
        (KeyError("content"), ErrorCode.INVALID_REQUEST),
        (RecursionError(), ErrorCode.INVALID_REQUEST),
        (MemoryError(), ErrorCode.INSUFFICIENT_MEMORY),
    ],
)
def test_a_template_error_is_the_requests_own_G6(
    text: Text, raised: BaseException, code: ErrorCode
) -> None:
    text.codec.raises = raised
    text.submit(A, "abc")
    (result,) = text.results(1)
    assert isinstance(result, Refused)
    assert result.error.code is code
    text.codec.raises = None
    text.submit(B, "abcd")
    assert isinstance(text.results(1)[0], Tokenised)


def test_any_template_error_travels_G6(text: Text) -> None:
    text.codec.raises = ValueError("half a letter: \ud83e")
    text.submit(A, "abc")
    (result,) = text.results(1)
    assert isinstance(result, Refused)
    assert result.error.message == (
        "the prompt could not be prepared: ValueError: half a letter: ?"
    )
    encode(Rejected(key=A, error=result.error.to_wire()))


def test_a_body_that_is_not_msgpack_is_refused_C7(text: Text) -> None:
    text.threads.submit(A, b"\xc1")
    (result,) = text.results(1)
    assert isinstance(result, Refused)
    assert result.error.code is ErrorCode.INVALID_REQUEST


def hold_with_a_first_one(text: Text) -> None:
    text.codec.gate.clear()
    text.submit(A, "first")
    eventually(lambda: text.threads.busy() is not None)


def test_a_forgotten_request_is_not_begun_G5(text: Text) -> None:
    hold_with_a_first_one(text)
    text.submit(B, "second")
    text.threads.forget(B)
    text.submit(C, "third")
    text.codec.gate.set()
    assert [result.key for result in text.results(2)] == [A, C]
    assert text.codec.seen == ["first", "third"]


def long_prompt(bodies: float = 1) -> str:
    return "L" * int(LONG_BODY_BYTES * bodies + 1)


def hold_with_a_long_one(text: Text) -> ScriptedCodec:
    """Returns the codec of the long ones, which waits at its gate."""
    text.submit(A, long_prompt())
    eventually(lambda: text.codec.for_long is not None and text.codec.for_long.seen)
    assert text.codec.for_long is not None
    return text.codec.for_long


def test_small_prompts_never_wait_for_long_ones_G7(text: Text) -> None:
    for_long = hold_with_a_long_one(text)
    text.submit(B, long_prompt())
    small = [RequestKey(number) for number in range(10, 20)]
    for key in small:
        text.submit(key, "small")
    assert [result.key for result in text.results(10)] == small, "in order, the long ones held"
    for_long.gate.set()
    assert [result.key for result in text.results(2)] == [A, B]


def test_long_prompts_never_wait_for_small_ones_G7(text: Text) -> None:
    hold_with_a_first_one(text)
    text.submit(B, long_prompt())
    eventually(lambda: text.codec.for_long is not None)
    assert text.codec.for_long is not None
    text.codec.for_long.gate.set()
    assert [result.key for result in text.results(1)] == [B]
    text.codec.gate.set()
    assert [result.key for result in text.results(1)] == [A]


def test_a_long_prompt_is_overtaken_by_shorter_ones_but_not_for_ever_G7(text: Text) -> None:
    for_long = hold_with_a_long_one(text)
    text.submit(B, long_prompt(4))
    shorter = [RequestKey(number) for number in range(10, 20)]
    for key in shorter:
        text.submit(key, long_prompt())
    for_long.gate.set()
    order = [result.key for result in text.results(12)]
    assert order.index(B) == 3, "A had begun, and two went first"
    assert [key for key in order if key >= 10] == shorter


def test_the_oldest_preparation_is_the_busy_one(text: Text) -> None:
    assert text.threads.busy() is None
    for_long = hold_with_a_long_one(text)
    text.codec.gate.clear()
    text.submit(B, "small")
    eventually(lambda: text.codec.seen)
    busy = text.threads.busy()
    assert busy is not None
    assert busy[0] == A
    for_long.gate.set()
    text.results(1)
    busy = text.threads.busy()
    assert busy is not None
    assert busy[0] == B


def test_slow_preprocessing_is_logged_without_its_text_G4(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter([0.0, 0.0, 2.5, 2.5, 2.5])
    woken = threading.Event()
    threads = TextThreads(ScriptedCodec(), woken.set, clock=lambda: next(times))
    threads.submit(A, encode_body(RequestBody(prompt="secret words")))
    threads.start()
    assert woken.wait(60)
    eventually(lambda: "slow preprocessing key=1 tokens=1 seconds=2.500" in caplog.text)
    assert "secret" not in caplog.text
    threads.close()
    join(threads)


def test_an_odd_refusal_is_logged_G6(text: Text) -> None:
    text.codec.raises = MemoryError("x")
    text.submit(A, "abc")
    text.codec.raises, (refused,) = KeyError("y" * 400), text.results(1)
    assert isinstance(refused, Refused)
    assert (refused.key, refused.error.message) == (
        A,
        "there is not enough memory to prepare the prompt",
    )
    text.submit(B, "abc")
    (refused,) = text.results(1)
    assert isinstance(refused, Refused)
    said = "the prompt could not be prepared: KeyError: '" + "y" * 299
    assert (refused.key, refused.error.message) == (B, said)


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
    (result,) = text.results(1)
    assert isinstance(result, Tokenised)
    assert result.prompt == Prompt(tokens=[5, 6], opening="<think>")
    assert result.body == RequestBody(prompt_tokens=[5, 6], max_tokens=9, stop=["z"], seed=7)
    assert result.resume is resume
    assert text.codec.seen == []


def test_a_form_is_compiled_for_the_part_that_the_prompt_opened(text: Text) -> None:
    text.codec.form = Grammar(None, [])
    form = {"type": "json_object"}
    body = RequestBody(prompt="abc", response_format=form)
    text.threads.submit(A, encode_body(body))
    (result,) = text.results(1)
    assert isinstance(result, Tokenised)
    assert result.prompt == Prompt(tokens=[3], grammar=text.codec.form)
    assert text.codec.asked == [(form, "")]
    text.submit(B, "abc")
    (result,) = text.results(1)
    assert isinstance(result, Tokenised)
    assert (result.prompt.grammar, result.body) == (None, RequestBody(prompt="abc"))
    assert len(text.codec.asked) == 1


def test_threads_are_daemons_with_names_and_are_alive_together() -> None:
    threads = TextThreads(ScriptedCodec(), lambda: None)
    assert [(lane.thread.name, lane.thread.daemon) for lane in threads.lanes] == [
        ("text", True),
        ("long text", True),
    ]
    assert not threads.is_alive()
    threads.start()
    assert threads.is_alive()
    short, _ = threads.lanes
    short.close()
    short.thread.join(60)
    assert not threads.is_alive(), "one is not enough"
    threads.close()
    join(threads)


def test_closed_threads_begin_nothing() -> None:
    codec, woken = ScriptedCodec(), threading.Semaphore(0)
    threads = TextThreads(codec, woken.release)
    codec.gate.clear()
    threads.start()
    threads.submit(A, encode_body(RequestBody(prompt="first")))
    threads.submit(B, encode_body(RequestBody(prompt="second")))
    eventually(lambda: codec.seen)
    threads.close()
    codec.gate.set()
    join(threads)
    assert codec.seen == ["first"]
    assert [result.key for result in threads.take()] == [A]
