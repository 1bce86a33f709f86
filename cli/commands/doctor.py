"""`mlxsup doctor`: look for what is wrong, and name what fixes it.

It changes nothing, because a doctor that repairs is run by scripts and then read by no person. What
`start`, `status` and `config check` find is found by their own functions.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..connection import Target, daemon_options, status_of_daemon
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output, width_of
from ..terminal.text import counted, wrapped

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

REFUSED = "`mlxsup start` exits with 73"

FULL_BYTES = 256 * 2**20
RUNTIME_BYTES = 2**20
"""The runtime folder has small files only, often on a small disk in memory."""
NEARLY_FULL_BYTES = 5 * 2**30
"""Less than most models take."""


class Level(StrEnum):
    """The grade of a finding; a note is worth knowing, a problem does not work or will not."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


COLOURS = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}
"""In the order of the report: the most important findings come last, next to the prompt."""

INDENT = max(map(len, COLOURS)) + 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is about, in a word or two.
        what: a sentence without a full stop.
        level: how bad it is.
        why: why it matters; empty if all is well.
        fix: what to do, for people; empty if all is well, or if `command` does it.
        command: one line for a shell that fixes it; empty if no command alone does.
    """

    subject: str
    what: str
    _: KW_ONLY
    level: Level
    why: str = ""
    fix: str = ""
    command: str = ""


ok = partial(Finding, level=Level.OK)
note = partial(Finding, level=Level.NOTE)
problem = partial(Finding, level=Level.PROBLEM)


@click.command()
@daemon_options
def doctor(target: Target, output: Output) -> int:
    """Example: mlxsup doctor

    Checks the installation, configuration, models, folders, memory, daemon and service. For each
    problem it says why it matters and how to fix it. It changes nothing. The exit code is 1 if
    there is a problem; notes do not count.
    """
    setting = find_setting(target)
    findings = [_with_options(one, target) for one in examine(setting)]
    levels = Counter(one.level for one in findings)
    if output.is_json:
        output.object(
            {
                "config": None if setting.config is None else str(setting.config),
                "endpoint": setting.endpoint,
                "problems": levels[Level.PROBLEM],
                "notes": levels[Level.NOTE],
                "findings": [asdict(one) for one in findings],
            }
        )
    else:
        width = width_of(sys.stdout)
        for level in COLOURS:
            for one in findings:
                if one.level == level:
                    output.data("\n".join(lines_of(one, width, output)))
        output.data("\n".join(wrapped(_summary(levels), width)))
    return ExitStatus.FAILED if levels[Level.PROBLEM] else ExitStatus.OK


def _with_options(finding: Finding, target: Target) -> Finding:
    """Return the finding, whose commands have the options that were given."""
    command = finding.command
    if command.startswith("mlxsup "):
        command = target.repeat_in(f"`{command}`").strip("`")
    what, fix = target.repeat_in(finding.what), target.repeat_in(finding.fix)
    return replace(finding, what=what, fix=fix, command=command)


def _summary(levels: Counter[Level]) -> str:
    """Return `2 problems, 1 note`."""
    problems, notes = levels[Level.PROBLEM], levels[Level.NOTE]
    found = counted(problems, "problem") if problems else "no problems"
    return f"{found}, {counted(notes, 'note')}" if notes else found


def lines_of(one: Finding, width: int | None, output: Output) -> list[str]:
    """Return a finding as people read it, on a terminal with `width` columns; None: in a pipe."""
    word = one.level.value.ljust(INDENT)
    first, *lines = wrapped(f"{one.subject}: {one.what}", width, INDENT)
    styled = output.style(word, sys.stdout, COLOURS[one.level])
    lines.insert(0, styled + first[INDENT:])
    for name, text in (("why", one.why), ("fix", one.fix)):
        if text:
            lines += wrapped(f"{name}: {text}", width, INDENT)
    if one.command:
        command = output.style(one.command, sys.stdout, "bold")
        lines.append(f"{' ' * INDENT}run: {command}")  # never broken: it is to be copied
    return lines


# ---------------------------------------------------------------- the checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The configuration that counts, and which daemon follows from it.

    Attributes:
        config: the file that is named or there; None if there is none.
        loaded: what it says; None if there is none, or anything in it is wrong.
        problems: what is wrong with it, its models' folders and their needs of memory included.
        target: the daemon that was asked about.
        endpoint: where commands look for that daemon.
        runtime_dir, log_dir: the folders that a daemon with this configuration would use.
    """

    config: Path | None
    loaded: DaemonConfig | None
    problems: Sequence[str]
    target: Target
    endpoint: str
    runtime_dir: Path
    log_dir: Path


