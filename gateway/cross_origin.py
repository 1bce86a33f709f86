"""CORS: the pages of other sites that may ask, and what their browsers get to know.

The page of this gateway, which contains the token of an operator, is read by no other page, and no
other page may send that token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from starlette.responses import Response

from .headers import ANTHROPIC_REQUEST_ID, CHANGED, IGNORED, REQUEST_ID
from .operator import TOKEN_HEADER

Headers = list[tuple[bytes, bytes]]

ORIGIN = b"origin"
WANTED_METHOD = b"access-control-request-method"
WANTED_HEADERS = b"access-control-request-headers"

PAGE = "/"
PAGE_FOLDER = "/page/"

METHODS = "GET, POST, DELETE"
MAX_AGE_S = 600
READABLE = (
    REQUEST_ID, ANTHROPIC_REQUEST_ID, CHANGED, IGNORED, "retry-after", "x-should-retry",
)  # fmt: skip
"""Headers of a response that the page gets to see."""

HEADER_NAME = re.compile(r"[a-z0-9-]{1,64}")


class CrossOrigin:
    """Knows the origins that may ask.

    Args:
        origins: as browsers send them. One that is not of this machine makes keys necessary
            (`find_key_need`); who serves the pages of the others may run programs here anyway.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, scope: MutableMapping[str, Any]) -> Headers:
        """Return those that the response to this request gets besides its own."""
        if not self._origins:
            return []
        # A cache must not hand the response for one page to another one.
        headers = [(b"vary", ORIGIN)]
        if origin := self._allowed(scope):
            headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
            headers.append((b"access-control-expose-headers", ", ".join(READABLE).encode()))
        return headers

    def preflight(self, scope: MutableMapping[str, Any]) -> Response | None:
        """Return the answer to a browser that asks whether its page may ask.

        None if this is no such question, or the page may not.
        """
        names = [name for name, _ in scope["headers"]]
        if scope["method"] != "OPTIONS" or WANTED_METHOD not in names or not self._allowed(scope):
            return None
        headers = {
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": ", ".join(_wanted(scope)),
            "access-control-max-age": str(MAX_AGE_S),
        }
        return Response(status_code=204, headers=headers)

    def _allowed(self, scope: MutableMapping[str, Any]) -> str:
        """Return the origin of the page that asks, if it may; otherwise empty."""
        if scope["path"] == PAGE or scope["path"].startswith(PAGE_FOLDER):
            return ""
        given = _values(scope, ORIGIN)
        if len(given) != 1 or given[0] not in self._origins:
            return ""
        return given[0]


def _wanted(scope: MutableMapping[str, Any]) -> Iterator[str]:
    """Return the headers that the page wants to send and may.

    Clients add further ones to each request, which change nothing here.
    """
    for value in _values(scope, WANTED_HEADERS):
        for name in value.lower().split(","):
            if HEADER_NAME.fullmatch(name.strip()) and name.strip() != TOKEN_HEADER:
                yield name.strip()


def _values(scope: MutableMapping[str, Any], wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
