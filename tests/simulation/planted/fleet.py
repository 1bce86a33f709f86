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
    bug("nobody looks for loads again", "load_looks",
        "return True\n", "return False\n"),
    bug("what changes who may load is not looked at", "load_looks",
        "self._is_due |= self._head_room.is_stirred", "pass"),
    bug("a row that ends wakes no other model", "fleet", "if self._serving.ledger.take_freed():",
        "if False:"),
)  # fmt: skip