def find_setting(target: Target) -> Setting:
    """Read the configuration that counts, with as much of a wrong one as can be read.

    Raises:
        CliError: the endpoint that was given is none.
    """
    from mlxsup.protocol.discovery import find_config, socket_at
    from mlxsup.protocol.folders import CLIENT_SOCKET_NAME, DEFAULT_RUNTIME_DIR, default_log_dir

    found = find_config(target.config)
    path = None if found is None else found.path.expanduser().absolute()
    loaded, problems = None, list[str]()
    if path is not None:  # without a file nothing waits for pydantic
        from mlxsup.supervisor.config.load import ConfigError, load_config

        from ..configuration import check_models

        try:
            loaded = load_config(path, has_sockets=True)
            check_models(loaded, path)
        except ConfigError as error:
            problems = error.problems
    try:
        endpoint = target.find_endpoint()
    except CliError:
        if target.endpoint is not None:
            raise
        # What is wrong is a finding.
        endpoint = f"ipc://{Path(DEFAULT_RUNTIME_DIR).expanduser() / CLIENT_SOCKET_NAME}"
    runtime_dir = socket_at(endpoint).parent if loaded is None else loaded.runtime_dir
    log_dir = default_log_dir(runtime_dir) if loaded is None else loaded.log_dir
    return Setting(
        config=path, loaded=loaded, problems=problems, target=target, endpoint=endpoint,
        runtime_dir=runtime_dir, log_dir=log_dir,
    )  # fmt: skip


def examine(setting: Setting) -> Iterator[Finding]:
    """Yield what all checks find; of one that a file keeps from running, that it does."""
    checks: dict[str, Callable[[Setting], Iterator[Finding]]] = {
        "software": check_software,
        "configuration": check_file,
        "folders": check_folders,
        "memory": check_memory,
        "daemon": check_daemon,
        "service": check_services,
    }
    for subject, check in checks.items():
        try:
            yield from check(setting)
        except OSError as error:
            what = f"this could not be checked: {error}"
            yield note(subject, what, why="problems may be missing here", fix="make it readable")


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """Return what mlxsup needs in every case; nothing if it is not installed as a package."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("mlxsup") or []
    except metadata.PackageNotFoundError:
        return []
    markers = ((line, Requirement(line).marker) for line in lines)
    return [line for line, marker in markers if marker is None or marker.evaluate({"extra": ""})]


def installer() -> str:
    """Return the command that installs into this environment; uv's environments have no pip."""
    from importlib.util import find_spec

    python = shlex.quote(sys.executable)
    if find_spec("pip") is None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def check_software(_setting: Setting) -> Iterator[Finding]:
    """Judge the versions of packages, and whether MLX can use what the machine has."""
    from packaging.requirements import Requirement

    from mlxsup.protocol.version import VERSION
    from mlxsup.supervisor.memory.machine import CUDA_PACKAGES, find_backend

    wrong = False
    for one in map(Requirement, requirements()):
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
    is_linux = platform.system() == "Linux"
    has_gpu = is_linux and shutil.which("nvidia-smi") is not None
    if is_linux and all(version_of(name) is None for name in ("mlx-cpu", *CUDA_PACKAGES)):
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


def check_file(setting: Setting) -> Iterator[Finding]:
    """Judge the configuration file as `config check` does, and the keys of its gateway."""
    if setting.config is None:
        yield note(
            "configuration",
            "there is no configuration file; `mlxsup config path` shows where it is looked for",
            why="`mlxsup start` begins without a model",
            command="mlxsup init",
        )
        return
    fix = "correct that line or that folder"
    if not os.path.lexists(setting.config):
        fix = f"create it with `mlxsup init {shlex.quote(str(setting.config))}`, or choose another"
    for text in setting.problems:
        why = "`mlxsup start` refuses the file, or the model fails to load"
        yield problem("configuration", text, why=why, fix=fix)
    if setting.loaded is None:
        return
    if not setting.problems:
        models = counted(len(setting.loaded.models), "model")
        yield ok("configuration", f"{setting.config} is valid, with {models}")
    from mlxsup.protocol.key_file import find_trouble

    from ..keys import WAYS

    if trouble := find_trouble(setting.loaded.keys):
        yield problem("API keys", trouble, why="the HTTP gateway refuses every request", fix=WAYS)


def check_folders(setting: Setting) -> Iterator[Finding]:
    """Judge the runtime folder, and the room for logs and models."""
    from mlxsup.store.hub_cache import find_cache
    from mlxsup.supervisor.runtime_folder import RuntimeFolderError, check_folder

    runtime_dir, log_dir = setting.runtime_dir, setting.log_dir
    try:
        check_folder(runtime_dir)
        yield _read_only("runtime folder", runtime_dir, "runtime_dir") or _room(
            "runtime folder", runtime_dir, REFUSED, few_bytes=RUNTIME_BYTES, low_bytes=0
        )
    except RuntimeFolderError as error:
        fix, _, command = error.hint.partition("run: ")
        yield problem("runtime folder", str(error), why=REFUSED, fix=fix, command=command)
    yield _read_only("log folder", log_dir, "log_dir") or _room(
        "log folder", log_dir, "lines are lost when the disk is full"
    )
    yield _room("model cache", find_cache(), "models are downloaded there")


