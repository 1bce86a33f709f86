"""A played daemon whose models can be loaded, unloaded, restarted and followed."""

from __future__ import annotations

import asyncio
from typing import Any

from mlxsup.client import ConnectionLost, ErrorCode, RequestError

from .played_gateway import PlayedDaemon


class OperatedDaemon(PlayedDaemon):
    """One that accepts or refuses, as the test says.

    Attributes:
        commands: each with its model, in their order.
        refusal: the answer to all of them; None: they are accepted.
        over: when the accepted ones are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[tuple[str, str]] = []
        self.refusal: Exception | None = None
        self.over = asyncio.Event()

    async def load(self, model: str) -> dict[str, Any]:
        return await self._command("load", model)

    async def unload(self, model: str) -> dict[str, Any]:
        return await self._command("unload", model)

    async def restart(self, model: str) -> dict[str, Any]:
        return await self._command("restart", model)

    async def ping(self) -> dict[str, Any]:
        """Answered after what was asked before."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if isinstance(self.refusal, ConnectionLost):
            raise self.refusal
        return {}

    async def _command(self, action: str, model: str) -> dict[str, Any]:
        self.commands.append((action, model))
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        await self.over.wait()
        return {}


def unknown(name: str) -> RequestError:
    """What a daemon says of a model that it does not have."""
    message = f"no model is called {name!r}; configured: m"
    return RequestError(ErrorCode.UNKNOWN_MODEL, message, retryable=False, detail={})
