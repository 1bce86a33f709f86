"""What follows an exit that nobody asked for, and how a shutdown ends all that lives."""

from __future__ import annotations

from mlxsup.protocol.client_messages import Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import Exit, RowDelta, Step
from mlxsup.supervisor.core.actions import Finish, WorkerSignal
from mlxsup.supervisor.core.lifecycle.life import KILL_LIMIT_S

from support.core.driver import RESTART, Driver, entry
from support.core.states import in_state

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


def test_a_worker_is_signalled_by_the_names_that_the_system_has() -> None:
    names = ["SIGUSR1", "SIGTERM", "SIGKILL"]
    assert [one.value for one in (WorkerSignal.DUMP, WorkerSignal.TERM, WorkerSignal.KILL)] == names


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
