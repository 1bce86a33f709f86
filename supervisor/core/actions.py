"""The core's orders to the shell, which carries them out in order and decides nothing.

The outbox collects those of one event. Its journal keeps the facts of models and requests for
`mlxsup why`: only what is rare (changes of state, deaths, and the start, pauses and end of each
request), as facts and not as sentences, because a better sentence then explains an old death, too.
Requests that are refused on arrival are left out, because a flood of them would push out what
others ask for. Its deadlines are the times at which something may be due, earliest first; the shell
is only asked for the next one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxsup.protocol.client_messages import (
    AddModel,
    Configure,
    Failed,
    MessageToClient,
    RemoveModel,
    Reply,
    SettingsQuery,
)
from mlxsup.protocol.client_messages import Event as EventMessage
from mlxsup.protocol.codec import to_map
from mlxsup.protocol.download import Repository
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.flight import (
    Entry,
    ModelChanged,
    WorkerDied,
)
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import Caller, ConnectionId, Generation, ModelName, RequestId, RequestKey
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.message import Record, record
from mlxsup.protocol.worker_messages import MessageToWorker

from .budget import Budget, Need

if TYPE_CHECKING:
    from .model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToWorker:
    """Something to do about a process: the one of this model with this generation."""

    model: ModelName
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn(_ToWorker):
    """Start a worker; answered by `Spawned` or `SpawnFailed`, and later by `Exited`.

    Attributes:
        known_batching: see `protocol.launch.LaunchSpec`.
        prewarmed: the number of the prewarmed worker that becomes it, if that one still lives; None
            for a new process.
    """

    launch: LaunchSettings
    known_batching: dict[str, str] | None = None
    prewarmed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPrewarmed:
    """Start a prewarmed worker; answered by `PrewarmedReady`, and by `PrewarmedEnded` if its
    process ends before a `Spawn` names it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPrewarmed:
    """End a prewarmed worker at once; answered by `PrewarmedEnded`."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDownload:
    """Start a download; answered by `DownloadSaid`, at last when it is complete or has failed."""

    number: int
    repository: Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class EndDownload:
    """End a download at once, and report nothing more of it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGateway:
    """Start the gateway; answered by `GatewayListening` once it accepts connections, and by
    `GatewayEnded` when its process has ended, or if its address could not be bound."""

    number: int
    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class KillGateway:
    """Kill the gateway's process, which does nothing any longer; answered by `GatewayEnded`."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseListener:
    """Stop listening at the gateway's address: connections are refused until the next start."""


class WorkerSignal(StrEnum):
    """The signals that end a worker; DUMP makes it print every thread's stack first."""

    DUMP = "SIGUSR1"
    TERM = "SIGTERM"
    KILL = "SIGKILL"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorker(_ToWorker):
    """Signal a worker's process group."""

    signal: WorkerSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtWorker(_ToWorker):
    """Find out which state a silent worker's process is in; answered by `WorkerSeen`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtFiles(_ToWorker):
    """Find out whether a model's files still are those that its live worker has loaded; answered by
    `FilesSeen`, unless the process has ended by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToWorker(_ToWorker):
    """Send a message to a worker."""

    message: MessageToWorker


@record
class SendToClient(Record):
    """Send a message to a client; dropped if the connection is gone."""

    connection: ConnectionId
    message: MessageToClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """A model changed: log it, and print it if the daemon runs in a terminal.

    Attributes:
        change: the same map that subscribers get in `Event.value`: model, from, to, generation,
            pid, wanted, why, note (one phrase for people), at `now`; if it has become READY,
            also batching and warnings, as in the status.
    """

    change: dict[str, Any]


@record
class RequestRefused(Record):
    """A request was refused when it came: log it, but record nothing, because a flood may come.

    Attributes:
        outcome: the code of its error.
    """

    id: RequestId
    model: ModelName
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLogLevel:
    """Log from this level on, and start workers that do."""

    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfiguration:
    """Read the configuration file and check all of it; answered by `Reloaded` or `ReloadRefused`.

    Attributes:
        caller: who asked; handed back with the answer.
        is_dry: whether nothing may change because of it; handed back, too.
    """

    caller: Caller
    is_dry: bool = False


