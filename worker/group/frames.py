"""Frames between the leader of a group and its followers, over a follower's stdin and stdout.

A frame is four bytes of length, most significant first, and a message in msgpack. A frame without
a message is a ping: it shows that the link is alive. End of file is a lost peer.
"""

from __future__ import annotations

import fcntl
import os
import select
import termios
import threading
from array import array
from dataclasses import field, replace
from typing import Any, ClassVar

from mlxsup.protocol.codec import MAX_FRAME_BYTES, Decoder, encode, to_map
from mlxsup.protocol.group import READ_BYTES
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.message import Message, record
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import LoadPhase

from ..engine import Row

LENGTH_BYTES = 4

PING = bytes(LENGTH_BYTES)


class FrameError(Exception):
    """The bytes that have arrived are no frame; the message says why.

    Attributes:
        received: these bytes.
    """

    def __init__(self, message: str, received: bytes) -> None:
        super().__init__(message)
        self.received = received


@record
class Who(Message):
    """Leader → follower: what it serves, before it looks at anything.

    Attributes:
        launch: its launch spec, with the path on its own host.
        address: the address of its host on which the ranks meet.
        gpu: the place of its GPU among those of its host: each rank there takes another one.
    """

    TYPE: ClassVar[str] = "who"

    launch: dict[str, Any]
    address: str
    gpu: int


@record
class Plan(Message):
    """Leader → follower: all ranks fit together, so load.

    Attributes:
        rank: its number; the leader is 0.
        addresses: where each rank listens, `ip:port`, rank 0 first.
        backend: how they connect, see `Rank`.
    """

    TYPE: ClassVar[str] = "plan"

    rank: int
    addresses: list[str]
    backend: str


@record
class Call(Message):
    """Leader → follower: call a method of the engine, as the leader does now.

    Attributes:
        number: of the call, from 1, without a gap.
        name: of the method.
        digest: of the results of all earlier calls, see `Replay.digest`.
        row: that it inserts, see `plain_row`; empty: it inserts none.
        is_constrained: whether that row has a grammar, which the leader alone knows.
        keys: of the rows that it is about.
        named: its other arguments.
    """

    TYPE: ClassVar[str] = "call"

    number: int
    name: str
    digest: int
    row: dict[str, Any] = field(default_factory=dict)
    is_constrained: bool = False
    keys: list[RequestKey] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[Any]:
        """Return what the method takes without a name."""
        return [_row(self.row)] if self.row else self.keys


@record
class Stop(Message):
    """Leader → follower: close the engine and exit."""

    TYPE: ClassVar[str] = "stop"


@record
class Greeting(Message):
    """Follower → leader: what it is, before MLX is imported.

    Attributes:
        address: where it will listen for other ranks.
        versions, fingerprint: see `ModelFiles`.
    """

    TYPE: ClassVar[str] = "hello"

    address: str
    versions: dict[str, Any]
    fingerprint: str


@record
class Progress(Message):
    """Follower → leader: how far its load is."""

    TYPE: ClassVar[str] = "progress"

    phase: LoadPhase
    progress: float


@record
class Loaded(Message):
    """Follower → leader: it is ready for calls.

    Attributes:
        active_bytes: what its arrays take.
    """

    TYPE: ClassVar[str] = "ready"

    active_bytes: int


@record
class Beat(Message):
    """Follower → leader, every pulse.

    Attributes:
        heard: bytes that have come from the leader. It grows with each ping, unless something
            between them is stopped.
        begun, ended: how many calls, so far.
        available_bytes: memory that programs could have on its host.
    """

    TYPE: ClassVar[str] = "beat"

    heard: int
    begun: int
    ended: int
    available_bytes: int


@record
class Failed(Message):
    """Follower → leader: why it exits.

    Attributes:
        code: what it exits with; see `protocol.launch.ExitCode`.
        text: one sentence.
    """

    TYPE: ClassVar[str] = "error"

    code: int
    text: str = field(default="")


ToFollower = Who | Plan | Call | Stop
ToLeader = Greeting | Progress | Loaded | Beat | Failed

TO_FOLLOWER: tuple[type[Message], ...] = (Who, Plan, Call, Stop)
TO_LEADER: tuple[type[Message], ...] = (Greeting, Progress, Loaded, Beat, Failed)


class FrameReader:
    """Reads the frames of one direction from a descriptor, for one thread.

    Args:
        descriptor: a pipe or a socket that blocks.
        classes: the messages that may arrive.
    """

    def __init__(self, descriptor: int, classes: tuple[type[Message], ...]) -> None:
        self._descriptor = descriptor
        self._decoder: Decoder[Message] = Decoder(classes, is_strict=False)
        self._received = bytearray()
        self._taken = 0

    def heard(self) -> int:
        """Return how many bytes have come, also those that wait to be read; on any thread."""
        waiting = array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, waiting)
        return self._taken + waiting[0]

    def read(self) -> Message | None:
        """Return the next message, or None for a ping.

        Raises:
            EOFError: the other side is gone.
            FrameError: what it sends is no frame.
            DecodeError: the frame holds no message of this direction.
        """
        header = self._take(LENGTH_BYTES)
        length = int.from_bytes(header, "big")
        if length > MAX_FRAME_BYTES:
            raise FrameError(
                f"a frame must have at most {MAX_FRAME_BYTES} bytes, not {length}",
                header + self._received,
            )
        return self._decoder.decode([self._take(length)]) if length else None

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            piece = os.read(self._descriptor, READ_BYTES)
            if not piece:
                raise EOFError
            self._taken += len(piece)
            self._received += piece
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


def pack_frame(message: Message) -> bytes:
    """Return the frame of a message."""
    [packed] = encode(message)
    return len(packed).to_bytes(LENGTH_BYTES, "big") + packed


class FrameWriter:
    """Writes whole frames to a descriptor, from any thread.

    Args:
        descriptor: a pipe or a socket that blocks.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, message: Message) -> None:
        """Write the frame of a message; see `write_frame`."""
        self.write_frame(pack_frame(message))

    def write_frame(self, frame: bytes) -> None:
        """Write a frame; block while the other side reads nothing.

        Raises:
            BrokenPipeError: the other side is gone.
        """
        with self._lock:
            self._write_all(frame)

    def ping(self) -> None:
        """Write a ping, unless a frame is on its way or there is no room, so that the other side
        has something to read.

        Raises:
            BrokenPipeError: the other side is gone.
        """
        if self._lock.acquire(blocking=False):
            try:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                if poll.poll(0):
                    self._write_all(PING)
            finally:
                self._lock.release()

    def _write_all(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def plain_row(row: Row) -> dict[str, Any]:
    """Return a row without what the leader alone needs: its token is every rank's token, so the
    grammar and the likelihoods of others stay with it."""
    needed = replace(row, grammar=None, top_logprobs=None, logit_bias={})
    return {**to_map(needed), "logit_bias": list(row.logit_bias.items())}


def _row(plain: dict[str, Any]) -> Row:
    made = {
        "key": RequestKey(plain["key"]),
        "sampling": Sampling(**plain.get("sampling", {})),
        "logit_bias": dict(plain["logit_bias"]),
    }
    pairs = ("stop_token_ids", "checkpoints", "lengths")
    return Row(**{**plain, **{name: tuple(plain.get(name, ())) for name in pairs}, **made})
