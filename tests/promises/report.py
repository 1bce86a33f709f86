"""The report in Markdown, as docs/reliability.md carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .campaigns import CAMPAIGNS, Run
from .measure import Measure, Outcome, Sizes, spread
from .results import Note, Results
from support.verdict import Verdict

NOT_RUN = "it was not run at this commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that is known of one commit.

    Attributes:
        outcomes: of every measure, by promise.
        runs: of every campaign; None where it was not run.
        notes: of all that was run.
    """

    outcomes: tuple[Outcome, ...]
    runs: tuple[Run | None, ...]
    notes: tuple[Note, ...]


def gather(results: Results, measures: Sequence[Measure]) -> Findings:
    """Reads what has been measured."""
    by_number = sorted(measures, key=lambda measure: int(measure.promise[1:]))
    outcomes = [results.load_outcome(measure) for measure in by_number]
    runs = [results.load_run(campaign) for campaign in CAMPAIGNS]
    return Findings(
        outcomes=tuple(outcome for outcome, _ in outcomes),
        runs=tuple(run and run[0] for run in runs),
        notes=(*(note for _, note in outcomes if note), *(run[1] for run in runs if run)),
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


def head_lines(commit: str, notes: Sequence[Note]) -> list[str]:
    """What ran, where and when."""
    dates = sorted({note.ended for note in notes})
    when = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "nothing was run"
    machines = " · also ".join(sorted({note.machine for note in notes}))
    return [
        f"Commit `{commit}` · {when} · {machines}",
        "",
        "Each round holds every measure, with the fault and without it. Median (smallest to"
        " largest). *Fake engine*: the real supervisor and a real worker process with an engine"
        " that makes up its tokens. *MLX, CPU*: mlx-lm with a tiny llama. A figure is *kept* or"
        " *MISSED* by its target in the same row, *reported* if it has none, and *not shown* if the"
        " run could not judge it.",
        "",
    ]


def count_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """How many of each verdict."""
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in Verdict)
    return [f"{len(verdicts)} figures and campaigns: {counts}.", ""]


def anchor(outcome: Outcome, key: str) -> str:
    """The name of a row that other documents link to."""
    return f"{outcome.measure.key}-{key}".replace("_", "-")


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
                    f'<a id="{anchor(outcome, figure.key)}"></a>{outcome.measure.promise}',
                    figure.what,
                    outcome.measure.where,
                    spread(figure, samples.get(figure.key, ()), sizes.patience_s),
                    spread(figure, samples.get(figure.without, ()), sizes.patience_s),
                    figure.target,
                    outcome.verdict(figure),
                    f"{outcome.rounds} of {min(sizes.repeats, outcome.measure.most_repeats)}",
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
            outcome.verdict(figure),
            f"{outcome.rounds} of {min(sizes.repeats, outcome.measure.most_repeats)}",
        )
        for outcome in outcomes
        for figure in outcome.measure.figures
        if figure.theirs
    ]
    head = ("fault and figure (MLX, CPU)", "mlxsup", "mlx_lm.server", "", "rounds")
    return [*table(head, rows), ""]


def run_lines(runs: Sequence[Run | None]) -> list[str]:
    """The campaigns: a table, then what each of them printed."""
    rows, texts = [], list[str]()
    for campaign, run in zip(CAMPAIGNS, runs, strict=True):
        verdict = run.verdict if run else Verdict.NOT_SHOWN
        took = f"{run.took_s / 60:.1f} min" if run else "–"
        rows.append((" ".join(campaign.promises), campaign.name, campaign.what, took, verdict))
        lines = run.lines if run else (NOT_RUN,)
        texts += [f"{campaign.name}: {verdict}", "", "```", *lines, "```", ""]
        if run and campaign.document:
            texts += [f"More in [{campaign.document}]({campaign.document}).", ""]
    return [*table(("", "campaign", "what it does", "took", ""), rows), "", *texts]


def problem_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Why a measure ended before its time."""
    problems = [
        f"- {outcome.measure.promise} ({outcome.measure.where}), {outcome.problem_verdict}:"
        f" {' '.join(outcome.problem.split())}"
        for outcome in outcomes
        if outcome.problem
    ]
    return [*problems, ""] if problems else []


def verdicts_of(findings: Findings) -> list[Verdict]:
    """Of every figure and every campaign."""
    return [
        *(o.verdict(figure) for o in findings.outcomes for figure in o.measure.figures),
        *(run.verdict if run else Verdict.NOT_SHOWN for run in findings.runs),
    ]


def report(commit: str, findings: Findings, sizes: Sizes) -> list[str]:
    """All of it."""
    return [
        *head_lines(commit, findings.notes),
        *count_lines(verdicts_of(findings)),
        *figure_lines(findings.outcomes, sizes),
        *problem_lines(findings.outcomes),
        *beside_lines(findings.outcomes, sizes),
        "### Campaigns",
        "",
        *run_lines(findings.runs),
    ]
