"""Changes of the models' states: heard, printed, and waited for."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .arguments import check_known, row_called
from .exit_status import CliError, ExitStatus
from .terminal.output import CLEAR_LINE, LiveLine, Output, terminal_size
from .terminal.status import PHASE_WORDS, note_of, progress_text, warning_lines
from .terminal.text import clock, counted, cut, format_duration, in_a_line

if TYPE_CHECKING:
    from mlxsup.client import Client


MAX_CHANGES = 200
"""Changes that are kept for a slow reader: the latest ones."""


def state_changes(client: Client) -> Iterator[dict[str, Any]]:
    """Return the changes of state from the return of this call on, each with its time."""
    return (change for change in _changes(client) if is_step(change))


def is_step(change: dict[str, Any]) -> bool:
    """True if the state has changed, and not only how far a load is."""
    return bool(change.get("from") != change.get("to"))


class Changes:
    """All changes from now on, which can be waited for up to a time.

    The thread that hears them ends with the client.

    Args:
        client: where to hear them; this takes its one subscription.
    """

    def __init__(self, client: Client) -> None:
        self._arrived = threading.Condition()
        self._heard: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)
        self._error: Exception | None = None
        changes = _changes(client)
        hearing = threading.Thread(
            target=self._hear, args=(changes,), name="mlxsup-changes", daemon=True
        )
        hearing.start()

    def wait(self, limit_s: float | None = None) -> list[dict[str, Any]]:
        """Wait for a change, and return it and all that have arrived with it.

        Args:
            limit_s: for how long to wait at most; None: however long it takes.

        Returns:
            None of them if the time is over.

        Raises:
            RequestError, ConnectionLost: there will be none any more.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._heard or self._error, limit_s)
            heard = list(self._heard)
            self._heard.clear()
            if self._error is not None and not heard:
                raise self._error
        return heard

    def _hear(self, changes: Iterator[dict[str, Any]]) -> None:
        from mlxsup.client import ConnectionLost, RequestError

        try:
            for change in changes:
                with self._arrived:
                    self._heard.append(change)
                    self._arrived.notify_all()
        except (ConnectionLost, RequestError) as error:
            with self._arrived:
                self._error = error
                self._arrived.notify_all()


def _changes(client: Client) -> Iterator[dict[str, Any]]:
    events = client.events()
    # The daemon answers in order: once it has answered this, no change is missed.
    client.ping()
    return ({"at": time.time(), **change} for change in events)


MAX_WAITING = 1000
"""Lines that are kept for a slow reader; more are dropped and counted."""

FLUSH_LIMIT_S = 1.0


