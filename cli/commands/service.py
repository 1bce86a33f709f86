"""`mlxsup service`: the daemon as a service that starts by itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.regular_file import replace_file

from ..connection import config_option, output_options
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output

if TYPE_CHECKING:
    from ..service import Manager, ServiceFacts, Steps

system_option = click.option(
    "--system",
    "is_system",
    is_flag=True,
    help="Install for the whole machine, to run without a login; needs root.",
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
@system_option
@click.option("--dry-run", "is_dry", is_flag=True, help="Only print what would be done.")
@output_options
def install(config_path: Path | None, is_system: bool, is_dry: bool, output: Output) -> None:
    """Example: mlxsup service install --config mlxsup.toml

    Writes a systemd unit or a launchd job that starts this mlxsup with this configuration, and
    starts it. A service that mlxsup has written with other settings is replaced: the difference is
    printed. A file of another program stays.
    """
    from ..service import MARKER, read_file

    manager = _find_manager(is_system=is_system)
    facts = _find_facts(config_path, is_system=is_system)
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
    by_root = _by_root(facts.program, "install", "--config", str(facts.config))
    if is_system:
        _need_root(manager, by_root)
    manager.check(by_root)
    if before is None:
        _refuse_running(facts)
    elif MARKER not in before:
        raise _foreign(manager)
    if is_done:
        done = f"already installed: {manager.path}; nothing was changed"
    else:
        if difference:
            output.note(difference)
        _write(manager, text, facts, steps, output)
        done = f"{'started' if before == text else 'installed'}: {manager.path}"
        if is_system:
            output.note(f"it uses the downloaded models in {facts.model_cache}")
    state, notes = manager.state(), manager.notes()
    output.result(
        {**value, "notes": notes, "service": asdict(state)},
        f"{done}\nit is {state.state}" + (f", pid {state.pid}" if state.pid else ""),
    )
    for note in notes:
        output.note(note)


@service.command(short_help="Stop the service and remove it.")
@system_option
@output_options
def uninstall(is_system: bool, output: Output) -> None:
    """Example: mlxsup service uninstall

    Stops the service, which finishes running requests, and removes the file that `install` has
    written. A file of another program stays, and so do configuration, models and logs.
    """
    from ..service import MARKER, read_file

    manager = _find_manager(is_system=is_system)
    text, commands, done = read_file(manager.path), [], "not installed"
    if text is not None:
        if MARKER not in text:
            raise _foreign(manager)
        if is_system:
            _need_root(manager, _by_root(_find_program(), "uninstall"))
        manager.check("")
        before, after = manager.uninstall_commands()
        commands, done = [*before, *after], "removed"
        _run(before, manager, output)
        manager.path.unlink()
        _run(after, manager, output)
    value = {"path": str(manager.path), "is_removed": done == "removed", "commands": commands}
    output.result(value, f"{done}: {manager.path}")


@service.command(short_help="Show the state of the service.")
@system_option
@output_options
def status(is_system: bool, output: Output) -> None:
    """Example: mlxsup service status

    Shows whether the service is installed, runs, and starts by itself, and the command that prints
    its log, such as why the daemon could not start. `mlxsup status` shows the models.
    """
    from ..service import MARKER, read_file

    manager = _find_manager(is_system=is_system)
    text = read_file(manager.path)
    is_ours = text is not None and MARKER in text
    program = next(iter(manager.command_in(text or "")), None) if is_ours else None
    state = None if text is None else manager.state()
    value = {
        "manager": manager.name, "path": str(manager.path), "is_installed": text is not None,
        "program": program, "service": None if state is None else asdict(state),
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
        "program": program or "changed since mlxsup wrote it",
        "file": manager.path,
        "log": shlex.join(manager.log_command()),
    }
    shown = {name: fact for name, fact in rows.items() if fact not in (None, "")}
    output.result(value, "\n".join(f"{name:<9}  {fact}" for name, fact in shown.items()))
    if state.pid is None:
        output.note("its log may show why it does not run")


def _difference(before: str | None, text: str) -> str:
    """Return what would change in a service file; nothing for a new one."""
    if before is None or before == text:
        return ""
    import difflib

    old, new = before.splitlines(), text.splitlines()
    return "\n".join(difflib.unified_diff(old, new, "installed", "new", lineterm=""))


def _foreign(manager: Manager) -> CliError:
    """Return the error for a file of another program, which stays."""
    message = f"{manager.path} was not written by mlxsup; nothing was changed"
    hint = "remove it with the program that wrote it"
    return CliError(message, code="foreign_service", hint=hint)


def _refuse_running(facts: ServiceFacts) -> None:
    """Refuse a new service for a runtime folder that a daemon holds."""
    from mlxsup.protocol.discovery import endpoint_in

    from ..lock_holder import lock_holder

    with contextlib.suppress(ValueError):  # the daemon will say that its path is too long
        holder = lock_holder(endpoint_in(facts.runtime_dir))
        if holder is not None:
            stop = f"`mlxsup stop --config {shlex.quote(str(facts.config))}`"
            raise CliError(
                "a daemon with this configuration already runs outside the service"
                f" (pid {holder.pid})",
                hint=f"stop it with {stop}, then install the service",
                status=ExitStatus.ALREADY_RUNNING,
            )


def _write(manager: Manager, text: str, facts: ServiceFacts, steps: Steps, output: Output) -> None:
    """Write the file and start the service."""
    before, after = steps
    _make_folders(facts)
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    _run(before, manager, output)
    replace_file(manager.path, text.encode())
    manager.path.chmod(0o644)
    _run(after, manager, output)


def _run(commands: list[list[str]], manager: Manager, output: Output) -> None:
    for command in commands:
        output.note(shlex.join(command))  # before, because it may take a while
        manager.carry_out(command)


def _make_folders(facts: ServiceFacts) -> None:
    """Make the folders that a service manager needs before the daemon runs, as their user's."""
    import pwd

    owner = pwd.getpwnam(facts.user)
    for folder in (facts.home / ".mlxsup", facts.runtime_dir, facts.log_dir, facts.model_cache):
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o700)
            if facts.is_system:
                os.chown(one, owner.pw_uid, owner.pw_gid)


