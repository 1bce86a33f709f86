"""Processes that nothing ends: those in a frozen cgroup of version 1, which needs root."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .eventually import eventually

ROOT = Path("/sys/fs/cgroup/freezer")


def is_there() -> bool:
    """Whether this process may freeze others: SIGKILL ends them only when they are thawed."""
    return (ROOT / "tasks").exists() and os.access(ROOT, os.W_OK)


class Freezer:
    """A cgroup for one process."""

    def __init__(self) -> None:
        self._folder = ROOT / f"mlxsup-{os.getpid()}"
        self._folder.mkdir()
        self._held: list[int] = []

    def hold(self, pid: int) -> None:
        """From here on nothing ends this process; it waits in the kernel, in state D."""
        self._held.append(pid)
        (self._folder / "cgroup.procs").write_text(str(pid))
        (self._folder / "freezer.state").write_text("FROZEN")
        state = self._folder / "freezer.state"
        eventually(lambda: state.read_text().strip() == "FROZEN")

    def close(self) -> None:
        """Ends them all."""
        (self._folder / "freezer.state").write_text("THAWED")
        for pid in self._held:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        eventually(lambda: not (self._folder / "cgroup.procs").read_text())
        self._folder.rmdir()
