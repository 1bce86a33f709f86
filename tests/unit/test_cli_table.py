"""Rows, columns, sizes and durations, as `mlxsup status` shows them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.cli.connection import unknown_model
from mlxsup.cli.terminal.change_printer import change_line
from mlxsup.cli.terminal.model_row import cause_of, note_of, row_of
from mlxsup.cli.terminal.notices import notice_text
from mlxsup.cli.terminal.quantities import format_bytes, format_duration
from mlxsup.cli.terminal.sharing_lines import sharing_lines
from mlxsup.cli.terminal.table import Row, render
from mlxsup.client import Notice, NoticeKind

NOW = 1_000_000.0
KILLED = {
    "reason": "crash",
    "code": None,
    "signal": "SIGKILL",
    "detail": "out of memory",
    "at": NOW - 125,
}


def model(**values: Any) -> dict[str, Any]:
    return {
        "name": "smollm2",
        "state": "READY",
        "generation": 3,
        "pid": 4711,
        "restarts": 2,
        "last_exit": None,
        "retry_in_s": None,
        "progress": None,
        "queued": 3,
        "running": ["a-1", "a-2"],
        "tokens_per_s": 93.456,
        "footprint_bytes": 3 * 2**30,
        "context_length": 8192,
        "loaded_for_s": 3725.0,
        **values,
    }


def plain(text: str, what: str) -> str:
    return text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0s"),
        (59.9, "59s"),
        (125, "2m 5s"),
        (3725, "1h 2m"),
        (90000, "1d 1h"),
        (-3, "0s"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0.0 MiB"),
        (1, "1 B"),
        (2**20, "1.0 MiB"),
        (2**29, "512.0 MiB"),
        (3 * 2**30, "3.00 GiB"),
    ],
)
def test_sizes(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


def test_row_of_a_ready_model() -> None:
    row = row_of(model(), NOW)
    expected = ["smollm2", "READY", "1h 2m", "4711", "2", "2/3", "93.5", "3.00 GiB", "8192"]
    assert list(row.cells) == expected
    assert row.note == ""


def row_that_reads(read: int, of: int | None, tokens_sent: int = 0) -> dict[str, int | None]:
    """What a note looks at of a running request."""
    return {"read_tokens": read, "prompt_tokens": of, "tokens_sent": tokens_sent}


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"state": "FAILED", "cause": "internal error"}, "internal error"),
        ({"state": "LOADING", "progress": {"phase": "weights", "fraction": 0.4}}, "weights 40%"),
        (
            {"state": "READY", "progress": None, "last_exit": KILLED},
            "SIGKILL, out of memory, 2m 5s ago",
        ),
        (
            {"state": "BACKOFF", "retry_in_s": 4.2, "last_exit": KILLED},
            "retry in 4s, SIGKILL, out of memory, 2m 5s ago",
        ),
        ({"state": "STOPPED", "last_exit": {"reason": "asked", "code": 0, "at": NOW}}, ""),
        (
            {"state": "PENDING", "progress": {"phase": "waiting for turn", "fraction": 0.0}},
            "waiting for turn",
        ),
        ({"batching": {"mode": "together", "reason": ""}, "warnings": []}, ""),
        ({"paused": ["a", "b"]}, "2 paused"),
        (
            {"rows": [row_that_reads(419, 1000)], "last_exit": KILLED},
            "prefill 41%, SIGKILL, out of memory, 2m 5s ago",
        ),
        (
            {"rows": [row_that_reads(9, 10), row_that_reads(1, 10)], "paused": ["a"]},
            "prefill 10% of 2 prompts, 1 paused",
        ),
        ({"rows": [row_that_reads(0, None), row_that_reads(0, 9), row_that_reads(9, 9)]}, ""),
        ({"rows": [row_that_reads(5, 9, tokens_sent=1)]}, ""),
        ({"paused": ["a"], "yielded": ["b", "c"]}, "1 paused, 2 gave way"),
        ({"paused": ["a"], "last_exit": KILLED}, "SIGKILL, out of memory, 2m 5s ago, 1 paused"),
        ({"batching": {"mode": "serial_prefill", "reason": "why"}}, "prompts one by one"),
        ({"batching": {"mode": "one_row", "reason": "why"}}, "one row at a time"),
        ({"batching": {"mode": "together", "reason": ""}, "warnings": ["a"]}, "1 warning"),
        ({"queued_per_class": {"interactive": 0, "normal": 3, "batch": 0}}, ""),
        (
            {"queued_per_class": {"interactive": 1, "normal": 0, "batch": 3}, "warnings": ["a"]},
            "waiting: 1 interactive, 3 batch, 1 warning",
        ),
        (
            {"batching": {"mode": "one_row", "reason": "why"}, "warnings": ["a", "b"]},
            "one row at a time, 2 warnings",
        ),
        (
            {"batching": {"mode": "one_row", "reason": "why"}, "last_exit": KILLED},
            "SIGKILL, out of memory, 2m 5s ago",
        ),
    ],
)
def test_note_says_what_matters_now(values: dict[str, Any], note: str) -> None:
    assert note_of(model(**values), NOW) == note


@pytest.mark.parametrize(
    ("last_exit", "cause"),
    [
        (None, ""),
        ({"reason": "crash", "code": 70, "signal": None, "detail": ""}, "crashed, exit 70"),
        ({"reason": "crash", "code": None, "signal": 11, "detail": ""}, "SIGSEGV"),
        ({"reason": "stall", "signal": "SIGKILL", "detail": ""}, "stalled, SIGKILL"),
        ({"reason": "load_error", "code": 66, "detail": "no /m"}, "load failed, no /m"),
    ],
)
def test_causes(last_exit: dict[str, Any] | None, cause: str) -> None:
    assert cause_of(last_exit, NOW) == cause


def test_table_holds_in_80_columns_and_loses_no_note() -> None:
    rows = [
        row_of(model(name="a-model-with-a-very-long-name-indeed"), NOW),
        row_of(model(state="BACKOFF", retry_in_s=4, last_exit=KILLED, pid=None), NOW),
        row_of(model(state="FAILED", last_exit=KILLED), NOW, last_line="x" * 200),
    ]
    lines = render(rows, 80, plain)
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert "retry in 4s, SIGKILL, out of memory, 2m 5s ago" in text
    assert "a-model-with-a" in text
    assert lines[0].split()[:4] == ["MODEL", "STATE", "UPTIME", "PID"]
    assert lines[-1].startswith("  xxx")


def test_table_in_a_pipe_cuts_nothing_and_aligns() -> None:
    rows = [
        row_of(model(name="a-model-with-a-very-long-name-indeed"), NOW),
        row_of(model(name="b", state="FAILED", last_exit=KILLED), NOW, last_line="x" * 200),
    ]
    lines = render(rows, None, plain)
    assert lines[0].split()[-1] == "NOTE"
    assert lines[1].startswith("a-model-with-a-very-long-name-indeed  READY")
    assert lines[1].index("READY") == lines[2].index("FAILED") == lines[0].index("STATE")
    assert lines[2].endswith("SIGKILL, out of memory, 2m 5s ago")
    assert lines[3] == "  " + "x" * 200


def test_table_without_models_is_its_header() -> None:
    assert len(render([], 80, plain)) == 1


def test_state_keeps_its_column_when_it_is_coloured() -> None:
    def style(text: str, what: str) -> str:
        return f"<{text}>" if what == "READY" else text

    lines = render([Row(cells=["m", "READY", *["-"] * 7])], None, style)
    assert "<READY>" in lines[1]


def test_unknown_model_names_close_and_configured_ones() -> None:
    error = unknown_model("smolm2", ["smollm2", "qwen"])
    assert error.message == "no model is called 'smolm2'; configured: qwen, smollm2"
    assert error.hint == "did you mean smollm2?"
    assert "did you mean" not in unknown_model("zzz", ["smollm2"]).hint


@pytest.mark.parametrize(
    ("kind", "detail", "text"),
    [
        (NoticeKind.QUEUED, {"position": 3}, "queued, position 3"),
        (NoticeKind.LOADING, {"phase": "weights", "fraction": 0.4}, "loading, weights 40%"),
        (NoticeKind.LOADING, {"state": "BACKOFF"}, "loading, backoff"),
        (
            NoticeKind.PREFILLING,
            {"done": 5, "total": 9},
            "reading the prompt, 5 of 9 tokens (55%)",
        ),
        (NoticeKind.PAUSED, {"reason": "user"}, "paused, until `mlxsup resume`"),
        (NoticeKind.PAUSED, {"reason": "turn"}, "paused, another has its turn"),
        (NoticeKind.PAUSED, {"reason": "memory"}, "paused, there is too little memory for it now"),
        (
            NoticeKind.PAUSED,
            {"reason": "swap"},
            "paused, its model makes room for another one until its next turn",
        ),
        (
            NoticeKind.QUEUED,
            {"position": 3, "reason": "swap"},
            "queued, position 3, the model waits for its next turn",
        ),
        (
            NoticeKind.PAUSED,
            {"reason": "class", "expected_s": 75.2},
            "paused, an interactive request has its row, about 1m 15s",
        ),
        (
            NoticeKind.QUEUED,
            {"position": 1, "reason": "rows", "since_s": 3.0, "expected_s": 12.9},
            "queued, position 1, about 12s",
        ),
        (NoticeKind.QUEUED, {"position": 1, "expected_s": 0.9}, "queued, position 1"),
        (
            NoticeKind.QUEUED,
            {"position": 2, "reason": "limit"},
            "queued, position 2, its client runs as many as it may",
        ),
    ],
)
def test_notices(kind: NoticeKind, detail: dict[str, Any], text: str) -> None:
    assert notice_text(Notice(kind=kind, detail=detail)) == text


def test_table_moves_together_where_that_gives_the_longest_note_its_place() -> None:
    rows = [row_of(model(last_exit=KILLED), NOW)]
    wide = max(map(len, render(rows, None, plain)))
    assert len(render(rows, wide, plain)) == 2
    assert len(render(rows, wide - 9, plain)) == 2
    assert len(render(rows, wide - 10, plain)) == 3


def test_change_line_says_the_progress_once() -> None:
    change = {
        "at": NOW,
        "model": "m",
        "from": "LOADING",
        "to": "LOADING",
        "generation": 2,
        "pid": 9,
    }
    progress = {"phase": "weights", "fraction": 0.2}
    line = change_line(change | {"note": "weights 20%", "progress": progress})
    assert line.endswith(" m: LOADING (generation 2, pid 9, weights 20%)")
    assert change_line(change | {"progress": progress}) == line


def test_change_line() -> None:
    change = {"at": NOW, "model": "m", "from": "LOADING", "to": "READY", "generation": 2, "pid": 9}
    line = change_line(change | {"note": "loaded"})
    assert line.endswith(" m: LOADING → READY (generation 2, pid 9, loaded)")


def test_who_waits_and_how_models_have_shared_stands_below_the_table() -> None:
    clients = {
        "ann": {"waiting": 3, "running": 2, "weight": 1.0},
        "bob": {"waiting": 1, "running": 0, "weight": 1.0},
        "eve": {"waiting": 0, "running": 1, "weight": 1.0},
    }
    models = [{"name": "a", "share": 0.704}, {"name": "b", "share": 0.296}, {"name": "c"}]
    value = {"queue": {"clients": clients}, "models": models}
    assert sharing_lines(value, None) == [
        "waiting: ann 3 (2 running), bob 1",
        "engine time: a 70%, b 30%",
    ]
    assert sharing_lines(value, 20) == [
        "waiting: ann 3 (2",
        "running), bob 1",
        "engine time: a 70%,",
        "b 30%",
    ]
    assert sharing_lines({"models": [{"name": "a", "share": 1.0}]}, None) == []


def test_the_note_of_a_pinned_model_that_is_unloaded_says_what_stays_reserved() -> None:
    unloaded: dict[str, Any] = {"state": "STOPPED", "reserved_bytes": 2**28, "pinned": True}
    assert note_of(model(**unloaded), NOW) == "pinned: 256.0 MiB stay reserved"
    assert note_of(model(**unloaded | {"reserved_bytes": 0}), NOW) == ""
    assert note_of(model(**unloaded | {"pinned": False}), NOW) == ""
    assert note_of(model(**unloaded | {"state": "READY"}), NOW) == ""
