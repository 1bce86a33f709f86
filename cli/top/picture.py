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


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the screen: a header, and rows of one or more lines.

    Attributes:
        header: the line above the rows; None for none.
        groups: the lines of each row.
        focus: the row that must be shown, as an index.
        more: how many rows there are that the daemon has not listed.
        is_at_end: whether the last rows matter most, and not those around the focus.
    """

    header: Text | None = None
    groups: Sequence[Sequence[Text]]
    focus: int = 0
    more: int = 0
    is_at_end: bool = False

    @property
    def wanted(self) -> int:
        """Return how many lines show all of it."""
        return (self.header is not None) + sum(map(len, self.groups)) + bool(self.more)

    def lines(self, room: int) -> list[Text]:
        """Return as much of it as fits, and how many rows are hidden.

        A row is shown rather than the header, and the header rather than the number of the others.
        """
        if room <= 0:
            return []
        header = [] if self.header is None or (self.groups and room == 1) else [self.header]
        if not self.groups:
            return header
        room -= len(header)
        flat = [line for group in self.groups for line in group]
        if self.is_at_end:
            return [*header, *flat[-room:]]
        if len(flat) + bool(self.more) <= room:
            return [*header, *flat, *_count(self.more)]
        is_counted = room > len(self.groups[self.focus])
        first, end = self._shown(room - is_counted)
        shown = [line for group in self.groups[first:end] for line in group]
        hidden = len(self.groups) - (end - first) + self.more
        return [*header, *shown[: room - is_counted], *(_count(hidden) if is_counted else [])]

    def _shown(self, room: int) -> tuple[int, int]:
        """Return the first row that is shown and the one after the last, around the focus."""
        sizes = [len(group) for group in self.groups]
        first = self.focus
        used = sizes[first]
        while first > 0 and used + sizes[first - 1] <= room:
            first -= 1
            used += sizes[first]
        end = self.focus + 1
        while end < len(sizes) and used + sizes[end] <= room:
            used += sizes[end]
            end += 1
        return first, end


def _count(hidden: int) -> list[Text]:
    return [Text(f"  and {hidden} more")] if hidden else []


def body(
    look: Look, events: Sequence[str], selected: Item | None, width: int, height: int
) -> list[Text]:
    """Return the tables, the remarks and the events, which share the lines.

    Args:
        look: the latest one.
        events: lines about what happened, the newest last.
        selected: what is marked, if anything is.
        width: columns of the terminal.
        height: how many lines there are.
    """
    said = [line for remark in remarks(look.status) for line in wrapped(remark, width)]
    heard = [[Text(for_terminal(in_a_line(line)))] for line in events]
    sections = [
        _models(look, selected, width),
        _requests(look, selected, width),
        Section(groups=[[Text(for_terminal(line), style="dim")] for line in said]),
        Section(
            header=_header("latest events", "no events since top began", heard),
            groups=heard,
            is_at_end=True,
        ),
    ]
    rooms = shared(height, [section.wanted for section in sections])
    lines = [
        line for section, room in zip(sections, rooms, strict=True) for line in section.lines(room)
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def shared(room: int, wanted: Sequence[int]) -> list[int]:
    """Return how many lines each part gets: in turns one more, until it has all it wants.

    Args:
        room: how many lines there are.
        wanted: how many each part could use.
    """
    got = [0] * len(wanted)
    while room > sum(got) and got != list(wanted):
        for place, want in enumerate(wanted):
            if got[place] < want and sum(got) < room:
                got[place] += 1
    return got


def _header(title: str, empty: str, rows: Sequence[object]) -> Text:
    return Text(title, style="bold") if rows else Text(empty, style="dim")


def _models(look: Look, selected: Item | None, width: int) -> Section:
    header, *groups = models_table(look.status, look.status["models"], width - len(MARK))
    places = [item for item in items_of(look) if item.kind == "model"]
    return _marked(header[0], groups, places, selected, width)


def _requests(look: Look, selected: Item | None, width: int) -> Section:
    listed = look.requests["requests"]
    if not listed:
        return Section(header=_header("", "no open requests", listed), groups=[])
    header, *lines = request_lines(listed, width - len(MARK))
    places = [item for item in items_of(look) if item.kind == "request"]
    more = look.requests["more"]
    return _marked(header, [[line] for line in lines], places, selected, width, more)


def _marked(
    header: Line,
    groups: Sequence[Sequence[Line]],
    items: Sequence[Item],
    selected: Item | None,
    width: int,
    more: int = 0,
) -> Section:
    """Return a section with a mark at what is selected, which is always among what is shown."""
    focus = items.index(selected) if selected in items else None
    marked = []
    for place, lines in enumerate(groups):
        group = [Text.assemble(NO_MARK, *line) for line in lines]
        if place == focus:
            # Not its colours, which a terminal may show on themselves.
            group[0] = Text(f"{MARK}{group[0].plain.removeprefix(NO_MARK)}", style="reverse")
            group[0].pad_right(max(width - group[0].cell_len, 0))
        marked.append(group)
    return Section(
        header=Text.assemble(NO_MARK, *header), groups=marked, focus=focus or 0, more=more
    )
