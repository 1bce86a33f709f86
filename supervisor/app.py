"""The supervisor's shell: passes events to the core and carries out its actions, in one thread."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mlxsup.protocol.client_messages import AddModel, Configure, RemoveModel, SettingsQuery
from mlxsup.protocol.clock import PULSE_S, Clock
from mlxsup.protocol.download import Repository
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.flight import Entry
from mlxsup.protocol.ids import Caller
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.version import VERSION
from mlxsup.store.sources import RefusedModelError, find_source, servable

from .announcements import Announcer
from .config.entries import Edit, adding, planned, removing, still_written, write_text
from .config.keys import changing, settings_of
from .config.load import (
    ConfigError,
    ConfigText,
    DaemonConfig,
    changed_for_later,
    parse_config,
    read_text,
)
from .core.actions import (
    Abandon,
    Action,
    AdoptLaunch,
    Announce,
    AppraiseLaunch,
    BudgetChanged,
    ChangeConfiguration,
    CloseListener,
    EndDownload,
    EndPrewarmed,
    FileMessage,
    Finish,
    ForgetModel,
    KillGateway,
    LogFault,
    LookAtFiles,
    LookAtWorker,
    NeedRaised,
    ReadConfiguration,
    RequestRefused,
    SendToClient,
    SendToWorker,
    SetLogLevel,
    SignalWorker,
    Spawn,
    StartDownload,
    StartGateway,
    StartPrewarmed,
    WakeAt,
)
from .core.core import Core
from .core.errors import bad_configuration
from .core.events import (
    Appraised,
    Event,
    LaunchAppraised,
    Reloaded,
    ReloadRefused,
    Sampled,
    SettingsRead,
    ShutdownAsked,
    Started,
    Tick,
)
from .downloads import DownloadKeeper
from .file_threads import FileThreads
from .gateway import GatewayKeeper
from .log_files import LogWriter
from .logs import DaemonLog
from .memory.folder_reader import Place
from .memory.machine import ram_bytes
from .memory.snapshot import ConfigSnapshot, MemorySnapshot
from .runtime_folder import RuntimeFolder, RuntimeFolderError, connections_within, room_for
from .runtime_watch import FolderWatch
from .signals import Signals
from .sockets.clients import Clients
from .sockets.connection import Turns
from .workers.instance import Surroundings
from .workers.measure import Sampler
from .workers.orphans import WorkerRecord
from .workers.registry import Workers, report

INTERNAL_EXIT_CODE = 70
LEFT_BEHIND_EXIT_CODE = 71
"""EX_OSERR: a process could not be ended."""

FAREWELL_S = 2.0
"""How long clients may take to read their last messages."""

LOOK_DELAY_S = 0.05
"""The time between inspecting a silent process and reporting it to the core."""

READ_LIMIT_S = 5.0
WRITE_LIMIT_S = 30.0
SEARCH_LIMIT_S = 30.0
"""For the model that is meant, in all folders with models on this machine."""
PARSE_LIMIT_S = 60.0
"""On a machine however busy: the file has a limit of size."""

SETTLE_S = 1.0
MAX_READS = 10
"""How often a file is read that another program keeps writing."""

OnListening = Callable[[str], None]
Value = TypeVar("Value")


class Timer:
    """The one timer of the core: it calls back at a time of the clock, or a little later.

    Args:
        clock: gives the time; it may have stood still while the machine slept.
        on_due: called with the time.
    """

    def __init__(self, clock: Clock, on_due: Callable[[float], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0

    def wake_at(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        """Ask for a call at this time; an earlier one stays.

        Args:
            when: monotonic seconds.
            loop: makes the call.
        """
        if self._handle is not None:
            if self._wakes_at <= when:
                return
            self._handle.cancel()
        self._wakes_at = when
        self._handle = loop.call_later(self._clock.delay_until(when), lambda: self._wake(loop))

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = None
        now = self._clock.now()
        if now < self._wakes_at:  # the clock stood still in the meantime
            self.wake_at(self._wakes_at, loop)
        else:
            self._on_due(now)


class _Asked(NamedTuple):
    """A reload, and who asks for it, if it is a client.

    Attributes:
        caller: who.
        is_dry: whether nothing may change because of it.
        change: of the file, which comes first; or a question about it.
    """

    caller: Caller | None
    is_dry: bool = False
    change: FileMessage | None = None


class _Read(NamedTuple):
    """A configuration that was read, and what is answered if it was changed before."""

    snapshot: ConfigSnapshot
    answer: dict[str, Any]


class App:
    """Everything that lives as long as the supervisor.

    Args:
        config: what to run.
        folder: the runtime folder, locked.
        record: where live workers are recorded.
        log: the daemon's log.
        writer: writes every log file.
        argv: the command that starts a worker.
        announcer: learns what happens.

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
        argv: Sequence[str],
        announcer: Announcer,
    ) -> None:
        self._config = config
        self._log = log
        self._writer = writer
        self._record = record
        self._announcer = announcer
        self._clock = Clock()
        self._surroundings = Surroundings(
            folder=folder,
            record=record,
            log=log,
            argv=argv,
            post=self.dispatch,
            turns=Turns(self._clock.now),
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
        self._memory = MemorySnapshot(self._workers.measurements, log)
        self._files = FileThreads()
        # Until the folders of its models are read, it can only be asked to end.
        self._core = self._core_of(config)
        # What asks for a reload: clients, and signals; bounded by the connections.
        self._asked: asyncio.Queue[_Asked] = asyncio.Queue()
        # Emptied before the loop continues: it only holds what follows from the current event.
        self._pending: deque[Event] = deque()
        self._is_handling = False
        self._is_broken = False
        self._finished = asyncio.Event()
        # What waits for a model folder; bounded by commands, downloads and loads.
        self._readers: set[asyncio.Task[None]] = set()
        self._timer = Timer(self._clock, lambda now: self.dispatch(Tick(now=now)))

    async def run(self, on_listening: OnListening, *, open_files: int) -> int:
        """Serve until `Finish`; return the exit code.

        Args:
            on_listening: called with the endpoint.
            open_files: how many files the process may have open.
        """
        self._open_files = open_files
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        signals = Signals(self._on_signal, self._reload)
        around = self._surroundings
        if not await self._begin():
            signals.ignore()
            return 0
        try:
            self._clients = Clients(
                around.folder.client_socket,
                turns=around.turns,
                post=self.dispatch,
                max_connections=connections_within(open_files, len(self._config.models)),
                warn=lambda cause: self._log.write(
                    "warning", "clients wait to be let in", cause=cause
                ),
            )
        except OSError as error:
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
                rereading = self._tasks.create_task(self._keep_rereading())
                on_listening(endpoint)
                self._loop.call_soon(self._start)
                await self._finished.wait()
                signals.ignore()
                self._announcer.finishes()
                sampling.cancel()
                rereading.cancel()
                for reader in self._readers:
                    reader.cancel()
                if self._is_broken:
                    await self._workers.end()
                await self._workers.prewarmed.end()
                await self._downloads.end()
                await self._gateway.end()
                pulse.cancel()  # not before: together these may outlast a watchdog
                left_behind = self._workers.leave()
            await self._clients.finish(0.0 if self._is_broken else FAREWELL_S)
        except ExceptionGroup as group:  # a bug in a task; processes are gone
            self._break(group)
        finally:
            self._clients.close()
            self._workers.close()
            self._gateway.close()
        if self._is_broken:
            return INTERNAL_EXIT_CODE
        return LEFT_BEHIND_EXIT_CODE if left_behind else 0

    def dispatch(self, event: Event) -> None:
        """Pass an event to the core and carry out its actions; only on the loop's thread.

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
            case StartPrewarmed(number=number):
                self._workers.prewarmed.start(number, self._tasks)
            case EndPrewarmed(number=number):
                self._workers.prewarmed.kill(number)
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
                self._reload(caller, is_dry)
            case ChangeConfiguration(caller=caller, change=change):
                self._asked.put_nowait(_Asked(caller, change=change))
            case Announce() | RequestRefused() | SetLogLevel() | Entry() | LogFault():
                self._announcer.take(action)
            case Abandon(model=model, generation=generation):
                self._workers.abandon(model, generation)
            case ForgetModel(model=model):
                self._workers.forget(model)
            case BudgetChanged(budget=budget):
                self._memory.changed(budget)
            case AppraiseLaunch():
                self._read_aside(self._appraise_launch(action))
            case AdoptLaunch(model=model, launch=launch, need=need):
                self._memory.relaunched(model, launch, need)
            case NeedRaised(launch=launch, raised_bytes=raised_bytes):
                self._memory.raised(launch, raised_bytes)
                self._appraised()
            case Finish():
                self._finished.set()
            case _:
                raise AssertionError(action)

    # ------------------------------------------------------------ what happens by itself

    def _core_of(self, config: DaemonConfig) -> Core:
        return Core(
            self._memory.settings_of(config, is_dry=True),
            config.models,
            facts=daemon_facts(config, self._surroundings.folder.client_socket),
            random=random.Random(),
            is_strict=False,
            gateway=config.http or config.gateway,
        )

    async def _begin(self) -> bool:
        """Read the folders of the models for the core; return False if a signal asks for the end
        meanwhile.

        Raises:
            ConfigError: the pinned models do not fit into the memory budget together.
        """
        reading = asyncio.create_task(self._memory.read(self._config))
        ending = asyncio.create_task(self._finished.wait())
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (reading, ending):
                one.cancel()
            await asyncio.wait([reading, ending])  # the process that reads is ended, too
        # Nothing waits from here to the new core, which would not know of the signal.
        if self._finished.is_set():
            return False
        read = reading.result()
        self._memory.adopt(read, self._memory.needs_of(read))
        self._memory.settings_of(read.config)  # which logs the budget
        self._core = self._core_of(read.config)
        return True

    def _start(self) -> None:
        self._appraised()
        self.dispatch(Started(now=self._clock.now()))

    def _learnt(self, launch: LaunchSettings, loaded: str) -> None:
        """Plan the next load with what a worker has measured of its model."""
        self._memory.measured(launch)
        self._appraised()
        if outdated := self._memory.outdated(launch, loaded):
            self._read_aside(self._read_again(outdated))

    async def _read_again(self, places: Collection[Place]) -> None:
        await self._memory.read_again(places)
        self._loop.call_soon(self._appraised)

    async def _downloaded(self, repository: Repository, folder: str) -> None:
        """Plan the models that lacked a repository with what is there, now that it is complete."""
        await self._memory.found(repository, folder)
        self._loop.call_soon(self._appraised)

    async def _appraise_launch(self, action: AppraiseLaunch) -> None:
        need = await self._memory.appraise(action.model, action.launch)
        appraised = LaunchAppraised(
            now=self._clock.now(),
            model=action.model,
            launch=action.launch,
            caller=action.caller,
            need=need,
        )
        self._loop.call_soon(self.dispatch, appraised)

    def _read_aside(self, reading: Coroutine[Any, Any, None]) -> None:
        """Run what waits for a model folder; the end does not wait for it."""
        task = self._tasks.create_task(reading)
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    def _appraised(self) -> None:
        self.dispatch(Appraised(now=self._clock.now(), needs=self._memory.needs))

    async def _pulse(self) -> None:
        """Keep the clock running and, every second, the clients informed."""
        is_second = False
        folder = FolderWatch(
            self._surroundings.folder,
            self._clients.listener,
            self._record,
            self._log,
            self._config.log_dir,
        )
        while True:
            await asyncio.sleep(PULSE_S)
            self._clock.now()
            is_second = not is_second
            if is_second:
                self._loop.call_soon(self._clients.pulse)
                self._loop.call_soon(folder.look)
                self._loop.call_soon(self._announcer.pulse, self._core.outline)

    async def _sample(self) -> None:
        """Measure every second, and write the record if that failed before."""
        sampler = Sampler(
            lambda error: self._log.write("warning", "memory not measured", error=error.strerror),
            self._memory.watch(),
        )
        try:
            while True:
                await sampler.measure(self._workers.pids)
                sampled = Sampled(
                    now=self._clock.now(),
                    footprint_bytes=sampler.footprint_bytes,
                    machine_bytes=ram_bytes(),
                    reading=sampler.reading,
                )
                self._loop.call_soon(self.dispatch, sampled)
                self._record.write_again()
                self._log.flight.alive()
                await asyncio.sleep(1.0)
        finally:
            sampler.close()

    def _on_signal(self, number: signal.Signals, is_repeated: bool) -> None:
        self._announcer.ends(number.name, *self._core.left_to_finish(is_repeated))
        self.dispatch(ShutdownAsked(now=self._clock.now(), is_immediate=is_repeated))

    def _reload(self, caller: Caller | None = None, is_dry: bool = False) -> None:
        """Read the file again and check all of it; if it is wrong, nothing changes (P20)."""
        if not is_dry:
            self._announcer.reloads()
        self._asked.put_nowait(_Asked(caller, is_dry))

    async def _keep_rereading(self) -> None:
        """Do what is asked of the configuration, one after the other: each reads what was written
        before it was asked."""
        while True:
            await self._answered(await self._asked.get())

    async def _answered(self, asked: _Asked) -> None:
        """Do what was asked of the configuration, or answer why it was not done.

        Nothing takes effect before `_adopt`, on the loop. So a bug that the text of a file or of a
        client leads to, on the way there, costs that request alone.
        """
        try:
            if isinstance(asked.change, SettingsQuery):
                await self._tell_settings(asked, asked.change)
            else:
                plan = None if asked.change is None else partial(_edit, asked.change)
                done = await self._read(plan, is_dry=asked.is_dry)
                self._loop.call_soon(self._adopt, asked, done)
        except (ConfigError, RefusedModelError) as error:
            self._loop.call_soon(self._refuse, asked, error)
        except Exception as error:  # noqa: BLE001 - see above
            self._log.bug(error, "nothing was changed", self._core.stories())
            message = f"a bug of mlxsup: {type(error).__name__}; nothing was changed"
            detail = {"hint": "please report it with the file from `mlxsup why --report FILE`"}
            bug = RemoteError(ErrorCode.INTERNAL, message, detail=detail)
            self._loop.call_soon(self._refuse, asked, bug)

    async def _tell_settings(self, asked: _Asked, query: SettingsQuery) -> None:
        """Read what the file says about a model, as it is now."""
        path, caller = self._config.config_path, asked.caller
        if caller is None:
            return
        settings: list[dict[str, Any]] = []
        if path is not None:
            text = await self._in_thread(path, partial(read_text, path), READ_LIMIT_S)
            tell = partial(settings_of, text, path, query.model)
            settings = await self._in_thread(path, tell, PARSE_LIMIT_S)
        answer = _placed({"model": query.model, "settings": settings}, path)
        read = SettingsRead(now=self._clock.now(), answer=answer, caller=caller)
        self._loop.call_soon(self.dispatch, read)

    async def _read(
        self, plan: Callable[[DaemonConfig], Edit] | None = None, *, is_dry: bool = False
    ) -> _Read:
        """Read the configuration and the folders of its models; write it first if a change of it is
        planned.

        An editor may be writing the file, and half of one may be valid. So before the process of a
        model ends because of it, the file must read the same a second later.

        Raises:
            ConfigError: it cannot be read, or anything in it is or would be wrong.
            RefusedModelError: the change is refused, or cannot be written.
        """
        path = self._config.config_path
        if path is None:
            return await self._change_without_file(plan)
        for _ in range(MAX_READS):
            text = await self._in_thread(path, partial(read_text, path), READ_LIMIT_S)
            if plan is None:
                config = await self._in_thread(
                    path, partial(parse_config, text, path), PARSE_LIMIT_S
                )
                raw, answer = text.raw, {}
            else:
                done = await self._planned(partial(planned, text, path, plan))
                config, raw, answer = done.config, done.raw, _placed(done.edit.answer, path)
            read = await self._memory.read(config)
            if plan is not None:
                self._check(read)
            is_still = is_dry or not self._core.ended_by(read.config.models)
            if not is_still:
                await asyncio.sleep(SETTLE_S)
            if raw != text.raw:
                write = partial(write_text, path, text.raw, raw)
                is_still = await self._in_thread(path, write, WRITE_LIMIT_S)
            elif not is_still:
                again = await self._in_thread(path, partial(read_text, path), READ_LIMIT_S)
                is_still = again == text
            if is_still:
                return _Read(read, answer)
        raise still_written(path)

    async def _change_without_file(self, plan: Callable[[DaemonConfig], Edit] | None) -> _Read:
        """Keep a change for as long as the daemon runs, which was started without a file."""
        if plan is None:
            raise ConfigError(["the daemon was started without a configuration file"])
        text = ConfigText(raw=self._config.text, folder=Path.cwd())
        done = await self._planned(partial(planned, text, None, plan))
        config = replace(self._config, models=done.config.models, text=done.raw)
        read = await self._memory.read(config)
        self._check(read)
        self._config = read.config
        return _Read(read, _placed(done.edit.answer, None))

    async def _planned(self, plan: Callable[[], Value]) -> Value:
        """Plan a change: the folders with models, which are searched for it, may be on any disk."""
        try:
            return await self._files.run(Path(), plan, limit_s=SEARCH_LIMIT_S)
        except TimeoutError:
            message = f"the model could not be found within {SEARCH_LIMIT_S:g} s"
            hint = "look after the disks with models on them"
            raise RefusedModelError("silent", message, hint) from None
        except OSError as error:
            message = f"the model could not be looked for: {error.strerror}"
            raise RefusedModelError("output", message, "end other programs and try again") from None

    def _check(self, read: ConfigSnapshot) -> None:
        """Raise ConfigError unless the configuration can take effect."""
        self._memory.needs_of(read)
        self._room_for(read.config)

    async def _in_thread(self, path: Path, function: Callable[[], Value], limit_s: float) -> Value:
        try:
            return await self._files.run(path, function, limit_s=limit_s)
        except TimeoutError:
            problem = f"{path}: could not be read within {limit_s:g} s; check its disk"
            raise ConfigError([problem]) from None
        except OSError as error:
            problem = (
                f"{path}: could not be read ({error.strerror}); end other programs, and reload"
            )
            raise ConfigError([problem]) from None

    def _refuse(self, asked: _Asked, error: _Refused) -> None:
        if asked.change is None and not asked.is_dry:
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            self._announcer.reload_refused(problems)
        if asked.caller is not None:
            now, answer = self._clock.now(), _refusal(error)
            self.dispatch(ReloadRefused(now=now, error=answer, caller=asked.caller))

    def _adopt(self, asked: _Asked, done: _Read) -> None:
        """Put a configuration that was read into effect, unless it only asks what it would do."""
        read, config, is_dry = done.snapshot, done.snapshot.config, asked.is_dry
        try:
            needs = self._memory.needs_of(read)
            room = self._room_for(config)
        except ConfigError as error:
            self._refuse(asked, error)
            return
        reloaded = Reloaded(
            now=self._clock.now(),
            settings=self._memory.settings_of(config, is_dry=is_dry),
            models=config.models,
            later=changed_for_later(self._config, config),
            needs=needs,
            unread=read.unread,
            answer=done.answer,
            caller=asked.caller,
            is_dry=is_dry,
        )
        if not is_dry:
            self._clients.limit_to(room)
            self._announcer.reloaded(reloaded.later)
            self._memory.adopt(read, needs)
        self.dispatch(reloaded)

    def _room_for(self, config: DaemonConfig) -> int:
        """Return the connections beside the new models and those still running.

        Raises:
            ConfigError: they are too few.
        """
        names = {entry.name for entry in config.models} | self._workers.models
        return room_for(len(names), self._open_files, self._clients.admitted)

    # ------------------------------------------------------------ bugs

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End at an exception of a callback, a bug of ours; log other complaints of the loop."""
        error = context.get("exception")
        if isinstance(error, Exception) and "handle" in context:
            self._break(error)
        else:
            self._log.write("error", "event loop", complaint=context.get("message"), error=error)

    def _break(self, error: Exception) -> None:
        """Log a bug with the stories of all models, and end everything."""
        if self._is_broken:
            return
        self._is_broken = True
        self._pending.clear()
        self._log.bug(error, "the daemon ends", self._core.stories())
        report(
            "mlxsup: the daemon ends because of an internal error; see mlxsup.log in the log folder"
        )
        self._finished.set()


def _edit(change: AddModel | RemoveModel | Configure, config: DaemonConfig) -> Edit:
    """Return what a client wants changed in a configuration.

    Raises:
        RefusedModelError: it cannot be.
    """
    if isinstance(change, RemoveModel):
        return removing(config, change.model)
    if isinstance(change, Configure):
        return changing(config, change.changes)
    find = partial(find_source, change.model, change.revision, is_here=False)
    return adding(config, change.model, change.name, find=find, ready=servable)


def _placed(answer: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Return what a client is told, with the file that it is about."""
    return {**answer, "config_path": str(path) if path is not None else None}


_Refused = ConfigError | RefusedModelError | RemoteError
"""The reason why a request about the configuration was refused."""


def _refusal(error: _Refused) -> RemoteError:
    """Return what a client is answered."""
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, ConfigError):
        return bad_configuration(error.problems)
    is_unknown = error.code == ErrorCode.UNKNOWN_MODEL
    code = ErrorCode.UNKNOWN_MODEL if is_unknown else ErrorCode.INVALID_REQUEST
    detail = {"problem": error.code, "hint": error.hint}
    return RemoteError(code, error.message, detail=detail)


def daemon_facts(config: DaemonConfig, client_socket: Path) -> dict[str, Any]:
    """Return version, pid and places of a daemon that runs with this configuration."""
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "endpoint": f"ipc://{_path_text(client_socket)}",
        "config_path": _path_text(config.config_path) if config.config_path else None,
        "log_dir": _path_text(config.log_dir),
    }


def _path_text(path: Path) -> str:
    """Return a path as text that can be encoded, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "replace")
