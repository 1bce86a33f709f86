"""Where output goes and how it looks: data on stdout, everything else on stderr."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TextIO, cast

import click

from mlxsup.protocol.text import escaped

from ..exit_status import CliError, ExitStatus
from .writer import GuardedStream, own

Piece = tuple[str, str]
Line = list[Piece]
"""Texts from anywhere, each with its style: some words of `SGR`."""

SGR = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}

SCHEMA_VERSION = 1
ESCAPE = "\x1b["
RESET = f"{ESCAPE}0m"
CLEAR_LINE = own("\r\x1b[K")

_NEW_LINE = re.compile(r"\n(?=\S)")
"""Before a line of an error that is not indented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a command writes its output.

    Attributes:
        is_json: whether to write one object for programs instead of text for people.
        is_plain: whether to omit colour, whatever the terminal can do.
    """

    is_json: bool = False
    is_plain: bool = False

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Output:
        """Return the output of errors in the arguments, before a command has read them."""
        flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
        return cls(is_json="--json" in flags, is_plain="--no-color" in flags)

    def data(self, text: str, style: str = "", *, newline: bool = True) -> None:
        """Write what was asked for, at once."""
        click.echo(self.style(text, sys.stdout, style), nl=newline)

    def result(self, value: Mapping[str, Any], shown: str | Iterable[Line]) -> None:
        """Write what a command has found or done: for programs the value, for people the rest."""
        if self.is_json:
            self.object(value)
        elif isinstance(shown, str):
            self.data(shown)
        else:
            self.show(shown)

    def show(self, *groups: Iterable[Line]) -> None:
        """Write lines of styled text on stdout, below each other."""
        lines = (f"{self.drawn(line)}\n" for group in groups for line in group)
        self.data("".join(lines), newline=False)

    def drawn(self, line: Line) -> str:
        """Return a line for stdout, with its style if that supports it."""
        return "".join(self.style(text, sys.stdout, style) for text, style in line)

    def answer(self, text: str, stream: TextIO, style: str = "") -> None:
        """Write a piece of a model's text: as it is, but for what a terminal would act on."""
        styled = self.style(text, stream, style)
        guarded = cast(object, stream)
        if isinstance(guarded, GuardedStream):
            guarded.write_answer(styled)
            guarded.flush()
        else:
            click.echo(styled, file=stream, nl=False)

    def object(self, value: Mapping[str, Any]) -> None:
        """Write one object, on one line."""
        self.data(self.object_line(value))

    @staticmethod
    def object_line(value: Mapping[str, Any]) -> str:
        """Return one object as a line for programs, with escapes for what is not printable."""
        import json  # help and usage errors would wait for it

        line = json.dumps({"schema_version": SCHEMA_VERSION, **value}, ensure_ascii=False)
        return escaped(line)

    def note(self, text: str, style: str = "") -> None:
        """Write what only a person wants to know."""
        if not self.is_json:
            click.echo(self.style(text, sys.stderr, style), err=True)

    def end_line(self) -> None:
        """Clear the ^C that a terminal shows, or begin a new line after it."""
        if sys.stderr.isatty():
            click.echo(CLEAR_LINE if self.can_redraw(sys.stderr) else "\n", nl=False, err=True)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Take an interrupt for the end of the body: it is how users leave, and no failure."""
        try:
            yield
        except KeyboardInterrupt:
            self.end_line()

    def error(self, error: CliError) -> None:
        """Print what went wrong, and what helps."""
        if self.is_json:
            value = {"code": error.code, "message": error.message, "hint": error.hint}
            self.object({"error": value})
            return
        # Indented, a line of a text from outside cannot pass for the hint.
        message = _NEW_LINE.sub("\n  ", error.message)
        try:
            self.note(f"{self.style('error:', sys.stderr, 'red')} {message}")
            if error.hint:
                self.note(f"hint: {error.hint}", "dim")
        except OSError:
            discard(sys.stderr)  # the exit code still says what it says

    def has_colour(self, stream: TextIO) -> bool:
        """True if escape sequences may be written there."""
        if self.is_plain or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return False
        return stream.isatty()

    def can_redraw(self, stream: TextIO) -> bool:
        """True if what was written there can be overwritten."""
        return stream.isatty() and os.environ.get("TERM") != "dumb"

    def style(self, text: str, stream: TextIO, style: str) -> str:
        """Return the text, with its style if the stream supports it."""
        return styled(text, style) if style and self.has_colour(stream) else text


def styled(text: str, style: str) -> str:
    """Return a text from anywhere between our own sequences, for some words of `SGR`."""
    codes = ";".join(str(SGR[word]) for word in style.split())
    return f"{own(f'{ESCAPE}{codes}m')}{text}{own(RESET)}"


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal; None for anything else, whose lines are never cut."""
    return terminal_size().columns if stream.isatty() else None


def terminal_size() -> os.terminal_size:
    """Return what `shutil.get_terminal_size` does, for which every help would wait."""
    given = [os.environ.get(name, "") for name in ("COLUMNS", "LINES")]
    columns, lines = (int(text) if text.isdecimal() else 0 for text in given)
    try:
        real = os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else 1)
    except (OSError, ValueError):
        real = os.terminal_size((0, 0))
    return os.terminal_size((columns or real.columns or 80, lines or real.lines or 24))


def settle_streams() -> None:
    """Write what is buffered, or discard it if it is not taken.

    If any of it were left, the interpreter would exit with 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)


def discard(stream: TextIO) -> None:
    """Discard what is still buffered, about which the interpreter would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    stream.flush()


class LiveLine:
    """The line on standard error that says what is being waited for.

    Attributes:
        is_possible: true if a line can be replaced there; elsewhere lines stay.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._is_shown = False
        self._told: object = None
        self.is_possible = output.can_redraw(sys.stderr) and not output.is_json

    def show(self, text: str) -> None:
        """Replace the line's text."""
        if self.is_possible:
            from .text import cut  # help would wait for it

            # A line that wraps could not be cleared.
            text = cut(text, terminal_size().columns - 1)
            styled = self._output.style(text, sys.stderr, "dim")
            click.echo(f"{CLEAR_LINE}{styled}", nl=False, err=True)
            self._is_shown = True

    def tell(self, text: str, step: object) -> None:
        """Show the text; where lines stay, write it only with another step than the one before."""
        if self.is_possible:
            self.show(text)
        elif step != self._told:
            self._told = step
            self._output.note(text)

    def remark(self, text: str) -> None:
        """Write a line that stays."""
        self.clear()
        self._output.note(text, "dim")

    def clear(self) -> None:
        """Clear the line."""
        if self._is_shown:
            click.echo(CLEAR_LINE, nl=False, err=True)
            self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def confirm(question: str, *, default: bool = False, declined: str = "nothing was removed") -> None:
    """Return if the user says yes.

    Args:
        question: for the terminal.
        default: the answer that Enter alone gives.
        declined: the message of the error if the answer is no.
    """
    if not sys.stdin.isatty():
        raise CliError(
            "cannot ask for confirmation, because standard input is not a terminal",
            hint="add --yes",
            status=ExitStatus.USAGE,
        )
    if not click.confirm(question, default=default, err=True):
        raise CliError(declined, code="declined")
