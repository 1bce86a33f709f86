"""Planted bugs: what concerns several models."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("a process that cannot be ended is waited for", "fleet",
        "phase.is_last and model.life.pid is not None", "False"),
    bug("the second signal is ignored", "fleet",
        "if is_immediate and (was_stopping or", "if False and (was_stopping or"),
    bug("fleet: who waits for a failed load waits on", "fleet",
        "self._endings.fail_queue(model, error, now)", "pass"),
    bug("a row that ends wakes no other model", "fleet", "if self._serving.ledger.take_freed():",
        "if False:"),
)  # fmt: skip
