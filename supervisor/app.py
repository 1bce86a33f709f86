"""The supervisor's shell: passes events to the core and carries out its actions, in one thread."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from mlxsup.protocol.clock import PULSE_S, Clock
from mlxsup.protocol.download import Repository
from mlxsup.protocol.flight import Entry
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.version import VERSION

from .announcements import Announcer
from .config.fixed import changed_for_later
from .config.load import ConfigError, DaemonConfig, load_config
from .core.actions import (
    Abandon,
    Action,
    AdoptLaunch,
    Announce,
    AppraiseLaunch,
    BudgetChanged,
    CloseListener,
    EndDownload,
    EndSpare,
    Finish,
    ForgetModel,
    KillGateway,
    LogFault,
    LookAtFiles,
    LookAtWorker,
    NeedRaised,
    ReadConfiguration,
    RequestEnded,
    SendToClient,
    SendToWorker,
    SetLogLevel,
    SignalWorker,
    Spawn,
    StartDownload,
    StartGateway,
    StartSpare,
    WakeAt,
)
from .core.core import Core
from .core.events import (
    Appraised,
    Caller,
    Event,
    Reloaded,
    ReloadRefused,
    Sampled,
    ShutdownAsked,
    Started,
    Tick,
)
from .downloads import DownloadKeeper
from .facts import daemon_facts
from .gateway import GatewayKeeper
from .log_files import LogWriter
from .logs import DaemonLog
from .memory.briefing import MemoryBriefing
from .memory.watch import PROC
from .runtime_folder import RuntimeFolder, RuntimeFolderError, connections_within, room_for
from .signals import Signals
from .sockets.clients import Clients
from .sockets.transport import Context
from .timer import Timer
from .workers.incarnation import Surroundings
from .workers.leftovers import WorkerRecord
from .workers.measure import Sampler, keep_measuring
from .workers.registry import Workers, report

INTERNAL_EXIT_CODE = 70
LEFT_BEHIND_EXIT_CODE = 71
"""EX_OSERR: a process could not be ended."""

FAREWELL_S = 2.0
"""How long clients may take to read their last messages."""

LOOK_DELAY_S = 0.05
"""The time between inspecting a silent process and reporting it to the core."""

OnListening = Callable[[str], None]


class App:
    """Everything that lives as long as the supervisor.

    Args:
        config: what to run.
        folder: the runtime folder, locked.
        record: where live workers are recorded.
        log: the daemon's log.
        writer: writes every log file.
        context: makes the sockets.
        argv: the command that starts a worker.
        announcer: learns what happens.
        proc: where the system says how much memory is available.

    Raises:
        ConfigError: the pinned models do not fit into the memory budget together.
    """

    def __init__(
        self,
        config: DaemonConfig,
        *,
        folder: RuntimeFolder,
        record: WorkerRecord,
        log: DaemonLog,
        writer: LogWriter,
        context: Context,
        argv: Sequence[str],
        announcer: Announcer,
        proc: Path = PROC,
    ) -> None:
        self._config = config
        self._proc = proc
        self._log = log
        self._record = record
        self._announcer = announcer
        self._clock = Clock()
        self._surroundings = Surroundings(
            context=context,
            folder=folder,
            record=record,
            log=log,
            argv=argv,
            post=self.dispatch,
            now=self._clock.now,
        )
        self._workers = Workers(self._surroundings, config.log_dir, writer, self._learnt)
        self._downloads = DownloadKeeper(self._surroundings, self._downloaded)
        self._gateway = GatewayKeeper(
            self._surroundings,
            config.log_dir,
            writer,
            self._announcer.gateway_listens,
            rules=config.gateway_rules,
            keys=config.keys,
        )
        self._briefing = MemoryBriefing(self._workers.measurements, log)
        self._briefing.adopt(config.models, self._briefing.needs_of(config))
        self._core = Core(
            self._briefing.settings_of(config),
            config.models,
            facts=daemon_facts(config, folder.client_socket),
            random=random.Random(),
            is_strict=False,
            gateway=config.http or config.gateway,
        )
        # Emptied before the loop continues: it only holds what follows from the current event.
        self._pending: deque[Event] = deque()
        self._is_handling = False
        self._is_broken = False
        self._finished = asyncio.Event()
        self._timer = Timer(self._clock, lambda now: self.dispatch(Tick(now=now)))

    async def run(self, on_listening: OnListening, *, open_files: int) -> int:
        """Serves until `Finish`; returns the exit code.

        Args:
            on_listening: called with the endpoint.
            open_files: how many files the process may have open.
        """
        self._open_files = open_files
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        signals = Signals(self._on_signal, self._reload)
        around = self._surroundings
        try:
            self._clients = Clients(
                around.context,
                around.folder.client_socket,
                post=self.dispatch,
                now=self._clock.now,
                max_connections=connections_within(open_files, len(self._config.models)),
            )
        except zmq.ZMQError as error:
            raise RuntimeFolderError(
                f"cannot listen at {around.folder.client_socket}: {error.strerror}",
                hint="set another runtime_dir",
            ) from None
        endpoint = self._clients.endpoint
        left_behind = 0
        self._log.write("info", "daemon started", version=VERSION, endpoint=endpoint)
        self._log.flight.started(os.getpid())
        try:
            async with asyncio.TaskGroup() as self._tasks:
                pulse = self._tasks.create_task(self._pulse())
                sampling = self._tasks.create_task(self._sample())
                on_listening(endpoint)
                self._loop.call_soon(self._start)
                await self._finished.wait()
                signals.ignore()
                self._announcer.finishes()
                sampling.cancel()
                if self._is_broken:
                    await self._workers.end()
                await self._workers.spares.end()
                await self._downloads.end()
                await self._gateway.end()
                pulse.cancel()  # not before: together these may outlast a watchdog
                left_behind = self._workers.leave()
            await self._clients.finish(0.0 if self._is_broken else FAREWELL_S)
        except ExceptionGroup as group:  # a bug in a task; processes are gone
            self._break(group)
        finally:
            self._clients.close(0.0 if self._is_broken else FAREWELL_S)
            self._workers.close()
            self._gateway.close()
        if self._is_broken:
            return INTERNAL_EXIT_CODE
        return LEFT_BEHIND_EXIT_CODE if left_behind else 0

    def dispatch(self, event: Event) -> None:
        """Passes an event to the core and carries out its actions; only on the loop's thread.

        If called while an action is being carried out, it keeps the event until that is done: the
        core sees one event after the other. Tasks make the loop call it, so that a bug in here
        always ends up in `_on_loop_error` and never takes a task group down.
        """
        if self._is_broken:
            return
        self._pending.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._pending:
                for action in self._core.handle(self._pending.popleft()):
                    self._carry_out(action)
        except Exception as error:
            self._break(error)
            raise
        finally:
            self._is_handling = False

    # ------------------------------------------------------------ actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendToClient(connection=connection, message=message):
                self._clients.send(connection, message)
            case SendToWorker(model=model, generation=generation, message=message):
                self._workers.send(model, generation, message)
            case WakeAt(when=when):
                self._timer.wake_at(when, self._loop)
            case Spawn():
                self._workers.spawn(action, self._tasks)
            case StartSpare(number=number):
                self._workers.spares.start(number, self._tasks)
            case EndSpare(number=number):
                self._workers.spares.kill(number)
            case StartDownload() | EndDownload():
                self._downloads.carry_out(action, self._tasks)
            case StartGateway():
                self._gateway.start(action, self._tasks)
            case KillGateway(cause=cause):
                self._gateway.kill(cause)
            case CloseListener():
                self._gateway.close_listener()
            case SignalWorker(model=model, generation=generation, signal=worker_signal):
                self._log.write("info", "worker signalled", model=model, signal=worker_signal.value)
                self._workers.signal(model, generation, worker_signal)
            case LookAtWorker(model=model, generation=generation):
                self._workers.look_at(model, generation, LOOK_DELAY_S)
            case LookAtFiles(model=model, generation=generation):
                self._workers.look_at_files(model, generation, self._tasks)
            case ReadConfiguration(caller=caller, is_dry=is_dry):
                self._loop.call_soon(self._reload, caller, is_dry)
            case Announce() | RequestEnded() | SetLogLevel() | Entry() | LogFault():
                self._announcer.take(action)
            case Abandon(model=model, generation=generation):
                self._workers.abandon(model, generation)
            case ForgetModel(model=model):
                self._workers.forget(model)
            case BudgetChanged(budget=budget):
                self._briefing.changed(budget)
            case AppraiseLaunch():
                need = self._briefing.appraise(action.launch)
                self.dispatch(action.answered(need, now=self._clock.now()))
            case AdoptLaunch(model=model, launch=launch, need=need):
                self._briefing.relaunched(model, launch, need)
            case NeedRaised(launch=launch, raised_bytes=raised_bytes):
                self._briefing.raised(launch, raised_bytes)
                self._appraised()
            case Finish():
                self._finished.set()
            case _:
                raise AssertionError(action)

    # ------------------------------------------------------------ what happens by itself

    def _start(self) -> None:
        self._appraised()
        self.dispatch(Started(now=self._clock.now()))

    def _learnt(self, launch: LaunchSettings) -> None:
        """A worker has measured its model: the next load is planned with that."""
        self._briefing.measured(launch)
        self._appraised()

    def _downloaded(self, repository: Repository, folder: str) -> None:
        """A repository is complete: the models that lacked it are planned with what is there."""
        self._briefing.found(repository, folder)
        self._appraised()

    def _appraised(self) -> None:
        self.dispatch(Appraised(now=self._clock.now(), needs=self._briefing.needs))

    async def _pulse(self) -> None:
        """Keeps the clock running and, every second, the clients informed."""
        is_second = False
        while True:
            await asyncio.sleep(PULSE_S)
            self._clock.now()
            is_second = not is_second
            if is_second:
                self._loop.call_soon(self._clients.pulse)
                self._loop.call_soon(self._announcer.pulse, self._core.outline)

    async def _sample(self) -> None:
        """Measures every second, and writes the record if that failed before."""

        def sampled(event: Sampled) -> None:
            self._loop.call_soon(self.dispatch, event)
            self._record.write_again()
            self._log.flight.alive()

        sampler = Sampler(
            lambda error: self._log.write("warning", "memory not measured", error=error.strerror),
            self._briefing.watch(self._proc),
        )
        await keep_measuring(
            sampler, pids=lambda: self._workers.pids, now=self._clock.now, on_sampled=sampled
        )

    def _on_signal(self, number: signal.Signals, is_repeated: bool) -> None:
        self._announcer.ends(number.name, *self._core.left_to_finish(is_repeated))
        self.dispatch(ShutdownAsked(now=self._clock.now(), is_immediate=is_repeated))

    def _reload(self, caller: Caller | None = None, is_dry: bool = False) -> None:
        """Reads the file again and checks all of it; if it is wrong, nothing changes (P20)."""
        now, old = self._clock.now(), self._config
        if not is_dry:
            self._announcer.reloads()
        try:
            if old.config_path is None:
                raise ConfigError(["the daemon was started without a file: there is none to read"])
            config = load_config(old.config_path)
            needs = self._briefing.needs_of(config)
            room = self._room_for(config)
        except ConfigError as error:
            if not is_dry:
                self._announcer.reload_refused(error)
            if caller is not None:
                self.dispatch(ReloadRefused(now=now, problems=tuple(error.problems), caller=caller))
            return
        later = changed_for_later(old, config)
        settings = self._briefing.settings_of(config, is_dry=is_dry)
        read = Reloaded(now=now, settings=settings, models=config.models, later=later, needs=needs)
        if not is_dry:
            self._clients.limit_to(room)
            self._announcer.reloaded(later)
            self._briefing.adopt(config.models, needs)
        self.dispatch(replace(read, caller=caller, is_dry=is_dry))

    def _room_for(self, config: DaemonConfig) -> int:
        """Connections beside the new models and those still running, or raises ConfigError."""
        names = {entry.name for entry in config.models} | self._workers.models
        return room_for(len(names), self._open_files, self._clients.admitted)

    # ------------------------------------------------------------ bugs

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: a bug of ours. Anything else the loop complains about is logged."""
        error = context.get("exception")
        if isinstance(error, Exception) and "handle" in context:
            self._break(error)
        else:
            self._log.write("error", "event loop", complaint=context.get("message"), error=error)

    def _break(self, error: Exception) -> None:
        """Logs a bug with the stories of all models, and ends everything."""
        if self._is_broken:
            return
        self._is_broken = True
        self._pending.clear()
        self._log.bug(error, self._core.stories())
        report("mlxsup: internal error, the daemon ends; see mlxsup.log in the log folder")
        self._finished.set()
