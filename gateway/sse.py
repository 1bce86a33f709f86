"""Server-sent events: one response that is sent in pieces, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """A response of events; its head is sent with the first of them.

    It is whole only after `end`. One that is left without it is cut off by the server, without the
    mark that closes a response: to its reader it is no complete answer.

    Args:
        send: of the ASGI connection.
        headers: further ones.
    """

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = [
            *HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())
        ]  # fmt: skip
        # Answers of several requests, and comments, are written by several tasks.
        self._turn = asyncio.Lock()
        self.is_started = False

    async def event(self, data: bytes) -> None:
        """Sends an event with this line of data."""
        await self._write(b"data: %b\n\n" % data)

    async def comment(self, text: str) -> None:
        """Sends a line that every reader skips; the connection is seen to be alive."""
        await self._write(f": {text}\n\n".encode())

    async def end(self) -> None:
        """The answer is whole."""
        async with self._turn:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        async with self._turn:
            if not self.is_started:
                self.is_started = True
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
