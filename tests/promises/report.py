"""The report in Markdown, as docs/reliability.md carries it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version

import psutil
from mlxsup.protocol.version import VERSION

from .long_runs import LongRun
from .measure import Outcome, Sizes, spread


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


def head_lines(sizes: Sizes, scale: str) -> list[str]:
    """Where and how it ran."""
    memory_gib = psutil.virtual_memory().total / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "pyzmq"))
    return [
        "## Figures",
        "",
        f"{date.today()} · {platform.system()} {platform.machine()}, {psutil.cpu_count()} cores,"
        f" {memory_gib:.0f} GiB · Python {platform.python_version()}, mlxsup {VERSION}, {packages}"
        f" · {scale}.",
        "",
        f"Rounds: {sizes.repeats}, fewer where the last column says so; each round holds every"
        " measure, with the fault and without it. Median (smallest to largest). *Fake engine*: the"
        " real supervisor and a real worker process with an engine that makes up its tokens. *MLX,"
        " CPU*: mlx-lm with a tiny llama.",
        "",
    ]


def figure_lines(outcomes: Sequence[Outcome], sizes: Sizes) -> list[str]:
    """The promises, each with its figures."""
    rows = []
    for outcome in outcomes:
        for figure in outcome.measure.figures:
            if figure.theirs:
                continue
            samples = outcome.samples
            rows.append(
                (
                    outcome.measure.promise,
                    figure.what,
                    outcome.measure.where,
                    spread(figure, samples.get(figure.key, ()), sizes.patience_s),
                    spread(figure, samples.get(figure.without, ()), sizes.patience_s),
                    figure.target or "–",
                    "kept" if outcome.is_kept(figure) else "BROKEN",
                    str(outcome.rounds),
                )
            )
    head = ("", "figure", "on", "with the fault", "without", "target", "", "rounds")
    return [*table(head, rows), ""]


def beside_lines(outcomes: Sequence[Outcome], sizes: Sizes) -> list[str]:
    """The same faults, mlxsup and its peer."""
    rows = [
        (
            figure.what,
            spread(figure, outcome.samples.get(figure.key, ()), sizes.patience_s),
            spread(figure, outcome.samples.get(figure.theirs, ()), sizes.patience_s),
            str(outcome.rounds),
        )
        for outcome in outcomes
        for figure in outcome.measure.figures
        if figure.theirs
    ]
    head = ("fault and figure (MLX, CPU)", "mlxsup", "mlx_lm.server", "rounds")
    return [*table(head, rows), ""]


def long_run_lines(runs: Sequence[LongRun]) -> list[str]:
    """The runs that count instead of timing."""
    rows = [
        (run.promise, run.what, "<br>".join(run.lines), "kept" if run.is_kept else "BROKEN")
        for run in runs
    ]
    return [*table(("", "run", "what it prints", ""), rows), ""]


def problem_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """What was not as promised."""
    return [
        f"- {outcome.measure.promise} ({outcome.measure.where}): {outcome.problem}"
        for outcome in outcomes
        if outcome.problem
    ]
