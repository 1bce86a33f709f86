"""Which models a run begins with."""

from __future__ import annotations

import random

NAMES = ("a", "b", "c", "d", "e")

MANY = 3
"""Of the runs with so many models, some have more."""


def of(seed: int, count: int) -> tuple[str, ...]:
    """The names of so many models, or of more: the other draws of a run stay what they were."""
    dice = random.Random(f"models of {seed}")
    return NAMES[: dice.choice((3, 3, 3, 4, 5)) if count == MANY else count]
