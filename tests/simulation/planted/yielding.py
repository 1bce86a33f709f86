"""Planted bugs: rows that are freed for a higher class, and what people hear of their wait."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("yielding: rows are freed at once", "yielding", "if when <= now]", "if True]"),
    bug("yielding: nobody wakes when a row may be freed", "model",
        ", self.queue.ages_at, self.yields_at]", ", self.queue.ages_at]"),
    bug("yielding: what is awaited is not looked at", "serving",
        "return has_changed or is_awaited or", "return has_changed or"),
    bug("yielding: the time runs on after a return", "serving",
        "request.dispatched_at, request.gains_since = now, None", "request.dispatched_at = now"),
    bug("yielding: no row is ever freed", "yielding", "if missing <= 0:", "if True:"),
    bug("yielding: one row more than requests wait for", "yielding",
        "len(rows) + leaving) - leaving", "len(rows) + leaving)"),
    bug("yielding: max_running does not count", "requests.line",
        "min(own, may_run_more(account))", "own"),
    bug("yielding: the first served gives way", "yielding", "reverse=True", "reverse=False"),
    bug("yielding: every class gives way", "yielding",
        "request.priority is GIVES_WAY and", ""),
    bug("yielding: aged requests free rows", "yielding", "urgent = model.queue.urgent",
        "urgent = model.queue._lines[Priority.INTERACTIVE]"),
    bug("yielding: aged requests keep their rows", "yielding",
        "request.priority is GIVES_WAY", "request.standing is GIVES_WAY"),
    bug("yielding: who must not be interrupted gives way", "yielding",
        " and request.may_resume", ""),
    bug("yielding: deterministic models free rows", "yielding",
        "not life.launch.deterministic and", ""),
    bug("yielding: a freed row goes to whoever is first", "yielding",
        "if request is not None:\n            return request", "pass"),
    bug("yielding: every row goes to the highest class", "yielding",
        "if model.freed_rows and not", "if not"),
    bug("yielding: lost states are not made up for", "yielding",
        "run_s = min_run_s if keeps_states else", "run_s = min_run_s if True else"),
    bug("yielding: notices give another reason", "pausing",
        '"reason": request.pause_reason.value', '"reason": "turn"'),
    bug("notices: since the request came", "serving", "now - request.queued_at",
        "now - request.arrived_at"),
    bug("expectations: the place does not count", "expectations",
        "else place * max(cost_s, SHORTEST_FREE_S)", "else max(cost_s, SHORTEST_FREE_S)"),
)  # fmt: skip
