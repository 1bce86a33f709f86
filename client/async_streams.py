"""Answers and state changes of the asynchronous client, read by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from mlxsup.protocol.ids import RequestId

from .results import Delta, Notice
from .session import Item, Owner
from .streams import ENDS_OF_READING, OnNotice, StreamBase, SubscriptionBase, is_end


class AsyncInbox:
    """An inbox that can be awaited, or that hands on each item as it comes.

    Attributes:
        put: takes one item; never blocks.
    """

    def __init__(self) -> None:
        self._owner = Owner()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self.put: Callable[[Item], None] = self._queue.put_nowait

    @contextmanager
    def handing_on(self, taker: Callable[[Item], None]) -> Iterator[None]:
        """Hand each item on at once within the block; first of all those that are here."""
        while not self._queue.empty():
            taker(self._queue.get_nowait())
        self.put = taker
        try:
            yield
        finally:
            self.put = self._queue.put_nowait

    def is_empty(self) -> bool:
        """Return whether `get` would wait."""
        return self._queue.empty()

    async def get(self) -> Item:
        """Return the next item. The end stays, for each task that reads.

        Raises:
            RuntimeError: this process was forked, and nothing comes in.
        """
        self._owner.check()
        item = await self._queue.get()
        if is_end(item):
            self._queue.put_nowait(item)
        return item


class AsyncStream(StreamBase):
    """An answer under way: iterate over its pieces, in one task.

    As a context manager, it cancels the request if it has not ended when the block is left. If the
    task is cancelled while it waits for a piece, by a timeout too, so is the request.
    """

    def __init__(
        self,
        request_id: RequestId,
        inbox: AsyncInbox,
        cancel: Callable[[RequestId], None],
        on_notice: OnNotice | None,
    ) -> None:
        super().__init__(request_id, cancel, on_notice)
        self._inbox = inbox

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._end is not None:
            raise StopAsyncIteration
        try:
            while isinstance(item := await self._inbox.get(), Notice):
                self._tell(item)
        except (asyncio.CancelledError, *ENDS_OF_READING):
            # The task may keep the error, and with it the frame that holds the stream.
            self.cancel()
            raise
        delta = self._take(item)
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def forward(self, take: Callable[[Delta], None]) -> None:
        """Read to the end, as iterating would, but wake no task for a piece.

        Args:
            take: gets each piece in the turn of the event loop that has brought it.

        Raises:
            RequestError, ConnectionLost: the stream ended with this error.
            BaseException: what `take` has raised; a StopIteration comes as RuntimeError.

        Nothing can be read after an error, or if this is cancelled.
        """
        if self._end is not None:
            return
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        def on_item(item: Item) -> None:
            if ended.done():
                return
            try:
                if isinstance(item, Delta):
                    take(item)
                elif isinstance(item, Notice):
                    self._tell(item)
                else:
                    self._take(item)
                    ended.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised where the stream is read
                # A result, because a future takes no StopIteration as its exception.
                ended.set_result(error)

        with self._inbox.handing_on(on_item):
            try:
                if (error := await ended) is not None:
                    raise error
            finally:
                self.cancel()  # does nothing once the stream has ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncEventStream(SubscriptionBase):
    """State changes from the call on, as maps; `close` ends it."""

    def __init__(
        self, request_id: RequestId, inbox: AsyncInbox, cancel: Callable[[RequestId], None]
    ) -> None:
        super().__init__(request_id, cancel)
        self._inbox = inbox

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._is_closed:
            raise StopAsyncIteration
        change = self._take(await self._inbox.get())
        if change is None:
            raise StopAsyncIteration
        return change

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
