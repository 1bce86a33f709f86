"""The signals that the supervisor handles: to end, and to reload."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def held_back() -> Iterator[None]:
    """Block signals that come before `Signals` listens, so that they do not end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """Counts SIGTERM and SIGINT; SIGHUP means a reload, or the end if it says that our terminal
    is gone.

    Args:
        on_end: called for each signal that asks for the end: which it is, and whether it is a
            later one.
        on_reload: called for each SIGHUP that asks for a reload.
    """

    def __init__(
        self, on_end: Callable[[signal.Signals, bool], None], on_reload: Callable[[], None]
    ) -> None:
        self._on_end = on_end
        self._on_reload = on_reload
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._had_terminal = has_terminal()
        # An ignored SIGHUP means `nohup`: the daemon must outlive its terminal.
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in ENDING:
            self._loop.add_signal_handler(number, self._ask_for_end, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, signal.SIGHUP))

    def ignore(self) -> None:
        """Ignore all signals from now on: what is left is bounded and short."""
        for number in (*ENDING, signal.SIGHUP):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _ask_for_end(self, number: signal.Signals) -> None:
        self._count += 1
        self._on_end(number, self._count > 1)

    def _hang_up(self) -> None:
        if self._had_terminal and not has_terminal():
            if not self._outlives_terminal:
                self._ask_for_end(signal.SIGHUP)
            self._had_terminal = False
        else:
            self._on_reload()


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that still exists; without a free file
    that cannot be seen, and is no reason to end."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True
