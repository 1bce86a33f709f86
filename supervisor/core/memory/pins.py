"""Whether the models that are pinned fit into the budget together."""

from __future__ import annotations

from collections.abc import Mapping

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import size_text

from .sentences import listed


def pins_problem(pinned: Mapping[ModelName, int], budget_bytes: int) -> str:
    """What is wrong with a configuration whose pinned models exceed the budget; empty if nothing.

    Args:
        pinned: what each of them needs in bytes, by name.
        budget_bytes: what all models may take together.
    """
    total = sum(pinned.values())
    if total <= budget_bytes:
        return ""
    names = listed(f"{name} ({size_text(size)})" for name, size in pinned.items())
    return (
        f"the pinned models {names} need {size_text(total)} together, but the memory budget is "
        f"{size_text(budget_bytes)}; unpin one, or raise supervisor.memory_budget"
    )