def _find_manager(*, is_system: bool) -> Manager:
    """Return what starts services here; refuse if that of the user is meant and root asks."""
    import pwd

    from ..service import manager_here

    user = os.environ.get("SUDO_USER", "")
    if is_system and user:
        try:  # `~` is root's; the service has the folders of the user behind sudo
            os.environ["HOME"] = pwd.getpwnam(user).pw_dir
        except KeyError:
            raise CliError(f"the user {user} does not exist", hint="see SUDO_USER") from None
    elif user and os.getuid() == 0:
        raise CliError(
            f"sudo cannot reach the service manager of {user}",
            hint="run this without sudo, or with --system",
            status=ExitStatus.USAGE,
        )
    return manager_here(Path.home(), is_system=is_system)


def _need_root(manager: Manager, command: str) -> None:
    """Refuse to write a service of the machine without the right to; name what root has to run."""
    folders = manager.path.parents
    if os.access(next(one for one in folders if one.exists()), os.W_OK):
        return
    raise CliError(
        f"only root may change {manager.path}",
        hint=f"`{command}`",
        status=ExitStatus.NO_PERMISSION,
    )


def _by_root(program: Path, command: str, *options: str) -> str:
    """Return a command that root has to run; sudo drops what only variables say."""
    return shlex.join(["sudo", str(program), "service", command, "--system", *options])


@contextlib.contextmanager
def _acting_for_user(*, is_system: bool) -> Iterator[None]:
    """Under sudo, read as the user that the service will run as, whose files must be that user's
    own; nothing is written."""
    import pwd

    user = os.environ.get("SUDO_USER", "") if is_system and os.geteuid() == 0 else ""
    if not user:
        yield
        return
    entry, group = pwd.getpwnam(user), os.getegid()
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def _find_facts(config_path: Path | None, *, is_system: bool) -> ServiceFacts:
    """Return what the service is made of, from a configuration that is valid."""
    import pwd
    import shutil

    from mlxsup.store.hub_cache import find_cache

    from ..configuration import find_configuration, read_configuration
    from ..service import ServiceFacts

    with _acting_for_user(is_system=is_system):
        path = Path(os.path.abspath(find_configuration(config_path).expanduser()))
        configuration = read_configuration(path)
    user = os.environ.get("SUDO_USER", "") if is_system else ""
    driver = shutil.which("nvidia-smi")
    facts = ServiceFacts(
        program=_find_program(),
        config=path,
        home=Path.home(),
        user=user or pwd.getpwuid(os.getuid()).pw_name,
        is_system=is_system,
        drain_s=configuration.core.drain_timeout_s,
        runtime_dir=configuration.runtime_dir,
        log_dir=configuration.log_dir,
        model_cache=find_cache(),
        variables=kept_variables(os.environ),
        more_path=(str(Path(driver).parent),) if driver else (),
    )
    facts.check()
    return facts


def kept_variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return those of an environment that the service needs, too."""
    return tuple((name, environment[name]) for name in KEPT_VARIABLES if environment.get(name))


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
