"""Streams of both clients: pieces, notices, ends, forwarding, and readers that leave early."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from mlxsup.client.async_streams import AsyncEventStream, AsyncInbox, AsyncStream
from mlxsup.client.client import EventStream, Stream, SyncInbox
from mlxsup.client.errors import ConnectionLost, RequestError, SubscriptionClosed
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.client.session import Item
from mlxsup.client.streams import StreamBase, value_of
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, NoticeKind

ID = RequestId("r")
DELTA, NOTICE = Delta(text="x", token_ids=[1]), Notice(kind=NoticeKind.LOADING, detail={})
DONE = Result(text="x", finish_reason=FinishReason.STOP)
LOST = ConnectionLost("it is gone", "ipc:///x")


class Noted:
    """Streams over given items, with a note of all that they cancel and tell."""

    def __init__(self, *items: Item) -> None:
        self.items = items
        self.cancelled: list[RequestId] = []
        self.told: list[Notice] = []

    def _fill(self, inbox: Any) -> Any:
        for item in self.items:
            inbox.put(item)
        return inbox

    def stream(self) -> Stream:
        return Stream(ID, self._fill(SyncInbox()), self.cancelled.append, self.told.append)

    def async_stream(self) -> AsyncStream:
        return AsyncStream(ID, self._fill(AsyncInbox()), self.cancelled.append, self.told.append)

    def events(self) -> EventStream:
        return EventStream(ID, self._fill(SyncInbox()), self.cancelled.append)

    def async_events(self) -> AsyncEventStream:
        return AsyncEventStream(ID, self._fill(AsyncInbox()), self.cancelled.append)


def run(read: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(read(), 60))


def test_stream_gives_pieces_and_notices() -> None:
    noted, other = Noted(NOTICE, NOTICE, DELTA, DONE), Noted(NOTICE, NOTICE, DELTA, DONE)
    with noted.stream() as stream:
        assert iter(stream) is stream
        assert list(stream) == [DELTA]
        assert next(stream, "over") == "over"
    assert stream.result is DONE

    async def read() -> None:
        async with other.async_stream() as stream:
            assert aiter(stream) is stream
            assert [delta async for delta in stream] == [DELTA]
            assert [delta async for delta in stream] == []
        assert stream.result is DONE

    run(read)
    for one in (noted, other):
        assert (one.told, one.cancelled) == ([NOTICE, NOTICE], [])


def test_end_is_for_every_reader() -> None:
    # Each stream is one that another reader waits for: it has taken nothing yet.
    inbox, lost = SyncInbox(), SyncInbox()
    streams = [Stream(ID, inbox, lambda _: None, None) for _ in range(2)]
    for item in (DELTA, DONE):
        inbox.put(item)
    lost.put(LOST)
    assert [list(stream) for stream in streams] == [[DELTA], []]
    assert [stream.result for stream in streams] == [DONE, DONE]
    for stream in (Stream(ID, lost, lambda _: None, None) for _ in range(2)):
        with pytest.raises(ConnectionLost):
            next(stream)

    async def read() -> None:
        shared = AsyncInbox()
        streams = [AsyncStream(ID, shared, lambda _: None, None) for _ in range(2)]
        for item in (DELTA, DONE):
            shared.put(item)
        assert [[delta async for delta in stream] for stream in streams] == [[DELTA], []]
        assert [stream.result for stream in streams] == [DONE, DONE]

    run(read)


def test_fork_cannot_read_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(DELTA)
    stream = noted.stream()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="make one in this process"):
        next(stream)


def test_fork_cannot_read_an_asynchronous_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(DELTA)

    async def read() -> None:
        stream = noted.async_stream()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="make one in this process"):
            await anext(stream)

    run(read)


def test_subscription_ends_when_it_is_closed() -> None:
    noted, other = Noted({"n": 1}, {"n": 2}), Noted({"n": 1}, {"n": 2})
    with noted.events() as events:
        assert iter(events) is events
        assert (next(events), noted.cancelled) == ({"n": 1}, [])
    assert (next(events, "over"), noted.cancelled) == ("over", [ID])

    async def read() -> None:
        async with other.async_events() as events:
            assert aiter(events) is events
            assert (await anext(events), other.cancelled) == ({"n": 1}, [])
        assert (await anext(events, "over"), other.cancelled) == ("over", [ID])

    run(read)


def test_ended_subscription_stays_ended() -> None:
    closed, lost = Noted(SubscriptionClosed()), Noted(LOST)
    assert next(closed.events(), "over") == "over"
    events = lost.events()
    with pytest.raises(ConnectionLost):
        next(events)
    assert next(events, "over") == "over"

    async def read() -> None:
        assert await anext(closed.async_events(), "over") == "over"
        events = lost.async_events()
        with pytest.raises(ConnectionLost):
            await anext(events)
        assert await anext(events, "over") == "over"

    run(read)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exception_while_reading_cancels_the_stream(end: type[BaseException]) -> None:
    cancelled: list[RequestId] = []
    inbox = SyncInbox()
    inbox.put(NOTICE)

    def tell(_: Notice) -> None:
        raise end

    stream = Stream(ID, inbox, cancelled.append, tell)
    with pytest.raises(end):
        next(stream)
    assert cancelled == [ID], "while the stream is still held"


def test_closed_coroutine_or_generator_cancels_its_stream() -> None:
    noted, other = Noted(), Noted(DELTA)

    async def texts() -> AsyncGenerator[str]:
        async for delta in other.async_stream():
            yield delta.text

    async def read() -> None:
        stream = noted.async_stream()
        waiting = stream.__anext__()
        waiting.send(None)
        waiting.close()
        assert noted.cancelled == [ID], "while the stream is still held"
        reading = texts()
        assert (await anext(reading), other.cancelled) == ("x", [])
        await reading.aclose()
        assert other.cancelled == [ID]

    run(read)


# ---------------------------------------------------------------- forwarding


def piece(text: str) -> Delta:
    return Delta(text=text, token_ids=[1])


class Reading(Noted):
    """A stream that is being forwarded, and what came of it."""

    def __init__(self, *before: Item, bug: BaseException | None = None) -> None:
        super().__init__(*before)
        self.taken: list[str] = []
        self.bug = bug
        self.forwarded = self.async_stream()
        self.task = asyncio.create_task(self.forwarded.forward(self.take))

    def _fill(self, inbox: Any) -> Any:
        self.inbox = inbox
        return super()._fill(inbox)

    def take(self, piece: Delta) -> None:
        if piece.text == "bug":
            assert self.bug is not None
            raise self.bug
        self.taken.append(piece.text)

    def put(self, *items: Item) -> list[str]:
        """Return what was taken once all have been put: the loop has not turned meanwhile."""
        for item in items:
            self.inbox.put(item)
        return list(self.taken)


def test_forwarded_pieces_come_in_the_turn_that_brings_them() -> None:
    async def read() -> None:
        reading = Reading(piece("a"), NOTICE, piece("b"))
        await asyncio.sleep(0)
        assert reading.taken == ["a", "b"]
        assert reading.put(piece("c"), NOTICE) == ["a", "b", "c"]
        reading.put(DONE)
        await reading.task
        assert reading.forwarded.result is DONE
        assert (reading.told, reading.cancelled) == ([NOTICE, NOTICE], [])
        await reading.forwarded.forward(reading.take)  # there is nothing more

    run(read)


def test_iterated_pieces_are_not_forwarded_again() -> None:
    async def read() -> None:
        taken: list[str] = []
        stream = Noted(piece("a"), piece("b"), DONE).async_stream()
        taken.append((await anext(stream)).text)
        await stream.forward(lambda one: taken.append(one.text))
        assert taken == ["a", "b"]

    run(read)


@pytest.mark.parametrize(
    ("bug", "raised"),
    [
        (KeyError("bug"), KeyError),
        (StopIteration(), RuntimeError),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (GeneratorExit(), GeneratorExit),
        (None, ConnectionLost),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_error_or_bug_while_forwarding_is_raised_to_the_reader(
    bug: BaseException | None, raised: type[BaseException]
) -> None:
    async def read() -> None:
        reading = Reading(bug=bug)
        await asyncio.sleep(0)
        assert reading.put(piece("a"), LOST if bug is None else piece("bug"), piece("b")) == ["a"]
        with pytest.raises(raised):
            await reading.task
        assert reading.cancelled == ([] if bug is None else [ID]), "the rest is not read"

    run(read)


def test_cancelled_reader_is_given_nothing_more() -> None:
    async def read() -> None:
        reading = Reading()
        await asyncio.sleep(0)
        reading.task.cancel()
        await asyncio.gather(reading.task, return_exceptions=True)
        assert reading.put(piece("a")) == []
        assert reading.cancelled == [ID]

    run(read)


# ---------------------------------------------------------------- what both kinds share


class Taking(StreamBase):
    """A stream that is given its items one by one."""

    def tell(self, notice: Notice) -> None:
        self._tell(notice)

    def take(self, item: Item) -> Delta | None:
        return self._take(item)


def test_stream_has_a_result_and_is_cancelled_until_its_end_only_D4() -> None:
    cancelled: list[str] = []
    stream = Taking(ID, cancelled.append, None)
    assert stream.request_id == "r"
    with pytest.raises(RuntimeError, match="the result is available once the stream has been read"):
        _ = stream.result
    assert stream.take(DELTA) is DELTA
    stream.cancel()
    assert (stream.take(DONE), stream.result) == (None, DONE)
    stream.cancel()
    assert cancelled == ["r"]


def test_collected_stream_is_cancelled() -> None:
    cancelled: list[str] = []
    stream, ended = Taking(ID, cancelled.append, None), Taking(ID, cancelled.append, None)
    ended.take(DONE)
    stream.tell(NOTICE)  # notices were not asked for
    del stream, ended
    assert cancelled == ["r"]


@pytest.mark.parametrize(
    ("item", "error"),
    [({"n": 1}, "a stream was given a reply"), (NOTICE, "a stream was given a reply"),
     (ConnectionLost("gone", "ipc:///x"), "gone")],
)  # fmt: skip
def test_failed_stream_raises_its_error_each_time(item: Item, error: str) -> None:
    stream = Taking(ID, lambda _: None, None)
    with pytest.raises((RequestError, ConnectionLost), match=f"^{error}$"):
        stream.take(item)
    with pytest.raises((RequestError, ConnectionLost), match=f"^{error}$"):
        _ = stream.result


def test_command_gives_its_map_or_raises() -> None:
    assert value_of({"n": 1}) == {"n": 1}
    with pytest.raises(RequestError, match=r"^a command was given a piece of a stream$"):
        value_of(DONE)
    with pytest.raises(ConnectionLost, match="it is gone"):
        value_of(LOST)
