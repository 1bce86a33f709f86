"""The memory budget, below the table of models: how much is reserved, and who waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .columns import wrapped
from .quantities import format_bytes, format_duration


def memory_lines(value: Mapping[str, Any], width: int | None) -> list[str]:
    """`memory: 6.00 GiB of 8.00 GiB reserved`, a line that says so if the budget is lowered or
    exceeded, and one for each model that waits for memory, or has run out of it.

    Args:
        value: the daemon's status; without a budget there is nothing to say.
        width: columns of the terminal; None: lines are never wrapped.
    """
    memory = value.get("memory") or {}
    budget_bytes = memory.get("budget_bytes")
    if budget_bytes is None:
        return []
    reserved = format_bytes(memory.get("reserved_bytes") or 0)
    lines = [f"memory: {reserved} of {format_bytes(budget_bytes)} reserved"]
    if memory.get("shortage"):
        left = format_bytes(memory["effective_budget_bytes"])
        lines.append(f"memory is short, {left} of the budget is left: {memory['shortage']}")
    if memory.get("over_bytes"):
        over = format_bytes(memory["over_bytes"])
        lines.append(f"{over} more is reserved than that: models go once they can")
    for model in value["models"]:
        wait = model.get("memory_wait")
        if wait:
            waits = format_duration(wait["waits_s"])
            lines.append(f"{model['name']} has waited for memory for {waits}: it {wait['reason']}")
        if model.get("raised_bytes"):
            more, needed = (format_bytes(model[key]) for key in ("raised_bytes", "needed_bytes"))
            lines.append(
                f"{model['name']} needs {needed}, {more} of it because it ran out of memory before"
            )
    return [part for line in lines for part in wrapped(line, width)]
