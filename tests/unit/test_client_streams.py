"""Streams of both clients: pieces, notices, ends, forwarding, and readers that leave early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from mlxsup.client.async_streams import AsyncEventStream, AsyncInbox, AsyncStream
from mlxsup.client.client import EventStream, Stream, SyncInbox
from mlxsup.client.errors import ConnectionLost, RequestError, SubscriptionClosed, internal
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.client.session import Item
from mlxsup.client.streams import StreamBase, value_of
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, NoticeKind

ID = RequestId("r")


DELTA, NOTICE = Delta(text="x", token_ids=[1]), Notice(kind=NoticeKind.LOADING, detail={})


DONE = Result(text="x", finish_reason=FinishReason.STOP)


def ignore(request_id: RequestId) -> None:
    """Ignore the end."""


def test_stream_gives_pieces_and_notices() -> None:
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


def test_async_stream_gives_pieces_and_notices() -> None:
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


def test_subscription_ends_when_it_is_closed() -> None:
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

    async def read() -> list[dict[str, Any] | str]:
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


@pytest.mark.parametrize("end", [SubscriptionClosed(), ConnectionLost("it is gone", "ipc:///x")])
def test_ended_subscription_stays_ended(end: Exception) -> None:
    """By a close of the subscription, or by its error."""
    inbox = SyncInbox()
    inbox.put(end)
    events = EventStream(ID, inbox, ignore)
    with nullcontext() if isinstance(end, SubscriptionClosed) else pytest.raises(ConnectionLost):
        assert next(events, "over") == "over"
    if isinstance(end, ConnectionLost):
        assert next(events, "over") == "over"

    async def read() -> None:
        inbox = AsyncInbox()
        inbox.put(end)
        events = AsyncEventStream(ID, inbox, ignore)
        is_closed = isinstance(end, SubscriptionClosed)
        with nullcontext() if is_closed else pytest.raises(ConnectionLost):
            assert await anext(events, "over") == "over"
        if not is_closed:
            assert await anext(events, "over") == "over"

    asyncio.run(asyncio.wait_for(read(), 60))


def test_closed_async_generator_cancels_its_stream() -> None:
    cancelled: list[RequestId] = []

    async def texts() -> AsyncGenerator[str]:
        inbox = AsyncInbox()
        inbox.put(DELTA)
        async for delta in AsyncStream(ID, inbox, cancelled.append, None):
            yield delta.text

    async def read() -> None:
        reading = texts()
        assert (await anext(reading), cancelled) == ("x", [])
        await reading.aclose()
        assert cancelled == [ID]

    asyncio.run(read())


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exception_while_reading_cancels_the_stream(end: type[BaseException]) -> None:
    cancelled: list[RequestId] = []
    inbox = SyncInbox()
    inbox.put(NOTICE)

    def told(_: Notice) -> None:
        raise end

    stream = Stream(ID, inbox, cancelled.append, told)
    with pytest.raises(end):
        next(stream)
    assert cancelled == [ID], "while the stream is still held"


def test_closed_coroutine_cancels_its_stream() -> None:
    cancelled: list[RequestId] = []

    async def read() -> None:
        stream = AsyncStream(ID, AsyncInbox(), cancelled.append, None)
        waiting = stream.__anext__()
        waiting.send(None)
        waiting.close()
        assert cancelled == [ID], "while the stream is still held"

    asyncio.run(read())


# ---------------------------------------------------------------- forwarding


WHOLE = Result(text="abc", finish_reason=FinishReason.STOP)


def piece(text: str) -> Delta:
    return Delta(text=text, token_ids=[1])


class Reading:
    """A stream that is being forwarded, and what came of it."""

    def __init__(self, *before: Item) -> None:
        self.inbox = AsyncInbox()
        self.taken: list[str] = []
        self.told: list[Notice] = []
        self.bug: BaseException = KeyError("bug")
        self.cancelled: list[RequestId] = []
        for item in before:
            self.inbox.put(item)
        self.stream = AsyncStream(ID, self.inbox, self.cancelled.append, self.told.append)
        self.task = asyncio.create_task(self.stream.forward(self.take))

    def take(self, piece: Delta) -> None:
        if piece.text == "bug":
            raise self.bug
        self.taken.append(piece.text)

    def put(self, *items: Item) -> Sequence[str]:
        """What was taken by the time that all have been put: the loop has not turned meanwhile."""
        for item in items:
            self.inbox.put(item)
        return list(self.taken)


def test_forwarded_pieces_come_in_the_turn_that_brings_them() -> None:
    async def read() -> None:
        reading = Reading(piece("a"), NOTICE, piece("b"))
        await asyncio.sleep(0)
        assert reading.taken == ["a", "b"]
        assert reading.put(piece("c"), NOTICE) == ["a", "b", "c"]
        reading.put(WHOLE)
        await reading.task
        assert reading.stream.result is WHOLE
        assert (reading.told, reading.cancelled) == ([NOTICE, NOTICE], [])
        await reading.stream.forward(reading.take)  # there is nothing more

    asyncio.run(read())


def test_iterated_pieces_are_not_forwarded_again() -> None:
    async def read() -> list[str]:
        inbox = AsyncInbox()
        for item in (piece("a"), piece("b"), WHOLE):
            inbox.put(item)
        cancelled: list[RequestId] = []
        taken: list[str] = []
        stream = AsyncStream(ID, inbox, cancelled.append, None)
        async for one in stream:
            taken.append(one.text)
            break
        await stream.forward(lambda one: taken.append(one.text))
        return taken

    assert asyncio.run(read()) == ["a", "b"]


def test_forwarded_error_is_raised_to_the_reader() -> None:
    async def read() -> None:
        reading = Reading()
        await asyncio.sleep(0)
        reading.put(piece("a"), ConnectionLost("it is gone", "ipc:///x"))
        with pytest.raises(ConnectionLost):
            await reading.task
        assert (reading.taken, reading.cancelled) == (["a"], [])

    asyncio.run(read())


@pytest.mark.parametrize(
    ("bug", "raised"),
    [
        (KeyError("bug"), KeyError),
        (StopIteration(), RuntimeError),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (GeneratorExit(), GeneratorExit),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_bug_of_the_reader_is_raised_to_the_reader(
    bug: BaseException, raised: type[BaseException]
) -> None:
    async def read() -> None:
        reading = Reading()
        reading.bug = bug
        await asyncio.sleep(0)
        assert reading.put(piece("a"), piece("bug"), piece("b")) == ["a"]
        with pytest.raises(raised):
            await reading.task
        assert reading.cancelled == [ID], "the rest is not read"

    asyncio.run(read())


def test_cancelled_reader_is_given_nothing_more() -> None:
    async def read() -> None:
        reading = Reading()
        await asyncio.sleep(0)
        reading.task.cancel()
        await asyncio.gather(reading.task, return_exceptions=True)
        assert reading.put(piece("a")) == []
        assert reading.cancelled == [ID]

    asyncio.run(read())


# ---------------------------------------------------------------- what both kinds share


class Taking(StreamBase):
    """A stream that is given its items one by one."""

    def tell(self, notice: Notice) -> None:
        self._tell(notice)

    def take(self, item: Item) -> Delta | None:
        return self._take(item)


class Held:
    """A stream, with what it cancelled and what reached it."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.notices: list[Notice] = []
        self.base = Taking(ID, self.cancelled.append, self.notices.append)


