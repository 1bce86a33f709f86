"""What the checks judge: plain values, so that those of any system can be judged on any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.download import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that mlxsup needs.

    Attributes:
        name: of the package.
        version: that is installed; None if it is not.
        needed: which versions may be, as pip takes them.
        is_right: whether the installed one is among them.
    """

    name: str
    version: str | None
    needed: str
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is installed.

    Attributes:
        version: of mlxsup.
        python: its version.
        packages: what mlxsup needs.
        installer: the command that installs into this environment, up to the package.
        system: `Linux` or `Darwin`.
        backend: that MLX would use: `cpu`, `cuda` or `metal`.
        has_backend: whether the package with that back-end is installed, if it needs one.
        has_gpu: whether there is a GPU that CUDA could use.
    """

    version: str
    python: str
    packages: tuple[Package, ...]
    installer: str
    system: str
    backend: str
    has_backend: bool
    has_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Another program that serves models on this machine.

    Attributes:
        pid: its process.
        name: what it is.
        size_bytes: memory that it holds.
    """

    pid: int
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How much memory there is, and what is planned with it.

    Attributes:
        backend: `cpu`, `cuda` or `metal`.
        total_bytes: of the machine.
        available_bytes: that a program could get now.
        swap_used_bytes: of the machine.
        budget_bytes: what all models may take together; None if nobody can say.
        automatic_bytes: what that would be if no size were configured.
        reason: how the budget was found, or why it was not.
        change: what would make all models that are loaded at the start fit; empty if they fit.
        too_large: models that do not fit even if no other is loaded.
        servers: other programs that serve models.
    """

    backend: str
    total_bytes: int
    available_bytes: int
    swap_used_bytes: int
    budget_bytes: int | None
    automatic_bytes: int
    reason: str
    change: str
    too_large: tuple[str, ...]
    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """How many files a process may have open.

    Attributes:
        system: `Linux` or `Darwin`.
        hard: the limit up to which a daemon raises its own; None: none.
        needed: what a daemon with the configured models needs.
    """

    system: str
    hard: int | None
    needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that a daemon uses.

    Attributes:
        path: absolute.
        is_there: whether anything is.
        is_folder: whether that is a folder.
        owner: its user id; None if it is not there.
        mode: its permissions; None if it is not there.
        is_private_use: whether everything in it is mlxsup's own.
        file_system: the kind of its disk; empty if that is not known.
        free_bytes: on its disk; None if that is not known.
        refusal: why no file can be made there; empty if one can.
    """

    path: Path
    is_there: bool
    is_folder: bool
    owner: int | None
    mode: int | None
    is_private_use: bool
    file_system: str
    free_bytes: int | None
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The folders of a daemon.

    Attributes:
        user: our user id.
        runtime: for sockets and the lock.
        logs: for logs.
        cache: the Hugging Face cache.
        too_long: why sockets do not fit into the runtime folder; empty if they do.
        key_trouble: why a gateway refuses every request for its keys; empty if it does not.
        key_path: that file.
        is_key_file_open: whether others may read or change it, and that alone is wrong.
    """

    user: int
    runtime: Folder
    logs: Folder
    cache: Folder
    too_long: str
    key_trouble: str
    key_path: Path
    is_key_file_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A place for a configuration file.

    Attributes:
        path: of the file, absolute.
        source: what names it.
        is_named: whether somebody has named it, by an option or a variable.
        is_there: whether there is a file.
    """

    path: Path
    source: str
    is_named: bool
    is_there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What the configuration says.

    Attributes:
        looked_at: the places, in their order; the first that is named or there counts.
        endpoint_variable: the value of MLXSUP_ENDPOINT; empty if it is not set.
        problems: what is wrong with the file that counts.
        models: how many it names.
    """

    looked_at: tuple[ConfigFile, ...]
    endpoint_variable: str
    problems: tuple[str, ...]
    models: int

    @property
    def counting(self) -> ConfigFile | None:
        """The file that counts; None if there is none."""
        return next((one for one in self.looked_at if one.is_named or one.is_there), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A configured model that is on the disk, or should be.

    Attributes:
        name: of the model.
        problem: why it cannot be loaded; empty if nothing is seen that would keep it from it.
        hint: what to do; may be empty.
    """

    name: str
    problem: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """What is downloaded, and whether it can be.

    Attributes:
        offline: the variable that forbids it; empty if none does.
        missing: repositories of the configuration that are not complete on the disk, by model.
        token: where a token was found, never the token; empty if there is none.
        token_path: its file; None if it comes from elsewhere.
        token_mode: the permissions of that file.
    """

    offline: str
    missing: tuple[tuple[str, Repository], ...]
    token: str
    token_path: Path | None
    token_mode: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDaemon:
    """Another daemon of this user.

    Attributes:
        pid: its process.
        endpoint: where it listens.
    """

    pid: int
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """The daemon that commands would find.

    Attributes:
        endpoint: where it listens, or would.
        version: ours.
        config: the configuration file that commands would read; None if there is none.
        holder: the pid of the process that holds the runtime folder; None if nobody does.
        is_stopped: whether that process was stopped.
        is_beating: whether it has touched its lock in the last seconds, as it does while it works.
        recorded: the pid that the lock names, although that process does not hold it; None if the
            lock names nobody else.
        recorded_name: the program that has that pid now; empty if none has.
        leftovers: sockets in the runtime folder although nobody holds it.
        status: what it says of itself; None if it does not answer.
        failure: what it answered instead; empty if it did not answer, or all is well.
        others: other daemons.
    """

    endpoint: str
    version: str
    config: Path | None
    holder: int | None
    is_stopped: bool
    is_beating: bool
    recorded: int | None
    recorded_name: str
    leftovers: int
    status: Mapping[str, Any] | None
    failure: str
    others: tuple[OtherDaemon, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFacts:
    """The HTTP gateway, if the configuration has one.

    Attributes:
        address: where it is to listen; empty without one.
        missing: packages of its extra that are not installed.
        installer: as for `Software`.
        key_need: why requests need keys, if there never was one; else empty.
        is_ours: whether the daemon's gateway listens there now.
        refusal: why nobody could listen there now; empty if somebody could.
        taken_by: the program that listens there instead; empty if that is not known.
        free_address: the same host with a port that is free; empty if none was looked for.
    """

    address: str
    missing: tuple[str, ...]
    installer: str
    key_need: str
    is_ours: bool
    refusal: str
    taken_by: str
    free_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What else may be in the way.

    Attributes:
        system: `Linux` or `Darwin`.
        sleep_minutes: after how long the machine sleeps; 0: never, None: not known.
        now_s: seconds since the epoch, by the clock of the machine.
        written_s: when `written_path` was written, by that clock.
        written_path: the file that was written last of those that are looked at.
    """

    system: str
    sleep_minutes: int | None
    now_s: float
    written_s: float
    written_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A file that makes a service manager run the daemon.

    Attributes:
        path: of the file.
        manager: `systemd` or `launchd`.
        problem: why it cannot be read; empty if it can.
        program: that it starts; empty if it does not say.
        has_program: whether that is there and can be run.
        is_own_program: whether that is the mlxsup that runs now; None if that is not known.
        config: the configuration file that it names; None if it names none.
        has_config: whether that file is there.
        is_interactive: whether launchd gives it the processor as to a program in the foreground.
        lingers: whether systemd lets it run while its user is not logged in; None: it is a service
            of the machine, or that is not known.
    """

    path: Path
    manager: str
    problem: str = ""
    program: str = ""
    has_program: bool = False
    is_own_program: bool | None = None
    config: Path | None = None
    has_config: bool = False
    is_interactive: bool = True
    lingers: bool | None = None
