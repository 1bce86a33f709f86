"""One client's connection: what it has open, and what it has yet to be sent."""

from __future__ import annotations

import socket

from mlxsup.protocol.client_messages import Cancel, Done, Failed, Reply, Subscribe
from mlxsup.protocol.message import Command, Message

from ..core.events import ConnectionId
from .outbox import Outbox, Tally
from .peer import NO_NAMES
from .zmtp import Inbound

ENDS = (Done, Failed, Reply)
"""What ends a request or a command."""


class Connection:
    """A connection that was accepted.

    Attributes:
        id: which no other connection of this daemon has had.
        socket: its end here.
        pid: of the process at the other end; None if the platform does not say.
        names: on whose behalf its messages are; found in the handshake.
        refusal: why it is not served; empty if it is.
        came_at: when it was accepted.
        inbound: what it sends.
        open: ids of its requests and commands that have not ended.
        subscription: the id under which it gets changes.
        leaving: bytes that leave at the end of the turn.
        outbox: what its socket had no room for.
        progressed_at: when some of that was last sent, or the first began to wait.
        is_slow: whether it was given up once; then it only gets terminal messages.
        is_queued: whether it waits for its turn of reading.
        is_ended: whether its socket is closed.
    """

    __slots__ = (
        "came_at",
        "id",
        "inbound",
        "is_ended",
        "is_queued",
        "is_slow",
        "leaving",
        "names",
        "open",
        "outbox",
        "pid",
        "progressed_at",
        "refusal",
        "socket",
        "subscription",
    )

    def __init__(
        self,
        id: ConnectionId,
        socket: socket.socket,
        tally: Tally,
        *,
        pid: int | None,
        refusal: str,
        now: float,
    ) -> None:
        self.id = id
        self.socket = socket
        self.pid = pid
        self.names = NO_NAMES
        self.refusal = refusal
        self.came_at = now
        self.inbound = Inbound()
        self.open: set[str] = set()
        self.subscription: str | None = None
        self.leaving = bytearray()
        self.outbox = Outbox(tally)
        self.progressed_at = now
        self.is_slow = False
        self.is_queued = False
        self.is_ended = False

    @property
    def has_anything_open(self) -> bool:
        """True if a request, a command or a subscription has not ended."""
        return bool(self.open) or self.subscription is not None

    def has_open(self, id: str) -> bool:
        """True if anything with this id has not ended."""
        return id in self.open or id == self.subscription

    def note_said(self, message: Command) -> None:
        """Record what a message opens; a second subscription replaces the first."""
        id = message.id
        if isinstance(message, Subscribe):
            self.subscription = id
        elif isinstance(message, Cancel):
            if id == self.subscription:
                self.subscription = None
        else:
            self.open.add(id)

    def note_sent(self, message: Message) -> None:
        """Record what a message to the client ends."""
        if isinstance(message, ENDS):
            self.open.discard(message.id)
            if message.id == self.subscription:
                self.subscription = None
