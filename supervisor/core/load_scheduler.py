"""Decides which models may load: `parallel_loads` at a time, within the memory budget.

`next_steps` looks at all models that wait for a load, in order, and returns triggers: turns,
refusals, and evictions that make room. It remembers nothing: which models wait for memory, since
when and why, is part of the phase. `Fleet` asks it when anything has changed that this depends on,
and for as long as a model waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Why
from mlxsup.protocol.text import size_text

from .errors import does_not_fit
from .lifecycle.states import Lack, Pending, Shortage, Swapping
from .lifecycle.triggers import (
    Evicted,
    FilesDoubted,
    HasMemory,
    LacksMemory,
    NoMemory,
    SwapCalledOff,
    SwappedOut,
    Trigger,
    Turn,
    WantDown,
)
from .loaded_models import loaded_models
from .memory.planner import (
    Admit,
    Evict,
    GiveBack,
    LoadedModel,
    Refuse,
    Standing,
    Swap,
    Urgency,
    Verdict,
    Wait,
    give_back,
    needs,
    plan,
)
from .model import Model
from .preemption import are_rows_leaving, who_gives_way
from .requests.queue import MayRun
from .settings import CoreSettings
from .swapping import (
    goes_for_shortage,
    highest_class,
    is_still_wanted,
    lasts,
    load_request_of,
    must_be_compared,
    place_in_line,
    shortage_text,
)
from .warm_pool import WarmPool


def pending(model: Model) -> Pending:
    """The phase of a model that waits for a load."""
    phase = model.life.phase
    assert isinstance(phase, Pending)
    return phase


def waits_for_load(model: Model) -> bool:
    """True if it waits for a turn or for memory, and not for its files."""
    return isinstance(model.life.phase, Pending) and model.life.settings.download is None


def is_unwanted(model: Model) -> bool:
    """True if it only waits because it has made room, and no request waits for it: like an
    evicted one, it loads with its next request."""
    is_for_nobody = model.urgency is Urgency.NOBODY and not model.paused
    return model.life.why is Why.SWAP and is_for_nobody


def turn_order(model: Model) -> tuple[bool, bool, bool, float, bool]:
    """Models that crashed first, then the one that others are swapped out for, then those that
    somebody waits for, the longest wait first; of two that came at the same moment, the one that
    has been found to lack memory."""
    phase = pending(model)
    is_promised = phase.lack is not None and phase.lack.is_promised
    is_for_nobody = model.urgency is Urgency.NOBODY
    return not phase.is_after_crash, not is_promised, is_for_nobody, phase.since, phase.lack is None


def wait_for(verdict: GiveBack) -> Wait:
    """Return what a model waits for if others give back enough without going."""
    return Wait(reason=verdict.reason, is_under_way=True, takes_spare=True)


def as_trigger(lack: Lack) -> LacksMemory:
    """Return what a model was last told that it lacks."""
    return LacksMemory(
        reason=lack.reason,
        looks_again_at=lack.looks_again_at,
        is_asked_for=lack.asked_since is not None,
        is_promised=lack.is_promised,
        takes_spare=lack.takes_spare,
    )


PATIENCE_S = 20.0
"""A model that has waited for so long is only passed by loads that leave it room."""

Steps = list[tuple[Model, Trigger]]
"""What happens to which model, in this order."""


def next_steps(
    models: Iterable[Model],
    warm_pool: WarmPool,
    settings: CoreSettings,
    may_run: MayRun,
    now: float,
) -> Steps | None:
    """The turns, evictions, swaps and refusals that are due now; ends prewarmed workers in the way.

    Args:
        models: every model.
        warm_pool: the prewarmed workers.
        settings: the budget, and how long a model may stay.
        may_run: whether an account may have one more request running.
        now: monotonic seconds.

    Returns:
        None if nobody waits or makes room and no more is reserved than there is, so that there is
        nothing to decide before that changes.
    """
    everybody = list(models)
    waiting = [model for model in everybody if waits_for_load(model)]
    swapping = [model for model in everybody if isinstance(model.life.phase, Swapping)]
    if not (waiting or swapping) and _is_within(everybody, warm_pool, settings):
        return None
    round_ = _Round(everybody, warm_pool, settings, may_run, now)
    for model in swapping:
        round_.call_off(model)
    unwanted = [model for model in waiting if is_unwanted(model)]
    round_.steps += [(model, WantDown(why=Why.EVICT, drain_s=0.0)) for model in unwanted]
    waiting = [model for model in waiting if model not in unwanted]
    for model in sorted(waiting, key=turn_order):
        round_.decide(model)
    round_.swap(waiting)
    round_.give_back()
    if not round_.rows_give_way():
        round_.swap_for_shortage()
    return round_.steps


class _Round:
    """One look at all models.

    Attributes:
        steps: what has been decided.

    Args:
        models: every model.
        warm_pool: the prewarmed workers, which go before any model does.
        settings: the budget, and how long a model may stay.
        may_run: whether an account may have one more request running.
        now: monotonic seconds.
    """

    def __init__(
        self,
        models: list[Model],
        warm_pool: WarmPool,
        settings: CoreSettings,
        may_run: MayRun,
        now: float,
    ) -> None:
        self.steps: Steps = []
        self._warm_pool = warm_pool
        self._now = now
        self._settings = settings
        self._may_run = may_run
        self._budget = settings.budget
        self._models = {model.name: model for model in models}
        self._loaded = {one.name: one for one in loaded_models(models, settings, now)}
        # A load holds a turn from its spawn to READY or to its exit. One after a crash only waits
        # for others of its kind, so that a model that was serving comes back without waiting for
        # one that never was; every other load waits for all.
        loading = [model.life for model in models if model.life.is_loading]
        self._free_turns = settings.parallel_loads - len(loading)
        self._free_turns_after_crash = settings.parallel_loads - sum(
            life.is_after_crash for life in loading
        )
        self._may_evict = True
        self._promised_bytes = 0

    def call_off(self, model: Model) -> None:
        """Let a model stay whose rows leave, if what they leave for no longer needs them to."""
        phase = model.life.phase
        assert isinstance(phase, Swapping)
        if isinstance(phase.cause, Shortage):
            must_go = lasts(phase.cause, self._models, self._loaded, self._budget)
        else:
            target = self._models.get(phase.cause)
            must_go = (
                target is not None
                and is_still_wanted(phase, target, self._may_run)
                and not isinstance(self._verdict(target), Admit)
            )
        if not must_go:
            self.steps.append((model, SwapCalledOff()))
            one = self._loaded[model.name]
            self._loaded[model.name] = replace(one, standing=Standing.BUSY)

    def decide(self, model: Model) -> None:
        """Decide about a model that waits for a load."""
        phase = pending(model)
        turns = self._free_turns_after_crash if phase.is_after_crash else self._free_turns
        is_open = turns > 0
        match self._verdict(model):
            case Admit() if is_open and not self._fits_with_warm_pool(model):
                self._lacks(model, Wait(reason=self._short_of(model), is_under_way=True))
            case Admit() if is_open:
                self._let_in(model)
            case GiveBack() as verdict if is_open:
                self._lacks(model, wait_for(verdict))
            case Evict(models=names, reason=reason, takes_spare=takes_spare) if (
                is_open and self._may_evict
            ):
                needed = size_text(model.life.needed_bytes)
                self._evict(names, f" for {model.name}, which needs {needed}")
                wait = Wait(reason=reason, is_under_way=True, takes_spare=takes_spare)
                self._lacks(model, wait)
            case Admit() | GiveBack() | Evict() if phase.lack is not None:
                if phase.lack.is_promised:
                    needed = size_text(model.life.needed_bytes)
                    reason = f"needs {needed}, which is kept for it: other models load first"
                    self._lacks(model, Wait(reason=reason, is_under_way=True))
                else:
                    self.steps.append((model, HasMemory()))
            case Swap(models=names, reason=reason) if not self._settings.swap:
                why = f"{reason}, and busy models do not make room because `swap` is off"
                self._refuse(model, Refuse(reason=why, blockers=names))
            case Swap(reason=reason):  # unless it is next: see `swap`
                self._lacks(model, Wait(reason=f"{reason}, and another model is next"))
            case Wait() as wait:
                self._lacks(model, wait)
            case Refuse() as refusal:
                self._refuse(model, refusal)

    def swap(self, waiting: Iterable[Model]) -> None:
        """Swap models out for whoever is first in line over all models, if that is due.

        Nobody behind it gets a turn before it, unless nothing that is known would make room for it.
        """
        if not (self._settings.swap and self._free_turns > 0 and self._may_evict):
            return  # or another one is on its way in
        places = [
            (place, model)
            for model in waiting
            if (
                place := place_in_line(
                    model, self._models.values(), self._settings, self._may_run, self._now
                )
            )
        ]
        for _, model in sorted(places, key=lambda pair: pair[0]):
            match self._verdict(model):
                case Swap() as swap:
                    if self._may_return(*(self._models[name] for name in swap.models)):
                        self._swap(model, swap)
                    return
                case Wait(swaps=names) if names:
                    return
                case _:
                    pass

    def give_back(self) -> None:
        """Evict idle models if more is reserved than the budget allows, and not just until workers
        have given back what they keep for reuse. Prewarmed workers go before them."""
        if self._budget is None:
            return
        # What a model waits for is held by now. Prewarmed workers stay if they fit once those that
        # leave for it are gone: it takes one over.
        kept_bytes = self._budget.kept_bytes
        everybody = self._loaded.values()
        leaving = [one for one in everybody if one.standing is Standing.LEAVING]
        leaving_bytes = sum(one.reserved_bytes for one in leaving)
        self._warm_pool.make_room(self._left_of(kept_bytes) + leaving_bytes, self._now)
        if self._is_giving_back():
            return
        names = give_back(self._loaded.values(), budget_bytes=kept_bytes)
        self._evict(names, f", because {shortage_text(self._loaded, self._budget)}")

    def rows_give_way(self) -> bool:
        """Has rows of the lowest class leave if that was not enough; returns whether any leave."""
        if self._budget is None or self._is_giving_back():
            return False
        if are_rows_leaving(self._models.values()):
            return True
        leaving = who_gives_way(self._models, self._loaded, self._budget)
        self.steps += [(self._models[name], trigger) for name, trigger in leaving.items()]
        return bool(leaving)

    def swap_for_shortage(self) -> None:
        """Swap a busy model out if no row leaves: what is there does not fit together."""
        if self._budget is None or not self._settings.swap or self._is_giving_back():
            return
        found = goes_for_shortage(self._models, self._loaded, self._budget, self._now)
        if found is not None and self._may_return(found[0]):
            victim, cause = found
            text = shortage_text(self._loaded, self._budget)
            self._swap_out(victim, cause, f"{cause.reason}: {text}")

    # ------------------------------------------------------------ inside

    def _verdict(self, model: Model) -> Verdict:
        if self._budget is None:
            return Admit()
        needed_bytes = model.life.needed_bytes
        request = load_request_of(model, self._settings, self._may_run)
        others = [one for name, one in self._loaded.items() if name != model.name]
        verdict = plan(
            request,
            others,
            budget_bytes=self._budget.size_bytes,
            whole_bytes=self._budget.whole_bytes,
            now=self._now,
        )
        fixed_bytes = sum(one.never_bytes for one in others)
        leaves_room = fixed_bytes + needed_bytes + self._promised_bytes <= self._budget.size_bytes
        is_back = needed_bytes <= model.life.reserved_bytes  # after a crash or a restart
        if isinstance(verdict, Admit | GiveBack | Evict) and not (leaves_room or is_back):
            return Wait(reason=f"needs {size_text(needed_bytes)}; another model has waited longer")
        return verdict

    def _let_in(self, model: Model) -> None:
        self.steps.append((model, Turn(prewarmed=self._warm_pool.hand_over(model))))
        self._free_turns -= 1
        self._free_turns_after_crash -= pending(model).is_after_crash
        self._hold(model)

    def _fits_with_warm_pool(self, model: Model) -> bool:
        """True if there is room without ending any prewarmed worker; those in the way are ended."""
        if self._budget is None:
            return True
        left_bytes = self._left_bytes(model) - model.life.needed_bytes
        return self._warm_pool.make_room(left_bytes, self._now, for_whom=model)

    def _short_of(self, model: Model) -> str:
        free_bytes = self._left_bytes(model) - self._warm_pool.reserved_bytes
        return f"{needs(model.life.needed_bytes, free_bytes)}: prewarmed workers are about to go"

    def _left_bytes(self, model: Model) -> int:
        """Return what the models, without this one, leave of the budget."""
        assert self._budget is not None
        return self._left_of(self._budget.size_bytes, model)

    def _left_of(self, size_bytes: int, model: Model | None = None) -> int:
        others = (r for r in self._loaded.values() if model is None or r.name != model.name)
        return size_bytes - sum(one.reserved_bytes for one in others)

    def _swap(self, model: Model, swap: Swap) -> None:
        lack = pending(model).lack
        waits_s = self._now - (lack.since if lack else self._now)
        needed = size_text(model.life.needed_bytes)
        self._evict(swap.evicted, f" for {model.name}, which needs {needed}")
        for name in swap.models:
            why = f"for {model.name}, which needs {needed} and has waited for {waits_s:.0f} s"
            self._swap_out(self._models[name], model.name, why)
        under_way = self._verdict(model)
        if isinstance(under_way, GiveBack):
            under_way = wait_for(under_way)
        assert isinstance(under_way, Wait), under_way
        self._lacks(model, under_way, is_promised=True)

    def _swap_out(self, victim: Model, cause: ModelName | Shortage, why: str) -> None:
        ready_s = self._now - victim.life.phase.since
        trigger = SwappedOut(
            cause=cause,
            ran=highest_class(victim),
            leave_s=self._settings.drain_timeout_s,
            reason=f"swapped out {why}; it had its turn for {ready_s:.0f} s",
        )
        self.steps.append((victim, trigger))
        one = self._loaded[victim.name]
        self._loaded[victim.name] = replace(one, standing=Standing.LEAVING)

    def _may_return(self, *victims: Model) -> bool:
        """True if the files of these models are known to be what they have loaded; if nobody has
        looked lately, that is done first."""
        doubted = [one for one in victims if must_be_compared(one, self._now)]
        unseen = [one for one in doubted if not one.life.files.is_being_seen]
        self.steps += [(one, FilesDoubted()) for one in unseen]
        return not doubted

    def _is_giving_back(self) -> bool:
        return any(model.is_giving_back(self._now) for model in self._models.values())

    def _lacks(self, model: Model, wait: Wait, *, is_promised: bool = False) -> None:
        phase = pending(model)
        lack = phase.lack
        if lack is not None and lack.is_promised and model.urgency is not Urgency.NOBODY:
            is_promised = wait.is_under_way
        trigger = LacksMemory(
            reason=wait.reason,
            looks_again_at=wait.until,
            is_asked_for=model.urgency is not Urgency.NOBODY,
            is_promised=is_promised,
            takes_spare=wait.takes_spare,
        )
        if lack is None or trigger != as_trigger(lack):
            self.steps.append((model, trigger))
        if wait.is_under_way:  # what is being freed is for this model
            self._may_evict = False
            self._hold(model)
            return
        if not model.life.settings.pinned:
            self._loaded.pop(model.name, None)
        if model.urgency is not Urgency.NOBODY and self._now >= phase.since + PATIENCE_S:
            self._promised_bytes += model.life.needed_bytes

    def _refuse(self, model: Model, refusal: Refuse) -> None:
        assert self._budget is not None
        error = does_not_fit(
            model.name,
            refusal.reason,
            needed_bytes=model.life.needed_bytes,
            budget_bytes=self._budget.whole_bytes,
            blockers=refusal.blockers,
        )
        self.steps.append((model, NoMemory(reason=refusal.reason, error=error)))
        if not model.life.settings.pinned:
            self._loaded.pop(model.name, None)

    def _hold(self, model: Model) -> None:
        """The others see the memory of this model as taken."""
        standing = Standing.PINNED if model.life.settings.pinned else Standing.BUSY
        needed_bytes = model.life.needed_bytes
        self._loaded[model.name] = LoadedModel(
            name=model.name,
            reserved_bytes=needed_bytes,
            standing=standing,
            never_bytes=model.life.pinned_bytes,
        )

    def _evict(self, names: Iterable[ModelName], why: str) -> None:
        for name in names:
            model = self._models[name]
            idle_s = self._now - model.idle_since
            reason = f"evicted{why}; it was idle for {idle_s:.0f} s"
            self.steps.append((model, Evicted(reason=reason)))
            self._loaded[name] = replace(self._loaded[name], standing=Standing.LEAVING)


def _is_within(models: list[Model], warm_pool: WarmPool, settings: CoreSettings) -> bool:
    if settings.budget is None:
        return True
    reserved_bytes = sum(model.life.reserved_bytes for model in models) + warm_pool.reserved_bytes
    return reserved_bytes <= settings.budget.kept_bytes
