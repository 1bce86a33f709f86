"""The socket that clients connect to, and what each of them has yet to be sent."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import zmq

from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    Alive,
    Cancel,
    ClientMessage,
    Deltas,
    Event,
    Failed,
    MessageToClient,
)
from mlxsup.protocol.codec import MAX_FRAME_BYTES, DecodeError, Decoder, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError

from ..core.errors import duplicate_id, slow_consumer
from ..core.events import ClientGone, ClientSaid, ClientTooSlow, ConnectionId
from ..core.events import Event as CoreEvent
from .connection import Connection
from .doors import Doors, Verdict
from .outbox import Tally
from .peer_names import PeerNames
from .peers import connection_at, process_of, turn_away
from .transport import NO_SOURCE, Context, Monitor, TracedSocket, bound_socket

SEND_HIGH_WATER_MARK = 16
"""How many messages libzmq takes for one connection; nobody counts their bytes."""
RECEIVE_HIGH_WATER_MARK = 2
"""How many messages of one connection libzmq reads ahead: each may be a body of 8 MiB, and none of
them has been admitted yet."""
HANDSHAKE_LIMIT_MS = 2000
PROBE_DELAY_S = 0.02
"""How long after the announcement of a connection's end the socket may still not know it."""

ROUTING_ID_BYTES = 5
"""The length of an id that libzmq made: a zero, and a number."""

MAX_OPEN_PER_CONNECTION = 4096
MAX_UNSENT_BYTES = 8 * 1024 * 1024
MAX_UNSENT_IN_ALL_BYTES = 256 * 1024 * 1024
MAX_UNSENT_S = 10.0

RETRY_FIRST_S = 0.001
RETRY_MOST_S = 0.5
"""A client without room is tried again after the first of these, then after twice as long each
time: a try costs as much for a client that has stopped reading as for one that reads."""

MONITOR_TURNS = 8
"""How many events the monitor of the connections can hold."""


