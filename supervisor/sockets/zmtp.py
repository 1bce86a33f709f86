"""The server's side of ZMTP 3, which ZeroMQ 4 speaks: bytes in, messages out. No sockets.

Only what a daemon needs of https://rfc.zeromq.org/spec/23/: the NULL mechanism, a ROUTER that
DEALERs connect to, a PULL for PUSHes, and heartbeats. What a peer may send is bounded before it is
kept.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum, auto

from mlxsup.protocol.codec import MAX_FRAME_BYTES

SIGNATURE_BYTES = 10
GREETING = (
    b"\xff\0\0\0\0\0\0\0\x01\x7f"  # the signature, as libzmq sends it
    + b"\x03\x01"  # the version
    + b"NULL".ljust(20, b"\0")
    + b"\0"  # as-server, which means nothing to NULL
    + bytes(31)
)
MECHANISM = slice(12, 32)

SERVES = {b"DEALER": b"ROUTER", b"PUSH": b"PULL"}
"""The types of peers' sockets, and what each of them expects here."""

MORE, LONG, COMMAND = 1, 2, 4

MAX_COMMAND_BYTES = 4096
MAX_FRAMES = 1024
"""Frames of one message: more than any may have, so that the sender of too many hears of it."""

_LONG_HEADER = struct.Struct(">BQ")
_SHORT = [bytes((0, size)) for size in range(256)]
"""The header of the last frame of a message, by its size."""


class ZmtpError(Exception):
    """The peer does not speak the protocol, or sends too much; its connection must be ended.

    Attributes:
        answer: bytes that tell the peer why; empty if it would not understand them.
    """

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


class _Stage(Enum):
    GREETING = auto()
    HANDSHAKE = auto()
    TRAFFIC = auto()


