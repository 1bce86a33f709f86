"""What the command line exits with (sysexits)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitStatus(IntEnum):
    """A contract with scripts."""

    OK = 0
    FAILED = 1
    USAGE = 64
    NO_DAEMON = 69
    LEFT_BEHIND = 71
    RUNTIME_FOLDER = 73
    ALREADY_RUNNING = 75
    NO_PERMISSION = 77
    BAD_CONFIGURATION = 78
    TIMED_OUT = 124
    INTERRUPTED = 130
    BROKEN_PIPE = 141


PERMANENT_EXITS = (
    ExitStatus.USAGE,
    ExitStatus.RUNTIME_FOLDER,
    ExitStatus.ALREADY_RUNNING,
    ExitStatus.BAD_CONFIGURATION,
)
"""Errors that another start does not help against."""


class CliError(Exception):
    """What ends a command: one sentence, and the command that helps.

    Any function of the command line may raise it; a docstring names it only if the body does not
    show it.

    Attributes:
        message: for people.
        code: for programs; by default, the name of the status.
        hint: what to do; may be empty.
        status: what to exit with.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        hint: str = "",
        status: ExitStatus = ExitStatus.FAILED,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or status.name.lower()
        self.hint = hint
        self.status = status


class NoDaemonError(CliError):
    """No daemon runs at the endpoint, as far as its lock says."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, code="connection_lost", hint=hint, status=ExitStatus.NO_DAEMON)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence that says what has ended and what goes on."""


@contextmanager
def interrupt_says(sentence: str | Callable[[], str]) -> Iterator[None]:
    """Have Ctrl-C in the body end the command with this sentence.

    Raises:
        Interrupted: it was pressed.
    """
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(sentence if isinstance(sentence, str) else sentence()) from None


def misuse(message: str, command: str) -> CliError:
    """Return the error for options that make no sense, and how the help of a command is found."""
    return CliError(message, hint=f"see `{command} -h`", status=ExitStatus.USAGE)
