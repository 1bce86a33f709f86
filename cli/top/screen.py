"""What `mlxsup top` shows: the facts and the controls as the lines of a terminal of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..terminal.gateway_lines import gateway_lines
from ..terminal.memory_bar import memory_bar
from ..terminal.memory_lines import memory_lines
from ..terminal.quantities import format_duration
from ..terminal.requests_table import request_rows
from ..terminal.sharing_lines import sharing_lines
from ..terminal.spare_lines import spare_lines
from ..terminal.status_table import STATE_COLOURS
from ..terminal.table import Style, render_rows
from ..terminal.writer import plain
from .facts import Facts, clock
from .keys import Controls, Kind, question_text
from .sections import Section, shared

STYLES: dict[str, dict[str, Any]] = {
    **STATE_COLOURS,
    "selected": {"reverse": True},
    "lost": {"fg": "red", "bold": True},
    "question": {"bold": True},
}
"""How `Output.style` shows what a text is; it is never said by its style alone."""

MARK, NO_MARK = "> ", "  "
MARK_WIDTH = len(MARK)
LEAST_ROWS_WITH_BAR = 6

HELP = (
    "arrows, j, k   select",
    "home, end      the first, the last",
    "escape         select nothing",
    "r  l  u        restart, load, unload",
    "c              cancel a request",
    "p              pause it, or resume it",
    "q, Ctrl-C      leave",
    "Ctrl-Z         leave it for a while",
)
HINTS = {
    None: "arrows select  ? help  q quit",
    "model": "r restart  l load  u unload  ? help",
    "request": "c cancel  p pause  ? help  q quit",
}


def screen(facts: Facts, controls: Controls, *, columns: int, rows: int, style: Style) -> list[str]:
    """The lines, from the top; never more than fit.

    Args:
        facts: what is known of the daemon.
        controls: what the keys have led to.
        columns: of the terminal.
        rows: likewise.
        style: adds colour; takes a text and what it is, a key of `STYLES`.
    """
    top = [_title(facts, columns, style)]
    if rows >= LEAST_ROWS_WITH_BAR:
        top.append(memory_bar(facts.looked.status, columns))
    bottom = [_cut(_last_line(facts, controls), columns)]
    if controls.question is not None:
        bottom = [style(bottom[0], "question")]
    room = max(rows - len(top) - len(bottom), 0)
    if controls.is_helping:
        body = [_cut(line, columns) for line in HELP[:room]]
    else:
        body = _body(facts, controls, columns, room, style)
    lines = [*top, *body, *[""] * (room - len(body)), *bottom]
    return lines[:rows] if rows >= len(top) + len(bottom) else lines[-rows:]


def _title(facts: Facts, columns: int, style: Style) -> str:
    """What fits of it, what matters least being last; nothing is cut in two."""
    status = facts.looked.status
    if facts.lost_at is not None:
        text = f"no daemon since {clock(facts.lost_at)}, still trying: {facts.lost}"
        return style(_cut(text, columns), "lost")
    count = len(facts.looked.requests["requests"]) + facts.looked.requests["more"]
    models = len(status["models"])
    parts = [
        f"mlxsup {status['version']}",
        f"{models} model{'' if models == 1 else 's'}",
        f"{count} request{'' if count == 1 else 's'}",
        f"up {format_duration(status['uptime_s'])}",
        f"pid {status['pid']}",
        str(status["endpoint"]),
    ]
    while len(parts) > 1 and len(", ".join(parts)) > columns:
        parts.pop()
    return style(_cut(", ".join(parts), columns), "header")


def _last_line(facts: Facts, controls: Controls) -> str:
    if controls.question is not None:
        return question_text(controls.question)
    if controls.is_helping:
        return "any key leaves this help"
    if controls.said:
        return controls.said
    selected = controls.selected
    return HINTS[selected.kind if selected is not None and facts.lost_at is None else None]


def _body(facts: Facts, controls: Controls, columns: int, room: int, style: Style) -> list[str]:
    """The tables, the remarks and the events, which share the room."""
    if facts.lost_at is not None:
        style = _only_dim(style)
    sections = [
        _models(facts, controls, columns, style),
        _requests(facts, controls, columns, style),
        Section(groups=[[style(line, "dim")] for line in _remarks(facts, columns)]),
        _events(facts, columns, style),
    ]
    rooms = shared(room, [section.wanted for section in sections])
    return [
        line
        for section, lines in zip(sections, rooms, strict=True)
        for line in section.lines(lines)
    ]


def _models(facts: Facts, controls: Controls, columns: int, style: Style) -> Section:
    header, *groups = render_rows(facts.rows, columns - MARK_WIDTH, style)
    return _marked("model", header[0], groups, controls, columns, style)


def _requests(facts: Facts, controls: Controls, columns: int, style: Style) -> Section:
    value = facts.looked.requests
    if not value["requests"]:
        return Section(header=style(_cut("no open requests", columns), "dim"), groups=[])
    header, *lines = request_rows(value["requests"], columns - MARK_WIDTH)
    groups = [[line] for line in lines]
    return _marked(
        "request", style(header, "header"), groups, controls, columns, style, more=value["more"]
    )


def _marked(
    kind: Kind,
    header: str,
    groups: Sequence[Sequence[str]],
    controls: Controls,
    columns: int,
    style: Style,
    more: int = 0,
) -> Section:
    """A section with a mark at what is selected, which is always among what is shown."""
    of_kind = [item for item in controls.items if item.kind == kind]
    selected = controls.selected
    focus = of_kind.index(selected) if selected in of_kind else None
    marked = []
    for place, lines in enumerate(groups):
        if place == focus:
            text = f"{MARK}{plain(lines[0])}".ljust(columns)
            marked.append([style(text, "selected"), *(f"{NO_MARK}{line}" for line in lines[1:])])
        else:
            marked.append([f"{NO_MARK}{line}" for line in lines])
    return Section(header=f"{NO_MARK}{header}", groups=marked, focus=focus or 0, more=more)


def _remarks(facts: Facts, columns: int) -> list[str]:
    """What `mlxsup status` says below its table, but for the first line about memory."""
    status = facts.looked.status
    return [
        *memory_lines(status, columns)[1:],
        *sharing_lines(status, columns),
        *spare_lines(status, columns),
        *gateway_lines(status, columns),
    ]


def _events(facts: Facts, columns: int, style: Style) -> Section:
    title, what = ("latest events", "header") if facts.events else ("no events yet", "dim")
    groups = [[_cut(line, columns)] for line in facts.events]
    return Section(header=style(_cut(title, columns), what), groups=groups, is_at_end=True)


def _only_dim(style: Style) -> Style:
    """What nobody confirms any longer is shown as that."""
    return lambda text, what: style(text, what if what == "selected" else "dim")


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: max(columns - 1, 0)]}…"
