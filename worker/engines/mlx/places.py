"""Arrays that name places in a batch's logits (rows, vocabulary)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx


def column(values: Iterable[float]) -> mx.array:
    """A number for each row (rows, 1), float32."""
    return mx.array([[value] for value in values], dtype=mx.float32)


def rows_at(places: Sequence[int], count: int) -> mx.array | None:
    """Those rows of `count` (some,); None if it is all of them, in their order."""
    if list(places) == list(range(count)):
        return None
    return mx.array(list(places), dtype=mx.int32)


def entries_at(ids: Sequence[Sequence[int]], width: int) -> tuple[mx.array, mx.array] | None:
    """The entries of each row that ids stand for, as rows and columns; None if there is none.

    Args:
        ids: of each row.
        width: of the logits: a tokenizer may know more ids than the model has a place for.
    """
    found = [(row, token) for row, own in enumerate(ids) for token in own if 0 <= token < width]
    if not found:
        return None
    rows, columns = zip(*found, strict=True)
    return mx.array(rows, dtype=mx.int32), mx.array(columns, dtype=mx.int32)
