"""The socket that clients connect to, and what each of them is owed."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq
from mlxsup.protocol.codec import MAX_FRAME_BYTES, DecodeError, Decoder, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.messages import (
    CLIENT_MESSAGES,
    Alive,
    Cancel,
    Deltas,
    Done,
    Event,
    Failed,
    Message,
    Reply,
    Subscribe,
)

from .core.events import ClientGone, ClientSaid, ClientTooSlow, ConnectionId
from .core.events import Event as CoreEvent
from .core.refusals import slow_consumer
from .transport import Context, LoopSocket, Monitor, bound_socket

SEND_HIGH_WATER_MARK = 64
RECEIVE_HIGH_WATER_MARK = 2
"""Messages of one connection that libzmq reads ahead: each may be a body of 8 MiB, and none of them
has been admitted yet."""
HANDSHAKE_LIMIT_MS = 2000
PROBE_DELAY_S = 0.02
"""A connection's end is announced a moment before the socket knows it."""

MAX_CONNECTIONS = 256
MAX_OPEN_PER_CONNECTION = 4096
MAX_UNSENT_BYTES = 8 * 1024 * 1024
MAX_UNSENT_S = 10.0
MAX_MERGED_DELTAS = 512
MESSAGE_OVERHEAD_BYTES = 256
"""What an unsent message costs beyond its encoded bytes."""


class _Connection:
    """A connection that has something open, or is owed something.

    Attributes:
        id: its routing id.
        open: how often each id of a request or command is open; a refused second use counts.
        subscription: the id under which it is told of changes.
        outbox: what the socket had no room for.
        outbox_bytes: of it.
        progressed_at: when the last of it was sent, or the first began to wait.
        is_slow: whether it was given up once; it then gets terminal messages only.
    """

    __slots__ = (
        "id",
        "is_slow",
        "open",
        "outbox",
        "outbox_bytes",
        "progressed_at",
        "subscription",
    )

    def __init__(self, id: ConnectionId) -> None:
        self.id = id
        self.open: dict[str, int] = {}
        self.subscription: str | None = None
        self.outbox: deque[tuple[Message, int]] = deque()
        self.outbox_bytes = 0
        self.progressed_at = 0.0
        self.is_slow = False

    @property
    def has_anything_open(self) -> bool:
        return bool(self.open) or self.subscription is not None

    def note_said(self, message: Message) -> None:
        """Keeps the books of what is open."""
        id = getattr(message, "id", "")
        if isinstance(message, Subscribe):
            self.subscription = id
        elif isinstance(message, Cancel):
            if id == self.subscription:
                self.subscription = None
        else:
            self.open[id] = self.open.get(id, 0) + 1

    def note_sent(self, message: Message) -> None:
        """Keeps the books of what is open."""
        if isinstance(message, Done | Failed | Reply):
            count = self.open.pop(message.id, 0)
            if count > 1:
                self.open[message.id] = count - 1
            elif message.id == self.subscription:
                self.subscription = None

    def keep(self, message: Message, size_bytes: int) -> None:
        """Adds to the outbox; pieces that follow each other become one message (H7)."""
        size_bytes += MESSAGE_OVERHEAD_BYTES
        self.outbox_bytes += size_bytes
        if isinstance(message, Deltas) and self.outbox:
            last, last_bytes = self.outbox[-1]
            if isinstance(last, Deltas) and len(last.deltas) < MAX_MERGED_DELTAS:
                self.outbox[-1] = (
                    Deltas(deltas=last.deltas + message.deltas),
                    last_bytes + size_bytes,
                )
                return
        self.outbox.append((message, size_bytes))

    def keep_only_ends(self) -> None:
        """Throws away what is no end of anything; a stream's good end is one no more."""
        kept, self.outbox, self.outbox_bytes = self.outbox, deque(), 0
        for message, size_bytes in kept:
            if isinstance(message, Done):
                message = Failed(id=message.id, error=slow_consumer().to_wire())
            if isinstance(message, Failed | Reply):
                self.outbox.append((message, size_bytes))
                self.outbox_bytes += size_bytes


