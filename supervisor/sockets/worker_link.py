"""The sockets of one worker's life: private to it, so that a dead one's late frames get lost.

The worker's socket is a ROUTER that knows one peer, the one whose HELLO carried the token: with a
DEALER one stray frame of another process ended a healthy worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from mlxsup.protocol.codec import MAX_FRAME_BYTES, DecodeError, Decoder, encode
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
from .limits import free_files
from .listener import identity_of
from .transport import NO_SOURCE, Context, LoopSocket, Monitor, TracedSocket, bound_socket

RECEIVE_HIGH_WATER_MARK = 256
"""libzmq drops what waits for a full receiver when its peer closes: a worker's last words must fit,
while a worker whose supervisor has stopped reading must still stop stepping soon."""
BEAT_HIGH_WATER_MARK = 4
SEND_HIGH_WATER_MARK = 64
"""Room in addition to four messages for each row of the batch: enough for all that may be sent."""

RETRY_S = 0.01
"""When to retry a send that found no room: the event for new room may have come during it and be
lost."""

FILES_OF_SPAWN = 16
"""How many files must be free before a worker is started: what its process and its sockets take,
and what libzmq takes when it connects. libzmq ends the daemon if it finds none then."""

MAX_OUTBOX_MESSAGES = 8192
"""A worker that leaves more than this unread does not follow the protocol."""


class _PeerSocket(TracedSocket):
    """Traces messages until it is known which connection is the worker's, because it costs a copy.

    Attributes:
        is_traced: whether it traces them.
    """

    is_traced = True

    def _receive(self) -> list[bytes]:
        return super()._receive() if self.is_traced else LoopSocket._receive(self)


class WorkerLink:
    """Messages from and to one incarnation of a worker.

    Anybody else who finds the socket is ignored: only the peer whose HELLO had the token counts.

    Attributes:
        pid: its process's pid, once it is known.
        has_peer: whether a worker has ever connected.
        disconnected: set once its connection has ended and nothing more can arrive; before HELLO,
            once nobody is connected.

    Args:
        context: makes the sockets.
        path: path of the socket; the one for heartbeats is next to it.
        model, generation, token: what HELLO must carry.
        max_concurrency: rows of the worker's batch.
        post: called with each event.
        now: the time that events carry.

    Raises:
        zmq.ZMQError: the sockets cannot be made, or too few files are free.
    """

    def __init__(
        self,
        context: Context,
        path: Path,
        *,
        model: ModelName,
        generation: Generation,
        token: str,
        max_concurrency: int,
        post: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        self.pid: int | None = None
        self.has_peer = False
        self.disconnected = asyncio.Event()
        self._path = path
        self._beat_path = path.with_name(path.name + BEAT_SUFFIX)
        self._model = model
        self._generation = generation
        self._token = token
        self._post = post
        self._now = now
        self._decoder = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
        self._beat_decoder = Decoder((Heartbeat,), is_strict=False)
        self._peer: bytes | None = None
        self._peer_connection = NO_SOURCE
        self._connected = 0
        self._is_broken = False
        self._is_closed = False
        self._outbox: deque[list[bytes]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        if free_files() < FILES_OF_SPAWN:
            raise zmq.ZMQError(errno.EMFILE)
        common = {zmq.LINGER: 0, zmq.MAXMSGSIZE: MAX_FRAME_BYTES, zmq.HANDSHAKE_IVL: 2000}
        socket = bound_socket(
            context,
            zmq.ROUTER,
            self.endpoint,
            common
            | {
                zmq.ROUTER_MANDATORY: 1,
                zmq.RCVHWM: RECEIVE_HIGH_WATER_MARK,
                zmq.SNDHWM: SEND_HIGH_WATER_MARK + 4 * max_concurrency,
            },
        )
        try:
            beats = bound_socket(
                context,
                zmq.PULL,
                self.endpoint + BEAT_SUFFIX,
                common | {zmq.RCVHWM: BEAT_HIGH_WATER_MARK},
            )
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._monitor = Monitor(
            socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, self._on_connection_event
        )
        # A path may be another daemon's by the time that its file is removed.
        self._files = {one: identity_of(one) for one in (self._path, self._beat_path)}
        self._socket = _PeerSocket(socket, self._take, self._flush)
        self._beats = LoopSocket(beats, self._take_beat)

    @property
    def endpoint(self) -> str:
        """Return what the worker connects to."""
        return f"ipc://{self._path}"

    def send(self, message: MessageToWorker) -> None:
        """Send, or keep what there is no room for, in order; sends nothing to a broken worker."""
        if self._is_broken:
            return
        self._outbox.append(encode(message))
        self._flush()
        if len(self._outbox) > MAX_OUTBOX_MESSAGES:
            self._break("does not read its messages")

    def drain(self) -> None:
        """Take everything that has arrived; if `disconnected` is set, nothing more will come."""
        self._socket.drain_now()
        self._beats.drain_now()

    def close(self) -> None:
        """Close the sockets and removes their files; a second time does nothing.

        Raises:
            OSError: a file cannot be removed; the sockets are closed.
        """
        self._is_broken = True
        if self._is_closed:
            return
        self._is_closed = True
        self._monitor.close()
        self._socket.close()
        self._beats.close()
        for path in list(self._files):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a socket's file, so that nobody else connects to it.

        Raises:
            OSError: it cannot be removed.
        """
        if self._files[path] is not None and identity_of(path) == self._files[path]:
            path.unlink(missing_ok=True)
        del self._files[path]

    def _hide(self, path: Path) -> None:
        """Remove a socket's file once its worker has connected.

        libzmq would accept others until no file is left, and then end the daemon.
        """
        with contextlib.suppress(OSError):  # it is tried again at the end, and reported then
            self._remove(path)

    def _flush(self) -> None:
        if self._peer is None:
            return  # before HELLO there is nobody to send anything to
        try:
            while self._outbox and self._socket.send([self._peer, *self._outbox[0]]):
                self._outbox.popleft()
            if self._outbox and self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)
        except zmq.ZMQError as error:
            self._outbox.clear()
            if (
                error.errno != errno.EHOSTUNREACH
            ):  # otherwise the end of its connection is reported soon
                self._break(f"cannot be sent to: {error.strerror}")

    def _try_again(self) -> None:
        self._retry = None
        if not self._is_closed:
            self._flush()

    def _on_connection_event(self, event: int, connection: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.has_peer = True
            self._connected += 1
            if self._peer is None:
                self.disconnected.clear()
            return
        self._connected -= 1
        self.drain()  # a HELLO may wait there, and its connection shows who sent it
        if self._peer is None:
            if not self._connected:
                self.disconnected.set()
        elif connection == self._peer_connection:
            self._peer_connection = NO_SOURCE  # the number may be another's soon
            self.disconnected.set()
            if not self._is_broken:  # whatever connects in its place is a stranger
                self._post(
                    WorkerUnlinked(now=self._now(), model=self._model, generation=self._generation)
                )

    def _take(self, frames: list[bytes]) -> None:
        sender = frames[0]
        if self._is_broken or self._peer not in (None, sender):
            return
        try:
            message = self._decoder.decode(frames[1:])
        except DecodeError as error:
            is_other = error.code is ErrorCode.UNSUPPORTED_VERSION
            if self._peer is not None or is_other:
                self._break(f"sent no message: {error.message}", is_other_version=is_other)
            return
        if self._peer is None:
            if not isinstance(message, Hello) or not self._has_token(message):
                return
            problem = self._check_greeting(message)
            if problem:
                self._break(problem)
                return
            self._peer, self._peer_connection = sender, self._socket.source
            self._socket.is_traced = False
            self._hide(self._path)
        self._say(message)
        self._flush()

    def _take_beat(self, frames: list[bytes]) -> None:
        if self._is_broken or self._peer is None:
            return
        try:
            beat = self._beat_decoder.decode(frames)
        except DecodeError:
            return  # a stranger's: beats carry no token, and the worker's own still come
        if self._beat_path in self._files:
            self._hide(self._beat_path)
        self._say(beat)

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
        self._post(
            WorkerSaid(
                now=self._now(), model=self._model, generation=self._generation, message=message
            )
        )

    def _break(self, detail: str, *, is_other_version: bool = False) -> None:
        """Report the worker once; whatever else it sends is ignored."""
        self._is_broken = True
        self._outbox.clear()
        self._post(
            WorkerBroke(
                now=self._now(),
                model=self._model,
                generation=self._generation,
                detail=detail,
                is_other_version=is_other_version,
            )
        )
