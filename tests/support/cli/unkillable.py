"""Processes that SIGKILL does not end, without root: a supervisor whose kill does nothing."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from support.cli.scripted_daemon import ScriptedDaemon

SPAWNER = """
import os
signal_group = os.killpg
def powerless(pid, number):
    listed = Path({listed!r})
    if not (listed.exists() and str(pid) in listed.read_text().split()):
        signal_group(pid, number)
os.killpg = powerless
"""

ORPHAN = """
import sys
from mlxsup.worker import __main__ as worker
worker.die_with_parent = lambda: None
worker.watch_pipe = lambda descriptor: None
worker.leave(worker.main([]))
"""
"""A worker that outlives its supervisor, as one that cannot be ended does."""


class Unkillable(ScriptedDaemon):
    """A daemon on whose signals the processes of a list do not end.

    `hold` puts one there and `let_go` ends it. It should be stuck by a fault of the fake engine, so
    that it hears no message either.
    """

    def __init__(
        self, models: dict[str, dict[str, Any]], supervisor: dict[str, Any] | None = None
    ) -> None:
        super().__init__(models, supervisor)
        self._listed = Path(self.folder) / "unkillable"
        self._held: list[int] = []
        self.scripted(
            SPAWNER.format(listed=os.fspath(self._listed)), argv=[sys.executable, "-c", ORPHAN]
        )

    def hold(self, pid: int) -> None:
        """From here on this process cannot be ended by its supervisor."""
        self._held.append(pid)
        self._listed.write_text(" ".join(map(str, self._held)))

    def let_go(self, pid: int) -> None:
        """It ends."""
        self._held.remove(pid)
        os.kill(pid, signal.SIGKILL)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in list(self._held):
            self.let_go(pid)
        super().__exit__(kind, error, trace)
