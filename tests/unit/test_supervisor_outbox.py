"""What an outbox holds: its bytes, its order, what becomes one message, and what is kept last."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import (
    SUPERVISOR_TO_CLIENT,
    ClientDelta,
    Deltas,
    Done,
    Event,
    Failed,
    Reply,
)
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import RequestId, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.sockets.outbox import (
    MAX_MERGED_BYTES,
    MAX_MERGED_DELTAS,
    MESSAGE_OVERHEAD_BYTES,
    Outbox,
    Tally,
)
from mlxsup.supervisor.sockets.zmtp import to_wire

from support import pieces
from support.zmtp import read, ready

BODY_OF_X = len(pieces.piece("r", 0, "x").body)
REPLY = Reply(id=RequestId("c"), value={"a": 1})
DECODER = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)


def piece(seq: int, text: str = "x", id: str = "r") -> Deltas:
    return Deltas(deltas=[pieces.piece(id, seq, text)])


def done(id: str = "r") -> Done:
    return Done(id=RequestId(id), seq=9, finish_reason=FinishReason.STOP)


def sent(outbox: Outbox) -> list[Message]:
    """Everything that goes out, in order, a few bytes at a time."""
    inbound, messages = ready(), list[Message]()
    while outbox:
        piece = bytes(outbox.head()[:1000])
        outbox.drop(len(piece))
        messages += [DECODER.decode(frames) for frames in read(inbound, piece)]
    return messages


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(Tally())


def test_pieces_that_follow_each_other_become_one_and_order_is_kept_H7(outbox: Outbox) -> None:
    outbox.begin(to_wire(encode(piece(0))), 0)  # was tried: stays what it is
    outbox.add(piece(1))
    outbox.add(piece(2, id="other"))
    outbox.add(REPLY)
    outbox.add(piece(3))
    outbox.add(done())
    first, second, third, fourth, fifth = sent(outbox)
    assert first == piece(0)
    assert isinstance(second, Deltas)
    assert [(d.id, d.seq) for d in second.deltas] == [("r", 1), ("other", 2)]
    assert (third, fourth, fifth) == (REPLY, piece(3), done())


def test_what_was_tried_as_the_head_takes_nothing_more(outbox: Outbox) -> None:
    outbox.add(piece(0))
    outbox.drop(len(outbox.head()[:1]))  # one byte has left
    outbox.add(piece(1))
    inbound = ready()
    inbound.feed(to_wire(encode(piece(0)))[:1])
    rest = b""
    while outbox:
        rest += outbox.head()
        outbox.drop(len(outbox.head()))
    assert [DECODER.decode(frames) for frames in read(inbound, rest)] == [piece(0), piece(1)]


def test_so_many_pieces_are_one_message_and_no_more(outbox: Outbox) -> None:
    count = MAX_MERGED_BYTES // (MESSAGE_OVERHEAD_BYTES + BODY_OF_X)
    assert count < MAX_MERGED_DELTAS
    for seq in range(count + 1):
        outbox.add(piece(seq))
    lengths = [len(m.deltas) for m in sent(outbox) if isinstance(m, Deltas)]
    assert lengths == [count, 1]


def test_pieces_of_just_the_merged_size_are_one_message(outbox: Outbox) -> None:
    half = MAX_MERGED_BYTES // 2 - MESSAGE_OVERHEAD_BYTES
    for seq, size in enumerate((half, half, 0)):
        delta = ClientDelta(id=RequestId("r"), seq=seq, tokens=b"", body=bytes(size))
        outbox.add(Deltas(deltas=[delta]))
    assert [len(m.deltas) for m in sent(outbox) if isinstance(m, Deltas)] == [2, 1]


def test_a_message_of_more_pieces_than_are_merged_is_sent_as_it_is(outbox: Outbox) -> None:
    deltas = [pieces.piece("r", n) for n in range(MAX_MERGED_DELTAS)]
    outbox.add(Deltas(deltas=deltas))
    outbox.add(piece(MAX_MERGED_DELTAS))
    assert [len(m.deltas) for m in sent(outbox) if isinstance(m, Deltas)] == [512, 1]


def test_its_bytes_are_those_of_what_it_holds_and_shared_with_others() -> None:
    tally = Tally()
    one, other = Outbox(tally), Outbox(tally)
    assert not one
    delta = ClientDelta(id=RequestId("r"), seq=0, tokens=pack_tokens([1]), body=b"abc")
    one.add(Deltas(deltas=[delta]))
    expected = MESSAGE_OVERHEAD_BYTES + 3 + 4
    assert one.size_bytes == tally.bytes == expected
    other.add(REPLY)
    wire = to_wire(encode(REPLY))
    assert other.size_bytes == MESSAGE_OVERHEAD_BYTES + len(wire)
    assert tally.bytes == expected + MESSAGE_OVERHEAD_BYTES + len(wire)
    assert other.head() == wire
    assert (other.size_bytes, tally.bytes) == (len(wire), expected + len(wire))
    other.drop(3)
    assert other.head() == wire[3:]
    other.drop(len(wire) - 3)
    assert (other.size_bytes, tally.bytes, bool(other)) == (0, expected, False)
    other.begin(b"abcd", 1)
    assert (bytes(other.head()), tally.bytes) == (b"bcd", expected + 3)
    other.drop(3)
    one.add(piece(1))
    one.clear()
    assert (one.size_bytes, tally.bytes, bool(one)) == (0, 0, False)


def test_only_ends_are_kept_and_a_good_end_is_one_no_more_P15() -> None:
    tally = Tally()
    outbox = Outbox(tally)
    failed = Failed(id=RequestId("f"), error={"code": "internal", "message": "m"})
    begun = to_wire(encode(REPLY))
    outbox.begin(begun, 5)
    outbox.add(piece(0))
    outbox.add(done("d"))
    outbox.add(Event(id=RequestId("e"), value={}))
    outbox.add(failed)
    outbox.add(REPLY)
    outbox.keep_only_ends()
    assert tally.bytes == outbox.size_bytes
    assert outbox.head() == begun[5:], "what has begun to leave must end, or nothing can be read"
    outbox.drop(len(begun) - 5)
    slow, *others = sent(outbox)
    assert isinstance(slow, Failed)
    assert (slow.id, slow.error["code"]) == ("d", "slow_consumer")
    assert others == [failed, REPLY]
    assert tally.bytes == 0
