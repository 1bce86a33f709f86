"""A worker that lives and has lost its connection, a row or its owner thread is replaced (P23)."""

from __future__ import annotations

import pytest

from mlxsup.protocol.states import FinishReason, State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, Step
from mlxsup.supervisor.core.actions import LookAtWorker, WorkerSignal
from mlxsup.supervisor.core.health.watchdog import (
    RECHECK_S,
    SILENCE_S,
    SLACK_S,
    UNLINKED_S,
    Alarm,
    Watch,
)

from support.beats import LIMIT_S, beats, seen_running, serving
from support.core_driver import Driver, entry
from support.core_states import WITH_PROCESS, in_state

# ---------------------------------------------------------------- its connection


def replaced_by_a_sound_one(driver: Driver) -> None:
    """The process dies of our signal: nobody is accused, and what ran is dispatched again."""
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit()
    assert driver.row()["last_exit"]["reason"] == "crash"
    assert driver.row()["suspects"] == 0
    driver.come_up()
    assert driver.dispatched() == [1]


@pytest.mark.parametrize("state", WITH_PROCESS)
def test_a_process_that_outlives_its_connection_is_killed_P23(state: State) -> None:
    driver = in_state(state)
    driver.unlinked()
    driver.pass_time(UNLINKED_S - 0.1)
    assert driver.state() is state, "it may be about to die"
    driver.unlinked()
    driver.pass_time(0.2)
    assert (driver.state(), driver.signals()) == (State.STOPPING, [WorkerSignal.KILL])
    driver.exit()
    assert "connection" in driver.row()["last_exit"]["detail"]


def test_beats_do_not_save_a_process_without_a_connection_P23() -> None:
    driver = serving()
    driver.unlinked()
    assert beats(driver, 5, phase=WorkerPhase.IDLE) == [WorkerSignal.KILL]
    driver.actions = []
    driver.exit()
    driver.come_up()
    assert driver.dispatched() == [1]


def test_a_worker_that_dies_soon_after_its_connection_is_judged_by_its_exit() -> None:
    driver = serving()
    driver.unlinked()
    driver.pass_time(UNLINKED_S / 2)
    driver.exit(code=70)
    assert (driver.row()["suspects"], driver.row()["last_exit"]["code"]) == (1, 70)


@pytest.mark.parametrize(
    ("code", "signal", "suspects"),
    [(70, "", 1), (None, "SIGSEGV", 1), (None, "SIGTERM", 0), (71, "", 0), (None, "SIGKILL", 0)],
)
def test_a_death_that_our_kill_crosses_keeps_its_own_verdict(
    code: int | None, signal: str, suspects: int
) -> None:
    """The kernel frees its memory for long: the signal changes nothing of how it ended."""
    driver = serving()
    driver.unlinked()
    driver.pass_time(9.0)
    assert driver.state() is State.STOPPING
    driver.exit(code=code, signal=signal)
    assert driver.row()["suspects"] == suspects
    is_ours = signal == "SIGKILL"
    assert ("connection" in driver.row()["last_exit"]["detail"]) is is_ours


def test_a_stopped_process_that_died_before_our_kill_keeps_its_own_verdict() -> None:
    driver = serving()
    while driver.state() is State.READY:
        driver.pass_time(0.25)
        if driver.of(LookAtWorker):
            driver.seen(is_stopped=True)
    driver.exit(signal="SIGSEGV")
    assert (driver.row()["suspects"], driver.row()["last_exit"]["reason"]) == (1, "crash")


def test_a_death_that_a_restart_crosses_too_is_asked_for() -> None:
    driver = serving()
    driver.unlinked()
    driver.pass_time(UNLINKED_S)
    driver.restart()
    driver.exit(code=70)
    assert (driver.state(), driver.row()["suspects"]) == (State.LOADING, 0)
    assert driver.row()["restarts"] == 0, "it comes up with a clean window"


def test_out_of_memory_and_a_bad_model_are_judged_so_though_our_kill_crosses_them() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.come_up()
    driver.serve("a", "b")
    driver.unlinked()
    driver.pass_time(9.0)
    driver.exit(code=75)
    assert driver.model().row_limit == 1

    driver = in_state(State.LOADING)
    driver.unlinked()
    driver.pass_time(9.0)
    driver.exit(code=65)
    assert (driver.state(), driver.row()["last_exit"]["reason"]) == (State.FAILED, "load_error")


def test_nothing_is_dispatched_to_a_worker_whose_connection_has_ended() -> None:
    driver = in_state(State.READY)
    driver.unlinked()
    driver.ask("r2")
    assert driver.dispatched() == []
    driver.pass_time(9.0)
    driver.exit()
    driver.come_up()
    assert driver.dispatched() == [1, 2]


