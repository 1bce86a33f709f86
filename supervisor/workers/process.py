"""A child process: spawned, read from, signalled, and waited for without polling.

Its group is killed between its exit and its reaping, because only then is its id certain to be that
of the group; asyncio's own transport reaps first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from signal import SIGKILL, Signals
from typing import NamedTuple

from mlxsup.protocol.launch import child_environment

READ_BYTES = 64 * 1024
READ_SLICE_S = 0.01
READ_SLICE_BYTES = 1024 * 1024
"""A process that prints faster than this waits for the rest of the slice: reading one process's
output must not take the event loop from the others."""

LAST_WORDS_S = 1.0
"""How long after an exit the end of its output may take to arrive. Only a grandchild that holds the
pipe makes it take that long."""


class Exit(NamedTuple):
    """The end of a process.

    Attributes:
        code: the exit code; None after a signal.
        signal_name: `SIGKILL`; empty after an exit code.
    """

    code: int | None
    signal_name: str

    @classmethod
    def of(cls, return_code: int) -> Exit:
        """Return what a return code of `subprocess` says."""
        if return_code >= 0:
            return cls(return_code, "")
        try:
            return cls(None, Signals(-return_code).name)
        except ValueError:
            return cls(None, f"signal {-return_code}")

    @property
    def facts(self) -> dict[str, object]:
        """Return how a line of a log names it."""
        return {"signal": self.signal_name} if self.signal_name else {"code": self.code}


class WorkerProcess:
    """A process in its own group, with both its outputs in one pipe.

    Its standard input stays open until `close`: EOF on it means to the worker that its supervisor
    has died. Processes that it started and left in its group are killed when it exits.

    Attributes:
        exited: done with the return code as soon as the process has been reaped, even if another
            one holds its pipes.
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
        """Start a process and write one line to its standard input.

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
        """Return the process id, which is also its group's."""
        return self._process.pid

    def take_line(self, line: bytes, on_output: Callable[[bytes], None]) -> bool:
        """Give a process that was started without a line its line, and its output a new reader.

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
        """Signal the group; not after the exit, because the id may be another's by then."""
        if self._process.returncode is None:
            self._signal_group(number)

    def close(self) -> None:
        """Close the pipes and kill what still runs."""
        self.signal(SIGKILL)
        self.close_pipes()

    def close_pipes(self) -> None:
        """Read nothing from it from now on; its exit is still waited for."""
        if self._resume is not None:
            self._resume.cancel()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._loop.remove_reader(self._output)
            self._process.stdout.close()
            self._process.stdin.close()
        self.output_ended.set()

    async def ended(self) -> Exit:
        """Wait for its exit, and for the end of its output if no other process holds the pipe."""
        code = await self.exited
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.output_ended.wait()
        return Exit.of(code)

    def forget(self) -> None:
        """Leave a process that cannot be ended to the system, and wait for it no longer."""
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
        """Kill its group and reap it: until then the id belongs to no other process or group."""
        self._signal_group(SIGKILL)
        code = self._process.wait()
        if not self.exited.done():
            self.exited.set_result(code)

    def _signal_group(self, number: Signals) -> None:
        # Dead but not reaped: nothing is left to signal, which macOS reports as "not permitted".
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _give_line(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """Return whether the line could be written: a process may have ended, as is seen soon."""
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    try:
        if os.write(process.stdin.fileno(), line) < len(line):
            raise OSError(errno.EMSGSIZE, "its launch spec is longer than a pipe takes")
    except BrokenPipeError:
        return False
    return True


def watch_exit(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    """Have the event loop call `on_exit` once, when a child has exited and is not reaped yet.

    A thread waits for it, without reaping: a debugger may see the exit long before its parent does.

    Returns:
        A function that ends the watch early.

    Raises:
        OSError: no thread can be started, or on macOS no file be opened.
    """
    loop = asyncio.get_running_loop()
    watchers = [on_exit]  # a thread that waits for ever must not hold a process that was forgotten
    wait_for_exit = _exit_waiter(pid)

    def tell() -> None:
        while watchers:
            watchers.pop()()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # it was forgotten, and then reaped
            wait_for_exit()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell)

    try:
        threading.Thread(target=wait, name=f"exit-of-{pid}", daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from None
    return watchers.clear


def _exit_waiter(pid: int) -> Callable[[], object]:
    """Return a function that waits for the exit of a child, and does not reap it.

    Raises:
        OSError: macOS cannot watch it, because no file can be opened.
    """
    if sys.platform != "darwin":
        return partial(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    queue = select.kqueue()  # Python has waitid on macOS since 3.13 only
    change = select.kevent(
        pid,
        filter=select.KQ_FILTER_PROC,
        flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT,
        fflags=select.KQ_NOTE_EXIT,
    )
    try:
        queue.control([change], 0)
    except ProcessLookupError:  # a process that waits to be reaped does not exist there
        queue.close()
        return lambda: None
    except OSError:
        queue.close()
        raise

    def wait() -> None:
        with contextlib.closing(queue):
            queue.control(None, 1)

    return wait
