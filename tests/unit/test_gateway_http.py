"""HTTP of the gateway on one connection: limits of time and length, parsing, unread bodies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, MutableMapping
from itertools import pairwise
from typing import Any, cast

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from mlxsup.gateway import limits
from mlxsup.gateway.connection import LimitedProtocol
from mlxsup.gateway.guard import Guard
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.metrics import Meter
from mlxsup.gateway.sse import WRITE

from support.gateway.played_gateway import PlayedDaemon, Site

# ---------------------------------------------------------------- time limits


TURNS = 30
"""Of the loop, in which a timer of no time has run, and a few requests are answered."""


class Wire:
    """A transport that keeps what is written; the answers end with the connection."""

    def __init__(self) -> None:
        self.aborts = 0
        self.written = b""
        self.responded: list[int] = []
        self.closes = 0

    def get_extra_info(self, name: str) -> None:
        """Know nothing."""

    def abort(self) -> None:
        self.aborts += 1

    def close(self) -> None:
        self.closes += 1

    def is_closing(self) -> bool:
        return self.aborts > 0

    def write(self, data: bytes) -> None:
        self.written += data

    def write_eof(self) -> None:
        """Send nothing more."""

    def pause_reading(self) -> None:
        """Bring no further pieces."""

    def resume_reading(self) -> None:
        """Bring further pieces."""


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Begin an answer, and end it when its reader leaves."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


Step = bytes | Callable[[LimitedProtocol], None]


def said(*steps: Step, app: Any = endless) -> Wire:
    """Return the transport of a connection after pieces, each in a read, and other steps."""
    wire = Wire()

    async def run() -> None:
        config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
        protocol = LimitedProtocol(config, ServerState(), {}, responded=wire.responded.append)
        protocol.connection_made(cast(Any, wire))
        for step in steps:
            if not isinstance(step, bytes):
                step(protocol)
                continue
            protocol.data_received(step)
            await turn()
        await turn()
        protocol.connection_lost(None)
        await turn()

    asyncio.run(run())
    return wire


async def turn() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def leave(protocol: LimitedProtocol) -> None:
    protocol.connection_lost(None)


def read_no_more(protocol: LimitedProtocol) -> None:
    protocol.flow.pause_reading()


def read_on(protocol: LimitedProtocol) -> None:
    protocol.flow.resume_reading()


STOP, CATCH_UP = LimitedProtocol.pause_writing, LimitedProtocol.resume_writing


@pytest.mark.parametrize(
    ("limit", "steps", "aborts"),
    [
        pytest.param("UNREAD_LIMIT_S", (STOP,), 1, id="cut off without a read"),
        pytest.param("UNREAD_LIMIT_S", (STOP, CATCH_UP), 0, id="left alone after a read"),
        pytest.param("UNREAD_LIMIT_S", (STOP, CATCH_UP, STOP), 1, id="cut off the second time"),
        pytest.param("UNREAD_LIMIT_S", (STOP, leave), 0, id="no timer after the end"),
        pytest.param("HEAD_LIMIT_S", (), 1, id="no head"),
        pytest.param("HEAD_LIMIT_S", (leave,), 0, id="no head, and no timer after the end"),
        pytest.param("HEAD_LIMIT_S", (read_no_more, b"G"), 0, id="a head that is not read"),
        pytest.param("HEAD_LIMIT_S", (read_no_more, b"G", read_on), 1, id="and is then read"),
    ],
)
def test_reader_and_head_have_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    steps: tuple[Step, ...],
    aborts: int,
) -> None:
    monkeypatch.setattr(limits, limit, 0.0)
    assert said(*steps).aborts == aborts


def test_answer_ends_with_its_connection_though_another_request_waits() -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await endless(scope, receive, send)
        ended.append(scope["path"])

    said(b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n", GET + b"\r\n", app=app)
    assert ended[:1] == ["/a"]


# ---------------------------------------------------------------- heads


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
FIELDS = b"X: y\r\n" * 1000
LONG = FIELDS * (limits.MAX_HEAD_BYTES // len(FIELDS) + 1)


def refused_with(wire: Wire) -> tuple[int, str]:
    """Status and code of the only response, which has the name of its request and a length."""
    head, _, body = wire.written.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    assert fields["x-request-id"]
    assert (fields["connection"], int(fields["content-length"])) == ("close", len(body))
    return int(first.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "opening",
    [
        pytest.param((GET + b"\r\n", GET), id="behind a request"),
        pytest.param((POST + b"0\r\n\r\n", GET), id="behind a body"),
        pytest.param((POST, b"0\r\n"), id="fields behind the chunks"),
        pytest.param((POST + b"1\r\na\r\n0\r\n",), id="behind the chunks, in one read"),
    ],
)
def test_bytes_behind_an_open_answer_are_limited(opening: tuple[bytes, ...]) -> None:
    wire = said(*opening, *[FIELDS] * 9)
    assert wire.aborts == 0, "that is not too much"
    wire = said(*opening, *[FIELDS] * 12)
    assert (wire.aborts, b"431" in wire.written) == (1, False)


def test_head_behind_an_open_answer_has_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_LIMIT_S", 0.0)
    assert said(GET + b"\r\n", GET).aborts == 1
    assert said(GET + b"\r\n" + GET).aborts == 1, "in one read"
    assert said(GET + b"\r\n", b"\r\n").aborts == 0, "a line break is no head"
    assert said(GET + b"\r\n", GET + b"\r\n" + GET).aborts == 0, "nothing more is read"


@pytest.mark.parametrize("piece_bytes", [len(LONG) + 100, 20_000])
def test_head_that_is_too_long_is_refused(piece_bytes: int) -> None:
    data = GET + LONG + b"\r\n"
    wire = said(*(data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)))
    assert refused_with(wire) == (431, "headers_too_large")
    assert wire.responded == [431]


def test_bytes_of_the_path_count_as_the_head_s() -> None:
    head = b"GET /%b HTTP/1.1\r\nhost: a\r\na: %b\r\n\r\n"
    half = b"x" * (limits.MAX_HEAD_BYTES // 2)
    assert refused_with(said(head % (half, half))) == (431, "headers_too_large")
    assert said(head % (half, half[100:])).responded == []


def test_discarded_bytes_behind_a_long_head_are_limited() -> None:
    most = [bytes(2**20)] * (limits.MAX_DISCARD_BYTES // 2**20)
    assert said(GET + LONG + b"\r\n", *most).aborts == 0
    assert said(GET + LONG + b"\r\n", *most, b"x").aborts > 0


def test_long_head_behind_an_open_answer_is_cut_off() -> None:
    wire = said(GET + b"\r\n", GET + LONG + b"\r\n")
    assert (wire.aborts, b"431" in wire.written) == (1, False)


def test_many_short_heads_are_taken() -> None:
    head = GET + b"a: " + b"x" * 2000 + b"\r\n\r\n"
    assert said(*[head] * 3, head * (limits.MAX_PIPELINED - 3)).aborts == 0


def test_pipelined_requests_are_limited() -> None:
    assert said((GET + b"\r\n") * (limits.MAX_PIPELINED + 2)).aborts == 1
    begun_s = time.thread_time()
    assert said((GET + b"\r\n") * 14_000).aborts == 1
    assert time.thread_time() - begun_s < 5.0, "the rest is not parsed"


def test_bytes_that_are_no_request_are_refused() -> None:
    wire = said(b"\x16\x03\x01")
    assert refused_with(wire) == (400, "invalid_http")
    assert wire.responded == [400]
    wire = said(GET + b"\r\n", b"\x16\x03\x01")
    assert (wire.aborts, b"400" in wire.written) == (1, False)


# ---------------------------------------------------------------- requests out of bytes


OFFERED = b"POST /a?b HTTP/1.1\r\nHost: x\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: y\r\n\r\n"


class Noted:
    """An application that notes requests: method, target, names of the headers, body, `whole`."""

    def __init__(self) -> None:
        self.requests: list[list[Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        target, names = scope["raw_path"] + scope["query_string"], dict(scope["headers"])
        noted: list[Any] = [scope["method"], target, [*names], b"", "begun"]
        self.requests.append(noted)
        while noted[4] == "begun":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            noted[3] += message["body"]
            noted[4] = "begun" if message["more_body"] else "whole"
        await PlainTextResponse("yes")(scope, receive, send)


def seen(*pieces: bytes) -> list[list[Any]]:
    """The requests in these pieces."""
    noted = Noted()
    said(*pieces, app=noted)
    return noted.requests


def with_body(body: bytes, offer: bytes = OFFER) -> bytes:
    return OFFERED + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, behind: bytes = b"") -> bytes:
    """The body in chunks of a byte, and what stands behind them."""
    chunks = b"".join(b"1\r\n%c\r\n" % one for one in body)
    head = OFFERED + OFFER + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n" + behind + b"\r\n"


PLAIN = [b"host", b"connection", b"http2-settings"]


def test_offer_of_another_protocol_leaves_the_body_alone() -> None:
    assert seen(with_body(NEXT)) == [
        ["POST", b"/ab", [*PLAIN, b"content-length"], NEXT, "whole"]
    ]  # fmt: skip


def test_field_behind_the_chunks_is_no_header() -> None:
    behind = b"Authorization: Bearer x\r\nX-Last: y\r\n"
    first, second = seen(chunked(b"abc", behind) + NEXT)
    assert (first[2], first[3]) == ([*PLAIN, b"transfer-encoding"], b"abc")
    assert second[2] == [b"host"]


def test_tunnel_is_refused() -> None:
    wire = said(b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n", app=Noted())
    assert refused_with(wire) == (400, "invalid_http")


async def piecemeal(scope: Any, receive: Any, send: Any) -> None:
    """Answer in three pieces, the second one on the short way."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first,", "more_body": True})
    scope["extensions"][WRITE](b"second,")
    await send({"type": "http.response.body", "body": b"last", "more_body": False})


