"""The verdict on one load: there is room, there will be, or there never is.

A verdict carries its sentence, so that status, events, notices and errors say the same. The memory
plan asks for it in each model's turn; `load --dry-run`, `reload --dry-run` and `mlxsup plan` ask
about a changed view.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority
from mlxsup.protocol.text import size_text

from .budget import Budget, Room, find_room, listed
from .memory_view import LoadedModel, LoadRequest, MemoryView, Standing, Urgency, Wait

SHORTAGE = "other programs hold the rest of the memory budget"
"""The cause of the wait of a model that would fit if memory were not short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """There is room for it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """There is room once the others have given back what they do not need now.

    Attributes:
        reason: a phrase that follows the name of the model that is to be loaded.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """There is room once these have gone; all of them are idle.

    Attributes:
        models: which must go, the least recently used first.
        reason: a phrase that follows the name of the model that is to be loaded.
        reclaims: whether the others must also give back what they do not need now.
    """

    models: tuple[ModelName, ...]
    reason: str
    reclaims: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """There is room once these have gone, some of which are busy: their requests wait.

    Attributes:
        models: the busy ones, whose turns are over; the longest loaded first.
        evicted: the idle ones.
        reason: a phrase that follows the name of the model that is to be loaded.
    """

    models: tuple[ModelName, ...]
    evicted: tuple[ModelName, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """There is no room even if everything goes that may.

    Attributes:
        reason: a phrase that follows its name.
        blockers: the models that would have to go.
    """

    reason: str
    blockers: tuple[ModelName, ...]


Verdict = Admit | Reclaim | Evict | Swap | Wait | Refuse
"""The outcome for a model that is to be loaded."""


def verdict_on(request: LoadRequest, view: MemoryView) -> Verdict:
    """Decide about one load, next to the other models of the view."""
    budget = view.budget
    if budget is None:
        return Admit()
    others = view.beside(request.name)
    fixed = [one for one in others if one.never_bytes]
    fixed_bytes = sum(one.never_bytes for one in fixed)
    if request.needed_bytes > budget.whole_bytes - fixed_bytes:
        return _never(request, fixed, budget.whole_bytes)
    free_bytes = budget.size_bytes - sum(one.reserved_bytes for one in others)
    if request.needed_bytes <= free_bytes:
        return Admit()
    short = needs(request.needed_bytes, free_bytes)
    if request.needed_bytes > budget.size_bytes - fixed_bytes:
        return Wait(reason=f"{short}: {SHORTAGE}")
    return _Displacing(request, view, budget, short).verdict()


def needs(needed_bytes: int, free_bytes: int) -> str:
    """Return how a sentence about a model that has to wait begins."""
    return f"needs {size_text(needed_bytes)}; {size_text(max(free_bytes, 0))} is free"


def _never(request: LoadRequest, fixed: list[LoadedModel], budget_bytes: int) -> Wait | Refuse:
    size = f"needs {size_text(request.needed_bytes)}"
    budget = size_text(budget_bytes)
    if request.needed_bytes > budget_bytes:
        reason = f"{size}, but the memory budget is {budget}"
        blockers: tuple[ModelName, ...] = ()
    else:
        why = {Standing.PINNED: "is pinned", Standing.STUCK: "has a process that cannot be ended"}
        held = "; ".join(
            f"{one.name} {why[one.standing]} and holds {size_text(one.never_bytes)}"
            for one in fixed
        )
        reason = f"{size} of {budget}: {held}"
        blockers = tuple(one.name for one in fixed)
    if request.urgency is Urgency.NONE:
        return Wait(reason=reason)
    return Refuse(reason=reason, blockers=blockers)


class _Displacing:
    """A load that has no room next to what is there."""

    def __init__(self, request: LoadRequest, view: MemoryView, budget: Budget, short: str) -> None:
        self._request = request
        self._short = short
        self._now = view.now
        self._budget_bytes = budget.size_bytes
        self._others = {one.name: one for one in view.beside(request.name)}
        self._staying = [one for one in self._others.values() if not one.is_leaving]

    def verdict(self) -> Verdict:
        """Find room at once, by what leaves already or by evicting; otherwise later."""
        request, short = self._request, self._short
        late_bytes = {n: late for n, one in self._others.items() if (late := one.freed_late_bytes)}
        spare_bytes = sum(r.spare_bytes for n, r in self._others.items() if n not in late_bytes)
        idle = [one for one in self._staying if one.standing is Standing.IDLE]
        room = self._room_without(
            one
            for one in sorted(idle, key=lambda one: one.used_at)
            if _may_go(one, request.urgency, self._now)
        )
        if room is not None and not room.models:
            reclaims = room.spare_bytes < spare_bytes
            if reclaims and sum(late_bytes.values()) <= room.spare_bytes:
                reason = f"{short}; other models release memory they do not need"
                return Reclaim(reason=reason)
            reason = f"{short}: {is_or_are(list(late_bytes))} about to go"
            return Wait(reason=reason, is_under_way=True, reclaims=reclaims)
        if room is not None:
            spare_bytes -= sum(self._others[name].spare_bytes for name in room.models)
            return Evict(
                models=room.models,
                reason=f"{short}: {is_or_are(room.models)} idle",
                reclaims=room.spare_bytes < spare_bytes,
            )
        if request.urgency is Urgency.NONE:
            return Wait(reason=f"{short}; other models are unloaded once it gets a request")
        return self._later(idle)

    def _later(self, idle: list[LoadedModel]) -> Swap | Wait:
        """Wait for models that were just used, if that is enough, and otherwise for busy ones, or
        for what rows of pinned ones take."""
        room = self._room_without(sorted(idle, key=lambda one: one.ripe_at))
        if room is not None:
            until = max(self._others[name].ripe_at for name in room.models)
            names = is_or_are(room.models)
            reason = f"{self._short}; {names} idle, but not for long enough"
            return Wait(reason=reason, until=until)
        swaps_from = self._request.swaps_from
        if swaps_from is not None and (swap := self._swap(swaps_from)):
            return swap
        return Wait(reason=f"{self._short}: {_holds_up(self._staying)}")

    def _swap(self, swaps_from: float) -> Swap | Wait | None:
        """Return which models go now, or when they will; None if it is not enough if all go that
        may."""
        whens = {one.name: self._goes_at(one) for one in self._staying}
        goes_at = {name: when for name, when in whens.items() if when is not None}
        may_go = [self._others[name] for name in goes_at]
        at_once = [one for one in may_go if goes_at[one.name] <= self._now]
        room = self._room_without(sorted(at_once, key=_idle_first))
        if room is not None and swaps_from <= self._now:
            busy = self._busy(room.models)
            idle = tuple(name for name in room.models if name not in busy)
            reason = f"{self._short}: {is_or_are(busy)} busy"
            return Swap(models=busy, evicted=idle, reason=reason)
        if room is None:
            room = self._room_without(sorted(may_go, key=lambda one: goes_at[one.name]))
        if room is None:
            return None
        busy = self._busy(room.models)
        until = max(swaps_from, *(goes_at[name] for name in room.models))
        when = (
            "makes room when its turn ends" if len(busy) == 1 else "make room when their turns end"
        )
        reason = f"{self._short}: {is_or_are(busy)} busy and {when}"
        return Wait(reason=reason, until=until if until < math.inf else None, swaps=busy)

    def _goes_at(self, one: LoadedModel) -> float | None:
        """Return from when on a model may go for this load; None if it may not, as things are."""
        if one.standing is Standing.IDLE:
            return -math.inf if self._request.urgency is Urgency.COMMAND else one.ripe_at
        wants = self._request.wants or Priority.BATCH
        return None if one.runs is not None and one.runs.is_above(wants) else one.turn_ends_at

    def _busy(self, names: Iterable[ModelName]) -> tuple[ModelName, ...]:
        return tuple(n for n in names if self._others[n].standing is Standing.BUSY)

    def _room_without(self, may_go: Iterable[LoadedModel]) -> Room | None:
        return find_room(
            self._request.needed_bytes,
            budget_bytes=self._budget_bytes,
            reserved={one.name: one.least_bytes for one in self._staying},
            may_go=[one.name for one in may_go],
        )


def _may_go(one: LoadedModel, urgency: Urgency, now: float) -> bool:
    if urgency is Urgency.COMMAND:
        return True
    return urgency is Urgency.REQUEST and one.ripe_at <= now


def _idle_first(one: LoadedModel) -> tuple[bool, float]:
    """Sort the idle ones first, the least recently used at the front; then the busy ones."""
    is_busy = one.standing is Standing.BUSY
    return is_busy, one.loaded_since if is_busy else one.used_at


def is_or_are(names: Iterable[str]) -> str:
    """Return the names with their verb: `a is`, `a and b are`."""
    found = list(names)
    return f"{listed(found)} {'is' if len(found) == 1 else 'are'}"


def _holds_up(staying: Iterable[LoadedModel]) -> str:
    """Return what a load waits for: models that stay until their answers have ended, and what
    pinned ones hold beyond what they keep for good."""
    there = list(staying)
    busy = {one.name: one.stays_because for one in there if one.standing is Standing.BUSY}
    why = [f"{is_or_are(busy)} busy"] if busy else []
    why += [
        f"{name} stays loaded until its answers are complete, because {reason}"
        for name, reason in busy.items()
        if reason
    ]
    why += [
        f"{one.name} is pinned and holds {size_text(one.least_bytes)} for now"
        for one in there
        if one.standing is Standing.PINNED and one.least_bytes > one.never_bytes
    ]
    return "; ".join(why)


def idle_to_evict(view: MemoryView) -> tuple[ModelName, ...]:
    """Return the idle models that must go because more is reserved than the budget allows: as many
    as are needed, the least recently used first, or all if that is not enough."""
    if view.budget is None:
        return ()
    staying = [one for one in view.loaded.values() if not one.is_leaving]
    idle = sorted(
        (one for one in staying if one.standing is Standing.IDLE), key=lambda one: one.used_at
    )
    may_go = tuple(one.name for one in idle)
    room = find_room(
        0,
        budget_bytes=view.budget.kept_bytes,
        reserved={one.name: one.least_bytes for one in staying},
        may_go=may_go,
    )
    return may_go if room is None else room.models
