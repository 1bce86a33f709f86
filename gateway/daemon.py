"""The daemon behind the gateway: its client, its status, and what names mean to it.

A model's own names come first, so that `gpt-*` does not take away a model called `gpt-oss`.
Presets are known here only, because the core reads no parameters; `x:ADAPTER` it knows itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from mlxsup.client import AsyncClient, ConnectionLost, RequestError

from . import limits
from .errors import failure_of
from .failure import Failure
from .metrics import Meter
from .names import Meant, look_up

FRESH_S = 1.0
"""The age up to which a status serves to look up names, and so the delay of a changed
configuration."""

T = TypeVar("T")


class Daemon:
    """Asks the daemon what requests over HTTP need to know of it.

    Attributes:
        client: of the daemon, once `connected` has begun.
        meter: counts what comes of requests, by names that a status has vouched for.

    Args:
        foreign: names of another API, in which `*` stands for anything, and the models they mean;
            the first that fits counts, after the models' own names.
    """

    client: AsyncClient

    def __init__(self, foreign: Sequence[tuple[str, str]] = ()) -> None:
        self.meter = Meter()
        self._foreign = [(_pattern_of(name), model) for name, model in foreign]
        self._recent: Mapping[str, Any] | Failure = {}
        self._recent_at = -FRESH_S
        self._looking = asyncio.Lock()

    @asynccontextmanager
    async def connected(
        self, client: AbstractAsyncContextManager[AsyncClient]
    ) -> AsyncIterator[None]:
        """Use this client as long as the block lasts."""
        async with client as self.client:
            yield

    async def status(self) -> dict[str, Any]:
        """Return the daemon's status."""
        status = await answered(self.client.status())
        self.meter.know(status["models"])
        return status

    async def meant(self, name: str) -> Meant:
        """Return what the name of a model means; itself if that is not known.

        Raises:
            Failure: the daemon was asked, and does not answer.
        """
        others = [model for pattern, model in self._foreign if pattern.fullmatch(name)]
        if ":" not in name and not others:
            return Meant(name)  # the daemon finds it, or refuses it
        status = await self._recent_status()
        for one in (name, *others[:1]):
            if (meant := look_up(status, one)) is not None:
                return meant
        return Meant(others[0] if others else name)

    async def learn(self, name: str) -> None:
        """Let the meter know which model this name means, if that is known at all."""
        if not self.meter.knows(name):
            try:
                await self._recent_status()
            except Failure:
                pass  # the request gets the same answer, if that is still so

    async def _recent_status(self) -> Mapping[str, Any]:
        """Return a status of the last second; invented names cause one question in that time."""
        async with self._looking:
            if time.monotonic() - self._recent_at >= FRESH_S:
                try:
                    self._recent = await self.status()
                except Failure as failure:
                    self._recent = failure
                self._recent_at = time.monotonic()
        if isinstance(self._recent, Failure):
            raise self._recent
        return self._recent


async def answered(call: Awaitable[T], limit_s: float | None = None) -> T:
    """Return what the daemon answers, at once unless a limit is given.

    Raises:
        Failure: it refuses, is gone, or does not answer.
    """
    limit_s = limit_s or limits.STATUS_LIMIT_S
    try:
        async with asyncio.timeout(limit_s):
            return await call
    except (RequestError, ConnectionLost) as error:
        failure = failure_of(error)
        if isinstance(error, RequestError) and (hint := error.detail.get("hint")):
            failure.message += f"; {hint}"
        raise failure from None
    except TimeoutError:
        raise Failure(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the daemon did not answer within {limit_s:g} s",
            code="daemon_silent",
            is_retryable=True,
            retry_after_s=1.0,
        ) from None


def _pattern_of(name: str) -> re.Pattern[str]:
    """Return the expression for a name with `*` in it. The first place where a part fits is never
    given up again: else a long name would take time to the power of the number of `*`."""
    first, *parts = map(re.escape, name.split("*"))
    if not parts:
        return re.compile(first)
    *middle, last = parts
    return re.compile("".join([first, *(f"(?>.*?{part})" for part in middle), f".*{last}"]))
