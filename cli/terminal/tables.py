"""Tables that fit a terminal, and are whole in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from .output import Line, Piece, width_of
from .text import cell_len, cut, in_a_line, wrapped
from .writer import for_terminal

GAP = 2


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its header.
        is_right: whether its cells are aligned to the right.
        least: to how many signs a narrow terminal may cut it before others are given up; 0: to
            none.
        given_up: in which order a narrow terminal does without such columns, the lowest first; 0:
            never.
    """

    title: str
    is_right: bool = False
    least: int = 0
    given_up: int = 0


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Piece]],
    width: int | None,
    gap: int = GAP,
) -> list[Line]:
    """Return the line of the headers, then one for each row.

    Not a table of rich, for which every command would wait.

    Args:
        columns: from the left.
        rows: a cell for each column, from anywhere; with its style if it is a pair.
        width: columns of the terminal; None for anything else, for which nothing is cut.
        gap: spaces between two columns.
    """
    cells = [[_safe(cell) for cell in row] for row in rows]
    widths = fitting(columns, [[text for text, _ in row] for row in cells], width, gap)
    lines = []
    for row in ([(column.title, "bold") for column in columns], *cells):
        line: Line = []
        for place, room in widths.items():
            text, style = cut(row[place][0], room), row[place][1]
            pad, cell = (" " * (room - cell_len(text)), ""), (text, style)
            line += [pad, cell] if columns[place].is_right else [cell, pad]
            line.append((" " * gap, ""))
        while line and not line[-1][0].strip():
            line.pop()
        lines.append(line)
    return lines


def fitting(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, gap: int = GAP
) -> dict[int, int]:
    """Return how wide the columns are that a terminal has room for, by their places.

    Columns are cut to their `least`, then given up; only then any are cut, the widest first.
    """
    widths = {
        place: max(cell_len(text) for text in (column.title, *(row[place] for row in rows)))
        for place, column in enumerate(columns)
    }
    if width is None:
        return widths
    least = {place: min(room, columns[place].least or room) for place, room in widths.items()}
    dropped_first = sorted(
        (place for place in widths if columns[place].given_up),
        key=lambda place: columns[place].given_up,
    )
    for place in dropped_first:
        if sum(least.values()) + gap * (len(least) - 1) <= width:
            break
        del least[place], widths[place]
    over = sum(widths.values()) + gap * (len(widths) - 1) - width
    for place in widths:
        taken = min(max(over, 0), widths[place] - least[place])
        widths[place] -= taken
        over -= taken
    while over > 0 and max(widths.values()) > 1:
        widths[max(widths, key=widths.__getitem__)] -= 1
        over -= 1
    return widths


def text_lines(text: str, width: int | None, *, style: str = "", indent: int = 0) -> list[Line]:
    """Return a text from anywhere in lines that fit."""
    return [[(line, style)] for line in wrapped(for_terminal(text), width, indent)]


def _safe(cell: str | Piece) -> Piece:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return for_terminal(in_a_line(text)), style


def listing(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()
) -> list[Line]:
    """Return a table for stdout, whose cells are folded on a narrow terminal, and never cut.

    Where a column would lose more than half of its width, each row is a block with a line for each
    cell instead.

    Args:
        headings: of the columns; without any, the first of two columns names what follows it.
        rows: a cell for each column, from anywhere.
        right: the headings of columns that are aligned to the right.
    """
    columns = [Column(heading, is_right=heading in right) for heading in headings or ("", "")]
    cells = [[for_terminal(in_a_line(cell)) for cell in row] for row in rows]
    width = width_of(sys.stdout)
    widths = fitting(columns, cells, width)
    whole = fitting(columns, cells, None)
    if headings and any(2 * room < whole[place] for place, room in widths.items()):
        blocks = [[*listing((), zip(headings, row, strict=True)), []] for row in cells]
        return [line for block in blocks for line in block][:-1]
    folded: list[tuple[str, ...]] = []
    for row in cells:
        room = [None if width is None else widths[place] for place in widths]
        folded += zip_longest(*map(wrapped, row, room), fillvalue="")
    lines = table(columns, folded, width)
    return lines if headings else lines[1:]
