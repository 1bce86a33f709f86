"""The signals that ask the supervisor to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EndSignals:
    """Counts SIGTERM, SIGINT and SIGHUP.

    Args:
        on_signal: told of each: which, and whether it is not the first.
    """

    def __init__(self, on_signal: Callable[[signal.Signals, bool], None]) -> None:
        self._on_signal = on_signal
        self._loop = asyncio.get_running_loop()
        self._count = 0
        for number in ENDING:
            # An ignored SIGHUP means `nohup`: the daemon shall outlive its terminal.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._on_arrival, number)

    def ignore(self) -> None:
        """From here on the end cannot be hurried: what is left is bounded and short."""
        for number in ENDING:
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_arrival(self, number: signal.Signals) -> None:
        self._count += 1
        self._on_signal(number, self._count > 1)
