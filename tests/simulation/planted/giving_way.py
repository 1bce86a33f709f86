"""Planted bugs: rows that leave because other programs need memory."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("giving way: no row leaves", "giving_way", "if missing_bytes <= 0 or", "if True or"),
    bug("giving way: rows of any class", "giving_way", "one.priority is GIVES_WAY and ", ""),
    bug("giving way: they return at once", "pausing",
        " or is_leaving_short(request)\n", "\n"),
    bug("giving way: rows that leave by hand are freed by others", "giving_way",
        "if one.stage is not Stage.RUNNING}", "if False}"),
    bug("giving way: every one that may", "giving_way",
        "        if _freed_bytes(others) >= enough_bytes:", "        if False:"),
)  # fmt: skip
