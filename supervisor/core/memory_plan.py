"""The memory plan: which models load, wait, go or give way, decided in one place.

`plan` looks at a `MemoryView` and returns triggers for the lives of models. It remembers nothing:
which models wait for memory, since when and why, is part of their phase.

`verdict_on` decides what may be done about one load: there is room, there will be, or there never
is. A verdict carries its sentence, so that status, events, notices and errors say the same. The
plan asks for it in each model's turn; `load --dry-run`, `reload --dry-run` and `mlxsup plan` ask
about a changed view.

The order: models that make room stay if that is no longer needed; those that wait are admitted,
and idle ones evicted for them, `parallel_loads` at a time; the first in line over all models has
busy ones swapped out. If more is reserved than may be kept, prewarmed workers go, workers give back
what they keep for reuse, then idle models go, then rows of `batch` requests, and at last a busy
model. Last, what no model needs otherwise is divided among the rows of those that serve.

While the models leave that go for one that waits, its need counts as taken for all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.states import CLASSES, Priority, Why
from mlxsup.protocol.text import listed, size_text

from .budget import Budget, Room, equal_shares, fewest, find_room
from .kv_budget import Part, Row
from .life import Lack, Shortage, Swapping, Wait
from .memory_view import LoadedModel, LoadRequest, MemoryView, Standing, Urgency
from .transitions import (
    LacksMemory,
    NoMemory,
    SwapCalledOff,
    SwappedOut,
    Trigger,
    Turn,
    WantDown,
)
from .warm_pool import Prewarmed, PrewarmedState, usefulness

# ---------------------------------------------------------------- one load

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


# ---------------------------------------------------------------- all models

PATIENCE_S = 20.0
"""A model that has waited for so long is only passed by loads that leave it room."""

OTHERS = "because other programs need memory"
BUDGET = "because the loaded models need more than memory_budget"

LEAST_SHARE = 100
"""What a worker keeps is asked for if it is at least this part of what is missing."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """The steps that are due now.

    Attributes:
        steps: which trigger is put to which model, in this order.
        ended: the numbers of the prewarmed workers that are in the way.
        reclaimed: the models whose workers give back what they keep for reuse, with a note for
            those who watch; empty: none.
        shed: the models of which rows leave because memory is short: whose, and a note.
        doubted: the models whose files are compared with those that they have loaded, before they
            may be swapped out.
        parts: what the rows of each model may take; none while there is anything else to do.
    """

    steps: list[tuple[ModelName, Trigger]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    reclaimed: list[tuple[ModelName, str]] = field(default_factory=list)
    shed: list[tuple[ModelName, list[RequestKey], str]] = field(default_factory=list)
    doubted: list[ModelName] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def plan(view: MemoryView) -> Plan:
    """Decide what follows from the view for all models."""
    planner = _Planner(view)
    planner.reclaim()
    for one in view.loaded.values():
        if one.swap is not None:
            planner.call_off(one, one.swap)
    waiting = [request for request in view.waiting if not request.is_unwanted]
    for request in view.waiting:
        if request.is_unwanted:  # like an evicted one, it loads with its next request
            planner.put(request.name, WantDown(why=Why.EVICT, drain_s=0.0))
    for request in sorted(waiting, key=lambda request: request.turn_order):
        planner.decide(request)
    planner.swap(waiting)
    if view.budget is not None:
        planner.keep_within(view.budget)
    planner.divide()
    return planner.plan


class _Planner:
    """One pass over a view: what is decided for one model counts for those after it.

    Attributes:
        plan: what has been decided.
    """

    def __init__(self, view: MemoryView) -> None:
        self.plan = Plan()
        self._view = view
        self._now = view.now
        self._loaded = dict(view.loaded)
        self._waiting = {request.name: request for request in view.waiting}
        self._prewarmed = {worker.number: worker for worker in view.prewarmed}
        self._free_turns = view.free_turns
        self._free_turns_after_crash = view.free_turns_after_crash
        self._may_evict = True
        self._promised_bytes = 0

    def put(self, name: ModelName, trigger: Trigger) -> None:
        """Decide that a trigger is put to a model."""
        self.plan.steps.append((name, trigger))

    def reclaim(self) -> None:
        """Have workers give back what they keep for reuse: all others if one has run out of memory,
        and otherwise those that keep a part worth asking for of what must go."""
        view, budget, missing_bytes = self._view, self._view.budget, self._view.overshoot_bytes
        ready = [one for one in self._loaded.values() if one.is_ready]
        if view.ran_out is not None:
            self.plan.reclaimed += [(one.name, "") for one in ready if one.name != view.ran_out]
        elif budget is not None and missing_bytes:
            reserved_bytes = budget.kept_bytes + missing_bytes
            of_budget = f"{size_text(reserved_bytes)} of {size_text(budget.kept_bytes)}"
            for one in ready:
                if one.reclaimable_bytes * LEAST_SHARE >= missing_bytes:
                    kept = f"{size_text(one.reclaimable_bytes)} kept for reuse"
                    note = f"asked to give back {kept}: {of_budget} are reserved"
                    self.plan.reclaimed.append((one.name, note))

    def call_off(self, one: LoadedModel, swap: Swapping) -> None:
        """Let a model stay whose rows leave, if what they leave for no longer needs them to."""
        if isinstance(swap.cause, Shortage):
            must_go = self._lasts(swap.cause)
        else:
            target = self._waiting.get(swap.cause)
            must_go = (
                target is not None
                and _is_still_wanted(target, swap.ran)
                and not isinstance(self._verdict(target), Admit)
            )
        if not must_go:
            self.put(one.name, SwapCalledOff())
            self._loaded[one.name] = replace(one, standing=Standing.BUSY)

    def decide(self, request: LoadRequest) -> None:
        """Decide about a model that waits for a load."""
        turns = self._free_turns_after_crash if request.is_after_crash else self._free_turns
        is_open = turns > 0
        match self._verdict(request):
            case Admit() if is_open and not self._fits_beside_prewarmed(request):
                reason = f"{self._short_of(request)}: prewarmed workers are about to go"
                self._wait(request, Wait(reason=reason, is_under_way=True))
            case Admit() if is_open:
                self._admit(request)
            case Reclaim(reason=reason) if is_open:
                self._wait(request, Wait(reason=reason, is_under_way=True, reclaims=True))
            case Evict(models=names, reason=reason, reclaims=reclaims) if (
                is_open and self._may_evict
            ):
                self._evict(names, _for(request))
                self._wait(request, Wait(reason=reason, is_under_way=True, reclaims=reclaims))
            case Admit() | Reclaim() | Evict() if request.is_promised:
                needed = size_text(request.needed_bytes)
                reason = f"needs {needed}, which is kept for it: other models load first"
                self._wait(request, Wait(reason=reason, is_under_way=True))
            case Admit() | Reclaim() | Evict():
                if request.lack is not None:
                    self.put(request.name, LacksMemory(lack=None))
            case Swap(models=names, reason=reason) if not self._view.swaps:
                why = f"{reason}, and busy models do not make room because `swap` is off"
                self._refuse(request, Refuse(reason=why, blockers=names))
            case Swap(reason=reason):  # unless it is next: see `swap`
                self._wait(request, Wait(reason=f"{reason}, and another model is next"))
            case Wait() as wait:
                self._wait(request, wait)
            case Refuse() as refusal:
                self._refuse(request, refusal)

    def swap(self, waiting: Iterable[LoadRequest]) -> None:
        """Swap models out for the first in line over all models, if that is due.

        None behind it gets a turn before it, unless nothing that is known would make room for it.
        """
        if not (self._view.swaps and self._free_turns > 0 and self._may_evict):
            return  # or another one is on its way in
        places = [(request.place, request) for request in waiting if request.place is not None]
        for _, request in sorted(places, key=lambda pair: pair[0]):
            match self._verdict(request):
                case Swap() as swap:
                    if self._may_return(swap.models):
                        self._swap(request, swap)
                    return
                case Wait(swaps=names) if names:
                    return
                case _:
                    pass

    def keep_within(self, budget: Budget) -> None:
        """Make room if more is reserved than the budget allows, and not just until workers have
        given back what they keep for reuse."""
        # What a model waits for is held by now. Prewarmed workers stay if they fit once those that
        # leave for it are gone: it takes one over.
        leaving = [one for one in self._loaded.values() if one.is_leaving]
        leaving_bytes = sum(one.reserved_bytes for one in leaving)
        self._end_prewarmed(self._left_of(budget.kept_bytes) + leaving_bytes)
        if self._view.is_reclaiming or self.plan.reclaimed:
            return
        names = idle_to_evict(replace(self._view, loaded=self._loaded))
        self._evict(names, f", because {_shortage_text(self._loaded, budget)}")
        if self._view.are_rows_leaving or self._shed(budget):
            return
        if self._view.swaps:
            self._swap_for_shortage(budget)

    def divide(self) -> None:
        """Divide what is free among the rows of those that serve, once nothing else is to be
        done."""
        view = self._view
        if view.is_division_due and not (self.plan.steps or self.plan.shed):
            reclaims = any(one.lack.wait.reclaims for one in view.waiting if one.lack is not None)
            self.plan.parts = divide(view, is_short=reclaims or view.overshoot_bytes > 0)

    # ------------------------------------------------------------ inside

    def _verdict(self, request: LoadRequest) -> Verdict:
        budget = self._view.budget
        if budget is None:
            return Admit()
        needed_bytes = request.needed_bytes
        verdict = verdict_on(request, replace(self._view, loaded=self._loaded))
        others = (one for one in self._loaded.values() if one.name != request.name)
        fixed_bytes = sum(one.never_bytes for one in others)
        leaves_room = fixed_bytes + needed_bytes + self._promised_bytes <= budget.size_bytes
        is_back = needed_bytes <= request.reserved_bytes  # after a crash or a restart
        if isinstance(verdict, Admit | Reclaim | Evict) and not (leaves_room or is_back):
            return Wait(reason=f"needs {size_text(needed_bytes)}; another model has waited longer")
        return verdict

    def _admit(self, request: LoadRequest) -> None:
        prewarmed = self._prewarmed_for(request)
        number = None if prewarmed is None else self._prewarmed.pop(prewarmed.number).number
        self.put(request.name, Turn(prewarmed=number))
        self._free_turns -= 1
        self._free_turns_after_crash -= request.is_after_crash
        self._hold(request)

    def _wait(self, request: LoadRequest, wait: Wait, *, is_promised: bool = False) -> None:
        is_asked_for = request.urgency is not Urgency.NONE
        if request.is_promised and is_asked_for:
            is_promised = wait.is_under_way
        before = request.lack
        asked_since = self._now
        if before is not None and before.asked_since is not None:
            asked_since = before.asked_since
        lack = Lack(
            since=self._now if before is None else before.since,
            wait=wait,
            asked_since=asked_since if is_asked_for else None,
            is_promised=is_promised,
        )
        if lack != before:
            self.put(request.name, LacksMemory(lack=lack))
        if wait.is_under_way:  # what is being freed is for this model
            self._may_evict = False
            self._hold(request)
            return
        if request.pinned_bytes is None:
            self._loaded.pop(request.name, None)
        if is_asked_for and self._now >= request.since + PATIENCE_S:
            self._promised_bytes += request.needed_bytes

    def _refuse(self, request: LoadRequest, refusal: Refuse) -> None:
        assert self._view.budget is not None
        refused = NoMemory(
            reason=refusal.reason,
            needed_bytes=request.needed_bytes,
            budget_bytes=self._view.budget.whole_bytes,
            blockers=refusal.blockers,
        )
        self.put(request.name, refused)
        if request.pinned_bytes is None:
            self._loaded.pop(request.name, None)

    def _hold(self, request: LoadRequest) -> None:
        """Have the others see the memory of this model as taken."""
        is_pinned = request.pinned_bytes is not None
        self._loaded[request.name] = LoadedModel(
            name=request.name,
            reserved_bytes=request.needed_bytes,
            needed_bytes=request.needed_bytes,
            standing=Standing.PINNED if is_pinned else Standing.BUSY,
            never_bytes=request.pinned_bytes or 0,
        )

    def _evict(self, names: Iterable[ModelName], why: str) -> None:
        for name in names:
            one = self._loaded[name]
            reason = f"evicted{why}; it was idle for {self._now - one.used_at:.0f} s"
            self.put(name, WantDown(why=Why.EVICT, drain_s=0.0, reason=reason))
            self._loaded[name] = replace(one, standing=Standing.LEAVING)

    def _swap(self, request: LoadRequest, swap: Swap) -> None:
        waits_s = self._now - (request.lack.since if request.lack else self._now)
        self._evict(swap.evicted, _for(request))
        for name in swap.models:
            why = f"{_for(request)} and has waited for {waits_s:.0f} s"
            self._swap_out(name, request.name, why)
        under_way = self._verdict(request)
        if isinstance(under_way, Reclaim):
            under_way = Wait(reason=under_way.reason, is_under_way=True, reclaims=True)
        assert isinstance(under_way, Wait), under_way
        self._wait(request, under_way, is_promised=True)

    def _swap_out(self, name: ModelName, cause: ModelName | Shortage, why: str) -> None:
        one = self._loaded[name]
        ready_s = self._now - one.loaded_since
        trigger = SwappedOut(
            cause=cause,
            ran=one.runs,
            leave_s=self._view.leave_s,
            reason=f"swapped out{why}; it had its turn for {ready_s:.0f} s",
        )
        self.put(name, trigger)
        self._loaded[name] = replace(one, standing=Standing.LEAVING)

    def _may_return(self, names: Iterable[ModelName]) -> bool:
        """True if the files of these models are known to be what they have loaded; if they have not
        been looked at lately, that is done first."""
        doubted = [self._loaded[name] for name in names if self._loaded[name].are_files_doubted]
        unseen = [one for one in doubted if not one.are_files_being_seen]
        self.plan.doubted += [one.name for one in unseen]
        return not doubted

    # ------------------------------------------------------------ a shortage

    def _shed(self, budget: Budget) -> bool:
        """Have rows of the lowest class leave; return whether any do."""
        leaving = _rows_to_shed(self._loaded, budget)
        for name, rows in leaving.items():
            count = "1 batch request leaves"
            if len(rows) > 1:
                count = f"{len(rows)} batch requests leave"
            reason = f"{count} {OTHERS}: {_shortage_text(self._loaded, budget)}"
            self.plan.shed.append((name, [row.key for row in rows], reason))
        return bool(leaving)

    def _swap_for_shortage(self, budget: Budget) -> None:
        """Swap a busy model out if what is there does not fit together.

        One model that is READY always stays: with none, nothing would be served, and the load that
        follows needs as much memory. So does one that could not return.
        """
        counted = _counted_bytes(self._loaded, budget)
        if sum(counted.values()) <= budget.kept_bytes:
            return
        staying = [self._loaded[name] for name in counted]
        ready = [one for one in staying if one.is_ready]
        left_bytes = budget.whole_bytes - sum(one.never_bytes for one in staying)
        may_go = [
            one
            for one in ready
            if one.turn_ends_at is not None
            and one.turn_ends_at <= self._now
            and one.needed_bytes <= left_bytes
        ]
        if not may_go or len(ready) < 2:
            return
        name = min(may_go, key=_runs_least).name
        reason = OTHERS if budget.is_short else BUDGET
        if self._may_return([name]):
            cause = Shortage(reason=reason, counted_bytes=counted[name])
            self._swap_out(name, cause, f" {reason}: {_shortage_text(self._loaded, budget)}")

    def _lasts(self, cause: Shortage) -> bool:
        """True if a model that is on its way out for a shortage could still not stay."""
        budget = self._view.budget
        if budget is None:
            return False
        staying_bytes = sum(_counted_bytes(self._loaded, budget).values())
        return staying_bytes + cause.counted_bytes > budget.kept_bytes

    # ------------------------------------------------------------ prewarmed workers

    def _prewarmed_for(self, request: LoadRequest) -> Prewarmed | None:
        """Return the worker that a model takes over; None for a new process."""
        if not request.takes_prewarmed:
            return None
        return next((worker for worker in self._prewarmed.values() if worker.is_waiting), None)

    def _fits_beside_prewarmed(self, request: LoadRequest) -> bool:
        """True if there is room without ending any prewarmed worker; those in the way are ended."""
        if self._view.budget is None:
            return True
        left_bytes = self._left_of(self._view.budget.size_bytes, request) - request.needed_bytes
        return self._end_prewarmed(left_bytes, kept=self._prewarmed_for(request))

    def _end_prewarmed(self, left_bytes: int, kept: Prewarmed | None = None) -> bool:
        """End as few prewarmed workers as are too many, those first that are not of use yet.

        Args:
            left_bytes: what the models leave of the budget.
            kept: the worker that is taken over, and needs no extra room.

        Returns:
            True if they fit already; if not, they do once the exits have been seen.
        """
        others = [worker for worker in self._prewarmed.values() if worker is not kept]
        held_bytes = sum(worker.reserved_bytes for worker in others)
        if held_bytes <= left_bytes:
            return True
        staying = [worker for worker in others if not worker.is_ending]
        held_bytes = sum(worker.reserved_bytes for worker in staying)
        for worker in sorted(staying, key=usefulness):
            if held_bytes > left_bytes:
                held_bytes -= worker.reserved_bytes
                self.plan.ended.append(worker.number)
                ending = replace(worker, state=PrewarmedState.ENDING)
                self._prewarmed[worker.number] = ending
        return False

    def _short_of(self, request: LoadRequest) -> str:
        assert self._view.budget is not None
        prewarmed_bytes = sum(worker.reserved_bytes for worker in self._prewarmed.values())
        free_bytes = self._left_of(self._view.budget.size_bytes, request) - prewarmed_bytes
        return needs(request.needed_bytes, free_bytes)

    def _left_of(self, size_bytes: int, request: LoadRequest | None = None) -> int:
        """Return what the models, without the one that asks, leave of so much."""
        asking = None if request is None else request.name
        others = (one for one in self._loaded.values() if one.name != asking)
        return size_bytes - sum(one.reserved_bytes for one in others)


def _for(request: LoadRequest) -> str:
    """Return what the others go for, a phrase."""
    return f" for {request.name}, which needs {size_text(request.needed_bytes)}"


def _is_still_wanted(target: LoadRequest, ran: Priority | None) -> bool:
    """True if a model still waits for what others free, and may have it next to what they ran."""
    wants = target.wants
    return (
        target.is_promised and wants is not None and not (ran is not None and ran.is_above(wants))
    )


def _runs_least(one: LoadedModel) -> tuple[int, float]:
    """Sort models that run nothing first, then by class from the lowest; then by how long they have
    been loaded."""
    rank = len(CLASSES) if one.runs is None else one.runs.rank
    return -rank, one.loaded_since


# ---------------------------------------------------------------- more reserved than may be kept


def _counted_bytes(loaded: Mapping[ModelName, LoadedModel], budget: Budget) -> dict[ModelName, int]:
    """Return what each model that stays cannot give back without going, by name.

    While others do not lack memory, what it has grown by does not count: it would be let in again
    at once, and grow again.
    """
    return {
        one.name: one.least_bytes if budget.is_short else min(one.least_bytes, one.needed_bytes)
        for one in loaded.values()
        if not one.is_leaving
    }


def _shortage_text(loaded: Mapping[ModelName, LoadedModel], budget: Budget) -> str:
    """Return how much is reserved, how much may be kept, and why it is no more, a phrase."""
    reserved_bytes = sum(one.reserved_bytes for one in loaded.values())
    sizes = f"{size_text(reserved_bytes)} of {size_text(budget.kept_bytes)} are reserved"
    return f"{sizes} and {budget.shortage}" if budget.is_short else sizes


def _rows_to_shed(
    loaded: Mapping[ModelName, LoadedModel], budget: Budget
) -> dict[ModelName, list[Row]]:
    """Return the rows that must leave now, by model: those served last, and none without which the
    others would free as much as is missing. If all of them are not enough, those that free any."""
    missing_bytes = sum(_counted_bytes(loaded, budget).values()) - budget.kept_bytes
    if missing_bytes <= 0 or not budget.is_short:
        return {}
    rows = [(one, row) for one in loaded.values() for row in _may_leave(one)]
    enough_bytes = min(missing_bytes, _freed_bytes(rows))
    rows.sort(key=lambda pair: pair[1])
    return _by_model(fewest(rows, lambda left: _freed_bytes(left) >= enough_bytes))


def _may_leave(one: LoadedModel) -> list[Row]:
    """Return the rows that may leave, but never all: the one that was served first stays."""
    if one.rows is None or one.is_leaving:
        return []
    staying = [row for row in one.rows.rows if not row.is_leaving]
    may_go = sorted(row for row in staying if row.may_go)
    return may_go[1:] if len(may_go) == len(staying) else may_go


def _freed_bytes(rows: list[tuple[LoadedModel, Row]]) -> int:
    """Return how much less must be reserved once these rows have left."""
    models = {one.name: one for one, _ in rows}
    return sum(
        _kept_bytes(models[name]) - _kept_bytes(models[name], left)
        for name, left in _by_model(rows).items()
    )


def _kept_bytes(one: LoadedModel, without: Iterable[Row] = ()) -> int:
    assert one.rows is not None
    left = frozenset(row.key for row in without)
    return min(one.reserved_bytes, one.rows.needed_bytes(left))


def _by_model(rows: Iterable[tuple[LoadedModel, Row]]) -> dict[ModelName, list[Row]]:
    found: dict[ModelName, list[Row]] = {}
    for one, row in rows:
        found.setdefault(one.name, []).append(row)
    return found


# ---------------------------------------------------------------- what is free, divided

LEAST_CHANGE = 8
"""Divides a KV budget: it is lowered only by at least one part, unless memory is needed."""


def divide(view: MemoryView, *, is_short: bool) -> list[Part]:
    """Divide the memory that is free for rows.

    Args:
        is_short: whether every model must give back what it does not need now.

    Returns:
        A part for each member, in the order in which they are told: lower budgets come first.
    """
    coulds = {name: _could_bytes(name, view) for name in view.members}
    raises = {name: rows.raise_bytes for name, rows in view.members.items()}
    if view.budget is not None:
        # What was raised gives way to a row that could not run otherwise, until the next load.
        for name, rows in view.members.items():
            room_bytes = max(0, coulds[name] - rows.least_bytes)
            raises[name] = min(rows.raise_bytes, room_bytes)
    view = _with_raises(view, raises)
    targets = _targets(view, is_short=is_short)
    parts = {n: Part(name=n, could_bytes=coulds[n], raise_bytes=raises[n]) for n in coulds}
    lowered = {}
    for name in view.members:
        size_bytes = _lowered(view.loaded[name], targets[name], is_short=is_short)
        if size_bytes is not None:
            lowered[name] = replace(parts.pop(name), size_bytes=size_bytes, gives_back=is_short)
    free_bytes = view.members_bytes
    if free_bytes is not None:
        free_bytes -= sum(view.loaded[name].reserved_bytes for name in view.members)
    raised = []
    for name, rows in view.members.items():
        target_bytes, reserved_bytes = targets[name], view.loaded[name].reserved_bytes
        if free_bytes is not None:
            held_bytes = reserved_bytes - rows.fixed_bytes
            target_bytes = min(target_bytes, held_bytes + max(0, free_bytes))
        if rows.size_bytes is None:  # the first row needs nothing that is free
            target_bytes = max(target_bytes, rows.least_bytes)
        elif target_bytes <= rows.size_bytes or name in lowered:
            continue
        raised.append(replace(parts.pop(name), size_bytes=target_bytes))
        if free_bytes is not None:
            free_bytes -= rows.reserved_with(target_bytes) - reserved_bytes
    return [*lowered.values(), *raised, *parts.values()]


def _with_raises(view: MemoryView, raises: Mapping[ModelName, int]) -> MemoryView:
    """Return the view with so much reserved besides for each member."""
    loaded = dict(view.loaded)
    for name, rows in view.members.items():
        loaded[name] = replace(loaded[name], rows=replace(rows, raise_bytes=raises[name]))
    return replace(view, loaded=loaded)


def _could_bytes(name: ModelName, view: MemoryView) -> int:
    rows = view.members[name]
    if view.budget is None or rows.is_given:
        return rows.wanted_bytes
    others = [other for n, other in view.members.items() if n != name]
    taken_bytes = sum(other.fixed_bytes + other.least_bytes for other in others)
    return view.budget.whole_bytes - taken_bytes - view.others_bytes - rows.bare_bytes


def _lowered(one: LoadedModel, target_bytes: int, *, is_short: bool) -> int | None:
    """Return a lower budget, or the same if the worker must give back what it keeps for speed; None
    for no news. It is lowered by little only if that is needed elsewhere."""
    if one.rows is None or one.rows.size_bytes is None:
        return None
    size_bytes = one.rows.size_bytes
    target_bytes = min(target_bytes, size_bytes)
    if is_short:
        has_spare = one.spare_bytes > 0 and not one.rows.is_asked
        return target_bytes if target_bytes < size_bytes or has_spare else None
    return target_bytes if target_bytes < size_bytes - size_bytes // LEAST_CHANGE else None


def _targets(view: MemoryView, *, is_short: bool) -> dict[ModelName, int]:
    """Return what the rows of each model should be allowed to take: what they hold if memory is
    short or a request of another model has run out of memory alone, no more than now while a model
    waits for memory, or else also an equal share of what is free."""
    held = {name: rows.held_bytes for name, rows in view.members.items()}
    if is_short:
        return held
    shares = _shares(view, held)
    tried = view.tried_again
    if not tried:
        return shares
    return {n: shares[n] if tried <= {n} else min(shares[n], held[n]) for n in shares}


def _shares(view: MemoryView, held: Mapping[ModelName, int]) -> dict[ModelName, int]:
    """Return what the rows of each model should be allowed to take while memory is not short."""
    members, size_bytes = view.members, view.members_bytes
    if size_bytes is None:
        return {name: rows.wanted_bytes for name, rows in members.items()}
    if view.is_awaited:
        return {name: rows.size_bytes or 0 for name, rows in members.items()}
    least_bytes = sum(rows.fixed_bytes + rows.least_bytes for rows in members.values())
    wanted = {n: rows.wanted_bytes - rows.least_bytes for n, rows in members.items()}
    extras = equal_shares(size_bytes - least_bytes, wanted)
    return {n: max(rows.least_bytes + extras[n], held[n]) for n, rows in members.items()}
