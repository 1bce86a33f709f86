"""The thread and the event loop that drive a client's connection; both are played."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from mlxsup.client import async_client as async_module
from mlxsup.client import client as thread_module
from mlxsup.client import connection as connection_module
from mlxsup.client.async_client import AsyncClient
from mlxsup.client.client import Client, IoThread, SyncInbox
from mlxsup.client.errors import ConnectionLost
from mlxsup.client.streams import value_of
from mlxsup.protocol.ids import RequestId


class Connection:
    """A connection that notes what a driver does with it."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.delay_s: float | None = None
        self.link: Any = None
        self.is_more = False

    def open_command(self, *_: object, is_subscription: bool) -> None:
        """Open it."""

    def pump(self) -> bool:
        self.done.append("pump")
        return self.is_more

    def pump_messages(self) -> bool:
        self.done.append("pump messages")
        return self.is_more

    def cancel(self, _: object) -> None:
        self.done.append("cancel")

    def close(self) -> None:
        self.done.append("close")

    def terminate(self) -> None:
        self.done.append("terminate")


# ---------------------------------------------------------------- the thread


class Enough(Exception):
    """End of a loop that would otherwise wait for ever."""


def enough() -> None:
    raise Enough


class Unstarted:
    """A thread that the test runs itself."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.calls: list[str] = []
        self.on_join: Callable[[], object] = lambda: None

    def start(self) -> None:
        self.calls.append("start")

    def join(self) -> None:
        self.calls.append("join")
        self.on_join()


class Driven:
    """An IoThread that is run by hand, and the pipe by which it is woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection = Connection()
        self.polls: list[tuple[list[tuple[object, int]], int | None]] = []
        self.on_poll: list[Callable[[], object]] = []
        self.woken, self.waker = ends = os.pipe()
        threads: list[Unstarted] = []

        def thread(**given: Any) -> Unstarted:
            threads.append(Unstarted(**given))
            return threads[-1]

        with monkeypatch.context() as made:
            made.setattr(threading, "Thread", thread)
            made.setattr(os, "pipe", lambda: ends)
            self.thread = IoThread("ipc:///x")
        [self.started] = threads
        monkeypatch.setattr(thread_module, "Connection", lambda endpoint: self.connection)
        monkeypatch.setattr(zmq, "Poller", lambda: Poller(self))

    def run(self) -> None:
        """Do all that the thread does."""
        self.started.given["target"]()

    def run_until_enough(self) -> None:
        with pytest.raises(Enough):
            self.run()


class Poller:
    """Notes what is waited for, and never waits."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven
        self.registered: list[tuple[object, int]] = []

    def register(self, what: object, flags: int) -> None:
        self.registered.append((what.fileno() if isinstance(what, io.FileIO) else what, flags))

    def poll(self, timeout_ms: int | None) -> None:
        self.driven.polls.append((self.registered, timeout_ms))
        if self.driven.on_poll:
            self.driven.on_poll.pop(0)()


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    made = Driven(monkeypatch)
    yield made
    made.thread.close()


@pytest.mark.parametrize(
    ("is_more", "delay_s", "timeout_ms"),
    [(False, None, None), (True, None, 0), (True, 5.0, 0), (False, 2.5, 2501), (False, 0.0, 1)],
)
def test_thread_waits_until_silence_is_judged_P2(
    driven: Driven, is_more: bool, delay_s: float | None, timeout_ms: int | None
) -> None:
    driven.connection.delay_s = delay_s
    driven.connection.is_more = is_more
    driven.on_poll = [enough]
    driven.run_until_enough()
    assert driven.polls == [([(driven.woken, zmq.POLLIN)], timeout_ms)]


def test_thread_waits_for_the_link(driven: Driven) -> None:
    link = SimpleNamespace(socket="socket", monitor="monitor")
    driven.connection.link = link
    driven.on_poll = [lambda: setattr(driven.connection, "link", None), enough]
    driven.run_until_enough()
    own = (driven.woken, zmq.POLLIN)
    assert driven.polls == [
        ([own, ("socket", zmq.POLLIN), ("monitor", zmq.POLLIN)], None), ([own], None)
    ]  # fmt: skip


def test_post_wakes_the_thread_with_one_byte_and_wait_takes_all(driven: Driven) -> None:
    assert driven.thread.post(lambda connection: None) is True
    assert os.read(driven.woken, 99) == b"\0"
    assert os.write(driven.waker, b"x" * 4097) == 4097

    def look() -> None:
        with pytest.raises(BlockingIOError):
            os.read(driven.woken, 1)
        raise Enough

    driven.on_poll = [lambda: None, look]
    driven.run_until_enough()
    assert len(driven.polls) == 2
    assert driven.thread.post(lambda connection: None) is False
    with pytest.raises(BlockingIOError):
        os.read(driven.woken, 99)


def test_broken_loop_still_runs_its_tasks(driven: Driven) -> None:
    def broken(connection: object) -> None:
        raise ValueError("broken")

    driven.thread.post(broken)
    driven.thread.post(lambda connection: driven.connection.done.append("the next"))
    with pytest.raises(ValueError, match="broken"):
        driven.run()
    assert driven.connection.done == ["the next", "close", "terminate"]
    assert not driven.thread.post(broken)


def test_fork_takes_no_task_and_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(monkeypatch)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert driven.thread.post(lambda connection: None) is False
        driven.thread.close()
    assert driven.started.calls == ["start"], "not waited for"
    assert driven.thread.post(lambda connection: None) is True
    assert os.read(driven.woken, 99) == b"\0", "woken by its own process alone"
    driven.thread.close()


# ---------------------------------------------------------------- the event loop


class Handle:
    """A call that a loop was asked for."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop that calls nothing by itself."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []
        self.handles: list[Handle] = []

    def _note(self, call: Callable[[], object], *said: object) -> Handle:
        self.done.append(said)
        self.handles.append(Handle(call))
        return self.handles[-1]

    def call_soon(self, call: Callable[[], object]) -> Handle:
        return self._note(call, "soon")

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Handle:
        return self._note(call, "later", delay_s)

    def call_soon_threadsafe(self, call: Callable[..., object], *given: object) -> Handle:
        return self._note(partial(call, *given), "from outside")

    def add_reader(self, descriptor: int, call: Callable[[], object]) -> None:
        self._note(call, "add", descriptor)

    def remove_reader(self, descriptor: int) -> None:
        self.done.append(("remove", descriptor))


