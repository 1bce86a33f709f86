"""Stalls are found by the step counter, whoever holds the interpreter; honest work never is."""

from __future__ import annotations

import pytest

from mlxsup.protocol.states import State, WorkerPhase
from mlxsup.protocol.worker_messages import Step
from mlxsup.supervisor.core.actions import LookAtWorker, WorkerSignal

from support.beats import LIMIT_S, beats, seen_running, serving
from support.core_driver import Driver, entry
from support.core_states import in_state


@pytest.mark.parametrize("phase", [WorkerPhase.PREFILL, WorkerPhase.DECODE])
def test_a_step_that_does_not_end_is_found_dumped_and_killed_F5_P6(phase: WorkerPhase) -> None:
    driver = serving()
    start = driver.now
    assert beats(driver, 9, phase=phase) == []
    assert beats(driver, 3, phase=phase, phase_s=9.0)[:1] == [WorkerSignal.DUMP]
    assert driver.now - start <= LIMIT_S + 1.0
    driver.pass_time(0.6)
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit()
    assert driver.row()["last_exit"]["reason"] == "stall"
    assert "did not end" in driver.row()["last_exit"]["detail"]
    assert driver.row()["suspects"] == 1, "our own kill accuses"
    driver.come_up()
    assert driver.dispatched() == [1]


def test_a_predicted_long_step_is_given_four_times_its_prediction_P7() -> None:
    driver = serving()
    assert beats(driver, 49, phase=WorkerPhase.PREFILL, predicted_s=10.0) == []
    assert driver.state() is State.READY
    assert beats(driver, 3, phase=WorkerPhase.PREFILL, predicted_s=10.0) != []


def test_long_honest_work_in_many_steps_is_never_killed_P7() -> None:
    driver = serving()
    for step in range(1, 200):
        beats(driver, 9, phase=WorkerPhase.PREFILL, step=step - 1)
        driver.worker(Step(step=step))
        assert driver.state() is State.READY, step


def test_a_stale_beat_does_not_make_the_next_step_look_long() -> None:
    driver = serving()
    beats(driver, 9, phase=WorkerPhase.DECODE)
    driver.worker(Step(step=1))
    driver.beat(WorkerPhase.DECODE, step=0, phase_s=9.5)
    driver.pass_time(2.0)
    driver.beat(WorkerPhase.IDLE, step=1)
    assert beats(driver, 7, phase=WorkerPhase.IDLE, step=1) == []
    assert driver.state() is State.READY


def test_a_beat_from_the_load_says_nothing_of_a_worker_that_is_ready() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    driver.beat(WorkerPhase.LOADING, phase_s=3.0)
    assert (driver.row()["phase"], driver.row()["phase_s"]) == ("loading", 3.0)
    driver.ready()
    assert (driver.row()["phase"], driver.row()["phase_s"]) == (None, None)
    driver.beat(WorkerPhase.LOADING, phase_s=4.0)  # sent before, on the other socket
    assert driver.row()["phase"] is None
    driver.beat(WorkerPhase.IDLE)
    assert driver.row()["phase"] == "idle"


def test_a_pause_of_the_whole_machine_makes_no_step_long_P7() -> None:
    driver = serving()
    driver.pass_time(1.0)
    driver.beat(WorkerPhase.DECODE, step=1, phase_s=61.0)
    assert driver.state() is State.READY, "the supervisor's own clock stood still meanwhile"
    assert beats(driver, 8, phase=WorkerPhase.DECODE, step=1, phase_s=61.0) == []


def test_silence_with_the_interpreter_held_is_found_F6_P6() -> None:
    driver = serving()
    driver.beat(WorkerPhase.DECODE)
    start, looks = driver.now, 0
    while driver.state() is State.READY:
        driver.pass_time(0.25)
        looks += len(driver.of(LookAtWorker))
        if driver.of(LookAtWorker):
            driver.seen(is_stopped=False)
        assert driver.now - start <= LIMIT_S + 2.5
    assert driver.signals() == [WorkerSignal.DUMP]
    assert looks > 1
    driver.exit()
    assert driver.row()["suspects"] == 1


def test_a_template_that_holds_the_interpreter_is_found_though_no_step_is_known_of() -> None:
    driver = serving()
    for _ in range(80):
        driver.pass_time(0.25)
        if driver.of(LookAtWorker):
            driver.seen(is_stopped=False)
    assert driver.state() is State.STOPPING


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.DRAINING])
def test_a_stopped_process_is_found_killed_and_accuses_nobody_F7_P5(state: State) -> None:
    driver = serving()
    if state is State.LOADING:
        driver.restart(now=True)
        driver.exit(code=0)
        driver.spawned()
        driver.hello()
    elif state is State.DRAINING:
        driver.restart()
    driver.beat(WorkerPhase.DECODE)
    start = driver.now
    while driver.state() is state:
        driver.pass_time(0.25)
        if driver.of(LookAtWorker):
            driver.seen(is_stopped=True)
        assert driver.now - start <= 6.0
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit()
    assert driver.row()["suspects"] == 0
    assert driver.row()["last_exit"]["reason"] == "stall"


