"""HTTP at a real gateway: bad requests, smuggling, dawdling and flooding, beside a live stream."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

from mlxsup.gateway import limits

from support.bad.daemon import undisturbed
from support.bad.input import MODEL, SMALL, SMALL_CONTEXT
from support.client.streams import Reader
from support.daemon.daemon import fake, row
from support.eventually import eventually
from support.gateway.http_daemon import CHAT, HttpDaemon, SseReader, chat, everything

ROWS = 3
MAX_WAITING = 4
FIT = ROWS - 1 + MAX_WAITING
"""Answers that find a row or a place next to the stream that runs all the time."""

JSON = {"Content-Type": "application/json"}
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    options = {"step_s": 0.004, "context_length": 10_000_000}
    models = {
        MODEL: fake(fake=options, max_concurrency=ROWS),
        SMALL: fake(context_length=SMALL_CONTEXT),
    }
    # HTTP may wait in all of the queue but the places of one more client.
    queues = {"max_queue": 2 * MAX_WAITING, "max_queue_per_client": MAX_WAITING}
    with HttpDaemon(models, queues) as running:
        with running.client() as client:
            for name in models:
                client.load(name)
        yield running


@pytest.fixture(scope="module", autouse=True)
def live(daemon: HttpDaemon) -> Iterator[Reader]:
    """A stream beside all of these tests; in the end nothing of it may have changed."""
    with undisturbed(daemon) as reader:
        yield reader


@pytest.fixture(autouse=True)
def nothing_is_left(daemon: HttpDaemon, live: Reader) -> Iterator[None]:
    yield
    assert live.error is None
    with daemon.client() as client:
        eventually(lambda: others(row(client, MODEL), live) == ([], 0), what="nothing left open")


def others(status: dict[str, Any], live: Reader) -> tuple[list[str], int]:
    """Return what runs beside the live stream, and how much waits."""
    running = [one for one in status["running"] if one != str(live.stream.request_id)]
    return running, status["queued"]


def told(daemon: HttpDaemon, data: bytes) -> tuple[int, list[bytes], bytes]:
    """Return status, lines of the head, and body of the only answer to these bytes."""
    with daemon.connect() as connection:
        connection.sendall(data)
        return read(everything(connection))


def read(answer: bytes) -> tuple[int, list[bytes], bytes]:
    assert answer.count(b"HTTP/1.1 ") == 1, answer[:500]
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), lines, body


def statuses(daemon: HttpDaemon, data: bytes) -> list[bytes]:
    """Return the status of each answer to these bytes."""
    with daemon.connect() as connection:
        connection.sendall(data)
        return re.findall(rb"HTTP/1\.1 (\d+) ", everything(connection))


def chat_body(**fields: Any) -> dict[str, Any]:
    return chat("hi", **{"model": MODEL, "max_tokens": 5, **fields})


def request(
    body: bytes | None,
    *,
    method: str = "POST",
    path: str = CHAT,
    host: str = "localhost",
    headers: Mapping[str, str] = JSON,
) -> bytes:
    """Return a request as it is sent, on a connection of its own."""
    given = {"Host": host, "Connection": "close", **headers}
    if body is not None:
        given["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def asked(**fields: Any) -> bytes:
    return request(json.dumps(chat_body(**fields)).encode())


def begun(length: bytes, *more: bytes) -> bytes:
    """Return the head of a request on a connection that stays open."""
    head = request(None, headers={**JSON, "Connection": "keep-alive"}).removesuffix(b"\r\n")
    return head + b"".join(more) + length + b"\r\n\r\n"


def asking(**fields: Any) -> bytes:
    """Return a long chat on a connection that stays open."""
    body = json.dumps(chat_body(max_tokens=3000, stream=True, **fields)).encode()
    return begun(b"Content-Length: %d" % len(body)) + body


# ---------------------------------------------------------------- what is refused


POST = request(None).removesuffix(b"\r\n")
NO_HTTP = "not a valid HTTP request"
LONG_HEAD = b"X-Long: " + b"y" * limits.MAX_HEAD_BYTES + b"\r\n"
REQUESTS: dict[str, tuple[bytes, int, str]] = {
    "bytes that are no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, NO_HTTP),
    "a header with a space in its name": (POST + b"Bad Header: x\r\n\r\n", 400, NO_HTTP),
    "a length, and chunks as well (smuggling)": (
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x",
        400, NO_HTTP),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}", 400, NO_HTTP),
    "a transfer-encoding behind the chunks": (
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400, NO_HTTP),
    "a head of more than 64 KiB": (POST + LONG_HEAD, 431, "at most 64 KiB"),
    "the name of another machine": (
        request(b"{}", host="evil.example"), 403, "the header `host` must be one of"),
    "a body that is too long": (
        request(b" " * (limits.MAX_BODY_BYTES + 1)), 413, "at most 48 MiB"),
    "a tunnel": (b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, NO_HTTP),
    "100,000 lists inside each other": (request(b"[" * 100_000), 400, "nested too deeply"),
    "a model that is not configured": (asked(model="nobody"), 404, "there is no model 'nobody'"),
    "a prompt that does not fit": (
        request(json.dumps(chat("y" * SMALL_CONTEXT, model=SMALL)).encode()),
        400, f"maximum context length is {SMALL_CONTEXT} tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_bad_request_gets_its_status_and_nothing_behind_it(daemon: HttpDaemon, name: str) -> None:
    data, status, words = REQUESTS[name]
    seen, lines, body = told(daemon, data)
    error = json.loads(body)["error"]
    assert (seen, bool(error["code"])) == (status, True)
    assert words in error["message"]
    assert [line for line in lines if line.startswith(b"x-request-id: ")]


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
def test_ambiguous_head_is_refused(daemon: HttpDaemon, name: str) -> None:
    status, lines, body = told(daemon, HEAD + BAD_HEADERS[name] + SMUGGLED)
    assert status == 400, body
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert [line for line in lines if line.startswith(b"x-request-id: ")]
    assert not [line for line in lines if b"injected" in line.lower()]


@pytest.mark.parametrize("text", ["x\r\nX-Injected: 1\r\n\r\nH", "x\nX-Injected: 1"])
@pytest.mark.parametrize("is_path", [False, True])
def test_line_breaks_in_a_name_make_no_header(daemon: HttpDaemon, text: str, is_path: bool) -> None:
    if is_path:
        coded = "".join(f"%{byte:02x}" for byte in text.encode())
        data = request(None, method="GET", path=f"/v1/models/{coded}")
    else:
        data = asked(model=text)
    status, lines, body = told(daemon, data)
    code = "unknown_path" if is_path else "model_not_found"
    assert (status, json.loads(body)["error"]["code"]) == (404, code)
    assert not [line for line in lines if b"injected" in line.lower()]


def test_chunks_in_the_older_version_end_the_connection(daemon: HttpDaemon) -> None:
    """HTTP/1.0 has none: a proxy in between may see the end of this request somewhere else."""
    body = json.dumps(chat_body()).encode()
    head = request(None).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"close", b"keep-alive")
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    status, _, _ = told(daemon, head.removesuffix(b"\r\n") + chunked + SMUGGLED)
    assert status == 200, "nothing behind it counts"


@pytest.mark.parametrize(("version", "status"), [(b"1.0", 200), (b"1.1", 403)])
def test_only_the_older_version_may_leave_the_host_out(
    daemon: HttpDaemon, version: bytes, status: int
) -> None:
    """As HAProxy's health checks do, and no browser."""
    head = b"GET /health HTTP/%b\r\nConnection: close\r\n\r\n" % version
    assert told(daemon, head)[0] == status


