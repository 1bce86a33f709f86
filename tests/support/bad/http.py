"""Bad HTTP requests with the answer that each gets, as data.

tests/integration/test_gateway_http.py sends each of these to a real gateway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxsup.gateway import limits

from support.bad.input import MODEL, SMALL, SMALL_CONTEXT

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """Bytes on a new connection, and the answer to them.

    Attributes:
        name: what is wrong, for people.
        data: what is sent.
        status: of the answer.
        words: stand in the message of its error.
    """

    name: str
    data: bytes
    status: int
    words: str


def request(
    body: bytes | None,
    *,
    method: str = "POST",
    path: str = CHAT,
    host: str = "localhost",
    headers: Mapping[str, str] = JSON,
) -> bytes:
    """A request as it is sent, on a connection of its own."""
    given = {"Host": host, "Connection": "close", **headers}
    if body is not None:
        given["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def _chat(name: str, words: str, status: int = 400, **fields: Any) -> BadRequest:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, **fields}
    return BadRequest(
        name=name, data=request(json.dumps(body).encode()), status=status, words=words
    )


def _body(name: str, body: bytes, words: str) -> BadRequest:
    return BadRequest(name=name, data=request(body), status=400, words=words)


def _raw(
    name: str, data: bytes, status: int = 400, words: str = "no request of HTTP"
) -> BadRequest:
    return BadRequest(name=name, data=data, status=status, words=words)


_HEAD = request(None)[:-2]
_IMAGE = [{"type": "image_url", "image_url": {"url": "data:,x"}}]

REQUESTS = (
    _raw("bytes that are no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    _raw("a header with a space in its name", _HEAD + b"Bad Header: x\r\n\r\n"),
    _raw("a length, and chunks as well (smuggling)",
         _HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x"),
    _raw("two lengths", _HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}"),
    _raw("a transfer-encoding behind the chunks",
         _HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
    _raw("a head of more than 64 KiB",
         _HEAD + b"X-Long: " + b"y" * limits.MAX_HEAD_BYTES + b"\r\n", 431, "at most 64 KiB"),
    _raw("the name of another machine", request(b"{}", host="evil.example"), 403,
         "the header `host` takes one of"),
    _raw("no content type", request(b"{}", headers={}), 415, "content-type: application/json"),
    _raw("a form", request(b"a=1", headers={"Content-Type": "application/x-www-form-urlencoded"}),
         415, "content-type: application/json"),
    _raw("a compressed body", request(b"{}", headers={**JSON, "Content-Encoding": "gzip"}), 415,
         "send it uncompressed"),
    _raw("a body of more than 8 MiB", request(b" " * (limits.MAX_BODY_BYTES + 1)), 413,
         "at most 8 MiB"),
    _raw("a length of more than 8 MiB, and no body", _HEAD
         + b"Content-Length: %d\r\n\r\n" % (limits.MAX_BODY_BYTES + 1), 413, "at most 8 MiB"),
    _raw("a tunnel", b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    _raw("a GET where a POST belongs", request(None, method="GET"), 405, "this path takes POST"),
    _raw("an unknown path", request(None, method="GET", path="/v2"), 404, "no such path"),
    _raw("embeddings", request(b"{}", path="/v1/embeddings"), 501, "embeddings are not there yet"),
    _body("an empty body", b"", "not JSON"),
    _body("a body that is not UTF-8", b'{"model": "\xff"}', "not UTF-8 text (byte 11)"),
    _body("a body cut short", b'{"model": "m"', "not JSON"),
    _body("a list", b"[]", "takes an object"),
    _body("NaN", b'{"temperature": NaN}', "NaN is no number"),
    _body("a number of 5,000 digits", b'{"n": ' + b"9" * 5_000 + b"}", "more digits than"),
    _body("half a surrogate pair", rb'{"model": "\ud800"}', "half a surrogate pair"),
    _body("100,000 lists inside each other", b"[" * 100_000, "nested too deeply"),
    _chat("no messages", "at least one message", messages=[]),
    _chat("an unknown role", "takes one of system, developer", messages=[{"role": "x"}]),
    _chat("an image", "no model here takes images", messages=[{"role": "user", "content": _IMAGE}]),
    _chat("a field that has no effect here", "has no effect here", grammar="root ::= x"),
    _chat("`n` above the limit", "n takes an integer from 1 to 16", n=17),
    _chat("a value outside its range", "temperature takes a number from 0 to 10", temperature=99),
    _chat("a call of nothing", "tool_choice takes tools to choose from", tool_choice="required"),
    _chat("a model that is not configured", "no model is called 'nobody'", 404, model="nobody"),
    _chat("a prompt that does not fit", f"the context of {SMALL_CONTEXT} leaves no room", 400,
          model=SMALL, messages=[{"role": "user", "content": "y" * SMALL_CONTEXT}]),
)  # fmt: skip
"""What a client of the gateway can send wrong."""
