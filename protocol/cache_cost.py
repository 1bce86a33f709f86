"""The memory that the caches of a batch take, from what each layer keeps: the supervisor plans with
it, and a worker admits rows by it.

Both compute instead of measuring, so that they agree, and because a measurement would come too
late to admit a row by.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cache_layers import CacheLayers

GROWTH_TOKENS = 256
"""mlx-lm's caches grow by this many tokens at once."""

CHUNK_TOKENS = 2048
"""The most tokens of a prompt that a step reads; while it does, a window holds them, too."""


def cache_bytes(layers: Sequence[CacheLayers], *, rows: int, longest: int) -> int:
    """Return the bytes that a batch takes at most. Every row is padded to the longest, and while a
    cache grows or rows join and leave, the largest layer is there twice.

    Args:
        layers: of the model.
        rows: in the batch.
        longest: tokens of the longest row.
    """
    if rows == 0:
        return 0
    each = [(part.layers, _layer_bytes(part, longest)) for part in layers if part.layers]
    held = sum(count * size for count, size in each)
    return rows * (held + max((size for _, size in each), default=0))


def joining_bytes(layers: Sequence[CacheLayers], lengths: Sequence[int]) -> int:
    """Return the bytes that a batch must have room for when a row joins it: those that it takes
    once each row has grown by one step, so that no row has to leave again at its first tokens. A
    row alone needs no more than it takes.

    Args:
        layers: of the model.
        lengths: tokens of each row, with the one that joins; at least one.
    """
    longest = max(lengths) + (GROWTH_TOKENS if len(lengths) > 1 else 0)
    return cache_bytes(layers, rows=len(lengths), longest=longest)


def tokens_within(size_bytes: int, layers: Sequence[CacheLayers], *, rows: int, most: int) -> int:
    """Return how long the rows of a batch can be in so much memory.

    Args:
        size_bytes: for the caches alone.
        layers: of the model.
        rows: in the batch, at least one.
        most: the answer is no larger than this.
    """
    fits, too_long = 0, most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if cache_bytes(layers, rows=rows, longest=middle) <= size_bytes:
            fits = middle
        else:
            too_long = middle
    return fits


def _layer_bytes(part: CacheLayers, longest: int) -> int:
    """Return one layer of the group, for one row."""
    tokens = longest + GROWTH_TOKENS
    if part.window is not None:
        tokens = min(tokens, part.window + CHUNK_TOKENS)
    return part.row_bytes + part.token_bytes * tokens
