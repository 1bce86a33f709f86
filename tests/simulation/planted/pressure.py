"""Planted bugs: memory that others need."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("pressure: nobody goes", "loading",
        "names = give_back(self._residents.values(), budget_bytes=kept_bytes)", "names = ()"),
    bug("pressure: nobody goes while others need memory", "memory.budget",
        "return self.size_bytes if self.is_short else self.whole_bytes",
        "return self.whole_bytes"),
    bug("pressure: who is idle goes although memory is not short", "memory.budget",
        "return self.size_bytes if self.is_short else self.whole_bytes",
        "return self.size_bytes"),
    bug("pressure: nobody waits for what workers give back", "loading",
        
        "return any(model.is_giving_back(self._now) for model in self._models.values())",
        "return False"),
    bug("pressure: workers are asked each second", "giving_back",
        "now < model.asked_back_at + ASK_AGAIN_S:", "False:"),
    bug("pressure: the budget does not come back", "memory.pressure",
        "if now < before.calm_since + CALM_S:", "if True:"),
    bug("pressure: loads take what others hold", "loading",
        "self._budget = settings.budget\n",
        "self._budget = settings.budget and settings.budget.whole()\n"),
    bug("pressure: who must wait is refused", "memory.planner",
        "most_bytes = budget_bytes if whole_bytes is None else whole_bytes",
        "most_bytes = budget_bytes"),
    bug("pressure: the status does not say it", "status",
        '"effective_budget_bytes": budget.size_bytes',
        '"effective_budget_bytes": budget.whole_bytes'),
    bug("shortage: the last one that serves goes", "shortage", " or len(ready) < 2:", ":"),
)  # fmt: skip
