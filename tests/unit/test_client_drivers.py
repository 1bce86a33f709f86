"""Who drives a connection: the thread of one client and the event loop of the other, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from mlxsup.client import async_client as async_module
from mlxsup.client import io_thread as thread_module
from mlxsup.client.async_client import AsyncClient, AsyncEventStream, AsyncInbox, AsyncStream
from mlxsup.client.client import EventStream, Stream, SyncInbox
from mlxsup.client.io_thread import IoThread
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, NoticeKind

ID = RequestId("r")


class Connection:
    """What a driver needs of one, and what was done with it."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.deadline: float | None = None
        self.link: Any = None
        self.pumps: list[bool] = []

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


class Unstarted:
    """A thread that the test runs itself."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def join(self) -> None:
        self.calls.append("join")


class Driven:
    """An IoThread that is run by hand, on a clock that stands at 100 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection = Connection()
        self.polls: list[Any] = []
        monkeypatch.setattr(thread_module.threading, "Thread", Unstarted)
        monkeypatch.setattr(thread_module, "Connection", lambda endpoint: self.connection)
        monkeypatch.setattr(thread_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
        monkeypatch.setattr(thread_module.zmq, "Poller", lambda: Poller(self))
        self.thread = IoThread("ipc:///x")
        self.on_poll: list[Any] = []


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
    started = driven.thread._thread
    assert isinstance(started, Unstarted)
    assert started.calls == ["start"]
    assert started.given == {
        "target": driven.thread._run, "name": "mlxsup-client", "daemon": True
    }  # fmt: skip


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
    driven.thread._wait(driven.connection, is_more)  # type: ignore[arg-type]
    assert driven.polls == [([(driven.thread._woken, zmq.POLLIN)], timeout_ms)]


@pytest.mark.parametrize("has_unsent", [False, True])
def test_it_waits_for_the_link_and_for_room_if_something_is_unsent(
    driven: Driven, has_unsent: bool
) -> None:
    link = SimpleNamespace(socket="socket", monitor="monitor", has_unsent=has_unsent)
    driven.connection.link = link
    driven.thread._wait(driven.connection, False)  # type: ignore[arg-type]
    flags = zmq.POLLIN | zmq.POLLOUT if has_unsent else zmq.POLLIN
    own = (driven.thread._woken, zmq.POLLIN)
    assert driven.polls == [([own, ("socket", flags), ("monitor", zmq.POLLIN)], None)]
    link.monitor = None
    driven.thread._wait(driven.connection, False)  # type: ignore[arg-type]
    assert driven.polls[1] == ([own], None)


def test_what_is_posted_wakes_the_thread_with_one_byte(driven: Driven) -> None:
    assert driven.thread.post(lambda connection: None) is True
    assert driven.thread._woken.recv(99) == b"\0"
    driven.thread._is_closing = True
    assert driven.thread.post(lambda connection: None) is False
    with pytest.raises(BlockingIOError):
        driven.thread._woken.recv(99)
    driven.thread._is_closing = False


def test_a_wait_takes_all_wakes(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b"x" * 4096, b"x"]

    class Woken:
        def recv(self, size: int) -> bytes:
            assert size == 4096
            if not pieces:
                raise BlockingIOError
            return pieces.pop(0)

    monkeypatch.setattr(driven.thread, "_woken", Woken())
    driven.thread._wait(driven.connection, False)  # type: ignore[arg-type]
    assert pieces == []
    monkeypatch.undo()


def test_tasks_run_in_order_before_each_pump_and_once_more_at_the_end(driven: Driven) -> None:
    thread, done = driven.thread, driven.connection.done

    def post(name: str) -> bool:
        return thread.post(lambda connection: done.append((name, connection is driven.connection)))

    post("a")
    post("b")
    driven.on_poll = [lambda: post("c"), lambda: (post("d"), setattr(thread, "_is_closing", True))]
    thread._run()
    assert done == [
        ("a", True), ("b", True), "pump", ("c", True), "pump", ("d", True), "close", "terminate"
    ]  # fmt: skip
    assert not post("late")
    thread.close()
    assert done[-1] == "terminate"


def test_a_loop_that_broke_leaves_nobody_waiting(driven: Driven) -> None:
    def broken(connection: Any) -> None:
        raise ValueError("broken")

    driven.thread.post(broken)
    driven.thread.post(lambda connection: connection.done.append("the next"))
    with pytest.raises(ValueError, match="broken"):
        driven.thread._run()
    assert driven.connection.done == ["the next", "close", "terminate"]
    assert not driven.thread.post(broken)


def test_a_closed_thread_was_woken_once_and_has_no_sockets(driven: Driven) -> None:
    assert driven.thread._woken.fileno() >= 0
    woken = []
    wake = driven.thread._wake
    driven.thread._wake = lambda: (woken.append(1), wake())  # type: ignore[method-assign, assignment]
    driven.thread.close()
    driven.thread.close()
    assert woken == [1]
    assert (driven.thread._woken.fileno(), driven.thread._waker.fileno()) == (-1, -1)
    assert driven.thread._thread.calls == ["start", "join", "join"]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the event loop


class Handle:
    """What a loop gives for what it is to call."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop that calls nothing."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.handles: list[Handle] = []
        self.is_closed = False

    def _note(self, *said: Any) -> Handle:
        self.done.append(said)
        self.handles.append(Handle())
        return self.handles[-1]

    def call_soon(self, call: Any) -> Handle:
        return self._note("soon", call.__name__)

    def call_at(self, at: float, call: Any) -> Handle:
        return self._note("at", at, call.__name__)

    def call_soon_threadsafe(self, call: Any, *given: Any) -> Handle:
        if self.is_closed:
            raise RuntimeError("closed")
        return self._note("from outside", call.__name__, *given)

    def add_reader(self, descriptor: int, call: Any) -> None:
        self._note("add", descriptor, call.__name__)

    def remove_reader(self, descriptor: int) -> None:
        self._note("remove", descriptor)


class Looped:
    """An AsyncClient in such a loop."""

    def __init__(self) -> None:
        self.client = AsyncClient("ipc:///x")
        self.client._connection.terminate()
        self.connection, self.loop = Connection(), Loop()
        self.client._connection = self.connection  # type: ignore[assignment]
        self.client._loop = self.loop  # type: ignore[assignment]


@pytest.fixture
def looped() -> Looped:
    return Looped()


def test_a_pump_is_asked_for_once_at_a_time(looped: Looped) -> None:
    client = looped.client
    client._pump_soon()
    client._pump_soon()
    assert looped.loop.done == [("soon", "_pump")]
    client._pump()
    client._pump_soon()
    assert looped.loop.done == [("soon", "_pump")] * 2
    assert looped.connection.done == ["pump"]


def test_nothing_is_asked_of_no_loop_and_of_a_closed_client(looped: Looped) -> None:
    client = looped.client
    looped.connection.deadline = 5.0
    client._loop = None
    client._pump_soon()
    client._set_timer()
    client._watch(None, SimpleNamespace(monitor=1))  # type: ignore[arg-type]
    client._cancel(ID)
    client._loop = looped.loop  # type: ignore[assignment]
    client._is_closed = True
    client._pump_soon()
    client._pump()
    client._cancel(ID)
    client._cancel_here(ID)
    assert (looped.loop.done, looped.connection.done) == ([], [])


def test_a_pump_that_left_something_is_followed_by_another(looped: Looped) -> None:
    looped.connection.pumps = [True, False]
    looped.client._pump()
    looped.client._pump()
    assert looped.loop.done == [("soon", "_pump")]


def test_one_timer_runs_at_a_time_and_moves_on_when_it_has_come_P2(looped: Looped) -> None:
    client = looped.client
    client._pump()
    assert looped.loop.done == [], "nothing is owed"
    looped.connection.deadline = 5.0
    client._pump()
    looped.connection.deadline = 6.0
    client._pump()
    assert looped.loop.done == [("at", 5.0, "_on_timer")]
    client._on_timer()
    assert looped.loop.done == [("at", 5.0, "_on_timer"), ("at", 6.0, "_on_timer")]
    assert looped.connection.done == ["pump"] * 4


def test_the_descriptors_of_a_link_are_read_while_it_is_there(looped: Looped) -> None:
    def link(socket: int, monitor: int) -> Any:
        return SimpleNamespace(
            socket=SimpleNamespace(FD=socket), monitor=SimpleNamespace(FD=monitor)
        )

    looped.client._watch(None, link(1, 2))
    looped.client._watch(link(1, 2), link(3, 4))
    looped.client._watch(link(3, 4), None)
    looped.client._watch(None, SimpleNamespace(monitor=None))  # type: ignore[arg-type]
    assert looped.loop.done == [
        ("add", 1, "_pump_soon"), ("add", 2, "_pump_soon"),
        ("remove", 1), ("remove", 2), ("add", 3, "_pump_soon"), ("add", 4, "_pump_soon"),
        ("remove", 3), ("remove", 4),
    ]  # fmt: skip


def test_a_cancel_is_carried_out_at_once_in_the_loop_and_handed_over_elsewhere_D4(
    looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped.client._cancel(ID)
    assert looped.connection.done == []
    assert looped.loop.done == [("from outside", "_cancel_here", ID)]
    looped.loop.is_closed = True
    looped.client._cancel(ID)  # nothing can be open without it
    assert looped.connection.done == []
    monkeypatch.setattr(async_module, "_running_loop", lambda: looped.loop)
    looped.client._cancel(ID)
    assert looped.connection.done == [("cancel", ID)]
    assert looped.loop.done[1:] == [("soon", "_pump")]


def test_a_close_ends_timer_and_pump_and_happens_once(looped: Looped) -> None:
    looped.connection.deadline = 5.0
    looped.connection.pumps = [True]
    looped.client._pump()

    async def close() -> None:
        await looped.client.close()
        await looped.client.close()

    asyncio.run(close())
    assert [handle.is_cancelled for handle in looped.loop.handles] == [True, True]
    assert looped.connection.done == ["pump", "close", "terminate"]


def test_a_client_belongs_to_the_loop_that_used_it_first() -> None:
    client = AsyncClient("ipc:///x")

    async def use() -> None:
        client._check_loop()
        client._check_loop()

    asyncio.run(use())
    with pytest.raises(
        RuntimeError, match=r"^an AsyncClient belongs to the event loop that first used it$"
    ):
        asyncio.run(use())
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match=r"^the client is closed$"):
        asyncio.run(use())


# ---------------------------------------------------------------- streams

DELTA, NOTICE = Delta(text="x", token_ids=[1]), Notice(kind=NoticeKind.LOADING, detail={})
DONE = Result(text="x", finish_reason=FinishReason.STOP)


def test_a_stream_gives_pieces_tells_notices_and_stays_at_its_end() -> None:
    cancelled: list[RequestId] = []
    told: list[Notice] = []
    inbox = SyncInbox()
    for item in (NOTICE, NOTICE, DELTA, DONE):
        inbox.put(item)
    with Stream(ID, inbox, cancelled.append, told.append) as stream:
        assert iter(stream) is stream
        assert list(stream) == [DELTA]
        assert next(stream, "over") == "over"
    assert (told, cancelled, stream.result) == ([NOTICE, NOTICE], [], DONE)


def test_an_asynchronous_stream_does_the_same() -> None:
    cancelled: list[RequestId] = []
    told: list[Notice] = []

    async def read() -> None:
        inbox = AsyncInbox()
        assert inbox.is_empty()
        for item in (NOTICE, NOTICE, DELTA, DONE):
            inbox.put(item)
        assert not inbox.is_empty()
        async with AsyncStream(ID, inbox, cancelled.append, told.append) as stream:
            assert aiter(stream) is stream
            assert [delta async for delta in stream] == [DELTA]
            assert [delta async for delta in stream] == []
        assert stream.result is DONE

    asyncio.run(read())
    assert (told, cancelled) == ([NOTICE, NOTICE], [])


def test_a_subscription_ends_when_it_is_closed() -> None:
    cancelled: list[RequestId] = []
    inbox = SyncInbox()
    inbox.put({"n": 1})
    inbox.put({"n": 2})
    with EventStream(ID, inbox, cancelled.append) as events:
        assert iter(events) is events
        assert next(events) == {"n": 1}
        assert cancelled == []
    assert cancelled == [ID]
    assert next(events, "over") == "over"

    async def read() -> list[Any]:
        inbox = AsyncInbox()
        inbox.put({"n": 1})
        inbox.put({"n": 2})
        async with AsyncEventStream(ID, inbox, cancelled.append) as events:
            assert aiter(events) is events
            first = await anext(events)
            assert cancelled == [ID]
        return [first, await anext(events, "over")]

    assert asyncio.run(read()) == [{"n": 1}, "over"]
    assert cancelled == [ID, ID]
