"""Waiting for something to become true inside an event loop, which keeps running meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from support.eventually import INTERVAL_S, TIMEOUT_S

T = TypeVar("T")


async def eventually_async(
    predicate: Callable[[], T | Literal[False] | None], timeout_s: float = TIMEOUT_S
) -> T:
    """The first truthy value of the predicate; `eventually` for a coroutine."""
    until = time.monotonic() + timeout_s
    while not (value := predicate()):
        assert time.monotonic() < until, f"still {value!r} after {timeout_s:g} s"
        await asyncio.sleep(INTERVAL_S)
    return value
