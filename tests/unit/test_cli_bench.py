"""Sizes, figures and remarks of `mlxsup bench`; no daemon, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.cli.commands.bench import (
    TITLES,
    Cell,
    Run,
    cells_of,
    figure_text,
    figures_of,
    sizes,
    value_of,
)
from mlxsup.cli.exit_status import CliError

CELL = Cell("m", 10, 3, 2)


def test_figures_of_a_burst() -> None:
    assert figures_of([0.0, 0.0], [[1.0, 2.0, 3.0], [2.0, 2.5, 5.0]]) == {
        "first_token_s": 1.5,
        "gap_p50_s": 1.0,  # of 0.5, 1, 1 and 2.5
        "gap_p99_s": 2.5,
        "stream_tokens_per_s": pytest.approx((1.0 + 2 / 3) / 2),
        "tokens_per_s": 6 / 5,
    }
    assert figures_of([0.5], [[1.5]]) == {"first_token_s": 1.0, "tokens_per_s": 1 / 1.5}


def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed() -> None:
    gaps = [[0.0, *(float(n * (n + 1) / 2) for n in range(1, 101))]]  # of 1 to 100 seconds
    found = figures_of([0.0], gaps)
    assert (found["gap_p50_s"], found["gap_p99_s"]) == (50.0, 99.0)


def test_repeats_are_summed_up_by_median_and_range() -> None:
    run = Run(
        cells=[CELL],
        repeats=3,
        found={CELL: [{"tokens_per_s": speed} for speed in (4.0, 1.0, 2.0)]},
    )
    [cell] = value_of(run, "1")["cells"]
    summary = {"median": 2.0, "low": 1.0, "high": 4.0, "values": [4.0, 1.0, 2.0]}
    assert cell["figures"] == {**dict.fromkeys(TITLES), "tokens_per_s": summary}


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("gap_p50_s", [0.0123], "12.3 ms"),
        ("gap_p50_s", [0.123], "123 ms"),
        ("gap_p50_s", [1.234], "1.23 s"),
        ("gap_p50_s", [], "-"),
        ("tokens_per_s", [99.94], "99.9"),
        ("tokens_per_s", [1234.0], "1,234"),
        ("tokens_per_s", [4.0, 1.0, 2.0], "2.0 ±75%"),
    ],
)
def test_figure_has_its_unit_and_its_spread(name: str, values: list[float], text: str) -> None:
    assert figure_text(name, values) == text


def found(context: int | None = 4096, rows: int = 8, **wanted: tuple[int, ...]) -> list[Cell]:
    names = ("prompt_tokens", "output_tokens", "concurrency")
    return cells_of({name: wanted.get(name) for name in names}, "m", context, rows)


def test_sizes_that_are_not_given_are_those_that_fit() -> None:
    assert [str(cell) for cell in found()] == [
        f"m {prompt} + 128 tokens × {streams}" for prompt in (16, 512) for streams in (1, 4, 8)
    ]
    for context, fit in ((639, [16]), (640, [16, 512])):
        assert [one.prompt_tokens for one in found(context=context, concurrency=(2,))] == fit
    assert len(found(context=None)) == 6


@pytest.mark.parametrize(
    ("wanted", "code", "hint"),
    [
        ({"prompt_tokens": (16, 3969)}, "context_length_exceeded", "at most 3968 with"),
        ({"output_tokens": (128, 4096)}, "context_length_exceeded", "at most 4095"),
        ({"concurrency": (1, 9)}, "too_many_requests", "use --concurrency 8 or less, or run"),
    ],
)
def test_size_that_does_not_fit_is_refused_with_the_largest(
    wanted: dict[str, Any], code: str, hint: str
) -> None:
    with pytest.raises(CliError) as refused:
        found(**wanted)
    assert refused.value.code == code
    assert hint in refused.value.hint


def test_sizes_are_numbers_with_commas() -> None:
    assert sizes("16, 512,16") == (16, 512)
    for wrong in ("", "0", "16,", "a", "-1", "1.5", "999999999"):
        with pytest.raises(Exception, match="is not a list of positive numbers"):
            sizes(wrong)


def status(running: int = 0, paused: int = 0, queued: int = 0) -> dict[str, Any]:
    """A daemon's status while so many requests of a model are open, and one of another."""
    row = {"running": ["r"] * running, "paused": ["r"] * paused, "queued": queued}
    return {"models": [row, {"running": ["r"] * bool(running), "paused": [], "queued": 0}]}


def test_remarks_name_what_has_touched_the_figures() -> None:
    figures = {"first_token_s": 1.0}
    quiet = Run(cells=[CELL], repeats=1, found={CELL: [figures]})
    quiet.look(status())
    assert quiet.remarks() == []
    run = Run(cells=[CELL], repeats=4, found={CELL: [figures] * 2}, interrupted=1)
    for seen in (status(running=1, paused=2, queued=4), status()):
        run.look(seen)
    assert [one.split(": measure")[0] for one in run.remarks()] == [
        "incomplete: only 2 of 4 bursts were measured",
        "up to 8 other requests ran or waited during the run",
        "interrupted and resumed: 1 answer",
    ]
