"""The bookkeeping of a client: pieces, ends, errors, silence, without sockets and clock."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgpack
import pytest

from mlxsup.client.errors import ConnectionLost, RequestError, SubscriptionClosed
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.client.session import BUSY_LIMIT_S, DOUBT_S, SILENCE_LIMIT_S, Item, Outcome, Session
from mlxsup.client.tool_calls import NO_ARGUMENTS, NO_CALL
from mlxsup.client.vectors import embeddings_of, ranked, ranking_of
from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    Alive,
    Cancel,
    ClientDelta,
    Deltas,
    Done,
    Event,
    Failed,
    Reply,
    Timings,
    Usage,
)
from mlxsup.protocol.client_messages import Notice as NoticeMessage
from mlxsup.protocol.codec import Decoder
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestId, pack_tokens
from mlxsup.protocol.message import Logprobs, Message, TokenLogprob
from mlxsup.protocol.pooling import pack_vector
from mlxsup.protocol.states import Channel, FinishReason, NoticeKind

from support.client import pieces

A, B, C, UNKNOWN = map(RequestId, ("a", "b", "c", "unknown"))
CANCELS_A = [Cancel(id=A)]


class Box:
    """An inbox that is a list."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)


class Open:
    """A session with a stream `a`, a command `b` and a subscription `c`."""

    def __init__(self) -> None:
        self.session = Session()
        self.stream, self.command, self.subscription = self.boxes = Box(), Box(), Box()
        self.session.open_stream(A, self.stream, 0.0)
        self.session.open_command(B, self.command, 0.0)
        self.session.open_command(C, self.subscription, 0.0, is_subscription=True)

    def receive(self, message: Message, now: float = 0.0) -> list[Message]:
        """Deliver what a message brings, and return what is sent."""
        return self.take(self.session.receive(pieces.frame_of(message), now))

    def take(self, outcome: Outcome) -> list[Message]:
        for inbox, item in outcome.deliveries:
            inbox.put(item)
        decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
        return [decoder.decode(frames) for frames in outcome.sends]

    def lose(self, error: ConnectionLost) -> None:
        self.take(Outcome(deliveries=self.session.lose(error)))

    @property
    def result(self) -> Result:
        """The last item of the stream."""
        result = self.stream.items[-1]
        assert isinstance(result, Result), result
        return result

    def error(self, box: Box | None = None) -> tuple[str, str]:
        """Return code and message of the last item of an inbox."""
        error = (box or self.stream).items[-1]
        assert isinstance(error, RequestError), error
        return str(error.code), error.message


@pytest.fixture
def opened() -> Open:
    return Open()


def piece(seq: int, text: str = "", *, tokens: bytes = b"", id: str = A, **more: Any) -> Deltas:
    return Deltas(deltas=[pieces.piece(id, seq, text, tokens=tokens, **more)])


def call(seq: int, line: str) -> Deltas:
    return piece(seq, line, channel=Channel.TOOL_CALL)


def done(seq: int, **more: Any) -> Done:
    return Done(seq=seq, **({"id": A, "finish_reason": FinishReason.STOP} | more))


# ---------------------------------------------------------------- what comes


def logprobs_of(token: int) -> list[Logprobs]:
    return [Logprobs(chosen=TokenLogprob(token=token, logprob=-1.0, text="x"))]


