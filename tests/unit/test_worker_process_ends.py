"""How a worker's life in this process ends: by a failed load, by SIGTERM, by its heartbeats."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.message import Message
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dying,
    Exit,
)
from mlxsup.worker import process as process_module
from mlxsup.worker.engine import EngineFacts, ReportProgress, WorkerFaultError
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.link import Link
from mlxsup.worker.preparing import StuckPreprocessingError
from mlxsup.worker.process import Life, TerminatedError, TerminationHandler, judge

from support.worker_life import IdleLoop, Supervisor, listening, make_spec, run_loop


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with listening() as made:
        yield made


@pytest.fixture
def idle_loop(monkeypatch: pytest.MonkeyPatch) -> type[IdleLoop]:
    monkeypatch.setattr(process_module, "StepLoop", IdleLoop)
    return IdleLoop


def test_an_exit_during_the_load_ends_it_without_a_cause_B9(
    supervisor: Supervisor, idle_loop: type[IdleLoop]
) -> None:
    life = Life(make_spec(supervisor))
    supervisor.say(Exit())
    life.link.wait(60.0)
    assert life.run() == ExitCode.ASKED
    types = [message.TYPE for message in supervisor.heard(last="load_progress")]
    assert types == ["hello", "load_progress"], "the load ends at its first report"
    assert not life.termination.is_interrupting


def test_what_comes_before_ready_and_is_no_exit_is_a_broken_link(
    supervisor: Supervisor, idle_loop: type[IdleLoop]
) -> None:
    life = Life(make_spec(supervisor))
    supervisor.say(CancelRow(key=RequestKey(1)))
    life.link.wait(60.0)
    assert life.run() == 76
    assert supervisor.heard(last="dying")[-1] == Dying(
        code=76, message="cancel_row came before READY"
    )


@pytest.mark.parametrize(
    ("fake", "code", "cause", "has_traceback"),
    [
        ({"load_error": "missing"}, 66, "the model folder /nowhere does not exist", False),
        ({"load_error": "memory"}, 75, "the weights do not fit into memory", False),
        ({"load_error": "exception"}, 70, "RuntimeError: life 1 raises this on demand", True),
        ({"load_steps": 0}, 64, "the fake engine's load_steps takes an integer from 1", False),
    ],
)
def test_a_load_that_fails_is_the_last_thing_said_F3(
    supervisor: Supervisor,
    idle_loop: type[IdleLoop],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    fake: dict[str, Any],
    code: int,
    cause: str,
    has_traceback: bool,
) -> None:
    life = Life(make_spec(supervisor, fake=fake))
    with caplog.at_level(logging.ERROR):
        assert life.run() == code
    assert not life.termination.is_interrupting, "a SIGTERM interrupts no end that is under way"
    assert supervisor.heard(last="dying")[-1] == Dying(code=code, message=cause)
    assert ("Traceback" in capsys.readouterr().err) is has_traceback
    assert f"worker dies code={code} cause=" in caplog.text


def test_sigterm_is_a_death_unless_the_exit_was_asked_for_too_E5(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come = []

    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        has_come.append(must_end())
        signal.raise_signal(signal.SIGTERM)
        has_come.append(must_end())

    run_loop(monkeypatch, run, asked=False)
    assert Life(make_spec(supervisor)).run() == 143
    assert has_come == [False, True], "it is seen between two steps, and interrupts none"
    assert supervisor.heard(last="dying")[-1] == Dying(code=143, message="ended by SIGTERM")


@pytest.mark.parametrize(
    ("message", "code", "last"),
    [(Exit(), 0, "ready"), (CancelRow(key=RequestKey(1)), 143, "dying")],
)
def test_an_exit_that_came_with_sigterm_is_what_counts(
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    message: Message,
    code: int,
    last: str,
) -> None:
    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        supervisor.say(message)
        loop.given["link"].wait(60.0)
        signal.raise_signal(signal.SIGTERM)

    run_loop(monkeypatch, run, asked=False)
    assert Life(make_spec(supervisor)).run() == code
    assert last == supervisor.heard(last=last)[-1].TYPE


def test_sigterm_interrupts_a_load_where_it_stands_B9(
    supervisor: Supervisor, idle_loop: type[IdleLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    class Loading(FakeEngine):
        def load(self, report: ReportProgress) -> EngineFacts:
            reached.append("load")
            signal.raise_signal(signal.SIGTERM)
            reached.append("behind the signal")
            return super().load(report)

    monkeypatch.setattr(process_module, "FakeEngine", Loading)
    life = Life(make_spec(supervisor))
    assert life.run() == 143
    assert reached == ["load"]
    assert not life.termination.is_interrupting


def test_heartbeats_that_have_ended_end_the_worker_P23(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        assert not must_end()
        life.heartbeat.stop()
        must_end()

    run_loop(monkeypatch, run, asked=False)
    life = Life(make_spec(supervisor))
    assert life.run() == 71
    last = supervisor.heard(last="dying")[-1]
    assert last == Dying(code=71, message="the thread that sends heartbeats has ended")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory"),
        (MemoryError("no  room\nleft"), "no room left"),
        (KeyError("x"), "KeyError: 'x'"),
        (WorkerFaultError("a row is gone"), "a row is gone"),
        (StuckPreprocessingError("too long"), "too long"),
        (TerminatedError("ended"), "ended"),
    ],
)
def test_a_cause_says_what_the_error_says(error: BaseException, message: str) -> None:
    assert judge(error).message == message


class Waking(Link):
    """What a termination handler needs of a link, without a socket."""

    def __init__(self) -> None:
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1


def test_sigterm_interrupts_once_while_it_may_and_else_wakes_the_loop() -> None:
    link = Waking()
    handler = TerminationHandler(link)
    assert not handler.has_come()
    handler.interrupt_from_now_on()
    with pytest.raises(TerminatedError, match=r"^ended by SIGTERM$"):
        handler(signal.SIGTERM, None)
    assert (handler.has_come(), link.wakes) == (True, 0)
    handler(signal.SIGTERM, None)
    assert link.wakes == 1
    with pytest.raises(TerminatedError, match=r"^ended by SIGTERM$"):
        handler.interrupt_from_now_on()
    handler(signal.SIGTERM, None)
    assert link.wakes == 2
