"""Rounds in which several sides are measured."""

from __future__ import annotations

from collections.abc import Sequence


def order_in_round(sides: Sequence[str], repeat: int) -> Sequence[str]:
    """The sides, so that each comes first, second and last equally often.

    Args:
        sides: what is measured in each round.
        repeat: the number of the round.
    """
    place = repeat % len(sides)
    return (*sides[place:], *sides[:place])
