"""Every row of the state table: where each state leaves to, and what each trigger does in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import HAS_PROCESS, FinishReason, State
from mlxsup.protocol.worker_messages import Exit
from mlxsup.supervisor.core.actions import LogFault, WorkerSignal
from mlxsup.supervisor.core.lifecycle import triggers
from mlxsup.supervisor.core.lifecycle.life import KILL_LIMIT_S
from mlxsup.supervisor.core.lifecycle.states import AFTER_EXIT, LEAVES_TO, Phase
from mlxsup.supervisor.core.lifecycle.table import TABLE, ImpossibleTransitionError

from support.core_driver import Driver, entry
from support.core_states import in_state


def test_the_edges_are_those_of_the_design() -> None:
    assert {
        State.STOPPED: {"PENDING"},
        State.PENDING: {"LOADING", "STOPPED", "BACKOFF", "FAILED"},
        State.LOADING: {"READY", "STOPPING"},
        State.READY: {"DRAINING", "STOPPING"},
        State.DRAINING: {"READY", "STOPPING"},
        State.STOPPING: {"FAILED"},
        State.BACKOFF: {"PENDING", "STOPPED"},
        State.FAILED: {"PENDING", "STOPPED"},
    } == LEAVES_TO
    assert {"STOPPED", "PENDING", "BACKOFF", "FAILED"} == AFTER_EXIT


PHASES = get_args(Phase)


def test_every_state_answers_to_every_command() -> None:
    commands = (
        triggers.WantUp,
        triggers.WantDown,
        triggers.WantRestart,
        triggers.Removed,
        triggers.Reconfigured,
        triggers.HitBug,
    )
    assert [(p, c) for p in PHASES for c in commands if (p, c) not in TABLE] == []


def test_every_state_with_a_process_answers_to_its_end_and_to_garbage() -> None:
    with_process = [phase for phase in PHASES if phase.STATE in HAS_PROCESS]
    assert {phase.STATE for phase in with_process} == HAS_PROCESS
    for phase in with_process:
        assert {(phase, triggers.Died), (phase, triggers.Broke)} <= TABLE.keys()


@pytest.mark.parametrize("state", list(State))
def test_the_driver_reaches_every_state(state: State) -> None:
    assert in_state(state).state() is state


LOAD = {
    State.STOPPED: State.LOADING,
    State.PENDING: State.PENDING,
    State.LOADING: State.LOADING,
    State.READY: State.READY,
    State.DRAINING: State.READY,
    State.STOPPING: State.STOPPING,
    State.BACKOFF: State.LOADING,
    State.FAILED: State.LOADING,
}


@pytest.mark.parametrize(("state", "after"), LOAD.items())
def test_load(state: State, after: State) -> None:
    driver = in_state(state)
    command = driver.load()
    assert driver.state() is after
    assert driver.row()["wanted"] == "up"
    if after is State.READY:
        assert driver.replies() == [command]
    else:
        assert driver.replies() == []


UNLOAD = {
    State.STOPPED: State.STOPPED,
    State.PENDING: State.STOPPED,
    State.LOADING: State.STOPPING,
    State.READY: State.DRAINING,
    State.DRAINING: State.DRAINING,
    State.STOPPING: State.STOPPING,
    State.BACKOFF: State.STOPPED,
    State.FAILED: State.STOPPED,
}


@pytest.mark.parametrize(("state", "after"), UNLOAD.items())
def test_unload(state: State, after: State) -> None:
    driver = in_state(state)
    command = driver.unload()
    assert driver.state() is after
    assert driver.row()["wanted"] == "down"
    assert driver.replies() == ([command] if after is State.STOPPED else [])


RESTART = {
    State.STOPPED: State.LOADING,
    State.PENDING: State.PENDING,
    State.LOADING: State.LOADING,
    State.READY: State.DRAINING,
    State.DRAINING: State.DRAINING,
    State.STOPPING: State.STOPPING,
    State.BACKOFF: State.LOADING,
    State.FAILED: State.LOADING,
}


@pytest.mark.parametrize(("state", "after"), RESTART.items())
def test_restart(state: State, after: State) -> None:
    driver = in_state(state)
    driver.restart()
    assert driver.state() is after
    assert (driver.row()["wanted"], driver.row()["why"]) == ("up", "restart")


RESTART_NOW = RESTART | {
    State.LOADING: State.STOPPING,
    State.READY: State.STOPPING,
    State.DRAINING: State.STOPPING,
}


@pytest.mark.parametrize(("state", "after"), RESTART_NOW.items())
def test_restart_now(state: State, after: State) -> None:
    driver = in_state(state)
    driver.restart(now=True)
    assert driver.state() is after


REQUEST = {
    State.STOPPED: (State.LOADING, None),
    State.PENDING: (State.PENDING, None),
    State.LOADING: (State.LOADING, None),
    State.READY: (State.READY, None),
    State.DRAINING: (State.DRAINING, ErrorCode.UNLOADED),
    State.STOPPING: (State.STOPPING, ErrorCode.UNLOADED),
    State.BACKOFF: (State.BACKOFF, None),
    State.FAILED: (State.FAILED, ErrorCode.MODEL_FAILED),
}


@pytest.mark.parametrize(("state", "after"), REQUEST.items())
def test_request(state: State, after: tuple[State, ErrorCode | None]) -> None:
    driver = in_state(state)
    driver.ask("new")
    assert (driver.state(), driver.errors().get("new")) == after


EXIT = {
    State.LOADING: State.LOADING,  # the first crash is answered at once
    State.READY: State.LOADING,
    State.DRAINING: State.STOPPED,
    State.STOPPING: State.STOPPED,
}


@pytest.mark.parametrize(("state", "after"), EXIT.items())
def test_exit(state: State, after: State) -> None:
    driver = in_state(state)
    generation = driver.generation()
    driver.exit()
    assert driver.state() is after
    assert driver.generation() == generation + (after is State.LOADING)


def test_ready_while_loading_becomes_ready() -> None:
    driver = in_state(State.LOADING)
    driver.ready()
    assert driver.state() is State.READY


@pytest.mark.parametrize("say", [Driver.hello, Driver.ready, lambda d: d.progress(0.5)])
@pytest.mark.parametrize("state", [State.READY, State.DRAINING])
def test_hello_ready_or_progress_after_ready_is_a_crash_without_evidence(
    say: Callable[[Driver], object], state: State
) -> None:
    driver = in_state(state)
    say(driver)
    assert driver.state() is State.STOPPING
    assert driver.signals() == [WorkerSignal.KILL]


@pytest.mark.parametrize(
    "say", [Driver.hello, Driver.ready, lambda d: d.progress(0.5), Driver.broke]
)
def test_what_crosses_a_stop_on_its_way_is_ignored(say: Callable[[Driver], object]) -> None:
    driver = in_state(State.LOADING)
    driver.unload()
    say(driver)
    assert driver.state() is State.STOPPING
    assert driver.actions == []


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.DRAINING])
def test_garbage_kills_the_worker(state: State) -> None:
    driver = in_state(state)
    driver.broke()
    assert (driver.state(), driver.signals()) == (State.STOPPING, [WorkerSignal.KILL])
    driver.exit()
    assert driver.row()["last_exit"]["reason"] == ("asked" if state is None else "crash")


def test_a_load_without_progress_stalls_and_is_a_crash_at_the_exit() -> None:
    driver = in_state(State.LOADING)
    driver.pass_time(19.0)
    driver.progress(0.5)
    driver.pass_time(19.0)
    assert driver.state() is State.LOADING, "progress renews the limit"
    driver.progress(0.5)
    driver.pass_time(1.5)
    assert driver.state() is State.STOPPING
    assert driver.signals() == [WorkerSignal.DUMP, WorkerSignal.KILL], "its stacks, then its end"
    driver.exit()
    assert driver.row()["last_exit"]["reason"] == "stall"
    assert driver.state() is State.LOADING, "the first crash is answered at once"


def test_backoff_ends_at_its_time() -> None:
    driver = in_state(State.BACKOFF)
    retry_in_s = driver.row()["retry_in_s"]
    assert 0.5 <= retry_in_s <= 1.0
    driver.pass_time(retry_in_s + 0.01)
    assert driver.state() is State.LOADING


def test_the_drain_limit_stops() -> None:
    driver = in_state(State.DRAINING)
    driver.pass_time(5.1)
    assert driver.state() is State.STOPPING
    assert len(driver.told(Exit)) == 1


def test_a_drain_ends_when_nothing_runs() -> None:
    driver = in_state(State.DRAINING)
    driver.token(1, finish=FinishReason.STOP)
    assert driver.state() is State.STOPPING
    assert len(driver.told(Exit)) == 1


def test_stopping_escalates_from_asking_to_term_to_kill_E5() -> None:
    driver = in_state(State.STOPPING)
    driver.pass_time(2.1)
    assert driver.signals() == [WorkerSignal.TERM]
    driver.pass_time(2.1)
    assert driver.signals() == [WorkerSignal.KILL]
    driver.pass_time(KILL_LIMIT_S - 0.5)
    assert driver.signals() == []
    assert driver.state() is State.STOPPING, "stopping lasts until the exit is seen"


def test_a_worker_of_another_version_fails_and_says_why() -> None:
    driver = Driver([entry()])
    driver.ask()
    driver.spawned()
    driver.hello(version="9.9.9")
    assert driver.state() is State.STOPPING
    driver.exit(code=143)
    assert driver.state() is State.FAILED
    assert "restart the daemon" in driver.row()["cause"]
    assert driver.errors() == {"r1": ErrorCode.LOAD_FAILED}


def test_an_absent_pair_raises_in_tests() -> None:
    driver = in_state(State.STOPPED)
    model = driver.model()
    with pytest.raises(ImpossibleTransitionError):
        driver.core.fleet.trigger(model, triggers.BecameReady(), driver.now)


def test_in_production_an_absent_pair_ends_that_life_alone() -> None:
    driver = Driver([entry("m"), entry("other")], is_strict=False)
    driver.load("m")
    driver.come_up("m")
    driver.load("other")
    driver.come_up("other", 78)
    model = driver.model()
    driver.core.outbox.take()
    driver.core.fleet.trigger(model, triggers.Turn(), driver.now)
    driver.actions = driver.core.outbox.take()
    assert len(driver.of(LogFault)) == 1
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit("m")
    assert driver.state("m") is State.FAILED
    assert driver.row("m")["last_exit"]["reason"] == "internal"
    assert driver.state("other") is State.READY
