"""What the daemon reads and writes of ZMTP, against ZeroMQ itself and against hostile bytes."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.codec import MAX_FRAME_BYTES
from mlxsup.supervisor.sockets.zmtp import (
    GREETING,
    MAX_COMMAND_BYTES,
    MAX_FRAMES,
    Inbound,
    ZmtpError,
    to_wire,
)

from support.zmtp import PING, READY, read, ready

PONG = b"\x04\x07\x04PONGab"

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
    with dealer(HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=2000) as peer:
        for _ in range(3):
            while not peer.inbound.answers:
                assert read(peer.inbound, peer.bare.recv(65536)) == []
            assert b"PONG" in peer.inbound.answers
            peer.answer()
        peer.bare.sendall(to_wire([b"still there"]))
        assert peer.socket.poll(30_000)
        assert peer.socket.recv() == b"still there"


def test_a_peer_that_names_itself_is_heard_to_have() -> None:
    with dealer(ROUTING_ID=b"mine") as peer:
        assert peer.inbound.routing_id == b"mine"


# ---------------------------------------------------------------- pieces of any size


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
        (long_frame(0, MAX_FRAME_BYTES + 1), "16777216 bytes"),
        (long_frame(0, 2**63), "16777216 bytes"),
        (long_frame(4, MAX_COMMAND_BYTES + 1), "command has at most"),
        (b"\x05\x00", "flags 5"),
        (b"\x08\x00", "flags 8"),
        (b"\x01\x00" * (MAX_FRAMES + 1), "1024 frames"),
        (b"\x01\x01x" + long_frame(0, MAX_FRAME_BYTES), "16777216 bytes"),
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
    with pytest.raises(ZmtpError, match=said):
        read(Inbound(), sent)


def test_another_kind_of_socket_is_told_which_one_is_needed() -> None:
    with pytest.raises(ZmtpError) as caught:
        read(Inbound(), GREETING + READY.replace(b"DEALER", b"ROUTER"))
    reason = b"a client must be a DEALER socket"
    assert caught.value.answer == b"\x04\x27\x05ERROR" + bytes([len(reason)]) + reason


def test_one_call_reads_one_frame_so_that_a_flood_has_turns() -> None:
    inbound = ready()
    inbound.feed(PING * 3 + b"\x01\x00\x00\x00")
    assert [inbound.next() for _ in range(6)] == [[], [], [], [], [b"", b""], None]
