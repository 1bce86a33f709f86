"""Commands of the service manager, run and read."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..exit_status import CliError


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a service manager that changes something.

    Attributes:
        argv: what is run.
        end_limit_s: how many seconds a job that it ends may take after it has returned; None: it
            ends none, or waits by itself.
    """

    argv: list[str]
    end_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """What became of a command.

    Attributes:
        code: its exit code.
        out: its standard output.
        err: its standard error.
    """

    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line that it has written."""
        return (self.err.strip() or self.out.strip()).rpartition("\n")[2]


def call(argv: Sequence[str]) -> Called:
    """Runs a command to its end.

    Raises:
        CliError: there is no such program.
    """
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise no_program(argv[0]) from None
    return Called(code=done.returncode, out=done.stdout, err=done.stderr)


def must(argv: Sequence[str], allowed: Collection[int] = (0,)) -> None:
    """Runs a command that has to succeed.

    Args:
        argv: the command.
        allowed: exit codes that count as success.

    Raises:
        CliError: it fails.
    """
    called = call(argv)
    if called.code not in allowed:
        said = f": {called.last_words}" if called.last_words else ""
        raise CliError(
            f"`{shlex.join(argv)}` failed with exit code {called.code}{said}",
            code="service_manager",
            hint="see `mlxsup service logs` and `mlxsup service status`",
        )


def no_program(name: str) -> CliError:
    """The error for a service manager whose command is not there."""
    manager = "launchd" if name == "launchctl" else "systemd"
    return CliError(
        f"there is no {manager} here: {name} is not installed",
        code="no_service_manager",
        hint="run `mlxsup start --detach`, or `mlxsup start` under what starts services here",
    )
