"""`python -m promises [--only P2 chaos …] [--render] [--scratch] [--small]`: see `main`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from .campaigns import CAMPAIGNS, run_campaign
from .document import write_figures
from .measure import SMALL, Measure, Outcome, Place, Sizes
from .measures import MEASURES
from .report import beside_lines, figure_lines, gather, problem_lines, report, verdicts_of
from .results import Results, UncleanTreeError, clean_commit
from support.tiny_model import make_tiny_model
from support.verdict import EXIT_CODES, Verdict

USAGE = 64


def tell(line: str) -> None:
    """Progress, apart from the report."""
    print(line, file=sys.stderr, flush=True)


def measure_all(outcomes: Sequence[Outcome], place: Place, keep: Callable[[Outcome], None]) -> None:
    """All rounds that are due; a measure that has failed once is not repeated.

    Args:
        outcomes: what is known already; grows.
        place: for every round.
        keep: called after each round of each measure.
    """
    for repeat in range(place.sizes.repeats):
        for outcome in outcomes:
            measure = outcome.measure
            if repeat >= measure.most_repeats or outcome.rounds > repeat or outcome.problem:
                continue
            start_s = time.monotonic()
            try:
                outcome.add(measure.round(place))
            except Exception as error:  # noqa: BLE001 - the report names whatever broke
                outcome.fail(error)
                tell(traceback.format_exc())
            keep(outcome)
            tell(f"round {repeat + 1}: {measure.key} {time.monotonic() - start_s:.1f} s")


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Of the worst."""
    for worst in (Verdict.MISSED, Verdict.NOT_SHOWN):
        if worst in verdicts:
            return EXIT_CODES[worst]
    return EXIT_CODES[Verdict.KEPT]


def scratch(measures: Sequence[Measure], sizes: Sizes) -> int:
    """Measures in any tree, keeps nothing, and prints the tables."""
    outcomes = [Outcome(measure=measure) for measure in measures]
    with tempfile.TemporaryDirectory() as folder:
        place = Place(sizes=sizes, tiny=make_tiny_model(Path(folder) / "tiny"))
        measure_all(outcomes, place, lambda outcome: None)
    tables = figure_lines, beside_lines
    lines = [line for part in tables for line in part(outcomes, sizes)]
    print("\n".join([*lines, *problem_lines(outcomes)]))
    return exit_code([o.verdict(figure) for o in outcomes for figure in o.measure.figures])


def measure_and_keep(results: Results, names: Sequence[str], sizes: Sizes) -> None:
    """Runs what is asked for and not known of this commit yet.

    Raises:
        UncleanTreeError: the tree has changed meanwhile.
    """

    def check() -> None:
        if clean_commit() != results.commit:
            raise UncleanTreeError(f"the tree is no more that of {results.commit[:12]}")

    def keep(outcome: Outcome) -> None:
        check()
        results.save_outcome(outcome)

    wanted = [m for m in MEASURES if not names or m.promise in names or m.key in names]
    outcomes = [results.load_outcome(measure)[0] for measure in wanted]
    with tempfile.TemporaryDirectory() as folder:
        place = Place(sizes=sizes, tiny=make_tiny_model(Path(folder) / "tiny"))
        measure_all(outcomes, place, keep)
    for campaign in CAMPAIGNS:
        is_wanted = not names or campaign.name in names or set(campaign.promises) & set(names)
        if is_wanted and results.load_run(campaign) is None:
            tell(f"{campaign.name}: python -m {' '.join(campaign.arguments)}")
            run = run_campaign(campaign)
            check()
            results.save_run(run)
            tell(f"{campaign.name}: {run.verdict}, {run.took_s:.0f} s")


def main() -> int:
    """Measures what is not known of this commit yet, and writes docs/reliability.md.

    Results are kept in docs/promises/COMMIT, one file each, so that a run can be interrupted and
    made in pieces, also on another machine. A measure is repeated only when its file is removed.
    """
    parser = argparse.ArgumentParser(prog="promises", description=main.__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help="promises (P0: the peer), measures and campaigns; nothing is written to docs/",
    )  # fmt: skip
    parser.add_argument("--render", action="store_true", help="measure nothing, write docs/")
    parser.add_argument("--commit", help="whose results are rendered; the tree's, if absent")
    parser.add_argument("--scratch", action="store_true", help="print figures, keep nothing")
    parser.add_argument("--small", action="store_true", help="scratch, in seconds")
    parser.add_argument("--repeats", type=int, help="rounds; 5 are published")
    given = parser.parse_args()
    known = {m.promise for m in MEASURES} | {m.key for m in MEASURES}
    known |= {name for c in CAMPAIGNS for name in (c.name, *c.promises)}
    if unknown := set(given.only) - known:
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(sorted(known))}")
    sizes = SMALL if given.small else Sizes()
    if given.repeats is not None:
        sizes = replace(sizes, repeats=given.repeats)
    if given.small or given.scratch:
        measures = [m for m in MEASURES if not given.only or {m.promise, m.key} & set(given.only)]
        return scratch(measures, sizes)
    try:
        results = Results(given.commit or clean_commit())
        if not given.render:
            measure_and_keep(results, given.only, sizes)
        findings = gather(results, MEASURES)
        if given.render or not given.only:
            write_figures(results.commit, report(results.commit, findings, Sizes()))
    except UncleanTreeError as error:
        print(f"promises: {error}", file=sys.stderr)
        return USAGE
    return exit_code(verdicts_of(findings))


if __name__ == "__main__":
    sys.exit(main())
