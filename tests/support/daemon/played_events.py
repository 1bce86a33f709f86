"""A subscription to the changes of models, which yields what a test puts into it."""

from __future__ import annotations

import asyncio
from typing import Any, Self

Item = dict[str, Any] | Exception


class PlayedEvents:
    """The changes that a played daemon tells.

    Attributes:
        items: what comes next; an exception ends it.
        is_closed: whether nobody reads it any longer.
    """

    def __init__(self) -> None:
        self.items: asyncio.Queue[Item] = asyncio.Queue()
        self.is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True
