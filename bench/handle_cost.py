"""What sharing adds to `Core.handle` of a step: this tree next to one from before.

`python -m bench.handle_cost [--base COMMIT_OR_FOLDER] [--repeats N]`. Each repeat asks a fresh
process of each tree in turn; a figure is the processor time of the quickest of many batches of
steps, so that other work on the machine hurts less.
"""

from __future__ import annotations

import statistics

from .compare import ROOT, Times, compare
from .report import print_table, spread

CHILD = ROOT / "bench" / "handle_steps.py"
BEFORE_SHARING = "24e583a"
"""The last commit before engine seconds."""

MOST = 0.10


def added(before: Times, now: Times) -> dict[int, list[float]]:
    """What was added in each repeat, as a part of what there was before, by rows."""
    return {
        rows: [after / first - 1 for first, after in zip(before[rows], now[rows], strict=True)]
        for rows in before
    }


def print_cost(before: Times, now: Times) -> None:
    """One row for each number of rows."""
    head = ("rows", "before sharing", "now", "added", "target")
    parts = added(before, now)
    table = []
    for rows in before:
        verdict = "" if statistics.median(parts[rows]) <= MOST else ", MISSED"
        percent = [100 * part for part in parts[rows]]
        table.append(
            [
                str(rows),
                spread(before[rows], " µs", 1),
                spread(now[rows], " µs", 1),
                spread(percent, " %", 1),
                f"≤{MOST:.0%}{verdict}",
            ]
        )
    print_table(head, table)


if __name__ == "__main__":
    compare(
        "bench.handle_cost",
        __doc__,
        base=BEFORE_SHARING,
        child=CHILD,
        title="What sharing adds to a step, the core alone (fake engine)",
        show=print_cost,
    )