class Inbound:
    """What one peer sends, and what must be answered to it.

    Args:
        peer: the type that its socket must have.

    Attributes:
        answers: bytes that must go out; the code that sends them clears them.
        routing_id: the id that the peer has given itself; empty if it has not.
        announced_bytes: the size of the message under way, as far as its frames have begun.
        most_bytes: the size that it may reach: more than that if another frame is to follow.
    """

    __slots__ = (
        "_buffer",
        "_frames",
        "_kept_bytes",
        "_peer",
        "_stage",
        "announced_bytes",
        "answers",
        "most_bytes",
        "routing_id",
    )

    def __init__(self, peer: bytes = b"DEALER") -> None:
        self._peer = peer
        self.answers = bytearray()
        self.routing_id = b""
        self._stage = _Stage.GREETING
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._kept_bytes = 0  # the size of `_frames`
        self.announced_bytes = self.most_bytes = 0

    @property
    def is_ready(self) -> bool:
        """True if the handshake is over."""
        return self._stage is _Stage.TRAFFIC

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add what has been received."""
        self._buffer += data

    def next(self) -> list[bytes] | None:
        """Return the frames of the next message; none of them if a step without a message was made.

        Call it until it returns None: then it needs more bytes. Each call reads one frame at most,
        so that the caller can stop after as many as it likes.

        Raises:
            ZmtpError: the connection must be ended.
        """
        if self._stage is _Stage.GREETING:
            return [] if self._read_greeting() else None
        found = self._read_frame()
        if found is None:
            return None
        flags, frame = found
        if flags & COMMAND:
            self._take_command(frame)
            return []
        self._frames.append(frame)
        self._kept_bytes += len(frame)
        if flags & MORE:
            return []
        frames, self._frames = self._frames, []
        self._kept_bytes = self.announced_bytes = self.most_bytes = 0
        return frames

    def _read_greeting(self) -> bool:
        """Return whether the greeting is complete, and right."""
        got = self._buffer
        if (got and got[0] != 0xFF) or (len(got) >= SIGNATURE_BYTES and got[9] != 0x7F):
            raise ZmtpError("this is not ZMTP 3")
        if len(got) > SIGNATURE_BYTES and got[SIGNATURE_BYTES] < 3:
            raise ZmtpError(f"this is ZMTP {got[SIGNATURE_BYTES]}, and not 3")
        if len(got) < len(GREETING):
            return False
        if got[MECHANISM] != GREETING[MECHANISM]:
            raise ZmtpError("the mechanism is not NULL")
        del got[: len(GREETING)]
        self._stage = _Stage.HANDSHAKE
        return True

    def _read_frame(self) -> tuple[int, bytes] | None:
        """Return the flags and the bytes of the next frame; None if it is not complete."""
        got = self._buffer
        if not got:
            return None
        flags = got[0]
        header_bytes = 9 if flags & LONG else 2
        if flags > 7 or (flags & COMMAND and flags & MORE):
            raise ZmtpError(f"a frame has the flags {flags}")
        if len(got) < header_bytes:
            return None
        size = int.from_bytes(got[1:header_bytes], "big")
        self._check_size(flags, size)
        if not flags & COMMAND:
            self.announced_bytes = self._kept_bytes + size
            self.most_bytes = MAX_FRAME_BYTES if flags & MORE else self.announced_bytes
        end = header_bytes + size
        if len(got) < end:
            return None
        with memoryview(got) as view:
            frame = bytes(view[header_bytes:end])
        del got[:end]
        return flags, frame

    def _check_size(self, flags: int, size: int) -> None:
        if flags & COMMAND:
            if size > MAX_COMMAND_BYTES:
                raise ZmtpError(f"a command has at most {MAX_COMMAND_BYTES} bytes, not {size}")
            return
        if self._stage is not _Stage.TRAFFIC:
            raise ZmtpError("a message came before READY")
        if len(self._frames) >= MAX_FRAMES:
            raise ZmtpError(f"a message has at most {MAX_FRAMES} frames")
        if self._kept_bytes + size > MAX_FRAME_BYTES:
            raise ZmtpError(f"a message has at most {MAX_FRAME_BYTES} bytes")

    def _take_command(self, command: bytes) -> None:
        name = command[1 : 1 + command[0]] if command else b""
        body = command[1 + len(name) :]
        if self._stage is _Stage.HANDSHAKE:
            if name != b"READY":
                raise ZmtpError(f"the handshake has the command {name[:20]!r}, and not READY")
            self._take_ready(body)
        elif name == b"PING" and len(body) >= 2:
            self.answers += _command(b"PONG", body[2:18])  # two bytes are its time to live

    def _take_ready(self, body: bytes) -> None:
        properties = dict(_properties(body))
        kind = properties.get(b"socket-type", b"")
        if kind != self._peer:
            reason = b"a client must be a %s socket" % self._peer
            answer = _command(b"ERROR", bytes((len(reason),)) + reason)
            raise ZmtpError(f"the peer is no {self._peer.decode()}: {kind[:20]!r}", answer)
        self.routing_id = properties.get(b"identity", b"")
        # Not before: the peer's handshake succeeds only if it is one that will be served.
        self.answers += _command(b"READY", _property(b"Socket-Type", SERVES[self._peer]))
        self._stage = _Stage.TRAFFIC


def to_wire(frames: Sequence[bytes]) -> bytes:
    """Return the bytes of a message."""
    if len(frames) == 1 and len(frames[0]) < 256:
        return _SHORT[len(frames[0])] + frames[0]
    parts = []
    for number, frame in enumerate(frames, 1):
        more = MORE if number < len(frames) else 0
        size = len(frame)
        parts.append(bytes((more, size)) if size < 256 else _LONG_HEADER.pack(more | LONG, size))
        parts.append(frame)
    return b"".join(parts)


def _command(name: bytes, body: bytes) -> bytes:
    command = bytes((len(name),)) + name + body
    return bytes((COMMAND, len(command))) + command


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(body: bytes) -> list[tuple[bytes, bytes]]:
    """Return names in lower case, and values.

    Raises:
        ZmtpError: they are cut off.
    """
    found = []
    at = 0
    while at < len(body):
        name_end = at + 1 + body[at]
        value_at = name_end + 4
        end = value_at + int.from_bytes(body[name_end:value_at], "big")
        if value_at > len(body) or end > len(body):
            raise ZmtpError("the properties of READY are cut off")
        found.append((body[at + 1 : name_end].lower(), body[value_at:end]))
        at = end
    return found
