"""The memory of all models at one moment: the facts that every decision about memory is made on.

A view holds values alone, so that nothing can depend on anything else. `view_of` reads it from the
models; a dry run changes it, or makes one up, before it asks what would follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import SERVES, Priority, State, Wanted, Why

from .budget import Budget
from .kv_budget import Row, Rows
from .life import Abandoned, Draining, Lack, Pending, Ready, StopCause, Stopping, Swapping
from .model import ASK_AGAIN_S, RESIDENCY_LOADS, Model
from .settings import CoreSettings
from .warm_pool import ENGINE, Prewarmed, WarmPool


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


# ---------------------------------------------------------------- as it is now

PASSED_OVER_AGINGS = 2
"""A model that has waited for this many times `aging_s` comes before those that have not: each of
its requests has aged to the highest class by then, and clients' counters must not hold it up."""


def view_of(
    models: Iterable[Model],
    warm_pool: WarmPool,
    settings: CoreSettings,
    now: float,
    *,
    ran_out: ModelName | None,
    is_division_due: bool,
) -> MemoryView:
    """Return the memory of these models now.

    Args:
        ran_out: as in `MemoryView`.
        is_division_due: whether anything has changed that the division depends on.
    """
    everybody = list(models)
    loading = [model.life for model in everybody if model.life.is_loading]
    return MemoryView(
        budget=settings.budget,
        now=now,
        loaded={one.name: one for one in loaded_models(everybody, settings, now)},
        waiting=tuple(
            _load_request(model, everybody, settings, now)
            for model in everybody
            if model.waits_for_load
        ),
        prewarmed=tuple(warm_pool.workers.values()),
        free_turns=settings.parallel_loads - len(loading),
        free_turns_after_crash=settings.parallel_loads
        - sum(life.is_after_crash for life in loading),
        swaps=settings.swap,
        leave_s=settings.drain_timeout_s,
        is_reclaiming=any(model.process.is_giving_back(now) for model in everybody),
        ran_out=ran_out,
        is_division_due=is_division_due,
        claimed_bytes=0
        if settings.budget is None
        else warm_pool.claimed_bytes(settings, is_of_use=any(map(takes_prewarmed, everybody))),
        tried_again=frozenset(one.name for one in everybody if _is_tried_again(one)),
        are_rows_leaving=any(
            one.is_leaving_short for model in everybody for one in model.batch.running.values()
        ),
    )


def _is_tried_again(model: Model) -> bool:
    """True if a request runs, or is about to, that has run out of memory alone."""
    return any(one.crashes.shortages for one in (*model.batch.running.values(), *model.queue.again))


def at_rest(models: Iterable[Model], warm_pool: WarmPool, budget: Budget | None) -> bool:
    """True if no model waits or makes room and no more is reserved than there is, so that there is
    nothing to plan before that changes."""
    everybody = list(models)
    if any(one.waits_for_load or isinstance(one.life.phase, Swapping) for one in everybody):
        return False
    if budget is None:
        return True
    reserved_bytes = sum(model.life.reserved_bytes for model in everybody)
    return reserved_bytes + warm_pool.reserved_bytes <= budget.kept_bytes


def loaded_models(models: Iterable[Model], settings: CoreSettings, now: float) -> list[LoadedModel]:
    """Return what is known of the models that hold memory, reserved for them or not."""
    return [
        _loaded_model(model, settings, now)
        for model in models
        if model.life.reserved_bytes or isinstance(model.life.phase, Ready)
    ]


def _loaded_model(model: Model, settings: CoreSettings, now: float) -> LoadedModel:
    life, phase, standing = model.life, model.life.phase, _standing(model)
    rows = _rows_of(model)
    spare_bytes = _spare_bytes(model, rows, now)
    never_bytes = life.reserved_bytes if standing is Standing.STUCK else 0
    if standing is Standing.PINNED:
        never_bytes = _lasting_bytes(model, rows, spare_bytes, now)
    may_be_asked = now >= model.process.asked_back_at + ASK_AGAIN_S
    ready_since = phase.since if isinstance(phase, Ready) else 0.0
    residency_s = max(settings.min_residency_s, RESIDENCY_LOADS * model.load_s)
    return LoadedModel(
        name=model.name,
        reserved_bytes=life.reserved_bytes,
        needed_bytes=model.bytes_to_load,
        never_bytes=never_bytes,
        spare_bytes=spare_bytes,
        reclaimable_bytes=model.process.reusable_bytes if may_be_asked else 0,
        is_ready=isinstance(phase, Ready),
        is_ending=isinstance(phase, Stopping),
        swap=phase if isinstance(phase, Swapping) else None,
        standing=standing,
        used_at=model.idle_since,
        ripe_at=min(model.idle_since + model.load_s, ready_since + residency_s),
        loaded_since=ready_since,
        turn_ends_at=turn_ends_at(model, settings),
        runs=_highest_class(model),
        stays_because=model.stays_because,
        are_files_doubted=model.has_open_answers and not life.files.is_fresh(now),
        are_files_being_seen=life.files.is_being_seen,
        rows=rows,
    )


