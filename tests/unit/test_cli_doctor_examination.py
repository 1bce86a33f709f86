"""Everything is looked at, and nothing is waited for longer than the limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mlxsup.cli.doctor import examination
from mlxsup.cli.doctor.examination import examine, settle
from mlxsup.cli.doctor.finding import Finding, Level, note, ok, problem
from mlxsup.cli.doctor.report import report_lines, summary
from mlxsup.cli.terminal.output import Output


def nobody(_: Sequence[str]) -> None:
    """Nothing is slow."""


def test_a_check_that_hangs_is_a_finding_and_loses_no_other() -> None:
    release, slow = threading.Event(), list[str]()

    def hang() -> Iterator[Finding]:
        release.wait()
        yield ok("disk", "late")

    try:
        found = examine(
            {"disk": hang, "rest": lambda: [ok("rest", "fine")]}, on_slow=slow.extend, limit_s=0.2
        )
        shown = [(one.subject, one.level) for one in found]
    finally:
        release.set()
    assert shown == [("disk", Level.NOTE), ("rest", Level.OK)]
    assert slow == ["disk"]


def test_what_ends_one_after_the_other_is_waited_for_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a played clock: one of the examinations ends every six seconds."""
    now = 0.0
    works = [Future[None]() for _ in range(5)]

    def wait(
        waiting: set[Future[None]], limit_s: float, return_when: str
    ) -> tuple[set[Future[None]], set[Future[None]]]:
        nonlocal now
        now += 6.0
        ended = {one for one in works[: int(now / 6.0)] if one in waiting}
        return ended, waiting - ended

    monkeypatch.setattr(examination, "wait", wait)
    clock = SimpleNamespace(monotonic=lambda: now, process_time=lambda: 0.0)
    monkeypatch.setattr(examination, "time", clock)
    assert settle(works, limit_s=10.0)
    assert now == 30.0
    assert not settle([Future()], limit_s=10.0), "nothing of it ever ends"


def test_what_cannot_be_read_is_a_finding() -> None:
    def refuse() -> Iterator[Finding]:
        yield ok("a", "before")
        raise PermissionError(13, "Permission denied", "/root")

    [one] = examine({"a": refuse}, on_slow=nobody)
    assert one.level is Level.NOTE
    assert "Permission denied" in one.what


def test_a_bug_of_ours_is_none() -> None:
    def wrong() -> Iterator[Finding]:
        raise KeyError("a")
        yield

    with pytest.raises(KeyError):
        list(examine({"a": wrong}, on_slow=nobody))


def test_the_worst_comes_last() -> None:
    findings = [
        problem("b", "file is wrong", why="it matters", command="rm x"),
        ok("a", "fine"),
        note("c", "so", why="because", fix="do it"),
    ]
    lines = report_lines(findings, Output())
    assert [line.split()[0] for line in lines] == [
        "ok", "note", "why:", "fix:", "problem", "why:", "run:", "1",
    ]  # fmt: skip
    assert lines[-1] == "1 problem, 1 note"


def test_the_summary_counts() -> None:
    assert summary([]) == "nothing is wrong"
    assert summary([note("a", "b", why="c")]) == "nothing is broken; 1 note"
    assert summary([problem("a", "b", why="c")] * 2) == "2 problems"
