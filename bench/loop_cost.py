"""What the worker's step loop adds to the engine's step: this tree next to one from before.

`python -m bench.loop_cost [--base COMMIT_OR_FOLDER] [--repeats N]`. Each repeat asks a fresh
process of each tree in turn; a figure is the processor time of the quickest of many batches of
steps. Nothing is sent, so what a socket costs comes on top.
"""

from __future__ import annotations

import statistics

from .compare import ROOT, Times, compare
from .report import print_table, spread

CHILD = ROOT / "bench" / "loop_steps.py"
BEFORE = "a66137d"
"""The last commit at which every token was sorted into lists of pieces."""

FIXED_US, ROW_US = 60.0, 2.0
"""The target: so much for a step, and so much for each row."""


def print_cost(before: Times, now: Times) -> None:
    """One row for each number of rows."""
    table = []
    for rows in before:
        most_us = FIXED_US + ROW_US * rows
        verdict = "kept" if statistics.median(now[rows]) <= most_us else "MISSED"
        table.append(
            [
                str(rows),
                spread(before[rows], " µs", 1),
                spread(now[rows], " µs", 1),
                f"≤{most_us:.0f} µs, {verdict}",
            ]
        )
    print_table(("rows", "before", "now", "target"), table)


if __name__ == "__main__":
    compare(
        "bench.loop_cost",
        __doc__,
        base=BEFORE,
        child=CHILD,
        title="What the step loop adds to the engine's step (no engine, no socket)",
        show=print_cost,
    )
