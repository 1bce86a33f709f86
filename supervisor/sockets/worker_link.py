"""The sockets of one worker's life: private to it, so that a dead one's late frames get lost.

Every connection is read, but only the one whose HELLO carried the token is the worker's: so a stray
frame of another process ends no healthy worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import socket
from collections.abc import Callable
from pathlib import Path

from mlxsup.protocol.codec import DecodeError, Decoder
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.folders import BEAT_SUFFIX
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.worker_messages import (
    WORKER_TO_SUPERVISOR,
    Heartbeat,
    Hello,
    MessageToWorker,
    WorkerMessage,
)

from ..core.events import Event, WorkerBroke, WorkerSaid, WorkerUnlinked
from .connection import Connection, Owner, Turns
from .limits import free_files
from .listener import Listener
from .outbox import Tally

FILES_OF_SPAWN = 16
"""How many files must be free before a worker is started: what its process and its sockets take."""

MAX_UNSENT_MESSAGES = 8192
"""A worker that leaves more than this unread does not follow the protocol."""

MAX_CONNECTIONS = 16
"""Connections at one of its sockets; beyond them the oldest is ended."""

MAX_STRANGE_BYTES = 64 * 1024
"""The largest message from a connection that has not said HELLO."""


class WorkerLink(Owner[Connection]):
    """Messages from and to one incarnation of a worker.

    Attributes:
        endpoint: what the worker connects to.
        pid: its process's pid, once it is known.
        disconnected: set once its connection has ended and nothing more can arrive; before HELLO,
            while there is no connection.

    Args:
        path: path of the socket; the one for heartbeats is next to it.
        turns: when connections are read and written.
        model, generation, token: what HELLO must carry.
        post: called with each event.

    Raises:
        OSError: the sockets cannot be made, or too few files are free.
    """

    def __init__(
        self,
        path: Path,
        *,
        turns: Turns,
        model: ModelName,
        generation: Generation,
        token: str,
        post: Callable[[Event], None],
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.pid: int | None = None
        self.disconnected = asyncio.Event()
        self.disconnected.set()
        self._turns = turns
        self._model = model
        self._generation = generation
        self._token = token
        self._post = post
        self._decoder = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
        self._beat_decoder = Decoder((Heartbeat,), is_strict=False)
        self._peer: Connection | None = None
        self._is_broken = False
        self._early: list[MessageToWorker] = []
        # The peer's among strangers', oldest first; bounded by MAX_CONNECTIONS each.
        self._connections: list[Connection] = []
        self._beats: list[Connection] = []
        if free_files() < FILES_OF_SPAWN:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        # They wait silently for a free file: the clients' listener warns long before.
        self._listener = Listener(path, self._come)
        try:
            beat_path = path.with_name(path.name + BEAT_SUFFIX)
            self._beat_listener = Listener(beat_path, self._come_for_beats)
        except OSError:
            self._listener.close()
            raise

    def send(self, message: MessageToWorker) -> None:
        """Send, or keep what there is no room for, in order; sends nothing to a broken worker."""
        if self._is_broken:
            return
        if self._peer is not None:
            if not self._peer.is_ended:
                self._peer.send(message)
        else:  # before HELLO there is no peer
            self._early.append(message)
            self._check_unsent(len(self._early))

    def drain(self) -> None:
        """Take everything that has arrived; if `disconnected` is set, nothing more will come."""
        for listener in (self._listener, self._beat_listener):
            listener.drain()
        for connection in (*self._connections, *self._beats):
            connection.drain()

    def close(self) -> None:
        """Close the sockets and remove their files; a second time does nothing.

        Raises:
            OSError: a file cannot be removed; the sockets are closed.
        """
        self._is_broken = True
        for connection in (*self._connections, *self._beats):
            connection.close()
        self._connections.clear()
        self._beats.clear()
        try:
            self._listener.close()
        finally:
            self._beat_listener.close()

    # ------------------------------------------------------------ who comes and goes

    def _come(self, accepted: socket.socket) -> None:
        self.disconnected.clear()  # there is no peer yet: its HELLO closes the listener
        self._let_in(accepted, b"DEALER", self._connections)

    def _come_for_beats(self, accepted: socket.socket) -> None:
        self._let_in(accepted, b"PUSH", self._beats)

    def _let_in(self, accepted: socket.socket, peer: bytes, others: list[Connection]) -> None:
        others.append(Connection(self, self._turns, accepted, peer=peer, tally=Tally()))
        if len(others) > MAX_CONNECTIONS:
            others[0].end()

    def was_read(self, connection: Connection) -> None:
        """End a stranger that sends more than a HELLO has."""
        is_large = connection.inbound.announced_bytes > MAX_STRANGE_BYTES
        if is_large and connection is not self._peer:
            connection.end()

    def has_ended(self, connection: Connection) -> None:
        """Post that the worker's connection is gone: whatever connects in its place is strange."""
        if connection in self._beats:
            self._beats.remove(connection)
            return
        self._connections.remove(connection)
        if self._peer is None:
            if not self._connections:
                self.disconnected.set()
        elif connection is self._peer:
            self.disconnected.set()
            if not self._is_broken:
                self._post(
                    WorkerUnlinked(
                        now=self._turns.now(), model=self._model, generation=self._generation
                    )
                )

    def has_unsent(self, connection: Connection) -> None:
        """Report a worker that does not read its messages."""
        if connection is self._peer and not self._is_broken:
            self._check_unsent(len(connection.outbox))

    def _check_unsent(self, count: int) -> None:
        if count > MAX_UNSENT_MESSAGES:
            self._break("does not read its messages")

    # ------------------------------------------------------------ in

    def take(self, connection: Connection, frames: list[bytes]) -> None:
        """Post what the worker says."""
        if self._is_broken:
            return
        if connection is self._peer:
            try:
                message = self._decoder.decode(frames)
            except DecodeError as error:
                self._break_for(error)
            else:
                self._say(message)
        elif connection in self._beats:
            self._take_beat(frames)
        elif self._peer is None:
            self._take_hello(connection, frames)

    def _take_hello(self, connection: Connection, frames: list[bytes]) -> None:
        try:
            message = self._decoder.decode(frames)
        except DecodeError as error:
            if error.code is ErrorCode.UNSUPPORTED_VERSION:
                self._break_for(error)
            return
        if not isinstance(message, Hello) or not self._has_token(message):
            return
        problem = self._check_greeting(message)
        if problem:
            self._break(problem)
            return
        self._peer = connection
        connection.is_first = True
        self._hide(self._listener)
        for stranger in [one for one in self._connections if one is not connection]:
            stranger.end()
        for early in self._early:
            connection.send(early)
        self._early.clear()
        self._say(message)

    def _take_beat(self, frames: list[bytes]) -> None:
        if self._peer is None:
            return
        try:
            beat = self._beat_decoder.decode(frames)
        except DecodeError:
            return  # a stranger's: beats carry no token, and the worker's own still come
        self._hide(self._beat_listener)
        self._say(beat)

    def _hide(self, listener: Listener) -> None:
        with contextlib.suppress(OSError):  # it is tried again at the end, and reported then
            listener.close()

    def _has_token(self, hello: Hello) -> bool:
        """Return whether this is the HELLO of the process that was given the token."""
        return hmac.compare_digest(hello.token.encode(), self._token.encode())

    def _check_greeting(self, message: Hello) -> str:
        """Return what is wrong with a HELLO that carries the token; empty if nothing is."""
        if (message.model, message.generation) != (self._model, self._generation):
            return f"said HELLO as {message.model} generation {message.generation}"
        if self.pid is not None and message.pid != self.pid:
            return f"said HELLO with pid {message.pid} and not {self.pid}"
        return ""

    def _say(self, message: WorkerMessage) -> None:
        now = self._turns.now()
        self._post(
            WorkerSaid(now=now, model=self._model, generation=self._generation, message=message)
        )

    def _break_for(self, error: DecodeError) -> None:
        is_other = error.code is ErrorCode.UNSUPPORTED_VERSION
        self._break(f"sent no message: {error.message}", is_other_version=is_other)

    def _break(self, detail: str, *, is_other_version: bool = False) -> None:
        """Report the worker once; whatever else it sends is ignored."""
        self._is_broken = True
        self._early.clear()
        if self._peer is not None:
            self._peer.outbox.clear()
        self._post(
            WorkerBroke(
                now=self._turns.now(),
                model=self._model,
                generation=self._generation,
                detail=detail,
                is_other_version=is_other_version,
            )
        )
