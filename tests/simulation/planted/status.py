"""Planted bugs: what is said of models and queues."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("queue_status: who runs does not", "queue_status", '"running": running.get(account, 0),',
        '"running": 0,'),
    bug("forecast: what lacks files fits", "forecast",
        "if model.life.settings.download is not None:", "if False:"),
    bug("forecast: what is loaded is to be loaded", "forecast",
        "if model.life.state in (State.LOADING, State.READY):", "if False:"),
    bug("status: nobody waits", "status", '"queued": len(model.queue)', '"queued": 0'),
)  # fmt: skip
