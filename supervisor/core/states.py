"""The values of a model's life: its states, and the triggers that change them.

A state holds what is only true while it lasts. A trigger is what may happen to a life.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import Enum, StrEnum, auto
from typing import ClassVar

from mlxsup.protocol.download import DownloadDone, DownloadFailed
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import (
    DeathCause,
    LoadPhase,
    PendingReason,
    Priority,
    State,
    Why,
)
from mlxsup.protocol.worker_messages import Hello, LoadProgress
from mlxsup.protocol.worker_messages import Ready as ReadyMessage

from .events import Spawned
from .poison import NO_VERDICT, Verdict
from .settings import ModelSettings

# ---------------------------------------------------------------- states

KEPT_BACKOFF_S = 5.0
"""A model that crashed keeps the memory that is reserved for it if its next start is nearer."""


class StopCause(StrEnum):
    """The reason why a worker is being ended; decides what follows its exit."""

    ASKED = auto()
    STALL = auto()
    SUSPENDED = auto()
    BROKEN = auto()
    VERSION = auto()
    TOO_LARGE = auto()
    INTERNAL = auto()
    SWAP = auto()


class StopStage(Enum):
    """The stages of ending a worker, ever harder (E5)."""

    ASK = auto()
    DUMP = auto()
    TERM = auto()
    KILL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """One state of a worker.

    Attributes:
        since: when it was entered, monotonic seconds.
        due_at: when something is due if nothing else happens first; None: nothing is.
    """

    STATE: ClassVar[State]
    KEEPS_MEMORY: ClassVar[bool] = True
    since: float
    due_at: float | None = None

    @property
    def keeps_memory(self) -> bool:
        """True if the memory that is reserved for the model stays reserved."""
        return self.KEEPS_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(_Phase):
    """No process, none wanted."""

    STATE: ClassVar[State] = State.STOPPED
    KEEPS_MEMORY: ClassVar[bool] = False


class Urgency(Enum):
    """The urgency of a load, by who waits for it; decides which models it may evict."""

    NONE = auto()
    """It takes what is free, such as a preload."""
    REQUEST = auto()
    """It evicts models that are idle and had their time."""
    COMMAND = auto()
    """It evicts models that are idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """There is no memory for a model yet.

    Attributes:
        since: when that was found, monotonic seconds.
        reason: what it needs and what is in the way, a phrase for people.
        looks_again_at: when a model that is in the way may go; None if nothing is known of that.
        asked_since: since when a request or a command has been waiting for the model; None: none
            does.
        is_promised: whether others are being swapped out for it: what they free is for it.
        reclaims: whether others must give back what they do not need now.
    """

    since: float
    reason: str
    looks_again_at: float | None = None
    asked_since: float | None = None
    is_promised: bool = False
    reclaims: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """Files of a model are being downloaded.

    Attributes:
        done_bytes: what is on the disk.
        total_bytes: of the model; 0 while that is not known.
        is_waiting: whether another process downloads it, and this download waits for that one.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    is_waiting: bool = False

    @property
    def fraction(self) -> float:
        """Return how much has come, from 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    def is_news_after(self, before: Fetching) -> bool:
        """True if it has come a percent further, or is not what it was."""
        return (int(self.fraction * 100), self.total_bytes, self.is_waiting) != (
            int(before.fraction * 100),
            before.total_bytes,
            before.is_waiting,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending(_Phase):
    """Wanted, and waiting to be spawned.

    Attributes:
        is_after_crash: whether it only waits for other loads that follow a crash.
        lack: the memory that it waits for; None if it waits for something else.
        fetching: the download that it waits for; None if it waits for its turn, or for memory.
        download_cause: why the download before that failed; empty if it is the first, or has begun.
    """

    STATE: ClassVar[State] = State.PENDING
    is_after_crash: bool = False
    lack: Lack | None = None
    fetching: Fetching | None = None
    download_cause: str = ""

    @property
    def reason(self) -> PendingReason:
        """Return what it waits for."""
        if self.fetching is not None:
            return PendingReason.DOWNLOAD
        return PendingReason.MEMORY if self.lack else PendingReason.TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(_Phase):
    """Spawned, not READY yet.

    Attributes:
        due_at: when the load has stalled if there is no progress until then.
        progress: from 0 to 1 over all phases.
        is_restart: whether a restart command caused it; further ones join it.
    """

    STATE: ClassVar[State] = State.LOADING
    due_at: float
    load_phase: LoadPhase = LoadPhase.SPAWN
    progress: float = 0.0
    is_restart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(_Phase):
    """Serving."""

    STATE: ClassVar[State] = State.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(_Phase):
    """Finishing running requests.

    Attributes:
        due_at: when requests that still run are cut off.
    """

    STATE: ClassVar[State] = State.DRAINING
    due_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory is short, whichever model waits for it.

    Attributes:
        reason: why, a phrase that follows what is done: `because other programs need memory`.
        counted_bytes: what the model that goes for it was counted with.
    """

    reason: str
    counted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapping(_Phase):
    """Its rows leave, because its memory is needed; then its process ends.

    Attributes:
        due_at: when rows that have not left are cut off; they continue as after a crash.
        cause: the model that it makes room for, or the shortage that it goes for.
        ran: the highest class that it ran when it was chosen; None if it ran nothing.
    """

    STATE: ClassVar[State] = State.DRAINING
    due_at: float
    cause: ModelName | Shortage
    ran: Priority | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(_Phase):
    """Asked to exit, or being killed, until the exit is seen.

    Attributes:
        stage: how hard it is being ended.
        due_at: when the next, harder stage begins; after the last one, when it is given up.
        is_restart: whether a restart was asked for: it then comes up with a clean window.
        detail: a phrase that says what went wrong, or for whom it is swapped out; empty if it was
            only asked to go.
    """

    STATE: ClassVar[State] = State.STOPPING
    cause: StopCause
    stage: StopStage
    due_at: float
    is_restart: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff(_Phase):
    """Crashed, or not downloaded; to be tried again.

    Attributes:
        due_at: when the next attempt begins.
        download_cause: why its download failed; empty after a crash.
    """

    STATE: ClassVar[State] = State.BACKOFF
    due_at: float
    download_cause: str = ""

    @property
    def keeps_memory(self) -> bool:
        """True if its next start is near."""
        return self.due_at - self.since < KEPT_BACKOFF_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_Phase):
    """Cannot recover by itself, or crashed too often.

    Attributes:
        cause: one sentence for people.
    """

    STATE: ClassVar[State] = State.FAILED
    KEEPS_MEMORY: ClassVar[bool] = False
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(Failed):
    """FAILED, with a live process: SIGKILL has not ended it within its limit (P26).

    It holds no turn and is not waited for, but the model gets no other process.
    """

    KEEPS_MEMORY: ClassVar[bool] = True


Phase = (
    Stopped
    | Pending
    | Loading
    | Ready
    | Draining
    | Swapping
    | Stopping
    | Backoff
    | Failed
    | Abandoned
)
"""One state of a worker, with the time it was entered."""

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

PROGRESS = Spawned | Hello | LoadProgress
"""Triggers that change nothing of what the memory plan depends on."""


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
