"""What every request goes through: who may ask, an id for each answer, and no bare tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from mlxsup.client.connection import RequestIds

from .answers import REQUEST_ID
from .body import Receive
from .failure import Failure
from .openai.errors import body_of
from .sse import Send

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

logger = logging.getLogger(__name__)


class Guard:
    """An ASGI application around another one.

    Args:
        app: the one within.
        hosts: names and addresses that a request may be sent to, without ports. A web page of
            another site whose name suddenly means this machine is refused by them.
    """

    def __init__(self, app: App, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset([*LOCAL_NAMES, *(host.lower() for host in hosts)])
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection or request; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        named = _Named(send, self._ids.next())
        failure = self._refusal(scope)
        if failure is not None:
            await JSONResponse(body_of(failure), failure.status)(scope, receive, named)
            return
        try:
            await self._app(scope, receive, named)
        except Exception:
            # The client has its answer: the application gives one before it raises.
            logger.exception("request failed path=%s id=%s", scope["path"], named.request_id)

    def _refusal(self, scope: Scope) -> Failure | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
        if without_port(host) in self._hosts:
            return None
        return Failure(
            HTTPStatus.FORBIDDEN,
            f"the header `host` takes one of {', '.join(sorted(self._hosts))}",
            code="forbidden_host",
        )


class _Named:
    """Sends a response with an id, unless it has one.

    Attributes:
        request_id: its id.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            if not any(name == REQUEST_ID.encode() for name, _ in headers):
                headers.append((REQUEST_ID.encode(), self.request_id.encode()))
            message["headers"] = headers
        await self._send(message)


def without_port(host: str) -> str:
    """The name or the address in a `host` header."""
    name, colon, port = host.rpartition(":")
    is_port = port.isascii() and port.isdigit()
    return name if colon and is_port and (":" not in name or name.endswith("]")) else host
