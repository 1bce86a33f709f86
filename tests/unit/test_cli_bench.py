"""Figures, comparison and files of `mlxsup bench`; a scripted HTTP server, no daemon, no clock."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.benchmark import AnswerError, Burst, Cell, Run, read_stream
from mlxsup.cli.commands.bench import (
    TITLES,
    cells_in,
    cells_of,
    check_new,
    compare,
    figure_text,
    passes,
    read_saved,
    sizes,
    summary_text,
    value_of,
    write_new,
)
from mlxsup.cli.exit_status import CliError

from support.daemon.full_disk import full_disk

CELL, OTHER = Cell(10, 3, 2), Cell(20, 3, 2)
FACTS: dict[str, Any] = {"through": "zmq", "backend": "cpu", "daemon": "1", "left_out": []}


def burst(*times: list[float], **more: Any) -> Burst:
    return Burst(sent_s=[0.0] * len(times), times=times, **more)


def value(*cells: Cell, **figures: list[float]) -> dict[str, Any]:
    """A run of these sizes with these values of figures, as `--json` prints it."""
    run = Run(model="m", cells=cells or [CELL], repeats=3)
    run.values = {cell: dict(figures) for cell in run.cells}
    return value_of(run, FACTS)


# ---------------------------------------------------------------- figures of a burst


def test_figures_of_a_burst() -> None:
    two = burst([1.0, 2.0, 3.0], [2.0, 2.5, 5.0], prompt_tokens=20, cached_tokens=4)
    assert two.figures(memory_bytes=7) == {
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
    one_token_each = burst([1.0], [1.5]).figures(memory_bytes=0)
    assert one_token_each.keys() == TITLES.keys()
    shown = {name for name, one in one_token_each.items() if one is not None}
    assert shown == {"first_token_s", "tokens_per_s", "prefill_tokens_per_s"}


def test_repeats_are_summed_up_by_median_and_range() -> None:
    [cell] = value(tokens_per_s=[4.0, 1.0, 2.0])["cells"]
    summary = {"median": 2.0, "low": 1.0, "high": 4.0, "values": [4.0, 1.0, 2.0]}
    assert cell["figures"]["tokens_per_s"] == summary
    assert cell["figures"]["gap_p50_s"] is None
    assert summary_text("tokens_per_s", summary) == "2.0 ±75%"
    assert summary_text("gap_p50_s", None) == "-"


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("gap_p50_s", 0.0123, "12.3 ms"),
        ("gap_p50_s", 0.123, "123 ms"),
        ("gap_p50_s", 1.234, "1.23 s"),
        ("tokens_per_s", 99.94, "99.9"),
        ("tokens_per_s", 1234.0, "1,234"),
        ("memory_bytes", 2**30, "1.00 GiB"),
    ],
)
def test_figure_has_its_unit(name: str, number: float, text: str) -> None:
    assert figure_text(name, number) == text


# ---------------------------------------------------------------- sizes


def found(
    context: int | None = 4096, rows: int = 8, **wanted: tuple[int, ...]
) -> tuple[list[Cell], list[str]]:
    names = ("prompt_tokens", "output_tokens", "concurrency")
    return cells_of({name: wanted.get(name) for name in names}, "m", context, rows)


def test_sizes_that_are_not_given_are_those_that_fit() -> None:
    cells, left_out = found()
    assert [str(cell) for cell in cells] == [
        f"{prompt} + 128 tokens × {streams}" for prompt in (16, 512) for streams in (1, 4, 8)
    ]
    assert [text[:31] for text in left_out] == ["m runs at most 8 requests at on"]
    assert found(rows=16)[1] == []
    short, left_out = found(context=600, concurrency=(2,))
    assert ([cell.prompt_tokens for cell in short], len(left_out)) == ([16], 1)
    assert len(found(context=None)[0]) == 6


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


# ---------------------------------------------------------------- a run


def take(run: Run, cell: Cell, **more: Any) -> None:
    run.take(cell, burst([1.0, 2.0], [1.0, 2.0], **more), 2.0, 5)


def status(m: int = 0, b: int = 0, generation: int = 1) -> dict[str, Any]:
    """A daemon's status while so many requests of two models are open."""
    rows = {"m": ["r"] * m, "b": ["r"] * b}
    about = {"paused": [], "queued": 0, "generation": generation, "footprint_bytes": 5}
    return {"models": [{"name": name, "running": ids, **about} for name, ids in rows.items()]}


def test_remarks_name_requests_of_others_and_a_new_process() -> None:
    run = Run(model="m", cells=[CELL], repeats=0)
    assert run.look(status(m=2), own=2) == 5
    assert run.remarks() == []
    run.look(status(m=3, b=2, generation=2), own=2)
    run.look(status(), own=0)
    others, restarted = run.remarks()
    assert "3 other requests ran or waited during the run, some for b:" in others
    assert restarted.startswith("m was restarted during the run")
    with pytest.raises(CliError, match="no longer configured"):
        run.look({"models": []}, own=0)


