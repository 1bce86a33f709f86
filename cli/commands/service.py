"""`mlxsup service`: the daemon as a service of the user that starts by itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..connection import config_option, output_options
from ..exit_status import CliError, ExitStatus
from ..new_file import replaced_file
from ..terminal.output import Output

if TYPE_CHECKING:
    from ..service_managers import Launchd, Steps, Systemd

    Manager = Systemd | Launchd

dry_option = click.option(
    "--dry-run", "is_dry", is_flag=True, help="Only print what would be done."
)

KEPT_VARIABLES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_ENDPOINT",
)  # fmt: skip
"""Of the environment in which the service is installed: they say where models are. No shell of the
user's is asked when it starts, so they would be missing. Secrets are not among them."""


@click.group()
def service() -> None:
    """Example: mlxsup service install

    Runs the daemon as a service of systemd or launchd: it starts automatically, restarts if it
    crashes, and finishes running requests when it is stopped.
    """


@service.command(short_help="Write the service and start it.")
@config_option
@dry_option
@click.option("--force", "is_forced", is_flag=True, help="Replace a service with other settings.")
@output_options
def install(config_path: Path | None, is_dry: bool, is_forced: bool, output: Output) -> None:
    """Example: mlxsup service install --config mlxsup.toml

    Writes a systemd unit or a launchd job that starts this mlxsup with this configuration, and
    starts it. If a service is installed already, nothing changes: the difference is printed.
    """
    from ..configuration import find_configuration, read_configuration
    from ..service_managers import MARKER, ServiceFacts, read_file

    manager = _find_manager()
    path = Path(os.path.abspath(find_configuration(config_path).expanduser()))
    configuration = read_configuration(path)
    facts = ServiceFacts(
        program=_find_program(),
        config=path,
        drain_s=configuration.core.drain_timeout_s,
        log_dir=configuration.log_dir,
        variables=kept_variables(os.environ),
        more_path=_driver_folder(),
    )
    facts.check()
    text, before = manager.text(facts), read_file(manager.path)
    is_done = before == text and manager.state().is_on
    steps: Steps = ([], []) if is_done else manager.install_commands(is_new=before is None)
    difference = _difference(before, text)
    value: dict[str, Any] = {
        "path": str(manager.path), "text": text, "difference": difference,
        "commands": [*steps[0], *steps[1]], "is_changed": not (is_done or is_dry), "notes": [],
        "service": None,
    }  # fmt: skip
    if is_dry:
        output.note(f"would write {manager.path}:")
        output.result(value, text.removesuffix("\n"))
        for command in value["commands"]:
            output.note(f"would run {shlex.join(command)}")
        if is_done:
            output.note("it is already installed and running; nothing would change")
        return
    manager.check()
    if before is None:
        _refuse_running(configuration.runtime_dir, path)
    elif before != text and not is_forced:
        output.note(difference)
        message, code = "the service is installed with other settings", "service_differs"
        if MARKER not in before:
            message, code = f"{manager.path} was not written by mlxsup", "foreign_service"
        raise CliError(message, code=code, hint="`mlxsup service install --force` replaces it")
    if is_done:
        done = f"already installed: {manager.path}; nothing was changed"
    else:
        _make_folders(configuration.runtime_dir, configuration.log_dir)
        _write(manager, text, steps, output)
        done = f"{'started' if before == text else 'installed'}: {manager.path}"
    state, notes = manager.state(), manager.notes()
    output.result(
        {**value, "notes": notes, "service": asdict(state)},
        f"{done}\nit is {state.state}" + (f", pid {state.pid}" if state.pid else ""),
    )
    for note in notes:
        output.note(note)


@service.command(short_help="Stop the service and remove it.")
@dry_option
@output_options
def uninstall(is_dry: bool, output: Output) -> None:
    """Example: mlxsup service uninstall

    Stops the service, which finishes running requests, and removes the file that `install` has
    written. A file of another program stays, and so do configuration, models and logs.
    """
    from ..service_managers import MARKER, read_file

    manager = _find_manager()
    text, commands, done = read_file(manager.path), [], "not installed"
    if text is not None:
        if MARKER not in text:
            raise CliError(
                f"{manager.path} was not written by mlxsup, so it was not removed",
                code="foreign_service",
                hint="remove it with the program that wrote it",
            )
        before, after = manager.uninstall_commands()
        commands, done = [*before, *after], "would be removed" if is_dry else "removed"
        if not is_dry:
            manager.check()
            _run(before, manager, output)
            manager.path.unlink()
            _run(after, manager, output)
    value = {"path": str(manager.path), "is_removed": done == "removed", "commands": commands}
    output.result(value, f"{done}: {manager.path}")
    for command in commands if is_dry else ():
        output.note(f"would run {shlex.join(command)}")


