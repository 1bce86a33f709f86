"""Checks of what a daemon needs: software, configuration, models, folders, memory."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlxsup.protocol import discovery
from mlxsup.protocol.discovery import ConfigPlace, UnreadableConfigError
from mlxsup.protocol.folders import (
    CLIENT_SOCKET_NAME,
    DEFAULT_RUNTIME_DIR,
    default_log_dir,
)
from mlxsup.protocol.key_file import KeyPlace, find_trouble
from mlxsup.protocol.text import size_text
from mlxsup.protocol.version import VERSION
from mlxsup.store.hub_cache import OFFLINE_VARIABLES, YES, find_cache

from ..connection import Target
from ..exit_status import CliError
from ..keys import find_keys
from ..terminal.text import counted
from .finding import Finding, note, ok, problem

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

CPU_PACKAGE = "mlx-cpu"
"""With MLX's back-end for CPUs, on Linux."""

FULL_BYTES = 256 * 2**20
NEARLY_FULL_BYTES = 5 * 2**30
"""Less than most models take."""

NETWORK = (
    "nfs", "nfs4", "smbfs", "cifs", "smb3", "afpfs", "webdav", "fuse.sshfs", "9p", "afs", "ceph",
)  # fmt: skip
"""File systems whose sockets and locks do not work, or not among machines."""

REFUSED_73 = "`mlxsup start` exits with 73"

_REPAIR = re.compile(r"`((?:mlxsup (?:pull|convert)|git) [^`]+)`")
"""The commands of a hint that repair a model folder; other commands only show something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The configuration that counts, and which daemon follows from it.

    Attributes:
        places: where a configuration file is looked for, with absolute paths.
        counting: the first of them that is named or there; None if there is none.
        config: its file; None if it is not there.
        problems: what is wrong with that file.
        loaded: what it says; None if there is none, or anything in it is wrong.
        endpoint: where commands look for the daemon.
        runtime_dir, log_dir: the folders that a daemon with this configuration would use.
        listen: where a gateway is to listen, unchecked; empty without one.
        key_need: why its requests need keys even if there never was one, unchecked.
        keys: where its keys are.
    """

    places: tuple[ConfigPlace, ...]
    counting: ConfigPlace | None
    config: Path | None
    problems: tuple[str, ...]
    loaded: DaemonConfig | None
    endpoint: str
    runtime_dir: Path
    log_dir: Path
    listen: str
    key_need: str
    keys: KeyPlace


def find_setting(target: Target) -> Setting:
    """Read the configuration that counts, with as much of a wrong one as can be read.

    Raises:
        CliError: the endpoint that was given is none.
    """
    from mlxsup.protocol.gateway import DEFAULT_LISTEN, key_need_in
    from mlxsup.supervisor.config.load import ConfigError, load_config

    looked_at = tuple(
        place._replace(path=place.path.expanduser().absolute())
        for place in discovery.config_places(target.config)
    )
    counting = next((one for one in looked_at if one.is_named or one.is_there), None)
    path = counting.path if counting is not None and counting.is_there else None
    loaded: DaemonConfig | None = None
    problems: tuple[str, ...] = ()
    runtime_dir = Path(DEFAULT_RUNTIME_DIR).expanduser()
    log_dir, listen, need = default_log_dir(runtime_dir), "", None
    if path is not None:
        try:
            loaded = load_config(path)
        except ConfigError as error:
            problems = tuple(error.problems)
        with suppress(UnreadableConfigError):
            table = discovery.read_toml(path).get("gateway")
            need = key_need_in(table)
            given = table.get("listen", DEFAULT_LISTEN) if isinstance(table, dict) else ""
            listen = given if isinstance(given, str) else ""
            runtime_dir, log_dir = discovery.runtime_dir_of(path), discovery.log_dir_of(path)
    try:
        endpoint = target.find_endpoint()
    except CliError:
        if target.endpoint is not None:
            raise
        endpoint = f"ipc://{runtime_dir / CLIENT_SOCKET_NAME}"  # what is wrong is a finding
    try:
        keys = find_keys(target)
    except CliError:  # what is wrong with the file, or with its folder, is a finding
        keys = KeyPlace.beside(path, runtime_dir)
    return Setting(
        places=looked_at, counting=counting, config=path, problems=problems, loaded=loaded,
        endpoint=endpoint, runtime_dir=runtime_dir, log_dir=log_dir, listen=listen,
        key_need=f"gateway.{need[0]} {need[1]}" if need is not None else "", keys=keys,
    )  # fmt: skip


