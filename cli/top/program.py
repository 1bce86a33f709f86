"""The loop of `mlxsup top` on a terminal: news and keys in, pictures and orders out.

Signals only write their number into the pipe that the loop waits for: KeyboardInterrupt could come
while the terminal is being given back.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Sequence

from ..terminal.full_screen import FullScreen
from ..terminal.output import Output
from .facts import Facts, Looked
from .follower import Follower, Mailbox
from .keys import Controls, press_all, see
from .orders import Orders
from .screen import STYLES, screen


def run(endpoint: str, first: Looked, interval_s: float, output: Output) -> None:
    """Shows a daemon on the whole terminal until somebody leaves.

    It is drawn after each look, each key and each change of the terminal. A signal that ends other
    programs ends this one, once the terminal is what it was.

    Args:
        endpoint: of the daemon.
        first: what it has answered.
        interval_s: from one look to the next.
        output: how to write output.
    """
    with FullScreen(has_colour=output.has_colour(sys.stdout)) as full_screen:
        mailbox = Mailbox(full_screen.wake)
        with Follower(endpoint, interval_s, mailbox):
            ended_by = _Program(first, endpoint, mailbox, full_screen, output).run()
    if ended_by is not None and ended_by != signal.SIGINT:
        signal.signal(ended_by, signal.SIG_DFL)
        signal.raise_signal(ended_by)


class _Program:
    """What is shown, and what changes it.

    Args:
        first: what the daemon has answered.
        endpoint: where it answers.
        mailbox: where news of it come.
        full_screen: the terminal.
        output: how to write output.
    """

    def __init__(
        self,
        first: Looked,
        endpoint: str,
        mailbox: Mailbox,
        full_screen: FullScreen,
        output: Output,
    ) -> None:
        self._facts = Facts.first(first)
        self._controls = see(Controls(), self._facts.items())
        self._mailbox = mailbox
        self._full_screen = full_screen
        self._output = output
        # Bounded by the orders that are under way.
        self._said: deque[str] = deque()
        self._orders = Orders(endpoint, self._say)

    def run(self) -> int | None:
        """The signal that asked for the end; None if a key did.

        The first picture comes with the follower's first look, after which no change is missed.
        """
        while not self._controls.has_quit:
            woken = self._full_screen.wait()
            if woken.ended_by is not None:
                return woken.ended_by
            self._hear()
            self._press(woken.keys)
            self._draw()
        return None

    def _draw(self) -> None:
        size = self._full_screen.size
        lines = screen(
            self._facts, self._controls, columns=size.columns, rows=size.lines, style=self._style
        )
        self._full_screen.show(lines)

    def _hear(self) -> None:
        """Takes what has come from the daemon and from orders, before any key that came with it."""
        for news in self._mailbox.take():
            before = self._facts
            self._facts = before.after(news)
            self._controls = see(
                self._controls,
                self._facts.items(),
                is_same_daemon=self._facts.is_same_daemon(before),
            )
        while self._said:
            self._controls = self._controls.saying(self._said.popleft())

    def _press(self, keys: Sequence[str]) -> None:
        self._controls, orders = press_all(self._controls, keys)
        for order in orders:
            self._controls = self._controls.saying(self._orders.start(order))

    def _say(self, sentence: str) -> None:
        self._said.append(sentence)
        self._full_screen.wake()

    def _style(self, text: str, what: str) -> str:
        return self._output.style(text, sys.stdout, **STYLES.get(what, {}))
