"""The command line as a user runs it: in a pipe, or on a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import psutil

from support.daemon import warm
from support.eventually import eventually

TIME_LIMIT_S = 120.0
COLUMNS = 80
ROWS = 24
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""An engine that a test has run in this process may have set these."""

Raised = type[BaseException]
"""A separate name, because `Terminal` has a method `type`."""

PROMPT = "\x1b[?2004h"
"""Written once when a chat begins to read keys: pasted text is to be marked."""

ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[@-_])")


def command(*arguments: str) -> list[str]:
    """The command line of this environment's mlxsup."""
    return [sys.executable, "-m", "mlxsup.cli", *arguments]


def environment(**values: str) -> dict[str, str]:
    """This process's, without what would change how mlxsup speaks or whom it asks."""
    dropped = ("MLXSUP", "_MLXSUP", "NO_COLOR", "COLUMNS", "LINES", "XDG_CONFIG_HOME", *OFFLINE)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | values


def run_cli(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its streams are no terminal."""
    return warm.run_text(
        command(*arguments),
        stdin=stdin,
        environment=environment(**variables),
        timeout_s=TIME_LIMIT_S,
    )


def check_plain(text: str) -> None:
    """Fails if there is an escape byte, or anything drawn or redrawn, or a traceback."""
    assert "\x1b" not in text
    assert "\r" not in text
    assert not re.search("[\u2500-\u259f\u2800-\u28ff]", text)
    assert "Traceback" not in text


class Piped:
    """A command that follows something, in pipes, until it is interrupted.

    Attributes:
        stdout: the end of the pipe from which its output is read.
    """

    def __init__(self, *arguments: str, **variables: str) -> None:
        out, write_out = os.pipe()
        err, write_err = os.pipe()
        with (
            open(os.devnull) as nothing,
            open(write_out, "w") as output,
            open(write_err, "w") as errors,
        ):
            streams = (nothing, output, errors)
            self.process = warm.start(command(*arguments), streams, environment(**variables))
        self.stdout, self._stderr = os.fdopen(out), os.fdopen(err)

    def line(self) -> str:
        """The next line of standard output."""
        return self.stdout.readline()

    def has_output(self) -> bool:
        """Whether there is more on standard output; asked before anything but whole reads."""
        return bool(select.select([self.stdout], [], [], 0)[0])

    def note(self) -> str:
        """The next line of standard error."""
        return self._stderr.readline()

    def interrupt(self) -> tuple[int, str, str]:
        """Ctrl-C; the exit code and what was not read yet."""
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> tuple[int, str, str]:
        """Waits for the end; the exit code and what was not read yet."""
        limit = threading.Timer(TIME_LIMIT_S, self.process.kill)
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.append(self._stderr.read()))
        limit.start()
        reading.start()
        out = self.stdout.read()
        reading.join()
        limit.cancel()
        limit.join()
        return self.process.wait(TIME_LIMIT_S), out, errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.stdout.close()
        self._stderr.close()


class Terminal:
    """A command on a terminal, of 80 columns unless the test says otherwise.

    Args:
        arguments: of mlxsup.
        variables: added to the environment, but for COLUMNS and LINES, which are the size of the
            terminal.
    """

    def __init__(self, *arguments: str, **variables: str) -> None:
        columns = int(variables.pop("COLUMNS", COLUMNS))
        rows = int(variables.pop("LINES", ROWS))
        self._leader, follower = pty.openpty()
        self._is_there = True
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.seen = ""
        self._read_until = 0
        with open(follower, "r+b", buffering=0) as stream:
            self.process = warm.start(
                self.command_line(arguments),
                (stream, stream, stream),
                environment(**({"TERM": "xterm"} | variables)),
            )

    def command_line(self, arguments: tuple[str, ...]) -> list[str]:
        """What is started."""
        return command(*arguments)

    def type(self, text: str) -> None:
        """Presses these keys."""
        os.write(self._leader, text.encode())

    def expect(self, text: str, timeout_s: float = TIME_LIMIT_S) -> str:
        """Waits until the text was written after what was expected before; gives all up to it."""
        until = time.monotonic() + timeout_s
        while (place := self.seen.find(text, self._read_until)) < 0:
            assert self._read(until), (
                f"no {text!r} after {self._read_until} in {self.seen!r}, exit {self.process.poll()}"
            )
        found = self.seen[self._read_until : place]
        self._read_until = place + len(text)
        return found

    def read_more(self) -> None:
        """Waits until the command writes something."""
        assert self._read(time.monotonic() + TIME_LIMIT_S), (
            f"nothing after {self.seen!r}, exit {self.process.poll()}"
        )

    def interrupt(self) -> None:
        """Presses Ctrl-C while the command waits for a key.

        As fast as no person is, readline would miss it: a signal that comes while it still draws
        a key waits for the next one.
        """
        shown = psutil.Process(self.process.pid)
        eventually(lambda: shown.status() == psutil.STATUS_SLEEPING)
        self.type("\x03")

    def hang_up(self) -> None:
        """The terminal is gone: its window was closed, or the line to it was lost."""
        self._is_there = False
        os.close(self._leader)

    def end(self) -> str:
        """Reads to the end; gives everything that was ever written."""
        until = time.monotonic() + TIME_LIMIT_S
        while self._read(until):
            pass
        self.process.wait(TIME_LIMIT_S)
        return self.seen

    @property
    def rest(self) -> str:
        """What was written after what was expected."""
        return self.seen[self._read_until :]

    def _read(self, until: float) -> bool:
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([self._leader], [], [], left_s)[0]:
            return False
        try:
            block = os.read(self._leader, 65536)
        except OSError:
            # Linux says so when the last process has closed the terminal.
            return False
        self.seen += block.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: Raised | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        if self._is_there:
            self.hang_up()


def on_terminal(arguments: Sequence[str], **variables: str) -> str:
    """All that a command writes to a terminal."""
    with Terminal(*arguments, **variables) as terminal:
        return terminal.end()