class Clients:
    """Every client's connection; turns what it sends into events.

    Args:
        context: makes the socket.
        path: path of the socket.
        post: called with each event.
        now: the time that events carry.
        max_connections: how many connections are let in, including silent ones.

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
        max_connections: int,
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self._path = path
        self._post = post
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
        self._doors = Doors(max_connections)
        self._peer_names = PeerNames()
        # Both are bounded by the connections that the doors let in, plus those that just ended.
        self._connections: dict[ConnectionId, Connection] = {}
        self._speakers: dict[int, Connection] = {}
        # Connections with something in the outbox, and ones that may have ended.
        self._unsent: dict[ConnectionId, Connection] = {}
        self._doubted: dict[ConnectionId, Connection] = {}
        self._tally = Tally()
        self._probe_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._all_sent = asyncio.Event()
        self._all_sent.set()
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
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._monitor = Monitor(socket, events, self._on_connection_event)
        self._socket = TracedSocket(socket, self._take)

    @property
    def admitted(self) -> int:
        """How many connections there are."""
        return self._doors.admitted

    def limit_to(self, max_connections: int) -> None:
        """From now on that many connections are let in; existing ones stay."""
        self._doors.max_connections = max_connections

    def send(self, connection_id: ConnectionId, message: MessageToClient) -> None:
        """Sends a message, or keeps it if there is no room; drops it if the connection is gone."""
        connection = self._connections.get(connection_id)
        if connection is None:
            return
        connection.note_sent(message)
        if connection.is_slow and isinstance(message, Deltas | Event):
            return
        self._send(connection, message)
        self._forget_if_idle(connection)

    def pulse(self) -> None:
        """Every second: sends signs of life, finds slow clients and ended connections."""
        if self._is_closed:
            return  # scheduled in the loop's last round
        self._probe(self._connections)
        now = self._now()
        for connection in list(self._unsent.values()):
            if now - connection.progressed_at > MAX_UNSENT_S:
                self._give_up(connection)
        for descriptor in self._doors.take_overdue(now):
            with connection_at(descriptor, str(self._path)) as peer:
                if peer is not None:
                    turn_away(peer)

    async def finish(self, limit_s: float) -> None:
        """Sends what is unsent to clients that read, for at most this long."""
        try:
            async with asyncio.timeout(limit_s):
                await self._all_sent.wait()
        except TimeoutError:
            pass

    def close(self, linger_s: float) -> None:
        """Closes the socket and removes its file; what was sent has this long to leave.

        The socket's context must be ended next.
        """
        self._is_closed = True
        for timer in (self._probe_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._path.unlink(missing_ok=True)
        self._socket.close(int(linger_s * 1000))
        self._monitor.forget()

    # ------------------------------------------------------------ in

    def _take(self, frames: list[bytes]) -> None:
        id = ConnectionId(frames[0])
        connection = self._connections.get(id)
        try:
            message = self._decoder.decode(frames[1:])
        except DecodeError as error:
            self._refuse(connection, id, error.id, RemoteError(error.code, error.message))
            return
        refusal = self._refusal(connection, id, message)
        if refusal is not None:
            self._refuse(connection, id, message.id, refusal)
            return
        if connection is None:
            connection = Connection(id, self._socket.source, self._tally)
            self._connections[id] = self._speakers[connection.descriptor] = connection
        connection.note_said(message)
        process = self._peer_names.of(connection.descriptor, message)
        said = ClientSaid(now=self._now(), connection=id, message=message, process=process)
        self._post(said)
        if connection.outbox:
            self._flush(connection)  # a client that writes may well have read
        self._forget_if_idle(connection)

    def _refusal(
        self,
        connection: Connection | None,
        id: ConnectionId,
        message: ClientMessage,
    ) -> RemoteError | None:
        """Why a message is refused; None if it is not."""
        if len(id) != ROUTING_ID_BYTES or id[0]:
            return RemoteError(
                ErrorCode.INVALID_REQUEST,
                "a client must not set a routing id: another connection could take its place",
            )
        if self._socket.source == NO_SOURCE:
            return RemoteError(
                ErrorCode.INVALID_REQUEST, "a client must speak ZMTP 3, which ZeroMQ 4 does"
            )
        if connection is None:
            refusal = self._refusal_at_door(self._socket.source)
            return RemoteError(ErrorCode.OVERLOADED, refusal) if refusal else None
        if isinstance(message, Cancel):
            return None
        if connection.has_open(message.id):
            return duplicate_id(message.id)
        if len(connection.open) >= MAX_OPEN_PER_CONNECTION:
            return RemoteError(
                ErrorCode.OVERLOADED,
                f"a connection has at most {MAX_OPEN_PER_CONNECTION} requests open",
            )
        return None

    def _refusal_at_door(self, descriptor: int) -> str:
        """Why a connection is not served; its arrival may not have been seen yet."""
        for _ in range(MONITOR_TURNS):
            if self._doors.knows(descriptor) or not self._monitor.drain_turn():
                break
        return self._doors.refusal(descriptor)

    def _refuse(
        self,
        connection: Connection | None,
        id: ConnectionId,
        request_id: str,
        error: RemoteError,
    ) -> None:
        """Answers a refused message; a stranger without room for the answer gets none."""
        failed = Failed(id=request_id, error=error.to_wire())
        if connection is not None:
            self._send(connection, failed)
        else:
            self._try_send(Connection(id, self._socket.source, self._tally), encode(failed))

    # ------------------------------------------------------------ out

    def _send(self, connection: Connection, message: MessageToClient) -> None:
        if connection.outbox:
            connection.outbox.add(message)
        else:
            frames = encode(message)
            if self._try_send(connection, frames):
                return
            connection.outbox.add(message, frames)
            connection.progressed_at = self._now()
            self._unsent[connection.id] = connection
            self._all_sent.clear()
            self._retry_later(connection, RETRY_FIRST_S)
        if connection.outbox.size_bytes > MAX_UNSENT_BYTES:
            self._give_up(connection)
        elif self._tally.bytes > MAX_UNSENT_IN_ALL_BYTES:
            self._give_up(max(self._unsent.values(), key=lambda one: one.outbox.size_bytes))

    def _try_send(self, connection: Connection, frames: list[bytes]) -> bool:
        """Returns whether nothing is left to do: it was sent, or the client is gone."""
        try:
            return self._socket.send([connection.id, *frames])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._lose(connection)
            return True

    def _flush(self, connection: Connection) -> None:
        """Sends what there is room for."""
        has_progressed = False
        while connection.outbox and self._try_send(connection, connection.outbox.head()):
            if connection.outbox:  # otherwise the connection was found to be gone
                connection.outbox.drop_head()
                has_progressed = True
        if not connection.outbox:
            self._is_sent(connection)
            self._forget_if_idle(connection)
            return
        if has_progressed:
            connection.progressed_at = self._now()
        wait_s = RETRY_FIRST_S if has_progressed else 2 * connection.retry_s
        self._retry_later(connection, min(wait_s, RETRY_MOST_S))

    def _retry_later(self, connection: Connection, wait_s: float) -> None:
        connection.retry_s = wait_s
        connection.retry_at = self._loop.time() + wait_s
        self._wake_at(connection.retry_at)

    def _wake_at(self, when: float) -> None:
        if self._retry_timer is not None:
            if self._retry_timer.when() <= when:
                return
            self._retry_timer.cancel()
        self._retry_timer = self._loop.call_at(when, self._retry)

    def _retry(self) -> None:
        """Tries all that are due, and those that are due in a moment."""
        self._retry_timer = None
        until = self._loop.time() + RETRY_FIRST_S
        for connection in list(self._unsent.values()):
            if connection.retry_at <= until:
                self._flush(connection)
        if self._unsent:
            self._wake_at(min(one.retry_at for one in self._unsent.values()))

    def _is_sent(self, connection: Connection) -> None:
        self._unsent.pop(connection.id, None)
        if not self._unsent:
            self._all_sent.set()

    def _give_up(self, connection: Connection) -> None:
        """The client does not read: its streams end; the second time, it counts as gone."""
        if connection.is_slow:
            with connection_at(connection.descriptor, str(self._path)) as peer:
                if peer is not None and self._speakers.get(connection.descriptor) is connection:
                    turn_away(peer)  # otherwise it would wait for ends that never come
            self._lose(connection)
            return
        connection.is_slow = True
        connection.outbox.keep_only_ends()
        connection.progressed_at = self._now()
        if connection.subscription is not None:
            failed = Failed(id=connection.subscription, error=slow_consumer().to_wire())
            connection.outbox.add(failed)
            connection.subscription = None
        self._post(ClientTooSlow(now=self._now(), connection=connection.id))

    def _lose(self, connection: Connection) -> None:
        """The connection is gone: forgets everything about it."""
        connection.outbox.clear()
        self._is_sent(connection)
        if self._forget(connection):
            self._post(ClientGone(now=self._now(), connection=connection.id))

    def _forget_if_idle(self, connection: Connection) -> None:
        if not connection.has_anything_open and not connection.outbox:
            self._forget(connection)

    def _forget(self, connection: Connection) -> bool:
        """Returns whether it was known."""
        if self._speakers.get(connection.descriptor) is connection:
            del self._speakers[connection.descriptor]
        return self._connections.pop(connection.id, None) is not None

    # ------------------------------------------------------------ connections that come and end

    def _on_connection_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._on_accepted(descriptor)
        else:
            self._doors.go(descriptor)
            self._peer_names.go(descriptor)
            speaker = self._speakers.get(descriptor)
            if speaker is not None:
                self._doubt(speaker)

    def _on_accepted(self, descriptor: int) -> None:
        with connection_at(descriptor, str(self._path)) as peer:
            process = None if peer is None else process_of(peer)
            self._peer_names.come(descriptor, process)
            verdict = self._doors.come(descriptor, process, self._now())
            if verdict is Verdict.TURNED_AWAY and peer is not None:
                turn_away(peer)

    def _doubt(self, connection: Connection) -> None:
        """Schedules a check, in a moment, of whether the connection still exists."""
        self._doubted[connection.id] = connection
        if self._probe_timer is None:
            self._probe_timer = self._loop.call_later(PROBE_DELAY_S, self._probe_doubted)

    def _probe_doubted(self) -> None:
        self._probe_timer = None
        doubted, self._doubted = self._doubted, {}
        self._probe(doubted)
        for connection in doubted.values():
            is_known = connection.id in self._connections
            if is_known and not self._doors.knows(connection.descriptor):
                self._doubt(connection)  # the socket does not know of its end yet

    def _probe(self, connections: dict[ConnectionId, Connection]) -> None:
        """Sends a sign of life, which finds clients that are gone; retries one without room."""
        frames = encode(Alive())
        for connection in list(connections.values()):
            if not connection.outbox:
                self._try_send(connection, frames)
