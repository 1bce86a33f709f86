"""The daemon's socket, played by a ROUTER, and a connection to it with a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import zmq

from mlxsup.client.connection import Connection
from mlxsup.client.link import Link
from mlxsup.client.session import Item
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Ping
from mlxsup.protocol.clock import PULSE_S, Clock
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message

from .eventually import eventually

A = RequestId("a")


class Box:
    """An inbox that is a list."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)


class Router:
    """The daemon's socket, and a connection to it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/c.sock"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.bind()
        self.now = 100.0
        self.links: list[tuple[bool, bool]] = []
        self.is_busy = False
        self.connection = Connection(
            self.endpoint, self.on_link, Clock(lambda: self.now), lambda: self.is_busy
        )
        self.peer = b""

    def bind(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(self.endpoint)
        return socket

    def on_link(self, old: Link | None, new: Link | None) -> None:
        self.links.append((old is not None, new is not None))

    def pass_time(self, seconds: float) -> None:
        """Pumps in each pulse of this time, and at its end."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + PULSE_S)
            assert not self.connection.pump()

    def next(self) -> Message:
        """What the client sent."""
        eventually(self.can_read, timeout_s=60.0)
        self.peer, *frames = self.socket.recv_multipart()
        return Decoder(CLIENT_MESSAGES, is_strict=True).decode(frames)

    def can_read(self) -> bool:
        self.connection.pump()
        return bool(self.socket.poll(10))

    def send(self, message: Message) -> None:
        self.socket.send_multipart([self.peer, *encode(message)])

    def pump_until(self, is_so: Callable[[], bool]) -> None:
        def pumped() -> bool:
            self.connection.pump()
            return is_so()

        eventually(pumped, timeout_s=60.0)

    def command(self, request_id: RequestId = A) -> Box:
        box = Box()
        self.connection.open_command(request_id, encode(Ping(id=request_id)), box)
        return box
