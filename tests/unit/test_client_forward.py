"""How an answer is read without a task that wakes for each piece."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mlxsup.client.async_streams import AsyncInbox, AsyncStream
from mlxsup.client.errors import ConnectionLost
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.client.session import Item
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, NoticeKind

ID = RequestId("r")
NOTICE = Notice(kind=NoticeKind.LOADING, detail={})
DONE = Result(text="abc", finish_reason=FinishReason.STOP)


def delta(text: str) -> Delta:
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


def test_pieces_that_were_there_come_first_and_others_in_the_turn_that_brings_them() -> None:
    async def read() -> None:
        reading = Reading(delta("a"), NOTICE, delta("b"))
        await asyncio.sleep(0)
        assert reading.taken == ["a", "b"]
        assert reading.put(delta("c"), NOTICE) == ["a", "b", "c"]
        reading.put(DONE)
        await reading.task
        assert reading.stream.result is DONE
        assert (reading.told, reading.cancelled) == ([NOTICE, NOTICE], [])
        await reading.stream.forward(reading.take)  # there is nothing more

    asyncio.run(read())


def test_what_was_iterated_over_is_not_forwarded_again() -> None:
    async def read() -> list[str]:
        inbox = AsyncInbox()
        for item in (delta("a"), delta("b"), DONE):
            inbox.put(item)
        cancelled: list[RequestId] = []
        taken: list[str] = []
        stream = AsyncStream(ID, inbox, cancelled.append, None)
        async for piece in stream:
            taken.append(piece.text)
            break
        await stream.forward(lambda piece: taken.append(piece.text))
        return taken

    assert asyncio.run(read()) == ["a", "b"]


def test_the_error_of_a_stream_is_raised_to_its_reader() -> None:
    async def read() -> None:
        reading = Reading()
        await asyncio.sleep(0)
        reading.put(delta("a"), ConnectionLost("it is gone", "ipc:///x"))
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
def test_a_bug_of_the_reader_is_raised_to_it_and_not_to_whoever_delivers(
    bug: BaseException, raised: type[BaseException]
) -> None:
    async def read() -> None:
        reading = Reading()
        reading.bug = bug
        await asyncio.sleep(0)
        assert reading.put(delta("a"), delta("bug"), delta("b")) == ["a"]
        with pytest.raises(raised):
            await reading.task
        assert reading.cancelled == [ID], "nobody reads the rest"

    asyncio.run(read())


def test_a_reader_that_is_cancelled_is_given_nothing_more() -> None:
    async def read() -> None:
        reading = Reading()
        await asyncio.sleep(0)
        reading.task.cancel()
        await asyncio.gather(reading.task, return_exceptions=True)
        assert reading.put(delta("a")) == []
        assert reading.cancelled == [ID]

    asyncio.run(read())
