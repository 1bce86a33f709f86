"""A process that SIGKILL does not end is given up, and everything else continues (P26)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxsup.protocol.client_messages import Failed, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.actions import Abandon, Finish, Spawn, WorkerSignal
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.lifecycle.life import KILL_LIMIT_S
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import Driver, entry
from support.core_states import in_state

SETTINGS = CoreSettings(max_queue=8, max_queue_per_client=4, drain_timeout_s=5.0)
GB = 1_000_000_000
LONG_S = 3600.0


def stuck(**changes: object) -> Driver:
    """A driver whose model `m` is FAILED because its process, 77, could not be ended."""
    driver = in_state(State.READY, **changes)
    driver.broke()
    assert driver.signals() == [WorkerSignal.KILL]
    driver.pass_time(KILL_LIMIT_S + 0.1)
    return driver


def reload(driver: Driver, *models: str) -> None:
    entries = tuple(entry(name) for name in models)
    driver.do(Reloaded(now=driver.now, settings=SETTINGS, models=entries))


def test_it_is_failed_and_named_and_its_requests_are_answered() -> None:
    driver = in_state(State.READY)
    driver.broke()
    driver.ask("waits")
    driver.pass_time(KILL_LIMIT_S - 0.1)
    assert driver.state() is State.STOPPING
    driver.pass_time(0.2)
    assert driver.state() is State.FAILED
    assert driver.row()["cause"] == "process 77 cannot be ended"
    assert driver.row()["pid"] == 77
    assert driver.errors() == {"r1": ErrorCode.WORKER_CRASHED, "waits": ErrorCode.LOAD_FAILED}
    assert [(a.model, a.generation) for a in driver.of(Abandon)] == [("m", 1)]
    driver.pass_time(LONG_S)
    assert driver.actions == []


def test_the_limit_grows_with_what_it_last_held() -> None:
    driver = in_state(State.READY)
    driver.sample(100 * GB)
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 49.0)
    assert driver.state() is State.STOPPING
    driver.pass_time(2.0)
    assert driver.state() is State.FAILED


def test_what_it_holds_still_counts() -> None:
    driver = stuck()
    driver.sample(5 * GB)
    assert driver.row()["footprint_bytes"] == 5 * GB
    assert driver.core.status(driver.now)["memory"]["reserved_bytes"] == 5 * GB


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_load_that_cannot_be_ended_gives_its_turn_back(is_silent: bool) -> None:
    driver = Driver([entry("m"), entry("other")])
    command = driver.load("m")
    driver.spawned("m")
    if not is_silent:
        driver.hello("m")
    driver.load("other")
    driver.pass_time(LONG_S)
    assert driver.state("m") is State.FAILED
    assert driver.errors()[command] == ErrorCode.LOAD_FAILED
    assert [spawn.model for spawn in driver.of(Spawn)] == ["other"]
    assert driver.generation("m") == 1


@pytest.mark.parametrize("command", [Driver.load, Driver.restart])
def test_another_process_is_refused_while_it_lives(command: Callable[[Driver], RequestId]) -> None:
    driver = stuck()
    id = command(driver)
    assert driver.spawns() == []
    assert driver.state() is State.FAILED
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["code"]) == (id, ErrorCode.LOAD_FAILED)
    assert "77" in failed.error["message"]
    driver.ask("late")
    assert driver.errors() == {"late": ErrorCode.MODEL_FAILED}


def test_an_exit_that_is_seen_at_last_brings_the_model_back() -> None:
    driver = stuck()
    driver.exit()
    assert driver.state() is State.LOADING
    assert driver.spawns() == ["m"]
    assert (driver.generation(), driver.row()["pid"]) == (2, None)
    driver.come_up(pid=78)
    assert driver.state() is State.READY


def test_who_is_not_wanted_any_more_is_stopped_by_it() -> None:
    driver = stuck()
    unload = driver.unload()
    assert driver.errors() == {unload: ErrorCode.MODEL_FAILED}
    assert (driver.state(), driver.row()["wanted"]) == (State.FAILED, "down")
    driver.exit()
    assert (driver.state(), driver.row()["pid"]) == (State.STOPPED, None)


def test_an_unload_that_waits_is_answered() -> None:
    driver = in_state(State.READY)
    unload = driver.unload()
    driver.pass_time(5.0 + 2.0 + 2.0 + KILL_LIMIT_S + 1.0)
    assert driver.state() is State.FAILED
    assert driver.errors()[unload] == ErrorCode.MODEL_FAILED


def test_the_end_does_not_wait_for_it() -> None:
    driver = stuck()
    stop = driver.stop()
    [reply] = driver.sent(Reply)
    assert (reply.id, reply.value["pids"]) == (stop, [77])
    assert len(driver.of(Finish)) == 1


def test_who_hurries_its_end_again_and_again_puts_nothing_off() -> None:
    driver = in_state(State.READY)
    driver.broke()
    for _ in range(9):
        driver.pass_time(KILL_LIMIT_S / 10)
        driver.signal(is_immediate=True)
    assert driver.state() is State.STOPPING
    driver.pass_time(KILL_LIMIT_S / 10 + 0.1)
    assert driver.state() is State.FAILED


def test_an_end_without_processes_names_no_limit_for_them() -> None:
    driver = Driver()
    driver.stop()
    [reply] = driver.sent(Reply)
    assert reply.value["end_limit_s"] == 0.0


def test_the_limit_of_an_end_has_both_graces_in_it() -> None:
    driver = Driver(settings=CoreSettings(exit_grace_s=7.0))
    driver.load()
    driver.come_up()
    driver.stop()
    [reply] = driver.sent(Reply)
    assert reply.value["end_limit_s"] == pytest.approx(2 * 7.0 + KILL_LIMIT_S)


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.STOPPING])
def test_an_end_that_meets_it_comes_within_the_limit_it_has_named(state: State) -> None:
    driver = in_state(state)
    driver.stop()
    [reply] = driver.sent(Reply)
    limit_s = reply.value["drain_timeout_s"] + reply.value["end_limit_s"]
    assert driver.of(Finish) == []
    for _ in range(3):  # impatience does not put it off
        driver.pass_time(1.0)
        driver.signal(is_immediate=True)
    driver.pass_time(limit_s - 3.0)
    assert len(driver.of(Finish)) == 1


def test_a_reload_that_removes_it_forgets_it_at_its_exit() -> None:
    driver = stuck()
    reload(driver)
    assert driver.row()["wanted"] == "gone"
    driver.ask("late")
    assert driver.errors() == {"late": ErrorCode.UNKNOWN_MODEL}
    driver.exit()
    assert driver.core.status(driver.now)["models"] == []


def test_what_it_held_when_a_reload_removed_it_is_told_that_it_is_gone() -> None:
    driver = in_state(State.READY)
    driver.accept(1)
    reload(driver, "other")
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 0.1)
    assert driver.failure_of().error["code"] == ErrorCode.UNKNOWN_MODEL


def test_a_reload_that_brings_it_back_starts_no_second_process() -> None:
    driver = stuck()
    reload(driver)
    reload(driver, "m")
    assert driver.spawns() == []
    assert (driver.state(), driver.row()["wanted"]) == (State.FAILED, "up")
    driver.exit()
    assert driver.spawns() == ["m"]


def test_what_it_says_after_it_was_given_up_means_nothing() -> None:
    driver = stuck()
    for say in (Driver.hello, Driver.ready, Driver.broke, Driver.beat):
        say(driver)
        assert (driver.actions, driver.state()) == ([], State.FAILED)


def test_its_end_accuses_nobody_twice() -> None:
    driver = in_state(State.READY)
    driver.beat(step=0)
    driver.pass_time(2.0)
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 0.1)
    before = driver.row()["suspects"]
    driver.exit(signal="SIGSEGV")
    assert driver.row()["suspects"] == before
