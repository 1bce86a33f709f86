"""`mlxsup top` in a pipe, or with --json: a line for each change, and one for each look."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from ..terminal.change_printer import change_line
from ..terminal.memory_bar import amounts
from ..terminal.output import Output
from ..terminal.reader_watch import reader_watched
from .facts import Changed, Looked, Lost, clock
from .follower import Follower, Mailbox

MAX_CHANGES = 200
"""How many changes a line of JSON has at most, the latest."""


def follow(endpoint: str, interval_s: float, output: Output) -> None:
    """Writes lines until interrupted, or until nobody reads them.

    In words, there is a line for each change of a model's state, and one for each look at which
    something else is true than at the one before. As JSON there is one for each look.

    Args:
        endpoint: of the daemon.
        interval_s: from one look to the next.
        output: how to write output.

    Raises:
        CliError: the daemon does not answer, or no longer.
        BrokenPipeError: nobody reads.
    """
    woken = threading.Event()
    is_unread = threading.Event()
    mailbox = Mailbox(woken.set)

    def give_up() -> None:
        is_unread.set()
        woken.set()

    lines: _JsonLines | _WordLines = _JsonLines(output) if output.is_json else _WordLines(output)
    with reader_watched(give_up), Follower(endpoint, interval_s, mailbox):
        while not is_unread.is_set():
            woken.wait()
            woken.clear()
            for news in mailbox.take():
                match news:
                    case Lost(error=error):
                        raise error
                    case Changed(change=change):
                        lines.changed(change)
                    case Looked():
                        lines.looked(news)


class _WordLines:
    """Lines for people.

    Args:
        output: how to write output.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._last = ""

    def changed(self, change: Mapping[str, Any]) -> None:
        """A model's state changed."""
        self._output.data(change_line(change))

    def looked(self, looked: Looked) -> None:
        """The daemon answered."""
        words = summary(looked)
        if words != self._last:
            self._last = words
            self._output.data(f"{clock(looked.at)} {words}")


class _JsonLines:
    """Lines for programs.

    Args:
        output: how to write output.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._changes: deque[Mapping[str, Any]] = deque(maxlen=MAX_CHANGES)

    def changed(self, change: Mapping[str, Any]) -> None:
        """A model's state changed."""
        self._changes.append(change)

    def looked(self, looked: Looked) -> None:
        """The daemon answered."""
        status = {key: looked.status[key] for key in ("pid", "uptime_s", "memory", "models")}
        requests = {key: looked.requests[key] for key in ("requests", "more")}
        changes = list(self._changes)
        self._changes.clear()
        self._output.object({"at": looked.at, **status, **requests, "changes": changes})


def summary(looked: Looked) -> str:
    """`1 READY, 1 LOADING; 3 running, 5 waiting, 93.5 tok/s; 3.10 GiB used, 5.00 GiB of …`."""
    models = looked.status["models"]
    states = Counter(model["state"] for model in models)
    counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "no models"
    running = sum(len(model.get("running") or []) for model in models)
    waiting = sum(model.get("queued") or 0 for model in models)
    rate = sum(model.get("tokens_per_s") or 0.0 for model in models)
    paused = sum(len(model.get("paused") or []) for model in models)
    parts = [f"{running} running", f"{waiting} waiting"]
    parts += [f"{paused} paused"] if paused else []
    parts += [f"{rate:.1f} tok/s"] if rate else []
    return f"{counted}; {', '.join(parts)}; {amounts(looked.status)}"
