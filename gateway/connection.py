"""The HTTP connections: what uvicorn does, and limits for senders and readers that dawdle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from mlxsup.client.connection import RequestIds

from . import limits
from .errors import openai_body
from .failure import Failure
from .parser import RequestParser
from .sse import WRITE

TOO_LARGE = Failure(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "the request line and the headers must be at most 64 KiB together",
    code="headers_too_large",
)
NOT_HTTP = Failure(
    HTTPStatus.BAD_REQUEST,
    "this is not a valid HTTP request, or it asks for a tunnel",
    code="invalid_http",
)

_ids = RequestIds()
"""Of requests that are refused before anybody else sees them."""


def refusal(failure: Failure) -> bytes:
    """Return the last response of a connection, to what no application sees, in OpenAI's form."""
    status, body = HTTPStatus(failure.status), json.dumps(openai_body(failure))
    return (
        f"HTTP/1.1 {status} {status.phrase}\r\nx-request-id: {_ids.next()}\r\n"
        "content-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode("ascii")


def write_piece(cycle: RequestResponseCycle, data: bytes) -> None:
    """Send a piece of a body whose head was sent, in the bytes that `cycle.send` would.

    There is one for each token, and a call of `send` through every layer of the application costs
    several times as much. Nothing is sent to nobody, and to nobody who has asked for the head only.
    """
    if cycle.chunked_encoding and not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn limits neither the time nor the length of a request's head, nor how
    long a reader may leave an answer unread.

    A head has the same limits if it comes behind a request that is still being answered.

    Args:
        responded: gets the status of each response that is sent from here.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        responded: Callable[[int], None] = lambda status: None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._responded = responded
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False  # some of a head has come, and not all of it
        self._has_advanced = False  # since the last read began: a head, or some of a body
        self._stuck_bytes = 0  # that have come since then
        self._is_too_long = False
        self._is_refused = False
        self._discarded_bytes = 0  # that have come since then
        # Requests whose answers are not complete, in their order; uvicorn does not read on while
        # more than one waits.
        self._cycles: list[RequestResponseCycle] = []

    def connection_made(self, transport: Any) -> None:
        """Expect the first request of an accepted connection soon."""
        super().connection_made(transport)
        self._requests = RequestParser(self)
        self.parser = self._requests  # type: ignore[assignment]
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Read bytes that have come."""
        if self._is_refused:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > limits.MAX_DISCARD_BYTES:
                self.transport.abort()
            return
        self._has_advanced = False
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        # What is neither a whole head nor a piece of a body is kept by the parser: half a head, or
        # the fields behind the chunks of a body.
        self._stuck_bytes = 0 if self._has_advanced else self._stuck_bytes + len(data)
        if self._stuck_bytes > limits.MAX_HEAD_BYTES:
            self._refuse()
        elif self._head_timer is None and (self._is_in_head or not self._has_request):
            self._await_head()

    def on_message_begin(self) -> None:
        """Note that a head has begun."""
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin a request whose head was read.

        Raises:
            httptools.HttpParserError: it is too long, or behind too many others.
        """
        self._has_advanced = True
        self._is_in_head = False
        self._stop_waiting()
        if self._requests.head_bytes > limits.MAX_HEAD_BYTES:
            self._is_too_long = True
            raise httptools.HttpParserError("the head is too long")
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            extensions: dict[str, Any] = {WRITE: partial(write_piece, self.cycle)}
            self.scope["extensions"] = extensions
        self._cycles = [one for one in self._cycles if not one.response_complete]
        if len(self._cycles) >= limits.MAX_PIPELINED:
            self._abort()
            raise httptools.HttpParserError("too many requests wait")
        if self.cycle is not None and self.cycle not in self._cycles:
            self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of a body."""
        self._has_advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request that was read."""
        self._has_advanced = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or is not put up with."""
        if self._is_refused:
            return
        if self._is_too_long:
            self._refuse()
        elif any(one.response_started and not one.response_complete for one in self._cycles):
            self._abort()  # or the refusal would be a part of that answer
        else:
            self._responded(NOT_HTTP.status)
            self.transport.write(refusal(NOT_HTTP))
            self.transport.close()

    def pause_writing(self) -> None:
        """Time a reader that is behind."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(limits.UNREAD_LIMIT_S, self._cut)

    def resume_writing(self) -> None:
        """Stop timing a reader that has caught up."""
        super().resume_writing()
        self._stop_timing_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests that the connection is gone."""
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
        """True if the head of a request was read whose answer is not complete."""
        return any(not cycle.response_complete for cycle in self._cycles)

    def _refuse(self) -> None:
        """Answer, and read on for a moment: an end at once would take the answer with it. If
        another answer is awaited or under way, the connection is cut."""
        if self._has_request:
            self._abort()
            return
        self._is_refused = True
        self._stop_waiting()
        self._responded(TOO_LARGE.status)
        self.transport.write(refusal(TOO_LARGE))
        self.transport.write_eof()
        self.loop.call_later(limits.DISCARD_LIMIT_S, self.transport.abort)

    def _abort(self) -> None:
        self._is_refused = True
        self._stop_waiting()
        self.transport.abort()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(limits.HEAD_LIMIT_S, self._on_head_limit)

    def _on_head_limit(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:
            self._await_head()  # nobody listens: the sender is not to blame
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
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
