"""The sockets of one incarnation of a worker, with a bare DEALER as the worker."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import zmq

from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, Hello, WorkerMessage
from mlxsup.supervisor.core.events import Event, WorkerSaid
from mlxsup.supervisor.sockets import worker_link
from mlxsup.supervisor.sockets.transport import LoopSocket, Monitor, Socket
from mlxsup.supervisor.sockets.worker_link import WorkerLink

from .eventually_async import eventually_async
from .loop_sockets import watched_sockets

HELLO = Hello(
    model=ModelName("m"), generation=Generation(3), token="secret", pid=42, version="0.1.0"
)
BEAT = Heartbeat(step=1, phase=WorkerPhase.IDLE, phase_s=0.5)


class Bench:
    """A `WorkerLink` under test, with what a worker has at the other end.

    Attributes:
        events: it has posted, in order.
        sockets: inside of it, by their type.
        heard: of its connections: ZeroMQ's events, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.path = folder / "w1.sock"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.heard: list[int] = []
        with (
            watched_sockets() as self.sockets,
            patch.object(worker_link, "Monitor", self._make_monitor),
        ):
            self.link = WorkerLink(
                self.context,
                self.path,
                model=ModelName("m"),
                generation=Generation(3),
                token="secret",
                max_concurrency=2,
                post=self.events.append,
                now=lambda: 5.0,
            )
        self.link.pid = 42
        self.worker_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.worker = self.worker_context.socket(zmq.DEALER)
        self.worker.connect(self.link.endpoint)

    def _make_monitor(
        self, socket: Socket, events: int, take: Callable[[int, int], None]
    ) -> Monitor:
        def take_noted(event: int, connection: int) -> None:
            self.heard.append(event)
            take(event, connection)

        return Monitor(socket, events, take_noted)

    @property
    def socket(self) -> LoopSocket:
        """The link's own, for all but beats."""
        return self.sockets[zmq.ROUTER].loop_socket

    def say(self, message: Message) -> None:
        self.worker.send_multipart(encode(message))

    def beat(self, message: Message) -> None:
        with self.worker_context.socket(zmq.PUSH) as socket:
            socket.connect(self.link.endpoint + ".beat")
            socket.send_multipart(encode(message))

    async def event(self, number: int = 0) -> Event:
        await eventually_async(lambda: len(self.events) > number)
        return self.events[number]

    async def said(self, number: int = 0) -> WorkerMessage:
        """The message that the event of this number carries."""
        event = await self.event(number)
        assert isinstance(event, WorkerSaid)
        return event.message

    def close(self) -> None:
        self.worker_context.destroy(linger=0)
        self.link.close()
        self.link.close()
        self.context.term()


def run(body: Callable[[Bench], Awaitable[None]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))

    async def main() -> None:
        bench = Bench(folder)
        try:
            async with asyncio.timeout(60):
                await body(bench)
        finally:
            bench.close()
        assert not bench.path.exists()

    try:
        asyncio.run(main())
    finally:
        shutil.rmtree(folder)