def _there(folder: Path) -> Path:
    """Return a folder, or the nearest above it that exists."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def _read_only(subject: str, folder: Path, key: str) -> Finding | None:
    """Return that nothing can be written into a folder, or that it cannot be made."""
    if os.access(_there(folder), os.W_OK | os.X_OK):
        return None
    fix = f"make it writable, or set {key} to another folder"
    return problem(subject, f"{_there(folder)} cannot be written", why=REFUSED, fix=fix)


def _room(
    subject: str,
    folder: Path,
    why: str,
    *,
    few_bytes: int = FULL_BYTES,
    low_bytes: int = NEARLY_FULL_BYTES,
) -> Finding:
    """Return how much room there is on the disk of a folder, which need not exist."""
    from mlxsup.protocol.text import size_text

    free, inodes = shutil.disk_usage(_there(folder)).free, os.statvfs(_there(folder))
    what = f"the disk of {folder} has {size_text(free)} left"
    fix = "free some space; `mlxsup models` shows the size of each model, `mlxsup rm` removes one"
    if inodes.f_files and not inodes.f_favail:  # some file systems do not count them
        what = f"the disk of {folder} has no room for one more file (`df -i`)"
        return problem(subject, what, why=why, fix="remove files that are not needed")
    if free < few_bytes:
        return problem(subject, what, why=why, fix=fix)
    if free < low_bytes:
        return note(subject, what, why=why, fix=fix)
    return ok(subject, f"{folder}, {size_text(free)} free")


def check_memory(setting: Setting) -> Iterator[Finding]:
    """Judge the budget against the machine, and the models against the budget."""
    from mlxsup.protocol.text import size_text
    from mlxsup.supervisor.memory.machine import NoDeviceMemoryError, command_budget, find_backend

    backend, loaded, found = find_backend(), setting.loaded, list[Finding]()
    given = loaded.memory_budget if loaded is not None else None
    try:
        budget = command_budget(given, backend, setting.runtime_dir)
    except NoDeviceMemoryError as error:
        why = "mlxsup cannot refuse or unload models when memory runs out"
        fix = 'set memory_budget = "…GiB" in [supervisor]'
        yield problem("memory", str(error), why=why, fix=fix)
        return
    size, automatic = budget.size_bytes, budget.automatic_bytes
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
    change = None
    if loaded is not None:
        from .plan import plan_of

        change = plan_of(loaded)["change"]
    if change:
        what = f"the models do not all fit into {size_text(size)}"
        why = "those that fit alone take turns, and each turn costs a load"
        fix = f"{change}; `mlxsup plan` shows what each needs"
        found.append(note("memory", what, why=why, fix=fix))
    ample = f"all models together may use {size_text(size)} ({budget.reason})"
    yield from found or [ok("memory", ample)]


def check_daemon(setting: Setting) -> Iterator[Finding]:
    """Judge what the daemon says of itself, or that it says nothing."""
    from ..terminal.status import broken_parts

    try:
        status = status_of_daemon(setting.target)
    except CliError as error:
        if error.status is not ExitStatus.BAD_CONFIGURATION:  # that is a finding about the file
            why = "commands cannot use it, and no other daemon can start in its folder"
            yield problem(
                "daemon", error.message, why=why, fix=error.hint or "check MLXSUP_ENDPOINT"
            )
        return
    if status is None:
        yield ok("daemon", f"no daemon runs at {setting.endpoint}")
        return
    broken = broken_parts(status)
    for part in broken:
        fix = "`mlxsup why` explains it"
        yield problem("daemon", part, why="requests for it fail or wait", fix=fix)
    path, here = status["config_path"], setting.config
    # Not Path.resolve, which raises for links that lead in a circle.
    if path and here is not None and os.path.realpath(path) != os.path.realpath(here):
        yield note(
            "daemon",
            f"the daemon uses {path}, but commands here read {os.path.realpath(here)}",
            why="changes of the latter do not affect it",
            fix="choose the file with --config, or stop the daemon and start it here",
        )
    if not broken:
        models = counted(len(status["models"]), "model")
        yield ok("daemon", f"answers at {setting.endpoint} (pid {status['pid']}, {models})")


def check_services(_setting: Setting) -> Iterator[Finding]:
    """Judge whether what the services start is still there, this user's and the machine's."""
    from ..service import manager_here, read_file

    for is_system in (False, True):
        manager = manager_here(Path.home(), is_system=is_system)
        text = read_file(manager.path)
        if text is None:
            continue
        words = manager.command_in(text)
        files = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--config"]
        missing = [one for one in (*words[:1], *files) if not os.path.exists(one)]
        if words and not missing:
            yield ok("service", f"{manager.path} starts {words[0]}")
            continue
        what = f"names {missing[0]}, which does not exist" if missing else "starts no program"
        again = "mlxsup service install" + (" --system" if is_system else "")
        why = "the service manager cannot start the daemon"
        yield problem("service", f"{manager.path} {what}", why=why, command=again)
