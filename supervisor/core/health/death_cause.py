"""The cause of a worker's death, as its exit, its last lines and the state of its model show it: a
class to count and to act on, and what the death says about the requests that the worker held.

The same error in two loads in a row is permanent, because most of what a load raises follows from
the files; lack of memory, faults of the GPU and signals depend on the neighbours and are tried
again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxsup.protocol.launch import PERMANENT_EXITS, ExitCode
from mlxsup.protocol.states import DeathCause, ExitReason

from ..lifecycle.states import Abandoned, StopCause, Stopping
from .poison import Evidence

if TYPE_CHECKING:
    from ..lifecycle.life import Life
    from ..lifecycle.transitions import Died


_BY_EXIT = {
    ExitCode.OUT_OF_MEMORY: DeathCause.OUT_OF_MEMORY,
    ExitCode.GPU_FAULT_ELSEWHERE: DeathCause.GPU_FAULT_ELSEWHERE,
    ExitCode.NO_DEVICE: DeathCause.NO_DEVICE,
    ExitCode.MODEL_MISSING: DeathCause.MODEL_MISSING,
    ExitCode.BAD_MODEL: DeathCause.BAD_MODEL,
    ExitCode.RANK_LOST: DeathCause.RANK_LOST,
}

_BY_LINE: tuple[tuple[DeathCause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(pattern, re.IGNORECASE))
    for cause, pattern in (
        (DeathCause.STREAM_ERROR, r"there is no stream\("),
        (DeathCause.GPU_TIMEOUT, r"gpu (timeout|time-out|hang)|CallbackErrorTimeout|LaunchTimeout"),
        (DeathCause.GPU_FAULT_ELSEWHERE, r"innocent ?victim"),
        (
            DeathCause.OUT_OF_MEMORY,
            r"out ?of ?memory|insufficient memory|memoryerror|bad_alloc|cannot allocate memory"
            r"|unable to allocate|attempting to allocate|MemoryAllocation",
        ),
        (DeathCause.MODEL_MISSING, r"FileNotFoundError|no such file or directory"),
    )
)
"""Patterns of the causes: Metal, CUDA, the C++ library and Python each use their own words."""


def classify(
    exit_code: int | None, lines: Sequence[str], *, is_over_memory: bool = False
) -> DeathCause:
    """Return the cause of a death.

    Args:
        exit_code: None if a signal ended it.
        is_over_memory: whether it was killed while it held more memory than its limit.
    """
    for code, cause in _BY_EXIT.items():
        if exit_code == code:
            return cause
    for line in reversed(lines):
        for cause, pattern in _BY_LINE:
            if pattern.search(line):
                return cause
    return DeathCause.OUT_OF_MEMORY if is_over_memory else DeathCause.UNKNOWN


# ---------------------------------------------------------------- judged by the state of its model

ACCUSING_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"})
"""Signals that a process causes itself; SIGKILL, SIGTERM and SIGSTOP come from outside."""

ACCUSING_EXITS = frozenset({ExitCode.STEP_ERROR, ExitCode.STUCK_PROMPT, ExitCode.LINK_BROKEN})
"""Exits that a request may have brought about."""

CAUSED_ELSEWHERE = frozenset(
    {DeathCause.OUT_OF_MEMORY, DeathCause.GPU_FAULT_ELSEWHERE, DeathCause.GPU_TIMEOUT}
)
"""Causes that other processes contribute to: the next attempt may well succeed."""

OF_STOPPED = {
    StopCause.ASKED: (ExitReason.ASKED, Evidence.ASKED),
    StopCause.SWAP: (ExitReason.ASKED, Evidence.ASKED),
    StopCause.VERSION: (ExitReason.VERSION, Evidence.ASKED),
    StopCause.TOO_LARGE: (ExitReason.LOAD_ERROR, Evidence.ASKED),
    StopCause.INTERNAL: (ExitReason.INTERNAL, Evidence.ASKED),
    StopCause.STALL: (ExitReason.STALL, Evidence.ACCUSES),
    StopCause.SUSPENDED: (ExitReason.STALL, Evidence.NONE),
    StopCause.BROKEN: (ExitReason.CRASH, Evidence.NONE),
}
"""The verdict on a process that was being ended, and on its requests; a stalled load says nothing
about them."""

TERMINATED_EXIT = 128 + signal.SIGTERM

NUMBER = re.compile(r"0x[0-9a-f]+|\b(?=[a-f]*[0-9])[0-9a-f]{6,}\b|[0-9]+", re.IGNORECASE)
"""Addresses, sizes and times, which differ between two reports of the same error."""


def ending_of(life: Life, died: Died) -> Stopping | None:
    """Return how the process was being ended; None if it ended by itself.

    A broken or suspended process is killed at once. If that signal did not end it, it had been
    about to die: its connection ends before its exit can be seen, and the kernel may take long to
    free its memory. So its own exit says what happened, unless its end was asked for, too.
    """
    phase = life.phase
    if not isinstance(phase, Stopping):
        return None
    is_killed_at_once = phase.cause in (StopCause.BROKEN, StopCause.SUSPENDED)
    is_by_itself = is_killed_at_once and died.signal_name != "SIGKILL"
    return None if is_by_itself and not phase.is_restart else phase


def exit_reason(life: Life, died: Died) -> ExitReason:
    """Return how a process has ended, before `died` is applied."""
    if isinstance(life.phase, Abandoned):
        return ExitReason.ASKED
    stopping = ending_of(life, died)
    if stopping is not None:
        if stopping.cause is StopCause.TOO_LARGE and stopping.is_restart:
            return ExitReason.ASKED  # another entry may have come since then
        return OF_STOPPED[stopping.cause][0]
    if died.is_spawn_error:
        return ExitReason.SPAWN_ERROR
    if life.ready_at is None and died.exit_code in PERMANENT_EXITS:
        return ExitReason.LOAD_ERROR
    return ExitReason.CRASH


def evidence_of(life: Life, died: Died, *, is_over_memory: bool) -> Evidence:
    """Return what the end of a process, before `died` is applied, says about the requests it held.

    Args:
        life: still in the state in which the process ended.
        is_over_memory: whether it had reported more memory than its limit.
    """
    if isinstance(life.phase, Abandoned):
        return Evidence.ASKED
    stopping = ending_of(life, died)
    if stopping is not None and OF_STOPPED[stopping.cause][1] is Evidence.ASKED:
        return Evidence.ASKED
    if life.ready_at is None:
        return Evidence.NONE
    if stopping is not None:
        return OF_STOPPED[stopping.cause][1]
    if died.exit_code == ExitCode.OUT_OF_MEMORY:
        return Evidence.OUT_OF_MEMORY
    if died.signal_name == "SIGKILL" and is_over_memory:
        return Evidence.OUT_OF_MEMORY
    if died.exit_code in ACCUSING_EXITS or died.signal_name in ACCUSING_SIGNALS:
        return Evidence.ACCUSES
    return Evidence.NONE


def load_error(life: Life, died: Died) -> str | None:
    """Return what a load that crashed by itself has in common with another that failed the same
    way; None: it had become READY, did not say why, or others contribute to the cause."""
    if life.ready_at is not None or not died.announced or ending_of(life, died) is not None:
        return None
    if died.cause in CAUSED_ELSEWHERE or died.exit_code == TERMINATED_EXIT:
        return None
    return f"{died.exit_code}: {NUMBER.sub('#', died.announced)}"