def test_result_holds_all_that_came(opened: Open) -> None:
    opened.receive(piece(0, "so", channel=Channel.PROMPT, logprobs=logprobs_of(3)))
    opened.receive(piece(1, "hm", channel=Channel.REASONING))
    opened.receive(piece(2, "a", tokens=pack_tokens([7]), logprobs=logprobs_of(7)))
    opened.receive(piece(3, "b", tokens=pack_tokens([8, 9]), logprobs=logprobs_of(8), stop="x"))
    opened.receive(piece(4, stop_token=9))
    opened.receive(call(5, '{"function": 1}\n'))
    usage = Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3)
    timings = Timings(queued_s=1.0, total_s=2.0)
    told = {"usage": usage, "timings": timings, "seed": 11, "resumed": 2, "warnings": ["mind"]}
    assert opened.receive(done(6, finish_reason=FinishReason.LENGTH, **told)) == []
    assert opened.stream.items[:-1] == [
        Delta(text="so", token_ids=[], channel=Channel.PROMPT, logprobs=logprobs_of(3)),
        Delta(text="hm", token_ids=[], channel=Channel.REASONING),
        Delta(text="a", token_ids=[7], logprobs=logprobs_of(7)),
        Delta(text="b", token_ids=[8, 9], logprobs=logprobs_of(8)),
        Delta(text="", token_ids=[]),
        Delta(text='{"function": 1}\n', token_ids=[], channel=Channel.TOOL_CALL),
    ]
    result = opened.result
    assert (result.text, result.reasoning, result.token_ids) == ("ab", "hm", [7, 8, 9])
    assert (result.prompt, result.prompt_logprobs) == ("so", logprobs_of(3))
    assert result.logprobs == [*logprobs_of(7), *logprobs_of(8)]
    assert (result.usage, result.timings) == (usage, timings)
    assert (result.stop, result.stop_token) == ("x", 9)
    assert (result.finish_reason, result.seed, result.resumed) == (FinishReason.LENGTH, 11, 2)
    assert result.tool_calls[0]["function"] == {"name": "", "arguments": '{"function": 1}'}
    assert result.warnings == ["mind", NO_CALL]
    again = Box()
    opened.session.open_stream(A, again, 0.0)
    opened.receive(piece(0, "x"))
    assert (len(opened.stream.items), len(again.items)) == (7, 1), "a new request"


def test_each_message_reaches_its_kind_alone_D6(opened: Open) -> None:
    detail = {"position": 1, "reason": "rows"}
    messages: list[Message] = [
        NoticeMessage(id=id, kind=NoticeKind.QUEUED, detail=detail) for id in (A, B, C, UNKNOWN)
    ]
    messages += [Reply(id=C, value={}), Reply(id=UNKNOWN, value={}), done(0, id=UNKNOWN)]
    messages += [Event(id=B, value={"n": 3}), Event(id=C, value={"n": 4}), piece(0, "x", id=B)]
    messages += [piece(0, "x", id=UNKNOWN), Reply(id=B, value={"n": 1}), Reply(id=B, value={})]
    for message in messages:
        assert opened.receive(message) == []
    notice = Notice(kind=NoticeKind.QUEUED, detail=detail)
    assert [box.items for box in opened.boxes] == [[notice], [{"n": 1}], [{"n": 4}]]
    assert len(opened.session) == 2, "a reply ends a command, and no subscription"


GOOD_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_CALLS = [
    "not JSON", "[1, 2]", "7", "null", "{}", '{"function": "f"}',
    '{"function": {"name": 1, "arguments": "{}"}}', '{"function": {"name": "f", "arguments": {}}}',
    '{"number": ' + 5000 * "9" + "}", 10_000 * "[",
]  # fmt: skip


@pytest.mark.parametrize("line", NO_CALLS, ids=lambda line: line[:24])
def test_unreadable_tool_call_is_kept_with_a_warning_J2(opened: Open, line: str) -> None:
    opened.receive(call(0, json.dumps(GOOD_CALL) + "\n"))
    opened.receive(call(1, f"{line}\n"))
    opened.receive(done(2, finish_reason=FinishReason.TOOL_CALLS, warnings=["first"]))
    raw = {"id": "", "type": "function", "function": {"name": "", "arguments": line}}
    assert opened.result.tool_calls == [GOOD_CALL, raw]
    assert opened.result.warnings == ["first", NO_CALL]


@pytest.mark.parametrize("arguments", ["not JSON", "[]", ""])
def test_unreadable_arguments_are_kept_with_a_warning(opened: Open, arguments: str) -> None:
    made = GOOD_CALL | {"function": {"name": "f", "arguments": arguments}}
    opened.receive(call(0, json.dumps(made) + "\n"))
    opened.receive(done(1, finish_reason=FinishReason.TOOL_CALLS))
    assert (opened.result.tool_calls, opened.result.warnings) == ([made], [NO_ARGUMENTS])


def test_body_cannot_speak_for_its_piece(opened: Open) -> None:
    body = msgpack.packb({"text": "x", "id": "b", "seq": 9, "tokens": b"1234"})
    opened.receive(Deltas(deltas=[ClientDelta(id=A, seq=0, tokens=b"", body=body)]))
    assert opened.stream.items == [Delta(text="x", token_ids=[])]


# ---------------------------------------------------------------- what goes wrong

HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "half a token": (b"123", b"\x80"),
    "nothing": (b"", b""),
    "no msgpack": (b"", b"\xc1"),
    "cut short": (b"", b"\xa5tex"),
    "bytes that follow": (b"", b"\x80\x80"),
    "no map": (b"", msgpack.packb(["text"])),
    "another's name": (b"", msgpack.packb({"id": "b", "seq": 0, "text": 5})),
    "a text that is none": (b"", msgpack.packb({"text": b"\xff"})),
    "half a character": (b"", b"\x81\xa4text\xa1\xff"),
    "an unknown channel": (b"", msgpack.packb({"channel": "loud"})),
    "deep nesting": (b"", b"\x91" * 5000),
    "an extension": (b"", msgpack.packb({"text": msgpack.ExtType(4, b"xx")})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_unreadable_body_ends_its_stream_alone(opened: Open, name: str) -> None:
    other = Box()
    opened.session.open_stream(UNKNOWN, other, 0.0)
    tokens, body = HOSTILE[name]
    bad = ClientDelta(id=A, seq=0, tokens=tokens, body=body)
    good = [pieces.piece(UNKNOWN, seq, text) for seq, text in enumerate("xy")]
    assert opened.receive(Deltas(deltas=[good[0], bad, good[1]])) == CANCELS_A
    code, message = opened.error()
    assert (code, message.startswith("piece 0 of the stream cannot be read: ")) == (
        "internal",
        True,
    )
    opened.receive(piece(1, "late"))
    assert len(opened.stream.items) == 1
    assert [one.text for one in other.items if isinstance(one, Delta)] == ["x", "y"]


@pytest.mark.parametrize(
    ("second", "came"),
    [(piece(2, "y"), 2), (piece(0, "x"), 0), (done(3), 3)],
    ids=["a gap", "a repeated piece", "an end that counts more"],
)
def test_missing_piece_is_an_error_with_both_numbers_H7(
    opened: Open, second: Message, came: int
) -> None:
    opened.receive(piece(0, "x"))
    assert opened.receive(second) == CANCELS_A
    said = f"piece 1 of the stream is missing; the next one is number {came}"
    assert opened.error() == ("internal", said)
    assert opened.receive(piece(1, "late")) == []
    assert (len(opened.stream.items), len(opened.session)) == (2, 2)


@pytest.mark.parametrize(
    ("bad", "patched"),
    [
        (piece(0, "x", tokens=pack_tokens([1])), "Delta"),
        (piece(0, "x", channel=Channel.REASONING), "Delta"),
        (piece(0, "x"), "unpack_tokens"),
        (done(0), "_Open.result"),
    ],
)
def test_bug_in_the_client_ends_the_streams_that_it_struck(
    opened: Open, bad: Message, patched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(f"mlxsup.client.session.{patched}", broken)
        assert opened.receive(bad) == CANCELS_A
    assert opened.error() == ("internal", "internal error in the client: TypeError: a bug")
    assert opened.command.items == opened.subscription.items == []


FULL = RemoteError(ErrorCode.OVERLOADED, "full", detail={"running": 4})
TWICE = RemoteError(ErrorCode.DUPLICATE_ID, "open already", detail={"id": A})


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Failed(id=A, error=FULL), (FULL.code, "full", True, {"running": 4})),
        (Reply(id=A, value={}),
         ("internal", "the daemon answered a request as a command", False, {})),
    ],
)  # fmt: skip
def test_error_reaches_its_request_alone(opened: Open, message: Message, error: Any) -> None:
    assert opened.receive(Failed(id=UNKNOWN, error=FULL)) == []
    opened.receive(message)
    [seen] = opened.stream.items
    assert isinstance(seen, RequestError)
    assert (seen.code, seen.message, seen.retryable, seen.detail) == error
    assert opened.command.items == opened.subscription.items == []
    assert len(opened.session) == 2


@pytest.mark.parametrize("last", [done(0), Failed(id=A, error=FULL)])
def test_nothing_follows_the_end_of_a_stream(opened: Open, last: Message) -> None:
    for message in (last, last, piece(0, "late")):
        assert opened.receive(message) == []
        assert (len(opened.stream.items), len(opened.session)) == (1, 2)


def test_refused_second_use_of_an_id_leaves_the_first_open_D7(opened: Open) -> None:
    opened.receive(piece(0, "x"))
    assert opened.receive(Failed(id=A, error=TWICE)) == []
    opened.receive(piece(1, "y"))
    opened.receive(done(2))
    assert opened.result.text == "xy"


