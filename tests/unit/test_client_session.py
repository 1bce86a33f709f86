"""The bookkeeping of a client: pieces, ends, errors, silence, without sockets and clock."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgpack
import pytest

from mlxsup.client import session as session_module
from mlxsup.client.errors import ConnectionLost, RequestError, SubscriptionClosed
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.client.session import (
    BUSY_LIMIT_S,
    DOUBT_S,
    SILENCE_LIMIT_S,
    Delivery,
    Item,
    Outcome,
    Session,
)
from mlxsup.client.tool_calls import NO_ARGUMENTS, NO_CALL
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
from mlxsup.protocol.states import Channel, FinishReason, NoticeKind

from support.client import pieces

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


class Box:
    """An inbox that is a list."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)


def deliver(deliveries: list[Delivery]) -> None:
    for inbox, item in deliveries:
        inbox.put(item)


def receive(session: Session, message: Message, now: float = 0.0) -> Outcome:
    outcome = session.receive(pieces.frame_of(message), now)
    deliver(outcome.deliveries)
    return outcome


def sent(outcome: Outcome) -> list[Message]:
    decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
    return [decoder.decode(frames) for frames in outcome.sends]


def piece(request_id: RequestId, seq: int, text: str, **values: Any) -> Deltas:
    return Deltas(deltas=[pieces.piece(request_id, seq, text, tokens=pack_tokens([seq]), **values)])


@pytest.mark.parametrize(
    ("given", "text"),
    [(piece(A, 0, "x"), "x"), (piece(A, 0, '{"id": "ca', channel=Channel.TOOL_CALL), "")],
    ids=["text", "half a call"],
)
def test_lost_connection_keeps_what_a_cancelled_stream_had_P2(given: Deltas, text: str) -> None:
    session, cancelled = Session(), Box()
    session.open_stream(A, cancelled, 0.0)
    receive(session, given)
    session.cancel(A)
    deliver(session.lose(ConnectionLost("gone", "ipc:///x")))
    result = cancelled.items[-1]
    assert isinstance(result, Result)
    assert (result.text, result.finish_reason) == (text, "cancelled")
    assert result.usage.completion_tokens == 1
    assert len(session) == 0


GOOD_CALL = '{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[1, 2]",
        "7",
        "null",
        "{}",
        '{"function": "f"}',
        '{"function": {"name": 1, "arguments": "{}"}}',
        '{"function": {"name": "f", "arguments": {}}}',
        '{"number": ' + 5000 * "9" + "}",
        10_000 * "[",
    ],
    ids=lambda line: line[:24],
)
def test_unreadable_tool_call_is_kept_with_a_warning_J2(line: str) -> None:
    session, box, other = Session(), Box(), Box()
    session.open_stream(A, box, 0.0)
    session.open_stream(B, other, 0.0)
    receive(session, piece(A, 0, f"{GOOD_CALL}\n", channel=Channel.TOOL_CALL))
    receive(session, piece(A, 1, f"{line}\n", channel=Channel.TOOL_CALL))
    receive(session, Done(id=A, seq=2, finish_reason=FinishReason.TOOL_CALLS, warnings=["first"]))
    result = box.items[-1]
    assert isinstance(result, Result), result
    good, raw = result.tool_calls
    assert good == json.loads(GOOD_CALL)
    assert raw == {"id": "", "type": "function", "function": {"name": "", "arguments": line}}
    assert result.warnings == ["first", NO_CALL]
    assert other.items == []


@pytest.mark.parametrize("arguments", ["not JSON", "[]", ""])
def test_unreadable_arguments_are_kept_with_a_warning(arguments: str) -> None:
    session, box = Session(), Box()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    session.open_stream(A, box, 0.0)
    receive(session, piece(A, 0, json.dumps(call) + "\n", channel=Channel.TOOL_CALL))
    receive(session, Done(id=A, seq=1, finish_reason=FinishReason.TOOL_CALLS))
    result = box.items[-1]
    assert isinstance(result, Result)
    assert (result.tool_calls, result.warnings) == ([call], [NO_ARGUMENTS])


