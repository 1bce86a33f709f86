"""The socket that clients connect to, and what each of them has yet to be sent.

The daemon accepts itself (`listener.py`) and speaks ZMTP itself (`zmtp.py`): libzmq ends the
process if it cannot accept for want of a file, and accepts without asking.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
from mlxsup.protocol.codec import DecodeError, Decoder, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError

from ..core.errors import duplicate_id, slow_consumer
from ..core.events import ClientGone, ClientSaid, ClientTooSlow, ConnectionId
from ..core.events import Event as CoreEvent
from .connection import Connection
from .limits import ConnectionLimits
from .listener import Listener
from .outbox import Tally
from .peer import NO_NAMES, Names, credentials_of, end
from .transport import TURN_BYTES, TURN_MESSAGES, at_turn_end, turn
from .zmtp import GREETING, ZmtpError, to_wire

HANDSHAKE_LIMIT_S = 2.0

MAX_REFUSED = 64
"""How many connections beyond the limits are held until they know why they are refused."""

REFUSAL_S = 2.0
"""How long they are held: a handshake and a first message, on a busy machine."""

READ_BYTES = 64 * 1024
STEPS_OF_ONE = 16
"""How many frames of one connection to read before another one gets its turn."""

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

MAX_LEAVING_BYTES = 64 * 1024
"""How much is collected in a turn before it is sent."""
WRITES_IN_TURN = 16

_ALIVE = to_wire(encode(Alive()))


class _Large(NamedTuple):
    """Since when a large message is read, and what it may take until it is whole."""

    since: float
    most_bytes: int


class Clients:
    """Every client's connection; turns what it sends into events.

    Attributes:
        listener: accepts the connections.

    Args:
        path: path of the socket.
        post: called with each event.
        now: the time that events carry.
        max_connections: how many connections are let in, including silent ones.
        warn: called, at most once a minute, with why connections wait to be accepted.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        *,
        post: Callable[[CoreEvent], None],
        now: Callable[[], float],
        max_connections: int,
        warn: Callable[[str], None],
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self._post = post
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
        self._limits = ConnectionLimits(max_connections)
        self._uid = os.getuid()
        # Bounded by the limits and MAX_REFUSED.
        self._connections: dict[ConnectionId, Connection] = {}
        self._refused = 0
        self._count = 0
        self._chunk = memoryview(bytearray(READ_BYTES))
        self._readable: deque[Connection] = deque()
        self._is_turn_due = False
        # Those whose large message is being read; and those that wait for room.
        self._large: dict[Connection, _Large] = {}
        self._large_waiting: dict[Connection, None] = {}
        self._leaving: list[Connection] = []
        self._unsent: dict[ConnectionId, Connection] = {}
        self._tally = Tally()
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._is_closed = False
        self.listener = Listener(path, self._come, now=now, warn=warn)

    @property
    def admitted(self) -> int:
        """Return how many connections there are."""
        return self._limits.admitted

    def limit_to(self, max_connections: int) -> None:
        """Let in that many connections from now on; existing ones stay."""
        self._limits.max_connections = max_connections

    def send(self, connection_id: ConnectionId, message: MessageToClient) -> None:
        """Send a message, or keep it if there is no room; drop it if the connection is gone."""
        connection = self._connections.get(connection_id)
        if connection is None:
            return
        connection.note_sent(message)
        if connection.is_slow and isinstance(message, Deltas | Event):
            return
        self._send(connection, message)

    def pulse(self) -> None:
        """Send signs of life, and end who is overdue; called every second."""
        if self._is_closed:
            return  # scheduled in the loop's last round
        now = self._now()
        with turn():
            for connection in list(self._connections.values()):
                if connection.has_anything_open and not connection.outbox:
                    self._write(connection, _ALIVE)
                age_s = now - connection.came_at
                if connection.refusal:
                    is_overdue = age_s >= REFUSAL_S
                else:
                    is_overdue = not connection.inbound.is_ready and age_s >= HANDSHAKE_LIMIT_S
                if is_overdue:
                    self._end(connection)
            for connection in list(self._unsent.values()):
                if now - connection.progressed_at > MAX_UNSENT_S:
                    self._give_up(connection)
            if self._large_waiting:
                for connection, large in list(self._large.items()):
                    if now - large.since > LARGE_LIMIT_S:
                        self._end(connection)
        self.listener.start()

    async def finish(self, limit_s: float) -> None:
        """Send what is unsent to clients that read, for at most this long."""
        self._flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._all_sent.wait()

    def close(self) -> None:
        """Close the socket and all connections, and remove the socket's file."""
        self._flush()
        self._is_closed = True
        self.listener.close()
        for connection in list(self._connections.values()):
            self._close(connection)

    # ------------------------------------------------------------ who comes

    def _come(self, accepted: socket.socket) -> None:
        """Let in who has come, hold it until it knows why not, or end its connection."""
        pid, uid = credentials_of(accepted)
        refusal = self._limits.refusal(pid)
        if uid not in (self._uid, None) or (refusal and self._refused >= MAX_REFUSED):
            end(accepted)
            return
        accepted.setblocking(False)
        self._count += 1
        connection = Connection(
            ConnectionId(self._count.to_bytes(8, "big")),
            accepted,
            self._tally,
            pid=pid,
            refusal=refusal,
            now=self._now(),
        )
        if refusal:
            self._refused += 1
        else:
            self._limits.add(pid)
        self._connections[connection.id] = connection
        self._watch(connection)
        self._write(connection, GREETING)

    # ------------------------------------------------------------ in

    def _watch(self, connection: Connection) -> None:
        self._loop.add_reader(connection.socket.fileno(), self._on_readable, connection)

    def _on_readable(self, connection: Connection) -> None:
        """Have it read in its turn, so that a round of the loop does not grow with who talks."""
        if not connection.is_queued:
            connection.is_queued = True
            self._readable.append(connection)
            self._read_soon()

    def _read_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._read_turn)

    def _read_turn(self) -> None:
        """Read from those that have sent something, each for a moment."""
        self._is_turn_due = False
        steps, size_bytes = 0, 0
        with turn():
            while self._readable and steps < TURN_MESSAGES and size_bytes < TURN_BYTES:
                connection = self._readable.popleft()
                connection.is_queued = False
                if not connection.is_ended and connection not in self._large_waiting:
                    size_bytes += self._read(connection)
                    steps += STEPS_OF_ONE if connection.is_queued else 1
        if self._readable:
            self._read_soon()

    def _read(self, connection: Connection) -> int:
        """Take what one has sent, and receive once; return how many bytes were received."""
        inbound = connection.inbound
        received = 0
        try:
            for _ in range(STEPS_OF_ONE):
                frames = inbound.next()
                if frames is None:
                    if received or not (received := self._receive(connection)):
                        break
                elif connection.names is NO_NAMES and inbound.is_ready:
                    # Not before: most connections of a storm never say anything.
                    connection.names = Names.of_process(connection.pid)
                elif frames:
                    self._large_is_over(connection)
                    self._take(connection, frames)
                if connection.is_ended:
                    break
            else:
                self._on_readable(connection)  # there may be more
        except ZmtpError as error:
            if error.answer and not connection.outbox:
                self._leave(connection, error.answer)
            self._end(connection)
        if connection.is_ended:
            return received
        if inbound.answers:
            if not connection.outbox:  # otherwise it has enough to hear
                self._write(connection, bytes(inbound.answers))
            inbound.answers.clear()
        if inbound.announced_bytes > LARGE_BYTES:
            self._wait_for_large(connection)
        return received

    def _receive(self, connection: Connection) -> int:
        """Return how many bytes were received: 0 if there are none now, or if it has ended."""
        try:
            received = connection.socket.recv_into(self._chunk)
        except BlockingIOError:
            return 0
        except OSError:
            received = 0
        if received:
            connection.inbound.feed(self._chunk[:received])
        else:
            self._end(connection)
        return received

    def _wait_for_large(self, connection: Connection) -> None:
        """Read a large message, or wait until others leave room for it."""
        if connection in self._large or connection in self._large_waiting:
            return
        if not self._large_waiting and self._has_room_for(connection):
            self._large[connection] = _Large(self._now(), connection.inbound.most_bytes)
        else:
            self._large_waiting[connection] = None
            self._loop.remove_reader(connection.socket.fileno())

    def _has_room_for(self, connection: Connection) -> bool:
        taken = sum(large.most_bytes for large in self._large.values())
        return taken + connection.inbound.most_bytes <= MAX_LARGE_BYTES

    def _large_is_over(self, connection: Connection) -> None:
        """It has none under way any longer: the next ones that wait may."""
        self._large.pop(connection, None)
        while self._large_waiting:
            following = next(iter(self._large_waiting))
            if not self._has_room_for(following):
                return
            del self._large_waiting[following]
            self._large[following] = _Large(self._now(), following.inbound.most_bytes)
            self._watch(following)
            self._on_readable(following)  # frames of it may have been received

    def _take(self, connection: Connection, frames: list[bytes]) -> None:
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
        self._post(
            ClientSaid(now=self._now(), connection=connection.id, message=message, process=process)
        )

    def _refusal(self, connection: Connection, message: ClientMessage) -> RemoteError | None:
        """Return why a message is refused; None if it is not."""
        if connection.inbound.routing_id:
            return RemoteError(
                ErrorCode.INVALID_REQUEST,
                "a client must not set a routing id: another connection could take its place",
            )
        if connection.refusal:
            return RemoteError(ErrorCode.OVERLOADED, connection.refusal)
        if isinstance(message, Cancel):
            return None
        if connection.has_open(message.id):
            return duplicate_id(message.id)
        if len(connection.open) >= MAX_OPEN_PER_CONNECTION:
            return RemoteError(
                ErrorCode.OVERLOADED,
                f"a connection can have at most {MAX_OPEN_PER_CONNECTION} open requests",
            )
        return None

    def _refuse(self, connection: Connection, request_id: str, error: RemoteError) -> None:
        """Answer a refused message; a connection that is not served is owed nothing."""
        if not (connection.refusal and connection.outbox):
            self._send(connection, Failed(id=request_id, error=error.to_wire()))

    # ------------------------------------------------------------ out

    def _send(self, connection: Connection, message: MessageToClient) -> None:
        if connection.outbox:
            connection.outbox.add(message)
            self._check_unsent(connection)
        else:
            self._write(connection, to_wire(encode(message)))

    def _write(self, connection: Connection, wire: bytes) -> None:
        """Send at the end of the turn, in one call with what else this connection gets in it."""
        if not connection.leaving:
            if not self._leaving:
                at_turn_end(self._flush, self._loop)
            self._leaving.append(connection)
        connection.leaving += wire
        if len(connection.leaving) > MAX_LEAVING_BYTES:
            self._leave_now(connection)

    def _flush(self) -> None:
        """Send what was written in this turn."""
        leaving, self._leaving = self._leaving, []
        for connection in leaving:
            if connection.leaving:
                self._leave_now(connection)

    def _leave_now(self, connection: Connection) -> None:
        wire = bytes(connection.leaving)
        connection.leaving.clear()
        self._leave(connection, wire)

    def _leave(self, connection: Connection, wire: bytes) -> None:
        """Send bytes, and keep those that the socket has no room for."""
        taken = self._try_send(connection, wire)
        if connection.is_ended or taken == len(wire):
            return
        connection.outbox.begin(wire, taken)
        connection.progressed_at = self._now()
        self._unsent[connection.id] = connection
        self._all_sent.clear()
        self._loop.add_writer(connection.socket.fileno(), self._on_writable, connection)
        self._check_unsent(connection)

    def _try_send(self, connection: Connection, wire: bytes | memoryview) -> int:
        """Return how many bytes there was room for; ends a connection that is gone."""
        try:
            return connection.socket.send(wire)
        except BlockingIOError:
            return 0
        except OSError:
            self._end(connection)
            return 0

    def _on_writable(self, connection: Connection) -> None:
        """Send what there is room for."""
        outbox = connection.outbox
        for _ in range(WRITES_IN_TURN):
            wire = outbox.head()
            taken = self._try_send(connection, wire)
            if connection.is_ended:
                return
            if taken:
                outbox.drop(taken)
                connection.progressed_at = self._now()
            if not outbox:
                self._is_sent(connection)
                if not connection.has_anything_open:
                    connection.is_slow = False  # it has read its ends, and may begin anew
                return
            if taken < len(wire):
                return

    def _is_sent(self, connection: Connection) -> None:
        if self._unsent.pop(connection.id, None) is not None:
            self._loop.remove_writer(connection.socket.fileno())
        if not self._unsent:
            self._all_sent.set()

    def _check_unsent(self, connection: Connection) -> None:
        if connection.outbox.size_bytes > MAX_UNSENT_BYTES:
            self._give_up(connection)
        elif self._tally.bytes > MAX_UNSENT_IN_ALL_BYTES:
            self._give_up(max(self._unsent.values(), key=lambda one: one.outbox.size_bytes))

    def _give_up(self, connection: Connection) -> None:
        """End the streams of a client that does not read; the second time, its connection."""
        if connection.is_slow:
            self._end(connection)
            return
        connection.is_slow = True
        connection.outbox.keep_only_ends()
        connection.progressed_at = self._now()
        if connection.subscription is not None:
            failed = Failed(id=connection.subscription, error=slow_consumer().to_wire())
            connection.outbox.add(failed)
            connection.subscription = None
        self._post(ClientTooSlow(now=self._now(), connection=connection.id))

    # ------------------------------------------------------------ who ends

    def _end(self, connection: Connection) -> None:
        """End a connection: forget everything about it, and let the core know."""
        if connection.is_ended:
            return
        self._close(connection)
        if connection.refusal:
            self._refused -= 1
        else:
            self._limits.remove(connection.pid)
        if connection.has_anything_open:
            self._post(ClientGone(now=self._now(), connection=connection.id))
        self.listener.start()  # a file is free

    def _close(self, connection: Connection) -> None:
        connection.is_ended = True
        connection.leaving.clear()
        connection.outbox.clear()
        self._is_sent(connection)
        del self._connections[connection.id]
        self._large_waiting.pop(connection, None)
        self._large_is_over(connection)
        self._loop.remove_reader(connection.socket.fileno())
        end(connection.socket)
