"""What models need: as the shell has appraised it, raised if their processes run out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import Wanted
from mlxsup.protocol.text import size_text

from .actions import NeedRaised
from .fleet import Fleet
from .kv_budget import planned_bytes
from .memory.need import Need, bounded, raised
from .model import Model
from .outbox import Outbox
from .status import change_map


class Appraising:
    """Gives each life what its next load is planned with.

    Args:
        fleet: the models; it keeps what they were appraised at.
        outbox: takes what the shell must remember, and what watchers hear of.
    """

    def __init__(self, fleet: Fleet, outbox: Outbox) -> None:
        self._fleet = fleet
        self._outbox = outbox

    def appraised(self, needs: Mapping[ModelName, Need]) -> None:
        """The shell has appraised the models of the configuration; this replaces what was known."""
        self._fleet.needs = needs
        self.settle()

    def relaunched(self, name: ModelName, need: Need | None) -> None:
        """One model was appraised for another launch than that of the configuration."""
        others = {one: known for one, known in self._fleet.needs.items() if one != name}
        self._fleet.needs = others if need is None else {**others, name: need}
        self.settle()

    def settle(self) -> None:
        """The needs, the budget, or who is pinned has changed."""
        needs, budget = self._fleet.needs, self._fleet.settings.budget
        if budget is not None:
            pinned = {model.name for model in self._fleet if _is_pinned(model)}
            needs = bounded(needs, pinned, budget.whole_bytes)
        self._fleet.memory_changed()
        for model in self._fleet:
            model.life.appraise(needs.get(model.name))
            self._fleet.touch(model)

    def exited(self, model: Model, exit_code: int | None, now: float) -> None:
        """The process of a model has ended, and what was known of it is not forgotten yet: if it
        ran out of memory, the next one has more."""
        need = model.life.need
        if exit_code != ExitCode.OUT_OF_MEMORY or need is None or model.life.is_outdated:
            return
        if model.name not in self._fleet.needs:
            return  # the files that it has loaded cannot be read, or a reload has removed it
        held_bytes = model.measured_bytes - model.process.reusable_bytes
        higher = raised(need, planned_bytes=planned_bytes(model), held_bytes=held_bytes)
        if higher.raised_bytes == need.raised_bytes:
            return
        self._fleet.needs = {
            **self._fleet.needs,
            model.name: replace(higher, most_bytes=None),
        }
        self.settle()
        remember = NeedRaised(
            model=model.name, launch=model.life.launch, raised_bytes=higher.raised_bytes
        )
        self._outbox.add(remember)
        note = (
            f"it ran out of memory, so a load now reserves {size_text(higher.needed_bytes)}, "
            f"which is {size_text(higher.raise_for(0))} more than estimated"
        )
        model.life.story.append(f"{now:.3f} {note}")
        self._outbox.announce(change_map(model, model.life.state, note))


def _is_pinned(model: Model) -> bool:
    return model.life.settings.pinned and model.life.wanted is not Wanted.GONE