@service.command(short_help="Show the state of the service.")
@output_options
def status(output: Output) -> None:
    """Example: mlxsup service status

    Shows whether the service is installed, runs, and starts by itself. `mlxsup status` shows the
    models.
    """
    from ..service_managers import read_file

    manager = _find_manager()
    state = None if read_file(manager.path) is None else manager.state()
    value = {
        "manager": manager.name, "path": str(manager.path), "is_installed": state is not None,
        "service": None if state is None else asdict(state),
    }  # fmt: skip
    if state is None:
        output.result(value, f"not installed: {manager.path} does not exist")
        output.note("install it with `mlxsup service install`")
        return
    rows: dict[str, Any] = {
        "state": state.state,
        "pid": state.pid,
        "says": state.note,
        "last exit": state.last_exit,
        "restarts": state.restarts,
        "starts": f"at {state.starts_at}" if state.is_enabled else "not automatically",
        "file": manager.path,
    }
    shown = {name: fact for name, fact in rows.items() if fact not in (None, "")}
    output.result(value, "\n".join(f"{name:<9}  {fact}" for name, fact in shown.items()))
    if state.pid is None:
        output.note(f"{manager.evidence} may show why it does not run")


def _difference(before: str | None, text: str) -> str:
    """Return what would change in a service file; nothing for a new one."""
    if before is None or before == text:
        return ""
    import difflib

    old, new = before.splitlines(), text.splitlines()
    return "\n".join(difflib.unified_diff(old, new, "installed", "new", lineterm=""))


def _refuse_running(runtime_dir: Path, config: Path) -> None:
    """Refuse a new service for a runtime folder that a daemon holds."""
    from mlxsup.protocol.discovery import endpoint_in

    from ..lock_holder import lock_holder

    with contextlib.suppress(ValueError):  # the daemon will say that its path is too long
        holder = lock_holder(endpoint_in(runtime_dir))
        if holder is not None:
            stop = f"`mlxsup stop --config {shlex.quote(str(config))}`"
            raise CliError(
                "a daemon with this configuration is already running outside the service (pid "
                f"{holder.pid})",
                hint=f"stop it with {stop}, then install the service",
                status=ExitStatus.ALREADY_RUNNING,
            )


def _make_folders(*folders: Path) -> None:
    """Make the folders that launchd needs before the daemon runs."""
    for folder in folders:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o700)


def _write(manager: Manager, text: str, steps: Steps, output: Output) -> None:
    """Write the file and start the service."""
    before, after = steps
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(manager.path) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text.encode())
        _run(before, manager, output)
    _run(after, manager, output)


def _run(commands: list[list[str]], manager: Manager, output: Output) -> None:
    for command in commands:
        output.note(shlex.join(command))  # before, because it may take a while
        manager.carry_out(command)


def _find_manager() -> Manager:
    """Return what starts the user's services here; root behind sudo has another one."""
    from ..service_managers import Launchd, Systemd, no_program

    if (user := os.environ.get("SUDO_USER", "")) and os.getuid() == 0:
        raise CliError(
            f"sudo cannot reach the service manager of {user}",
            hint="run this without sudo",
            status=ExitStatus.USAGE,
        )
    if sys.platform == "darwin":
        return Launchd(Path.home())
    if sys.platform == "linux":
        return Systemd(Path.home())
    raise no_program("systemctl")


def kept_variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return those of an environment that the service needs, too."""
    return tuple((name, environment[name]) for name in KEPT_VARIABLES if environment.get(name))


def _driver_folder() -> tuple[str, ...]:
    """Return the folder of the program that says how much memory a GPU has, if it has one."""
    import shutil

    driver = shutil.which("nvidia-smi")
    return (str(Path(driver).parent),) if driver else ()


def _find_program() -> Path:
    import shutil

    program = own_program(sys.argv[0], sys.executable, shutil.which("mlxsup"))
    if program is None:
        raise CliError(
            f"there is no mlxsup program next to {sys.executable} for a service to start",
            code="not_a_program",
            hint="install mlxsup with pip, uv or pipx",
        )
    return program


def own_program(command: str, interpreter: str, found: str | None) -> Path | None:
    """Return the path of the `mlxsup` that runs, as a service should start it; None if there is
    none.

    Args:
        command: what was run, `sys.argv[0]`.
        interpreter: `sys.executable`.
        found: what a shell would run, `shutil.which("mlxsup")`. If that is this very program, as
            the link in `~/.local/bin` of uv and pipx is, it counts: an upgrade keeps it.
    """
    given = Path(os.path.abspath(command))
    own = given if given.name == "mlxsup" else Path(interpreter).parent / "mlxsup"
    if not own.is_file():
        return None
    if found is not None and Path(found).is_file() and os.path.samefile(found, own):
        return Path(os.path.abspath(found))
    return own
