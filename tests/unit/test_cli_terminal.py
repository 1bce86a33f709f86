"""Tables, lines and what may reach a terminal."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO, cast
from unittest.mock import Mock

import click
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.changes import change_line
from mlxsup.cli.commands.plan import plan_lines
from mlxsup.cli.commands.status import _redraw, traffic
from mlxsup.cli.terminal.output import CLEAR_LINE, Line, Output, styled
from mlxsup.cli.terminal.requests import notice_text, request_lines
from mlxsup.cli.terminal.status import cause_of, lines_below, models_table, note_of
from mlxsup.cli.terminal.tables import listing
from mlxsup.cli.terminal.text import cell_len, cut, format_bytes, format_duration, wrapped
from mlxsup.cli.terminal.writer import GuardedStream, for_terminal, own, plain
from mlxsup.client import Notice, NoticeKind
from mlxsup.protocol.version import VERSION

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


def plain_of(line: Line) -> str:
    return "".join(text for text, _ in line)


@pytest.mark.parametrize(
    ("text", "width", "cut_to", "lines"),
    [
        ("two words", 9, "two words", ["two words"]),
        ("two words", 8, "two wor…", ["two", "words"]),
        ("日本語", 6, "日本語", ["日本語"]),
        ("日本語 é", 5, "日本…", ["日本", "語 é"]),
        ("x", 0, "…", None),
        ("anything", None, "anything", ["anything"]),
    ],
)
def test_a_text_is_cut_or_wrapped_by_the_columns_that_its_signs_take(
    text: str, width: int | None, cut_to: str, lines: list[str] | None
) -> None:
    assert cut(text, width) == cut_to
    assert lines is None or wrapped(text, width) == lines


def test_durations_and_sizes(snapshot: SnapshotAssertion) -> None:
    seconds = (None, -3, 0.4, 59.9, 125, 3725, 90000)
    sizes = (None, 0, 1, 2**20, 2**29, 3 * 2**30)
    shown = [f"{value} s: {format_duration(value)}" for value in seconds]
    assert [*shown, *(f"{value} bytes: {format_bytes(value)}" for value in sizes)] == snapshot


def row_that_reads(read: int, of: int | None, tokens_sent: int = 0) -> dict[str, int | None]:
    """What a note looks at of a running request."""
    return {"read_tokens": read, "prompt_tokens": of, "tokens_sent": tokens_sent}


NOTED: list[dict[str, Any]] = [
    {"state": "FAILED", "cause": "internal error"},
    {"state": "LOADING", "progress": {"phase": "weights", "fraction": 0.4}},
    {"state": "READY", "progress": None, "last_exit": KILLED},
    {"state": "BACKOFF", "retry_in_s": 4.2, "last_exit": KILLED},
    {"state": "STOPPED", "last_exit": {"reason": "asked"}},
    {"state": "PENDING", "progress": {"phase": "waiting for turn", "fraction": 0.0}},
    {"batching": {"mode": "together", "reason": ""}, "warnings": []},
    {"paused": ["a", "b"]},
    {"rows": [row_that_reads(419, 1000)], "last_exit": KILLED},
    {"rows": [row_that_reads(9, 10), row_that_reads(1, 10)], "paused": ["a"]},
    {"rows": [row_that_reads(0, None), row_that_reads(0, 9), row_that_reads(9, 9)]},
    {"rows": [row_that_reads(5, 9, tokens_sent=1)]},
    {"paused": ["a"], "yielded": ["b", "c"]},
    {"paused": ["a"], "last_exit": KILLED},
    {"batching": {"mode": "serial_prefill", "reason": "why"}},
    {"batching": {"mode": "one_row", "reason": "why"}},
    {"batching": {"mode": "together", "reason": ""}, "warnings": ["a"]},
    {"queued_per_class": {"interactive": 0, "normal": 3, "batch": 0}},
    {"queued_per_class": {"interactive": 1, "normal": 0, "batch": 3}, "warnings": ["a"]},
    {"batching": {"mode": "one_row", "reason": "why"}, "warnings": ["a", "b"]},
    {"batching": {"mode": "one_row", "reason": "why"}, "last_exit": KILLED},
    {"state": "STOPPED", "reserved_bytes": 2**28, "pinned": True},
    {"state": "STOPPED", "reserved_bytes": 0, "pinned": True},
    {"state": "STOPPED", "reserved_bytes": 2**28, "pinned": False},
    {"state": "READY", "reserved_bytes": 2**28, "pinned": True},
    {"unloads_in_s": 1790.0, "running": [], "queued": 0},
    {"unloads_in_s": 1800.0, "running": ["a"], "queued": 0},
    {"unloads_in_s": 0.0, "running": [], "queued": 0, "last_exit": KILLED},
]

RANKS: list[dict[str, Any]] = [
    {"rank": 0, "host": None, "address": "10.0.0.1", "state": "ready", "silent_s": 0.0},
    {"rank": 1, "host": "studio-2", "address": "10.0.0.2", "state": "ready", "silent_s": 3.0},
]
NOTED += [
    {"ranks": RANKS, "last_exit": KILLED},
    {
        "state": "LOADING", "progress": {"phase": "import", "fraction": 0.1},
        "ranks": [RANKS[0], RANKS[1] | {"state": "starting"}],
    },
    {"state": "STOPPED", "ranks": RANKS},
]  # fmt: skip

EXITS: list[dict[str, Any]] = [
    {"reason": "crash", "code": 70},
    {"reason": "crash", "signal": "SIGSEGV"},
    {"reason": "stall", "signal": "SIGKILL"},
    {"reason": "load_error", "code": 66, "detail": "no /m"},
]


def test_the_note_and_the_cause_in_a_row(snapshot: SnapshotAssertion) -> None:
    notes = [f"{values} -> {note_of(model(**values), NOW)}" for values in NOTED]
    rest = {"code": None, "signal": None, "detail": "", "at": None}
    assert [*notes, *(f"{exit} -> {cause_of(rest | exit, NOW)}" for exit in EXITS)] == snapshot


MODELS = [
    model(name="a-model-with-a-very-long-name-indeed"),
    model(state="BACKOFF", retry_in_s=4, last_exit=KILLED, pid=None),
    model(name="日本\x1b[2J", state="FAILED", last_exit=KILLED | {"last_words": "x" * 90}),
]
REQUEST = {
    "id": "5f0c12ab-1",
    "number": "#12",
    "model": "smollm2",
    "client": "process 4711@77",
    "state": "waiting",
    "place": 3,
    "reason": "turn",
    "prefill": None,
    "expected_s": 12.0,
    "tokens_sent": 17,
    "tokens_per_s": 31.5,
    "engine_s": 1.5,
}
FIGURE = {"bytes": 3 * 2**30, "source": "estimated"}
PLANNED = {
    "name": "a-model-with-a-long-name",
    "problem": None,
    "needed": FIGURE,
    "weights": FIGURE,
    "process": FIGURE,
    "cache": {**FIGURE, "source": "measured"},
    "raised_bytes": 2**30,
    "is_loaded": False,
    "goes": ["smollm2"],
    "missing_bytes": 0,
    "memory_bytes": 4 * 2**30,
    "context_tokens": 4096,
    "context_length": 8192,
    "rows": 2,
    "max_concurrency": 8,
    "remark": None,
    "hosts": [],
}
HOST = {"address": "", "problem": None, "fits": False}
SHARED = PLANNED | {
    "name": "shared",
    "goes": [],
    "hosts": [
        HOST | {"rank": 1, "host": "far", "available_bytes": 2**31},
        HOST | {"rank": 2, "host": "b", "problem": "no folder", "available_bytes": 2**32},
        HOST | {"rank": 3, "host": "c", "problem": "no route", "available_bytes": None},
    ],
}
PLAN = {
    "budget": {"bytes": 8 * 2**30, "reason": "given"},
    "needed_bytes": 3 * 2**30,
    "fits": False,
    "swap": True,
    "change": None,
    "measurements": None,
    "models": [PLANNED, {"name": "b", "problem": "no folder /b\x1b[2J"}, SHARED],
}


@pytest.mark.parametrize("width", [None, 80, 40])
def test_a_table_gives_columns_up_before_it_cuts_what_matters(
    width: int | None,
    snapshot: SnapshotAssertion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxsup.cli.terminal.status.time.time", lambda: NOW)
    groups = models_table(MODELS, width)
    said = " ".join(plain_of(line).strip() for group in groups for line in group)
    assert "retry in 4s, SIGKILL, out of memory, 2m 5s ago" in said
    tables = {
        "status": [line for group in groups for line in group],
        "requests": request_lines([REQUEST], width),
        "a long id": request_lines([{**REQUEST, "id": "x" * 50}], width),
        "plan": list(plan_lines(PLAN, width)),
    }
    for lines in (tables["status"], tables["requests"], tables["a long id"], tables["plan"][1:4]):
        assert width is None or max(cell_len(plain_of(line)) for line in lines) <= width
    assert {name: list(map(plain_of, lines)) for name, lines in tables.items()} == snapshot


def test_a_plan_of_one_model_speaks_of_no_others_and_explains_no_sign_that_is_not_there() -> None:
    measured = {"bytes": 2**30, "source": "measured"}
    alone = PLANNED | {"goes": [], "raised_bytes": 0, "context_tokens": 8192}
    alone |= dict.fromkeys(("needed", "weights", "process", "cache"), measured)
    plan = PLAN | {"models": [alone], "fits": True}
    _, _, _, row, *rest = map(plain_of, plan_lines(plan, None))
    assert row.split()[-1] == "yes"
    fits = "it fits into memory"
    assert rest == ["  loaded on request", "", fits]


def test_what_stands_below_the_table_of_models(snapshot: SnapshotAssertion) -> None:
    gib = 2**30
    clients = {
        "ann": {"waiting": 3, "running": 2},
        "bob": {"waiting": 1, "running": 0},
        "eve": {"waiting": 0, "running": 1},
    }
    wait = {"waits_s": 12.0, "reason": "needs 2.00 GiB more"}
    models = [
        {"name": "a", "share": 0.704, "memory_wait": wait},
        {"name": "b", "share": 0.296, "raised_bytes": gib, "needed_bytes": 3 * gib},
        {"name": "c"},
    ]
    short = {"shortage": "why", "effective_budget_bytes": gib, "over_bytes": 2 * gib}
    short["is_short"] = True
    worker = {"state": "starting", "reserved_bytes": gib}
    value = {
        "models": models,
        "memory": {
            "budget_bytes": 8 * gib, "used_bytes": 4 * gib, "may_grow_to_bytes": 6 * gib, **short,
        },
        "queue": {"clients": clients},
        "warm_pool": {"workers": [worker, worker], "wanted": 2, "retry_in_s": 4.0},
        "gateway": {
            "state": "listening", "url": "http://127.0.0.1:8484", "pid": 7, "restarts": 1,
            "cause": "it ended with signal SIGKILL",
        },
    }  # fmt: skip
    down = {"state": "backoff", "ends_in_a_row": 2, "cause": "exit 1", "retry_in_s": 3.0}
    assert list(lines_below(value)) == snapshot
    assert list(lines_below({"models": models[2:], "gateway": down})) == [
        "http: backoff, 2 times in a row: exit 1; next attempt in 3s"
    ]
    assert list(lines_below({"models": [{"name": "a", "share": 1.0}]})) == []


@pytest.mark.parametrize("is_short", [True, False])
def test_memory_is_short_once_a_model_loses_something(*, is_short: bool) -> None:
    memory = {"budget_bytes": 2**31, "used_bytes": 0, "may_grow_to_bytes": 0, "shortage": "why",
              "effective_budget_bytes": 2**30, "is_short": is_short}  # fmt: skip
    first, *more = lines_below({"models": [{"name": "a"}], "memory": memory})
    assert first == "memory: none used of 2.00 GiB; other programs leave 1.00 GiB"
    assert more == (["memory is short: why"] if is_short else [])


def test_a_daemon_of_another_version_is_said() -> None:
    [line] = lines_below({"models": [], "version": "0.0.0"})
    assert line.startswith(f"the daemon is mlxsup 0.0.0, this command {VERSION}: ")
    assert list(lines_below({"models": [], "version": VERSION})) == []


NOTICES: list[tuple[NoticeKind, dict[str, Any]]] = [
    (NoticeKind.QUEUED, {"position": 3}),
    (NoticeKind.LOADING, {"phase": "weights", "fraction": 0.4}),
    (NoticeKind.LOADING, {"state": "BACKOFF"}),
    (NoticeKind.PREFILLING, {"done": 5, "total": 9}),
    (NoticeKind.PAUSED, {"reason": "user"}),
    (NoticeKind.PAUSED, {"reason": "turn"}),
    (NoticeKind.PAUSED, {"reason": "memory"}),
    (NoticeKind.PAUSED, {"reason": "swap"}),
    (NoticeKind.QUEUED, {"position": 3, "reason": "swap"}),
    (NoticeKind.PAUSED, {"reason": "class", "expected_s": 75.2}),
    (NoticeKind.QUEUED, {"position": 1, "reason": "rows", "since_s": 3.0, "expected_s": 12.9}),
    (NoticeKind.QUEUED, {"position": 1, "expected_s": 0.9}),
    (NoticeKind.QUEUED, {"position": 2, "reason": "limit"}),
    (NoticeKind.QUEUED, {"position": 2, "reason": "load"}),
]


BARS = [
    (-1.0, "[>           ]"), (0.08, "[>           ]"), (0.09, "[=>          ]"),
    (0.5, "[======>     ]"), (0.99, "[===========>]"), (1.0, "[============]"),
    (7.0, "[============]"),
]  # fmt: skip


@pytest.mark.parametrize(("share", "drawn"), BARS)
def test_bar_is_full_at_the_end_alone(share: float, drawn: str) -> None:
    loading = Notice(kind=NoticeKind.LOADING, detail={"phase": "weights", "fraction": share})
    assert f"the model, {drawn} " in notice_text(loading, has_bar=True)


def test_the_sentence_of_each_notice(snapshot: SnapshotAssertion) -> None:
    assert [
        f"{kind} {detail} -> {notice_text(Notice(kind=kind, detail=detail))}"
        for kind, detail in NOTICES
    ] == snapshot


def test_change_line() -> None:
    change = {"at": NOW, "model": "m", "from": "LOADING", "to": "READY", "generation": 2, "pid": 9}
    line = change_line(change | {"note": "loaded"})
    assert line.endswith(" m: LOADING → READY (generation 2, pid 9, loaded)")


ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
FORCING = set(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
BRICKS = (
    "\x1b", "\x9b", "\x90", "[31m", "[2J", "]0;x", "\x07", "\r", "\x7f", "\x85", "\u061c", "\u200d",
    "\u200f", "\u202e", "\u2066", "\u2028", "\U000e0041", "\udc9b", "\x1b[31m", "x", "ä", "\n",
    "\t",
    "0123456789abcdef" * 2,
)  # fmt: skip

FEWER = settings(max_examples=25)
BEGIN, END = own(" ").split(" ")
anything = st.text() | st.lists(st.sampled_from(BRICKS)).map("".join)
foreign = anything.filter(lambda text: BEGIN not in text and END not in text)
"""Hypothesis reads patterns of the modules that it tests, and so finds out the marks."""

ours = st.sampled_from([CLEAR_LINE, own("\x1b[7A"), own("\x1b[J")])
mixed = st.lists(foreign | ours | foreign.map(lambda text: styled(text, "red bold"))).map("".join)
OURS = re.compile(r"\r\x1b\[K|\x1b\[(?:7A|J|31;1m|0m)")


class Screen(io.StringIO):
    """A terminal that notes what is written."""

    def isatty(self) -> bool:
        """See `io.IOBase.isatty`."""
        return True


def test_a_watched_table_is_drawn_over_itself_and_never_scrolls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LINES", "4")
    monkeypatch.setattr("time.sleep", Mock(side_effect=[None, KeyboardInterrupt]))
    screen = Screen()
    monkeypatch.setattr("sys.stdout", GuardedStream(screen))
    table: list[Line] = [[(f"line {number}", "")] for number in range(9)]
    with pytest.raises(KeyboardInterrupt):
        _redraw(lambda: table, Output(is_plain=True))
    drawn = "".join(f"line {number}\x1b[K\n" for number in range(3))
    assert screen.getvalue() == f"\r{drawn}\x1b[J\x1b[3A\r{drawn}\x1b[J"


def acting(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in ACTING and c not in "\n\t"]


@FEWER
@given(foreign)
def test_nothing_of_another_acts_and_every_character_keeps_its_place(text: str) -> None:
    shown = for_terminal(text)
    assert acting(shown) == []
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable() or a in "\n\t")


@FEWER
@given(mixed)
def test_own_style_survives_around_anything_and_only_it(text: str) -> None:
    shown = for_terminal(text)
    assert acting(OURS.sub("", shown)) == []
    assert OURS.sub("", shown) == for_terminal(plain(text))
    assert "\x1b" not in for_terminal(plain(text))


@FEWER
@given(mixed, st.integers(0, 400), st.integers(0, 400), foreign)
@example(styled("\x1b[31m", "red"), 1, 400, "")
@example(styled("x", "red"), 0, len(BEGIN) + len("\x1b[31m"), "\x1b[2J")
def test_a_style_that_is_cut_sets_nothing_free(text: str, begin: int, end: int, more: str) -> None:
    assert acting(OURS.sub("", for_terminal(text[begin : begin + end] + more))) == []


@FEWER
@given(foreign)
def test_an_answer_keeps_what_languages_need_and_nothing_that_forces_an_order(text: str) -> None:
    shown = for_terminal(text, is_answer=True)
    assert {unicodedata.category(c) for c in acting(shown)} <= {"Cf"}
    assert not FORCING & set(shown)
    assert not [c for c in shown if 0xE0000 <= ord(c) <= 0xE00FF]


def test_honest_text_is_not_changed() -> None:
    honest = "שלום\u200f (abc)، می\u200cخواهم 👩\u200d💻 é 日本語\n\tend"
    assert for_terminal(honest, is_answer=True) == honest
    assert for_terminal("Grüße, 日本語, 👍\n\tend") == "Grüße, 日本語, 👍\n\tend"


def test_click_and_print_pass_the_guard_and_there_is_no_way_around_it() -> None:
    screen = Screen()
    stream = GuardedStream(screen)
    print("\x1b[2J", file=stream)
    click.secho("\x9b", file=cast(TextIO, stream), fg="red")
    stream.writelines(["\x07", "\u202e"])
    Output().answer("\x1b]0;\u200f", cast(TextIO, stream))
    assert acting(screen.getvalue()) == ["\u200f"]
    assert not hasattr(GuardedStream(io.TextIOWrapper(io.BytesIO())), "buffer")


def test_in_a_pipe_answers_alone_are_as_they_are_and_there_is_no_style() -> None:
    pipe = io.StringIO()
    stream = GuardedStream(pipe)
    print(styled("\x1b[2J\u202e", "red"), file=stream, end="|")
    stream.write_answer(own("\r") + "\x1b[2J\u202e")
    assert pipe.getvalue() == "␛[2J\ufffd|\x1b[2J\u202e"


@FEWER
@given(foreign)
def test_a_line_of_json_is_printable_and_means_the_same(text: str) -> None:
    line = Output.object_line({"value": {text: text}})
    assert line.isprintable()
    meant = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert json.loads(line)["value"] == {meant: meant}


@pytest.mark.parametrize(
    ("is_json", "written"), [(True, '{"schema_version": 1, "a": 1}\n'), (False, "one\n")]
)
def test_a_result_is_a_value_for_programs_and_a_text_or_lines_for_people(
    is_json: bool, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Iterator[Line] = iter([[("one", "bold")]])
    for shown in ("one", lines):
        Output(is_json=is_json).result({"a": 1}, shown)
        assert capsys.readouterr() == (written, "")
    assert list(lines) == ([[("one", "bold")]] if is_json else []), "made only to be shown"


def test_no_line_of_an_error_passes_for_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    from mlxsup.cli.exit_status import CliError

    Output().error(CliError("it says:\nhint: run `x`\n  - so", code="x", hint="do this"))
    assert capsys.readouterr().err.splitlines() == [
        "error: it says:", "  hint: run `x`", "  - so", "hint: do this",
    ]  # fmt: skip


ROWS = [("a", "1 GiB"), ("a longer name", "9"), ("日本語 \x1b[2J and a path", "10")]


@pytest.mark.parametrize("width", [None, 20, 16])
def test_a_listing_folds_its_cells_and_no_line_ends_in_spaces(
    width: int | None, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxsup.cli.terminal.tables.width_of", lambda _: width)
    tables = listing(("MODEL", "SIZE"), ROWS, right=("SIZE",)), listing((), ROWS)
    assert [list(map(plain_of, lines)) for lines in tables] == snapshot


@pytest.mark.parametrize(
    ("figures", "lines"),
    [
        ({"decode_kept": None, "shapes_seen": 0}, []),
        ({"decode_kept": 0.625, "interleaved_s": 8.0}, ["kept 62% of their speed"]),
        ({"shapes_seen": 2, "shapes_s": 0.5}, ["2 steps of a new shape took 0.50 s"]),
    ],
    ids=["none", "prompts beside answers", "new shapes"],
)
def test_debug_says_what_requests_cost_each_other(
    figures: dict[str, Any], lines: list[str]
) -> None:
    shown = [line for _, found in traffic({"models": [{"name": "a", **figures}]}) for line in found]
    assert len(shown) == len(lines)
    assert all(part in line for part, line in zip(lines, shown, strict=True))


def test_a_path_or_an_option_is_not_broken_at_its_hyphens() -> None:
    assert wrapped("run it with --no-color", 17) == ["run it with", "--no-color"]


@pytest.mark.parametrize("detail", [{}, {"done": 0, "total": 0}, {"done": "3", "total": None}])
def test_a_prompt_whose_length_is_not_said_is_no_error(detail: dict[str, Any]) -> None:
    """A daemon of another version may say less."""
    notice = Notice(kind=NoticeKind.PREFILLING, detail=detail)
    assert notice_text(notice, has_bar=True).endswith("0 of 1 token (0%)")
    assert "(0%)" in notice_text(notice, is_interrupted=True)
