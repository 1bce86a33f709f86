"""Test the life of a model: commands, states, loads, processes that do not end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Failed, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import Batching, FinishReason, LoadPhase, State
from mlxsup.protocol.worker_messages import Dispatch, Dying, Exit, Ready
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
from mlxsup.supervisor.core.lifecycle.triggers import BecameReady
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core.driver import LAUNCH, RESTART, Driver, entry
from support.core.looks import BOB
from support.core.states import in_state

# What is wanted and what follows

OTHER = replace(LAUNCH, path="/other")


def reload(driver: Driver, *models: ModelSettings, drain_s: float = 5.0) -> None:
    settings = CoreSettings(drain_timeout_s=drain_s)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


def why(driver: Driver) -> tuple[str, str, str]:
    row = driver.row()
    return row["state"], row["wanted"], row["why"]


def test_unload_ends_requests_that_wait_for_a_restart() -> None:
    driver = in_state(State.READY)
    driver.restart()
    driver.ask("waits")
    assert driver.errors() == {}
    driver.unload()
    assert driver.errors()["waits"] == ErrorCode.UNLOADED


@pytest.mark.parametrize("how", ["unload", "removal"])
def test_waiters_end_when_the_process_will_not_come_back(how: str) -> None:
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


def test_an_unload_while_it_drains_shortens_the_drain_and_never_lengthens_it() -> None:
    driver = in_state(State.DRAINING)
    driver.pass_time(3.0)
    driver.unload()
    driver.pass_time(1.9)
    assert driver.state() is State.DRAINING
    driver.pass_time(0.1)
    assert driver.state() is State.STOPPING, "five seconds after the first"


def test_load_takes_a_drain_back() -> None:
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


def test_drain_limit_of_a_restart_ends_no_request() -> None:
    driver = in_state(State.READY)
    driver.restart()
    driver.pass_time(5.0)
    assert (driver.state(), driver.told(Exit), driver.errors()) == (State.STOPPING, [Exit()], {})
    driver.exit(code=0)
    assert (driver.state(), driver.row()["restarts"]) == (State.LOADING, 0)
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.key == 1


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


# The state table


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
def test_worker_messages_while_stopping_are_ignored(say: Callable[[Driver], object]) -> None:
    driver = in_state(State.LOADING)
    driver.unload()
    say(driver)
    assert driver.state() is State.STOPPING
    assert driver.actions == []


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


def test_stopping_escalates_from_asking_to_term_to_kill_E5() -> None:
    driver = in_state(State.STOPPING)
    driver.pass_time(2.1)
    assert driver.signals() == [WorkerSignal.TERM]
    driver.pass_time(2.1)
    assert driver.signals() == [WorkerSignal.KILL]
    driver.pass_time(KILL_LIMIT_S - 0.5)
    assert driver.signals() == []
    assert driver.state() is State.STOPPING, "stopping lasts until the exit is seen"


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


@pytest.mark.parametrize("state", ["LOADING", "READY", "DRAINING", "STOPPING"])
def test_exit_in_each_state(state: str) -> None:
    driver = in_state(State(state))
    generation = driver.generation()
    driver.exit()
    is_wanted = state in ("LOADING", "READY")
    assert driver.state() is (State.LOADING if is_wanted else State.STOPPED)
    assert driver.generation() == generation + is_wanted, "the first crash is answered at once"


# Failed loads and batching

RAISED = "RuntimeError: [GatherMM] only float32 is supported"
READY = Ready(
    context_length=100,
    fingerprint="print-1",
    backend="fake",
    batching=Batching.SERIAL_PREFILL,
    batching_reason="rows of different length differ by 0.4",
    warnings=["memory is short", "the context is unknown"],
)


def die(driver: Driver, message: str, code: int = 70) -> None:
    """The process comes up, says why it dies, and exits."""
    driver.pass_time(10.0)  # the delay before the start, if there is one
    assert driver.state() is State.LOADING
    driver.spawned()
    driver.hello()
    driver.worker(Dying(code=code, message=message))
    driver.exit(code=code)


def test_the_same_error_in_two_loads_in_a_row_is_permanent_P11() -> None:
    driver = Driver()
    driver.ask("waits")
    die(driver, RAISED)
    assert driver.state() is State.LOADING, "once may be bad luck"
    die(driver, RAISED)
    row = driver.row()
    assert (row["state"], row["generation"]) == ("FAILED", 2)
    assert row["cause"] == f"exit code 70: {RAISED}, as the time before"
    assert (row["last_exit"]["reason"], row["last_exit"]["detail"]) == ("load_error", RAISED)
    assert driver.errors() == {"waits": "load_failed"}


def test_numbers_do_not_make_an_error_another_one() -> None:
    driver = Driver()
    driver.load()
    die(driver, "ValueError: no room at 0x7f3a2b10 after 12.5 s (object deadbeef01)")
    die(driver, "ValueError: no room at 0x7f00ffee after 3.75 s (object 00c0ffee42)")
    assert (driver.state(), driver.generation()) == (State.FAILED, 2)


def test_another_error_is_another_attempt() -> None:
    driver = Driver()
    driver.load()
    for message in ("ValueError: a", "ValueError: b", "ValueError: a"):
        die(driver, message)
        assert driver.state() in (State.LOADING, State.BACKOFF)
    assert driver.generation() >= RESTART.max_restarts


def test_another_code_with_the_same_words_is_another_error() -> None:
    driver = Driver()
    driver.load()
    die(driver, "gone", code=70)
    die(driver, "gone", code=71)
    assert driver.state() is State.BACKOFF


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (ExitCode.OUT_OF_MEMORY, "the weights do not fit into memory"),
        (ExitCode.STEP_ERROR, "RuntimeError: [malloc] Unable to allocate 12 bytes"),
        (ExitCode.GPU_FAULT_ELSEWHERE, "innocent victim"),
        (ExitCode.STEP_ERROR, "RuntimeError: Caused GPU Timeout Error"),
        (143, "ended by SIGTERM"),
    ],
)
def test_outside_causes_use_the_whole_restart_budget_P9(code: int, message: str) -> None:
    driver = Driver()
    driver.load()
    for _ in range(RESTART.max_restarts):
        die(driver, message, code=code)
        assert driver.state() in (State.LOADING, State.BACKOFF)
    die(driver, message, code=code)
    assert driver.state() is State.FAILED
    assert "crashed 4 times" in driver.row()["cause"]


def test_a_load_that_succeeded_between_makes_it_the_first_again() -> None:
    driver = Driver()
    driver.load()
    die(driver, RAISED)
    driver.come_up()
    driver.worker(Dying(code=70, message=RAISED))
    driver.exit(code=70)
    assert driver.state() is State.BACKOFF, "a crash after READY is no load that failed"
    die(driver, RAISED)
    assert driver.state() is State.BACKOFF


@pytest.mark.parametrize("between", ["silence", "a stall", "no process"])
def test_a_load_that_ended_otherwise_between_makes_it_the_first_again(between: str) -> None:
    driver = Driver()
    driver.load()
    die(driver, RAISED)
    if between == "no process":
        driver.spawn_failed()
    else:
        driver.spawned()
        driver.hello()
        if between == "a stall":
            driver.pass_time(entry().load_stall_timeout_s + 1.0)
            assert driver.state() is State.STOPPING
        driver.exit(code=70)
    assert driver.row()["last_exit"]["detail"] != RAISED
    die(driver, RAISED)
    assert driver.state() is State.BACKOFF
    die(driver, RAISED)
    assert driver.state() is State.FAILED


def test_a_load_that_was_ended_is_not_the_first_of_two() -> None:
    driver = Driver()
    driver.load()
    driver.spawned()
    driver.hello()
    driver.worker(Dying(code=70, message=RAISED))
    driver.unload()
    driver.exit(code=70)
    driver.ask()
    die(driver, RAISED)
    assert driver.state() is State.LOADING


def test_a_person_who_asks_for_it_gets_two_attempts_again() -> None:
    driver = Driver()
    driver.load()
    die(driver, RAISED)
    die(driver, RAISED)
    driver.restart()
    die(driver, RAISED)
    assert driver.state() is State.LOADING
    die(driver, RAISED)
    assert (driver.state(), driver.generation()) == (State.FAILED, 4)


def come_up(driver: Driver, ready: Ready = READY) -> None:
    """From the spawn to this READY."""
    driver.spawned()
    driver.hello()
    driver.worker(ready)


# Phases of a load

LOAD_PHASES = st.sampled_from(LoadPhase)
SECONDS = st.integers(0, 1000)


@hypothesis.settings(max_examples=50)
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


# Processes that SIGKILL does not end (P26)

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


def reload_names(driver: Driver, *models: str) -> None:
    entries = tuple(entry(name) for name in models)
    driver.do(Reloaded(now=driver.now, settings=SETTINGS, models=entries))


def test_stuck_process_fails_its_model_and_requests() -> None:
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


def test_kill_limit_grows_with_the_footprint() -> None:
    driver = in_state(State.READY)
    driver.sample(100 * GB)
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 49.0)
    assert driver.state() is State.STOPPING
    driver.pass_time(2.0)
    assert driver.state() is State.FAILED


def test_memory_of_a_stuck_process_counts() -> None:
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
def test_a_new_process_is_refused_while_a_stuck_one_lives(
    command: Callable[[Driver], RequestId],
) -> None:
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


def test_unloaded_stuck_model_stops_at_its_exit() -> None:
    driver = stuck()
    unload = driver.unload()
    assert driver.errors() == {unload: ErrorCode.MODEL_FAILED}
    assert (driver.state(), driver.row()["wanted"]) == (State.FAILED, "down")
    driver.exit()
    assert (driver.state(), driver.row()["pid"]) == (State.STOPPED, None)


def test_an_unload_of_a_stuck_process_is_answered() -> None:
    driver = in_state(State.READY)
    unload = driver.unload()
    driver.pass_time(5.0 + 2.0 + 2.0 + KILL_LIMIT_S + 1.0)
    assert driver.state() is State.FAILED
    assert driver.errors()[unload] == ErrorCode.MODEL_FAILED


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


def test_a_removed_stuck_model_is_forgotten_at_its_exit() -> None:
    driver = stuck()
    reload_names(driver)
    assert driver.row()["wanted"] == "gone"
    driver.ask("late")
    assert driver.errors() == {"late": ErrorCode.UNKNOWN_MODEL}
    driver.exit()
    assert driver.core.status(driver.now)["models"] == []


def test_memory_of_a_removed_stuck_process_is_reported_gone() -> None:
    driver = in_state(State.READY)
    driver.accept(1)
    reload_names(driver, "other")
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 0.1)
    assert driver.failure_of().error["code"] == ErrorCode.UNKNOWN_MODEL


def test_a_reload_that_brings_back_a_stuck_model_starts_no_process() -> None:
    driver = stuck()
    reload_names(driver)
    reload_names(driver, "m")
    assert driver.spawns() == []
    assert (driver.state(), driver.row()["wanted"]) == (State.FAILED, "up")
    driver.exit()
    assert driver.spawns() == ["m"]


def test_messages_of_an_abandoned_worker_are_ignored() -> None:
    driver = stuck()
    for say in (Driver.hello, Driver.ready, Driver.broke, Driver.beat):
        say(driver)
        assert (driver.actions, driver.state()) == ([], State.FAILED)


def test_late_exit_accuses_once() -> None:
    driver = in_state(State.READY)
    driver.beat(step=0)
    driver.pass_time(2.0)
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 0.1)
    before = driver.row()["suspects"]
    driver.exit(signal="SIGSEGV")
    assert driver.row()["suspects"] == before
