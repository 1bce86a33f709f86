"""Decides where a prompt's cache is worth keeping although the row continues; pure.

For models whose caches cannot be cut back, as those of sliding windows and of state-space layers:
what they hold only serves a prompt that continues exactly where it ends, so it must be kept where
other prompts will diverge from this one.

A snapshot every n tokens would take the memory of a row each and miss by up to n; these places are
known beforehand or learned from other prompts.
"""

from __future__ import annotations

from collections.abc import Iterable

LEAST_GAIN = 16
"""Of two checkpoints closer than this the first serves for both; the rest is read quickly."""

MAX_CHECKPOINTS = 8
"""The most checkpoints of one prompt: each takes the memory of a row."""


def plan_checkpoints(
    wanted: Iterable[int], *, known: int, shared: int, prompt_tokens: int
) -> tuple[int, ...]:
    """After how many tokens of a prompt its cache is kept, ascending.

    Args:
        wanted: what the text side expects others to share.
        known: how many tokens need not be read.
        shared: how many another prompt has already shared with this one, without a cache that
            would serve: the third such prompt will find one.
        prompt_tokens: without what was delivered; the same prompt again shares all but the last.
    """
    places = sorted({*wanted, shared, prompt_tokens - 1})
    result: list[int] = []
    last = known
    for place in places:
        if place - last >= LEAST_GAIN and place < prompt_tokens:
            result.append(place)
            last = place
    # The last one is for the same prompt again.
    return (*result[: MAX_CHECKPOINTS - 1], *result[MAX_CHECKPOINTS - 1 :][-1:])
