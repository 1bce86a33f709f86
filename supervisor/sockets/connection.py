"""One client's connection: what it has open, and what it has yet to be sent."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.client_messages import Cancel, Done, Failed, Reply, Subscribe
from mlxsup.protocol.message import Message

from ..core.events import ConnectionId
from .outbox import Outbox, Tally

ENDS = (Done, Failed, Reply)
"""What ends a request or a command."""


class Connection:
    """A connection that has something open, or something yet to be sent.

    Attributes:
        id: its routing id.
        descriptor: its socket's descriptor, owned by libzmq; may have been reused since.
        open: ids of its requests and commands that have not ended.
        subscription: the id under which it gets changes.
        outbox: messages that the socket had no room for.
        progressed_at: when the last of them was sent, or the first began to wait.
        retry_at, retry_s: when sending is tried again, and how long after the last try.
        is_slow: whether it was given up once; then it only gets terminal messages.
    """

    __slots__ = (
        "descriptor",
        "id",
        "is_slow",
        "open",
        "outbox",
        "progressed_at",
        "retry_at",
        "retry_s",
        "subscription",
    )

    def __init__(self, id: ConnectionId, descriptor: int, tally: Tally) -> None:
        self.id = id
        self.descriptor = descriptor
        self.open: set[str] = set()
        self.subscription: str | None = None
        self.outbox = Outbox(tally)
        self.progressed_at = 0.0
        self.retry_at = 0.0
        self.retry_s = 0.0
        self.is_slow = False

    @property
    def has_anything_open(self) -> bool:
        return bool(self.open) or self.subscription is not None

    def has_open(self, id: str) -> bool:
        """Whether anything with this id has not ended."""
        return id in self.open or id == self.subscription

    def note_said(self, message: Any) -> None:
        """Records what a message opens; a second subscription replaces the first.

        Args:
            message: one of `CLIENT_MESSAGES`, all of which have an id.
        """
        id = message.id
        if isinstance(message, Subscribe):
            self.subscription = id
        elif isinstance(message, Cancel):
            if id == self.subscription:
                self.subscription = None
        else:
            self.open.add(id)

    def note_sent(self, message: Message) -> None:
        """Records what a message to the client ends."""
        if isinstance(message, ENDS):
            self.open.discard(message.id)
            if message.id == self.subscription:
                self.subscription = None
