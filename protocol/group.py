"""The commands that reach the hosts of a group, and the report of a host."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from .launch import GroupHost
from .message import Record, record

SSH_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=2",
    "-o", "ServerAliveCountMax=2", "-o", "LogLevel=ERROR",
)  # fmt: skip
"""Never ask, and notice a dead link; users, keys and jumps are for the user's ssh configuration."""

LINK_LIMIT_S = 5.0
"""A link without a sign of life for so long is dead. Every `PULSE_S` the leader sends a ping, and
each rank a beat."""

LOAD_LIMIT_S = 20.0
"""Instead of `LINK_LIMIT_S` during a load, which holds the interpreter's lock while it imports and
while it connects the ranks."""

READ_BYTES = 64 * 1024

MOST_TOLD = 200
"""Characters of what a host has printed."""

AGENT = "mlxsup.worker.group.agent"
INSPECTION = "mlxsup.worker.group.inspection"


def host_argv(host: GroupHost, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of mlxsup on a host.

    sh runs it there, because login shells disagree about the exit code of what cannot be run: it
    is 1 in csh.
    """
    run = [host.python or sys.executable, "-P", "-m", module, *arguments]
    if not host.ssh:
        return run
    in_sh = shlex.join(["sh", "-c", f"exec {shlex.join(run)}"])
    return ["ssh", *SSH_OPTIONS, "--", host.ssh, f"exec {in_sh}"]


def has_no_mlxsup(exit_code: int, last_line: str) -> bool:
    """True if a command could not run: its host has no such interpreter, or that has no mlxsup.

    Args:
        exit_code: 126 or 127 is how sh says so; 2 that of a Python before 3.11, which has no -P.
        last_line: what it has printed.
    """
    return exit_code in (2, 126, 127) or "No module named" in last_line


def shell_prints(said: bytes) -> str:
    """Return the complaint about a host whose shell has printed something before the command."""
    line = said.decode(errors="replace").strip().partition("\n")[0][:MOST_TOLD]
    return f"its shell prints {line!r}; it must print nothing before a command"


def other_version(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return what a host has in another version than the first one, and what to do; empty if it has
    the same."""
    for name, version in ours.items():
        if (other := theirs.get(name)) != version:
            return f"has {name} {other}, not {version}; install the same on every host"
    return ""


OTHER_FILES = "has other model files than the first host; copy the folder there again"


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
