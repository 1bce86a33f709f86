"""Shows what a model does while a command waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..model_rows import row_called
from .change_printer import change_line
from .live_line import LiveLine
from .output import Output

if TYPE_CHECKING:
    from mlxsup.client import Client

QUIET_S = 1.0
"""What takes no longer than this needs no explanation."""


@contextmanager
def progress_shown(client: Client, model: str, output: Output) -> Iterator[None]:
    """Shows on standard error, after the first second, how far the model has come.

    On a terminal it is one line that is gone at the end, elsewhere a line for each change. The
    thread that reads the changes ends with the client.
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
    """Keeps the latest change of one model, and shows it once it is time.

    Args:
        client: where to read the changes.
        model: the model that the command waits for.
        output: how to write output.
    """

    def __init__(self, client: Client, model: str, output: Output) -> None:
        self._model = model
        self._output = output
        self._line = LiveLine(output)
        self._lock = threading.Lock()
        self._latest: Mapping[str, Any] | None = None
        self._is_told = False
        self._has_finished = False
        self._shown: tuple[object, ...] = ()
        self._events = client.events()
        self._latest = _standing(client.status(), model)
        if self._latest is not None:
            self._model = self._latest["model"]  # and not an alias
        self._timer = threading.Timer(QUIET_S, self._begin)
        self._timer.daemon = True
        self._timer.start()
        threading.Thread(target=self._read, name="mlxsup-progress", daemon=True).start()

    def finish(self) -> None:
        """Shows nothing from now on."""
        self._timer.cancel()
        with self._lock:
            self._has_finished = True
            self._line.clear()

    def _begin(self) -> None:
        with self._lock:
            self._is_told = True
            self._show()

    def _read(self) -> None:
        from mlxsup.client import ConnectionLost, RequestError

        try:
            for change in self._events:
                if change.get("model") == self._model:
                    with self._lock:
                        self._latest = {"at": time.time(), **change}
                        self._show()
        except (ConnectionLost, RequestError):
            # The command itself meets the same error, and reports it.
            return

    def _show(self) -> None:
        change = self._latest
        if not self._is_told or self._has_finished or change is None:
            return
        if self._line.is_possible:
            self._line.show(change_line(change))
            return
        progress = change.get("progress") or {}
        step = (change.get("to"), change.get("generation"), progress.get("phase"))
        if step != self._shown:
            self._shown = step
            self._output.note(change_line(change))


def _standing(status: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    """The model's state before anything changes, as a change that changed nothing."""
    row = row_called(status, model)
    if row is None:
        return None
    facts = {name: row.get(name) for name in ("generation", "pid", "progress")}
    state = {"from": row["state"], "to": row["state"]}
    return {"at": time.time(), "model": row["name"], **state, **facts}
