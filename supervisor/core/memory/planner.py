"""Decides whether a model may be loaded now: who goes for it, what it waits for, or why it cannot.

`load_scheduler.py` turns a verdict into triggers, and `load --dry-run` only shows it.

A verdict carries its sentence, so that status, events, notices and errors say the same. While the
models leave that go for one that waits, its need counts as taken for all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority
from mlxsup.protocol.text import size_text


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


def is_or_are(names: Iterable[str]) -> str:
    """The names with their verb: `a is`, `a and b are`."""
    found = list(names)
    return f"{listed(found)} {'is' if len(found) == 1 else 'are'}"


def holds_up(busy: Mapping[ModelName, str], pinned: Mapping[ModelName, int]) -> str:
    """Return what a load waits for.

    Args:
        busy: models, and why they stay until their answers have ended; an empty reason is none.
        pinned: models that hold more than they keep for good, and how much that is in all.
    """
    why = [f"{is_or_are(busy)} busy"] if busy else []
    why += [
        f"{name} stays loaded until its answers are complete, because {reason}"
        for name, reason in busy.items()
        if reason
    ]
    why += [
        f"{name} is pinned and holds {size_text(size)} for now" for name, size in pinned.items()
    ]
    return "; ".join(why)


def needs(needed_bytes: int, free_bytes: int) -> str:
    """Return how a sentence about a model that has to wait begins."""
    return f"needs {size_text(needed_bytes)}; {size_text(max(free_bytes, 0))} is free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """There is room.

    Attributes:
        spare_bytes: what is left afterwards.
    """

    spare_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitsWithout:
    """There is room once these have gone.

    Attributes:
        models: who must go; leaving out any one of them is not enough.
        spare_bytes: what is left afterwards.
    """

    models: tuple[ModelName, ...]
    spare_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """There is no room even if everyone goes who may.

    Attributes:
        missing_bytes: what is missing then.
    """

    missing_bytes: int


Room = Fits | FitsWithout | NoRoom


def find_room(
    needed_bytes: int,
    *,
    budget_bytes: int,
    reserved: Mapping[ModelName, int],
    may_go: Sequence[ModelName],
) -> Room:
    """Return whether a model fits, and which models must go if it does not.

    Args:
        needed_bytes: what it needs.
        budget_bytes: what all models may take together.
        reserved: what is reserved for each model that is there; not for the one that asks.
        may_go: those of them that may go, whoever should go first at the beginning.
    """
    free = budget_bytes - sum(reserved.values())
    if needed_bytes <= free:
        return Fits(spare_bytes=free - needed_bytes)
    going: list[ModelName] = []
    for model in may_go:
        going.append(model)
        free += reserved[model]
        if needed_bytes <= free:
            break
    else:
        return NoRoom(missing_bytes=needed_bytes - free)
    # A large one that goes late may have made an earlier one's going needless.
    for model in reversed(going[:-1]):
        if needed_bytes <= free - reserved[model]:
            going.remove(model)
            free -= reserved[model]
    return FitsWithout(models=tuple(going), spare_bytes=free - needed_bytes)


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


SHORTAGE = "other programs hold the rest of the memory budget"
"""Why a model waits that would fit if memory were not short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that holds a part of the budget.

    Attributes:
        name: its name.
        reserved_bytes: how much it holds.
        standing: what can be done about it.
        never_bytes: how much of that no load can wait for, because it never goes.
        used_at: when it was last used, monotonic seconds.
        ripe_at: from when on a request for another model may evict it, if it stays idle.
        loaded_since: since when it has been READY.
        turn_ends_at: from when on it may be swapped out though it is busy; infinite if that is not
            known yet, None if it may not, as things are.
        runs: the highest class that it runs; None if it runs nothing.
        spare_bytes: what it gives back when asked, without going.
        is_ending: its process is on its way out, and gives that back when it has ended.
        stays_because: what keeps it from being swapped out besides, a phrase; empty: nothing.
    """

    name: ModelName
    reserved_bytes: int
    standing: Standing
    never_bytes: int = 0
    spare_bytes: int = 0
    is_ending: bool = False
    used_at: float = 0.0
    ripe_at: float = 0.0
    loaded_since: float = 0.0
    turn_ends_at: float | None = None
    runs: Priority | None = None
    stays_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A model that is to be loaded.

    Attributes:
        name: its name.
        needed_bytes: what it needs.
        urgency: who waits for it.
        priority: the class of whoever waits first: what runs in a higher one stays.
        swaps_from: from when on others may be swapped out for it; None: never.
    """

    name: ModelName
    needed_bytes: int
    urgency: Urgency
    priority: Priority = Priority.NORMAL
    swaps_from: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """There is room for it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """There is room as soon as the others have given back what they do not need now; nobody goes.

    Attributes:
        reason: a phrase that follows the name of the one that is to be loaded.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """There is room once these have gone; all of them are idle.

    Attributes:
        models: who must go, the least recently used first.
        reason: a phrase that follows the name of the one that is to be loaded.
        takes_spare: whether the others must also give back what they do not need now.
    """

    models: tuple[ModelName, ...]
    reason: str
    takes_spare: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """There is room once these have gone, some of which are busy: their requests wait.

    Attributes:
        models: the busy ones, whose turns are over; the longest loaded first.
        evicted: the idle ones.
        reason: a phrase that follows the name of the one that is to be loaded.
    """

    models: tuple[ModelName, ...]
    evicted: tuple[ModelName, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """There may be room later.

    Attributes:
        reason: a phrase that follows its name.
        until: when a model that is in the way becomes ripe; None if nothing is known of that.
        is_under_way: whether enough of the memory is already being freed.
        swaps: the busy models that will be swapped out for it, as things are.
        takes_spare: whether the others must also give back what they do not need now.
    """

    reason: str
    until: float | None = None
    is_under_way: bool = False
    swaps: tuple[ModelName, ...] = ()
    takes_spare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """There is no room even if everything goes that may.

    Attributes:
        reason: a phrase that follows its name.
        blockers: the models that would have to go.
    """

    reason: str
    blockers: tuple[ModelName, ...]


Verdict = Admit | GiveBack | Evict | Swap | Wait | Refuse
"""What follows for one model that is to be loaded."""


def plan(
    request: LoadRequest,
    loaded: Iterable[LoadedModel],
    *,
    budget_bytes: int,
    now: float,
    whole_bytes: int | None = None,
) -> Verdict:
    """Decide about one load.

    Args:
        request: the model that is to be loaded.
        loaded: the others that hold memory.
        budget_bytes: what all may hold together now.
        now: monotonic seconds.
        whole_bytes: what they may hold once memory is no longer short; None: it is not short.
    """
    others = {one.name: one for one in loaded}
    fixed = [one for one in others.values() if one.never_bytes]
    fixed_bytes = sum(one.never_bytes for one in fixed)
    most_bytes = budget_bytes if whole_bytes is None else whole_bytes
    if request.needed_bytes > most_bytes - fixed_bytes:
        return _never(request, fixed, most_bytes)
    free_bytes = budget_bytes - sum(one.reserved_bytes for one in others.values())
    if request.needed_bytes <= free_bytes:
        return Admit()
    short = needs(request.needed_bytes, free_bytes)
    if request.needed_bytes > budget_bytes - fixed_bytes:
        return Wait(reason=f"{short}: {SHORTAGE}")
    staying = {r.name: _least(r) for r in others.values() if not _leaves(r)}
    late_bytes = {r.name: size for r in others.values() if (size := _freed_late_bytes(r))}
    spare_bytes = sum(r.spare_bytes for r in others.values() if r.name not in late_bytes)
    idle = sorted((r for r in others.values() if r.standing is Standing.IDLE), key=_last_used)
    may_go = [r.name for r in idle if _may_go(r, request.urgency, now)]
    room = find_room(
        request.needed_bytes, budget_bytes=budget_bytes, reserved=staying, may_go=may_go
    )
    if isinstance(room, Fits):
        takes_spare = room.spare_bytes < spare_bytes
        if takes_spare and sum(late_bytes.values()) <= room.spare_bytes:
            return GiveBack(reason=f"{short}; other models release memory they do not need")
        reason = f"{short}: {is_or_are(list(late_bytes))} about to go"
        return Wait(reason=reason, is_under_way=True, takes_spare=takes_spare)
    if isinstance(room, FitsWithout):
        reason = f"{short}: {is_or_are(room.models)} idle"
        spare_bytes -= sum(others[name].spare_bytes for name in room.models)
        takes_spare = room.spare_bytes < spare_bytes
        return Evict(models=room.models, reason=reason, takes_spare=takes_spare)
    if request.urgency is Urgency.NOBODY:
        return Wait(reason=f"{short}; other models are unloaded once it gets a request")
    return _later(request, short, staying, idle, others, budget_bytes, now)


def give_back(loaded: Iterable[LoadedModel], *, budget_bytes: int) -> tuple[ModelName, ...]:
    """The idle models that must go because more is reserved than the budget allows.

    Returns:
        As many as are needed, the least recently used first, or all if that is not enough.
    """
    staying = {r.name: r for r in loaded if not _leaves(r)}
    reserved = {name: _least(r) for name, r in staying.items()}
    idle = sorted((r for r in staying.values() if r.standing is Standing.IDLE), key=_last_used)
    may_go = [r.name for r in idle]
    room = find_room(0, budget_bytes=budget_bytes, reserved=reserved, may_go=may_go)
    if isinstance(room, Fits):
        return ()
    return room.models if isinstance(room, FitsWithout) else tuple(may_go)


# ---------------------------------------------------------------- inside


def _never(request: LoadRequest, fixed: list[LoadedModel], budget_bytes: int) -> Wait | Refuse:
    size = f"needs {size_text(request.needed_bytes)}"
    budget = size_text(budget_bytes)
    if request.needed_bytes > budget_bytes:
        reason = f"{size}, but the memory budget is {budget}"
        blockers: tuple[ModelName, ...] = ()
    else:
        why = {Standing.PINNED: "is pinned", Standing.STUCK: "has a process that cannot be ended"}
        held = "; ".join(
            f"{r.name} {why[r.standing]} and holds {size_text(r.never_bytes)}" for r in fixed
        )
        reason = f"{size} of {budget}: {held}"
        blockers = tuple(r.name for r in fixed)
    if request.urgency is Urgency.NOBODY:
        return Wait(reason=reason)
    return Refuse(reason=reason, blockers=blockers)


def _later(
    request: LoadRequest,
    short: str,
    staying: dict[ModelName, int],
    idle: list[LoadedModel],
    others: dict[ModelName, LoadedModel],
    budget_bytes: int,
    now: float,
) -> Swap | Wait:
    """Wait for models that were just used, if that is enough, and otherwise for busy ones, or for
    what rows of pinned ones take."""
    in_time = sorted(idle, key=_ripens)
    room = find_room(
        request.needed_bytes,
        budget_bytes=budget_bytes,
        reserved=staying,
        may_go=[r.name for r in in_time],
    )
    if isinstance(room, FitsWithout):
        until = max(others[name].ripe_at for name in room.models)
        names = is_or_are(room.models)
        return Wait(reason=f"{short}; {names} idle, but not for long enough", until=until)
    turns = _Turns(request, short, staying, others, now)
    if request.swaps_from is not None and (swap := turns.swap(request.swaps_from, budget_bytes)):
        return swap
    there = [others[name] for name in staying]
    busy = {one.name: one.stays_because for one in there if one.standing is Standing.BUSY}
    pinned = {r.name: _least(r) for r in there if r.standing is Standing.PINNED}
    in_the_way = {n: size for n, size in pinned.items() if size > others[n].never_bytes}
    return Wait(reason=f"{short}: {holds_up(busy, in_the_way)}")


class _Turns:
    """Models that may be swapped out for another one, sooner or later.

    Args:
        request: the other one.
        short: how a sentence about it begins.
        staying: what is reserved for those that are not on their way out.
        others: all that hold memory.
        now: monotonic seconds.
    """

    def __init__(
        self,
        request: LoadRequest,
        short: str,
        staying: dict[ModelName, int],
        others: dict[ModelName, LoadedModel],
        now: float,
    ) -> None:
        self._request = request
        self._short = short
        self._staying = staying
        self._others = others
        self._now = now
        whens = {name: self._when(others[name]) for name in staying}
        self._may_go_at = {name: when for name, when in whens.items() if when is not None}

    def swap(self, swaps_from: float, budget_bytes: int) -> Swap | Wait | None:
        """Return who goes now, or when who will; None if it is not enough if all go that may."""
        at_once = [name for name, when in self._may_go_at.items() if when <= self._now]
        room = self._room(sorted(at_once, key=self._goes_first), budget_bytes)
        if isinstance(room, FitsWithout) and swaps_from <= self._now:
            busy = tuple(name for name in room.models if self._is_busy(name))
            idle = tuple(name for name in room.models if not self._is_busy(name))
            reason = f"{self._short}: {is_or_are(busy)} busy"
            return Swap(models=busy, evicted=idle, reason=reason)
        if not isinstance(room, FitsWithout):
            in_time = sorted(self._may_go_at, key=lambda name: self._may_go_at[name])
            room = self._room(in_time, budget_bytes)
        if not isinstance(room, FitsWithout):
            return None
        busy = tuple(name for name in room.models if self._is_busy(name))
        until = max(swaps_from, *(self._may_go_at[name] for name in room.models))
        makes_room = (
            "makes room when its turn ends"
            if len(busy) == 1
            else ("make room when their turns end")
        )
        reason = f"{self._short}: {is_or_are(busy)} busy and {makes_room}"
        return Wait(reason=reason, until=until if until < math.inf else None, swaps=busy)

    def _room(self, may_go: list[ModelName], budget_bytes: int) -> Room:
        needed = self._request.needed_bytes
        return find_room(needed, budget_bytes=budget_bytes, reserved=self._staying, may_go=may_go)

    def _when(self, one: LoadedModel) -> float | None:
        if one.standing is Standing.IDLE:
            return -math.inf if self._request.urgency is Urgency.COMMAND else one.ripe_at
        if one.runs is not None and one.runs.is_above(self._request.priority):
            return None
        return one.turn_ends_at

    def _goes_first(self, name: ModelName) -> tuple[bool, float]:
        """The idle ones, the least recently used first; then the busy ones."""
        one = self._others[name]
        return self._is_busy(name), one.loaded_since if self._is_busy(name) else one.used_at

    def _is_busy(self, name: ModelName) -> bool:
        return self._others[name].standing is Standing.BUSY


def _may_go(one: LoadedModel, urgency: Urgency, now: float) -> bool:
    if urgency is Urgency.COMMAND:
        return True
    return urgency is Urgency.REQUEST and one.ripe_at <= now


def _least(one: LoadedModel) -> int:
    """Return what it holds once it has given back what it does not need now."""
    return one.reserved_bytes - one.spare_bytes


def _freed_late_bytes(one: LoadedModel) -> int:
    """Return what becomes free once its process, which is on its way out, has ended."""
    going_bytes = one.spare_bytes if one.is_ending else 0
    return one.reserved_bytes if _leaves(one) else going_bytes


def _leaves(one: LoadedModel) -> bool:
    return one.standing is Standing.LEAVING


def _last_used(one: LoadedModel) -> float:
    return one.used_at


def _ripens(one: LoadedModel) -> float:
    return one.ripe_at
