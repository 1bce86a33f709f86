"""What every request goes through: who may ask, an id for each answer, and no bare tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from mlxsup.client.connection import RequestIds

from .body import Heard, Receive
from .cross_origin import CrossOrigin, Headers
from .errors import error_response
from .failure import Failure
from .headers import ANTHROPIC_REQUEST_ID, ID_KEY, REQUEST_ID, is_anthropic
from .keys import CALLER, Caller, Keys
from .metrics import Meter
from .sse import Send

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

OPEN_PATHS = ("/health",)
"""Answered without a key: nothing can be learned or done there."""

logger = logging.getLogger(__name__)


class Guard:
    """An ASGI application around another one.

    Args:
        app: the one within.
        hosts: names and addresses that a request may be sent to, without ports. A web page of
            another site whose name suddenly means this machine is refused by them. None: any,
            because every request needs a key, which such a page does not have.
        keys: those that it takes.
        meter: counts the responses.
        open_paths: further ones like `OPEN_PATHS`.
        origins: pages of other sites that may ask, as browsers send them.
    """

    def __init__(
        self,
        app: App,
        hosts: Iterable[str] | None,
        keys: Keys,
        meter: Meter,
        *,
        open_paths: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._open_paths = frozenset([*OPEN_PATHS, *open_paths])
        self._meter = meter
        self._hosts = (
            None if hosts is None else frozenset([*LOCAL_NAMES, *(host.lower() for host in hosts)])
        )
        self._keys = keys
        self._cross_origin = CrossOrigin(origins)
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection or request; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        heard = Heard(receive, waits=_waits(scope["headers"]))
        more = self._cross_origin.headers(scope)
        named = _Named(
            send, self._ids.next(), self._meter, heard, more, is_anthropic=is_anthropic(scope)
        )
        scope[ID_KEY] = named.request_id
        try:
            self._check_host(scope)
            if preflight := self._cross_origin.preflight(scope):
                await preflight(scope, heard, named)
                return
            scope[CALLER] = self._caller(scope)
        except Failure as failure:
            await error_response(scope, failure)(scope, heard, named)
            return
        try:
            await self._app(scope, heard, named)
        except Exception:
            # The client has its answer: the application gives one before it raises.
            logger.exception("request failed path=%s id=%s", scope["path"], named.request_id)

    def _check_host(self, scope: Scope) -> None:
        """Refuse what is sent to another machine."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        # HAProxy's health checks are HTTP/1.0 without a host. A browser, whose page may be of
        # another site, always sends one.
        if not hosts and scope["http_version"] == "1.0":
            return
        host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
        if self._hosts is not None and without_port(host) not in self._hosts:
            raise Failure(
                HTTPStatus.FORBIDDEN,
                f"the header `host` must be one of {', '.join(sorted(self._hosts))}; `hosts` of"
                " [gateway] adds others",
                code="forbidden_host",
            )

    def _caller(self, scope: Scope) -> Caller:
        """Return who asks."""
        if scope["path"] in self._open_paths:
            return Caller()
        return self._keys.caller(scope["headers"])


class _Named:
    """Sends a response with an id, unless it has one, and ends the connection if the rest of the
    request would otherwise be taken for the next one.

    Attributes:
        request_id: its id.
    """

    def __init__(
        self,
        send: Send,
        request_id: str,
        meter: Meter,
        heard: Heard,
        more: Headers,
        *,
        is_anthropic: bool,
    ) -> None:
        self._send = send
        self._meter = meter
        self._heard = heard
        self._more = more
        self._is_anthropic = is_anthropic
        self.request_id = request_id

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._meter.responded(message["status"])
            if not self._heard.is_over:
                await self._heard.discard()
            message["headers"] = self._named(message.get("headers", []))
        await self._send(message)

    def _named(self, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        headers = [*given, *self._more]
        name = dict(headers).get(REQUEST_ID.encode())
        if name is None:
            name = self.request_id.encode()
            headers.append((REQUEST_ID.encode(), name))
        if self._is_anthropic:
            headers.append((ANTHROPIC_REQUEST_ID.encode(), name))
        if not self._heard.is_over:
            headers.append((b"connection", b"close"))
        return headers


def _waits(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if a sender waits for a word before it sends its body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)


def without_port(host: str) -> str:
    """Return the name or the address in a `host` header."""
    name, colon, port = host.rpartition(":")
    is_port = port.isascii() and port.isdigit()
    return name if colon and is_port and (":" not in name or name.endswith("]")) else host
