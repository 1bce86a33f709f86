"""Planted bugs: how requests end."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("nothing ever resumed", "endings",
        "if request.acceptance is not None and not request.may_resume:\n        return worker",
        "if request.acceptance is not None:\n        return worker"),
    bug("resumed with the wish not to be", "endings",
        "if request.acceptance is not None and not request.may_resume:\n        return worker",
        "if False:\n        return worker"),
    bug("deaths without progress never end", "endings",
        "if request.deaths >= MAX_DEATHS_WITHOUT_PROGRESS:", "if False:"),
    bug("no deadline is ever due", "endings",
        "if request.deadline is not None and now >= request.deadline:", "if False:"),
    bug("usage lost", "endings", "usage=ended.usage,", ""),
    bug("seed lost", "endings", "seed=request.acceptance.seed if request.acceptance else None,",
        ""),
    bug("warnings lost", "endings", "warnings=request.warnings,", ""),
    bug("cancel × finish: its row is free before it has left", "endings",
        "model.leaving[request.key] = request.held", "pass"),
    bug("cancel × restart: it waits on", "endings",
        "                model.queue.leave(request)\n", "                pass\n"),
    bug("cancel × restart: it is taken for running", "endings",
        "self._ledger.move(request, Stage.QUEUED)\n        request.told.clear()",
        "request.told.clear()"),
    bug("pause × crash: who is about to leave runs again", "endings",
        "if was_pausing:", "if False:"),
    bug("pause × unload: it ends", "endings",
        "if is_served and request.is_paused:", "if False:"),
    bug("deadlines: none comes", "deadlines",
        "while (when := self.earliest()) is not None and when <= now:",
        "while (when := self.earliest()) is not None and when < now - 1e9:"),
    bug("the twin of a culprit waits on", "endings",
        "if request.digest == verdict.culprit:\n                    error",
        "if False:\n                    error"),
    bug("an error does not say what it cost", "endings", "if request.engine_s:", "if False:"),
    bug("who is cancelled does not pay for the latest steps", "endings",
        "model.settle()\n        del model.running[request.key]", "del model.running[request.key]"),
)  # fmt: skip
