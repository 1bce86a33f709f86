"""The parser of requests: httptools', without three things that it does for other servers.

An offer of another protocol is left out of the head, because httptools would skip the body; fields
behind a body are dropped, because no proxy has seen them.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECT = b"CONNECT"
UPGRADE = b"upgrade"


class RequestParser:
    """Tells a protocol of uvicorn what comes on its connection.

    - A head that offers another protocol (`upgrade: h2c`, as Java's client does with each request)
      is that of an ordinary request, as RFC 9110 (7.8) has it. httptools takes what follows for the
      other protocol: the body would be lost, or be read as the next request. So such a head is
      parsed once more without its offer.
    - A field behind the chunks of a body is no header. httptools calls the same function for both,
      and a key or a host there would count.
    - The chunks of a body that come in one read are one piece. httptools calls a function for each,
      and a body of chunks of one byte would take the event loop seconds.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._url = b""
        # Those of one head: the connection limits its length.
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_head = False
        self._pieces: list[bytes] = []  # of a body, from the read under way
        self.on_body = self._pieces.append
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        """Read bytes that have come.

        Raises:
            httptools.HttpParserError: they are no HTTP, or ask for a tunnel.
        """
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                if self.get_method() == CONNECT:
                    raise httptools.HttpParserError("tunnels are not supported") from None
                data = self._plain_head() + data[stop.args[0] :]
                self._parser = self._new()
            else:
                self._pass_body_on()
                return

    @property
    def head_bytes(self) -> int:
        """Return the length of the head that was read last: its target and its headers."""
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def get_http_version(self) -> str:
        """Return the version of the request, such as `1.1`."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """Return the method of the request."""
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        """True if another request may follow."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Return False: never."""
        return False

    # ------------------------------------------------------------ called by httptools

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._url = b""
        self._headers = []
        self._is_head = True
        self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Add a piece of its target."""
        self._url += url
        self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; drop a field behind the chunks."""
        if self._is_head:
            self._headers.append((name, value))
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """End its head."""
        self._is_head = False
        if not self._parser.should_upgrade():
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        """End it."""
        self._pass_body_on()
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()

    # ------------------------------------------------------------ inside

    def _pass_body_on(self) -> None:
        if self._pieces:
            body = b"".join(self._pieces)
            self._pieces.clear()
            self._protocol.on_body(body)

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn has it: a response to a request that others follow may end the connection.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _plain_head(self) -> bytes:
        """Return the head that was read last, without its offers."""
        version = self.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.get_method(), self._url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self._headers
                  if name.lower() != UPGRADE]  # fmt: skip
        return b"\r\n".join([*lines, b"", b""])
