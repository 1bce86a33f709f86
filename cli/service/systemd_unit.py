"""The unit file of systemd; see systemd.service(5), systemd.exec(5) and systemd.syntax(7).

A colon before the command keeps systemd from replacing `$NAME` in paths. The unit of a machine has
no `PrivateDevices`, which would hide the GPU, and no `MemoryMax`, which would kill what the daemon
would rather pause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .facts import MARKER, PERMANENT_EXITS, ServiceFacts

WATCHDOG_S = 10

TEMPORARY = (Path("/tmp"), Path("/var/tmp"))

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
UMask=0077"""
"""Of a unit of the machine; a user's own systemd may not set most of these. Not among them:
PrivateDevices, because of GPUs, and MemoryDenyWriteExecute, because kernels are compiled."""

_PROGRAM = re.compile(r'^ExecStart=:?"([^"]*)" ', re.MULTILINE)


def unit_text(facts: ServiceFacts) -> str:
    """The unit of the service; needs systemd 244 or later, as Debian has had since version 11."""
    return "\n".join(_lines(facts)) + "\n"


def program_in(text: str) -> str | None:
    """Which program a unit starts; None if it was not written by `unit_text`."""
    found = _PROGRAM.search(text)
    return found.group(1).replace("%%", "%") if found and MARKER in text else None


def _lines(facts: ServiceFacts) -> Iterator[str]:
    yield f"# {MARKER}"
    yield "[Unit]"
    yield "Description=mlxsup, a server of MLX language models"
    if facts.is_system:
        yield "After=network.target"
    yield "StartLimitIntervalSec=600"
    yield "StartLimitBurst=5"
    yield ""
    yield "[Service]"
    yield "Type=notify"
    yield "NotifyAccess=main"
    yield f"ExecStart={_command(facts, 'start')}"
    yield f"ExecReload={_command(facts, 'reload')}"
    for name, value in facts.environment.items():
        yield f"Environment={quoted(f'{name}={value}')}"
    yield f"WatchdogSec={WATCHDOG_S}"
    yield "Restart=on-failure"
    yield "RestartSec=2"
    yield f"RestartPreventExitStatus={' '.join(map(str, PERMANENT_EXITS))}"
    yield "KillMode=mixed"
    yield f"TimeoutStopSec={facts.stop_s}"
    yield "OOMPolicy=continue"
    yield "LimitNOFILE=65536"
    if facts.is_system:
        yield f"User={facts.user}"
        yield HARDENING
        # What is below these folders would not be what the user's commands see there.
        if not any(_is_below(facts, folder) for folder in TEMPORARY):
            yield "PrivateTmp=yes"
        for folder in facts.folders:
            yield f"ReadWritePaths={quoted(f'-{folder}')}"
    yield ""
    yield "[Install]"
    yield f"WantedBy={'multi-user' if facts.is_system else 'default'}.target"


def quoted(text: str) -> str:
    """A word of a unit file: spaces and specifiers (`%h`) mean themselves."""
    return '"' + text.replace("%", "%%") + '"'


def _command(facts: ServiceFacts, word: str) -> str:
    """A command line; the colon keeps systemd from replacing `$NAME`."""
    program, config = quoted(str(facts.program)), quoted(str(facts.config))
    return f":{program} {word} --config {config}"


def _is_below(facts: ServiceFacts, folder: Path) -> bool:
    paths = (facts.program, facts.config, facts.home, *facts.folders)
    return any(path.is_relative_to(folder) for path in paths)
