"""Waits until models are READY."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .connection import unknown_model
from .exit_status import CliError, ExitStatus
from .model_rows import row_called
from .terminal.change_printer import change_line
from .terminal.live_line import LiveLine
from .terminal.model_row import note_of
from .terminal.output import Output
from .terminal.quantities import format_duration

if TYPE_CHECKING:
    from mlxsup.client import Client

Row = Mapping[str, Any]


def wait_until_ready(
    client: Client, names: Sequence[str], output: Output, *, limit_s: float | None = None
) -> dict[str, Any]:
    """Returns the daemon's status once these models are READY.

    Shows each change of their states on standard error, and on a terminal how far loads have come.

    Args:
        client: of the daemon; this takes its one subscription.
        names: of models, or their aliases; if there are none, every model that is coming up.
        output: how to write output.
        limit_s: for how long to wait at most; 0 only looks; None for no limit.

    Raises:
        CliError: one has FAILED, does not come up, or is unknown; or the time is over (124).
        RequestError, ConnectionLost: the daemon has ended.
    """
    give_up_at = None if limit_s is None else time.monotonic() + limit_s
    news = _News(client)
    with LiveLine(output) as line:
        while True:
            status = client.status()
            pending = _pending(_chosen(status, names), is_named=bool(names))
            if not pending:
                return status
            for change in news.until(give_up_at):
                if any(change["model"] == row["name"] for row in pending):
                    _show(change, line, output)
            if news.is_late:
                raise _late(pending, limit_s or 0.0)


class _News:
    """The changes of models, which can be waited for up to a time.

    Args:
        client: where to read them.
    """

    def __init__(self, client: Client) -> None:
        self.is_late = False
        # Bounded by the daemon: it drops a client that does not read.
        self._news: queue.SimpleQueue[Mapping[str, Any] | Exception] = queue.SimpleQueue()
        self._events = client.events()
        # The daemon answers in order: once it has answered this, no change is missed.
        client.ping()
        threading.Thread(target=self._read, name="mlxsup-news", daemon=True).start()

    def until(self, give_up_at: float | None) -> Iterator[Mapping[str, Any]]:
        """Waits for a change, and gives it and all that have arrived with it.

        Args:
            give_up_at: until when, in monotonic seconds; None: however long it takes.

        Raises:
            RequestError, ConnectionLost: there will be none any more.
        """
        try:
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            first = self._news.get(timeout=left_s)
        except queue.Empty:
            self.is_late = True
            return
        yield _change(first)
        while not self._news.empty():
            yield _change(self._news.get())

    def _read(self) -> None:
        from mlxsup.client import ConnectionLost, RequestError

        try:
            for change in self._events:
                self._news.put({"at": time.time(), **change})
        except (ConnectionLost, RequestError) as error:
            self._news.put(error)


def _change(item: Mapping[str, Any] | Exception) -> Mapping[str, Any]:
    if isinstance(item, Exception):
        raise item
    return item


def _chosen(status: Mapping[str, Any], names: Sequence[str]) -> list[Row]:
    if not names:
        return list(status["models"])
    rows: list[Row] = []
    for name in names:
        row = row_called(status, name)
        if row is None:
            raise unknown_model(name, [one["name"] for one in status["models"]])
        rows.append(row)
    return rows


def _pending(rows: Sequence[Row], *, is_named: bool) -> list[Row]:
    """Those that are not READY yet but may become so by themselves."""
    for row in rows:
        name = row["name"]
        if row["state"] == "FAILED":
            raise CliError(
                f"{name} has FAILED: {note_of(row, time.time())}",
                code="model_failed",
                hint=f"see `mlxsup logs {name}`, then `mlxsup restart {name}`",
            )
        if is_named and row["wanted"] != "up":
            raise CliError(
                f"{name} is {row['state']}, and nothing loads it",
                code="not_loading",
                hint=f"load it with `mlxsup load {name}`",
            )
    return [row for row in rows if row["wanted"] == "up" and row["state"] != "READY"]


def _show(change: Mapping[str, Any], line: LiveLine, output: Output) -> None:
    if change["from"] != change["to"]:
        line.remark(change_line(change))
    else:
        line.show(change_line(change))


def _late(pending: Sequence[Row], limit_s: float) -> CliError:
    said = [f"{row['name']} is {row['state']}" for row in pending]
    notes = [note_of(row, time.time()) for row in pending]
    parts = [f"{what} ({note})" if note else what for what, note in zip(said, notes, strict=True)]
    after = f" after {format_duration(limit_s)}" if limit_s else ""
    return CliError(
        f"not READY{after}: {', '.join(parts)}",
        code="timeout",
        hint="wait longer, or see `mlxsup status`",
        status=ExitStatus.TIMED_OUT,
    )
