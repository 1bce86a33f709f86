"""`mlxsup service`: the daemon as a service that starts by itself."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..connection import config_option, output_options
from ..exit_status import CliError
from ..terminal.output import Output

if TYPE_CHECKING:
    from ..service.facts import ServiceFacts
    from ..service.install import Plan

system_option = click.option(
    "--system",
    "is_system",
    is_flag=True,
    help="A service of the machine, which runs without a login; needs root.",
)
dry_option = click.option(
    "--dry-run", "is_dry", is_flag=True, help="Print what would be done, and do nothing."
)

DEFAULT_LINES = 50


@click.group()
def service() -> None:
    """Example: mlxsup service install

    Runs the daemon unattended, as a service of systemd or launchd: it starts by itself, comes back
    if it dies, and finishes running requests when it is stopped.
    """


@service.command(short_help="Write the service and start it.")
@config_option
@system_option
@dry_option
@click.option("--force", "is_forced", is_flag=True, help="Replace a service that is another one.")
@output_options
def install(
    config_path: Path | None, is_system: bool, is_dry: bool, is_forced: bool, output: Output
) -> None:
    """Example: mlxsup service install --config mlxsup.toml

    Writes a systemd unit or a launchd job that starts this mlxsup with this configuration, and
    starts it. If a service is installed already, nothing changes: the difference is printed.
    """
    from ..service.install import install as carry_out
    from ..service.install import plan_of, refuse_other, refuse_running
    from ..service.managers import find_manager, install_by_root, need_root

    manager = find_manager(is_system=is_system)
    facts = _facts_of(config_path, is_system=is_system)
    plan = plan_of(manager, facts)
    if is_dry:
        _show_plan(plan, output)
        return
    by_root = install_by_root(facts)
    if is_system:
        need_root(manager, by_root)
    manager.check(by_root)
    if not is_forced:
        if plan.difference:
            output.note(plan.difference)
        refuse_other(plan, manager, facts)
    refuse_running(plan, facts)
    if plan.is_done:
        done = f"already installed: {plan.path}; nothing has changed"
    else:
        carry_out(plan, manager, facts, output.note)
        done = f"{'started' if plan.is_same else 'installed'}: {plan.path}"
        if is_system:
            output.note(f"it looks for downloaded models in {facts.model_cache}")
    state, notes = manager.state(), manager.notes()
    if output.is_json:
        output.object({**_plan_map(plan), "is_changed": not plan.is_done, "notes": notes,
                       "service": state.as_map()})  # fmt: skip
        return
    output.data(f"{done}\nit is {state.state}" + (f", pid {state.pid}" if state.pid else ""))
    for note in notes:
        output.note(note)


@service.command(short_help="End the service and remove it.")
@system_option
@dry_option
@output_options
def uninstall(is_system: bool, is_dry: bool, output: Output) -> None:
    """Example: mlxsup service uninstall

    Stops the service, which finishes running requests, and removes the file that `install` has
    written. A file that somebody else has written stays. Configuration, models and logs stay, too.
    """
    from ..service.install import read_file, refuse_foreign
    from ..service.install import uninstall as carry_out
    from ..service.managers import find_manager, need_root, uninstall_by_root

    manager = find_manager(is_system=is_system)
    text = read_file(manager.path)
    if text is None:
        _say_removed(manager.path, "not installed", [], output, is_removed=False)
        return
    refuse_foreign(manager.path, text)
    if is_dry:
        would = [*manager.uninstall_commands(), *manager.forget_commands()]
        commands = [command.argv for command in would]
        _say_removed(manager.path, "would be removed", commands, output, is_removed=False)
        return
    if is_system:
        need_root(manager, uninstall_by_root())
    manager.check("")
    steps: list[str] = []

    def on_step(command: str) -> None:
        steps.append(command)
        output.note(command)

    carry_out(manager, on_step)
    commands = [shlex.split(step) for step in steps]
    _say_removed(manager.path, "removed", commands, output, is_removed=True)


@service.command(short_help="Show what the service does.")
@system_option
@output_options
def status(is_system: bool, output: Output) -> None:
    """Example: mlxsup service status

    Shows whether the service is installed, runs, and starts by itself. `mlxsup status` shows the
    models.
    """
    from ..service.install import read_file
    from ..service.managers import find_manager

    manager = find_manager(is_system=is_system)
    text = read_file(manager.path)
    program = None if text is None else manager.program_in(text)
    state = None if text is None else manager.state()
    if output.is_json:
        output.object({
            "manager": manager.name, "path": str(manager.path), "is_installed": text is not None,
            "program": program, "service": None if state is None else state.as_map(),
        })  # fmt: skip
        return
    if state is None:
        output.data(f"not installed: there is no {manager.path}")
        output.note("install it with `mlxsup service install`")
        return
    rows: dict[str, Any] = {
        "state": state.state,
        "pid": state.pid,
        "says": state.note,
        "last exit": state.last_exit,
        "restarts": state.restarts,
        "starts": f"at {state.starts_at}" if state.is_enabled else "not by itself",
        "program": program or "another one than mlxsup has written",
        "file": manager.path,
    }
    shown = {name: value for name, value in rows.items() if value not in (None, "")}
    output.data("\n".join(f"{name:<9}  {value}" for name, value in shown.items()))
    if state.pid is None:
        output.note("`mlxsup service logs` may say why it does not run")


@service.command(short_help="Show what the service manager has recorded.")
@system_option
@click.option("-f", "--follow", "is_following", is_flag=True, help="Follow new lines.")
@click.option(
    "-n",
    "--lines",
    "count",
    metavar="N",
    type=click.IntRange(min=0),
    default=DEFAULT_LINES,
    help=f"Last N lines; default: {DEFAULT_LINES}.",
)
@output_options
def logs(is_system: bool, is_following: bool, count: int, output: Output) -> None:
    """Example: mlxsup service logs -n 20

    Shows starts and ends of the service, and what the daemon has printed, above all why it could
    not start. What it did while it ran is in `mlxsup logs mlxsup`.
    """
    from ..service.managers import find_manager

    manager = find_manager(is_system=is_system)
    command = manager.log_command(count, is_following=is_following)
    for line in _lines_of(command):
        if output.is_json:
            output.object({"line": line})
        else:
            output.data(line)


def _lines_of(command: list[str]) -> Iterator[str]:
    """What a command prints, line by line.

    Raises:
        CliError: it fails, or there is no such program.
    """
    import subprocess

    from ..service.calls import no_program

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise no_program(command[0]) from None
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
            said = process.stderr.read().strip()
            process.wait()
        finally:
            process.kill()  # if nobody reads any longer
    if process.returncode:
        last = said.rpartition("\n")[2] or f"exit code {process.returncode}"
        raise CliError(
            f"{command[0]}: {last}", code="service_manager", hint="see `mlxsup service status`"
        )


def _facts_of(config_path: Path | None, *, is_system: bool) -> ServiceFacts:
    """What the service is made of.

    Raises:
        CliError: the configuration is missing or wrong, or no service can be made of it.
    """
    from ..service.managers import acting_for_user, find_facts
    from .start import find_configuration, read_configuration

    with acting_for_user(is_system=is_system):
        path = Path(os.path.abspath(find_configuration(config_path).expanduser()))
        configuration = read_configuration(path)
    return find_facts(
        path,
        drain_s=configuration.core.drain_timeout_s,
        runtime_dir=configuration.runtime_dir,
        log_dir=configuration.log_dir,
        is_system=is_system,
    )


def _plan_map(plan: Plan) -> dict[str, Any]:
    return {"path": str(plan.path), "text": plan.text, "difference": plan.difference,
            "commands": [command.argv for command in plan.commands]}  # fmt: skip


def _show_plan(plan: Plan, output: Output) -> None:
    if output.is_json:
        output.object({**_plan_map(plan), "is_changed": False, "notes": [], "service": None})
        return
    output.note(f"would write {plan.path}:")
    output.data(plan.text, newline=False)
    for command in plan.commands:
        output.note(f"would run {shlex.join(command.argv)}")
    if plan.is_done:
        output.note("it is installed exactly so, and runs: nothing would change")


def _say_removed(
    path: Path, what: str, commands: list[list[str]], output: Output, *, is_removed: bool
) -> None:
    if output.is_json:
        output.object({"path": str(path), "is_removed": is_removed, "commands": commands})
        return
    output.data(f"{what}: {path}")
    if not is_removed:
        for command in commands:
            output.note(f"would run {shlex.join(command)}")
