"""A request that is answered before all of it has come: what is left is read, or the connection
ends, so that nothing of it can be taken for the next request."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from mlxsup.gateway import limits
from mlxsup.gateway.guard import Guard
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.metrics.meter import Meter

from support.played_gateway import PlayedDaemon, Site

PIECE = {"type": "http.request", "body": b"x", "more_body": True}
LAST = {"type": "http.request", "body": b"x", "more_body": False}
LEFT = {"type": "http.disconnect"}
CHAT = "/v1/chat/completions"


class Exchange:
    """One request to a guarded application that never reads a body.

    Attributes:
        asks: how often somebody asked for a message of it.
        asks_before: how often, when the response began.
        headers: of the response.
        status: of the response.

    Args:
        messages: what comes; then nothing does.
        host: what the request is sent to.
        expect: the header of that name; empty for none.
    """

    def __init__(
        self, *messages: dict[str, Any], host: str = "localhost", expect: str = ""
    ) -> None:
        self._messages = list(messages)
        self.asks = self.asks_before = 0
        given = {"host": host, "expect": expect}
        self._scope = {
            "type": "http", "method": "POST", "path": "/", "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in given.items() if v],
        }  # fmt: skip
        guard = Guard(PlainTextResponse("yes"), [], Keys(), Meter())
        asyncio.run(guard(self._scope, self._receive, self._send))

    async def _receive(self) -> MutableMapping[str, Any]:
        self.asks += 1
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
            self.asks_before = self.asks


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("evil.example", 403)])
def test_what_is_left_is_read_before_the_answer(host: str, status: int) -> None:
    seen = Exchange(PIECE, PIECE, LAST, host=host)
    assert (seen.status, seen.asks_before) == (status, 3)
    assert b"connection" not in seen.headers, "the next request may follow"


def test_an_endless_body_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DISCARD_LIMIT_S", 0.0)
    seen = Exchange(PIECE, host="evil.example")
    assert (seen.status, seen.headers[b"connection"]) == (403, b"close")


def test_no_more_than_so_much_is_read_of_a_body_that_nobody_wants() -> None:
    piece = PIECE | {"body": bytes(2**20)}
    seen = Exchange(*[piece] * 100, host="evil.example")
    most = limits.MAX_DISCARD_BYTES // 2**20
    assert (seen.status, seen.headers[b"connection"]) == (403, b"close")
    assert seen.asks == most + 1


@pytest.mark.parametrize("word", ["100-continue", "100-Continue"])
def test_who_waits_for_a_word_gets_the_answer_instead(word: str) -> None:
    seen = Exchange(host="evil.example", expect=word)
    assert (seen.status, seen.asks, seen.headers[b"connection"]) == (403, 0, b"close")


def test_who_has_left_is_not_waited_for() -> None:
    seen = Exchange(PIECE, LEFT, host="evil.example")
    assert (seen.asks, b"connection" in seen.headers) == (2, False)


def test_a_length_that_is_too_long_is_refused_unread() -> None:
    site = Site(PlayedDaemon())
    length = {"content-length": str(limits.MAX_BODY_BYTES + 1)}
    response = asyncio.run(site.ask("POST", CHAT, b"{}", headers=length))
    assert (response.status, response.error["code"]) == (413, "request_too_large")