def _standing(model: Model) -> Standing:
    life, phase = model.life, model.life.phase
    if isinstance(phase, Abandoned):
        return Standing.STUCK
    if isinstance(phase, Swapping):
        return Standing.LEAVING
    is_ending = isinstance(phase, Draining | Stopping)
    if is_ending and life.wanted is Wanted.GONE:
        return Standing.LEAVING
    if life.settings.pinned:
        return Standing.PINNED
    if is_ending and life.wanted is Wanted.DOWN:
        return Standing.LEAVING
    if isinstance(phase, Stopping) and phase.cause is StopCause.SWAP:
        return Standing.LEAVING
    if isinstance(phase, Stopping) and phase.cause is StopCause.ASKED and not phase.is_restart:
        return Standing.LEAVING  # it is wanted again, and starts from nothing
    return Standing.IDLE if isinstance(phase, Ready) and model.is_idle else Standing.BUSY


# ---------------------------------------------------------------- what their rows take

LOWEST = Priority.BATCH
"""The class whose rows leave when memory is short."""


def _rows_of(model: Model) -> Rows | None:
    """Return the rows of a model that serves, and what they may take; None if nothing is known of
    that. While memory is short, rows of the lowest class may leave that can continue later."""
    if model.life.state not in SERVES or not model.has_row_budget:
        return None
    ready, need, budget = model.process.ready, model.life.need, model.batch.budget
    assert ready is not None
    assert need is not None
    may_go = model.life.state is State.READY and not model.process.is_unlinked
    layers = tuple(ready.cache_layers)
    if need.given_bytes is not None:  # enough for a short row, or the load would have failed
        least_bytes = wanted_bytes = max(0, need.given_bytes - model.fixed_bytes)
    else:
        longest = need.row_tokens(model.longest_stream)
        least_bytes = cache_bytes(layers, rows=1, longest=longest)
        wanted_bytes = cache_bytes(layers, rows=need.max_rows, longest=need.context_tokens)
    return Rows(
        layers=layers,
        least_bytes=least_bytes,
        wanted_bytes=wanted_bytes,
        bare_bytes=model.bare_bytes,
        raise_bytes=model.life.raise_bytes,
        measured_bytes=model.measured_bytes,
        kept_bytes=model.life.pinned_bytes,
        size_bytes=None if budget is None else budget.size_bytes,
        most_bytes=0 if budget is None else budget.most_bytes,
        is_given=need.given_bytes is not None,
        is_asked=budget is not None and budget.is_asked,
        rows=tuple(
            Row(
                served_at=one.run.dispatched_at or 0.0,
                key=one.key,
                tokens=one.length,
                may_go=may_go and one.priority is LOWEST and model.may_leave(one),
                is_leaving=one.is_leaving,
                is_leaving_short=one.is_leaving_short,
            )
            for one in model.batch.running.values()
        ),
    )


def _spare_bytes(model: Model, rows: Rows | None, now: float) -> int:
    """Return how much less would be reserved for a model if it gave back what it does not need now;
    once its process is about to go, that is all but what the next one needs, if there is to be one,
    or what is kept for a pinned model."""
    if model.life.state is State.STOPPING:
        next_bytes = model.bytes_to_load if model.life.wanted is Wanted.UP else 0
        return max(0, model.life.reserved_bytes - max(next_bytes, model.life.pinned_bytes))
    budget = model.batch.budget
    if budget is None or rows is None or rows.is_given:
        return 0
    left_bytes = rows.fixed_bytes + rows.held_bytes
    if not budget.may_give_back(now):  # what it holds is what it needs
        left_bytes = max(left_bytes, rows.measured_bytes)
    return max(0, model.life.reserved_bytes - max(left_bytes, model.life.pinned_bytes))


