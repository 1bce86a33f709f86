"""The asynchronous client: one connection, read by the running event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

from mlxsup.protocol.client_messages import (
    Ping,
    Reload,
    RemoveModel,
    Restart,
    SettingsQuery,
    StatusQuery,
    Stop,
    Subscribe,
    Unload,
)
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.request_messages import PauseRequest, ResumeRequest

from .api import GenerateParameters, RequestOptions, TokenizeParameters
from .async_streams import AsyncEventStream, AsyncInbox, AsyncStream
from .connection import Connection
from .link import Link
from .parameters import (
    Command,
    add_model,
    answer_limit_s,
    check_limit,
    check_model,
    check_request,
    configure,
    encode_command,
    load,
    prioritize,
    unanswered,
)
from .request_commands import AsyncRequestCommands
from .results import Result
from .streams import OnNotice, value_of
from .vectors import (
    Embeddings,
    Ranking,
    embed_body,
    embeddings_of,
    ranking_of,
    rerank_body,
)


class AsyncClient(AsyncRequestCommands[AsyncStream]):
    """A client of one daemon, for use in the event loop that runs when it is first used."""

    def __init__(self, endpoint: str | None = None) -> None:
        super().__init__(endpoint)
        self._connection = Connection(self._endpoint, on_link=self._watch)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._is_closed = False

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
        """Cancels what is open and ends the connection. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        for handle in (self._timer, self._pump_handle):
            if handle is not None:
                handle.cancel()
        self._connection.close()
        await asyncio.to_thread(self._connection.terminate)

    async def complete(self, model: str, **parameters: Unpack[GenerateParameters]) -> Result:
        """Returns the whole answer; takes the arguments of `generate`.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
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
        """As `Client.embed`."""
        body = embed_body(texts, dimensions, input_type, truncate)
        return embeddings_of(await self._read_out(self.stream_vectors(model, body, options)))

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
        """As `Client.rerank`."""
        body = rerank_body(query, documents, truncate)
        return ranking_of(await self._read_out(self.stream_vectors(model, body, options)), top_n)

    @staticmethod
    async def _read_out(stream: AsyncStream) -> Result:
        async with stream:
            async for _ in stream:
                pass
        return stream.result

    async def tokenize(self, model: str, **parameters: Unpack[TokenizeParameters]) -> list[int]:
        """Returns the ids of a prompt, as `generate` would make them of the same arguments.

        Nothing is computed; the model is loaded if need be.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
        async with self._tokenizing(model, ids=True, **parameters) as stream:
            async for _ in stream:
                pass
        return stream.result.prompt_token_ids

    async def detokenize(self, model: str, tokens: list[int]) -> str:
        """Returns the text of token ids, special ones included.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
        async with self._tokenizing(model, ids=False, prompt_tokens=tokens) as stream:
            async for _ in stream:
                pass
        return stream.result.prompt

    async def ping(self) -> dict[str, Any]:
        """Returns once the daemon has answered."""
        return await self._call(Ping(id=self._ids.next()))

    async def status(self, *, debug: bool = False) -> dict[str, Any]:
        """Returns what `mlxsup status --json` prints; `debug` adds each model's latest events."""
        return await self._call(StatusQuery(id=self._ids.next(), debug=debug))

    async def load(
        self,
        model: str,
        *,
        dry_run: bool = False,
        keep_alive: float | None = None,
        context_length: int | None = None,
    ) -> dict[str, Any]:
        """Returns once the model is READY.

        Args:
            model: which one.
            dry_run: change nothing, and return at once what the load would lead to: `outcome`
                (`loaded`, `fits`, `evicts`, `swaps` or `waits`), `evicts` and `swaps` (names),
                `needed_bytes` and `reason`. A load that would be refused raises its error.
            keep_alive: as for `generate`, but above 0.
            context_length: tokens of prompt and answer together, 0 for the model's own limit, until
                the configuration is read again; None: as it is. Another one takes a new process.
        """
        message = load(
            self._ids.next(),
            model,
            dry_run=dry_run,
            keep_alive=keep_alive,
            context_length=context_length,
        )
        return await self._call(message)

    async def unload(self, model: str) -> dict[str, Any]:
        """Returns once the model's process is gone."""
        return await self._call(Unload(id=self._ids.next(), model=check_model(model)))

    async def restart(self, model: str, *, now: bool = False, wait: bool = True) -> dict[str, Any]:
        """Returns once the model is READY in a new process.

        Args:
            model: which one.
            now: whether to cut running requests off.
            wait: False to return as soon as the daemon has accepted it.
        """
        restart = Restart(id=self._ids.next(), model=check_model(model), now=now)
        inbox = self._post(restart, restart.id)
        if not wait:
            # The daemon answers in order: a refusal would be here before this answer is.
            await self.ping()
            if inbox.is_empty():
                return {}
        return value_of(await inbox.get())

    async def prioritize(self, request: str, priority: str) -> dict[str, Any]:
        """Gives an open request of anybody another class, and returns what is known of it.

        Args:
            request: its id, or, as `#12`, the number that the status shows for it.
            priority: `interactive`, `normal` or `batch`; its wait so far no longer counts.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do.
        """
        return await self._call(prioritize(self._ids.next(), request, priority))

    async def pause(self, request: str) -> dict[str, Any]:
        """Makes an open request of anybody wait until it is resumed; returns at once.

        Args:
            request: as for `prioritize`.

        Returns:
            `request`, `number`, `model`, `tokens_sent`, and `stage`: `pausing` until its row has
            left the batch, then `paused`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do, or it is
                paused already or may not be paused.
        """
        return await self._call(PauseRequest(id=self._ids.next(), request=check_request(request)))

    async def resume(self, request: str) -> dict[str, Any]:
        """Lets a paused request continue; returns at once.

        Args:
            request: as for `prioritize`.

        Returns:
            The same as `pause`; its `stage` is `queued`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do, or it is
                not paused.
        """
        return await self._call(ResumeRequest(id=self._ids.next(), request=check_request(request)))

    async def reload(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Makes the daemon read its configuration file again; a wrong one changes nothing.

        Args:
            dry_run: change nothing, and return what would change.

        Returns:
            The names of the models that were `added`, `changed` and `removed`, the other `settings`
            that have changed, and in `later` the keys that take effect at the next start. A dry run
            also has in `foreseen` what would happen to each of the models, and in `evicts` and
            `refuses` which would be evicted, and which could not be loaded.

        Raises:
            RequestError: the file is wrong; `detail["problems"]` lists everything that is wrong.
        """
        return await self._call(Reload(id=self._ids.next(), dry_run=dry_run))

    async def add(
        self, model: str, *, name: str | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        """As `Client.add`."""
        return await self._call(add_model(self._ids.next(), model, name=name, revision=revision))

    async def remove(self, model: str) -> dict[str, Any]:
        """As `Client.remove`."""
        return await self._call(RemoveModel(id=self._ids.next(), model=check_model(model)))

    async def configure(self, changes: Mapping[str, str | None]) -> dict[str, Any]:
        """As `Client.configure`."""
        return await self._call(configure(self._ids.next(), changes))

    async def settings(self, model: str) -> dict[str, Any]:
        """As `Client.settings`."""
        return await self._call(SettingsQuery(id=self._ids.next(), model=check_model(model)))

    async def stop(self, *, now: bool = False, timeout_s: float | None = None) -> dict[str, Any]:
        """Asks the daemon to end; returns at once with the pids that will go.

        Args:
            now: whether to cut running requests off.
            timeout_s: how long they may take; None for the configured limit.
        """
        limit_s = check_limit("timeout_s", timeout_s)
        return await self._call(Stop(id=self._ids.next(), now=now, timeout_s=limit_s))

    def events(self) -> AsyncEventStream:
        """State changes from now on."""
        subscribe = Subscribe(id=self._ids.next())
        inbox = self._post(subscribe, subscribe.id, is_subscription=True)
        return AsyncEventStream(subscribe.id, inbox, self._cancel)

    async def _call(self, message: Command) -> dict[str, Any]:
        inbox = self._post(message, message.id)
        try:
            async with asyncio.timeout(answer_limit_s(message)):
                return value_of(await inbox.get())
        except TimeoutError:
            raise unanswered(message, self._endpoint) from None

    def _post(
        self, message: Message, request_id: RequestId, *, is_subscription: bool = False
    ) -> AsyncInbox:
        inbox = AsyncInbox()
        frames = encode_command(message)
        self._check_loop()
        self._connection.open_command(request_id, frames, inbox, is_subscription=is_subscription)
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
        if self._loop is None or self._is_closed:
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
        """Adopts the running loop, and refuses callers from any other."""
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
        """Keeps one timer; it is set anew only when it fires."""
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
        if new is not None and new.monitor is not None:
            self._loop.add_reader(new.socket.FD, self._on_messages)
            self._loop.add_reader(new.monitor.FD, self._pump_soon)


def _descriptors(link: Link | None) -> list[int]:
    if link is None or link.monitor is None:
        return []
    return [link.socket.FD, link.monitor.FD]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