# ---------------------------------------------------------------- software


def system_name() -> str:
    """Return `Linux` or `Darwin`."""
    return platform.system()


def installer() -> str:
    """Return the command that installs into this environment; uv's environments have no pip."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def check_software(_setting: Setting) -> Iterator[Finding]:
    """Judge the versions of packages, and whether MLX can use what the machine has."""
    from packaging.requirements import Requirement

    from mlxsup.supervisor.memory.machine import CUDA_PACKAGES, find_backend

    needed, wrong = list(map(Requirement, _requirements())), False
    for one in needed:
        has = version_of(one.name)
        if has is None or not one.specifier.contains(has, prereleases=True):
            wrong = True
            yield problem(
                "software",
                f"{one.name} {'is not installed' if has is None else f'is {has}'}; mlxsup needs"
                f" {one.name}{one.specifier}",
                why="this version is untested: loads may fail and answers may differ",
                command=f"{installer()} {shlex.quote(f'{one.name}{one.specifier}')}",
            )
    backend = find_backend()
    is_linux = system_name() == "Linux"
    has_gpu = is_linux and shutil.which("nvidia-smi") is not None
    if is_linux and all(version_of(name) is None for name in (CPU_PACKAGE, *CUDA_PACKAGES)):
        yield problem(
            "software",
            "MLX has no back-end: install the one for CPUs or for CUDA",
            why="no model can be loaded",
            command=f"{installer()} 'mlxsup[{'cuda' if has_gpu else 'cpu'}]'",
        )
    elif has_gpu and backend == "cpu":
        yield note(
            "software",
            "this machine has an NVIDIA GPU, and MLX is installed for the CPU",
            why="models run many times slower than on the GPU",
            command=f"{installer()} 'mlxsup[cuda]'",
        )
    if not wrong:
        versions = "".join(f", {name} {version_of(name)}" for name in ("mlx", "mlx-lm"))
        python = platform.python_version()
        yield ok("software", f"mlxsup {VERSION}, Python {python}{versions} ({backend})")


def _requirements() -> list[str]:
    """Return what mlxsup needs in every case; nothing if it is not installed as a package."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("mlxsup") or []
    except metadata.PackageNotFoundError:
        return []
    markers = ((line, Requirement(line).marker) for line in lines)
    return [line for line, marker in markers if marker is None or marker.evaluate({"extra": ""})]


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- the configuration and its models


def check_configuration(setting: Setting) -> Iterator[Finding]:
    """Judge which file counts, and what is wrong with it, its models' need of memory included."""
    counting, problems = setting.counting, [*setting.problems]
    looked_at = [str(one.path) for one in setting.places]
    if counting is None:
        yield note(
            "configuration",
            f"there is no configuration file; looked for {', '.join(looked_at)}",
            why="`mlxsup start` needs a configuration file or --model",
            command="mlxsup init",
        )
    elif not counting.is_there:
        yield problem(
            "configuration",
            f"{counting.path} does not exist; {counting.source} names it",
            why="`mlxsup start` exits with 78",
            fix=f"create it with `mlxsup init {shlex.quote(str(counting.path))}`, or choose another"
            " file",
        )
    if setting.loaded is not None:
        from mlxsup.supervisor.config.load import ConfigError
        from mlxsup.supervisor.memory.estimator import check_memory as check_needs

        try:
            check_needs(setting.loaded)
        except ConfigError as error:
            problems += error.problems
    refused = "`mlxsup start` exits with 78, and a reload is refused"
    for text in problems:
        yield problem("configuration", text, why=refused, fix="correct that line")
    if setting.loaded is not None and counting is not None and not problems:
        models = counted(len(setting.loaded.models), "model")
        yield ok("configuration", f"{counting.path} is valid, with {models}")
    for one in setting.places:
        if counting is not None and one.path != counting.path and one.is_there:
            yield note(
                "configuration",
                f"{one.path} is ignored, because {counting.path} takes precedence "
                f"({counting.source})",
                why="changes of the ignored file have no effect",
                fix=f"choose a file with --config, or rename {counting.path}",
            )
    if variable := os.environ.get(discovery.ENDPOINT_VARIABLE):
        yield note(
            "configuration",
            f"MLXSUP_ENDPOINT is set to {variable}",
            why="commands without --config look for the daemon there, but `mlxsup start` ignores "
            "it",
            command="unset MLXSUP_ENDPOINT",
        )


