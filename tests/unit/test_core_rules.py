"""The rules under the state table: what is wanted, what follows an exit, who is answered what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlxsup.protocol.client_messages import Failed, Reload, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId, RequestKey
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, Exit, RowDelta, Step
from mlxsup.supervisor.core.actions import Finish, ReadConfiguration, WorkerSignal
from mlxsup.supervisor.core.events import Reloaded, ReloadRefused
from mlxsup.supervisor.core.lifecycle.life import KILL_LIMIT_S
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings
from support.core_driver import LAUNCH, RESTART, Driver, entry
from support.core_looks import BOB
from support.core_states import in_state

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
    assert driver.state() is State.READY, "what ran goes on running"


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


def test_unload_answers_what_waits_at_once_and_lets_what_runs_finish() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    driver.ask("waits")
    unload = driver.unload()
    assert driver.errors() == {"waits": ErrorCode.UNLOADED}
    driver.token(1, finish=FinishReason.STOP)
    assert driver.state() is State.DRAINING
    driver.token(2, finish=FinishReason.STOP)
    assert driver.told(Exit) == [Exit()]
    driver.exit(code=0)
    assert driver.replies() == [unload]
    assert (driver.state(), driver.row()["pid"]) == (State.STOPPED, None)


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


# ---------------------------------------------------------------- after the exit


def test_the_first_crash_is_answered_at_once_later_ones_back_off_F2() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.exit()
    assert driver.state() is State.LOADING
    delays = []
    for _ in range(2):
        driver.come_up()
        driver.exit()
        assert driver.state() is State.BACKOFF
        delays.append(driver.row()["retry_in_s"])
        driver.pass_time(10.0)
    assert 0.5 <= delays[0] <= 1.0
    assert 1.0 <= delays[1] <= 2.0


def test_beyond_the_window_it_fails_with_the_last_cause_P9() -> None:
    driver = in_state(State.FAILED)
    assert driver.generation() == RESTART.max_restarts + 1
    assert "SIGKILL" in driver.row()["cause"]
    driver.pass_time(10_000.0)
    assert driver.state() is State.FAILED


def test_ready_for_a_stable_time_starts_the_delay_afresh() -> None:
    driver = Driver()
    driver.load()
    for _ in range(2):
        driver.come_up()
        driver.pass_time(10.0)
        driver.exit()
        assert driver.state() is State.LOADING, "at once, since it had been stable"


@pytest.mark.parametrize("is_crash", [True, False])
def test_so_does_one_that_ended_with_an_unload(is_crash: bool) -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.exit()
    driver.come_up()
    driver.pass_time(10.0)
    driver.ask()
    driver.unload()
    assert driver.state() is State.DRAINING
    if not is_crash:
        driver.token(1, finish=FinishReason.STOP)
    driver.exit()
    assert driver.state() is State.STOPPED
    driver.ask("again")
    driver.spawned()
    driver.exit()
    assert driver.state() is State.LOADING, "at once, since it had been stable"


def test_old_crashes_leave_the_window() -> None:
    driver = Driver()
    driver.load()
    for _ in range(10):
        driver.come_up()
        driver.pass_time(60.0)
        driver.exit()
    assert driver.state() is State.LOADING


def test_a_permanent_code_before_ready_fails_at_the_first_attempt_B6() -> None:
    for code in (64, 65, 66, 69):
        driver = in_state(State.LOADING)
        driver.ask()
        driver.exit(code=code)
        assert driver.state() is State.FAILED
        assert driver.errors() == {"c1": ErrorCode.LOAD_FAILED, "r1": ErrorCode.LOAD_FAILED}
        assert driver.generation() == 1


def test_a_permanent_code_after_ready_is_transient() -> None:
    driver = in_state(State.READY)
    driver.exit(code=65)
    assert driver.state() is State.LOADING


def test_exit_0_unasked_is_a_crash() -> None:
    driver = in_state(State.READY)
    driver.exit(code=0)
    assert driver.row()["last_exit"]["reason"] == "crash"
    assert driver.row()["restarts"] == 1


def test_a_spawn_error_is_a_crash_while_loading() -> None:
    driver = Driver()
    load = driver.load()
    driver.ask()
    driver.spawn_failed()
    assert driver.errors() == {load: ErrorCode.LOAD_FAILED}
    assert driver.state() is State.LOADING
    driver.spawn_failed()
    assert driver.state() is State.BACKOFF
    assert driver.row()["last_exit"]["reason"] == "spawn_error"


def test_a_transient_crash_while_loading_keeps_the_queue_and_answers_the_caller_F8() -> None:
    driver = in_state(State.LOADING)
    driver.ask()
    driver.exit()
    assert driver.errors() == {"c1": ErrorCode.LOAD_FAILED}
    driver.come_up()
    assert driver.dispatched() == [1]


def test_failed_answers_the_whole_queue() -> None:
    driver = in_state(State.BACKOFF)
    driver.ask()
    driver.ask("r2")
    for _ in range(2):
        driver.pass_time(10.0)
        driver.spawned()
        driver.exit()
    assert driver.state() is State.FAILED
    assert driver.errors() == {"r1": ErrorCode.LOAD_FAILED, "r2": ErrorCode.LOAD_FAILED}


def test_frames_and_exits_of_an_earlier_generation_are_dropped_F9() -> None:
    driver = in_state(State.READY)
    driver.exit()
    driver.come_up()
    driver.ask("r2")
    late = Step(step=9, rows=[RowDelta(key=RequestKey(2), text="late", tokens=b"\0\0\0\0")])
    assert driver.worker(late, generation=1) == []
    assert driver.exit(generation=1) == []
    assert driver.state() is State.READY


# ---------------------------------------------------------------- shutdown


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
    assert len(driver.of(Finish)) == 1


def test_nothing_starts_again_after_a_shutdown() -> None:
    driver = in_state(State.BACKOFF)
    driver.signal()
    assert len(driver.of(Finish)) == 1
    driver.load()
    assert driver.errors() == {"c2": ErrorCode.SHUTTING_DOWN}
    driver.pass_time(1000.0)
    assert driver.state() is State.STOPPED


def test_what_runs_at_the_limit_of_a_shutdown_ends_with_shutting_down_E1() -> None:
    driver = in_state(State.READY)
    driver.signal()
    driver.pass_time(5.1)
    assert driver.errors() == {"r1": ErrorCode.SHUTTING_DOWN}


def test_a_second_signal_ends_at_once() -> None:
    driver = in_state(State.READY)
    driver.signal()
    driver.signal(is_immediate=True)
    assert driver.errors() == {"r1": ErrorCode.SHUTTING_DOWN}
    assert driver.told(Exit) == [Exit()]
    driver.signal(is_immediate=True)
    assert driver.signals() == [WorkerSignal.TERM]
    driver.signal(is_immediate=True)
    assert driver.signals() == [WorkerSignal.KILL]


def test_stop_now_asks_gracefully_first_E5() -> None:
    driver = in_state(State.READY)
    driver.stop(now=True)
    [reply] = driver.sent(Reply)
    assert reply.value == {
        "pids": [77],
        "supervisor_pid": 1,
        "drain_timeout_s": 0.0,
        "end_limit_s": 2 * 2.0 + KILL_LIMIT_S,
    }
    assert (driver.told(Exit), driver.signals()) == ([Exit()], [])
    driver = in_state(State.LOADING)
    driver.stop(now=True)
    assert driver.signals() == [WorkerSignal.TERM]


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


def test_the_cause_is_what_the_fault_handler_called_it_not_its_last_line() -> None:
    driver = in_state(State.READY)
    lines = ("2026-01-01T00:00:00Z INFO started", "Fatal Python error: Segmentation fault", "")
    more = ("Current thread 0x1 (most recent call first):", "Extension modules: zmq (total: 1)")
    driver.exit(signal="SIGSEGV", last_lines=(*lines, *more))
    assert driver.row()["last_exit"]["detail"] == "Fatal Python error: Segmentation fault"


def test_routine_logs_are_no_cause() -> None:
    driver = in_state(State.READY)
    driver.exit(
        last_lines=(
            "2026-01-01T00:00:00.1Z WARNING a prompt could not be prepared key=3",
            "Current thread 0x00007f0a (most recent call first):",
            '  File "<frozen runpy>", line 198 in _run_module_as_main',
        )
    )
    assert driver.row()["last_exit"]["detail"] == ""
    driver = in_state(State.READY)
    driver.exit(last_lines=("2026-01-01T00:00:00.1Z INFO model ready model=m",))
    assert driver.row()["last_exit"]["detail"] == ""


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
    }  # fmt: skip


def test_a_refused_reload_changes_nothing_and_says_why_P20() -> None:
    driver = in_state(State.READY)
    driver.say(Reload(id=RequestId("x")))
    [read] = driver.of(ReadConfiguration)
    driver.do(ReloadRefused(now=driver.now, problems=("line 3",), caller=read.caller))
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["detail"]) == ("x", {"problems": ["line 3"]})
    assert driver.state() is State.READY


def test_a_reload_meets_a_shutdown() -> None:
    driver = in_state(State.READY)
    driver.say(Reload(id=RequestId("x")))
    [read] = driver.of(ReadConfiguration)
    driver.signal()
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(), caller=read.caller))
    assert driver.errors() == {"x": ErrorCode.SHUTTING_DOWN}
    driver.say(Reload(id=RequestId("y")))
    assert driver.errors() == {"y": ErrorCode.SHUTTING_DOWN}
