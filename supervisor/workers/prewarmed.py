"""Prewarmed workers: started without a launch spec, and handed over to the model that needs one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxsup.protocol.launch import prewarmed_argv

from ..core.events import PrewarmedEnded, PrewarmedReady
from ..file_threads import LIMIT_S, FileThreads
from ..memory.machine import installed
from .instance import Surroundings
from .measure import is_process_stopped
from .process import Exit, WorkerProcess

RECORDED_AS = "(prewarmed worker)"
"""In the record of live workers, instead of a model: no model can have this name."""

KEPT_BYTES = 16 * 1024
"""How much of what one prints before it has a model is kept."""

END_LIMIT_S = 10.0
"""How long killed ones may take to be gone when the daemon ends."""


Installation = frozenset[tuple[str, int]]
"""The packages, and Python itself, each with the time of its installation."""


def find_installation() -> Installation:
    """Return what a process that starts now would import.

    Each installation of a package makes its `.dist-info` folder anew, even of the same version.
    """
    packages = (Path(sys.executable), *installed())
    return frozenset((path.name, path.stat().st_mtime_ns) for path in packages)


class PrewarmedUnit:
    """One prewarmed worker, until its exit or until a model takes it over.

    Args:
        around: what all workers share.
        number: as the core counts them.

    Attributes:
        installation: what was installed when it was started; None: not known.
    """

    def __init__(self, around: Surroundings, number: int) -> None:
        self._around = around
        self._number = number
        self._process: WorkerProcess | None = None
        self._ready_pipe: int | None = None
        self._output = b""
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_killed = False
        self.installation: Installation | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid of its process, while it lives and no model has it."""
        process = self._process
        if process is None or process.exited.done() or self._taken.done():
            return None
        return process.pid

    def take(self, line: bytes, on_output: Callable[[bytes], None]) -> WorkerProcess | None:
        """Give it its launch spec; return None if its process is gone, or is ended because it is
        stopped and would not read the spec.

        Args:
            line: the launch spec.
            on_output: gets what it has printed so far, soon, and then what it prints.

        Raises:
            OSError: the line is longer than a pipe takes, or its process cannot be looked at.
        """
        process = self._process
        if process is None or self._is_killed:
            return None
        if is_process_stopped(process.pid):
            self._around.log.write("warning", "prewarmed worker is stopped", pid=process.pid)
            self.kill()
            return None
        if not process.take_line(line, on_output):
            return None
        if self._output:
            asyncio.get_running_loop().call_soon(on_output, self._output)
        self._taken.set_result(None)
        return process

    def kill(self) -> None:
        """End it at once, or as soon as it is there; it holds nothing that could be lost."""
        self._is_killed = True
        if self._process is not None and not self._taken.done():
            self._process.signal(signal.SIGKILL)

    async def live(self) -> None:
        """Post `PrewarmedReady`, and `PrewarmedEnded` if it ends before it was taken over."""
        try:
            if self._start():
                await self._end()
        finally:
            self._stop_listening()
            if self._process is not None and not self._taken.done():
                self._process.close()
                self._process.forget()

    def _start(self) -> bool:
        around = self._around
        try:
            self._ready_pipe, theirs = os.pipe()
            try:
                argv = prewarmed_argv(around.argv, theirs)
                self._process = WorkerProcess.spawn(argv, b"", self._keep, inherited=[theirs])
            finally:
                os.close(theirs)
        except OSError as error:
            around.log.write("warning", "prewarmed worker not started", error=error.strerror)
            self._post_end()
            return False
        pid = self._process.pid
        asyncio.get_running_loop().add_reader(self._ready_pipe, self._on_ready, self._ready_pipe)
        around.spawned(RECORDED_AS, pid)
        around.log.write("info", "prewarmed worker started", pid=pid)
        if self._is_killed:
            self.kill()
        return True

    async def _end(self) -> None:
        """Wait until it is taken over or gone."""
        assert self._process is not None
        around, process = self._around, self._process
        either: list[asyncio.Future[Any]] = [process.exited, self._taken]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._taken.done():
            return
        around.exited(process.pid)
        level = "warning" if not self._is_killed else "info"
        facts = Exit.of(process.exited.result()).facts
        around.log.write(level, "prewarmed worker exited", pid=process.pid, **facts)
        if self._output and not self._is_killed:
            around.log.block(self._output.decode("utf-8", "replace"))
        self._post_end()

    # ------------------------------------------------------------ called by the event loop

    def _on_ready(self, ready_pipe: int) -> None:
        is_ready = os.read(ready_pipe, 1) != b""  # or it has ended, as is about to be seen
        self._stop_listening()
        pid = self.pid
        if is_ready and pid is not None:
            now = self._around.now()
            self._around.post(PrewarmedReady(now=now, number=self._number, pid=pid))

    def _stop_listening(self) -> None:
        if self._ready_pipe is not None:
            asyncio.get_running_loop().remove_reader(self._ready_pipe)
            os.close(self._ready_pipe)
            self._ready_pipe = None

    def _keep(self, data: bytes) -> None:
        self._output = (self._output + data)[-KEPT_BYTES:]

    def _post_end(self) -> None:
        self._around.post_soon(PrewarmedEnded(now=self._around.now(), number=self._number))


class PrewarmedUnits:
    """All prewarmed workers, each a task.

    Args:
        around: what all workers share.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        # Bounded by the core, which counts them: one entry for each that lives and no model has.
        self._units: dict[int, PrewarmedUnit] = {}
        self._threads = FileThreads()
        self._lives: set[asyncio.Task[None]] = set()

    @property
    def pids(self) -> list[int]:
        """Return the pids of all that live and no model has."""
        return [unit.pid for unit in self._units.values() if unit.pid is not None]

    def start(self, number: int, tasks: asyncio.TaskGroup) -> None:
        """Begin the life of one."""
        unit = self._units[number] = PrewarmedUnit(self._around, number)
        life = tasks.create_task(self._live(number, unit))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    def get(self, number: int | None) -> PrewarmedUnit | None:
        """Return the one with this number; None once it is gone or taken over."""
        return self._units.get(number) if number is not None else None

    async def end_outdated(self, number: int | None) -> None:
        """End the one with this number if packages were installed or removed since it began: it
        would serve with those that it has imported."""
        unit = self.get(number)
        if unit is None:
            return
        before, now = unit.installation, await self._look()
        if before is None or before != now:
            self._around.log.write("info", "prewarmed worker outdated", pid=unit.pid)
            unit.kill()

    def kill(self, number: int) -> None:
        """End one."""
        unit = self._units.get(number)
        if unit is not None:
            unit.kill()

    async def end(self) -> None:
        """Kill all; return when all are gone, or at the limit."""
        for unit in self._units.values():
            unit.kill()
        if self._lives:
            await asyncio.wait(self._lives, timeout=END_LIMIT_S)

    def leave(self) -> int:
        """Stop waiting for those that cannot be ended; return how many there are."""
        left = self.pids
        for pid in left:
            self._around.log.write("error", "prewarmed worker left behind", pid=pid)
        for life in self._lives:
            life.cancel()
        return len(left)

    async def _live(self, number: int, unit: PrewarmedUnit) -> None:
        try:
            unit.installation = await self._look()
            await unit.live()
        finally:
            del self._units[number]

    async def _look(self) -> Installation | None:
        """Return what is installed; None if that cannot be read."""
        try:
            return await self._threads.run(Path(sys.prefix), find_installation, limit_s=LIMIT_S)
        except OSError:  # TimeoutError is one
            return None
