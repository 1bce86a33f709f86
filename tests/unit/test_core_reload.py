"""A reload meets what lives: the process that is replaced, the crashes so far, and a stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Failed, Reload
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Dispatch, Exit
from mlxsup.supervisor.core.actions import (
    Finish,
    LookAtWorker,
    ReadConfiguration,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import Reloaded, ReloadRefused, ShutdownAsked
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core_driver import LAUNCH, RESTART, Driver, entry
from support.core_states import in_state

LONG_DRAIN = CoreSettings(drain_timeout_s=600.0)


def reload(driver: Driver, *models: ModelSettings, drain_s: float = 600.0) -> None:
    settings = CoreSettings(drain_timeout_s=drain_s)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


# ---------------------------------------------------------------- the process that lives


def test_a_draining_process_is_judged_by_the_step_limit_that_it_was_started_with_P7() -> None:
    driver = in_state(State.READY)
    driver.beat(WorkerPhase.DECODE)
    reload(driver, entry(launch=replace(LAUNCH, step_timeout_s=0.5)))
    assert driver.state() is State.DRAINING
    for _ in range(10):  # a step of ten seconds, of the thirty that the process may take
        driver.pass_time(1.0)
        driver.beat(WorkerPhase.DECODE, phase_s=1.0)
        assert (driver.of(LookAtWorker), driver.signals()) == ([], [])
    driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert driver.row()["suspects"] == 0
    [spawn] = driver.of(Spawn)
    assert spawn.launch.step_timeout_s == 0.5


def test_its_successor_is_judged_by_the_new_one_F5() -> None:
    driver = in_state(State.READY)
    driver.token(1, finish=FinishReason.STOP)
    reload(driver, entry(launch=replace(LAUNCH, step_timeout_s=0.5)))
    driver.exit(code=0)
    driver.come_up()
    driver.ask("r2")
    driver.beat(WorkerPhase.DECODE)
    driver.pass_time(1.0)
    driver.seen(is_stopped=False)
    assert driver.signals() == [WorkerSignal.DUMP]


def test_a_draining_process_is_judged_by_the_memory_limit_that_it_was_started_with() -> None:
    driver = in_state(State.READY)
    driver.sample(100, machine_bytes=10_000)
    reload(driver, entry(launch=replace(LAUNCH, memory_limit_bytes=50)))
    driver.exit(signal="SIGKILL")
    assert driver.state() is State.LOADING
    assert driver.row()["last_exit"]["cause"] != "out of memory"
    driver.come_up()
    assert driver.dispatched() == [1], "its requests continue: it did not run out of memory alone"


def test_the_memory_limit_of_a_draining_process_still_holds() -> None:
    limited = replace(LAUNCH, memory_limit_bytes=50)
    driver = in_state(State.READY, launch=limited)
    driver.sample(100, machine_bytes=10_000)
    reload(driver, entry(launch=replace(LAUNCH, memory_limit_bytes=10_000)))
    driver.exit(signal="SIGKILL")
    assert driver.row()["last_exit"]["cause"] == "out of memory"


def test_a_draining_process_keeps_its_rows_when_the_entry_has_fewer() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    reload(driver, entry(launch=replace(LAUNCH, max_concurrency=1)))  # checks invariants
    assert driver.row()["running"] == ["r1", "r2"]
    assert driver.row()["row_limit"] == 2
    driver.token(1, 2, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert driver.row()["row_limit"] == 1


def test_a_load_takes_no_draining_process_back_that_was_started_with_another_launch() -> None:
    driver = in_state(State.DRAINING)
    other = replace(LAUNCH, path="/other")
    reload(driver, entry(launch=other))
    load = driver.load()
    assert driver.state() is State.DRAINING
    assert driver.replies() == []
    driver.token(1, finish=FinishReason.STOP)
    assert driver.told(Exit) == [Exit()]
    driver.exit(code=0)
    assert [spawn.launch for spawn in driver.of(Spawn)] == [other]
    driver.come_up()
    assert driver.replies() == [load]


def test_a_load_takes_a_draining_process_back_whose_launch_has_not_changed() -> None:
    driver = in_state(State.DRAINING)
    reload(driver, entry(idle_unload_s=3.0))
    load = driver.load()
    assert (driver.state(), driver.replies()) == (State.READY, [load])


# ---------------------------------------------------------------- the crashes so far


def crash_until_failed(driver: Driver, entry_of_reload: ModelSettings) -> int:
    """Crashes with a reload after each; returns the crash that made it FAILED, or the last."""
    for crash in range(1, 3 * RESTART.max_restarts):
        driver.exit()
        reload(driver, entry_of_reload)
        if driver.state() is State.FAILED:
            return crash
        driver.pass_time(10.0)
        driver.come_up()
    return crash


def test_a_reload_does_not_clear_the_restart_window_of_an_unchanged_model_P9() -> None:
    driver = in_state(State.READY)
    assert crash_until_failed(driver, entry()) == RESTART.max_restarts + 1


def test_a_reload_keeps_the_delay_of_an_unchanged_model() -> None:
    driver = in_state(State.BACKOFF)
    before = driver.row()["retry_in_s"]
    reload(driver, entry())
    assert driver.row()["retry_in_s"] == before
    driver.pass_time(1.1)
    driver.come_up()
    driver.exit()
    assert driver.row()["retry_in_s"] > 1.0, "twice the first delay, less the half at random"


def test_a_changed_entry_clears_the_restart_window() -> None:
    driver = in_state(State.READY)
    for number in range(3 * RESTART.max_restarts):
        driver.exit()
        reload(driver, entry(idle_unload_s=1000.0 + number))
        assert driver.state() is not State.FAILED
        driver.pass_time(10.0)
        driver.come_up()


# ---------------------------------------------------------------- a stop


@pytest.mark.parametrize("drains", ["removed", "changed", "unloaded", "restarted"])
def test_a_stop_shortens_every_drain_that_is_under_way_P12(drains: str) -> None:
    driver = Driver(settings=LONG_DRAIN)
    driver.load()
    driver.come_up()
    driver.ask()
    if drains == "removed":
        reload(driver)
    elif drains == "changed":
        reload(driver, entry(launch=replace(LAUNCH, path="/other")))
    elif drains == "unloaded":
        driver.unload()
    else:
        driver.restart()
    assert driver.state() is State.DRAINING
    driver.stop(timeout_s=1.0)
    driver.pass_time(0.9)
    assert driver.told(Exit) == []
    driver.actions = []
    driver.pass_time(0.2)
    assert driver.errors() == {"r1": ErrorCode.SHUTTING_DOWN}
    assert driver.told(Exit) == [Exit()]
    driver.exit(code=0)
    assert len(driver.of(Finish)) == 1


@pytest.mark.parametrize("drains", ["removed", "changed"])
def test_stop_now_hurries_what_a_reload_is_replacing_in_every_state_P12(drains: str) -> None:
    entries = [entry(launch=replace(LAUNCH, path="/other"))] if drains == "changed" else []
    for state, signals in {
        State.LOADING: [WorkerSignal.TERM],
        State.READY: [],
        State.DRAINING: [],
        State.STOPPING: [WorkerSignal.TERM],
    }.items():
        driver = in_state(state)
        reload(driver, *entries)
        was = driver.state()
        driver.stop(now=True)
        assert driver.state() is State.STOPPING, state
        if was is State.DRAINING:
            assert driver.told(Exit) == [Exit()], state
        else:
            expected = [WorkerSignal.KILL] if state is State.LOADING else signals
            assert driver.signals() == expected, state
        driver.exit(code=0)
        assert len(driver.of(Finish)) == 1
        assert driver.told(Dispatch) == []


def test_a_removed_model_is_not_erased_before_the_stop_has_seen_its_end() -> None:
    driver = in_state(State.READY)
    reload(driver, entry("other"))
    driver.stop(timeout_s=1.0)
    driver.ask("new")
    assert driver.errors() == {"new": ErrorCode.SHUTTING_DOWN}
    driver.token(1, finish=FinishReason.STOP)
    assert driver.of(Finish) == []
    driver.exit(code=0)
    assert len(driver.of(Finish)) == 1


def test_a_reload_changes_how_often_a_model_that_runs_is_restarted_F2() -> None:
    driver = in_state(State.READY)
    reload(driver, entry(restart=replace(RESTART, max_restarts=0)))
    assert driver.state() is State.READY
    driver.exit()
    assert driver.state() is State.FAILED


# ---------------------------------------------------------------- what would end


def test_a_reload_ends_a_process_that_it_removes_or_gives_another_launch_and_no_other() -> None:
    driver = in_state(State.READY)
    same, other = entry(idle_unload_s=7.0), entry(launch=replace(LAUNCH, max_concurrency=3))
    assert [driver.core.ended_by(models) for models in ([same], [other], [])] == [
        False, True, True,
    ]  # fmt: skip
    stopped = in_state(State.STOPPED)
    assert not any(stopped.core.ended_by(models) for models in ([same], [other], []))


def test_whoever_asked_for_a_reload_that_the_end_overtakes_is_told_at_once() -> None:
    driver = Driver()
    driver.say(Reload(id=RequestId("reload")))
    [asked] = driver.of(ReadConfiguration)
    driver.do(ShutdownAsked(now=driver.now, is_immediate=False))
    assert [failed.error["code"] for failed in driver.sent(Failed)] == ["shutting_down"]
    assert driver.of(Finish) == [Finish()]
    driver.do(ReloadRefused(now=driver.now, problems=("late",), caller=asked.caller))
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(), caller=asked.caller))
    assert driver.sent(Failed) == [], "it was answered already"
