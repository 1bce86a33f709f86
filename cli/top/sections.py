"""How the parts of a screen share its lines, and which of their rows they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the screen: a line that says what it is, and rows of one or more lines.

    Attributes:
        header: the line above the rows; empty for none.
        groups: the lines of each row.
        focus: the row that must be shown, as an index.
        more: how many rows there are that nobody has listed.
        is_at_end: whether the last rows matter most, and not those around the focus.
    """

    header: str = ""
    groups: Sequence[Sequence[str]]
    focus: int = 0
    more: int = 0
    is_at_end: bool = False

    @property
    def wanted(self) -> int:
        """How many lines show all of it."""
        return bool(self.header) + sum(map(len, self.groups)) + bool(self.more)

    def lines(self, room: int) -> list[str]:
        """As much of it as fits, and how many rows are hidden.

        A row is shown rather than the header, and the header rather than the number of the others.
        """
        if room <= 0:
            return []
        if not self.groups:
            return [self.header] if self.header else []
        header = [self.header] if self.header and room > 1 else []
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
        """The first row that is shown and the one after the last; the focus is one of them."""
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


def shared(room: int, wanted: Sequence[int]) -> list[int]:
    """How many lines each part gets: one after the other gets one more, until it has all it wants.

    Args:
        room: how many lines there are.
        wanted: how many each part could use.
    """
    got = [0] * len(wanted)
    while room > sum(got) and any(have < want for have, want in zip(got, wanted, strict=True)):
        for place, want in enumerate(wanted):
            if got[place] < want and sum(got) < room:
                got[place] += 1
    return got


def _count(hidden: int) -> list[str]:
    return [f"  and {hidden} more"] if hidden else []
