"""Changes of the models' states, as a daemon reports them: heard, put into words, and shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from .arguments import row_called
from .terminal.output import LiveLine, Output
from .terminal.status import PHASE_WORDS, progress_text
from .terminal.text import clock, in_a_line

if TYPE_CHECKING:
    from mlxsup.client import Client


def state_changes(client: Client) -> Iterator[dict[str, Any]]:
    """Return the changes of state from the return of this call on, each with its time."""
    changes = client.events()
    # The daemon answers in order: once it has answered this, no change is missed.
    client.ping()
    return ({"at": time.time(), **change} for change in changes if is_step(change))


def is_step(change: Mapping[str, Any]) -> bool:
    """True if the state has changed, and not only how far a load is."""
    return bool(change.get("from") != change.get("to"))


def change_line(change: Mapping[str, Any], *, has_bar: bool = False) -> str:
    """Return `12:03:04Z smollm2: LOADING → READY (generation 1, pid 4711)`, in UTC.

    Args:
        change: as a daemon sends it.
        has_bar: whether to draw a progress, in a line that is drawn again.
    """
    at = clock(change.get("at") or time.time())
    before, after = change.get("from"), change.get("to")
    states = str(after) if before in (None, after) else f"{before} → {after}"
    progress = progress_text(change.get("progress"), has_bar=has_bar)
    facts = [progress] if before == after else []
    if not any(facts):
        pid, note = change.get("pid"), str(change.get("note") or "")
        facts = [f"generation {change.get('generation')}, pid {pid}"] if pid else []
        facts += [note] if note else []
    said = f" ({', '.join(facts)})" if facts else ""
    return in_a_line(f"{at} {change.get('model')}: {states}{said}")


QUIET_S = 1.0
"""A wait that is shorter is not explained."""


@contextmanager
def progress_shown(client: Client, model: str, output: Output) -> Iterator[None]:
    """Show on standard error, after the first second, how far the model has come.

    On a terminal it is one line that is gone at the end, elsewhere a line for each change.
    """
    from mlxsup.client import ConnectionLost, RequestError

    if output.is_json:
        yield
        return
    line, lock, has_finished = LiveLine(output), threading.Lock(), threading.Event()
    changes = client.events()
    row = row_called(client.status(), model)

    def follow() -> None:
        if row is None or has_finished.wait(QUIET_S):
            return
        facts = {name: row.get(name) for name in ("generation", "pid", "progress")}
        standing = {"model": row["name"], "from": row["state"], "to": row["state"], **facts}
        # The command itself meets the same errors, and reports them.
        with suppress(ConnectionLost, RequestError):
            for change in chain([standing], changes):
                if change.get("model") != row["name"]:
                    continue
                phase = str((change.get("progress") or {}).get("phase"))
                step = (change.get("to"), change.get("generation"), PHASE_WORDS.get(phase, phase))
                with lock:
                    if has_finished.is_set():
                        return
                    line.tell(change_line(change, has_bar=line.is_possible), step)

    threading.Thread(target=follow, name="mlxsup-progress", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            has_finished.set()
            line.clear()
        changes.close()
