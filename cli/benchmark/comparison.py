"""Says what is slower or faster than in an earlier run, beyond what repeats differ by. Pure.

Slower means that every repeat of one run lies above every repeat of the other; with five repeats
each that happens by chance once in 252 times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .figures import FIGURES, Figure, Unit, summary
from .run import Run
from .saved import SavedRun, conditions_of
from .sizes import Cell

LEAST_REPEATS = 3
"""Of both runs. If nothing has changed, all of 3 values are above all of 3 others once in 20 times,
and all of 5 above 5 others once in 252 times."""


def compare(run: Run, now: Mapping[str, Any], before: SavedRun) -> dict[str, Any]:
    """What has changed, as `--json` prints it.

    A figure has changed if its values do not overlap: the best of one run is worse than the worst
    of the other.

    Args:
        run: the new run.
        now: the same as `--json` prints it, for its conditions.
        before: the earlier one.
    """
    slower: list[dict[str, Any]] = []
    faster: list[dict[str, Any]] = []
    compared = too_few = 0
    for cell, figure, values, earlier in _pairs(run, before):
        if min(len(values), len(earlier)) < LEAST_REPEATS:
            too_few += 1
            continue
        compared += 1
        change = _change(cell, figure, values, earlier)
        if min(values) > max(earlier) or max(values) < min(earlier):
            (slower if change["slower_percent"] > 0 else faster).append(change)
    conditions = conditions_of(now)
    return {
        "file": str(before.path),
        "measured_at": before.measured_at,
        "compared": compared,
        "too_few": too_few,
        "not_there": sum(cell not in before.cells for cell in run.values),
        "slower": sorted(slower, key=lambda one: -one["slower_percent"]),
        "faster": sorted(faster, key=lambda one: one["slower_percent"]),
        "conditions": [
            {"what": what, "before": earlier, "now": conditions.get(what, "")}
            for what, earlier in before.conditions.items()
            if conditions.get(what, "") != earlier
        ],
    }


def passes(comparison: Mapping[str, Any], percent: float) -> bool:
    """Whether figures were compared, and none is slower beyond the spread and by more than this."""
    too_slow = any(one["slower_percent"] > percent for one in comparison["slower"])
    return comparison["compared"] > 0 and not too_slow


def _pairs(
    run: Run, before: SavedRun
) -> Sequence[tuple[Cell, Figure, Sequence[float], Sequence[float]]]:
    """The figures that both runs have, and that say whether something is slow."""
    return [
        (cell, figure, values, earlier)
        for cell, own in run.values.items()
        for figure in FIGURES
        if figure.is_compared
        and (values := own.get(figure.name))
        and (earlier := before.cells.get(cell, {}).get(figure.name))
        and min(*values, *earlier) > 0
    ]


def _change(
    cell: Cell, figure: Figure, values: Sequence[float], earlier: Sequence[float]
) -> dict[str, Any]:
    """How much longer the same takes, by the medians."""
    after, before = summary(values)["median"], summary(earlier)["median"]
    times = before / after if figure.unit is Unit.PER_SECOND else after / before
    return {
        "prompt_tokens": cell.prompt_tokens,
        "output_tokens": cell.output_tokens,
        "concurrency": cell.concurrency,
        "figure": figure.name,
        "before": before,
        "now": after,
        "slower_percent": 100 * (times - 1),
    }
