"""The commands that reach the hosts of a group, and the report of a host."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from .launch import GroupHost
from .message import Record, record

SSH_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=2",
    "-o", "ServerAliveCountMax=2", "-o", "LogLevel=ERROR",
)  # fmt: skip
"""Never ask, and notice a dead link; users, keys and jumps are for the user's ssh configuration."""

LINK_LIMIT_S = 5.0
"""A link without a byte for so long is dead; each side sends a ping or a beat every pulse."""

PULSE_S = 1.0

READ_BYTES = 64 * 1024

AGENT = "mlxsup.worker.group.agent"
INSPECTION = "mlxsup.worker.group.inspection"


def host_argv(host: GroupHost, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of mlxsup on a host."""
    run = [host.python or sys.executable, "-P", "-m", module, *arguments]
    return ["ssh", *SSH_OPTIONS, "--", host.ssh, f"exec {shlex.join(run)}"] if host.ssh else run


def has_no_mlxsup(exit_code: int, last_line: str) -> bool:
    """True if a command could not run: its host has no such interpreter, or that has no mlxsup.

    Args:
        exit_code: 126 or 127 is how a shell says so.
        last_line: what it has printed.
    """
    return exit_code in (126, 127) or "No module named 'mlxsup" in last_line


@record
class HostReport(Record):
    """The report of a host about itself.

    Attributes:
        python: the version of its interpreter.
        versions: of mlxsup and of the engine's libraries.
        available_bytes: memory that programs could have now.
        fingerprint: of the model's files.
        problem: why it cannot take part; empty if it can.
        port: on which it answers each line that is sent to its address with a newline; 0: on none.
    """

    python: str
    versions: dict[str, Any]
    available_bytes: int
    fingerprint: str = ""
    problem: str = ""
    port: int = 0
