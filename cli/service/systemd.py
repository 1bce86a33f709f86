"""systemd: where the unit is, and the commands that make it count."""

from __future__ import annotations

import os
from pathlib import Path

from ..exit_status import CliError
from . import systemd_unit
from .calls import Command, call, must
from .facts import NAME, ServiceFacts
from .state import ServiceState

UNIT = f"{NAME}.service"

CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))

SHOWN = (
    "ActiveState", "SubState", "MainPID", "UnitFileState", "StatusText", "ExecMainStatus",
    "NRestarts",
)  # fmt: skip


class Systemd:
    """The user's systemd, or that of the machine.

    Args:
        is_system: which.
        home: the user's home folder.
    """

    name = "systemd"

    def __init__(self, home: Path, *, is_system: bool) -> None:
        self._is_system = is_system
        if is_system:
            self.path = Path("/etc/systemd/system") / UNIT
        else:
            given = os.environ.get("XDG_CONFIG_HOME", "")
            folder = Path(given) if os.path.isabs(given) else home / ".config"
            self.path = folder / "systemd" / "user" / UNIT

    def text(self, facts: ServiceFacts) -> str:
        """The unit."""
        return systemd_unit.unit_text(facts)

    def program_in(self, text: str) -> str | None:
        """Which program a unit of ours starts."""
        return systemd_unit.program_in(text)

    def install_commands(self, *, is_new: bool) -> list[Command]:
        """What makes the unit count, and starts the service; one that runs is drained before."""
        if is_new:
            calls = [("daemon-reload",), ("enable", "--now", UNIT)]
        else:
            calls = [("daemon-reload",), ("enable", UNIT), ("restart", UNIT)]
        return [Command(self._control(*words)) for words in calls]

    def uninstall_commands(self) -> list[Command]:
        """What ends the service, before its file is removed."""
        return [Command(self._control("disable", "--now", UNIT))]

    def forget_commands(self) -> list[Command]:
        """What follows the removal of the file."""
        return [Command(self._control("daemon-reload"))]

    def carry_out(self, command: Command) -> None:
        """Runs one of the commands above, and returns when it has taken effect.

        Raises:
            CliError: it fails.
        """
        must(command.argv)

    def check(self, instead: str) -> None:
        """Whether systemd runs and can be reached.

        Args:
            instead: what may be run if only that of the user cannot; may be empty.

        Raises:
            CliError: it does not; with what to do instead.
        """
        called = call(self._control("is-system-running"))
        if called.out.strip() == "offline" or "not been booted with systemd" in called.err:
            is_contained = any(mark.exists() for mark in CONTAINER_MARKS)
            where = "in this container" if is_contained else "on this machine"
            hint = (
                "let the container run `mlxsup start`, with a restart policy"
                if is_contained
                else "run `mlxsup start --detach`, or `mlxsup start` under what starts services"
                " here"
            )
            raise CliError(f"systemd does not run {where}", code="no_service_manager", hint=hint)
        if not called.out.strip():
            cause = called.last_words or f"exit code {called.code}"
            raise CliError(
                f"the user's systemd cannot be reached: {cause}"
                if not self._is_system
                else f"systemd cannot be reached: {cause}",
                code="no_service_manager",
                hint="is it running?"
                if self._is_system
                else "log in as the user (not with su)" + (f", or `{instead}`" if instead else ""),
            )

    def notes(self) -> list[str]:
        """What somebody who has installed the service should know."""
        if not self._is_system and self._has_linger() is False:
            return [
                "it starts when you log in, and ends when you log out; to have it run from the"
                " start of the machine: `loginctl enable-linger`"
            ]
        return []

    def state(self) -> ServiceState:
        """What systemd says of the service."""
        called = call(self._control("show", UNIT, f"--property={','.join(SHOWN)}"))
        pairs = (line.partition("=")[::2] for line in called.out.splitlines())
        shown = dict(pairs)
        pid = _number(shown.get("MainPID"))
        starts_at = "boot" if self._is_system or self._has_linger() else "login"
        return ServiceState(
            state=f"{shown.get('ActiveState', 'unknown')} ({shown.get('SubState', 'unknown')})",
            pid=pid or None,
            is_enabled=shown.get("UnitFileState", "").startswith("enabled"),
            starts_at=starts_at,
            note=shown.get("StatusText", ""),
            last_exit=None if pid else _number(shown.get("ExecMainStatus")),
            restarts=_number(shown.get("NRestarts")),
        )

    def log_command(self, lines: int, *, is_following: bool) -> list[str]:
        """What prints the journal of the service."""
        unit = "--unit" if self._is_system else "--user-unit"
        follow = ["--follow"] if is_following else []
        return [
            "journalctl", unit, UNIT, "--lines", str(lines), "--no-pager", "--output=short-iso",
            *follow,
        ]  # fmt: skip

    def _control(self, *arguments: str) -> list[str]:
        return ["systemctl", *([] if self._is_system else ["--user"]), *arguments]

    def _has_linger(self) -> bool | None:
        """Whether the user's systemd runs without a login; None if nobody says."""
        try:
            called = call(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
        except CliError:
            return None
        # It knows nobody who neither lingers nor is logged in.
        return {"Linger=yes": True, "Linger=no": False}.get(called.out.strip())


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
