"""The rules under the state table: what is wanted, and who is answered what."""

from __future__ import annotations

import pytest

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, Exit
from mlxsup.supervisor.core.actions import WorkerSignal

from support.core.driver import Driver, entry
from support.core.looks import BOB
from support.core.states import in_state

# ---------------------------------------------------------------- load


def test_loads_join_and_all_callers_are_answered_at_ready_B8() -> None:
    driver = Driver()
    commands = [driver.load(), driver.load()]
    driver.spawned()
    driver.hello()
    driver.ready()
    assert driver.replies() == commands
    assert driver.generation() == 1


def test_many_requests_for_a_cold_model_cause_one_spawn_B8() -> None:
    driver = Driver()
    spawns = []
    for number in range(4):
        driver.ask(f"r{number}")
        spawns += driver.spawns()
    assert spawns == ["m"]


def test_load_takes_a_draining_unload_back_to_ready_and_supersedes_it() -> None:
    driver = in_state(State.READY)
    unload = driver.unload()
    load = driver.load()
    assert driver.state() is State.READY
    assert driver.errors() == {unload: ErrorCode.SUPERSEDED}
    assert driver.replies() == [load]
    driver.token(1)
    assert driver.state() is State.READY, "what ran keeps running"


def test_load_while_stopping_comes_up_again() -> None:
    driver = in_state(State.STOPPING)
    driver.load()
    driver.exit(code=0)
    assert driver.state() is State.LOADING
    assert driver.row()["restarts"] == 0, "not a crash"


def test_load_clears_the_window_of_a_failed_model() -> None:
    driver = in_state(State.FAILED)
    driver.load()
    driver.spawned()
    driver.exit()
    assert driver.state() is State.LOADING, "its first crash again"


def test_only_one_model_loads_at_a_time_from_spawn_to_ready_or_exit() -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    for name in "abc":
        driver.load(name)
    assert [driver.state(n) for n in "abc"] == [State.LOADING, State.PENDING, State.PENDING]
    driver.spawned("a")
    driver.unload("a")
    assert driver.state("b") is State.PENDING, "the turn lasts until the exit is seen"
    driver.exit("a")
    assert driver.spawns() == ["b"]
    driver.come_up("b", 78)
    assert driver.spawns() == ["c"]


def test_a_restart_after_a_crash_waits_only_for_its_like() -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    for name, pid in (("a", 1), ("b", 2)):
        driver.load(name)
        driver.come_up(name, pid)
    driver.load("c")
    driver.spawned("c", 3)
    driver.exit("a")
    assert driver.spawns() == ["a"], "it does not wait for c, which is loading afresh"
    driver.exit("b")
    assert driver.spawns() == [], "it waits for a, which comes back after a crash"
    driver.come_up("a", 4)
    assert driver.spawns() == ["b"]


# ---------------------------------------------------------------- unload


def test_what_runs_at_the_drain_limit_ends_with_unloaded() -> None:
    driver = in_state(State.DRAINING)
    driver.pass_time(5.1)
    assert driver.errors() == {"r1": ErrorCode.UNLOADED}
    driver.exit(code=0)
    assert driver.errors() == {}


def test_unload_during_a_load_ends_it_and_answers_who_waited() -> None:
    driver = in_state(State.LOADING)
    driver.ask()
    driver.unload()
    assert driver.signals() == [WorkerSignal.TERM]
    assert driver.errors() == {"c1": ErrorCode.SUPERSEDED, "r1": ErrorCode.UNLOADED}
    driver.exit(signal="SIGTERM")
    assert driver.state() is State.STOPPED


def test_unload_before_the_pid_is_known_signals_once_it_is() -> None:
    driver = Driver()
    driver.load()
    driver.unload()
    assert driver.signals() == []
    driver.spawned()
    assert driver.signals() == [WorkerSignal.TERM]


def test_unload_of_a_model_in_backoff_stops_it() -> None:
    driver = in_state(State.BACKOFF)
    driver.ask()
    driver.unload()
    assert driver.errors()["r1"] == ErrorCode.UNLOADED
    driver.pass_time(60.0)
    assert driver.state() is State.STOPPED


# ---------------------------------------------------------------- restart


def test_restart_drains_and_comes_up_once_F14() -> None:
    driver = in_state(State.READY)
    restart = driver.restart()
    driver.ask("waits")
    assert (driver.dispatched(), driver.errors()) == ([], {})
    driver.token(1, finish=FinishReason.STOP)
    assert driver.told(Exit) == [Exit()]
    driver.exit(code=0)
    assert driver.spawns() == ["m"]
    driver.spawned()
    driver.hello()
    driver.ready()
    assert driver.replies() == [restart]
    assert driver.dispatched() == [2], "queued requests survive"
    assert (driver.generation(), driver.row()["restarts"]) == (2, 0)


def test_four_restarts_at_once_coalesce_F14() -> None:
    driver = in_state(State.READY)
    commands = [driver.restart() for _ in range(4)]
    driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    driver.spawned()
    driver.hello()
    driver.ready()
    assert driver.replies() == commands
    assert driver.generation() == 2


