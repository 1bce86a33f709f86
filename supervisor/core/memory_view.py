"""The memory of all models at one moment: the facts that every decision about memory is made on.

A view holds values alone, so that nothing can depend on anything else. `memory_facts.py` reads it
from the models; a dry run changes it, or makes one up, before it asks what would follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority

from .budget import Budget

if TYPE_CHECKING:
    from .kv_budget import Rows
    from .life import Swapping
    from .warm_pool import Prewarmed


class Standing(Enum):
    """The standing of a model that holds memory: what can be done about it."""

    PINNED = auto()
    """Its entry says that it never goes."""
    STUCK = auto()
    """Its process cannot be ended."""
    LEAVING = auto()
    """It is on its way out."""
    BUSY = auto()
    """It loads, serves or comes back."""
    IDLE = auto()
    """It is READY, and no request uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that holds memory.

    Attributes:
        reserved_bytes: how much of the budget it holds; 0 if nothing is known of that yet.
        standing: what can be done about it.
        needed_bytes: what it would need to be loaded again.
        never_bytes: how much of what it holds no load can wait for, because it never goes.
        spare_bytes: what it gives back when asked, without going.
        reclaimable_bytes: what its worker keeps for reuse, as it says; 0 if it was asked lately to
            give that back.
        is_ready: whether it serves.
        is_ending: its process is on its way out, and gives `spare_bytes` back when it has ended.
        swap: the state in which it is being swapped out; None: it is not.
        used_at: when it was last used, monotonic seconds.
        ripe_at: from when on a request for another model may evict it, if it stays idle.
        loaded_since: since when it has been READY.
        turn_ends_at: from when on it may be swapped out though it is busy; infinite if that is not
            known yet, None if it may not, as things are.
        runs: the highest class that it runs; None if it runs nothing.
        stays_because: what keeps it from being swapped out besides, a phrase; empty: nothing.
        are_files_doubted: whether its files must be looked at before it may be swapped out.
        are_files_being_seen: whether the shell is looking at them.
        rows: what its rows take and may take; None if nothing is known of that.
    """

    name: ModelName
    reserved_bytes: int
    standing: Standing
    needed_bytes: int = 0
    never_bytes: int = 0
    spare_bytes: int = 0
    reclaimable_bytes: int = 0
    is_ready: bool = False
    is_ending: bool = False
    swap: Swapping | None = None
    used_at: float = 0.0
    ripe_at: float = 0.0
    loaded_since: float = 0.0
    turn_ends_at: float | None = None
    runs: Priority | None = None
    stays_because: str = ""
    are_files_doubted: bool = False
    are_files_being_seen: bool = False
    rows: Rows | None = None

    @property
    def is_leaving(self) -> bool:
        """True if it is on its way out."""
        return self.standing is Standing.LEAVING

    @property
    def least_bytes(self) -> int:
        """Return what it holds once it has given back what it does not need now."""
        return self.reserved_bytes - self.spare_bytes

    @property
    def freed_late_bytes(self) -> int:
        """Return what becomes free once its process, which is on its way out, has ended."""
        going_bytes = self.spare_bytes if self.is_ending else 0
        return self.reserved_bytes if self.is_leaving else going_bytes


class Urgency(Enum):
    """The urgency of a load, by who waits for it; decides which models it may evict."""

    NONE = auto()
    """It takes what is free, such as a preload."""
    REQUEST = auto()
    """It evicts models that are idle and had their time."""
    COMMAND = auto()
    """It evicts models that are idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """There may be room for a model later.

    Attributes:
        reason: what it needs and what is in the way, a phrase that follows its name.
        until: when a model that is in the way may go; None if nothing is known of that.
        is_under_way: whether enough of the memory is already being freed.
        swaps: the busy models that will be swapped out for it, as things are.
        reclaims: whether the others must also give back what they do not need now.
    """

    reason: str
    until: float | None = None
    is_under_way: bool = False
    swaps: tuple[ModelName, ...] = ()
    reclaims: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """There is no memory for a model yet.

    Attributes:
        since: when that was found, monotonic seconds.
        wait: what it waits for.
        asked_since: since when a request or a command has been waiting for the model; None: none
            does.
        is_promised: whether others are being swapped out for it: what they free is for it.
    """

    since: float
    wait: Wait
    asked_since: float | None = None
    is_promised: bool = False


