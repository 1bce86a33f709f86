"""Test exits: reasons, causes, failed loads, restart policy; the tests play the worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import DeathCause, State
from mlxsup.protocol.text import last_words
from mlxsup.protocol.worker_messages import Dying
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.life import RestartPolicy
from mlxsup.supervisor.core.poison import Evidence
from mlxsup.supervisor.core.transitions import Ending
from mlxsup.supervisor.core.workers import classify, judge

from support.core.driver import RESTART, Driver, entry
from support.core.scripts import play
from support.core.states import in_state

# Restart policy (F2)

PATIENT = replace(RESTART, max_restarts=20, window_s=10_000.0)


class Longest(random.Random):
    """Draws the upper end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


def delays(policy: RestartPolicy, count: int) -> list[float]:
    found = [policy.after_crash(PATIENT, float(number)) for number in range(count)]
    return [delay for delay in found if delay is not None]


def test_delays_double_from_the_first_to_the_most_behind_one_restart_at_once_F2() -> None:
    longest = [0.0, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert delays(RestartPolicy(random=Longest()), 6) == longest
    drawn = [delays(RestartPolicy(random=random.Random(seed)), 6) for seed in range(20)]
    for one in drawn:
        assert all(most / 2 <= delay <= most for delay, most in zip(one, longest, strict=True))
    shares = [one[1] / longest[1] for one in drawn]
    assert len(set(shares)) == len(drawn), "models do not come back together"
    assert min(shares) < 0.6
    assert max(shares) > 0.9


def test_a_stable_time_starts_the_delay_afresh_and_forgives_no_crash_F2() -> None:
    settings, policy = replace(PATIENT, max_restarts=3), RestartPolicy(random=Longest())
    assert delays(policy, 2) == [0.0, 1.0]
    policy.was_stable()
    assert policy.after_crash(settings, 2.0) == 0.0
    policy.was_stable()
    assert (policy.after_crash(settings, 3.0), policy.crashes) == (None, 4)


def test_crashes_count_for_the_window_and_no_longer_F2() -> None:
    settings, policy = replace(RESTART, max_restarts=2), RestartPolicy(random=Longest())
    assert RESTART.window_s == 100.0
    assert [policy.after_crash(settings, at) for at in (0.0, 50.0)] == [0.0, 1.0]
    assert policy.after_crash(settings, 100.0) == 2.0, "the first is a whole window ago"
    assert policy.after_crash(settings, 149.0) is None


def test_backoff_ends_at_its_time() -> None:
    driver = in_state(State.BACKOFF)
    retry_in_s = driver.row()["retry_in_s"]
    assert 0.5 <= retry_in_s <= 1.0
    driver.pass_time(retry_in_s + 0.01)
    assert driver.state() is State.LOADING
    driver.exit()
    assert 1.0 <= driver.row()["retry_in_s"] <= 2.0


@pytest.mark.parametrize("how", ["load", "restart", "restart now", "a request"])
def test_commands_clear_the_restart_window_and_requests_do_not_F2(how: str) -> None:
    driver = in_state(State.FAILED)
    assert driver.generation() == RESTART.max_restarts + 1
    driver.pass_time(10_000.0)
    assert driver.state() is State.FAILED
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


SEVERAL = {
    "being stable shortens the delay, and the crashes still count P9": (
        "LOADING", 3 * "up; wait 11; exit -> LOADING & retry_in_s=None;"
        + "up; wait 11; exit -> FAILED; wait 10000 -> FAILED",
    ),
    "a model that dies seldom is restarted for ever F2": (
        "LOADING", 9 * "up; wait 35; exit -> LOADING;",
    ),
    "a failed load answers its callers and keeps its queue F8": (
        "LOADING", "ask; exit -> errors={c1: load_failed}; up -> dispatched=[1]",
    ),
    "a failed load for good answers all B6": (
        "LOADING", "ask; exit code=66 -> errors={c1: load_failed, r1: load_failed} & FAILED;"
        " -> generation=1",
    ),
    "a spawn error is a crash": (
        "STOPPED", "load; ask; spawn_failed -> errors={c1: load_failed} & LOADING;"
        " spawn_failed -> BACKOFF",
    ),
    "a process that does not say HELLO is killed without a dump": (
        "STOPPED", "load; spawned; wait 19.9 -> signals=[]; wait 0.1 -> signals=[KILL]",
    ),
}  # fmt: skip
"""In which state each begins, and its script."""


@pytest.mark.parametrize("rule", SEVERAL)
def test_rule_of_crashes(rule: str) -> None:
    state, script = SEVERAL[rule]
    play(in_state(State(state)), script)


@pytest.mark.parametrize(("ready_s", "state"), [(9.9, "BACKOFF"), (10.0, "LOADING")])
@pytest.mark.parametrize("killed", ["", "broke; now 50;"], ids=["drained", "killed"])
def test_the_time_of_a_drain_and_not_of_an_end_counts_as_ready(
    killed: str, ready_s: float, state: str
) -> None:
    play(
        in_state(State.READY),
        f"exit; up; now {ready_s - 2}; unload; now 2; {killed} exit; ask again; spawned;"
        f" exit -> {state}",
    )


# Exits

EXITS: dict[tuple[State, int | None, str], tuple[State, str, str]] = {
    (State.LOADING, 64, ""): (State.FAILED, "load_error", "none"),
    (State.LOADING, 65, ""): (State.FAILED, "load_error", "none"),
    (State.LOADING, 66, ""): (State.FAILED, "load_error", "none"),
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
    generation = driver.generation()
    seen = Ending(text="", said="", exit_code=code, signal_name=signal)
    assert judge(driver.model().life, seen).evidence is Evidence(evidence)
    driver.exit(code=code, signal=signal, last_lines=("why",), at=5.0)
    last = driver.row()["last_exit"]
    assert (driver.state(), last["reason"]) == (after, reason)
    assert (last["code"], last["signal"], last["detail"]) == (code, signal or None, "why")
    assert last["at"] == 5.0
    assert driver.generation() - generation == (after is State.LOADING)
    assert driver.row()["restarts"] == (after is State.LOADING), "an exit with 0 is a crash, too"


def stalls(driver: Driver) -> None:
    driver.pass_time(20.0)
    assert driver.signals() == [WorkerSignal.DUMP]
    killed = Ending(text="", said="", signal_name="SIGKILL")
    evidence = judge(driver.model().life, killed).evidence
    assert evidence is Evidence.NONE, "a stall during a load accuses no request"


def reads_and_stalls(driver: Driver) -> None:
    driver.progress(0.5)
    stalls(driver)


ENDINGS: dict[str, tuple[State, Callable[[Driver], object], str, str]] = {
    "garbage": (State.READY, Driver.broke, "crash", "garbage"),
    "another version": (
        State.READY,
        lambda d: d.hello(version="9.9.9"),
        "version",
        "mlxsup was upgraded to 9.9.9; restart the daemon",
    ),
    "a second hello": (State.READY, Driver.hello, "crash", "said HELLO after READY"),
    "a second ready": (State.READY, Driver.ready, "crash", "said READY twice"),
    "a load": (
        State.READY, lambda d: d.progress(0.5), "crash", "reported a load after READY",
    ),
    "a stalled load": (
        State.LOADING, stalls, "stall",
        "the load made no progress for 20 s while MLX was imported",
    ),
    "a disk that does not let go": (
        State.LOADING, reads_and_stalls, "stall",
        "the load made no progress for 20 s while its weights were read",
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


def test_a_spawn_that_failed_is_named() -> None:
    driver = play(Driver(), "load; spawn_failed; spawn_failed")
    last = driver.row()["last_exit"]
    assert (last["reason"], last["detail"]) == ("spawn_error", "could not be started: no memory")
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


STACK = ("Thread 0x00007f (most recent call first):", '  File "a.py", line 198 in run')


def test_a_status_has_the_last_words_above_the_stacks_of_a_stuck_process() -> None:
    driver = in_state(State.READY)
    driver.worker(Dying(code=70, message="no news"))
    driver.exit(code=70, last_lines=("MemoryError: device", *STACK * 400))
    last = driver.row()["last_exit"]
    assert (last["detail"], last["last_words"]) == ("no news", "MemoryError: device")
    assert last["cause"] == "unknown", "it may have been long ago"


def test_a_load_that_is_tried_again_fails_as_retryable() -> None:
    driver = in_state(State.LOADING)
    driver.exit(last_lines=("one",))
    failed = driver.failure_of("c1")
    assert failed.error.message == "m could not be loaded: SIGKILL: one"
    assert failed.error.retryable is True


def test_failed_model_names_its_crashes_and_the_last_cause_and_answers_its_queue_P9() -> None:
    driver = Driver([entry(restart=replace(RESTART, max_restarts=1))])
    load = driver.load()
    for id in ("r1", "r2"):
        driver.ask(id)
    driver.spawned()
    driver.exit()
    load = driver.load()
    driver.spawned()
    driver.exit(signal="SIGABRT", last_lines=("libc++abi: GPU Timeout Error",))
    cause = (
        "crashed 2 times within 100 s, the last time:"
        " SIGABRT, GPU time-out: libc++abi: GPU Timeout Error"
    )
    assert (driver.state(), driver.row()["cause"]) == (State.FAILED, cause)
    assert driver.row()["last_exit"]["cause"] == "GPU time-out"
    assert driver.errors() == dict.fromkeys((load, "r1", "r2"), ErrorCode.LOAD_FAILED)
    failed = driver.failure_of(load)
    assert failed.error.message == f"m could not be loaded: {cause}"
    assert failed.error.retryable is False


def test_every_end_is_counted_by_its_reason_and_the_class_of_its_cause() -> None:
    again = f"wait {RESTART.backoff_max_s}; up;"
    driver = play(
        in_state(State.READY),
        f"-> exits=[]; exit code=75; {again} exit code=70; {again} exit code=75; {again} unload;"
        " exit code=0",
    )
    assert driver.row()["exits"] == [
        {"reason": "crash", "cause": "out of memory", "count": 2},
        {"reason": "crash", "cause": "unknown", "count": 1},
        {"reason": "asked", "cause": "unknown", "count": 1},
    ]


# Loads that fail in the same way (P11)

RAISED = "RuntimeError: [GatherMM] only float32 is supported"


def loading() -> Driver:
    driver = Driver()
    driver.load()
    return driver


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
    driver.restart()
    die(driver, RAISED)
    assert driver.state() is State.LOADING, "who asks for it gets two attempts again"
    die(driver, RAISED)
    assert (driver.state(), driver.generation()) == (State.FAILED, 4)


@pytest.mark.parametrize(
    ("first", "second", "are_same"),
    [
        pytest.param(
            (70, "ValueError: no room at 0x7f3a2b10 after 12.5 s (object deadbeef01)"),
            (70, "ValueError: no room at 0x7f00ffee after 3.75 s (object 00c0ffee42)"),
            True,
            id="numbers do not count",
        ),
        pytest.param((70, "ValueError: a"), (70, "ValueError: b"), False, id="other words"),
        pytest.param((70, "gone"), (71, "gone"), False, id="another code"),
    ],
)
def test_errors_are_the_same_by_code_and_words(
    first: tuple[int, str], second: tuple[int, str], are_same: bool
) -> None:
    driver = loading()
    for code, message in (first, second):
        die(driver, message, code)
    assert driver.state() is (State.FAILED if are_same else State.BACKOFF)
    if not are_same:
        die(driver, first[1], first[0])
        assert driver.state() is State.BACKOFF, "another error between"


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
    driver = loading()
    for _ in range(RESTART.max_restarts):
        die(driver, message, code=code)
        assert driver.state() in (State.LOADING, State.BACKOFF)
    die(driver, message, code=code)
    assert driver.state() is State.FAILED
    assert "crashed 4 times" in driver.row()["cause"]


@pytest.mark.parametrize("between", ["a crash", "silence", "a stall", "no process"])
def test_a_load_that_ended_otherwise_between_makes_it_the_first_again(between: str) -> None:
    driver = loading()
    die(driver, RAISED)
    if between == "no process":
        driver.spawn_failed()
    else:
        driver.spawned()
        driver.hello()
        if between == "a crash":
            driver.ready()
            driver.worker(Dying(code=70, message=RAISED))
        elif between == "a stall":
            driver.pass_time(entry().load_stall_timeout_s + 1.0)
            assert driver.state() is State.STOPPING
        driver.exit(code=70)
    assert driver.state() is State.BACKOFF
    die(driver, RAISED)
    assert driver.state() is State.BACKOFF
    die(driver, RAISED)
    assert driver.state() is State.FAILED


def test_a_load_that_was_ended_is_not_the_first_of_two() -> None:
    driver = loading()
    driver.spawned()
    driver.hello()
    driver.worker(Dying(code=70, message=RAISED))
    driver.unload()
    driver.exit(code=70)
    driver.ask()
    die(driver, RAISED)
    assert driver.state() is State.LOADING


# Causes of death


@pytest.mark.parametrize(
    ("code", "line", "cause"),
    [
        (75, "gpu hang", DeathCause.OUT_OF_MEMORY),
        (72, "", DeathCause.GPU_FAULT_ELSEWHERE),
        (69, "", DeathCause.NO_DEVICE),
        (66, "", DeathCause.MODEL_MISSING),
        (65, "", DeathCause.BAD_MODEL),
        (
            70,
            "RuntimeError: There is no Stream(gpu, 3) in current thread.",
            DeathCause.STREAM_ERROR,
        ),
        (70, "GPU Timeout", DeathCause.GPU_TIMEOUT),
        (70, "gpu time-out", DeathCause.GPU_TIMEOUT),
        (70, "GPU Hang", DeathCause.GPU_TIMEOUT),
        (None, "kIOGPUCommandBufferCallbackErrorTimeout", DeathCause.GPU_TIMEOUT),
        (70, "cudaErrorLaunchTimeout", DeathCause.GPU_TIMEOUT),
        (70, "Innocent Victim of a fault", DeathCause.GPU_FAULT_ELSEWHERE),
        (70, "ErrorInnocentVictim", DeathCause.GPU_FAULT_ELSEWHERE),
        (70, "Out Of Memory", DeathCause.OUT_OF_MEMORY),
        (None, "Insufficient Memory (00000008:kIOGPU…ErrorOutOfMemory)", DeathCause.OUT_OF_MEMORY),
        (70, "insufficient memory", DeathCause.OUT_OF_MEMORY),
        (70, "MemoryError: x", DeathCause.OUT_OF_MEMORY),
        (None, "terminate called after throwing 'std::bad_alloc'", DeathCause.OUT_OF_MEMORY),
        (70, "Cannot allocate memory", DeathCause.OUT_OF_MEMORY),
        (70, "Unable to allocate 4 bytes", DeathCause.OUT_OF_MEMORY),
        (70, "Attempting to allocate 4 bytes", DeathCause.OUT_OF_MEMORY),
        (70, "cudaErrorMemoryAllocation", DeathCause.OUT_OF_MEMORY),
        (70, "FileNotFoundError: [Errno 2] tokenizer.json", DeathCause.MODEL_MISSING),
        (70, "No such file or directory", DeathCause.MODEL_MISSING),
        (1, 'File "/x/engines/mlx/ranks.py", line 110 in join', DeathCause.RANK_LOST),
        (70, "ValueError: something else", DeathCause.UNKNOWN),
        (64, "sh: /no/python: No such file or directory", DeathCause.UNKNOWN),
        (None, "", DeathCause.UNKNOWN),
    ],
)
def test_causes_are_classified_by_exit_and_last_lines(
    code: int | None, line: str, cause: DeathCause
) -> None:
    assert classify(code, ["started", f"… {line} …", "worker exits"]) is cause


def test_the_latest_line_counts_more_than_earlier_ones_and_than_the_memory() -> None:
    assert classify(70, ["gpu hang", "bad_alloc"]) is DeathCause.OUT_OF_MEMORY
    assert classify(None, ["bad_alloc", "gpu hang"], is_over_memory=True) is DeathCause.GPU_TIMEOUT
    assert classify(None, ["?"], is_over_memory=True) is DeathCause.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "routine",
    [
        "2026-01-01T00:00:00.1Z DEBUG x", "2026-01-01T00:00:00.1Z INFO x",
        "2026-01-01T00:00:00.1Z WARNING x", "Extension modules: zmq", "Current thread 0x1 (most",
        "Thread 0x1 (most", "Stack (most recent call first):", '  File "x.py", line 1 in f',
        '  Binary file "x.so", at f', "  <no Python frame>", "", "   ",
    ],
)  # fmt: skip
def test_last_words_skip_routine_lines(routine: str) -> None:
    assert last_words(["first", "  cause  ", routine]) == "cause"
    assert last_words([routine]) == ""


def test_last_words_may_be_an_error_and_always_are_a_fatal_line() -> None:
    assert last_words(["x", "2026-01-01T00:00:00.1Z ERROR y"]) == "2026-01-01T00:00:00.1Z ERROR y"
    assert last_words(["Fatal Python error: Aborted ", "later"]) == "Fatal Python error: Aborted"
    long = last_words(["Fatal Python error: " + "x" * 300])
    assert (long[:21], len(long)) == ("Fatal Python error: x", 200)
    assert last_words([]) == ""
