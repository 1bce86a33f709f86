"""Folders that are read in this process, instead of one of their own that has to start first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxsup.supervisor.config import model_folders
from mlxsup.supervisor.memory import estimates
from mlxsup.supervisor.memory.estimator import Answer, Question, look


async def ask_here(questions: Sequence[Question], **_: object) -> dict[int, Answer | str]:
    """Answers as the process would, over the same lines."""
    asked = [Question.of_line(question.to_line()) for question in questions]
    return {one.number: Answer.of_line(look(one).to_line().encode()) for one in asked}


@pytest.fixture
def estimates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every folder read in this process."""
    for module in (estimates, model_folders):
        monkeypatch.setattr(module, "ask", ask_here)
