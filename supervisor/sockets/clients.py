"""The socket that clients connect to: who is let in, what each of them has open and may be owed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    Alive,
    Cancel,
    ClientMessage,
    Deltas,
    Done,
    Event,
    Failed,
    MessageToClient,
    Reply,
    Subscribe,
)
from mlxsup.protocol.codec import DecodeError, Decoder, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import ConnectionId
from mlxsup.protocol.message import Command, Message

from ..core.errors import duplicate_id, slow_consumer
from ..core.events import ClientGone, ClientSaid, ClientTooSlow
from ..core.events import Event as CoreEvent
from .connection import Connection, Owner, Turns
from .limits import KEPT_FILES, ConnectionLimits
from .listener import Listener
from .outbox import Tally
from .peer import Names, credentials_of, end
from .zmtp import to_wire

HANDSHAKE_LIMIT_S = 2.0

MAX_REFUSED = 64
"""How many connections beyond the limits are held until they know why they are refused, because a
typed error says more than a closed connection."""

REFUSAL_S = 2.0
"""How long they are held: a handshake and a first message, on a busy machine."""

LARGE_BYTES = 64 * 1024
MAX_LARGE_BYTES = 128 * 1024 * 1024
"""What the messages above LARGE_BYTES that are read at once may take until they are whole. The
others wait in the sockets of their senders."""
LARGE_LIMIT_S = 10.0
"""How long the reading of one may take while others wait for it."""

MAX_OPEN_PER_CONNECTION = 4096
MAX_UNSENT_BYTES = 8 * 1024 * 1024
MAX_UNSENT_IN_ALL_BYTES = 256 * 1024 * 1024
MAX_UNSENT_S = 10.0

ENDS = (Done, Failed, Reply)
"""Messages that end a request or a command."""

_ALIVE = to_wire(encode(Alive()))


class Client(Connection):
    """A client's connection.

    Attributes:
        id: which no other connection of this daemon has had.
        pid: of the process at the other end; None if the platform does not say.
        names: on whose behalf its messages are; found in the handshake.
        refusal: why it is not served; empty if it is.
        came_at: when it was accepted.
        open: ids of its requests and commands that have not ended.
        subscription: the id under which it gets changes.
        is_slow: whether it was given up, and has not read its ends since; it only gets terminal
            messages then.
    """

    __slots__ = ("came_at", "id", "is_slow", "names", "open", "pid", "refusal", "subscription")

    def __init__(
        self,
        owner: Owner[Client],
        turns: Turns,
        accepted: socket.socket,
        *,
        tally: Tally,
        id: ConnectionId,
        pid: int | None,
        refusal: str,
    ) -> None:
        self.id = id
        self.pid = pid
        self.names = Names()
        self.refusal = refusal
        self.came_at = turns.now()
        self.open: set[str] = set()
        self.subscription: str | None = None
        self.is_slow = False
        super().__init__(owner, turns, accepted, peer=b"DEALER", tally=tally)

    @property
    def has_anything_open(self) -> bool:
        """True if a request, a command or a subscription has not ended."""
        return bool(self.open) or self.subscription is not None

    def has_open(self, id: str) -> bool:
        """True if anything with this id has not ended."""
        return id in self.open or id == self.subscription

    def note_said(self, message: Command) -> None:
        """Record what a message opens; a second subscription replaces the first."""
        id = message.id
        if isinstance(message, Subscribe):
            self.subscription = id
        elif isinstance(message, Cancel):
            if id == self.subscription:
                self.subscription = None
        else:
            self.open.add(id)

    def note_sent(self, message: Message) -> None:
        """Record what a message to the client ends."""
        if isinstance(message, ENDS):
            self.open.discard(message.id)
            if message.id == self.subscription:
                self.subscription = None


class _Large(NamedTuple):
    """Since when a large message is read, and what it may take until it is whole."""

    since: float
    most_bytes: int


class Clients(Owner[Client]):
    """Every client's connection; turns what it sends into events.

    Attributes:
        listener: accepts the connections.

    Args:
        path: path of the socket.
        turns: when connections are read and written.
        post: called with each event.
        max_connections: how many connections are let in, including silent ones.
        warn: called, at most once a minute, with why connections wait to be accepted.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        *,
        turns: Turns,
        post: Callable[[CoreEvent], None],
        max_connections: int,
        warn: Callable[[str], None],
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self._turns = turns
        self._post = post
        self._decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
        self._limits = ConnectionLimits(max_connections)
        self._uid = os.getuid()
        # Bounded by the limits and MAX_REFUSED.
        self._connections: dict[ConnectionId, Client] = {}
        self._refused = 0
        self._count = 0
        # Those whose large message is being read; and those that wait for room.
        self._large: dict[Client, _Large] = {}
        self._large_waiting: dict[Client, None] = {}
        self._tally = Tally()
        self._fewer_unsent = asyncio.Event()
        self._is_closed = False
        self.listener = Listener(path, self._come, kept_files=KEPT_FILES, warn=warn)

    @property
    def admitted(self) -> int:
        """Return how many connections there are."""
        return self._limits.admitted

    def limit_to(self, max_connections: int) -> None:
        """Let in that many connections from now on; existing ones stay."""
        self._limits.max_connections = max_connections

    def send(self, connection_id: ConnectionId, message: MessageToClient) -> None:
        """Send a message, or keep it if there is no room; drop it if the connection is gone."""
        client = self._connections.get(connection_id)
        if client is None:
            return
        client.note_sent(message)
        if client.is_slow and isinstance(message, Deltas | Event):
            return
        client.send(message)

    def pulse(self) -> None:
        """Send signs of life, and end who is overdue; called every second."""
        if self._is_closed:
            return  # scheduled in the loop's last round
        now = self._turns.now()
        with self._turns:
            for client in list(self._connections.values()):
                if client.has_anything_open and not client.outbox:
                    client.write(_ALIVE)
                age_s = now - client.came_at
                if client.refusal:
                    is_overdue = age_s >= REFUSAL_S
                else:
                    is_overdue = not client.inbound.is_ready and age_s >= HANDSHAKE_LIMIT_S
                if is_overdue:
                    client.end()
                elif client.outbox and now - client.progressed_at > MAX_UNSENT_S:
                    self._give_up(client)
            if self._large_waiting:
                for client, large in list(self._large.items()):
                    if now - large.since > LARGE_LIMIT_S:
                        client.end()

    async def finish(self, limit_s: float) -> None:
        """Send what is unsent to clients that read, for at most this long."""
        self._turns.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(client.outbox for client in self._connections.values()):
                    self._fewer_unsent.clear()
                    await self._fewer_unsent.wait()

    def close(self) -> None:
        """Close the socket and all connections, and remove the socket's file."""
        self._turns.flush()
        self._is_closed = True
        self.listener.close()
        for client in list(self._connections.values()):
            client.close()
            self._forget(client)

    # ------------------------------------------------------------ who comes and goes

    def _come(self, accepted: socket.socket) -> None:
        """Let in who has come, hold it until it knows why not, or end its connection."""
        pid, uid = credentials_of(accepted)
        refusal = self._limits.refusal(pid)
        if uid not in (self._uid, None) or (refusal and self._refused >= MAX_REFUSED):
            end(accepted)
            return
        self._count += 1
        if refusal:
            self._refused += 1
        else:
            self._limits.add(pid)
        id = ConnectionId(self._count.to_bytes(8, "big"))
        self._connections[id] = Client(
            self, self._turns, accepted, tally=self._tally, id=id, pid=pid, refusal=refusal
        )

    def met(self, connection: Client) -> None:
        """Find its names; not before, because most connections of a storm never say anything."""
        connection.names = Names.of_process(connection.pid)

    def has_ended(self, connection: Client) -> None:
        """Forget everything about it, and let the core know."""
        self._forget(connection)
        if connection.refusal:
            self._refused -= 1
        else:
            self._limits.remove(connection.pid)
        if connection.has_anything_open:
            self._post(ClientGone(now=self._turns.now(), connection=connection.id))

    def _forget(self, client: Client) -> None:
        del self._connections[client.id]
        self._large_waiting.pop(client, None)
        self._large_is_over(client)
        self._fewer_unsent.set()

    # ------------------------------------------------------------ in

    def take(self, connection: Client, frames: list[bytes]) -> None:
        """Post what it says, or refuse it."""
        self._large_is_over(connection)
        try:
            message = self._decoder.decode(frames)
        except DecodeError as error:
            self._refuse(connection, error.id, RemoteError(error.code, error.message))
            return
        refusal = self._refusal(connection, message)
        if refusal is not None:
            self._refuse(connection, message.id, refusal)
            return
        connection.note_said(message)
        process = connection.names.of(message)
        now = self._turns.now()
        self._post(ClientSaid(now=now, connection=connection.id, message=message, process=process))

    def _refusal(self, client: Client, message: ClientMessage) -> RemoteError | None:
        """Return why a message is refused; None if it is not."""
        if client.inbound.routing_id:
            return RemoteError(
                ErrorCode.INVALID_REQUEST,
                "a client must not set a routing id: another connection could take its place",
            )
        if client.refusal:
            return RemoteError(ErrorCode.OVERLOADED, client.refusal)
        if isinstance(message, Cancel):
            return None
        if client.is_slow:  # a new stream would lack its pieces
            return slow_consumer()
        if client.has_open(message.id):
            return duplicate_id(message.id)
        if len(client.open) >= MAX_OPEN_PER_CONNECTION:
            return RemoteError(
                ErrorCode.OVERLOADED,
                f"a connection can have at most {MAX_OPEN_PER_CONNECTION} open requests",
            )
        return None

    def _refuse(self, client: Client, request_id: str, error: RemoteError) -> None:
        """Answer a refused message; a connection that is not served is owed nothing."""
        if not (client.refusal and client.outbox):
            client.send(Failed(id=request_id, error=error))

    def was_read(self, connection: Client) -> None:
        """Read on in a large message, or wait until others leave room for it."""
        is_large = connection.inbound.announced_bytes > LARGE_BYTES
        if not is_large or connection in self._large or connection in self._large_waiting:
            return
        if not self._large_waiting and self._has_room_for(connection):
            self._large[connection] = _Large(self._turns.now(), connection.inbound.most_bytes)
        else:
            self._large_waiting[connection] = None
            connection.pause()

    def _has_room_for(self, client: Client) -> bool:
        taken = sum(large.most_bytes for large in self._large.values())
        return taken + client.inbound.most_bytes <= MAX_LARGE_BYTES

    def _large_is_over(self, client: Client) -> None:
        """It has none under way any longer: the next ones that wait may."""
        self._large.pop(client, None)
        while self._large_waiting:
            following = next(iter(self._large_waiting))
            if not self._has_room_for(following):
                return
            del self._large_waiting[following]
            self._large[following] = _Large(self._turns.now(), following.inbound.most_bytes)
            following.resume()
            self._turns.read_soon(following)  # frames of it may have been received

    # ------------------------------------------------------------ out

    def has_sent(self, connection: Client) -> None:
        """Give one that was slow another chance: it has read its ends."""
        self._fewer_unsent.set()
        connection.is_slow = False

    def has_unsent(self, connection: Client) -> None:
        """Give up those that are owed too much."""
        if connection.outbox.size_bytes > MAX_UNSENT_BYTES:
            self._give_up(connection)
        elif self._tally.bytes > MAX_UNSENT_IN_ALL_BYTES:
            self._give_up(max(self._connections.values(), key=lambda one: one.outbox.size_bytes))

    def _give_up(self, client: Client) -> None:
        """End the streams of a client that does not read; the second time, its connection."""
        if client.is_slow:
            client.end()
            return
        now = self._turns.now()
        client.is_slow = True
        client.outbox.keep_only_ends()
        client.progressed_at = now
        if client.subscription is not None:
            failed = Failed(id=client.subscription, error=slow_consumer())
            client.outbox.add(failed)
            client.subscription = None
        self._post(ClientTooSlow(now=now, connection=client.id))
