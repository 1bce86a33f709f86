"""Writes and removes the file of a service, and makes the service manager notice."""

from __future__ import annotations

import contextlib
import difflib
import os
import pwd
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxsup.protocol.places import endpoint_in

from ..exit_status import CliError, ExitStatus
from ..lock_holder import lock_holder
from .calls import Command
from .facts import MARKER, ServiceFacts
from .managers import Manager

FORCE_HINT = "`mlxsup service install --force` replaces it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an installation would do.

    Attributes:
        path: the file.
        text: what it will contain.
        before: what it contains now; None if there is none.
        commands: what is run then; empty if there is nothing to do.
    """

    path: Path
    text: str
    before: str | None
    commands: Sequence[Command]

    @property
    def is_same(self) -> bool:
        """Whether the file is there exactly so."""
        return self.before == self.text

    @property
    def is_done(self) -> bool:
        """Whether the service is installed exactly so, and runs."""
        return not self.commands

    @property
    def difference(self) -> str:
        """What would change in the file; empty for a new one."""
        if self.before is None:
            return ""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.text.splitlines(), "installed", "new", lineterm=""
        )
        return "\n".join(lines)


def plan_of(manager: Manager, facts: ServiceFacts) -> Plan:
    """What an installation with these facts would do.

    Raises:
        CliError: the file that is there cannot be read.
    """
    text, before = manager.text(facts), read_file(manager.path)
    is_done = before == text and manager.state().is_on
    commands = [] if is_done else manager.install_commands(is_new=before is None)
    return Plan(path=manager.path, text=text, before=before, commands=commands)


def refuse_other(plan: Plan, manager: Manager, facts: ServiceFacts) -> None:
    """Refuses to replace a file that is not the one to write.

    Raises:
        CliError: says whose it is.
    """
    if plan.before is None or plan.is_same:
        return
    program = manager.program_in(plan.before)
    if MARKER not in plan.before:
        message, code = f"{plan.path} was not written by mlxsup", "foreign_service"
    elif program is None:
        message, code = f"somebody has changed {plan.path}", "service_differs"
    elif program != str(facts.program):
        message = f"the service is installed by another mlxsup, {program}; this is {facts.program}"
        code = "other_program"
    else:
        message, code = "the service is installed with other settings", "service_differs"
    raise CliError(message, code=code, hint=FORCE_HINT)


def refuse_running(plan: Plan, facts: ServiceFacts) -> None:
    """Refuses a new service for a runtime folder that somebody's daemon holds.

    Raises:
        CliError: names its pid.
    """
    if plan.before is not None:
        return
    with contextlib.suppress(ValueError):  # the configuration says what is wrong with its path
        holder = lock_holder(endpoint_in(facts.runtime_dir))
        if holder is not None:
            raise CliError(
                f"a daemon that is no service runs with this configuration (pid {holder.pid})",
                code="already_running",
                hint=f"`mlxsup stop --config {shlex.quote(str(facts.config))}`, then install it",
                status=ExitStatus.ALREADY_RUNNING,
            )


def install(
    plan: Plan, manager: Manager, facts: ServiceFacts, on_step: Callable[[str], None]
) -> None:
    """Writes the file and starts the service.

    Args:
        plan: what to do.
        manager: the service manager.
        facts: of the service.
        on_step: called with each command before it is run, because it may take a while.

    Raises:
        CliError: a command fails.
    """
    _make_folders(facts)
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    new = plan.path.with_name(f".{plan.path.name}.new")
    new.write_text(plan.text, encoding="utf-8")
    new.chmod(0o644)
    new.replace(plan.path)
    run(plan.commands, manager, on_step)


def uninstall(manager: Manager, on_step: Callable[[str], None]) -> None:
    """Ends the service and removes its file.

    Raises:
        CliError: a command fails.
    """
    run(manager.uninstall_commands(), manager, on_step)
    manager.path.unlink()
    run(manager.forget_commands(), manager, on_step)


def refuse_foreign(path: Path, text: str) -> None:
    """Refuses to remove what somebody else has written.

    Raises:
        CliError: it has no mark of ours.
    """
    if MARKER not in text:
        raise CliError(
            f"{path} was not written by mlxsup, so it stays",
            code="foreign_service",
            hint="whoever has written it may remove it",
        )


def read_file(path: Path) -> str | None:
    """A service file; None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def run(commands: Sequence[Command], manager: Manager, on_step: Callable[[str], None]) -> None:
    """Runs the commands of a service manager, one after the other."""
    for command in commands:
        on_step(shlex.join(command.argv))
        manager.carry_out(command)


def _make_folders(facts: ServiceFacts) -> None:
    """The folders that a service manager needs before the daemon makes them, as their user's."""
    owner = pwd.getpwnam(facts.user)
    own = facts.home / ".mlxsup"
    for folder in (own, facts.runtime_dir, facts.log_dir, facts.model_cache):
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o700)
            if facts.is_system:
                os.chown(one, owner.pw_uid, owner.pw_gid)
