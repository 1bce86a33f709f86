"""An answer on a terminal that is played: its lines, and what is said while no text comes."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxsup.cli.terminal import answer
from mlxsup.cli.terminal.answer import (
    AnswerScreen,
    cancelled_text,
    column_after,
    empty_remark,
    result_map,
)
from mlxsup.cli.terminal.output import Output
from mlxsup.cli.terminal.text import cell_len
from mlxsup.cli.terminal.writer import GuardedStream
from mlxsup.client import Notice, NoticeKind, Result
from mlxsup.protocol.client_messages import Usage
from mlxsup.protocol.states import FinishReason

COLUMNS = 20
SEQUENCE = re.compile(r"\x1b\[(\d*)([A-Za-z])|(.|\n)")


class Glass(io.StringIO):
    """A terminal that knows as much of ours as is used; a wide sign leaves an empty cell."""

    def __init__(self, columns: int = COLUMNS) -> None:
        super().__init__()
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0

    def isatty(self) -> bool:
        """See `io.IOBase.isatty`."""
        return True

    def write(self, text: str) -> int:
        """Obey the text."""
        for count, verb, sign in SEQUENCE.findall(text):
            number = int(count or 1)
            match verb or sign:
                case "A":
                    self.row -= number
                case "D":
                    self.column = max(self.column - number, 0)
                case "G":
                    self.column = number - 1
                case "K":
                    del self.rows[self.row][self.column :]
                case "\r":
                    self.column = 0
                case "\n":
                    self._next_row()
                case _ if sign:
                    self._draw(sign)
        return len(text)

    def _next_row(self) -> None:
        self.row, self.column = self.row + 1, 0
        self.rows += [[]] if self.row == len(self.rows) else []

    def _draw(self, sign: str) -> None:
        width = cell_len(sign)
        if self.column + width > self.columns:
            self._next_row()
        row = self.rows[self.row]
        row += " " * (self.column - len(row))
        row[self.column : self.column + width] = [sign, *[""] * (width - 1)]
        self.column += width

    @property
    def lines(self) -> list[str]:
        """What stands there."""
        return ["".join(row).rstrip() for row in self.rows]


@pytest.mark.parametrize(
    "text",
    [
        "exactly twenty it has",
        "two\nlines",
        "a\tbc\td",
        "日本語の文章はどこでも切れる。",
        "x" * COLUMNS,
    ],
    ids=["words", "lines", "tabs", "wide", "full line"],
)
def test_column_is_where_a_terminal_stands(text: str) -> None:
    glass = Glass()
    glass.write(text.expandtabs(8))
    assert column_after(0, text, COLUMNS) == glass.column


@pytest.mark.parametrize(
    ("remark", "about"),
    [
        ("the answer is empty", {}),
        ("the answer contains only white space", {"text": " \n"}),
        ("no answer: the model reached the token limit", {"reasoning": "x", "end": "length"}),
        ("no answer: the model stopped after its reasoning", {"reasoning": "x"}),
        ("", {"text": "x", "end": "length"}),
        ("", {"calls": [{}], "end": "tool_calls"}),
        ("", {"end": "cancelled"}),
    ],
)
def test_an_answer_with_nothing_to_read_is_remarked(remark: str, about: dict[str, Any]) -> None:
    said = {"text": "", "reasoning": "", "calls": [], "end": "stop", **about}
    result = SimpleNamespace(
        text=said["text"], reasoning=said["reasoning"], tool_calls=said["calls"],
        finish_reason=said["end"],
    )  # fmt: skip
    found = empty_remark(cast(Result, result))
    assert found.startswith(remark)
    assert bool(found) == bool(remark)


def test_an_interrupt_says_whether_a_load_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Answer(monkeypatch)
    stays = "Cancelled. The model stays loaded."
    assert cancelled_text(shown.screen) == stays
    shown.wait("loading", state="LOADING")
    assert "m continues to load; `mlxsup unload m`" in cancelled_text(shown.screen)
    shown.say("one")
    assert cancelled_text(shown.screen) == stays


class Timers:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def __call__(self, _: float, function: Callable[[], None]) -> Any:
        self._due.append(function)
        self.start = self.cancel = lambda: None
        return self

    def second(self) -> None:
        """Have a second pass."""
        while self._due:
            self._due.pop()()


class Answer:
    """A screen on a terminal, or on streams where lines stay."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_terminal: bool = True,
        columns: int = COLUMNS,
    ) -> None:
        self.glass = Glass(columns) if is_terminal else io.StringIO()
        stream = GuardedStream(self.glass)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("threading.Timer", timers := Timers())
        monkeypatch.setattr(answer, "clock", lambda: "12:00:00Z")
        monkeypatch.setenv("COLUMNS", str(columns))
        self.second = timers.second
        self.screen = AnswerScreen("m", Output(is_plain=True))

    def say(self, text: str) -> None:
        """Write some of the answer."""
        self.screen.write(text, sys.stdout)

    def wait(self, kind: str, **detail: Any) -> None:
        """Tell what the answer waits for."""
        self.screen.notify(Notice(kind=NoticeKind(kind), detail=detail))

    @property
    def lines(self) -> list[str]:
        """What stands there."""
        if isinstance(self.glass, Glass):
            return self.glass.lines
        return self.glass.getvalue().splitlines()


