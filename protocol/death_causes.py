"""The causes of a worker's death, for `why` and the page: a sentence and what helps for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .flight import GIVEN_UP, WorkerDied
from .launch import TEXT_LIMIT_STEPS, ExitCode
from .states import ExitReason
from .text import size_text

TERMINATED = 143
"""The exit code of a worker after a SIGTERM that the supervisor did not send."""
ORPHANED = 1

NATIVE = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"})
"""Signals that a process brings upon itself."""

STACKS = "`mlxsup logs MODEL OPTIONS` has the stacks of its threads"
LAST_LINES = "`mlxsup logs MODEL OPTIONS` has its last lines"
AGAIN = "once that is done: `mlxsup restart MODEL`"
REPORT = "please report it, with the file that `mlxsup why MODEL --report FILE` writes"
BLAMELESS = "no request is to blame"
QUARANTINE = "if it happens again with the same request, that request is quarantined by itself"
FITS = "`mlxsup plan` shows what fits together"
LOWER = "lower `max_concurrency` or `context_length` of MODEL, or let fewer models be loaded"
LONGER_STEPS = "if its steps only need longer, raise `step_timeout_s`"
WAS_IT_THE_SYSTEM = (
    "was it the system, for want of memory? `journalctl -k | grep -i 'out of memory'`; on a Mac,"
    " `log show --last 1h | grep -i jetsam`"
)


class Cause(NamedTuple):
    """One kind of death.

    Attributes:
        name: for programs.
        fits: true for the deaths of this kind; the first cause that fits counts.
        what: the sentence, with fields of the entry in braces.
        advice: what to do, the most useful first; MODEL stands for the model's name, OPTIONS for
            those of `mlxsup logs`, PID for the process.
    """

    name: str
    fits: Callable[[WorkerDied], bool]
    what: str
    advice: tuple[str, ...] = ()


CAUSES = (
    Cause("cannot_be_ended", lambda died: died.reason == GIVEN_UP,
          "SIGKILL has not ended its process (pid {pid}): it hangs in the kernel, usually in a"
          " driver or on a disk",
          ("find out what it waits for: `ps -o pid,stat,wchan:32,args -p PID` (Linux)",
           "it is loaded again once that process is gone; if it never goes, restart the machine")),
    Cause("asked", lambda died: died.reason == ExitReason.ASKED,
          "its process was ended because that was asked for ({ended})"),
    Cause("other_version", lambda died: died.reason == ExitReason.VERSION,
          "its worker was of another version than the daemon: {detail}",
          ("`mlxsup stop`, then `mlxsup start`",)),
    Cause("bug", lambda died: died.reason == ExitReason.INTERNAL,
          "mlxsup itself has a bug: {detail}", ("`mlxsup restart MODEL`", REPORT)),
    Cause("not_started", lambda died: died.reason == ExitReason.SPAWN_ERROR,
          "its process {detail}",
          ("look at the limits and the memory of this machine: `ulimit -a`, `mlxsup status`",
           AGAIN)),
    Cause("stopped_from_outside", lambda died: died.ended_by == "suspended",
          "its process had been stopped from outside mlxsup (SIGSTOP), so it was killed and"
          " replaced",
          (f"find out what stops processes here, a debugger or a shell; {BLAMELESS}",)),
    Cause("load_stalled",
          lambda died: died.ended_by == "stall" and "the load made no progress" in died.detail,
          "its load hung: {detail}",
          ("is the disk slow, or gone? If it only needs longer, raise `load_stall_timeout_s`",
           STACKS)),
    Cause("silent", lambda died: died.ended_by == "stall" and "no sign of life" in died.detail,
          "it hung, and something held the interpreter: {detail}", (STACKS, LONGER_STEPS)),
    Cause("stuck", lambda died: died.ended_by == "stall",
          "it hung: {detail}", (STACKS, LONGER_STEPS)),
    Cause("too_large", lambda died: died.ended_by == "too_large",
          "it needs more memory than it may have: {detail}",
          ("`mlxsup plan` shows what fits",
           "raise `memory` of MODEL or `memory_budget`, or lower `max_concurrency` or"
           " `context_length`, then `mlxsup reload`")),
    Cause("broken", lambda died: died.ended_by == "broken",
          "its process lived, but was of no use any longer, and was killed: {detail}",
          (f"nothing, if it stays the only time; {BLAMELESS}", REPORT)),
    Cause("killed_over_memory",
          lambda died: died.cause == "out of memory" and died.signal == "SIGKILL",
          "the system killed it (SIGKILL) when it held {held}, with a limit of {limit}",
          (FITS, LOWER)),
    Cause("out_of_memory", lambda died: died.cause == "out of memory",
          "it ran out of memory ({ended}) when it held {held}", (FITS, LOWER)),
    Cause("model_missing", lambda died: died.cause == "model missing",
          "files of the model are missing: {detail}",
          ("`mlxsup models` lists what is on this machine",
           "correct `path` in the configuration and `mlxsup reload`, or bring the files back and"
           " `mlxsup restart MODEL`")),
    Cause("bad_model", lambda died: died.cause == "bad model",
          "the model's files cannot be used: {detail}",
          ("`mlxsup show MODEL` says what they are; download or convert them again", AGAIN)),
    Cause("no_device", lambda died: died.cause == "no usable device",
          "there is no device that MLX can use: {detail}",
          ("is the driver loaded, and MLX installed for this machine?", AGAIN)),
    Cause("bad_launch", lambda died: died.code == ExitCode.BAD_LAUNCH,
          "its worker could not do with what its entry says: {detail}",
          ("correct the entry in the configuration, then `mlxsup reload`",)),
    Cause("gpu_timeout", lambda died: died.cause == "GPU time-out",
          "the GPU gave up work that took too long ({ended})",
          ("lower `decode_stall_target_ms` of MODEL, so that prompts are read in smaller parts",
           "see what else uses the GPU")),
    Cause("gpu_fault_elsewhere", lambda died: died.cause == "GPU fault of another process",
          "the GPU failed because of another process ({ended})",
          (f"see what else uses the GPU; {BLAMELESS}",)),
    Cause("stream_error", lambda died: died.cause == "stream error",
          "a thread used a stream of MLX that belongs to another one ({ended})", (REPORT,)),
    Cause("stuck_prompt", lambda died: died.code == ExitCode.STUCK_PROMPT,
          "a template or a tokeniser took too long, or too much memory: {detail}",
          (STACKS, QUARANTINE,
           "if honest prompts take that long here, raise `step_timeout_s`: preparing one may take"
           f" {TEXT_LIMIT_STEPS:g} times as long")),
    Cause("broken_link", lambda died: died.code == ExitCode.LINK_BROKEN,
          "the daemon sent it what it did not expect: {detail}",
          (LAST_LINES, QUARANTINE, REPORT)),
    # Also for the first time, when the next attempt is still to come.
    Cause("load_error",
          lambda died: died.reason == ExitReason.LOAD_ERROR
          or (died.ready_s is None and died.code == ExitCode.STEP_ERROR),
          "its load failed ({ended}): {detail}",
          (LAST_LINES,
           "a load that fails twice in the same way is not tried again; once the cause is gone:"
           " `mlxsup restart MODEL`")),
    Cause("killed_from_outside", lambda died: died.signal == "SIGKILL",
          "its process was killed from outside mlxsup (SIGKILL)",
          (WAS_IT_THE_SYSTEM, BLAMELESS)),
    Cause("terminated_from_outside",
          lambda died: died.signal == "SIGTERM" or died.code == TERMINATED,
          "its process was asked to end from outside mlxsup (SIGTERM)",
          (f"end models with `mlxsup unload MODEL`; {BLAMELESS}",)),
    Cause("native_crash", lambda died: died.signal in NATIVE,
          "it crashed in native code ({signal})",
          (f"{STACKS}, if it could write them", QUARANTINE)),
    Cause("signal", lambda died: bool(died.signal),
          "a signal ended its process ({signal})", ("find out what sent it", LAST_LINES)),
    Cause("step_error", lambda died: died.code == ExitCode.STEP_ERROR,
          "a step of its engine failed: {detail}", (LAST_LINES, QUARANTINE)),
    Cause("lost_thread", lambda died: died.code == ExitCode.WORKER_FAULT,
          "it lost one of its threads or rows: {detail}", (LAST_LINES, REPORT)),
    Cause("orphaned", lambda died: died.code == ORPHANED,
          "it ended itself (exit code 1): it had lost its daemon, or a step hung",
          (LAST_LINES,)),
    Cause("exited", lambda died: died.code == ExitCode.ASKED,
          "its process exited without having been asked to", (LAST_LINES,)),
    Cause("unknown", lambda died: True,
          "its process ended for a reason that mlxsup does not know ({ended})",
          (LAST_LINES, REPORT)),
)  # fmt: skip
"""In the order in which they are tried."""


class Explanation(NamedTuple):
    """A death in words; see `Cause`."""

    name: str
    what: str
    advice: tuple[str, ...]


def explain(died: WorkerDied, log_options: str = "") -> Explanation:
    """Return what a death means, and what to do.

    Args:
        died: the death.
        log_options: with which `mlxsup logs` shows its last lines: none, unless a process of the
            model has started since.
    """
    cause = next(cause for cause in CAUSES if cause.fits(died))
    ended = died.signal or (f"exit code {died.code}" if died.code is not None else "no exit")
    what = cause.what.format(
        detail=died.detail or ended,
        ended=ended,
        pid=died.pid or "not known",
        signal=died.signal,
        held=size_text(max(died.footprint_bytes, died.active_bytes + died.cache_bytes)),
        limit=size_text(died.limit_bytes or died.machine_bytes),
    )
    is_told = "{detail}" in cause.what or died.ended_by or died.reason == GIVEN_UP
    if died.detail and not is_told:
        what += f"; its last words: {died.detail}"
    advice = tuple(
        one.replace("PID", str(died.pid or "PID"))
        .replace(" OPTIONS", log_options and f" {log_options}")
        .replace("MODEL", died.model)
        for one in cause.advice
        if died.rows or one != QUARANTINE
    )
    return Explanation(cause.name, what, advice)
