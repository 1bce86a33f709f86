"""The books of one client's connection: what is open, and what is owed."""

from __future__ import annotations

import socket

import pytest

from mlxsup.protocol.client_messages import (
    Cancel,
    Deltas,
    Done,
    Event,
    Failed,
    Generate,
    Reply,
    Subscribe,
)
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.core.events import ConnectionId
from mlxsup.supervisor.sockets.connection import Connection
from mlxsup.supervisor.sockets.outbox import Tally

ID = RequestId("a")


@pytest.fixture
def connection() -> Connection:
    with socket.socket() as unused:
        return Connection(ConnectionId(b"\0abcd"), unused, Tally(), pid=None, refusal="", now=0.0)


@pytest.mark.parametrize(
    "end", [Failed(id=ID, error={"code": "superseded"}), Reply(id=ID, value={})]
)
def test_a_subscription_is_over_when_its_end_is_sent(connection: Connection, end: Message) -> None:
    connection.note_said(Subscribe(id=ID))
    assert connection.has_open(ID)
    connection.note_sent(end)
    assert not connection.has_open(ID)
    assert not connection.has_anything_open


def test_a_cancel_ends_a_subscription_at_once_and_a_request_with_its_end(
    connection: Connection,
) -> None:
    connection.note_said(Subscribe(id=RequestId("s")))
    connection.note_said(Generate(id=ID, model=ModelName("m"), body=b""))
    for id in ("s", ID):
        connection.note_said(Cancel(id=RequestId(id)))
    assert (connection.has_open("s"), connection.has_open(ID)) == (False, True)
    connection.note_sent(Failed(id=ID, error={}))
    assert not connection.has_anything_open


def test_the_books_hold_what_was_said_until_its_end_was_sent(connection: Connection) -> None:
    assert not connection.has_anything_open
    connection.note_said(Generate(id=ID, model=ModelName("m"), body=b""))
    assert (connection.has_anything_open, connection.has_open("b")) == (True, False)
    for id in ("s", "t"):
        connection.note_said(Subscribe(id=RequestId(id)))
    assert (connection.has_open("s"), connection.has_open("t")) == (False, True)
    connection.note_said(Cancel(id=RequestId("s")))
    connection.note_sent(Deltas(deltas=[]))
    connection.note_sent(Event(id=RequestId("t"), value={}))
    connection.note_sent(Reply(id=RequestId("s"), value={}))
    assert (connection.open, connection.subscription) == ({"a"}, "t")
    connection.note_sent(Done(id=ID, seq=1, finish_reason=FinishReason.STOP))
    assert (connection.open, connection.has_anything_open) == (set(), True)
    connection.note_sent(Failed(id=RequestId("t"), error={}))
    assert not connection.has_anything_open
