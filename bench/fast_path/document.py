"""The tables of rows: for people, from the results that are kept in docs/.

docs/benchmarks.md has each between two markers, where `--keep` writes it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..claim import (
    NOT_MEASURED,
    Claim,
    Place,
    markdown,
    range_of,
    shown,
    verdict_text,
)
from ..report import interval_of_median
from .claims import ROWS, Row
from .results import TRIAL, Failure, Found, Result, result_of
from support.verdict import Verdict

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
HEAD = ("", "claim", "on", "target", "figure", "made of", "runs", "commit", "")
MANY = 9
"""From this many runs on, the interval of the median is more than the range once again."""


@dataclass(slots=True, kw_only=True)
class Kept:
    """What a file in docs/ holds.

    Attributes:
        results: by row.
        failures: attempts that gave no figures.
    """

    results: dict[str, Result] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table of rows, and the file that keeps what it shows.

    Attributes:
        rows: all of them by name, in order.
        path: of the file.
        place: of the table.
    """

    rows: Mapping[str, Row]
    path: Path
    place: Place

    def load(self) -> Kept:
        """Reads the file."""
        if not self.path.exists():
            return Kept()
        entries = json.loads(self.path.read_text())
        return Kept(
            results={row: result_of(entry) for row, entry in entries["results"].items()},
            failures=[Failure(**entry) for entry in entries["failures"]],
        )

    def keep(self, results: Iterable[Result], failures: Sequence[Failure]) -> None:
        """Puts results in the place of earlier ones of their rows, and adds failures once.

        Raises:
            ValueError: a result is a trial's.
        """
        kept = self.load()
        for result in results:
            if result.commit == TRIAL:
                raise ValueError(f"{result.row} was measured with small shapes: measure it anew")
            kept.results[result.row] = result
        kept.failures += [one for one in failures if one not in kept.failures]
        in_order = {row: asdict(kept.results[row]) for row in self.rows if row in kept.results}
        about = {"results": in_order, "failures": [asdict(one) for one in kept.failures]}
        self.path.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")

    def table(self, results: Mapping[str, Result], names: Iterable[str] | None = None) -> list[str]:
        """One line for each claim of these rows, or of all, in Markdown."""
        return markdown(
            HEAD,
            (
                line(claim, results.get(name))
                for name in (self.rows if names is None else names)
                for claim in self.rows[name].claims
            ),
        )

    def written(self, kept: Kept, names: Iterable[str] | None = None) -> list[str]:
        """The table, where it was measured, and the attempts that gave no figures."""
        machines = sorted({result.machine for result in kept.results.values()})
        failures = [
            f"- {one.ended}, `{one.commit[:9]}`: {', '.join(one.rows)}: {one.reason}"
            for one in kept.failures
        ]
        on = [f"Measured on {name}." for name in machines]
        lines = [*self.table(kept.results, names), "", *on]
        return [*lines, "", "Attempts that gave no figures:", "", *failures] if failures else lines

    def render(self) -> None:
        """Writes the document anew."""
        self.place.fill(self.written(self.load()))


# ---------------------------------------------------------------- for people


def verdict(claim: Claim, found: Found) -> Verdict:
    """How a claim stands."""
    return claim.verdict(range_of(claim, found.values).value)


def figure_text(claim: Claim, found: Found) -> str:
    """A figure with its range, and the interval of its median if there are many runs."""
    text = shown(claim, range_of(claim, found.values))
    interval = interval_of_median(found.values)
    if not claim.is_worst and interval is not None and len(found.values) >= MANY:
        text += f", 95 %: {claim.shown(interval[0])} to {claim.shown(interval[1])}"
    return text + (f". {found.note}" if found.note else "")


def sides_text(found: Found) -> str:
    """What it was made of: medians and ranges."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    parts = []
    for name, values in found.sides.items():
        low, middle, high = (number(f(values)) for f in (min, statistics.median, max))
        span = "" if low == high else f" ({low} to {high})"
        parts.append(f"{name}: {middle}{span} {found.unit}".rstrip())
    return "; ".join(parts)


def line(claim: Claim, result: Result | None) -> tuple[str, ...]:
    """The cells of one claim."""
    start = (f'<a id="{claim.id}"></a>', claim.what, claim.on, claim.target)
    found = result.found.get(claim.id) if result else None
    if result is None or found is None:
        return (*start, NOT_MEASURED, "", "", "", "")
    figure, sides = figure_text(claim, found), sides_text(found)
    runs, commit = f"{len(found.values):,}", f"`{result.commit[:9]}`"
    return (*start, figure, sides, runs, commit, verdict_text(verdict(claim, found)))


FAST_PATH = Sheet(
    rows=ROWS,
    path=ROOT / "docs" / "fast_path.json",
    place=Place(
        document=DOCUMENT,
        begin="<!-- the fast path: written by `python -m bench.gpu FOLDER --keep` and its like -->",
        end="<!-- end of the fast path -->",
    ),
)
