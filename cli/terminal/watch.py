"""`mlxsup status --watch`: the table, refreshed in place on a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..state_changes import state_changes
from .columns import in_a_line
from .output import Output
from .reader_watch import reader_watched
from .writer import own, plain

if TYPE_CHECKING:
    from mlxsup.client import Client

REDRAW_INTERVAL_S = 1.0
CLEAR_REST, CLEAR_BELOW = own("\x1b[K"), own("\x1b[J")

Draw = Callable[[], Sequence[str]]
"""Asks the daemon, and returns the lines to show."""


def watch(client: Client, draw: Draw, output: Output) -> None:
    """Shows the lines until interrupted: every second, or in a pipe with each change."""
    try:
        if output.can_redraw(sys.stdout) and not output.is_json:
            redraw(draw, output)
        else:
            with reader_watched(client.close):
                _follow(client, draw, output)
    except KeyboardInterrupt:
        # This is how users end it, so it is no failure.
        output.end_line()


def _follow(client: Client, draw: Draw, output: Output) -> None:
    changes = state_changes(client)
    _write(draw(), output)
    for _ in changes:
        if not output.is_json:
            output.data("")
        _write(draw(), output)


def _write(lines: Sequence[str], output: Output) -> None:
    output.data("\n".join(lines))


def redraw(draw: Draw, output: Output) -> None:
    """Shows the lines every second, over those of before; ends with an interrupt."""
    rows_above = 0
    while True:
        size = shutil.get_terminal_size()
        # Lines that scrolled off the terminal could not be overwritten.
        lines = [in_a_line(line) for line in draw()][: size.lines - 1]
        up = own(f"\x1b[{rows_above}A\r" if rows_above else "\r")
        body = "".join(f"{line}{CLEAR_REST}\n" for line in lines)
        output.data(f"{up}{body}{CLEAR_BELOW}", newline=False)
        rows_above = sum(_rows_of(line, size.columns) for line in lines)
        time.sleep(REDRAW_INTERVAL_S)


def _rows_of(line: str, columns: int) -> int:
    return max(1, -(-len(plain(line)) // columns))
