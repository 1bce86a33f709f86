"""One connection to a supervisor: a DEALER socket and its monitor, never blocking."""

from __future__ import annotations

import errno
import struct
from contextlib import ExitStack
from enum import Enum, auto
from typing import Any

import zmq

from mlxsup.protocol.codec import MAX_FRAME_BYTES

NO_RECONNECT_MS = 3_600_000
"""A link is one connection: it is dropped when that ends. libzmq must not get "never" (-1), because
then it drops what had arrived and was not read yet."""

MONITOR_EVENT = struct.Struct("=HI")
"""A monitor's first frame: the event and its value, in the machine's byte order."""

POLLIN = int(zmq.POLLIN)

HANDSHAKE_LIMIT_MS = 60_000
"""Longer than the session waits: it tells a daemon that lacks the CPU from one that is gone, and
libzmq does not."""

CLOSE_LINGER_MS = 500


class LinkState(Enum):
    """The state of a connection."""

    CONNECTING = auto()
    CONNECTED = auto()
    LOST = auto()


class Link:
    """A connection, used by one thread.

    Both file descriptors are edge-triggered: after every wake and after every send, call `receive`
    until it returns None, and `update`.

    Args:
        context: makes the socket.
        endpoint: `ipc://…`; if no daemon listens there, `state` shows it at once.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.was_connected = False
        self.was_turned_away = False
        self.was_reset = False
        self.was_heard = False
        self.state = LinkState.CONNECTING
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        with ExitStack() as undo:
            undo.callback(self.socket.close, 0)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.RECONNECT_IVL, NO_RECONNECT_MS)
            self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            # The client always keeps reading, and bounds its inboxes itself; what is unsent is
            # bounded by what its owner has open at once.
            self.socket.setsockopt(zmq.RCVHWM, 0)
            self.socket.setsockopt(zmq.SNDHWM, 0)
            self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_CLOSED
                | zmq.EVENT_DISCONNECTED
            )
            undo.callback(self.monitor.close, 0)
            self.socket.connect(endpoint)
            undo.pop_all()

    def send(self, frames: list[bytes]) -> None:
        """Send frames in order; libzmq keeps those that the daemon has no room for yet."""
        self.socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self) -> bytes | None:
        """Return the next message, each of which has one frame; None if there is none now."""
        try:
            frame = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.was_heard = True
        return frame

    def has_message(self) -> bool:
        """True if a message can be received now; asking costs half as much as the exception of an
        empty `receive`."""
        return _has_message(self.socket)

    def update(self) -> LinkState:
        """Return the state, after reading the monitor. LOST may leave messages to receive."""
        while self.state is not LinkState.LOST and _has_message(self.monitor):
            frames = self.monitor.recv_multipart(zmq.NOBLOCK)
            # `zmq.utils.monitor` would do this, but it imports asyncio.
            event, value = MONITOR_EVENT.unpack(frames[0])
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # A clean end comes from a daemon; a reset may come from one that has just died.
                self.was_turned_away = value == errno.EPIPE
                self.was_reset = value == errno.ECONNRESET
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = LinkState.CONNECTED
                self.was_connected = True
            else:
                self.state = LinkState.LOST
        return self.state

    def close(self, linger_ms: int) -> None:
        """End the connection; what was sent has this long to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    events: Any = socket.getsockopt(zmq.EVENTS)
    return bool(events & POLLIN)
