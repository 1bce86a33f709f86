"""What a client has yet to be sent because its socket had no room, encoded once."""

from __future__ import annotations

from collections import deque

from mlxsup.protocol.client_messages import ClientDelta, Deltas, Done, Failed, Reply
from mlxsup.protocol.codec import encode
from mlxsup.protocol.message import Message

from ..core.errors import slow_consumer

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

    __slots__ = ("deltas", "frames", "message", "size_bytes")

    def __init__(self, message: Message, frames: list[bytes] | None) -> None:
        self.message = message
        self.deltas = list(message.deltas) if isinstance(message, Deltas) else []
        if frames is None and not self.deltas:
            frames = encode(message)
        self.frames = frames
        self.size_bytes = (
            MESSAGE_OVERHEAD_BYTES + sum(map(len, frames))
            if frames is not None
            else sum(map(_size_bytes, self.deltas))
        )

    def takes(self, other: _Unsent) -> bool:
        """Whether the other may be merged into this one: nobody has tried to send either."""
        return (
            self.frames is None
            and other.frames is None
            and len(self.deltas) + len(other.deltas) <= MAX_MERGED_DELTAS
            and self.size_bytes + other.size_bytes <= MAX_MERGED_BYTES
        )


class Outbox:
    """A queue of unsent messages; consecutive pieces behind its head become one message (H7).

    Args:
        tally: also counts its bytes.
    """

    __slots__ = ("_queue", "_tally", "size_bytes")

    def __init__(self, tally: Tally) -> None:
        self._queue: deque[_Unsent] = deque()
        self._tally = tally
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, message: Message, frames: list[bytes] | None = None) -> None:
        """Adds a message; with its frames, if it has been encoded."""
        unsent = _Unsent(message, frames)
        self._count(unsent.size_bytes)
        if self._queue and self._queue[-1].takes(unsent):
            self._queue[-1].deltas += unsent.deltas
            self._queue[-1].size_bytes += unsent.size_bytes
        else:
            self._queue.append(unsent)

    def head(self) -> list[bytes]:
        """The frames to send next."""
        first = self._queue[0]
        if first.frames is None:
            first.frames = encode(Deltas(deltas=first.deltas))
        return first.frames

    def drop_head(self) -> None:
        """They were sent."""
        self._count(-self._queue.popleft().size_bytes)

    def clear(self) -> None:
        """The client is gone: drops everything."""
        self._queue.clear()
        self._count(-self.size_bytes)

    def keep_only_ends(self) -> None:
        """Drops everything but ends; a stream's good end no longer counts as one."""
        kept = list(self._queue)
        self.clear()
        for unsent in kept:
            if isinstance(unsent.message, Done):
                self.add(Failed(id=unsent.message.id, error=slow_consumer().to_wire()))
            elif isinstance(unsent.message, Failed | Reply):
                self.add(unsent.message, unsent.frames)

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._tally.bytes += size_bytes


def _size_bytes(delta: ClientDelta) -> int:
    """About how large a piece is, without encoding it."""
    return MESSAGE_OVERHEAD_BYTES + len(delta.tokens) + len(delta.body)