def link(socket: int, monitor: int) -> Any:
    return SimpleNamespace(socket=SimpleNamespace(FD=socket), monitor=SimpleNamespace(FD=monitor))


class Looped:
    """An AsyncClient with two subscriptions in such a loop, whose first pump is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection, self.loop = Connection(), Loop()
        self.links: list[Callable[[Any, Any], None]] = []
        monkeypatch.setattr(async_module, "Connection", self._connect)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", lambda: self.loop)
            self.client = AsyncClient("ipc:///x")
            self.events = [self.client.events() for _ in range(2)]
        assert self.loop.done == [("soon",)], "one pump is asked for at a time"
        self.loop.handles[0].call()

    def _connect(self, _: str, *, on_link: Callable[[Any, Any], None]) -> Connection:
        self.links.append(on_link)
        return self.connection


def test_cancel_from_another_thread_is_handed_over_D4(monkeypatch: pytest.MonkeyPatch) -> None:
    looped = Looped(monkeypatch)
    looped.events[0].close()
    assert (looped.loop.done[1:], looped.connection.done) == ([("from outside",)], ["pump"])
    looped.loop.handles[-1].call()
    assert looped.connection.done == ["pump", "cancel"]
    assert looped.loop.done[2:] == [("soon",)]


def test_loop_reads_the_descriptors_of_the_link_until_it_is_closed_P2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looped = Looped(monkeypatch)
    connection, loop, links, client = looped.connection, looped.loop, looped.links, looped.client
    links[0](None, link(1, 2))
    links[0](link(1, 2), link(3, 4))
    assert loop.done[1:] == [
        ("add", 1), ("add", 2), ("remove", 1), ("remove", 2), ("add", 3), ("add", 4)
    ]  # fmt: skip
    messages, monitor = loop.handles[-2:]
    messages.call()
    assert (len(loop.done), connection.done) == (7, ["pump", "pump messages"]), "read at once"
    connection.delay_s = 5.0
    monitor.call()
    messages.call()
    assert connection.done == ["pump", "pump messages"], "left to the pump that is due"
    loop.handles[-1].call()
    connection.is_more = True
    messages.call()
    assert loop.done[7:] == [("soon",), ("later", 5.0), ("soon",)], "one timer; and there is more"
    assert connection.done[2:] == ["pump", "pump messages"]
    asyncio.run(client.close())
    assert [handle.is_cancelled for handle in loop.handles[-2:]] == [True, True]
    for handle in loop.handles:
        handle.call()
    assert connection.done[4:] == ["close", "terminate"]
    assert len(loop.done) == 10, "a closed client asks nothing of its loop"


def test_asynchronous_client_of_a_process_before_a_fork_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looped = Looped(monkeypatch)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="make one in this process"):
            asyncio.run(looped.client.status())
        looped.events[0].close()
        asyncio.run(looped.client.close())
    assert looped.connection.done == ["pump"]
    assert looped.loop.done == [("soon",)], "the loop belongs to the other process, too"
    asyncio.run(looped.client.close())
    assert looped.connection.done == ["pump", "close", "terminate"]


def test_client_of_a_process_before_a_fork_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with Client("ipc:///x") as client, monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="make one in this process"):
            client.generate("m", prompt="x")
    with pytest.raises(RuntimeError, match="is closed"):
        client.generate("m", prompt="x")


def test_too_few_descriptors_are_an_error_before_libzmq_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    connection, inbox = connection_module.Connection("ipc:///x"), SyncInbox()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", none_left)
        patch.setattr(connection_module, "Link", None)
        connection.open_command(RequestId("a"), [b""], inbox)
    with pytest.raises(ConnectionLost, match=r"/x: Too many open files; .*ulimit -n"):
        value_of(inbox.take())
    connection.close()
    connection.terminate()
