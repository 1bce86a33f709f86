"""Planted bugs: what the flight recorder says of deaths and ends."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("last_moments: everybody continues", "last_moments",
        "fate=outcomes.get(request.key, waits)", "fate=waits"),
    bug("last_moments: looked at too late", "last_moments",
        "running=list(model.running.values())", "running=list(model.running.values())[1:]"),
    bug("last_moments: an end that was asked for hits nobody", "last_moments",
        "if entry.rows or entry.reason", "if entry.reason"),
    bug("flight_entries: every end is a stop", "flight_entries",
        "outcome=outcome,", 'outcome="stop",'),
    bug("endings: who is gone has no end", "endings",
        "self._outbox.record(ended, now)", "outcome == GONE or self._outbox.record(ended, now)"),
)  # fmt: skip
