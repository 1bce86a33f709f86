"""Reloads of the configuration: what they change, whom they end, and how they are answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.client_messages import Failed, Reload, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.actions import Finish, ReadConfiguration
from mlxsup.supervisor.core.events import Caller, Reloaded, ReloadRefused
from mlxsup.supervisor.core.memory.budget import Budget
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings, ModelSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.looks import ALICE
from support.core.states import in_state

# ---------------------------------------------------------------- reload


def reload(driver: Driver, *models: ModelSettings) -> None:
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(drain_timeout_s=5.0), models=models))


OTHER_LAUNCH = replace(LAUNCH, path="/other")


def test_reload_with_a_changed_launch_key() -> None:
    expected = {
        State.STOPPED: State.STOPPED,
        State.LOADING: State.STOPPING,
        State.READY: State.DRAINING,
        State.DRAINING: State.DRAINING,
        State.STOPPING: State.STOPPING,
        State.BACKOFF: State.LOADING,
        State.FAILED: State.LOADING,
    }
    for state, after in expected.items():
        driver = in_state(state)
        reload(driver, entry(launch=OTHER_LAUNCH))
        assert driver.state() is after, state


def test_reload_with_another_key_applies_at_once_and_restarts_nothing() -> None:
    for state in State:
        if state is State.PENDING:
            continue
        driver = in_state(state)
        reload(driver, entry(idle_unload_s=3.0))
        assert driver.state() is state


def test_a_removed_busy_model_drains_and_is_erased_at_the_exit() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    driver.ask("waits")
    reload(driver, entry("other"))
    assert driver.errors() == {"waits": ErrorCode.UNKNOWN_MODEL}
    driver.ask("new")
    assert driver.errors() == {"new": ErrorCode.UNKNOWN_MODEL}
    driver.token(1, 2, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert [row["name"] for row in driver.core.status(driver.now)["models"]] == ["other"]


def test_a_removed_model_without_a_process_is_erased_at_once() -> None:
    for state in (State.STOPPED, State.BACKOFF, State.FAILED):
        driver = in_state(state)
        reload(driver, entry("other"))
        assert [row["name"] for row in driver.core.status(driver.now)["models"]] == ["other"]


def test_an_added_model_that_is_preloaded_comes_up() -> None:
    driver = in_state(State.READY)
    reload(driver, entry(), entry("new", preload=True))
    assert driver.spawns() == ["new"]


def test_a_reload_that_was_asked_for_is_answered_with_what_it_changes() -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    driver.say(Reload(id=RequestId("x")))
    [read] = driver.of(ReadConfiguration)
    models = (entry("a"), entry("b", idle_unload_s=5.0), entry("d"))
    driver.do(
        Reloaded(
            now=driver.now,
            settings=CoreSettings(),
            models=models,
            caller=read.caller,
            later=("log_dir",),
        )
    )
    [reply] = driver.sent(Reply)
    assert reply.id == "x"
    assert reply.value == {
        "added": ["d"], "changed": ["b"], "removed": ["c"], "later": ["log_dir"],
        "over_budget_bytes": 0,
        "settings": ["max_queue", "max_queue_per_client", "drain_timeout_s"], "unread": {},
    }  # fmt: skip


def test_a_reload_names_the_settings_that_it_changes_and_only_those() -> None:
    driver = Driver(settings=CoreSettings())
    caller = Caller(connection=ALICE, id=RequestId("x"))
    memory = Budget(size_bytes=9, machine_bytes=99, is_given=True, reason="memory_budget")
    changes: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"clients": {"ann": ClientSettings(weight=2.0)}}, ["clients"]),
        ({"clients": {"ann": ClientSettings(weight=2.0)}, "budget": memory}, ["memory_budget"]),
        ({"aging_s": 5.0, "budget": replace(memory, reason="another")}, ["aging_s", "clients"]),
    ]
    for change, names in changes:
        settings = CoreSettings(**change)
        driver.do(Reloaded(now=driver.now, settings=settings, models=(entry(),), caller=caller))
        [reply] = driver.sent(Reply)
        assert (reply.value["changed"], reply.value["settings"]) == ([], names)


def test_a_refused_reload_changes_nothing_and_says_why_P20() -> None:
    driver = in_state(State.READY)
    driver.say(Reload(id=RequestId("x")))
    [read] = driver.of(ReadConfiguration)
    driver.do(ReloadRefused(now=driver.now, problems=("line 3",), caller=read.caller))
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["detail"]) == ("x", {"problems": ["line 3"]})
    assert driver.state() is State.READY


def test_the_daemon_does_not_end_before_a_reload_is_answered() -> None:
    driver = Driver([entry("a")])
    driver.say(Reload(id=RequestId("x")))
    driver.signal()
    assert driver.errors() == {"x": ErrorCode.SHUTTING_DOWN}, "its file may never be read"
    assert driver.of(Finish)


def test_a_reload_meets_a_shutdown() -> None:
    driver = in_state(State.READY)
    driver.say(Reload(id=RequestId("x")))
    [read] = driver.of(ReadConfiguration)
    driver.signal()
    assert driver.errors() == {"x": ErrorCode.SHUTTING_DOWN}
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(), caller=read.caller))
    assert not driver.errors(), "it is answered once"
    driver.say(Reload(id=RequestId("y")))
    assert driver.errors() == {"y": ErrorCode.SHUTTING_DOWN}
