"""Planted bugs: clients and who is let in."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("every request refused", "admission", "if life.state is State.FAILED:", "if True:"),
    bug("the queue is full from the start", "admission",
        "if ledger.waiting < settings.max_queue or", "if"),
    bug("the queue has no limit", "admission",
        "if waiting < (own or settings.max_queue_per_client):",
        "if True:"),
    bug("any client may use any class", "admission", "if not priority.is_above(highest):",
        "if True:"),
    bug("a refused reload is not answered", "core",
        "self.outbox.fail(caller, bad_configuration(problems))", "pass"),
    bug("slow clients are kept", "client_events",
        "self._endings.fail(self._fleet.touched_by(request), request, error, event.now)", "pass"),
    bug("core: one request of a lost client stays", "client_events",
        "for request in self._serving.ledger.of_connection(event.connection):",
        "for request in self._serving.ledger.of_connection(event.connection)[1:]:"),
    bug("reload: what is removed is not named", "reload",
        '"removed": [name for name in old if name not in new]', '"removed": []'),
    bug("outbox: commands are not answered", "outbox",
        "self.send(caller.connection, Reply(id=caller.id, value=value))", "pass"),
    bug("errors: tokens_sent is wrong", "errors", '"cause": text, "tokens_sent": tokens_sent}',
        '"cause": text, "tokens_sent": tokens_sent + 1}'),
    bug("the subscription of a lost client stays", "client_events",
        "self._outbox.subscriptions.pop(connection, None)\n        forgotten", "forgotten"),
    bug("the process behind a connection is not looked at", "client_events",
        "self._obey(caller, event.message, event.now, event.process)",
        'self._obey(caller, event.message, event.now, "")'),
)  # fmt: skip
