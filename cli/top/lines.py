"""`mlxsup top` in a pipe, or with --json: a line for each change, and one for each look."""

from __future__ import annotations

import threading
from collections import Counter

from ..changes import change_line
from ..connection import Target, connect
from ..terminal.memory_bar import amounts
from ..terminal.output import Output
from ..terminal.reader_watch import reader_watched
from .looks import Look, clock, looks


def follow(target: Target, interval_s: float, output: Output) -> None:
    """Write lines until interrupted, or until the reader has gone.

    In words, there is a line for each change of a model's state, and one for each look at which
    something else is true than at the one before. As JSON there is one for each look.

    Args:
        target: the daemon.
        interval_s: from one look to the next.
        output: how to write output.

    Raises:
        CliError: the daemon does not answer, or no longer.
        BrokenPipeError: the reader has gone.
    """
    is_unread = threading.Event()
    last = ""
    with reader_watched(is_unread.set), connect(target) as client:
        for look in looks(client, interval_s, is_unread):
            if output.is_json:
                _write_object(look, output)
                continue
            for change in look.changes:
                output.data(change_line(change))
            words = summary(look)
            if words != last:
                output.data(f"{clock(look.at)} {words}")
            last = words


def _write_object(look: Look, output: Output) -> None:
    status = {key: look.status[key] for key in ("pid", "uptime_s", "memory", "models")}
    requests = {key: look.requests[key] for key in ("requests", "more")}
    output.object({"at": look.at, **status, **requests, "changes": look.changes})


def summary(look: Look) -> str:
    """Return `1 READY, 1 LOADING; 3 running, 5 waiting, 93.5 tok/s; 3.10 GiB used, …`."""
    models = look.status["models"]
    states = Counter(model["state"] for model in models)
    counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "no models"
    running = sum(len(model.get("running") or []) for model in models)
    waiting = sum(model.get("queued") or 0 for model in models)
    rate = sum(model.get("tokens_per_s") or 0.0 for model in models)
    paused = sum(len(model.get("paused") or []) for model in models)
    parts = [f"{running} running", f"{waiting} waiting"]
    parts += [f"{paused} paused"] if paused else []
    parts += [f"{rate:.1f} tok/s"] if rate else []
    return f"{counted}; {', '.join(parts)}; {amounts(look.status)}"
