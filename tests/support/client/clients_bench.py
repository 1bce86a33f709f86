"""The clients' socket under test, with real sockets at the other end."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import zmq

from mlxsup.protocol.client_messages import SUPERVISOR_TO_CLIENT, Alive, Deltas, Done, Generate
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import ConnectionId, ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.core.events import ClientGone, ClientSaid, Event
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets import connection as connection_module
from mlxsup.supervisor.sockets import outbox as outbox_module
from mlxsup.supervisor.sockets.clients import Client, Clients
from mlxsup.supervisor.sockets.connection import Turns
from mlxsup.supervisor.sockets.outbox import Tally

from support.client.pieces import piece
from support.eventually_async import eventually_async


class Peer:
    """A client made of a bare DEALER."""

    def __init__(
        self, endpoint: str, receive_high_water_mark: int = 0, routing_id: bytes = b""
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        self.socket.setsockopt(zmq.RCVHWM, receive_high_water_mark)
        self.socket.connect(endpoint)
        self._decoder = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)

    def say(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    async def hear(self, *, is_alive_shown: bool = False) -> Message:
        """The next message that is no sign of life."""
        while True:
            await eventually_async(lambda: self.socket.poll(0))
            message = self._decoder.decode(self.socket.recv_multipart())
            if is_alive_shown or not isinstance(message, Alive):
                return message

    def close(self) -> None:
        self.context.destroy(linger=0)


def encode_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The type of each message that is encoded from now on."""
    seen: list[str] = []

    def counting(message: Message) -> list[bytes]:
        seen.append(message.TYPE)
        return encode(message)

    for module in (connection_module, outbox_module):
        monkeypatch.setattr(module, "encode", counting)
    return seen


class NotedClient(Client):
    """One that can be referred to without keeping it."""

    __slots__ = ("__weakref__",)


class Bench:
    """A `Clients` under test; its events are collected.

    Attributes:
        warnings: for the daemon's log.
        tally: of what it owes.
    """

    def __init__(self, folder: Path, max_connections: int = 1000) -> None:
        self.events: list[Event] = []
        self.moment = 100.0
        self.is_closed = False
        self.path = folder / "c.sock"
        self.warnings: list[str] = []
        self.tally = Tally()
        self._made: weakref.WeakSet[Client] = weakref.WeakSet()
        self._noting = patch.object(clients_module, "Client", self._make_client)
        self._noting.start()
        with patch.object(clients_module, "Tally", self._tally):
            self.clients = Clients(
                self.path,
                turns=Turns(lambda: self.moment),
                post=self.events.append,
                max_connections=max_connections,
                warn=self.warnings.append,
            )
        self.peers: list[Peer] = []

    def _tally(self) -> Tally:
        return self.tally

    def _make_client(self, *given: Any, **more: Any) -> Client:
        connection = NotedClient(*given, **more)
        self._made.add(connection)
        return connection

    @property
    def connections(self) -> dict[ConnectionId, Client]:
        """Those that are remembered, wherever, although nothing ties them to a peer."""
        return {connection.id: connection for connection in self._made}

    def peer(self, receive_high_water_mark: int = 0) -> Peer:
        peer = Peer(self.clients.endpoint, receive_high_water_mark)
        self.peers.append(peer)
        return peer

    async def said(self, count: int) -> list[ClientSaid]:
        """Waits for that many messages of clients."""

        def found() -> list[ClientSaid]:
            return [e for e in self.events if isinstance(e, ClientSaid)]

        await eventually_async(lambda: len(found()) >= count)
        return found()

    async def gone(self, count: int) -> None:
        """Waits until that many clients are known to be gone."""
        await eventually_async(lambda: len(self.of_kind(ClientGone)) == count)

    def of_kind(self, kind: type[Event]) -> list[Any]:
        return [e for e in self.events if type(e) is kind]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        if not self.is_closed:
            self.close_all()

    def close_all(self) -> None:
        self.is_closed = True
        self._noting.stop()
        self.clients.close()


def run(body: Callable[[Bench], Awaitable[None]], **more: Any) -> None:
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))

    async def main() -> None:
        bench = Bench(folder, **more)
        try:
            async with asyncio.timeout(300):
                await body(bench)
        finally:
            bench.close()
        assert not bench.path.exists()

    try:
        asyncio.run(main())
    finally:
        shutil.rmtree(folder)


def generate(id: str) -> Generate:
    return Generate(id=RequestId(id), model=ModelName("m"), body=b"\x80")


def deltas(id: str, seq: int, text: str = "x") -> Deltas:
    return Deltas(deltas=[piece(id, seq, text)])


def done(id: str, seq: int) -> Done:
    return Done(id=RequestId(id), seq=seq, finish_reason=FinishReason.STOP)


async def fill(bench: Bench, connection: Any, id: str, count: int, text: str) -> None:
    for seq in range(count):
        bench.clients.send(connection, deltas(id, seq, text))
        if seq % 100 == 0:
            await asyncio.sleep(0)