@pytest.mark.parametrize(
    ("version", "body"),
    [
        ("1.1", b"6\r\nfirst,\r\n7\r\nsecond,\r\n4\r\nlast\r\n0\r\n\r\n"),
        ("1.0", b"first,second,last"),
    ],
)
def test_older_version_gets_no_chunks(version: str, body: bytes) -> None:
    asked = f"GET / HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    wire = said(asked, app=piecemeal)
    head, _, seen = wire.written.partition(b"\r\n\r\n")
    assert (seen, b"chunked" in head, wire.closes > 0) == (body, version == "1.1", True)
    plain = said(asked, app=PlainTextResponse("whole")).written
    assert plain.endswith(b"\r\n\r\nwhole")
    assert b"content-length: 5\r\n" in plain


def test_head_says_whether_more_may_follow_and_chunks_of_one_read_are_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed_on: list[bytes] = []
    monkeypatch.setattr(HttpToolsProtocol, "on_body", lambda _, body: passed_on.append(body))
    wire = said(chunked(b"abc"), app=Noted())
    assert (passed_on, wire.closes) == ([b"abc"], 1)
    last = b"Connection: close, Upgrade\r\nUpgrade: x\r\n"
    assert said(chunked(b"abc") + with_body(b"de", last), app=Noted()).closes == 2