def test_restart_joins_a_load_that_a_restart_caused_even_with_now() -> None:
    driver = in_state(State.FAILED)
    driver.restart()
    driver.spawned()
    generation = driver.generation()
    driver.restart(now=True)
    assert (driver.state(), driver.generation()) == (State.LOADING, generation)


def test_restart_now_ends_another_load_and_keeps_its_waiters() -> None:
    driver = in_state(State.LOADING)
    driver.ask()
    restart = driver.restart(now=True)
    assert driver.signals() == [WorkerSignal.TERM]
    assert driver.errors() == {}
    driver.exit(signal="SIGTERM")
    driver.spawned()
    driver.hello()
    driver.ready()
    assert driver.replies() == ["c1", restart]
    assert driver.dispatched() == [1]


def test_what_runs_at_restart_now_is_treated_as_after_a_crash() -> None:
    driver = in_state(State.READY)
    driver.token(1)
    driver.restart(now=True)
    driver.token(1)
    assert len(driver.actions) == 1, "tokens still reach open requests"
    driver.exit(code=0)
    assert driver.errors() == {}
    assert driver.state() is State.LOADING
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert len(dispatch.resume.delivered) == 8, "both tokens"


@pytest.mark.parametrize("drains", ["restart", "unload"])
def test_restart_now_of_a_model_that_drains_clears_the_window(drains: str) -> None:
    driver = in_state(State.READY)
    driver.exit()
    driver.come_up()
    driver.restart() if drains == "restart" else driver.unload()
    assert driver.state() is State.DRAINING
    driver.restart(now=True)
    assert driver.state() is State.STOPPING
    driver.exit(code=0)
    driver.come_up()
    driver.exit()
    assert driver.state() is State.LOADING, "the first restart after a crash is immediate"


def test_restart_while_stopping_comes_up_again_and_supersedes_the_unload() -> None:
    driver = in_state(State.READY)
    unload = driver.unload()
    driver.restart(now=True)
    assert driver.errors() == {unload: ErrorCode.SUPERSEDED}
    driver.exit(code=0)
    assert driver.state() is State.LOADING


def test_unload_supersedes_a_restart_that_drains() -> None:
    driver = in_state(State.READY)
    restart = driver.restart()
    driver.unload()
    assert driver.errors() == {restart: ErrorCode.SUPERSEDED}
    driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert driver.state() is State.STOPPED


def test_a_crash_after_a_fulfilled_restart_is_a_crash() -> None:
    driver = in_state(State.BACKOFF)
    driver.restart()
    driver.come_up()
    driver.exit()
    assert driver.state() is State.LOADING
    driver.come_up()
    driver.exit()
    assert driver.state() is State.BACKOFF


# ---------------------------------------------------------------- requests


def test_a_request_takes_an_idle_unload_back() -> None:
    driver = Driver([entry(idle_unload_s=30.0)])
    driver.load()
    driver.come_up()
    driver.pass_time(30.1)
    assert (driver.state(), driver.row()["why"]) == (State.STOPPING, "idle")
    driver.ask()
    assert driver.errors() == {}
    driver.exit(code=0)
    assert driver.state() is State.LOADING
    driver.come_up()
    assert driver.dispatched() == [1]


def test_idle_counts_from_the_last_request() -> None:
    driver = Driver([entry(idle_unload_s=30.0)])
    driver.load()
    driver.come_up()
    driver.pass_time(20.0)
    driver.ask()
    driver.accept(1)
    driver.pass_time(20.0)
    driver.token(1, finish=FinishReason.STOP)
    driver.pass_time(29.0)
    assert driver.state() is State.READY
    driver.pass_time(1.1)
    assert driver.state() is State.STOPPING


def test_an_unknown_model_is_answered_with_the_names_there_are_H10() -> None:
    driver = Driver([entry("smollm2")])
    driver.ask(model="smollm")
    failed = driver.failure_of()
    assert failed.error["code"] == ErrorCode.UNKNOWN_MODEL
    assert failed.error["detail"] == {"known": ["smollm2"], "close": ["smollm2"]}


def test_a_name_in_other_letters_is_close_too() -> None:
    driver = Driver([entry("smollm2")])
    driver.ask(model="SmolLM2")
    failed = driver.failure_of()
    assert failed.error["detail"]["close"] == ["smollm2"]


# ---------------------------------------------------------------- small things


def test_a_disconnected_caller_is_not_answered() -> None:
    driver = Driver()
    driver.load()
    driver.leave()
    driver.come_up()
    assert driver.replies() == []


def test_a_cancelled_row_holds_its_place_until_it_has_left_D11() -> None:
    driver = in_state(State.READY)
    driver.ask("r2", connection=BOB)
    driver.ask("r3")
    driver.cancel("r1")
    assert driver.told(CancelRow) == [CancelRow(key=RequestKey(1))]
    assert driver.dispatched() == []
    driver.row_left(1)
    assert driver.dispatched() == [3]