def test_remarks_name_what_has_touched_the_figures() -> None:
    run = Run(model="m", cells=[CELL], repeats=2)
    take(run, CELL, interrupted=1, waited=2, cached_tokens=3)
    assert [one.split(":")[0] for one in run.remarks()] == [
        "incomplete",
        "1 answer was interrupted and resumed",
        "2 answers were delayed in the queue by limits of this client, memory or other requests",
        "3 prompt tokens came from the cache",
    ]
    quiet = Run(model="m", cells=[CELL], repeats=1)
    take(quiet, CELL)
    assert quiet.remarks() == []


# ---------------------------------------------------------------- next to an earlier run

FILE = Path("before.json")


def names(changes: list[dict[str, Any]]) -> list[str]:
    return [one["figure"] for one in changes]


def test_values_that_do_not_overlap_are_slower_or_faster() -> None:
    before = value(
        first_token_s=[1.0, 2.0, 3.0], gap_p50_s=[1.0, 1.1, 1.2], gap_p99_s=[1.0, 1.0, 1.0],
        tokens_per_s=[100.0, 110.0, 120.0],
    )  # fmt: skip
    now = value(
        first_token_s=[3.0, 4.0, 5.0],  # touches
        gap_p50_s=[1.3, 1.3, 1.4],
        gap_p99_s=[0.5, 0.6, 0.7],
        tokens_per_s=[50.0, 55.0, 60.0],
    )
    told = compare(now, before, FILE)
    assert (told["compared"], told["file"]) == (4, "before.json")
    assert names(told["slower"]) == ["tokens_per_s", "gap_p50_s"], "the worst first"
    assert names(told["faster"]) == ["gap_p99_s"]
    assert told["slower"][0]["slower_percent"] == pytest.approx(100.0), "half as many per second"
    assert told["slower"][1]["slower_percent"] == pytest.approx(100 * (1.3 / 1.1 - 1))
    assert told["faster"][0]["slower_percent"] == pytest.approx(-40.0)
    assert told["conditions"] == []
    assert not passes(told, 99.0)
    assert passes(told, 101.0)
    faster = compare(before, now, FILE)
    assert names(faster["slower"]) == ["gap_p99_s"]
    assert not passes(faster, 50.0)
    assert passes({**faster, "slower": []}, 0.0), "what is faster never fails"


def test_too_few_repeats_other_sizes_and_zeros_tell_nothing() -> None:
    before = value(tokens_per_s=[1.0, 1.0], gap_p50_s=[0.0, 0.0, 0.0])
    now = value(CELL, OTHER, tokens_per_s=[9.0, 9.0, 9.0], gap_p50_s=[1.0, 1.0, 1.0])
    told = compare(now, before, FILE)
    assert (told["compared"], told["too_few"], told["not_there"]) == (0, 1, 1)
    assert not passes(told, 100.0), "what was not compared is not known to be as fast"


def test_other_conditions_are_named() -> None:
    before = value(tokens_per_s=[1.0])
    machine = {**before["machine"], "versions": {"mlxsup": "older"}}
    told = compare({**before, "through": "http", "machine": machine}, before, FILE)["conditions"]
    assert [(one["what"], one["now"]) for one in told][:2] == [
        ("through", "http"), ("mlxsup", "older"),
    ]  # fmt: skip


# ---------------------------------------------------------------- files


def test_saved_run_is_read_with_the_same_values(tmp_path: Path) -> None:
    run = Run(model="m", cells=[CELL, OTHER], repeats=2)
    for cell in (CELL, OTHER, OTHER, CELL):
        take(run, cell)
    write_new(tmp_path / "run.json", json.dumps(value_of(run, FACTS)))
    assert cells_in(read_saved(tmp_path / "run.json")) == run.values


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"kind": "bench", "cells": []}', "[" * 100_000],
)
def test_file_without_a_run_is_refused_with_the_way_to_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(CliError, match="was not written by") as refused:
        read_saved(path)
    assert "--output FILE" in refused.value.hint


def test_file_is_never_overwritten_nor_left_half_written(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------- over HTTP

OK = b"HTTP/1.1 200 OK\r\n\r\n"
TEXT = b'5\r\ndata: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (OK + TEXT + TEXT + USAGE + END, ""),
        (b'HTTP/1.1 401 No\r\n\r\n{"error": {"message": "no key"}}', "refused: no key"),
        (b"", "refused: b''"),
        (OK + TEXT + b'data: {"error": {"message": "crashed"}}\n\n', "ended too early: crashed"),
        (OK, "ended too early: b''"),
        (OK + TEXT + END, "does not say how many tokens"),
    ],
)
def test_answer_over_http_is_whole_or_an_error(said: bytes, wrong: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        writer.write(said)
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            read = await read_stream(address, "/", {})
        assert (len(read.times), read.prompt_tokens, read.tokens) == (2, 3, 2)

    with pytest.raises(AnswerError, match=re.escape(wrong)) if wrong else nullcontext():
        asyncio.run(ask())