FileMessage = AddModel | RemoveModel | Configure | SettingsQuery
"""What clients ask of the configuration file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeConfiguration:
    """Write a change into the configuration file, and then do as for `ReadConfiguration`; or
    only read the settings of a model, answered by `SettingsRead`.

    Attributes:
        caller: who asked; handed back with the answer.
    """

    caller: Caller
    change: FileMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class AppraiseLaunch:
    """Find out what a model needs with another launch; answered by `LaunchAppraised`.

    Attributes:
        caller: who asked for the load; handed back with the answer.
    """

    model: ModelName
    launch: LaunchSettings
    caller: Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptLaunch:
    """A model is loaded with a launch that it was appraised for: that one counts from now on.

    Attributes:
        launch: it stands for that of the configuration, until that is read again.
        need: what it needs then; None: its files cannot be read.
    """

    model: ModelName
    launch: LaunchSettings
    need: Need | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a `Tick` at this time (monotonic seconds), or a little later; an earlier one stays."""

    when: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon(_ToWorker):
    """A worker's process cannot be ended: close what connects to it, and report it.

    `Exited` is still sent when it exits; `Finish` does not wait for that.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetModel:
    """A model was removed and none of its processes is left: close what is open for it."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged:
    """The memory budget was lowered because memory is short, or raised again: log it."""

    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedRaised:
    """A process ran out of memory: remember, until the model's files change, that so much more than
    it is appraised at is reserved for its loads.

    Attributes:
        launch: what it was started with.
        raised_bytes: how much more; it replaces what was remembered before.
    """

    model: ModelName
    launch: LaunchSettings
    raised_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFault:
    """An event met a state without a rule for it: log the story as an error."""

    model: ModelName
    story: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end was asked for, and all processes are gone or abandoned: flush to clients and exit."""


Action = (
    Spawn
    | StartPrewarmed
    | EndPrewarmed
    | StartDownload
    | EndDownload
    | StartGateway
    | KillGateway
    | CloseListener
    | SignalWorker
    | LookAtWorker
    | LookAtFiles
    | SendToWorker
    | SendToClient
    | Announce
    | RequestRefused
    | Entry
    | SetLogLevel
    | ReadConfiguration
    | ChangeConfiguration
    | AppraiseLaunch
    | AdoptLaunch
    | WakeAt
    | Abandon
    | ForgetModel
    | BudgetChanged
    | NeedRaised
    | LogFault
    | Finish
)
"""Everything that the core asks the shell to do: an entry of the journal has just come about, and
is to be written to its file, and a request's end to the log, too."""


# ---------------------------------------------------------------- the journal

CHANGES_OF_A_MODEL = 40
DEATHS_OF_A_MODEL = 8
OF_REQUESTS = 256
MOST_MODELS = 1024
"""Those that changed last; a configuration has far fewer."""


class Journal:
    """The latest entries, in memory; the shell writes all of them to files."""

    def __init__(self) -> None:
        self._last_number = 0
        # Entries with their numbers, which count as those in the files do, and their times in
        # monotonic seconds. Bounded by the four numbers above.
        self._changes: dict[str, deque[tuple[int, float, Entry]]] = {}
        self._deaths: dict[str, deque[tuple[int, float, Entry]]] = {}
        self._requests: deque[tuple[int, float, Entry]] = deque(maxlen=OF_REQUESTS)

    def keep(self, entry: Entry, now: float) -> None:
        """Keep an entry."""
        self._last_number += 1
        kept = (self._last_number, now, entry)
        match entry:
            case WorkerDied(model=model):
                _ring(self._deaths, model, DEATHS_OF_A_MODEL).append(kept)
            case ModelChanged(model=model):
                _ring(self._changes, model, CHANGES_OF_A_MODEL).append(kept)
            case _:
                self._requests.append(kept)

    def entries(self, now: float) -> list[dict[str, Any]]:
        """Return what is kept, oldest first: `n`, `kind`, the entry's fields, and `ago_s`."""
        kept = heapq.merge(*self._changes.values(), *self._deaths.values(), self._requests)
        return [
            {"n": number, "ago_s": now - at, "kind": entry.KIND, **to_map(entry)}
            for number, at, entry in kept
        ]


def _ring(
    rings: dict[str, deque[tuple[int, float, Entry]]], model: str, length: int
) -> deque[tuple[int, float, Entry]]:
    """Return the ring of a model, which becomes the latest; the oldest of too many goes."""
    ring = rings.pop(model, None)
    if ring is None:
        ring = deque(maxlen=length)
    rings[model] = ring
    while len(rings) > MOST_MODELS:
        del rings[next(iter(rings))]
    return ring


# ---------------------------------------------------------------- when something is due


class Housekeeping(Enum):
    """The subjects that are no model and no request."""

    WARM_POOL = auto()
    """The next attempt to start a prewarmed worker."""
    GATEWAY = auto()
    """The next attempt to start the gateway, or its next sign of life."""


class SignsOf(NamedTuple):
    """The signs of life of a model's process. Each beat moves their time, and no other."""

    model: ModelName