# ---------------------------------------------------------------- its owner thread


@pytest.mark.parametrize("phase", [WorkerPhase.ROWS, WorkerPhase.CLOSING])
def test_work_outside_a_step_that_does_not_end_is_a_stall_P23_F5(phase: WorkerPhase) -> None:
    driver = serving()
    start = driver.now
    assert beats(driver, 9, phase=phase) == []
    assert beats(driver, 3, phase=phase, phase_s=9.0)[:1] == [WorkerSignal.DUMP]
    assert driver.now - start <= LIMIT_S + 1.0
    driver.pass_time(0.6)
    driver.exit()
    assert driver.row()["last_exit"]["reason"] == "stall"
    assert driver.row()["suspects"] == 1, "our own kill accuses"


def test_long_work_in_pieces_outside_a_step_is_honest_P7() -> None:
    """A replay of 100,000 tokens says every thousand that it advances."""
    driver = serving()
    for _ in range(100):
        driver.pass_time(1.0)
        driver.beat(WorkerPhase.ROWS, phase_s=0.7)
        assert seen_running(driver) == []
    assert driver.state() is State.READY


def test_a_worker_is_not_judged_by_what_it_did_before_READY() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    driver.ready()
    driver.ask()
    driver.beat(WorkerPhase.LOADING, phase_s=500.0)
    assert beats(driver, 5, phase=WorkerPhase.DECODE) == []
    assert driver.state() is State.READY


# ---------------------------------------------------------------- its rows


def test_a_request_that_the_worker_does_not_hold_was_lost_P23() -> None:
    driver = serving()
    driver.beat(WorkerPhase.IDLE, requests=1)
    assert driver.state() is State.READY
    driver.beat(WorkerPhase.IDLE, requests=0)
    replaced_by_a_sound_one(driver)


@pytest.mark.parametrize("phase", [WorkerPhase.IDLE, WorkerPhase.DECODE, WorkerPhase.PREFILL])
def test_one_of_several_that_was_lost_is_noticed_while_the_others_run_P23(
    phase: WorkerPhase,
) -> None:
    driver = serving()
    driver.ask("r2")
    driver.beat(phase, requests=1)
    assert driver.signals() == [WorkerSignal.KILL]


def test_what_crosses_a_beat_on_its_way_is_not_lost_P7() -> None:
    driver = in_state(State.READY)
    watch = driver.model().watch
    assert watch is not None
    heard, told = watch.heard, watch.told
    driver.ask("r2")  # a beat that counted before the worker took this one
    driver.worker(
        Heartbeat(
            step=0, phase=WorkerPhase.DECODE, phase_s=0.0, requests=1, sent=heard, received=told
        )
    )
    assert driver.state() is State.READY
    # The worker has ended r1, and its beat overtakes the step that says so.
    ended = Heartbeat(
        step=1,
        phase=WorkerPhase.IDLE,
        phase_s=0.0,
        requests=1,
        sent=heard + 1,
        received=told + 1,
    )
    driver.worker(ended)
    assert driver.state() is State.READY
    driver.token(1, finish=FinishReason.STOP)
    driver.worker(ended)
    assert driver.state() is State.READY


def test_a_lost_row_that_was_leaving_holds_no_drain_open_P23() -> None:
    driver = in_state(State.READY)
    driver.cancel()
    driver.unload()
    assert driver.state() is State.DRAINING
    driver.beat(WorkerPhase.IDLE, requests=0)
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit()
    assert driver.state() is State.STOPPED


def test_a_worker_that_waits_though_it_was_given_a_request_is_replaced_P23() -> None:
    """Something was lost on the way, so that the counts never agree."""
    driver = serving()
    start = driver.now
    beats(driver, 12, phase=WorkerPhase.IDLE)
    assert LIMIT_S <= driver.now - start <= LIMIT_S + 1.0
    replaced_by_a_sound_one_after_beats(driver)


def replaced_by_a_sound_one_after_beats(driver: Driver) -> None:
    assert driver.state() is State.STOPPING
    driver.exit()
    assert (driver.row()["suspects"], driver.row()["last_exit"]["reason"]) == (0, "crash")
    assert "nothing moved" in driver.row()["last_exit"]["detail"]


def test_the_preparation_of_a_prompt_has_the_limit_of_the_text_P7_P23() -> None:
    driver = serving()
    limit_s = int(11 * LIMIT_S)
    assert beats(driver, limit_s - 1, phase=WorkerPhase.IDLE, preparing=1) == []
    beats(driver, 3, phase=WorkerPhase.IDLE, preparing=1, phase_s=limit_s - 1)
    replaced_by_a_sound_one_after_beats(driver)


