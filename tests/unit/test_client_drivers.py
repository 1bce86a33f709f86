"""Who drives a connection: the thread of one client and the event loop of the other, by hand."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from mlxsup.client import async_client as async_module
from mlxsup.client import io_thread as thread_module
from mlxsup.client.async_client import AsyncClient
from mlxsup.client.io_thread import IoThread
from mlxsup.protocol.ids import RequestId


class Connection:
    """What a driver needs of one, and what was done with it."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.opened: list[RequestId] = []
        self.deadline: float | None = None
        self.link: Any = None
        self.pumps: list[bool] = []

    def open_command(self, request_id: RequestId, *_: object, is_subscription: bool) -> None:
        assert is_subscription
        self.opened.append(request_id)

    def pump(self) -> bool:
        self.done.append("pump")
        return self.pumps.pop(0) if self.pumps else False

    def cancel(self, request_id: RequestId) -> None:
        self.done.append(("cancel", request_id))

    def close(self) -> None:
        self.done.append("close")

    def terminate(self) -> None:
        self.done.append("terminate")


# ---------------------------------------------------------------- the thread


class Enough(Exception):
    """Ends a loop that would otherwise wait for ever."""


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
    """An IoThread that is run by hand, on a clock that stands at 100 s.

    Attributes:
        started: the thread that it made.
        waker, woken: the pair of sockets by which it is woken.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection = Connection()
        self.polls: list[Any] = []
        self.on_poll: list[Callable[[], object]] = []
        self.waker, self.woken = socket.socketpair()
        threads: list[Unstarted] = []

        def thread(**given: Any) -> Unstarted:
            threads.append(Unstarted(**given))
            return threads[-1]

        with monkeypatch.context() as made:
            made.setattr(threading, "Thread", thread)
            made.setattr(socket, "socketpair", lambda: (self.waker, self.woken))
            self.thread = IoThread("ipc:///x")
        [self.started] = threads
        monkeypatch.setattr(thread_module, "Connection", lambda endpoint: self.connection)
        monkeypatch.setattr(thread_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
        monkeypatch.setattr(zmq, "Poller", lambda: Poller(self))

    def run(self) -> None:
        """What the thread does from its start to its end."""
        self.started.given["target"]()

    def run_until_enough(self) -> None:
        with pytest.raises(Enough):
            self.run()


class Poller:
    """Notes what is waited for, and never waits."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven
        self.registered: list[Any] = []

    def register(self, what: Any, flags: int) -> None:
        self.registered.append((what, flags))

    def poll(self, timeout_ms: int | None) -> None:
        self.driven.polls.append((self.registered, timeout_ms))
        if self.driven.on_poll:
            self.driven.on_poll.pop(0)()


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    made = Driven(monkeypatch)
    yield made
    made.thread.close()


def test_the_thread_is_a_daemon_with_a_name_and_starts_at_once(driven: Driven) -> None:
    assert driven.started.calls == ["start"]
    target = driven.started.given["target"]
    assert driven.started.given == {"target": target, "name": "mlxsup-client", "daemon": True}


@pytest.mark.parametrize(
    ("is_more", "deadline", "timeout_ms"),
    [
        (False, None, None),
        (True, None, 0),
        (True, 105.0, 0),
        (False, 102.5, 2501),
        (False, 100.0, 1),
        (False, 90.0, 1),
    ],
)
def test_it_waits_until_silence_is_to_be_judged_and_not_at_all_if_more_is_there_P2(
    driven: Driven, is_more: bool, deadline: float | None, timeout_ms: int | None
) -> None:
    driven.connection.deadline = deadline
    driven.connection.pumps = [is_more]
    driven.on_poll = [enough]
    driven.run_until_enough()
    assert driven.polls == [([(driven.woken, zmq.POLLIN)], timeout_ms)]


@pytest.mark.parametrize("has_unsent", [False, True])
def test_it_waits_for_the_link_and_for_room_if_something_is_unsent(
    driven: Driven, has_unsent: bool
) -> None:
    link = SimpleNamespace(socket="socket", monitor="monitor", has_unsent=has_unsent)
    driven.connection.link = link
    driven.on_poll = [lambda: setattr(link, "monitor", None), enough]
    driven.run_until_enough()
    flags = zmq.POLLIN | zmq.POLLOUT if has_unsent else zmq.POLLIN
    own = (driven.woken, zmq.POLLIN)
    assert driven.polls == [
        ([own, ("socket", flags), ("monitor", zmq.POLLIN)], None), ([own], None)
    ]  # fmt: skip


