"""How both kinds of stream are read: pieces, notices, the end, and what ends a subscription."""

from __future__ import annotations

import asyncio
from typing import Any

from mlxsup.client.async_streams import AsyncEventStream, AsyncInbox, AsyncStream
from mlxsup.client.client import EventStream, Stream, SyncInbox
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, NoticeKind

ID = RequestId("r")
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
