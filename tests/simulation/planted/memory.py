"""Planted bugs: memory and loads."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("loading: side by side", "load_turns", "self._free = most - len(loading)",
        "self._free = 9"),
    bug("loading: one more than may load", "load_turns", "self._free = most - len(loading)",
        "self._free = most + 1 - len(loading)"),
    bug("loading: one at a time, whatever is allowed", "load_turns",
        "self._free = most - len(loading)", "self._free = 1 - len(loading)"),
    bug("loading: after a crash it waits for all", "load_turns",
        "self._free_after_crash if is_after_crash else self._free)", "self._free)"),
    bug("residents: busy models are evicted", "residents",
        "isinstance(phase, Ready) and model.is_idle else", "isinstance(phase, Ready) else"),
    bug("residents: pinned models are evicted", "residents",
        "if life.settings.pinned:\n        return Standing.PINNED",
        "if False:\n        return Standing.PINNED"),
    bug("residents: what rows of a pinned model take never comes back", "residents",
        "return lasting_bytes(model, now) if standing is Standing.PINNED else 0",
        "return model.life.reserved_bytes if standing is Standing.PINNED else 0"),
    bug("planner: the budget is ignored", "memory.planner",
        "if wish.needed_bytes <= free_bytes:", "if True:"),
    bug("planner: requests evict whom they like", "memory.planner",
        "resident.ripe_at <= now", "True"),
    bug("given: too little is enough", "memory.given",
        "if need.given_bytes is None:\n        return \"\"", "if True:\n        return \"\""),
    bug("given: enough is too little", "memory.given",
        "if need.given_bytes >= least_bytes:", "if False:"),
    bug("room: what is reserved does not count", "memory.room",
        "free = budget_bytes - sum(reserved.values())", "free = budget_bytes"),
)  # fmt: skip
