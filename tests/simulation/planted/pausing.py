"""Planted bugs: pauses by hand."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("pause × resume: it stays paused", "pausing",
        "self._ledger.move(request, Stage.YIELDING)\n        elif", "pass\n        elif"),
    bug("pause × limits: the time in the queue runs on", "pausing",
        "request.queue_deadline += now - request.paused_at", "pass"),
    bug("the kept state of who has left for good", "pausing",
        "self._outbox.tell(model.life, DropKept(key=key))", "pass"),
    bug("pausing: a pause earns credit", "pausing", "model.line_up(request, now)",
        "model.line_up_again(request, now)"),
    bug("pausing: the wait before a pause is lost", "pausing",
        "request.end_wait(now)\n            request", "request"),
    bug("pausing: it keeps its place in the queue", "requests.ledger",
        "self.stage is Stage.QUEUED and not", "not self.has_row and not"),
    bug("pausing: what is paused counts as no more than its body", "requests.ledger",
        "PAUSED_BYTES if self.stage is Stage.PAUSED else 0", "0"),
)  # fmt: skip
