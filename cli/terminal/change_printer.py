"""Prints what a daemon in the foreground does, without ever holding up the daemon."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from .output import CLEAR_LINE, Output
from .status import progress_text, warning_lines
from .text import format_duration, in_a_line

MAX_WAITING = 1000
"""How many lines wait for a reader that has stopped reading; more are dropped and counted."""

FLUSH_LIMIT_S = 1.0


class ChangePrinter:
    """Writes on its own thread, because a pipe that is not read blocks its writer.

    Args:
        output: how to write.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._is_live = output.has_colour(sys.stdout) and not output.is_json
        self._has_live_line = False
        self._thread = threading.Thread(target=self._run, name="mlxsup-output", daemon=True)

    def listening(self, endpoint: str) -> None:
        """Print where the daemon answers.

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
                    self._output.note(f"{dropped} lines were left out")
                self._write(value)
            self._end_live_line()
        except OSError:
            # Nobody reads any longer, or the disk is full: the daemon continues (its log has all).
            return

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._output.is_json:
            self._output.object(value)
        elif "endpoint" in value:
            self._output.data(f"listening at {value['endpoint']} (pid {value['pid']})")
        elif "gateway" in value:
            self._end_progress()
            self._output.data(f"HTTP at {value['gateway']} (pid {value['pid']})")
        elif "stopping" in value:
            self._end_progress()
            self._output.note(stopping_line(value))
        elif value.get("from") == value.get("to"):
            self._output.data(f"{CLEAR_LINE}{change_line(value)}", newline=False)
            self._has_live_line = True
        else:
            self._end_progress()
            self._output.data(change_line(value))
            for line in warning_lines(value.get("model"), value.get("warnings")):
                self._output.note(line)

    def _end_progress(self) -> None:
        """Clear the line that shows how far a load is, for what comes next."""
        if self._has_live_line:
            self._output.data(CLEAR_LINE, newline=False)
            self._has_live_line = False

    def _end_live_line(self) -> None:
        if self._has_live_line:
            self._output.data("")


def stopping_line(value: Mapping[str, Any]) -> str:
    """Return what a daemon that was asked to end still does, and how to hurry it."""
    count = value["stopping"]
    requests = f"{count} running request{'' if count == 1 else 's'}"
    if not count:
        return "stopping: ending every process"
    if not value["limit_s"]:
        return f"stopping: cutting off {requests}"
    limit = format_duration(value["limit_s"])
    return f"stopping: {requests} may take up to {limit} to finish; Ctrl-C again cuts them off"


def change_line(change: Mapping[str, Any]) -> str:
    """Return `12:03:04Z smollm2: LOADING → READY (generation 1, pid 4711)`, in UTC."""
    at = time.strftime("%H:%M:%SZ", time.gmtime(change.get("at") or time.time()))
    before, after = change.get("from"), change.get("to")
    states = str(after) if before in (None, after) else f"{before} → {after}"
    facts = []
    if change.get("pid"):
        facts.append(f"generation {change.get('generation')}, pid {change['pid']}")
    progress = progress_text(change.get("progress"))
    note = str(change.get("note") or "")
    if before == after and progress and not note:
        facts.append(progress)
    if note:
        facts.append(note)
    said = f" ({', '.join(facts)})" if facts else ""
    return in_a_line(f"{at} {change.get('model')}: {states}{said}")
