"""Decides who is let in at the clients' socket: how many connections, and how many per process.

No sockets and no clock. A connection is known by its descriptor from when libzmq accepts it until
libzmq reports its end; descriptors are reused, so a newcomer replaces whatever its descriptor stood
for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto

MAX_CONNECTIONS = 1024
"""The limit for all clients together; fewer if the limit of open files is low."""

MAX_OF_ONE_PROCESS = 128

KEPT_FOR_NEWCOMERS = 64
"""This many last places are only for the first connection of a process, so that commands get in."""

MIN_CONNECTIONS = 2 * KEPT_FOR_NEWCOMERS
"""A daemon that could have fewer does not start."""

MAX_REFUSED = 64
"""How many connections beyond the limits are held until they know why they are refused."""

REFUSAL_S = 2.0
"""How long they are held: a handshake and a first message, on a busy machine."""


class Verdict(Enum):
    """What happens to a new connection."""

    ADMITTED = auto()
    REFUSED = auto()
    """Held for a moment: each of its messages is answered with the reason."""
    TURNED_AWAY = auto()
    """Ended at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A connection.

    Attributes:
        process: its peer's pid; None if the platform does not say.
        refusal: why it is not admitted; empty if it is.
        since: when it came, in seconds.
    """

    process: int | None
    refusal: str
    since: float


class Doors:
    """All current connections.

    Args:
        max_connections: how many to admit at most.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        # Bounded by `max_connections` + MAX_REFUSED.
        self._places: dict[int, _Place] = {}
        self._refused: dict[int, _Place] = {}
        self._of_process: Counter[int | None] = Counter()  # never holds None

    @property
    def admitted(self) -> int:
        """How many are admitted."""
        return len(self._places)

    @property
    def processes(self) -> frozenset[int | None]:
        """The processes that have a connection, as far as the platform names them."""
        return frozenset(self._of_process)

    def knows(self, descriptor: int) -> bool:
        """Whether this connection exists."""
        return descriptor in self._places or descriptor in self._refused

    def come(self, descriptor: int, process: int | None, now: float) -> Verdict:
        """A connection was accepted."""
        self.go(descriptor)
        refusal = self._refusal(process)
        place = _Place(process=process, refusal=refusal, since=now)
        if not refusal:
            self._places[descriptor] = place
            if process is not None:
                self._of_process[process] += 1
            return Verdict.ADMITTED
        if len(self._refused) >= MAX_REFUSED:
            return Verdict.TURNED_AWAY
        self._refused[descriptor] = place
        return Verdict.REFUSED

    def go(self, descriptor: int) -> None:
        """A connection has ended; unknown ones are ignored."""
        self._refused.pop(descriptor, None)
        place = self._places.pop(descriptor, None)
        if place is not None and place.process is not None:
            self._of_process[place.process] -= 1
            if not self._of_process[place.process]:
                del self._of_process[place.process]

    def refusal(self, descriptor: int) -> str:
        """Why this connection is not served; empty if it is."""
        place = self._refused.get(descriptor)
        return "" if place is None else place.refusal

    def take_overdue(self, now: float) -> list[int]:
        """Forgets and returns refused connections whose time is over; they must be ended."""
        overdue = [d for d, place in self._refused.items() if now - place.since >= REFUSAL_S]
        for descriptor in overdue:
            del self._refused[descriptor]
        return overdue

    def _refusal(self, process: int | None) -> str:
        count = self._of_process[process]
        if count >= MAX_OF_ONE_PROCESS:
            return f"process {process} has {MAX_OF_ONE_PROCESS} connections, and cannot have more"
        is_first = process is not None and not count
        free = self.max_connections - len(self._places)
        if free <= (0 if is_first else KEPT_FOR_NEWCOMERS):
            return (
                f"the daemon has {len(self._places)} connections, and accepts no more of this kind"
            )
        return ""
