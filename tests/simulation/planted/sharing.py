"""Planted bugs: what requests cost, and who pays."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("weights do not count", "sharing.counters",
        "engine_s / self.terms.of(account).weight", "engine_s"),
    bug("idleness earns credit", "sharing.counters", "max(self._of.get(account, floor), floor)",
        "self._of.get(account, 0.0)"),
    bug("debt is forgotten", "sharing.counters",
        "max(self._of.get(account, floor), floor)", "floor"),
    bug("accounts: invented names count", "sharing.accounts",
        "client != ANYONE and client in self._clients", "client != ANYONE"),
    bug("metering: nobody is charged", "metering", "model.pay(request, seconds)", "pass"),
    bug("charging: what is read again is charged", "sharing.charging",
        "again = max(0.0, min(row.computed, read_before(row.key) - begin))", "again = 0.0"),
    bug("alike_steps: those that are alike cost nothing", "sharing.alike_steps",
        "max(self.took_s, 0.0)", "0.0"),
    bug("device_time: engines at once pay whole steps", "sharing.device_time",
        "return took_s * min(share, 1.0)", "return took_s"),
    bug("rows that left between two steps pay", "sharing.charging",
        "step.rows[step.between_steps :] if step.between_steps > 0 else step.rows", "step.rows"),
    bug("what was known of a prompt is not free", "sharing.charging",
        "sum(row.computed for row in read)", "sum(row.done for row in read)"),
    bug("who begins makes what was before cheaper", "metering",
        "            model.settle()\n\n    def _device_of",
        "            pass\n\n    def _device_of"),
    bug("how far a prompt was read is forgotten", "metering", "request.read_tokens = row.done",
        "pass"),
)  # fmt: skip
