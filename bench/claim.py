"""A claim, how it stands, and how a table shows it: the form of all tables of claims."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.verdict import Verdict

NOT_MEASURED = "*not measured*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One line of a table.

    Attributes:
        id: names its figure.
        what: is measured, for people.
        on: what it runs on.
        limit: what the figure is held against; None if it is only reported.
        is_least: the figure must be at least the limit, not at most.
        is_worst: the figure is the worst of its runs, not their median.
        unit: behind the figure; "%" for one that is stored as a fraction.
        digits: after the point.
        slack: added to the limit by the measure itself, for people ("plus one step").
    """

    id: str
    what: str
    on: str
    limit: float | None = None
    is_least: bool = False
    is_worst: bool = False
    unit: str = ""
    digits: int = 2
    slack: str = ""

    @property
    def target(self) -> str:
        """The limit, for people."""
        if self.limit is None:
            return "–"
        if self.limit == 0:
            return "none"
        sign = "≥" if self.is_least else "≤"
        return f"{sign}{self.shown(self.limit)}{self.slack and ', '}{self.slack}"

    def shown(self, value: float) -> str:
        """A value with its unit, for people."""
        if self.unit == "%":
            return f"{100 * value:.{self.digits}f} %"
        return f"{value:,.{self.digits}f} {self.unit}".rstrip()

    def verdict(self, value: float) -> Verdict:
        """How it stands, if that is its figure."""
        if self.limit is None:
            return Verdict.REPORTED
        is_kept = value >= self.limit if self.is_least else value <= self.limit
        return Verdict.KEPT if is_kept else Verdict.MISSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A figure and its range over runs.

    Attributes:
        value: the median or the worst of the runs, as the claim says.
        low: the smallest of the runs.
        high: the largest.
    """

    value: float
    low: float
    high: float


def range_of(claim: Claim, values: Sequence[float]) -> Range:
    """Sums runs up, as the claim wants it."""
    low, high = min(values), max(values)
    if not claim.is_worst:
        return Range(value=statistics.median(values), low=low, high=high)
    return Range(value=low if claim.is_least else high, low=low, high=high)


# ---------------------------------------------------------------- for people


def shown(claim: Claim, found: Range) -> str:
    """A figure and its range."""
    if found.low == found.high:
        return claim.shown(found.value)
    return f"{claim.shown(found.value)} ({claim.shown(found.low)} to {claim.shown(found.high)})"


def verdict_text(verdict: Verdict) -> str:
    """A miss must be seen."""
    return f"**{verdict}**" if verdict is Verdict.MISSED else str(verdict)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    cells = [head, *rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The part of a document that is written by a script.

    Attributes:
        document: its file.
        begin: the line before it, which is there once.
        end: the line behind it, which is there once.
    """

    document: Path
    begin: str
    end: str

    def filled(self, text: str, lines: Sequence[str]) -> str:
        """The document with other lines there.

        Raises:
            ValueError: a marker is missing, or there more than once.
        """
        if text.count(self.begin) != 1 or text.count(self.end) != 1:
            raise ValueError(f"{self.document.name} needs each of its two markers once")
        before, after = text.split(self.begin)[0], text.split(self.end)[1]
        filled = "\n".join([before + self.begin, "", *lines]).rstrip()
        return f"{filled}\n\n{self.end}{after}"

    def content(self, text: str) -> str:
        """What is there."""
        return text.split(self.begin)[1].split(self.end)[0]

    def fill(self, lines: Sequence[str]) -> None:
        """Writes the document anew."""
        self.document.write_text(self.filled(self.document.read_text(), lines))
