"""What `mlxsup top` shows of a look, as the lines of a terminal of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.text import Text

from ..terminal.output import Line
from ..terminal.requests import request_lines
from ..terminal.status import models_table, remarks
from ..terminal.text import counted, format_duration, in_a_line, wrapped
from ..terminal.writer import for_terminal
from .looks import Look

MARK, NO_MARK = "> ", "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A model or a request that can be selected; equal to itself in other states.

    Attributes:
        kind: which of them.
        name: for the daemon: a model's name, or the id or number of a request.
        title: for people: a model's name, or the id of a request.
        state: as its row shows it.
    """

    kind: Literal["model", "request"]
    name: str
    title: str = field(compare=False)
    state: str = field(compare=False)


def items_of(look: Look) -> tuple[Item, ...]:
    """Return what can be selected, in the order of the screen."""
    models, listed = look.status["models"], look.requests["requests"]
    ids = Counter(one["id"] for one in listed)
    items = [
        Item(kind="model", name=str(one["name"]), title=str(one["name"]), state=str(one["state"]))
        for one in models
    ]
    for one in listed:
        # A number means another request once another daemon answers, an id never does; but two
        # connections may use the same one.
        name = str(one["id"] if ids[one["id"]] == 1 else one["number"])
        items.append(Item(kind="request", name=name, title=str(one["id"]), state=str(one["state"])))
    return tuple(items)


def title(look: Look, width: int) -> str:
    """Return what fits of the title, what matters least being last; no part is cut in two."""
    status = look.status
    parts = [
        f"mlxsup {status['version']}",
        counted(len(status["models"]), "model"),
        counted(len(look.requests["requests"]) + look.requests["more"], "request"),
        f"up {format_duration(status['uptime_s'])}",
        f"pid {status['pid']}",
        str(status["endpoint"]),
    ]
    while len(parts) > 1 and len(", ".join(parts)) > width:
        parts.pop()
    return ", ".join(parts)


def body(
    look: Look, events: Sequence[str], selected: Item | None, width: int, height: int
) -> list[Text]:
    """Return the tables, the remarks and the events, cut to a terminal of this size.

    The tables get all lines but a third, which are for the latest events, or what the tables leave
    to them.

    Args:
        look: the latest one.
        events: lines about what happened, the newest last.
        selected: what is marked, if anything is.
        width: columns of the terminal.
        height: how many lines there are.
    """
    lines, focus = _tables(look, selected, width)
    room = max(2, min(len(lines), max(height - len(events) - 1, height - height // 3)))
    if len(lines) > room:
        # The selected row is always shown, and the first ones if nothing is selected.
        first = max(focus - room + 2, 0)
        hidden = len(lines) - room + 1
        lines = [*lines[first : first + room - 1], Text(f"  and {hidden} more lines")]
    lines.append(
        Text("latest events", style="bold")
        if events
        else Text("no events since top began", style="dim")
    )
    latest = list(events)[max(len(events) - height + len(lines), 0) :]
    lines += [Text(for_terminal(in_a_line(line))) for line in latest]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _tables(look: Look, selected: Item | None, width: int) -> tuple[list[Text], int]:
    """Return the lines of models, requests and remarks, and the place of the selected row's last
    one; 0 without a selection."""
    (models_header,), *models = models_table(look.status, look.status["models"], width - len(MARK))
    nothing: list[Line] = [[("no open requests", "dim")]]
    listed, more = look.requests["requests"], look.requests["more"]
    requests_header, *requests = request_lines(listed, width - len(MARK)) if listed else nothing
    lines: list[Text] = []
    focus, items = 0, iter(items_of(look))
    for header, groups in ((models_header, models), (requests_header, [[one] for one in requests])):
        lines.append(Text.assemble(NO_MARK, *header))
        for group in groups:
            marked = [Text.assemble(NO_MARK, *line) for line in group]
            if next(items) == selected:
                # Not its colours, which a terminal may show on themselves.
                marked[0] = Text(f"{MARK}{marked[0].plain.removeprefix(NO_MARK)}", style="reverse")
                marked[0].pad_right(max(width - marked[0].cell_len, 0))
                focus = len(lines) + len(marked) - 1
            lines += marked
    if more:
        lines.append(Text(f"{NO_MARK}and {more} more"))
    said = [line for remark in remarks(look.status) for line in wrapped(remark, width)]
    return lines + [Text(for_terminal(line), style="dim") for line in said], focus
