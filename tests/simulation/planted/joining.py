"""Planted bugs: streams that others have joined."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("attaching: what was delivered is left out", "attaching",
        "        if request.sent_tokens:\n            self._ask(model, reader)\n", ""),
    bug("attaching: pieces do not wait for what came before", "attaching",
        "        if reader.asked is None:\n            self._send(reader, [(tokens, body)])",
        "        if True:\n            self._send(reader, [(tokens, body)])"),
    bug("attaching: pieces that wait are lost", "attaching",
        "*((b\"\", body) for body in others), *reader.held]",
        "*((b\"\", body) for body in others)]"),
    bug("attaching: an end does not wait", "attaching",
        "            if reader.asked is None:\n                self._finish(reader, end)",
        "            if True:\n                self._finish(reader, end)"),
    bug("attaching: an end that waits never comes", "attaching",
        "        if reader.end is not None:\n            self._finish(reader, reader.end)\n", ""),
    bug("attaching: any number of readers", "attaching",
        "if len(readers) >= MOST_READERS:", "if False:"),
    bug("attaching: who asks a worker that dies waits on", "attaching",
        "self._fail(reader, renderer_lost(name, reader.request.id))\n\n    def detach",
        "pass\n\n    def detach"),
    bug("attaching: a worker that goes is asked", "attaching",
        "if model.life.state not in SERVES or model.is_unlinked or acceptance is None:",
        "if acceptance is None:"),
    bug("attaching: a connection that is gone is read to", "attaching",
        "if caller.connection == connection]", "if False]"),
    bug("attaching: who leaves has no end", "attaching",
        "        self._finish(reader, Done(id=caller.id, seq=0,"
        " finish_reason=FinishReason.CANCELLED))\n", ""),
    bug("attach × cancel: readers of a cancelled request wait on", "endings",
        "        self._outbox.send(request.connection, message)\n"
        "        self._attaching.ended(request, message)",
        "        self._outbox.send(request.connection, message)\n"
        "        if finish is not FinishReason.CANCELLED:\n"
        "            self._attaching.ended(request, message)"),
    bug("attach × gone: readers of a lost client wait on", "endings",
        "        self._attaching.ended(request, _done(request, FinishReason.CANCELLED, ended))",
        "        pass"),
)  # fmt: skip
