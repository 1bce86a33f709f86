"""The spare workers, below the table of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .columns import wrapped
from .quantities import format_bytes, format_duration


def spare_lines(value: Mapping[str, Any], width: int | None) -> list[str]:
    """`spare workers: 1 waiting, 1 starting (2 wanted), 409.6 MiB`.

    Args:
        value: the daemon's status; if none is wanted and none is there, there is nothing to say.
        width: columns of the terminal; None: lines are never wrapped.
    """
    spares = value.get("spares") or {}
    workers, wanted = spares.get("workers") or [], spares.get("wanted") or 0
    if not workers and not wanted:
        return []
    counts = Counter(worker["state"] for worker in workers)
    states = ", ".join(f"{count} {state}" for state, count in counts.items()) or "none"
    held = format_bytes(sum(worker["reserved_bytes"] for worker in workers))
    line = f"spare workers: {states} ({wanted} wanted), {held}"
    if spares.get("retry_in_s") is not None:
        line += f"; one died, the next starts in {format_duration(spares['retry_in_s'])}"
    return wrapped(line, width)
