"""What the end of a process means: what it says about its requests, and what follows for the model.

The same error in two loads in a row is permanent, because most of what a load raises follows from
the files; lack of memory, faults of the GPU and signals depend on the neighbours and are tried
again.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from mlxsup.protocol.download import Repository
from mlxsup.protocol.launch import PERMANENT_EXITS, ExitCode
from mlxsup.protocol.states import ExitReason, Wanted

from ..actions import Abandon
from ..errors import cut_off, load_failed, model_failed
from ..health.death_cause import Cause
from ..health.poison import Evidence
from .life import LastExit, Life
from .restart_policy import GiveUp
from .states import (
    Abandoned,
    Backoff,
    Draining,
    Failed,
    Lack,
    Pending,
    Ready,
    StopCause,
    Stopped,
    Stopping,
    Swapping,
)
from .triggers import (
    Died,
    DownWaitersEnd,
    Erased,
    GivenUp,
    QueueEnds,
    RunningLost,
    UpWaitersEnd,
)

ACCUSING_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"})
"""Signals that a process causes itself; SIGKILL, SIGTERM and SIGSTOP come from outside."""

ACCUSING_EXITS = frozenset({ExitCode.STEP_ERROR, ExitCode.STUCK_PROMPT, ExitCode.LINK_BROKEN})
"""Exits that a request may have brought about."""

CAUSED_ELSEWHERE = frozenset({Cause.OUT_OF_MEMORY, Cause.GPU_FAULT_ELSEWHERE, Cause.GPU_TIMEOUT})
"""Causes that other processes contribute to: the next attempt may well succeed."""

FAILING = (ExitReason.INTERNAL, ExitReason.VERSION, ExitReason.LOAD_ERROR)
"""What another attempt would only repeat."""

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

# ---------------------------------------------------------------- what follows an exit


def died(life: Life, trigger: Died, now: float) -> None:
    """Decide what follows the end of a process; nothing else does."""
    phase = life.phase
    stopping = ending_of(life, trigger)
    reason = _judge(life, trigger)
    text = stopping.detail if stopping and stopping.detail else trigger.text
    if life.restarts.fails_alike(_load_error(life, trigger)) and reason is ExitReason.CRASH:
        reason = ExitReason.LOAD_ERROR
        text += ", as the time before"
    is_lost = reason is ExitReason.LOAD_ERROR and _has_lost_files(life, trigger)
    life.exited(
        LastExit(
            reason=reason,
            code=trigger.exit_code,
            signal=trigger.signal_name or None,
            detail=stopping.detail if stopping and stopping.detail else trigger.said,
            at=trigger.at,
            cause=trigger.cause,
        )
    )
    is_swap = stopping is not None and stopping.cause is StopCause.SWAP
    if _was_stable(life, now) and not is_swap:
        life.restarts.was_stable()
    life.do(RunningLost(text=text, verdict=trigger.verdict))
    if life.wanted is Wanted.GONE:
        assert life.removal is not None
        life.do(QueueEnds(error=life.removal))
        life.enter_after_exit(Stopped(since=now), "removed")
        life.do(DownWaitersEnd(error=None), Erased())
    elif life.wanted is Wanted.DOWN:
        life.do(QueueEnds(error=cut_off(life.name, life.why)))
        life.enter_after_exit(Stopped(since=now), "")
        life.do(DownWaitersEnd(error=None))
    elif not is_lost and reason in FAILING:
        _fail(life, text, now)
    elif trigger.verdict.failure:
        _fail(life, f"{trigger.verdict.failure}, the last time: {text}", now)
    elif is_lost:
        _fetch_again(life, text, now)
    elif is_swap:
        _wait_for_turn(life, text, now, is_restart=stopping is not None and stopping.is_restart)
    elif stopping.is_restart if stopping else isinstance(phase, Draining):
        life.restarts.clean()
        life.enter_after_exit(Pending(since=now), "")
    elif reason is ExitReason.ASKED:
        life.reserved_bytes = 0  # it was to go, and others may wait for its memory
        life.enter_after_exit(Pending(since=now), "")
    elif not trigger.verdict.is_counted:
        life.enter_after_exit(Pending(since=now, is_after_crash=True), text)
    else:
        _after_crash(life, text, now)


def _has_lost_files(life: Life, died: Died) -> bool:
    """True if files of a repository have been removed since the configuration was read.

    Not if the load before ended for the same reason: a download has not helped.
    """
    missing = ExitCode.MODEL_MISSING
    if died.exit_code != missing or not life.settings.repo:
        return False
    return life.last_exit is None or life.last_exit.code != missing


def _fetch_again(life: Life, text: str, now: float) -> None:
    """It is PENDING until its repository has been downloaded, as if that had never happened."""
    settings = life.settings
    lost = Repository(settings.repo, settings.revision)
    life.settings = replace(settings, download=lost)
    life.enter_after_exit(Pending(since=now), text)


def _wait_for_turn(life: Life, text: str, now: float, *, is_restart: bool) -> None:
    """It was swapped out: it waits for memory as others do, and its requests wait with it."""
    if is_restart:  # asked for meanwhile
        life.restarts.clean()
    life.reserved_bytes = 0
    lack = Lack(since=now, reason=f"was {text}")
    life.enter_after_exit(Pending(since=now, lack=lack), text)


def given_up(life: Life, trigger: GivenUp, now: float) -> None:
    """SIGKILL has not ended the process: what waited for its exit continues without it (P26)."""
    cause = trigger.text
    failed = load_failed(life.name, cause, is_retryable=False)
    error = failed
    if life.wanted is Wanted.GONE:
        assert life.removal is not None
        error = life.removal
    elif life.wanted is Wanted.DOWN:
        error = cut_off(life.name, life.why)
    life.do(RunningLost(text=cause, verdict=trigger.verdict), QueueEnds(error=error))
    life.enter(Abandoned(since=now, cause=cause), cause)
    life.do(
        UpWaitersEnd(error=failed),
        DownWaitersEnd(error=model_failed(life.name, cause)),
    )
    life.do(Abandon(model=life.name, generation=life.generation))


def ended_at_last(life: Life, trigger: Died, now: float) -> None:
    """A process that had been given up has exited: the model is as free as any other."""
    life.exited(
        LastExit(
            reason=ExitReason.ASKED,
            code=trigger.exit_code,
            signal=trigger.signal_name or None,
            detail=trigger.said,
            at=trigger.at,
            cause=trigger.cause,
        )
    )
    note = f"process {life.pid} has finally ended"
    life.do(RunningLost(text=trigger.text, verdict=trigger.verdict))
    if life.wanted is Wanted.GONE:
        life.enter_after_exit(Stopped(since=now), "removed")
        life.do(Erased())
    elif life.wanted is Wanted.DOWN:
        life.enter_after_exit(Stopped(since=now), note)
    else:
        life.enter_after_exit(Pending(since=now), note)


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
    if not life.has_been_ready:
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


def _after_crash(life: Life, text: str, now: float) -> None:
    was_loading = not life.has_been_ready
    verdict = life.restarts.after_crash(now)
    if isinstance(verdict, GiveUp):
        _fail(life, f"{verdict.reason}, the last time: {text}", now)
        return
    if was_loading:  # F8: those who wait for the load itself are notified; requests keep waiting
        life.do(UpWaitersEnd(error=load_failed(life.name, text, is_retryable=True)))
    if verdict > 0.0:
        life.enter_after_exit(Backoff(since=now, retry_at=now + verdict), text)
    else:
        life.enter_after_exit(Pending(since=now, is_after_crash=True), text)


def _fail(life: Life, cause: str, now: float) -> None:
    error = load_failed(life.name, cause, is_retryable=False)
    life.enter_after_exit(Failed(since=now, cause=cause), cause)
    life.do(QueueEnds(error=error), UpWaitersEnd(error=error))


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


def _judge(life: Life, died: Died) -> ExitReason:
    stopping = ending_of(life, died)
    if stopping is not None:
        if stopping.cause is StopCause.TOO_LARGE and stopping.is_restart:
            return ExitReason.ASKED  # another entry may have come since then
        return OF_STOPPED[stopping.cause][0]
    if died.is_spawn_error:
        return ExitReason.SPAWN_ERROR
    if not life.has_been_ready and died.exit_code in PERMANENT_EXITS:
        return ExitReason.LOAD_ERROR
    return ExitReason.CRASH


def _load_error(life: Life, died: Died) -> str | None:
    """Return what a load that failed by itself has in common with another that failed the same way.

    None: it had become READY, was ended, did not say why, or others contribute to the cause.
    """
    if life.has_been_ready or not died.announced or ending_of(life, died) is not None:
        return None
    if died.cause in CAUSED_ELSEWHERE or died.exit_code == TERMINATED_EXIT:
        return None
    return f"{died.exit_code}: {NUMBER.sub('#', died.announced)}"


def ready_for_s(life: Life, now: float) -> float | None:
    """Return how long a process has been READY, or had been before it was asked to end; None:
    never."""
    match life.phase:
        case Ready(since=since):
            return now - since
        case Draining(ready_since=since) | Swapping(ready_since=since):
            return now - since
        case Stopping(was_ready_s=ready_s):
            return ready_s
        case _:
            return None


def _was_stable(life: Life, now: float) -> bool:
    ready_s = ready_for_s(life, now)
    return ready_s is not None and ready_s >= life.settings.restart.stable_s
