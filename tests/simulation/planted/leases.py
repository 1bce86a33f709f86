"""Planted bugs: turns of long prompts."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("the lease of a worker that ends stays out", "leasing", "before.leases.drop(name)", "pass"),
    bug("workers never hear that leases are needed", "leasing",
        "if was_told != are_needed:", "if False:"),
    bug("a lease more than there are", "sharing.leases",
        "max(limit - len(self._in(Stage.HOLDS)), 0)",
        "max(limit + 1 - len(self._in(Stage.HOLDS)), 0)"),
    bug("who asked last reads first", "sharing.leases",
        "(rank(name), self._parts[name].order)", "(rank(name), -self._parts[name].order)"),
    bug("an engine that has got its lease is not at work", "leasing",
        "self._meter.works(model, now)", "pass"),
    bug("turns have no class", "sharing.leases",
        "(rank(name), self._parts[name].order)", "self._parts[name].order"),
    bug("an answer that streams lends its class to a turn", "leasing",
        "for one in reading or running)", "for one in running)"),
    bug("a lease that has ended is granted to nobody", "leasing",
        "device.leases.is_over(name, now)", "False"),
    bug("leases never end", "sharing.leases",
        "if part.stage is Stage.HOLDS and part.until <= now:", "if False:"),
)  # fmt: skip
