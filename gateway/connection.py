"""The HTTP connections: what uvicorn does, and limits for senders and readers that dawdle."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from . import limits
from .parser import RequestParser
from .sse import WRITE

TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
)
TOO_LARGE_BODY = (
    b'{"error":{"message":"the head of a request has at most 64 KiB",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
)


def write_piece(cycle: RequestResponseCycle, data: bytes) -> None:
    """Sends a piece of a body whose head was sent, in the bytes that `cycle.send` would.

    There is one for each token, and a call of `send` through every layer of the application costs
    several times as much. Nothing is sent to nobody, and to nobody who has asked for the head only.
    """
    if cycle.chunked_encoding and not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn limits neither the time nor the length of a request's head, nor how
    long a reader may leave an answer unread."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_refused = False
    _cycles: list[RequestResponseCycle]
    """Requests whose answers are not complete, in their order; uvicorn does not read on while
    more than one waits."""

    def connection_made(self, transport: Any) -> None:
        """A connection was accepted: its first request must begin soon."""
        super().connection_made(transport)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._cycles = []
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        if self._is_refused:
            return
        if self._has_request:
            super().data_received(data)
            return
        self._head_bytes += len(data)
        if self._head_timer is None:
            self._await_head()
        super().data_received(data)
        if self._has_request:
            self._stop_waiting()
        elif self._head_bytes > limits.MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """The head of a request was read."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            extensions: dict[str, Any] = {WRITE: partial(write_piece, self.cycle)}
            self.scope["extensions"] = extensions
        self._cycles = [one for one in self._cycles if not one.response_complete]
        if self.cycle is not None and self.cycle not in self._cycles:
            self._cycles.append(self.cycle)

    def on_response_complete(self) -> None:
        """An answer was sent; another request may follow."""
        self._head_bytes = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(limits.UNREAD_LIMIT_S, self._cut)

    def resume_writing(self) -> None:
        """The reader has caught up."""
        super().resume_writing()
        self._stop_timing_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        self._stop_timing_reader()
        super().connection_lost(exc)
        # uvicorn notifies the last request only, which may wait behind the one being answered.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # ------------------------------------------------------------ inside

    @property
    def _has_request(self) -> bool:
        """Whether the head of a request was read whose answer is not complete."""
        return any(not cycle.response_complete for cycle in self._cycles)

    def _refuse(self) -> None:
        """Answers, and reads on for a moment: an end at once would take the answer with it."""
        self._is_refused = True
        self._stop_waiting()
        self.transport.write(TOO_LARGE % (len(TOO_LARGE_BODY), TOO_LARGE_BODY))
        self.transport.write_eof()
        self.loop.call_later(limits.DISCARD_LIMIT_S, self.transport.abort)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(limits.HEAD_LIMIT_S, self._on_head_limit)

    def _on_head_limit(self) -> None:
        self._head_timer = None
        if not self._has_request:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_timing_reader(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _cut(self) -> None:
        self._unread_timer = None
        self.transport.abort()
