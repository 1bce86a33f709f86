"""What both kinds of sockets share: a ZeroMQ socket in the event loop, without threads or polls."""

from __future__ import annotations

import asyncio
import errno
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

# Plain integers: arithmetic on the enumerations costs more than the calls that use them.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = _NOBLOCK | int(zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)

_MONITOR_EVENT = struct.Struct("=Hi")
"""A monitor's first frame: the event and its value, in the machine's byte order."""

TURN_MESSAGES = 128
TURN_BYTES = 1024 * 1024
"""How many messages to take from one socket before others get their turn."""


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


class LoopSocket:
    """Calls `take` for each message of a socket, on the event loop's thread.

    The descriptor of a ZeroMQ socket is edge-triggered, and any call on the socket can swallow an
    edge. So a socket through which something was sent is looked at once: at the end of the turn in
    which that happened, whichever socket's turn it is, otherwise in the loop's next round. A turn
    that only forwards then costs one round of the loop and not two.

    Args:
        socket: already bound; closed by `close`.
        take: called with the frames of each message.
        on_drained: called after each turn of receiving, when there may be room to send again.
    """

    def __init__(
        self,
        socket: Socket,
        take: Callable[[list[bytes]], None],
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        self.socket = socket
        self._take = take
        self._on_drained = on_drained
        self._loop = asyncio.get_running_loop()
        self._is_drain_scheduled = False
        self._is_look_due = False
        self._is_closed = False
        descriptor = socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._descriptor = descriptor
        self._loop.add_reader(descriptor, self._drain)
        self.drain_soon()

    def drain_soon(self) -> None:
        """Schedule a turn of receiving in the loop's next round."""
        if not self._is_drain_scheduled:
            self._is_drain_scheduled = True
            self._loop.call_soon(self._drain)

    def drain_now(self) -> None:
        """Take all messages that have arrived."""
        while self._receive_turn():
            pass

    def send(self, frames: list[bytes]) -> bool:
        """Send at once and return True, or return False if there is no room.

        Raises:
            zmq.ZMQError: the peer is unreachable.
        """
        try:
            for frame in frames[:-1]:
                self.socket.send(frame, _MORE)
            self.socket.send(frames[-1], _NOBLOCK)
        except zmq.Again:
            return False
        finally:
            # Sending, even in vain, may have swallowed the edge of something that arrived.
            if not self._is_look_due:
                self._is_look_due = True
                at_turn_end(self._look, self._loop)
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what was sent has this long to leave."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger_ms)

    def _look(self) -> None:
        """Have what arrived while something was sent taken, if anything did."""
        self._is_look_due = False
        if not self._is_closed and self._has_arrived():
            self.drain_soon()

    def _has_arrived(self) -> bool:
        return bool(self.socket.getsockopt(zmq.EVENTS) & _POLLIN)  # type: ignore[operator]

    def _drain(self) -> None:
        self._is_drain_scheduled = False
        if self._is_closed:
            return
        with turn():
            if self._receive_turn():
                self.drain_soon()
            if self._on_drained is not None and not self._is_closed:
                self._on_drained()

    def _receive_turn(self) -> bool:
        """Take some messages; return whether there may be more."""
        left_bytes = TURN_BYTES
        for _ in range(TURN_MESSAGES):
            if self._is_closed:
                return False
            if left_bytes <= 0:
                return True
            # A look costs a fifth of an error that says that there is nothing.
            if not self._has_arrived():
                return False
            frames = self._receive()
            left_bytes -= len(frames[-1])
            self._take(frames)
        return True

    def _receive(self) -> list[bytes]:
        return [frame.bytes for frame in self._frames()]

    def _frames(self) -> list[zmq.Frame]:
        # `recv_multipart` asks the socket after each frame whether there are more, which takes
        # longer than to receive one: pyzmq looks each option up in an enumeration.
        frames = [self.socket.recv(_NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(self.socket.recv(_NOBLOCK, copy=False))
        return frames


NO_SOURCE = -1


class TracedSocket(LoopSocket):
    """A socket that knows which connection the current message came over.

    Attributes:
        source: the descriptor of that connection, which libzmq may have closed since; NO_SOURCE
            if the peer speaks ZMTP 2 or less, for which libzmq does not say.
    """

    source = NO_SOURCE

    def _receive(self) -> list[bytes]:
        frames = self._frames()
        try:
            self.source = int(frames[-1].get(zmq.SRCFD))
        except zmq.ZMQError as error:
            if error.errno != errno.EINVAL:
                raise
            self.source = NO_SOURCE
        return [frame.bytes for frame in frames]


class Monitor:
    """Calls `take` for each event of a socket's connections.

    Args:
        socket: the socket whose connections to monitor.
        events: the kinds of events to take.
        take: called with the event's kind and its value.
    """

    def __init__(self, socket: Socket, events: int, take: Callable[[int, int], None]) -> None:
        self._socket = socket
        endpoint = f"inproc://monitor-{socket.getsockopt(zmq.FD)!r}"
        socket.monitor(endpoint, events)
        pair: Socket = socket.context.socket(zmq.PAIR)
        # libzmq can do this many things before anybody is notified of them.
        pair.setsockopt(zmq.RCVHWM, 1)
        pair.connect(endpoint)

        def take_event(frames: list[bytes]) -> None:
            take(*_MONITOR_EVENT.unpack_from(frames[0]))

        self._pair = LoopSocket(pair, take_event)

    def close(self) -> None:
        """End the events; must come before the socket is closed."""
        self._socket.disable_monitor()
        self._pair.close()


def bound_socket(
    context: Context, kind: int, endpoint: str, options: dict[zmq.SocketOption, int]
) -> Socket:
    """Return a socket that listens.

    Raises:
        zmq.ZMQError: it cannot listen.
    """
    socket = context.socket(kind)
    try:
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket
