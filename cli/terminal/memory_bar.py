"""The memory budget as a bar: what processes use, what is reserved, and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .text import format_bytes

MIN_BAR_WIDTH = 8
USED, RESERVED, FREE = "#", "=", "."
TITLE = "memory"


def memory_bar(value: Mapping[str, Any], width: int) -> str:
    """Return `memory [###==.....] 3.10 GiB used, 5.00 GiB of 10.00 GiB reserved`.

    A terminal that is too narrow for a bar gets none.

    The bar is as long as the budget, or as what is used or reserved if that is more. A `#` is used,
    an `=` is reserved and not used, and a dot is neither. Without a budget it is as long as the
    memory of the machine.

    Args:
        value: the daemon's status.
        width: columns of the terminal.
    """
    memory = value.get("memory") or {}
    used = used_bytes(value)
    reserved = memory.get("reserved_bytes") or 0
    budget = memory.get("budget_bytes")
    whole = budget if budget is not None else memory.get("machine_bytes") or 0
    text = amounts(value)
    room = width - len(f"{TITLE} [] {text}")
    if room < MIN_BAR_WIDTH:
        text = f"{format_bytes(max(used, reserved))} of {format_bytes(whole)}"
        room = width - len(f"{TITLE} [] {text}")
    if room < MIN_BAR_WIDTH:
        return f"{TITLE} {text}"[:width]
    longest = max(whole, used, reserved, 1)
    return f"{TITLE} [{_bar(used / longest, reserved / longest, room)}] {text}"


def amounts(value: Mapping[str, Any]) -> str:
    """Return `3.10 GiB used, 5.00 GiB of 10.00 GiB reserved`."""
    memory = value.get("memory") or {}
    used = f"{format_bytes(used_bytes(value))} used"
    budget = memory.get("budget_bytes")
    if budget is None:
        return f"{used} of {format_bytes(memory.get('machine_bytes') or 0)}"
    reserved = format_bytes(memory.get("reserved_bytes") or 0)
    return f"{used}, {reserved} of {format_bytes(budget)} reserved"


def used_bytes(value: Mapping[str, Any]) -> int:
    """Return the resident bytes of all models' processes, as they were measured last."""
    return sum(int(model.get("footprint_bytes") or 0) for model in value["models"])


def _bar(used: float, reserved: float, width: int) -> str:
    """Return one sign for each part of the whole; the shares are between 0 and 1."""
    used_signs = round(used * width)
    reserved_signs = max(round(reserved * width), used_signs)
    free_signs = width - reserved_signs
    return USED * used_signs + RESERVED * (reserved_signs - used_signs) + FREE * free_signs
