"""Ctrl-C that waits while a process is being started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Let an interrupt wait until the block has ended.

    A process exists before the call that starts it returns; an interrupt in between would leave
    it without an owner.

    Raises:
        KeyboardInterrupt: at the end of the block, if an interrupt came and counts here.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
