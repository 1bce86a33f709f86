"""The helper thread for templates and tokenisation."""

import threading
from collections.abc import Iterator

import pytest
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import encode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.worker.engine import Prompt
from mlxsup.worker.text import BYTES_PER_TURN, Refused, TextThread, Tokenised
from support.eventually import eventually

A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)


class ScriptedCodec:
    """Encodes to the prompt's length; can be held, or told to raise."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.raises: BaseException | None = None
        self.threads: set[int] = set()
        self.seen: list[str] = []

    def encode(self, body: RequestBody) -> Prompt:
        self.threads.add(threading.get_ident())
        assert body.prompt is not None
        self.seen.append(body.prompt[:8])
        assert self.gate.wait(20)
        if self.raises is not None:
            raise self.raises
        return Prompt(tokens=[len(body.prompt)])

    def detokenizer(self):
        raise NotImplementedError


class Text:
    """A running text thread with what it produced."""

    def __init__(self) -> None:
        self.codec = ScriptedCodec()
        self.wakes = threading.Semaphore(0)
        self.thread = TextThread(self.codec, self.wakes.release)
        self.thread.start()

    def submit(self, key: RequestKey, prompt: str) -> None:
        self.thread.submit(key, encode_body(RequestBody(prompt=prompt)))

    def results(self, count: int) -> list[Tokenised | Refused]:
        """Waits for so many wakes and takes what is there."""
        for _ in range(count):
            assert self.wakes.acquire(timeout=10)
        return self.thread.take()


@pytest.fixture
def text() -> Iterator[Text]:
    made = Text()
    yield made
    made.codec.gate.set()
    made.thread.close()
    made.thread._thread.join(10)
    assert not made.thread._thread.is_alive()


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
def test_what_a_template_raises_is_the_requests_own_error_G6(text: Text, raised, code) -> None:
    text.codec.raises = raised
    text.submit(A, "abc")
    (result,) = text.results(1)
    assert isinstance(result, Refused)
    assert result.error.code is code
    text.codec.raises = None
    text.submit(B, "abcd")
    assert isinstance(text.results(1)[0], Tokenised)


def test_a_body_that_is_not_msgpack_is_refused_C7(text: Text) -> None:
    text.thread.submit(A, b"\xc1")
    (result,) = text.results(1)
    assert isinstance(result, Refused)
    assert result.error.code is ErrorCode.INVALID_REQUEST


def hold_with_a_first_one(text: Text) -> None:
    text.codec.gate.clear()
    text.submit(A, "first")
    eventually(lambda: text.thread.busy() is not None)


def test_a_forgotten_request_is_not_begun_G5(text: Text) -> None:
    hold_with_a_first_one(text)
    text.submit(B, "second")
    text.thread.forget(B)
    text.submit(C, "third")
    text.codec.gate.set()
    assert [result.key for result in text.results(2)] == [A, C]
    assert text.codec.seen == ["first", "third"]


def test_small_prompts_overtake_a_large_one_but_not_for_ever_G7(text: Text) -> None:
    hold_with_a_first_one(text)
    text.submit(B, "L" * (3 * BYTES_PER_TURN))
    for number in range(10, 20):
        text.submit(RequestKey(number), f"small{number}")
    text.codec.gate.set()
    order = [result.key for result in text.results(12)]
    assert order.index(B) == 3 or order.index(B) == 4
    assert [key for key in order if key >= 10] == list(range(10, 20))


def test_slow_preprocessing_is_logged_without_its_text_G4(caplog) -> None:
    times = iter([0.0, 0.0, 2.5, 2.5, 2.5])
    woken = threading.Event()
    thread = TextThread(ScriptedCodec(), woken.set, clock=lambda: next(times))
    thread.submit(A, encode_body(RequestBody(prompt="secret words")))
    thread.start()
    assert woken.wait(10)
    eventually(lambda: "slow preprocessing key=1 tokens=1 seconds=2.500" in caplog.text)
    assert "secret" not in caplog.text
    thread.close()
    thread._thread.join(10)
