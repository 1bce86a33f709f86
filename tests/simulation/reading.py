"""Leases as a played worker handles them: it reads long prompts with one, if it was told so."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from mlxsup.protocol.worker_messages import Lease, Leases, Step

from .violation import check


class Has(Enum):
    """What a worker has of a lease."""

    NOTHING = auto()
    ASKED = auto()
    A_LEASE = auto()


@dataclass(slots=True)
class Reading:
    """Of one worker.

    Attributes:
        are_needed: what the supervisor said last.
        has: how far it has come.
        unread: what the supervisor has said since the step under way began.
    """

    are_needed: bool = False
    has: Has = Has.NOTHING
    unread: list[Leases | Lease] = field(default_factory=list)

    def hear(self) -> None:
        """No step is under way: reads what the supervisor has said about leases."""
        for message in self.unread:
            self._heard(message)
        self.unread.clear()

    def _heard(self, message: Leases | Lease) -> None:
        if isinstance(message, Leases):
            check("told again", message.are_needed != self.are_needed, message)
            self.are_needed = message.are_needed
        else:
            check("lease for nobody's question", self.has is Has.ASKED, self.has)
            self.has = Has.A_LEASE

    def may_read(self, *, is_reading: bool) -> bool:
        """Whether a step may read."""
        is_free = self.has is Has.NOTHING and not self.are_needed
        return is_free or self.has is Has.A_LEASE or not is_reading

    def has_news(self, *, is_reading: bool) -> bool:
        """Whether there is something to say even without a step."""
        wants = self.has is Has.NOTHING and self.are_needed and is_reading
        return wants or self.has is Has.A_LEASE

    def fill_in(self, step: Step, *, is_reading: bool, can_decode: bool) -> Step:
        """Adds what there is to say about leases to the message of a step, or between two."""
        returns = self.has is Has.A_LEASE
        if returns:
            self.has = Has.NOTHING
        wants = self.has is Has.NOTHING and self.are_needed and is_reading
        if wants:
            self.has = Has.ASKED
        return Step(
            step=step.step,
            rows=step.rows,
            prefill=step.prefill,
            took_s=step.took_s,
            decode_s=step.decode_s,
            between_steps=step.between_steps,
            reads_on=is_reading,
            returns_lease=returns,
            wants_lease=wants,
            only_waits=self.has is Has.ASKED and is_reading and not can_decode,
        )
