"""Reads what a person types in a chat: lines become turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol

import click

from ..exit_status import CliError, ExitStatus
from .history import History
from .writer import for_terminal

PROMPT = "> "
PROMPT_ON = "| "
FENCE = "```"
QUOTES = '"""'

ReadLine = Callable[[str], str | None]
"""Shows a prompt and returns the next line without its line break; None at the end."""


def read_turn(read_line: ReadLine) -> str | None:
    """The next turn: one line, or several.

    A line that ends with a backslash continues on the next, and so does a block of code until its
    closing fence. What stands between three quotation marks at the beginning of a line and the next
    three at the end of one is a turn, without them.

    Returns:
        The text; None at the end of the input.
    """
    lines: list[str] = []
    prompt = PROMPT
    while (line := read_line(prompt)) is not None:
        if not lines and line.lstrip().startswith(QUOTES):
            return _read_quoted(line.lstrip().removeprefix(QUOTES), read_line)
        prompt = PROMPT_ON
        is_in_code = sum(part.count(FENCE) for part in [*lines, line]) % 2 == 1
        goes_on = is_in_code or _ends_with_backslash(line)
        lines.append(line[:-1] if goes_on and not is_in_code else line)
        if not goes_on:
            break
    return "\n".join(lines) if lines else None


def _read_quoted(first: str, read_line: ReadLine) -> str:
    """What stands before the closing quotation marks, or before the end of the input."""
    lines: list[str] = []
    line: str | None = first
    while line is not None:
        if line.rstrip().endswith(QUOTES):
            lines.append(line.rstrip().removesuffix(QUOTES))
            break
        lines.append(line)
        line = read_line(PROMPT_ON)
    return "\n".join(lines).strip("\n")


def _ends_with_backslash(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


class Reader(Protocol):
    """Reads the turns of a chat."""

    is_interactive: bool

    def read(self) -> str | None:
        """The next turn; None at the end."""


class PipeReader:
    """Turns from a file or a pipe; shows no prompt."""

    is_interactive = False

    def read(self) -> str | None:
        """See `Reader.read`."""
        return read_turn(lambda _: read_plain_line())


class TerminalReader:
    """Turns typed by a person, who can edit them and recall earlier ones.

    Args:
        history: what was typed before.
    """

    is_interactive = True

    def __init__(self, history: History) -> None:
        self._history = history
        # Otherwise it would write escape sequences to something that is not a terminal.
        self._has_editing = sys.stdout.isatty() and _prepare_readline(history.load())

    def read(self) -> str | None:
        """See `Reader.read`; an interrupt discards the turn."""
        turn = read_turn(self._read_line)
        if turn is None or not turn.strip():
            return turn
        try:
            turn.encode()
        except UnicodeEncodeError:
            click.echo("that line is not UTF-8 and was not sent", err=True)
            return ""
        self._remember(turn)
        return turn

    def _read_line(self, prompt: str) -> str | None:
        if not self._has_editing:
            click.echo(prompt, nl=False, err=True)
            return read_plain_line()
        try:
            # Pasted text may end with its own line break.
            return input(prompt).rstrip("\n")
        except EOFError:
            return None

    def _remember(self, turn: str) -> None:
        self._history.add(turn)
        if self._has_editing:
            import readline

            readline.add_history(for_terminal(turn, is_answer=True))


def read_plain_line() -> str | None:
    """Reads a line of standard input, without editing.

    Raises:
        CliError: it is not UTF-8.
    """
    data = sys.stdin.buffer.readline()
    if not data:
        return None
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        message = f"the input is not UTF-8: {error.reason} at byte {error.start} of a line"
        raise CliError(message, code="usage", status=ExitStatus.USAGE) from None


def _prepare_readline(entries: list[str]) -> bool:
    """Whether lines can be edited; Python can be built without readline."""
    try:
        import readline
    except ImportError:
        return False
    readline.set_auto_history(False)
    if "libedit" not in (readline.__doc__ or ""):
        # Alt-Enter inserts a line break, and Tab a tab: nothing is completed here.
        readline.parse_and_bind(r'"\e\r": "\C-v\n"')
        readline.parse_and_bind("tab: self-insert")
        # What is pasted is one turn, however many lines it has; Python turns this off.
        is_dumb = os.environ.get("TERM") == "dumb"
        readline.parse_and_bind(f"set enable-bracketed-paste {'off' if is_dumb else 'on'}")
    for entry in entries:
        # Past our guard, readline itself writes what is recalled.
        readline.add_history(for_terminal(entry, is_answer=True))
    return True
