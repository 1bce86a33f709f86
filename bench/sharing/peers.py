"""Orders to compare ours with: whoever has a free row asks them who is next.

First come, first served is what most servers do. Deficit round robin is the fair order that is
easiest to build; because nobody knows what a request will cost, it is charged afterwards, as
ours is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mlxsup.protocol.states import Priority


@dataclass(slots=True, kw_only=True)
class Job:
    """One request; not frozen, because it is being computed.

    Attributes:
        number: counts arrivals.
        account: asked for it.
        cost_s: engine seconds that it takes.
        at: when it comes, in seconds.
        priority: its class.
        left_s: what it has yet to receive.
        began_at: when it got its row; None while it waits.
    """

    number: int
    account: str
    cost_s: float
    at: float
    priority: Priority = Priority.NORMAL
    left_s: float = 0.0
    began_at: float | None = None

    def fresh(self) -> Job:
        """The same for another server, nothing of it computed."""
        return Job(
            number=self.number, account=self.account, cost_s=self.cost_s, at=self.at,
            priority=self.priority, left_s=self.cost_s,
        )  # fmt: skip


class Order(Protocol):
    """Decides who is next among those that wait."""

    def add(self, job: Job) -> None:
        """It waits."""

    def take(self) -> Job | None:
        """Removes and returns the next one; None if nobody waits."""

    def charge(self, account: str, seconds: float) -> None:
        """An account has received engine seconds."""


class FirstCome:
    """The order of arrivals."""

    def __init__(self) -> None:
        self._line: deque[Job] = deque()

    def add(self, job: Job) -> None:
        """It waits behind all others."""
        self._line.append(job)

    def take(self) -> Job | None:
        """The oldest."""
        return self._line.popleft() if self._line else None

    def charge(self, account: str, seconds: float) -> None:
        """Nobody counts."""


class ByClass:
    """The order of classes, and of arrivals within a class; nobody ever moves up."""

    def __init__(self) -> None:
        self._lines = {priority: FirstCome() for priority in Priority}

    def add(self, job: Job) -> None:
        """It waits behind those of its class."""
        self._lines[job.priority].add(job)

    def take(self) -> Job | None:
        """The oldest of the highest class."""
        return next((job for line in self._lines.values() if (job := line.take())), None)

    def charge(self, account: str, seconds: float) -> None:
        """Nobody counts."""


@dataclass(slots=True, kw_only=True)
class RoundRobin:
    """Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), charged afterwards.

    An account whose turn it is gets a quantum, times its weight, and starts requests while it has
    something left; what they cost is taken off as they are computed.

    Attributes:
        quantum_s: engine seconds for each turn.
        weights: of the accounts; 1 for others.
    """

    quantum_s: float
    weights: Mapping[str, float]
    _lines: dict[str, deque[Job]] = field(default_factory=dict)
    _ring: deque[str] = field(default_factory=deque)
    _left_s: dict[str, float] = field(default_factory=dict)
    _has_turn: str = ""

    def add(self, job: Job) -> None:
        """It waits behind those of its account."""
        line = self._lines.setdefault(job.account, deque())
        if not line and job.account not in self._ring:
            self._ring.append(job.account)
        line.append(job)

    def take(self) -> Job | None:
        """The oldest of the account whose turn it is."""
        while self._ring:
            account = self._ring[0]
            line = self._lines[account]
            if not line:  # whoever leaves takes no credit along
                self._leave(account)
                continue
            if self._has_turn != account:
                self._has_turn = account
                quantum_s = self.quantum_s * self.weights.get(account, 1.0)
                self._left_s[account] = self._left_s.get(account, 0.0) + quantum_s
            if self._left_s[account] > 0:
                return line.popleft()
            self._ring.rotate(-1)
            self._has_turn = ""
        return None

    def charge(self, account: str, seconds: float) -> None:
        """Takes off what was computed."""
        self._left_s[account] = self._left_s.get(account, 0.0) - seconds

    def _leave(self, account: str) -> None:
        self._ring.popleft()
        self._has_turn = ""
        self._left_s[account] = min(self._left_s.get(account, 0.0), 0.0)
