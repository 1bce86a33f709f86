"""systemd: the unit, where it is, and the commands that make it count.

See systemd.service(5), systemd.exec(5) and systemd.syntax(7).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from ..exit_status import PERMANENT_EXITS, CliError
from .facts import (
    MARKER,
    NAME,
    ServiceFacts,
    ServiceState,
    Steps,
    call,
    last_words,
    must,
)

UNIT = f"{NAME}.service"

UNIT_TEXT = """\
# {marker}
[Unit]
Description=mlxsup, a server of MLX language models
{after}StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart=:{program} start --config {config}
ExecReload=:{program} reload --config {config}
{environment}WatchdogSec=10
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={permanent}
KillMode=mixed
TimeoutStopSec={stop_s}
OOMPolicy=continue
LimitNOFILE=65536
{of_machine}
[Install]
WantedBy={target}.target
"""
"""Needs systemd 244 or later, as Debian has had since version 11. A colon before a command keeps
systemd from replacing `$NAME` in paths."""

HARDENING = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
LockPersonality=yes
SystemCallFilter=@system-service
SystemCallArchitectures=native
CapabilityBoundingSet=
UMask=0077
"""
"""Of a unit of the machine; a user's own systemd may not set most of these. Not among them:
PrivateDevices, because of GPUs, MemoryDenyWriteExecute, because kernels are compiled, and
MemoryMax, which would kill what the daemon would rather pause."""

TEMPORARY = (Path("/tmp"), Path("/var/tmp"))

CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))

SHOWN = (
    "ActiveState", "SubState", "MainPID", "UnitFileState", "StatusText", "ExecMainStatus",
    "NRestarts",
)  # fmt: skip

EXEC = re.compile(r"^ExecStart=\s*[:@+!-]*(.*)$", re.MULTILINE)
"""The signs before the command are not part of it."""


def unit_text(facts: ServiceFacts) -> str:
    """Return the unit of the service."""
    return UNIT_TEXT.format(
        marker=MARKER,
        after="After=network.target\n" if facts.is_system else "",
        program=_quoted(str(facts.program)),
        config=_quoted(str(facts.config)),
        environment="".join(
            f"Environment={_quoted(f'{name}={value}')}\n"
            for name, value in facts.environment.items()
        ),
        permanent=" ".join(str(int(status)) for status in PERMANENT_EXITS),
        stop_s=facts.stop_s,
        of_machine=_lines_of_machine(facts) if facts.is_system else "",
        target="multi-user" if facts.is_system else "default",
    )


def _lines_of_machine(facts: ServiceFacts) -> str:
    paths = (facts.program, facts.config, facts.home, *facts.folders)
    is_temporary = any(path.is_relative_to(folder) for path in paths for folder in TEMPORARY)
    # What is below these folders would not be what the user's commands see there.
    private = "" if is_temporary else "PrivateTmp=yes\n"
    writable = "".join(f"ReadWritePaths={_quoted(f'-{folder}')}\n" for folder in facts.folders)
    return f"User={facts.user}\n{HARDENING}{private}{writable}"


def _quoted(text: str) -> str:
    """Return a word of a unit file: spaces and specifiers (`%h`) mean themselves."""
    return '"' + text.replace("%", "%%") + '"'


class Systemd:
    """The systemd of a user with this home folder, or of the machine; `path` is the unit's."""

    name = "systemd"

    def __init__(self, home: Path, *, is_system: bool) -> None:
        self._is_system = is_system
        if is_system:
            folder = Path("/etc/systemd/system")
        else:
            given = os.environ.get("XDG_CONFIG_HOME", "")
            folder = (Path(given) if os.path.isabs(given) else home / ".config") / "systemd/user"
        self.path = folder / UNIT

    @staticmethod
    def text(facts: ServiceFacts) -> str:
        """Return the unit."""
        return unit_text(facts)

    @staticmethod
    def command_in(text: str) -> list[str]:
        """Return the words of the command that a unit starts; none if it says none."""
        found = EXEC.search(text)
        try:
            words = shlex.split(found.group(1)) if found else []
        except ValueError:
            return []
        meant = {"%%": "%", "%h": str(Path.home())}
        return [re.sub("%[%h]", lambda found: meant[found[0]], word) for word in words]

    def install_commands(self, *, is_new: bool) -> Steps:
        """Return what is run around the writing of the unit; a daemon that runs is drained."""
        calls = [("enable", "--now", UNIT)] if is_new else [("enable", UNIT), ("restart", UNIT)]
        return [], [self._control(*words) for words in [("daemon-reload",), *calls]]

    def uninstall_commands(self) -> Steps:
        """Return what is run before and after the unit is removed."""
        return [self._control("disable", "--now", UNIT)], [self._control("daemon-reload")]

    @staticmethod
    def carry_out(argv: list[str]) -> None:
        """Run one of the commands above, and return when it has taken effect."""
        must(argv)

    def check(self, instead: str) -> None:
        """Refuse to go on if systemd does not run or cannot be reached;
        `instead`, if it is not empty, is what may be run then."""
        done = call(self._control("is-system-running"))
        if done.stdout.strip() == "offline" or "not been booted with systemd" in done.stderr:
            where = "on this machine"
            hint = (
                "use `mlxsup start --detach`, or run `mlxsup start` under your own service manager"
            )
            if any(mark.exists() for mark in CONTAINER_MARKS):
                where = "in this container"
                hint = "let the container run `mlxsup start`, with a restart policy"
            raise CliError(f"systemd does not run {where}", code="no_service_manager", hint=hint)
        if not done.stdout.strip():
            cause = last_words(done) or f"exit code {done.returncode}"
            whose, hint = "systemd", "is it running?"
            if not self._is_system:
                whose = "the user's systemd"
                hint = "log in as the user (not with su)" + (f", or `{instead}`" if instead else "")
            message = f"{whose} cannot be reached: {cause}"
            raise CliError(message, code="no_service_manager", hint=hint)

    def notes(self) -> list[str]:
        """Return what the user who has installed the service should know."""
        if not self._is_system and self._has_linger() is False:
            return [
                "it starts when you log in and ends when you log out; `loginctl "
                "enable-linger` lets it start with the machine"
            ]
        return []

    def state(self) -> ServiceState:
        """Return what systemd says of the service."""
        done = call(self._control("show", UNIT, f"--property={','.join(SHOWN)}"))
        pairs = (line.partition("=")[::2] for line in done.stdout.splitlines())
        shown = dict(pairs)
        pid = _number(shown.get("MainPID"))
        return ServiceState(
            state=f"{shown.get('ActiveState', 'unknown')} ({shown.get('SubState', 'unknown')})",
            pid=pid or None,
            is_enabled=shown.get("UnitFileState", "").startswith("enabled"),
            starts_at="boot" if self._is_system or self._has_linger() else "login",
            note=shown.get("StatusText", ""),
            last_exit=None if pid else _number(shown.get("ExecMainStatus")),
            restarts=_number(shown.get("NRestarts")),
        )

    def log_command(self) -> list[str]:
        """Return what prints the journal of the service."""
        return ["journalctl", "--unit" if self._is_system else "--user-unit", UNIT]

    def _control(self, *arguments: str) -> list[str]:
        return ["systemctl", *([] if self._is_system else ["--user"]), *arguments]

    def _has_linger(self) -> bool | None:
        """True if the user's systemd runs without a login; None if loginctl does not say."""
        try:
            done = call(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
        except CliError:
            return None
        # It does not know a user who neither lingers nor is logged in.
        return {"Linger=yes": True, "Linger=no": False}.get(done.stdout.strip())


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
