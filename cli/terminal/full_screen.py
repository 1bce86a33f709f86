"""The whole terminal for one command: its other screen, its keys one by one, and its signals.

What a terminal was like before is what it is like afterwards, whatever ends the command.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from .columns import in_a_line
from .key_reader import KeyReader
from .writer import beneath, for_terminal

if TYPE_CHECKING:
    from rich.live import Live

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOPPING = frozenset({signal.SIGTSTP, signal.SIGCONT})
HANDLED = (*ENDING, *STOPPING, signal.SIGWINCH)
READ_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """Why a wait is over; nothing of it if only `wake` was called or the size has changed.

    Attributes:
        keys: what was typed, as `KeyReader` names it.
        ended_by: the signal that asks for the end; SIGHUP also if the terminal is gone.
    """

    keys: Sequence[str] = ()
    ended_by: int | None = None


class FullScreen:
    """Has the terminal from `with` to its end. Signals interrupt nothing meanwhile: they end a
    wait. Ctrl-Z gives the terminal back until the shell continues the command.

    Only for the main thread, and if standard output is a terminal; without a keyboard there are
    no keys.

    Args:
        has_colour: whether to show styles.
    """

    def __init__(self, *, has_colour: bool) -> None:
        self._has_colour = has_colour
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._keys = KeyReader()
        self._mode: list[Any] | None = None
        self._live: Live | None = None
        self._has_continued = False
        self._undo = ExitStack()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._lock = threading.Lock()
        self._is_open = True

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._close_pipe)
            before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
            undo.callback(signal.set_wakeup_fd, before)
            for number in HANDLED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    undo.callback(signal.signal, number, signal.signal(number, _noted))
            if self._keyboard is not None:
                self._mode = termios.tcgetattr(self._keyboard)
            undo.callback(self._give_back)
            self._take()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    @property
    def size(self) -> os.terminal_size:
        """Columns and rows of the terminal now."""
        return shutil.get_terminal_size()

    def show(self, lines: Sequence[str]) -> None:
        """Replaces what is on the screen.

        Args:
            lines: with styles as `Output` makes them; what does not fit is cut.
        """
        from rich.text import Text

        if self._live is not None:
            self._live.console.size = self.size
            shown = "\n".join(for_terminal(in_a_line(line)) for line in lines)
            text = Text.from_ansi(shown, no_wrap=True, overflow="crop")
            self._live.update(text, refresh=True)

    def wake(self) -> None:
        """Ends a wait; any thread may call it, even when the screen has been left."""
        with self._lock, suppress(BlockingIOError):
            # If the pipe is full, the wait has been ended already.
            if self._is_open:
                os.write(self._waker, b"\0")

    def wait(self) -> Woken:
        """Returns once a key was typed, the size has changed, or somebody wants it."""
        descriptors = [self._woken]
        if self._keyboard is not None:
            descriptors.append(self._keyboard)
        ready, _, _ = select.select(descriptors, [], [])
        signals = self._signals()
        ended_by = next((number for number in ENDING if number in signals), None)
        if ended_by is not None:
            return Woken(ended_by=ended_by)
        if signal.SIGCONT in signals:
            self._continue()
        if signal.SIGTSTP in signals:
            self._suspend()
        if signals & STOPPING or self._keyboard is None or self._keyboard not in ready:
            # What was typed before a stop is gone.
            return Woken()
        return self._read(self._keyboard)

    def _read(self, keyboard: int) -> Woken:
        try:
            block = os.read(keyboard, READ_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            block = b""
        # Nothing: its window was closed, or the line to it was lost.
        return Woken(keys=self._keys.feed(block)) if block else Woken(ended_by=signal.SIGHUP)

    def _close_pipe(self) -> None:
        with self._lock:
            self._is_open = False
            os.close(self._woken)
            os.close(self._waker)

    def _signals(self) -> frozenset[int]:
        """Those that have come since the last time."""
        try:
            return frozenset(os.read(self._woken, READ_BYTES))
        except BlockingIOError:
            return frozenset()

    def _suspend(self) -> None:
        """Stops the process, as Ctrl-Z does with any other."""
        self._give_back()
        noted = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, noted)
        self._take()
        self._has_continued = True

    def _continue(self) -> None:
        """The shell has used the terminal, even if the process was stopped without notice."""
        if not self._has_continued:
            self._give_back()
            self._take()
        self._has_continued = False

    def _take(self) -> None:
        """Makes the terminal ours."""
        from rich.console import Console
        from rich.live import Live

        if self._keyboard is not None:
            keyboard = self._keyboard
            _uninterrupted(lambda: tty.setcbreak(keyboard, termios.TCSANOW))
        console = Console(
            file=beneath(sys.stdout),
            force_terminal=True,
            force_interactive=True,
            no_color=not self._has_colour,
            legacy_windows=False,
        )
        console.size = self.size
        self._live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _give_back(self) -> None:
        """Makes the terminal what it was."""
        # What is written to a terminal that is gone fails, and need not be undone.
        with suppress(OSError):
            if self._live is not None:
                self._live.stop()
        self._live = None
        if self._keyboard is not None and self._mode is not None:
            keyboard, mode = self._keyboard, self._mode
            with suppress(termios.error):
                # What was typed for this command must not reach the shell.
                termios.tcflush(keyboard, termios.TCIFLUSH)
                _uninterrupted(lambda: termios.tcsetattr(keyboard, termios.TCSANOW, mode))


def _uninterrupted(change: Callable[[], None]) -> None:
    """Changes the mode of a terminal, although a process in the background is stopped over it and
    the signal that continues it interrupts the change."""
    while True:
        try:
            change()
        except termios.error as error:
            if error.args[0] != errno.EINTR:
                raise
        else:
            return


def _noted(number: int, frame: FrameType | None) -> None:
    """The byte that `set_wakeup_fd` writes is what matters."""
