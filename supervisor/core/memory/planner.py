"""Decides whether a model may be loaded now: who goes for it, what it waits for, or why it cannot.

Nothing is done here: `core/loading.py` turns a verdict into triggers, and `load --dry-run` only
shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text

from .room import Fits, FitsWithout, find_room
from .sentences import is_or_are, needs


class Urgency(Enum):
    """Who waits for a load; decides whom it may evict."""

    NOBODY = auto()
    """It takes what is free, such as a preload."""
    REQUEST = auto()
    """It evicts models that are idle and had their time."""
    COMMAND = auto()
    """It evicts models that are idle."""


class Standing(Enum):
    """What can be done about a model that holds memory."""

    PINNED = auto()
    """Its entry says that it never goes."""
    STUCK = auto()
    """Its process cannot be ended."""
    LEAVING = auto()
    """It is on its way out."""
    BUSY = auto()
    """It loads, serves or comes back."""
    IDLE = auto()
    """It is READY, and nobody uses it."""


FIXED = frozenset({Standing.PINNED, Standing.STUCK})
"""What no load can wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model that holds a part of the budget.

    Attributes:
        name: its name.
        reserved_bytes: how much it holds.
        standing: what can be done about it.
        used_at: when it was last used, monotonic seconds.
        ripe_at: from when on a request for another model may evict it, if it stays idle.
    """

    name: ModelName
    reserved_bytes: int
    standing: Standing
    used_at: float = 0.0
    ripe_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A model that is to be loaded.

    Attributes:
        name: its name.
        needed_bytes: what it needs.
        urgency: who waits for it.
    """

    name: ModelName
    needed_bytes: int
    urgency: Urgency


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """There is room for it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """There is room once these have gone; all of them are idle.

    Attributes:
        models: who must go, the least recently used first.
        reason: a phrase that follows the name of the one that is to be loaded.
    """

    models: tuple[ModelName, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """There may be room later.

    Attributes:
        reason: a phrase that follows its name.
        until: when a model that is in the way becomes ripe; None if nothing is known of that.
        is_under_way: whether enough of the memory is already being freed.
    """

    reason: str
    until: float | None = None
    is_under_way: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """There is no room even if everything goes that may.

    Attributes:
        reason: a phrase that follows its name.
        blockers: the models that would have to go.
    """

    reason: str
    blockers: tuple[ModelName, ...]


Verdict = Admit | Evict | Wait | Refuse
"""What follows for one model that is to be loaded."""


def plan(wish: Wish, residents: Iterable[Resident], *, budget_bytes: int, now: float) -> Verdict:
    """Decides about one load.

    Args:
        wish: the model that is to be loaded.
        residents: the others that hold memory.
        budget_bytes: what all may hold together.
        now: monotonic seconds.
    """
    others = {resident.name: resident for resident in residents}
    fixed = [resident for resident in others.values() if resident.standing in FIXED]
    if wish.needed_bytes > budget_bytes - _sum(fixed):
        return _never(wish, fixed, budget_bytes)
    free_bytes = budget_bytes - _sum(others.values())
    if wish.needed_bytes <= free_bytes:
        return Admit()
    short = needs(wish.needed_bytes, free_bytes)
    staying = {r.name: r.reserved_bytes for r in others.values() if not _leaves(r)}
    leaving = [r.name for r in others.values() if _leaves(r)]
    idle = sorted((r for r in others.values() if r.standing is Standing.IDLE), key=_last_used)
    may_go = [r.name for r in idle if _may_go(r, wish.urgency, now)]
    room = find_room(wish.needed_bytes, budget_bytes=budget_bytes, reserved=staying, may_go=may_go)
    if isinstance(room, Fits):
        return Wait(reason=f"{short}: {is_or_are(leaving)} about to go", is_under_way=True)
    if isinstance(room, FitsWithout):
        return Evict(models=room.models, reason=f"{short}: {is_or_are(room.models)} idle")
    if wish.urgency is Urgency.NOBODY:
        return Wait(reason=f"{short}: only a request or a load of it makes others go")
    return _later(wish, short, staying, idle, others, budget_bytes)


def give_back(residents: Iterable[Resident], *, budget_bytes: int) -> tuple[ModelName, ...]:
    """The idle models that must go because more is reserved than the budget allows.

    Returns:
        As many as are needed, the least recently used first, or all if that is not enough.
    """
    staying = {r.name: r for r in residents if not _leaves(r)}
    reserved = {name: r.reserved_bytes for name, r in staying.items()}
    idle = sorted((r for r in staying.values() if r.standing is Standing.IDLE), key=_last_used)
    may_go = [r.name for r in idle]
    room = find_room(0, budget_bytes=budget_bytes, reserved=reserved, may_go=may_go)
    if isinstance(room, Fits):
        return ()
    return room.models if isinstance(room, FitsWithout) else tuple(may_go)


# ---------------------------------------------------------------- inside


def _never(wish: Wish, fixed: list[Resident], budget_bytes: int) -> Wait | Refuse:
    size = f"needs {size_text(wish.needed_bytes)}"
    budget = size_text(budget_bytes)
    if wish.needed_bytes > budget_bytes:
        reason = f"{size}, and the memory budget is {budget}"
        blockers: tuple[ModelName, ...] = ()
    else:
        why = {Standing.PINNED: "is pinned", Standing.STUCK: "has a process that cannot be ended"}
        held = "; ".join(
            f"{r.name} {why[r.standing]} and holds {size_text(r.reserved_bytes)}" for r in fixed
        )
        reason = f"{size} of {budget}: {held}"
        blockers = tuple(r.name for r in fixed)
    if wish.urgency is Urgency.NOBODY:
        return Wait(reason=reason)
    return Refuse(reason=reason, blockers=blockers)


def _later(
    wish: Wish,
    short: str,
    staying: dict[ModelName, int],
    idle: list[Resident],
    others: dict[ModelName, Resident],
    budget_bytes: int,
) -> Wait:
    """Waits for models that were just used, if that is enough, and otherwise for busy ones."""
    in_time = sorted(idle, key=_ripens)
    room = find_room(
        wish.needed_bytes,
        budget_bytes=budget_bytes,
        reserved=staying,
        may_go=[r.name for r in in_time],
    )
    if isinstance(room, FitsWithout):
        until = max(others[name].ripe_at for name in room.models)
        names = is_or_are(room.models)
        return Wait(reason=f"{short}: {names} idle, but not for long enough", until=until)
    busy = [name for name in staying if others[name].standing is Standing.BUSY]
    return Wait(reason=f"{short}: {is_or_are(busy)} busy")


def _may_go(resident: Resident, urgency: Urgency, now: float) -> bool:
    if urgency is Urgency.COMMAND:
        return True
    return urgency is Urgency.REQUEST and resident.ripe_at <= now


def _leaves(resident: Resident) -> bool:
    return resident.standing is Standing.LEAVING


def _sum(residents: Iterable[Resident]) -> int:
    return sum(resident.reserved_bytes for resident in residents)


def _last_used(resident: Resident) -> float:
    return resident.used_at


def _ripens(resident: Resident) -> float:
    return resident.ripe_at
