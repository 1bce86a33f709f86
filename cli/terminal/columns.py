"""Rows in columns: aligned where they fit, and one under the other on a narrow terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

GAP = 2
INDENT = 2


def columns(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    right: Collection[int] = (),
) -> list[list[str]]:
    """The lines of the headers, then those of each row; nothing is ever cut.

    Args:
        headers: one for each column.
        rows: likewise.
        width: columns of the terminal; None for anything else.
        right: places of the columns that are aligned to the right.

    Returns:
        One list of lines for the headers, and one for each row.
    """
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    if width is None or sum(widths) + GAP * (len(widths) - 1) <= width:
        return [[_aligned(row, widths, right)] for row in (headers, *rows)]
    return [[], *(_stacked(row, width) for row in rows)]


def indented(text: str, width: int | None) -> list[str]:
    """A sentence that belongs to the row above it."""
    return wrapped(text, width, INDENT)


def wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """A sentence in lines that fit; paths and names are cut only if one alone is too long."""
    begin = " " * indent
    if width is None:
        return [f"{begin}{text}"]
    return textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False
    )


def _aligned(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> str:
    cells = [
        cell.rjust(width) if place in right else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return (" " * GAP).join(cells).rstrip()


def _stacked(row: Sequence[str], width: int) -> list[str]:
    first, *others = row
    return [*wrapped(first, width), *indented(", ".join(filter(None, others)), width)]
