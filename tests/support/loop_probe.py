"""What an event loop does that it must not: computes for long, or touches files of others."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

TICK_S = 0.002
MOST_CALLS = 50_000
"""Of a loop's thread between two ticks: twice what a reload with a hundred new models takes."""

TOUCHES = {"open", "os.listdir", "os.scandir", "os.stat", "os.lstat"}
"""Audit events of the interpreter, and what it does not tell of: looks at a file."""


@asynccontextmanager
async def no_stall(most_calls: int = MOST_CALLS) -> AsyncIterator[None]:
    """Fail if the thread of the running loop calls more functions between two ticks.

    Calls are counted instead of time, because a busy machine does not change them.
    """
    longest = count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    async def tick() -> None:
        nonlocal longest, count
        while True:
            longest, count = max(longest, count), 0
            await asyncio.sleep(TICK_S)

    ticking = asyncio.create_task(tick())
    sys.setprofile(note)
    try:
        yield
        await asyncio.sleep(TICK_S)
    finally:
        sys.setprofile(None)
        ticking.cancel()
    assert longest > 0, "nothing was counted"
    assert longest <= most_calls, f"the loop has called {longest} functions without a pause"


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