REFUSED = [("/nothing", b"", 404), ("/models/load", b"", 403), ("/v1/moderations", b"", 501),
           (CHAT, b"Content-Encoding: gzip\r\n", 415)]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "status"), REFUSED)
def test_unread_body_is_no_further_request(
    daemon: HttpDaemon, path: str, more: bytes, status: int
) -> None:
    body = b" " * 1_500_000
    head = begun(b"Content-Length: %d" % len(body), more).replace(CHAT.encode(), path.encode())
    with daemon.connect() as connection:
        connection.sendall(head + body + LAST)
        answer = everything(connection)
    found = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    # If it takes longer than a moment to come, the connection ends with the refusal.
    is_closed = b"connection: close" in answer.partition(b"\r\n\r\n")[0]
    assert found == ([b"%d" % status] if is_closed else [b"%d" % status, b"404"])


@pytest.mark.slow
@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_that_does_not_come_is_answered_with_408(daemon: HttpDaemon, is_chunked: bool) -> None:
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 100"
    status, lines, body = told(daemon, begun(length) + (b"1\r\n{\r\n" if is_chunked else b"{"))
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (408, "request_timeout")
    assert f"within {limits.BODY_LIMIT_S:g} s" in error["message"]
    assert b"connection: close" in lines


# ---------------------------------------------------------------- what is taken


def test_pipelined_requests_are_answered_in_order(daemon: HttpDaemon) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert statuses(daemon, get + get + LAST) == [b"200", b"200", b"404"]


def test_more_answers_than_rows_begin_to_stream_while_others_wait(daemon: HttpDaemon) -> None:
    status, value = daemon.post(CHAT, chat_body(n=FIT))
    assert (status, [one["index"] for one in value["choices"]]) == (200, list(range(FIT)))
    assert {one["finish_reason"] for one in value["choices"]} == {"length"}
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(asking(n=FIT))
        seen = b""
        while seen.count(b'"delta":') < 2:  # the role, and a piece
            seen += (piece := connection.recv(65536))
            assert piece, seen
        assert seen.startswith(b"HTTP/1.1 200 ")
        assert row(client, MODEL)["queued"] == MAX_WAITING


# ---------------------------------------------------------------- senders that leave or dawdle


@pytest.mark.parametrize("how", ["leaves", "leaves behind a further request", "half closes"])
def test_client_that_leaves_frees_its_row(daemon: HttpDaemon, live: Reader, how: str) -> None:
    more = LAST if how == "leaves behind a further request" else b""
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(asking() + more)
        eventually(lambda: others(row(client, MODEL), live)[0])
        if how == "half closes":
            connection.shutdown(socket.SHUT_WR)
            assert b"[DONE]" not in everything(connection)
        else:
            connection.close()
        eventually(lambda: not others(row(client, MODEL), live)[0], what="a free row")


def takes(connection: socket.socket, data: bytes) -> bool:
    """Return whether the other side still reads."""
    try:
        connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def test_thousand_idle_connections_keep_no_other_out(daemon: HttpDaemon) -> None:
    idle = [daemon.connect() for _ in range(1000)]
    try:
        assert daemon.get("/health")[0] == 200
        assert SseReader(daemon, chat("beside", max_tokens=20)).finished().events[-1] == "[DONE]"
        idle[0].settimeout(120)
        assert idle[0].recv(1) == b"", "it was closed"
    finally:
        for connection in idle:
            connection.close()
    with daemon.client() as client:
        gateway = psutil.Process(client.status()["gateway"]["pid"])
    eventually(lambda: gateway.num_fds() < 64, what="connections that are closed")
