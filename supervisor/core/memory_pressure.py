"""Makes room when there is less memory than is in use: others need it, or a process has grown.

First workers give back what they keep for reuse, then idle models are evicted, then `batch` rows
leave, and at last busy models are swapped out (`memory_plan.py`).

The budget is lowered at once and raised after ten calm seconds in small steps, so that it does not
follow every change.
"""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.states import State
from mlxsup.protocol.text import size_text

from .actions import BudgetChanged
from .fleet import Fleet
from .kv_budget import ask_back
from .memory.budget import Budget, Reading, Squeeze, room_bytes, squeezed
from .memory_view import overshoot_bytes
from .model import ASK_AGAIN_S, Model
from .outbox import Outbox
from .settings import CoreSettings
from .status import change_map

LEAST_SHARE = 100
"""What a worker keeps is asked for if it is at least this part of what is missing."""


class MemoryPressure:
    """Follows what is measured of the machine's memory.

    Args:
        fleet: the models; its settings hold the budget.
        outbox: takes what workers are sent.
    """

    def __init__(self, fleet: Fleet, outbox: Outbox) -> None:
        self._fleet = fleet
        self._outbox = outbox
        self._squeeze = Squeeze()

    def sampled(self, reading: Reading | None, now: float) -> None:
        """Memory was measured, and the footprints have been entered."""
        budget = self._fleet.settings.budget
        if budget is None:
            return
        held_bytes = sum(model.held_bytes for model in self._fleet)
        room = room_bytes(reading, held_bytes)
        self._squeeze = squeezed(self._squeeze, room, budget.whole_bytes, now)
        changed = self._lowered(budget, reading)
        if changed != budget:
            self._fleet.settings = replace(self._fleet.settings, budget=changed)
            self._fleet.look_at_all()
        if changed.size_bytes != budget.size_bytes:
            self._outbox.add(BudgetChanged(budget=changed))
        self._ask(changed, now)

    def after_reload(self, settings: CoreSettings) -> CoreSettings:
        """The settings that were read, with as much of their budget as there is now."""
        if settings.budget is None:
            return settings
        before, limit_bytes = self._fleet.settings.budget, self._squeeze.limit_bytes
        if before is None or limit_bytes is None or limit_bytes >= settings.budget.whole_bytes:
            self._squeeze = Squeeze()
            return settings
        budget = settings.budget.lowered(limit_bytes, before.shortage, is_short=before.is_short)
        return replace(settings, budget=budget)

    # ------------------------------------------------------------ inside

    def _lowered(self, budget: Budget, reading: Reading | None) -> Budget:
        limit_bytes = self._squeeze.limit_bytes
        if limit_bytes is None or reading is None:
            return budget.whole()
        is_new = limit_bytes != budget.size_bytes
        shortage = reading.shortage if is_new else budget.shortage
        return budget.lowered(limit_bytes, shortage, is_short=reading.free_bytes < 0)

    def _ask(self, budget: Budget, now: float) -> None:
        missing_bytes = overshoot_bytes(self._fleet, budget)
        if missing_bytes == 0:
            return
        self._fleet.look_at_all()
        reserved_bytes = budget.kept_bytes + missing_bytes
        asked = [model for model in self._fleet if _may_give(model, missing_bytes, now)]
        ask_back(asked, self._outbox, now)
        for model in asked:
            note = (
                f"asked to give back {size_text(model.reusable_bytes)} kept for reuse:"
                f" {size_text(reserved_bytes)} of {size_text(budget.kept_bytes)} are reserved"
            )
            self._outbox.announce(change_map(model, model.life.state, note))


def _may_give(model: Model, missing_bytes: int, now: float) -> bool:
    if model.life.state is not State.READY or now < model.asked_back_at + ASK_AGAIN_S:
        return False
    return model.reusable_bytes > 0 and model.reusable_bytes * LEAST_SHARE >= missing_bytes
