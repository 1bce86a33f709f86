"""What a peer has yet to be sent because its socket had no room, encoded once."""

from __future__ import annotations

from collections import deque

from mlxsup.protocol.client_messages import ClientDelta, Deltas, Done, Failed, Reply
from mlxsup.protocol.codec import encode
from mlxsup.protocol.message import Message

from ..core.errors import slow_consumer
from .zmtp import to_wire

MAX_MERGED_DELTAS = 512
MAX_MERGED_BYTES = 64 * 1024
MESSAGE_OVERHEAD_BYTES = 256
"""How much memory an unsent message, or a piece in one, takes beyond its bytes."""


class Tally:
    """Counts the bytes in all outboxes that share it."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class _Unsent:
    """A message, or pieces of streams that become one message when they are first in line."""

    __slots__ = ("deltas", "message", "size_bytes", "wire")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.deltas = list(message.deltas) if isinstance(message, Deltas) else []
        self.wire = b"" if self.deltas else to_wire(encode(message))
        self.size_bytes = (
            sum(map(_size_bytes, self.deltas))
            if self.deltas
            else MESSAGE_OVERHEAD_BYTES + len(self.wire)
        )

    def takes(self, other: _Unsent) -> bool:
        """True if the other may be merged into this one."""
        return (
            bool(self.deltas and other.deltas)
            and len(self.deltas) + len(other.deltas) <= MAX_MERGED_DELTAS
            and self.size_bytes + other.size_bytes <= MAX_MERGED_BYTES
        )


class Outbox:
    """What is unsent: bytes that have begun to leave, then messages (H7).

    Consecutive pieces become one message as long as nothing of them has begun to leave.

    Args:
        tally: also counts its bytes.
    """

    __slots__ = ("_begun", "_queue", "_tally", "size_bytes")

    def __init__(self, tally: Tally) -> None:
        self._begun = memoryview(b"")
        self._queue: deque[_Unsent] = deque()
        self._tally = tally
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._begun or self._queue)

    def __len__(self) -> int:
        return len(self._queue) + bool(self._begun)

    def begin(self, wire: bytes, taken: int) -> None:
        """Add bytes of which the socket has taken some; the outbox must be empty."""
        self._begun = memoryview(wire)[taken:]
        self._count(len(self._begun))

    def add(self, message: Message) -> None:
        """Add a message."""
        unsent = _Unsent(message)
        self._count(unsent.size_bytes)
        if self._queue and self._queue[-1].takes(unsent):
            self._queue[-1].deltas += unsent.deltas
            self._queue[-1].size_bytes += unsent.size_bytes
        else:
            self._queue.append(unsent)

    def head(self) -> memoryview:
        """Return the bytes to send next; the outbox must not be empty."""
        if not self._begun:
            first = self._queue.popleft()
            wire = first.wire or to_wire(encode(Deltas(deltas=first.deltas)))
            self._begun = memoryview(wire)
            self._count(len(wire) - first.size_bytes)
        return self._begun

    def drop(self, taken: int) -> None:
        """Drop this many bytes of the head: they were sent."""
        self._begun = self._begun[taken:]
        self._count(-taken)

    def clear(self) -> None:
        """Drop everything."""
        self._begun = memoryview(b"")
        self._queue.clear()
        self._count(-self.size_bytes)

    def keep_only_ends(self) -> None:
        """Drop every message but ends; a stream's good end no longer counts as one.

        What has begun to leave stays, because the client could not read what follows otherwise.
        """
        kept = list(self._queue)
        self._queue.clear()
        self._count(len(self._begun) - self.size_bytes)
        for unsent in kept:
            if isinstance(unsent.message, Done):
                self.add(Failed(id=unsent.message.id, error=slow_consumer()))
            elif isinstance(unsent.message, Failed | Reply):
                self.add(unsent.message)

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._tally.bytes += size_bytes


def _size_bytes(delta: ClientDelta) -> int:
    """Return about how large a piece is, without encoding it."""
    return MESSAGE_OVERHEAD_BYTES + len(delta.tokens) + len(delta.body)
