"""What an event loop does that it must not: computes for long, or touches files of others."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

TICK_S = 0.002
MOST_CPU_S = 0.1
"""Of a loop's thread between two ticks: CPU time, which a busy machine changes little."""

TOUCHES = {"open", "os.listdir", "os.scandir", "os.stat", "os.lstat"}
"""Audit events of the interpreter, and what it does not tell of: looks at a file."""


@asynccontextmanager
async def no_stall(most_cpu_s: float = MOST_CPU_S) -> AsyncIterator[None]:
    """Fail if the thread of the running loop computes for longer between two ticks."""
    longest, last = 0.0, time.thread_time()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            now = time.thread_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(TICK_S)

    gc.collect()
    gc.freeze()  # what earlier tests left is not the daemon's: a look through it takes 0.1 s
    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        gc.unfreeze()
        await asyncio.sleep(TICK_S)
        ticking.cancel()
    assert longest <= most_cpu_s, f"the loop has computed for {longest:.3f} s without a pause"


class FileWatch:
    """Notes which files below a folder a thread touches, and from where.

    Attributes:
        touched: the event, the path, and the line of the product that caused it.

    Args:
        folder: of files of others; resolved.
        thread: the thread whose touches count.
    """

    def __init__(self, folder: Path, thread: int) -> None:
        self.touched: list[tuple[str, str, str]] = []
        self._folder = str(folder)
        self._thread = thread

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an event, if it is about such a file and the product is to blame."""
        if event not in TOUCHES or threading.get_ident() != self._thread or not arguments:
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self._folder):
            return
        if where := _line_of_product():
            self.touched.append((event, os.fspath(path), where))


def _line_of_product() -> str:
    """The innermost line of the product on the stack; empty if a test does this itself."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/mlxsup/" in name or "/supervisor/" in name:
            return f"{name}:{frame.f_lineno}"
        if "/tests/" in name and "/support/" not in name:
            return ""
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return ""


_watches: list[FileWatch] = []
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    for watch in _watches:
        watch.note(event, arguments)


@contextmanager
def watched_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileWatch]:
    """Watch what this thread touches below a folder; an audit hook cannot be taken away again."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    watch = FileWatch(folder, threading.get_ident())

    def noted(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *arguments: Any, **options: Any) -> Any:
            watch.note(event, (path,))
            return function(path, *arguments, **options)

        return look

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, noted(f"os.{name}", getattr(os, name)))
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)
