"""How the event loop of the asynchronous client drives its connection, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.client import async_client as async_module
from mlxsup.client.async_client import AsyncClient

from support.client.driven_connection import Connection


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
        self.done: list[tuple[object, ...]] = []
        self.handles: list[Handle] = []
        self.is_closed = False

    def _note(self, call: Callable[[], object], *said: object) -> Handle:
        self.done.append(said)
        self.handles.append(Handle(call))
        return self.handles[-1]

    def call_latest(self) -> None:
        """What was asked for last happens."""
        self.handles[-1].call()

    def call_soon(self, call: Callable[[], object]) -> Handle:
        return self._note(call, "soon")

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Handle:
        return self._note(call, "later", delay_s)

    def call_soon_threadsafe(self, call: Callable[..., object], *given: object) -> Handle:
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


def test_pump_is_asked_for_once_at_a_time(looped: Looped) -> None:
    client = looped.client
    looped.connection.pumps = [True, False]
    client.events()
    client.events()
    assert looped.loop.done == [("soon",)]
    looped.loop.call_latest()
    assert looped.loop.done == [("soon",)] * 2, "the pump left something"
    looped.loop.call_latest()
    assert looped.loop.done == [("soon",)] * 2
    client.events()
    assert looped.loop.done == [("soon",)] * 3
    assert looped.connection.done == ["pump"] * 2


def test_closed_client_asks_nothing_of_its_loop(looped: Looped) -> None:
    looped.new_link(None, link(1, 2))
    looped.new_link(link(1, 2), None)
    assert looped.loop.done == [], "it has no loop yet"
    events = looped.client.events()
    looped.loop.call_latest()
    looped.connection.delay_s = 5.0
    looped.new_link(None, link(1, 2))
    looped.is_inside = False
    events.close()
    asyncio.run(looped.client.close())
    looped.connection.done.clear()
    looped.loop.done.clear()
    for handle in looped.loop.handles:  # the pump, two readers, and a cancel from outside
        handle.call()
    events.close()
    looped.is_inside = True
    events.close()
    assert (looped.loop.done, looped.connection.done) == ([], [])


def test_one_timer_runs_at_a_time_P2(looped: Looped) -> None:
    def pump() -> None:
        looped.client.events()
        looped.loop.call_latest()

    pump()
    assert looped.loop.done == [("soon",)], "nothing is owed"
    looped.connection.delay_s = 5.0
    pump()
    timer = looped.loop.handles[-1]
    looped.connection.delay_s = 6.0
    pump()
    assert looped.loop.done == [("soon",), ("soon",), ("later", 5.0), ("soon",)]
    timer.call()
    assert looped.loop.done[4:] == [("later", 6.0)]
    assert looped.connection.done == ["pump"] * 4


def test_descriptors_are_read_while_the_link_is_there(looped: Looped) -> None:
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
    for messages, monitor in (readers[:2], readers[2:]):
        looped.loop.done.clear()
        looped.connection.done.clear()
        looped.connection.pumps = [False, True]
        messages.call()
        assert (looped.loop.done, looped.connection.done) == ([], ["pump messages"]), "at once"
        messages.call()
        assert looped.loop.done == [("soon",)], "there is more"
        looped.loop.call_latest()
        monitor.call()
        assert looped.loop.done == [("soon",)] * 2
        looped.loop.call_latest()
        assert looped.connection.done == ["pump messages"] * 2 + ["pump"] * 2


def test_readable_descriptor_is_left_to_a_due_pump(looped: Looped) -> None:
    looped.client.events()
    looped.loop.call_latest()
    looped.new_link(None, link(1, 2))
    reader = looped.loop.handles[-2]
    looped.client.events()
    due = looped.loop.handles[-1]
    looped.connection.done.clear()
    reader.call()
    assert looped.connection.done == []
    due.call()
    looped.connection.delay_s = 5.0
    reader.call()
    assert looped.connection.done == ["pump", "pump messages"]
    assert looped.loop.done[-1] == ("later", 5.0), "what is owed is waited for"


def test_cancel_from_another_thread_is_handed_over_D4(
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


def test_close_ends_timer_and_pump_once(looped: Looped) -> None:
    looped.connection.delay_s = 5.0
    looped.connection.pumps = [True]
    looped.client.events()
    looped.loop.call_latest()

    async def close() -> None:
        await looped.client.close()
        await looped.client.close()

    asyncio.run(close())
    assert looped.loop.done == [("soon",), ("soon",), ("later", 5.0)]
    assert [handle.is_cancelled for handle in looped.loop.handles] == [False, True, True]
    assert looped.connection.done == ["pump", "close", "terminate"]


def test_client_belongs_to_the_loop_that_used_it_first(
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
