"""One line of a terminal that is rewritten in place, and is gone at the end."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Self, TextIO

import click

from .output import CLEAR_LINE, Output
from .text import cut


class LiveLine:
    """Shows on standard error what is being waited for; nothing if that is not a terminal.

    Args:
        output: how to write output.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._is_shown = False
        self._is_beside_text = False
        self.is_possible = output.can_redraw(sys.stderr) and not output.is_json

    def show(self, text: str) -> None:
        """Replace the line's text; not while half a line of an answer stands there."""
        if self.is_possible and not self._is_beside_text:
            # A line that wraps could not be cleared.
            text = cut(text, shutil.get_terminal_size().columns - 1)
            styled = self._output.style(text, sys.stderr, dim=True)
            click.echo(f"{CLEAR_LINE}{styled}", nl=False, err=True)
            self._is_shown = True

    def make_way(self, text: str, stream: TextIO) -> None:
        """Clear the line for text of an answer that is about to be written there."""
        self.clear()
        self._is_beside_text = stream.isatty() and not text.endswith("\n")

    def end_text(self) -> None:
        """Begin a new line if half a line of an answer stands on the terminal."""
        self.clear()
        if self._is_beside_text:
            self._output.note("")
        self._is_beside_text = False

    def remark(self, text: str) -> None:
        """Write a line that stays, below what has been written of an answer."""
        self.end_text()
        self._output.note(self._output.style(text, sys.stderr, dim=True))

    def clear(self) -> None:
        """Clear the line."""
        if self._is_shown:
            click.echo(CLEAR_LINE, nl=False, err=True)
            self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
