"""Every live worker, and the logs of the models."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.worker_messages import MessageToWorker, Ready

from ..core.actions import Spawn, WorkerSignal
from ..core.events import FilesSeen, SpawnFailed, WorkerSeen
from ..file_threads import SILENT, FileLooks
from ..log_files import LogWriter
from ..logs import ModelLog
from ..memory.measurements import Measurements
from ..memory.needs import measured_by
from .instance import Surroundings, WorkerUnit
from .measure import is_process_stopped
from .prewarmed import PrewarmedUnits

BROKEN_LIMIT_S = 30.0
"""How long ending all processes may take after a bug."""


OnMeasured = Callable[[LaunchSettings, str], None]
"""Called when a worker with these settings has measured its model, with the fingerprint of the
files that it has loaded."""


class Workers:
    """The lives of all workers, each a task.

    Attributes:
        measurements: what they measured of their models, in this daemon and before.
        prewarmed: those without a model.

    Args:
        surroundings: what all of them share.
        log_dir: the folder of the models' logs.
        writer: writes the logs.
        on_measured: see `OnMeasured`.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        log_dir: Path,
        writer: LogWriter,
        on_measured: OnMeasured,
    ) -> None:
        self._surroundings = surroundings
        self.prewarmed = PrewarmedUnits(surroundings)
        self._on_measured = on_measured
        self._log = surroundings.log
        self._log_dir = log_dir
        self._writer = writer
        self.measurements = Measurements(surroundings.folder.path)
        if self.measurements.problem:
            problem = self.measurements.problem
            self._log.write("warning", "measurements not used", cause=problem)
        # One entry for each live process, in both.
        self._units: dict[tuple[ModelName, Generation], WorkerUnit] = {}
        self._lives: dict[WorkerUnit, asyncio.Task[None]] = {}
        # One entry for each model of the configuration.
        self._model_logs: dict[ModelName, ModelLog] = {}
        self._files = FileLooks()
        self._spawns = 0

    @property
    def pids(self) -> list[int]:
        """Return the pids of all live workers, those without a model included."""
        own = [unit.pid for unit in self._units.values() if unit.pid is not None]
        return [*own, *self.prewarmed.pids]

    @property
    def models(self) -> set[ModelName]:
        """Return the models that have a process."""
        return {name for name, _ in self._units}

    def get(self, model: ModelName, generation: Generation) -> WorkerUnit | None:
        """Return the worker of this life; None once it is over."""
        return self._units.get((model, generation))

    def send(self, model: ModelName, generation: Generation, message: MessageToWorker) -> None:
        """Send a message to the worker of this life, unless it is over."""
        unit = self.get(model, generation)
        if unit is not None:
            unit.send(message)

    def signal(self, model: ModelName, generation: Generation, signal: WorkerSignal) -> None:
        """Signal the worker of this life, unless it is over."""
        unit = self.get(model, generation)
        if unit is not None:
            unit.signal(signal)

    def spawn(self, action: Spawn, tasks: asyncio.TaskGroup) -> None:
        """Begin the life of a worker."""
        self._spawns += 1
        model_log = self._model_logs.get(action.model)
        if model_log is None:
            model_log = ModelLog(self._log_dir, action.model, self._writer)
            self._model_logs[action.model] = model_log
        prewarmed = self.prewarmed.get(action.prewarmed)
        unit = WorkerUnit(
            self._surroundings,
            action,
            self._spawns,
            model_log,
            lambda ready: self._learn(unit, ready),
            take_prewarmed=prewarmed.take if prewarmed is not None else None,
        )
        self._units[action.model, action.generation] = unit
        self._lives[unit] = tasks.create_task(self._live(unit, action.prewarmed))

    def _learn(self, unit: WorkerUnit, ready: Ready) -> None:
        """Remember what a worker measured; a full disk does not stop the serving."""
        measured = measured_by(unit.launch, ready, unit.loaded_files)
        if measured is None:
            return
        try:
            self.measurements.learn(measured)
        except OSError as error:
            self._log.write("warning", "measurements not written", error=error.strerror)
        self._on_measured(unit.launch, measured.fingerprint)

    async def _live(self, unit: WorkerUnit, prewarmed: int | None) -> None:
        try:
            try:
                await self.prewarmed.end_outdated(prewarmed)
                unit.loaded_files = await self._files.before_load(unit.launch)
            except TimeoutError:
                self._cannot_live(unit, prewarmed)
            else:
                await unit.live()
        finally:
            del self._units[unit.model, unit.generation]
            del self._lives[unit]

    def _cannot_live(self, unit: WorkerUnit, prewarmed: int | None) -> None:
        """Post that the folder of its model does not answer: a process would only hang there."""
        if prewarmed is not None:
            self.prewarmed.kill(prewarmed)  # the core has given it to this life
        around = self._surroundings
        failed = SpawnFailed(
            now=around.now(), model=unit.model, generation=unit.generation, detail=SILENT
        )
        around.post_soon(failed)

    def look_at(self, model: ModelName, generation: Generation, delay_s: float) -> None:
        """Post `WorkerSeen` after that time, unless the state of its process cannot be known."""
        is_stopped = self.is_stopped(model, generation)
        if is_stopped is None:
            return

        def tell() -> None:
            around = self._surroundings
            seen = WorkerSeen(
                now=around.now(), model=model, generation=generation, is_stopped=is_stopped
            )
            around.post(seen)

        # What has arrived in the meantime is read first: a late beat is a sign of life.
        asyncio.get_running_loop().call_later(delay_s, tell)

    def is_stopped(self, model: ModelName, generation: Generation) -> bool | None:
        """Return whether the state of the process is *stopped*; None if that cannot be known."""
        unit = self.get(model, generation)
        if unit is None or unit.pid is None:
            return None
        try:
            return is_process_stopped(unit.pid)
        except OSError as error:  # the core asks again before it judges
            self._log.write(
                "warning", "worker inspection failed", model=model, error=error.strerror
            )
            return None

    def look_at_files(
        self, model: ModelName, generation: Generation, tasks: asyncio.TaskGroup
    ) -> None:
        """Post `FilesSeen`, unless the worker's life is over."""
        unit = self.get(model, generation)
        if unit is not None:
            tasks.create_task(self._compare(unit))

    async def _compare(self, unit: WorkerUnit) -> None:
        change = await self._files.change(unit.launch, unit.loaded_files)
        around = self._surroundings
        seen = FilesSeen(
            now=around.now(), model=unit.model, generation=unit.generation, change=change
        )
        around.post_soon(seen)

    def abandon(self, model: ModelName, generation: Generation) -> None:
        """Give up a process that cannot be ended; its exit is still waited for."""
        unit = self._units[model, generation]
        self._log.write("error", "worker cannot be ended", model=model, pid=unit.pid)
        report(f"mlxsup: SIGKILL has no effect on process {unit.pid} of {model}")
        unit.abandon()

    def forget(self, model: ModelName) -> None:
        """Close the log of a model that was removed, and of which no process is left."""
        model_log = self._model_logs.pop(model, None)
        if model_log is not None:
            model_log.close()

    async def end(self) -> None:
        """Kill every process; return when all are gone, or at the limit."""
        for unit in self._lives:
            unit.kill()
        if self._lives:
            await asyncio.wait(self._lives.values(), timeout=BROKEN_LIMIT_S)

    def leave(self) -> int:
        """Stop waiting for processes that cannot be ended; return how many there are."""
        left = [unit for unit in self._lives if unit.pid is not None]
        for unit in left:
            self._log.write("error", "worker left behind", model=unit.model, pid=unit.pid)
            report(
                f"mlxsup: the daemon ends, but SIGKILL has no effect on process {unit.pid} of "
                f"{unit.model}"
            )
        for life in self._lives.values():
            life.cancel()
        return len(left) + self.prewarmed.leave()

    def close(self) -> None:
        """Close the models' logs."""
        for model_log in self._model_logs.values():
            model_log.close()


def report(text: str) -> None:
    """Report on standard error what no log can; it does not matter if the terminal is gone."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
