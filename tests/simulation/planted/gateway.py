"""Planted bugs: the HTTP gateway's process."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("gateway: never started", "gateway", "if self._address is None:", "if True:"),
    bug("gateway: not started again", "gateway",
        "self._deadlines.set(Housekeeping.GATEWAY, self._retry_at)", "pass"),
    bug("gateway: started again at once, always", "gateway",
        "if self._has_listened and self._ends_in_a_row == 1:", "if True:"),
    bug("gateway: started again late after a long life", "gateway",
        "if self._has_listened and self._ends_in_a_row == 1:", "if False:"),
    bug("gateway: the delay does not grow", "gateway",
        "** min(self._ends_in_a_row - 1, 16)", "** 0"),
    bug("gateway: a long life changes nothing", "gateway",
        "now - self._since >= STABLE_S", "False"),
    bug("gateway: who connects waits for nobody", "gateway",
        "self._outbox.add(CloseListener())", "pass"),
    bug("gateway: it is started while the daemon ends", "gateway",
        "if is_ending:\n            return", "pass"),
    bug("gateway: a frozen one is left alone", "gateway",
        "self._deadlines.set(Housekeeping.GATEWAY, now + FROZEN_S)", "pass"),
    bug("gateway: one that beats is killed all the same", "gateway",
        "if number == self._number and self._state is GatewayState.LISTENING:", "if False:"),
    bug("gateway: one that freezes while it starts is left alone", "gateway",
        "self._deadlines.set(Housekeeping.GATEWAY, now + START_LIMIT_S)", "pass"),
    bug("gateway: who froze waits for the next one", "gateway",
        "self._has_listened = True", "pass"),
)  # fmt: skip
