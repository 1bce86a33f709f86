"""Test the life of a model: commands, states, loads, stops, processes that do not end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Failed, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import FinishReason, LoadPhase, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, Exit, RowDelta, Step
from mlxsup.supervisor.core.actions import (
    Abandon,
    Announce,
    Finish,
    ForgetModel,
    LogFault,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.lifecycle import triggers
from mlxsup.supervisor.core.lifecycle.life import KILL_LIMIT_S
from mlxsup.supervisor.core.lifecycle.load_times import LoadTimes
from mlxsup.supervisor.core.lifecycle.table import ImpossibleTransitionError
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.looks import BOB
from support.core.states import in_state

OTHER = replace(LAUNCH, path="/other")
LIVING = (State.LOADING, State.READY, State.DRAINING, State.STOPPING)


def reload(driver: Driver, *models: ModelSettings, drain_s: float = 5.0) -> None:
    settings = CoreSettings(drain_timeout_s=drain_s)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


def why(driver: Driver) -> tuple[str, str, str]:
    row = driver.row()
    return row["state"], row["wanted"], row["why"]


# The state table

ORDER = ("STOPPED", "PENDING", "LOADING", "READY", "DRAINING", "STOPPING", "BACKOFF", "FAILED")
COMMANDS: dict[str, tuple[Callable[[Driver], RequestId], str, str]] = {
    "load": (
        Driver.load, "up", "LOADING PENDING LOADING READY READY STOPPING LOADING LOADING",
    ),
    "unload": (
        Driver.unload, "down",
        "STOPPED STOPPED STOPPING DRAINING DRAINING STOPPING STOPPED STOPPED",
    ),
    "restart": (
        Driver.restart, "up",
        "LOADING PENDING LOADING DRAINING DRAINING STOPPING LOADING LOADING",
    ),
    "restart now": (
        lambda driver: driver.restart(now=True), "up",
        "LOADING PENDING STOPPING STOPPING STOPPING STOPPING LOADING LOADING",
    ),
}  # fmt: skip
"""How each is said, what is wanted then, and where each state of `ORDER` leads."""


@pytest.mark.parametrize("state", ORDER)
@pytest.mark.parametrize("name", COMMANDS)
def test_command_in_each_state(name: str, state: str) -> None:
    say, wanted, states = COMMANDS[name]
    driver = in_state(State(state))
    command = say(driver)
    assert driver.state() == dict(zip(ORDER, states.split(), strict=True))[state]
    assert driver.row()["wanted"] == wanted
    done = {"load": State.READY, "unload": State.STOPPED}.get(name)
    assert driver.replies() == ([command] if driver.state() is done else [])
    assert not name.startswith("restart") or driver.row()["why"] == "restart"


@pytest.mark.parametrize("state", ORDER)
def test_request_in_each_state(state: str) -> None:
    driver = in_state(State(state))
    driver.ask("new")
    refused = {"DRAINING": "unloaded", "STOPPING": "unloaded", "FAILED": "model_failed"}
    assert driver.errors().get("new") == refused.get(state)
    assert driver.state() == ("LOADING" if state == "STOPPED" else state)


@pytest.mark.parametrize("say", [Driver.hello, Driver.ready, lambda d: d.progress(0.5)])
@pytest.mark.parametrize("state", [State.READY, State.DRAINING])
def test_hello_ready_or_progress_after_ready_is_a_crash_without_evidence(
    say: Callable[[Driver], object], state: State
) -> None:
    driver = in_state(state)
    say(driver)
    assert (driver.state(), driver.signals()) == (State.STOPPING, [WorkerSignal.KILL])


@pytest.mark.parametrize(
    "say", [Driver.hello, Driver.ready, lambda d: d.progress(0.5), Driver.broke]
)
def test_worker_messages_while_stopping_are_ignored(say: Callable[[Driver], object]) -> None:
    driver = in_state(State.LOADING)
    driver.unload()
    say(driver)
    assert (driver.state(), driver.actions) == (State.STOPPING, [])


def test_frames_and_exits_of_an_earlier_generation_are_dropped_F9() -> None:
    driver = in_state(State.READY)
    driver.exit()
    driver.come_up()
    driver.ask("r2")
    late = Step(step=9, rows=[RowDelta(key=RequestKey(2), text="late", tokens=b"\0\0\0\0")])
    assert driver.worker(late, generation=1) == []
    assert driver.exit(generation=1) == []
    assert driver.state() is State.READY


def test_an_absent_pair_raises_in_tests() -> None:
    driver = in_state(State.STOPPED)
    with pytest.raises(ImpossibleTransitionError):
        driver.core.fleet.trigger(driver.model(), triggers.BecameReady(), driver.now)


@pytest.mark.parametrize("is_ending", [False, True])
def test_in_production_an_absent_pair_ends_that_life_alone(is_ending: bool) -> None:
    driver = Driver([entry("m"), entry("other")], is_strict=False)
    for name, pid in (("m", 77), ("other", 78)):
        driver.load(name)
        driver.come_up(name, pid)
    if is_ending:
        driver.restart("m", now=True)
    driver.core.outbox.take()
    driver.core.fleet.trigger(driver.model(), triggers.Turn(), driver.now)
    driver.actions = driver.core.outbox.take()
    assert len(driver.of(LogFault)) == 1
    assert driver.signals() == ([] if is_ending else [WorkerSignal.KILL])
    driver.exit("m")
    last = driver.row("m")["last_exit"]
    assert (driver.state("m"), last["reason"]) == (State.FAILED, "internal")
    assert last["detail"].startswith("internal error: m: no rule for Turn in ")
    assert driver.state("other") is State.READY


# Loads


def test_loads_join_and_all_callers_are_answered_at_ready_B8() -> None:
    driver = Driver()
    commands = [driver.load(), driver.load()]
    spawns = driver.generation()
    for number in range(3):
        driver.ask(f"r{number}")
    driver.come_up()
    assert driver.replies() == commands
    assert driver.generation() == spawns == 1, "requests join it, too"


def test_a_caller_that_has_gone_is_not_answered() -> None:
    driver = Driver()
    driver.load()
    driver.leave()
    driver.come_up()
    assert driver.replies() == []


def test_load_takes_a_draining_unload_back_to_ready_and_supersedes_it() -> None:
    driver = in_state(State.READY)
    driver.now += 7.0
    unload = driver.unload()
    driver.now += 2.0
    load = driver.load()
    assert why(driver) == ("READY", "up", "user")
    assert driver.errors() == {unload: ErrorCode.SUPERSEDED}
    assert driver.replies() == [load]
    assert driver.row()["loaded_for_s"] == 9.0
    driver.token(1)
    assert driver.state() is State.READY, "what ran keeps running"


def test_load_while_stopping_comes_up_again() -> None:
    driver = in_state(State.STOPPING)
    driver.load()
    driver.exit(code=0)
    assert (driver.state(), driver.row()["restarts"]) == (State.LOADING, 0), "not a crash"


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


def test_preload_follows_the_order_of_the_file() -> None:
    driver = Driver([entry("a", preload=True), entry("b"), entry("c", preload=True)])
    assert driver.spawns() == ["a"]
    assert [driver.row(n)["wanted"] for n in "abc"] == ["up", "down", "up"]
    assert (driver.row("c")["why"], driver.state("c")) == ("preload", State.PENDING)
    driver.come_up("a")
    assert driver.spawns() == ["c"]


def test_longest_wait_loads_first_and_crashed_models_wait_only_for_their_like() -> None:
    driver = Driver([entry(name) for name in "abcde"])
    for name in "de":
        driver.load(name)
        driver.come_up(name, ord(name))
    driver.load("a")
    for seconds, name in enumerate("cb", start=1):
        driver.now = 1000.0 + seconds
        driver.load(name)
    driver.now = 1010.0
    driver.exit("d")
    assert driver.spawns() == ["d"], "it does not wait for a, which is loading afresh"
    driver.exit("e")
    assert driver.spawns() == [], "it waits for d, which comes back after a crash"
    driver.come_up("a", 1)
    assert driver.spawns() == [], "after a crash or not, one loads"
    driver.come_up("d", 5)
    assert driver.spawns() == ["e"]
    driver.come_up("e", 6)
    assert driver.spawns() == ["c"]
    driver.come_up("c", 3)
    assert driver.spawns() == ["b"]


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


LOAD_PHASES = st.sampled_from(LoadPhase)
SECONDS = st.integers(0, 1000)


@hypothesis.settings(max_examples=25)
@given(st.lists(st.tuples(SECONDS, LOAD_PHASES), max_size=12), SECONDS, SECONDS)
def test_load_phases_add_up(steps: list[tuple[int, LoadPhase]], rest: int, later: int) -> None:
    now = 1000
    times, spent = LoadTimes.begun(now), dict.fromkeys(LoadPhase, 0)
    current, order = LoadPhase.SPAWN, [LoadPhase.SPAWN]
    for seconds, phase in steps:
        now += seconds
        spent[current] += seconds
        times, current = times.entered(phase, now), phase
        order += [phase] if phase not in order else []
    spent[current] += rest
    now += rest
    shown = times.seconds(now)
    ended = times.ended(now)
    assert shown == {phase: spent[phase] for phase in order}
    assert list(shown) == order
    assert ended.seconds(now + later) == ended.ended(now + later).seconds(0) == shown


# Unloads


def test_drain_limit_of_an_unload_ends_what_runs_and_no_unload_lengthens_it() -> None:
    driver = in_state(State.DRAINING)
    driver.pass_time(3.0)
    driver.unload()
    driver.pass_time(1.9)
    assert driver.state() is State.DRAINING
    driver.pass_time(0.1)
    assert driver.errors() == {"r1": ErrorCode.UNLOADED}, "five seconds after the first"
    assert (driver.state(), driver.told(Exit)) == (State.STOPPING, [Exit()])
    driver.exit(code=0)
    assert driver.errors() == {}


def test_stopping_escalates_from_asking_to_term_to_kill_E5() -> None:
    driver = in_state(State.STOPPING)
    for signal in (WorkerSignal.TERM, WorkerSignal.KILL):
        driver.pass_time(2.1)
        assert driver.signals() == [signal]
    driver.pass_time(KILL_LIMIT_S - 0.5)
    assert driver.signals() == []
    assert driver.state() is State.STOPPING, "stopping lasts until the exit is seen"


def test_unload_during_a_load_ends_it_and_answers_who_waited() -> None:
    driver = in_state(State.LOADING)
    driver.ask()
    driver.unload()
    assert driver.signals() == [WorkerSignal.TERM]
    assert driver.errors() == {"c1": ErrorCode.SUPERSEDED, "r1": ErrorCode.UNLOADED}
    driver.exit(signal="SIGTERM")
    assert driver.state() is State.STOPPED


@pytest.mark.parametrize(
    ("waits_s", "signal"), [(0.0, WorkerSignal.TERM), (100.0, WorkerSignal.KILL)]
)
def test_a_process_that_is_to_end_is_signalled_once_its_pid_is_known(
    waits_s: float, signal: WorkerSignal
) -> None:
    driver = Driver()
    driver.load()
    driver.unload()
    assert driver.signals() == []
    driver.pass_time(waits_s)
    assert driver.state() is State.STOPPING, "beyond all limits"
    driver.spawned()
    assert driver.signals() == [signal]


@pytest.mark.parametrize("how", ["unload", "now unload", "now removal", "backoff unload"])
def test_waiters_end_when_the_process_will_not_come_back(how: str) -> None:
    driver = in_state(State.BACKOFF if "backoff" in how else State.READY)
    if "backoff" not in how:
        driver.restart(now="now" in how)
    driver.ask("waits")
    assert driver.errors() == {}
    reload(driver) if "removal" in how else driver.unload()
    code = ErrorCode.UNKNOWN_MODEL if "removal" in how else ErrorCode.UNLOADED
    assert driver.errors()["waits"] == code
    if "now" in how:
        driver.exit(code=0)
        assert driver.failure_of().error["code"] == code, "its row had been cut off"
    if "backoff" in how:
        driver.pass_time(60.0)
        assert driver.state() is State.STOPPED


@pytest.mark.parametrize("is_used", [False, True])
def test_an_idle_model_is_unloaded_and_a_request_takes_that_back(is_used: bool) -> None:
    driver = Driver([entry(idle_unload_s=30.0)])
    driver.load()
    driver.come_up()
    if is_used:
        driver.pass_time(20.0)
        driver.ask()
        driver.accept(1)
        driver.pass_time(20.0)
        driver.token(1, finish=FinishReason.STOP)
    driver.pass_time(29.0)
    assert driver.state() is State.READY
    driver.pass_time(1.1)
    assert (driver.state(), driver.row()["why"]) == (State.STOPPING, "idle")
    driver.ask("r2")
    assert driver.errors() == {}
    driver.exit(code=0)
    driver.come_up()
    assert len(driver.dispatched()) == 1


def test_a_cancelled_row_holds_its_place_until_it_has_left_D11() -> None:
    driver = in_state(State.READY)
    driver.ask("r2", connection=BOB)
    driver.ask("r3")
    driver.cancel("r1")
    assert driver.told(CancelRow) == [CancelRow(key=RequestKey(1))]
    assert driver.dispatched() == []
    driver.row_left(1)
    assert driver.dispatched() == [3]


# Restarts


def test_restarts_drain_join_and_come_up_once_F14() -> None:
    driver = in_state(State.READY)
    commands = [driver.restart() for _ in range(4)]
    commands.append(driver.load())
    driver.ask("waits")
    assert (driver.dispatched(), driver.errors(), driver.replies()) == ([], {}, [])
    assert why(driver) == ("DRAINING", "up", "restart"), "the load does not take it back"
    driver.token(1, finish=FinishReason.STOP)
    assert driver.told(Exit) == [Exit()]
    driver.exit(code=0)
    assert driver.spawns() == ["m"]
    driver.come_up()
    assert driver.replies() == commands
    assert driver.dispatched() == [2], "queued requests survive"
    assert (driver.generation(), driver.row()["restarts"]) == (2, 0)
    assert why(driver) == ("READY", "up", "user"), "the restart is fulfilled"


def test_drain_limit_of_a_restart_ends_no_request() -> None:
    driver = in_state(State.READY)
    driver.restart()
    driver.pass_time(5.0)
    assert (driver.state(), driver.told(Exit), driver.errors()) == (State.STOPPING, [Exit()], {})
    driver.exit(code=0)
    assert (driver.state(), driver.row()["restarts"]) == (State.LOADING, 0)
    driver.come_up()
    assert driver.dispatched() == [1]


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
    assert (driver.signals(), driver.errors()) == ([WorkerSignal.TERM], {})
    driver.exit(signal="SIGTERM")
    driver.come_up()
    assert driver.replies() == ["c1", restart]
    assert driver.dispatched() == [1]


def test_what_runs_at_restart_now_is_treated_as_after_a_crash() -> None:
    driver = in_state(State.READY)
    driver.token(1)
    driver.restart(now=True)
    driver.token(1)
    assert len(driver.actions) == 1, "tokens still reach open requests"
    driver.exit(code=0)
    assert (driver.errors(), driver.state()) == ({}, State.LOADING)
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert len(dispatch.resume.delivered) == 8, "both tokens"


@pytest.mark.parametrize("drains", [Driver.restart, Driver.unload])
def test_restart_now_of_a_model_that_drains_clears_the_window(
    drains: Callable[[Driver], RequestId],
) -> None:
    driver = in_state(State.READY)
    driver.exit()
    driver.come_up()
    drains(driver)
    assert driver.state() is State.DRAINING
    driver.restart(now=True)
    assert driver.state() is State.STOPPING
    driver.exit(code=0)
    driver.come_up()
    driver.exit()
    assert driver.state() is State.LOADING, "the first restart after a crash is immediate"
    driver.come_up()
    driver.exit()
    assert driver.state() is State.BACKOFF, "the next one is a crash as others"


def test_restart_and_unload_supersede_each_other() -> None:
    driver = in_state(State.READY)
    unload = driver.unload()
    restart = driver.restart(now=True)
    assert driver.errors() == {unload: ErrorCode.SUPERSEDED}
    driver.exit(code=0)
    assert driver.state() is State.LOADING
    driver.unload()
    assert driver.errors()[restart] == ErrorCode.SUPERSEDED
    driver = in_state(State.READY)
    restart = driver.restart()
    driver.unload()
    assert driver.errors() == {restart: ErrorCode.SUPERSEDED}
    driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert driver.state() is State.STOPPED


# Entries that a reload changes or removes


def test_a_reload_of_a_load_starts_it_again_with_the_new_launch() -> None:
    driver = in_state(State.LOADING)
    driver.ask(connection=BOB)
    reload(driver, entry(launch=OTHER))
    assert why(driver) == ("STOPPING", "up", "reload")
    assert (driver.signals(), driver.errors(BOB)) == ([WorkerSignal.TERM], {})
    driver.exit(signal="SIGTERM")
    [spawn] = driver.of(Spawn)
    assert (spawn.generation, spawn.launch, driver.row()["restarts"]) == (2, OTHER, 0)
    driver.come_up()
    assert driver.replies() == ["c1"]


@pytest.mark.parametrize("state", LIVING)
def test_a_model_that_a_reload_removes_and_another_brings_back_comes_up(state: State) -> None:
    driver = in_state(state)
    reload(driver)
    assert why(driver)[1:] == ("gone", "reload")
    reload(driver, entry())
    assert why(driver)[1:] == ("up", "reload")
    if driver.state() is State.DRAINING:
        driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert (driver.state(), driver.of(ForgetModel)) == (State.LOADING, [])
    driver.ask("new")
    assert driver.errors() == {}


@pytest.mark.parametrize("state", list(State))
def test_a_model_that_is_removed_is_forgotten_once_nothing_of_it_lives(state: State) -> None:
    driver = in_state(state)
    reload(driver, *([entry("z")] if state is State.PENDING else []))
    if state in (State.READY, State.DRAINING):
        driver.ask("new")
        assert driver.errors() == {"new": ErrorCode.UNKNOWN_MODEL}
        assert driver.of(ForgetModel) == []
        driver.token(1, finish=FinishReason.STOP)
        assert driver.told(Exit) == [Exit()]
    if state in LIVING:
        driver.exit(code=0)
    assert driver.of(ForgetModel) == [ForgetModel(model=ModelName("m"))]
    notes = [a.change["note"] for a in driver.of(Announce) if a.change["model"] == "m"]
    assert notes == ["removed"]
    assert "m" not in driver.core.fleet.by_name


# Shutdown


def test_shutdown_drains_what_is_ready_stops_what_loads_and_answers_queues_E4() -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    driver.load("a")
    driver.come_up("a")
    driver.ask("runs", "a")
    driver.accept(1, "a")
    load_b = driver.load("b")
    driver.spawned("b", 2)
    load_c = driver.load("c")
    driver.ask("waits", "b")
    driver.signal()
    assert [driver.state(n) for n in "abc"] == [State.DRAINING, State.STOPPING, State.STOPPED]
    assert driver.errors() == dict.fromkeys(("waits", load_b, load_c), ErrorCode.SHUTTING_DOWN)
    driver.ask("new", "a")
    assert driver.errors() == {"new": ErrorCode.SHUTTING_DOWN}
    driver.exit("b", signal="SIGTERM")
    driver.token(1, model="a", finish=FinishReason.STOP)
    assert driver.of(Finish) == []
    driver.exit("a", code=0)
    assert driver.of(Finish) == [Finish()]
    driver.signal(is_immediate=True)
    driver.pass_time(1000.0)
    assert driver.of(Finish) == [], "the end is said once"


def test_nothing_starts_again_after_a_shutdown() -> None:
    driver = in_state(State.BACKOFF)
    driver.signal()
    assert len(driver.of(Finish)) == 1
    driver.load()
    assert driver.errors() == {"c2": ErrorCode.SHUTTING_DOWN}
    driver.pass_time(1000.0)
    assert driver.state() is State.STOPPED


@pytest.mark.parametrize(("timeout_s", "drain_timeout_s"), [(None, 5.0), (0.0, 0.0), (9.5, 9.5)])
def test_stop_reply_has_pids_and_limits_and_keeps_them_E1(
    timeout_s: float | None, drain_timeout_s: float
) -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    for pid, name in enumerate("ab", start=5):
        driver.load(name)
        driver.come_up(name, pid)
        driver.ask(name, name)
    driver.sample(10**9, pid=6)
    driver.stop(timeout_s=timeout_s)
    [reply] = driver.sent(Reply)
    assert reply.value == {
        "pids": [5, 6],
        "supervisor_pid": 1,
        "drain_timeout_s": drain_timeout_s,
        "end_limit_s": 2 * 2.0 + KILL_LIMIT_S + 0.5,
    }
    if drain_timeout_s:
        driver.pass_time(drain_timeout_s - 0.1)
        assert driver.state("a") is State.DRAINING
    driver.pass_time(0.1)
    assert driver.errors() == dict.fromkeys("ab", ErrorCode.SHUTTING_DOWN)


def test_stop_refuses_a_negative_limit() -> None:
    driver = Driver()
    driver.stop(timeout_s=-0.1)
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == "timeout_s takes seconds from 0"
    assert driver.of(Finish) == []


@pytest.mark.parametrize("is_signal", [True, False])
def test_an_immediate_end_asks_gracefully_first_E5(is_signal: bool) -> None:
    def end(driver: Driver) -> None:
        driver.signal(is_immediate=True) if is_signal else driver.stop(now=True)

    driver = in_state(State.READY)
    end(driver)
    assert driver.errors() == {"r1": ErrorCode.SHUTTING_DOWN}
    assert (driver.told(Exit), driver.signals()) == ([Exit()], [])
    driver = in_state(State.LOADING)
    end(driver)
    assert driver.signals() == [WorkerSignal.TERM]


# Processes that SIGKILL does not end (P26)

GB = 1_000_000_000
LONG_S = 3600.0


def stuck(**changes: object) -> Driver:
    """A driver whose model `m` is FAILED because its process, 77, could not be ended."""
    driver = in_state(State.READY, **changes)
    driver.broke()
    assert driver.signals() == [WorkerSignal.KILL]
    driver.pass_time(KILL_LIMIT_S + 0.1)
    return driver


@pytest.mark.parametrize("footprint_gb", [0, 100])
def test_stuck_process_fails_its_model_and_requests(footprint_gb: int) -> None:
    """The larger it is, the longer the kernel needs to free it."""
    driver = in_state(State.READY)
    driver.sample(footprint_gb * GB)
    driver.broke()
    driver.ask("waits")
    driver.pass_time(KILL_LIMIT_S + footprint_gb / 2 - 0.1)
    assert driver.state() is State.STOPPING
    driver.pass_time(0.2)
    row = driver.row()
    assert (row["state"], row["cause"]) == ("FAILED", "process 77 cannot be ended")
    assert driver.errors() == {"r1": ErrorCode.WORKER_CRASHED, "waits": ErrorCode.LOAD_FAILED}
    assert [(a.model, a.generation) for a in driver.of(Abandon)] == [("m", 1)]
    driver.pass_time(LONG_S)
    assert driver.actions == []
    driver.sample(5 * GB)
    assert (driver.row()["pid"], driver.row()["footprint_bytes"]) == (77, 5 * GB)
    assert driver.core.status(driver.now)["memory"]["reserved_bytes"] == max(5, footprint_gb) * GB


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
def test_a_new_process_is_refused_while_a_stuck_one_lives(
    command: Callable[[Driver], RequestId],
) -> None:
    driver = stuck()
    id = command(driver)
    assert (driver.spawns(), driver.state()) == ([], State.FAILED)
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["code"]) == (id, ErrorCode.LOAD_FAILED)
    assert "77" in failed.error["message"]
    driver.ask("late")
    assert driver.errors() == {"late": ErrorCode.MODEL_FAILED}
    driver.exit()
    assert driver.spawns() == ["m"], "its exit is seen at last"
    assert (driver.generation(), driver.row()["pid"]) == (2, None)


@pytest.mark.parametrize("is_stuck_before", [True, False])
def test_an_unload_of_a_stuck_process_fails(is_stuck_before: bool) -> None:
    driver = stuck() if is_stuck_before else in_state(State.READY)
    unload = driver.unload()
    if not is_stuck_before:
        driver.pass_time(5.0 + 2.0 + 2.0 + KILL_LIMIT_S + 1.0)
    assert driver.errors()[unload] == ErrorCode.MODEL_FAILED
    assert (driver.state(), driver.row()["wanted"]) == (State.FAILED, "down")
    driver.exit()
    assert (driver.state(), driver.row()["pid"]) == (State.STOPPED, None)


def test_shutdown_does_not_wait_for_a_stuck_process() -> None:
    driver = stuck()
    stop = driver.stop()
    [reply] = driver.sent(Reply)
    assert (reply.id, reply.value["pids"]) == (stop, [77])
    assert len(driver.of(Finish)) == 1


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.STOPPING])
def test_stop_with_a_stuck_process_keeps_its_limit(state: State) -> None:
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


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_removed_stuck_model_is_forgotten_at_its_exit(comes_back: bool) -> None:
    driver = stuck()
    reload(driver)
    assert driver.row()["wanted"] == "gone"
    driver.ask("late")
    assert driver.errors() == {"late": ErrorCode.UNKNOWN_MODEL}
    if comes_back:
        reload(driver, entry())
        assert driver.spawns() == []
        assert (driver.state(), driver.row()["wanted"]) == (State.FAILED, "up")
    driver.exit()
    assert driver.spawns() == (["m"] if comes_back else [])
    assert len(driver.core.status(driver.now)["models"]) == comes_back


def test_answers_of_a_removed_stuck_model_end_as_unknown() -> None:
    driver = in_state(State.READY)
    reload(driver, entry("other"))
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 0.1)
    assert driver.failure_of().error["code"] == ErrorCode.UNKNOWN_MODEL


def test_messages_of_an_abandoned_worker_are_ignored_and_its_late_exit_accuses_no_more() -> None:
    driver = stuck()
    for say in (Driver.hello, Driver.ready, Driver.broke, Driver.beat):
        say(driver)
        assert (driver.actions, driver.state()) == ([], State.FAILED)
    before = driver.row()["suspects"]
    driver.exit(signal="SIGSEGV")
    assert driver.row()["suspects"] == before
