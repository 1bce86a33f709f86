"""How both kinds of stream are read: pieces, notices, the end, and what ends a subscription."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import nullcontext
from typing import Any

import pytest

from mlxsup.client.async_streams import AsyncEventStream, AsyncInbox, AsyncStream
from mlxsup.client.client import EventStream, Stream, SyncInbox
from mlxsup.client.errors import ConnectionLost, SubscriptionClosed
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, NoticeKind

ID = RequestId("r")
DELTA, NOTICE = Delta(text="x", token_ids=[1]), Notice(kind=NoticeKind.LOADING, detail={})
DONE = Result(text="x", finish_reason=FinishReason.STOP)


def ignore(request_id: RequestId) -> None:
    """Nobody asks for the end."""


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
def test_whoever_waits_for_an_event_is_ended_once_and_stays_so(end: Exception) -> None:
    """By whoever closes the subscription, or by its error."""
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


# ---------------------------------------------------------------- readers that leave early


def test_a_generator_that_is_closed_cancels_what_it_reads() -> None:
    cancelled: list[RequestId] = []
    inbox = SyncInbox()
    inbox.put(DELTA)

    def texts() -> Generator[str]:
        for delta in Stream(ID, inbox, cancelled.append, None):
            yield delta.text

    reading = texts()
    assert (next(reading), cancelled) == ("x", [])
    reading.close()
    assert cancelled == [ID]


def test_an_asynchronous_generator_that_is_closed_cancels_what_it_reads() -> None:
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
def test_what_ends_a_program_while_a_stream_is_read_cancels_it(end: type[BaseException]) -> None:
    cancelled: list[RequestId] = []
    inbox = SyncInbox()
    inbox.put(NOTICE)

    def told(_: Notice) -> None:
        raise end

    stream = Stream(ID, inbox, cancelled.append, told)
    with pytest.raises(end):
        next(stream)
    assert cancelled == [ID], "while somebody still holds the stream"


def test_a_coroutine_that_is_closed_while_it_waits_for_a_piece_cancels_it() -> None:
    cancelled: list[RequestId] = []

    async def read() -> None:
        stream = AsyncStream(ID, AsyncInbox(), cancelled.append, None)
        waiting = stream.__anext__()
        waiting.send(None)
        waiting.close()
        assert cancelled == [ID], "while somebody still holds the stream"

    asyncio.run(read())
