"""Rows under headings, as a table of rich."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from .terminal.writer import for_terminal

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

_BREAKS = dict.fromkeys(map(ord, "\n\t"), " ")


def listing(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()
) -> Table:
    """Return a table for `Output.show`; its cells may contain text from outside.

    Args:
        headings: of the columns; without any, the first column names what follows it.
        rows: a cell for each column.
        right: the headings of columns that are aligned to the right.
    """
    from rich.table import Table  # other commands need not wait for it

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headings))
    for heading in headings or ("", ""):
        # Folded, never cut: rich narrows the widest column first.
        justify: JustifyMethod = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(for_terminal(cell.translate(_BREAKS)) for cell in row))
    return table
