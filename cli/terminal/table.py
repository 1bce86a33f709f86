"""The table of models: it fits the terminal, and stays whole in a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .columns import cut, in_a_line, kept_columns

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
DROPPED_FIRST = ("CONTEXT", "PID", "RESTARTS", "UPTIME", "MEMORY", "TOK/S", "RUN/WAIT")
"""What a terminal that is too narrow for all columns does without, in this order."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where everything of a table stands.

    Attributes:
        headers: of the columns that are shown, but NOTE.
        widths: of the same columns.
        gap: spaces between two columns.
        width: columns of the terminal; None to cut nothing.
        note_room: what is left of them for notes; None for any length.
    """

    headers: Sequence[str]
    widths: Sequence[int]
    gap: int
    width: int | None
    note_room: int | None


def render(rows: Sequence[Row], width: int | None, style: Style) -> list[str]:
    """The lines of the table.

    Args:
        rows: the models.
        width: columns of the terminal; None to cut nothing.
        style: adds colour.
    """
    return [line for lines in render_rows(rows, width, style) for line in lines]


def render_rows(rows: Sequence[Row], width: int | None, style: Style) -> list[list[str]]:
    """The lines of the headers, then those of each row; see `render`."""
    headers = COLUMNS[:-1]
    widths = [
        max(len(header), *(len(row.cells[i]) for row in rows)) if rows else len(header)
        for i, header in enumerate(headers)
    ]
    least = [min(widths[0], MIN_MODEL_WIDTH), *widths[1:]]
    dropped_first = [COLUMNS.index(header) for header in DROPPED_FIRST]
    places = kept_columns(least, width, 1, dropped_first)
    longest_note = max((len(row.note) for row in rows), default=0)
    layout = _layout(
        [headers[place] for place in places],
        [widths[place] for place in places],
        width,
        longest_note,
    )
    has_note = layout.note_room is None or layout.note_room >= len("NOTE")
    title = _join([*layout.headers, "NOTE" if has_note else ""], layout)
    shown = [replace(row, cells=[row.cells[place] for place in places]) for row in rows]
    return [[style(title, "header")], *(_row_lines(row, layout, style) for row in shown)]


def _layout(
    headers: Sequence[str], widths: list[int], width: int | None, longest_note: int
) -> _Layout:
    """How wide the columns become."""
    gap = 2
    if width is not None and sum(widths) + gap * len(widths) + longest_note > width:
        # Closer together, if that makes room for the longest note, or is needed for any note.
        room = width - sum(widths) - len(widths)
        if room >= longest_note or sum(widths) + gap * len(widths) + MIN_NOTE_WIDTH > width:
            gap = 1
            excess = sum(widths) + gap * (len(widths) - 1) - width
            widths[0] = min(widths[0], max(MIN_MODEL_WIDTH, widths[0] - max(0, excess)))
    taken = sum(widths) + gap * len(widths)
    note_room = None if width is None else width - taken
    return _Layout(headers=headers, widths=widths, gap=gap, width=width, note_room=note_room)


def _row_lines(row: Row, layout: _Layout, style: Style) -> list[str]:
    width, room = layout.width, layout.note_room
    state = row.cells[STATE_COLUMN]
    name, *others = map(in_a_line, row.cells)
    cells = [cut(name, None if width is None else layout.widths[0]), *others]
    note = in_a_line(row.note)
    is_inline = room is None or len(note) <= room
    padded = _pad([*cells, note if is_inline else ""], layout)
    padded[STATE_COLUMN] = style(padded[STATE_COLUMN], state)
    lines = [(" " * layout.gap).join(padded).rstrip()]
    if not is_inline:
        # A cause is too important to be cut: it gets its own lines.
        lines += textwrap.wrap(note, width or 80, initial_indent="  ", subsequent_indent="  ")
    if row.below:
        lines.append(style(cut(in_a_line(f"  {row.below}"), width), "dim"))
    return lines


def _join(cells: Sequence[str], layout: _Layout) -> str:
    return (" " * layout.gap).join(_pad(cells, layout)).rstrip()


def _pad(cells: Sequence[str], layout: _Layout) -> list[str]:
    padded = [
        cell.ljust(width) if header in LEFT_ALIGNED else cell.rjust(width)
        for header, cell, width in zip(layout.headers, cells, layout.widths, strict=False)
    ]
    return [*padded, cells[-1]]
