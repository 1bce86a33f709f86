"""Planted bugs: what is logged, listed and told."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("log_level: who serves is not told", "log_level",
        "        for model in models:\n            self.tell(model)\n", ""),
    bug("log_level: a loading worker is notified", "log_level",
        "if self._level is not None and model.life.state in SERVES:",
        "if self._level is not None:"),
    bug("log_level: the daemon is not told", "log_level",
        "self._outbox.add(SetLogLevel(level=level))", "pass"),
    bug("log_level: there are all levels", "log_level", "if level not in LOG_LEVELS:", "if False:"),
    bug("log_level: who becomes READY is not told", "worker_events",
        "self._log_level.tell(model)", "pass"),
    bug("requests: who is paused is not listed", "request_status",
        "(*model.running.values(), *model.paused.values())", "model.running.values()"),
    bug("requests: places from 0", "request_status",
        "enumerate(model.queue, start=1)", "enumerate(model.queue, start=0)"),
    bug("requests: of any client", "request_status",
        "if client is not None and not _is_of(request.account, client):", "if False:"),
    bug("requests: what they have cost is from the latest change", "request_status",
        "        model.settle()\n        model.queue.age(now)", "        model.queue.age(now)"),
    bug("requests: who is read answers", "request_status",
        'return "reading" if request.gains_since is None else "answering"', 'return "answering"'),
    bug("requests: a prompt that nobody has read has no tokens", "queue_status",
        "// 4 if acceptance else None", "// 4 if acceptance else 0"),
    bug("report: tokens of the prompt count as the answer", "requests.report",
        '"completion_tokens": usage.completion_tokens,',
        '"completion_tokens": usage.prompt_tokens,'),
    bug("report: why one was refused is not said", "requests.report",
        '"outcome": code.value}', '"outcome": "refused"}'),
    bug("report: one whose client is gone is not logged", "endings",
        "self._outbox.add(RequestEnded(facts=report_of(ended)))",
        "if outcome != GONE:\n            self._outbox.add(RequestEnded(facts=report_of(ended)))"),
    bug("words: a death without its cause", "lifecycle.words",
        "[trigger.text] if isinstance(trigger, Died)", "[] if isinstance(trigger, Died)"),
)  # fmt: skip
