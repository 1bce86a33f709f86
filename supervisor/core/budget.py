"""The memory budget: what all models may take together, what other programs leave of it, and which
models have room in it.

What models hold and what is available do not change together when a model loads, grows or ends,
only with what all other programs hold. The room for models is that sum, less what is kept free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text

T = TypeVar("T")


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
        """Return the same budget, not lowered."""
        return replace(
            self,
            size_bytes=self.whole_bytes,
            lowered_from_bytes=None,
            shortage="",
            is_short=False,
        )

    def lowered(self, size_bytes: int, shortage: str, *, is_short: bool) -> Budget:
        """Return as much of the same budget as there is now.

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
    """The system's own word about its memory."""

    EASY = auto()
    """It is not short, even if little seems to be available (macOS)."""
    UNSAID = auto()
    """The platform says nothing, so the bytes that are available decide."""
    STALLED = auto()
    """Processes wait for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The memory of the machine, or of the control group that the daemon is in.

    Attributes:
        available_bytes: what could be allocated without swapping.
        kept_free_bytes: what models leave of that to all other programs.
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


@dataclass(slots=True)
class Pressure:
    """The lowering of the budget while other programs need memory.

    It follows the room for models down at once, and up after ten calm seconds in small steps, so
    that it does not follow every change.

    Attributes:
        limit_bytes: what is left of the budget; None: all of it.
        calm_since: since when there has been a step more room than that; None: there is not.
        floor_bytes: the least room since then.
    """

    limit_bytes: int | None = None
    calm_since: float | None = None
    floor_bytes: int = 0

    def sampled(
        self, budget: Budget, reading: Reading | None, held_bytes: int, now: float
    ) -> Budget:
        """Return what there is of the budget after memory was measured.

        Args:
            reading: of the machine; None: it cannot be read.
            held_bytes: what models hold now.
        """
        if reading is None or reading.strain is Strain.EASY:
            self.limit_bytes = None
            return budget.whole()
        self.follow(max(0, held_bytes + reading.free_bytes), budget.whole_bytes, now)
        if self.limit_bytes is None:
            return budget.whole()
        is_new = self.limit_bytes != budget.size_bytes
        shortage = reading.shortage if is_new else budget.shortage
        return budget.lowered(self.limit_bytes, shortage, is_short=reading.free_bytes < 0)

    def follow(self, room_bytes: int, whole_bytes: int, now: float) -> None:
        """Lower or raise the limit, as there is room for models now.

        Args:
            room_bytes: what models may hold together.
            whole_bytes: the budget that is not lowered.
        """
        step_bytes = max(1, whole_bytes // STEPS)
        limit_bytes = whole_bytes if self.limit_bytes is None else self.limit_bytes
        if room_bytes < limit_bytes:
            self.limit_bytes, self.calm_since = room_bytes // step_bytes * step_bytes, None
        elif self.limit_bytes is None or room_bytes - step_bytes <= limit_bytes:
            self.calm_since = None
        elif self.calm_since is None:
            self.calm_since, self.floor_bytes = now, room_bytes
        else:
            self.floor_bytes = min(self.floor_bytes, room_bytes)
            if now >= self.calm_since + CALM_S:
                raised_bytes = (self.floor_bytes - step_bytes) // step_bytes * step_bytes
                is_whole = self.floor_bytes - step_bytes >= whole_bytes
                self.limit_bytes = None if is_whole else max(limit_bytes, raised_bytes)
                self.calm_since = None

    def after_reload(self, before: Budget | None, after: Budget | None) -> Budget | None:
        """Return what there is of a budget that was read from the configuration."""
        if after is None:
            return None
        if before is None or self.limit_bytes is None or self.limit_bytes >= after.whole_bytes:
            self.limit_bytes = None
            return after
        return after.lowered(self.limit_bytes, before.shortage, is_short=before.is_short)


class Room(NamedTuple):
    """There is room.

    Attributes:
        models: must go for it, and leaving out any one of them is not enough; empty: there is room
            as things are.
        spare_bytes: what is left then.
    """

    models: tuple[ModelName, ...]
    spare_bytes: int


def find_room(
    needed_bytes: int,
    *,
    budget_bytes: int,
    reserved: Mapping[ModelName, int],
    may_go: Sequence[ModelName],
) -> Room | None:
    """Return which models must go so that a model fits; None if it does not even if all go that
    may.

    Args:
        budget_bytes: what all models may take together.
        reserved: what is reserved for each model that is there; not for the one that asks.
        may_go: those of them that may go, the one that should go first at the beginning.
    """
    free_bytes = budget_bytes - sum(reserved.values())

    def left_bytes(going: Sequence[ModelName]) -> int:
        return free_bytes + sum(reserved[model] for model in going) - needed_bytes

    if left_bytes(()) >= 0:
        return Room((), left_bytes(()))
    enough = (count for count in range(1, len(may_go) + 1) if left_bytes(may_go[:count]) >= 0)
    count = next(enough, None)
    if count is None:
        return None
    # A large one that goes late may have made an earlier one's going needless.
    latest_first = fewest(list(may_go[:count])[::-1], lambda going: left_bytes(going) >= 0)
    going = tuple(latest_first[::-1])
    return Room(going, left_bytes(going))


def fewest(going: list[T], is_enough: Callable[[list[T]], bool]) -> list[T]:
    """Return those of `going`, which are enough together, without any that may as well stay: the
    first ones stay first."""
    for one in list(going):
        others = [other for other in going if other is not one]
        if is_enough(others):
            going = others
    return going


def equal_shares(free_bytes: int, wanted: Mapping[ModelName, int]) -> dict[ModelName, int]:
    """Return what each model gets of what is free: equal shares, and none more than it can use."""
    left_bytes, shares = max(0, free_bytes), {}
    # The one that can use least comes first: what it leaves of its share is for the others.
    order = sorted(wanted, key=lambda name: (wanted[name], name))
    for place, name in enumerate(order):
        part_bytes = left_bytes // (len(order) - place)
        shares[name] = max(0, min(wanted[name], part_bytes))
        left_bytes -= shares[name]
    return shares