def check_models(setting: Setting) -> Iterator[Finding]:
    """Judge the folders of the models that need no download."""
    if setting.loaded is None:
        return
    from mlxsup.supervisor.config.model_folders import model_problems

    problems = model_problems(setting.loaded)
    names = [
        model.name
        for model in setting.loaded.models
        if model.launch.engine == "mlx" and model.download is None
    ]
    broken = [name for name in names if name in problems]
    for name in broken:
        hint = problems[name].hint
        found = _REPAIR.search(hint)
        command = found.group(1) if found else ""
        if command.startswith("mlxsup pull") and offline_variable():
            command = _online(command)
        yield problem(
            "models",
            f"{name}: {problems[name].text}",
            why="the model cannot be loaded; requests for it fail with `load_failed`",
            fix="" if command else hint or "copy or download the model again",
            command=command,
        )
    if names and not broken:
        yield ok("models", f"the files of {', '.join(names)} are complete")


def check_downloads(setting: Setting) -> Iterator[Finding]:
    """Judge whether what is missing can be downloaded."""
    offline = offline_variable()
    for model in setting.loaded.models if setting.loaded is not None else ():
        repository = model.download
        if repository is None:
            continue
        revision = "" if repository.revision == "main" else f" --revision {repository.revision}"
        command = f"mlxsup pull {repository.repo}{revision}"
        if offline:
            yield problem(
                "downloads",
                f"{model.name} needs {repository}, which is not downloaded, and {offline} "
                "forbids downloads",
                why="the model cannot be loaded",
                command=_online(command),
            )
        else:
            yield note(
                "downloads",
                f"{model.name} needs {repository}, which is not downloaded yet",
                why="the first load waits for the download",
                command=command,
            )


def offline_variable() -> str:
    """Return the variable that forbids downloads; empty if none does."""
    return next((name for name in OFFLINE_VARIABLES if os.environ.get(name, "").upper() in YES), "")


def _online(command: str) -> str:
    """Return a command that downloads although variables forbid it."""
    return f"env {' '.join(f'-u {name}' for name in OFFLINE_VARIABLES)} {command}"


# ---------------------------------------------------------------- folders and files


def check_folders(setting: Setting) -> Iterator[Finding]:
    """Judge the runtime folder, the log folder, the model cache, and the file of API keys."""
    found = [*_runtime_problems(setting.runtime_dir)]
    yield from found or [ok("runtime folder", str(setting.runtime_dir))]
    logs = setting.log_dir
    if refusal := _refusal(_nearest(logs)):
        yield problem(
            "log folder",
            f"cannot write to {logs}: {refusal}",
            why=f"{REFUSED_73}, or runs without logs",
            fix="set log_dir to a writable folder",
        )
    else:
        yield _room("log folder", logs, "lines are lost when the disk is full")
    yield _room("model cache", find_cache(), "models are downloaded there")
    trouble, _, _ = find_trouble(setting.keys).partition("; run: ")  # the finding's command
    if trouble:
        file = setting.keys.file
        command = f"chmod 600 {shlex.quote(str(file))}" if _is_open(file) else ""
        new = "create a key with `mlxsup key new NAME`, or allow HTTP without keys with"
        yield problem(
            "API keys",
            trouble,
            why="the HTTP gateway refuses every request",
            fix="" if command else f"{new} `mlxsup key off`",
            command=command,
        )


def _runtime_problems(folder: Path) -> Iterator[Finding]:
    from mlxsup.supervisor.runtime_folder import RuntimeFolderError, check_folder

    subject, near = "runtime folder", _nearest(folder)
    try:
        check_folder(folder)
        if refusal := _refusal(near):
            fix = "set runtime_dir to a writable folder"
            yield problem(subject, f"{folder} cannot be used: {refusal}", why=REFUSED_73, fix=fix)
    except RuntimeFolderError as error:
        fix, _, command = error.hint.partition("run: ")
        yield problem(subject, str(error), why=REFUSED_73, fix=fix, command=command)
    if (kind := _file_system(near)) in NETWORK:
        yield problem(
            subject,
            f"{folder} is on a network disk ({kind})",
            why="sockets and locks do not work reliably there",
            fix="set runtime_dir to a folder on a local disk",
        )