def test_what_is_posted_wakes_the_thread_with_one_byte(driven: Driven) -> None:
    assert driven.thread.post(lambda connection: None) is True
    assert driven.woken.recv(99) == b"\0"
    driven.on_poll = [enough]
    driven.run_until_enough()
    assert driven.thread.post(lambda connection: None) is False
    with pytest.raises(BlockingIOError):
        driven.woken.recv(99)


def test_a_wait_takes_all_wakes(driven: Driven) -> None:
    assert driven.waker.send(b"x" * 4097) == 4097

    def look() -> None:
        with pytest.raises(BlockingIOError):
            driven.woken.recv(1)
        raise Enough

    driven.on_poll = [lambda: None, look]
    driven.run_until_enough()
    assert len(driven.polls) == 2


def test_tasks_run_in_order_before_each_pump_and_once_more_at_the_end(driven: Driven) -> None:
    thread, done = driven.thread, driven.connection.done
    is_over = threading.Event()
    driven.started.on_join = lambda: is_over.wait(60)
    closer = threading.Thread(target=thread.close)

    def note(name: str, connection: object) -> None:
        done.append((name, connection is driven.connection))

    def post(name: str) -> bool:
        return thread.post(partial(note, name))

    def post_and_close() -> None:
        post("d")
        driven.woken.recv(99)
        closer.start()
        assert select.select([driven.woken], [], [], 60)[0], "it is closing"

    post("a")
    post("b")
    driven.on_poll = [lambda: post("c"), post_and_close]
    driven.run()
    assert done == [
        ("a", True), ("b", True), "pump", ("c", True), "pump", ("d", True), "close", "terminate"
    ]  # fmt: skip
    assert not post("late")
    is_over.set()
    closer.join(60)
    assert done[-1] == "terminate"


def test_a_loop_that_broke_leaves_nobody_waiting(driven: Driven) -> None:
    def broken(connection: object) -> None:
        raise ValueError("broken")

    driven.thread.post(broken)
    driven.thread.post(lambda connection: driven.connection.done.append("the next"))
    with pytest.raises(ValueError, match="broken"):
        driven.run()
    assert driven.connection.done == ["the next", "close", "terminate"]
    assert not driven.thread.post(broken)


def test_a_closed_thread_was_woken_once_and_has_no_sockets(driven: Driven) -> None:
    woken: list[bytes] = []

    def read() -> None:
        if driven.woken.fileno() >= 0:
            woken.append(driven.woken.recv(99))

    driven.started.on_join = read
    driven.thread.close()
    assert (driven.woken.fileno(), driven.waker.fileno()) == (-1, -1)
    driven.thread.close()
    assert woken == [b"\0"]
    assert driven.started.calls == ["start", "join", "join"]


# ---------------------------------------------------------------- the event loop


class Handle:
    """What a loop gives for what it is to call."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop that calls nothing by itself."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.handles: list[Handle] = []
        self.is_closed = False

    def _note(self, call: Callable[[], object], *said: Any) -> Handle:
        self.done.append(said)
        self.handles.append(Handle(call))
        return self.handles[-1]

    def call_latest(self) -> None:
        """What was asked for last happens."""
        self.handles[-1].call()

    def call_soon(self, call: Callable[[], object]) -> Handle:
        return self._note(call, "soon")

    def call_at(self, at: float, call: Callable[[], object]) -> Handle:
        return self._note(call, "at", at)

    def call_soon_threadsafe(self, call: Callable[..., object], *given: Any) -> Handle:
        if self.is_closed:
            raise RuntimeError("closed")
        return self._note(partial(call, *given), "from outside")

    def add_reader(self, descriptor: int, call: Callable[[], object]) -> None:
        self._note(call, "add", descriptor)

    def remove_reader(self, descriptor: int) -> None:
        self.done.append(("remove", descriptor))


class Looped:
    """An AsyncClient in such a loop.

    Attributes:
        is_inside: whether the loop is the running one.
        new_link: what the connection calls when it has another link.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection, self.loop = Connection(), Loop()
        self.is_inside = True

        def connect(endpoint: str, *, on_link: Callable[[Any, Any], None]) -> Connection:
            self.new_link = on_link
            return self.connection

        def running() -> Loop:
            if not self.is_inside:
                raise RuntimeError("no running event loop")
            return self.loop

        monkeypatch.setattr(async_module, "Connection", connect)
        monkeypatch.setattr(asyncio, "get_running_loop", running)
        self.client = AsyncClient("ipc:///x")


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> Looped:
    return Looped(monkeypatch)


def link(socket: int, monitor: int | None) -> Any:
    """A link with these descriptors; without a monitor it was closed."""
    return SimpleNamespace(
        socket=SimpleNamespace(FD=socket),
        monitor=None if monitor is None else SimpleNamespace(FD=monitor),
    )


