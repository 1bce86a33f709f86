"""Test reloads: what they change, which processes they replace, how they are answered, dry runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import AddModel, Configure, Failed, Reload, RemoveModel, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import Caller, ModelName, RequestId
from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Dispatch, Exit
from mlxsup.supervisor.core.actions import (
    Announce,
    ChangeConfiguration,
    Finish,
    LogFault,
    LookAtWorker,
    ReadConfiguration,
    SendToClient,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.budget import Budget, Need
from mlxsup.supervisor.core.errors import bad_configuration
from mlxsup.supervisor.core.events import Appraised, Reloaded, ReloadRefused
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings, ModelSettings

from support.core.driver import LAUNCH, RESTART, Driver, entry
from support.core.looks import ALICE
from support.core.memory import GIB, MemoryDriver, limited, pair_and_more, sized
from support.core.needs import need
from support.core.rows import FIXED, RowsDriver, bytes_for, need_of, served
from support.core.scripts import play
from support.core.states import in_state

OTHER = entry(launch=replace(LAUNCH, path="/other"))
CALLER = Caller(connection=ALICE, id=RequestId("x"))


def reload(
    driver: Driver,
    *models: ModelSettings,
    settings: CoreSettings | None = None,
    drain_s: float = 5.0,
    **more: Any,
) -> None:
    """The configuration was read: these models, and settings with this limit of drains."""
    settings = settings or CoreSettings(drain_timeout_s=drain_s)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models, **more))


def read(driver: Driver, *, is_dry: bool = False) -> None:
    """`mlxsup reload`, whose file is to be read then."""
    driver.say(Reload(id=RequestId("x"), dry_run=is_dry))
    [asked] = driver.of(ReadConfiguration)
    assert (asked.caller, asked.is_dry) == (CALLER, is_dry)


def answer(driver: Driver) -> dict[str, Any]:
    [reply] = driver.sent(Reply)
    assert reply.id == "x"
    return dict(reply.value)


# Models that it changes, removes and adds


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (State.STOPPED, State.STOPPED),
        (State.LOADING, State.STOPPING),
        (State.READY, State.DRAINING),
        (State.DRAINING, State.DRAINING),
        (State.STOPPING, State.STOPPING),
        (State.BACKOFF, State.LOADING),
        (State.FAILED, State.LOADING),
    ],
)
def test_another_launch_replaces_the_process_and_another_key_does_not(
    state: State, after: State
) -> None:
    driver = in_state(state)
    reload(driver, OTHER)
    assert driver.state() is after
    driver = in_state(state)
    reload(driver, entry(idle_unload_s=3.0))
    assert driver.state() is state


def test_models_are_removed_added_and_put_in_the_order_of_the_file() -> None:
    driver = Driver([entry(name=name) for name in ("a", "b", "c")])
    driver.load("a")
    driver.come_up("a")
    driver.ask("r1", "a")

    def names(*models: ModelSettings) -> list[str]:
        reload(driver, *models)
        return [row["name"] for row in driver.core.status(driver.now)["models"]]

    assert names(entry("c"), entry("b")) == ["c", "b", "a"], "its answer has to end first"
    assert names(entry("b"), entry("c")) == ["b", "c", "a"]
    driver.token(1, model="a", finish=FinishReason.STOP)
    driver.exit("a", code=0)
    assert names(entry("n", preload=True), entry("b")) == ["n", "b"]
    assert driver.spawns() == ["n"]
    assert driver.row("n")["why"] == "reload"


def test_a_removed_busy_model_ends_who_waits_and_not_what_runs() -> None:
    driver = play(in_state(State.READY), "ask r2; ask waits")
    reload(driver, entry("other"))
    assert [one.change["note"] for one in driver.of(Announce)] == ["removed"]
    play(
        driver,
        "-> errors={waits: unknown_model}; token 1 2 finish=stop -> done={r1: stop, r2: stop}",
    )


def test_aliases_and_adapters_are_known_while_their_model_is_configured() -> None:
    launch = replace(LAUNCH, adapters={"sql": "/sql"})
    driver = Driver([entry(aliases=("fast",), launch=launch)])
    driver.load()
    driver.come_up()
    driver.ask("r1", "fast:sql")
    assert [one.adapter for one in driver.told(Dispatch)] == ["sql"]
    driver.ask("r2", "fast:poet")
    [failed] = driver.sent(Failed)
    assert failed.error.detail["known"] == ["m", "m:sql"]
    reload(driver, entry("other"))
    driver.ask("r3", "fast")
    [failed] = driver.sent(Failed)
    assert failed.error.detail["known"] == ["other"]


def test_a_removed_busy_model_that_is_named_again_comes_up_again() -> None:
    driver = in_state(State.READY)
    reload(driver, entry("other"))
    reload(driver, entry("other"), entry())
    assert (driver.state(), driver.row()["wanted"]) == (State.DRAINING, "up")


def test_limits_apply_at_once() -> None:
    driver = in_state(State.READY)
    settings = CoreSettings(max_queue=1, max_queue_per_client=9, drain_timeout_s=77.0)
    reload(driver, entry(), settings=settings)
    assert driver.actions == [], "no client asked for an answer"
    for id in ("r2", "waits", "more"):
        driver.ask(id)
    assert driver.errors() == {"more": ErrorCode.OVERLOADED}
    driver.stop()
    assert driver.sent(Reply)[0].value["drain_timeout_s"] == 77.0
    reload(driver)
    assert (driver.actions, driver.row()["wanted"]) == ([], "down"), "it is too late"


# Answers


def test_the_answer_names_what_it_changes() -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    read(driver)
    models = (entry("a"), entry("b", idle_unload_s=5.0), entry("d"))
    reload(driver, *models, settings=CoreSettings(), caller=CALLER, later=("log_dir",))
    assert answer(driver) == {
        "added": ["d"], "changed": ["b"], "removed": ["c"], "later": ["log_dir"],
        "over_budget_bytes": 0,
        "settings": ["max_queue", "max_queue_per_client", "drain_timeout_s"], "unread": {},
    }  # fmt: skip
    memory = Budget(size_bytes=9, machine_bytes=99, reason="memory_budget")
    ann = {"ann": ClientSettings(weight=2.0)}
    changes: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"clients": ann}, ["clients"]),
        ({"clients": ann, "budget": memory}, ["memory_budget"]),
        ({"aging_s": 5.0, "budget": replace(memory, reason="another")}, ["aging_s", "clients"]),
    ]
    for change, names in changes:
        reload(driver, *models, settings=CoreSettings(**change), caller=CALLER)
        assert (answer(driver)["changed"], answer(driver)["settings"]) == ([], names)


def test_a_refused_reload_changes_nothing_and_says_why_P20() -> None:
    driver = in_state(State.READY)
    read(driver)
    driver.do(ReloadRefused(now=driver.now, error=bad_configuration(["a", "b"]), caller=CALLER))
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error.detail) == ("x", {"problems": ["a", "b"]})
    assert failed.error.message.endswith("nothing was changed:\n  a\n  b")
    assert driver.state() is State.READY


OF_THE_FILE = {
    "add": AddModel(id=RequestId("x"), model="o/n"),
    "remove": RemoveModel(id=RequestId("x"), model=ModelName("a")),
    "configure": Configure(id=RequestId("x"), changes={"defaults.preload": "true"}),
}


@pytest.mark.parametrize("change", OF_THE_FILE.values(), ids=OF_THE_FILE)
def test_a_change_of_the_file_is_answered_as_a_reload_with_more(
    change: AddModel | RemoveModel | Configure,
) -> None:
    driver = in_state(State.READY)
    driver.say(change)
    [asked] = driver.of(ChangeConfiguration)
    assert (asked.caller, asked.change) == (CALLER, change)
    reload(driver, entry("n"), caller=CALLER, answer={"model": "n", "config_path": None})
    value = answer(driver)
    assert (value["added"], value["model"], value["config_path"]) == (["n"], "n", None)
    driver.signal()
    driver.say(change)
    assert driver.errors() == {"x": ErrorCode.SHUTTING_DOWN}


@pytest.mark.parametrize("state", [State.STOPPED, State.READY])
def test_a_shutdown_answers_a_pending_reload_once(state: State) -> None:
    driver = in_state(state)
    read(driver)
    driver.signal()
    assert driver.errors() == {"x": ErrorCode.SHUTTING_DOWN}, "its file may never be read"
    assert driver.of(Finish) == ([Finish()] if state is State.STOPPED else [])
    driver.do(ReloadRefused(now=driver.now, error=bad_configuration(["late"]), caller=CALLER))
    assert not driver.errors()
    reload(driver, caller=CALLER)
    assert not driver.errors()
    driver.say(Reload(id=RequestId("y")))
    assert driver.errors() == {"y": ErrorCode.SHUTTING_DOWN}


# Processes that it replaces


def test_a_draining_process_is_judged_by_the_step_limit_that_it_was_started_with_F5_P7() -> None:
    driver = in_state(State.READY)
    driver.beat(WorkerPhase.DECODE)
    reload(driver, entry(launch=replace(LAUNCH, step_timeout_s=0.5)), drain_s=600.0)
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
    driver.come_up()
    driver.ask("r2")
    driver.beat(WorkerPhase.DECODE)
    driver.pass_time(1.0)
    driver.seen(is_stopped=False)
    assert driver.signals() == [WorkerSignal.DUMP], "its successor has the new limit"


@pytest.mark.parametrize(("before", "after"), [(None, 50), (50, 10_000)])
def test_a_draining_process_is_judged_by_the_memory_limit_that_it_was_started_with(
    before: int | None, after: int
) -> None:
    driver = in_state(State.READY, launch=replace(LAUNCH, memory_limit_bytes=before))
    driver.sample(100, machine_bytes=10_000)
    reload(driver, entry(launch=replace(LAUNCH, memory_limit_bytes=after)))
    driver.exit(signal="SIGKILL")
    assert driver.state() is State.LOADING
    assert (driver.row()["last_exit"]["cause"] == "out of memory") is (before == 50)
    driver.come_up()
    assert driver.dispatched() == [1]


def test_a_draining_process_keeps_its_rows_when_the_entry_has_fewer() -> None:
    driver = play(in_state(State.READY), "ask r2")
    reload(driver, entry(launch=replace(LAUNCH, max_concurrency=1)))  # checks invariants
    play(
        driver,
        "-> running=[r1, r2] & row_limit=2; token 1 2 finish=stop; exit code=0 -> row_limit=1",
    )


def test_a_load_takes_a_drain_back_only_with_the_same_launch() -> None:
    driver = in_state(State.DRAINING)
    reload(driver, entry(idle_unload_s=3.0))
    play(driver, "load -> READY & replies=[c3]")
    driver = in_state(State.DRAINING)
    reload(driver, OTHER)
    play(driver, "load -> DRAINING & replies=[]; token 1 finish=stop -> told=[Exit]; exit code=0")
    assert [spawn.launch for spawn in driver.of(Spawn)] == [OTHER.launch]
    play(driver, "up -> replies=[c3]")


@pytest.mark.parametrize("is_changed", [False, True])
def test_only_a_changed_entry_clears_the_restart_window_P9(is_changed: bool) -> None:
    driver = in_state(State.READY)
    crashes = 0
    while crashes < 2 * RESTART.max_restarts and driver.state() is not State.FAILED:
        crashes += 1
        driver.exit()
        reload(driver, entry(idle_unload_s=1000.0 + crashes) if is_changed else entry())
        driver.pass_time(10.0)
        if driver.state() is not State.FAILED:
            driver.come_up()
    assert crashes == (2 * RESTART.max_restarts if is_changed else RESTART.max_restarts + 1)


def test_a_reload_keeps_the_delay_of_an_unchanged_model() -> None:
    driver = in_state(State.BACKOFF)
    before = driver.row()["retry_in_s"]
    reload(driver, entry())
    assert driver.row()["retry_in_s"] == before
    play(driver, "wait 1.1; up; exit")
    assert driver.row()["retry_in_s"] > 1.0, "twice the first delay, less the half at random"


def test_a_reload_changes_how_often_a_model_that_runs_is_restarted_F2() -> None:
    driver = in_state(State.READY)
    reload(driver, entry(restart=replace(RESTART, max_restarts=0)))
    play(driver, "-> READY; exit -> FAILED")


@pytest.mark.parametrize("drains", ["removed", "changed", "unloaded", "restarted"])
def test_a_stop_shortens_every_drain_that_is_under_way_P12(drains: str) -> None:
    driver = play(Driver(settings=CoreSettings(drain_timeout_s=600.0)), "load; up; ask")
    if drains in ("removed", "changed"):
        reload(driver, *([OTHER] if drains == "changed" else []), drain_s=600.0)
    else:
        driver.unload() if drains == "unloaded" else driver.restart()
    play(
        driver,
        "-> DRAINING; stop timeout_s=1; ask new -> errors={new: shutting_down};"
        " wait 0.9 -> errors={}; wait 0.2 -> errors={r1: shutting_down} & finished=False;"
        " -> told=[Exit]; exit code=0 -> finished=True",
    )


@pytest.mark.parametrize("drains", ["removed", "changed"])
@pytest.mark.parametrize(
    ("state", "signals"),
    [
        (State.LOADING, [WorkerSignal.KILL]),
        (State.READY, []),
        (State.DRAINING, []),
        (State.STOPPING, [WorkerSignal.TERM]),
    ],
)
def test_stop_now_hurries_a_reload_in_every_state_P12(
    state: State, signals: list[WorkerSignal], drains: str
) -> None:
    driver = in_state(state)
    reload(driver, *([OTHER] if drains == "changed" else []))
    driver.stop(now=True)
    assert (driver.state(), driver.signals()) == (State.STOPPING, signals)
    assert driver.told(Exit) == ([] if signals else [Exit()])
    driver.exit(code=0)
    assert len(driver.of(Finish)) == 1
    assert driver.told(Dispatch) == []


def test_a_reload_ends_a_process_that_it_removes_or_gives_another_launch_and_no_other() -> None:
    same, other = entry(idle_unload_s=7.0), entry(launch=replace(LAUNCH, max_concurrency=3))
    for state, ends in ((State.READY, [False, True, True]), (State.STOPPED, [False] * 3)):
        core = in_state(state).core
        assert [core.ended_by(models) for models in ([same], [other], [])] == ends


# `reload --dry-run`: models

CHANGES: dict[str, tuple[ModelSettings, ...]] = {
    "another launch": (OTHER,),
    "another key": (entry(idle_unload_s=3.0),),
    "removed": (),
}
FOLLOWS = {"DRAINING": {"DRAINING", "STOPPING"}, "PENDING": {"PENDING", "LOADING"}}
"""Where a state leads in the same turn, if nothing runs and there is room."""


def foresee(driver: Driver, *models: ModelSettings, **more: Any) -> dict[str, Any]:
    """The answer to a dry run, of which nothing else may come."""
    read(driver, is_dry=True)
    before = driver.core.status(driver.now)
    reload(driver, *models, later=("log_dir",), caller=CALLER, is_dry=True, **more)
    (action,) = driver.actions
    assert isinstance(action, SendToClient)
    assert driver.core.status(driver.now) == before
    value = answer(driver)
    assert value["later"] == ["log_dir"]
    return value


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("state", [state for state in State if state is not State.PENDING])
def test_reload_does_what_its_dry_run_said(state: State, change: str) -> None:
    driver, models = in_state(state), (*CHANGES[change], entry("other"))
    value = foresee(driver, *models)
    (row,) = [one for one in value["foreseen"] if one["model"] == "m"]
    assert row["state"] == state.value
    assert row["change"] == ("removed" if change == "removed" else "changed")
    reload(driver, *models)
    states = {row["name"]: row["state"] for row in driver.core.status(driver.now)["models"]}
    after, becomes = states.get("m"), row["becomes"]
    assert after in FOLLOWS.get(becomes, {becomes})


def test_dry_run_leaves_out_a_model_that_was_removed_and_still_drains() -> None:
    driver = in_state(State.DRAINING)
    reload(driver, entry("other"))
    value = foresee(driver, entry("other"))
    assert (driver.state(), value["foreseen"], value["removed"]) == (State.DRAINING, [], [])


def test_dry_run_names_added_models_and_answers_to_be_finished() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    value = foresee(driver, OTHER, entry("a", preload=True), entry("b"))
    assert value["foreseen"] == [
        {"model": "m", "change": "changed", "state": "READY", "becomes": "DRAINING", "running": 2},
        {"model": "a", "change": "added", "state": None, "becomes": "PENDING", "running": 0},
        {"model": "b", "change": "added", "state": None, "becomes": "STOPPED", "running": 0},
    ]
    assert (value["added"], value["changed"], value["removed"]) == (["a", "b"], ["m"], [])
    assert "max_queue" in value["settings"]
    assert value["over_budget_bytes"] == 0


# `reload --dry-run`: memory

AS_BEFORE = tuple(sized(name, 4 * GIB) for name in "abc")


def answer_to_reload(
    driver: MemoryDriver, gib: int, models: tuple[ModelSettings, ...], *, is_dry: bool
) -> dict[str, Any]:
    reload(driver, *models, settings=limited(gib * GIB), caller=CALLER, is_dry=is_dry)
    assert driver.of(LogFault) == []
    return answer(driver)


def both(gib: int, *models: ModelSettings) -> dict[str, Any]:
    """What a dry run says; the reload that follows has to do it, and nothing else."""
    driver = pair_and_more()
    before = {model.name: model.life.state for model in driver.core.fleet}
    said = answer_to_reload(driver, gib, models or AS_BEFORE, is_dry=True)
    assert {model.name: model.life.state for model in driver.core.fleet} == before
    done = answer_to_reload(driver, gib, models or AS_BEFORE, is_dry=False)
    assert said["over_budget_bytes"] == done["over_budget_bytes"]
    names = {one.name for one in models or AS_BEFORE}
    after = [model for model in driver.core.fleet if model.name in names]
    gone = [one.name for one in after if one.life.state is not before.get(one.name, State.STOPPED)]
    assert said["evicts"] == gone
    return said


def test_dry_run_evicts_only_as_many_as_must_go() -> None:
    said = both(8)
    assert (said["over_budget_bytes"], said["evicts"], said["still_over_bytes"]) == (0, [], 0)
    assert said["refuses"] == []
    said = both(6)
    assert (said["over_budget_bytes"], said["evicts"], said["still_over_bytes"]) == (
        2 * GIB, ["a"], 0,
    )  # fmt: skip


def test_dry_run_names_models_that_never_fit() -> None:
    said = both(6, *AS_BEFORE, sized("new", 7 * GIB))
    assert said["refuses"] == [
        {"model": "new", "reason": "needs 7.00 GiB, but the memory budget is 6.00 GiB"}
    ]
    assert len(said["evicts"]) == 1
    said = answer_to_reload(pair_and_more(), 3, AS_BEFORE, is_dry=True)
    assert [one["model"] for one in said["refuses"]] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["c", "new"])
def test_dry_run_names_models_blocked_by_pins(name: str) -> None:
    models = (*AS_BEFORE[:2], sized(name, 4 * GIB, pinned=True))
    said = answer_to_reload(pair_and_more(), 7, models, is_dry=True)
    assert [one["model"] for one in said["refuses"]] == ["a", "b"]
    assert f"{name} is pinned and holds 4.00 GiB" in said["refuses"][0]["reason"]
    assert said["over_budget_bytes"] == 5 * GIB


# Needs that change with a reload


def needs_of(**gib: int) -> dict[ModelName, Need]:
    return {ModelName(name): need(size * GIB, layers=()) for name, size in gib.items()}


@pytest.mark.parametrize("is_dry", [True, False])
def test_reload_plans_with_the_needs_that_come_with_it(is_dry: bool) -> None:
    driver = MemoryDriver([entry("b"), entry("a")], limited(8 * GIB))
    driver.do(Appraised(now=driver.now, needs=needs_of(b=5, a=4)))
    driver.bring_up("a")
    driver.serve("r1", model="a")
    driver.ask("r2", "b")
    assert driver.state("b") is State.PENDING
    models = (entry("b", launch=replace(LAUNCH, context_length=4096)), entry("a"), entry("n"))
    needs, settings = needs_of(b=14, a=4, n=30), limited(24 * GIB)
    reload(driver, *models, settings=settings, needs=needs, caller=CALLER, is_dry=is_dry)
    if is_dry:
        assert [one["model"] for one in answer(driver)["refuses"]] == ["n"]
        return
    assert driver.errors() == {}
    assert (driver.state("b"), driver.row("b")["needed_bytes"]) == (State.LOADING, 14 * GIB)
    assert (driver.row("n")["needed_bytes"], driver.reserved()) == (30 * GIB, 18 * GIB)


def test_a_dry_run_refuses_a_model_whose_open_answer_would_not_fit() -> None:
    """One row of 1,000 tokens fits, and not with the step by which it grows."""
    driver = RowsDriver("a", FIXED + bytes_for(3, 1000), {"a": need_of()})
    driver.bring_up("a")
    driver.begin("a", "r1", 1000)
    needs = {ModelName("a"): need_of()}
    refused = []
    for tokens in (1000, 2000):
        settings = limited(FIXED + bytes_for(1, tokens))
        reload(driver, served("a"), settings=settings, needs=needs, caller=CALLER, is_dry=True)
        refused.append([one["model"] for one in answer(driver)["refuses"]])
    assert refused == [["a"], []]
