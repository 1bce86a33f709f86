"""What ends a worker whose load or prompt takes memory without end, and what does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import LoadPhase
from mlxsup.worker.memory_guard import (
    BYTES_PER_BODY_BYTE,
    LOAD_LIMIT_BYTES,
    PROMPT_LIMIT_BYTES,
    Arrays,
    MemoryGuard,
)

MIB = 2**20
GIB = 2**30


class Process:
    """A process whose memory a test sets.

    Attributes:
        resident: its size.
        arrays: what arrays take of that.
        ended: the codes and causes with which the guard would have ended it.
    """

    def __init__(self) -> None:
        self.resident = 5 * GIB
        self.arrays = Arrays(2 * GIB, 4 * GIB)
        self.ended: list[tuple[ExitCode, str]] = []
        self.guard = MemoryGuard(
            lambda: self.resident,
            lambda: self.arrays,
            lambda code, cause: self.ended.append((code, cause)),
        )

    def prompt(self, body_bytes: int = 0, key: int = 7) -> AbstractContextManager[None]:
        return self.guard.prepares(RequestKey(key), body_bytes)

    def grow(self, count: int) -> None:
        """Grow, and be looked at often enough to be judged."""
        self.resident += count
        self.guard.look()
        self.guard.look()


@pytest.fixture
def process() -> Process:
    return Process()


def test_a_prompt_that_takes_too_much_ends_the_process_with_a_sentence(process: Process) -> None:
    with process.prompt():
        process.grow(PROMPT_LIMIT_BYTES)
        assert process.ended == []
        process.grow(MIB)
    code, cause = process.ended[0]
    assert code is ExitCode.STUCK_PROMPT
    assert "prompt of request 7 takes more than 1.00 GiB" in cause


def test_nothing_is_looked_at_between_prompts(process: Process) -> None:
    with process.prompt():
        assert process.guard.look()
    assert not process.guard.look()
    process.grow(9 * GIB)
    with process.prompt():
        process.grow(MIB)
    assert process.ended == []


def test_a_long_body_may_take_more_whichever_thread_prepares_it(process: Process) -> None:
    with process.prompt(key=1), process.prompt(8 * MIB, key=2):
        process.grow(PROMPT_LIMIT_BYTES + 8 * MIB * BYTES_PER_BODY_BYTE)
        assert process.ended == []
        process.grow(MIB)
    assert [cause for _, cause in process.ended if "request 1 takes more than 1.00 GiB" in cause]
    assert [cause for _, cause in process.ended if "request 2 takes more than 3.00 GiB" in cause]


def test_short_prompts_beside_do_not_hide_one_that_grows(process: Process) -> None:
    with process.prompt():
        for _ in range(20):
            with process.prompt(key=8):
                process.grow(64 * MIB)
    assert "request 7" in process.ended[0][1]


def rows_grow(process: Process) -> None:
    process.arrays = Arrays(process.arrays.now + 3 * GIB, process.arrays.peak)
    process.resident += 3 * GIB


def a_step_of_which_only_the_peak_is_seen(process: Process) -> None:
    process.arrays = Arrays(process.arrays.now, process.arrays.peak + 3 * GIB)
    process.resident += 3 * GIB


def rows_end_and_their_memory_is_kept(process: Process) -> None:
    rows_grow(process)
    process.guard.look()
    process.arrays = Arrays(2 * GIB, process.arrays.peak)


def one_look_between_an_array_s_end_and_its_return(process: Process) -> None:
    process.resident += 3 * GIB
    process.guard.look()
    process.resident -= 3 * GIB


@pytest.mark.parametrize(
    "happens",
    [
        rows_grow,
        a_step_of_which_only_the_peak_is_seen,
        rows_end_and_their_memory_is_kept,
        one_look_between_an_array_s_end_and_its_return,
    ],
)
def test_arrays_of_running_rows_accuse_no_prompt_P7(
    process: Process, happens: Callable[[Process], None]
) -> None:
    with process.prompt():
        happens(process)
        process.grow(0)
    assert process.ended == []


def test_each_step_of_a_load_may_take_its_limit_and_no_more(process: Process) -> None:
    process.guard.loads(LoadPhase.IMPORT)
    process.grow(3 * GIB)
    for _ in range(3):
        process.guard.loads(LoadPhase.WEIGHTS)
        process.grow(LOAD_LIMIT_BYTES)
    assert process.ended == []
    process.grow(MIB)
    code, cause = process.ended[0]
    assert code is ExitCode.BAD_MODEL
    assert "describes more than its weight files hold" in cause
    process.guard.loads(LoadPhase.MATERIALISE)
    assert not process.guard.look()


def test_the_last_line_of_a_process_that_is_ended_is_the_cause() -> None:
    ends = (
        "from mlxsup.worker.memory_guard import end_process, ExitCode\n"
        "end_process(ExitCode.BAD_MODEL, 'too much')"
    )
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (65, "too much")
