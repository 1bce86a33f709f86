"""The triggers of a model's life, and their effects besides actions.

A life knows nothing about requests, callers and watchers: `fleet.py` carries its effects out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import DeathCause, LoadPhase, Priority, Why

from ..actions import Abandon, LookAtFiles, SendToWorker, SignalWorker, Spawn
from ..health.poison import NO_VERDICT, Verdict
from ..settings import ModelSettings
from .states import Fetching, Lack, Shortage, StopCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Something that happens to a life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantUp(Trigger):
    """A load command, a preload, or a request for a model that is down."""

    why: Why


@dataclass(frozen=True, slots=True, kw_only=True)
class WantDown(Trigger):
    """An unload command, an eviction, or the shutdown.

    Attributes:
        drain_s: how long running requests may take to finish.
        reason: of an eviction: what the memory is for, and why this model was chosen.
    """

    why: Why
    drain_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantRestart(Trigger):
    """A restart command.

    Attributes:
        is_immediate: whether running requests are cut off.
        drain_s: otherwise, how long they may take to finish.
    """

    is_immediate: bool
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed(Trigger):
    """The configuration no longer names the model.

    Attributes:
        drain_s: how long running requests may take to finish.
        error: the answer for its queue.
    """

    drain_s: float
    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigured(Trigger):
    """The configuration was read again and names the model.

    Attributes:
        drain_s: how long running requests may take to finish if the process must be replaced.
    """

    settings: ModelSettings
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Trigger):
    """It is this model's turn to load.

    Attributes:
        prewarmed: the number of the prewarmed worker that it takes over; None for a new process.
    """

    prewarmed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LacksMemory(Trigger):
    """There is no memory for it yet."""

    lack: Lack


@dataclass(frozen=True, slots=True, kw_only=True)
class HasMemory(Trigger):
    """There is memory for it now, but it is not its turn yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMemory(Trigger):
    """There cannot be memory for it, even if all go that may.

    Attributes:
        reason: what it needs and what is in the way.
        error: the answer for everybody who waits for it.
    """

    reason: str
    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class LacksFiles(Trigger):
    """Files of the model are being downloaded."""

    fetching: Fetching


@dataclass(frozen=True, slots=True, kw_only=True)
class HasFiles(Trigger):
    """Nothing is left to download.

    Attributes:
        folder: the model folder, absolute; None if the entry has changed, and now names one.
    """

    folder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFiles(Trigger):
    """The download has failed.

    Attributes:
        cause: why, and what helps: a phrase for people.
        waits_for: what the next attempt needs and only time can bring, such as `the network`; empty
            if there is nothing of the kind.
        is_passing: whether a later attempt may succeed.
        retry_after_s: when the hub allows one; 0 if it does not say.
    """

    cause: str
    waits_for: str
    is_passing: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut(Trigger):
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
class SwapCalledOff(Trigger):
    """The model that it makes room for no longer waits, or that got room elsewhere; or
    memory is no longer short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesDoubted(Trigger):
    """Its files must be compared with those that it has loaded before it may be swapped out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesCompared(Trigger):
    """Its files were compared with those that it has loaded.

    Attributes:
        change: what has changed since then; empty if nothing has.
    """

    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HasPid(Trigger):
    """The process is running."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted(Trigger):
    """HELLO, from a worker of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(Trigger):
    """The load has progressed."""

    phase: LoadPhase
    progress: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameReady(Trigger):
    """READY, announced after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Trigger):
    """Nothing runs in the engine any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(Trigger):
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
class Due(Trigger):
    """The state's own deadline has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurry(Trigger):
    """A shutdown is asked for again: running requests are cut off, and stopping is escalated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died(Trigger):
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
    """SIGKILL has not ended the process within its limit: nobody waits for it any longer.

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


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEnds:
    """Answer every request that waits for this model."""

    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEnds:
    """Answer every running request, though the process is still alive."""

    error: RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLost:
    """The process is gone with what ran in it: answer those requests, or let them wait again."""

    text: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLeave:
    """All rows are to leave for a swap without an end; what they have computed is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpWaitersEnd:
    """Answer callers of load and restart: with success, or with an error."""

    error: RemoteError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DownWaitersEnd:
    """Answer callers of unload: with success, or with an error."""

    error: RemoteError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The state changed: notify the watchers."""

    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """The model was removed and its process is gone: forget it."""


Effect = (
    QueueEnds
    | RunningEnds
    | RunningLost
    | RowsLeave
    | UpWaitersEnd
    | DownWaitersEnd
    | Changed
    | Erased
)

Outcome = Effect | Spawn | LookAtFiles | SendToWorker | SignalWorker | Abandon
"""Everything that a transition can cause."""


# ---------------------------------------------------------------- words

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def words_of(trigger: Trigger) -> str:
    """Return a trigger for the log of a bug: `want down (shutdown, 30.0)`."""
    name = _CAPITAL.sub(" ", type(trigger).__name__).lower()
    if isinstance(trigger, Died):
        return f"{name} ({trigger.text})"
    values = [getattr(trigger, one.name) for one in fields(trigger)]
    facts = [str(value) for value in values if value and isinstance(value, str | int | float)]
    return f"{name} ({', '.join(facts)})" if facts else name