KINDS = [
    with_body(b"abc"), with_body(b""), with_body(b"z", b""), chunked(b"xy", b"T: u\r\n"), NEXT,
]  # fmt: skip


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    st.lists(st.integers(1, 400), max_size=8),
)
def test_parser_does_not_depend_on_pieces(requests: list[bytes], cuts: list[int]) -> None:
    data = b"".join(requests)
    places = [0, *sorted({cut % len(data) for cut in cuts}), len(data)]
    pieces = [data[a:b] for a, b in pairwise(places) if a < b]
    whole = [one for request in requests for one in seen(request)]
    assert seen(*pieces) == seen(data) == whole


# ---------------------------------------------------------------- bodies that are not read


PIECE = {"type": "http.request", "body": b"x", "more_body": True}
LAST = {"type": "http.request", "body": b"x", "more_body": False}
LEFT = {"type": "http.disconnect"}
CHAT = "/v1/chat/completions"


class Exchange:
    """One request to a guarded application that never reads a body.

    Attributes:
        asks: how often it was asked for a message.
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
def test_rest_of_a_body_is_read_before_the_answer(host: str, status: int) -> None:
    seen = Exchange(PIECE, PIECE, LAST, host=host)
    assert (seen.status, seen.asks_before) == (status, 3)
    assert b"connection" not in seen.headers, "the next request may follow"
    seen = Exchange(PIECE, LEFT, host=host)
    assert (seen.asks, b"connection" in seen.headers) == (2, False), "the client has left"


def test_endless_body_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DISCARD_LIMIT_S", 0.0)
    seen = Exchange(PIECE, host="evil.example")
    assert (seen.status, seen.headers[b"connection"]) == (403, b"close")


def test_discarded_body_is_limited() -> None:
    piece = PIECE | {"body": bytes(2**20)}
    seen = Exchange(*[piece] * 100, host="evil.example")
    most = limits.MAX_DISCARD_BYTES // 2**20
    assert (seen.status, seen.headers[b"connection"]) == (403, b"close")
    assert seen.asks == most + 1


@pytest.mark.parametrize("word", ["100-continue", "100-Continue"])
def test_sender_that_asks_first_gets_the_answer_instead(word: str) -> None:
    seen = Exchange(host="evil.example", expect=word)
    assert (seen.status, seen.asks, seen.headers[b"connection"]) == (403, 0, b"close")


def test_announced_length_that_is_too_long_is_refused_unread() -> None:
    site = Site(PlayedDaemon())
    length = {"content-length": str(limits.MAX_BODY_BYTES + 1)}
    response = asyncio.run(site.ask("POST", CHAT, b"{}", headers=length))
    assert (response.status, response.error["code"]) == (413, "request_too_large")
