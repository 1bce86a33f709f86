"""Has the daemon answer a request, whole or in pieces, and ends it when nobody reads any longer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxsup.client import AsyncClient, ConnectionLost, FinishReason, RequestError, Result
from mlxsup.client.async_client import AsyncStream

from .body import Disconnected, Receive
from .failure import Failure
from .openai.chunks import Shape
from .openai.errors import body_of, failure_of, headers_of, interrupted
from .openai.requests import Ask
from .progress import Progress
from .sse import EventStream, Send

REQUEST_ID = "x-request-id"

MakeShape = Callable[[str, int], Shape]
"""Makes the shape of an answer from its id and its time."""


class OpenAnswers:
    """The answers under way, so that they can be ended before the gateway is."""

    def __init__(self) -> None:
        # One entry for each request of the daemon that is open.
        self._streams: set[AsyncStream] = set()

    def add(self, streams: Sequence[AsyncStream]) -> None:
        """Some more."""
        self._streams.update(streams)

    def remove(self, streams: Sequence[AsyncStream]) -> None:
        """They have ended."""
        self._streams.difference_update(streams)

    def cancel(self) -> None:
        """Ends all."""
        for stream in list(self._streams):
            stream.cancel()


class Answer:
    """The requests of the daemon that one HTTP request stands for.

    Args:
        client: of the daemon.
        ask: what was asked for.
        open_answers: where they are listed while they run.
        progress: is given their notices; None for none.

    Raises:
        Failure: a parameter is wrong.
    """

    def __init__(
        self, client: AsyncClient, ask: Ask, open_answers: OpenAnswers, progress: Progress | None
    ) -> None:
        self.streams: list[AsyncStream] = []
        self._open_answers = open_answers
        try:
            for choice in ask.choices():
                self.streams.append(client.generate(ask.model, **choice, on_notice=progress))
        except RequestError as error:
            self.cancel()
            raise failure_of(error) from None
        open_answers.add(self.streams)

    @property
    def request_id(self) -> str:
        """The name of the first of them in logs, in `status` and in errors."""
        return self.streams[0].request_id

    def cancel(self) -> None:
        """Ends all."""
        for stream in self.streams:
            stream.cancel()

    async def read(
        self, take: Callable[[int, AsyncStream], Coroutine[Any, Any, None]], receive: Receive
    ) -> list[Result]:
        """Reads all to their ends, unless the reader leaves before.

        Args:
            take: reads one, which has this number.
            receive: of the ASGI connection.

        Raises:
            Failure: one of them has failed.
            Disconnected: nobody waits for the answer any longer.
        """
        gone = asyncio.create_task(_gone(receive))
        # Its end is that of the requests: the reader has left, or nobody needs them any longer.
        gone.add_done_callback(lambda _: self.cancel())
        tasks = [
            asyncio.create_task(take(index, stream)) for index, stream in enumerate(self.streams)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if gone.done():
                raise Disconnected
            for task in tasks:
                if task.done():
                    task.result()
            results = [stream.result for stream in self.streams]
        except (RequestError, ConnectionLost) as error:
            raise self._named(failure_of(error)) from None
        finally:
            self._open_answers.remove(self.streams)
            for task in (gone, *tasks):
                task.cancel()
            await asyncio.gather(gone, *tasks, return_exceptions=True)
        if any(result.finish_reason is FinishReason.CANCELLED for result in results):
            raise self._named(interrupted())
        return results

    def _named(self, failure: Failure) -> Failure:
        """The failure, whose response has the name of the request."""
        failure.headers[REQUEST_ID] = self.request_id
        return failure


async def answer(
    request: Request, client: AsyncClient, ask: Ask, open_answers: OpenAnswers, shape: MakeShape
) -> Response:
    """The response to a request whose body was read.

    Raises:
        Failure: a parameter is wrong, or the daemon has refused; not if the response is streamed.
        Disconnected: nobody waits for the answer any longer.
    """
    if ask.is_streamed:
        progress = Progress(time.monotonic)
        streamed = Answer(client, ask, open_answers, progress)
        return _Streamed(streamed, shape(streamed.request_id, int(time.time())), ask, progress)
    whole = Answer(client, ask, open_answers, None)
    shaped = shape(whole.request_id, int(time.time()))

    async def take(index: int, stream: AsyncStream) -> None:
        counted = shaped.count(index)
        async for delta in stream:
            counted.take(delta)

    results = await whole.read(take, request.receive)
    return JSONResponse(shaped.whole(results), headers={REQUEST_ID: whole.request_id})


class _Streamed(Response):
    """An answer in pieces. If it fails before its first piece, it is an ordinary error."""

    def __init__(self, answer: Answer, shape: Shape, ask: Ask, progress: Progress) -> None:
        super().__init__()
        self._answer = answer
        self._shape = shape
        self._ask = ask
        self._progress = progress

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Sends the response; see Starlette's `Response`."""
        out = EventStream(send, {REQUEST_ID: self._answer.request_id})
        self._progress.attach(out)

        async def take(index: int, stream: AsyncStream) -> None:
            await self._take(index, stream, out)

        try:
            results = await self._answer.read(take, receive)
        except Disconnected:
            return
        except Failure as failure:
            self._progress.close()
            if out.is_started:
                # And no end: the server cuts the connection, so that nothing looks complete.
                await out.event(json.dumps(body_of(failure)).encode())
                return
            response = JSONResponse(body_of(failure), failure.status, headers_of(failure))
            await response(scope, receive, send)
            return
        finally:
            self._progress.close()
        if self._ask.has_usage:
            await out.event(self._shape.usage(results))
        await out.event(b"[DONE]")
        await out.end()

    async def _take(self, index: int, stream: AsyncStream, out: EventStream) -> None:
        first = self._shape.first(index)
        async for delta in stream:
            piece = self._shape.piece(index, delta)
            if piece is None:
                continue
            if first is not None:
                await out.event(first)
                first = None
            await out.event(piece)
        if stream.result.finish_reason is FinishReason.CANCELLED:
            return
        if first is not None:
            await out.event(first)
        await out.event(self._shape.last(index, stream.result))


async def _gone(receive: Receive) -> None:
    """Returns when the reader has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