class Place(NamedTuple):
    """The place of a model in the line for the next turn; lower ones come first.

    Attributes:
        rank: the class in which its first request waits, from 0 for the highest.
        has_patience: whether it has not waited for very long.
        is_new: whether its first request has not begun, or has had a turn already.
        counter: what the account of that request has received from all models.
        since: when the model began to wait.
        arrived_at: when that request came.
    """

    rank: int
    has_patience: bool
    is_new: bool
    counter: float
    since: float
    arrived_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A model that waits to be loaded.

    Attributes:
        needed_bytes: what it needs.
        urgency: who waits for it.
        wants: the class of the request that waits first, as it was asked for; a load command
            counts as interactive. What runs in a higher class stays. None: none that may run waits.
        swaps_from: from when on others may be swapped out for it; None: never.
        since: when it began to wait.
        reserved_bytes: what is reserved for it already: it comes back after a crash or a restart.
        pinned_bytes: what it keeps for good; None: it is not pinned.
        lack: the memory that it was last told to wait for.
        place: its place among those that wait for a turn; None: it has not waited for long enough.
        is_after_crash: whether it only waits for other loads that follow a crash.
        is_unwanted: whether it only waits because it has made room, and no request waits for it.
        takes_prewarmed: whether a prewarmed worker can load it.
    """

    name: ModelName
    needed_bytes: int
    urgency: Urgency
    wants: Priority | None = Priority.NORMAL
    swaps_from: float | None = None
    since: float = 0.0
    reserved_bytes: int = 0
    pinned_bytes: int | None = None
    lack: Lack | None = None
    place: Place | None = None
    is_after_crash: bool = False
    is_unwanted: bool = False
    takes_prewarmed: bool = False

    @property
    def is_promised(self) -> bool:
        """True if others are being swapped out for it."""
        return self.lack is not None and self.lack.is_promised

    @property
    def turn_order(self) -> tuple[bool, bool, bool, float, bool]:
        """Return what sorts the waiting models: those that crashed first, then the one that others
        are swapped out for, then those with a request or a command, the longest wait first; of two
        that came at the same moment, the one that has been found to lack memory."""
        is_unasked = self.urgency is Urgency.NONE
        has_not_lacked = self.lack is None
        return (
            not self.is_after_crash,
            not self.is_promised,
            is_unasked,
            self.since,
            has_not_lacked,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """The memory of all models at one moment.

    Attributes:
        budget: what they may take together; None: any amount.
        loaded: the models that hold memory, by name.
        waiting: the models that wait for a load, and not for their files.
        prewarmed: the prewarmed workers, which go before any model does.
        free_turns: how many more loads may begin.
        free_turns_after_crash: how many more that follow a crash: they only wait for each other, so
            that a model that was serving comes back without waiting for one that never was.
        swaps: whether busy models may be swapped out.
        leave_s: how long rows of a model that is swapped out may take to leave.
        is_reclaiming: whether workers may still be giving back what they were asked for.
        ran_out: the model whose worker has just run out of memory with one request, which is tried
            again; None: there is none.
        is_division_due: whether anything has changed that the parts of the members depend on.
        claimed_bytes: what prewarmed workers hold, or will once they are started.
        tried_again: the models that try a request again that has run out of memory alone.
        are_rows_leaving: whether rows have been asked to leave for want of memory, and are there.
    """

    budget: Budget | None
    now: float
    loaded: Mapping[ModelName, LoadedModel]
    waiting: tuple[LoadRequest, ...] = ()
    prewarmed: tuple[Prewarmed, ...] = ()
    free_turns: int = 1
    free_turns_after_crash: int = 1
    swaps: bool = True
    leave_s: float = 0.0
    is_reclaiming: bool = False
    ran_out: ModelName | None = None
    is_division_due: bool = True
    claimed_bytes: int = 0
    tried_again: frozenset[ModelName] = frozenset()
    are_rows_leaving: bool = False

    @property
    def overshoot_bytes(self) -> int:
        """Return how much of what is reserved must still go, of any model that may."""
        if self.budget is None:
            return 0
        staying = (one for one in self.loaded.values() if not one.is_leaving)
        return max(0, sum(one.reserved_bytes for one in staying) - self.budget.kept_bytes)

    @property
    def members(self) -> dict[ModelName, Rows]:
        """Return the models that serve and whose rows share what is free, by name."""
        return {
            name: rows
            for name, one in self.loaded.items()
            if (rows := one.rows) is not None
            and (self.budget is not None or rows.is_given or rows.size_bytes is not None)
        }

    @property
    def others_bytes(self) -> int:
        """Return what is reserved for all models that are no members of the division."""
        members = self.members
        return sum(one.reserved_bytes for name, one in self.loaded.items() if name not in members)

    @property
    def members_bytes(self) -> int | None:
        """Return what the members may hold together now; None: any amount."""
        if self.budget is None:
            return None
        return self.budget.size_bytes - self.claimed_bytes - self.others_bytes

    @property
    def is_awaited(self) -> bool:
        """True if a model waits for memory that a request or a command needs it to have."""
        return any(one.lack and one.urgency is not Urgency.NONE for one in self.waiting)

    def beside(self, name: ModelName) -> list[LoadedModel]:
        """Return the other models that hold memory."""
        return [one for one in self.loaded.values() if one.name != name]
