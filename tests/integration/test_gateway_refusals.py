"""Requests that want too much, never end, or smuggle: the right status, and a stream next to them
does not change."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.gateway import limits

from support.bad_http import CHAT, JSON, MESSAGES, request
from support.bad_input import MODEL
from support.bad_input_daemon import undisturbed
from support.daemon import fake, row
from support.eventually import eventually
from support.http_daemon import HttpDaemon, everything
from support.streams import Reader

ROWS = 3
MAX_WAITING = 4
FIT = ROWS - 1 + MAX_WAITING
"""Answers that find a row or a place next to the stream that runs all the time."""

EVIL = "https://evil.example"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    options = {"step_s": 0.004, "context_length": 10_000_000}
    model = fake(fake=options, max_concurrency=ROWS)
    with HttpDaemon({MODEL: model}, {"max_queue_per_client": MAX_WAITING}) as running:
        with running.client() as client:
            client.load(MODEL)
        yield running


@pytest.fixture
def live(daemon: HttpDaemon) -> Iterator[Reader]:
    with undisturbed(daemon) as reader:
        yield reader


def told(daemon: HttpDaemon, data: bytes) -> tuple[int, list[bytes], bytes]:
    """Status, lines of the head, and body of the only answer to these bytes."""
    with daemon.connect() as connection:
        connection.sendall(data)
        answer = everything(connection)
    return read(answer)


def read(answer: bytes) -> tuple[int, list[bytes], bytes]:
    assert answer.count(b"HTTP/1.1 ") == 1, answer[:500]
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), lines, body


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, **fields}


# ---------------------------------------------------------------- more answers than there is room


def test_more_answers_than_rows_are_given_as_rows_are_free(
    daemon: HttpDaemon, live: Reader
) -> None:
    assert FIT > ROWS
    status, value = daemon.post(CHAT, chat_body(n=FIT))
    assert status == 200
    assert [choice["index"] for choice in value["choices"]] == list(range(FIT))
    assert all(choice["finish_reason"] == "length" for choice in value["choices"])


def test_more_answers_than_rows_begin_to_stream_while_the_others_wait(
    daemon: HttpDaemon, live: Reader
) -> None:
    body = json.dumps(chat_body(n=FIT, max_tokens=3000, stream=True)).encode()
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(request(body))
        seen = b""
        while seen.count(b'"delta":') < 2:  # the role, and a piece
            seen += (piece := connection.recv(65536))
            assert piece, seen
        assert seen.startswith(b"HTTP/1.1 200 ")
        assert row(client, MODEL)["queued"] == MAX_WAITING


@pytest.mark.parametrize("stream", [False, True])
def test_more_answers_than_may_wait_are_refused_and_none_of_them_is_left(
    daemon: HttpDaemon, live: Reader, stream: bool
) -> None:
    body = chat_body(n=limits.MAX_CHOICES, max_tokens=3000, stream=stream)
    status, value = daemon.post(CHAT, body)
    assert (status, value["error"]["code"]) == (429, "overloaded")
    assert value["error"]["type"] == "rate_limit_error"


# ---------------------------------------------------------------- bodies that never end


def test_a_body_of_endless_chunks_is_answered_with_413(daemon: HttpDaemon, live: Reader) -> None:
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    head = begun(b"Transfer-Encoding: chunked")
    with daemon.connect() as connection:
        connection.sendall(head)
        try:
            while not has_answer(connection):
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # what was answered before is still there
        status, lines, body = read(everything(connection))
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
    assert b"connection: close" in lines


def begun(length: bytes) -> bytes:
    """The head of a request behind whose answer its sender would send more on the connection."""
    head = request(None, headers={**JSON, "Connection": "keep-alive"})
    return head.removesuffix(b"\r\n") + length + b"\r\n\r\n"


def has_answer(connection: socket.socket) -> bool:
    """Whether something has come, or the end."""
    return bool(select.select([connection], [], [], 0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_does_not_come_is_answered_with_408(
    daemon: HttpDaemon, live: Reader, is_chunked: bool
) -> None:
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 100"
    piece = b"1\r\n{\r\n" if is_chunked else b"{"
    status, lines, body = told(daemon, begun(length) + piece)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (408, "request_timeout")
    assert f"within {limits.BODY_LIMIT_S:g} s" in error["message"]
    assert b"connection: close" in lines


# ---------------------------------------------------------------- injected headers, smuggling

HEAD = request(None, method="GET", path="/v1/models").removesuffix(b"\r\n")

BAD_HEADERS = {
    "a carriage return in a value": b"X-Test: a\rX-Injected: 1\r\n\r\n",
    "a NUL in a value": b"X-Test: a\0b\r\n\r\n",
    "a value that continues on the next line": b"X-Test: a\r\n X-Injected: 1\r\n\r\n",
    "a NUL in a name": b"X-\0: a\r\n\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a line feed alone": b"X-Test: a\nX-Injected: 1\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_head_that_could_be_read_in_two_ways_is_refused(
    daemon: HttpDaemon, live: Reader, name: str
) -> None:
    status, lines, body = told(daemon, HEAD + BAD_HEADERS[name] + SMUGGLED)
    assert status == 400, body
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert [line for line in lines if line.startswith(b"x-request-id: ")]
    assert not [line for line in lines if b"injected" in line.lower()]


@pytest.mark.parametrize("text", ["x\r\nX-Injected: 1\r\n\r\nH", "x\nX-Injected: 1"])
@pytest.mark.parametrize("is_path", [False, True])
def test_a_models_name_with_line_breaks_makes_no_header(
    daemon: HttpDaemon, live: Reader, text: str, is_path: bool
) -> None:
    if is_path:
        coded = "".join(f"%{byte:02x}" for byte in text.encode())
        data = request(None, method="GET", path=f"/v1/models/{coded}")
    else:
        data = request(json.dumps(chat_body(model=text)).encode())
    status, lines, body = told(daemon, data)
    code = "unknown_path" if is_path else "model_not_found"
    assert (status, json.loads(body)["error"]["code"]) == (404, code)
    assert not [line for line in lines if b"injected" in line.lower()]


def test_chunks_in_the_older_version_end_the_connection(daemon: HttpDaemon, live: Reader) -> None:
    """HTTP/1.0 has none: a proxy in between may see the end of this request somewhere else."""
    body = json.dumps(chat_body()).encode()
    head = request(None).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"close", b"keep-alive")
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    status, _, _ = told(daemon, head.removesuffix(b"\r\n") + chunked + SMUGGLED)
    assert status == 200, "and nothing behind it counts"


def test_a_page_of_another_site_learns_nothing(daemon: HttpDaemon, live: Reader) -> None:
    get = request(None, method="GET", path="/v1/models", headers={"Origin": EVIL})
    status, lines, _ = told(daemon, get)
    assert status == 200
    assert not [line for line in lines if line.lower().startswith(b"access-control")]
    form = {"Origin": EVIL, "Content-Type": "text/plain"}
    status, lines, _ = told(daemon, request(json.dumps(chat_body()).encode(), headers=form))
    assert status == 415
    assert not [line for line in lines if line.lower().startswith(b"access-control")]


def test_nothing_was_left_waiting(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        eventually(lambda: not row(client, MODEL)["running"] and not row(client, MODEL)["queued"])
