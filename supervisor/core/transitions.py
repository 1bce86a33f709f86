"""The transitions of a model's life: one function per state with a case per trigger, and the
judgement on the end of a process.

`apply` is the only way to change a state. A trigger without a case is a bug, except that a process
that is STOPPING may still say anything: its message crossed the command on its way.

An exit, its last lines and the state of the model show the cause of a death: a class to count and
to act on, and what the death says about the requests that the worker held. The same error in two
loads in a row is permanent, because most of what a load raises follows from the files; lack of
memory, faults of the GPU and signals depend on the neighbours and are tried again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from mlxsup.protocol.download import DownloadDone, DownloadFailed, Repository
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import Generation
from mlxsup.protocol.launch import PERMANENT_EXITS, ExitCode
from mlxsup.protocol.states import DeathCause, ExitReason, LoadPhase, Wanted, Why
from mlxsup.protocol.worker_messages import Hello, LoadProgress
from mlxsup.protocol.worker_messages import Ready as ReadyMessage

from .actions import Abandon, ForgetModel, Spawn
from .errors import cut_off, load_failed, model_failed
from .events import Spawned
from .life import (
    Changed,
    GiveUp,
    LastExit,
    Life,
    LoadTimes,
    Outcome,
    RowsLeave,
    RunningLost,
    Waiters,
)
from .poison import Evidence
from .states import (
    Abandoned,
    Backoff,
    Died,
    Drained,
    Draining,
    Due,
    Failed,
    Faulted,
    Fetching,
    GivenUp,
    Lack,
    LacksMemory,
    Loading,
    NoMemory,
    Pending,
    Ready,
    Reconfigured,
    Removed,
    Shortage,
    StopCause,
    Stopped,
    Stopping,
    StopStage,
    SwapCalledOff,
    SwappedOut,
    Swapping,
    Trigger,
    Turn,
    WantDown,
    WantRestart,
    WantUp,
)

# ---------------------------------------------------------------- one trigger

DOING = {
    LoadPhase.SPAWN: "its process started",
    LoadPhase.IMPORT: "MLX was imported",
    LoadPhase.WEIGHTS: "its weights were opened",
    LoadPhase.MATERIALISE: "its weights were read",
    LoadPhase.WARMUP: "it was warmed up",
}

FIRST_STAGE = {
    StopCause.STALL: StopStage.DUMP,
    StopCause.SUSPENDED: StopStage.KILL,
    StopCause.BROKEN: StopStage.KILL,
    StopCause.VERSION: StopStage.TERM,
    StopCause.TOO_LARGE: StopStage.TERM,
    StopCause.INTERNAL: StopStage.KILL,
}
"""The first stage of ending a process with this fault."""


class ImpossibleTransitionError(Exception):
    """The state has no case for this trigger: a bug."""


def apply(life: Life, trigger: Trigger, now: float) -> list[Outcome]:
    """Change a life by a trigger, and return what follows from that.

    Raises:
        ImpossibleTransitionError: the state has no case for it; nothing was changed.
    """
    match life.phase:
        case Abandoned():
            _abandoned(life, trigger, now)
        case Stopped() | Backoff() | Failed() as phase:
            _at_rest(life, phase, trigger, now)
        case Pending() as phase:
            _pending(life, phase, trigger, now)
        case Loading() as phase:
            _loading(life, phase, trigger, now)
        case Ready():
            _ready(life, trigger, now)
        case Draining() as phase:
            _draining(life, phase, trigger, now)
        case Swapping() as phase:
            _swapping(life, phase, trigger, now)
        case Stopping() as phase:
            _stopping(life, phase, trigger, now)
        case phase:
            assert_never(phase)
    return life.take_outcomes()


# ---------------------------------------------------------------- without a process


def _at_rest(life: Life, phase: Stopped | Backoff | Failed, trigger: Trigger, now: float) -> None:
    """Nothing runs, and nothing is about to."""
    match trigger:
        case WantUp(why=why):
            _start(life, why, now)
        case WantRestart():
            _start(life, Why.RESTART, now)
        case WantDown(why=why) if isinstance(phase, Stopped):
            life.want(Wanted.DOWN, why)
            life.answer(Waiters.CALLERS_DOWN)
        case WantDown(why=why):
            _stay_down(life, why, now)
        case Removed(error=error):
            _erase(life, error)
        case Reconfigured(settings=settings):
            if life.adopt(settings) and not isinstance(phase, Stopped):
                life.want(Wanted.UP, Why.RELOAD)
                life.enter(Pending(since=now))
        case Due() if isinstance(phase, Backoff):
            cause = phase.download_cause
            life.enter(Pending(since=now, is_after_crash=not cause, download_cause=cause))
        case _:
            raise _impossible(life, trigger)


def _pending(life: Life, phase: Pending, trigger: Trigger, now: float) -> None:
    """Handle a trigger while it waits for its turn, for memory or for files. It holds no memory
    meanwhile: two models that wait for each other would wait for ever."""
    match trigger:
        case WantUp(why=why):
            life.join(why)
        case WantRestart():
            life.want(Wanted.UP, Why.RESTART)
        case WantDown(why=why):
            _stay_down(life, why, now)
        case Removed(error=error):
            _erase(life, error)
        case Reconfigured(settings=settings):
            life.adopt(settings)
            if phase.fetching is not None and settings.download is None:
                _has_files(life, phase, "", now)
        case Turn(prewarmed=prewarmed):
            _spawn(life, phase, prewarmed, now)
        case LacksMemory(lack=Lack() as lack):
            _wait_for_memory(life, phase, lack)
        case LacksMemory():
            life.phase = replace(phase, lack=None)
        case NoMemory(error=error, reason=reason):
            # All who wait are answered. What came up for the configuration stays wanted, because
            # a reload may make room; what came up for those who are answered does not.
            life.answer(Waiters.QUEUE, error)
            life.answer(Waiters.CALLERS_UP, error)
            if life.settings.preload and life.why in (Why.PRELOAD, Why.RELOAD):
                since = phase.lack.since if phase.lack else now
                _wait_for_memory(life, phase, Lack(since=since, reason=reason))
            else:
                life.want(Wanted.DOWN, Why.MEMORY)
                life.enter(Stopped(since=now), error.message)
        case Fetching() as fetching:  # others load meanwhile
            cause = "" if fetching.total_bytes else phase.download_cause  # the hub has answered
            life.phase = replace(phase, lack=None, fetching=fetching, download_cause=cause)
            life.release_memory()
            life.do(Changed(""))
        case DownloadDone(folder=folder):
            launch = replace(life.settings.launch, path=folder)
            life.settings = replace(life.settings, launch=launch, download=None)
            life.restarts.outage_ended()
            _has_files(life, phase, "downloaded", now)
        case DownloadFailed() as failed:
            _not_downloaded(life, failed, now)
        case Due():  # there may be memory: the plan looks again
            pass
        case _:
            raise _impossible(life, trigger)


def _abandoned(life: Life, trigger: Trigger, now: float) -> None:
    """Handle a trigger while its process cannot be ended: the model gets no other one before that
    has exited."""
    match trigger:
        case WantUp() | WantRestart():
            life.answer(
                Waiters.CALLERS_UP, load_failed(life.name, life.failure, is_retryable=False)
            )
        case WantDown(why=why):
            life.want(Wanted.DOWN, why)
            life.answer(Waiters.CALLERS_DOWN, model_failed(life.name, life.failure))
        case Removed(error=error):
            life.remove(error)
        case Reconfigured(settings=settings):
            if life.adopt(settings) and life.wanted is not Wanted.DOWN:
                life.want(Wanted.UP, Why.RELOAD)
        case Died():
            _ended(life, trigger, now)
        case _:
            raise _impossible(life, trigger)


# ---------------------------------------------------------------- with a process


def _loading(life: Life, phase: Loading, trigger: Trigger, now: float) -> None:
    match trigger:
        case WantUp(why=why):
            life.join(why)
        case WantDown(why=why):
            life.want(Wanted.DOWN, why)
            life.stop(StopCause.ASKED, now, stage=StopStage.TERM)
        case WantRestart(is_immediate=is_immediate):
            life.want(Wanted.UP, Why.RESTART)
            if is_immediate and not phase.is_restart:  # otherwise this load is the restart
                life.stop(StopCause.ASKED, now, stage=StopStage.TERM, is_restart=True)
        case Removed(error=error):
            life.remove(error)
            life.stop(StopCause.ASKED, now, stage=StopStage.TERM)
        case Reconfigured(settings=settings):
            if life.adopt(settings):
                life.want(Wanted.UP, Why.RELOAD)
                life.stop(StopCause.ASKED, now, stage=StopStage.TERM)
        case Spawned(pid=pid):
            life.pid = pid
        case Hello():
            _advance(life, phase, LoadPhase.IMPORT, 0.0, now)
        case LoadProgress(phase=load_phase, progress=progress):
            _advance(life, phase, load_phase, progress, now)
        case ReadyMessage():  # announced after the warm-up
            life.ready_at = now
            if life.why is Why.RESTART:
                life.why = Why.USER  # done: a later crash counts as a crash
            elif life.why is Why.SWAP:
                life.why = Why.REQUEST  # it has its turn again
            life.enter(Ready(since=now))
        case Due():
            limit_s = life.settings.load_stall_timeout_s
            detail = f"the load made no progress for {limit_s:g} s while {DOING[phase.load_phase]}"
            # Before HELLO the signal that prints stacks would only end the process.
            is_silent = phase.load_phase is LoadPhase.SPAWN
            stage = StopStage.KILL if is_silent else StopStage.DUMP
            life.stop(StopCause.STALL, now, stage=stage, detail=detail)
        case _:
            _goes_wrong(life, trigger, now)


def _ready(life: Life, trigger: Trigger, now: float) -> None:
    match trigger:
        case WantUp():
            life.answer(Waiters.CALLERS_UP)
        case WantDown(why=why, drain_s=drain_s, reason=reason):
            life.want(Wanted.DOWN, why)
            life.drain(drain_s, now, reason or str(why))
        case WantRestart(is_immediate=is_immediate, drain_s=drain_s):
            life.want(Wanted.UP, Why.RESTART)
            if is_immediate:
                life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)
            else:
                life.drain(drain_s, now, "restart")
        case Removed(error=error, drain_s=drain_s):
            life.remove(error)
            life.drain(drain_s, now, "removed")
        case Reconfigured(settings=settings, drain_s=drain_s):
            if life.adopt(settings):
                life.want(Wanted.UP, Why.RELOAD)
                life.drain(drain_s, now, "reload")
        case Due():  # nothing has run for `idle_unload_s`: see `Model.state_deadline`
            life.want(Wanted.DOWN, Why.IDLE)
            life.drain(0.0, now, str(Why.IDLE))
        case SwappedOut(cause=cause, ran=ran, leave_s=leave_s, reason=reason):
            life.want(Wanted.UP, Why.SWAP)  # its requests wait until it is its turn again
            swapping = Swapping(since=now, due_at=now + leave_s, cause=cause, ran=ran)
            life.enter(swapping, reason)
            life.do(RowsLeave())
        case _:
            _goes_wrong(life, trigger, now)


def _draining(life: Life, phase: Draining, trigger: Trigger, now: float) -> None:
    match trigger:
        case WantUp(why=why):
            if life.wanted is Wanted.UP:
                return  # draining for a restart: it comes up again anyway
            life.want(Wanted.UP, why)
            if life.is_outdated:
                return  # a reload has changed its entry: it drains, then comes up with that
            _serve_on(life)
        case WantDown(why=why, drain_s=drain_s):
            life.want(Wanted.DOWN, why)
            life.phase = replace(phase, due_at=min(phase.due_at, now + drain_s))
        case WantRestart(is_immediate=is_immediate):
            life.want(Wanted.UP, Why.RESTART)
            if is_immediate:
                life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)
        case Removed(error=error):
            life.remove(error)
        case Reconfigured(settings=settings):
            # Idle or evicted, it keeps going down: a request would otherwise bring the old launch
            # back.
            goes_down = life.wanted is Wanted.DOWN
            is_asked = goes_down and life.why in (Why.USER, Why.SHUTDOWN)
            if not life.adopt(settings) or is_asked:
                return
            if goes_down:
                life.stop(StopCause.ASKED, now, stage=StopStage.ASK)
            else:
                life.want(Wanted.UP, Why.RELOAD)
        case Drained():
            is_restart = life.wanted is Wanted.UP
            life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=is_restart)
        case Due():
            is_restart = life.wanted is Wanted.UP
            if not is_restart:  # those of a restart are handled at the exit, as after a crash
                error = cut_off(life.name, life.why)
                life.answer(Waiters.RUNNING, error)
                life.answer(Waiters.QUEUE, life.waiting_error)
            life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=is_restart)
        case _:
            _goes_wrong(life, trigger, now)


def _swapping(life: Life, phase: Swapping, trigger: Trigger, now: float) -> None:
    """Handle a trigger while it makes room although it is busy, and stays wanted. Until its process
    is asked to exit, that can be called off."""
    match trigger:
        case WantUp(why=why):
            life.join(why)
        case WantDown(why=why, drain_s=drain_s):  # answers that have begun are completed first
            life.want(Wanted.DOWN, why)
            _drain_instead(life, drain_s, now)
        case WantRestart(is_immediate=is_immediate, drain_s=drain_s):
            # It comes up again at once: what needed its memory waits for its next turn to end.
            life.want(Wanted.UP, Why.RESTART)
            if is_immediate:
                life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)
            else:
                _drain_instead(life, drain_s, now)
        case Removed(error=error, drain_s=drain_s):
            life.remove(error)
            _drain_instead(life, drain_s, now)
        case Reconfigured(settings=settings, drain_s=drain_s):
            if life.adopt(settings):
                life.want(Wanted.UP, Why.RELOAD)
                _drain_instead(life, drain_s, now)
            elif life.settings.pinned:
                _stay(life, "stays: it is pinned now")
        case SwapCalledOff():  # rows that have left return
            if isinstance(phase.cause, Shortage):
                _stay(life, "stays: memory is no longer short")
            else:
                _stay(life, f"stays: {phase.cause} no longer needs its memory")
        case Drained() | Due():  # what still runs continues as after a crash, which accuses nothing
            cause = phase.cause
            why_it_goes = cause.reason if isinstance(cause, Shortage) else f"for {cause}"
            detail = f"swapped out {why_it_goes}"
            life.stop(StopCause.SWAP, now, stage=StopStage.ASK, detail=detail)
        case _:
            _goes_wrong(life, trigger, now)


def _stopping(life: Life, phase: Stopping, trigger: Trigger, now: float) -> None:
    match trigger:
        case WantUp(why=why):
            life.join(why)
        case WantDown(why=why):
            life.want(Wanted.DOWN, why)
        case WantRestart():
            life.want(Wanted.UP, Why.RESTART)
            life.phase = replace(phase, is_restart=True)
        case Removed(error=error):
            life.remove(error)
        case Reconfigured(settings=settings):
            if life.adopt(settings) and life.wanted is not Wanted.DOWN:
                life.want(Wanted.UP, Why.RELOAD)
                life.phase = replace(phase, is_restart=True)
        case Spawned(pid=pid):
            life.pid = pid
            # The limit counts from the signal, which could not be sent before.
            life.phase = replace(phase, due_at=now + life.limit_s(phase.stage))
            life.tell_to_end(phase.stage)
        case Due():
            stage = StopStage.TERM if phase.stage is StopStage.ASK else StopStage.KILL
            if stage is not phase.stage or life.pid is None:  # there is nothing yet to give up
                life.phase = replace(phase, stage=stage, due_at=now + life.limit_s(stage))
            life.tell_to_end(stage)
        case Faulted(cause=StopCause.INTERNAL, detail=detail):
            life.phase = replace(phase, cause=StopCause.INTERNAL, detail=detail)
        case GivenUp():
            _given_up(life, trigger, now)
        case Died():
            _ended(life, trigger, now)
        case Hello() | LoadProgress() | ReadyMessage() | Faulted():
            pass
        case _:
            raise _impossible(life, trigger)


def _goes_wrong(life: Life, trigger: Trigger, now: float) -> None:
    """Handle what its process must not do, or its end, while it loads, serves or drains."""
    match trigger:
        case Faulted(cause=cause, detail=detail):
            life.stop(cause, now, stage=FIRST_STAGE[cause], detail=detail)
        case Died():
            _ended(life, trigger, now)
        case _:
            raise _impossible(life, trigger)


# ---------------------------------------------------------------- the end of a process

FAILING = (ExitReason.INTERNAL, ExitReason.VERSION, ExitReason.LOAD_ERROR)
"""What another attempt would only repeat."""


def _ended(life: Life, died: Died, now: float) -> None:
    """Decide what follows the end of a process, in every state that has one; nothing else does."""
    phase, stopping = life.phase, ending_of(life, died)
    reason = exit_reason(life, died)
    text, detail = died.text, died.said
    if stopping is not None and stopping.detail:
        text = detail = stopping.detail
    if isinstance(phase, Abandoned):
        text = f"process {life.pid} has finally ended"
    if life.restarts.fails_alike(load_error(life, died)) and reason is ExitReason.CRASH:
        reason = ExitReason.LOAD_ERROR
        text += ", as the time before"
    is_lost = reason is ExitReason.LOAD_ERROR and _has_lost_files(life, died)
    is_swap = stopping is not None and stopping.cause is StopCause.SWAP
    is_restart = stopping.is_restart if stopping else isinstance(phase, Draining)
    ready_s = life.ready_for_s(now)
    if ready_s is not None and ready_s >= life.settings.restart.stable_s:
        life.restarts.was_stable()
    life.last_exit = LastExit(
        reason=reason,
        code=died.exit_code,
        signal=died.signal_name or None,
        detail=detail,
        at=died.at,
        cause=died.cause,
    )
    life.exits[reason, died.cause] += 1
    life.do(RunningLost(text, died.verdict))
    was_given_up = text if isinstance(phase, Abandoned) else ""
    if life.wanted is not Wanted.UP:
        is_gone = life.wanted is Wanted.GONE
        life.answer(Waiters.QUEUE, life.waiting_error)
        life.enter(Stopped(since=now), "removed" if is_gone else was_given_up)
        if is_gone:
            life.do(ForgetModel(model=life.name))
    elif reason in FAILING and not is_lost:
        _fail(life, text, now)
    elif died.verdict.failure:
        _fail(life, f"{died.verdict.failure}, the last time: {text}", now)
    elif is_lost:  # it is PENDING until its repository is there, as if it had never been downloaded
        lost = Repository(life.settings.repo, life.settings.revision)
        life.settings = replace(life.settings, download=lost)
        life.enter(Pending(since=now), text)
    elif is_swap:  # it waits for memory as others do, and its requests wait with it
        if is_restart:  # asked for meanwhile
            life.restarts.clean()
        life.reserved_bytes = 0
        lack = Lack(since=now, reason=f"was {text}")
        life.enter(Pending(since=now, lack=lack), text)
    elif is_restart:
        life.restarts.clean()
        life.enter(Pending(since=now), "")
    elif reason is ExitReason.ASKED:
        life.reserved_bytes = 0  # it was to go, and others may wait for its memory
        life.enter(Pending(since=now), was_given_up)
    elif not died.verdict.is_counted:
        life.enter(Pending(since=now, is_after_crash=True), text)
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


def _after_crash(life: Life, text: str, now: float) -> None:
    was_loading = life.ready_at is None
    verdict = life.restarts.after_crash(now)
    if isinstance(verdict, GiveUp):
        _fail(life, f"{verdict.reason}, the last time: {text}", now)
        return
    if was_loading:  # F8: those who wait for the load itself are notified; requests keep waiting
        life.answer(Waiters.CALLERS_UP, load_failed(life.name, text, is_retryable=True))
    if verdict > 0.0:
        life.enter(Backoff(since=now, due_at=now + verdict), text)
    else:
        life.enter(Pending(since=now, is_after_crash=True), text)


def _fail(life: Life, cause: str, now: float) -> None:
    life.enter(Failed(since=now, cause=cause), cause)


def _given_up(life: Life, trigger: GivenUp, now: float) -> None:
    """SIGKILL has not ended the process: what waited for its exit continues without it (P26)."""
    cause = trigger.text
    failed = load_failed(life.name, cause, is_retryable=False)
    error = failed if life.wanted is Wanted.UP else life.waiting_error
    life.do(RunningLost(cause, trigger.verdict))
    life.answer(Waiters.QUEUE, error)
    life.enter(Abandoned(since=now, cause=cause), cause)
    life.answer(Waiters.CALLERS_UP, failed)
    life.answer(Waiters.CALLERS_DOWN, model_failed(life.name, cause))
    life.do(Abandon(model=life.name, generation=life.generation))


# ---------------------------------------------------------------- steps of several states


def _impossible(life: Life, trigger: Trigger) -> ImpossibleTransitionError:
    name = type(trigger).__name__
    return ImpossibleTransitionError(f"{life.name}: no rule for {name} in {life.state}")


def _start(life: Life, why: Why, now: float) -> None:
    life.want(Wanted.UP, why)
    if why is not Why.REQUEST:
        life.restarts.clean()
    life.enter(Pending(since=now))


def _stay_down(life: Life, why: Why, now: float) -> None:
    life.want(Wanted.DOWN, why)
    life.enter(Stopped(since=now))


def _erase(life: Life, error: RemoteError) -> None:
    life.remove(error)
    life.answer(Waiters.CALLERS_DOWN)
    life.do(Changed("removed"), ForgetModel(model=life.name))


def _wait_for_memory(life: Life, phase: Pending, lack: Lack) -> None:
    life.phase = replace(phase, lack=lack)
    life.release_memory()
    if phase.lack is None:
        life.do(Changed(f"waiting for memory: {lack.reason}"))


def _has_files(life: Life, phase: Pending, note: str, now: float) -> None:
    """Line up for a load, behind those that could have had their turn meanwhile."""
    life.phase = replace(phase, since=now, fetching=None, download_cause="")
    life.do(Changed(note))


def _not_downloaded(life: Life, failed: DownloadFailed, now: float) -> None:
    """Wait, however long it takes, for what ends by itself; count what else another attempt may fix
    as a crash. Callers of the load itself are answered, and requests keep waiting. Everything else
    is for a person to fix."""
    said = f"{failed.message}; {failed.hint}" if failed.hint else failed.message
    cause = f"not downloaded: {said}"
    verdict: float | GiveUp | None = None
    if failed.waits_for:
        cause = f"waits for {failed.waits_for}: {said}"
        verdict = life.restarts.after_outage()
    elif failed.is_passing:
        verdict = life.restarts.after_crash(now)
    if isinstance(verdict, float):
        said = f"it {cause}" if failed.waits_for else cause
        life.answer(Waiters.CALLERS_UP, load_failed(life.name, said, is_retryable=True))
        due_at = now + max(verdict, failed.retry_after_s)
        life.enter(Backoff(since=now, due_at=due_at, download_cause=cause), cause)
        return
    if isinstance(verdict, GiveUp):
        cause = f"its download {verdict.reason}, the last time: {cause}"
    _fail(life, cause, now)


def _spawn(life: Life, phase: Pending, prewarmed: int | None, now: float) -> None:
    """Start a process of the next generation, or make one of a prewarmed worker."""
    life.generation = Generation(life.generation + 1)
    life.launched = life.settings.launch
    life.is_after_crash = phase.is_after_crash
    life.crash_restarts += phase.is_after_crash
    life.granted_bytes = life.needed_bytes
    life.raise_bytes = life.need.raise_for(life.stream_tokens) if life.need else 0
    life.reserved_bytes = life.granted_bytes  # before the load; what is measured corrects it
    due_at = now + life.settings.load_stall_timeout_s
    is_restart = life.why is Why.RESTART
    life.enter(Loading(since=now, due_at=due_at, is_restart=is_restart))
    life.load_times = LoadTimes.begun(now, life.load_times)
    spawn = Spawn(
        model=life.name,
        generation=life.generation,
        launch=life.launch,
        known_batching=life.known_batching,
        prewarmed=prewarmed,
    )
    life.do(spawn)


def _advance(
    life: Life, phase: Loading, load_phase: LoadPhase, progress: float, now: float
) -> None:
    """Only progress renews the limit of a load; a repeated report does not."""
    if progress <= phase.progress and load_phase is phase.load_phase:
        return
    life.load_times = life.load_times.entered(load_phase, now).reached(progress, now)
    progress = max(phase.progress, progress)
    due_at = now + life.settings.load_stall_timeout_s
    life.phase = replace(phase, load_phase=load_phase, progress=progress, due_at=due_at)
    life.do(Changed(f"{load_phase} {progress:.0%}"))


def _serve_on(life: Life, note: str = "") -> None:
    """Serve again as if it had not begun to drain."""
    assert life.ready_at is not None
    life.enter(Ready(since=life.ready_at), note)


def _stay(life: Life, note: str) -> None:
    life.why = Why.REQUEST
    _serve_on(life, note)


def _drain_instead(life: Life, drain_s: float, now: float) -> None:
    """Drain for another reason from now on, which people are notified of."""
    life.phase = Draining(since=now, due_at=now + drain_s)
    life.do(Changed(str(life.why)))


# ---------------------------------------------------------------- the cause of a death

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
