"""Planted bugs: spare workers."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("spares: one is used twice", "spares",
        "return self._spares.pop(spare.number).number", "return spare.number"),
    bug("spares: none is ever used", "spares", "return next(waiting, None)", "return None"),
    bug("spares: any engine uses them", "spares",
        "if model.life.settings.launch.engine != ENGINE:\n            return None",
        "if False:\n            return None"),
    bug("spares: one that is not ready is used", "spares",
        "if s.state is SpareState.WAITING)", "if not _is_ending(s))"),
    bug("spares: they do not count", "spares", "if held_bytes <= left_bytes:", "if True:"),
    bug("spares: started next to a load", "spares", "model.life.is_loading or ", ""),
    bug("spares: started before a model that needs the memory", "spares",
        " or _waits_for_somebody(model)", ""),
    bug("spares: started without room", "spares",
        "<= settings.budget.size_bytes", "<= 2 * settings.budget.size_bytes"),
    bug("spares: never replaced", "spares", "if len(staying) < wanted and",
        "if self._started < wanted and"),
    bug("spares: replaced at once", "spares", "self._retry_at = now + delay_s",
        "self._retry_at = now"),
    bug("spares: one too many", "spares", "if len(staying) < wanted and",
        "if len(staying) <= wanted and"),
    bug("spares: they outlive the daemon's end", "spares",
        "if _are_of_use(everybody) and not is_ending else 0",
        "if _are_of_use(everybody) else 0"),
)  # fmt: skip
