"""Draws docs/images/sharing from the latest runs in build/sharing; a measure that has not run here
leaves its picture as it is. Needs the extra `plots`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from matplotlib import pyplot

from .curves import saved
from .document import PICTURES
from .played import STEP_S
from .virtual_order import DRR, FCFS, OURS, WEIGHED

COLOURS = {OURS: "#0b6e4f", DRR: "#e09f3e", FCFS: "#9e2a2b"}
GREY = "#6c757d"
DOTS_PER_INCH = 110


def colour(name: str) -> str:
    """One for each server."""
    return COLOURS.get(name, GREY)


def draw_bound(found: Any) -> Any:
    """The gap over time, one line for each seed."""
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for axis, name in zip(axes, (OURS, DRR, FCFS), strict=True):
        for gaps in found["gaps"]:
            times = [STEP_S * (step + 1) for step in range(len(gaps[name]))]
            axis.plot(times, gaps[name], color=colour(name), linewidth=0.6, alpha=0.6)
        axis.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axis.axhline(-1, color="black", linewidth=0.8, linestyle="--")
        axis.set_title(name)
        axis.set_xlabel("virtual seconds")
        axis.set_ylim(-3, 3)
    axes[0].set_ylabel("difference, in bounds")
    return figure


def draw_shares(found: Any) -> Any:
    """Shares next to weights, and Jain's index."""
    figure, (shares, index) = pyplot.subplots(1, 2, figsize=(10, 3.2))
    weights = sum(asker.weight for asker in WEIGHED)
    names = (OURS, DRR, FCFS)
    for place, asker in enumerate(WEIGHED):
        for offset, name in enumerate(names):
            parts = [run[name].get(asker.name, 0.0) / sum(run[name].values())
                     for run in found["weighed"]]  # fmt: skip
            middle = statistics.median(parts)
            spread = [[middle - min(parts)], [max(parts) - middle]]
            shares.bar(place + 0.25 * (offset - 1), middle, 0.23, yerr=spread, color=colour(name),
                       label=name if not place else None)  # fmt: skip
        target = asker.weight / weights
        shares.plot([place - 0.4, place + 0.4], [target, target], color="black", linewidth=1.2)
    shares.set_xticks(range(len(WEIGHED)), [f"weight {asker.weight:g}" for asker in WEIGHED])
    shares.set_ylabel("share of engine seconds")
    shares.legend(fontsize=8)
    index.boxplot([found["jain"][name] for name in names], tick_labels=names)
    index.axhline(0.95, color="black", linewidth=0.8, linestyle="--")
    index.set_ylabel("Jain's index, 10:1 offered")
    index.tick_params(axis="x", labelsize=7)
    return figure


def draw_waits(found: Any) -> Any:
    """How many requests waited at most that long."""
    figure, axis = pyplot.subplots(figsize=(7, 3.4))
    for name, longest in found.items():
        ranks = [(place + 1) / len(longest) for place in range(len(longest))]
        style = "-" if name in COLOURS else "--"
        axis.plot(sorted(longest), ranks, color=colour(name), label=name, linestyle=style)
    axis.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axis.set_xscale("log")
    axis.set_xlabel("longest wait below a flood, in units of twice aging_s")
    axis.set_ylabel("part of the seeds")
    axis.legend(fontsize=8)
    return figure


def draw_hits(found: Any) -> Any:
    """Hit rates of all seeds."""
    figure, axis = pyplot.subplots(figsize=(7, 3.0))
    axis.boxplot([[100 * rate for rate in rates] for rates in found.values()],
                 tick_labels=list(found), orientation="horizontal")  # fmt: skip
    axis.set_xlabel("requests that find their model loaded, %")
    return figure


def draw_cost(found: Any) -> Any:
    """A step, and a dispatch."""
    figure, (steps, dispatches) = pyplot.subplots(1, 2, figsize=(10, 3.2))
    rows = list(found["now"])
    for offset, (part, name, shade) in enumerate(
        (("before", "before sharing", GREY), ("now", "now", COLOURS[OURS]))
    ):
        middles = [statistics.median(found[part][number]) for number in rows]
        places = [place + 0.4 * (offset - 0.5) for place in range(len(rows))]
        steps.bar(places, middles, 0.38, color=shade, label=name)
    steps.set_xticks(range(len(rows)), [f"{number} rows" for number in rows])
    steps.set_ylabel("µs of a step")
    steps.legend(fontsize=8)
    waiting = list(found["dispatch"])
    dispatches.boxplot([found["dispatch"][number] for number in waiting], tick_labels=waiting)
    dispatches.set_ylim(bottom=0)
    dispatches.set_xlabel("requests that wait")
    dispatches.set_ylabel("µs of an end and a dispatch")
    return figure


DRAWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bound": ("order", draw_bound),
    "shares": ("order", draw_shares),
    "waits": ("waits", draw_waits),
    "hits": ("hits", draw_hits),
    "cost": ("cost", draw_cost),
}
"""What each picture is drawn from, and how."""


def draw_all() -> list[str]:
    """Draws what has been measured here; returns the names of the pictures."""
    pyplot.switch_backend("agg")
    PICTURES.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (source, draw) in DRAWN.items():
        found = saved(source)
        if found is None:
            continue
        picture = draw(found)
        picture.tight_layout()
        # Without a date or a version, the same figures make the same bytes.
        picture.savefig(PICTURES / f"{name}.png", dpi=DOTS_PER_INCH, metadata={"Software": None})
        pyplot.close(picture)
        drawn.append(name)
    return drawn
