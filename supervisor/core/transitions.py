"""The transitions of a model's life: one method per state with a case per trigger, and the
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
from enum import Enum, auto
from typing import NamedTuple, assert_never

from mlxsup.protocol.download import DownloadDone, DownloadFailed, Repository
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import Generation
from mlxsup.protocol.launch import PERMANENT_EXITS, ExitCode
from mlxsup.protocol.states import DeathCause, ExitReason, LoadPhase, Wanted, Why
from mlxsup.protocol.worker_messages import Exit, Hello, LoadProgress
from mlxsup.protocol.worker_messages import Ready as ReadyMessage

from .actions import Abandon, ForgetModel, SendToWorker, SignalWorker, Spawn, WorkerSignal
from .errors import cut_off, load_failed, model_failed, superseded
from .events import Spawned
from .life import UNSEEN, GiveUp, LastExit, Life, LoadTimes
from .poison import Evidence, Verdict
from .settings import ModelSettings
from .states import (
    AFTER_EXIT,
    LEAVES_TO,
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
    Phase,
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

# ---------------------------------------------------------------- what a transition causes


class Waiters(Enum):
    """Those who wait for something of a model, and get an answer when its life changes."""

    CALLERS_UP = auto()
    """Of a load or a restart."""
    CALLERS_DOWN = auto()
    """Of an unload."""
    QUEUE = auto()
    """Requests that wait for it."""
    RUNNING = auto()
    """Requests that run in its process."""


class Answer(NamedTuple):
    """Answer all of these: with an error or, if it is None, callers with success."""

    waiters: Waiters
    error: RemoteError | None = None


class RowsLeave(NamedTuple):
    """All rows are to leave for a swap without an end; what they have computed is dropped."""


class RunningLost(NamedTuple):
    """The process is gone with what ran in it: answer those requests, or let them wait again."""

    text: str
    verdict: Verdict


class Changed(NamedTuple):
    """The state changed, or a fact of it that watchers are notified of; the note says what."""

    note: str


Outcome = (
    Answer
    | RowsLeave
    | RunningLost
    | Changed
    | Spawn
    | SendToWorker
    | SignalWorker
    | Abandon
    | ForgetModel
)
"""Everything that a transition can cause: actions for the shell, and what `fleet.py` carries out,
because a life knows nothing about requests, callers and watchers."""


# ---------------------------------------------------------------- one trigger

DOING = {
    LoadPhase.SPAWN: "its process started",
    LoadPhase.IMPORT: "MLX was imported",
    LoadPhase.WEIGHTS: "its weights were read",
    LoadPhase.MATERIALISE: "its arrays were computed",
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

DUMP_GRACE_S = 0.5
"""A stalled worker may print its stacks for so long, and is killed then."""

SIGNALS = {
    StopStage.DUMP: WorkerSignal.DUMP,
    StopStage.TERM: WorkerSignal.TERM,
    StopStage.KILL: WorkerSignal.KILL,
}

FAILING = (ExitReason.INTERNAL, ExitReason.VERSION, ExitReason.LOAD_ERROR)
"""Another attempt would end like these."""


class ImpossibleTransitionError(Exception):
    """The state has no case for this trigger: a bug."""


def apply(life: Life, trigger: Trigger, now: float) -> list[Outcome]:
    """Change a life by a trigger, and return what follows from that.

    Raises:
        ImpossibleTransitionError: the state has no case for it; nothing was changed.
    """
    transition = _Transition(life, now)
    transition.run(trigger)
    return transition.outcomes


class _Transition:
    """One change of a life, under way.

    Attributes:
        life: the life, which nothing else changes meanwhile.
        now: monotonic seconds.
        outcomes: what it has caused so far.
    """

    def __init__(self, life: Life, now: float) -> None:
        self.life = life
        self.now = now
        self.outcomes: list[Outcome] = []

    def run(self, trigger: Trigger) -> None:
        """Have the method of the state handle the trigger.

        Raises:
            ImpossibleTransitionError: it has no case for it; nothing was changed.
        """
        match self.life.phase:
            case Abandoned():
                self._abandoned(trigger)
            case Stopped() | Backoff() | Failed() as phase:
                self._at_rest(phase, trigger)
            case Pending() as phase:
                self._pending(phase, trigger)
            case Loading() as phase:
                self._loading(phase, trigger)
            case Ready():
                self._ready(trigger)
            case Draining() as phase:
                self._draining(phase, trigger)
            case Swapping() as phase:
                self._swapping(phase, trigger)
            case Stopping() as phase:
                self._stopping(phase, trigger)
            case phase:
                assert_never(phase)

    # ------------------------------------------------------------ without a process

    def _at_rest(self, phase: Stopped | Backoff | Failed, trigger: Trigger) -> None:
        """Nothing runs, and nothing is about to."""
        match trigger:
            case WantUp(why=why):
                self._start(why)
            case WantRestart():
                self._start(Why.RESTART)
            case WantDown(why=why) if isinstance(phase, Stopped):
                self._want(Wanted.DOWN, why)
                self._answer(Waiters.CALLERS_DOWN)
            case WantDown(why=why):
                self._stay_down(why)
            case Removed(error=error):
                self._erase(error)
            case Reconfigured(settings=settings):
                if self._adopt(settings) and not isinstance(phase, Stopped):
                    self._want(Wanted.UP, Why.RELOAD)
                    self._enter(Pending(since=self.now))
            case Due() if isinstance(phase, Backoff):
                cause = phase.download_cause
                self._enter(Pending(since=self.now, is_after_crash=not cause, download_cause=cause))
            case _:
                raise self._impossible(trigger)

    def _pending(self, phase: Pending, trigger: Trigger) -> None:
        """Handle a trigger while it waits for its turn, for memory or for files. It holds no memory
        meanwhile: two models that wait for each other would wait for ever."""
        match trigger:
            case WantUp(why=why):
                self._join(why)
            case WantRestart():
                self._want(Wanted.UP, Why.RESTART)
            case WantDown(why=why):
                self._stay_down(why)
            case Removed(error=error):
                self._erase(error)
            case Reconfigured(settings=settings):
                self._adopt(settings)
                if phase.fetching is not None and settings.download is None:
                    self._has_files(phase, "")
            case Turn(prewarmed=prewarmed):
                self._spawn(phase, prewarmed)
            case LacksMemory(lack=Lack() as lack):
                self._wait_for_memory(phase, lack)
            case LacksMemory():
                self.life.phase = replace(phase, lack=None)
            case NoMemory(error=error, reason=reason):
                # All who wait are answered. What came up for the configuration stays wanted,
                # because a reload may make room; what came up for those who are answered does not.
                self._answer(Waiters.QUEUE, error)
                self._answer(Waiters.CALLERS_UP, error)
                if self.life.settings.preload and self.life.why in (Why.PRELOAD, Why.RELOAD):
                    since = phase.lack.since if phase.lack else self.now
                    self._wait_for_memory(phase, Lack(since=since, reason=reason))
                else:
                    self._want(Wanted.DOWN, Why.MEMORY)
                    self._enter(Stopped(since=self.now), error.message)
            case Fetching() as fetching:  # others load meanwhile
                cause = "" if fetching.total_bytes else phase.download_cause  # the hub has answered
                self.life.phase = replace(phase, lack=None, fetching=fetching, download_cause=cause)
                self._release_memory()
                self._do(Changed(""))
            case DownloadDone(folder=folder):
                launch = replace(self.life.settings.launch, path=folder)
                self.life.settings = replace(self.life.settings, launch=launch, download=None)
                self.life.restarts.outage_ended()
                self._has_files(phase, "downloaded")
            case DownloadFailed() as failed:
                self._not_downloaded(failed)
            case Due():  # there may be memory: the plan looks again
                pass
            case _:
                raise self._impossible(trigger)

    def _abandoned(self, trigger: Trigger) -> None:
        """Handle a trigger while its process cannot be ended: the model gets no other one before
        that has exited."""
        life = self.life
        match trigger:
            case WantUp() | WantRestart():
                failed = load_failed(life.name, life.failure, is_retryable=False)
                self._answer(Waiters.CALLERS_UP, failed)
            case WantDown(why=why):
                self._want(Wanted.DOWN, why)
                self._answer(Waiters.CALLERS_DOWN, model_failed(life.name, life.failure))
            case Removed(error=error):
                self._remove(error)
            case Reconfigured(settings=settings):
                if self._adopt(settings) and life.wanted is not Wanted.DOWN:
                    self._want(Wanted.UP, Why.RELOAD)
            case Died():
                self._ended(trigger)
            case _:
                raise self._impossible(trigger)

    # ------------------------------------------------------------ with a process

    def _loading(self, phase: Loading, trigger: Trigger) -> None:
        match trigger:
            case WantUp(why=why):
                self._join(why)
            case WantDown(why=why):
                self._want(Wanted.DOWN, why)
                self._stop(StopCause.ASKED, stage=StopStage.TERM)
            case WantRestart(is_immediate=is_immediate):
                self._want(Wanted.UP, Why.RESTART)
                if is_immediate and not phase.is_restart:  # otherwise this load is the restart
                    self._stop(StopCause.ASKED, stage=StopStage.TERM, is_restart=True)
            case Removed(error=error):
                self._remove(error)
                self._stop(StopCause.ASKED, stage=StopStage.TERM)
            case Reconfigured(settings=settings):
                if self._adopt(settings):
                    self._want(Wanted.UP, Why.RELOAD)
                    self._stop(StopCause.ASKED, stage=StopStage.TERM)
            case Spawned(pid=pid):
                self.life.pid = pid
            case Hello():
                self._advance(phase, LoadPhase.IMPORT, 0.0)
            case LoadProgress(phase=load_phase, progress=progress):
                self._advance(phase, load_phase, progress)
            case ReadyMessage():  # announced after the warm-up
                self.life.ready_at = self.now
                if self.life.why is Why.RESTART:
                    self.life.why = Why.USER  # done: a later crash counts as a crash
                elif self.life.why is Why.SWAP:
                    self.life.why = Why.REQUEST  # it has its turn again
                self._enter(Ready(since=self.now))
            case Due():
                limit_s = self.life.settings.load_stall_timeout_s
                doing = DOING[phase.load_phase]
                detail = f"the load made no progress for {limit_s:g} s while {doing}"
                # Before HELLO the signal that prints stacks would only end the process.
                is_silent = phase.load_phase is LoadPhase.SPAWN
                stage = StopStage.KILL if is_silent else StopStage.DUMP
                self._stop(StopCause.STALL, stage=stage, detail=detail)
            case _:
                self._goes_wrong(trigger)

    def _ready(self, trigger: Trigger) -> None:
        match trigger:
            case WantUp():
                self._answer(Waiters.CALLERS_UP)
            case WantDown(why=why, drain_s=drain_s, reason=reason):
                self._want(Wanted.DOWN, why)
                self._drain(drain_s, reason or str(why))
            case WantRestart(is_immediate=is_immediate, drain_s=drain_s):
                self._want(Wanted.UP, Why.RESTART)
                if is_immediate:
                    self._stop(StopCause.ASKED, stage=StopStage.ASK, is_restart=True)
                else:
                    self._drain(drain_s, "restart")
            case Removed(error=error, drain_s=drain_s):
                self._remove(error)
                self._drain(drain_s, "removed")
            case Reconfigured(settings=settings, drain_s=drain_s):
                if self._adopt(settings):
                    self._want(Wanted.UP, Why.RELOAD)
                    self._drain(drain_s, "reload")
            case Due():  # nothing has run for `idle_unload_s`: see `Model.state_deadline`
                self._want(Wanted.DOWN, Why.IDLE)
                self._drain(0.0, str(Why.IDLE))
            case SwappedOut(cause=cause, ran=ran, leave_s=leave_s, reason=reason):
                self._want(Wanted.UP, Why.SWAP)  # its requests wait until it is its turn again
                swapping = Swapping(since=self.now, due_at=self.now + leave_s, cause=cause, ran=ran)
                self._enter(swapping, reason)
                self._do(RowsLeave())
            case _:
                self._goes_wrong(trigger)

    def _draining(self, phase: Draining, trigger: Trigger) -> None:
        match trigger:
            case WantUp(why=why):
                if self.life.wanted is Wanted.UP:
                    return  # draining for a restart: it comes up again anyway
                self._want(Wanted.UP, why)
                if self.life.is_outdated:
                    return  # a reload has changed its entry: it drains, then comes up with that
                self._serve_on()
            case WantDown(why=why, drain_s=drain_s):
                self._want(Wanted.DOWN, why)
                self.life.phase = replace(phase, due_at=min(phase.due_at, self.now + drain_s))
            case WantRestart(is_immediate=is_immediate):
                self._want(Wanted.UP, Why.RESTART)
                if is_immediate:
                    self._stop(StopCause.ASKED, stage=StopStage.ASK, is_restart=True)
            case Removed(error=error):
                self._remove(error)
            case Reconfigured(settings=settings):
                # Idle or evicted, it keeps going down: a request would otherwise bring the old
                # launch back.
                goes_down = self.life.wanted is Wanted.DOWN
                is_asked = goes_down and self.life.why in (Why.USER, Why.SHUTDOWN)
                if not self._adopt(settings) or is_asked:
                    return
                if goes_down:
                    self._stop(StopCause.ASKED, stage=StopStage.ASK)
                else:
                    self._want(Wanted.UP, Why.RELOAD)
            case Drained():
                is_restart = self.life.wanted is Wanted.UP
                self._stop(StopCause.ASKED, stage=StopStage.ASK, is_restart=is_restart)
            case Due():
                is_restart = self.life.wanted is Wanted.UP
                if not is_restart:  # those of a restart are handled at the exit, as after a crash
                    error = cut_off(self.life.name, self.life.why)
                    self._answer(Waiters.RUNNING, error)
                    self._answer(Waiters.QUEUE, self.life.waiting_error)
                self._stop(StopCause.ASKED, stage=StopStage.ASK, is_restart=is_restart)
            case _:
                self._goes_wrong(trigger)

    def _swapping(self, phase: Swapping, trigger: Trigger) -> None:
        """Handle a trigger while it makes room although it is busy, and stays wanted. Until its
        process is asked to exit, that can be called off."""
        match trigger:
            case WantUp(why=why):
                self._join(why)
            case WantDown(why=why, drain_s=drain_s):  # answers that have begun are completed first
                self._want(Wanted.DOWN, why)
                self._drain_instead(drain_s)
            case WantRestart(is_immediate=is_immediate, drain_s=drain_s):
                # It comes up again at once: what needed its memory waits for its next turn to end.
                self._want(Wanted.UP, Why.RESTART)
                if is_immediate:
                    self._stop(StopCause.ASKED, stage=StopStage.ASK, is_restart=True)
                else:
                    self._drain_instead(drain_s)
            case Removed(error=error, drain_s=drain_s):
                self._remove(error)
                self._drain_instead(drain_s)
            case Reconfigured(settings=settings, drain_s=drain_s):
                if self._adopt(settings):
                    self._want(Wanted.UP, Why.RELOAD)
                    self._drain_instead(drain_s)
                elif self.life.settings.pinned:
                    self._stay("stays: it is pinned now")
            case SwapCalledOff():  # rows that have left return
                if isinstance(phase.cause, Shortage):
                    self._stay("stays: memory is no longer short")
                else:
                    self._stay(f"stays: {phase.cause} no longer needs its memory")
            case Drained() | Due():
                # What still runs continues as after a crash, which accuses nothing.
                cause = phase.cause
                why_it_goes = cause.reason if isinstance(cause, Shortage) else f"for {cause}"
                detail = f"swapped out {why_it_goes}"
                self._stop(StopCause.SWAP, stage=StopStage.ASK, detail=detail)
            case _:
                self._goes_wrong(trigger)

    def _stopping(self, phase: Stopping, trigger: Trigger) -> None:
        match trigger:
            case WantUp(why=why):
                self._join(why)
            case WantDown(why=why):
                self._want(Wanted.DOWN, why)
            case WantRestart():
                self._want(Wanted.UP, Why.RESTART)
                self.life.phase = replace(phase, is_restart=True)
            case Removed(error=error):
                self._remove(error)
            case Reconfigured(settings=settings):
                if self._adopt(settings) and self.life.wanted is not Wanted.DOWN:
                    self._want(Wanted.UP, Why.RELOAD)
                    self.life.phase = replace(phase, is_restart=True)
            case Spawned(pid=pid):
                self.life.pid = pid
                # The limit counts from the signal, which could not be sent before.
                self.life.phase = replace(phase, due_at=self.now + self._limit_s(phase.stage))
                self._tell_to_end(phase.stage)
            case Due():
                stage = StopStage.TERM if phase.stage is StopStage.ASK else StopStage.KILL
                # Without a pid there is nothing yet to give up.
                if stage is not phase.stage or self.life.pid is None:
                    due_at = self.now + self._limit_s(stage)
                    self.life.phase = replace(phase, stage=stage, due_at=due_at)
                self._tell_to_end(stage)
            case Faulted(cause=StopCause.INTERNAL, detail=detail):
                self.life.phase = replace(phase, cause=StopCause.INTERNAL, detail=detail)
            case GivenUp():
                self._given_up(trigger)
            case Died():
                self._ended(trigger)
            case Hello() | LoadProgress() | ReadyMessage() | Faulted():
                pass
            case _:
                raise self._impossible(trigger)

    def _goes_wrong(self, trigger: Trigger) -> None:
        """Handle what its process must not do, or its end, while it loads, serves or drains."""
        match trigger:
            case Faulted(cause=cause, detail=detail):
                self._stop(cause, stage=FIRST_STAGE[cause], detail=detail)
            case Died():
                self._ended(trigger)
            case _:
                raise self._impossible(trigger)

    # ------------------------------------------------------------ the end of a process

    def _ended(self, died: Died) -> None:
        """Decide what follows the end of a process, in every state that has one; nothing else
        does."""
        life, now = self.life, self.now
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
        is_lost = reason is ExitReason.LOAD_ERROR and self._has_lost_files(died)
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
        self._do(RunningLost(text, died.verdict))
        was_given_up = text if isinstance(phase, Abandoned) else ""
        if life.wanted is not Wanted.UP:
            is_gone = life.wanted is Wanted.GONE
            self._answer(Waiters.QUEUE, life.waiting_error)
            self._enter(Stopped(since=now), "removed" if is_gone else was_given_up)
            if is_gone:
                self._do(ForgetModel(model=life.name))
        elif reason in FAILING and not is_lost:
            self._fail(text)
        elif died.verdict.failure:
            self._fail(f"{died.verdict.failure}, the last time: {text}")
        elif is_lost:
            # It is PENDING until its repository is there, as if it had never been downloaded.
            lost = Repository(life.settings.repo, life.settings.revision)
            life.settings = replace(life.settings, download=lost)
            self._enter(Pending(since=now), text)
        elif is_swap:  # it waits for memory as others do, and its requests wait with it
            if is_restart:  # asked for meanwhile
                life.restarts.clean()
            life.reserved_bytes = 0
            lack = Lack(since=now, reason=f"was {text}")
            self._enter(Pending(since=now, lack=lack), text)
        elif is_restart:
            life.restarts.clean()
            self._enter(Pending(since=now), "")
        elif reason is ExitReason.ASKED:
            life.reserved_bytes = 0  # it was to go, and others may wait for its memory
            self._enter(Pending(since=now), was_given_up)
        elif not died.verdict.is_counted:
            self._enter(Pending(since=now, is_after_crash=True), text)
        else:
            self._after_crash(text)

    def _after_crash(self, text: str) -> None:
        life, now = self.life, self.now
        was_loading = life.ready_at is None
        verdict = life.restarts.after_crash(now)
        if isinstance(verdict, GiveUp):
            self._fail(f"{verdict.reason}, the last time: {text}")
            return
        # F8: those who wait for the load itself are notified; requests keep waiting.
        if was_loading:
            self._answer(Waiters.CALLERS_UP, load_failed(life.name, text, is_retryable=True))
        if verdict > 0.0:
            self._enter(Backoff(since=now, due_at=now + verdict), text)
        else:
            self._enter(Pending(since=now, is_after_crash=True), text)

    def _fail(self, cause: str) -> None:
        self._enter(Failed(since=self.now, cause=cause), cause)

    def _given_up(self, trigger: GivenUp) -> None:
        """Continue without the exit of a process that SIGKILL has not ended (P26)."""
        life = self.life
        cause = trigger.text
        failed = load_failed(life.name, cause, is_retryable=False)
        error = failed if life.wanted is Wanted.UP else life.waiting_error
        self._do(RunningLost(cause, trigger.verdict))
        self._answer(Waiters.QUEUE, error)
        self._enter(Abandoned(since=self.now, cause=cause), cause)
        self._answer(Waiters.CALLERS_UP, failed)
        self._answer(Waiters.CALLERS_DOWN, model_failed(life.name, cause))
        self._do(Abandon(model=life.name, generation=life.generation))

    # ------------------------------------------------------------ steps of several states

    def _start(self, why: Why) -> None:
        self._want(Wanted.UP, why)
        if why is not Why.REQUEST:
            self.life.restarts.clean()
        self._enter(Pending(since=self.now))

    def _stay_down(self, why: Why) -> None:
        self._want(Wanted.DOWN, why)
        self._enter(Stopped(since=self.now))

    def _erase(self, error: RemoteError) -> None:
        self._remove(error)
        self._answer(Waiters.CALLERS_DOWN)
        self._do(Changed("removed"), ForgetModel(model=self.life.name))

    def _wait_for_memory(self, phase: Pending, lack: Lack) -> None:
        self.life.phase = replace(phase, lack=lack)
        self._release_memory()
        if phase.lack is None:
            self._do(Changed(f"waiting for memory: {lack.reason}"))

    def _has_files(self, phase: Pending, note: str) -> None:
        """Line up for a load, behind those that could have had their turn meanwhile."""
        self.life.phase = replace(phase, since=self.now, fetching=None, download_cause="")
        self._do(Changed(note))

    def _not_downloaded(self, failed: DownloadFailed) -> None:
        """Wait, however long it takes, for what ends by itself; count what else another attempt may
        fix as a crash. Callers of the load itself are answered, and requests keep waiting.
        Everything else is for a person to fix."""
        life, now = self.life, self.now
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
            self._answer(Waiters.CALLERS_UP, load_failed(life.name, said, is_retryable=True))
            due_at = now + max(verdict, failed.retry_after_s)
            self._enter(Backoff(since=now, due_at=due_at, download_cause=cause), cause)
            return
        if isinstance(verdict, GiveUp):
            cause = f"its download {verdict.reason}, the last time: {cause}"
        self._fail(cause)

    def _spawn(self, phase: Pending, prewarmed: int | None) -> None:
        """Start a process of the next generation, or make one of a prewarmed worker."""
        life, now = self.life, self.now
        life.generation = Generation(life.generation + 1)
        life.launched = life.settings.launch
        life.is_after_crash = phase.is_after_crash
        life.crash_restarts += phase.is_after_crash
        life.granted_bytes = life.needed_bytes
        life.raise_bytes = life.need.raise_for(life.stream_tokens) if life.need else 0
        life.reserved_bytes = life.granted_bytes  # before the load; what is measured corrects it
        due_at = now + life.settings.load_stall_timeout_s
        is_restart = life.why is Why.RESTART
        self._enter(Loading(since=now, due_at=due_at, is_restart=is_restart))
        life.load_times = LoadTimes.begun(now, life.load_times)
        spawn = Spawn(
            model=life.name,
            generation=life.generation,
            launch=life.launch,
            known_batching=life.known_batching,
            prewarmed=prewarmed,
        )
        self._do(spawn)

    def _advance(self, phase: Loading, load_phase: LoadPhase, progress: float) -> None:
        """Only progress renews the limit of a load; a repeated report does not."""
        life, now = self.life, self.now
        if progress <= phase.progress and load_phase is phase.load_phase:
            return
        life.load_times = life.load_times.entered(load_phase, now).reached(progress, now)
        progress = max(phase.progress, progress)
        due_at = now + life.settings.load_stall_timeout_s
        life.phase = replace(phase, load_phase=load_phase, progress=progress, due_at=due_at)
        self._do(Changed(f"{load_phase} {progress:.0%}"))

    def _serve_on(self, note: str = "") -> None:
        """Serve again as if it had not begun to drain."""
        assert self.life.ready_at is not None
        self._enter(Ready(since=self.life.ready_at), note)

    def _stay(self, note: str) -> None:
        self.life.why = Why.REQUEST
        self._serve_on(note)

    def _drain_instead(self, drain_s: float) -> None:
        """Drain for another reason from now on, which people are notified of."""
        self.life.phase = Draining(since=self.now, due_at=self.now + drain_s)
        self._do(Changed(str(self.life.why)))

    def _has_lost_files(self, died: Died) -> bool:
        """True if files of a repository have been removed since the configuration was read.

        Not if the load before ended for the same reason: a download has not helped.
        """
        missing = ExitCode.MODEL_MISSING
        if died.exit_code != missing or not self.life.settings.repo:
            return False
        return self.life.last_exit is None or self.life.last_exit.code != missing

    def _impossible(self, trigger: Trigger) -> ImpossibleTransitionError:
        name = type(trigger).__name__
        return ImpossibleTransitionError(
            f"{self.life.name}: no rule for {name} in {self.life.state}"
        )

    # ------------------------------------------------------------ changes that several need

    def _enter(self, phase: Phase, note: str = "") -> None:
        """Change the state along the edges of `LEAVES_TO` or, with the end of the process, of
        `AFTER_EXIT`; answer who has waited for this state, or waits in vain from now on."""
        life = self.life
        before, had_process = life.state, life.has_process
        life.load_times = life.load_times.ended(phase.since)
        life.phase = phase
        is_exit = had_process and not life.has_process
        assert phase.STATE in (AFTER_EXIT if is_exit else LEAVES_TO[before]), f"{before} → {phase}"
        if is_exit:
            life.pid = None
            life.launched = None
            life.ready_at = None
            life.files = UNSEEN
        life.keep_books()
        self._do(Changed(note))
        match phase:
            case Ready():
                self._answer(Waiters.CALLERS_UP)
            case Stopped():
                self._answer(Waiters.CALLERS_DOWN)
            case Failed(cause=cause) if not life.has_process:
                error = load_failed(life.name, cause, is_retryable=False)
                self._answer(Waiters.QUEUE, error)
                self._answer(Waiters.CALLERS_UP, error)

    def _answer(self, waiters: Waiters, error: RemoteError | None = None) -> None:
        """Answer all of these: with an error, or callers with success."""
        self._do(Answer(waiters, error))

    def _do(self, *outcomes: Outcome) -> None:
        """Add to what this transition causes."""
        self.outcomes.extend(outcomes)

    def _drain(self, drain_s: float, note: str) -> None:
        """Let running requests finish, for that long at most; then the process is ended."""
        self._enter(Draining(since=self.now, due_at=self.now + drain_s), note)

    def _want(self, wanted: Wanted, why: Why) -> None:
        """Record what is wanted, and answer all who want the opposite: commands are superseded, and
        requests are cut off."""
        life = self.life
        was_up, life.wanted, life.why = life.wanted is Wanted.UP, wanted, why
        if wanted is not Wanted.UP:
            if was_up:
                is_command = why is Why.USER
                error = (
                    superseded(life.name, "an unload") if is_command else cut_off(life.name, why)
                )
                self._answer(Waiters.CALLERS_UP, error)
            self._answer(Waiters.QUEUE, life.waiting_error)
        elif not was_up:
            self._answer(Waiters.CALLERS_DOWN, superseded(life.name, "a load"))

    def _join(self, why: Why) -> None:
        """Want it up, for a reason that does not replace the one that it comes up for."""
        self._want(Wanted.UP, self.life.why if self.life.wanted is Wanted.UP else why)

    def _remove(self, error: RemoteError) -> None:
        """Want it gone once its process has ended; the error answers its requests."""
        self.life.removal = error
        self._want(Wanted.GONE, Why.RELOAD)

    def _adopt(self, settings: ModelSettings) -> bool:
        """Adopt an entry, and return whether a live process must be replaced by a new one."""
        life = self.life
        is_other_launch = settings.launch != life.settings.launch
        if settings != life.settings:
            life.restarts.clean()  # the old entry crashed; an unchanged one keeps its crashes
        if life.settings.pinned and not life.has_process:
            life.reserved_bytes = 0  # it was reserved for the pin
        life.settings = settings
        life.restarts.settings = settings.restart
        life.keep_books()
        return is_other_launch or life.wanted is Wanted.GONE

    def _release_memory(self) -> None:
        """Reserve no more than a pinned model always has."""
        self.life.reserved_bytes = 0
        self.life.keep_books()

    def _stop(
        self,
        cause: StopCause,
        *,
        stage: StopStage,
        is_restart: bool = False,
        detail: str = "",
    ) -> None:
        """Enter STOPPING, and ask or signal the process."""
        stopping = Stopping(
            since=self.now,
            cause=cause,
            stage=stage,
            due_at=self.now + self._limit_s(stage),
            is_restart=is_restart,
            detail=detail,
        )
        self._enter(stopping, detail)
        self._tell_to_end(stage)

    def _limit_s(self, stage: StopStage) -> float:
        """Return how long the process may take to exit at this stage."""
        match stage:
            case StopStage.DUMP:
                return DUMP_GRACE_S
            case StopStage.ASK | StopStage.TERM:
                return self.life.exit_grace_s
            case StopStage.KILL:
                return self.life.kill_limit_s

    def _tell_to_end(self, stage: StopStage) -> None:
        """Ask or signal; a process whose pid is not known yet is signalled once it is."""
        life = self.life
        if life.pid is None:
            return
        if stage is StopStage.ASK:
            message = Exit()
            self._do(SendToWorker(model=life.name, generation=life.generation, message=message))
        else:
            signal = SIGNALS[stage]
            self._do(SignalWorker(model=life.name, generation=life.generation, signal=signal))


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