def test_stream_has_no_result_before_its_end() -> None:
    stream = Held()
    assert stream.base.request_id == "r"
    expected = "there is no result until the stream has been read to its end"
    with pytest.raises(RuntimeError, match=f"^{expected}$"):
        _ = stream.base.result
    delta = Delta(text="x", token_ids=[1])
    assert stream.base.take(delta) is delta
    assert stream.base.take(DONE) is None
    assert stream.base.result is DONE


def test_stream_is_cancelled_before_its_end_only_D4() -> None:
    stream = Held()
    stream.base.cancel()
    stream.base.take(DONE)
    stream.base.cancel()
    assert stream.cancelled == ["r"]


def test_collected_stream_is_cancelled() -> None:
    stream, ended = Held(), Held()
    ended.base.take(DONE)
    Taking(ID, ended.cancelled.append, None).tell(NOTICE)  # notices were not asked for
    del stream.base, ended.base
    assert (stream.cancelled, ended.cancelled) == (["r"], ["r"])


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ({"n": 1}, "a stream was given a reply"),
        (NOTICE, "a stream was given a reply"),
        (ConnectionLost("gone", "ipc:///x"), "gone"),
    ],
)
def test_failed_stream_raises_its_error_each_time(item: Item, error: str) -> None:
    stream = Held()
    with pytest.raises((RequestError, ConnectionLost), match=f"^{error}$"):
        stream.base.take(item)
    with pytest.raises((RequestError, ConnectionLost), match=f"^{error}$"):
        _ = stream.base.result


def test_command_gives_its_map_or_raises() -> None:
    assert value_of({"n": 1}) == {"n": 1}
    with pytest.raises(RequestError, match=r"^a command was given a piece of a stream$"):
        value_of(DONE)
    with pytest.raises(ConnectionLost):
        value_of(ConnectionLost("gone", "ipc:///x"))


def test_errors_read_as_sentences() -> None:
    plain = ConnectionLost("gone", "ipc:///x")
    assert (str(plain), plain.hint, plain.is_turned_away) == ("gone", "", False)
    error = internal("odd")
    assert (error.code, str(error), error.retryable) == ("internal", "odd", False)
    assert repr(error) == "RequestError(internal, 'odd', detail={})"
