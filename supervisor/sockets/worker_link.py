"""The sockets of one worker's life: private to it, so that a dead one's late frames get lost.

Whoever connects is read, but only the connection whose HELLO carried the token is the worker's: so
a stray frame of another process ends no healthy worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
from collections.abc import Callable, Sized
from pathlib import Path

from mlxsup.protocol.codec import DecodeError, Decoder, encode
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
from .transport import Door, Line
from .zmtp import to_wire

FILES_OF_SPAWN = 16
"""How many files must be free before a worker is started: what its process and its sockets take."""

MAX_UNSENT_MESSAGES = 8192
"""A worker that leaves more than this unread does not follow the protocol."""


class WorkerLink:
    """Messages from and to one incarnation of a worker.

    Anybody else who finds the socket is ignored: only the peer whose HELLO had the token counts.

    Attributes:
        endpoint: what the worker connects to.
        pid: its process's pid, once it is known.
        has_peer: whether a worker has ever connected.
        disconnected: set once its connection has ended and nothing more can arrive; before HELLO,
            once nobody is connected.

    Args:
        path: path of the socket; the one for heartbeats is next to it.
        model, generation, token: what HELLO must carry.
        post: called with each event.
        now: the time that events carry.

    Raises:
        OSError: the sockets cannot be made, or too few files are free.
    """

    def __init__(
        self,
        path: Path,
        *,
        model: ModelName,
        generation: Generation,
        token: str,
        post: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.pid: int | None = None
        self.has_peer = False
        self.disconnected = asyncio.Event()
        self._model = model
        self._generation = generation
        self._token = token
        self._post = post
        self._now = now
        self._decoder = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
        self._beat_decoder = Decoder((Heartbeat,), is_strict=False)
        self._peer: Line | None = None
        self._is_broken = False
        self._early: list[bytes] = []
        if free_files() < FILES_OF_SPAWN:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._door = Door(path, b"DEALER", take=self._take, come=self._come, leave=self._leave)
        try:
            beat_path = path.with_name(path.name + BEAT_SUFFIX)
            self._beats = Door(beat_path, b"PUSH", take=self._take_beat)
        except OSError:
            self._door.close()
            raise

    @property
    def has_unsent(self) -> bool:
        """True if messages wait for HELLO, or for room."""
        return bool(self._unsent)

    @property
    def _unsent(self) -> Sized:
        return self._early if self._peer is None else self._peer.unsent

    def send(self, message: MessageToWorker) -> None:
        """Send, or keep what there is no room for, in order; sends nothing to a broken worker."""
        if self._is_broken:
            return
        wire = to_wire(encode(message))
        if self._peer is None:  # before HELLO there is nobody to send anything to
            self._early.append(wire)
        else:
            self._peer.send(wire)
        if len(self._unsent) > MAX_UNSENT_MESSAGES:
            self._break("does not read its messages")

    def drain(self) -> None:
        """Take everything that has arrived; if `disconnected` is set, nothing more will come."""
        self._door.drain()
        self._beats.drain()

    def close(self) -> None:
        """Close the sockets and remove their files; a second time does nothing.

        Raises:
            OSError: a file cannot be removed; the sockets are closed.
        """
        self._is_broken = True
        try:
            self._door.close()
        finally:
            self._beats.close()

    def _come(self) -> None:
        self.has_peer = True
        if self._peer is None:
            self.disconnected.clear()

    def _leave(self, line: Line) -> None:
        if self._peer is None:
            if not self._door.lines:
                self.disconnected.set()
        elif line is self._peer:
            self.disconnected.set()
            if not self._is_broken:  # whatever connects in its place is a stranger
                self._post(
                    WorkerUnlinked(now=self._now(), model=self._model, generation=self._generation)
                )

    def _take(self, line: Line, frames: list[bytes]) -> None:
        if self._is_broken:
            return
        try:
            message = self._decoder.decode(frames)
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
            self._peer = line
            self._hide(self._door)
            for stranger in [one for one in self._door.lines if one is not line]:
                self._door.end(stranger)
            for wire in self._early:
                line.send(wire)
        self._say(message)

    def _take_beat(self, _: Line, frames: list[bytes]) -> None:
        if self._is_broken or self._peer is None:
            return
        try:
            beat = self._beat_decoder.decode(frames)
        except DecodeError:
            return  # a stranger's: beats carry no token, and the worker's own still come
        self._hide(self._beats)
        self._say(beat)

    def _hide(self, door: Door) -> None:
        with contextlib.suppress(OSError):  # it is tried again at the end, and reported then
            door.hide()

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
        self._early.clear()
        if self._peer is not None:
            self._peer.unsent.clear()
        self._post(
            WorkerBroke(
                now=self._now(),
                model=self._model,
                generation=self._generation,
                detail=detail,
                is_other_version=is_other_version,
            )
        )
