"""The table of the fast path: for people, from the results that are kept in docs/fast_path.json.

docs/benchmarks.md has it between two markers, where `--keep` writes it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..report import interval_of_median
from ..sharing.claims import Claim
from ..sharing.document import NOT_MEASURED, verdict_text
from ..sharing.figures import range_of, shown
from .claims import ROWS
from .results import TRIAL, Failure, Found, Result, result_of
from support.verdict import Verdict

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "fast_path.json"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- the fast path: written by `python -m bench.gpu FOLDER --keep` and its like -->"
END = "<!-- end of the fast path -->"
HEAD = ("", "claim", "on", "target", "figure", "made of", "runs", "commit", "")
MANY = 9
"""From this many runs on, the interval of the median is more than the range once again."""


@dataclass(slots=True, kw_only=True)
class Kept:
    """What docs/fast_path.json holds.

    Attributes:
        results: by row.
        failures: attempts that gave no figures.
    """

    results: dict[str, Result] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def load(path: Path = KEPT) -> Kept:
    """Reads it."""
    if not path.exists():
        return Kept()
    entries = json.loads(path.read_text())
    return Kept(
        results={row: result_of(entry) for row, entry in entries["results"].items()},
        failures=[Failure(**entry) for entry in entries["failures"]],
    )


def keep(results: Iterable[Result], failures: Sequence[Failure], path: Path = KEPT) -> None:
    """Puts results in the place of earlier ones of their rows, and adds failures once.

    Raises:
        ValueError: a result is a trial's.
    """
    kept = load(path)
    for result in results:
        if result.commit == TRIAL:
            raise ValueError(f"{result.row} was measured with small shapes: measure it anew")
        kept.results[result.row] = result
    kept.failures += [one for one in failures if one not in kept.failures]
    in_order = {row: asdict(kept.results[row]) for row in ROWS if row in kept.results}
    about = {"results": in_order, "failures": [asdict(one) for one in kept.failures]}
    path.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")


# ---------------------------------------------------------------- for people


def verdict(claim: Claim, found: Found) -> Verdict:
    """How a claim stands."""
    if claim.limit is None:
        return Verdict.REPORTED
    is_kept = claim.is_kept(range_of(claim, found.values).value)
    return Verdict.KEPT if is_kept else Verdict.MISSED


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


def table(results: Mapping[str, Result], rows: Iterable[str] = ROWS) -> list[str]:
    """One line for each claim of these rows, in Markdown."""
    cells = [HEAD, *(line(claim, results.get(row)) for row in rows for claim in ROWS[row].claims)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(HEAD), *lines[1:]]


def written(kept: Kept, rows: Iterable[str] = ROWS) -> list[str]:
    """The table, where it was measured, and the attempts that gave no figures."""
    machines = sorted({result.machine for result in kept.results.values()})
    failures = [
        f"- {one.ended}, `{one.commit[:9]}`: {', '.join(one.rows)}: {one.reason}"
        for one in kept.failures
    ]
    lines = [*table(kept.results, rows), "", *(f"Measured on {name}." for name in machines)]
    return [*lines, "", "Attempts that gave no figures:", "", *failures] if failures else lines


def with_table(text: str, lines: Sequence[str]) -> str:
    """The document with another table.

    Raises:
        ValueError: a marker is missing, or there more than once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError("docs/benchmarks.md needs each of its two markers once")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return "\n".join([before + BEGIN, "", *lines]).rstrip() + f"\n\n{END}{after}"


def render() -> None:
    """Writes the document anew."""
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), written(load())))
