"""Lines of a terminal that are refreshed in place, until interrupted."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .output import Output
from .writer import beneath

if TYPE_CHECKING:
    from rich.console import RenderableType

REDRAW_INTERVAL_S = 1.0
CLEAR_REST, CLEAR_BELOW = "\x1b[K", "\x1b[J"


def redraw(draw: Callable[[], Sequence[RenderableType]], output: Output) -> None:
    """Show what `draw` returns every second, over what it returned before; ends by an interrupt.

    Not by `rich.live`, which hides the cursor: a signal that ends the command would leave it so.
    """
    rows_above = 0
    while True:
        console = output.console(sys.stdout)
        with console.capture() as captured:
            for renderable in draw():
                console.print(renderable)
        # Lines that scrolled off the terminal could not be overwritten.
        lines = captured.get().splitlines()[: shutil.get_terminal_size().lines - 1]
        up = f"\x1b[{rows_above}A\r" if rows_above else "\r"
        stream = beneath(sys.stdout)
        stream.write(up + "".join(f"{line}{CLEAR_REST}\n" for line in lines) + CLEAR_BELOW)
        stream.flush()
        rows_above = len(lines)
        time.sleep(REDRAW_INTERVAL_S)
