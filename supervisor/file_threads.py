"""Threads in which the supervisor touches files of other people: their disk may never answer.

So it learns, too, whether the files of a model still are those that its worker has loaded.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from mlxsup.protocol.launch import LaunchSettings

from .memory.folder import Stamp, difference, stamp

SILENT = "its folder does not respond; check its disk"

LIMIT_S = 5.0
"""How long a look at a folder may take; a disk may not answer at all."""

UNKNOWN = "its folder could not be read when it was loaded"

Value = TypeVar("Value")


class FileThreads:
    """Runs functions in threads that may hang for ever, at most one thread for each path.

    The threads are daemonic and never joined: one that hangs keeps neither the loop nor the end of
    the process waiting, as the threads of an executor would. A function must not hold the
    interpreter's lock while it waits for a disk: `os.stat` releases the lock, but the methods of
    `os.DirEntry` do not.
    """

    def __init__(self) -> None:
        # Bounded by the paths that are asked for: the configuration, and one folder for each model.
        self._running: dict[Path, Future[Any]] = {}

    async def run(self, path: Path, function: Callable[[], Value], *, limit_s: float) -> Value:
        """Return what the function returns.

        Args:
            path: what the function reads; while an earlier one still does, this one waits for it.
            function: called in a thread.
            limit_s: how long that may take.

        Raises:
            TimeoutError: it has not ended in time; its thread is left to itself.
            OSError: no thread can be started.
        """
        async with asyncio.timeout(limit_s):
            while (earlier := self._running.get(path)) is not None:
                await asyncio.wait([asyncio.wrap_future(earlier)])
            future: Future[Value] = Future()
            future.set_running_or_notify_cancel()  # so that the time limit does not cancel it
            self._running[path] = future
            thread = threading.Thread(
                target=self._run, args=(path, function, future), name="mlxsup-files", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                del self._running[path]
                raise OSError(errno.EAGAIN, str(error)) from None
            return await asyncio.wrap_future(future)

    def _run(self, path: Path, function: Callable[[], Value], future: Future[Value]) -> None:
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001  raised again in the coroutine that waits
            del self._running[path]
            future.set_exception(error)
        else:
            del self._running[path]
            future.set_result(value)


class FileLooks:
    """Looks at the folders of models; each has a time limit.

    Args:
        limit_s: how long a look may take.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._threads = FileThreads()

    async def before_load(self, launch: LaunchSettings) -> Stamp | None:
        """Return the files that a worker is about to load.

        None if they cannot be read, or if its engine loads none.

        Raises:
            TimeoutError: the folder does not answer, and would keep a worker waiting, too.
        """
        if launch.engine == "fake":
            return None
        try:
            return await self._stamp(launch)
        except TimeoutError:
            raise
        except OSError:  # the load itself says what is wrong
            return None

    async def change(self, launch: LaunchSettings, loaded: Stamp | None) -> str:
        """Return what has changed since a worker loaded its files, a phrase; empty if nothing."""
        if launch.engine == "fake":
            return ""
        if loaded is None:
            return UNKNOWN
        try:
            return difference(loaded, await self._stamp(launch))
        except TimeoutError:
            return f"its folder could not be read within {self._limit_s:g} s"
        except OSError as error:
            return f"its folder cannot be read ({error.strerror or error})"

    async def _stamp(self, launch: LaunchSettings) -> Stamp:
        folder = Path(launch.path)
        return await self._threads.run(
            folder, lambda: stamp(folder, launch.adapters.values()), limit_s=self._limit_s
        )