def _room(subject: str, folder: Path, why: str) -> Finding:
    """Return how much room there is on the disk of a folder."""
    fix = "free some space; `mlxsup models` shows the size of each model, and `mlxsup rm`"
    fix += " removes one"
    try:
        free = shutil.disk_usage(_nearest(folder)).free
    except OSError:
        return ok(subject, str(folder))
    if free < FULL_BYTES:
        what = f"the disk of {folder} has only {size_text(free)} left"
        return problem(subject, what, why=why, fix=fix)
    if free < NEARLY_FULL_BYTES:
        return note(subject, f"the disk of {folder} has {size_text(free)} left", why=why, fix=fix)
    return ok(subject, f"{folder}, {size_text(free)} free")


def _nearest(path: Path) -> Path:
    """Return the path itself, or the closest one above it that is there."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def _refusal(near: Path) -> str:
    """Return why no file can be made in a folder; empty if one can. Leaves nothing there."""
    if not near.is_dir():
        return f"{near} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=near):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _is_open(path: Path) -> bool:
    """True if a file of ours is one that others may read or change."""
    with suppress(OSError):
        status = path.stat()
        is_own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return is_own_file and bool(stat.S_IMODE(status.st_mode) & 0o077)
    return False


def _file_system(path: Path) -> str:
    """Return the kind of the disk that a path is on; empty if the system does not say."""
    real = path.resolve()
    mounted = [
        part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)
    ]
    closest = max(mounted, key=lambda part: len(part.mountpoint), default=None)
    return closest.fstype if closest is not None else ""


# ---------------------------------------------------------------- memory


def check_memory(setting: Setting) -> Iterator[Finding]:
    """Judge the budget against the machine and the models."""
    from mlxsup.supervisor.memory.machine import NoDeviceMemoryError, command_budget, find_backend

    backend = find_backend()
    given = setting.loaded.memory_budget if setting.loaded is not None else None
    try:
        budget = command_budget(given, backend, setting.runtime_dir)
    except NoDeviceMemoryError as error:
        yield problem(
            "memory",
            str(error),
            why="mlxsup cannot refuse or unload models when memory runs out",
            fix='set memory_budget = "…GiB" in [supervisor]',
        )
        return
    size, automatic = budget.size_bytes, budget.automatic_bytes
    found = [*(_misfits(setting.loaded, size) if setting.loaded is not None else ())]
    if backend == "metal" and automatic is not None and size > automatic:
        found.append(
            problem(
                "memory",
                f"memory_budget is {size_text(size)}, but macOS recommends at most "
                f"{size_text(automatic)} for the GPU",
                why="beyond that, the system compresses and swaps memory, which is slow",
                command=f"sudo sysctl iogpu.wired_limit_mb={-(-size // 2**20)}",
            )
        )
    yield from found
    if not found:
        yield ok("memory", f"all models together may use {size_text(size)} ({budget.reason})")


def _misfits(configuration: DaemonConfig, budget_bytes: int) -> Iterator[Finding]:
    """Judge whether the models fit together, and each of them alone."""
    from ..commands.plan import plan_of

    try:
        plan = plan_of(configuration)
    except CliError:
        return  # there is no budget, which is a finding
    advice = (plan["change"] or "use a smaller model").partition(": ")[0]
    rows = [row for row in plan["models"] if not row["problem"]]
    too_large = [row["name"] for row in rows if row["missing_bytes"]]
    for name in too_large:
        yield problem(
            "memory",
            f"{name} does not fit into {size_text(budget_bytes)}, even alone",
            why="it cannot be loaded",
            fix=f"{advice}; `mlxsup plan` shows what it needs",
        )
    if plan["change"] and not too_large:
        yield note(
            "memory",
            f"the models with `preload` do not fit together into {size_text(budget_bytes)}",
            why="they take turns, and each turn costs a load",
            fix=f"{advice}; `mlxsup plan` shows what each needs",
        )