@pytest.mark.parametrize(
    "bad",
    [
        piece(A, 0, "x"),
        piece(A, 0, "x", channel=Channel.REASONING),
        Done(id=A, seq=0, finish_reason=FinishReason.STOP),
    ],
)
def test_bug_ends_the_stream_that_it_struck_alone(
    bad: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a bug")

    session, box, other = Session(), Box(), Box()
    session.open_stream(A, box, 0.0)
    session.open_stream(B, other, 0.0)
    with monkeypatch.context() as patched:
        patched.setattr("mlxsup.client.session._Open.result", broken)
        patched.setattr("mlxsup.client.session.Delta", broken)
        outcome = receive(session, bad)
    [error] = box.items
    assert isinstance(error, RequestError)
    assert (error.code, error.message) == (
        "internal",
        "internal error in the client: TypeError: a bug",
    )
    assert sent(outcome) == [Cancel(id=A)]
    receive(session, piece(B, 0, "x"))
    assert len(other.items) == 1
    assert len(session) == 1


def test_refused_second_use_leaves_the_first_open_D7() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    receive(session, piece(A, 0, "x"))
    refused = RemoteError(
        ErrorCode.DUPLICATE_ID, "open already", detail={"id": A, "refused": "second use"}
    )
    outcome = receive(session, Failed(id=A, error=refused.to_wire()))
    assert (outcome.deliveries, outcome.sends) == ([], [])
    receive(session, piece(A, 1, "y"))
    receive(session, Done(id=A, seq=2, finish_reason=FinishReason.STOP))
    assert isinstance(box.items[-1], Result)
    assert box.items[-1].text == "xy"


def test_messages_for_what_is_not_open_are_ignored_D6() -> None:
    session, box = Session(), Box()
    session.open_command(A, box, 0.0)
    for message in (
        piece(B, 0, "x"),
        piece(A, 0, "x"),
        Done(id=B, seq=0, finish_reason=FinishReason.STOP),
        Reply(id=B, value={}),
        Event(id=A, value={}),
    ):
        outcome = receive(session, message)
        assert (outcome.deliveries, outcome.sends) == ([], [])
    assert len(session) == 1


def test_cancel_is_sent_once_before_the_end_D6() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    assert sent(session.cancel(A)) == [Cancel(id=A)]
    assert sent(session.cancel(A)) == []
    receive(session, Done(id=A, seq=0, finish_reason=FinishReason.CANCELLED))
    assert sent(session.cancel(A)) == []
    assert len(session) == 0


def test_events_go_on_until_the_subscription_is_cancelled() -> None:
    session, box = Session(), Box()
    session.open_command(A, box, 0.0, is_subscription=True)
    receive(session, Reply(id=A, value={}))
    receive(session, Event(id=A, value={"n": 1}))
    assert box.items == [{"n": 1}]
    outcome = session.cancel(A)
    assert sent(outcome) == [Cancel(id=A)]
    [(inbox, item)] = outcome.deliveries
    assert inbox is box
    assert isinstance(item, SubscriptionClosed), "a reader may be waiting"
    receive(session, Event(id=A, value={"n": 2}))
    assert box.items == [{"n": 1}]


def idle() -> bool:
    """The supervisor's process wants nothing."""
    return False


def test_silence_counts_only_while_something_is_open_P2() -> None:
    session, box = Session(), Box()
    assert session.deadline is None
    assert not session.is_silent(1e9, idle)
    session.open_stream(A, box, 100.0)
    assert session.deadline == 100.0 + SILENCE_LIMIT_S
    session.open_stream(B, box, 102.0)
    assert session.deadline == 100.0 + SILENCE_LIMIT_S
    receive(session, Alive(), now=102.5)
    assert not session.is_silent(102.5 + SILENCE_LIMIT_S - 0.1, idle)
    assert not session.is_silent(102.5 + SILENCE_LIMIT_S, idle), "it is waited for once more"
    assert session.deadline == 102.5 + SILENCE_LIMIT_S + DOUBT_S
    assert not session.is_silent(102.5 + SILENCE_LIMIT_S + DOUBT_S - 0.1, idle)
    assert session.is_silent(102.5 + SILENCE_LIMIT_S + DOUBT_S, idle)
    assert SILENCE_LIMIT_S + DOUBT_S <= 3.5


def looks(session: Session, *are_busy: bool) -> list[bool]:
    """Look at a silent supervisor at each deadline; return what is made of each look."""
    found = []
    for is_busy in are_busy:
        assert session.deadline is not None
        found.append(session.is_silent(session.deadline, partial(bool, is_busy)))
    return found


def test_busy_daemon_is_lost_once_idle_twice_or_in_the_end_P32() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    assert looks(session, True, True, False, True, False) == [False] * 5
    receive(session, Alive(), now=6.0)
    assert session.deadline == 6.0 + SILENCE_LIMIT_S
    assert looks(session, False) == [False], "what was seen before it was heard does not count"
    assert looks(session, False) == [True]
    busy = Session()
    busy.open_stream(A, box, 0.0)
    lost_at = SILENCE_LIMIT_S + looks(busy, *[True] * 100).index(True) * DOUBT_S
    assert BUSY_LIMIT_S <= lost_at <= BUSY_LIMIT_S + 2 * DOUBT_S


def test_short_stop_of_the_machine_loses_nothing_P7() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    woken = SILENCE_LIMIT_S + 0.1  # both stood still, for too short a time for the clock to notice
    assert not session.is_silent(woken, idle)
    receive(session, Alive(), now=woken + DOUBT_S / 2)
    assert not session.is_silent(woken + DOUBT_S, idle)
    assert session.deadline == woken + DOUBT_S / 2 + SILENCE_LIMIT_S
    assert box.items == []


def test_bug_in_a_message_ends_its_streams_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that was thrown away is waited for in vain."""
    session, boxes = Session(), [Box(), Box(), Box()]
    for id, box in zip((A, B, RequestId("c")), boxes, strict=True):
        session.open_stream(id, box, 0.0)

    def broken(tokens: bytes) -> list[int]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(session_module, "unpack_tokens", broken)
    both = Deltas(deltas=[pieces.piece(id, n) for id, n in ((A, 0), (B, 0), (A, 1))])
    outcome = receive(session, both)
    for box in boxes[:2]:
        [error] = box.items
        assert isinstance(error, RequestError)
        assert error.code is ErrorCode.INTERNAL
        assert "ZeroDivisionError: a bug" in str(error)
    assert boxes[2].items == []
    assert len(session) == 1
    assert sent(outcome) == [Cancel(id=A), Cancel(id=B)]


# ---------------------------------------------------------------- ends


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
        deliver(outcome.deliveries)
        return sent(outcome)

    def errors(self) -> list[tuple[str, str]]:
        """Of each inbox the one error that it was given."""
        found = []
        for box in self.boxes:
            [error] = box.items
            assert isinstance(error, RequestError)
            found.append((str(error.code), error.message))
        return found


def piece_of_a(seq: int, text: str = "", *, tokens: bytes = b"", **values: Any) -> Deltas:
    return Deltas(deltas=[pieces.piece(A, seq, text, tokens=tokens, **values)])


def logprobs_of(token: int) -> Logprobs:
    return Logprobs(chosen=TokenLogprob(token=token, logprob=-1.0, text="x"))


def test_result_holds_all_that_came() -> None:
    opened = Open()
    first, second = logprobs_of(7), logprobs_of(8)
    opened.receive(piece_of_a(0, "hm", channel=Channel.REASONING))
    opened.receive(piece_of_a(1, "a", tokens=pack_tokens([7]), logprobs=[first]))
    opened.receive(piece_of_a(2, "b", tokens=pack_tokens([8, 9]), logprobs=[second], stop="x"))
    opened.receive(piece_of_a(3, '{"function": 1}\n', channel=Channel.TOOL_CALL))
    usage = Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3)
    timings = Timings(queued_s=1.0, total_s=2.0)
    done = Done(
        id=A,
        seq=4,
        finish_reason=FinishReason.LENGTH,
        usage=usage,
        timings=timings,
        seed=11,
        resumed=2,
        warnings=["mind"],
    )
    assert opened.receive(done) == []
    *deltas, result = opened.stream.items
    assert deltas == [
        Delta(text="hm", token_ids=[], channel=Channel.REASONING),
        Delta(text="a", token_ids=[7], logprobs=[first]),
        Delta(text="b", token_ids=[8, 9], logprobs=[second]),
        Delta(text='{"function": 1}\n', token_ids=[], channel=Channel.TOOL_CALL),
    ]
    assert isinstance(result, Result)
    assert (result.text, result.reasoning, result.token_ids) == ("ab", "hm", [7, 8, 9])
    assert (result.logprobs, result.usage, result.timings) == ([first, second], usage, timings)
    assert (result.finish_reason, result.seed, result.resumed) == (FinishReason.LENGTH, 11, 2)
    assert result.tool_calls[0]["function"] == {"name": "", "arguments": '{"function": 1}'}
    assert (result.warnings[0], result.stop) == ("mind", "x")
    assert len(result.warnings) == 2
    assert len(opened.session) == 2
    again = Box()
    opened.session.open_stream(A, again, 0.0)
    opened.receive(piece_of_a(0, "x"))
    assert (len(opened.stream.items), len(again.items)) == (5, 1), "a new request"


@pytest.mark.parametrize(
    ("second", "came"),
    [
        (piece_of_a(2, "y"), 2),
        (piece_of_a(0, "x"), 0),
        (Done(id=A, seq=3, finish_reason=FinishReason.STOP), 3),
    ],
    ids=["a gap", "a repeated piece", "an end that counts more"],
)
def test_missing_piece_is_an_error_with_both_numbers_H7(second: Message, came: int) -> None:
    opened = Open()
    opened.receive(piece_of_a(0, "x"))
    assert opened.receive(second) == [Cancel(id=A)]
    error = opened.stream.items[-1]
    assert isinstance(error, RequestError)
    assert (error.code, error.message) == (
        "internal",
        f"piece 1 of the stream is missing; number {came} came instead",
    )
    assert opened.receive(piece_of_a(1, "late")) == []
    assert len(opened.stream.items) == 2
    assert len(opened.session) == 2


def test_notices_reach_streams_alone() -> None:
    opened = Open()
    detail = {"position": 1, "reason": "rows"}
    for request_id in (A, B, C, RequestId("unknown")):
        message = NoticeMessage(id=request_id, kind=NoticeKind.QUEUED, detail=detail)
        assert opened.receive(message) == []
    assert [box.items for box in opened.boxes] == [
        [Notice(kind=NoticeKind.QUEUED, detail=detail)],
        [],
        [],
    ]


def test_reply_ends_a_command_and_no_subscription() -> None:
    opened = Open()
    opened.receive(Reply(id=B, value={"n": 1}))
    opened.receive(Reply(id=B, value={"n": 2}))
    opened.receive(Reply(id=C, value={}))
    opened.receive(Event(id=B, value={"n": 3}))
    opened.receive(Event(id=C, value={"n": 4}))
    assert [box.items for box in opened.boxes] == [[], [{"n": 1}], [{"n": 4}]]
    assert len(opened.session) == 2


FULL = RemoteError(ErrorCode.OVERLOADED, "full", detail={"running": 4})


@pytest.mark.parametrize(
    ("message", "message_of_error"),
    [
        (Failed(id=A, error=FULL.to_wire()), "full"),
        (Failed(id=A, error={"code": "?"}), "the daemon sent an error that cannot be read"),
        (Reply(id=A, value={}), "the daemon answered a request as a command"),
    ],
)
def test_error_reaches_its_request_alone(message: Message, message_of_error: str) -> None:
    opened = Open()
    assert opened.receive(Failed(id=RequestId("unknown"), error=FULL.to_wire())) == []
    opened.receive(message)
    [error] = opened.stream.items
    assert isinstance(error, RequestError)
    expected = (FULL.code, True, {"running": 4}) if error.message == "full" else (
        ErrorCode.INTERNAL, False, {}
    )  # fmt: skip
    assert error.message == message_of_error
    assert (error.code, error.retryable, error.detail) == expected
    assert opened.command.items == opened.subscription.items == []
    assert len(opened.session) == 2


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (
            pieces.frame_of(
                Failed(id="", error=RemoteError(ErrorCode.INVALID_REQUEST, "no map").to_wire())
            ),
            "the daemon could not read a message: no map",
        ),
        (b"\xc1", "the daemon sent something that is not a message: "),
    ],
    ids=["an error without an id", "no message"],
)
def test_error_of_no_request_ends_everything(frame: bytes, words: str) -> None:
    opened = Open()
    assert opened.take(opened.session.receive(frame, 0.0)) == [Cancel(id=A)]
    for code, message in opened.errors():
        assert code == "internal"
        assert message.startswith(words)
    assert len(opened.session) == 0


def test_lost_connection_is_an_error_for_each_P2() -> None:
    opened = Open()
    opened.take(opened.session.cancel(B))
    lost = ConnectionLost("gone", "ipc:///x", "start it", is_turned_away=True)
    deliver(opened.session.lose(lost))
    errors = [box.items[0] for box in opened.boxes]
    assert len(set(map(id, errors))) == 3, "a traceback belongs to one reader"
    for error in errors:
        assert isinstance(error, ConnectionLost)
        assert (error.message, error.endpoint, error.hint) == ("gone", "ipc:///x", "start it")
        assert error.is_turned_away
        assert str(error) == "gone; start it"
    assert len(opened.session) == 0
    assert opened.session.deadline is None


def test_closing_cancels_streams_and_ends_commands() -> None:
    opened = Open()
    opened.receive(piece_of_a(0, "x", tokens=pack_tokens([5])))
    assert opened.take(opened.session.close("ipc:///x")) == [Cancel(id=A)]
    result = opened.stream.items[-1]
    assert isinstance(result, Result)
    assert (result.text, result.finish_reason, result.seed) == ("x", FinishReason.CANCELLED, None)
    assert result.usage == Usage(completion_tokens=1)
    for box in (opened.command, opened.subscription):
        [error] = box.items
        assert isinstance(error, ConnectionLost)
        assert (str(error), error.endpoint) == ("the client was closed", "ipc:///x")
        assert not error.is_turned_away
    assert len(opened.session) == 0


def test_every_message_is_a_sign_of_life_P2() -> None:
    opened = Open()
    at = 0.0
    for message in (Alive(), piece_of_a(0, "x"), Reply(id=B, value={}), Event(id=C, value={})):
        at += 1.0
        opened.receive(message, now=at)
        assert opened.session.deadline == at + SILENCE_LIMIT_S


# ---------------------------------------------------------------- bodies that cannot be read


HOSTILE: dict[str, bytes | tuple[bytes, bytes]] = {
    "half a token": (b"123", b"\x80"),
    "nothing": b"",
    "no msgpack": b"\xc1",
    "cut short": b"\xa5tex",
    "bytes that follow": b"\x80\x80",
    "no map": msgpack.packb(["text"]),
    "another's name": msgpack.packb({"id": "b", "seq": 0, "text": 5}),
    "a text that is none": msgpack.packb({"text": b"\xff"}),
    "half a character": b"\x81\xa4text\xa1\xff",
    "an unknown channel": msgpack.packb({"channel": "loud"}),
    "deep nesting": b"\x91" * 5000,
    "an extension": msgpack.packb({"text": msgpack.ExtType(4, b"xx")}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_unreadable_body_ends_its_stream_alone(name: str) -> None:
    session, box, other = Session(), Box(), Box()
    session.open_stream(A, box, 0.0)
    session.open_stream(B, other, 0.0)
    hostile = HOSTILE[name]
    tokens, body = hostile if isinstance(hostile, tuple) else (b"", hostile)
    bad = ClientDelta(id=A, seq=0, tokens=tokens, body=body)
    outcome = receive(
        session, Deltas(deltas=[pieces.piece(B, 0, "x"), bad, pieces.piece(B, 1, "y")])
    )
    [error] = box.items
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.INTERNAL
    assert error.message.startswith("piece 0 of the stream cannot be read: ")
    assert sent(outcome) == [Cancel(id=A)]
    receive(session, Deltas(deltas=[pieces.piece(A, 1, "late")]))
    receive(session, Done(id=B, seq=2, finish_reason=FinishReason.STOP))
    *deltas, result = other.items
    assert [delta.text for delta in deltas if isinstance(delta, Delta)] == ["x", "y"]
    assert isinstance(result, Result)
    assert result.text == "xy"
    assert (len(box.items), len(session)) == (1, 0)


def test_body_cannot_speak_for_its_piece() -> None:
    """What the supervisor has written is what counts."""
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    body = msgpack.packb({"text": "x", "id": "b", "seq": 9, "tokens": b"1234"})
    receive(session, Deltas(deltas=[ClientDelta(id=A, seq=0, tokens=b"", body=body)]))
    assert box.items == [Delta(text="x", token_ids=[])]
