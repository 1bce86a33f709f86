"""Processes of mlxsup that begin with its modules imported, which takes most of their start.

A server, one for each process of tests, has imported them, and forks. The child gets the arguments,
environment, folder and streams that a new process would get, and runs the same entry point. What is
about the start of a process itself needs a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from support.daemon.warm_server import FOR_CHILDREN, LENGTH, LIFE, is_own, read_at_start

CLI = "mlxsup.cli"

UNBUFFERED = "PYTHONUNBUFFERED"


class Process(Protocol):
    """What subprocess.Popen and `WarmProcess` have in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The return code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, at most `timeout` seconds; returns the return code."""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless it has ended."""
        ...

    def terminate(self) -> None:
        """SIGTERM."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...


class WarmProcess:
    """A child of the server; as far as it goes, like subprocess.Popen.

    Args:
        arguments: of the interpreter.
        life: the end of the pipe that tells of it.
    """

    def __init__(self, arguments: Sequence[str], life: int) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._life = os.fdopen(life, "rb", buffering=0)
        self.pid = self._read()

    def _read(self) -> int:
        told = self._life.read(LIFE.size)
        if len(told) != LIFE.size:
            raise RuntimeError("the server of warm processes is gone")
        return int(LIFE.unpack(told)[0])

    def poll(self) -> int | None:
        """The return code; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, at most `timeout` seconds; returns the return code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            poll = select.poll()  # unlike `select`, it takes any descriptor
            poll.register(self._life, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._read()
            self._life.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # reaped; the pipe tells of it soon
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmServer:
    """The server, started when it is first needed, and gone with this process.

    Attributes:
        read_at_start: the variables that its interpreter reads when it starts; None: it may not be
            used.
    """

    def __init__(self) -> None:
        self.read_at_start: dict[str, str] | None = None
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def allow(self) -> None:
        """From now on it may be used, and started with what the environment now says."""
        self.read_at_start = read_at_start(os.environ)

    @property
    def pid(self) -> int | None:
        """Its process id, once it was started."""
        return None if self._process is None else self._process.pid

    def fork(
        self,
        arguments: Sequence[str],
        streams: tuple[int, int, int],
        environment: Mapping[str, str],
        *,
        has_own_group: bool,
    ) -> WarmProcess:
        """Starts a process.

        Args:
            arguments: of the interpreter: `-m MODULE` or `-c PROGRAM`, and what follows.
            streams: file descriptors of standard input, output and error.
            environment: all of it.
            has_own_group: whether it leads a group of processes.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "has_own_group": has_own_group,
        }
        text = json.dumps(request).encode()
        told, life = os.pipe()
        try:
            with self._lock:
                control = self._control or self._start()
                socket.send_fds(control, [LENGTH.pack(len(text))], [*streams, life])
                control.sendall(text)
        finally:
            os.close(life)
        return WarmProcess(arguments, told)

    def _start(self) -> socket.socket:
        read = self.read_at_start or {}
        tests = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [read.get("PYTHONPATH"), tests]))
        mine, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.daemon.warm_server", str(its.fileno()), " " * 4000],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **read, "PYTHONPATH": path, UNBUFFERED: ""},
            )
        self._control = mine
        atexit.register(self._end)
        return mine

    def _end(self) -> None:
        assert self._control is not None
        assert self._process is not None
        self._control.close()
        self._process.wait()


SERVER = WarmServer()


def is_warm(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the server can run this command as a new interpreter would.

    It cannot outside of pytest, because figures are of new processes; if the environment changes
    how an interpreter starts; or if coverage measures child processes, from their first line on.
    """
    is_measured = any(name.startswith("COVERAGE_") for name in environment)
    read = read_at_start(environment)
    if any(name in environment for name in FOR_CHILDREN):
        read |= {k: v for k, v in (SERVER.read_at_start or {}).items() if k == "PYTHONPATH"}
    is_same = read == SERVER.read_at_start
    is_known = command[1:2] == ["-c"] or command[1:3] == ["-m", CLI] or is_own(command)
    return command[0] == sys.executable and is_known and is_same and not is_measured


def start(
    command: Sequence[str],
    streams: tuple[IO[Any], IO[Any], IO[Any]],
    environment: Mapping[str, str] | None = None,
    *,
    has_own_group: bool = False,
    is_new: bool = False,
) -> Process:
    """Starts a command, in a warm process if that can be.

    Args:
        command: its line.
        streams: standard input, output and error, each with a file descriptor.
        environment: all of it; None: as here.
        has_own_group: whether it leads a group of processes.
        is_new: whether it must be a new interpreter, and a child of this process.
    """
    env = os.environ if environment is None else environment
    stdin, stdout, stderr = streams
    if is_new or not is_warm(command, env):
        has_terminal = stdin.isatty()
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=has_terminal,
            preexec_fn=_take_terminal if has_terminal else None,
            process_group=0 if has_own_group else None,
        )
    fds = (stdin.fileno(), stdout.fileno(), stderr.fileno())
    return SERVER.fork(command[1:], fds, env, has_own_group=has_own_group)


def _take_terminal() -> None:
    """In a new session: the terminal becomes its own, so that Ctrl-C reaches the command."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def run(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end, in a warm process if that can be; its streams are files.

    Raises:
        subprocess.TimeoutExpired: it still ran after the time, and was killed.
    """
    with contextlib.ExitStack() as stack:
        given, output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        process = start(command, (given, output, errors), environment)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), errors.read())


def run_text(
    command: Sequence[str], *, stdin: str = "", **more: Any
) -> subprocess.CompletedProcess[str]:
    """As `run`, with text; what is no UTF-8 comes as surrogates, and no line end is translated."""
    done = run(command, stdin=stdin.encode("utf-8", "surrogateescape"), **more)
    out, err = (stream.decode("utf-8", "surrogateescape") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(command, done.returncode, out, err)
