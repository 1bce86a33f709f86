"""The changes of models, for any number of followers: a connection has only one subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from mlxsup.client import AsyncClient, ConnectionLost, RequestError
from mlxsup.protocol.errors import ErrorCode

from . import limits
from .background import background
from .failure import Failure
from .openai.errors import failure_of

Item = dict[str, Any] | Failure


class Follower:
    """Changes from now on, until the block is left. Iterating ends with the `Failure` that ends it.

    Args:
        changes: where it is listed.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        """Takes a change, or the end; one that is too far behind gets a separate end."""
        if self._items.qsize() >= limits.MAX_CHANGES_BEHIND:
            self._changes.remove(self)
            message = f"{limits.MAX_CHANGES_BEHIND} changes were not read in time"
            item = Failure(HTTPStatus.SERVICE_UNAVAILABLE, message, code="slow_consumer")
        self._items.put_nowait(item)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        item = await self._items.get()
        if isinstance(item, Failure):
            raise item
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._changes.remove(self)


class Changes:
    """Passes each change on to all who follow.

    Args:
        on_change: called with each, before anybody gets it.
    """

    def __init__(self, on_change: Callable[[dict[str, Any]], None]) -> None:
        self._on_change = on_change
        # At most MAX_FOLLOWERS.
        self._followers: set[Follower] = set()
        self._gap: Failure | None = None  # why there is no subscription now

    def watching(self, client: AsyncClient) -> AbstractAsyncContextManager[None]:
        """Subscribes, and passes on until the block is left."""
        return background(self._pass_on(client), lost="changes are no longer passed on")

    def follow(self) -> Follower:
        """Somebody follows.

        Raises:
            Failure: too many do.
        """
        if len(self._followers) >= limits.MAX_FOLLOWERS:
            raise Failure(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{limits.MAX_FOLLOWERS} follow the models already",
                code="overloaded",
                is_retryable=True,
                retry_after_s=1.0,
            )
        follower = Follower(self)
        if self._gap is not None:
            follower.put(self._gap)
        self._followers.add(follower)
        return follower

    def remove(self, follower: Follower) -> None:
        """It follows no longer."""
        self._followers.discard(follower)

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
