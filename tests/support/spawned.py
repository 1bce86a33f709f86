"""Python code as a worker's process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest

from mlxsup.supervisor.workers.process import WorkerProcess

Body = Callable[[WorkerProcess, bytearray], Awaitable[None]]


def run_with(
    code: str,
    body: Body,
    first_line: bytes = b"hello\n",
    on_output: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Runs Python code as a worker process, and the body with it and its output so far."""

    async def run() -> None:
        output = bytearray()
        argv = [sys.executable, "-c", code]

        def take(data: bytes) -> None:
            output.extend(data)
            on_output(data)

        process = WorkerProcess.spawn(argv, first_line, take)
        try:
            async with asyncio.timeout(60):
                await body(process, output)
        finally:
            process.close()
            await process.exited

    asyncio.run(run())


class Readers:
    """What event loops read from now on: the callbacks by their descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._callbacks: dict[int, Callable[..., object]] = {}
        add, remove = asyncio.SelectorEventLoop.add_reader, asyncio.SelectorEventLoop.remove_reader

        def add_noted(
            loop: asyncio.SelectorEventLoop, fd: int, callback: Callable[..., object]
        ) -> None:
            self._callbacks[fd] = callback
            add(loop, fd, callback)

        def remove_noted(loop: asyncio.SelectorEventLoop, fd: int) -> bool:
            self._callbacks.pop(fd, None)
            return remove(loop, fd)

        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", add_noted)
        monkeypatch.setattr(asyncio.SelectorEventLoop, "remove_reader", remove_noted)

    def of(self, owner: object) -> dict[int, Callable[..., object]]:
        """Those whose callback is a method of this object."""
        return {
            descriptor: callback
            for descriptor, callback in self._callbacks.items()
            if getattr(callback, "__self__", None) is owner
        }
