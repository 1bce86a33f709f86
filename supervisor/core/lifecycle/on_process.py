"""The rules for what a process does: come up, serve, end when asked, misbehave."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.ids import Generation
from mlxsup.protocol.states import LoadPhase, Wanted, Why

from ..errors import cut_off
from .effects import Changed, QueueEnds, RunningEnds, UpWaitersEnd
from .life import Life
from .load_times import LoadTimes
from .states import Backoff, Loading, Pending, Phase, Ready, StopCause, Stopping, StopStage
from .triggers import (
    BecameReady,
    Broke,
    Drained,
    Due,
    Greeted,
    GreetedByOtherVersion,
    HasPid,
    HitBug,
    Hurry,
    LoadedTooLarge,
    Progressed,
    Stalled,
    Suspended,
    Trigger,
    Turn,
)

# ---------------------------------------------------------------- the process comes up


def spawn(life: Life, phase: Pending, trigger: Turn, now: float) -> None:
    life.generation = Generation(life.generation + 1)
    life.launched = life.settings.launch
    life.is_after_crash = phase.is_after_crash
    if life.is_after_crash:
        life.crash_restarts += 1
    life.has_been_ready = False
    life.granted_bytes = life.needed_bytes
    life.raise_bytes = life.need.raise_for(life.stream_tokens) if life.need else 0
    life.reserved_bytes = life.granted_bytes  # before the load; what is measured corrects it
    life.enter(
        Loading(
            since=now,
            stalls_at=now + life.settings.load_stall_timeout_s,
            is_restart=life.why is Why.RESTART,
        )
    )
    life.load_times = LoadTimes.begun(now, life.load_times)
    life.spawn(trigger.spare)


def pid_while_loading(life: Life, phase: Phase, trigger: HasPid, now: float) -> None:
    life.pid = trigger.pid


def pid_while_stopping(life: Life, phase: Stopping, trigger: HasPid, now: float) -> None:
    life.pid = trigger.pid
    life.tell_to_end(phase.stage)


def greeted(life: Life, phase: Loading, trigger: Greeted, now: float) -> None:
    progressed(life, phase, Progressed(phase=LoadPhase.IMPORT, progress=0.0), now)


def other_version(life: Life, phase: Phase, trigger: GreetedByOtherVersion, now: float) -> None:
    detail = f"mlxsup was upgraded to {trigger.version}; restart the daemon"
    life.stop(StopCause.VERSION, now, stage=StopStage.TERM, detail=detail)


def progressed(life: Life, phase: Loading, trigger: Progressed, now: float) -> None:
    has_advanced = trigger.progress > phase.progress or trigger.phase is not phase.load_phase
    if has_advanced:  # only progress renews the limit; a repeated report does not
        times = life.load_times.entered(trigger.phase, now)
        life.load_times = times.reached(trigger.progress, now)
        life.phase = phase = replace(
            phase,
            load_phase=trigger.phase,
            progress=max(phase.progress, trigger.progress),
            stalls_at=now + life.settings.load_stall_timeout_s,
        )
        life.do(Changed(note=f"{trigger.phase} {phase.progress:.0%}"))


def too_large(life: Life, phase: Loading, trigger: LoadedTooLarge, now: float) -> None:
    life.stop(StopCause.TOO_LARGE, now, stage=StopStage.TERM, detail=trigger.detail)


def ready(life: Life, phase: Phase, trigger: BecameReady, now: float) -> None:
    life.has_been_ready = True
    if life.why is Why.RESTART:
        life.why = Why.USER  # done: a later crash counts as a crash
    elif life.why is Why.SWAP:
        life.why = Why.REQUEST  # it has its turn again
    life.enter(Ready(since=now))
    life.do(UpWaitersEnd(error=None))


# ---------------------------------------------------------------- the process goes


def drained(life: Life, phase: Phase, trigger: Drained, now: float) -> None:
    life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=life.wanted is Wanted.UP)


def drain_limit(life: Life, phase: Phase, trigger: Due | Hurry, now: float) -> None:
    if life.wanted is not Wanted.UP:  # those of a restart are handled at the exit, as after a crash
        error = cut_off(life.name, life.why)
        life.do(RunningEnds(error=error), QueueEnds(error=life.waiting_error))
    life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=life.wanted is Wanted.UP)


def load_stalled(life: Life, phase: Loading, trigger: Due, now: float) -> None:
    limit_s = life.settings.load_stall_timeout_s
    detail = f"the load made no progress for {limit_s:g} s"
    # Before HELLO the signal that prints stacks would only end the process.
    stage = StopStage.KILL if phase.load_phase is LoadPhase.SPAWN else StopStage.DUMP
    life.stop(StopCause.STALL, now, stage=stage, detail=detail)


def stalled(life: Life, phase: Phase, trigger: Stalled, now: float) -> None:
    life.stop(StopCause.STALL, now, stage=StopStage.DUMP, detail=trigger.detail)


def suspended(life: Life, phase: Phase, trigger: Suspended, now: float) -> None:
    detail = "another program stopped its process (SIGSTOP)"
    life.stop(StopCause.SUSPENDED, now, stage=StopStage.KILL, detail=detail)


def escalate(life: Life, phase: Stopping, trigger: Due | Hurry, now: float) -> None:
    match phase.stage:
        case StopStage.ASK:
            stage = StopStage.TERM
        case StopStage.DUMP | StopStage.TERM | StopStage.KILL:
            stage = StopStage.KILL
    if stage is not phase.stage or isinstance(trigger, Due):
        # Due again after SIGKILL: there is no pid yet to give up.
        life.phase = replace(phase, stage=stage, escalates_at=now + life.limit_s(stage))
    life.tell_to_end(stage)


def idle(life: Life, phase: Ready, trigger: Due, now: float) -> None:
    """Nothing has run for `idle_unload_s`: unloads; see `Model.state_deadline`."""
    life.want(Wanted.DOWN, Why.IDLE)
    life.drain(phase, 0.0, now, str(Why.IDLE))


def retry(life: Life, phase: Backoff, trigger: Due, now: float) -> None:
    cause = phase.download_cause
    life.enter(Pending(since=now, is_after_crash=not cause, download_cause=cause))


def broke(life: Life, phase: Phase, trigger: Broke, now: float) -> None:
    life.stop(StopCause.BROKEN, now, stage=StopStage.KILL, detail=trigger.detail)


def bug_with_process(life: Life, phase: Phase, trigger: HitBug, now: float) -> None:
    life.stop(StopCause.INTERNAL, now, stage=StopStage.KILL, detail=trigger.detail)


def bug_while_stopping(life: Life, phase: Stopping, trigger: HitBug, now: float) -> None:
    life.phase = replace(phase, cause=StopCause.INTERNAL, detail=trigger.detail)


def nothing(life: Life, phase: Phase, trigger: Trigger, now: float) -> None:
    """Ignores a deadline of an earlier state, a message that crossed a command on its way, or a bug
    without a process to end."""
