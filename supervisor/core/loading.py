"""Decides which model may load: one load at a time, within the memory budget.

`next_steps` looks at everybody who waits for a load, in order, and returns triggers: turns,
refusals, and evictions that make room. It remembers nothing: who waits for memory, since when and
why, is part of the phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Wanted
from mlxsup.protocol.text import size_text

from .errors import does_not_fit
from .lifecycle.states import Abandoned, Draining, Pending, Ready, StopCause, Stopping
from .lifecycle.triggers import Evicted, HasMemory, LacksMemory, NoMemory, Trigger, Turn
from .memory.planner import (
    FIXED,
    Admit,
    Evict,
    Refuse,
    Resident,
    Standing,
    Urgency,
    Verdict,
    Wait,
    Wish,
    give_back,
    plan,
)
from .model import Model
from .settings import CoreSettings

PATIENCE_S = 20.0
"""A model that has waited for so long is only passed by loads that leave it room."""

RESIDENCY_LOADS = 3.0
"""A request evicts no model that was READY for less than this many times its load."""

Steps = list[tuple[Model, Trigger]]
"""What happens to which model, in this order."""


def next_steps(models: Iterable[Model], settings: CoreSettings, now: float) -> Steps:
    """The turns, evictions and refusals that are due now."""
    everybody = list(models)
    waiting = [model for model in everybody if isinstance(model.life.phase, Pending)]
    if not waiting and _is_within(everybody, settings):
        return []
    desk = _Desk(everybody, settings, now)
    for model in sorted(waiting, key=_order):
        desk.weigh(model)
    desk.give_back()
    return desk.steps


def foresee(model: Model, models: Iterable[Model], settings: CoreSettings, now: float) -> Verdict:
    """What a load command for this model would lead to now; nothing changes."""
    if settings.budget is None:
        return Admit()
    others = [_resident(one, settings) for one in models if one is not model and _has_memory(one)]
    wish = Wish(name=model.name, needed_bytes=model.life.needed_bytes, urgency=Urgency.COMMAND)
    return plan(wish, others, budget_bytes=settings.budget.size_bytes, now=now)


class _Desk:
    """One look at all models.

    Attributes:
        steps: what has been decided.

    Args:
        models: every model.
        settings: the budget, and how long a model may stay.
        now: monotonic seconds.
    """

    def __init__(self, models: list[Model], settings: CoreSettings, now: float) -> None:
        self.steps: Steps = []
        self._now = now
        self._budget_bytes = settings.budget.size_bytes if settings.budget else None
        self._models = {model.name: model for model in models}
        self._residents = {m.name: _resident(m, settings) for m in models if _has_memory(m)}
        loading = [model.life for model in models if model.life.is_loading]
        # A load after a crash only waits for others of its kind, so that a model that was serving
        # comes back without waiting for one that never was; every other load waits for all.
        self._is_open = not loading
        self._is_open_after_crash = not any(life.is_after_crash for life in loading)
        self._may_evict = True
        self._promised_bytes = 0

    def weigh(self, model: Model) -> None:
        """Decides about a model that waits for a load."""
        phase = _pending(model)
        is_open = self._is_open_after_crash if phase.is_after_crash else self._is_open
        match self._verdict(model):
            case Admit() if is_open:
                self._let_in(model)
            case Evict(models=names, reason=reason) if is_open and self._may_evict:
                needed = size_text(model.life.needed_bytes)
                self._evict(names, f" for {model.name}, which needs {needed}")
                self._lacks(model, Wait(reason=reason, is_under_way=True))
            case Admit() | Evict():
                if phase.lack is not None:
                    self.steps.append((model, HasMemory()))
            case Wait() as wait:
                self._lacks(model, wait)
            case Refuse() as refusal:
                self._refuse(model, refusal)

    def give_back(self) -> None:
        """Evicts idle models if more is reserved than the budget allows."""
        if self._budget_bytes is None:
            return
        names = give_back(self._residents.values(), budget_bytes=self._budget_bytes)
        reserved_bytes = sum(resident.reserved_bytes for resident in self._residents.values())
        sizes = f"{size_text(reserved_bytes)} of {size_text(self._budget_bytes)}"
        self._evict(names, f", because {sizes} are reserved")

    # ------------------------------------------------------------ inside

    def _verdict(self, model: Model) -> Verdict:
        if self._budget_bytes is None:
            return Admit()
        needed_bytes = model.life.needed_bytes
        wish = Wish(name=model.name, needed_bytes=needed_bytes, urgency=model.urgency)
        others = [resident for name, resident in self._residents.items() if name != model.name]
        verdict = plan(wish, others, budget_bytes=self._budget_bytes, now=self._now)
        fixed_bytes = sum(r.reserved_bytes for r in others if r.standing in FIXED)
        leaves_room = fixed_bytes + needed_bytes + self._promised_bytes <= self._budget_bytes
        is_back = needed_bytes <= model.life.reserved_bytes  # after a crash or a restart
        if isinstance(verdict, Admit | Evict) and not (leaves_room or is_back):
            return Wait(reason=f"needs {size_text(needed_bytes)}: another has waited longer")
        return verdict

    def _let_in(self, model: Model) -> None:
        self.steps.append((model, Turn()))
        self._is_open = False
        if _pending(model).is_after_crash:
            self._is_open_after_crash = False
        self._hold(model)

    def _lacks(self, model: Model, wait: Wait) -> None:
        phase = _pending(model)
        lack = phase.lack
        if lack is None or (lack.reason, lack.looks_again_at) != (wait.reason, wait.until):
            trigger = LacksMemory(reason=wait.reason, looks_again_at=wait.until)
            self.steps.append((model, trigger))
        if wait.is_under_way:  # what is being freed is for this model
            self._may_evict = False
            self._hold(model)
            return
        if not model.life.settings.pinned:
            self._residents.pop(model.name, None)
        if model.urgency is not Urgency.NOBODY and self._now >= phase.since + PATIENCE_S:
            self._promised_bytes += model.life.needed_bytes

    def _refuse(self, model: Model, refusal: Refuse) -> None:
        assert self._budget_bytes is not None
        error = does_not_fit(
            model.name,
            refusal.reason,
            needed_bytes=model.life.needed_bytes,
            budget_bytes=self._budget_bytes,
            blockers=refusal.blockers,
        )
        self.steps.append((model, NoMemory(reason=refusal.reason, error=error)))
        if not model.life.settings.pinned:
            self._residents.pop(model.name, None)

    def _hold(self, model: Model) -> None:
        """The others see the memory of this model as taken."""
        standing = Standing.PINNED if model.life.settings.pinned else Standing.BUSY
        needed_bytes = model.life.needed_bytes
        self._residents[model.name] = Resident(
            name=model.name, reserved_bytes=needed_bytes, standing=standing
        )

    def _evict(self, names: Iterable[ModelName], why: str) -> None:
        for name in names:
            model = self._models[name]
            idle_s = self._now - model.idle_since
            reason = f"evicted{why}; it was idle for {idle_s:.0f} s"
            self.steps.append((model, Evicted(reason=reason)))
            self._residents[name] = replace(self._residents[name], standing=Standing.LEAVING)


def _is_within(models: list[Model], settings: CoreSettings) -> bool:
    if settings.budget is None:
        return True
    return sum(model.life.reserved_bytes for model in models) <= settings.budget.size_bytes


def _order(model: Model) -> tuple[bool, bool, float, bool]:
    """Models that crashed first, then those that somebody waits for, the longest wait first; of
    two that came at the same moment, the one that has been found to lack memory."""
    phase = _pending(model)
    is_for_nobody = model.urgency is Urgency.NOBODY
    return not phase.is_after_crash, is_for_nobody, phase.since, phase.lack is None


def _pending(model: Model) -> Pending:
    phase = model.life.phase
    assert isinstance(phase, Pending)
    return phase


def _has_memory(model: Model) -> bool:
    return model.life.reserved_bytes > 0


def _resident(model: Model, settings: CoreSettings) -> Resident:
    phase = model.life.phase
    ready_since = phase.since if isinstance(phase, Ready) else 0.0
    residency_s = max(settings.min_residency_s, RESIDENCY_LOADS * model.load_s)
    return Resident(
        name=model.name,
        reserved_bytes=model.life.reserved_bytes,
        standing=_standing(model),
        used_at=model.idle_since,
        ripe_at=min(model.idle_since + model.load_s, ready_since + residency_s),
    )


def _standing(model: Model) -> Standing:
    life, phase = model.life, model.life.phase
    if isinstance(phase, Abandoned):
        return Standing.STUCK
    is_ending = isinstance(phase, Draining | Stopping)
    if is_ending and life.wanted is Wanted.GONE:
        return Standing.LEAVING
    if life.settings.pinned:
        return Standing.PINNED
    if is_ending and life.wanted is Wanted.DOWN:
        return Standing.LEAVING
    if isinstance(phase, Stopping) and phase.cause is StopCause.ASKED and not phase.is_restart:
        return Standing.LEAVING  # it is wanted again, and starts from nothing
    return Standing.IDLE if isinstance(phase, Ready) and model.is_idle else Standing.BUSY
