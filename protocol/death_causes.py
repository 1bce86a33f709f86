"""The causes of a worker's death, for `why` and the page: a sentence and what helps for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .flight import GIVEN_UP, WorkerDied
from .launch import TEXT_LIMIT_STEPS, ExitCode
from .states import DeathCause, ExitReason
from .text import size_text

TERMINATED = 143
"""The exit code of a worker after a SIGTERM that the supervisor did not send."""
ORPHANED = 1

NATIVE = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"})
"""Signals that a process brings upon itself."""

STACKS = "`mlxsup logs MODEL OPTIONS` shows the stacks of its threads"
LAST_LINES = "`mlxsup logs MODEL OPTIONS` shows its last lines"
AGAIN = "then run `mlxsup restart MODEL`"
REPORT = "please report it with the file from `mlxsup why MODEL --report FILE`"
BLAMELESS = "no request is to blame"
QUARANTINE = "if the same request causes it again, mlxsup quarantines that request"
FITS = "`mlxsup plan` shows what fits together"
LOWER = "lower `max_concurrency` or `context_length` of MODEL, or load fewer models"
LONGER_STEPS = "if its steps are just slow, raise `step_timeout_s`"
WAS_IT_THE_SYSTEM = (
    "check whether the system was out of memory: `journalctl -k | grep -i 'out of memory'`; "
    "on a Mac, `log show --last 1h | grep -i jetsam`"
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
          "SIGKILL did not end its process (pid {pid}), which hangs in the kernel, usually in "
          "a driver or on a disk",
          ("find out what it waits for: `ps -o pid,stat,wchan:32,args -p PID` (Linux)",
           "it is loaded again once that process is gone; otherwise reboot the machine")),
    Cause("asked", lambda died: died.reason == ExitReason.ASKED,
          "its process was ended on request ({ended})"),
    Cause("other_version", lambda died: died.reason == ExitReason.VERSION,
          "its worker had another version than the daemon: {detail}",
          ("restart the daemon with `mlxsup stop` and `mlxsup start`",)),
    Cause("bug", lambda died: died.reason == ExitReason.INTERNAL,
          "mlxsup itself has a bug: {detail}", ("`mlxsup restart MODEL`", REPORT)),
    Cause("not_started", lambda died: died.reason == ExitReason.SPAWN_ERROR,
          "its process {detail}",
          ((
              "check the limits and the memory of this machine with `ulimit -a` and `mlxsup "
              "status`"
          ),
           AGAIN)),
    Cause("stopped_from_outside", lambda died: died.ended_by == "suspended",
          "another program stopped its process (SIGSTOP), so mlxsup killed and replaced it",
          (f"find out what stopped it, such as a debugger or a shell; {BLAMELESS}",)),
    Cause("load_stalled",
          lambda died: died.ended_by == "stall" and "the load made no progress" in died.detail,
          "its load hung: {detail}",
          ((
              "check whether the disk is slow or gone; if the load is just slow, raise "
              "`load_stall_timeout_s`"
          ),
           STACKS)),
    Cause("silent", lambda died: died.ended_by == "stall" and "no sign of life" in died.detail,
          "it hung, and something blocked the interpreter: {detail}", (STACKS, LONGER_STEPS)),
    Cause("stuck", lambda died: died.ended_by == "stall",
          "it hung: {detail}", (STACKS, LONGER_STEPS)),
    Cause("too_large", lambda died: died.ended_by == "too_large",
          "it needs more memory than it may use: {detail}",
          ("`mlxsup plan` shows what fits",
           "raise `memory` of MODEL or `memory_budget`, or lower `max_concurrency` or"
           " `context_length`, then `mlxsup reload`")),
    Cause("broken", lambda died: died.ended_by == "broken",
          "its process was alive but broken, so it was killed: {detail}",
          (f"nothing, unless it happens again; {BLAMELESS}", REPORT)),
    Cause("killed_over_memory",
          lambda died: died.cause == DeathCause.OUT_OF_MEMORY and died.signal == "SIGKILL",
          "the system killed it (SIGKILL) when it used {held}, with a limit of {limit}",
          (FITS, LOWER)),
    Cause("out_of_memory", lambda died: died.cause == DeathCause.OUT_OF_MEMORY,
          "it ran out of memory ({ended}) when it used {held}", (FITS, LOWER)),
    Cause("model_missing", lambda died: died.cause == DeathCause.MODEL_MISSING,
          "files of the model are missing: {detail}",
          ("`mlxsup models` lists the models on this machine",
           "correct `path` in the configuration and run `mlxsup reload`, or restore the files "
           "and run `mlxsup restart MODEL`")),
    Cause("bad_model", lambda died: died.cause == DeathCause.BAD_MODEL,
          "the model's files cannot be used: {detail}",
          ("`mlxsup show MODEL` describes them; download or convert them again", AGAIN)),
    Cause("no_device", lambda died: died.cause == DeathCause.NO_DEVICE,
          "MLX found no usable device: {detail}",
          ("check that the driver is loaded and that MLX is installed for this machine", AGAIN)),
    Cause("bad_launch", lambda died: died.code == ExitCode.BAD_LAUNCH,
          "its worker rejected the settings of the model: {detail}",
          ("correct the settings in the configuration, then run `mlxsup reload`",)),
    Cause("gpu_timeout", lambda died: died.cause == DeathCause.GPU_TIMEOUT,
          "the GPU aborted work that took too long ({ended})",
          ("lower `decode_stall_target_ms` of MODEL, so that prompts are read in smaller parts",
           "check what else uses the GPU")),
    Cause("gpu_fault_elsewhere", lambda died: died.cause == DeathCause.GPU_FAULT_ELSEWHERE,
          "the GPU failed because of another process ({ended})",
          (f"check what else uses the GPU; {BLAMELESS}",)),
    Cause("stream_error", lambda died: died.cause == DeathCause.STREAM_ERROR,
          "a thread used an MLX stream of another thread ({ended})", (REPORT,)),
    Cause("stuck_prompt", lambda died: died.code == ExitCode.STUCK_PROMPT,
          "a chat template or tokenizer took too long or too much memory: {detail}",
          (STACKS, QUARANTINE,
           "if normal prompts take that long, raise `step_timeout_s`; preparing a prompt may "
           f"take {TEXT_LIMIT_STEPS:g} times as long")),
    Cause("rank_lost", lambda died: died.cause == DeathCause.RANK_LOST,
          "a host that serves it with this one was lost: {detail}",
          ("`mlxsup hosts check MODEL` looks at each of its hosts", LAST_LINES, BLAMELESS)),
    Cause("broken_link", lambda died: died.code == ExitCode.LINK_BROKEN,
          "the daemon sent it an unexpected message: {detail}",
          (LAST_LINES, QUARANTINE, REPORT)),
    # Also for the first time, when the next attempt is still to come.
    Cause("load_error",
          lambda died: died.reason == ExitReason.LOAD_ERROR
          or (died.ready_s is None and died.code == ExitCode.STEP_ERROR),
          "its load failed ({ended}): {detail}",
          (LAST_LINES,
           "a load that fails twice in the same way is not retried; fix the cause, then run "
           "`mlxsup restart MODEL`")),
    Cause("killed_from_outside", lambda died: died.signal == "SIGKILL",
          "another program killed its process (SIGKILL)",
          (WAS_IT_THE_SYSTEM, BLAMELESS)),
    Cause("terminated_from_outside",
          lambda died: died.signal == "SIGTERM" or died.code == TERMINATED,
          "another program ended its process (SIGTERM)",
          (f"use `mlxsup unload MODEL` to end a model; {BLAMELESS}",)),
    Cause("native_crash", lambda died: died.signal in NATIVE,
          "it crashed in native code ({signal})",
          (f"{STACKS}, if they were written", QUARANTINE)),
    Cause("signal", lambda died: bool(died.signal),
          "a signal ended its process ({signal})", ("find out what sent it", LAST_LINES)),
    Cause("step_error", lambda died: died.code == ExitCode.STEP_ERROR,
          "a step of its engine failed: {detail}", (LAST_LINES, QUARANTINE)),
    Cause("lost_thread", lambda died: died.code == ExitCode.WORKER_FAULT,
          "it lost one of its threads or rows: {detail}", (LAST_LINES, REPORT)),
    # Python exits with it if it cannot import mlxsup; no daemon is left that sees an orphan's end.
    Cause("not_begun", lambda died: died.code == ORPHANED and died.ready_s is None,
          "its process could not begin: {detail}",
          ("if mlxsup is being upgraded, wait: the next attempt follows; otherwise install it "
           "again",
           LAST_LINES)),
    Cause("orphaned", lambda died: died.code == ORPHANED,
          "it exited with code 1, because the daemon was gone or a step hung",
          (LAST_LINES,)),
    Cause("exited", lambda died: died.code == ExitCode.ASKED,
          "its process exited unexpectedly", (LAST_LINES,)),
    Cause("unknown", lambda died: True,
          "its process ended for an unknown reason ({ended})",
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
