"""What is said, off a terminal, of what an answer waits for: not at once, and nothing twice."""

from __future__ import annotations

import pytest

from mlxsup.cli.terminal import answer_line
from mlxsup.cli.terminal.answer_line import AnswerLine
from mlxsup.cli.terminal.output import Output
from mlxsup.client.results import Notice
from mlxsup.protocol.states import NoticeKind

from support.eventually import eventually

NEVER_S = 3600.0
LOADING = Notice(kind=NoticeKind.LOADING, detail={"phase": "weights", "fraction": 0.4})
SAID = "m: loading, weights 40%\n"
QUEUED = Notice(kind=NoticeKind.QUEUED, detail={"position": 1})


class Written:
    """What was written to standard error so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def __call__(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text

    def wait_for(self, text: str, count: int) -> None:
        """Returns once the text was written that many times."""
        eventually(lambda: self().count(text) == count)


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Written:
    return Written(capsys)


def test_what_is_soon_over_is_not_said(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_line, "QUIET_S", NEVER_S)
    with AnswerLine("m", Output()) as line:
        for notice in (QUEUED, LOADING):
            line.tell(notice)
        line.clear()
        assert written() == ""
        # The next wait is another one.
        line.tell(QUEUED)
    assert written() == ""


def test_each_wait_is_said_anew_and_no_step_of_it_twice(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_line, "QUIET_S", 0.0)
    with AnswerLine("m", Output()) as line:
        for times in (1, 2):
            line.tell(LOADING)
            written.wait_for(SAID, times)
            line.tell(QUEUED)
            line.tell(LOADING)
            assert written().count("loading") == times
            assert written().count("m: queued, position 1\n") == times
            line.clear()
