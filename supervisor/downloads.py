"""The processes that download what models lack: started and ended when the core says so."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from mlxsup.protocol.codec import MAX_LINE_BYTES, to_line
from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    DownloadSpec,
    Repository,
    SnapshotReport,
    download_argv,
    read_report,
)

from .core.actions import EndDownload, StartDownload
from .core.events import DownloadSaid
from .workers.instance import Surroundings
from .workers.process import WorkerProcess

KILL_LIMIT_S = 10.0
KEPT_LINES = 50
"""Of what a process says besides its reports, for the log if it ends without a last one."""

OnFolder = Callable[[Repository, str], Awaitable[None]]
"""Awaited with a repository that is complete, and its folder, before the core hears of it."""


class DownloadKeeper:
    """Starts downloads, passes on what they report, and ends them.

    Args:
        around: what all processes of the supervisor share.
        on_folder: see `OnFolder`.
        argv: the command that starts a download.
    """

    def __init__(
        self, around: Surroundings, on_folder: OnFolder, argv: Sequence[str] | None = None
    ) -> None:
        self._around = around
        self._on_folder = on_folder
        self._argv = list(argv) if argv is not None else download_argv()
        # One entry for each live process, in both; the core starts one for each repository.
        self._units: dict[int, _Unit] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}

    def carry_out(self, action: StartDownload | EndDownload, tasks: asyncio.TaskGroup) -> None:
        """Begin or end a download."""
        if isinstance(action, EndDownload):
            if (unit := self._units.get(action.number)) is not None:
                self._around.log.write("info", "download cancelled", repo=unit.repository)
                unit.kill()
            return
        unit = _Unit(self._around, action, self._on_folder)
        self._units[action.number] = unit
        self._lives[action.number] = tasks.create_task(self._live(action.number, unit))

    async def end(self) -> None:
        """End all of them; return when they are gone."""
        for unit in self._units.values():
            unit.kill()
        if self._lives:
            await asyncio.wait(self._lives.values(), timeout=KILL_LIMIT_S)
        for life in self._lives.values():
            life.cancel()

    async def _live(self, number: int, unit: _Unit) -> None:
        try:
            await unit.live(self._argv)
        finally:
            del self._units[number]
            del self._lives[number]


class _Unit:
    """One download's process.

    Attributes:
        repository: what it downloads.

    Args:
        around: what all processes of the supervisor share.
        action: what the core asked for.
        on_folder: see `OnFolder`.
    """

    def __init__(self, around: Surroundings, action: StartDownload, on_folder: OnFolder) -> None:
        self.repository = action.repository
        self._around = around
        self._number = action.number
        self._on_folder = on_folder
        self._process: WorkerProcess | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._is_wanted = True
        self._line = b""
        self._last: DownloadReport | None = None
        self._noise: deque[str] = deque(maxlen=KEPT_LINES)

    def kill(self) -> None:
        """End it at once: what has arrived is as good as if it had been asked to end."""
        self._is_wanted = False
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
        if self._arrival is not None:
            self._arrival.cancel()

    async def live(self, argv: Sequence[str]) -> None:
        """Run it, and post what it reports; return when its process is gone."""
        if not self._is_wanted:
            return
        spec = DownloadSpec(repository=self.repository)
        try:
            # Of all children only this one needs proxies, mirrors and the hub's token.
            process = WorkerProcess.spawn(argv, to_line(spec), self._read, environment=os.environ)
        except OSError as error:
            await self._end(_broken(f"it could not be started: {error.strerror}"))
            return
        self._process = process
        log = self._around.log
        log.write("info", "download started", repo=self.repository, pid=process.pid)
        try:
            end = await process.ended()
            last = self._last
            if not isinstance(last, DownloadDone | DownloadFailed):
                last = _broken(f"it ended with {end.signal_name or f'exit code {end.code}'}")
            await self._end(last)
        finally:
            process.close()
            process.forget()

    def _read(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-MAX_LINE_BYTES:]
        for line in lines:
            report = read_report(line)
            if report is None:
                self._noise.append(line.decode(errors="replace"))
                continue
            self._last = report
            if isinstance(report, DownloadProgress):
                self._post(report)

    async def _end(self, last: DownloadDone | DownloadFailed) -> None:
        if not self._is_wanted:
            return
        log = self._around.log
        if isinstance(last, DownloadFailed):
            facts = {"cause": last.message, "problem": last.problem}
            log.write("warning", "download failed", repo=self.repository, **facts)
            if last.problem is DownloadProblem.INTERNAL and self._noise:
                log.block("\n".join(self._noise))
            asyncio.get_running_loop().call_soon(self._post, last)
            return
        log.write("info", "download complete", repo=self.repository, bytes=last.fetched_bytes)
        self._arrival = asyncio.ensure_future(self._on_folder(self.repository, last.folder))
        await asyncio.wait([self._arrival])
        asyncio.get_running_loop().call_soon(self._post, last)

    def _post(self, report: SnapshotReport) -> None:
        if self._is_wanted:
            around = self._around
            around.post(DownloadSaid(now=around.now(), number=self._number, report=report))


def _broken(message: str) -> DownloadFailed:
    return DownloadFailed(problem=DownloadProblem.INTERNAL, message=message)
