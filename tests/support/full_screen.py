"""A terminal whose command draws on all of it, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any

from .cli import COLUMNS, ESCAPE, ROWS, Terminal

OTHER_SCREEN = re.compile(r"\x1b\[\?1049h.*?\x1b\[\?1049l", re.DOTALL)
HOME = "\x1b[H"


class FullScreen(Terminal):
    """A command that shows one picture after the other.

    Args:
        arguments: of mlxsup.
        columns: of the terminal.
        rows: likewise.
        variables: added to the environment.
    """

    def __init__(
        self, *arguments: str, columns: int = COLUMNS, rows: int = ROWS, **variables: str
    ) -> None:
        self.size = (columns, rows)
        super().__init__(*arguments, COLUMNS=str(columns), LINES=str(rows), **variables)
        self.mode_before = fresh_mode()
        self._used = 0

    @property
    def mode(self) -> list[Any]:
        """How the terminal treats what is typed."""
        return termios.tcgetattr(self._leader)

    def set_mode(self, mode: list[Any]) -> None:
        """Treats what is typed otherwise, as another program would that uses the terminal."""
        termios.tcsetattr(self._leader, termios.TCSANOW, mode)

    def resize(self, columns: int, rows: int) -> None:
        """Gives the window another size; only pictures of that size count from now on."""
        self.size = (columns, rows)
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, size)

    def picture(self, part: str) -> list[str]:
        """The lines of a picture; none if it is not whole yet, or of another size."""
        columns, rows = self.size
        lines = ESCAPE.sub("", part).replace("\r", "").split("\n")
        is_whole = len(lines) == rows and all(len(line) == columns for line in lines)
        return [line.rstrip() for line in lines] if is_whole else []

    def wait_for(self, *words: str, without: str | None = None) -> list[str]:
        """The next picture with all these words, and none with another one; the words that this
        was called with before are looked for in pictures after that one."""

        def is_there(lines: list[str]) -> bool:
            text = "\n".join(lines)
            return all(word in text for word in words) and (without is None or without not in text)

        return self.wait_until(is_there)

    def wait_until(self, is_there: Callable[[list[str]], bool]) -> list[str]:
        """The first picture that is as wanted, among those that were not looked at before."""
        while True:
            parts = self.seen.split(HOME)
            for number in range(self._used, len(parts)):
                if lines := self.picture(parts[number]):
                    self._used = number + 1
                    if is_there(lines):
                        return lines
            self.read_more()

    def check_nothing_left(self, *, but: str = "") -> None:
        """Fails unless the terminal is what it was, with nothing on it but this text."""
        assert self.mode == self.mode_before
        assert self.seen.count("\x1b[?1049h") == self.seen.count("\x1b[?1049l") > 0
        assert self.seen.rfind("\x1b[?25h") > self.seen.rfind("\x1b[?25l")
        left = ESCAPE.sub("", OTHER_SCREEN.sub("", self.seen)).strip()
        assert left == but


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
    """The mode of a terminal that nobody has used yet."""
    leader, follower = pty.openpty()
    mode = termios.tcgetattr(leader)
    os.close(leader)
    os.close(follower)
    return mode
