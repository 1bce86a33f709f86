"""The oracle's account of leases: who reads, who waits, who has one, and whether that is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxsup.protocol.worker_messages import Lease, Leases, Step

from .costs import BACKENDS, backend_of
from .shares import CLASSES
from .violation import check

if TYPE_CHECKING:
    from .books import Life
    from .record import Record

LEASE_S = 4.0
SLACK_S = 0.05
"""A tick may come so late, and a little more."""

EPSILON_S = 1e-6


@dataclass(slots=True)
class Turn:
    """What a process has to do with leases.

    Attributes:
        reads: whether it said that a long prompt is left.
        asked: the number of its question, while it waits.
        only_waits: whether it computes nothing until it gets one.
        got_at: when it got the lease that it has not given back.
        was_told: whether it was told last that leases are needed.
    """

    reads: bool = False
    asked: int | None = None
    only_waits: bool = False
    got_at: float | None = None
    was_told: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether it counts as a reader."""
        return self.reads or self.asked is not None or self.got_at is not None


def stepped(record: Record, life: Life, message: Step) -> None:
    """A process that serves has said so."""
    turn = life.turn
    if message.returns_lease:
        turn.got_at = None
    turn.reads = message.reads_on
    turn.only_waits = message.only_waits
    if message.wants_lease:
        turn.asked = record.questions = record.questions + 1


def told(record: Record, life: Life, message: Leases | Lease) -> None:
    """The supervisor tells a process something about leases."""
    limit = record.plan.settings.max_parallel_prefills
    check("leases without a limit", limit is not None, life.model)
    assert limit is not None
    members = _members(record, backend_of(life.model))
    check("leases of the unready", life in members, life.model)
    if isinstance(message, Leases):
        life.turn.was_told = message.are_needed
        return
    asked = life.turn.asked
    check("lease unasked", asked is not None, life.model)
    waiting = [_place(other) for other in members if other.turn.asked is not None]
    own = _place(life)
    check("lease out of turn", own == min(waiting), f"{life.model}: {own} of {waiting}")
    if min(waiting, key=lambda place: place[1]) != own:
        record.count("lease by class")
    holding = _holding(members, record.now + EPSILON_S)
    check("too many leases", len(holding) < limit, [other.model for other in holding])
    life.turn.asked, life.turn.got_at = None, record.now
    if life.turn.only_waits:
        life.turn.only_waits = False
        life.works_since = record.now
        record.count("back at work")
    record.count("lease")


def look(record: Record) -> None:
    """Nobody waits for a lease that is free, and everybody knows whether one is needed."""
    limit = record.plan.settings.max_parallel_prefills
    if limit is None:
        return
    for backend in BACKENDS:
        members = _members(record, backend)
        are_needed = sum(life.turn.takes_part for life in members) > limit
        for life in members:
            check("leases needed", life.turn.was_told == are_needed, f"{life.model}: {are_needed}")
        if any(life.turn.asked is not None for life in members):
            record.count("waits for a lease")
            check("lease left", len(_holding(members, record.now - SLACK_S)) >= limit, limit)


def _members(record: Record, backend: str) -> list[Life]:
    """Processes that can be given a lease of this device."""
    lives = [book.life for book in record.books.values() if backend_of(book.name) == backend]
    return [
        life
        for life in lives
        if life is not None and life.serves and life.unlinked_at is None and not life.is_abandoned
    ]


def _holding(members: list[Life], now: float) -> list[Life]:
    """Those whose lease has not ended by then."""
    return [
        life
        for life in members
        if life.turn.got_at is not None and now < life.turn.got_at + LEASE_S
    ]


def _place(life: Life) -> tuple[int, int]:
    """What turns go by: the highest class of those that have no token from this process, or of
    all if there are none; then the question."""
    held = [ask for ask in life.given.values() if ask.is_open]
    reading = [
        ask for ask in held if ask.first_token_at is None or ask.is_interrupted or ask.is_paused
    ]
    assert life.turn.asked is not None
    return min((ask.standing for ask in reading or held), default=len(CLASSES)), life.turn.asked
