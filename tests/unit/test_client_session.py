"""The client's bookkeeping, without sockets and clock."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from mlxsup.client import session as session_module
from mlxsup.client.errors import ConnectionLost, RequestError, SubscriptionClosed
from mlxsup.client.results import Delta, Result
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
    Deltas,
    Done,
    Event,
    Failed,
    Reply,
)
from mlxsup.protocol.codec import Decoder
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestId, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Channel, FinishReason

from support import pieces

A, B = RequestId("a"), RequestId("b")


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


def test_a_result_names_the_stop_string_of_the_last_piece() -> None:
    for stop in ("x", None):
        session, box = Session(), Box()
        session.open_stream(A, box, 0.0)
        receive(session, piece(A, 0, "a"))
        receive(session, piece(A, 1, "", stop=stop))
        receive(session, Done(id=A, seq=2, finish_reason=FinishReason.STOP))
        result = box.items[-1]
        assert isinstance(result, Result)
        assert result.stop == stop


def test_reasoning_stays_apart_from_the_text() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    receive(session, piece(A, 0, "h", channel=Channel.REASONING))
    receive(session, piece(A, 1, "m", channel=Channel.REASONING))
    receive(session, piece(A, 2, "4"))
    receive(session, piece(A, 3, "2"))
    receive(session, Done(id=A, seq=4, finish_reason=FinishReason.STOP))
    *deltas, result = box.items
    channels = [d.channel for d in deltas if isinstance(d, Delta)]
    assert channels == ["reasoning", "reasoning", "content", "content"]
    assert isinstance(result, Result)
    assert (result.text, result.reasoning, result.token_ids) == ("42", "hm", [0, 1, 2, 3])
    assert (result.tool_calls, result.logprobs, result.seed) == ([], None, None)


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
def test_a_tool_call_that_cannot_be_read_stands_in_the_result_as_it_is_J2(line: str) -> None:
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
def test_arguments_that_are_not_json_are_given_with_a_warning(arguments: str) -> None:
    session, box = Session(), Box()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    session.open_stream(A, box, 0.0)
    receive(session, piece(A, 0, json.dumps(call) + "\n", channel=Channel.TOOL_CALL))
    receive(session, Done(id=A, seq=1, finish_reason=FinishReason.TOOL_CALLS))
    result = box.items[-1]
    assert isinstance(result, Result)
    assert (result.tool_calls, result.warnings) == ([call], [NO_ARGUMENTS])


def test_what_is_said_of_tool_calls_that_cannot_be_read() -> None:
    assert NO_CALL == (
        "a tool call could not be read: its text stands in `arguments`, without a name"
    )
    assert NO_ARGUMENTS == (
        "the arguments of a tool call are not a JSON object: they are given as they came"
    )


def test_a_cancelled_stream_with_half_a_tool_call_ends_where_the_connection_does_P2() -> None:
    session, box, running = Session(), Box(), Box()
    session.open_stream(A, box, 0.0)
    session.open_stream(B, running, 0.0)
    receive(session, piece(A, 0, '{"id": "ca', channel=Channel.TOOL_CALL))
    session.cancel(A)
    deliver(session.lose(ConnectionLost("gone", "ipc:///x")))
    assert isinstance(box.items[-1], Result)
    assert isinstance(running.items[-1], ConnectionLost)


@pytest.mark.parametrize(
    "bad",
    [
        piece(A, 0, "x"),
        piece(A, 0, "x", channel=Channel.REASONING),
        Done(id=A, seq=0, finish_reason=FinishReason.STOP),
    ],
)
def test_a_bug_in_here_ends_the_stream_that_it_struck_and_no_other(
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


def test_id_that_is_used_again_is_a_new_request_D7() -> None:
    session, first, second = Session(), Box(), Box()
    session.open_stream(A, first, 0.0)
    receive(session, Done(id=A, seq=0, finish_reason=FinishReason.STOP))
    session.open_stream(A, second, 0.0)
    receive(session, piece(A, 0, "x"))
    assert len(first.items) == len(second.items) == 1


def test_a_refused_second_use_is_no_end_of_the_first_D7() -> None:
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


def test_cancel_is_sent_once_and_not_after_the_end_D6() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    assert sent(session.cancel(A)) == [Cancel(id=A)]
    assert sent(session.cancel(A)) == []
    receive(session, Done(id=A, seq=0, finish_reason=FinishReason.CANCELLED))
    assert sent(session.cancel(A)) == []
    assert len(session) == 0


def test_repeated_piece_is_an_error_too_H7() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    receive(session, piece(A, 0, "x"))
    outcome = receive(session, piece(A, 0, "x"))
    assert isinstance(box.items[-1], RequestError)
    assert sent(outcome) == [Cancel(id=A)]


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
    assert isinstance(item, SubscriptionClosed), "somebody may be waiting"
    receive(session, Event(id=A, value={"n": 2}))
    assert box.items == [{"n": 1}]


def idle() -> bool:
    """The supervisor's process wants nothing."""
    return False


def test_silence_counts_only_while_something_is_open_P2() -> None:
    session, box = Session(), Box()
    assert session.deadline is None
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


def test_a_supervisor_that_lacks_the_cpu_is_lost_only_once_it_was_idle_twice_in_a_row_P32() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    assert looks(session, True, True, False, True, False) == [False] * 5
    receive(session, Alive(), now=6.0)
    assert session.deadline == 6.0 + SILENCE_LIMIT_S
    assert looks(session, False) == [False], "what was seen before it was heard does not count"
    assert looks(session, False) == [True]


def test_a_supervisor_that_never_comes_to_speak_is_lost_in_the_end() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    found = looks(session, *[True] * 100)
    lost_at = SILENCE_LIMIT_S + found.index(True) * DOUBT_S
    assert BUSY_LIMIT_S <= lost_at <= BUSY_LIMIT_S + 2 * DOUBT_S


def test_loss_ends_everything_and_keeps_what_a_cancelled_stream_had_P2() -> None:
    session, cancelled, running, command = Session(), Box(), Box(), Box()
    session.open_stream(A, cancelled, 0.0)
    session.open_stream(B, running, 0.0)
    session.open_command(RequestId("c"), command, 0.0)
    receive(session, piece(A, 0, "x"))
    session.cancel(A)
    deliver(session.lose(ConnectionLost("gone", "ipc:///x")))
    result = cancelled.items[-1]
    assert isinstance(result, Result)
    assert (result.text, result.finish_reason, result.usage.completion_tokens) == (
        "x",
        "cancelled",
        1,
    )
    assert isinstance(running.items[-1], ConnectionLost)
    assert isinstance(command.items[-1], ConnectionLost)
    assert len(session) == 0


def test_a_short_stop_of_the_whole_machine_loses_nothing_P7() -> None:
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    woken = SILENCE_LIMIT_S + 0.1  # both stood still, for too short a time for the clock to notice
    assert not session.is_silent(woken, idle)
    receive(session, Alive(), now=woken + DOUBT_S / 2)
    assert not session.is_silent(woken + DOUBT_S, idle)
    assert session.deadline == woken + DOUBT_S / 2 + SILENCE_LIMIT_S
    assert box.items == []


def test_a_bug_while_a_message_is_handled_ends_everybody_it_was_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for an answer that was thrown away."""
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
    assert [Decoder(CLIENT_MESSAGES, is_strict=True).decode(one) for one in outcome.sends] == [
        Cancel(id=A),
        Cancel(id=B),
    ]
