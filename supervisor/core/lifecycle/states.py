"""The states of a worker as values: each holds what is only true while it lasts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import ClassVar

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import LoadPhase, PendingReason, Priority, State

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
"""Where each state may lead without an exit; STOPPING only to `Abandoned`."""

AFTER_EXIT = frozenset({State.STOPPED, State.PENDING, State.BACKOFF, State.FAILED})
"""Where the exit of a process may lead, from every state that has one."""
