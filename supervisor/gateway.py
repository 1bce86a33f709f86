"""The gateway's process, and the socket that it listens at, which outlives it.

The supervisor binds the address, so that a port that is taken is its own error, and a client that
connects while the gateway is replaced waits instead of being refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxsup.protocol.codec import to_line
from mlxsup.protocol.folders import GATEWAY_LOG_NAME
from mlxsup.protocol.gateway import (
    BEAT_WITH_KEYS,
    Address,
    GatewayRules,
    GatewaySpec,
    gateway_argv,
)
from mlxsup.protocol.key_file import KeyPlace

from .core.actions import StartGateway
from .core.events import GatewayBeat, GatewayEnded, GatewayListening
from .log_files import LogWriter
from .logs import ModelLog
from .workers.instance import Surroundings
from .workers.process import LAST_WORDS_S, WorkerProcess
from .workers.registry import report

RECORDED_AS = "(gateway)"
"""In the record of live workers, instead of a model: no model can have this name."""

BACKLOG = 1024
"""Connections that wait while the gateway is busy, or being replaced."""

END_LIMIT_S = 4.0
"""From asking it to end to SIGKILL: it takes two seconds for answers that are still open."""

KILL_LIMIT_S = 10.0
READ_BYTES = 4096

OnListening = Callable[[str, int], None]
"""Called with the URL and the pid when it accepts connections."""


class GatewayKeeper:
    """Starts and kills the gateway when the core says so, and says when it listens, that its loop
    runs, and when it has ended.

    Args:
        around: what all processes of the supervisor share.
        log_dir: the folder of the logs.
        writer: writes the logs.
        on_listening: see `OnListening`.
        rules: what the configuration says about requests.
        keys: where the keys are that it takes.
        argv: the command that starts a gateway.
    """

    def __init__(
        self,
        around: Surroundings,
        log_dir: Path,
        writer: LogWriter,
        on_listening: OnListening,
        rules: GatewayRules,
        keys: KeyPlace,
        argv: Sequence[str] | None = None,
    ) -> None:
        self._around = around
        self._log_dir = log_dir
        self._writer = writer
        self._on_listening = on_listening
        self._rules = rules
        self._keys = keys
        self._has_had_keys = False
        self._argv = list(argv) if argv is not None else gateway_argv()
        self._log: ModelLog | None = None
        self._listener: socket.socket | None = None
        self._process: WorkerProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._refusal = ""
        self._is_ending = False

    @property
    def pid(self) -> int | None:
        """Return the pid of its process, while it lives."""
        process = self._process
        return None if process is None or process.exited.done() else process.pid

    def start(self, action: StartGateway, tasks: asyncio.TaskGroup) -> None:
        """Begin a life of it, or say why that is not possible."""
        log = self._around.log
        try:
            if self._listener is None:
                self._listener = bind(action.address)
        except OSError as error:
            cause = why_not(action.address, error)
            log.write("error", "gateway cannot listen", address=action.address, cause=cause)
            if cause != self._refusal:  # once, and not with each attempt
                report(f"mlxsup: the gateway cannot listen: {cause}")
            self._refusal = cause
            self._post_end(action.number, cause, is_crash=False)
            return
        self._refusal = ""
        if self._log is None:
            self._log = ModelLog(self._log_dir, GATEWAY_LOG_NAME, self._writer)
        life = self._live(action.number, self._listener, self._log)
        self._life = tasks.create_task(life)

    def kill(self, cause: str) -> None:
        """End its process, whose loop does nothing any longer."""
        if self._process is not None and self.pid is not None:
            self._around.log.write("error", "gateway killed", pid=self.pid, cause=cause)
            self._process.signal(signal.SIGKILL)

    def close_listener(self) -> None:
        """Refuse connections until the next start."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def end(self) -> None:
        """Let it end what is open, for a short time; return when it is gone."""
        self._is_ending = True
        self.close_listener()
        process, life = self._process, self._life
        if process is None or life is None or life.done():
            return
        process.signal(signal.SIGTERM)
        await asyncio.wait([life], timeout=END_LIMIT_S)
        if not life.done():
            process.signal(signal.SIGKILL)
            await asyncio.wait([life], timeout=KILL_LIMIT_S)
        if not life.done():
            self._around.log.write("error", "gateway left behind", pid=process.pid)
            life.cancel()

    def close(self) -> None:
        """Close its log and its socket."""
        self.close_listener()
        if self._log is not None:
            self._log.close()

    # ------------------------------------------------------------ one life

    async def _live(self, number: int, listener: socket.socket, output: ModelLog) -> None:
        if self._is_ending:  # before it began: its socket is closed
            return
        try:
            beats, theirs = os.pipe()
        except OSError as error:
            self._cannot_start(number, error)
            return
        try:
            try:
                process = self._spawn(listener, theirs, output)
            except OSError as error:
                self._cannot_start(number, error)
                return
            finally:
                os.close(theirs)
            output.begin(number, process.pid)
            self._watch(beats, number, process.pid, listener)
            await self._wait(number, process, output)
        finally:
            asyncio.get_running_loop().remove_reader(beats)
            os.close(beats)
            if self._process is not None:
                self._process.close()
                self._process.forget()

    def _spawn(self, listener: socket.socket, beat_pipe: int, output: ModelLog) -> WorkerProcess:
        around = self._around
        address = address_of(listener)
        spec = GatewaySpec(
            endpoint=f"ipc://{around.folder.client_socket}",
            host=address.host,
            port=address.port,
            listener=listener.fileno(),
            beat_pipe=beat_pipe,
            key_file=str(self._keys.file),
            key_mark=str(self._keys.mark),
            has_had_keys=self._has_had_keys,
            log_level=around.log.level,
            rules=self._rules,
        )
        inherited = [listener.fileno(), beat_pipe]
        process = WorkerProcess.spawn(self._argv, to_line(spec), output.write, inherited=inherited)
        self._process = process
        around.spawned(RECORDED_AS, process.pid)
        around.log.write("info", "gateway started", pid=process.pid)
        return process

    def _watch(self, beats: int, number: int, pid: int, listener: socket.socket) -> None:
        """Report each beat of its event loop; the first says that it accepts connections."""
        loop, around = asyncio.get_running_loop(), self._around
        address = address_of(listener)
        is_listening = False

        def on_beat() -> None:
            nonlocal is_listening
            read = os.read(beats, READ_BYTES)
            if not read:  # it has ended, as is about to be seen
                loop.remove_reader(beats)
                return
            self._has_had_keys = read.endswith(BEAT_WITH_KEYS)
            now = around.now()
            if is_listening:
                around.post(GatewayBeat(now=now, number=number))
                return
            is_listening = True
            around.log.write("info", "gateway listening", url=address.url, pid=pid)
            around.post(GatewayListening(now=now, number=number, pid=pid, address=address))
            self._on_listening(address.url, pid)

        loop.add_reader(beats, on_beat)

    async def _wait(self, number: int, process: WorkerProcess, output: ModelLog) -> None:
        around, end = self._around, await process.ended()
        await output.ended(LAST_WORDS_S)
        around.exited(process.pid)
        level = "warning" if not self._is_ending else "info"
        around.log.write(level, "gateway exited", pid=process.pid, **end.facts)
        if not self._is_ending:
            cause = f"signal {end.signal_name}" if end.signal_name else f"exit code {end.code}"
            self._post_end(number, f"it ended with {cause}", is_crash=True)

    def _cannot_start(self, number: int, error: OSError) -> None:
        self._around.log.write("error", "gateway not started", error=error.strerror)
        self._post_end(number, f"it could not be started: {error.strerror}", is_crash=True)

    def _post_end(self, number: int, cause: str, *, is_crash: bool) -> None:
        around = self._around
        ended = GatewayEnded(now=around.now(), number=number, cause=cause, is_crash=is_crash)
        around.post_soon(ended)


def bind(address: Address) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        OSError: the address is taken, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)


def address_of(listener: socket.socket) -> Address:
    """Return where a socket listens."""
    host, port = listener.getsockname()[:2]
    return Address(host=host, port=port)


def why_not(address: Address, error: OSError) -> str:
    """Return why it cannot listen there, and what helps."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"the address {address} is already in use; choose another one with gateway.listen or "
            "--http"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"the port of {address} needs root; choose one from 1024 on"
    return f"{address}: {error.strerror}"
