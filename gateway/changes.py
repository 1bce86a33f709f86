"""The changes of models, for any number of followers: a connection has only one subscription.

`GET /models/sse` passes them on in the form of llama.cpp's router.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxsup.client import AsyncClient, ConnectionLost, RequestError
from mlxsup.protocol.errors import ErrorCode

from . import limits
from .answers import OpenAnswers
from .body import Disconnected, Receive, unless_gone
from .errors import failure_of, interrupted, openai_body
from .failure import Failure
from .openai.models import status_of
from .sse import EventStream, Send, comment, event

Item = dict[str, Any] | Failure

logger = logging.getLogger(__name__)


class Follower:
    """Changes from now on, until it is removed. Iterating ends with the `Failure` that ends it."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        """Take a change, or the end; one that is too far behind gets a separate end."""
        if self._items.qsize() >= limits.MAX_CHANGES_BEHIND:
            self._changes.remove(self)
            message = (
                f"this client left {limits.MAX_CHANGES_BEHIND} changes unread, so its stream ends"
            )
            item = Failure(HTTPStatus.SERVICE_UNAVAILABLE, message, code="slow_consumer")
        self._items.put_nowait(item)

    def cancel(self) -> None:
        """End it, because the gateway ends."""
        self._items.put_nowait(interrupted())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        item = await self._items.get()
        if isinstance(item, Failure):
            raise item
        return item


class Changes:
    """Passes each change on to all who follow.

    Args:
        on_change: called with each, before a follower gets it.
        open_answers: where followers are listed, so that they end before the gateway does.
    """

    def __init__(
        self, on_change: Callable[[dict[str, Any]], None], open_answers: OpenAnswers
    ) -> None:
        self._on_change = on_change
        self._open_answers = open_answers
        # At most MAX_FOLLOWERS.
        self._followers: set[Follower] = set()
        self._gap: Failure | None = None  # why there is no subscription now

    @asynccontextmanager
    async def watching(self, client: AsyncClient) -> AsyncIterator[None]:
        """Subscribe, and pass on until the block is left; a bug in that is logged at once."""

        def report(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("changes are no longer passed on", exc_info=error)

        task = asyncio.create_task(self._pass_on(client))
        task.add_done_callback(report)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def routes(self) -> list[Route]:
        """`GET /models/sse`."""
        return [Route("/models/sse", self._answer, methods=["GET"])]

    async def _answer(self, request: Request) -> Response:
        return _Followed(self.follow(), self)

    def follow(self) -> Follower:
        """Return one more follower."""
        if len(self._followers) >= limits.MAX_FOLLOWERS:
            raise Failure(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{limits.MAX_FOLLOWERS} clients follow the models already; try again later",
                code="overloaded",
                is_retryable=True,
                retry_after_s=1.0,
            )
        follower = Follower(self)
        if self._gap is not None:
            follower.put(self._gap)
        self._followers.add(follower)
        self._open_answers.add([follower])
        return follower

    def remove(self, follower: Follower) -> None:
        """Forget a follower."""
        self._followers.discard(follower)
        self._open_answers.remove([follower])

    async def _pass_on(self, client: AsyncClient) -> None:
        while True:
            self._gap = None
            try:
                async with client.events() as changes:
                    async for change in changes:
                        self._on_change(change)
                        self._tell(change)
            except (RequestError, ConnectionLost) as error:
                # Those who follow have missed something, or are about to; whoever comes once there
                # is a new subscription begins with that.
                self._gap = failure_of(error)
                self._tell(self._gap)
                if not isinstance(error, RequestError) or error.code is not ErrorCode.SLOW_CONSUMER:
                    await asyncio.sleep(limits.FOLLOW_AGAIN_S)

    def _tell(self, item: Item) -> None:
        for follower in tuple(self._followers):
            follower.put(item)


# ---------------------------------------------------------------- over HTTP


def event_of(change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a change of a model as this API has it."""
    data: dict[str, Any] = {"status": (status := status_of(change["to"]))["value"]}
    progress = change["progress"]
    if progress is not None:
        data["progress"] = {"current": progress["phase"], "value": progress["fraction"]}
    if "failed" in status:
        data |= {"failed": True, "message": change["note"]}
    return {"model": change["model"], "event": "model_status", "data": data}


class _Followed(Response):
    """A response that never ends by itself."""

    def __init__(self, follower: Follower, changes: Changes) -> None:
        super().__init__()
        self._follower = follower
        self._changes = changes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Send the response; see Starlette's `Response`."""
        out = EventStream(scope, send, {})
        try:
            await unless_gone(receive, _pass_on(self._follower, out))
        except Disconnected:
            pass
        except Failure as failure:
            # And no end: who follows sees that it has been cut off, and connects again.
            await out.write(event(json.dumps(openai_body(failure)).encode()))
        finally:
            self._changes.remove(self._follower)


async def _pass_on(follower: Follower, out: EventStream) -> None:
    await out.write(comment("changes from now on"))
    async for change in follower:
        await out.write(event(json.dumps(event_of(change), ensure_ascii=False).encode()))
