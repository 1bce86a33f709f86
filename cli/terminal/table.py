"""The table of models: it fits a terminal of 80 columns, and stays whole in a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

COLUMNS = (
    "MODEL",
    "STATE",
    "UPTIME",
    "PID",
    "RESTARTS",
    "RUN/WAIT",
    "TOK/S",
    "MEMORY",
    "CONTEXT",
    "NOTE",
)
LEFT_ALIGNED = frozenset({"MODEL", "STATE", "NOTE"})
STATE_COLUMN = COLUMNS.index("STATE")
MIN_MODEL_WIDTH = 8
MIN_NOTE_WIDTH = 12

Style = Callable[[str, str], str]
"""Takes a text and what it is (`header`, `dim`, or a state), returns it with colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model.

    Attributes:
        cells: one for each column but NOTE.
        note: one phrase; empty for none.
        below: a line to show under it, dimmed.
    """

    cells: Sequence[str]
    note: str = ""
    below: str = field(default="")


def render(rows: Sequence[Row], width: int | None, style: Style) -> list[str]:
    """The lines of the table.

    Args:
        rows: the models.
        width: columns of the terminal; None to cut nothing.
        style: adds colour.
    """
    headers = COLUMNS[:-1]
    widths = [
        max(len(header), *(len(row.cells[i]) for row in rows)) if rows else len(header)
        for i, header in enumerate(headers)
    ]
    gap = 2
    longest_note = max((len(row.note) for row in rows), default=0)
    if width is not None and sum(widths) + gap * len(widths) + longest_note > width:
        # Closer together, if that makes room for the longest note, or is needed for any note.
        room = width - sum(widths) - len(widths)
        if room >= longest_note or sum(widths) + gap * len(widths) + MIN_NOTE_WIDTH > width:
            gap = 1
            excess = sum(widths) + gap * (len(widths) - 1) - width
            widths[0] = min(widths[0], max(MIN_MODEL_WIDTH, widths[0] - max(0, excess)))
    taken = sum(widths) + gap * len(widths)
    note_room = None if width is None else width - taken
    has_note = note_room is None or note_room >= len("NOTE")
    lines = [style(_join([*headers, "NOTE" if has_note else ""], widths, gap), "header")]
    for row in rows:
        lines += _row_lines(row, widths, gap, note_room, width, style)
    return lines


def _row_lines(
    row: Row, widths: list[int], gap: int, room: int | None, width: int | None, style: Style
) -> list[str]:
    state = row.cells[STATE_COLUMN]
    cells = [_cut(row.cells[0], None if width is None else widths[0]), *row.cells[1:]]
    is_inline = room is None or len(row.note) <= room
    padded = _pad([*cells, row.note if is_inline else ""], widths)
    padded[STATE_COLUMN] = style(padded[STATE_COLUMN], state)
    lines = [(" " * gap).join(padded).rstrip()]
    if not is_inline:
        # A cause is too important to be cut: it gets its own lines.
        lines += textwrap.wrap(row.note, width or 80, initial_indent="  ", subsequent_indent="  ")
    if row.below:
        lines.append(style(_cut(f"  {row.below}", width), "dim"))
    return lines


def _join(cells: Sequence[str], widths: Sequence[int], gap: int) -> str:
    return (" " * gap).join(_pad(cells, widths)).rstrip()


def _pad(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    padded = [
        cell.ljust(width) if header in LEFT_ALIGNED else cell.rjust(width)
        for header, cell, width in zip(COLUMNS, cells, widths, strict=False)
    ]
    return [*padded, cells[-1]]


def _cut(text: str, width: int | None) -> str:
    if width is None or len(text) <= width:
        return text
    return text[: max(1, width - 1)] + "…"
