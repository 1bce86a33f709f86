"""One worker's process: spawned, read from, signalled, and waited for without polling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import cast

STDIN, STDOUT = 0, 1


class WorkerProcess(asyncio.SubprocessProtocol):
    """A process in a group of its own, with both its outputs in one pipe.

    Its standard input stays open until `close`: the end of it tells the worker that its
    supervisor has died.

    Attributes:
        exited: done with the return code as soon as the process has been reaped, whoever still
            holds its pipes.
        output_ended: set when the output was read to its end.

    Args:
        on_output: given each piece of the output.
    """

    def __init__(self, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        self._transport: asyncio.SubprocessTransport | None = None
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.output_ended = asyncio.Event()

    @classmethod
    async def spawn(
        cls, argv: Sequence[str], first_line: bytes, on_output: Callable[[bytes], None]
    ) -> WorkerProcess:
        """Starts a process and writes one line to its standard input.

        Raises:
            OSError: it cannot be started.
        """
        transport, process = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(on_output),
            *argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        standard_input = cast(asyncio.WriteTransport, transport.get_pipe_transport(STDIN))
        standard_input.write(first_line)
        return process

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group."""
        assert self._transport is not None
        return self._transport.get_pid()

    def signal(self, number: signal.Signals) -> None:
        """Signals the group; not after the exit was seen, for the id may be another's by then."""
        if self._transport is None or self._transport.get_returncode() is not None:
            return
        # Dead but not reaped: nothing is left to signal, which macOS reports as "not permitted".
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Closes the pipes, whoever holds their other ends, and kills what still runs."""
        self.signal(signal.SIGKILL)
        if self._transport is not None:
            self._transport.close()
        self.output_ended.set()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process runs."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """It printed something."""
        self._on_output(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """A pipe reached its end."""
        if fd == STDOUT:
            self.output_ended.set()

    def process_exited(self) -> None:
        """It was reaped."""
        assert self._transport is not None
        code = self._transport.get_returncode()
        assert code is not None
        if not self.exited.done():
            self.exited.set_result(code)


def describe_exit(return_code: int) -> tuple[int | None, int | None, str]:
    """The exit code, or the number and the name of the signal, of a return code."""
    if return_code >= 0:
        return return_code, None, ""
    number = -return_code
    try:
        return None, number, signal.Signals(number).name
    except ValueError:
        return None, number, f"signal {number}"


def use_best_child_watcher() -> None:
    """Lets Python 3.11 on Linux reap on the event loop's own thread, as later versions do.

    With a thread that reaps, a group could be signalled in the instant between its leader's
    reaping and the loop's hearing of it.
    """
    if sys.platform == "linux" and sys.version_info < (3, 12):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return  # an old kernel: the default, a thread for each child, serves
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