def test_a_pump_is_asked_for_once_at_a_time(looped: Looped) -> None:
    client = looped.client
    client.events()
    client.events()
    assert looped.loop.done == [("soon",)]
    looped.loop.call_latest()
    client.events()
    assert looped.loop.done == [("soon",)] * 2
    assert looped.connection.done == ["pump"]


def test_nothing_is_asked_of_no_loop_and_of_a_closed_client(looped: Looped) -> None:
    looped.new_link(None, link(1, 2))
    looped.new_link(link(1, 2), None)
    assert looped.loop.done == [], "it has no loop yet"
    looped.connection.deadline = 5.0
    events = looped.client.events()
    looped.is_inside = False
    events.close()
    asyncio.run(looped.client.close())
    looped.connection.done.clear()
    assert looped.loop.done == [("soon",), ("from outside",)]
    for handle in looped.loop.handles:
        handle.call()
    events.close()
    looped.is_inside = True
    events.close()
    assert looped.loop.done == [("soon",), ("from outside",)]
    assert looped.connection.done == []


def test_a_pump_that_left_something_is_followed_by_another(looped: Looped) -> None:
    looped.connection.pumps = [True, False]
    looped.client.events()
    for _ in range(2):
        looped.loop.call_latest()
    assert looped.loop.done == [("soon",)] * 2
    assert looped.connection.done == ["pump"] * 2


def test_one_timer_runs_at_a_time_and_moves_on_when_it_has_come_P2(looped: Looped) -> None:
    def pump() -> None:
        looped.client.events()
        looped.loop.call_latest()

    pump()
    assert looped.loop.done == [("soon",)], "nothing is owed"
    looped.connection.deadline = 5.0
    pump()
    timer = looped.loop.handles[-1]
    looped.connection.deadline = 6.0
    pump()
    assert looped.loop.done == [("soon",), ("soon",), ("at", 5.0), ("soon",)]
    timer.call()
    assert looped.loop.done[4:] == [("at", 6.0)]
    assert looped.connection.done == ["pump"] * 4


def test_the_descriptors_of_a_link_are_read_while_it_is_there(looped: Looped) -> None:
    looped.client.events()
    looped.loop.call_latest()
    looped.loop.done.clear()
    looped.new_link(None, link(1, 2))
    looped.new_link(link(1, 2), link(3, 4))
    readers = looped.loop.handles[-4:]
    looped.new_link(link(3, 4), None)
    looped.new_link(None, link(5, None))
    assert looped.loop.done == [
        ("add", 1), ("add", 2),
        ("remove", 1), ("remove", 2), ("add", 3), ("add", 4),
        ("remove", 3), ("remove", 4),
    ]  # fmt: skip
    for reader in readers:
        looped.loop.done.clear()
        reader.call()
        assert looped.loop.done == [("soon",)]
        looped.loop.call_latest()


def test_a_cancel_is_carried_out_at_once_in_the_loop_and_handed_over_elsewhere_D4(
    looped: Looped,
) -> None:
    events = looped.client.events()
    looped.loop.call_latest()
    [id] = looped.connection.opened
    looped.connection.done.clear()
    looped.loop.done.clear()
    looped.is_inside = False
    events.close()
    assert (looped.loop.done, looped.connection.done) == ([("from outside",)], [])
    handed_over = looped.loop.handles[-1]
    looped.loop.is_closed = True
    events.close()  # nothing can be open without it
    assert looped.connection.done == []
    looped.is_inside = True
    events.close()
    assert looped.connection.done == [("cancel", id)]
    assert looped.loop.done[1:] == [("soon",)]
    handed_over.call()
    assert looped.connection.done == [("cancel", id)] * 2


def test_a_close_ends_timer_and_pump_and_happens_once(looped: Looped) -> None:
    looped.connection.deadline = 5.0
    looped.connection.pumps = [True]
    looped.client.events()
    looped.loop.call_latest()

    async def close() -> None:
        await looped.client.close()
        await looped.client.close()

    asyncio.run(close())
    assert looped.loop.done == [("soon",), ("soon",), ("at", 5.0)]
    assert [handle.is_cancelled for handle in looped.loop.handles] == [False, True, True]
    assert looped.connection.done == ["pump", "close", "terminate"]


def test_a_client_belongs_to_the_loop_that_used_it_first(
    looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = looped.client
    monkeypatch.undo()

    async def use() -> None:
        client.events()
        client.events()

    asyncio.run(use())
    with pytest.raises(
        RuntimeError, match=r"^an AsyncClient belongs to the event loop that first used it$"
    ):
        asyncio.run(use())
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match=r"^the client is closed$"):
        asyncio.run(use())
