"""Twenty questions of a newcomer: the noun that comes to mind first should be in the path.

Questions, nouns and `before` were written down when every part was one flat folder; six of the
answers had the noun in their path then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("protocol", "store", "supervisor", "worker", "client", "gateway", "downloader", "cli")
LEAST_FOUND = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Where is this?

    Attributes:
        what: the question.
        noun: looked for in the paths.
        anchor: a text that the right file has, and no other.
        before: the answer before the rooms.
    """

    what: str
    noun: str
    anchor: str
    before: str


def _q(what: str, noun: str, anchor: str, before: str) -> Question:
    return Question(what=what, noun=noun, anchor=anchor, before=before)


QUESTIONS = (
    _q("`mlxsup start`", "start", 'def start(\n    config_path', "cli/daemon.py"),
    _q("`mlxsup load`", "load", '"""Example: mlxsup load smollm2', "cli/models.py"),
    _q("`mlxsup restart`", "restart", '"""Example: mlxsup restart smollm2', "cli/models.py"),
    _q("when a crashed worker starts again", "restart", "def after_crash(",
       "supervisor/core/restart.py"),
    _q("how a stream is resumed after a crash", "resume", "def lose_running(",
       "supervisor/core/serving.py"),
    _q("the states of a worker", "state", "class Backoff(", "supervisor/core/phases.py"),
    _q("which transitions there are", "lifecycle", "TABLE: dict[", "supervisor/core/lifecycle.py"),
    _q("what follows the exit of a process", "exit", "def died(", "supervisor/core/exits.py"),
    _q("which request is to blame for a crash", "blame", "MAX_SUSPECTS = ",
       "supervisor/core/recovery.py"),
    _q("how a stall is noticed", "watchdog", "def judge(self, now: float, step_timeout_s",
       "supervisor/core/watchdog.py"),
    _q("which request of the queue is next", "queue", "def rejoin(",
       "supervisor/core/fairness.py"),
    _q("whether a request may wait", "admission", "def refuse_for_room(",
       "supervisor/core/admission.py"),
    _q("who sends the end of a stream", "end", "def _done(request: Request",
       "supervisor/core/serving.py"),
    _q("the sentences of the daemon's errors", "error", "def shutting_down(",
       "supervisor/core/refusals.py"),
    _q("workers left over by a killed daemon", "leftover", 'RECORD_NAME = "',
       "supervisor/sweep.py"),
    _q("where the memory of workers is measured", "measure", "def machine_bytes(",
       "supervisor/monitor.py"),
    _q("the keys of the configuration", "config", "class SupervisorTable(",
       "supervisor/config_tables.py"),
    _q("the socket that clients connect to", "socket", "MAX_OPEN_PER_CONNECTION = ",
       "supervisor/clients.py"),
    _q("where the chat template is rendered", "template", "apply_chat_template(",
       "worker/mlx_text.py"),
    _q("the default folders", "folder", 'DEFAULT_RUNTIME_DIR = "', "supervisor/config_tables.py"),
)  # fmt: skip


def answer(question: Question) -> str:
    """The one file that has the anchor, from the root."""
    paths = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    (found,) = [path for path in paths if question.anchor in path.read_text()]
    return found.relative_to(ROOT).as_posix()


def _what(question: Question) -> str:
    return question.what


@pytest.mark.parametrize("question", QUESTIONS, ids=_what)
def test_each_question_has_one_answer(question: Question) -> None:
    assert answer(question)


def test_the_noun_leads_to_the_file() -> None:
    assert len(QUESTIONS) == 20
    missed = {q.what: answer(q) for q in QUESTIONS if q.noun not in answer(q)}
    assert len(QUESTIONS) - len(missed) >= LEAST_FOUND, missed
    assert sum(q.noun in q.before for q in QUESTIONS) == 6, "as it was written down"
