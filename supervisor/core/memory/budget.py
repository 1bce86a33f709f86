"""How much memory all models together may take, also while other programs need some of it.

What models hold and what is available do not change together when a model loads, grows or ends,
only with what all other programs hold. The room for models is that sum, less what is kept free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from mlxsup.protocol.text import size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that models share. No load makes what is reserved exceed it.

    Attributes:
        size_bytes: what the models may take together now.
        machine_bytes: what the machine has of the memory that models live in: the device's with
            CUDA, otherwise its RAM or the limit of its control group.
        is_given: whether the configuration says so; otherwise it follows from the machine.
        reason: how it was found, a phrase: `15.60 GiB of RAM less a reserve of 2.00 GiB`.
        automatic_bytes: what it would be if the configuration did not say; None: it is that.
        lowered_from_bytes: what they may take together otherwise, if others need so much memory
            that it is less now; None if it is not lowered.
        shortage: why it is lowered, a phrase; empty if it is not.
        is_short: whether others lack memory at this moment, so that models must give some back. A
            budget may stay lowered for longer: models keep what they have, and no more are loaded.
    """

    size_bytes: int
    machine_bytes: int
    is_given: bool
    reason: str
    automatic_bytes: int | None = None
    lowered_from_bytes: int | None = None
    shortage: str = ""
    is_short: bool = False

    @property
    def whole_bytes(self) -> int:
        """Return what the models may take together while memory is not short."""
        return self.size_bytes if self.lowered_from_bytes is None else self.lowered_from_bytes

    @property
    def kept_bytes(self) -> int:
        """Return what may stay reserved; idle models go until it is no more."""
        return self.size_bytes if self.is_short else self.whole_bytes

    def whole(self) -> Budget:
        """The same budget, not lowered."""
        return replace(
            self,
            size_bytes=self.whole_bytes,
            lowered_from_bytes=None,
            shortage="",
            is_short=False,
        )

    def lowered(self, size_bytes: int, shortage: str, *, is_short: bool) -> Budget:
        """As much of the same budget as there is now.

        Args:
            shortage: why it is less.
            is_short: whether others lack memory at this moment.
        """
        return replace(
            self,
            size_bytes=size_bytes,
            lowered_from_bytes=self.whole_bytes,
            shortage=shortage,
            is_short=is_short,
        )


CALM_S = 10.0
"""There must have been more room for so long before the budget is raised again."""

STEPS = 50
"""The budget changes in steps of this part of it, and is raised only if there is one to spare."""

STALLED_FACTOR = 2
"""While processes wait for memory, this many times as much is kept free."""


class Strain(Enum):
    """What the system itself says about its memory."""

    EASY = auto()
    """It is not short, whatever seems to be available (macOS)."""
    UNSAID = auto()
    """What is available decides."""
    STALLED = auto()
    """Processes wait for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The memory of the machine, or of the control group that the daemon is in.

    Attributes:
        available_bytes: what could be allocated without swapping.
        kept_free_bytes: what models leave of that to everybody else.
        strain: what the system says besides.
        place: whose memory it is, a phrase: `on this machine`.
    """

    available_bytes: int
    kept_free_bytes: int
    strain: Strain = Strain.UNSAID
    place: str = "on this machine"

    @property
    def free_bytes(self) -> int:
        """Return what models may still take; below 0 if they hold too much."""
        return self.available_bytes - self._kept_bytes

    @property
    def shortage(self) -> str:
        """Return why there is less room for models than usual, a phrase."""
        sizes = f"{size_text(self.available_bytes)} is available {self.place}"
        waiting = ", processes wait for memory" if self.strain is Strain.STALLED else ""
        return f"{sizes}{waiting}, and {size_text(self._kept_bytes)} must stay free"

    @property
    def _kept_bytes(self) -> int:
        factor = STALLED_FACTOR if self.strain is Strain.STALLED else 1
        return factor * self.kept_free_bytes


def room_bytes(reading: Reading | None, held_bytes: int) -> int | None:
    """Return what models may hold together; None if nothing limits it.

    Args:
        reading: of the machine; None: it cannot be read.
        held_bytes: what models hold now.
    """
    if reading is None or reading.strain is Strain.EASY:
        return None
    return max(0, held_bytes + reading.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeeze:
    """How far a budget is lowered. It follows the room down at once, and up after a while.

    Attributes:
        limit_bytes: what is left of the budget; None: all of it.
        calm_since: since when there has been a step more room than that; None: there is not.
        floor_bytes: the least room since then.
    """

    limit_bytes: int | None = None
    calm_since: float | None = None
    floor_bytes: int = 0


def squeezed(before: Squeeze, room_bytes: int | None, whole_bytes: int, now: float) -> Squeeze:
    """Return what follows from the room that there is now.

    Args:
        before: how far the budget was lowered.
        room_bytes: what models may hold together; None: nothing limits it.
        whole_bytes: the budget that is not lowered.
    """
    if room_bytes is None:
        return Squeeze()
    step_bytes = max(1, whole_bytes // STEPS)
    limit_bytes = before.limit_bytes if before.limit_bytes is not None else whole_bytes
    if room_bytes < limit_bytes:
        return Squeeze(limit_bytes=room_bytes // step_bytes * step_bytes)
    if before.limit_bytes is None:
        return before
    if room_bytes - step_bytes <= limit_bytes:
        return Squeeze(limit_bytes=before.limit_bytes)
    if before.calm_since is None:
        return Squeeze(limit_bytes=before.limit_bytes, calm_since=now, floor_bytes=room_bytes)
    floor_bytes = min(before.floor_bytes, room_bytes)
    if now < before.calm_since + CALM_S:
        return Squeeze(
            limit_bytes=before.limit_bytes, calm_since=before.calm_since, floor_bytes=floor_bytes
        )
    raised_bytes = floor_bytes - step_bytes
    if raised_bytes >= whole_bytes:
        return Squeeze()
    return Squeeze(limit_bytes=max(limit_bytes, raised_bytes // step_bytes * step_bytes))


class Pressure:
    """How far the budget is lowered while other programs need memory.

    It is lowered at once and raised after ten calm seconds in small steps, so that it does not
    follow every change.
    """

    def __init__(self) -> None:
        self._squeeze = Squeeze()

    def sampled(
        self, budget: Budget, reading: Reading | None, held_bytes: int, now: float
    ) -> Budget:
        """Return what there is of the budget after memory was measured.

        Args:
            reading: of the machine; None: it cannot be read.
            held_bytes: what models hold now.
        """
        room = room_bytes(reading, held_bytes)
        self._squeeze = squeezed(self._squeeze, room, budget.whole_bytes, now)
        limit_bytes = self._squeeze.limit_bytes
        if limit_bytes is None or reading is None:
            return budget.whole()
        is_new = limit_bytes != budget.size_bytes
        shortage = reading.shortage if is_new else budget.shortage
        return budget.lowered(limit_bytes, shortage, is_short=reading.free_bytes < 0)

    def after_reload(self, before: Budget | None, after: Budget | None) -> Budget | None:
        """Return what there is of a budget that was read from the configuration."""
        if after is None:
            return None
        limit_bytes = self._squeeze.limit_bytes
        if before is None or limit_bytes is None or limit_bytes >= after.whole_bytes:
            self._squeeze = Squeeze()
            return after
        return after.lowered(limit_bytes, before.shortage, is_short=before.is_short)