def _lasting_bytes(model: Model, rows: Rows | None, spare_bytes: int, now: float) -> int:
    """Return what a pinned model holds even if all of its requests end: what a load of it needs,
    because what its rows take besides comes back with them. If its process has outgrown that, it is
    all that is left once it is idle and has given back; without a budget for its rows, nothing
    comes back."""
    life, budget = model.life, model.batch.budget
    if life.state is not State.READY:
        return life.pinned_bytes
    held_bytes = life.reserved_bytes - spare_bytes
    if rows is None or rows.is_given:
        return held_bytes
    has_given_back = budget is not None and budget.has_just_given_back(model.idle_since, now)
    return held_bytes if model.is_idle and has_given_back else life.pinned_bytes


# ---------------------------------------------------------------- models that wait


def _load_request(
    model: Model,
    models: Iterable[Model],
    settings: CoreSettings,
    now: float,
) -> LoadRequest:
    life, phase = model.life, model.life.phase
    assert isinstance(phase, Pending)
    wants = _wanted_class(model)
    urgency = Urgency.REQUEST if model.queue else Urgency.NONE
    is_unasked = not (model.is_asked_for or model.paused)
    return LoadRequest(
        name=model.name,
        needed_bytes=life.needed_bytes,
        urgency=Urgency.COMMAND if model.up_callers else urgency,
        wants=wants,
        swaps_from=None if wants is None else _swaps_from(model, settings),
        since=phase.since,
        reserved_bytes=life.reserved_bytes,
        pinned_bytes=life.pinned_bytes if life.settings.pinned else None,
        lack=phase.lack,
        place=_place_in_line(model, models, settings, now) if settings.swap else None,
        is_after_crash=phase.is_after_crash,
        is_unwanted=life.why is Why.SWAP and is_unasked,
        takes_prewarmed=takes_prewarmed(model),
    )


def takes_prewarmed(model: Model) -> bool:
    """True if a prewarmed worker can load a model."""
    return model.life.settings.launch.engine == ENGINE


def _place_in_line(
    model: Model, models: Iterable[Model], settings: CoreSettings, now: float
) -> Place | None:
    """Return its place among those that wait for a turn; None if it does not, or not for long
    enough.

    Answers that a swap has interrupted do not come before new ones of other models: two models with
    open streams would otherwise pass the memory to each other for ever.
    """
    phase, swaps_from = model.life.phase, _swaps_from(model, settings)
    if swaps_from is None or now < swaps_from:
        return None
    request = model.queue.first()
    if request is None and not model.up_callers:
        return None
    longest_s = PASSED_OVER_AGINGS * settings.aging_s
    if settings.aging_s > 0 and now >= phase.since + longest_s:
        rank = 0 if request is None else request.waiting.standing.rank
        return Place(rank, False, False, 0.0, phase.since, 0.0)
    if request is None:
        return Place(0, True, True, 0.0, phase.since, phase.since)
    has_begun = request.acceptance is not None and model.life.why is not Why.SWAP
    return Place(
        rank=request.waiting.standing.rank,
        has_patience=True,
        is_new=not has_begun,
        counter=sum(one.queue.counters.of(request.account) for one in models),
        since=phase.since,
        arrived_at=request.waiting.arrived_at,
    )


def _swaps_from(model: Model, settings: CoreSettings) -> float | None:
    """Return from when on others may be swapped out for it; None: no request waits for it."""
    lack = model.lack
    if lack is None or lack.asked_since is None:
        return None
    return lack.asked_since + settings.swap_after_s


def _wanted_class(model: Model) -> Priority | None:
    """Return the class of the request that waits first, as it was asked for: otherwise a stream
    that has once waited long would never make room again. A load command counts as interactive.
    None: no request waits that may run."""
    if model.up_callers:
        return Priority.INTERACTIVE
    request = model.queue.first()
    return None if request is None else request.priority


# ---------------------------------------------------------------- models that may be swapped out


def turn_ends_at(model: Model, settings: CoreSettings) -> float | None:
    """Return from when on it may be swapped out; infinite if that is not known yet, None if it may
    not as things are: it is not READY, is pinned, runs what must not be interrupted, or has open
    answers and changed files."""
    life = model.life
    if not isinstance(life.phase, Ready) or life.settings.pinned or model.process.residency is None:
        return None
    if model.stays_because or not all(map(model.may_leave, model.batch.running.values())):
        return None
    return model.process.residency.ends_at(
        load_s=model.load_s, min_residency_s=settings.min_residency_s
    )


def _highest_class(model: Model) -> Priority | None:
    """Return the highest class of what it runs, as it was asked for; None if it runs nothing."""
    classes = (request.priority for request in model.batch.running.values())
    return min(classes, key=lambda one: one.rank, default=None)
