"""Every kind of bad HTTP request gets its status, and a stream next to it does not change.

The cases are data, in tests/support/bad_http.py; docs/bad-input.md is printed from them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from support.bad_http import REQUESTS, BadRequest, request
from support.bad_input_daemon import large_and_small, undisturbed
from support.eventually import eventually
from support.http_daemon import HttpDaemon, everything
from support.streams import Reader


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    with large_and_small(HttpDaemon) as running:
        yield running


@pytest.fixture
def live(daemon: HttpDaemon) -> Iterator[Reader]:
    with undisturbed(daemon) as reader:
        yield reader


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case.name)
def test_a_bad_request_gets_its_status_and_nothing_behind_it_counts(
    daemon: HttpDaemon, live: Reader, case: BadRequest
) -> None:
    with daemon.connect() as connection:
        connection.sendall(case.data)
        answer = everything(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % case.status), answer[:300]
    assert answer.count(b"HTTP/1.1") == 1
    assert b"\r\nx-request-id: " in head
    error = json.loads(body)["error"]
    assert case.words in error["message"]
    assert error["code"]


def test_a_body_that_never_ends_is_refused(daemon: HttpDaemon, live: Reader) -> None:
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    head = request(None).removesuffix(b"\r\n") + b"Transfer-Encoding: chunked\r\n\r\n"
    with daemon.connect() as connection:
        connection.sendall(head)
        eventually(lambda: not takes(connection, chunk), what="a sender that is refused")


def takes(connection: socket.socket, data: bytes) -> bool:
    """Whether the other side still reads."""
    try:
        connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
