"""The end of a process: its cause, what follows for the model, and what it says about requests.

An exit, its last lines and the state of the model show the cause of a death: a class to count and
to act on, and what the death says about the requests that the worker held. The same error in two
loads in a row is permanent, because most of what a load raises follows from the files; lack of
memory, faults of the GPU and signals depend on the neighbours and are tried again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from mlxsup.protocol.launch import PERMANENT_EXITS, ExitCode
from mlxsup.protocol.states import DeathCause, ExitReason
from mlxsup.protocol.text import last_words

from .events import Exited
from .life import Abandoned, Life, StopCause, Stopping
from .poison import NO_VERDICT, Evidence, Verdict

# ---------------------------------------------------------------- what was seen of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The exit was seen, or the spawn failed.

    Attributes:
        exit_code: None if a signal ended it or nothing was started.
        signal_name: empty if it exited.
        said: its last words; empty if it had none.
        announced: what it said about its end over the link; empty if it said nothing.
        is_spawn_error: whether nothing was started.
        verdict: what its end means for the requests that it held.
        cause: the class of its cause.
        is_over_memory: whether SIGKILL ended it while it held more memory than its limit.
        at: wall-clock seconds since the epoch; None if nothing was started.
    """

    exit_code: int | None
    signal_name: str
    said: str
    announced: str = ""
    is_spawn_error: bool = False
    verdict: Verdict = NO_VERDICT
    cause: DeathCause = DeathCause.UNKNOWN
    is_over_memory: bool = False
    at: float | None = None

    @property
    def text(self) -> str:
        """Return one phrase that says how it ended, for people."""
        if self.is_spawn_error:
            return self.said
        ended = self.signal_name or f"exit code {self.exit_code}"
        if self.cause is not DeathCause.UNKNOWN:
            ended += f", {self.cause}"
        return f"{ended}: {self.said}" if self.said else ended


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp(Died):
    """SIGKILL has not ended the process within its limit: it is no longer waited for.

    Attributes:
        pid: the process, which is still alive.
    """

    pid: int
    exit_code: None = None
    signal_name: str = ""
    said: str = ""

    @property
    def text(self) -> str:
        """Return one phrase for people."""
        return f"process {self.pid} cannot be ended"


def seen_exit(event: Exited, dying: str, *, is_over_memory: bool) -> Died:
    """Return the end of a process that the shell has seen, still without a verdict.

    Args:
        dying: what it said about its end over the link; empty if it said nothing.
        is_over_memory: whether it last held more memory than its limit.
    """
    is_over_memory = is_over_memory and event.signal_name == "SIGKILL"
    lines = [*event.last_lines, dying]
    return Died(
        exit_code=event.exit_code,
        signal_name=event.signal_name,
        said=dying or last_words(event.last_lines),
        announced=dying,
        cause=classify(event.exit_code, lines, is_over_memory=is_over_memory),
        is_over_memory=is_over_memory,
        at=event.at,
    )


# ---------------------------------------------------------------- the class of its cause

_BY_EXIT = {
    ExitCode.BAD_LAUNCH: DeathCause.UNKNOWN,  # its sentence says all; lines before it mislead
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


# ---------------------------------------------------------------- what it says

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


def evidence_of(life: Life, died: Died) -> Evidence:
    """Return what the end of a process, before `died` is applied, says about the requests it
    held."""
    if isinstance(life.phase, Abandoned):
        return Evidence.ASKED
    stopping = ending_of(life, died)
    if stopping is not None and OF_STOPPED[stopping.cause][1] is Evidence.ASKED:
        return Evidence.ASKED
    if life.ready_at is None:
        return Evidence.NONE
    if stopping is not None:
        return OF_STOPPED[stopping.cause][1]
    if died.exit_code == ExitCode.OUT_OF_MEMORY or died.is_over_memory:
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