class Clients:
    """Every client's connection; what it says becomes events.

    Args:
        context: makes the socket.
        path: of the socket.
        post: given each event.
        now: the time that events carry.
        max_connected: connections, silent ones included, at which all are closed; well below the
            limit of open files, for libzmq aborts the process when it meets that.

    Raises:
        zmq.ZMQError: the socket cannot be made.
    """

    def __init__(
        self,
        context: Context,
        path: Path,
        *,
        post: Callable[[CoreEvent], None],
        now: Callable[[], float],
        max_connected: int,
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self._path = path
        self._post = post
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
        # Bounded by MAX_CONNECTIONS.
        self._connections: dict[ConnectionId, _Connection] = {}
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._connected = 0
        self._max_connected = max_connected
        options = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_LIMIT_MS,
            zmq.SNDHWM: SEND_HIGH_WATER_MARK,
            zmq.RCVHWM: RECEIVE_HIGH_WATER_MARK,
            zmq.LINGER: 0,
            zmq.IPC_FILTER_UID: os.getuid(),
        }
        socket = bound_socket(context, zmq.ROUTER, self.endpoint, options)
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = Monitor(socket, events, self._on_connection_event)
        self._socket = LoopSocket(socket, self._take, self._flush)

    def send(self, connection_id: ConnectionId, message: Message) -> None:
        """Sends, or keeps what there is no room for; drops it where the connection is gone."""
        connection = self._connections.get(connection_id)
        if connection is None:
            return
        connection.note_sent(message)
        if connection.is_slow and isinstance(message, Deltas | Event):
            return
        self._send(connection, message)
        self._forget_if_idle(connection)
        if not self._all_sent.is_set():
            # Sending may have swallowed the news that another one has room again.
            self._socket.drain_soon()

    def pulse(self) -> None:
        """Each second: signs of life, connections that ended unseen, clients that do not read."""
        if self._is_closed:
            return  # asked for in the loop's last round
        self._probe()
        now = self._now()
        for connection in list(self._connections.values()):
            if connection.outbox and now - connection.progressed_at > MAX_UNSENT_S:
                self._give_up(connection)

    async def finish(self, limit_s: float) -> None:
        """Lets what is unsent go to those who read, for at most this long."""
        self._flush()
        try:
            async with asyncio.timeout(limit_s):
                await self._all_sent.wait()
        except TimeoutError:
            pass

    def close(self, linger_s: float) -> None:
        """Closes the socket and removes its file; what was sent has so long to leave."""
        self._is_closed = True
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._monitor.close()
        self._path.unlink(missing_ok=True)
        self._socket.close(int(linger_s * 1000))

    # ------------------------------------------------------------ in

    def _take(self, frames: list[bytes]) -> None:
        id = ConnectionId(frames[0])
        connection = self._connections.get(id)
        try:
            message = self._decoder.decode(frames[1:])
            connection = connection or self._new_connection(id, message)
            if len(connection.open) >= MAX_OPEN_PER_CONNECTION and not isinstance(message, Cancel):
                raise DecodeError(
                    ErrorCode.OVERLOADED,
                    f"a connection has at most {MAX_OPEN_PER_CONNECTION} requests open",
                    getattr(message, "id", ""),
                )
        except DecodeError as error:
            failed = Failed(id=error.id, error=RemoteError(error.code, error.message).to_wire())
            self._send(connection or _Connection(id), failed, is_kept=connection is not None)
            return
        connection.note_said(message)
        self._post(ClientSaid(now=self._now(), connection=id, message=message))
        self._forget_if_idle(connection)

    def _new_connection(self, id: ConnectionId, message: Message) -> _Connection:
        if len(self._connections) >= MAX_CONNECTIONS:
            raise DecodeError(
                ErrorCode.OVERLOADED,
                f"{MAX_CONNECTIONS} clients have requests open already",
                getattr(message, "id", ""),
            )
        connection = self._connections[id] = _Connection(id)
        return connection

    # ------------------------------------------------------------ out

    def _send(self, connection: _Connection, message: Message, *, is_kept: bool = True) -> None:
        frames = encode(message)
        if not connection.outbox and self._try_send(connection, frames):
            return
        if not is_kept:
            return
        if not connection.outbox:
            connection.progressed_at = self._now()
        connection.keep(message, sum(map(len, frames)))
        self._all_sent.clear()
        if connection.outbox_bytes > MAX_UNSENT_BYTES:
            self._give_up(connection)

    def _try_send(self, connection: _Connection, frames: list[bytes]) -> bool:
        """Returns whether nothing is left to do: it was sent, or there is nobody to send it to."""
        try:
            return self._socket.send([connection.id, *frames])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._lose(connection)
            return True

    def _flush(self) -> None:
        for connection in [c for c in self._connections.values() if c.outbox]:
            while connection.outbox:
                message, size_bytes = connection.outbox[0]
                if not self._try_send(connection, encode(message)):
                    break
                if connection.outbox:  # else the connection was found gone
                    connection.outbox.popleft()
                    connection.outbox_bytes -= size_bytes
                    connection.progressed_at = self._now()
            self._forget_if_idle(connection)
        if not any(c.outbox for c in self._connections.values()):
            self._all_sent.set()

    def _give_up(self, connection: _Connection) -> None:
        """The client does not read: its streams end, and the second time it counts as gone."""
        if connection.is_slow:
            self._lose(connection)
            return
        connection.is_slow = True
        connection.keep_only_ends()
        connection.progressed_at = self._now()
        if connection.subscription is not None:
            failed = Failed(id=connection.subscription, error=slow_consumer().to_wire())
            connection.keep(failed, MESSAGE_OVERHEAD_BYTES)
            connection.subscription = None
        self._post(ClientTooSlow(now=self._now(), connection=connection.id))

    def _lose(self, connection: _Connection) -> None:
        """The connection is gone: nothing of it is left here."""
        connection.outbox.clear()
        connection.outbox_bytes = 0
        if self._connections.pop(connection.id, None) is not None:
            self._post(ClientGone(now=self._now(), connection=connection.id))

    def _forget_if_idle(self, connection: _Connection) -> None:
        if not connection.has_anything_open and not connection.outbox:
            self._connections.pop(connection.id, None)

    # ------------------------------------------------------------ connections that end

    def _on_connection_event(self, event: int, connection: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._connected += 1
            if self._connected == self._max_connected:
                # The last resort: it ends all connections (libzmq 4.3.5), but no worker.
                self._socket.socket.unbind(self.endpoint)
                self._socket.drain_soon()
        elif event == zmq.EVENT_CLOSED:
            # Only now: a listener that goes removes the file of the one that has come.
            self._connected = 0
            self._socket.socket.bind(self.endpoint)
            self._socket.drain_soon()
            self._probe_soon()
        else:
            self._connected = max(0, self._connected - 1)
            self._probe_soon()

    def _probe_soon(self) -> None:
        if self._probe_timer is None:
            self._probe_timer = self._loop.call_later(PROBE_DELAY_S, self._probe)

    def _probe(self) -> None:
        """Sends a sign of life to all who have something open, which finds those who are gone."""
        self._probe_timer = None
        frames = encode(Alive())
        for connection in list(self._connections.values()):
            if not connection.outbox:
                self._try_send(connection, frames)
        self._flush()
