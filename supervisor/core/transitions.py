"""The transitions of a model's life: what may happen to it, and what follows.

`apply` is the only way to change a state. People, the configuration and policies command; each
command has a method, because it may come in every state. Everything else that happens has a case
for each state that it may happen in: `_happens` is the table. Without a case it is a bug, except
that a process that is STOPPING may still say anything: its message crossed the command on its way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import NamedTuple, assert_never

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProgress,
    Repository,
)
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import (
    DeathCause,
    ExitReason,
    LoadPhase,
    Priority,
    State,
    Wanted,
    Why,
)
from mlxsup.protocol.worker_messages import Exit, Hello, LoadProgress
from mlxsup.protocol.worker_messages import Ready as ReadyMessage

from .actions import Abandon, ForgetModel, SendToWorker, SignalWorker, Spawn, WorkerSignal
from .errors import cut_off, does_not_fit, load_failed, model_failed, superseded, unknown_model
from .events import Spawned
from .life import (
    UNSEEN,
    Abandoned,
    Backoff,
    Draining,
    Failed,
    Lack,
    LastExit,
    Life,
    Loading,
    LoadTimes,
    Pending,
    Phase,
    Ready,
    Shortage,
    StopCause,
    Stopped,
    Stopping,
    StopStage,
    Swapping,
    Wait,
)
from .poison import NO_VERDICT, Evidence, Verdict
from .settings import ModelSettings

LEAVES_TO: dict[State, frozenset[State]] = {
    State.STOPPED: frozenset({State.PENDING}),
    State.PENDING: frozenset({State.LOADING, State.STOPPED, State.BACKOFF, State.FAILED}),
    State.LOADING: frozenset({State.READY, State.STOPPING}),
    State.READY: frozenset({State.DRAINING, State.STOPPING}),
    State.DRAINING: frozenset({State.READY, State.STOPPING}),
    State.STOPPING: frozenset({State.FAILED}),
    State.BACKOFF: frozenset({State.PENDING, State.STOPPED}),
    State.FAILED: frozenset({State.PENDING, State.STOPPED}),
}
"""The states that may follow each state without an exit; STOPPING only leads to `Abandoned`."""

AFTER_EXIT = frozenset({State.STOPPED, State.PENDING, State.BACKOFF, State.FAILED})
"""The states that may follow the exit of a process, from every state that has one."""

# ---------------------------------------------------------------- commands


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


Command = WantUp | WantDown | WantRestart | Removed | Reconfigured
"""Everything that is wanted of a life, in any state: by people, the configuration and policies."""


def reload_command(
    name: ModelName, entries: Mapping[ModelName, ModelSettings], drain_s: float
) -> Reconfigured | Removed:
    """Return what a reload wants of a model.

    Args:
        entries: of the configuration that was read, by name.
        drain_s: how long running requests may take if the process must end.
    """
    entry = entries.get(name)
    if entry is None:
        return Removed(drain_s=drain_s, error=unknown_model(name, entries))
    return Reconfigured(settings=entry, drain_s=drain_s)


# ---------------------------------------------------------------- what else may happen


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
        budget_bytes: what all models may take together.
        blockers: the models that would have to go.
    """

    reason: str
    needed_bytes: int
    budget_bytes: int
    blockers: tuple[ModelName, ...]


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
class Ending:
    """The end of a process, as the shell saw it.

    Attributes:
        text: how it ended, one phrase for people.
        said: what it announced, or else its last words.
        announced: what it said about its end over the link; empty if it said nothing.
        last_words: the line of its output that may be a cause; empty if there is none.
        exit_code: None if a signal ended it or nothing was started.
        signal_name: empty if it exited.
        cause: the class of its cause.
        is_spawn_error: whether nothing was started.
        is_given_up: whether there was none: SIGKILL has not ended the process within its limit, and
            it is no longer waited for (P26).
        is_over_memory: whether SIGKILL ended it while it held more memory than its limit.
        at: wall-clock seconds since the epoch; None if nothing was started.
    """

    text: str
    said: str
    announced: str = ""
    last_words: str = ""
    exit_code: int | None = None
    signal_name: str = ""
    cause: DeathCause = DeathCause.UNKNOWN
    is_spawn_error: bool = False
    is_given_up: bool = False
    is_over_memory: bool = False
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The exit was seen, or the spawn failed, or the process is given up.

    Attributes:
        seen: how it ended.
        reason: why it ended.
        stopping: how it was being ended; None if it ended by itself.
        evidence: what its end says about the requests that it held.
        load_error: what its load, which crashed by itself, has in common with another that failed
            the same way; None: it had become READY, did not say why, or others contribute to it.
        verdict: what its end means for those requests.
    """

    seen: Ending
    reason: ExitReason
    stopping: Stopping | None = None
    evidence: Evidence = Evidence.NONE
    load_error: str | None = None
    verdict: Verdict = NO_VERDICT


PROGRESS = Spawned | Hello | LoadProgress
"""Triggers that change nothing of what the memory plan depends on."""

Trigger = (
    Command
    | LacksMemory
    | NoMemory
    | Turn
    | SwappedOut
    | SwapCalledOff
    | DownloadProgress
    | DownloadDone
    | DownloadFailed
    | PROGRESS
    | ReadyMessage
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
        case Died(seen=Ending(text=text)):
            return f"{name} ({text})"
        case Hello():  # with the token of a process, which no log shows
            return name
    values = [getattr(trigger, one.name) for one in fields(trigger)]
    facts = [str(value) for value in values if value and isinstance(value, str | int | float)]
    return f"{name} ({', '.join(facts)})" if facts else name


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
        """Obey a command, or handle what has happened.

        Raises:
            ImpossibleTransitionError: that cannot happen in this state; nothing was changed.
        """
        match trigger:
            case WantUp(why=why):
                self._load(why)
            case WantDown():
                self._unload(trigger)
            case WantRestart():
                self._restart(trigger)
            case Removed():
                self._remove(trigger)
            case Reconfigured():
                self._reconfigure(trigger)
            case _:
                self._happens(trigger)

    # ------------------------------------------------------------ commands

    def _load(self, why: Why) -> None:
        match self.life.phase:
            case Abandoned():
                self._refuse()
            case Stopped() | Backoff() | Failed():
                self._want(Wanted.UP, why)
                self._start()
            case Ready():
                self._answer(Waiters.CALLERS_UP)
            case Draining() if self.life.wanted is not Wanted.UP:
                self._want(Wanted.UP, why)
                if not self.life.is_outdated:  # otherwise it drains, and comes up as its entry says
                    self._serve_on()
            case Pending() | Loading() | Draining() | Swapping() | Stopping():
                # What comes up anyway keeps the reason for which it does.
                self._want(Wanted.UP, self.life.why if self.life.wanted is Wanted.UP else why)
            case phase:
                assert_never(phase)

    def _unload(self, command: WantDown) -> None:
        life, drain_s = self.life, command.drain_s
        self._want(Wanted.DOWN, command.why)
        match life.phase:
            case Abandoned():
                self._answer(Waiters.CALLERS_DOWN, model_failed(life.name, life.failure))
            case Stopped():
                self._answer(Waiters.CALLERS_DOWN)
            case Pending() | Backoff() | Failed():
                self._enter(Stopped(since=self.now))
            case Loading():
                self._stop(StopCause.ASKED, stage=StopStage.TERM)
            case Ready():
                self._drain(drain_s, command.reason or str(command.why))
            case Draining() as phase:
                life.phase = replace(phase, due_at=min(phase.due_at, self.now + drain_s))
            case Swapping():  # answers that have begun are completed first
                self._drain_instead(drain_s)
            case Stopping():
                pass
            case phase:
                assert_never(phase)

    def _restart(self, command: WantRestart) -> None:
        is_immediate, drain_s = command.is_immediate, command.drain_s
        if isinstance(self.life.phase, Abandoned):
            self._refuse()
            return
        self._want(Wanted.UP, Why.RESTART)
        match self.life.phase:
            case Loading(is_restart=False) if is_immediate:
                self._stop(StopCause.ASKED, stage=StopStage.TERM, is_restart=True)
            case Ready() | Draining() | Swapping() if is_immediate:
                self._stop(StopCause.ASKED, stage=StopStage.ASK, is_restart=True)
            case phase:
                self._renew(phase, drain_s)

    def _remove(self, command: Removed) -> None:
        self._want(Wanted.GONE, Why.RELOAD, refusal=command.error)
        match self.life.phase:
            case Abandoned() | Draining() | Stopping():
                pass  # it is gone once its process has ended
            case Stopped() | Pending() | Backoff() | Failed():
                self._do(Changed("removed"), ForgetModel(model=self.life.name))
            case Loading():
                self._stop(StopCause.ASKED, stage=StopStage.TERM)
            case Ready():
                self._drain(command.drain_s, "removed")
            case Swapping():
                self._drain_instead(command.drain_s)
            case phase:
                assert_never(phase)

    def _reconfigure(self, command: Reconfigured) -> None:
        life, settings = self.life, command.settings
        is_replaced = self._adopt(settings)
        match life.phase:
            case Pending() as phase:
                if phase.fetching is not None and settings.download is None:
                    self._has_files(phase, "")
            case Swapping() if not is_replaced and settings.pinned:
                self._stay("stays: it is pinned now")
            case phase if is_replaced and life.wanted is not Wanted.DOWN:
                self._want(Wanted.UP, Why.RELOAD)
                match phase:
                    case Loading():
                        self._stop(StopCause.ASKED, stage=StopStage.TERM)
                    case Abandoned():
                        pass  # it gets no other process before that one has exited
                    case _:
                        self._renew(phase, command.drain_s)

    def _renew(self, phase: Phase, drain_s: float) -> None:
        """Have it come up with a new process, once running requests have finished."""
        match phase:
            case Stopped() | Backoff() | Failed():
                self._start()
            case Ready():
                self._drain(drain_s, str(self.life.why))
            case Swapping():
                # It comes up again at once: what needed its memory waits for its next turn to end.
                self._drain_instead(drain_s)
            case Stopping():
                self.life.phase = replace(phase, is_restart=True)
            case Pending() | Loading() | Draining():
                pass  # it does so already
            case _:
                assert_never(phase)

    def _start(self) -> None:
        """Have a model come up that has no process; a request alone forgives no crash."""
        if self.life.why is not Why.REQUEST:
            self.life.restarts.clean()
        self._enter(Pending(since=self.now))

    def _refuse(self) -> None:
        """Refuse a load: its process cannot be ended, and it gets no other before that has."""
        failed = load_failed(self.life.name, self.life.failure, is_retryable=False)
        self._answer(Waiters.CALLERS_UP, failed)

    # ------------------------------------------------------------ what happens

    def _happens(self, trigger: Trigger) -> None:
        life, now = self.life, self.now
        match life.phase, trigger:
            # A model that waits holds no memory: two that wait for each other would wait for ever.
            case Pending() as phase, Turn(prewarmed=prewarmed):
                self._spawn(phase, prewarmed)
            case Pending() as phase, LacksMemory(lack=None):
                life.phase = replace(phase, lack=None)
            case Pending() as phase, LacksMemory(lack=Lack() as lack):
                self._wait_for_memory(phase, lack)
            case Pending() as phase, NoMemory() as refusal:
                self._has_no_memory(phase, refusal)
            case Pending() as phase, DownloadProgress() as fetching:  # others load meanwhile
                cause = "" if fetching.total_bytes else phase.download_cause  # the hub has answered
                life.phase = replace(phase, lack=None, fetching=fetching, download_cause=cause)
                self._release_memory()
                self._do(Changed(""))
            case Pending() as phase, DownloadDone(folder=folder):
                launch = replace(life.settings.launch, path=folder)
                life.settings = replace(life.settings, launch=launch, download=None)
                life.restarts.outage_ended()
                self._has_files(phase, "downloaded")
            case Pending(), DownloadFailed() as failed:
                self._not_downloaded(failed)
            case Pending(), Due():  # there may be memory: the plan looks again
                pass
            case Backoff(download_cause=cause), Due():
                self._enter(Pending(since=now, is_after_crash=not cause, download_cause=cause))

            case Loading(), Spawned(pid=pid):
                life.pid = pid
            case Loading() as phase, Hello():
                self._advance(phase, LoadPhase.IMPORT, 0.0)
            case Loading() as phase, LoadProgress(phase=load_phase, progress=progress):
                self._advance(phase, load_phase, progress)
            case Loading(), ReadyMessage():  # announced after the warm-up
                life.ready_at = now
                if life.why is Why.RESTART:
                    life.why = Why.USER  # done: a later crash counts as a crash
                elif life.why is Why.SWAP:
                    life.why = Why.REQUEST  # it has its turn again
                self._enter(Ready(since=now))
            case Loading(load_phase=load_phase), Due():
                limit_s = life.settings.load_stall_timeout_s
                detail = f"the load made no progress for {limit_s:g} s while {DOING[load_phase]}"
                # Before HELLO the signal that prints stacks would only end the process.
                is_silent = load_phase is LoadPhase.SPAWN
                stage = StopStage.KILL if is_silent else StopStage.DUMP
                self._stop(StopCause.STALL, stage=stage, detail=detail)

            case Ready(), Due():  # nothing has run for `idle_unload_s`: see `Model.state_deadline`
                self._want(Wanted.DOWN, Why.IDLE)
                self._drain(0.0, str(Why.IDLE))
            case Ready(), SwappedOut(cause=cause, ran=ran, leave_s=leave_s, reason=reason):
                self._want(Wanted.UP, Why.SWAP)  # its requests wait until it is its turn again
                self._enter(Swapping(since=now, due_at=now + leave_s, cause=cause, ran=ran), reason)
                self._do(RowsLeave())

            case Draining(), Drained() | Due():
                is_restart = life.wanted is Wanted.UP
                if not is_restart:  # what still runs; of a restart, that continues after the exit
                    self._answer(Waiters.RUNNING, cut_off(life.name, life.why))
                    self._answer(Waiters.QUEUE, life.refusal)
                self._stop(StopCause.ASKED, stage=StopStage.ASK, is_restart=is_restart)

            # Until its process is asked to exit, a swap can be called off.
            case Swapping(cause=Shortage()), SwapCalledOff():  # rows that have left return
                self._stay("stays: memory is no longer short")
            case Swapping(cause=waiting), SwapCalledOff():
                self._stay(f"stays: {waiting} no longer needs its memory")
            case Swapping(what_for=what_for), Drained() | Due():
                # What still runs continues as after a crash, which accuses nothing.
                detail = f"swapped out {what_for}"
                self._stop(StopCause.SWAP, stage=StopStage.ASK, detail=detail)

            case Stopping() as phase, Spawned(pid=pid):
                life.pid = pid
                # The limit counts from the signal, which could not be sent before.
                life.phase = replace(phase, due_at=now + self._limit_s(phase.stage))
                self._tell_to_end(phase.stage)
            case Stopping() as phase, Due():
                stage = StopStage.TERM if phase.stage is StopStage.ASK else StopStage.KILL
                # Without a pid there is nothing yet to give up.
                if stage is not phase.stage or life.pid is None:
                    life.phase = replace(phase, stage=stage, due_at=now + self._limit_s(stage))
                self._tell_to_end(stage)
            case Stopping() as phase, Faulted(cause=StopCause.INTERNAL, detail=detail):
                life.phase = replace(phase, cause=StopCause.INTERNAL, detail=detail)
            case Stopping(), Died(seen=Ending(is_given_up=True)) as died:
                self._given_up(died)
            case Stopping(), Hello() | LoadProgress() | ReadyMessage() | Faulted():
                pass

            case Loading() | Ready() | Draining() | Swapping(), Faulted(cause=fault, detail=detail):
                self._stop(fault, stage=FIRST_STAGE[fault], detail=detail)
            case _, Died(seen=Ending(is_given_up=False)) as died if life.has_process:
                self._ended(died)
            case _:
                name = type(trigger).__name__
                raise ImpossibleTransitionError(f"{life.name}: no rule for {name} in {life.state}")

    # ------------------------------------------------------------ the end of a process

    def _ended(self, died: Died) -> None:
        """Note the end of a process, and decide what follows; nothing else does."""
        life, now = self.life, self.now
        seen, stopping, reason = died.seen, died.stopping, died.reason
        text, detail = seen.text, seen.said
        if stopping is not None and stopping.detail:
            text = detail = stopping.detail
        if isinstance(life.phase, Abandoned):
            text = f"process {life.pid} has finally ended"
        if life.restarts.fails_alike(died.load_error) and reason is ExitReason.CRASH:
            reason = ExitReason.LOAD_ERROR
            text += ", as the time before"
        is_lost = reason is ExitReason.LOAD_ERROR and self._has_lost_files(seen)
        ready_s = life.ready_for_s(now)
        if ready_s is not None and ready_s >= life.settings.restart.stable_s:
            life.restarts.was_stable()
        life.last_exit = LastExit(
            reason=reason,
            code=seen.exit_code,
            signal=seen.signal_name or None,
            detail=detail,
            at=seen.at,
            cause=seen.cause,
            last_words=seen.last_words,
        )
        life.exits[reason, seen.cause] += 1
        self._do(RunningLost(text, died.verdict))
        is_restart = stopping.is_restart if stopping else isinstance(life.phase, Draining)
        if life.wanted is not Wanted.UP:
            self._stay_down(text)
        elif reason in FAILING and not is_lost:
            self._fail(text)
        elif died.verdict.failure:
            self._fail(f"{died.verdict.failure}, the last time: {text}")
        elif is_lost:
            # It is PENDING until its repository is there, as if it had never been downloaded.
            lost = Repository(life.settings.repo, life.settings.revision)
            life.settings = replace(life.settings, download=lost)
            self._enter(Pending(since=now), text)
        elif is_restart or reason is ExitReason.ASKED:
            is_swap = stopping is not None and stopping.cause is StopCause.SWAP
            self._come_back(text, is_restart=is_restart, is_swap=is_swap)
        elif died.verdict.is_counted:
            self._after_crash(text)
        else:
            self._enter(Pending(since=now, is_after_crash=True), text)

    def _stay_down(self, text: str) -> None:
        """Go without a process, which is not wanted; a removed model is forgotten."""
        life = self.life
        is_gone = life.wanted is Wanted.GONE
        self._answer(Waiters.QUEUE, life.refusal)
        note = text if isinstance(life.phase, Abandoned) else ""
        self._enter(Stopped(since=self.now), "removed" if is_gone else note)
        if is_gone:
            self._do(ForgetModel(model=life.name))

    def _come_back(self, text: str, *, is_restart: bool, is_swap: bool) -> None:
        """Wait for another process after an end that was asked for. Only a restart keeps the memory
        of the last one; after a swap, the model waits for memory as others do, and its requests
        wait with it."""
        life, now = self.life, self.now
        if is_restart:  # of a swap, one was asked for meanwhile
            life.restarts.clean()
        if is_swap or not is_restart:
            life.reserved_bytes = 0
        lack = Lack(since=now, wait=Wait(reason=f"was {text}")) if is_swap else None
        is_worth_a_note = is_swap or isinstance(life.phase, Abandoned)
        self._enter(Pending(since=now, lack=lack), text if is_worth_a_note else "")

    def _after_crash(self, text: str) -> None:
        life, now = self.life, self.now
        was_loading = life.ready_at is None
        delay_s = life.restarts.after_crash(life.settings.restart, now)
        if delay_s is None:
            self._fail(f"{self._crashed_often()}, the last time: {text}")
            return
        # F8: those who wait for the load itself are notified; requests keep waiting.
        if was_loading:
            self._answer(Waiters.CALLERS_UP, load_failed(life.name, text, is_retryable=True))
        if delay_s > 0.0:
            self._enter(Backoff(since=now, due_at=now + delay_s), text)
        else:
            self._enter(Pending(since=now, is_after_crash=True), text)

    def _crashed_often(self) -> str:
        """Return how many crashes were too many, a clause."""
        window_s = self.life.settings.restart.window_s
        return f"crashed {self.life.restarts.crashes} times within {window_s:g} s"

    def _fail(self, cause: str) -> None:
        self._enter(Failed(since=self.now, cause=cause), cause)

    def _given_up(self, died: Died) -> None:
        """Continue without the exit of a process that SIGKILL has not ended (P26)."""
        life, cause = self.life, died.seen.text
        failed = load_failed(life.name, cause, is_retryable=False)
        error = life.refusal or failed
        self._do(RunningLost(cause, died.verdict))
        self._answer(Waiters.QUEUE, error)
        self._enter(Abandoned(since=self.now, cause=cause), cause)
        self._answer(Waiters.CALLERS_UP, failed)
        self._answer(Waiters.CALLERS_DOWN, model_failed(life.name, cause))
        self._do(Abandon(model=life.name, generation=life.generation))

    # ------------------------------------------------------------ steps of several states

    def _wait_for_memory(self, phase: Pending, lack: Lack) -> None:
        self.life.phase = replace(phase, lack=lack)
        self._release_memory()
        if phase.lack is None:
            self._do(Changed(f"waiting for memory: {lack.wait.reason}"))

    def _has_no_memory(self, phase: Pending, refusal: NoMemory) -> None:
        """Answer all who wait. What came up for the configuration stays wanted, because a reload
        may make room; what came up for those who are answered does not."""
        error = does_not_fit(
            self.life.name,
            refusal.reason,
            needed_bytes=refusal.needed_bytes,
            budget_bytes=refusal.budget_bytes,
            blockers=refusal.blockers,
        )
        self._answer(Waiters.QUEUE, error)
        self._answer(Waiters.CALLERS_UP, error)
        if self.life.settings.preload and self.life.why in (Why.PRELOAD, Why.RELOAD):
            since = phase.lack.since if phase.lack else self.now
            self._wait_for_memory(phase, Lack(since=since, wait=Wait(reason=refusal.reason)))
        else:
            self._want(Wanted.DOWN, Why.MEMORY)
            self._enter(Stopped(since=self.now), error.message)

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
        delay_s = None
        if failed.waits_for:
            cause = f"waits for {failed.waits_for}: {said}"
            delay_s = life.restarts.after_outage(life.settings.restart)
        elif failed.is_passing:
            delay_s = life.restarts.after_crash(life.settings.restart, now)
            if delay_s is None:
                cause = f"its download {self._crashed_often()}, the last time: {cause}"
        if delay_s is None:
            self._fail(cause)
            return
        said = f"it {cause}" if failed.waits_for else cause
        self._answer(Waiters.CALLERS_UP, load_failed(life.name, said, is_retryable=True))
        due_at = now + max(delay_s, failed.retry_after_s)
        self._enter(Backoff(since=now, due_at=due_at, download_cause=cause), cause)

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

    def _has_lost_files(self, seen: Ending) -> bool:
        """True if files of a repository have been removed since the configuration was read.

        Not if the load before ended for the same reason: a download has not helped.
        """
        missing = ExitCode.MODEL_MISSING
        if seen.exit_code != missing or not self.life.settings.repo:
            return False
        return self.life.last_exit is None or self.life.last_exit.code != missing

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

    def _want(self, wanted: Wanted, why: Why, *, refusal: RemoteError | None = None) -> None:
        """Record what is wanted, and answer all who want the opposite: commands are superseded, and
        requests are cut off, or refused with `refusal`."""
        life = self.life
        was_up, life.wanted, life.why = life.wanted is Wanted.UP, wanted, why
        life.refusal = None
        if wanted is not Wanted.UP:
            life.refusal = refusal or cut_off(life.name, why)
            if was_up:
                is_command = why is Why.USER
                error = (
                    superseded(life.name, "an unload") if is_command else cut_off(life.name, why)
                )
                self._answer(Waiters.CALLERS_UP, error)
            self._answer(Waiters.QUEUE, life.refusal)
        elif not was_up:
            self._answer(Waiters.CALLERS_DOWN, superseded(life.name, "a load"))

    def _adopt(self, settings: ModelSettings) -> bool:
        """Adopt an entry, and return whether a live process must be replaced by a new one."""
        life = self.life
        is_other_launch = settings.launch != life.settings.launch
        if settings != life.settings:
            life.restarts.clean()  # the old entry crashed; an unchanged one keeps its crashes
        if life.settings.pinned and not life.has_process:
            life.reserved_bytes = 0  # it was reserved for the pin
        life.settings = settings
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
