"""The transitions of a model's life: what may happen to it, and one function per state with a case
per trigger.

`apply` is the only way to change a state. A trigger without a case is a bug, except that a process
that is STOPPING may still say anything: its message crossed the command on its way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import assert_never

from mlxsup.protocol.download import DownloadDone, DownloadFailed, Repository
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import DeathCause, ExitReason, LoadPhase, Priority, Wanted, Why
from mlxsup.protocol.worker_messages import Hello, LoadProgress
from mlxsup.protocol.worker_messages import Ready as ReadyMessage

from ..actions import Abandon, Spawn
from ..errors import cut_off, load_failed, model_failed
from ..events import Spawned
from ..health.death_cause import ending_of, exit_reason, load_error
from ..health.poison import NO_VERDICT, Verdict
from ..settings import ModelSettings
from .life import (
    Changed,
    DownWaitersEnd,
    Erased,
    LastExit,
    Life,
    LoadTimes,
    Outcome,
    QueueEnds,
    RowsLeave,
    RunningEnds,
    RunningLost,
    UpWaitersEnd,
)
from .restart_policy import GiveUp
from .states import (
    Abandoned,
    Backoff,
    Draining,
    Failed,
    Fetching,
    Lack,
    Loading,
    Pending,
    Ready,
    Shortage,
    StopCause,
    Stopped,
    Stopping,
    StopStage,
    Swapping,
)

# ---------------------------------------------------------------- triggers


@dataclass(frozen=True, slots=True, kw_only=True)
class WantUp:
    """A load command, a preload, or a request for a model that is down."""

    why: Why


@dataclass(frozen=True, slots=True, kw_only=True)
class WantDown:
    """An unload command, an eviction, or the shutdown.

    Attributes:
        drain_s: how long running requests may take to finish.
        reason: of an eviction: what the memory is for, and why this model was chosen.
    """

    why: Why
    drain_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantRestart:
    """A restart command.

    Attributes:
        is_immediate: whether running requests are cut off.
        drain_s: otherwise, how long they may take to finish.
    """

    is_immediate: bool
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The configuration no longer names the model.

    Attributes:
        drain_s: how long running requests may take to finish.
        error: the answer for its queue.
    """

    drain_s: float
    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigured:
    """The configuration was read again and names the model.

    Attributes:
        drain_s: how long running requests may take to finish if the process must be replaced.
    """

    settings: ModelSettings
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LacksMemory:
    """The memory plan has decided whether there is memory for it.

    Attributes:
        lack: None if there is, but it is not its turn yet.
    """

    lack: Lack | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMemory:
    """There cannot be memory for it, even if all go that may.

    Attributes:
        reason: what it needs and what is in the way.
        error: the answer for all who wait for it.
    """

    reason: str
    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """It is this model's turn to load.

    Attributes:
        prewarmed: the number of the prewarmed worker that it takes over; None for a new process.
    """

    prewarmed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut:
    """Its turn is over: it makes room, and waits for its next turn.

    Attributes:
        cause: the model that it makes room for, or the shortage that it goes for.
        ran: the highest class that it runs; None if it runs nothing.
        leave_s: how long its rows may take to leave.
        reason: what for, and why it was chosen.
    """

    cause: ModelName | Shortage
    ran: Priority | None
    leave_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCalledOff:
    """The model that it makes room for no longer waits, or that got room elsewhere; or
    memory is no longer short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Nothing runs in the engine any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """The process does what it must not do, or nothing.

    Attributes:
        cause: BROKEN, it sent what no worker sends, or cannot be reached; STALL, a step does not
            end, or nothing is heard of it (F5, F6); SUSPENDED, it was stopped from outside (F7);
            VERSION, its HELLO is of another version; TOO_LARGE, it is READY, but the `memory` of
            its entry leaves no room for a request; INTERNAL, its state has no case for what
            happened, so that this life ends as FAILED.
        detail: what is wrong, a phrase for people.
    """

    cause: StopCause
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The state's own deadline has come, or a shutdown does not wait for it."""


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
        at: wall-clock seconds since the epoch; None if nothing was started.
    """

    exit_code: int | None
    signal_name: str
    said: str
    announced: str = ""
    is_spawn_error: bool = False
    verdict: Verdict = NO_VERDICT
    cause: DeathCause = DeathCause.UNKNOWN
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


Trigger = (
    WantUp
    | WantDown
    | WantRestart
    | Removed
    | Reconfigured
    | LacksMemory
    | NoMemory
    | Turn
    | Fetching
    | DownloadDone
    | DownloadFailed
    | Spawned
    | Hello
    | LoadProgress
    | ReadyMessage
    | SwappedOut
    | SwapCalledOff
    | Drained
    | Faulted
    | Due
    | Died
)
"""Everything that may happen to a life: commands, what the memory plan decides, what the shell and
the worker report, and time."""


_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def words_of(trigger: Trigger) -> str:
    """Return a trigger for the log of a bug: `want down (shutdown, 30.0)`."""
    name = _CAPITAL.sub(" ", type(trigger).__name__).lower()
    match trigger:
        case Died(text=text):
            return f"{name} ({text})"
        case Hello():  # with the token of a process, which no log shows
            return name
    values = [getattr(trigger, one.name) for one in fields(trigger)]
    facts = [str(value) for value in values if value and isinstance(value, str | int | float)]
    return f"{name} ({', '.join(facts)})" if facts else name


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
            life.do(DownWaitersEnd(error=None))
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
            life.do(QueueEnds(error=error), UpWaitersEnd(error=error))
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
            life.do(Changed(note=""))
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
            life.do(UpWaitersEnd(error=load_failed(life.name, life.failure, is_retryable=False)))
        case WantDown(why=why):
            life.want(Wanted.DOWN, why)
            life.do(DownWaitersEnd(error=model_failed(life.name, life.failure)))
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
            life.do(UpWaitersEnd(error=None))
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
                life.do(RunningEnds(error=error), QueueEnds(error=life.waiting_error))
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
    life.do(RunningLost(text=text, verdict=died.verdict))
    was_given_up = text if isinstance(phase, Abandoned) else ""
    if life.wanted is not Wanted.UP:
        is_gone = life.wanted is Wanted.GONE
        life.do(QueueEnds(error=life.waiting_error))
        life.enter(Stopped(since=now), "removed" if is_gone else was_given_up)
        if is_gone:
            life.do(Erased())
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
        life.do(UpWaitersEnd(error=load_failed(life.name, text, is_retryable=True)))
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
    life.do(RunningLost(text=cause, verdict=trigger.verdict), QueueEnds(error=error))
    life.enter(Abandoned(since=now, cause=cause), cause)
    life.do(
        UpWaitersEnd(error=failed),
        DownWaitersEnd(error=model_failed(life.name, cause)),
        Abandon(model=life.name, generation=life.generation),
    )


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
    life.do(DownWaitersEnd(error=None), Changed(note="removed"), Erased())


def _wait_for_memory(life: Life, phase: Pending, lack: Lack) -> None:
    life.phase = replace(phase, lack=lack)
    life.release_memory()
    if phase.lack is None:
        life.do(Changed(note=f"waiting for memory: {lack.reason}"))


def _has_files(life: Life, phase: Pending, note: str, now: float) -> None:
    """Line up for a load, behind those that could have had their turn meanwhile."""
    life.phase = replace(phase, since=now, fetching=None, download_cause="")
    life.do(Changed(note=note))


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
        life.do(UpWaitersEnd(error=load_failed(life.name, said, is_retryable=True)))
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
    life.do(Changed(note=f"{load_phase} {progress:.0%}"))


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
    life.do(Changed(note=str(life.why)))
