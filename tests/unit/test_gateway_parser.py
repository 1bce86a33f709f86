"""How requests are cut out of the bytes of a connection: an offer of another protocol is ignored, a
field behind a body is no header, and pieces make no difference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.gateway.parser import RequestParser

POST = b"POST /a?b HTTP/1.1\r\nHost: x\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
GET = b"GET /next HTTP/1.1\r\nHost: y\r\n\r\n"


class Seen:
    """A protocol that notes requests: method, target, names of the headers, body, `whole`."""

    def __init__(self) -> None:
        self.requests: list[list[Any]] = []
        self.more_may_follow: list[bool] = []
        self.pieces: list[bytes] = []
        self.parser = RequestParser(cast(Any, self))

    def on_message_begin(self) -> None:
        self._url = b""
        self._names: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._names.append(name.lower())

    def on_headers_complete(self) -> None:
        assert not self.parser.should_upgrade()
        method = self.parser.get_method()
        self.more_may_follow.append(self.parser.should_keep_alive())
        self.requests.append([method, self._url, self._names, b"", "begun"])

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self.requests[-1][3] += body

    def on_message_complete(self) -> None:
        self.requests[-1][4] = "whole"


def seen(*pieces: bytes) -> list[list[Any]]:
    """The requests in these pieces."""
    protocol = Seen()
    for piece in pieces:
        protocol.parser.feed_data(piece)
    return protocol.requests


def with_body(body: bytes, offer: bytes = OFFER) -> bytes:
    return POST + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, behind: bytes = b"") -> bytes:
    """The body in chunks of a byte, and what stands behind them."""
    chunks = b"".join(b"1\r\n%c\r\n" % one for one in body)
    head = POST + OFFER + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n" + behind + b"\r\n"


PLAIN = [b"host", b"connection", b"http2-settings"]


def test_the_body_of_a_request_that_offers_another_protocol_is_its_body() -> None:
    assert seen(with_body(GET)) == [
        [b"POST", b"/a?b", [*PLAIN, b"content-length"], GET, "whole"]
    ]  # fmt: skip


def test_what_comes_behind_is_the_next_request() -> None:
    first, second, third = seen(with_body(b"abc") + with_body(b"de") + GET)
    assert (first[3], second[3], third[1]) == (b"abc", b"de", b"/next")
    assert {one[4] for one in (first, second, third)} == {"whole"}


def test_an_offer_without_a_body_is_a_request() -> None:
    (one,) = seen(POST + OFFER + b"\r\n")
    assert (one[2], one[4]) == (PLAIN, "whole")


def test_a_field_behind_the_chunks_is_no_header_of_this_request_or_the_next() -> None:
    behind = b"Authorization: Bearer x\r\nX-Last: y\r\n"
    first, second = seen(chunked(b"abc", behind) + GET)
    assert (first[2], first[3]) == ([*PLAIN, b"transfer-encoding"], b"abc")
    assert second[2] == [b"host"]


def test_chunks_that_come_in_one_read_are_one_piece() -> None:
    protocol = Seen()
    protocol.parser.feed_data(chunked(b"abc") + chunked(b"de"))
    assert protocol.pieces == [b"abc", b"de"]


def test_a_tunnel_is_refused() -> None:
    with pytest.raises(httptools.HttpParserError):
        seen(b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_whether_more_may_follow_is_what_the_head_says() -> None:
    protocol = Seen()
    last = b"Connection: close, Upgrade\r\nUpgrade: x\r\n"
    protocol.parser.feed_data(with_body(b"abc") + with_body(b"abc", last))
    assert protocol.more_may_follow == [True, False]


KINDS = [
    with_body(b"abc"), with_body(b""), with_body(b"z", b""), chunked(b"xy", b"T: u\r\n"), GET,
]  # fmt: skip


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    st.lists(st.integers(1, 400), max_size=8),
)
def test_pieces_make_no_difference(requests: list[bytes], cuts: list[int]) -> None:
    data = b"".join(requests)
    places = [0, *sorted({cut % len(data) for cut in cuts}), len(data)]
    pieces = [data[a:b] for a, b in pairwise(places) if a < b]
    whole = [one for request in requests for one in seen(request)]
    assert seen(*pieces) == seen(data) == whole
