"""Rows in columns: aligned if they fit, and one under the other on a narrow terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

GAP = 2
INDENT = 2

_BREAKS = dict.fromkeys(map(ord, "\n\t"), " ")


def columns(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    right: Collection[int] = (),
) -> list[list[str]]:
    """Return the lines of the headers, then those of each row; nothing is ever cut.

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
    """Return the lines of a sentence that belongs to the row above it."""
    return wrapped(text, width, INDENT)


def wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """Return a sentence in lines that fit; a path or a name is cut only if it alone is too long."""
    begin = " " * indent
    if width is None:
        return [f"{begin}{text}"]
    return textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False
    )


def in_a_line(text: str) -> str:
    """Return the text without line breaks and tabs, which would make a row of a table two."""
    return text.translate(_BREAKS)


def cut(text: str, width: int | None) -> str:
    """Return the text, with an ellipsis at its end if it is longer than that."""
    if width is None or len(text) <= width:
        return text
    return text[: max(1, width - 1)] + "…"


def _aligned(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> str:
    cells = [
        cell.rjust(width) if place in right else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return in_a_line((" " * GAP).join(cells)).rstrip()


def _stacked(row: Sequence[str], width: int) -> list[str]:
    first, *others = row
    return [*wrapped(first, width), *indented(", ".join(filter(None, others)), width)]