NO_MAP = RemoteError(ErrorCode.INVALID_REQUEST, "no map")


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pieces.frame_of(Failed(id="", error=NO_MAP)),
         "the daemon could not read a message: no map"),
        (b"\xc1", "the daemon sent an invalid message: "),
    ],
    ids=["an error without an id", "no message"],
)  # fmt: skip
def test_error_of_no_request_ends_everything(opened: Open, frame: bytes, words: str) -> None:
    assert opened.take(opened.session.receive(frame, 0.0)) == CANCELS_A
    for box in opened.boxes:
        code, message = opened.error(box)
        assert (code, message.startswith(words)) == ("internal", True)
    assert len(opened.session) == 0


# ---------------------------------------------------------------- ends


def test_cancel_is_sent_once_while_a_stream_is_open_D6(opened: Open) -> None:
    assert opened.take(opened.session.cancel(UNKNOWN)) == []
    assert opened.take(opened.session.cancel(A)) == CANCELS_A
    assert opened.take(opened.session.cancel(A)) == []
    opened.receive(done(0, finish_reason=FinishReason.CANCELLED))
    assert opened.take(opened.session.cancel(A)) == []


def test_cancelled_subscription_ends_at_once(opened: Open) -> None:
    opened.receive(Event(id=C, value={"n": 1}))
    assert opened.take(opened.session.cancel(C)) == [Cancel(id=C)]
    opened.receive(Event(id=C, value={"n": 2}))
    first, closed = opened.subscription.items
    assert (first, type(closed)) == ({"n": 1}, SubscriptionClosed), "a reader may be waiting"


@pytest.mark.parametrize(
    ("given", "text"),
    [(piece(0, "x", tokens=pack_tokens([0])), "x"),
     (piece(0, '{"id": "ca', tokens=pack_tokens([0]), channel=Channel.TOOL_CALL), "")],
    ids=["text", "half a call"],
)  # fmt: skip
def test_lost_connection_keeps_what_a_cancelled_stream_had_P2(
    opened: Open, given: Deltas, text: str
) -> None:
    opened.receive(given)
    opened.session.cancel(A)
    opened.lose(ConnectionLost("gone", "ipc:///x"))
    assert (opened.result.text, opened.result.finish_reason) == (text, "cancelled")
    assert opened.result.usage.completion_tokens == 1
    assert len(opened.session) == 0


def test_lost_connection_is_an_error_for_each_P2(opened: Open) -> None:
    opened.take(opened.session.cancel(B))
    opened.lose(ConnectionLost("gone", "ipc:///x", "start it", is_turned_away=True))
    errors = [box.items[0] for box in opened.boxes]
    assert len(set(map(id, errors))) == 3, "a traceback belongs to one reader"
    for error in errors:
        assert isinstance(error, ConnectionLost)
        assert (error.message, error.endpoint, error.hint) == ("gone", "ipc:///x", "start it")
        assert (error.is_turned_away, str(error)) == (True, "gone; start it")
    assert (len(opened.session), opened.session.deadline) == (0, None)


def test_closing_cancels_streams_and_ends_commands(opened: Open) -> None:
    opened.receive(piece(0, "x", tokens=pack_tokens([5])))
    assert opened.take(opened.session.close("ipc:///x")) == CANCELS_A
    result = opened.result
    assert (result.text, result.finish_reason, result.seed) == ("x", FinishReason.CANCELLED, None)
    assert result.usage == Usage(completion_tokens=1)
    for box in (opened.command, opened.subscription):
        [error] = box.items
        assert isinstance(error, ConnectionLost)
        assert (str(error), error.endpoint) == ("the client was closed", "ipc:///x")
        assert not error.is_turned_away
    assert len(opened.session) == 0


# ---------------------------------------------------------------- silence


def looks(session: Session, *are_busy: bool) -> list[bool]:
    """Look at a silent supervisor at each deadline; return what is made of each look."""
    found = []
    for is_busy in are_busy:
        assert session.deadline is not None
        found.append(session.is_silent(session.deadline, partial(bool, is_busy)))
    return found


def idle() -> bool:
    return False


