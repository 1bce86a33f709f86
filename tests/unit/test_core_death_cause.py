"""Why a worker died, in one of a few classes; what follows when all die at once."""

from __future__ import annotations

import pytest

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import Exited
from mlxsup.supervisor.core.health.death_cause import Cause, classify

from support.core_driver import Driver, entry
from support.core_states import in_state


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


def test_a_kill_over_the_memory_limit_is_out_of_memory() -> None:
    assert classify(None, [], is_over_memory=True) is Cause.OUT_OF_MEMORY


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


def test_when_all_workers_die_at_once_loads_are_serialised() -> None:
    names = "abcd"
    driver = Driver([entry(name) for name in names])
    for pid, name in enumerate(names, 1):
        driver.load(name)
        driver.come_up(name, pid)
    for name in names:
        driver.exit(name)
    for pid, _ in enumerate(names, 11):
        loading = [name for name in names if driver.state(name) is State.LOADING]
        assert len(loading) == 1
        driver.come_up(loading[0], pid)
    assert {driver.state(name) for name in names} == {State.READY}