def test_stopped_right_after_a_beat_a_short_step_limit_accuses_nobody_F7() -> None:
    driver = serving(step_timeout_s=1.0)
    driver.pass_time(1.0)
    driver.beat(WorkerPhase.DECODE)
    while driver.state() is State.READY:
        driver.pass_time(0.25)
        if driver.of(LookAtWorker):
            driver.seen(is_stopped=True)
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit()
    assert (driver.row()["suspects"], driver.row()["last_exit"]["reason"]) == (0, "stall")


def test_a_late_beat_alone_kills_nobody_P5_P7() -> None:
    driver = serving(step_timeout_s=60.0)
    for _ in range(12):
        driver.pass_time(4.5)
        driver.seen(is_stopped=False)
        driver.beat(WorkerPhase.IDLE)
        assert driver.state() is State.READY


def test_a_look_that_crosses_the_end_of_a_process_means_nothing_F7() -> None:
    driver = in_state(State.STOPPING)
    for _ in range(2):
        driver.seen(is_stopped=True)
    assert driver.state() is State.STOPPING
    assert driver.actions == []


def test_a_process_that_was_seen_stopped_once_and_goes_on_is_left_alone() -> None:
    driver = serving()
    driver.pass_time(3.1)
    driver.seen(is_stopped=True)
    driver.beat(WorkerPhase.DECODE)
    driver.pass_time(3.1)
    driver.seen(is_stopped=True)
    driver.pass_time(0.2)
    driver.seen(is_stopped=False)
    assert driver.state() is State.READY


def test_nobody_is_killed_for_silence_before_its_process_was_looked_at() -> None:
    driver = serving()
    driver.beat(WorkerPhase.DECODE)
    driver.pass_time(300.0)
    assert driver.state() is State.READY
    driver.seen(is_stopped=False)
    assert driver.state() is State.STOPPING


GIB = 2**30


def silent_growth(driver: Driver, gib_per_s: float, seconds: int) -> None:
    """No beat comes while each sample, one a second, shows the process larger."""
    for second in range(1, seconds + 1):
        driver.pass_time(1.0)
        seen_running(driver)
        driver.sample(int((10 + second * gib_per_s) * GIB))
        seen_running(driver)
        if driver.state() is State.STOPPING:
            break


def test_a_silent_worker_that_grows_is_killed_long_before_its_time_is_up_P6() -> None:
    driver = serving(step_timeout_s=30.0)
    driver.sample(10 * GIB)
    start = driver.now
    silent_growth(driver, 1.5, 30)
    assert driver.state() is State.STOPPING
    assert driver.now - start <= 2.5
    driver.pass_time(0.6)
    driver.exit()
    assert driver.row()["suspects"] == 1
    assert "while the process grew by 3.00 GiB" in driver.row()["last_exit"]["detail"]


def test_slow_growth_in_silence_is_found_once_it_is_too_much() -> None:
    driver = serving(step_timeout_s=30.0)
    start = driver.now
    silent_growth(driver, 0.3, 30)
    assert driver.state() is State.STOPPING
    assert 4.0 <= driver.now - start <= 6.0


def test_a_worker_that_grows_and_beats_is_honest_P7() -> None:
    driver = serving(step_timeout_s=30.0)
    for second in range(20):
        driver.pass_time(1.0)
        driver.sample((10 + 3 * second) * GIB)
        seen_running(driver)
        driver.pass_time(0.4)
        driver.beat(WorkerPhase.PREFILL, phase_s=1.4 * second)
    assert driver.state() is State.READY


def test_what_it_grew_by_before_its_latest_sign_of_life_says_nothing_P7() -> None:
    driver = serving(step_timeout_s=30.0)
    driver.sample(10 * GIB)
    driver.pass_time(1.4)
    driver.beat(WorkerPhase.PREFILL, phase_s=1.4)
    for _ in range(10):
        driver.pass_time(1.0)
        driver.sample(20 * GIB)
        seen_running(driver)
    assert driver.state() is State.READY


def test_a_beat_that_arrives_during_the_look_ends_the_suspicion_P7() -> None:
    driver = serving(step_timeout_s=30.0)
    driver.sample(10 * GIB)
    driver.pass_time(2.0)
    driver.sample(20 * GIB)
    assert driver.of(LookAtWorker)
    driver.beat(WorkerPhase.PREFILL, phase_s=2.0)
    driver.seen(is_stopped=False)
    assert driver.state() is State.READY


def test_a_load_that_grows_in_silence_has_its_own_limits_P7() -> None:
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    silent_growth(driver, 4.0, 5)
    assert driver.state() is State.LOADING
