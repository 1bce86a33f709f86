"""Keeps a Mac awake while a request, a load or a download is under way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from .core.status import Outline
from .logs import DaemonLog

CAFFEINATE = "/usr/bin/caffeinate"

KEPT_LOOKS = 30
"""The machine is kept awake for this many idle looks, so that not each request costs a process."""


def awake_argv(platform: str, pid: int) -> list[str]:
    """Return the command that keeps the machine awake until it or the process `pid` ends; empty
    if mlxsup knows none for the platform (as in `sys.platform`)."""
    return [CAFFEINATE, "-i", "-w", str(pid)] if platform == "darwin" else []


class SleepGuard:
    """`prevent_sleep`: holds the command of `awake_argv` while the daemon is busy.

    Once that is ended, the machine sleeps after its own idle time.

    Args:
        mode: "off" or "busy".
        log: the daemon's log.
        argv: the command; None: what the platform has.
    """

    def __init__(self, mode: str, log: DaemonLog, argv: Sequence[str] | None = None) -> None:
        self._log = log
        self._argv = list(awake_argv(sys.platform, os.getpid()) if argv is None else argv)
        self._process: subprocess.Popen[bytes] | None = None
        self._idle_looks = 0
        self._is_on = mode == "busy"
        if self._is_on and not self._argv:
            self._refuse("only a Mac has caffeinate")

    def pulse(self, outline: Outline) -> None:
        """Begin or end to keep the machine awake; called every second."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None  # a user has ended it
        self._idle_looks = 0 if outline.is_busy else self._idle_looks + 1
        if self._idle_looks > KEPT_LOOKS:
            self.close()
        elif outline.is_busy and self._is_on and self._process is None:
            self._hold()

    def close(self) -> None:
        """Let the machine sleep."""
        if self._process is not None:
            self._process.kill()  # it has nothing to finish, so it ends at once
            self._process.wait()
            self._process = None

    def _hold(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._refuse(error.strerror or "it cannot be started")

    def _refuse(self, cause: str) -> None:
        self._log.write("warning", "sleep not prevented", cause=cause)
        self._is_on = False
