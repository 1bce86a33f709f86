"""A connection that was accepted, and the turns in which all of them are read and written."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mlxsup.protocol.codec import encode
from mlxsup.protocol.message import Message

from .outbox import Outbox, Tally
from .peer import end
from .zmtp import GREETING, Inbound, ZmtpError, to_wire

TURN_FRAMES = 128
TURN_BYTES = 1024 * 1024
"""The most that a turn reads of all connections before the loop does something else."""

FRAMES_OF_ONE = 16
"""How many frames of one connection to read before another one gets its turn."""

READ_BYTES = 64 * 1024

MAX_LEAVING_BYTES = 64 * 1024
"""How much is collected in a turn before it is sent."""
WRITES_IN_TURN = 16

Served = TypeVar("Served", bound="Connection")


class Owner(Generic[Served]):
    """Hears of the connections that it has accepted."""

    def met(self, connection: Served) -> None:
        """Hear that the handshake is over."""

    def take(self, connection: Served, frames: list[bytes]) -> None:
        """Take a message."""

    def was_read(self, connection: Served) -> None:
        """Hear that some was read; a part of a message may be left."""

    def has_unsent(self, connection: Served) -> None:
        """Hear that the outbox has grown."""

    def has_sent(self, connection: Served) -> None:
        """Hear that the outbox is empty again."""

    def has_ended(self, connection: Served) -> None:
        """Hear that the socket is closed; by then all that the peer sent was taken."""


class Turns:
    """Reads what has arrived in turns, and sends at the end of each what was written in it.

    A turn is what runs `with` it.

    Args:
        now: the time, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.chunk = memoryview(bytearray(READ_BYTES))
        # Each connection is in them once at most.
        self._readable: deque[Connection] = deque()
        self._leaving: list[Connection] = []
        self._is_due = False
        self._is_under_way = False

    def __enter__(self) -> None:
        self._is_under_way = True

    def __exit__(self, *raised: object) -> None:
        self._is_under_way = False
        self.flush()

    def read_soon(self, connection: Connection) -> None:
        """Have it read in its turn, so that a round of the loop does not grow with who talks."""
        if not connection.is_queued:
            connection.is_queued = True
            self._readable.append(connection)
            self._be_due()

    def leave_soon(self, connection: Connection) -> None:
        """Have what it has `leaving` sent at the end of the turn, or of the loop's round."""
        if not self._leaving and not self._is_under_way:
            asyncio.get_running_loop().call_soon(self.flush)
        self._leaving.append(connection)

    def flush(self) -> None:
        """Send what was written so far."""
        leaving, self._leaving = self._leaving, []
        for connection in leaving:
            connection.leave()

    def _be_due(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        """Read from those that have sent something, each for a moment."""
        self._is_due = False
        frames, size_bytes = 0, 0
        with self:
            while self._readable and frames < TURN_FRAMES and size_bytes < TURN_BYTES:
                connection = self._readable.popleft()
                connection.is_queued = False
                if connection.is_reading:
                    size_bytes += connection.read()
                    frames += FRAMES_OF_ONE if connection.is_queued else 1
        if self._readable:
            self._be_due()


class Connection:
    """A connection to a peer that speaks ZMTP: what it sends, and what it has yet to be sent.

    Attributes:
        socket: its end here.
        inbound: what it sends.
        leaving: bytes that leave at the end of the turn.
        outbox: what its socket had no room for.
        progressed_at: when some of that was last sent, or the first began to wait.
        is_first: whether it is read as soon as something has come, before all others.
        is_queued: whether it waits for its turn of reading.
        is_reading: whether what it sends is read at all; False once it has ended.
        is_ended: whether its socket is closed.

    Args:
        owner: serves it.
        turns: when it is read and written.
        accepted: its socket.
        peer: the type that the peer's ZeroMQ socket must have.
        tally: also counts the bytes in its outbox.
    """

    __slots__ = (
        "_is_met",
        "_owner",
        "_turns",
        "inbound",
        "is_ended",
        "is_first",
        "is_queued",
        "is_reading",
        "leaving",
        "outbox",
        "progressed_at",
        "socket",
    )

    def __init__(
        self, owner: Owner[Any], turns: Turns, accepted: socket.socket, *, peer: bytes, tally: Tally
    ) -> None:
        accepted.setblocking(False)
        self._owner = owner
        self._turns = turns
        self.socket = accepted
        self.inbound = Inbound(peer)
        self.leaving = bytearray()
        self.outbox = Outbox(tally)
        self.progressed_at = 0.0
        self.is_first = self.is_queued = self.is_reading = self.is_ended = self._is_met = False
        self.resume()
        self.write(GREETING)

    # ------------------------------------------------------------ in

    def resume(self) -> None:
        """Read from now on."""
        self.is_reading = True
        asyncio.get_running_loop().add_reader(self.socket.fileno(), self._on_readable)

    def pause(self) -> None:
        """Read nothing until `resume`; what it sends waits in its socket."""
        self.is_reading = False
        asyncio.get_running_loop().remove_reader(self.socket.fileno())

    def read(self, most_frames: int = FRAMES_OF_ONE) -> int:
        """Take what it has sent, and receive once; return how many bytes were received."""
        inbound, received = self.inbound, 0
        try:
            for _ in range(most_frames):
                frames = inbound.next()
                if frames is None:
                    if received or not (received := self._receive()):
                        break
                elif frames:
                    self._owner.take(self, frames)
                elif inbound.is_ready and not self._is_met:
                    self._is_met = True
                    self._owner.met(self)
                if self.is_ended:
                    break
            else:
                self._turns.read_soon(self)  # there may be more
        except ZmtpError as error:
            if error.answer and not self.outbox:
                self._send(error.answer)
            self.end()
        if self.is_ended:
            return received
        if inbound.answers:
            if not self.outbox:  # otherwise it has enough to hear
                self.write(bytes(inbound.answers))
            inbound.answers.clear()
        self._owner.was_read(self)
        return received

    def drain(self) -> None:
        """Take all that has arrived, and no more of a peer that keeps sending."""
        left_bytes = -1 if self.is_ended else _arrived_bytes(self.socket)
        with self._turns:
            # The last one sees its end.
            while left_bytes >= 0 and (received := self.read(sys.maxsize)):
                left_bytes = -1 if self.is_ended else left_bytes - received

    def _on_readable(self) -> None:
        if self.is_first and not self.is_queued:
            with self._turns:
                self.read(TURN_FRAMES)
        else:
            self._turns.read_soon(self)

    def _receive(self) -> int:
        """Return how many bytes were received: 0 if there are none now, or if it has ended."""
        try:
            received = self.socket.recv_into(self._turns.chunk)
        except BlockingIOError:
            return 0
        except OSError:
            received = 0
        if received:
            self.inbound.feed(self._turns.chunk[:received])
        else:
            self.end()
        return received

    # ------------------------------------------------------------ out

    def send(self, message: Message) -> None:
        """Send a message, or keep it if there is no room."""
        if self.outbox:
            self.outbox.add(message)
            self._owner.has_unsent(self)
        else:
            self.write(to_wire(encode(message)))

    def write(self, wire: bytes) -> None:
        """Send at the end of the turn, in one call with what else it gets; the outbox is empty."""
        if not self.leaving:
            if len(wire) > MAX_LEAVING_BYTES:
                self._send(wire)
                return
            self._turns.leave_soon(self)
        self.leaving += wire
        if len(self.leaving) > MAX_LEAVING_BYTES:
            self.leave()

    def leave(self) -> None:
        """Send what is leaving, now."""
        if self.leaving:
            wire = bytes(self.leaving)
            self.leaving.clear()
            self._send(wire)

    def _send(self, wire: bytes) -> None:
        """Send bytes, and keep those that the socket has no room for."""
        taken = self._try_send(wire)
        if taken == len(wire):
            return
        self.outbox.begin(wire, taken)
        self.progressed_at = self._turns.now()
        asyncio.get_running_loop().add_writer(self.socket.fileno(), self._on_writable)
        self._owner.has_unsent(self)

    def _try_send(self, wire: bytes | memoryview) -> int:
        """Return how many bytes are done with: there was room for them, or the peer is gone."""
        try:
            return self.socket.send(wire)
        except BlockingIOError:
            return 0
        except OSError:
            asyncio.get_running_loop().call_soon(self._end_after_words)
            return len(wire)

    def _end_after_words(self) -> None:
        """End it, but take what it has sent before: a dying worker's last tokens count."""
        self.drain()
        self.end()

    def _on_writable(self) -> None:
        """Send what there is room for."""
        for _ in range(WRITES_IN_TURN):
            if not self.outbox:
                asyncio.get_running_loop().remove_writer(self.socket.fileno())
                self._owner.has_sent(self)
                return
            wire = self.outbox.head()
            taken = self._try_send(wire)
            if taken:
                self.outbox.drop(taken)
                self.progressed_at = self._turns.now()
            if taken < len(wire):
                return

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """Close it and tell its owner; a second time does nothing."""
        if not self.is_ended:
            self.close()
            self._owner.has_ended(self)

    def close(self) -> None:
        """Close its socket, so that the peer reads what it was sent and then an ordinary end."""
        self.is_ended = True
        self.pause()
        asyncio.get_running_loop().remove_writer(self.socket.fileno())
        self.leaving.clear()
        self.outbox.clear()
        end(self.socket)


def _arrived_bytes(source: socket.socket) -> int:
    """Return how many bytes wait to be read."""
    count = fcntl.ioctl(source, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)
