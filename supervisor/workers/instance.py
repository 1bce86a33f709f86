"""One incarnation of a worker, from its spawn until its exit is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxsup.protocol.codec import to_line
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings, LaunchSpec
from mlxsup.protocol.worker_messages import MessageToWorker, Ready

from ..core.actions import Spawn, WorkerSignal
from ..core.events import Event, Exited, Spawned, SpawnFailed, WorkerSaid
from ..logs import DaemonLog, ModelLog
from ..memory.folder import Stamp
from ..runtime_folder import RuntimeFolder
from ..sockets.connection import Turns
from ..sockets.worker_link import WorkerLink
from .orphans import WorkerRecord
from .process import LAST_WORDS_S, Exit, WorkerProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The parts of the supervisor that each process of it needs.

    Attributes:
        folder: the runtime folder, where they are.
        record: where live workers are recorded.
        log: the daemon's log.
        argv: the command that starts a worker.
        post: called at once with each event.
        turns: when the sockets of clients and workers are read and written.
    """

    folder: RuntimeFolder
    record: WorkerRecord
    log: DaemonLog
    argv: Sequence[str]
    post: Callable[[Event], None]
    turns: Turns

    def now(self) -> float:
        """Return the time that events carry."""
        return self.turns.now()

    def post_soon(self, event: Event) -> None:
        """Post an event in the loop's next round, so that a bug in the core ends no task here."""
        asyncio.get_running_loop().call_soon(self.post, event)

    def spawned(self, name: str, pid: int) -> None:
        """Record a live process; a full disk does not stop the serving."""
        self._write_record(lambda: self.record.add(name, pid))

    def exited(self, pid: int) -> None:
        """Record that a process is gone."""
        self._write_record(lambda: self.record.remove(pid))

    def _write_record(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self.log.write("warning", "workers not recorded", error=error.strerror)


TakePrewarmed = Callable[[bytes, Callable[[bytes], None]], WorkerProcess | None]
"""Give a prewarmed worker its launch spec and the reader of its output; None if it is gone."""


class WorkerUnit:
    """A worker's process, its sockets and its log.

    Attributes:
        loaded_files: the files of its model as they were before it read them; None: not known.

    Args:
        surroundings: what all workers share.
        spawn: what the core asked for.
        number: the number of this spawn, counted over all models.
        model_log: where its output goes.
        learn: called with what its READY says, before the core hears of it.
        take_prewarmed: takes over a prewarmed worker; None for a new process.
    """

    _start_news: Spawned | SpawnFailed

    def __init__(
        self,
        surroundings: Surroundings,
        spawn: Spawn,
        number: int,
        model_log: ModelLog,
        learn: Callable[[Ready], None],
        take_prewarmed: TakePrewarmed | None = None,
    ) -> None:
        self._around = surroundings
        self._spawn = spawn
        self._number = number
        self._model_log = model_log
        self._learn = learn
        self._take_prewarmed = take_prewarmed
        self._link: WorkerLink | None = None
        self._process: WorkerProcess | None = None
        self._is_killed = False
        self.loaded_files: Stamp | None = None

    @property
    def launch(self) -> LaunchSettings:
        """Return what it was started with."""
        return self._spawn.launch

    @property
    def model(self) -> ModelName:
        """Return the model that it serves."""
        return self._spawn.model

    @property
    def generation(self) -> Generation:
        """Return which life of its model's worker this is."""
        return self._spawn.generation

    @property
    def pid(self) -> int | None:
        """Return the pid of the process, while it lives."""
        process = self._process
        return process.pid if process is not None and not process.exited.done() else None

    def send(self, message: MessageToWorker) -> None:
        """Send a message; drop it before the sockets exist and after they are gone."""
        if self._link is not None:
            self._link.send(message)

    def signal(self, worker_signal: WorkerSignal) -> None:
        """Signal the process group."""
        if self._process is not None:
            self._process.signal(signal.Signals[worker_signal.value])

    def kill(self) -> None:
        """End the process group at once, or as soon as there is one."""
        self._is_killed = True
        self.signal(WorkerSignal.KILL)

    def abandon(self) -> None:
        """Send nothing to it and read nothing from now on: the process cannot be ended."""
        assert self._process is not None
        self._process.close_pipes()
        self._close_link()

    async def live(self) -> None:
        """Live the whole life: post `Spawned` and `Exited`, or `SpawnFailed`.

        If cancelled, it ends the process, if that can be ended at all.
        """
        try:
            if self._start():
                await self._end()
        finally:
            if self._process is not None:
                self._process.close()
                self._process.forget()
            self._close_link()

    def _start(self) -> bool:
        """Make the sockets, then the process; return whether it is running."""
        around = self._around
        token = secrets.token_hex(16)
        # Before the sockets' first read, which the loop was asked for when they were made: on a
        # busy machine a worker may have said READY by then.
        asyncio.get_running_loop().call_soon(self._announce)
        try:
            self._link = WorkerLink(
                around.folder.worker_socket(self._number),
                turns=around.turns,
                model=self.model,
                generation=self.generation,
                token=token,
                post=self._hear,
            )
            line = to_line(self._launch_spec(token, self._link.endpoint))
            write = self._model_log.write
            prewarmed = (
                self._take_prewarmed(line, write) if self._take_prewarmed is not None else None
            )
            self._process = prewarmed or WorkerProcess.spawn(around.argv, line, write)
        except OSError as error:
            detail = error.strerror or str(error)
            self._start_news = SpawnFailed(
                now=around.now(), model=self.model, generation=self.generation, detail=detail
            )
            return False
        pid = self._link.pid = self._process.pid
        self._model_log.begin(self.generation, pid)
        around.spawned(self.model, pid)
        around.log.write(
            "info",
            "worker spawned",
            model=self.model,
            generation=self.generation,
            pid=pid,
            **({} if prewarmed is None else {"prewarmed": "yes"}),
        )
        self._start_news = Spawned(
            now=around.now(), model=self.model, generation=self.generation, pid=pid
        )
        if self._is_killed:
            self.kill()
        return True

    def _hear(self, event: Event) -> None:
        if isinstance(event, WorkerSaid) and isinstance(event.message, Ready):
            self._learn(event.message)
        self._around.post(event)

    def _announce(self) -> None:
        self._around.post(self._start_news)

    async def _end(self) -> None:
        """Wait for the exit, and for what the process sent and printed before it."""
        assert self._process is not None
        assert self._link is not None
        around = self._around
        process, link = self._process, self._link
        code = await process.exited
        with contextlib.suppress(TimeoutError):  # a grandchild holds the pipe or the socket
            async with asyncio.timeout(LAST_WORDS_S):
                await process.output_ended.wait()
                await link.disconnected.wait()
        link.drain()
        self._close_link()
        around.exited(process.pid)
        # Who is notified of the death finds its last words in the file.
        await self._model_log.ended(LAST_WORDS_S)
        end = Exit.of(code)
        names = {"model": self.model, "generation": self.generation}
        around.log.write("info", "worker exited", **names, pid=process.pid, **end.facts)
        around.post_soon(
            Exited(
                now=around.now(),
                model=self.model,
                generation=self.generation,
                exit_code=end.code,
                signal_name=end.signal_name,
                last_lines=self._model_log.last_lines,
                at=time.time(),
            )
        )

    def _close_link(self) -> None:
        """Close the sockets; a file that cannot be removed does no harm: each life has its own."""
        if self._link is None:
            return
        try:
            self._link.close()
        except OSError as error:
            self._around.log.write("warning", "socket not removed", error=error.strerror)

    def _launch_spec(self, token: str, endpoint: str) -> LaunchSpec:
        return LaunchSpec.of(
            self._spawn.launch,
            model=self.model,
            generation=self.generation,
            token=token,
            endpoint=endpoint,
            supervisor_pid=os.getpid(),
            known_batching=self._spawn.known_batching,
            learned_dir=str(self._around.folder.learned_dir(self.model)),
            log_level=self._around.log.level,
        )
