"""A terminal whose command draws on all of it, and what it leaves behind."""

from __future__ import annotations

import os
import pty
import shutil
import sys
import termios
from typing import Any

from support.cli.cli import Terminal


class FullScreen(Terminal):
    """A command that takes the terminal, and has to give it back."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        super().__init__(*arguments, **variables)
        self.mode_before = fresh_mode()

    @property
    def mode(self) -> list[Any]:
        """How the terminal treats what is typed."""
        return termios.tcgetattr(self._leader)

    def check_given_back(self) -> None:
        """Fail unless the terminal is what it was."""
        assert self.mode == self.mode_before
        for taken, given in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
            assert self.seen.rfind(given) > self.seen.rfind(taken) >= 0
        assert "Traceback" not in self.seen


class Script(FullScreen):
    """Python code on a terminal."""

    def command_line(self, arguments: tuple[str, ...]) -> list[str]:
        """See `Terminal.command_line`."""
        return [sys.executable, "-c", *arguments]


class Shell(FullScreen):
    """A shell with job control."""

    def command_line(self, arguments: tuple[str, ...]) -> list[str]:
        """See `Terminal.command_line`."""
        return [shutil.which("dash") or "sh", "-i", *arguments]


def fresh_mode() -> list[Any]:
    """Return the mode of a terminal that no program has used yet."""
    leader, follower = pty.openpty()
    mode = termios.tcgetattr(leader)
    os.close(leader)
    os.close(follower)
    return mode
