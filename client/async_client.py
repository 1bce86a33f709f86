"""The asynchronous client: one connection, read by the running event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

from mlxsup.protocol.client_messages import Subscribe
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Command

from .api import ClientBase, GenerateParameters, RequestOptions
from .async_streams import AsyncEventStream, AsyncInbox, AsyncStream
from .connection import Connection
from .link import Link
from .parameters import answer_limit_s, unanswered
from .results import Result
from .session import Owner
from .streams import OnNotice, value_of
from .vectors import (
    Embeddings,
    Ranking,
    embed_body,
    embeddings_of,
    ranking_of,
    rerank_body,
)


class AsyncClient(ClientBase[AsyncStream, Coroutine[Any, Any, dict[str, Any]]]):
    """A client of one daemon, for use in the event loop that runs when it is first used."""

    def __init__(self, endpoint: str | None = None) -> None:
        super().__init__(endpoint)
        self._connection = Connection(self._endpoint, on_link=self._watch)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._is_closed = False
        self._owner = Owner()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is open, and end the connection; a second time does nothing."""
        # What is open in a forked process belongs to the other one.
        if self._is_closed or self._owner.is_forked:
            return
        self._is_closed = True
        for handle in (self._timer, self._pump_handle):
            if handle is not None:
                handle.cancel()
        self._connection.close()
        await asyncio.to_thread(self._connection.terminate)

    async def complete(self, model: str, **parameters: Unpack[GenerateParameters]) -> Result:
        """Do what `Client.complete` does."""
        return await self._read_out(self.generate(model, **parameters))

    async def embed(
        self,
        model: str,
        texts: Sequence[str | list[int]],
        *,
        dimensions: int | None = None,
        input_type: str | None = None,
        truncate: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Embeddings:
        """Do what `Client.embed` does."""
        body = embed_body(texts, dimensions, input_type, truncate)
        return embeddings_of(await self._read_out(self._send(model, body, **options)))

    async def rerank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool | None = True,
        **options: Unpack[RequestOptions],
    ) -> Ranking:
        """Do what `Client.rerank` does."""
        body = rerank_body(query, documents, truncate)
        return ranking_of(await self._read_out(self._send(model, body, **options)), top_n)

    @staticmethod
    async def _read_out(stream: AsyncStream) -> Result:
        async with stream:
            async for _ in stream:
                pass
        return stream.result

    def events(self) -> AsyncEventStream:
        """Return the changes of states from now on."""
        subscribe = Subscribe(id=self._ids.next())
        inbox = self._post(subscribe, is_subscription=True)
        return AsyncEventStream(subscribe.id, inbox, self._cancel)

    async def _call(self, message: Command, *, wait: bool = True) -> dict[str, Any]:
        inbox = self._post(message)
        if not wait:
            # The daemon answers in order: a refusal would be here before this answer is.
            await self.ping()
            if inbox.is_empty():
                return {}
        try:
            async with asyncio.timeout(answer_limit_s(message)):
                return value_of(await inbox.get())
        except TimeoutError:
            raise unanswered(message, self._endpoint) from None

    def _post(self, message: Command, *, is_subscription: bool = False) -> AsyncInbox:
        inbox, frames = AsyncInbox(), encode(message)
        self._check_loop()
        self._connection.open_command(message.id, frames, inbox, is_subscription=is_subscription)
        self._pump_soon()
        return inbox

    def send_encoded(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None = None
    ) -> AsyncStream:
        """Send what `encode_generate` made, maybe in another process, and return its stream."""
        return self._open_stream(request_id, frames, on_notice)

    def _open_stream(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None
    ) -> AsyncStream:
        inbox = AsyncInbox()
        self._check_loop()
        self._connection.open_stream(request_id, frames, inbox)
        self._pump_soon()
        return AsyncStream(request_id, inbox, self._cancel, on_notice)

    def _cancel(self, request_id: RequestId) -> None:
        if self._loop is None or self._is_closed or self._owner.is_forked:
            return
        if _running_loop() is self._loop:
            # At once, so that nothing sent later overtakes it.
            self._cancel_here(request_id)
        else:
            # If the loop is closed, nothing can be open.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel_here, request_id)

    def _cancel_here(self, request_id: RequestId) -> None:
        if not self._is_closed:
            self._connection.cancel(request_id)
            self._pump_soon()

    def _check_loop(self) -> None:
        """Adopt the running loop, and refuse callers from any other, and in a forked process."""
        self._owner.check()
        if self._is_closed:
            raise RuntimeError("the client is closed")
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise RuntimeError("an AsyncClient belongs to the event loop that first used it")

    def _pump_soon(self) -> None:
        # The descriptors are edge-triggered, and a send swallows the edge: always read after it.
        if self._loop is not None and self._pump_handle is None and not self._is_closed:
            self._pump_handle = self._loop.call_soon(self._pump)

    def _on_messages(self) -> None:
        # At once: to be called again by the loop would cost as much as a message itself.
        if self._pump_handle is None and not self._is_closed:
            if self._connection.pump_messages():
                self._pump_soon()
            self._set_timer()

    def _pump(self) -> None:
        self._pump_handle = None
        if self._is_closed:
            return
        if self._connection.pump():
            self._pump_soon()
        self._set_timer()

    def _set_timer(self) -> None:
        """Keep one timer; it is set anew only when it fires."""
        if self._timer is not None or self._loop is None:
            return
        delay_s = self._connection.delay_s
        if delay_s is not None:
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _watch(self, old: Link | None, new: Link | None) -> None:
        if self._loop is None:
            # Nothing was ever sent, so there is no link.
            return
        for descriptor in _descriptors(old):
            self._loop.remove_reader(descriptor)
        if new is not None:
            self._loop.add_reader(new.socket.FD, self._on_messages)
            self._loop.add_reader(new.monitor.FD, self._pump_soon)


def _descriptors(link: Link | None) -> list[int]:
    return [] if link is None else [link.socket.FD, link.monitor.FD]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
