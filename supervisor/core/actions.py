"""The core's orders to the shell, which carries them out in order and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlxsup.protocol.client_messages import (
    AddModel,
    Configure,
    MessageToClient,
    RemoveModel,
    SettingsQuery,
)
from mlxsup.protocol.download import Repository
from mlxsup.protocol.flight import Entry
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import Caller, ConnectionId, Generation, ModelName, RequestId
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.message import Record, record
from mlxsup.protocol.worker_messages import MessageToWorker

from .events import LaunchAppraised
from .memory import Budget, Need


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

    number: int
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

    def answered(self, need: Need | None, *, now: float) -> LaunchAppraised:
        """Return the event that says what it needs; None if its files cannot be read."""
        return LaunchAppraised(
            now=now, model=self.model, launch=self.launch, caller=self.caller, need=need
        )


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
