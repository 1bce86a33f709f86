"""The shell's reports to the core. Every event carries `now`, monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from mlxsup.protocol.client_messages import ClientMessage
from mlxsup.protocol.download import SnapshotReport
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import Caller, ConnectionId, Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.message import Record, record
from mlxsup.protocol.worker_messages import WorkerMessage

from .budget import Need, Reading
from .settings import CoreSettings, ModelSettings


@record
class _Event(Record):
    """Something happened.

    Attributes:
        now: monotonic seconds at which the shell saw it.
    """

    now: float


@record
class OfWorker(_Event):
    """Something happened to a process: the one of this model with this generation."""

    model: ModelName
    generation: Generation


class OfClient(_Event):
    """A client said or did something, or the shell has read what one asked for."""

    __slots__ = ()


class Started(_Event):
    """The supervisor is up: preload what the configuration says. The first event."""

    __slots__ = ()


class Tick(_Event):
    """A time asked for with `WakeAt` has come."""

    __slots__ = ()


@record
class ClientSaid(OfClient):
    """A client sent a message.

    Attributes:
        process: the process behind the connection, under a name that no other process has; empty
            if it could not be found.
    """

    connection: ConnectionId
    message: ClientMessage
    process: str = ""


@record
class ClientGone(OfClient):
    """A client's connection is closed: its requests are cancelled, its commands forgotten."""

    connection: ConnectionId


@record
class ClientTooSlow(OfClient):
    """A client has not read what waits for it: its requests end with `slow_consumer`."""

    connection: ConnectionId


@record
class Spawned(OfWorker):
    """The process asked for with `Spawn` is running."""

    pid: int


@record
class SpawnFailed(OfWorker):
    """The process asked for with `Spawn` could not be started."""

    detail: str


@record
class WorkerSaid(OfWorker):
    """A worker sent a message (a HELLO only with the right token)."""

    message: WorkerMessage


@record
class WorkerSeen(OfWorker):
    """A process was inspected, as `LookAtWorker` asked.

    Attributes:
        is_stopped: whether its process state is *stopped*, as after SIGSTOP.
    """

    is_stopped: bool


@record
class FilesSeen(OfWorker):
    """The files of a model were compared with those that its worker has loaded, as `LookAtFiles`
    asked.

    Attributes:
        change: what has changed since then, `config.json has changed`; empty if nothing has.
    """

    change: str


@record
class WorkerBroke(OfWorker):
    """A worker sent something that is not a message: it is killed, as a crash without evidence.

    Attributes:
        detail: what was wrong, for people.
        is_other_version: it speaks another version of the protocol: mlxsup was upgraded.
    """

    detail: str
    is_other_version: bool = False


class WorkerUnlinked(OfWorker):
    """The connection of a worker that had said HELLO has ended, and everything it carried was read.

    Usually its process is about to die. If it lives, it is lost all the same: the supervisor takes
    any later connection for a stranger's.
    """

    __slots__ = ()


@record
class Exited(OfWorker):
    """A worker's process has exited and its output has been read to the end.

    Attributes:
        exit_code: what it exited with; None if a signal ended it.
        signal_name: `SIGKILL`; empty if it exited.
        last_lines: the end of its output, oldest first.
        at: wall-clock seconds since the epoch, for people.
    """

    exit_code: int | None
    signal_name: str = ""
    last_lines: tuple[str, ...] = ()
    at: float = 0.0


@record
class PrewarmedReady(_Event):
    """A prewarmed worker has imported everything, and waits for a launch spec."""

    number: int
    pid: int


@record
class PrewarmedEnded(_Event):
    """The process of a prewarmed worker has exited, or could not be started."""

    number: int


@record
class DownloadSaid(_Event):
    """A download has come further, is complete, or has failed.

    Attributes:
        number: as `StartDownload` gave it.
        report: nothing follows one that says that it is complete, or that it has failed.
    """

    number: int
    report: SnapshotReport


@record
class GatewayListening(_Event):
    """The gateway that was started under this number accepts connections.

    Attributes:
        address: with the port that it was given if any free one would do.
    """

    number: int
    pid: int
    address: Address


@record
class GatewayBeat(_Event):
    """The event loop of the gateway that was started under this number runs."""

    number: int


@record
class GatewayEnded(_Event):
    """The gateway's process has ended, or it could not be started.

    Attributes:
        cause: one phrase for people.
        is_crash: whether there was a process.
    """

    number: int
    cause: str
    is_crash: bool


@record
class Sampled(_Event):
    """The monitor has measured memory.

    Attributes:
        footprint_bytes: resident bytes of each worker's process, by pid; some may be gone by now.
        reading: what is available of it, measured after the footprints; None: not known.
    """

    footprint_bytes: Mapping[int, int]
    machine_bytes: int
    reading: Reading | None = None


@record
class Appraised(_Event):
    """The memory that models need: before they are loaded from their files, then as measured.

    Attributes:
        needs: of every model that could be appraised, by name; it replaces what was known.
    """

    needs: Mapping[ModelName, Need]


@record
class LaunchAppraised(OfClient):
    """A model was appraised for a load with another launch, which a client has asked for.

    Attributes:
        need: what the model needs then; None: its files cannot be read.
    """

    model: ModelName
    caller: Caller
    launch: LaunchSettings
    need: Need | None


@record
class ShutdownAsked(_Event):
    """A signal asked the supervisor to end.

    Attributes:
        is_immediate: do not let running requests finish (the second signal).
    """

    is_immediate: bool


@record
class Reloaded(OfClient):
    """The configuration was read again and is valid.

    Attributes:
        models: every entry, in the order of the file.
        caller: who asked for it; None for a signal.
        later: keys that have changed but only take effect at the next start.
        is_dry: whether to answer what it would change, and to change nothing.
        needs: of every model of that file that could be appraised; it replaces what was known.
        unread: of the models whose folders did not answer, a sentence each.
        answer: what else the caller is answered with.
    """

    settings: CoreSettings
    models: tuple[ModelSettings, ...]
    caller: Caller | None = None
    later: tuple[str, ...] = ()
    is_dry: bool = False
    needs: Mapping[ModelName, Need] = field(default_factory=dict)
    unread: Mapping[ModelName, str] = field(default_factory=dict)
    answer: Mapping[str, Any] = field(default_factory=dict)


@record
class ReloadRefused(OfClient):
    """The configuration was read again and cannot be used: the old one stays in effect (P20).

    Attributes:
        error: what is wrong with it, or with the change of it that was asked for.
    """

    error: RemoteError
    caller: Caller


@record
class SettingsRead(OfClient):
    """The settings of a model were read from the configuration file."""

    answer: Mapping[str, Any]
    caller: Caller


ClientEvent = (
    ClientSaid
    | ClientGone
    | ClientTooSlow
    | LaunchAppraised
    | Reloaded
    | ReloadRefused
    | SettingsRead
)
"""Events of clients, and of the shell that reads for them."""

WorkerEvent = (
    Spawned
    | SpawnFailed
    | WorkerSaid
    | WorkerSeen
    | FilesSeen
    | WorkerBroke
    | WorkerUnlinked
    | Exited
)
"""Events of the processes of models."""

Event = (
    ClientEvent
    | WorkerEvent
    | Started
    | Tick
    | PrewarmedReady
    | PrewarmedEnded
    | DownloadSaid
    | GatewayListening
    | GatewayBeat
    | GatewayEnded
    | Sampled
    | Appraised
    | ShutdownAsked
)
"""Everything that the shell reports to the core."""
