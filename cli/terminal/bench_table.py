"""A run of `mlxsup bench` as people read it: two tables, and what to know about them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..benchmark.comparison import LEAST_REPEATS
from ..benchmark.figures import BY_NAME, Figure, Unit
from .columns import columns, indented, wrapped
from .output import Output, width_of
from .quantities import format_bytes

SIZES = ("PROMPT", "OUTPUT", "STREAMS")
LATENCY = ("first_token_s", "gap_p50_s", "gap_p99_s", "gap_max_s")
SPEED = ("stream_tokens_per_s", "tokens_per_s", "prefill_tokens_per_s", "memory_bytes")
THROUGH = {"zmq": "the daemon's socket", "http": "HTTP"}


def bench_lines(output: Output, value: Mapping[str, Any]) -> list[str]:
    """The lines of a run; on a terminal none is longer than it is wide.

    Args:
        output: adds colour.
        value: as `--json` prints it.
    """
    width = width_of(sys.stdout)
    repeats = value["repeats"]
    head = (
        f"{value['model']} through {THROUGH[value['through']]}, {repeats}"
        f" {'repeat' if repeats == 1 else 'repeats'}"
    )
    if repeats > 1:
        head += ": the median of each figure, and how far its repeats are from each other (±)"
    lines = wrapped(head, width)
    for names in (LATENCY, SPEED):
        lines += ["", *_table(output, value["cells"], [BY_NAME[name] for name in names], width)]
    remarks = [*value["remarks"], *_comparison(value["comparison"])]
    if remarks:
        lines.append("")
    for remark in remarks:
        lines += wrapped(remark, width)
    return lines


def figure_text(figure: Figure, value: float) -> str:
    """A value with its unit."""
    match figure.unit:
        case Unit.BYTES:
            return format_bytes(value)
        case Unit.PER_SECOND:
            return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        case Unit.SECONDS if value >= 1:
            return f"{value:.2f} s"
        case Unit.SECONDS:
            milliseconds = value * 1000
            return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


# ---------------------------------------------------------------- inside


def _table(
    output: Output,
    cells: Sequence[Mapping[str, Any]],
    figures: Sequence[Figure],
    width: int | None,
) -> list[str]:
    headers = [*SIZES, *(figure.title for figure in figures)]
    rows = [
        [
            *(str(cell[key]) for key in ("prompt_tokens", "output_tokens", "concurrency")),
            *(_summary_text(figure, cell["figures"][figure.name]) for figure in figures),
        ]
        for cell in cells
    ]
    first, *others = columns(headers, rows, width, right=range(len(headers)))
    if first:
        return [
            output.style(first[0], sys.stdout, bold=True),
            *(line for lines in others for line in lines),
        ]
    return [line for row in rows for line in _sentence(row, figures, width)]


def _sentence(row: Sequence[str], figures: Sequence[Figure], width: int | None) -> list[str]:
    """A row where its table would be too wide: no number without its name."""
    prompt, answer, streams, *values = row
    about = f"prompt {prompt}, output {answer}, streams {streams}"
    pairs = zip(figures, values, strict=True)
    named = ", ".join(f"{figure.title.lower()} {value}" for figure, value in pairs)
    return [*wrapped(about, width), *indented(named, width)]


def _summary_text(figure: Figure, summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return "-"
    text = figure_text(figure, summary["median"])
    if figure.unit is Unit.BYTES or len(summary["values"]) < 2 or not summary["median"]:
        return text
    percent = 100 * (summary["high"] - summary["low"]) / 2 / summary["median"]
    return f"{text} ±{percent:.0f}%"


def _comparison(comparison: Mapping[str, Any] | None) -> list[str]:
    if comparison is None:
        return []
    lines = [
        f"{word}: {_change_text(change)}"
        for word in ("slower", "faster")
        for change in comparison[word]
    ]
    then = f"{comparison['file']} ({comparison['measured_at']})"
    compared = comparison["compared"]
    changed = len(lines)
    if not compared:
        lines.append(f"nothing could be compared with {then}")
    elif not changed:
        lines.append(f"as fast as {then}: no figure differs by more than its repeats do")
    else:
        rest = compared - changed
        lines.append(f"compared with {then}: {rest} other figures differ no more than repeats do")
    if comparison["not_there"]:
        lines.append(f"{comparison['not_there']} sizes are not in {comparison['file']}")
    if comparison["too_few"]:
        lines.append(
            f"{comparison['too_few']} figures have fewer than {LEAST_REPEATS} repeats, too few to"
            " tell a change"
        )
    return lines + [
        f"not alike: {one['what']} was {one['before']}, is {one['now'] or 'not there'}"
        for one in comparison["conditions"]
    ]


def _change_text(change: Mapping[str, Any]) -> str:
    figure = BY_NAME[change["figure"]]
    before, now = (figure_text(figure, change[key]) for key in ("before", "now"))
    percent = change["slower_percent"]
    size = f"{change['prompt_tokens']} + {change['output_tokens']} × {change['concurrency']}"
    more = "longer" if percent > 0 else "less time"
    return f"{size}: {figure.title.lower()} {now}, was {before}: takes {abs(percent):.0f}% {more}"
