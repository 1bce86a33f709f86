"""What each end of a process is called, whom it accuses, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.states import State
from mlxsup.protocol.worker_messages import Dying
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.events import SpawnFailed
from mlxsup.supervisor.core.health.blame import Evidence
from mlxsup.supervisor.core.health.death_cause import Cause
from mlxsup.supervisor.core.lifecycle.on_exit import weigh
from mlxsup.supervisor.core.lifecycle.triggers import Died, GivenUp

from support.core_driver import RESTART, Driver, entry
from support.core_states import in_state

EXITS: dict[tuple[State, int | None, str], tuple[State, str, str]] = {
    (State.LOADING, 64, ""): (State.FAILED, "load_error", "none"),
    (State.LOADING, 65, ""): (State.FAILED, "load_error", "none"),
    (State.LOADING, 69, ""): (State.FAILED, "load_error", "none"),
    (State.LOADING, 0, ""): (State.LOADING, "crash", "none"),
    (State.LOADING, 70, ""): (State.LOADING, "crash", "none"),
    (State.LOADING, 75, ""): (State.LOADING, "crash", "none"),
    (State.LOADING, None, "SIGSEGV"): (State.LOADING, "crash", "none"),
    (State.READY, 0, ""): (State.LOADING, "crash", "none"),
    (State.READY, 65, ""): (State.LOADING, "crash", "none"),
    (State.READY, 70, ""): (State.LOADING, "crash", "accuses"),
    (State.READY, 73, ""): (State.LOADING, "crash", "accuses"),
    (State.READY, 76, ""): (State.LOADING, "crash", "accuses"),
    (State.READY, 75, ""): (State.LOADING, "crash", "out of memory"),
    (State.READY, None, "SIGABRT"): (State.LOADING, "crash", "accuses"),
    (State.READY, None, "SIGKILL"): (State.LOADING, "crash", "none"),
    (State.DRAINING, 70, ""): (State.STOPPED, "crash", "accuses"),
    (State.STOPPING, 0, ""): (State.STOPPED, "asked", "asked"),
    (State.STOPPING, None, "SIGSEGV"): (State.STOPPED, "asked", "asked"),
}


@pytest.mark.parametrize("end", EXITS, ids=str)
def test_what_an_exit_is_and_where_it_leads(end: tuple[State, int | None, str]) -> None:
    state, code, signal = end
    after, reason, evidence = EXITS[end]
    driver = in_state(state)
    life = driver.model().life
    died = Died(exit_code=code, signal_name=signal, said="")
    assert weigh(life, died, is_over_memory=False) is Evidence(evidence)
    driver.exit(code=code, signal=signal, last_lines=("why",), at=5.0)
    last = driver.row()["last_exit"]
    assert (driver.state(), last["reason"]) == (after, reason)
    assert (last["code"], last["signal"], last["detail"]) == (code, signal or None, "why")
    assert last["at"] == 5.0


def test_a_kill_is_out_of_memory_only_of_a_process_that_held_too_much() -> None:
    life = in_state(State.READY).model().life
    for signal, evidence in {"SIGKILL": Evidence.OUT_OF_MEMORY, "SIGTERM": Evidence.NONE}.items():
        died = Died(exit_code=None, signal_name=signal, said="")
        assert weigh(life, died, is_over_memory=True) is evidence


@pytest.mark.parametrize(
    ("died", "text"),
    [
        (Died(exit_code=70, signal_name="", said="boom"), "exit code 70: boom"),
        (Died(exit_code=None, signal_name="SIGKILL", said=""), "SIGKILL"),
        (
            Died(exit_code=75, signal_name="", said="full", cause=Cause.OUT_OF_MEMORY),
            "exit code 75, out of memory: full",
        ),
        (
            Died(exit_code=None, signal_name="", said="no fork", is_spawn_error=True),
            "no fork",
        ),
        (GivenUp(pid=9), "process 9 cannot be ended"),
    ],
)  # fmt: skip
def test_an_end_in_one_phrase(died: Died, text: str) -> None:
    assert died.text == text


# ---------------------------------------------------------------- ends that we caused


def stalls(driver: Driver) -> None:
    driver.pass_time(20.0)
    assert driver.signals() == [WorkerSignal.DUMP]


ENDINGS: dict[str, tuple[State, Callable[[Driver], object], str, str]] = {
    "garbage": (State.READY, Driver.broke, "crash", "garbage"),
    "another version": (
        State.READY,
        lambda d: d.hello(version="9.9.9"),
        "version",
        "mlxsup was upgraded to 9.9.9: restart the daemon",
    ),
    "a second hello": (State.READY, Driver.hello, "crash", "said HELLO after READY"),
    "a second ready": (State.READY, Driver.ready, "crash", "said READY twice"),
    "a load": (
        State.READY, lambda d: d.progress(0.5), "crash", "reported a load after READY",
    ),
    "a stalled load": (
        State.LOADING, stalls, "stall", "the load made no progress for 20 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_who_is_ended_for_a_fault_is_remembered_by_it(name: str) -> None:
    state, end, reason, detail = ENDINGS[name]
    driver = in_state(state)
    end(driver)
    assert driver.state() is State.STOPPING
    driver.exit(last_lines=("killed",))
    last = driver.row()["last_exit"]
    assert (last["reason"], last["detail"]) == (reason, detail)


def test_a_process_that_does_not_say_hello_is_killed_without_a_dump() -> None:
    driver = Driver()
    driver.load()
    driver.spawned()
    driver.pass_time(19.9)
    assert driver.signals() == []
    driver.pass_time(0.1)
    assert driver.signals() == [WorkerSignal.KILL]


def test_a_spawn_that_failed_is_named() -> None:
    driver = Driver()
    driver.load()
    driver.do(
        SpawnFailed(
            now=driver.now, model=ModelName("m"), generation=Generation(1), detail="no memory"
        )
    )
    last = driver.row()["last_exit"]
    assert (last["reason"], last["detail"]) == ("spawn_error", "could not be spawned: no memory")
    assert (last["code"], last["signal"], last["at"]) == (None, None, None)


def test_what_a_worker_said_of_its_end_counts_more_than_its_last_line() -> None:
    driver = in_state(State.READY)
    driver.worker(Dying(code=70, message="MemoryError: no room"))
    driver.exit(code=70, last_lines=("something else",))
    last = driver.row()["last_exit"]
    assert (last["detail"], last["cause"]) == ("MemoryError: no room", "out of memory")
    driver.come_up()
    driver.exit(code=70, last_lines=("x" * 500, "", "   "))
    assert driver.row()["last_exit"]["detail"] == "x" * 200


# ---------------------------------------------------------------- when it is tried again


def test_a_start_that_was_stable_ends_the_delays_and_one_just_short_of_it_does_not() -> None:
    for ready_s, after in ((RESTART.stable_s - 0.01, State.BACKOFF), (10.0, State.LOADING)):
        driver = in_state(State.READY)
        driver.exit()
        driver.come_up()
        driver.now += ready_s
        driver.exit()
        assert driver.state() is after, ready_s


@pytest.mark.parametrize("ready_s", [9.9, 10.0])
@pytest.mark.parametrize("how", ["drained", "killed"])
def test_the_time_of_a_drain_and_not_of_an_end_counts_as_ready(how: str, ready_s: float) -> None:
    driver = in_state(State.READY)
    driver.exit()
    driver.come_up()
    driver.now += ready_s - 2.0
    driver.unload()
    driver.now += 2.0
    if how == "killed":
        driver.broke()
        driver.now += 50.0
    driver.exit()
    driver.ask("again")
    driver.spawned()
    driver.exit()
    assert driver.state() is (State.LOADING if ready_s == 10.0 else State.BACKOFF)


def test_it_is_given_up_with_how_often_it_crashed_and_how_it_did_the_last_time() -> None:
    driver = Driver([entry(restart=replace(RESTART, max_restarts=1))])
    load = driver.load()
    driver.spawned()
    driver.exit(last_lines=("one",))
    failed = driver.failure_of(load)
    assert failed.error["message"] == "m could not be loaded: SIGKILL: one"
    assert failed.error["retryable"] is True, "it is tried again"
    load = driver.load()
    driver.spawned()
    driver.exit(last_lines=("two",))
    cause = "crashed 2 times within 100 s, the last time: SIGKILL: two"
    assert (driver.state(), driver.row()["cause"]) == (State.FAILED, cause)
    failed = driver.failure_of(load)
    assert failed.error["message"] == f"m could not be loaded: {cause}"
    assert failed.error["retryable"] is False


def test_every_end_is_counted_by_its_reason_and_the_class_of_its_cause() -> None:
    driver = in_state(State.READY)
    assert driver.row()["exits"] == []
    for code in (75, 70, 75):
        driver.exit(code=code)
        driver.pass_time(RESTART.backoff_max_s)
        driver.come_up()
    driver.unload()
    driver.exit(code=0)
    assert driver.row()["exits"] == [
        {"reason": "crash", "cause": "out of memory", "count": 2},
        {"reason": "crash", "cause": "unknown", "count": 1},
        {"reason": "asked", "cause": "unknown", "count": 1},
    ]
