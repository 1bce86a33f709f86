"""The sockets of workers, which speak ZMTP, and the turns in which all sockets are read."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .listener import identity_of, listen
from .zmtp import GREETING, Inbound, ZmtpError

TURN_MESSAGES = 128
TURN_BYTES = 1024 * 1024
"""How many messages to take from one socket before others get their turn."""

READ_BYTES = 64 * 1024

MAX_LINES = 16
"""Connections at one door; beyond them the oldest is ended."""

RETRY_S = 0.1
"""The pause before the next accept after no file descriptor was free."""

_at_turn_end: list[Callable[[], None]] | None = None
"""What must still be done in the turn under way; None between turns."""


@contextmanager
def turn() -> Iterator[None]:
    """Do at the end what `at_turn_end` was given, once for all that happens inside."""
    global _at_turn_end
    ends = _at_turn_end = []
    try:
        yield
    finally:
        _at_turn_end = None
        for function in ends:
            function()


def at_turn_end(function: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Have this called at the end of the turn, or between turns in the loop's next round."""
    if _at_turn_end is None:
        loop.call_soon(function)
    else:
        _at_turn_end.append(function)


class Line:
    """A connection that was accepted at a `Door`.

    Attributes:
        socket: its end here.
        inbound: what it sends.
        unsent: what its socket had no room for, in order.
        is_ended: whether its socket is closed.
    """

    __slots__ = ("inbound", "is_ended", "socket", "unsent")

    def __init__(self, accepted: socket.socket, peer: bytes) -> None:
        self.socket = accepted
        self.inbound = Inbound(peer)
        self.unsent: deque[memoryview] = deque()
        self.is_ended = False

    def send(self, wire: bytes) -> None:
        """Send bytes, or keep those that there is no room for; drop them once it has ended."""
        if self.is_ended:
            return
        self.unsent.append(memoryview(wire))
        if len(self.unsent) == 1 and not self._send_some():
            asyncio.get_running_loop().add_writer(self.socket.fileno(), self._on_writable)

    def close(self) -> None:
        """Close its socket."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.socket.fileno())
        loop.remove_writer(self.socket.fileno())
        self.is_ended = True
        self.unsent.clear()
        self.socket.close()

    def _on_writable(self) -> None:
        if self._send_some():
            asyncio.get_running_loop().remove_writer(self.socket.fileno())

    def _send_some(self) -> bool:
        """Send what there is room for; return whether nothing is left."""
        try:
            while self.unsent:
                taken = self.socket.send(self.unsent[0])
                if taken < len(self.unsent[0]):
                    self.unsent[0] = self.unsent[0][taken:]
                else:
                    self.unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:  # it has ended, as is about to be read
            self.unsent.clear()
        return True


class Door:
    """A Unix socket of one worker: it accepts whoever connects, and reads what they send.

    Args:
        path: of the socket.
        peer: the type of the peers' ZeroMQ sockets.
        take: called with the line and the frames of each message.
        come: called when a line was accepted.
        leave: called with a line that has ended; by then all that it sent was taken.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        peer: bytes,
        *,
        take: Callable[[Line, list[bytes]], None],
        come: Callable[[], None] = lambda: None,
        leave: Callable[[Line], None] = lambda line: None,
    ) -> None:
        self._path = path
        self._peer = peer
        self._take = take
        self._come = come
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._chunk = memoryview(bytearray(READ_BYTES))
        # Bounded by MAX_LINES.
        self.lines: list[Line] = []
        self._listener, self._identity = listen(path)
        self._is_open = True
        self._watch()

    def drain(self) -> None:
        """Take all that has arrived, and no more of a peer that keeps sending."""
        self._accept()
        for line in list(self.lines):
            left_bytes = -1 if line.is_ended else _arrived_bytes(line.socket)
            while left_bytes >= 0 and (taken := self._read(line)):  # the last one sees its end
                left_bytes -= taken

    def hide(self) -> None:
        """Accept no others from now on, and remove the socket's file.

        Raises:
            OSError: it cannot be removed.
        """
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        if self._identity is not None:  # the path may be another daemon's by now
            if identity_of(self._path) == self._identity:
                self._path.unlink(missing_ok=True)
            self._identity = None

    def close(self) -> None:
        """Close everything; a second time does nothing.

        Raises:
            OSError: the socket's file cannot be removed; the sockets are closed.
        """
        for line in self.lines:
            line.close()
        self.lines.clear()
        self.hide()

    def end(self, line: Line) -> None:
        """End a connection."""
        if not line.is_ended:
            line.close()
            self.lines.remove(line)
            self._leave(line)

    def _watch(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        while self._is_open:
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no file is left: nothing spins until there is one
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(RETRY_S, self._watch)
                return
            accepted.setblocking(False)
            line = Line(accepted, self._peer)
            self.lines.append(line)
            self._loop.add_reader(accepted.fileno(), self._read, line)
            self._come()
            line.send(GREETING)
            if len(self.lines) > MAX_LINES:
                self.end(self.lines[0])

    def _read(self, line: Line) -> int:
        """Take what there is for a moment; return how many bytes that was."""
        try:
            received = line.socket.recv_into(self._chunk)
        except BlockingIOError:
            return 0
        except OSError:
            received = 0
        if not received:
            self.end(line)
            return 0
        with turn():
            line.inbound.feed(self._chunk[:received])
            try:
                while not line.is_ended and (frames := line.inbound.next()) is not None:
                    if frames:
                        self._take(line, frames)
            except ZmtpError:
                self.end(line)
            if line.inbound.answers:
                line.send(bytes(line.inbound.answers))
                line.inbound.answers.clear()
        return 0 if line.is_ended else received


def _arrived_bytes(source: socket.socket) -> int:
    """Return how many bytes wait to be read."""
    count = fcntl.ioctl(source, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)
