"""Prints for `mlxsup start` where the daemon answers, each change, and that its end is near."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any

from .changes import change_line
from .terminal.output import LiveLine, Output
from .terminal.status import stopping_words, warning_lines

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
        self._line = LiveLine(output)
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
        if not is_model or change.get("from") != change.get("to") or self._line.is_possible:
            self._put(dict(change))

    def close(self) -> bool:
        """Write what waits, as long as it is read; False if a reader still holds it up."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=FLUSH_LIMIT_S)  # the last one is never dropped
            except queue.Full:
                return False
            self._thread.join(FLUSH_LIMIT_S)
        return not self._thread.is_alive()

    def _put(self, value: Mapping[str, Any]) -> None:
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
            self._line.clear()
        except OSError:
            # The reader has gone, or the disk is full: the daemon continues (its log has all).
            return

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._output.is_json:
            self._output.object(value)
            return
        if "model" in value and value.get("from") == value.get("to"):
            self._line.show(change_line(value, has_bar=True))
            return
        self._line.clear()
        if "endpoint" in value:
            self._output.data(f"listening at {value['endpoint']} (pid {value['pid']})")
            if self._hint:
                self._output.note(self._hint)
        elif "gateway" in value:
            self._output.data(http_lines(value["gateway"], value["pid"]))
        elif "stopping" in value:
            words = stopping_words(value["stopping"], value["limit_s"], "press Ctrl-C again")
            self._output.note(f"stopping: {words}")
        else:
            self._output.data(change_line(value))
            for line in warning_lines(value["model"], value.get("warnings")):
                self._output.note(line)


def http_lines(url: str, pid: int) -> str:
    """Return where programs and browsers reach a gateway, in two lines."""
    return f"HTTP at {url}/v1 (pid {pid})\npage with a chat at {url}"


def next_commands(first: str) -> str:
    """Return what to do with a daemon that has just started; `first` is a model that writes text,
    if it has one."""
    return f"next: `mlxsup {f'chat {first}' if first else 'add OWNER/NAME'}`, `mlxsup status`"
