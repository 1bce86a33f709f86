"""Time limits of one HTTP connection, with a transport that is played."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from mlxsup.gateway import limits
from mlxsup.gateway.connection import LimitedProtocol

TURNS = 3
"""Of the loop, in which a timer of no time has run."""


class Wire:
    """A transport; counts how often it was aborted."""

    def __init__(self) -> None:
        self.aborts = 0

    def get_extra_info(self, name: str) -> None:
        """Nothing is known."""

    def abort(self) -> None:
        """The connection is cut."""
        self.aborts += 1

    def close(self) -> None:
        """It ends in order."""

    def is_closing(self) -> bool:
        """Whether it was."""
        return self.aborts > 0


def aborts_after(*steps: Callable[[LimitedProtocol], None]) -> int:
    """How often a connection was cut on which this happened."""
    wire = Wire()

    async def run() -> None:
        config = uvicorn.Config(
            PlainTextResponse("yes"), lifespan="off", ws="none", log_config=None
        )
        protocol = LimitedProtocol(config, ServerState(), {})
        protocol.connection_made(cast(Any, wire))
        for step in steps:
            step(protocol)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    asyncio.run(run())
    return wire.aborts


def stop(protocol: LimitedProtocol) -> None:
    protocol.pause_writing()


def catch_up(protocol: LimitedProtocol) -> None:
    protocol.resume_writing()


def leave(protocol: LimitedProtocol) -> None:
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("steps", "aborts"),
    [
        pytest.param((stop,), 1, id="who never reads is cut off"),
        pytest.param((stop, catch_up), 0, id="who reads on is not"),
        pytest.param((stop, catch_up, stop), 1, id="nor does that excuse the next time"),
        pytest.param((stop, leave), 0, id="who has left keeps no timer"),
    ],
)
def test_a_reader_has_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[Callable[[LimitedProtocol], None], ...],
    aborts: int,
) -> None:
    monkeypatch.setattr(limits, "UNREAD_LIMIT_S", 0.0)
    assert aborts_after(*steps) == aborts


@pytest.mark.parametrize(("steps", "aborts"), [((), 1), ((leave,), 0)])
def test_a_head_has_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[Callable[[LimitedProtocol], None], ...],
    aborts: int,
) -> None:
    monkeypatch.setattr(limits, "HEAD_LIMIT_S", 0.0)
    assert aborts_after(*steps) == aborts


# ---------------------------------------------------------------- heads

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
FIELDS = b"X: y\r\n" * 1000
LONG = FIELDS * (limits.MAX_HEAD_BYTES // len(FIELDS) + 1)


class Said(Wire):
    """A transport that keeps what is written; the answers end with the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False
        self.responded: list[int] = []

    def write(self, data: bytes) -> None:
        self.written += data

    def write_eof(self) -> None:
        """Nothing more is sent."""

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """An application that begins an answer, and ends it when its reader leaves."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


def said(*pieces: bytes) -> Said:
    """What became of a connection on which these pieces came, each in a read."""
    wire = Said()

    async def run() -> None:
        config = uvicorn.Config(endless, lifespan="off", ws="none", log_config=None)
        protocol = LimitedProtocol(config, ServerState(), {}, responded=wire.responded.append)
        protocol.connection_made(cast(Any, wire))
        for piece in pieces:
            protocol.data_received(piece)
            for _ in range(TURNS):
                await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    asyncio.run(run())
    return wire


def refused_with(wire: Said) -> tuple[int, str]:
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
def test_what_comes_behind_an_open_answer_has_a_limited_length(opening: tuple[bytes, ...]) -> None:
    wire = said(*opening, *[FIELDS] * 9)
    assert wire.aborts == 0, "that is not too much"
    wire = said(*opening, *[FIELDS] * 12)
    assert (wire.aborts, b"431" in wire.written) == (1, False)


def test_a_head_behind_an_open_answer_has_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_LIMIT_S", 0.0)
    assert said(GET + b"\r\n", GET).aborts == 1
    assert said(GET + b"\r\n" + GET).aborts == 1, "in one read"
    assert said(GET + b"\r\n", b"\r\n").aborts == 0, "a line break is no head"
    assert said(GET + b"\r\n", GET + b"\r\n" + GET).aborts == 0, "nobody reads on"


@pytest.mark.parametrize("piece_bytes", [len(LONG) + 100, 20_000])
def test_a_head_is_too_long_however_it_comes(piece_bytes: int) -> None:
    data = GET + LONG + b"\r\n"
    wire = said(*(data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)))
    assert refused_with(wire) == (431, "headers_too_large")
    assert wire.responded == [431]


def test_no_more_than_so_much_is_read_behind_a_head_that_is_too_long() -> None:
    most = [bytes(2**20)] * (limits.MAX_DISCARD_BYTES // 2**20)
    assert said(GET + LONG + b"\r\n", *most).aborts == 0
    assert said(GET + LONG + b"\r\n", *most, b"x").aborts > 0


def test_a_head_that_is_too_long_and_whole_behind_an_open_answer_is_cut_off() -> None:
    wire = said(GET + b"\r\n", GET + LONG + b"\r\n")
    assert (wire.aborts, b"431" in wire.written) == (1, False)


def test_many_short_heads_are_no_long_one() -> None:
    head = GET + b"a: " + b"x" * 2000 + b"\r\n\r\n"
    assert said(*[head] * 3, head * (limits.MAX_PIPELINED - 3)).aborts == 0


def test_requests_that_wait_for_their_answers_are_counted() -> None:
    begun_s = time.thread_time()
    assert said((GET + b"\r\n") * 14_000).aborts == 1
    assert time.thread_time() - begun_s < 0.5


def test_what_is_no_request_is_answered_only_if_that_is_no_part_of_another_answer() -> None:
    wire = said(b"\x16\x03\x01")
    assert refused_with(wire) == (400, "invalid_http")
    assert wire.responded == [400]
    wire = said(GET + b"\r\n", b"\x16\x03\x01")
    assert (wire.aborts, b"400" in wire.written) == (1, False)