def test_a_worker_that_waits_with_nothing_to_do_is_left_alone_P7() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.come_up()
    for second in range(300):
        driver.pass_time(1.0)
        driver.beat(WorkerPhase.IDLE, phase_s=second, requests=0)
    driver.ask()
    driver.beat(WorkerPhase.IDLE, phase_s=300.0)  # counted before the request came
    assert driver.state() is State.READY


# ---------------------------------------------------------------- steps without beats


def test_a_worker_that_steps_without_beats_is_alive_P7() -> None:
    driver = serving()
    looks = 0
    for step in range(1, 1001):
        driver.pass_time(0.1)
        looks += len(driver.of(LookAtWorker))
        driver.worker(Step(step=step))
    assert (driver.state(), looks) == (State.READY, 0)


def test_a_step_that_is_stuck_without_beats_is_found_P6() -> None:
    driver = serving()
    for step in range(1, 100):
        driver.pass_time(0.1)
        driver.worker(Step(step=step))
    start = driver.now
    while driver.state() is State.READY:
        driver.pass_time(0.25)
        if driver.of(LookAtWorker):
            driver.seen(is_stopped=False)
        assert driver.now - start <= LIMIT_S + SLACK_S + 1.0
    assert driver.signals() == [WorkerSignal.DUMP]


def test_a_worker_that_has_said_idle_before_its_work_is_stuck_and_does_not_wait_P6_P10() -> None:
    """It holds the interpreter in its first step: its last beat is older than its work, and no
    later one has said that it waits. That it was stuck accuses what it held."""
    driver = serving(step_timeout_s=1.0)
    driver.pass_time(1.5)
    driver.worker(Step(step=1))
    start = driver.now
    while driver.state() is State.READY:
        driver.pass_time(0.25)
        if driver.of(LookAtWorker):
            driver.seen(is_stopped=False)
        assert driver.now - start <= SILENCE_S + 1.0
    assert driver.signals() == [WorkerSignal.DUMP]
    driver.exit()
    assert driver.row()["last_exit"]["reason"] == "stall"
    assert driver.row()["suspects"] == 1


# ---------------------------------------------------------------- what a sign means


def test_what_is_new_began_after_the_sign_before_whatever_the_workers_clock_says_P7() -> None:
    watch = Watch.over(0.0)
    watch.beat(Heartbeat(step=0, phase=WorkerPhase.IDLE, phase_s=100.0), 0, 100.0)
    watch.beat(Heartbeat(step=0, phase=WorkerPhase.DECODE, phase_s=100.0), 1, 101.0)
    assert watch.stuck_at(LIMIT_S) == 100.0 + LIMIT_S


def test_a_beat_of_a_step_that_has_ended_tells_of_no_work_P7() -> None:
    watch = Watch.over(0.0)
    watch.stepped(5, 10.0)
    watch.beat(Heartbeat(step=4, phase=WorkerPhase.DECODE, phase_s=9.0), 1, 11.0)
    assert watch.stuck_at(LIMIT_S) is None


def test_whatever_a_worker_says_or_does_moves_something_P23() -> None:
    watch = Watch.over(0.0)
    watch.beat(Heartbeat(step=0, phase=WorkerPhase.IDLE, phase_s=0.0), 1, 1.0)
    watch.said(20.0)
    assert watch.idle_for_s(25.0) == 5.0
    watch.beat(Heartbeat(step=0, phase=WorkerPhase.ROWS, phase_s=0.0), 1, 30.0)
    watch.beat(Heartbeat(step=0, phase=WorkerPhase.IDLE, phase_s=0.0), 1, 31.0)
    assert watch.idle_for_s(35.0) == 4.0


def test_silence_is_as_long_as_a_step_and_a_late_beat_and_never_shorter_than_five_beats_P7() -> (
    None
):
    watch = Watch.over(0.0)
    assert watch.silent_at(LIMIT_S) == LIMIT_S + SLACK_S
    assert watch.silent_at(0.1) == SILENCE_S


def test_a_look_of_long_ago_does_not_say_that_a_silent_process_runs_F7() -> None:
    watch = Watch.over(0.0)
    watch.looked(is_stopped=False, now=LIMIT_S + SLACK_S - RECHECK_S)
    assert watch.judge(LIMIT_S + SLACK_S, LIMIT_S, 1) is Alarm.LOOK
    watch.looked(is_stopped=False, now=LIMIT_S + SLACK_S)
    assert watch.judge(LIMIT_S + SLACK_S, LIMIT_S, 1) is Alarm.STUCK
