"""Planted bugs: models that take turns."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("swaps: at once", "swapping", "lack.asked_since + settings.swap_after_s",
        "lack.asked_since"),
    bug("swaps: never", "loading",
        "                    self._swap(model, swap)\n                    return\n",
        "                    return\n"),
    bug("swaps: late", "swapping", "lack.asked_since + settings.swap_after_s",
        "lack.asked_since + 1000 * settings.swap_after_s"),
    bug("swaps: a lower class makes others go", "swapping",
        "priority=wants or Priority.BATCH", "priority=Priority.INTERACTIVE"),
    bug("swaps: what must run through is interrupted", "swapping",
        "not all(one.may_resume for one in running)", "False"),
    bug("swaps: pinned models make room", "swapping", "or life.settings.pinned or", "or"),
    bug("swaps: a turn lasts no time", "memory.residency",
        "return self.began_at + max(min_residency_s, RESIDENCY_LOADS * cost_s)",
        "return self.began_at"),
    bug("swaps: rows run on", "lifecycle.on_swap", 
        "    life.do(RowsLeave(reason=PauseReason.SWAP))\n", ""),
    bug("swaps: killed without a word", "lifecycle.on_swap",
        "StopCause.SWAP, now, stage=StopStage.ASK", "StopCause.SWAP, now, stage=StopStage.KILL"),
    bug("swaps: who has made room returns for nobody", "loading",
        "if is_unwanted(model)]", "if False]"),
    bug("swaps: who has made room stops though somebody waits", "pending",
        "model.urgency is Urgency.NOBODY and not model.paused\n", "True\n"),
)  # fmt: skip