Subject = ModelName | SignsOf | RequestKey | Housekeeping
"""A model (text), its process, a request (integer), or none of them."""


class _Due(NamedTuple):
    when: float
    order: int
    subject: Subject


class Deadlines:
    """Keeps one time per subject: its earliest deadline that still applies.

    Attributes:
        has_changed: whether the earliest time may be another one since this was last set to false.
    """

    def __init__(self) -> None:
        self._when: dict[Subject, float] = {}
        self._heap: list[_Due] = []
        self._order = 0
        self.has_changed = False

    def __len__(self) -> int:
        return len(self._when)

    @property
    def held(self) -> int:
        """Return how many times it keeps, with those that were replaced and not yet forgotten."""
        return len(self._heap)

    def of(self, subject: Subject) -> float | None:
        """Return the subject's time; None for none."""
        return self._when.get(subject)

    def set(self, subject: Subject, when: float | None) -> None:
        """Replace the subject's time; None for none."""
        if when is None:
            self._when.pop(subject, None)  # a wake too many does no harm
        elif self._when.get(subject) != when:
            self._when[subject] = when
            self.has_changed = True
            self._order += 1
            heapq.heappush(self._heap, _Due(when, self._order, subject))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._when):
            self._heap = [due for due in self._heap if self._is_current(due)]
            heapq.heapify(self._heap)

    def earliest(self) -> float | None:
        """Return the next time at which something may be due."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].when if self._heap else None

    def take_due(self, now: float) -> list[Subject]:
        """Remove and return the subjects whose time has come."""
        due = []
        self.has_changed = True
        while (when := self.earliest()) is not None and when <= now:
            subject = heapq.heappop(self._heap).subject
            del self._when[subject]
            due.append(subject)
        return due

    def _is_current(self, due: _Due) -> bool:
        return self._when.get(due.subject) == due.when


# ---------------------------------------------------------------- the outbox


class Outbox:
    """Collects actions until the event has been handled.

    Attributes:
        subscriptions: connections that get every change of a model, and under which id.
        journal: the latest facts of models and requests.
        deadlines: when something is due.
    """

    def __init__(self) -> None:
        # Bounded by the connections that the shell lets in, one entry each.
        self.subscriptions: dict[ConnectionId, RequestId] = {}
        self.journal = Journal()
        self.deadlines = Deadlines()
        self._woken_at: float | None = None
        self._actions: list[Action] = []
        self._now = 0.0

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions)

    def begin(self, now: float) -> None:
        """Begin the actions of an event; drop what one that raised an error has left."""
        self._actions, self._now = [], now

    def add(self, action: Action) -> None:
        """Add an action after all others."""
        self._actions.append(action)

    def record(self, entry: Entry) -> None:
        """Keep a fact in the journal, and have the shell write it."""
        self.journal.keep(entry, self._now)
        self._actions.append(entry)

    def take(self) -> list[Action]:
        """Return the actions of this event; the next one starts with none."""
        actions, self._actions = self._actions, []
        return actions

    def take_due(self, now: float) -> list[Subject]:
        """Remove and return the subjects whose time has come: the shell has woken the core."""
        self._woken_at = None
        return self.deadlines.take_due(now)

    def wake_in_time(self) -> None:
        """Ask to be woken at the earliest time, unless that has been asked for."""
        if not self.deadlines.has_changed:
            return
        self.deadlines.has_changed = False
        when = self.deadlines.earliest()
        if when is not None and (self._woken_at is None or when < self._woken_at):
            self._woken_at = when
            self.add(WakeAt(when=when))

    def send(self, connection: ConnectionId, message: MessageToClient) -> None:
        """Send a message to a client."""
        self._actions.append(SendToClient(connection=connection, message=message))

    def reply(self, caller: Caller, value: dict[str, Any]) -> None:
        """Answer a command that succeeded."""
        self.send(caller.connection, Reply(id=caller.id, value=value))

    def fail(self, caller: Caller, error: RemoteError) -> None:
        """Answer a command that failed."""
        self.send(caller.connection, Failed(id=caller.id, error=error))

    def tell(self, model: Model, message: MessageToWorker) -> None:
        """Send a message to the process of a model, and count it: its heartbeats count, too."""
        if model.process.watch is not None:
            model.process.watch.was_told(self._now)
        generation = model.life.generation
        action = SendToWorker(model=model.name, generation=generation, message=message)
        self._actions.append(action)

    def announce(self, change: dict[str, Any]) -> None:
        """Send a change of a model to all that watch."""
        self._actions.append(Announce(change=change))
        for connection, id in self.subscriptions.items():
            self.send(connection, EventMessage(id=id, value=change))
