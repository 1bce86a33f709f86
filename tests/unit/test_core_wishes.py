"""What is wanted of a model meets what it does: who is answered, and what its process receives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.client_messages import Failed, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import Dispatch, Exit
from mlxsup.supervisor.core.actions import Announce, ForgetModel, LogFault, Spawn, WorkerSignal
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.lifecycle.triggers import BecameReady
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import BOB
from support.core_states import in_state

OTHER = replace(LAUNCH, path="/other")


def reload(driver: Driver, *models: ModelSettings, drain_s: float = 5.0) -> None:
    settings = CoreSettings(drain_timeout_s=drain_s)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


def why(driver: Driver) -> tuple[str, str, str]:
    row = driver.row()
    return row["state"], row["wanted"], row["why"]


# ---------------------------------------------------------------- answers


def test_a_command_that_came_true_is_answered_with_the_state_of_its_model() -> None:
    driver = Driver()
    load = driver.load()
    driver.come_up()
    row = driver.row()
    del row["share"]  # next to the other models, which only the whole status has
    assert driver.sent(Reply) == [Reply(id=load, value={"model": row})]
    driver.ask()
    unload = driver.unload()
    driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0, at=5.0)
    [reply] = driver.sent(Reply)
    assert (reply.id, reply.value["model"]["state"]) == (unload, "STOPPED")
    assert reply.value["model"]["last_exit"]["at"] == 5.0


def test_an_unload_supersedes_a_load_and_says_so() -> None:
    driver = in_state(State.LOADING)
    driver.unload()
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["message"]) == (
        "c1",
        "an unload of m was requested in the meantime",
    )
    load = driver.load()
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == "a load of m was requested in the meantime"
    driver.signal()
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["code"]) == (load, ErrorCode.SHUTTING_DOWN)


def test_what_waits_for_a_restart_to_drain_is_answered_by_an_unload() -> None:
    driver = in_state(State.READY)
    driver.restart()
    driver.ask("waits")
    assert driver.errors() == {}
    driver.unload()
    assert driver.errors()["waits"] == ErrorCode.UNLOADED


@pytest.mark.parametrize("how", ["unload", "removal"])
def test_what_waits_for_a_process_to_end_is_answered_when_it_is_not_to_come_back(how: str) -> None:
    driver = in_state(State.READY)
    driver.restart(now=True)
    driver.ask("waits")
    if how == "unload":
        driver.unload()
    else:
        reload(driver)
    code = ErrorCode.UNLOADED if how == "unload" else ErrorCode.UNKNOWN_MODEL
    assert driver.errors()["waits"] == code
    driver.exit(code=0)
    assert driver.failure_of().error["code"] == code, "its row had been cut off"


def test_a_model_that_fails_or_is_stopped_answers_an_unload_at_once() -> None:
    driver = in_state(State.FAILED)
    unload = driver.unload()
    assert driver.replies() == [unload]
    assert why(driver) == ("STOPPED", "down", "user")
    unload = driver.unload()
    assert driver.replies() == [unload]


# ---------------------------------------------------------------- drains


def test_an_unload_while_it_drains_shortens_the_drain_and_never_lengthens_it() -> None:
    driver = in_state(State.DRAINING)
    driver.pass_time(3.0)
    driver.unload()
    driver.pass_time(1.9)
    assert driver.state() is State.DRAINING
    driver.pass_time(0.1)
    assert driver.state() is State.STOPPING, "five seconds after the first"


def test_what_is_taken_back_from_a_drain_has_been_ready_all_the_time() -> None:
    driver = in_state(State.READY)
    driver.now += 7.0
    driver.unload()
    driver.now += 2.0
    driver.load()
    assert driver.row()["loaded_for_s"] == 9.0
    assert why(driver) == ("READY", "up", "user")


def test_a_drain_for_a_restart_is_not_taken_back() -> None:
    driver = in_state(State.READY)
    driver.restart()
    load = driver.load()
    assert (why(driver), driver.replies()) == (("DRAINING", "up", "restart"), [])
    driver.token(1, finish=FinishReason.STOP)
    assert driver.told(Exit) == [Exit()]
    driver.exit(code=0)
    driver.come_up()
    assert load in driver.replies()
    assert why(driver) == ("READY", "up", "user"), "the restart is fulfilled"


def test_the_limit_of_the_drain_of_a_restart_answers_nobody() -> None:
    driver = in_state(State.READY)
    driver.restart()
    driver.pass_time(5.0)
    assert (driver.state(), driver.told(Exit), driver.errors()) == (State.STOPPING, [Exit()], {})
    driver.exit(code=0)
    assert (driver.state(), driver.row()["restarts"]) == (State.LOADING, 0)
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.key == 1


def test_a_reason_is_not_replaced_by_a_later_one_of_the_same_wish() -> None:
    driver = Driver()
    driver.ask()
    assert why(driver) == ("LOADING", "up", "request")
    driver.load()
    assert why(driver) == ("LOADING", "up", "request")
    driver.unload()
    assert why(driver) == ("STOPPING", "down", "user")
    driver.load()
    assert why(driver) == ("STOPPING", "up", "user")


# ---------------------------------------------------------------- the end of a process


def test_a_process_that_is_told_harder_has_as_long_again_for_each_stage() -> None:
    driver = in_state(State.LOADING)
    driver.unload()
    assert driver.signals() == [WorkerSignal.TERM]
    driver.pass_time(1.9)
    assert driver.signals() == []
    driver.pass_time(0.1)
    assert driver.signals() == [WorkerSignal.KILL]
    driver.pass_time(9.9)
    assert driver.state() is State.STOPPING
    driver.pass_time(0.1)
    assert driver.state() is State.FAILED


def test_a_process_without_a_pid_is_waited_for_beyond_all_limits_and_killed_when_it_has_one() -> (
    None
):
    driver = Driver()
    driver.load()
    driver.unload()
    for _ in range(5):
        driver.pass_time(20.0)
    assert driver.state() is State.STOPPING
    driver.spawned(pid=9)
    assert driver.signals() == [WorkerSignal.KILL]


def test_a_hurry_lets_a_process_that_was_killed_its_time() -> None:
    driver = in_state(State.READY)
    driver.broke()
    driver.pass_time(9.0)
    driver.signal(is_immediate=True)
    assert driver.signals() == [WorkerSignal.KILL], "said again"
    driver.pass_time(0.9)
    assert driver.state() is State.STOPPING
    driver.pass_time(0.2)
    assert driver.state() is State.FAILED


@pytest.mark.parametrize("state", [State.STOPPED, State.BACKOFF, State.FAILED])
def test_a_bug_of_ours_without_a_process_is_logged_and_ends_nothing(state: State) -> None:
    driver = Driver(is_strict=False)
    if state is not State.STOPPED:
        driver.load()
        driver.spawned()
        driver.exit(code=65 if state is State.FAILED else None)
        driver.spawned()
        driver.exit()
    model = driver.model()
    driver.core.outbox.take()
    driver.core.fleet.trigger(model, BecameReady(), driver.now)
    [fault] = [a for a in driver.core.outbox.take() if isinstance(a, LogFault)]
    assert fault.story[-2:] == (
        f"1000.000 {state} became ready !",
        f"1000.000 {state} became ready → {state}",
    )
    assert driver.state() is state


def test_a_bug_of_ours_while_a_process_ends_makes_the_model_fail_at_its_exit() -> None:
    driver = Driver(is_strict=False)
    driver.load()
    driver.come_up()
    driver.restart(now=True)
    model = driver.model()
    driver.core.fleet.trigger(model, _Unheard(), driver.now)
    driver.exit(code=0)
    assert driver.state() is State.FAILED
    last = driver.row()["last_exit"]
    assert last["reason"] == "internal"
    assert last["detail"] == "internal error: m: no rule for _Unheard in STOPPING"


class _Unheard(BecameReady):
    """A trigger that the table does not know."""


# ---------------------------------------------------------------- reloads


def test_a_reload_of_a_load_starts_it_again_with_the_new_launch() -> None:
    driver = in_state(State.LOADING)
    driver.ask(connection=BOB)
    reload(driver, entry(launch=OTHER))
    assert why(driver) == ("STOPPING", "up", "reload")
    assert (driver.signals(), driver.errors(BOB)) == ([WorkerSignal.TERM], {})
    driver.exit(signal="SIGTERM")
    [spawn] = driver.of(Spawn)
    assert (spawn.generation, spawn.launch) == (2, OTHER)
    assert driver.row()["restarts"] == 0
    driver.come_up()
    assert driver.replies() == ["c1"]


def test_a_reload_of_what_an_unload_drains_lets_it_go_down() -> None:
    driver = in_state(State.DRAINING)
    reload(driver, entry(launch=OTHER))
    assert why(driver) == ("DRAINING", "down", "user")
    driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert why(driver) == ("STOPPED", "down", "user")


def test_a_reload_of_what_idleness_ends_leaves_it_down() -> None:
    driver = in_state(State.READY, idle_unload_s=3.0)
    driver.token(1, finish=FinishReason.STOP)
    driver.pass_time(3.0)
    assert why(driver) == ("STOPPING", "down", "idle")
    reload(driver, entry(launch=OTHER))
    driver.exit(code=0)
    assert why(driver) == ("STOPPED", "down", "idle")


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.DRAINING, State.STOPPING])
def test_a_model_that_a_reload_removes_and_another_brings_back_comes_up(state: State) -> None:
    driver = in_state(state)
    reload(driver)
    assert driver.row()["wanted"] == "gone"
    assert driver.row()["why"] == "reload"
    reload(driver, entry())
    assert (driver.row()["wanted"], driver.row()["why"]) == ("up", "reload")
    if driver.state() is State.DRAINING:
        driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert driver.state() is State.LOADING
    assert driver.of(ForgetModel) == []
    driver.ask("new")
    assert driver.errors() == {}


@pytest.mark.parametrize("state", list(State))
def test_a_model_that_is_removed_is_forgotten_once_nothing_of_it_lives(state: State) -> None:
    driver = in_state(state)
    reload(driver, *([entry("z")] if state is State.PENDING else []))
    if state in (State.READY, State.DRAINING):
        assert driver.of(ForgetModel) == []
        driver.token(1, finish=FinishReason.STOP)
        assert driver.told(Exit) == [Exit()]
    if state in (State.LOADING, State.READY, State.DRAINING, State.STOPPING):
        driver.exit(code=0)
    assert driver.of(ForgetModel) == [ForgetModel(model=ModelName("m"))]
    assert [a.change["note"] for a in driver.of(Announce) if a.change["model"] == "m"] == [
        "removed"
    ]
    assert "m" not in driver.core.fleet.by_name


def test_a_reload_names_every_model_that_it_does_not_know_any_more() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    driver.ask("waits")
    reload(driver, entry("n"), entry("l"))
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == "no model is called 'm'; configured: l, n"
    driver.ask("new")
    [failed] = driver.sent(Failed)
    assert failed.error["detail"]["known"] == ["l", "n"]
