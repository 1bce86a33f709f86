"""Pieces that a broken worker has packed: they end their own stream, and no other."""

from __future__ import annotations

import msgpack
import pytest

from mlxsup.client.errors import RequestError
from mlxsup.client.results import Delta, Result
from mlxsup.client.session import Item, Outcome, Session
from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    Cancel,
    ClientDelta,
    Deltas,
    Done,
)
from mlxsup.protocol.codec import Decoder
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason

from support.pieces import frame_of, piece

A, B = RequestId("a"), RequestId("b")
HOSTILE = {
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


class Box:
    """An inbox that keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        """Keeps it."""
        self.items.append(item)


def receive(session: Session, message: Message) -> Outcome:
    outcome = session.receive(frame_of(message), 0.0)
    for inbox, item in outcome.deliveries:
        inbox.put(item)
    return outcome


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_cannot_be_read_ends_its_stream_and_no_other(name: str) -> None:
    session, box, other = Session(), Box(), Box()
    session.open_stream(A, box, 0.0)
    session.open_stream(B, other, 0.0)
    bad = ClientDelta(id=A, seq=0, tokens=b"", body=HOSTILE[name])
    outcome = receive(session, Deltas(deltas=[piece(B, 0, "x"), bad, piece(B, 1, "y")]))
    [error] = box.items
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.INTERNAL
    assert error.message.startswith("piece 0 of the stream cannot be read: ")
    decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
    assert [decoder.decode(frames) for frames in outcome.sends] == [Cancel(id=A)]
    receive(session, Deltas(deltas=[piece(A, 1, "late")]))
    receive(session, Done(id=B, seq=2, finish_reason=FinishReason.STOP))
    *deltas, result = other.items
    assert [delta.text for delta in deltas if isinstance(delta, Delta)] == ["x", "y"]
    assert isinstance(result, Result)
    assert result.text == "xy"
    assert (len(box.items), len(session)) == (1, 0)


def test_a_body_cannot_speak_for_its_piece() -> None:
    """What the supervisor has written is what counts."""
    session, box = Session(), Box()
    session.open_stream(A, box, 0.0)
    body = msgpack.packb({"text": "x", "id": "b", "seq": 9, "tokens": b"1234"})
    receive(session, Deltas(deltas=[ClientDelta(id=A, seq=0, tokens=b"", body=body)]))
    assert box.items == [Delta(text="x", token_ids=[])]