class ChangePrinter:
    """Writes on its own thread, because a pipe that is not read blocks its writer.

    Args:
        hint: what a person may do once the daemon answers.
    """

    def __init__(self, output: Output, hint: str = "") -> None:
        self._output = output
        self._hint = hint if sys.stderr.isatty() else ""
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._is_live = output.has_colour(sys.stdout) and not output.is_json
        self._has_live_line = False
        self._thread = threading.Thread(target=self._run, name="mlxsup-output", daemon=True)

    def listening(self, endpoint: str) -> None:
        """Print where the daemon answers, and to a person what to do next.

        The thread starts only now: a starting daemon blocks signals, and a thread that does not
        block them would let them end the process.
        """
        self._thread.start()
        self._put({"endpoint": endpoint, "pid": os.getpid()})

    def changed(self, change: Mapping[str, Any]) -> None:
        """Print a change of a model, that the gateway listens, or that the end is near."""
        is_model = "gateway" not in change and "stopping" not in change
        if not is_model or change.get("from") != change.get("to") or self._is_live:
            self._put(dict(change))

    def close(self) -> bool:
        """Write what waits, as long as it is read; False if a reader still holds it up."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(FLUSH_LIMIT_S)
        return not self._thread.is_alive()

    def _put(self, value: Mapping[str, Any] | None) -> None:
        try:
            self._lines.put_nowait(value)
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        try:
            while (value := self._lines.get()) is not None:
                dropped, self._dropped = self._dropped, 0
                if dropped:
                    self._output.note(f"{dropped} lines were skipped")
                self._write(value)
            self._end_live_line()
        except OSError:
            # The reader has gone, or the disk is full: the daemon continues (its log has all).
            return

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._output.is_json:
            self._output.object(value)
        elif "endpoint" in value:
            self._output.data(f"listening at {value['endpoint']} (pid {value['pid']})")
            if self._hint:
                self._output.note(self._hint)
        elif "gateway" in value:
            self._end_progress()
            self._output.data(http_lines(value["gateway"], value["pid"]))
        elif "stopping" in value:
            self._end_progress()
            self._output.note(stopping_line(value))
        elif value.get("from") == value.get("to"):
            line = cut(change_line(value, has_bar=True), terminal_size().columns - 1)
            self._output.data(f"{CLEAR_LINE}{line}", newline=False)
            self._has_live_line = True
        else:
            self._end_progress()
            self._output.data(change_line(value))
            for line in warning_lines(value["model"], value.get("warnings")):
                self._output.note(line)

    def _end_progress(self) -> None:
        """Clear the line that shows how far a load is, for what comes next."""
        if self._has_live_line:
            self._output.data(CLEAR_LINE, newline=False)
            self._has_live_line = False

    def _end_live_line(self) -> None:
        if self._has_live_line:
            self._output.data("")


def http_lines(url: str, pid: int) -> str:
    """Return where programs and browsers reach a gateway, in two lines."""
    return f"HTTP at {url}/v1 (pid {pid})\npage with a chat at {url}"


def next_commands(first: str) -> str:
    """Return what to do with a daemon that has just started; `first` is a model that writes text,
    if it has one."""
    return f"next: `mlxsup {f'chat {first}' if first else 'add OWNER/NAME'}`, `mlxsup status`"


def stopping_line(value: Mapping[str, Any]) -> str:
    """Return what a daemon that was asked to end still does, and how to hurry it."""
    count = value["stopping"]
    requests = counted(count, "running request")
    if not count:
        return "stopping: ending every process"
    if not value["limit_s"]:
        return f"stopping: cutting off {requests}"
    limit = format_duration(value["limit_s"])
    return (
        f"stopping: {requests} may take up to {limit} to finish; press Ctrl-C again to cut them off"
    )


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

    On a terminal it is one line that is gone at the end, elsewhere a line for each change. The
    thread that shows it ends with the client.
    """
    from mlxsup.client import ConnectionLost, RequestError

    if output.is_json:
        yield
        return
    line, lock, has_finished = LiveLine(output), threading.Lock(), threading.Event()
    changes = Changes(client)
    # Only now, so that no change between the two is missed.
    row = row_called(client.status(), model)

    def follow() -> None:
        if row is None or has_finished.wait(QUIET_S):
            return
        facts = {name: row.get(name) for name in ("generation", "pid", "progress")}
        standing = {"model": row["name"], "from": row["state"], "to": row["state"], **facts}
        # The command itself meets the same errors, and reports them.
        with suppress(ConnectionLost, RequestError):
            # Of what has changed in the quiet second, the latest says it all.
            heard = [{"at": time.time(), **standing}, *changes.wait(0.0)]
            latest = [change for change in heard if change.get("model") == row["name"]][-1:]
            while True:
                for change in latest:
                    phase = str((change.get("progress") or {}).get("phase"))
                    words = PHASE_WORDS.get(phase, phase)
                    with lock:
                        if has_finished.is_set():
                            return
                        step = (change.get("to"), change.get("generation"), words)
                        line.tell(change_line(change, has_bar=line.is_possible), step)
                latest = [one for one in changes.wait() if one.get("model") == row["name"]]

    threading.Thread(target=follow, name="mlxsup-progress", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            has_finished.set()
            line.clear()


Row = Mapping[str, Any]


def wait_until_ready(
    client: Client, names: Sequence[str], output: Output, *, limit_s: float | None = None
) -> dict[str, Any]:
    """Return the daemon's status once these models are READY.

    It shows each change of their states on standard error, and on a terminal how far they are.

    Args:
        client: of the daemon; this takes its one subscription.
        names: of models, or their aliases; if there are none, every model that is coming up.
        limit_s: for how long to wait at most; 0 only looks; None for no limit.

    Raises:
        CliError: one has FAILED, does not come up, or is unknown; or the time is over (124).
        RequestError, ConnectionLost: the daemon has ended.
    """
    give_up_at = None if limit_s is None else time.monotonic() + limit_s
    changes = Changes(client)
    status = client.status()
    with LiveLine(output) as line:
        pending = _pending(_chosen(status, names), is_named=bool(names))
        waiting = ", ".join(f"{row['name']} ({row['state']})" for row in pending)
        if waiting:
            line.show(f"waiting for {waiting}")
        while pending:
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            heard = changes.wait(left_s)
            if not heard:
                raise _too_late(pending, limit_s or 0.0)
            for change in heard:
                if any(change["model"] == row["name"] for row in pending):
                    if is_step(change):
                        line.remark(change_line(change))
                    else:
                        line.show(change_line(change, has_bar=True))
            status = client.status()
            pending = _pending(_chosen(status, names), is_named=bool(names))
    return status


def _chosen(status: Mapping[str, Any], names: Sequence[str]) -> list[Row]:
    if not names:
        return list(status["models"])
    return [check_known(status, name) for name in names]


def _pending(rows: Sequence[Row], *, is_named: bool) -> list[Row]:
    """Return those that are not READY yet but may become so by themselves."""
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
                f"{name} is {row['state']} and is not being loaded",
                code="not_loading",
                hint=f"load it with `mlxsup load {name}`",
            )
    return [row for row in rows if row["wanted"] == "up" and row["state"] != "READY"]


def _too_late(pending: Sequence[Row], limit_s: float) -> CliError:
    said = [f"{row['name']} is {row['state']}" for row in pending]
    notes = [note_of(row, time.time()) for row in pending]
    parts = [f"{what} ({note})" if note else what for what, note in zip(said, notes, strict=True)]
    after = f" after {format_duration(limit_s)}" if limit_s else ""
    return CliError(
        f"not READY{after}: {', '.join(parts)}",
        code="timeout",
        hint="use a longer --timeout, or see `mlxsup status`",
        status=ExitStatus.TIMED_OUT,
    )
