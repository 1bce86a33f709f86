"""`python -m promises [P2 …] [--small] [--scale X]`: measures, prints a part of the documents."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from support.tiny_model import make_tiny_model

from . import (
    beside,
    clients,
    crashes,
    doors,
    ends,
    loads,
    lost_work,
    passing_faults,
    stalls,
    stuck,
)
from .long_runs import LongRun, long_runs
from .measure import SMALL, Measure, Outcome, Place, Sizes
from .report import beside_lines, figure_lines, head_lines, long_run_lines, problem_lines

MEASURES: tuple[Measure, ...] = (
    *ends.MEASURES,
    *crashes.MEASURES,
    *stalls.MEASURES,
    *stuck.MEASURES,
    *lost_work.MEASURES,
    *loads.MEASURES,
    *passing_faults.MEASURES,
    *clients.MEASURES,
    *doors.MEASURES,
    *beside.MEASURES,
)
LONG = ("P1", "P17", "P22")


def tell(line: str) -> None:
    """Progress, apart from the report."""
    print(line, file=sys.stderr, flush=True)


def measure_all(measures: Sequence[Measure], place: Place) -> list[Outcome]:
    """All rounds; a measure that has failed once is not repeated."""
    outcomes = [Outcome(measure=measure) for measure in measures]
    for repeat in range(place.sizes.repeats):
        for outcome in outcomes:
            measure = outcome.measure
            if repeat >= measure.most_repeats or outcome.problem:
                continue
            start_s = time.monotonic()
            try:
                outcome.add(measure.round(place))
            except Exception as error:  # noqa: BLE001 - the report names whatever broke
                outcome.problem = f"{type(error).__name__}: {error}"[:500]
                tell(traceback.format_exc())
            took_s = time.monotonic() - start_s
            tell(f"round {repeat + 1}: {measure.promise} ({measure.where}) {took_s:.1f} s")
    return outcomes


def report(outcomes: Sequence[Outcome], runs: Sequence[LongRun], sizes: Sizes, scale: str) -> str:
    """The whole of it, in Markdown."""
    by_number = sorted(outcomes, key=lambda outcome: int(outcome.measure.promise[1:] or 0))
    lines = head_lines(sizes, scale) + figure_lines(by_number, sizes)
    if runs:
        lines += long_run_lines(runs)
    if any(figure.theirs for outcome in outcomes for figure in outcome.measure.figures):
        lines += beside_lines(outcomes, sizes)
    return "\n".join(lines + problem_lines(outcomes))


def main() -> int:
    """Exit code 1 where a promise is broken."""
    parser = argparse.ArgumentParser(prog="promises", description=__doc__)
    parser.add_argument("names", nargs="*", help="P2 and so on, P0 for the peer; all if absent")
    parser.add_argument("--small", action="store_true", help="seconds; no figures to publish")
    parser.add_argument("--scale", type=float, default=1.0, help="of P1, P17 and P22; 0: without")
    parser.add_argument("--repeats", type=int, help="rounds; 5 are published")
    given = parser.parse_args()
    sizes = SMALL if given.small else Sizes()
    if given.repeats is not None:
        sizes = replace(sizes, repeats=given.repeats)
    measures = [m for m in MEASURES if not given.names or m.promise in given.names]
    with tempfile.TemporaryDirectory() as folder:
        place = Place(sizes=sizes, tiny=make_tiny_model(Path(folder) / "tiny"))
        outcomes = measure_all(measures, place)
    is_long = given.scale > 0 and (not given.names or set(given.names) & set(LONG))
    runs = list(long_runs(given.scale)) if is_long else []
    is_published = not given.small and given.scale in (0.0, 1.0)
    print(
        report(
            outcomes,
            runs,
            sizes,
            "published sizes" if is_published else "smaller counts than the lines say",
        )
    )
    is_kept = all(o.is_kept(f) for o in outcomes for f in o.measure.figures)
    return 0 if is_kept and all(run.is_kept for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
