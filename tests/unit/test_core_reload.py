"""Test reloads and their dry runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed, Reload, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Dispatch, Exit
from mlxsup.supervisor.core.actions import (
    Finish,
    LogFault,
    LookAtWorker,
    ReadConfiguration,
    SendToClient,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import Appraised, Caller, Reloaded, ReloadRefused, ShutdownAsked
from mlxsup.supervisor.core.memory.need import Need
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core.driver import LAUNCH, RESTART, Driver, entry
from support.core.looks import ALICE
from support.core.memory import GIB, MemoryDriver, limited, pair_and_more, sized
from support.core.needs import need
from support.core.states import in_state

# Processes that a reload replaces

LONG_DRAIN = CoreSettings(drain_timeout_s=600.0)


def reload(driver: Driver, *models: ModelSettings, drain_s: float = 600.0) -> None:
    settings = CoreSettings(drain_timeout_s=drain_s)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


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


def test_successor_has_the_new_step_limit_F5() -> None:
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


def test_load_takes_back_a_drain_with_the_same_launch() -> None:
    driver = in_state(State.DRAINING)
    reload(driver, entry(idle_unload_s=3.0))
    load = driver.load()
    assert (driver.state(), driver.replies()) == (State.READY, [load])


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
def test_stop_now_hurries_a_reload_in_every_state_P12(drains: str) -> None:
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


def test_a_reload_ends_a_process_that_it_removes_or_gives_another_launch_and_no_other() -> None:
    driver = in_state(State.READY)
    same, other = entry(idle_unload_s=7.0), entry(launch=replace(LAUNCH, max_concurrency=3))
    assert [driver.core.ended_by(models) for models in ([same], [other], [])] == [
        False, True, True,
    ]  # fmt: skip
    stopped = in_state(State.STOPPED)
    assert not any(stopped.core.ended_by(models) for models in ([same], [other], []))


def test_shutdown_answers_a_pending_reload() -> None:
    driver = Driver()
    driver.say(Reload(id=RequestId("reload")))
    [asked] = driver.of(ReadConfiguration)
    driver.do(ShutdownAsked(now=driver.now, is_immediate=False))
    assert [failed.error["code"] for failed in driver.sent(Failed)] == ["shutting_down"]
    assert driver.of(Finish) == [Finish()]
    driver.do(ReloadRefused(now=driver.now, problems=("late",), caller=asked.caller))
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(), caller=asked.caller))
    assert driver.sent(Failed) == [], "it was answered already"


# `reload --dry-run`: models

STATES = [state for state in State if state is not State.PENDING]
CHANGES: dict[str, tuple[ModelSettings, ...]] = {
    "another launch": (entry(launch=replace(LAUNCH, path="/other")),),
    "another key": (entry(idle_unload_s=3.0),),
    "removed": (),
}
FOLLOWS = {"DRAINING": {"DRAINING", "STOPPING"}, "PENDING": {"PENDING", "LOADING"}}
"""Where a state leads in the same turn, if nothing runs and there is room."""


def ask(driver: Driver) -> None:
    driver.say(Reload(id=RequestId("x"), dry_run=True))
    (read,) = [one for one in driver.actions if isinstance(one, ReadConfiguration)]
    assert read.is_dry
    assert read.caller == Caller(connection=ALICE, id=RequestId("x"))


def foresee(driver: Driver, *models: ModelSettings, **settings: Any) -> dict[str, Any]:
    """The answer to a dry run, of which nothing else may come."""
    ask(driver)
    before = driver.core.status(driver.now)
    driver.do(
        Reloaded(
            now=driver.now,
            settings=CoreSettings(**{"drain_timeout_s": 5.0, **settings}),
            models=models,
            later=("log_dir",),
            caller=Caller(connection=ALICE, id=RequestId("x")),
            is_dry=True,
        )
    )
    (action,) = driver.actions
    assert isinstance(action, SendToClient)
    assert isinstance(action.message, Reply)
    assert driver.core.status(driver.now) == before
    value: dict[str, Any] = action.message.value
    assert value["later"] == ["log_dir"]
    return value


def all_states(driver: Driver) -> dict[str, str]:
    return {row["name"]: row["state"] for row in driver.core.status(driver.now)["models"]}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("state", STATES)
def test_reload_does_what_its_dry_run_said(state: State, change: str) -> None:
    driver, models = in_state(state), (*CHANGES[change], entry("other"))
    value = foresee(driver, *models)
    assert driver.state() is state
    (row,) = [one for one in value["foreseen"] if one["model"] == "m"]
    assert row["state"] == state.value
    assert row["change"] == ("removed" if change == "removed" else "changed")
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(drain_timeout_s=5.0), models=models))
    after, becomes = all_states(driver).get("m"), row["becomes"]
    assert after in FOLLOWS.get(becomes, {becomes})


def test_dry_run_names_added_models_only() -> None:
    driver = in_state(State.READY)
    value = foresee(driver, entry(), entry("a", preload=True), entry("b"))
    assert value["foreseen"] == [
        {"model": "a", "change": "added", "state": None, "becomes": "PENDING", "running": 0},
        {"model": "b", "change": "added", "state": None, "becomes": "STOPPED", "running": 0},
    ]
    assert (value["added"], value["changed"], value["removed"]) == (["a", "b"], [], [])


def test_how_many_answers_a_model_must_finish_is_said() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    value = foresee(driver, *CHANGES["another launch"], max_queue=7)
    (row,) = value["foreseen"]
    assert (row["running"], row["becomes"]) == (len(driver.row()["running"]), "DRAINING")
    assert "max_queue" in value["settings"]
    assert value["over_budget_bytes"] == 0


# `reload --dry-run`: memory

CALLER = Caller(connection=ALICE, id=RequestId("reload"))
AS_BEFORE = tuple(sized(name, 4 * GIB) for name in "abc")


def answer_to_reload(
    driver: MemoryDriver, gib: float | None, models: tuple[ModelSettings, ...], *, is_dry: bool
) -> dict[str, Any]:
    settings = limited(0, budget=None) if gib is None else limited(int(gib * GIB))
    event = Reloaded(now=driver.now, settings=settings, models=models, caller=CALLER, is_dry=is_dry)
    driver.do(event)
    [reply] = driver.sent(Reply)
    assert not [one for one in driver.actions if isinstance(one, LogFault)]
    return dict(reply.value)


def both(driver: MemoryDriver, gib: float, *models: ModelSettings) -> dict[str, Any]:
    """What a dry run says; the reload that follows has to do it, and nothing else."""
    before = {model.name: model.life.state for model in driver.core.fleet}
    said = answer_to_reload(driver, gib, models or AS_BEFORE, is_dry=True)
    assert {model.name: model.life.state for model in driver.core.fleet} == before, (
        "a dry run changes nothing"
    )
    done = answer_to_reload(driver, gib, models or AS_BEFORE, is_dry=False)
    assert said["over_budget_bytes"] == done["over_budget_bytes"]
    names = {one.name for one in models or AS_BEFORE}
    after = [model for model in driver.core.fleet if model.name in names]
    gone = [one.name for one in after if one.life.state is not before.get(one.name, State.STOPPED)]
    assert said["evicts"] == gone
    return said


def test_large_budget_evicts_no_model() -> None:
    said = both(pair_and_more(), 8)
    assert (said["over_budget_bytes"], said["evicts"], said["still_over_bytes"]) == (0, [], 0)
    assert said["refuses"] == []


def test_the_least_recently_used_goes_first_and_only_as_many_as_must() -> None:
    driver = pair_and_more()
    said = both(driver, 6)
    assert said["over_budget_bytes"] == 2 * GIB
    assert len(said["evicts"]) == 1
    assert said["still_over_bytes"] == 0


def test_dry_run_names_models_that_never_fit() -> None:
    large = sized("new", 7 * GIB)
    said = both(pair_and_more(), 6, *AS_BEFORE, replace(large, preload=False))
    assert said["refuses"] == [
        {"model": "new", "reason": "needs 7.00 GiB, and the memory budget is 6.00 GiB"}
    ]
    assert len(said["evicts"]) == 1
    said = answer_to_reload(pair_and_more(), 3, AS_BEFORE, is_dry=True)
    assert [one["model"] for one in said["refuses"]] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["c", "new"])
def test_dry_run_names_models_blocked_by_pins(name: str) -> None:
    pinned = sized(name, 4 * GIB, pinned=True)
    models = (*AS_BEFORE[:2], pinned)
    said = answer_to_reload(pair_and_more(), 7, models, is_dry=True)
    assert [one["model"] for one in said["refuses"]] == ["a", "b"]
    assert f"{name} is pinned and holds 4.00 GiB" in said["refuses"][0]["reason"]
    assert said["over_budget_bytes"] == 5 * GIB


# Needs that change with a reload

LONGER = replace(LAUNCH, context_length=4096)


def needs_of(**gib: int) -> dict[ModelName, Need]:
    return {ModelName(name): need(size * GIB, layers=()) for name, size in gib.items()}


def serving(pinned: str = "", **gib: int) -> MemoryDriver:
    """Models that need so much of 8 GiB."""
    driver = MemoryDriver([entry(name, pinned=name in pinned) for name in gib], limited(8 * GIB))
    driver.do(Appraised(now=driver.now, needs=needs_of(**gib)))
    return driver


def reload_needs(driver: MemoryDriver, budget_gib: int, *, pinned: str = "", **gib: int) -> None:
    """The first of these models has a longer context now, and they need so much."""
    first = next(iter(gib))
    models = tuple(
        entry(name, pinned=name in pinned, launch=LONGER if name == first else LAUNCH)
        for name in gib
    )
    settings = limited(budget_gib * GIB)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, needs=needs_of(**gib)))


def test_reload_replans_waiting_models_at_once() -> None:
    driver = serving(b=5, a=4)
    driver.bring_up("a")
    driver.serve("r1", model="a")
    driver.ask("r2", "b")
    assert driver.state("b") is State.PENDING
    reload_needs(driver, 24, b=14, a=4)
    assert driver.errors() == {}
    assert (driver.state("b"), driver.row("b")["needed_bytes"]) == (State.LOADING, 14 * GIB)
    assert driver.reserved() == 18 * GIB


def test_a_model_that_is_new_is_planned_with_what_it_needs() -> None:
    driver = serving(a=4)
    driver.bring_up("a")
    reload_needs(driver, 8, b=3, a=4)
    assert driver.row("b")["needed_bytes"] == 3 * GIB


def test_dry_run_plans_with_the_new_needs() -> None:
    driver = serving(a=4)
    driver.bring_up("a")
    models = (entry("a"), entry("b", preload=False))
    caller = Caller(connection=ALICE, id=RequestId("dry"))
    driver.do(
        Reloaded(
            now=driver.now, settings=limited(8 * GIB), models=models,
            needs=needs_of(a=4, b=9), caller=caller, is_dry=True,
        )
    )  # fmt: skip
    [reply] = driver.sent(Reply)
    assert [one["model"] for one in reply.value["refuses"]] == ["b"]
