"""How the end of a process is noticed: by a descriptor, by a thread, and as macOS does it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.supervisor.sockets.peer import credentials_of
from mlxsup.supervisor.workers import exit_watch
from mlxsup.supervisor.workers.exit_watch import watch_exit, watch_with_thread

from support.eventually_async import eventually_async


class Child:
    """A process that ends on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])

    def end(self) -> None:
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    with child.process:
        yield child
        child.process.kill()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(limited())


def threads_of(child: Child) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == f"exit-of-{child.process.pid}"]


@pytest.mark.parametrize("watch", [watch_exit, watch_with_thread])
def test_a_watch_that_was_stopped_is_silent_and_leaves_no_file_open(
    child: Child, watch: Callable[..., Callable[[], None]]
) -> None:
    async def body() -> None:
        seen: list[str] = []
        before = len(os.listdir("/dev/fd"))
        stop = watch(child.process.pid, lambda: seen.append("stopped"))
        stop()
        assert len(os.listdir("/dev/fd")) == before
        watch(child.process.pid, lambda: seen.append("watched"))
        child.end()
        await eventually_async(lambda: seen and not threads_of(child))
        await asyncio.sleep(0)  # what the threads asked of the loop
        assert seen == ["watched"]
        assert len(os.listdir("/dev/fd")) == before

    run(body)


def test_a_thread_that_waits_holds_up_no_end_of_the_process(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    async def body() -> None:
        watch_with_thread(child.process.pid, lambda: None)

    run(body)
    [thread] = threads_of(child)
    assert thread.daemon
    child.end()
    thread.join(60.0)
    assert (thread.is_alive(), raised) == (False, []), "the loop was closed meanwhile"


def test_only_a_process_that_has_ended_can_be_reaped(child: Child) -> None:
    assert not exit_watch.can_be_reaped(child.process.pid)
    child.end()
    assert exit_watch.can_be_reaped(child.process.pid)


def test_an_exit_that_a_descriptor_tells_of_needs_no_thread(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def watch(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
        threads.append(pid)
        return watch_with_thread(pid, on_exit)

    monkeypatch.setattr(exit_watch, "watch_with_thread", watch)

    async def body() -> None:
        seen: list[str] = []
        watch_exit(child.process.pid, lambda: seen.append("watched"))
        child.end()
        await eventually_async(lambda: seen)

    run(body)
    assert threads == []


# ---------------------------------------------------------------- macOS


class Queue:
    """A kqueue that writes down what is asked of it."""

    def __init__(self, error: OSError | None) -> None:
        self.asked: list[object] = []
        self.file, self._writer = os.pipe()
        self._error = error

    def control(self, changes: list[object], most: int) -> None:
        self.asked += [*changes, most]
        if self._error is not None:
            raise self._error

    def fileno(self) -> int:
        return self.file

    def close(self) -> None:
        self.asked.append("closed")
        os.close(self.file)
        os.close(self._writer)


def on_macos(monkeypatch: pytest.MonkeyPatch, error: OSError | None = None) -> tuple[Any, Queue]:
    """The module as macOS imports it, and the queue that it will use."""
    queue = Queue(error)
    names = {"KQ_FILTER_PROC": -5, "KQ_EV_ADD": 1, "KQ_EV_ONESHOT": 16, "KQ_NOTE_EXIT": 2**31}
    for name, value in names.items():
        monkeypatch.setattr(select, name, value, raising=False)
    monkeypatch.setattr(select, "kqueue", lambda: queue, raising=False)
    monkeypatch.setattr(select, "kevent", lambda *a, **k: (*a, k), raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    spec = importlib.util.find_spec(exit_watch.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, queue


def test_macos_is_asked_once_for_the_exit_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module, queue = on_macos(monkeypatch)
    descriptor = module.pollable(77)
    change = (77, {"filter": -5, "flags": 17, "fflags": 2**31})
    assert queue.asked == [change, 0, "closed"]
    os.close(descriptor)  # its own file, still open
    assert module.can_be_reaped(77), "no debugger sees an exit first there"


def test_macos_knows_no_process_that_waits_to_be_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    module, queue = on_macos(monkeypatch, ProcessLookupError(3, "No such process"))
    seen: list[str] = []

    async def body() -> None:
        module.watch_exit(77, lambda: seen.append("watched"))
        module.watch_exit(77, lambda: seen.append("stopped"))()
        assert seen == [], "the caller comes first"
        await asyncio.sleep(0)

    monkeypatch.setattr(queue, "close", lambda: None)
    run(body)
    Queue.close(queue)
    assert seen == ["watched"]


def test_macos_without_a_free_file_watches_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, queue = on_macos(monkeypatch, OSError(24, "Too many open files"))

    async def body() -> None:
        with pytest.raises(OSError, match="Too many open files"):
            module.watch_exit(os.getpid(), print)

    run(body)
    assert queue.asked[-1] == "closed"


def test_macos_names_the_process_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    # SOL_LOCAL; LOCAL_PEERPID, and LOCAL_PEERCRED with version, uid and the groups
    said: dict[Any, Any] = {(0, 2): 77, (0, 1, 128): struct.pack("2I68x", 0, 501)}
    connection: Any = SimpleNamespace(getsockopt=lambda *option: said[option])
    assert credentials_of(connection) == (77, 501)
    said[0, 2] = 0
    assert credentials_of(connection) == (None, 501)
