"""Server-sent events: one response that is sent in pieces, and how it ends.

An answer that breaks off is cut without its closing mark: a stream that ends cleanly would be
taken for a whole answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(data: bytes, name: bytes = b"") -> bytes:
    """Return an event with this line of data."""
    return b"event: %b\ndata: %b\n\n" % (name, data) if name else b"data: %b\n\n" % data


def comment(text: str) -> bytes:
    """Return a line that every reader skips; the connection is seen to be alive."""
    return f": {text}\n\n".encode()


WRITE = "mlxsup.write"
"""An extension of the server's, in the ASGI scope: sends a piece of the body without waiting."""


class EventStream:
    """A response of events; its head is sent with the first of them.

    It is whole only after `end`. One that is left without it is cut off by the server, without the
    mark that closes a response: to its reader it is no complete answer.

    Attributes:
        pass_on: sends whole events at once, the head having been sent. Nothing waits: what a reader
            leaves unread piles up, no more than its answer, until the connection is cut for it.
    """

    def __init__(self, scope: Scope, send: Send, headers: dict[str, str]) -> None:
        self.pass_on: Callable[[bytes], None] = scope["extensions"][WRITE]
        self._send = send
        self._headers = [
            (name.encode(), value.encode()) for name, value in {**HEADERS, **headers}.items()
        ]
        # Answers of several requests, and comments, are written by several tasks.
        self._turn = asyncio.Lock()
        self.is_started = False

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add some, unless the head has been sent."""
        if not self.is_started:
            known = dict(self._headers)
            known |= {name.encode(): value.encode() for name, value in headers.items()}
            self._headers = list(known.items())

    async def write(self, data: bytes) -> None:
        """Send whole events, or comments; wait for a reader that is behind."""
        async with self._turn:
            if not self.is_started:
                self.is_started = True
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End an answer that is whole."""
        async with self._turn:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
