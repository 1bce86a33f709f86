"""The modes of the terminal that keys come from, changed for a while and given back in any case."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""End the process by default, without a `finally`."""


class Keyboard:
    """The terminal of standard input, which `give_back` leaves as it was.

    A signal that ends the process gives it back first, from `save` on.

    Args:
        reset: written to the terminal by such a signal, before a line break.
    """

    def __init__(self, reset: bytes = b"") -> None:
        self._reset = reset
        self._modes: list[Any] | None = None
        self._handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def hide_typing(self) -> None:
        """Show no keys: they would stand in the middle of an answer. They wait for the prompt."""
        if not (sys.stdout.isatty() or sys.stderr.isatty()):
            return
        self.save()
        if self._modes is not None:
            hidden = [*self._modes]
            hidden[3] &= ~termios.ECHO
            self._set(hidden)

    def save(self) -> None:
        """Keep what the modes are; nothing happens without a terminal, or in the background."""
        if not _is_ours():
            return
        self._modes = termios.tcgetattr(sys.stdin)
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._end)

    def give_back(self) -> None:
        """Restore the modes."""
        modes, self._modes = self._modes, None
        if modes is not None and _is_ours():
            self._set(modes)
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _end(self, number: int, _: FrameType | None) -> None:
        self.give_back()
        shown_on = sys.stdout if sys.stdout.isatty() else sys.stderr
        try:
            os.write(shown_on.fileno(), self._reset + b"\n")
        except OSError:
            pass  # the terminal has gone
        signal.raise_signal(number)

    @staticmethod
    def _set(modes: list[Any]) -> None:
        try:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
        except termios.error:
            pass  # the terminal has gone


def _is_ours() -> bool:
    """True if standard input is a terminal on which this process runs in the foreground.

    One in the background would be stopped for changing it.
    """
    if not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return True  # it controls no process, so it stops none
