"""What `mlxsup top` knows of a daemon, and says of it in lines, in a pipe or with --json."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..changes import Changes, change_line, is_step
from ..connection import Target, connect
from ..terminal.output import Output
from ..terminal.reader_watch import reader_watched
from ..terminal.status import amounts, whole_bytes
from ..terminal.text import clock, format_bytes

if TYPE_CHECKING:
    from mlxsup.client import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A daemon's answers to the questions for its status and its requests.

    Attributes:
        at: seconds since the epoch.
        status: as `mlxsup status --json` prints it.
        requests: as `mlxsup requests --json` prints it.
        changes: of models' states since the look before, as `mlxsup events --json` prints them.
    """

    at: float
    status: Mapping[str, Any]
    requests: Mapping[str, Any]
    changes: Sequence[Mapping[str, Any]] = ()


def looks(client: Client, interval_s: float, has_ended: threading.Event) -> Iterator[Look]:
    """Yield a look at once and after each interval, until the event is set.

    Raises:
        RequestError, ConnectionLost: the daemon does not answer, or reports no changes any more.
    """
    changes = Changes(client)
    is_first = True
    while not has_ended.is_set():
        # What happened before is asked for once.
        status, requests = client.status(debug=is_first), client.requests()
        is_first = False
        heard = [change for change in changes.wait(0.0) if is_step(change)]
        yield Look(at=time.time(), status=status, requests=requests, changes=heard)
        has_ended.wait(interval_s)


MIN_BAR_WIDTH = 8
USED, GROWN, FREE = "#", "=", "."
TITLE = "memory"


def memory_bar(value: Mapping[str, Any], width: int) -> str:
    """Return `memory [###==.....] 3.10 GiB used, may grow to 5.00 GiB of 10.00 GiB`.

    A terminal that is too narrow for a bar gets none.

    The bar is as long as the budget, or as what models may grow to if that is more. A `#` is used,
    an `=` is what that may grow to, and a dot is neither. Without a budget it is as long as
    the memory of the machine.

    Args:
        value: the daemon's status.
        width: columns of the terminal.
    """
    memory = value.get("memory") or {}
    used, grown = memory.get("used_bytes") or 0, memory.get("may_grow_to_bytes") or 0
    whole, text = whole_bytes(value), amounts(value)
    room = width - len(f"{TITLE} [] {text}")
    if room < MIN_BAR_WIDTH:
        text = f"{format_bytes(used)} used of {format_bytes(whole)}"
        room = width - len(f"{TITLE} [] {text}")
    if room < MIN_BAR_WIDTH:
        return f"{TITLE} {text}"[:width]
    longest = max(whole, grown, 1)
    used_signs = round(used / longest * room)
    bar = USED * used_signs + GROWN * (round(grown / longest * room) - used_signs)
    return f"{TITLE} [{bar.ljust(room, FREE)}] {text}"


def follow(target: Target, interval_s: float, output: Output) -> None:
    """Write lines until interrupted, or until the reader has gone.

    In words, there is a line for each change of a model's state, and one for each look at which
    something else is true than at the one before. As JSON there is one for each look.

    Args:
        target: the daemon.
        interval_s: from one look to the next.

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
