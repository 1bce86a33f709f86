"""A client that is nothing but a socket and msgpack, for what no client of ours would say."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import zmq

from support.eventually import TIMEOUT_S


class RawClient:
    """A DEALER; `hear` gives messages as the plain maps that travel.

    Attributes:
        monitor: a socket that tells of the connection's end.

    Args:
        endpoint: of a daemon.
    """

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def say(self, frames: list[bytes]) -> None:
        """Send frames as they are."""
        self._socket.send_multipart(frames)

    def hear_any(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return the next message, signs of life included."""
        assert self._socket.poll(int(timeout_s * 1000)), "no answer"
        (frame,) = self._socket.recv_multipart()
        message: dict[str, Any] = msgpack.unpackb(frame)
        return message

    def hear(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return the next message that is neither a piece of a stream nor a sign of life."""
        until = time.monotonic() + timeout_s
        while True:
            message = self.hear_any(max(0.0, until - time.monotonic()))
            if message["type"] not in ("alive", "deltas"):
                return message

    def hear_error(self) -> dict[str, Any]:
        """Return the next such message, which must be an error."""
        message = self.hear()
        assert message["type"] == "failed", message
        return message
