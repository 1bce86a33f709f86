"""One worker's process: spawned, read from, signalled, and waited for without polling."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from signal import SIGKILL, Signals

from mlxsup.protocol.launch import child_environment

from .exit_watch import watch_exit

READ_BYTES = 64 * 1024
READ_SLICE_S = 0.01
READ_SLICE_BYTES = 1024 * 1024
"""A process that prints faster than this waits for the rest of the slice: reading one process's
output must not take the event loop from the others."""


class WorkerProcess:
    """A process in its own group, with both its outputs in one pipe.

    Its standard input stays open until `close`: EOF on it means to the worker that its supervisor
    has died. Processes that it started and left in its group are killed when it exits.

    Attributes:
        exited: done with the return code as soon as the process has been reaped, whoever still
            holds its pipes.
        output_ended: set when the output was read to its end.

    Args:
        process: just started, with pipes.
        on_output: called with each piece of the output.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], on_output: Callable[[bytes], None]
    ) -> None:
        self._process = process
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.output_ended = asyncio.Event()
        self._slice_began_at = -math.inf  # a slice begins with the first piece
        self._resume: asyncio.TimerHandle | None = None
        assert process.stdout is not None
        self._output = process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._stop_watching = watch_exit(process.pid, self._on_exit)
        self._loop.add_reader(self._output, self._read)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        first_line: bytes,
        on_output: Callable[[bytes], None],
        *,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Starts a process and writes one line to its standard input.

        Args:
            argv: its command.
            first_line: shorter than a pipe is wide; empty for none yet.
            on_output: called with each piece of the output.
            inherited: descriptors that it gets, too.
            environment: its variables; None: those of this process that are no secrets.

        Raises:
            OSError: it cannot be started.
        """
        if environment is None:
            environment = child_environment(os.environ)
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            process_group=0,
            bufsize=0,
            pass_fds=inherited,
        )
        try:
            if first_line:
                _give_line(process, first_line)
            return cls(process, on_output)
        except OSError:
            process.kill()
            process.wait()
            raise

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def take_line(self, line: bytes, on_output: Callable[[bytes], None]) -> bool:
        """Gives a process that was started without a line its line, and its output a new reader.

        Returns:
            Whether it is there to read it; if not, nothing has changed.

        Raises:
            OSError: the line is longer than a pipe takes.
        """
        if self.exited.done() or not _give_line(self._process, line):
            return False
        self._on_output = on_output
        return True

    def signal(self, number: Signals) -> None:
        """Signals the group; not after the exit, because the id may be another's by then."""
        if self._process.returncode is None:
            self._signal_group(number)

    def close(self) -> None:
        """Closes the pipes, whoever holds their other ends, and kills whatever still runs."""
        self.signal(SIGKILL)
        self.close_pipes()

    def close_pipes(self) -> None:
        """Reads nothing from it from now on; its exit is still waited for."""
        if self._resume is not None:
            self._resume.cancel()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._loop.remove_reader(self._output)
            self._process.stdout.close()
            self._process.stdin.close()
        self.output_ended.set()

    def forget(self) -> None:
        """Leaves a process that cannot be ended to the system, and no longer waits for it."""
        if self._process.returncode is None:
            self._stop_watching()

    # ------------------------------------------------------------ called by the event loop

    def _read(self) -> None:
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output)
            self.output_ended.set()
            return
        now = self._loop.time()
        if now - self._slice_began_at >= READ_SLICE_S:
            self._slice_began_at, self._slice_bytes = now, 0
        self._slice_bytes += len(data)
        if self._slice_bytes >= READ_SLICE_BYTES:
            self._loop.remove_reader(self._output)
            ends_at = self._slice_began_at + READ_SLICE_S
            self._resume = self._loop.call_at(ends_at, self._read_on)
        self._on_output(data)

    def _read_on(self) -> None:
        self._resume = None
        self._loop.add_reader(self._output, self._read)

    def _on_exit(self) -> None:
        """It has exited. Until it is reaped, its id belongs only to it and its group."""
        self._signal_group(SIGKILL)
        code = self._process.wait()
        if not self.exited.done():
            self.exited.set_result(code)

    def _signal_group(self, number: Signals) -> None:
        # Dead but not reaped: nothing is left to signal, which macOS reports as "not permitted".
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _give_line(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """Whether anybody was there to read it: a process may have ended, as is about to be seen."""
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    try:
        if os.write(process.stdin.fileno(), line) < len(line):
            raise OSError(errno.EMSGSIZE, "its launch spec is longer than a pipe takes")
    except BrokenPipeError:
        return False
    return True


def describe_exit(return_code: int) -> tuple[int | None, int | None, str]:
    """The exit code, or the number and the name of the signal, of a return code."""
    if return_code >= 0:
        return return_code, None, ""
    number = -return_code
    try:
        return None, number, Signals(number).name
    except ValueError:
        return None, number, f"signal {number}"
