"""Planted bugs: suspicion, stalls and deaths."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("everybody convicted at the first crash", "health.blame",
        "if len(held) == 1 and self.is_due(held[0]):", "if True:"),
    bug("suspects never take turns", "health.blame",
        "suspect.is_on_probation = bool(suspect.places)", "pass"),
    bug("turns last for ever", "health.blame", "if one.tokens < place + PROBATION_TOKENS]", "]"),
    bug("turns in company", "suspects", "return None if model.held else turns.due[0]",
        "return turns.due[0]"),
    bug("newcomers wait for all turns", "suspects",
        "if model.lets_newcomers_in:", "if False:"),
    bug("a broken engine is never found", "health.blame",
        "if len(self._in_a_row) >= MAX_QUARANTINES_IN_A_ROW:", "if False:"),
    bug("quarantines stay in the status", "health.blame", "if now >= until]:", "if False]:"),
    bug("long prompts taken for stalls", "health.watchdog",
        "return self.progress_at + step_timeout_s + PREDICTIONS * self.predicted_s",
        "return self.progress_at + step_timeout_s"),
    bug("stalls are never found", "health.watchdog", "return Alarm.STUCK", "return Alarm.NONE"),
    bug("lost rows are never found", "health.watchdog",
        "if given and (self.lost or self._waits_in_vain(step_timeout_s)):", "if False:"),
    bug("dead connections are never found", "health.watchdog",
        "return Alarm.BROKEN if now >= self.unlinked_at + UNLINKED_S else Alarm.NONE",
        "return Alarm.NONE"),
    bug("death_cause: none is known", "health.death_cause", "if exit_code == code:", "if False:"),
    bug("suspects: who is not due waits", "suspects",
        "return next((r for r in turns.waiting if r not in turns.due), None)", "return None"),
    bug("watchdog: stopped processes stay", "health.watchdog", "return Alarm.STOPPED",
        "return Alarm.NONE"),
    bug("a restart leaves quarantines", "health.blame",
        "        self._quarantined.clear()\n        self._in_a_row.clear()",
        "        self._in_a_row.clear()"),
    bug("lowered rows never come back", "health.blame", "if now >= self._rows_until:", "if False:"),
    bug("who waits for its turn is stuck", "health.watchdog",
        "return None if self.is_held_up or self.beat_at < due_at else due_at",
        "return None if self.beat_at < due_at else due_at"),
    bug("who has got its lease may wait for ever", "health.watchdog",
        "self.is_held_up = False\n        self.freed_at", "self.freed_at"),
)  # fmt: skip
