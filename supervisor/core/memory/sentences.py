"""What the planner says to people about memory, in phrases that follow a model's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


def is_or_are(names: Iterable[str]) -> str:
    """The names with their verb: `a is`, `a and b are`."""
    found = list(names)
    return f"{listed(found)} {'is' if len(found) == 1 else 'are'}"


def holds_up(busy: Mapping[ModelName, str], pinned: Mapping[ModelName, int]) -> str:
    """What a load waits for.

    Args:
        busy: models, and why they stay until their answers have ended; an empty reason is none.
        pinned: models that hold more than they keep for good, and how much that is in all.
    """
    why = [f"{is_or_are(busy)} busy"] if busy else []
    why += [
        f"{name} stays loaded until its answers are complete, because {reason}"
        for name, reason in busy.items()
        if reason
    ]
    why += [
        f"{name} is pinned and holds {size_text(size)} for now" for name, size in pinned.items()
    ]
    return "; ".join(why)


def needs(needed_bytes: int, free_bytes: int) -> str:
    """How a sentence about a model that has to wait begins."""
    return f"needs {size_text(needed_bytes)}; {size_text(max(free_bytes, 0))} is free"
