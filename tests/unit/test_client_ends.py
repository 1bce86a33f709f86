"""How what is open on a connection ends, and what its result holds."""

from __future__ import annotations

from typing import Any

from mlxsup.client.errors import ConnectionLost, RequestError
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.client.session import (
    SILENCE_LIMIT_S,
    Delivery,
    Item,
    Outcome,
    Session,
)
from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    Alive,
    Cancel,
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

from support import pieces

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


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
        """Delivers, and gives what is sent."""
        return self.take(self.session.receive(pieces.frame_of(message), now))

    def take(self, outcome: Outcome) -> list[Message]:
        deliver(outcome.deliveries)
        decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
        return [decoder.decode(frames) for frames in outcome.sends]

    def errors(self) -> list[tuple[str, str]]:
        """Of each inbox the one error that it was given."""
        found = []
        for box in self.boxes:
            [error] = box.items
            assert isinstance(error, RequestError)
            found.append((str(error.code), error.message))
        return found


def deliver(deliveries: list[Delivery]) -> None:
    for inbox, item in deliveries:
        inbox.put(item)


def piece(seq: int, text: str = "", *, tokens: bytes = b"", **values: Any) -> Deltas:
    return Deltas(deltas=[pieces.piece(A, seq, text, tokens=tokens, **values)])


def logprobs_of(token: int) -> Logprobs:
    return Logprobs(chosen=TokenLogprob(token=token, logprob=-1.0, text="x"))


def test_a_result_holds_all_that_came() -> None:
    opened = Open()
    first, second = logprobs_of(7), logprobs_of(8)
    opened.receive(piece(0, "hm", channel=Channel.REASONING))
    opened.receive(piece(1, "a", tokens=pack_tokens([7]), logprobs=[first]))
    opened.receive(piece(2, "b", tokens=pack_tokens([8, 9]), logprobs=[second]))
    opened.receive(piece(3, '{"function": 1}\n', channel=Channel.TOOL_CALL))
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
    assert result.warnings[0] == "mind"
    assert len(result.warnings) == 2
    assert len(opened.session) == 2


def test_a_gap_names_both_numbers_and_cancels_H7() -> None:
    opened = Open()
    opened.receive(piece(0, "x"))
    assert opened.receive(piece(2, "y")) == [Cancel(id=A)]
    error = opened.stream.items[-1]
    assert isinstance(error, RequestError)
    assert (error.code, error.message) == (
        "internal",
        "piece 1 of the stream is missing; number 2 came instead",
    )
    assert opened.receive(piece(1, "late")) == []
    assert len(opened.stream.items) == 2


def test_an_end_that_counts_more_pieces_than_came_is_an_error_H7() -> None:
    opened = Open()
    opened.receive(piece(0, "x"))
    sent = opened.receive(Done(id=A, seq=3, finish_reason=FinishReason.STOP))
    error = opened.stream.items[-1]
    assert isinstance(error, RequestError)
    assert error.message == "piece 1 of the stream is missing; number 3 came instead"
    assert sent == [Cancel(id=A)]
    assert len(opened.session) == 2


def test_token_ids_that_cannot_be_read_end_the_stream() -> None:
    opened = Open()
    assert opened.receive(piece(0, "x", tokens=b"123")) == [Cancel(id=A)]
    [error] = opened.stream.items
    assert isinstance(error, RequestError)
    assert error.message.startswith("piece 0 of the stream cannot be read: bytes length")
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


def test_a_reply_ends_a_command_and_no_subscription() -> None:
    opened = Open()
    opened.receive(Reply(id=B, value={"n": 1}))
    opened.receive(Reply(id=B, value={"n": 2}))
    opened.receive(Reply(id=C, value={}))
    opened.receive(Event(id=B, value={"n": 3}))
    opened.receive(Event(id=C, value={"n": 4}))
    assert [box.items for box in opened.boxes] == [[], [{"n": 1}], [{"n": 4}]]
    assert len(opened.session) == 2


def test_a_stream_that_is_answered_as_a_command_ends_with_an_error() -> None:
    opened = Open()
    opened.receive(Reply(id=A, value={}))
    [error] = opened.stream.items
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.INTERNAL
    assert error.message == "the daemon answered a request as a command"
    assert len(opened.session) == 2


def test_an_error_reaches_its_request_alone_with_all_that_it_says() -> None:
    opened = Open()
    said = RemoteError(ErrorCode.OVERLOADED, "full", detail={"running": 4})
    assert opened.receive(Failed(id=A, error=said.to_wire())) == []
    assert opened.receive(Failed(id=RequestId("unknown"), error=said.to_wire())) == []
    [error] = opened.stream.items
    assert isinstance(error, RequestError)
    assert (error.code, error.message, error.retryable, error.detail) == (
        "overloaded",
        "full",
        True,
        {"running": 4},
    )
    assert opened.command.items == opened.subscription.items == []
    assert len(opened.session) == 2


def test_an_error_that_cannot_be_read_is_one_of_the_daemon() -> None:
    opened = Open()
    opened.receive(Failed(id=B, error={"code": "unheard of"}))
    [error] = opened.command.items
    assert isinstance(error, RequestError)
    assert (error.code, error.message) == (
        "internal",
        "the daemon sent an error that cannot be read",
    )


def test_an_error_without_an_id_ends_everything() -> None:
    opened = Open()
    refused = RemoteError(ErrorCode.INVALID_REQUEST, "no map")
    assert opened.receive(Failed(id="", error=refused.to_wire())) == [Cancel(id=A)]
    said = ("internal", "the daemon could not read a message: no map")
    assert opened.errors() == [said, said, said]
    assert len(opened.session) == 0


def test_bytes_that_are_no_message_end_everything() -> None:
    opened = Open()
    assert opened.take(opened.session.receive(b"\xc1", 0.0)) == [Cancel(id=A)]
    assert all(
        code == "internal"
        and message.startswith("the daemon sent something that is not a message: ")
        for code, message in opened.errors()
    )
    assert len(opened.session) == 0


def test_a_lost_connection_is_told_to_each_with_all_that_is_known_P2() -> None:
    opened = Open()
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


def test_a_cancelled_command_is_lost_like_any_other_P2() -> None:
    opened = Open()
    opened.take(opened.session.cancel(B))
    deliver(opened.session.lose(ConnectionLost("gone", "ipc:///x")))
    assert isinstance(opened.command.items[0], ConnectionLost)


def test_closing_cancels_streams_and_ends_commands() -> None:
    opened = Open()
    opened.receive(piece(0, "x", tokens=pack_tokens([5])))
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
    for message in (Alive(), piece(0, "x"), Reply(id=B, value={}), Event(id=C, value={})):
        at += 1.0
        opened.receive(message, now=at)
        assert opened.session.deadline == at + SILENCE_LIMIT_S


def test_a_session_with_nothing_open_is_never_silent_P2() -> None:
    session = Session()
    assert not session.is_silent(1e9, lambda: False)
    session.open_command(A, Box(), 1e9)
    assert session.deadline == 1e9 + SILENCE_LIMIT_S
