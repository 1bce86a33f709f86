"""What is written to clients and read from them: ZMTP against ZeroMQ itself, and the outbox."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import (
    SUPERVISOR_TO_CLIENT,
    ClientDelta,
    Deltas,
    Done,
    Event,
    Failed,
    Reply,
)
from mlxsup.protocol.codec import MAX_FRAME_BYTES, Decoder, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
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
from mlxsup.supervisor.sockets.zmtp import (
    GREETING,
    MAX_COMMAND_BYTES,
    MAX_FRAMES,
    Inbound,
    ZmtpError,
    to_wire,
)

from support.client import pieces
from support.client.zmtp import PING, READY, read, ready

PONG = b"\x04\x15\x04PONG" + bytes(range(16))

frames = st.lists(st.binary(max_size=600), min_size=1, max_size=5)


# ---------------------------------------------------------------- against ZeroMQ


class Dealer:
    """A real DEALER, and the bare socket at its other end, over which the handshake has gone."""

    def __init__(self, folder: Path, **options: int | bytes) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            listener.listen()
            self.socket.connect(f"ipc://{folder}/s")
            self.bare, _ = listener.accept()
        self.bare.settimeout(30)
        self.inbound = Inbound()
        self.bare.sendall(GREETING)
        while not self.inbound.is_ready:
            assert read(self.inbound, self.bare.recv(1)) == []
        self.answer()

    def answer(self) -> None:
        self.bare.sendall(self.inbound.answers)
        self.inbound.answers.clear()

    def close(self) -> None:
        self.bare.close()
        self.context.destroy(linger=0)


@contextmanager
def dealer(**options: int | bytes) -> Iterator[Dealer]:
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as folder:
        made = Dealer(Path(folder), **options)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Dealer]:
    with dealer() as made:
        yield made


@given(message=frames)
def test_zeromq_reads_what_is_written_and_what_it_writes_is_read(
    peer: Dealer, message: list[bytes]
) -> None:
    peer.bare.sendall(to_wire(message))
    assert peer.socket.poll(30_000)
    assert peer.socket.recv_multipart() == message
    peer.socket.send_multipart(message)
    found: list[list[bytes]] = []
    while not found:
        found = read(peer.inbound, peer.bare.recv(65536))
    assert found == [message]


def test_large_frames_pass_in_both_directions(peer: Dealer) -> None:
    message = [b"h", bytes(9 * 1024 * 1024)]
    peer.socket.send_multipart(message)
    found: list[list[bytes]] = []
    while not found:
        found = read(peer.inbound, peer.bare.recv(65536))
        assert peer.inbound.announced_bytes in (0, 1, 1 + len(message[1]))
    assert found == [message]
    peer.bare.sendall(to_wire(message))
    assert peer.socket.recv_multipart() == message


def test_a_peer_that_asks_for_signs_of_life_gets_them() -> None:
    with dealer(HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=2000, ROUTING_ID=b"mine") as peer:
        assert peer.inbound.routing_id == b"mine"
        for _ in range(3):
            while not peer.inbound.answers:
                assert read(peer.inbound, peer.bare.recv(65536)) == []
            assert b"PONG" in peer.inbound.answers
            peer.answer()
        peer.bare.sendall(to_wire([b"still there"]))
        assert peer.socket.poll(30_000)
        assert peer.socket.recv() == b"still there"


# ---------------------------------------------------------------- pieces of any size


@settings(max_examples=40)  # each has hundreds of pieces
@given(messages=st.lists(frames, max_size=5), data=st.data())
def test_bytes_may_come_in_any_pieces_with_commands_between_the_frames(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    """A peer may send PING between the frames of a message: libzmq does."""
    wire = bytearray(GREETING + READY)
    pings = 0
    for message in messages:
        for number, frame in enumerate(message, 1):
            if data.draw(st.booleans()):
                wire += PING
                pings += 1
            header = to_wire([frame])[: -len(frame) or None]
            wire += bytes([header[0] | (number < len(message))]) + header[1:] + frame
    inbound, found = Inbound(), []
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        found += read(inbound, bytes(wire[:size]))
        del wire[:size]
    assert found == messages
    assert inbound.answers.count(PONG) == pings


# ---------------------------------------------------------------- hostile bytes


@given(garbage=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(garbage: bytes) -> None:
    for inbound in (Inbound(), ready()):
        try:
            read(inbound, garbage)
        except ZmtpError:
            pass


@given(data=st.data())
def test_any_changed_byte_of_a_handshake_is_read_or_refused(data: st.DataObject) -> None:
    wire = bytearray(GREETING + READY + to_wire([b"a", b"b"]))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(Inbound(), bytes(wire))
    except ZmtpError:
        pass


def long_frame(flags: int, size: int) -> bytes:
    return bytes([flags | 2]) + size.to_bytes(8, "big")


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (long_frame(0, MAX_FRAME_BYTES + 1), f"{MAX_FRAME_BYTES} bytes"),
        (long_frame(0, 2**63), f"{MAX_FRAME_BYTES} bytes"),
        (long_frame(4, MAX_COMMAND_BYTES + 1), "command has at most"),
        (b"\x05\x00", "flags 5"),
        (b"\x08\x00", "flags 8"),
        (b"\x01\x00" * (MAX_FRAMES + 1), "1024 frames"),
        (b"\x01\x01x" + long_frame(0, MAX_FRAME_BYTES), f"{MAX_FRAME_BYTES} bytes"),
    ],
)
def test_too_much_is_refused_before_it_is_kept(hostile: bytes, said: str) -> None:
    with pytest.raises(ZmtpError, match=said):
        read(ready(), hostile)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"G", "not ZMTP 3"),
        (b"\xff" * 10, "not ZMTP 3"),
        (GREETING[:10] + b"\x02", "ZMTP 2"),
        (GREETING.replace(b"NULL\0", b"PLAIN"), "NULL"),
        (GREETING + to_wire([b"early"]), "before READY"),
        (GREETING + PING, "and not READY"),
        (GREETING + b"\x04\x00", "and not READY"),
        (GREETING + READY.replace(b"DEALER", b"ROUTER"), "no DEALER"),
        (GREETING + b"\x04\x06\x05READY", "no DEALER"),
        (GREETING + b"\x04\x09\x05READY\x0bSo", "cut off"),
    ],
)
def test_a_handshake_that_is_wrong_is_refused_as_soon_as_it_shows(sent: bytes, said: str) -> None:
    with pytest.raises(ZmtpError, match=said) as caught:
        read(Inbound(), sent)
    if said == "no DEALER":
        reason = b"a client must be a DEALER socket"
        assert caught.value.answer == b"\x04\x27\x05ERROR" + bytes([len(reason)]) + reason


def test_one_call_reads_one_frame_so_that_a_flood_has_turns() -> None:
    inbound = ready()
    inbound.feed(PING * 3 + b"\x01\x00\x00\x00")
    assert [inbound.next() for _ in range(6)] == [[], [], [], [], [b"", b""], None]


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


def test_a_head_that_has_begun_to_leave_is_not_merged(outbox: Outbox) -> None:
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
    outbox.add(Deltas(deltas=[pieces.piece("r", n) for n in range(MAX_MERGED_DELTAS)]))
    outbox.add(piece(MAX_MERGED_DELTAS))
    lengths = [len(m.deltas) for m in sent(outbox) if isinstance(m, Deltas)]
    assert lengths == [count, 1, MAX_MERGED_DELTAS, 1]


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
    failed = Failed(id=RequestId("f"), error=RemoteError(ErrorCode.INTERNAL, "m"))
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
    assert (slow.id, slow.error.code) == ("d", "slow_consumer")
    assert others == [failed, REPLY]
    assert tally.bytes == 0
