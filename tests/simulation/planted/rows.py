"""Planted bugs: what rows may take, and who left because there was no room."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("rows: they may take what is not free", "head_room",
        "target_bytes = min(target_bytes, held_bytes + max(0, free_bytes))", "pass"),
    bug("rows: they may take what spare workers hold", "head_room",
        "budget.size_bytes - self._spares.claimed_bytes(everybody, settings)",
        "budget.size_bytes"),
    bug("rows: nothing is given back", "head_room",
        "self._outbox.tell(model.life, budget.tell(target_bytes, gives_back=True))", "pass"),
    bug("rows: who left returns at once", "rows_memory",
        "    if request.left_short_at is None or model.row_budget is None or",
        "    if True or"),
    bug("rows: who left returns without anything to spare", "rows_memory",
        "room_bytes -= room_bytes // SPARE_SHARE", "pass"),
    bug("rows: who left waits although a row has ended", "rows_memory",
        "if model.rows_ended > request.left_short_at:", "if False:"),
    bug("rows: who left is refused although there is room", "rows_memory",
        "needed_bytes <= budget.could_bytes and", "needed_bytes * 3 <= budget.could_bytes and"),
    bug("rows: what they hold is taken away", "rows_memory",
        "return min(max(claim.least_bytes, held_bytes), claim.wanted_bytes)",
        "return claim.least_bytes"),
    bug("rows: a model is left without one", "head_room",
        "target_bytes = max(target_bytes, claim.least_bytes)", "target_bytes = 0"),
    bug("rows: budgets are miscounted", "memory.head_room",
        "self.number += 1", "self.number += 2"),
    bug("rows: a lower budget counts at once", "memory.head_room",
        "self.most_bytes = max(self.most_bytes, size_bytes)", "self.most_bytes = size_bytes"),
    bug("rows: what a worker kept to before counts", "memory.head_room",
        "if number != self.number:", "if False:"),
)  # fmt: skip
