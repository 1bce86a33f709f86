"""What `mlxsup bench` makes of the times of answers. No process, no clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.benchmark.burst import Burst
from mlxsup.cli.benchmark.comparison import compare, passes
from mlxsup.cli.benchmark.figures import BY_NAME, Values, add_burst, summaries
from mlxsup.cli.benchmark.remarks import remarks_of
from mlxsup.cli.benchmark.run import Look, Run
from mlxsup.cli.benchmark.saved import SavedRun, check_new, read_saved, write_new
from mlxsup.cli.benchmark.sizes import (
    Cell,
    Limits,
    Wishes,
    cells_of,
    in_turn,
    left_out,
)
from mlxsup.cli.commands.bench import sizes
from mlxsup.cli.exit_status import CliError

from support.full_disk import full_disk

CELL = Cell(prompt_tokens=10, output_tokens=3, concurrency=2)
OTHER = Cell(prompt_tokens=20, output_tokens=3, concurrency=2)
MACHINE = {"system": "Linux", "architecture": "x86_64", "cores": 2, "versions": {"mlxsup": "1"}}
VALUE: dict[str, Any] = {"model": "m", "through": "zmq", "backend": "cpu", "machine": MACHINE}


def burst(*times: list[float], **more: Any) -> Burst:
    return Burst(sent_s=[0.0] * len(times), times=times, **more)


# ---------------------------------------------------------------- figures of a burst


def figures_of(one: Burst, memory_bytes: int = 7) -> dict[str, list[float]]:
    values: Values = {}
    add_burst(values, one, memory_bytes)
    return values


def test_every_figure_of_a_burst_is_worked_out_from_its_times() -> None:
    two = burst([1.0, 2.0, 3.0], [2.0, 2.5, 5.0], prompt_tokens=20, cached_tokens=4)
    found = figures_of(two)
    assert set(found) == set(BY_NAME)
    assert {name: values[0] for name, values in found.items()} == {
        "first_token_s": 1.5,
        "gap_p50_s": 1.0,  # of 0.5, 1, 1 and 2.5
        "gap_p99_s": 2.5,
        "gap_max_s": 2.5,
        "stream_tokens_per_s": pytest.approx((1.0 + 2 / 3) / 2),
        "tokens_per_s": 6 / 5,
        "steady_tokens_per_s": 2.0,  # at 2.5 and 3, in the second from 2 to 3
        "prefill_tokens_per_s": 8.0,  # 16 were read until the second answer began
        "memory_bytes": 7,
    }


def test_answers_of_one_token_have_no_gaps_and_no_speed_of_their_own() -> None:
    found = figures_of(burst([1.0], [1.5]), memory_bytes=0)
    assert set(found) == {"first_token_s", "tokens_per_s", "prefill_tokens_per_s"}
    shown = summaries(found)
    assert shown["gap_p50_s"] is None
    assert shown["memory_bytes"] is None


def test_repeats_are_summed_up_by_median_and_range() -> None:
    shown = summaries({"tokens_per_s": [4.0, 1.0, 2.0]})["tokens_per_s"]
    assert shown == {"median": 2.0, "low": 1.0, "high": 4.0, "values": [4.0, 1.0, 2.0]}


# ---------------------------------------------------------------- sizes


def limits(context: int | None = 4096, rows: int = 8) -> Limits:
    return Limits(model="m", context_tokens=context, rows=rows)


def test_what_is_not_given_is_what_fits() -> None:
    cells = cells_of(Wishes(), limits())
    assert [str(cell) for cell in cells] == [
        f"{prompt} + 128 tokens × {streams}" for prompt in (16, 512) for streams in (1, 4, 8)
    ]
    assert "at most 8 requests at once" in left_out(Wishes(), limits())[0]
    assert left_out(Wishes(), limits(rows=16)) == []
    short = cells_of(Wishes(concurrency=(2,)), limits(context=600))
    assert [cell.prompt_tokens for cell in short] == [16]
    assert len(left_out(Wishes(concurrency=(2,)), limits(context=600))) == 1
    assert len(cells_of(Wishes(), limits(context=None))) == 6


@pytest.mark.parametrize(
    ("wishes", "code", "hint"),
    [
        (Wishes(prompt_tokens=(16, 3969)), "context_length_exceeded", "at most 3968 with"),
        (Wishes(output_tokens=(128, 4096)), "context_length_exceeded", "at most 4095"),
        (Wishes(concurrency=(1, 9)), "too_many_requests", "at most 8; or raise max_concurrency"),
    ],
)
def test_what_is_given_and_does_not_fit_is_refused_with_what_does(
    wishes: Wishes, code: str, hint: str
) -> None:
    with pytest.raises(CliError) as refused:
        cells_of(wishes, limits())
    assert refused.value.code == code
    assert hint in refused.value.hint


def test_every_other_repeat_runs_backwards() -> None:
    cells = [CELL, OTHER]
    assert [in_turn(cells, repeat) for repeat in range(3)] == [cells, [OTHER, CELL], cells]


def test_sizes_are_numbers_with_commas() -> None:
    assert sizes("16, 512,16") == (16, 512)
    for wrong in ("", "0", "16,", "a", "-1", "1.5", "999999999"):
        with pytest.raises(Exception, match="is not a list of numbers"):
            sizes(wrong)


# ---------------------------------------------------------------- a run


def run_of(**values: list[float]) -> Run:
    """A run of one size, with these values of figures."""
    run = Run(model="m", cells=[CELL], repeats=3)
    run.values[CELL] = dict(values)
    return run


def take(run: Run, cell: Cell, **more: Any) -> None:
    run.take(cell, burst([1.0, 2.0], [1.0, 2.0], **more), 2.0, 5)


def looked(number: int, *, others: int = 0, generation: int = 1, **steps: int) -> Look:
    return Look(number=number, open_others=others, steps=steps, generation=generation)


def test_numbers_that_are_not_ours_are_requests_of_others() -> None:
    run = Run(model="m", cells=[CELL], repeats=2)
    run.look(looked(10, m=10, a=10, b=10))
    take(run, CELL)  # 11 and 12
    run.look(looked(13, m=20, a=10, b=10))
    assert run.others is not None
    assert (run.others.requests, run.others.models) == (0, ())
    take(run, CELL)  # two of 14 to 18
    run.look(looked(19, m=30, a=10, b=15, generation=2))
    assert (run.others.requests, run.others.models) == (3, ("b",))
    assert run.others.has_new_process
    assert remarks_of(run) == [
        "3 other requests were sent to the daemon meanwhile, some for b: measure again when it is"
        " idle",
        "m got a new process meanwhile: see `mlxsup events`",
    ]


def test_what_has_touched_the_figures_is_said() -> None:
    run = Run(model="m", cells=[CELL], repeats=2)
    take(run, CELL, interrupted=1, waited=2, cached_tokens=3)
    said = remarks_of(run)
    assert [one.split(":")[0] for one in said] == [
        "not complete",
        "1 answer was interrupted, and resumed",
        "2 answers were held up in the queue",
        "3 tokens of prompts were known, and not read again",
    ]
    quiet = Run(model="m", cells=[CELL], repeats=1)
    take(quiet, CELL)
    assert remarks_of(quiet) == []


# ---------------------------------------------------------------- next to an earlier run


def saved(**values: list[float]) -> SavedRun:
    return SavedRun(
        path=Path("before.json"),
        measured_at="2026-11-23",
        conditions={"model": "m", "through": "zmq", "backend": "cpu", "mlxsup": "1",
                    "machine": "Linux x86_64, 2 cores"},
        cells={CELL: dict(values)},
    )  # fmt: skip


def names(changes: list[dict[str, Any]]) -> list[str]:
    return [one["figure"] for one in changes]


def test_only_what_does_not_overlap_is_slower_or_faster() -> None:
    before = saved(
        first_token_s=[1.0, 2.0, 3.0], gap_p50_s=[1.0, 1.1, 1.2], gap_p99_s=[1.0, 1.0, 1.0],
        tokens_per_s=[100.0, 110.0, 120.0],
    )  # fmt: skip
    run = run_of(
        first_token_s=[3.0, 4.0, 5.0],  # touches
        gap_p50_s=[1.3, 1.3, 1.4],
        gap_p99_s=[0.5, 0.6, 0.7],
        tokens_per_s=[50.0, 55.0, 60.0],
    )
    found = compare(run, VALUE, before)
    assert found["compared"] == 4
    assert names(found["slower"]) == ["tokens_per_s", "gap_p50_s"], "the worst first"
    assert names(found["faster"]) == ["gap_p99_s"]
    assert found["slower"][0]["slower_percent"] == pytest.approx(100.0), "half as many per second"
    assert found["slower"][1]["slower_percent"] == pytest.approx(100 * (1.3 / 1.1 - 1))
    assert found["faster"][0]["slower_percent"] == pytest.approx(-40.0)
    assert found["conditions"] == []
    assert not passes(found, 99.0)
    assert passes(found, 101.0)


def test_faster_never_fails() -> None:
    before = saved(tokens_per_s=[1.0, 1.0, 1.0])
    found = compare(run_of(tokens_per_s=[9.0, 9.0, 9.0]), VALUE, before)
    assert names(found["faster"]) == ["tokens_per_s"]
    assert passes(found, 0.0)


def test_too_few_repeats_and_other_sizes_tell_nothing() -> None:
    before = saved(tokens_per_s=[1.0, 1.0])
    run = run_of(tokens_per_s=[9.0, 9.0, 9.0])
    run.values[OTHER] = {"tokens_per_s": [1.0, 1.0, 1.0]}
    found = compare(run, VALUE, before)
    assert (found["compared"], found["too_few"], found["not_there"]) == (0, 1, 1)
    assert not passes(found, 100.0), "what was not compared is not known to be as fast"


def test_other_conditions_are_named() -> None:
    machine = {**MACHINE, "versions": {"mlxsup": "2"}}
    value = {**VALUE, "through": "http", "machine": machine}
    found = compare(run_of(), value, saved())["conditions"]
    assert [(one["what"], one["before"], one["now"]) for one in found] == [
        ("through", "zmq", "http"), ("mlxsup", "1", "2"),
    ]  # fmt: skip


# ---------------------------------------------------------------- files


def text_of(run: Run) -> str:
    return json.dumps({**VALUE, "kind": "bench", "measured_at": "now", "cells": run.cell_maps()})


def test_what_was_written_is_read_and_has_the_same_sizes(tmp_path: Path) -> None:
    run = Run(model="m", cells=[CELL, OTHER], repeats=2)
    for cell in (CELL, OTHER, OTHER, CELL):
        take(run, cell)
    write_new(tmp_path / "run.json", text_of(run))
    found = read_saved(tmp_path / "run.json")
    assert found.cells == run.values
    assert cells_of(found.wishes, limits()) == [CELL, OTHER]
    asked = Wishes(prompt_tokens=(1,)).or_else(found.wishes)
    assert asked == Wishes(prompt_tokens=(1,), output_tokens=(3,), concurrency=(2,))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"kind": "bench", "cells": []}', '{"kind": "bench", "cells": 3}'],
)
def test_what_is_no_run_is_refused_with_the_way_to_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(CliError, match="is no run of") as refused:
        read_saved(path)
    assert "--output FILE" in refused.value.hint


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    check_new(path)
    path.write_text("mine")
    for refuse in (check_new, lambda one: write_new(one, "new")):
        with pytest.raises(CliError, match=r"run\.json"):
            refuse(path)
    assert path.read_text() == "mine"
    cut = tmp_path / "cut.json"
    with full_disk(100), pytest.raises(CliError, match="File too large"):
        write_new(cut, "x" * 1000)
    assert not cut.exists(), "half a run is no run"
    with pytest.raises(CliError, match="does not exist"):
        check_new(tmp_path / "nowhere" / "run.json")
