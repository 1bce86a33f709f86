"""Test exits: reasons, causes, restart policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.states import State
from mlxsup.protocol.worker_messages import Dying
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.events import Exited, SpawnFailed
from mlxsup.supervisor.core.health.blame import Evidence
from mlxsup.supervisor.core.health.death_cause import Cause, classify
from mlxsup.supervisor.core.lifecycle.on_exit import weigh
from mlxsup.supervisor.core.lifecycle.restart_policy import NOW, GiveUp, RestartPolicy
from mlxsup.supervisor.core.lifecycle.triggers import Died

from support.core.driver import RESTART, Driver, entry
from support.core.states import in_state
from support.core.suspects import HOUR_S, crash, engine_of

# Restart policy (F2)

PATIENT = replace(RESTART, max_restarts=20, window_s=10_000.0)


class Longest(random.Random):
    """Draws the upper end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


def delays(policy: RestartPolicy, count: int, *, every_s: float = 1.0) -> list[float]:
    found = [policy.after_crash(number * every_s) for number in range(count)]
    assert not any(isinstance(delay, GiveUp) for delay in found)
    return [float(delay) for delay in found if not isinstance(delay, GiveUp)]


def test_delays_double_from_the_first_to_the_most_behind_one_restart_at_once_F2() -> None:
    policy = RestartPolicy(settings=PATIENT, random=Longest())
    assert delays(policy, 6) == [NOW, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_random_half_is_taken_off_so_that_models_do_not_come_back_together_F2() -> None:
    longest = delays(RestartPolicy(settings=PATIENT, random=Longest()), 6)
    drawn = [
        delays(RestartPolicy(settings=PATIENT, random=random.Random(seed)), 6) for seed in range(20)
    ]
    for one in drawn:
        assert all(most / 2 <= delay <= most for delay, most in zip(one, longest, strict=True))
    assert len({one[1] for one in drawn}) == len(drawn), "all different"
    shares = [one[1] / longest[1] for one in drawn]
    assert min(shares) < 0.6
    assert max(shares) > 0.9


def test_a_stable_time_starts_the_delay_afresh_and_forgives_no_crash_F2() -> None:
    policy = RestartPolicy(settings=replace(PATIENT, max_restarts=3), random=Longest())
    assert delays(policy, 2) == [NOW, 1.0]
    policy.was_stable()
    assert policy.after_crash(2.0) == NOW
    policy.was_stable()
    assert policy.after_crash(3.0) == GiveUp(reason="crashed 4 times within 10000 s")


def test_crashes_count_for_the_window_and_no_longer_F2() -> None:
    policy = RestartPolicy(settings=replace(RESTART, max_restarts=2), random=Longest())
    assert RESTART.window_s == 100.0
    assert [policy.after_crash(at) for at in (0.0, 50.0)] == [NOW, 1.0]
    assert policy.after_crash(100.0) == 2.0, "the first is a whole window ago"
    assert isinstance(policy.after_crash(149.0), GiveUp)


@pytest.mark.parametrize("how", ["load", "restart", "restart now", "a request"])
def test_commands_clear_the_restart_window_and_requests_do_not_F2(
    how: str,
) -> None:
    driver = Driver()
    driver.load()
    starts = 0
    while driver.state() is not State.FAILED:
        driver.come_up()
        starts += 1
        driver.exit()
        driver.pass_time(4.0)
    assert starts == RESTART.max_restarts + 1
    asked: dict[str, Callable[[], object]] = {
        "load": driver.load,
        "restart": driver.restart,
        "restart now": lambda: driver.restart(now=True),
        "a request": driver.ask,
    }
    asked[how]()
    if how == "a request":
        assert driver.state() is State.FAILED
        assert driver.errors() == {"r1": "model_failed"}
        return
    driver.come_up()
    driver.exit()
    assert driver.state() is State.LOADING, "the first crash again: at once"


# Exits

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
def test_exit_reason_evidence_and_next_state(end: tuple[State, int | None, str]) -> None:
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
def test_last_exit_names_the_fault(name: str) -> None:
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


def test_dying_message_counts_more_than_the_last_line() -> None:
    driver = in_state(State.READY)
    driver.worker(Dying(code=70, message="MemoryError: no room"))
    driver.exit(code=70, last_lines=("something else",))
    last = driver.row()["last_exit"]
    assert (last["detail"], last["cause"]) == ("MemoryError: no room", "out of memory")
    driver.come_up()
    driver.exit(code=70, last_lines=("x" * 500, "", "   "))
    assert driver.row()["last_exit"]["detail"] == "x" * 200


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


def test_failed_model_names_its_crashes_and_the_last_cause() -> None:
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


def test_stall_during_a_load_accuses_no_request() -> None:
    driver = in_state(State.LOADING)
    stalls(driver)
    killed = Died(exit_code=None, signal_name="SIGKILL", said="")
    assert weigh(driver.model().life, killed, is_over_memory=False) is Evidence.NONE


# Causes of death


@pytest.mark.parametrize(
    ("code", "line", "cause"),
    [
        (75, "", Cause.OUT_OF_MEMORY),
        (72, "", Cause.GPU_FAULT_ELSEWHERE),
        (69, "", Cause.NO_DEVICE),
        (66, "", Cause.MODEL_MISSING),
        (65, "", Cause.BAD_MODEL),
        (70, "RuntimeError: There is no Stream(gpu, 3) in current thread.", Cause.STREAM_ERROR),
        (None, "Insufficient Memory (00000008:kIOGPU…ErrorOutOfMemory)", Cause.OUT_OF_MEMORY),
        (None, "terminate called after throwing 'std::bad_alloc'", Cause.OUT_OF_MEMORY),
        (None, "Caused GPU Timeout Error (00000002:kIOGPU…ErrorTimeout)", Cause.GPU_TIMEOUT),
        (None, "cudaErrorMemoryAllocation", Cause.OUT_OF_MEMORY),
        (70, "FileNotFoundError: [Errno 2] tokenizer.json", Cause.MODEL_MISSING),
        (70, "ValueError: something else", Cause.UNKNOWN),
        (None, "", Cause.UNKNOWN),
    ],
)
def test_causes_are_classified_by_exit_and_last_lines(
    code: int | None, line: str, cause: Cause
) -> None:
    assert classify(code, ["started", line, "worker exits"]) is cause


def test_crash_events_and_the_failure_carry_signal_class_and_last_line() -> None:
    driver = in_state(State.READY)
    for _ in range(4):
        driver.do(
            Exited(
                now=driver.now,
                model=ModelName("m"),
                generation=driver.generation(),
                exit_code=None,
                signal=6,
                signal_name="SIGABRT",
                last_lines=("libc++abi: GPU Timeout Error",),
            )
        )
        if driver.state() is not State.FAILED:
            driver.pass_time(6.0)
            driver.spawned()
    assert driver.state() is State.FAILED
    assert "SIGABRT, GPU time-out: libc++abi: GPU Timeout Error" in driver.row()["cause"]
    assert driver.row()["last_exit"]["cause"] == "GPU time-out"


# Windows of crashes and quarantines


def test_a_model_that_dies_just_after_each_stable_time_ends_as_failed_P9() -> None:
    """Being stable shortens the delay; the crashes still count, or it would restart for ever."""
    driver = Driver()
    driver.load()
    starts = 0
    while driver.state() is not State.FAILED and starts < 20:
        driver.come_up()
        starts += 1
        driver.pass_time(RESTART.stable_s + 1.0)
        driver.exit()
        assert driver.row()["retry_in_s"] is None, "each is the first since a stable time"
    assert starts == RESTART.max_restarts + 1
    assert driver.row()["cause"].startswith("crashed 4 times within 100 s")


def test_a_model_that_dies_seldom_is_restarted_for_ever_F2() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    for _ in range(3 * RESTART.max_restarts):
        driver.pass_time(RESTART.window_s / RESTART.max_restarts + 1.0)
        driver.exit()
        assert driver.state() is State.LOADING
        driver.come_up()


def test_a_status_of_an_idle_model_shows_no_quarantine_that_is_over() -> None:
    driver = engine_of(1)
    driver.serve("poison")
    for _ in range(3):
        crash(driver)
    assert driver.row()["quarantined"] == 1
    driver.now += HOUR_S - 1.0
    assert driver.row()["quarantined"] == 1
    driver.now += 1.0
    assert driver.row()["quarantined"] == 0
