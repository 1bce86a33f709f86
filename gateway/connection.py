"""The HTTP connections: what uvicorn does, and limits for senders and readers that dawdle.

uvicorn limits neither the time nor the length of a request's head, nor how long a reader may leave
an answer unread.
"""

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
    several times as much. Nothing is sent to a client that has left, or asked for the head only.
    """
    if cycle.chunked_encoding and not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    elif cycle.chunked_encoding is False and not cycle.disconnected:
        cycle.transport.write(data)


async def send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """Send a message of the application to a client of HTTP/1.0, which knows no chunks (RFC 9112,
    6.1): a body whose length no header says ends with the connection."""
    if message["type"] == "http.response.start":
        is_measured = b"content-length" in dict(message.get("headers", ()))
        if not is_measured and cycle.scope["method"] != "HEAD":
            cycle.chunked_encoding = False
    elif not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


class RequestParser(httptools.HttpRequestParser):
    """httptools' parser, to which a request that offers another protocol is an ordinary one.

    So RFC 9110 (7.8) has it, and Java's client offers h2c with each request. httptools takes what
    follows for the other protocol: a body would be lost, or be read as the next request. So such a
    head is read once more without its offer, by another parser.
    """

    def __init__(self, protocol: LimitedProtocol) -> None:
        super().__init__(protocol)
        # As uvicorn has it: a response to a request that others follow may end the connection.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        """Read bytes that have come.

        Raises:
            httptools.HttpParserError: they are no HTTP, or ask for a tunnel.
        """
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self.get_method() == b"CONNECT":
                raise httptools.HttpParserError("tunnels are not supported") from None
            version, of = self.get_http_version().encode(), self._protocol
            lines = [b"%b %b HTTP/%b" % (self.get_method(), of.url, version)]
            lines += [b"%b: %b" % header for header in of.headers if header[0] != b"upgrade"]
            of.parser = RequestParser(of)
            of.parser.feed_data(b"\r\n".join([*lines, b"", b""]) + data[stop.args[0] :])


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

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
        # Of a body, from the read under way: httptools has one for each chunk, and a body of chunks
        # of one byte would take the event loop seconds.
        self._body: list[bytes] = []
        # Requests whose answers are not complete, in their order; uvicorn does not read on while
        # more than one waits.
        self._cycles: list[RequestResponseCycle] = []

    def connection_made(self, transport: Any) -> None:
        """Expect the first request of an accepted connection soon."""
        super().connection_made(transport)
        self.parser = RequestParser(self)
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
        self._pass_body_on()
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; drop a field behind the chunks of a body, which no proxy has seen: a key or
        a host there would count."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request whose head was read.

        Raises:
            httptools.HttpParserError: it is too long, or behind too many others.
        """
        if self.parser.should_upgrade():
            return
        self._has_advanced = True
        self._is_in_head = False
        self._stop_waiting()
        head_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) + head_bytes > limits.MAX_HEAD_BYTES:
            self._is_too_long = True
            raise httptools.HttpParserError("the head is too long")
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            extensions: dict[str, Any] = {WRITE: partial(write_piece, self.cycle)}
            self.scope["extensions"] = extensions
            if self.scope["http_version"] == "1.0":
                # uvicorn makes the cycle itself, and takes no class of ours for it.
                self.cycle.send = partial(send_unchunked, self.cycle)  # type: ignore[method-assign]
        self._cycles = [one for one in self._cycles if not one.response_complete]
        if len(self._cycles) >= limits.MAX_PIPELINED:
            self._abort()
            raise httptools.HttpParserError("too many requests wait")
        if self.cycle is not None and self.cycle not in self._cycles:
            self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Take a chunk of a body."""
        self._has_advanced = True
        self._body.append(body)

    def on_message_complete(self) -> None:
        """End a request that was read."""
        if not self.parser.should_upgrade():
            self._has_advanced = True
            self._pass_body_on()
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

    @property
    def _has_request(self) -> bool:
        """True if the head of a request was read whose answer is not complete."""
        return any(not cycle.response_complete for cycle in self._cycles)

    def _pass_body_on(self) -> None:
        if self._body:
            body = b"".join(self._body)
            self._body.clear()
            super().on_body(body)

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
