"""Work that runs next to a block, and ends with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], *, lost: str) -> AsyncIterator[None]:
    """Run something until the block is left.

    Args:
        work: may end by itself; whatever it raises is a bug, and is logged at once.
        lost: what no longer happens then, for the log.
    """

    def report(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(lost, exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(report)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
