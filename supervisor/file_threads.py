"""Threads in which the supervisor touches files of other people: their disk may never answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

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
            thread.start()
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