def test_silence_counts_from_the_latest_message_while_something_is_open_P2() -> None:
    session = Session()
    assert (session.deadline, session.is_silent(1e9, idle)) == (None, False)
    session.open_stream(A, Box(), 100.0)
    session.open_command(B, Box(), 102.0)
    assert session.deadline == 100.0 + SILENCE_LIMIT_S
    at = 102.0
    for message in (Alive(), piece(0, "x"), Reply(id=B, value={}), Event(id=C, value={})):
        at += 0.5
        session.receive(pieces.frame_of(message), at)
        assert session.deadline == at + SILENCE_LIMIT_S
    silent = at + SILENCE_LIMIT_S
    assert not session.is_silent(silent - 0.1, idle)
    assert not session.is_silent(silent, idle), "it is waited for once more"
    assert session.deadline == silent + DOUBT_S
    assert not session.is_silent(silent + DOUBT_S - 0.1, idle)
    assert session.is_silent(silent + DOUBT_S, idle)
    assert SILENCE_LIMIT_S + DOUBT_S <= 3.5


def test_busy_daemon_is_lost_once_idle_twice_or_in_the_end_P32() -> None:
    session, busy = Session(), Session()
    session.open_stream(A, Box(), 0.0)
    assert looks(session, True, True, False, True, False) == [False] * 5
    session.receive(pieces.frame_of(Alive()), 6.0)
    assert session.deadline == 6.0 + SILENCE_LIMIT_S
    assert looks(session, False) == [False], "what was seen before it was heard does not count"
    assert looks(session, False) == [True]
    busy.open_stream(A, Box(), 0.0)
    lost_at = SILENCE_LIMIT_S + looks(busy, *[True] * 100).index(True) * DOUBT_S
    assert BUSY_LIMIT_S <= lost_at <= BUSY_LIMIT_S + 2 * DOUBT_S


def test_short_stop_of_the_machine_loses_nothing_P7(opened: Open) -> None:
    session = opened.session
    woken = SILENCE_LIMIT_S + 0.1  # both stood still, for too short a time for the clock to notice
    assert not session.is_silent(woken, idle)
    opened.receive(Alive(), now=woken + DOUBT_S / 2)
    assert not session.is_silent(woken + DOUBT_S, idle)
    assert session.deadline == woken + DOUBT_S / 2 + SILENCE_LIMIT_S
    assert opened.stream.items == []


# ---------------------------------------------------------------- vectors


def vectors_of(numbers: list[int], *scores: float, **more: Any) -> Result:
    """The answer to texts: the number of each, and a vector of one number."""
    vectors = [pack_vector([score]) for score in scores]
    given = {"finish_reason": FinishReason.STOP, **more}
    return Result(text="", token_ids=numbers, vectors=vectors, **given)


def test_vectors_are_those_of_their_texts_whichever_came_first() -> None:
    assert embeddings_of(vectors_of([2, 0, 1], 0.5, 0.25, 0.75)).vectors == [[0.25], [0.75], [0.5]]
    best = ranked(vectors_of([2, 0, 1, 3], 0.5, 0.25, 0.5, 0.0), 3)
    assert [(one.index, one.score) for one in best] == [(1, 0.5), (2, 0.5), (0, 0.25)]


@pytest.mark.parametrize("numbers", [[0], [0, 0], [1, 2], [0, 2], [0, 1, 2], [0, 2, 1]])
def test_vectors_that_are_not_those_of_all_texts_are_an_error(numbers: list[int]) -> None:
    with pytest.raises(RequestError, match="a vector is missing, or came twice"):
        embeddings_of(vectors_of(numbers, 0.5, 0.25))


def test_cancelled_request_for_vectors_may_be_sent_again() -> None:
    with pytest.raises(RequestError, match="cancelled before all of its texts") as caught:
        ranked(vectors_of([0], 0.5, finish_reason=FinishReason.CANCELLED))
    assert caught.value.retryable


def test_vectors_and_rankings_keep_what_the_answer_says_of_itself() -> None:
    about: dict[str, Any] = {
        "usage": Usage(prompt_tokens=5),
        "timings": Timings(total_s=2.0),
        "resumed": 2,
    }
    vectors = [pack_vector([0.5])]
    result = Result(
        text="", finish_reason=FinishReason.STOP, token_ids=[0], vectors=vectors, **about
    )
    for found in (embeddings_of(result), ranking_of(result, None)):
        assert {name: getattr(found, name) for name in about} == about
