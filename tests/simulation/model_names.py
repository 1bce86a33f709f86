"""Which models a run begins with."""

from __future__ import annotations

import random

NAMES = ("a", "b", "c", "d", "e")

MANY = 3
"""A run that would have this many models may get more."""


def of(seed: int, count: int) -> tuple[str, ...]:
    """The names of `count` models, sometimes of more; no other draw of the run changes."""
    dice = random.Random(f"models of {seed}")
    return NAMES[: dice.choice((3, 3, 3, 4, 5)) if count == MANY else count]
