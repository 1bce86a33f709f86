"""Shows what a model does while a command waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..arguments import row_called
from ..state_changes import Changes
from .change_printer import change_line
from .live_line import LiveLine
from .output import Output

if TYPE_CHECKING:
    from mlxsup.client import Client

QUIET_S = 1.0
"""What takes no longer than this needs no explanation."""


@contextmanager
def progress_shown(client: Client, model: str, output: Output) -> Iterator[None]:
    """Show on standard error, after the first second, how far the model has come.

    On a terminal it is one line that is gone at the end, elsewhere a line for each change. The
    thread that shows it ends with the client.
    """
    if output.is_json:
        yield
        return
    progress = _Progress(client, model, output)
    try:
        yield
    finally:
        progress.finish()


class _Progress:
    """Shows the changes of one model until it is finished.

    Args:
        client: where to hear them.
        model: the model that the command waits for.
        output: how to write output.
    """

    def __init__(self, client: Client, model: str, output: Output) -> None:
        self._output = output
        self._line = LiveLine(output)
        self._lock = threading.Lock()
        self._has_finished = threading.Event()
        self._shown: tuple[object, ...] = ()
        changes = Changes(client)
        # Only now, so that no change between the two is missed.
        row = row_called(client.status(), model)
        thread = threading.Thread(
            target=self._run, args=(changes, row), name="mlxsup-progress", daemon=True
        )
        thread.start()

    def finish(self) -> None:
        """Show nothing from now on."""
        with self._lock:
            self._has_finished.set()
            self._line.clear()

    def _run(self, changes: Changes, row: Mapping[str, Any] | None) -> None:
        from mlxsup.client import ConnectionLost, RequestError

        if row is None or self._has_finished.wait(QUIET_S):
            return
        facts = {name: row.get(name) for name in ("generation", "pid", "progress")}
        standing = {"model": row["name"], "from": row["state"], "to": row["state"], **facts}
        try:
            # Of what has changed in the quiet second, the latest says it all.
            heard = [{"at": time.time(), **standing}, *changes.wait(0.0)]
            latest = [change for change in heard if change.get("model") == row["name"]][-1:]
            while True:
                for change in latest:
                    self._show(change)
                latest = [one for one in changes.wait() if one.get("model") == row["name"]]
        except (ConnectionLost, RequestError):
            # The command itself meets the same error, and reports it.
            return

    def _show(self, change: Mapping[str, Any]) -> None:
        with self._lock:
            if self._has_finished.is_set():
                return
            if self._line.is_possible:
                self._line.show(change_line(change))
                return
            progress = change.get("progress") or {}
            step = (change.get("to"), change.get("generation"), progress.get("phase"))
            if step != self._shown:
                self._shown = step
                self._output.note(change_line(change))
