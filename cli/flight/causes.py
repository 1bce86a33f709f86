"""What a death of a worker means in plain words, and what to do about it, by its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxsup.protocol.flight import GIVEN_UP, WorkerDied
from mlxsup.protocol.launch import TEXT_LIMIT_STEPS, ExitCode
from mlxsup.protocol.states import ExitReason

from ..terminal.quantities import format_bytes

TERMINATED = 143
"""What a worker exits with after a SIGTERM that the supervisor did not send."""
ORPHANED = 1

NATIVE = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"})
"""Signals that a process brings upon itself."""

STACKS = "`mlxsup logs MODEL OPTIONS` has the stacks of its threads"
LAST_LINES = "`mlxsup logs MODEL OPTIONS` has its last lines"
AGAIN = "once that is done: `mlxsup restart MODEL`"
REPORT = "please report it, with the file that `mlxsup why MODEL --report FILE` writes"
NOBODY = "no request is to blame"
QUARANTINE = "if it happens again with the same request, that request is quarantined by itself"
WAS_IT_THE_SYSTEM = (
    "was it the system, for want of memory? `journalctl -k | grep -i 'out of memory'`; on a Mac,"
    " `log show --last 1h | grep -i jetsam`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of death.

    Attributes:
        name: for programs.
        fits: whether a death is of this kind; the first kind that fits counts.
        what: the sentence, with fields of the entry in braces.
        advice: what to do, the most useful first; MODEL stands for the model's name, OPTIONS for
            those of `mlxsup logs`.
    """

    name: str
    fits: Callable[[WorkerDied], bool]
    what: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A death in words; see `Kind`."""

    name: str
    what: str
    advice: tuple[str, ...]


def explain(died: WorkerDied, log_options: str = "") -> Explanation:
    """What a death means, and what to do.

    Args:
        died: the death.
        log_options: with which `mlxsup logs` shows its last lines: none, unless a process of the
            model has started since.
    """
    kind = next(kind for kind in KINDS if kind.fits(died))
    ended = died.signal or (f"exit code {died.code}" if died.code is not None else "no exit")
    what = kind.what.format(
        detail=died.detail or ended,
        ended=ended,
        pid=died.pid or "not known",
        signal=died.signal,
        code=died.code,
        held=format_bytes(max(died.footprint_bytes, died.active_bytes + died.cache_bytes)),
        limit=format_bytes(died.limit_bytes or died.machine_bytes),
    )
    if (
        died.detail
        and not died.ended_by
        and "{detail}" not in kind.what
        and died.reason != GIVEN_UP
    ):
        what += f"; its last words: {died.detail}"
    pid = str(died.pid or "PID")
    advice = tuple(
        one.replace("PID", pid)
        .replace(" OPTIONS", log_options and f" {log_options}")
        .replace("MODEL", died.model)
        for one in kind.advice
        if died.rows or one != QUARANTINE
    )
    return Explanation(name=kind.name, what=what, advice=advice)


def _is(reason: str) -> Callable[[WorkerDied], bool]:
    return lambda died: died.reason == reason


def _was_ended_as(cause: str) -> Callable[[WorkerDied], bool]:
    return lambda died: died.ended_by == cause


def _has(cause: str) -> Callable[[WorkerDied], bool]:
    return lambda died: died.cause == cause


def _exited_with(*codes: int) -> Callable[[WorkerDied], bool]:
    return lambda died: died.code in codes


def _failed_in_load(died: WorkerDied) -> bool:
    """Also for the first time, when the next attempt is still to come."""
    never_ready = died.ready_s is None
    return died.reason == ExitReason.LOAD_ERROR or (
        never_ready and died.code == ExitCode.STEP_ERROR
    )


def _stalled_with(words: str) -> Callable[[WorkerDied], bool]:
    return lambda died: died.ended_by == "stall" and words in died.detail


KINDS: tuple[Kind, ...] = (
    Kind(
        name="cannot_be_ended",
        fits=_is(GIVEN_UP),
        what="SIGKILL has not ended its process (pid {pid}): it hangs in the kernel, usually in a"
        " driver or on a disk",
        advice=(
            "find out what it waits for: `ps -o pid,stat,wchan:32,args -p PID` (Linux)",
            "it is loaded again once that process is gone; if it never goes, restart the machine",
        ),
    ),
    Kind(
        name="asked",
        fits=_is(ExitReason.ASKED),
        what="its process was ended because that was asked for ({ended})",
    ),
    Kind(
        name="other_version",
        fits=_is(ExitReason.VERSION),
        what="its worker was of another version than the daemon: {detail}",
        advice=("`mlxsup stop`, then `mlxsup start`",),
    ),
    Kind(
        name="bug",
        fits=_is(ExitReason.INTERNAL),
        what="mlxsup itself has a bug: {detail}",
        advice=("`mlxsup restart MODEL`", REPORT),
    ),
    Kind(
        name="not_started",
        fits=_is(ExitReason.SPAWN_ERROR),
        what="its process {detail}",
        advice=(
            "look at the limits and the memory of this machine: `ulimit -a`, `mlxsup status`",
            AGAIN,
        ),
    ),
    Kind(
        name="stopped_from_outside",
        fits=_was_ended_as("suspended"),
        what="somebody had stopped its process (SIGSTOP), so it was killed and replaced",
        advice=(f"find out who stops processes here, a debugger or a shell; {NOBODY}",),
    ),
    Kind(
        name="load_stalled",
        fits=_stalled_with("the load made no progress"),
        what="its load hung: {detail}",
        advice=(
            "is the disk slow, or gone? If it only needs longer, raise `load_stall_timeout_s`",
            STACKS,
        ),
    ),
    Kind(
        name="silent",
        fits=_stalled_with("no sign of life"),
        what="it hung, and something held the interpreter: {detail}",
        advice=(STACKS, "if its steps only need longer, raise `step_timeout_s`"),
    ),
    Kind(
        name="stuck",
        fits=_was_ended_as("stall"),
        what="it hung: {detail}",
        advice=(STACKS, "if its steps only need longer, raise `step_timeout_s`"),
    ),
    Kind(
        name="too_large",
        fits=_was_ended_as("too_large"),
        what="it needs more memory than it may have: {detail}",
        advice=(
            "`mlxsup plan` shows what fits",
            "raise `memory` of MODEL or `memory_budget`, or lower `max_concurrency` or"
            " `context_length`, then `mlxsup reload`",
        ),
    ),
    Kind(
        name="broken",
        fits=_was_ended_as("broken"),
        what="its process lived, but was of no use any longer, and was killed: {detail}",
        advice=(f"nothing, if it stays the only time; {NOBODY}", REPORT),
    ),
    Kind(
        name="killed_over_memory",
        fits=lambda died: died.cause == "out of memory" and died.signal == "SIGKILL",
        what="the system killed it (SIGKILL) when it held {held}, with a limit of {limit}",
        advice=(
            "`mlxsup plan` shows what fits together",
            "lower `max_concurrency` or `context_length` of MODEL, or let fewer models be loaded",
        ),
    ),
    Kind(
        name="out_of_memory",
        fits=_has("out of memory"),
        what="it ran out of memory ({ended}) when it held {held}",
        advice=(
            "`mlxsup plan` shows what fits together",
            "lower `max_concurrency` or `context_length` of MODEL, or let fewer models be loaded",
        ),
    ),
    Kind(
        name="model_missing",
        fits=_has("model missing"),
        what="files of the model are missing: {detail}",
        advice=(
            "`mlxsup models` lists what is on this machine",
            "correct `path` in the configuration and `mlxsup reload`, or bring the files back and"
            " `mlxsup restart MODEL`",
        ),
    ),
    Kind(
        name="bad_model",
        fits=_has("bad model"),
        what="the model's files cannot be used: {detail}",
        advice=(
            "`mlxsup show MODEL` says what they are; download or convert them again",
            AGAIN,
        ),
    ),
    Kind(
        name="no_device",
        fits=_has("no usable device"),
        what="there is no device that MLX can use: {detail}",
        advice=("is the driver loaded, and MLX installed for this machine?", AGAIN),
    ),
    Kind(
        name="bad_launch",
        fits=_exited_with(ExitCode.BAD_LAUNCH),
        what="its worker could not do with what its entry says: {detail}",
        advice=("correct the entry in the configuration, then `mlxsup reload`",),
    ),
    Kind(
        name="gpu_timeout",
        fits=_has("GPU time-out"),
        what="the GPU gave up work that took too long ({ended})",
        advice=(
            "lower `decode_stall_target_ms` of MODEL, so that prompts are read in smaller parts",
            "see what else uses the GPU",
        ),
    ),
    Kind(
        name="gpu_fault_elsewhere",
        fits=_has("GPU fault of another process"),
        what="the GPU failed because of another process ({ended})",
        advice=(f"see what else uses the GPU; {NOBODY}",),
    ),
    Kind(
        name="stream_error",
        fits=_has("stream error"),
        what="a thread used a stream of MLX that belongs to another one ({ended})",
        advice=(REPORT,),
    ),
    Kind(
        name="stuck_prompt",
        fits=_exited_with(ExitCode.STUCK_PROMPT),
        what="a template or a tokeniser took too long, or too much memory: {detail}",
        advice=(
            STACKS,
            QUARANTINE,
            "if honest prompts take that long here, raise `step_timeout_s`: preparing one may take"
            f" {TEXT_LIMIT_STEPS:g} times as long",
        ),
    ),
    Kind(
        name="broken_link",
        fits=_exited_with(ExitCode.LINK_BROKEN),
        what="the daemon sent it what it did not expect: {detail}",
        advice=(LAST_LINES, QUARANTINE, REPORT),
    ),
    Kind(
        name="load_error",
        fits=_failed_in_load,
        what="its load failed ({ended}): {detail}",
        advice=(
            LAST_LINES,
            "a load that fails twice in the same way is not tried again; once the cause is gone:"
            " `mlxsup restart MODEL`",
        ),
    ),
    Kind(
        name="killed_from_outside",
        fits=lambda died: died.signal == "SIGKILL",
        what="somebody, or the system, killed its process (SIGKILL)",
        advice=(WAS_IT_THE_SYSTEM, NOBODY),
    ),
    Kind(
        name="terminated_from_outside",
        fits=lambda died: died.signal == "SIGTERM" or died.code == TERMINATED,
        what="somebody else than mlxsup asked its process to end (SIGTERM)",
        advice=(f"end models with `mlxsup unload MODEL`; {NOBODY}",),
    ),
    Kind(
        name="native_crash",
        fits=lambda died: died.signal in NATIVE,
        what="it crashed in native code ({signal})",
        advice=(
            f"{STACKS}, if it could write them",
            QUARANTINE,
        ),
    ),
    Kind(
        name="signal",
        fits=lambda died: bool(died.signal),
        what="a signal ended its process ({signal})",
        advice=("find out who sent it", LAST_LINES),
    ),
    Kind(
        name="step_error",
        fits=_exited_with(ExitCode.STEP_ERROR),
        what="a step of its engine failed: {detail}",
        advice=(
            LAST_LINES,
            QUARANTINE,
        ),
    ),
    Kind(
        name="lost_thread",
        fits=_exited_with(ExitCode.WORKER_FAULT),
        what="it lost one of its threads or rows: {detail}",
        advice=(LAST_LINES, REPORT),
    ),
    Kind(
        name="orphaned",
        fits=_exited_with(ORPHANED),
        what="it ended itself (exit code 1): it had lost its supervisor, or a step hung",
        advice=(LAST_LINES,),
    ),
    Kind(
        name="exited",
        fits=_exited_with(ExitCode.ASKED),
        what="its process exited though nobody had asked it to",
        advice=(LAST_LINES,),
    ),
    Kind(
        name="unknown",
        fits=lambda died: True,
        what="its process ended for a reason that mlxsup does not know ({ended})",
        advice=(LAST_LINES, REPORT),
    ),
)
"""In the order in which they are tried."""