def test_a_wait_in_the_middle_of_a_line_is_said_after_a_second_and_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Answer(monkeypatch)
    seen.say("The keeper lig")
    seen.wait("paused", reason="user")
    assert seen.lines == ["The keeper lig"]
    seen.second()
    assert seen.lines == ["The keeper lig", "paused: `mlxsup re…"]
    seen.say("hted the lamp.")
    assert seen.lines == ["The keeper lighted t", "he lamp."]
    seen.wait("paused", reason="user")
    seen.say(" So")
    seen.second()
    assert seen.lines == ["The keeper lighted t", "he lamp. So"], "it was over within a second"


def test_a_crash_is_one_line_that_does_not_flap(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, said = Answer(monkeypatch, columns=80), []
    seen.say("half")
    seen.wait("interrupted", cause="SIGKILL")
    seen.second()
    for kind, detail in (
        ("queued", {"position": 1, "reason": "backoff"}),
        ("loading", {"phase": "weights", "fraction": 0.4}),
        ("prefilling", {"done": 1, "total": 2}),
        ("resumed", {"after": "crash"}),
    ):
        said.append(seen.lines[-1])
        seen.wait(kind, **detail)
    said.append(seen.lines[-1])
    seen.say("way")
    assert [*said, *seen.lines] == [
        "The model stopped. Reloading, then it continues.",
        "The model stopped. Reloading, then it continues.",
        "The model stopped. Reloading (40%), then it continues.",
        "Reading the conversation again (50%), then it continues.",
        "Reading the conversation again (50%), then it continues.",
        "halfway", "",
    ]  # fmt: skip


def test_where_lines_stay_a_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Answer(monkeypatch, is_terminal=False)
    seen.wait("loading", phase="download", fraction=0.1)
    for fraction in (0.0, 0.1, 0.3, 0.4, 0.9):
        seen.second()
        seen.wait("loading", phase="weights", fraction=fraction)
    seen.say("one\n")
    seen.wait("interrupted", cause="SIGKILL")
    seen.second()
    seen.say("two\n")
    seen.wait("interrupted", cause="SIGKILL")
    seen.say("three\n")
    assert seen.lines == [
        "12:00:00Z m: loading the model, 10%, downloading",
        "12:00:00Z m: loading the model, reading weights",
        "12:00:00Z m: loading the model, 30%, reading weights",
        "12:00:00Z m: loading the model, 90%, reading weights",
        "one",
        "12:00:00Z m: The model stopped. Reloading, then it continues.",
        "12:00:00Z m: the answer continues",
        "two", "three",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("column", "columns"), [(4, 10), (COLUMNS, COLUMNS)], ids=["resized", "full line"]
)
def test_text_continues_below_if_its_place_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch, column: int, columns: int
) -> None:
    seen = Answer(monkeypatch)
    seen.say("x" * column)
    seen.wait("paused", reason="turn")
    seen.second()
    monkeypatch.setenv("COLUMNS", str(columns))
    seen.say("yz")
    assert seen.lines == ["x" * column, "yz"]


def test_no_line_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Answer(monkeypatch)
    seen.say("half")
    seen.wait("paused", reason="user")
    seen.second()
    seen.screen.end_text()
    assert cast(Glass, seen.glass).lines == ["half", ""]
    assert cast(Glass, seen.glass).column == 0


def test_an_answer_that_ends_its_line_is_followed_by_no_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, lines in (("one\n", ["one", ""]), ("one", ["one", ""])):
        seen = Answer(monkeypatch)
        seen.say(text)
        seen.screen.end_text()
        assert seen.lines == lines


def test_a_result_for_programs_has_no_vectors_and_counts_guesses_only_if_there_were_some() -> None:
    for drafted in (0, 3):
        usage = Usage(completion_tokens=5, drafted=drafted)
        result = Result(text="a", finish_reason=FinishReason.STOP, usage=usage)
        value = result_map("m", "r-1", result)
        assert (value["model"], value["request_id"], value["text"]) == ("m", "r-1", "a")
        assert ("vectors" in value, "drafted" in value["usage"]) == (False, drafted > 0)
